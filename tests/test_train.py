"""The loop: schedules, resume to the bit, interruption, and what must never be lost."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from freda.cli import run as cli
from freda.data.config import CorpusConfig
from freda.data.loader import Batch
from freda.data.prepare import prepare_corpus
from freda.errors import FredaError
from freda.folders.model_folder import load_model
from freda.model.config import ModelConfig
from freda.train import checkpoint, loop
from freda.train import config as configs
from freda.train.config import DataConfig, RunConfig, TrainConfig
from freda.train.parallel import Ranks
from tests.helpers import FredaProcess, method


def config(shards: Path, name: str = "self-refine", **train: object) -> RunConfig:
    settings = {"steps": 6, "batch_rows": 4, "group_rows": 2, "lr": 1e-3, "warmup_steps": 2, "log_every": 1, **train}
    return RunConfig(
        model=ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn_dim=48),
        data=DataConfig(path=str(shards), seq_len=96),
        method=method(name),
        train=TrainConfig(validation_rows=4, **settings),  # type: ignore[arg-type]
    )


def losses(folder: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def start(folder: Path, settings: RunConfig) -> loop.Result:
    return loop.train(settings, folder)


@pytest.mark.parametrize("name", ["autoregressive", "block-diffusion", "self-refine"])
def test_resume_gives_the_very_losses_of_an_uninterrupted_run(name: str, shards: Path, tmp_path: Path) -> None:
    settings = config(shards, name, save_every=2)
    whole = start(tmp_path / "whole", settings)
    _train_until(settings, tmp_path / "cut", 4)
    resumed = loop.train(loop.resume_run(tmp_path / "cut"), tmp_path / "cut", resume=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole"), "bit for bit"
    assert len(losses(tmp_path / "whole")) == 6 and resumed.validation == whole.validation
    one, two = (load_model(result.checkpoint).backbone.state_dict() for result in (whole, resumed))
    assert all(torch.equal(one[key], two[key]) for key in one)


def _train_until(settings: RunConfig, folder: Path, step: int) -> None:
    """Train and crash in the middle of a later step, after the checkpoint of `step`."""
    take = loop.take_step

    def crash(run: loop.Run, number: int) -> dict[str, object]:
        if number == step + 1:
            raise RuntimeError("crash")
        return take(run, number)

    loop.take_step, before = crash, loop.take_step  # type: ignore[assignment]
    try:
        with pytest.raises(RuntimeError, match="crash"):
            loop.train(settings, folder)
    finally:
        loop.take_step = before
    assert [entry[0] for entry in losses(folder)] == [1, 2, 3, 4, 5], "step 5 was done, then lost"


def test_training_lowers_the_loss(shards: Path, tmp_path: Path) -> None:
    start(tmp_path / "run", config(shards, "autoregressive", steps=30, lr=1e-2, warmup_steps=3))
    seen = [loss for _, loss, _ in losses(tmp_path / "run")]
    assert seen[-1] < seen[0] - 1.5


def test_gradient_does_not_depend_on_the_grouping(shards: Path) -> None:
    """Accumulation is exact: two groups of two rows give the gradient of one group of four."""
    gradients = []
    for size in (4, 2):
        run = loop.setup(replace(config(shards, group_rows=size), method=method(passes=1)))
        batches = [run.rows.batch(first, size) for first in range(0, 4, size)]
        labels = sum(int(run.method.labels(batch).sum()) for batch in batches)
        loss = float(loop.accumulate_gradient(run, batches, 0, [labels]).sum()) / labels
        gradients.append((loss, torch.cat([w.grad.flatten() for w in run.parts.parameters() if w.grad is not None])))
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=1e-5)
    torch.testing.assert_close(gradients[0][1], gradients[1][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["block-diffusion", "self-refine"])
def test_gradient_does_not_depend_on_the_number_of_ranks(name: str, shards: Path) -> None:
    """The rows of two ranks, with the noise that belongs to them, add up to those of one process."""
    whole = loop.setup(config(shards, name))
    batches = loop.read_batches(whole, 3)
    labels = sum(int(whole.method.labels(batch).sum()) for batch in batches)
    loss = loop.accumulate_gradient(whole, batches, 3, [labels])
    parts, shared = [], loop.setup(config(shards, name))
    for rank in range(2):
        run = replace(shared, ranks=Ranks(rank, 2))
        assert [list(share) for share in run.shares] == [[rank], [2 + rank]]
        parts.append(loop.accumulate_gradient(run, loop.read_batches(run, 3), 3, [labels]))
    torch.testing.assert_close(sum(parts), loss, rtol=1e-5, atol=0)
    for one, two in zip(whole.parts.parameters(), shared.parts.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6)


def test_prefetching_changes_no_loss_and_the_metrics_show_the_wait(shards: Path, tmp_path: Path) -> None:
    settings = config(shards, save_every=2)
    start(tmp_path / "ahead", settings)
    run = loop.setup(settings)
    plain = [loop.take_step(run, step) for step in range(6)]
    lines = [json.loads(line) for line in (tmp_path / "ahead" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [(line["loss"], line["grad_norm"]) for line in steps] == [(n["loss"], n["grad_norm"]) for n in plain]
    for numbers in steps + plain:
        assert numbers["data_wait"] >= 0 and 0 <= numbers["data_wait_share"] <= 1
    assert lines[0] == {"step": 1, "data": {"rows": run.rows.rows, "fullness": run.rows.fullness}}
    assert len([line for line in lines if "data" in line]) == 1


def test_a_thread_reads_each_step_once_from_where_the_run_was_resumed(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _train_until(config(shards, save_every=2), tmp_path / "run", 4)
    read, seen = loop.read_batches, list[tuple[str, int, list[list[int]]]]()

    def watched(run: loop.Run, step: int) -> list[Batch]:
        batches = read(run, step)
        seen.append((threading.current_thread().name, step, torch.cat([batch.tokens for batch in batches]).tolist()))
        return batches

    monkeypatch.setattr(loop, "read_batches", watched)
    loop.train(loop.resume_run(tmp_path / "run"), tmp_path / "run", resume=True)
    rows = loop.setup(config(shards)).rows
    assert seen == [("prefetch_0", step, rows.batch(4 * step, 4).tokens.tolist()) for step in (4, 5)]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_wait_is_measured(ahead: bool, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = loop.read_batches

    def slow(run: loop.Run, step: int) -> list[Batch]:
        time.sleep(0.1)
        return read(run, step)

    monkeypatch.setattr(loop, "read_batches", slow)
    run = loop.setup(config(shards, steps=1))
    with loop.prefetch(run, 0) as prefetcher:
        begun = time.perf_counter()
        run.ahead = prefetcher if ahead else None
        numbers = loop.take_step(run, 0)
        took = time.perf_counter() - begun
    assert 0.05 < numbers["data_wait"] < took
    assert numbers["data_wait"] / took <= numbers["data_wait_share"] < 1


def test_the_longest_wait_between_two_lines_is_seen(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, waits = loop.take_step, [0.1, 0.7, 0.2, 0.0, 0.3, 0.1]
    monkeypatch.setattr(loop, "take_step", lambda run, step: {**take(run, step), "data_wait": waits[step]})
    start(tmp_path / "run", config(shards, "autoregressive", log_every=3))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    seen = [(line["data_wait"], line["data_wait_longest"]) for line in lines if "loss" in line]
    assert seen == [(0.2, 0.7), (0.1, 0.3)]


def test_an_error_of_the_prefetching_thread_ends_the_run_with_its_last_state_saved(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = loop.read_batches

    def broken(run: loop.Run, step: int) -> list[Batch]:
        if step == 3:
            raise OSError(errno.EIO, "Input/output error")
        return read(run, step)

    monkeypatch.setattr(loop, "read_batches", broken)
    with pytest.raises(OSError, match="Input/output error"):
        start(tmp_path / "run", config(shards))
    monkeypatch.undo()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
    start(tmp_path / "whole", config(shards))
    assert loop.train(loop.resume_run(tmp_path / "run"), tmp_path / "run", resume=True).step == 6
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.parametrize("name", ["autoregressive", "self-refine"])
def test_attention_changes_no_loss(name: str, shards: Path, tmp_path: Path) -> None:
    """Rows of one document and packed ones by turns, a validation of both: the staircase is the dense mask."""
    settings = config(shards, name, group_rows=1, attention="staircase")
    settings = replace(settings, model=replace(settings.model, head_dim=64), data=replace(settings.data, seq_len=64))
    run = loop.setup(settings)
    kinds = {batch.one_document for step in range(settings.train.steps) for batch in loop.read_batches(run, step)}
    assert run.parts.backbone.backend == "staircase" and kinds == {True, False}
    found = []
    for attention in ("staircase", "sdpa"):
        chosen = replace(settings, train=replace(settings.train, attention=attention))  # type: ignore[arg-type]
        end = start(tmp_path / attention, chosen)
        found.append([end.validation["loss"], *(number for line in losses(tmp_path / attention) for number in line)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_cpu_does_not_train_with_flex(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(FredaError, match=r"train\.attention is flex, which does not train on a cpu; use auto"):
        loop.train(config(shards, attention="flex", device="cpu"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_only_the_newest_checkpoints_are_kept(shards: Path, tmp_path: Path) -> None:
    start(tmp_path / "run", config(shards, save_every=2, keep=2))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-4", "step-6"]
    assert (tmp_path / "run" / "latest").read_text() == "step-6\n"


def test_a_checkpoint_starts_another_method(shards: Path, tmp_path: Path) -> None:
    base = start(tmp_path / "base", config(shards, "autoregressive"))
    tuned = start(tmp_path / "tuned", config(shards, "self-refine", init=str(tmp_path / "base"), steps=1, lr=1e-12))
    one, two = (load_model(result.checkpoint) for result in (base, tuned))
    assert (one.method.name, two.method.name) == ("autoregressive", "self-refine")
    torch.testing.assert_close(one.backbone.embed_tokens.weight, two.backbone.embed_tokens.weight, atol=1e-6, rtol=0)
    assert {"pass1", "pass2", "pass3", "pass4"} <= tuned.validation.keys()


def test_a_non_finite_loss_stops_before_the_update(shards: Path) -> None:
    run = loop.setup(config(shards))
    with torch.no_grad():
        run.parts.backbone.norm.weight[0] = float("nan")
    before = run.parts.backbone.embed_tokens.weight.clone()
    with pytest.raises(FredaError, match=r"loss nan .* at step 3, rank 0, rows 12 to 13: stopped before the update"):
        loop.take_step(run, 3)
    assert torch.equal(run.parts.backbone.embed_tokens.weight, before)


def test_run_folders_are_not_overwritten_and_say_what_is_wrong(shards: Path, tmp_path: Path) -> None:
    settings = config(shards)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    with pytest.raises(FredaError, match=r"is not empty; .* freda train --resume"):
        loop.train(settings, tmp_path / "used")
    with pytest.raises(FredaError, match="there is no run folder"):
        loop.resume_run(tmp_path / "none")
    with pytest.raises(FredaError, match=r"is not a run folder: it has no config\.toml"):
        loop.resume_run(tmp_path / "used")


def test_a_run_killed_before_its_first_save_starts_again(shards: Path, tmp_path: Path) -> None:
    settings = config(shards)
    start(tmp_path / "whole", settings)
    folder = tmp_path / "cut"
    (folder / "checkpoints" / "step-2.tmp").mkdir(parents=True)
    (folder / "config.toml").write_text(configs.dump(settings))
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 9.9, "grad_norm": 1.0}\n{"step": 2, "lo')
    loop.train(loop.resume_run(folder), folder, resume=True)
    assert losses(folder) == losses(tmp_path / "whole")


def test_a_dangling_pointer_falls_back_to_the_newest_checkpoint(shards: Path, tmp_path: Path) -> None:
    start(tmp_path / "run", config(shards, save_every=2))
    (tmp_path / "run" / "latest").write_text("step-9\n")
    found = checkpoint.latest(tmp_path / "run")
    assert found is not None and found.name == "step-6"


def test_a_finished_run_resumes_to_nothing_and_says_how_to_train_on(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    start(folder, config(shards))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    monkeypatch.setattr(loop, "setup", None)  # nothing is set up
    for more in ([], ["--set", "train.steps=6"]):
        assert cli(["train", "--resume", str(folder), *more]) == 0
        said = capsys.readouterr()
        assert said.out == f"{folder / 'checkpoints' / 'step-6'}\n"
        assert "already finished" in said.err and f"train.init={folder}" in said.err
        assert f"--resume {folder} --set train.steps=N" in said.err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_finished_run_is_extended(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a method whose steps do not depend on how many there are: it gives the run that was planned longer."""
    planned, folder = config(shards, "autoregressive", steps=8, save_every=2), tmp_path / "run"
    start(tmp_path / "planned", planned)
    start(folder, replace(planned, train=replace(planned.train, steps=4)))
    assert cli(["train", "--resume", str(folder), "--set", "train.steps=8"]) == 0
    assert capsys.readouterr().out == f"{folder / 'checkpoints' / 'step-8'}\n"
    assert losses(folder) == losses(tmp_path / "planned") and len(losses(folder)) == 8
    assert (folder / "config.toml").read_text() == (tmp_path / "planned" / "config.toml").read_text()


def test_of_a_resumed_run_only_the_steps_can_be_changed_and_only_upwards(shards: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start(folder, config(shards, "autoregressive", steps=2))
    before = (folder / "config.toml").read_bytes()
    for overrides, message in (
        (["train.steps=1"], r"train\.steps is 1, but .* has 2"),
        (["train.steps=4", "train.lr=1"], r"train\.lr=1.* train\.init="),
        (["method.name=self-refine"], r"method\.name=self-refine.* train\.init="),
        (["method.noise_min=0.5"], r"method\.noise_min=0\.5.* train\.init="),
    ):
        with pytest.raises(FredaError, match=message):
            loop.resume_run(folder, overrides)
    wrong = replace(loop.resume_run(folder, ["train.steps=4"]), data=DataConfig(path=str(tmp_path), seq_len=96))
    with pytest.raises(FredaError):
        loop.train(wrong, folder, resume=True)
    assert (folder / "config.toml").read_bytes() == before, "a run that cannot be resumed stays what it was"


def test_resume_needs_neither_the_working_folder_nor_the_first_model(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path / "base", config(shards, "autoregressive", steps=1))
    monkeypatch.chdir(tmp_path)
    settings = replace(
        config(shards, init="base", save_every=2), data=DataConfig(path=os.path.relpath(shards), seq_len=96)
    )
    _train_until(settings, Path("run"), 4)
    (tmp_path / "base").rename(tmp_path / "gone")
    monkeypatch.chdir("/")
    assert loop.train(loop.resume_run(tmp_path / "run"), tmp_path / "run", resume=True).step == 6


def test_a_signal_while_saving_saves_once(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves: list[int] = []
    save = checkpoint.Saver.start

    def signalled(saver: checkpoint.Saver, model: Any, optimizer: Any, step: int, validation: float | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        saves.append(step)
        save(saver, model, optimizer, step, validation)

    monkeypatch.setattr(checkpoint.Saver, "start", signalled)
    result = start(tmp_path / "run", config(shards, save_every=2))
    assert saves == [2] and (result.step, result.interrupted) == (2, "SIGTERM")


def test_an_error_keeps_the_steps_before_it(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulate = loop.accumulate_gradient

    def broken(run: loop.Run, batches: list[Batch], step: int, labels: int) -> torch.Tensor:
        losses = accumulate(run, batches, step, labels)
        return losses * float("nan") if step == 3 else losses

    monkeypatch.setattr(loop, "accumulate_gradient", broken)
    with pytest.raises(FredaError, match="at step 3"):
        start(tmp_path / "run", config(shards))
    monkeypatch.undo()
    assert checkpoint.latest(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "step-3"
    start(tmp_path / "whole", config(shards))
    loop.train(loop.resume_run(tmp_path / "run"), tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_the_stored_config_says_what_the_run_has(shards: Path, tmp_path: Path) -> None:
    start(tmp_path / "base", config(shards, "autoregressive", steps=1))
    stored = loop.resume_run(tmp_path / "base")
    assert stored.model.vocab_size == load_model(tmp_path / "base").backbone.config.vocab_size > 0
    assert Path(stored.data.path).is_absolute()
    wrong = replace(config(shards, init=str(tmp_path / "base")), model=ModelConfig(dim=32, layers=9))
    with pytest.raises(FredaError, match=r"model\.layers is 9, but the model of train\.init has 1"):
        loop.train(wrong, tmp_path / "wrong")


def test_data_and_model_must_fit(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(FredaError, match=r"block_size 16 does not divide the shards' align 8"):
        loop.setup(replace(config(shards), method=method(block_size=16)))
    with pytest.raises(FredaError, match=r"data.path is empty"):
        loop.setup(replace(config(shards), data=DataConfig(seq_len=96)))
    other = tmp_path / "other"
    prepare_corpus(CorpusConfig(problems=50, validation_problems=4, vocab_size=280), other)
    start(tmp_path / "base", config(shards, "autoregressive", steps=1))
    with pytest.raises(FredaError, match="tokenizer"):
        loop.train(config(other, init=str(tmp_path / "base")), tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists(), "a run that cannot start leaves nothing behind"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_saves_and_leaves_with_a_clear_word(
    number: signal.Signals, code: int, shards: Path, tmp_path: Path
) -> None:
    folder, file = tmp_path / "run", tmp_path / "run.toml"
    file.write_text(configs.dump(config(shards, steps=100_000)))
    process = FredaProcess("train", file, "--out", folder, folder=tmp_path / "said")
    deadline = time.monotonic() + 60
    while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.signal(number)
    said, out, errors = process.wait()
    assert said == code, errors
    assert f"{number.name} after step" in errors and "saved and stopped" in errors
    assert f"resume with: freda train --resume {folder}" in errors
    step = int(out.strip().rsplit("-", 1)[1])
    assert losses(folder)[-1][0] == step >= 1 and checkpoint.latest(folder) == folder / "checkpoints" / f"step-{step}"


def test_a_second_stage_goes_on_behind_the_rows_of_the_first(shards: Path) -> None:
    first = loop.setup(config(shards))
    second = loop.setup(replace(config(shards), data=DataConfig(path=str(shards), seq_len=96, first_row=8)))
    for one, two in zip(loop.read_batches(first, 2), loop.read_batches(second, 0), strict=True):
        assert torch.equal(one.tokens, two.tokens)
    assert not torch.equal(loop.read_batches(first, 0)[0].tokens, loop.read_batches(second, 0)[0].tokens)


def test_metrics_count_useful_operations(shards: Path, tmp_path: Path) -> None:
    result = start(tmp_path / "run", config(shards, "autoregressive", steps=2))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert result.step == 2 and all(0 < line["tflops"] < 100 for line in steps)
    assert all("matmul_share" not in line and "memory_gb" not in line for line in steps), "no GPU here"
