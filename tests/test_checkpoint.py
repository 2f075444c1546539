"""Checkpoints: written while training goes on, noticed when damaged, and whole at whatever moment a run is killed."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from freda.errors import FredaError
from freda.folders.model_folder import load_model
from freda.model.config import ModelConfig
from freda.model.parts import BACKBONE
from freda.train import checkpoint, loop
from freda.train import config as configs
from freda.train.config import DataConfig, RunConfig, TrainConfig
from freda.train.parallel import Ranks
from tests.helpers import fork, method, run_ranks


def config(shards: Path, **train: object) -> RunConfig:
    settings = {"steps": 6, "batch_rows": 4, "group_rows": 2, "lr": 1e-3, "warmup_steps": 2, "log_every": 1, **train}
    return RunConfig(
        model=ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn_dim=48),
        data=DataConfig(path=str(shards), seq_len=64),
        method=method("autoregressive"),
        train=TrainConfig(**{"save_every": 2, "validation_rows": 4, **settings}),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def whole(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to, with all its checkpoints."""
    run = tmp_path_factory.mktemp("whole") / "run"
    loop.train(config(shards, keep=3), run)
    return run


def losses(run: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_model(run).backbone.state_dict()


def assert_bitwise(one: Path, two: Path) -> None:
    assert losses(one) == losses(two)
    left, right = weights(one), weights(two)
    assert all(torch.equal(left[name], right[name]) for name in left)


def resume(run: Path) -> loop.Result:
    return loop.train(loop.resume_run(run), run, resume=True)


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# -- beside the steps ------------------------------------------------------------------------------------------------


def test_training_goes_on_while_a_checkpoint_is_written(
    shards: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is taken while the first checkpoint is held up. All hold the state of their own step, and no two are
    written at once."""
    take, write = loop.take_step, checkpoint.Saver._write
    reached, writing, most = threading.Event(), list[int](), list[int]()

    def step(run: loop.Run, number: int) -> dict[str, Any]:
        numbers = take(run, number)
        if number == 3:
            reached.set()
        return numbers

    def held_up(self: checkpoint.Saver, shot: checkpoint.Snapshot, model: Any) -> None:
        writing.append(shot.step)
        most.append(len(writing))
        assert shot.step != 2 or reached.wait(20), "training waits for the checkpoint"
        time.sleep(0.05)
        write(self, shot, model)
        writing.pop()

    monkeypatch.setattr(loop, "take_step", step)
    monkeypatch.setattr(checkpoint.Saver, "_write", held_up)
    loop.train(config(shards, keep=3), tmp_path / "run")
    assert most == [1, 1, 1]
    for number in (2, 4, 6):
        for name in ("model.safetensors", FILES[-1]):
            folders = (run / "checkpoints" / f"step-{number}" for run in (whole, tmp_path / "run"))
            left, right = (load_file(folder / name) for folder in folders)
            assert all(torch.equal(left[key], right[key]) for key in left), (number, name)


@pytest.mark.parametrize("where", ["weights", "moments", "checksums", "pointer"])
def test_a_full_disk_stops_the_run_and_harms_nothing(
    where: str, shards: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = checkpoint.Saver.start
    target = {
        "weights": (checkpoint, "write_files"),
        "moments": (checkpoint.HuggingFaceStorageWriter, "write_data"),
        "checksums": (checkpoint, "checksums"),
        "pointer": (checkpoint, "write_whole"),
    }[where]

    def fills(self: checkpoint.Saver, model: Any, optimizer: Any, step: int, validation: float | None) -> None:
        if step == 4:
            self.wait()
            monkeypatch.setattr(*target, no_space)
        start(self, model, optimizer, step, validation)

    monkeypatch.setattr(checkpoint.Saver, "start", fills)
    run = tmp_path / "run"
    with pytest.raises(FredaError, match=r"cannot write .*step-4: .*No space left on device"):
        loop.train(config(shards), run)
    monkeypatch.undo()
    found = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert found == (["step-2", "step-4"] if where == "pointer" else ["step-2"])
    assert (run / "latest").read_text() == "step-2\n"
    assert resume(run).step == 6
    assert_bitwise(whole, run)


# -- which are kept --------------------------------------------------------------------------------------------------


def test_the_newest_and_the_best_are_kept(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([3.0, float("nan"), 1.0, 2.0, 2.5, 1.5])
    monkeypatch.setattr(loop, "validate", lambda run: {"loss": next(found)})
    loop.train(config(shards, save_every=1, validate_every=1, keep=2), tmp_path / "run")
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-3", "step-5", "step-6"]
    assert (tmp_path / "run" / "best").read_text() == "step-3\n"
    assert (tmp_path / "run" / "latest").read_text() == "step-6\n"


def test_files_of_weights_are_about_equal_and_the_scorer_has_its_own() -> None:
    backbone = {"embed_tokens.weight": 40, **{f"layers.{n}": 10 for n in range(6)}, "norm.weight": 1}
    sizes = {**{(BACKBONE, name): size for name, size in backbone.items()}, ("scorer", "fuse"): 5}
    files = checkpoint.weight_files(sizes, 2)
    assert files[BACKBONE, "embed_tokens.weight"] == (0, "model-00001-of-00002.safetensors")
    assert files[BACKBONE, "layers.0"][0] == 0
    assert files[BACKBONE, "layers.5"] == (1, "model-00002-of-00002.safetensors")
    assert files["scorer", "fuse"] == (0, "scorer.safetensors")
    assert {file for _, file in checkpoint.weight_files(sizes, 1).values()} == {
        "model.safetensors",
        "scorer.safetensors",
    }
    few = checkpoint.weight_files({(BACKBONE, name): size for name, size in (("e", 98), ("norm", 1), ("last", 1))}, 8)
    assert few[BACKBONE, "last"] == (7, "model-00002-of-00002.safetensors"), "ranks without a weight have no file"


def test_many_files_of_moments(shards: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "BYTES_PER_FILE", 20_000)
    run = tmp_path / "run"
    loop.train(config(shards, steps=4), run)
    assert len(list((run / "checkpoints" / "step-4" / "optimizer").iterdir())) > 2
    settings = configs.load(run / "config.toml")
    (run / "config.toml").write_text(configs.dump(replace(settings, train=replace(settings.train, steps=6))))
    assert resume(run).step == 6
    assert losses(run) == losses(whole)


# -- damage ----------------------------------------------------------------------------------------------------------

FILES = ("model.safetensors", "config.json", "state.json", "optimizer/shard-00001-model-00001-of-00001.safetensors")


def spoil(file: Path, how: str) -> None:
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-5] if how == "cut" else content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "bit") for name in FILES),
        ("checksums.json", "cut"),
        *((name, how) for name in ("model.safetensors", "checksums.json") for how in ("missing",)),
        ("tokenizer.json", "cut"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    name: str, how: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    spoil(run / "checkpoints" / "step-6" / name, how)
    (run / "checkpoints" / "step-9.part").mkdir()  # left by a process that was killed
    assert resume(run).step == 6
    said = capsys.readouterr().err
    assert f"{run / 'checkpoints' / 'step-6'} is damaged ({name}" in said and "step-4" in said
    kept = {path.name for path in (run / "checkpoints").iterdir()}
    assert "step-6.damaged" in kept and "step-9.part" not in kept
    assert_bitwise(whole, run)


def test_a_run_with_damaged_checkpoints_only_says_so(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for step in (2, 4, 6):
        spoil(run / "checkpoints" / f"step-{step}" / "model.safetensors", "bit")
    with pytest.raises(FredaError, match=r"no checkpoint that is not damaged .*step-6: model.safetensors .*step-2"):
        resume(run)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-2", "step-4", "step-6"]


def test_a_checkpoint_of_an_older_freda_is_still_a_model(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    folder = run / "checkpoints" / "step-6"
    shutil.rmtree(folder / "optimizer")
    (folder / "checksums.json").unlink()
    save_file({"exp_avg.norm.weight": torch.zeros(32)}, folder / "optimizer.safetensors")
    assert load_model(run).method.name == "autoregressive"
    with pytest.raises(FredaError, match=r"older freda and cannot be resumed from; start a new run with train.init="):
        resume(run)


SECTIONS_OF_0_1 = """[corpus]
problems = 20000
carry = true

[mini]
documents = 4000000
math_distractors = 0.3

[prepare]
tokenizer = ""
validation_share = 0.005

[decontaminate]
ngram = 13

"""
METHOD_OF_0_1 = """
block_size = 4
passes = 2
feedback = "soft"
rescale = false
committed_hard = false
drafts = "greedy"
replacement = "iid"
replacement_start = 0.3
replacement_end = 0.1
negatives = "sampled"
num_negatives = 4
scorer_layer = false
noise_min = 0.001
noise_max = 1.0
"""


def as_written_by_0_1(run: Path) -> None:
    """Every method had all settings; a config had the sections of `freda prepare`, a model the passes of training."""
    text = (run / "config.toml").read_text()
    head, rest = text.split("[method]\n")
    name, train = rest.partition("\n")[0], rest[rest.index("[train]") :]
    (run / "config.toml").write_text(f"{SECTIONS_OF_0_1}{head}[method]\n{name}{METHOD_OF_0_1}\n{train}")
    for folder in (run / "checkpoints").iterdir():
        values = json.loads((folder / "config.json").read_text())
        more = {"passes": 2, "feedback": "soft", "rescale": False, "committed_hard": False}
        (folder / "config.json").write_text(json.dumps({**values, "freda": {**values["freda"], **more}}))
        sums = json.loads((folder / "checksums.json").read_text())
        sums |= checkpoint.checksums(folder, [folder / "config.json"])
        (folder / "checksums.json").write_text(json.dumps(sums))


@pytest.mark.parametrize("name", ["autoregressive", "block-diffusion", "self-refine", "best-of-n"])
def test_a_run_of_version_0_1_is_resumed(name: str, shards: Path, whole: Path, tmp_path: Path) -> None:
    settings, one, two = config(shards), tmp_path / "one", tmp_path / "two"
    if name == "best-of-n":
        base = replace(settings, method=method(passes=2), train=replace(settings.train, steps=1))
        init = str(loop.train(base, tmp_path / "base").checkpoint)
        settings = replace(settings, model=ModelConfig(), train=replace(settings.train, init=init))
    own = {"passes": 2} if name in ("self-refine", "best-of-n") else {}
    loop.train(replace(settings, method=method(name, **own)), one)
    shutil.copytree(one, two)
    shutil.rmtree(two / "checkpoints" / "step-6")
    (two / "latest").write_text("step-4\n")
    as_written_by_0_1(two)
    assert "[mini]" in (two / "config.toml").read_text() and load_model(two).method.name == name
    assert loop.resume_run(two) == loop.resume_run(one) and resume(two).step == 6
    assert_bitwise(one, two)
    assert load_model(two).method == load_model(one).method


def test_no_file_is_a_pickle(whole: Path) -> None:
    for path in (whole / "checkpoints" / "step-6").rglob("*"):
        assert path.is_dir() or path.suffix in (".safetensors", ".json", ".jinja"), path
    shard = load_file(whole / "checkpoints" / "step-6" / FILES[-1])
    assert {"exp_avg.norm.weight", "exp_avg_sq.embed_tokens.weight"} <= shard.keys()


# -- killed ----------------------------------------------------------------------------------------------------------

KILLS = 6


def train_or_resume(folder: Path, shards: Path, pause: float) -> None:
    """A run in a process of its own, that can be killed; slow, so that a kill meets all its parts."""
    torch.set_num_threads(1)
    take, sums = loop.take_step, checkpoint.checksums

    def slow_step(run: loop.Run, step: int) -> dict[str, Any]:
        time.sleep(pause / 4)
        return take(run, step)

    def slow_sums(*arguments: Any) -> dict[str, str]:
        time.sleep(pause)
        return sums(*arguments)

    loop.take_step, checkpoint.checksums = slow_step, slow_sums
    if (folder / "config.toml").is_file():
        loop.train(loop.resume_run(folder), folder, resume=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        loop.train(config(shards, steps=24, save_every=3), folder)


@pytest.mark.slow
def test_killed_at_random_moments_a_run_loses_nothing(shards: Path, tmp_path: Path) -> None:
    """Every second kill waits until a checkpoint is being written."""
    run, dice, seen = tmp_path / "run", random.Random(7), list[int]()
    for number in range(KILLS):
        child = fork(train_or_resume, run, shards, 0.04)
        deadline = time.monotonic() + (30 if number % 2 else dice.uniform(0.2, 0.8))
        while time.monotonic() < deadline and child.is_alive():
            if number % 2 and any((run / "checkpoints").glob("*.part")):
                break
            time.sleep(0.002)
        time.sleep(dice.uniform(0, 0.04))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        seen.append(len(losses(run)) if (run / "metrics.jsonl").exists() else 0)
    last = fork(train_or_resume, run, shards, 0.0)
    last.join(60)
    assert last.exitcode == 0 and 0 < max(seen) < 24, f"the kills came at {seen}"
    loop.train(config(shards, steps=24, save_every=3), tmp_path / "whole")
    assert_bitwise(tmp_path / "whole", run)
    assert not list((run / "checkpoints").glob("*.part")) and (run / "latest").read_text() == "step-24\n"


def two_ranks_killed(ranks: Ranks, folder: Path) -> None:
    """Both end as by SIGKILL, one while it writes its part of a checkpoint, and leave no result."""
    sums = checkpoint.checksums

    def killed(folder: Path, paths: list[Path]) -> dict[str, str]:
        if folder.name == "step-4.part" and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return sums(folder, paths)

    checkpoint.checksums = killed
    loop.train(configs.load(folder / "run.toml"), folder / "run", ranks=ranks)


def two_ranks_resume(ranks: Ranks, folder: Path) -> int:
    return loop.train(loop.resume_run(folder / "run"), folder / "run", resume=True, ranks=ranks).step


def test_two_processes_of_which_one_is_killed_go_on(shards: Path, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(configs.dump(config(shards)))
    with pytest.raises(AssertionError, match="exit codes"):
        run_ranks(two_ranks_killed, 2, tmp_path)
    assert (tmp_path / "run" / "latest").read_text() == "step-2\n"
    assert run_ranks(two_ranks_resume, 2, tmp_path) == [6, 6]
    for line, other in zip(losses(whole), losses(tmp_path / "run"), strict=True):
        assert other == pytest.approx(line, rel=5e-6)
