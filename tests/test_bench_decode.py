"""`freda bench decode` on a CPU: what is counted, and that the table says it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from freda.bench import decode
from freda.bench.hugging_face import borrowed, timed_generate
from freda.cli import run
from freda.data.tokenizer import Tokenizer
from freda.decode import places
from freda.decode.config import EngineConfig
from freda.decode.generate import generate
from freda.decode.request import Request
from freda.model.config import ModelConfig
from freda.model.parts import Parts
from freda.model.transformer import Transformer
from tests.helpers import answering_model, method, save_model, scored, tiny_model, use_ahead

pytestmark = pytest.mark.usefixtures("rates_once")
SIZES = ["--batch", "3", "--context", "9", "--new-tokens", "8", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = answering_model(["Tom has 12 apples and buys 7 more.\n"] * 3, 280, seed=3)
    with torch.no_grad():
        for weight in made.backbone.layers.parameters():
            weight.mul_(8 if weight.dim() > 1 else 1)  # so large that its confidence depends on the text
    folder = tmp_path_factory.mktemp("bench") / "model"
    save_model(folder, made)
    return folder


def test_the_table_and_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    command = ["bench", "decode", "tiny", "--batch", "1", "--batch", "3", "--context", "9", "--new-tokens", "8"]
    assert run([*command, "--passes", "2", "--compare", "--device", "cpu", "--out", str(out)]) == 0
    shown, found = capsys.readouterr().out, json.loads(out.read_text())
    rows = {(row["what"], row["batch"]): row for row in found["rows"]}
    assert len(rows) == 8
    for batch in (1, 3):
        made = rows["plain engine, self-refine", batch]
        # One token of the first block is given: blocks of 3, 4 and 1 new tokens, two passes each.
        assert made["tpf"] == pytest.approx(8 / 6)
        assert made["tokens_per_s"] / made["forwards_per_s"] == pytest.approx(batch * 8 / 6)
        assert made["seconds_per_forward"] * 6 == pytest.approx(made["passes_seconds"])
        both = made["prefill_seconds"] + made["passes_seconds"]
        assert made["tokens_per_s_with_prefill"] == pytest.approx(batch * 8 / both)
        weights = 4 * found["parameters"] * made["forwards_per_s"]
        assert made["weights_share_of_copy"] == pytest.approx(weights / found["copy_tb"] / 1e12)
        assert rows["plain engine, autoregressive", batch]["tpf"] == 1.0
        assert rows["reference loop one by one, self-refine", batch]["tpf"] == pytest.approx(8 / 6)
    assert shown.count("| plain engine, self-refine |") == 2 and "copy" in shown
    assert f"{found['parameters'] / 1e6:.3f} M parameters" in shown and " 0.0" not in shown.splitlines()[0]
    assert run(["bench", "decode", "nowhere"]) == 2
    assert "there is no model nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("plain", [False, True])
def test_the_table_names_the_engine(
    plain: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_ahead(monkeypatch)  # what a GPU has kernels for
    command = ["bench", "decode", "tiny", "--context", "8", "--new-tokens", "8", "--device", "cpu"]
    assert run([*command, *["--plain"] * plain]) == 0
    shown = capsys.readouterr().out
    assert ("| plain engine, self-refine |" in shown) == plain
    assert ("| engine with kernels and graphs, self-refine |" in shown) != plain
    titles, values = (
        line.split("|")[1:-1] for line in shown.splitlines() if line.startswith(("| what", "| plain", "| engine"))
    )
    cells = {title.strip(): value.strip() for title, value in zip(titles, values, strict=True)}
    assert float(cells["ms per forward"]) * float(cells["forwards/s"].replace(",", "")) == pytest.approx(1e3, rel=0.01)
    assert cells["peak GB"] == "–"  # of a GPU's memory


def test_no_text_ends_early(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Tokenizer.load

    def any_token_stops(folder: Path) -> Tokenizer:
        tokenizer = load(folder)
        tokenizer.stop_ids = tuple(range(tokenizer.size))
        return tokenizer

    monkeypatch.setattr(Tokenizer, "load", any_token_stops)
    assert run(["bench", "decode", str(folder), *SIZES, "--out", str(tmp_path / "bench.json")]) == 0
    [row] = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert row["tokens_per_s"] * row["passes_seconds"] == pytest.approx(3 * 8)


def measured(model: Path | str, out: Path, *options: str) -> dict[str, Any]:
    """The rows of a model, by what they are."""
    assert run(["bench", "decode", str(model), *SIZES, *options, "--out", str(out)]) == 0
    return {row["what"]: row for row in json.loads(out.read_text())["rows"]}


def test_blocks_close_by_confidence(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks of 3, 4 and 1 new tokens: 6 forwards with all passes, 3 if every block closes at once."""
    out = tmp_path / "bench.json"
    assert measured(folder, out)["plain engine, self-refine"]["tpf"] == pytest.approx(8 / 6)
    assert "2 passes for every block" in capsys.readouterr().out
    assert measured(folder, out, "--threshold", "1e-6")["plain engine, self-refine"]["tpf"] == pytest.approx(8 / 3)
    rows = measured(folder, out, "--threshold", "0.8", "--compare")
    assert 8 / 6 < rows["plain engine, self-refine"]["tpf"] < 8 / 3
    assert rows["plain engine, self-refine"]["tpf"] == rows["reference loop one by one, self-refine"]["tpf"]
    assert rows["plain engine, autoregressive"]["tpf"] == 1.0
    assert "at most 2 passes for a block, which closes from probability 0.8 on" in capsys.readouterr().out
    assert run(["bench", "decode", "tiny", *SIZES, "--threshold", "0"]) == 2
    assert "threshold is 0.0; use a probability above 0" in capsys.readouterr().err


def test_kernels_of_a_forward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "decode", "tiny", "--context", "8", "--new-tokens", "16", "--device", "cpu", "--profile"]
    assert run([*command, "--out", str(tmp_path / "bench.json")]) == 0
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    times = [kernel["us"] for kernel in row["kernels"]]
    assert times == sorted(times, reverse=True) and times[0] > 0
    assert "| kernels of a forward: plain engine, self-refine, batch 1, context 8 |" in capsys.readouterr().out


def test_int8_weights_count_a_byte(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_ahead(monkeypatch)
    shares = []
    for option in ([], ["--int8"]):
        out = tmp_path / f"bench{len(option)}.json"
        command = [
            "bench",
            "decode",
            "tiny",
            "--context",
            "8",
            "--new-tokens",
            "8",
            "--device",
            "cpu",
            "--out",
            str(out),
        ]
        assert run([*command, *option]) == 0
        (row,) = json.loads(out.read_text())["rows"]
        assert row["int8"] == bool(option) and row["what"].endswith(f"{', int8' * bool(option)}, self-refine")
        copied = json.loads(out.read_text())["copy_tb"]
        shares.append(row["weights_share_of_copy"] / row["forwards_per_s"] * copied)
    assert shares[1] == pytest.approx(shares[0] / 4, rel=0.02)  # of four bytes of fp32


def test_a_shape_has_a_scorer_for_best_of_n(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ModelConfig(vocab_size=64, dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn_dim=32)
    monkeypatch.setitem(decode.SHAPES, "small", small)
    sizes = ["--batch", "2", "--context", "9", "--new-tokens", "8", "--device", "cpu"]
    assert run(["bench", "decode", "small", "--method", "best-of-n", *sizes]) == 0
    assert "| plain engine, best-of-n | 2 |" in capsys.readouterr().out
    assert run(["bench", "decode", "small", "--method", "best", *sizes]) == 2
    assert "there is no method 'best'; use one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "long"),  # texts are long never, at once, on the way
    [("self-refine", 1024), ("self-refine", 4), ("self-refine", 20), ("best-of-n", 20)],
)
def test_no_graph_is_made_while_the_clock_runs(method: str, long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "LONG", long)
    made, warm, build, warm_up = [], [], places.pass_of, decode._warm_up
    use_ahead(monkeypatch)
    monkeypatch.setattr(places, "pass_of", lambda *given: (made.append(given[2]), build(*given))[1])
    monkeypatch.setattr(decode, "_warm_up", lambda *given: (warm_up(*given), warm.append(len(made))))
    case = decode.Case(batch=7, context=9, new_tokens=30, passes=3, threshold=0.3, method=method)
    model = scored(method)._replace(tokenizer=decode.NoText())
    row = decode._measured(model, case, decode.Limits(1.0, 1.0), EngineConfig(on_device=True), profile=False)
    assert row["on_device"] and 0 < warm[0] == len(made)
    assert row["tokens_per_s"] / row["forwards_per_s"] < 7 * row["tpf"] * 0.99, "all texts ended together"


# -- generate of Hugging Face ----------------------------------------------------------------------------------------

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {},
    "Qwen2ForCausalLM": {"qk_norm": False, "qkv_bias": True, "tied": False},
    "LlamaForCausalLM": {"qk_norm": False, "rope_scaling": LLAMA3},
}


def greedy(model: Transformer, prompts: list[list[int]], count: int) -> list[list[int]]:
    asked = [Request(prompt=prompt, max_new_tokens=count) for prompt in prompts]
    made = generate(Parts(model), method("autoregressive"), asked, stop_ids=[])
    return [output.tokens for output in made]


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_makes_the_same_text_of_the_same_weights(family: str) -> None:
    pytest.importorskip("transformers")
    model = tiny_model(3, **FAMILIES[family])
    with torch.no_grad():
        model.head_weight[model.blank_id] = 0  # which is a token like any other for them
    theirs = borrowed(model)
    assert type(theirs).__name__ == family
    own = {weight.data_ptr() for weight in model.parameters()}
    assert {weight.data_ptr() for weight in theirs.parameters()} <= own, "a weight is held twice"
    prompts = torch.randint(0, model.blank_id, (3, 21), generator=torch.Generator().manual_seed(0)).tolist()
    made = timed_generate(theirs, prompts, 40)
    assert made.tokens == greedy(model, prompts, 40)
    assert made.prefill > 0 and made.passes > 0


def test_their_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "bench.json"
    row = measured("tiny", out, "--compare")["Hugging Face generate, autoregressive"]
    assert row["tpf"] == 1.0 and row["batch"] == 3
    assert row["passes_seconds"] == pytest.approx(7 * row["seconds_per_forward"])  # the first token comes with prefill
    assert row["tokens_per_s"] == pytest.approx(3 * row["forwards_per_s"])
    both = row["prefill_seconds"] + row["passes_seconds"]
    assert row["tokens_per_s_with_prefill"] == pytest.approx(3 * 8 / both)
    assert json.loads(out.read_text())["transformers"]
    assert "| Hugging Face generate, autoregressive | 3 | 9 |" in capsys.readouterr().out
    assert "tokens_per_s" not in measured("tiny", out, "--compare", "--new-tokens", "1")[row["what"]]


def test_without_transformers_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    rows = measured("tiny", tmp_path / "bench.json", "--compare")
    assert "reference loop one by one, self-refine" in rows
    line = "| Hugging Face generate, autoregressive: transformers is not installed | 3 | 9 | – | – |"
    assert line in capsys.readouterr().out
