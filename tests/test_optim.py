"""AdamW with bf16 copies of the weights: the kernel is the library's optimizer, and copies follow their weights."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from freda.data.config import CorpusConfig
from freda.data.prepare import prepare_corpus
from freda.folders.model_folder import load_model
from freda.model.config import ModelConfig
from freda.model.parts import Parts
from freda.train import loop, setup
from freda.train.config import DataConfig, RunConfig, TrainConfig
from freda.train.optim import adamw_rates, clip_and_update, learning_rate, make_optimizer, pass_numbers, total_norm
from freda.train.parallel import Root
from tests.helpers import method, run_interpreted, tiny_model


def check_kernel() -> None:
    from freda.train import adamw_kernel as adamw

    for size, scale in ((5, 1.0), (5000, 0.25)):
        weight = torch.nn.Parameter(torch.randn(size))
        ours, copy = weight.detach().clone(), torch.empty(size, dtype=torch.float16)
        moments = torch.zeros(size), torch.zeros(size)
        plain = torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.95), weight_decay=0.3)
        for step in (1.0, 2.0, 3.0):
            gradient = torch.randn(size).half()
            weight.grad = gradient.float() * scale
            plain.step()
            adamw.update(ours, copy, gradient, moments, adamw_rates(plain.param_groups[0], step, scale))
        state = plain.state[weight]
        for one, other in ((ours, weight.detach()), (moments[0], state["exp_avg"]), (moments[1], state["exp_avg_sq"])):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert torch.equal(copy, ours.half())
        without = weight.detach().clone()  # a weight that has no copy
        adamw.update(without, None, gradient, moments, adamw_rates(plain.param_groups[0], 4.0, scale))
        plain.step()
        torch.testing.assert_close(without, weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_kernel_is_the_librarys_adamw(tmp_path: Path) -> None:
    """In Triton's interpreter, where Triton is installed; on a GPU below."""
    pytest.importorskip("triton")
    run_interpreted(check_kernel, tmp_path)


def test_its_rates_are_those_of_the_paper() -> None:
    group = {"lr": 0.1, "betas": (0.5, 0.75), "weight_decay": 0.2, "eps": 1e-8}
    scale, beta1, beta2, keep, step_size, root, eps = adamw_rates(group, 2.0, 0.5)
    assert (scale, beta1, beta2, eps) == (0.5, 0.5, 0.75, 1e-8)
    assert (keep, step_size) == pytest.approx((0.98, 0.1 / 0.75))
    assert root == pytest.approx((1 - 0.75**2) ** -0.5)


def test_norms_are_summed_in_fp32() -> None:
    gradients = [torch.full((1000,), 1.001, dtype=torch.bfloat16), torch.ones(3)]
    assert total_norm(gradients).item() == pytest.approx(1003**0.5, rel=1e-6)


def sum_of_weights(parts: Parts) -> torch.Tensor:
    assert parts.backbone.norm.weight.dtype == torch.bfloat16
    return sum((weight.float().sum() for weight in parts.parameters()), torch.zeros(()))


def test_copies_follow_their_weights() -> None:
    """Made once, made anew where a weight was written to, and only there; gradients add up in fp32."""
    model = tiny_model()
    root = Root(Parts(model))
    first = root.in_bfloat16(sum_of_weights)
    copies = root.copies
    copies[model.norm.weight].data.fill_(7)  # would be noticed if it were made anew
    with torch.no_grad():
        model.embed_tokens.weight.mul_(2)
    second = root.in_bfloat16(sum_of_weights)
    assert root.copies[model.norm.weight] is copies[model.norm.weight]
    assert copies[model.norm.weight].unique().tolist() == [7]
    assert torch.equal(copies[model.embed_tokens.weight], model.embed_tokens.weight.bfloat16())
    for loss in (first, second):
        loss.backward()  # type: ignore[no-untyped-call]
        root.widen_gradients()
    assert all(copy.grad is None for copy in copies.values())
    root.outdate_copies()  # for who writes to weights unseen
    root.in_bfloat16(sum_of_weights)
    assert torch.equal(copies[model.norm.weight], model.norm.weight.bfloat16())
    assert all(weight.grad is not None and weight.grad.unique().tolist() == [2] for weight in model.parameters())


# -- the update of weights and copies together, with a plain function for the kernel ----------------------------------


def plain_update(
    weight: Tensor, copy: Tensor | None, gradient: Tensor, moments: tuple[Tensor, Tensor], rates: tuple[float, ...]
) -> None:
    """What the kernel does. It writes through `data`, as unseen by versions as a kernel."""
    scale, beta1, beta2, keep, step_size, root, eps = rates
    first, second, wide = moments[0].data, moments[1].data, gradient.float() * scale
    first.lerp_(wide, 1 - beta1)
    second.mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
    weight.data.mul_(keep).sub_(step_size * first / (second.sqrt() * root + eps))
    if copy is not None:
        copy.data.copy_(weight.data)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(update=plain_update)
    monkeypatch.setitem(sys.modules, "freda.train.adamw_kernel", module)
    monkeypatch.setattr("freda.train.adamw_kernel", module, raising=False)


@pytest.fixture
def updating(kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on a CPU do as those on a GPU."""
    monkeypatch.setattr(setup.Run, "updates_copies", True)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "data"
    prepare_corpus(CorpusConfig(problems=60, validation_problems=8, vocab_size=280), folder)
    return folder


def config(shards: Path, init: str = "", **train: object) -> RunConfig:
    """A run in bf16 with one group a step: from the seed, or, from a model, of a scorer with a layer of its own."""
    settings = {"steps": 4, "batch_rows": 2, "group_rows": 2, "lr": 3e-3, "warmup_steps": 1, "log_every": 1, **train}
    shape = ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn_dim=48)
    return RunConfig(
        model=ModelConfig() if init else shape,
        data=DataConfig(path=str(shards), seq_len=64),
        method=method("best-of-n", scorer_layer=True) if init else method(),
        train=TrainConfig(init=init, validation_rows=4, dtype="bfloat16", clip=0.5, **settings),  # type: ignore[arg-type]
    )


def test_a_weight_and_its_copy_take_the_librarys_step(kernel: None) -> None:
    """Clipped or not; a weight without a copy has its own gradient, one without a gradient is left alone."""
    weights = [torch.nn.Parameter(torch.full((3,), float(number))) for number in range(3)]
    twins = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    ours, library = (torch.optim.AdamW(part, lr=0.1, weight_decay=0.3) for part in (weights, twins))
    copies = {weight: weight.detach().bfloat16() for weight in (weights[0], weights[2])}
    for norm in (4.0, 0.25, 0.25):
        gradient = torch.randn(3).bfloat16()
        copies[weights[0]].grad, weights[1].grad = gradient, gradient.float()
        for twin in twins[:2]:
            twin.grad = gradient.float() * min(1.0, 1 / norm)
        clip_and_update(ours, [gradient], norm, 1.0, copies)
        library.step()
    for weight, twin in zip(weights, twins, strict=True):
        torch.testing.assert_close(weight, twin, rtol=1e-5, atol=1e-6)
    assert torch.equal(copies[weights[0]], weights[0].detach().bfloat16()) and not ours.state[weights[2]]


def test_gradients_below_the_limit_are_not_scaled_up() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([0.3, 0.4])
    clip_and_update(torch.optim.AdamW([weight]), [weight.grad], 0.5, 1.0)
    assert weight.grad.tolist() == pytest.approx([0.3, 0.4])


@pytest.mark.parametrize("scores", [False, True])
def test_training_keeps_weights_and_copies_together(
    scores: bool, shards: Path, tmp_path: Path, updating: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage II too, whose backbone is frozen: the losses are those of widened gradients in the library's optimizer."""
    init = str(loop.train(config(shards, steps=1), tmp_path / "base").checkpoint) if scores else ""
    found = []
    for together in (True, False):
        monkeypatch.setattr(setup.Run, "updates_copies", together)
        run = loop.setup(config(shards, init))
        before = {name: weight.detach().clone() for name, weight in run.parts.named_parameters()}
        losses = []
        for step in range(4):
            losses += [loop.take_step(run, step)["loss"], loop.validate(run)["loss"]]
            for weight, copy in run.root.copies.items():
                assert torch.equal(copy, weight.bfloat16()) and copy.requires_grad == weight.requires_grad
                assert weight.grad is None and copy.grad is None
        for name, weight in run.parts.named_parameters():
            assert torch.equal(weight, before[name]) == (scores and not name.startswith("scorer.")), name
            own = name.startswith("scorer.") and not name.startswith("scorer.last_layer.")
            assert (weight in run.root.copies) != own, "the scorer's own weights stay as they are"
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=2e-3)


def test_a_run_with_copies_goes_on_where_it_was(shards: Path, tmp_path: Path, updating: None) -> None:
    """A checkpoint has the fp32 weights and the moments, and copies are made of those."""
    loop.train(config(shards, save_every=2), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-4")
    (tmp_path / "cut" / "latest").write_text("step-2\n")
    loop.train(loop.resume_run(tmp_path / "cut"), tmp_path / "cut", resume=True)
    whole, cut = (load_model(tmp_path / name).backbone.state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in cut.items())


def test_copies_do_not_trust_the_librarys_fused_optimizer(shards: Path) -> None:
    """It writes to weights without raising their versions; so it is with several groups a step on a GPU."""
    run = loop.setup(config(shards, group_rows=1))
    run.optimizer = make_optimizer(run.parts, run.config.train, fused=True)
    for step in range(2):
        loop.take_step(run, step)
        loop.validate(run)
        assert all(torch.equal(copy, weight.bfloat16()) for weight, copy in run.root.copies.items())


def test_when_copies_are_updated(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = loop.setup(config(shards))
    assert not run.updates_copies, "the kernel is for GPUs"
    run.device = torch.device("cuda")
    assert run.updates_copies
    for other in ({"group_rows": 1}, {"dtype": "float32"}):
        train = replace(run.config.train, **other)  # type: ignore[arg-type]
        assert not replace(run, config=replace(run.config, train=train)).updates_copies, other
    monkeypatch.setattr(Root, "sharded", True)
    assert not run.updates_copies


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses and weights as with the library's fused update of widened gradients."""
    prepare_corpus(CorpusConfig(problems=300, validation_problems=32), tmp_path / "data")
    config = RunConfig(
        model=ModelConfig(dim=64, layers=2, heads=2, kv_heads=1, head_dim=64, ffn_dim=128),
        data=DataConfig(path=str(tmp_path / "data"), seq_len=192),
        train=TrainConfig(
            steps=8, batch_rows=4, group_rows=4, lr=3e-3, warmup_steps=2, dtype="bfloat16", compile="off"
        ),
    )
    found = []
    for copies in (True, False):
        if not copies:
            monkeypatch.setattr(setup.Run, "updates_copies", False)
        run = loop.setup(config)
        assert run.updates_copies == copies
        losses = [loop.take_step(run, step)["loss"] for step in range(8)]
        found.append((losses, [weight.detach().clone() for weight in run.parts.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=2e-3)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert ((one - other).norm() / other.norm()).item() < 1e-2


def test_passes_are_uniform_and_spread_over_the_groups() -> None:
    drawn = [pass_numbers(1, step, 6, 3) for step in range(300)]
    assert all(Counter(counts) == {1: 2, 2: 2, 3: 2} for counts in drawn), "stratified within a step"
    first = Counter(counts[0] for counts in drawn)
    assert all(70 < first[t] < 130 for t in (1, 2, 3)), "uniform for each group"
    few = Counter(t for step in range(900) for t in pass_numbers(1, step, 1, 3))
    assert all(250 < few[t] < 350 for t in (1, 2, 3)), "also with fewer groups than passes"
    assert pass_numbers(1, 5, 4, 3) == pass_numbers(1, 5, 4, 3) != pass_numbers(2, 5, 4, 3)


def test_learning_rate() -> None:
    constant = TrainConfig(lr=1.0, warmup_steps=4, steps=20)
    assert [learning_rate(step, constant) for step in (0, 1, 3, 4, 19)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    cosine = replace(constant, schedule="cosine")
    rates = [learning_rate(step, cosine) for step in range(4, 20)]
    assert rates == sorted(rates, reverse=True) and rates[0] == 1.0 and 0.05 < rates[-1] < 0.07


def test_norms_and_biases_do_not_decay() -> None:
    model = tiny_model(qk_norm=False, qkv_bias=True)
    decayed, left = make_optimizer(Parts(model), TrainConfig()).param_groups
    assert decayed["weight_decay"] == 0.01 and left["weight_decay"] == 0.0
    assert all(weight.dim() == 2 for weight in decayed["params"]) and all(w.dim() == 1 for w in left["params"])
    assert len(decayed["params"]) + len(left["params"]) == len(list(model.parameters()))
