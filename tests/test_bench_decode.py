"""`freda bench decode` on a CPU: what is counted, and that the table says it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import answering_model
from test_device import PlainMachine

from freda.cli import run
from freda.data.tokenizer import Tokenizer
from freda.decode import engine
from freda.model.weights import save_model

SIZES = ["--batch", "3", "--context", "9", "--new-tokens", "8", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = answering_model(["Tom has 12 apples and buys 7 more.\n"] * 3, 280, seed=1)
    folder = tmp_path_factory.mktemp("bench") / "model"
    save_model(folder, made.model, made.tokenizer, made.method, stage="test")
    return folder


def test_the_table_and_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    command = ["bench", "decode", "tiny", "--batch", "1", "--batch", "3", "--context", "9", "--new-tokens", "8"]
    assert run([*command, "--passes", "2", "--compare", "--device", "cpu", "--out", str(out)]) == 0
    shown, found = capsys.readouterr().out, json.loads(out.read_text())
    rows = {(row["what"], row["batch"]): row for row in found["rows"]}
    assert len(rows) == 6
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
    assert run(["bench", "decode", "nowhere"]) == 2
    assert "there is no model nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("plain", [False, True])
def test_the_table_names_the_engine(
    plain: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "_packed_model", PlainMachine)  # what a GPU has kernels for
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
