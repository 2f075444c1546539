"""A run folder has one trainer, its data is what was written, and its checksums name every file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freda.data import shards
from freda.data.shards import Manifest
from freda.errors import FredaError
from freda.files import locked
from freda.train.loop import train
from tests.helpers import small_run


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    """While one trains, a second is refused, whether it resumes the run or has found the folder empty."""
    config, run = small_run(tmp_path / "data"), tmp_path / "run"
    train(config, run)
    with locked(run), pytest.raises(FredaError, match="another process is writing"):
        train(replace(config, train=replace(config.train, steps=2)), run, resume=True)
    new = tmp_path / "new"
    with locked(new), pytest.raises(FredaError, match="another process is writing"):
        train(config, new)
    assert not list(new.iterdir())
    train(config, new)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (0, 2**31 - 1, "has changed: its hash is"),
        (4, -5, "has changed: its hash is"),
        (8, 3, "has changed: its hash is"),
    ],
)
def test_changed_shards_are_refused_before_the_first_step(place: int, value: int, said: str, tmp_path: Path) -> None:
    config, run = small_run(tmp_path / "data"), tmp_path / "run"
    path = next((tmp_path / "data").glob("train-*.bin"))
    written = path.read_bytes()
    changed = bytearray(written)
    changed[place : place + 4] = value.to_bytes(4, "little", signed=True)
    path.write_bytes(changed)
    with pytest.raises(FredaError, match=said):
        train(config, run)
    assert not run.exists(), "nothing is left behind"
    path.write_bytes(written)
    train(config, run)
    path.write_bytes(changed)  # a run that has looked at them looks again at what has another time
    with pytest.raises(FredaError, match=said):
        train(replace(config, train=replace(config.train, steps=2)), run, resume=True)


def test_shards_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resuming compares times; too many bytes are not hashed at all, and ids are looked at when they are read."""
    config, run, hashed = small_run(tmp_path / "data"), tmp_path / "run", list[int]()
    monkeypatch.setattr(shards, "verify", lambda folder, manifest, names: hashed.append(len(names)))
    train(config, run)
    train(replace(config, train=replace(config.train, steps=2)), run, resume=True)
    assert len(hashed) == 2 and hashed[0] > 0 and hashed[1] == 0
    manifest, path = Manifest.read(tmp_path / "data"), next((tmp_path / "data").glob("train-*.bin"))
    stamps, skipped = shards.unchanged(tmp_path / "data", manifest, {}, most=10)
    assert stamps == {} and skipped == hashed[0] and len(hashed) == 2
    path.write_bytes(np.full(path.stat().st_size // 4, 10**6, "<i4").tobytes())
    with pytest.raises(FredaError, match=r"holds the id 1000000, which no text has: its files have changed; run freda"):
        train(config, tmp_path / "other")


@pytest.mark.parametrize("change", ["empty", "unnamed", "numbers"])
def test_checksums_must_name_every_file(change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record that names nothing proves nothing; what others lay beside is left alone."""
    config, run = small_run(tmp_path / "data", save_every=1), tmp_path / "run"
    longer = replace(config, train=replace(config.train, steps=2))
    train(longer, run)
    newest = run / "checkpoints" / "step-2"
    record: dict[str, Any] = json.loads((newest / "checksums.json").read_text())
    (newest / "README.md").write_text("mine")
    more = replace(config, train=replace(config.train, steps=3))
    if change == "empty":
        record = {}
    elif change == "unnamed":
        del record["state.json"]
    else:
        record["state.json"] = 5
    (newest / "checksums.json").write_text(json.dumps(record))
    assert train(more, run, resume=True).step == 3
    said = capsys.readouterr().err
    assert "step-2 is damaged (" in said and ("does not name" in said or "not what was written" in said)
