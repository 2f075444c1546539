"""What a step must do, what a run will need, and the numbers that go to trackers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from freda.cli import run
from freda.errors import FredaError
from freda.methods.geometry import Counted, Geometry
from freda.model.attention import clean_tokens, concat, dense, draft_tokens
from freda.model.config import AdapterConfig, adapter_parameters, all_parameters, head_parameters, layer_parameters
from freda.model.parts import Parts
from freda.model.scorer import Scorer
from freda.model.shapes import SHAPES
from freda.model.transformer import Transformer
from freda.train import config as configs
from freda.train.config import RunConfig, TrainConfig
from freda.train.metrics import make_trackers, scalars
from freda.train.optim import clip_and_update, make_optimizer
from freda.train.plan import memory, plan_lines
from tests.helpers import method, packed_batch, tiny_model

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_model(name: str) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        model = Transformer(shape, 500)
    sizes = {key: weight.numel() for key, weight in model.named_parameters()}
    assert all_parameters(shape) == sum(sizes.values())
    assert layer_parameters(shape) == sum(size for key, size in sizes.items() if key.startswith("layers."))
    assert head_parameters(shape) == sizes["embed_tokens.weight"]


@pytest.mark.parametrize("geometry", [Geometry(4), Geometry(4, shift=1, causal=True), Geometry(2, causal=True)])
def test_pairs_are_what_the_mask_lets_through(geometry: Geometry) -> None:
    batch = packed_batch([[8, 12, 4], [16, 8]])
    clean = clean_tokens(batch.document, batch.position, geometry.context)
    draft = draft_tokens(batch.document, geometry.first(batch.position))
    real = (batch.document >= 0)[:, :, None]
    pairs = [int((dense(*both) & real).sum()) for both in ((clean, clean), (draft, concat(clean, draft)))]
    assert geometry.size([8, 12, 4, 16, 8]) == geometry.size_of(batch) == Counted(48, *pairs)
    padded = packed_batch([[8, 12, 4], [16]])
    assert geometry.size_of(padded) == geometry.size([8, 12, 4, 16]), "padding does nothing"


def test_operations_of_a_step() -> None:
    """The count of the training benchmark: 6 × layers × both halves + 6 × head × drafts + 3 × attention."""
    shape, tokens, size = SHAPES["qwen3-4b"], 2 * 4096, Geometry(4).size([4096]).times(2)
    one, two, three = (method().flops(shape, size, t) for t in (1, 2, 3))
    attention = 3 * 2 * 4 * 36 * 32 * 128 * size.draft_pairs
    assert one == pytest.approx(6 * 3.6335e9 * 2 * tokens + 6 * 0.38896e9 * tokens + attention, rel=1e-4)
    forward = 2 * (3.6335e9 + 0.38896e9) * tokens + attention / 6
    assert two - one == pytest.approx(forward, rel=1e-4) and three - two == pytest.approx(forward, rel=1e-4)
    plain = method("autoregressive").flops(shape, size, 3)
    assert plain == pytest.approx(3 * forward, rel=1e-4)
    assert method("block-diffusion").flops(shape, size, 3) == one
    scorer = method("best-of-n", num_negatives=4).flops(shape, size, 1)
    assert scorer < 7.1 * forward, "no backward through the backbone"


def test_operations_and_memory_of_an_adapter() -> None:
    """Frozen weights have no gradient of their own, and with draft rows the clean half has none at all."""
    shape, tokens, size = SHAPES["qwen3-4b"], 4096, Geometry(4).size([4096])
    layers, head = 2 * 3.6335e9 * tokens, 2 * 0.38896e9 * tokens
    pairs = 4 * 36 * 32 * 128 * size.draft_pairs
    draft, every = AdapterConfig(rank=32), AdapterConfig(rank=32, rows="all")
    found = [method().flops(shape, size, 1, adapter) for adapter in (draft, every)]
    assert found[0] == pytest.approx((1 + 2) * layers + 2 * head + (1 + 2) * pairs, rel=1e-4)
    assert found[1] == pytest.approx(2 * 2 * layers + 2 * head + 2 * 3 * pairs, rel=1e-4)
    alone = method("autoregressive").flops(shape, size, 1, every)
    assert alone == pytest.approx(2 * (layers + head) + 3 * pairs, rel=1e-4)
    train = TrainConfig(batch_rows=8, group_rows=8, dtype="float32", init="base")
    whole, half, both = (memory(RunConfig(train=train, adapter=adapter), shape, 1) for adapter in (None, draft, every))
    assert half["states"] == both["states"] == 4 * all_parameters(shape) + 16 * adapter_parameters(shape, draft)
    assert 2 * half["activations"] == both["activations"] == whole["activations"]


def test_the_recipes_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    for name, billions in (
        ("freda-4b-stage1", 8.0),
        ("freda-4b-stage2-self-refine", 2.0),
        ("freda-4b-stage2-best-of-n", 2.0),
        ("block-diffusion-4b", 10.0),
    ):
        config = configs.load(ROOT / "configs" / f"{name}.toml")
        train = config.train
        assert train.steps * train.batch_rows * config.data.seq_len / 1e9 == pytest.approx(billions, rel=1e-3)
        values = (train.lr, train.warmup_steps, train.weight_decay, train.beta1, train.beta2, train.clip, train.seed)
        assert values == (5e-5, 250, 0.01, 0.9, 0.999, 1.0, 42)
        assert (train.schedule, train.dtype, train.backbone_lr_scale) == ("constant", "bfloat16", 1.0)
        assert (config.method.block_size, config.data.seq_len, train.batch_rows) == (4, 4096, 128)
        asked = ["train", str(ROOT / "configs" / f"{name}.toml"), "--dry-run", "--gpus", "64", "--shape", "qwen3-4b"]
        assert run(asked) == 0
        shown = capsys.readouterr().out
        assert f"{billions:.2f} B tokens" in shown and "4.022 B parameters" in shown and "hours at 460" in shown
    first = configs.load(ROOT / "configs" / "freda-4b-stage1.toml")
    second = configs.load(ROOT / "configs" / "freda-4b-stage2-self-refine.toml")
    assert (first.method.replacement_start, first.method.replacement_end, first.method.passes) == (0.3, 0.1, 3)
    assert (
        second.data.first_row == first.train.steps * first.train.batch_rows and second.method.replacement_start == 0.1
    )


def test_plans(tmp_path: Path) -> None:
    train = TrainConfig(batch_rows=8, group_rows=8, steps=10, dtype="float32")
    config = RunConfig(train=train, model=SHAPES["tiny"])
    one, two = (memory(config, SHAPES["tiny"], gpus) for gpus in (1, 2))
    assert two["states"] * 2 == one["states"] == 16 * all_parameters(SHAPES["tiny"])
    assert two["activations"] * 2 == one["activations"] and one["in all"] == one["states"] + one["activations"]
    short = replace(config, train=replace(config.train, dtype="bfloat16"))
    for rows, gpus, size in ((8, 1, 14), (4, 1, 16), (8, 2, 8)):  # one group on one GPU keeps its gradient in bf16
        grouped = replace(short, train=replace(short.train, group_rows=rows))
        assert memory(grouped, SHAPES["tiny"], gpus)["states"] == size * all_parameters(SHAPES["tiny"])
    lines = "\n".join(plan_lines(config, gpus=2, tflops=1.0))
    assert "10 steps" in lines and "4 rows on each of 2 GPUs" in lines
    for arguments, message in (
        ({"gpus": 3}, "train.group_rows 8 cannot be shared among 3 GPUs"),
        ({"gpus": 0}, "gpus is 0"),
        ({"tflops": -1.0}, "tflops is -1.0"),
        ({"shape_name": "qwen9"}, "there is no shape 'qwen9'; use one of qwen3-0.6b"),
    ):
        with pytest.raises(FredaError, match=message):
            plan_lines(config, **{"gpus": 1, "tflops": 1.0, **arguments})  # type: ignore[arg-type]
    missing = RunConfig(train=TrainConfig(init=str(tmp_path / "nowhere")))
    with pytest.raises(FredaError, match="or name the shape to plan with: --shape"):
        plan_lines(missing, gpus=1, tflops=1.0)


# -- the optimizer ---------------------------------------------------------------------------------------------------


def test_the_backbone_may_learn_slower_than_the_scorer() -> None:
    model = tiny_model()
    parts = Parts(model, Scorer(model.config, last_layer=True))
    optimizer = make_optimizer(parts, TrainConfig(backbone_lr_scale=0.1, weight_decay=0.5))
    names = {id(weight): name for name, weight in parts.named_parameters()}
    seen = set()
    for group in optimizer.param_groups:
        for weight in group["params"]:
            name = names[id(weight)]
            own = name.startswith("scorer.") and not name.startswith("scorer.last_layer.")
            assert group["scale"] == (1.0 if own else 0.1), name
            assert group["weight_decay"] == (0.5 if weight.dim() >= 2 else 0.0), name
            seen.add(name)
    assert seen == set(names.values())


@pytest.mark.parametrize(("norm", "moved"), [(0.5, 1.0), (4.0, 0.25)])
def test_gradients_are_clipped_to_the_norm(norm: float, moved: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.full((4,), norm / 2)
    optimizer = torch.optim.AdamW([weight], lr=1.0)
    clip_and_update(optimizer, [weight.grad], norm, 1.0)
    assert optimizer.state[weight]["exp_avg"].tolist() == pytest.approx([0.1 * moved * norm / 2] * 4, rel=1e-4)


# -- trackers --------------------------------------------------------------------------------------------------------

LINE = {"step": 3, "loss": 1.5, "loss_by_passes": {"1": 2.0, "2": 1.0}, "note": "text", "validation": {"loss": 0.5}}


def test_metrics_as_flat_numbers() -> None:
    expected = {"loss": 1.5, "loss_by_passes/1": 2.0, "loss_by_passes/2": 1.0, "validation/loss": 0.5}
    assert dict(scalars(LINE)) == expected


def test_tensorboard_files(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (track,) = make_trackers(RunConfig(train=TrainConfig(tensorboard=True)), tmp_path)
    track(3, dict(scalars(LINE)))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("validation/loss")] == [(3, 0.5)]


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    log = SimpleNamespace(log=lambda numbers, step: said.append((step, numbers)))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **values: said.append(values) or log))
    (track,) = make_trackers(RunConfig(train=TrainConfig(wandb="mine")), tmp_path / "run")
    track(3, {"loss": 1.5})
    assert said[0]["project"] == "mine" and (said[0]["id"], said[0]["resume"]) == ("run", "allow")
    assert json.dumps(said[0]["config"]) and said[1] == (3, {"loss": 1.5})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(FredaError, match=r"needs the package 'wandb'.*pip install 'freda\[track\]'"):
        make_trackers(RunConfig(train=TrainConfig(wandb="mine")), tmp_path / "run")
    assert make_trackers(RunConfig(), tmp_path) == []
