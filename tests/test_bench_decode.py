"""`freda bench decode` on a CPU: what is counted, and that the table says it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freda.cli import run


def test_the_table_and_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    command = ["bench", "decode", "tiny", "--batch", "1", "--batch", "3", "--context", "9", "--new-tokens", "8"]
    assert run([*command, "--passes", "2", "--compare", "--device", "cpu", "--out", str(out)]) == 0
    shown, found = capsys.readouterr().out, json.loads(out.read_text())
    rows = {(row["what"], row["batch"]): row for row in found["rows"]}
    assert len(rows) == 6
    for batch in (1, 3):
        engine = rows["engine, self-refine", batch]
        # One token of the first block is given: blocks of 3, 4 and 1 new tokens, two passes each.
        assert engine["tpf"] == pytest.approx(8 / 6)
        assert engine["tokens_per_s"] / engine["forwards_per_s"] == pytest.approx(batch * 8 / 6)
        weights = 4 * found["parameters"] * engine["forwards_per_s"]
        assert engine["weights_share_of_copy"] == pytest.approx(weights / found["copy_tb"] / 1e12)
        assert rows["engine, autoregressive", batch]["tpf"] == 1.0
        assert rows["reference loop one by one, self-refine", batch]["tpf"] == pytest.approx(8 / 6)
    assert shown.count("| engine, self-refine |") == 2 and "copy" in shown
    assert run(["bench", "decode", "nowhere"]) == 2
    assert "there is no model nowhere" in capsys.readouterr().err
