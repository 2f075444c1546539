"""`freda bench train` on a CPU: it runs the steps of `freda train`, and its table says what it measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from freda.bench.rates import about, copy_rate, matmul_rate
from freda.bench.train import Load, _profile, bench_train, kind_of, make_run
from freda.cli import run
from freda.data.loader import Batch
from freda.errors import FredaError
from freda.methods import METHODS
from freda.methods.method import Method, Step
from freda.model.parts import Parts
from freda.model.shapes import SHAPES
from freda.train import loop

pytestmark = pytest.mark.usefixtures("rates_once")


def test_the_table_and_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "bench.json"
    command = ["bench", "train", "--shape", "tiny", "--rows", "2", "--seq-len", "64", "--documents", "2"]
    assert (
        run(
            [*command, "--passes", "1", "--passes", "2", "--compare", "--profile", "--device", "cpu", "--out", str(out)]
        )
        == 0
    )
    shown, found = capsys.readouterr().out, json.loads(out.read_text())
    assert [row["passes"] for row in found["steps"]] == [1, 2]
    for row in [*found["steps"], *found["compare"]]:
        assert row["share"] == pytest.approx(row["tflops"] / row["seconds"] / found["matmul_tflops"])
        assert row["tokens_per_s"] == pytest.approx(2 * 64 / row["seconds"])
    assert found["mean_share"] == pytest.approx(sum(row["share"] for row in found["steps"]) / 2)
    assert found["steps"][1]["tflops"] > found["steps"][0]["tflops"] == found["compare"][0]["tflops"]
    assert sum(found["profile"]["kinds_ms"].values()) > 0 and found["profile"]["kernels"][0]["calls"] >= 1
    assert [row["variant"] for row in found["compare"]] == ["as it is", "eager layers", "dense mask", "full logits"]
    assert "| a pass without gradient |" in shown and "| full logits |" in shown and "share of the matmul rate" in shown


@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if kind.trains])
def test_every_method_is_measured_with_the_passes_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, inner = list[int](), METHODS[name].loss

    def loss(self: Method, parts: Parts, batch: Batch, step: Step) -> torch.Tensor:
        seen.append(step.passes)
        return inner(self, parts, batch, step)

    monkeypatch.setattr(METHODS[name], "loss", loss)
    load = Load("tiny", 32, rows=2, documents=1, passes=(4,), method=name, activations=1.0)
    found = bench_train(load, compare=False, profile=False, device="cpu")
    (row,) = found["steps"]
    pieces = seen.count(1)
    assert row["passes"] == 4 and seen.count(4) >= 4 and set(seen) <= {1, 4}
    assert bool(pieces) == bool(found["parts"]) == METHODS[name].refines, "only drafts have passes as pieces"
    rule = METHODS[name]()
    expected = rule.flops(SHAPES["tiny"], rule.geometry.size([32]).times(2), 4)
    assert row["tflops"] == pytest.approx(expected / 1e12)


def test_random_rows_are_packed_documents() -> None:
    load = Load("tiny", 64, 2, 4, (1,), "self-refine", 1.0)
    batch = load.batch(3, 2, blank=500)
    assert batch.document[0].tolist() == [d for d in range(4) for _ in range(16)]
    assert batch.position[1].tolist() == list(range(16)) * 4 and int(batch.tokens.max()) < 500
    assert torch.equal(batch.tokens, load.batch(3, 2, blank=500).tokens)
    assert not batch.one_document and replace(load, documents=1).batch(3, 2, blank=500).one_document


def test_a_profile_is_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load("tiny", 64, 1, 1, (3,), "self-refine", 1.0)
    seen, step = [], loop.take_step
    monkeypatch.setattr(loop, "take_step", lambda run, number: (seen.append(run.passes), step(run, number)))
    found = _profile(make_run(load, torch.device("cpu"), torch.float32))
    assert set(seen) == {1} and len(seen) == 2, "one to warm up"
    times = [kernel["ms"] for kernel in found["kernels"]]
    assert times == sorted(times, reverse=True)


def test_kernels_are_told_by_their_names() -> None:
    stored = json.loads((Path(__file__).parent.parent / "results" / "bench-train-h200.json").read_text())["profile"]
    sums = dict.fromkeys(stored["kinds_ms"], 0.0)
    for kernel in stored["kernels"]:
        sums[kind_of(kernel["name"])] += kernel["ms"]
    for kind, ms in stored["kinds_ms"].items():  # the 30 longest kernels are nearly all, but for elementwise ones
        assert sums[kind] <= ms * 1.0001 and (sums[kind] > 0.95 * ms or kind in ("fused elementwise", "other")), kind
    assert kind_of("triton_tem_fused_flex_attention_1") == "attention" and kind_of("triton_poi_fused_add") != "other"


def test_limits_are_measured() -> None:
    cpu = torch.device("cpu")
    assert matmul_rate(cpu, torch.float32) > 1e8 and copy_rate(cpu) > 1e7 and about(cpu)["device"] == "CPU"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": "qwen9"}, "there is no shape 'qwen9'; use one of qwen3-0.6b"),
        ({"method": "dream"}, "there is no method 'dream'; use one of autoregressive"),
        ({"seq_len": 62}, "2 documents of whole blocks do not fill 62 tokens"),
    ],
)
def test_what_cannot_be_measured(arguments: dict[str, object], message: str) -> None:
    settings = {"seq_len": 64, "rows": 1, "documents": 2, "passes": (1,), "method": "self-refine", "activations": 1.0}
    with pytest.raises(FredaError, match=message):
        Load(**{"shape": "tiny", **settings, **arguments})  # type: ignore[arg-type]
