"""The one training loop. What is trained is a method passed to it as a value.

`train` is setup, steps, checkpoints and validation. A step is `batch_rows` rows, cut into groups of `group_rows` that
share a number of passes; their gradients add up, each divided by the labels of the whole step. Everything random is a
function of (seed, step, row, position), so a resumed run gives the very losses of an uninterrupted one, and several
processes those of one. A thread builds the batches of the coming steps; `data_wait` in the metrics says how long a step
waited for its own. Another writes checkpoints. The host waits for the device once a step, before the update.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from freda.data.loader import Batch, Prefetcher, pinned, rank_rows
from freda.data.shards import Manifest, unchanged
from freda.errors import AgreedError, FredaError, note, require
from freda.files import locked, read_json, write_whole
from freda.folders.model_folder import About, model_path
from freda.methods.method import Step
from freda.train import checkpoint
from freda.train import config as config_module
from freda.train.config import RunConfig
from freda.train.metrics import ProgressLine, metrics_writer
from freda.train.optim import clip_and_update, learning_rate, pass_numbers, total_norm
from freda.train.parallel import Ranks, own_part, sharded
from freda.train.setup import Run, setup

SHARDS = "shards.json"  # in a run: size and time of the data's files when they were last compared with their hashes
VALIDATION_STEP = 0  # validation noise is that of a fixed step, so that its numbers can be compared


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    checkpoint: Path
    step: int
    interrupted: str  # the signal that stopped it, or empty
    validation: dict[str, float]
    seconds: float


def resume_run(folder: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of an existing run. Of all settings only `train.steps` can be overridden, to extend the run."""
    require(folder.is_dir(), f"there is no run folder {folder}")
    require((folder / "config.toml").is_file(), f"{folder} is not a run folder: it has no config.toml")
    for override in overrides:
        kept = f"--set {override}: a resumed run keeps its settings, except for a larger train.steps"
        steps_alone = override.partition("=")[0].strip() == "train.steps"
        require(steps_alone, f"{kept}; for other settings start a new run with train.init={folder}")
    before, config = (config_module.load_stored(folder / "config.toml", more) for more in ((), overrides))
    steps, asked = before.train.steps, config.train.steps
    require(asked >= steps, f"train.steps is {asked}, but the run {folder} has {steps}; use a larger number")
    return config


def train(
    config: RunConfig, folder: Path, *, resume: bool = False, name: str = "train", ranks: Ranks = Ranks()
) -> Result:
    """Train to the end, or until interrupted; in both cases everything is saved. `folder` is new, or resumed. No other
    process can train in it at the same time."""
    with contextlib.ExitStack() as lock:
        return _train(config, folder, resume, name, ranks, lock)


def _train(
    config: RunConfig, folder: Path, resume: bool, name: str, ranks: Ranks, lock: contextlib.ExitStack
) -> Result:
    def hold() -> None:
        """Keep others out; a new folder may have been used since it was looked at."""
        lock.enter_context(locked(folder))
        if not resume:
            _check_unused(folder)

    def prepare_folder(config: RunConfig) -> None:
        if not resume:
            hold()
        if not (resume and resume_run(folder) == config):
            write_whole(folder / "config.toml", config_module.dump(config))
        write_whole(folder / SHARDS, json.dumps(stamps) + "\n")

    def first(call: Callable[[], Any]) -> Any:
        return ranks.agree(lambda: call() if ranks.first else None)

    first(hold) if resume else ranks.agree(lambda: _check_unused(folder))
    config = _with_absolute_paths(config)
    saved = checkpoint.resumable(folder, ranks, note if ranks.first else lambda _: None) if resume else None
    done = 0 if saved is None else checkpoint.steps_done(saved)
    if saved is not None and done >= config.train.steps:
        first(lambda: _tell_finished(folder, done))
        return Result(saved, done, "", {}, 0.0)
    stamps = first(lambda: _check_shards(Path(config.data.path), folder / SHARDS))
    run = setup(config, saved, ranks)  # before the folder is made: a wrong config leaves nothing behind
    if saved is not None:
        checkpoint.restore(saved, run.parts, run.optimizer, ranks)
    first(lambda: prepare_folder(run.config))
    write = first(lambda: metrics_writer(run.config, folder, done)) or (lambda numbers: None)
    line = ProgressLine(name, config.train.steps, silent=not ranks.first)
    about = About(run.tokenizer, run.method, "training", run.over)
    saver = checkpoint.Saver(folder, about, ranks, keep=config.train.keep)
    with line.live, _stop_signals() as stop, prefetch(run, done) as run.ahead, saver:
        return _run_steps(run, saver, done, line, stop, lambda numbers: ranks.agree(lambda: write(numbers)))


def _tell_finished(folder: Path, done: int) -> None:
    more = f"freda train --resume {folder} --set train.steps=N with N above {done}"
    other = f"to train from it with other settings: train.init={folder} in a new run"
    note(f"{folder} is already finished, at step {done}; to extend it: {more}; {other}")


def _check_shards(data: Path, known: Path) -> dict[str, list[int]]:
    """Refuse token shards that have changed since they were written, or since this run has looked at them."""
    before: dict[str, Any] = {}
    with contextlib.suppress(FredaError):  # missing, or damaged: all of them are looked at
        before = read_json(known)
    stamps, skipped = unchanged(data, Manifest.read(data), before)
    if skipped:
        note(f"{skipped} shards of {data} are too large to look at now; to do so: freda inspect {data} --verify")
    return stamps


def _check_unused(folder: Path) -> None:
    """A new run must not mix with what is there."""
    unused = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    hint = f"resume it with: freda train --resume {folder}, or choose another folder"
    require(unused, f"{folder} is not empty; {hint}")


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """A stored config must mean the same from every folder."""
    data = replace(config.data, path=str(Path(config.data.path).absolute()) if config.data.path else "")
    init = str(model_path(Path(config.train.init)).absolute()) if config.train.init else ""
    return replace(config, data=data, train=replace(config.train, init=init))


def _run_steps(
    run: Run, saver: checkpoint.Saver, done: int, line: ProgressLine, stop: list[int], write: Callable[[Any], None]
) -> Result:
    """Steps, and what is due after them; whatever ends the run, its last state is saved."""
    config, first, begun = run.config.train, done, time.perf_counter()
    validation: dict[str, float] = {}
    saved_at, longest_wait, interrupted = done, 0.0, ""
    try:
        while done < config.steps and not (interrupted := _interruption(run, saver, stop)):
            numbers = take_step(run, done)
            done += 1
            elapsed = time.perf_counter() - begun
            numbers["tokens_per_s"] = (done - first) * config.batch_rows * run.config.data.seq_len / elapsed
            line.show(done, numbers, (config.steps - done) * elapsed / (done - first))
            longest_wait = max(longest_wait, numbers["data_wait"])
            if done == 1:
                write({"step": done, "data": {"rows": run.rows.rows, "fullness": run.rows.fullness}})
            if _due(done, config.log_every, config.steps):
                write({"step": done, **numbers, "data_wait_longest": longest_wait})
                longest_wait = 0.0
            judged = _due(done, config.validate_every, config.steps)
            if judged:
                validation = validate(run)
                write({"step": done, "validation": validation})
            if _due(done, config.save_every, config.steps):
                saved_at = done
                saver.start(run.parts, run.optimizer, done, validation["loss"] if judged else None)
        if done > saved_at:  # stopped by a signal
            saver.start(run.parts, run.optimizer, done, None)
        saver.wait()
    except (FredaError, OSError):  # raised before an update or beside one, so the last state is good: keep it
        if done > saved_at and not saver.failed:
            saver.start(run.parts, run.optimizer, done, None)
            saver.wait()
        raise
    if interrupted:
        line.note(f"{line.name}: {interrupted} after step {done} of {config.steps}: saved and stopped")
    saved = checkpoint.latest(saver.run) or saver.run
    return Result(saved, done, interrupted, validation, time.perf_counter() - begun)


def _interruption(run: Run, saver: checkpoint.Saver, stop: list[int]) -> str:
    """The signal that ends the run on all ranks, or nothing; a checkpoint that could not be written ends it too."""
    told = run.ranks.tell([stop[0] if stop else 0, saver.failed])
    number, failed = map(max, zip(*told, strict=True))
    if failed:
        saver.wait()  # raises
    return signal.Signals(number).name if number else ""


def _due(done: int, every: int, steps: int) -> bool:
    return done == steps or (every > 0 and done % every == 0)


def read_batches(run: Run, step: int) -> list[Batch]:
    """This rank's rows of a step, one batch per group."""
    first = run.config.data.first_row + step * run.config.train.batch_rows
    return [run.rows.batch(first + share.start, len(share)) for share in run.shares]


def prefetch(run: Run, done: int) -> Prefetcher:
    """The batches of the steps still to do, read ahead, ready to be copied to the device."""
    device = torch.empty(0, device=run.device).device  # with its number: "cuda" would be GPU 0 in a new thread

    steps = range(done, run.config.train.steps)
    return Prefetcher(lambda step: [pinned(batch, device) for batch in read_batches(run, step)], steps)


def take_step(run: Run, step: int) -> dict[str, Any]:
    """One optimizer step; returns its numbers, which are those of all ranks."""
    begun, config = time.perf_counter(), run.config.train
    read = run.ranks.agree(lambda: read_batches(run, step) if run.ahead is None else run.ahead.take(step))
    waited = time.perf_counter() - begun
    labels, counts, flops, waited = _shared_counts(run, step, read, waited)
    rate = learning_rate(step, config)
    for group in run.optimizer.param_groups:
        group["lr"] = rate * group["scale"]
    batches = [to_device(batch, run.device) for batch in read]
    losses = accumulate_gradient(run, batches, step, counts)
    copies = run.root.copies if run.updates_copies else None
    learnt = [(copies or {}).get(weight, weight) for weight in run.parts.parameters()]
    gradients = [own_part(weight.grad) for weight in learnt if weight.grad is not None]
    norm = total_norm(gradients).to(losses)
    seen = run.ranks.gather(torch.cat([losses, norm[None]])).tolist()  # the one time that the host waits
    by_rank, norm_of_all = [row[:-1] for row in seen], math.sqrt(sum(row[-1] ** 2 for row in seen))
    _require_finite(run, step, by_rank, norm_of_all, sum(labels))
    clip_and_update(run.optimizer, gradients, norm_of_all, config.clip, copies)
    if copies is None:
        run.root.outdate_copies()
    for weight in learnt:
        weight.grad = None
    by_group = [sum(group) for group in zip(*by_rank, strict=True)]
    numbers = {"loss": sum(by_group) / sum(labels), "grad_norm": norm_of_all, "lr": rate, "labels": sum(labels)}
    numbers |= {"data_wait": waited, **_speed(run, flops, waited, time.perf_counter() - begun)}
    several = run.method.training_passes > 1
    return {**numbers, "loss_by_passes": _by_passes(run, step, by_group, labels)} if several else numbers


def _shared_counts(run: Run, step: int, read: list[Batch], waited: float) -> tuple[list[int], list[int], float, float]:
    """Over all ranks: the labels of each group, and what the method counts of the whole step; the useful operations of
    this one, and the longest wait of a rank for its batches. Nothing is read back from a device: batches are counted
    before they go there."""
    method = run.method
    own = [method.counts(batch) for batch in read]
    told = run.ranks.tell([*(number for group in own for number in group), round(waited * 1e9)])
    *numbers, _ = (sum(column) for column in zip(*told, strict=True))
    kinds = len(own[0])
    counts = [sum(numbers[kind::kinds]) for kind in range(kinds)]
    flops = [
        method.flops(run.config.model, method.geometry.size_of(batch), passes, run.config.adapter)
        for batch, passes in zip(read, _passes(run, step), strict=True)
    ]
    return numbers[::kinds], counts, sum(flops), max(row[-1] for row in told) / 1e9


def _speed(run: Run, flops: float, waited: float, seconds: float) -> dict[str, float]:
    """Numbers of this rank's device: useful operations a second, and as a share of its matmul rate; memory."""
    numbers = {"data_wait_share": waited / seconds, "tflops": flops / seconds / 1e12}
    if run.matmul_rate:
        numbers["matmul_share"] = flops / seconds / run.matmul_rate
    if run.device.type == "cuda":
        numbers["memory_gb"] = torch.cuda.max_memory_allocated(run.device) / 1e9
    return numbers


def accumulate_gradient(run: Run, batches: list[Batch], step: int, counts: Sequence[int]) -> Tensor:
    """Backward of every group, its loss divided by the labels of the whole step, the first of its `counts`; this rank's
    sums of loss, fp64."""
    config, losses = run.config.train, []
    for batch, share, passes in zip(batches, run.shares, _passes(run, step), strict=True):
        row = torch.arange(share.start, share.stop)
        at = Step(config.seed, step, row, step / config.steps, passes, run.ranks.total, counts)
        loss = run.call(run.method.loss, batch, at)
        (loss / counts[0]).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach().double())
        if not run.updates_copies:
            run.root.widen_gradients()
    return torch.stack(losses)


def _passes(run: Run, step: int) -> list[int]:
    """The number of passes of each group of a step."""
    if run.passes:
        return [run.passes] * len(run.shares)
    return pass_numbers(run.config.train.seed, step, len(run.shares), run.method.training_passes)


def _by_passes(run: Run, step: int, losses: list[float], labels: list[int]) -> dict[str, float]:
    """The mean loss per label by number of passes."""
    sums, counts = defaultdict[int, float](float), defaultdict[int, int](int)
    for passes, loss, count in zip(_passes(run, step), losses, labels, strict=True):
        sums[passes] += loss
        counts[passes] += count
    return {str(passes): sums[passes] / counts[passes] for passes in sorted(sums)}


def _require_finite(run: Run, step: int, losses: list[list[float]], norm: float, labels: int) -> None:
    """Stop before an update that would ruin the weights, and say which rows to look at."""
    by_place = {(rank, group): loss for rank, row in enumerate(losses) for group, loss in enumerate(row)}
    bad = [place for place, loss in by_place.items() if not math.isfinite(loss)]
    if math.isfinite(norm) and not bad:
        return
    config, where = run.config.train, f"step {step}"
    rows = range(config.batch_rows)
    if bad:
        rank, group = bad[0]
        rows = rank_rows(config.batch_rows, config.group_rows, rank=rank, world=run.ranks.world)[group]
        where += f", rank {rank}"
    start = run.config.data.first_row + step * config.batch_rows
    where += f", rows {start + rows[0]} to {start + rows[-1]}"
    odd = f"loss {sum(by_place.values()) / labels} and gradient norm {norm} at {where}"
    raise AgreedError(f"{odd}: stopped before the update; lower train.lr or look at these rows")


@torch.no_grad()
def validate(run: Run) -> dict[str, float]:
    """Mean over the labels of the held-out rows of everything the method reports; each rank takes a part of them."""
    config, ranks = run.config.train, run.ranks
    size, count = config.group_rows, min(config.validation_rows, run.validation_rows.rows)
    sums, names = list[Tensor](), list[str]()
    for first in range(0, count, size):
        batch, row = _validation_share(run, first, min(size, count - first))
        at = Step(config.seed, VALIDATION_STEP, row, 1.0, run.method.training_passes)
        found = run.call(run.method.validate, batch, at)
        names, labels = list(found), run.method.labels(batch).sum()
        pairs = [value if value.dim() else torch.stack([value, labels]) for value in found.values()]
        sums.append(torch.stack([pair.double() for pair in pairs]).flatten())
    for module in sharded(run.root):
        module.reshard()  # frees gathered weights, which no backward will free
    values = ranks.agree(lambda: ranks.gather(torch.stack(sums).sum(0))).sum(0).tolist()
    return {name: value / max(1, n) for name, value, n in zip(names, values[::2], values[1::2], strict=True)}


def _validation_share(run: Run, first: int, count: int) -> tuple[Batch, Tensor]:
    """This rank's part of `count` validation rows, and their numbers. All ranks have as many, or they would wait for
    each other's layers: a rank that has run out repeats the last row, as padding."""
    share = -(-count // run.ranks.world)
    row = first + run.ranks.rank * share + torch.arange(share)
    held = row.clamp_max(first + count - 1)
    batch = Batch.cat([run.validation_rows.batch(int(number), 1) for number in held])
    batch.document[row != held] = -1
    return to_device(batch, run.device), held


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch where the model is; the copy to a GPU does not hold up the program, if the batch is pinned."""
    return batch.map(lambda part: part.to(device, non_blocking=True))


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """A list that fills when SIGINT or SIGTERM arrives. A second Ctrl-C acts as usual; torchrun may repeat SIGTERM."""
    caught, previous = list[int](), dict[int, Any]()

    def remember(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if number == signal.SIGINT:
            signal.signal(number, previous[number])

    with contextlib.suppress(ValueError):  # not the main thread: other code handles signals
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, remember)
    try:
        yield caught
    finally:
        for caught_number, handler in previous.items():
            signal.signal(caught_number, handler)
