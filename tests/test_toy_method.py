"""A method is one class and one line of `METHODS`.

A toy method is configured, trained, resumed, planned, decoded by the reference loop and by the engine, evaluated, swept
and measured, and no file of the package knows it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freda.cli import run
from freda.data.loader import Batch, Loader
from freda.decode.api import Model
from freda.decode.config import EngineConfig
from freda.decode.generate import generate
from freda.decode.request import Output, Pass, Request
from freda.errors import FredaError, require
from freda.folders.model_folder import LoadedModel, load_model
from freda.methods import METHODS, method_named
from freda.methods.block_diffusion import BlockDiffusion
from freda.methods.draft import Draft, Prediction, Rules, advance, clean_half, draft_logits, label_loss
from freda.methods.geometry import Geometry
from freda.methods.method import Method, Step, Work
from freda.methods.noise import Purpose, uniform
from freda.methods.self_refine import SelfRefine
from freda.model.parts import Parts
from freda.model.shapes import SHAPES
from freda.sections import knob
from freda.train import config as config_module
from freda.train import loop
from freda.train.config import RunConfig
from freda.train.loop import Result
from freda.train.plan import flops_as, plan_lines
from tests.benchmarks import resize
from tests.helpers import alone, small_run, use_ahead


@dataclass(frozen=True, kw_only=True)
class Leftward(Method):
    """Every pass reveals some positions more, from the left, and never changes one again."""

    name: str = field(default="leftward", init=False)
    reveal: int = knob(2, "positions that a pass reveals", stored=True)
    hidden_weight: float = knob(1.0, "weight of hidden positions in the loss")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.reveal >= 1, f"method.reveal is {self.reveal}; use 1 or more")

    def loss(self, parts: Parts, batch: Batch, step: Step) -> Tensor:
        """Cross-entropy of the positions that a random number of passes has not revealed."""
        row, place = step.row[:, None].to(batch.tokens.device), torch.arange(batch.tokens.shape[1])
        point = uniform(Purpose.MASKING, step.seed, step.step, row, place // self.block_size)
        return self.hidden_loss(parts, batch, (point * -(-self.block_size // self.reveal)).floor() * self.reveal)

    def validate(self, parts: Parts, batch: Batch, step: Step) -> dict[str, Tensor]:
        """The loss of the first pass."""
        return {"loss": self.hidden_loss(parts, batch, torch.zeros_like(batch.tokens))}

    def hidden_loss(self, parts: Parts, batch: Batch, revealed: Tensor) -> Tensor:
        """The loss of hidden positions, where `revealed` (R, L) positions of a token's block are shown."""
        shown = torch.arange(batch.tokens.shape[1]) % self.block_size < revealed
        x = self.embed(parts.backbone, batch.tokens, shown.float())
        logits = draft_logits(parts.backbone, x, clean_half(parts.backbone, batch, self.geometry))
        return label_loss(logits, self.geometry.targets(batch), ~shown * self.hidden_weight)

    def work(self, one: Work, passes: int) -> float:
        """Ten times the usual, so that a plan shows whose arithmetic it has."""
        return 10 * super().work(one, passes)

    def rows(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """Revealed tokens as they are, BLANK elsewhere."""
        return draft.ids, draft.committed.float()

    def update(self, draft: Draft, prediction: Prediction, rules: Rules) -> Draft:
        """Reveal the leftmost hidden positions."""
        hidden = ~draft.committed
        chosen = hidden & (hidden.cumsum(-1) <= self.reveal)
        ids, prob = torch.where(chosen, prediction.ids, draft.ids), torch.where(chosen, prediction.prob, draft.prob)
        return advance(draft, prediction._replace(ids=ids, prob=prob), draft.committed | chosen, rules)


TOY = Leftward(block_size=4, reveal=3, hidden_weight=0.5)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "leftward", Leftward)
        yield


@pytest.fixture(scope="module")
def trained(registered: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunConfig, Result]:
    """A run of six steps with a checkpoint after each third."""
    folder = tmp_path_factory.mktemp("toy")
    settings = {"steps": 6, "batch_rows": 4, "lr": 1e-2, "save_every": 3, "log_every": 1}
    config = replace(small_run(folder / "data", **settings), method=TOY)
    return folder / "run", config, loop.train(config, folder / "run")


@pytest.fixture(scope="module")
def loaded(trained: tuple[Path, RunConfig, Result]) -> LoadedModel:
    return load_model(trained[0])


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_its_settings_are_keys_of_the_method_section(tmp_path: Path) -> None:
    overrides = ["method.name=leftward", "method.reveal=3"]
    config = config_module.load(None, overrides)
    assert config.method == Leftward(reveal=3)
    (tmp_path / "config.toml").write_text(config_module.dump(config))
    assert config_module.load(tmp_path / "config.toml") == config
    with pytest.raises(FredaError, match=r"method\.reveal is 0"):
        config_module.load(None, ["method.name=leftward", "method.reveal=0"])
    with pytest.raises(FredaError, match=r"'method\.passes'.*reveal"):
        config_module.load(None, [*overrides, "method.passes=2"])
    with pytest.raises(FredaError, match=r"'method\.reveal'"):
        config_module.load(None, ["method.reveal=3"])


def test_it_learns_and_its_model_folder_says_how_to_decode(
    trained: tuple[Path, RunConfig, Result], loaded: LoadedModel
) -> None:
    folder, _, result = trained
    found = losses(folder)
    assert len(found) == 6 and found[-1] < 0.9 * found[0]
    assert result.validation.keys() == {"loss"}
    assert loaded.method == Leftward(block_size=4, reveal=3), "hidden_weight concerns training alone"


def test_its_setting_reaches_the_loss(trained: tuple[Path, RunConfig, Result], loaded: LoadedModel) -> None:
    _, config, _ = trained
    batch = Loader(Path(config.data.path), "train", seq_len=96, seed=0).batch(0, 2)
    step = Step(seed=1, step=0, row=torch.arange(2), progress=0.0, passes=1)
    methods = (TOY, replace(TOY, hidden_weight=1.0), Leftward())
    half, whole, other = (method.loss(loaded.parts, batch, step).item() for method in methods)
    assert whole == pytest.approx(2 * half) and other != pytest.approx(whole)


def test_a_resumed_run_has_the_losses_of_a_whole_one(trained: tuple[Path, RunConfig, Result], tmp_path: Path) -> None:
    folder, _, whole = trained
    shutil.copytree(folder, tmp_path / "cut")
    (tmp_path / "cut" / "latest").write_text("step-3\n")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-6")
    config = loop.resume_run(tmp_path / "cut")
    assert config.method == TOY
    again = loop.train(config, tmp_path / "cut", resume=True)
    assert losses(tmp_path / "cut") == losses(folder)
    assert again.validation == whole.validation and again.checkpoint.name == "step-6"


def decoded(model: LoadedModel, method: Method, asked: list[Request], **options: Any) -> list[Output]:
    return generate(model.parts, method, asked, stop_ids=[], **options)


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 250, (length,), generator=generator).tolist() for length in (8, 5, 3)]
    return [Request(prompt=prompt, max_new_tokens=12, passes=8) for prompt in prompts]


@pytest.mark.parametrize(("reveal", "passes"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_it_is_decoded_by_its_own_rule(loaded: LoadedModel, reveal: int, passes: int) -> None:
    method, seen = replace(loaded.method, reveal=reveal), list[Pass]()
    output = decoded(loaded, method, requests()[:1], watch=seen.append)[0]
    assert len(output.tokens) == 12 and output.nfe == 3 * passes
    for step in seen:
        count = min(4, reveal * step.number)
        assert step.committed == [True] * count + [False] * (4 - count) and step.closed == 4 * (count == 4)


def test_batch_cache_and_fused_commit_change_nothing(loaded: LoadedModel) -> None:
    together = decoded(loaded, loaded.method, requests())
    tokens = [output.tokens for output in together]
    assert tokens == [decoded(loaded, loaded.method, [request])[0].tokens for request in requests()]
    for option in ("cached", "fused"):
        assert tokens == [output.tokens for output in decoded(loaded, loaded.method, requests(), **{option: False})]


def test_models_of_other_methods_are_decoded_by_it_and_the_reverse(loaded: LoadedModel) -> None:
    assert method_named("leftward", SelfRefine(block_size=8)) == Leftward(block_size=8)
    assert method_named("self-refine", TOY) == SelfRefine(block_size=4)
    assert decoded(loaded, method_named("block-diffusion", loaded.method), requests())


def test_it_is_planned_with_its_own_arithmetic(trained: tuple[Path, RunConfig, Result]) -> None:
    _, config, _ = trained
    shape, rows, length = SHAPES["qwen3-4b"], config.train.batch_rows, config.data.seq_len
    size = Geometry(4).size([length]).times(rows)
    usual, own = (method.flops(shape, size, 1) for method in (BlockDiffusion(block_size=4), TOY))
    assert own == pytest.approx(10 * usual)
    lines = plan_lines(config, gpus=1, tflops=0, shape_name="qwen3-4b")
    step = next(line for line in lines if line.startswith("step"))
    assert flops_as(own) in step and flops_as(usual) not in step


# -- the engine and the commands ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", [False, True])
def test_the_engine_decodes_it_as_the_reference_loop_does(
    loaded: LoadedModel, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ahead(monkeypatch)
    model = Model(loaded, EngineConfig(max_batch=2, on_device=on_device))
    asked = [*requests(), replace(requests()[0], method="self-refine"), replace(requests()[1], passes=1)]
    handles = [model.engine.submit(request) for request in asked]
    for handle, request in zip(handles, asked, strict=True):
        output = handle.result()
        assert (output.tokens, output.nfe, output.finish) == alone(loaded, request)
    streamed = [event.tokens for event in model.engine.submit(asked[0])]
    assert [token for tokens in streamed for token in tokens] == alone(loaded, asked[0])[0] and len(streamed) > 1


def test_generate_and_eval(
    trained: tuple[Path, RunConfig, Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, config, _ = trained
    assert run(["generate", str(folder), "Q: Tom", "--max-new-tokens", "8", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "leftward"
    resize(monkeypatch, sums=6)
    place = ["--data", config.data.path, "--out", str(tmp_path / "eval"), "--device", "cpu"]
    assert run(["eval", str(folder), "--task", "sums", *place, "--max-new-tokens", "8"]) == 0
    found = json.loads((tmp_path / "eval" / "sums" / "results.json").read_text())
    assert (found["method"], found["block_size"], found["reveal"], found["n"]) == ("leftward", 4, 3, 6)
    assert 0 < found["tpf"] <= 4 and found["errors"] == 0


def test_sweep(trained: tuple[Path, RunConfig, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, config, _ = trained
    resize(monkeypatch, sums=4)
    sweep = '[sweep]\ntasks = ["sums"]\nparts = ["main", "passes"]\npasses = [1, 2]\nmax_new_tokens = 8\n'
    (tmp_path / "sweep.toml").write_text(f'{sweep}[system.toy]\nmodels = ["{folder}"]\n')
    place = ["--data", config.data.path, "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert run(["sweep", str(tmp_path / "sweep.toml"), *place]) == 0
    content = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert content["systems"]["toy"]["method"] == "leftward"
    assert len(content["points"]) == len({json.dumps(point["setting"]) for point in content["points"]}) > 1
    assert (tmp_path / "out" / "passes.csv").is_file()


def test_bench(
    trained: tuple[Path, RunConfig, Result], tmp_path: Path, rates_once: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out, last = (
        tmp_path / "bench.json",
        ["--device", "cpu", "--method", "leftward", "--out", str(tmp_path / "bench.json")],
    )
    assert run(["bench", "train", "--shape", "tiny", "--rows", "1", "--seq-len", "32", "--passes", "1", *last]) == 0
    (row,) = json.loads(out.read_text())["steps"]
    expected = Leftward().flops(SHAPES["tiny"], Geometry(4).size([32]), 1)
    assert row["tflops"] == pytest.approx(expected / 1e12)
    sizes = ["--context", "8", "--new-tokens", "8", "--passes", "4"]
    for model in ("tiny", str(trained[0])):
        assert run(["bench", "decode", model, *sizes, *last]) == 0
        (row,) = json.loads(out.read_text())["rows"]
        assert row["what"].endswith("leftward") and row["tpf"] == pytest.approx(2.0), "two passes for a block of 4"
