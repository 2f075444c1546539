"""The one training loop. What is trained is a method passed to it as a value.

`train` is setup, steps, checkpoints and validation. A step is `batch_rows` rows, cut into groups of `group_rows` that
share a number of passes; their gradients add up, each divided by the labels of the whole step. Everything random is a
function of (seed, step, row, position), so a resumed run gives the very losses of an uninterrupted one. A thread builds
the batches of the coming steps; `data_wait` in the metrics says how long a step waited for its own.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from freda import config as config_module
from freda.config import Config, MethodConfig, ModelConfig
from freda.data.loader import Batch, Loader, Prefetcher, pinned, rank_rows
from freda.data.tokenizer import Tokenizer
from freda.errors import FredaError, require
from freda.methods import METHODS
from freda.methods.method import Method, Step
from freda.model.attention import pick_backend
from freda.model.scorer import Scorer
from freda.model.transformer import Transformer, pick_device
from freda.model.weights import load_model
from freda.train import checkpoint
from freda.train.metrics import MetricsFile, ProgressLine
from freda.train.optim import learning_rate, make_optimizer, pass_numbers

VALIDATION_STEP = 0  # validation noise is that of a fixed step, so that its numbers can be compared


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    checkpoint: Path
    step: int
    interrupted: str  # the signal that stopped it, or empty
    validation: dict[str, float]
    seconds: float


@dataclass
class Run:
    """Everything a step needs."""

    config: Config
    method: Method
    model: Transformer
    tokenizer: Tokenizer
    optimizer: torch.optim.AdamW
    rows: Loader
    validation_rows: Loader
    device: torch.device
    rank: int = 0
    world: int = 1
    shares: list[range] = field(init=False)  # this rank's rows of each group, numbered within the step
    ahead: Prefetcher | None = None  # None: a step reads its batches itself

    def __post_init__(self) -> None:
        train = self.config.train
        self.shares = rank_rows(train.batch_rows, train.group_rows, rank=self.rank, world=self.world)


def check_unused(folder: Path) -> None:
    """A new run must not mix with what is there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FredaError(
            f"{folder} is not empty; go on with it by: freda train --resume {folder}, or choose another folder"
        )


def resume_run(folder: Path) -> Config:
    """The config of an existing run."""
    if not folder.is_dir():
        raise FredaError(f"there is no run folder {folder}")
    if not (folder / "config.toml").is_file():
        raise FredaError(f"{folder} is not a run folder: it has no config.toml")
    return config_module.load(folder / "config.toml")


def setup(config: Config, resume_from: Path | None = None) -> Run:
    """Model, data and optimizer of a run, checked against each other; the weights of a checkpoint to resume from."""
    device = pick_device(config.train.device)
    require(bool(config.data.path), "data.path is empty; name a folder made by freda prepare")
    shards, seq_len, seed = Path(config.data.path), config.data.seq_len, config.train.seed
    rows = Loader(shards, "train", seq_len=seq_len, seed=seed)
    align, block = rows.manifest.align, config.method.block_size
    require(
        align % block == 0,
        f"method.block_size {block} does not divide the shards' align {align}; prepare them with align={block}",
    )
    model, tokenizer = _initial_model(config, resume_from)
    rows.check_tokenizer(tokenizer)
    method = METHODS[config.method.name]
    if method.SCORES:
        _freeze_for_scorer(model, config)
    else:
        model.scorer = None  # it judged the drafts of a backbone that is about to change
    config = replace(config, model=model.config)  # what the run has, not what was asked for
    model.to(device)
    model.backend = pick_backend(config.train.attention, device)
    return Run(
        config=config,
        method=method,
        model=model,
        tokenizer=tokenizer,
        optimizer=make_optimizer(model, config.train),
        rows=rows,
        validation_rows=Loader(shards, "validation", seq_len=seq_len, seed=seed),
        device=device,
    )


def _freeze_for_scorer(model: Transformer, config: Config) -> None:
    """Stage II: only the scorer learns; a model without one gets a new one."""
    require(bool(config.train.init), "train.init is empty; best-of-n starts from a self-refine model")
    model.requires_grad_(False)
    wanted = config.method.scorer_layer
    if model.scorer is None:
        scorer = Scorer(model.config, last_layer=wanted)
        scorer.init_weights(config.train.seed, model)
        model.scorer = scorer
    assert isinstance(model.scorer, Scorer)
    require(
        (model.scorer.last_layer is not None) == wanted,
        f"method.scorer_layer is {str(wanted).lower()}, but the scorer of {config.train.init} was trained otherwise; "
        f"set it to {str(not wanted).lower()}, or start from the self-refine model",
    )
    model.scorer.requires_grad_(True)


def _initial_model(config: Config, resume_from: Path | None) -> tuple[Transformer, Tokenizer]:
    """The checkpoint, the model to start from, or a new one: in this order."""
    if resume_from is not None:
        loaded = load_model(resume_from)
        return loaded.model, loaded.tokenizer
    if config.train.init:
        loaded = load_model(Path(config.train.init))
        _check_shape(config.model, loaded.model.config)
        if METHODS[config.method.name].SCORES:
            _check_proposer(config, loaded.method)
        return loaded.model, loaded.tokenizer
    tokenizer = Tokenizer.load(Path(config.data.path))
    shape = config.model if config.model.vocab_size else replace(config.model, vocab_size=tokenizer.size)
    require(
        shape.vocab_size >= tokenizer.size,
        f"model.vocab_size {shape.vocab_size} is below the tokenizer's {tokenizer.size}; use 0 to take the tokenizer's",
    )
    model = Transformer(shape, tokenizer.blank_id)
    model.init_weights(config.train.seed)
    return model, tokenizer


def _check_proposer(config: Config, found: MethodConfig) -> None:
    """A scorer judges the drafts of the model it starts from, so it must see them as that model does."""
    init = config.train.init
    require(
        METHODS[found.name].REFINES,
        f"train.init {init} was trained as {found.name}; best-of-n starts from a self-refine model",
    )
    for key in ("block_size", "feedback", "rescale", "committed_hard"):
        asked, trained = getattr(config.method, key), getattr(found, key)
        require(asked == trained, f"method.{key} is {asked}, but {init} was trained with {trained}; use the same")


def _check_shape(asked: ModelConfig, found: ModelConfig) -> None:
    """A [model] section beside `train.init` must not say something else than the checkpoint."""
    asked = replace(asked, vocab_size=asked.vocab_size or found.vocab_size)
    if asked not in (found, replace(ModelConfig(), vocab_size=found.vocab_size)):  # the latter: none was given
        key = next(key for key, value in vars(asked).items() if value != getattr(found, key))
        raise FredaError(
            f"model.{key} is {getattr(asked, key)}, but the model of train.init has {getattr(found, key)}; "
            f"leave the [model] section away"
        )


def train(config: Config, folder: Path, *, resume: bool = False, name: str = "train") -> Result:
    """Train to the end, or until interrupted; in both cases everything is saved. `folder` is new, or resumed."""
    if not resume:
        check_unused(folder)
    config = _with_absolute_paths(config)
    saved = checkpoint.latest(folder) if resume else None
    run = setup(config, saved)  # before the folder is made: a wrong config leaves nothing behind
    done = 0 if saved is None else checkpoint.restore(saved, run.model, run.optimizer)
    if not resume:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(config_module.dump(run.config), encoding="utf-8")
    with ProgressLine(name, config.train.steps) as line, _stop_signals() as stop, prefetch(run, done) as run.ahead:
        return _run_steps(run, folder, done, line, stop)


def _with_absolute_paths(config: Config) -> Config:
    """A stored config must mean the same from every folder."""
    data = replace(config.data, path=str(Path(config.data.path).absolute()) if config.data.path else "")
    init = str(Path(config.train.init).absolute()) if config.train.init else ""
    return replace(config, data=data, train=replace(config.train, init=init))


def _run_steps(run: Run, folder: Path, done: int, line: ProgressLine, stop: list[str]) -> Result:
    """Steps, and what is due after them; whatever ends the run, its last state is saved."""
    config, first, begun = run.config.train, done, time.perf_counter()
    metrics = MetricsFile(folder / "metrics.jsonl", steps_done=done)
    validation: dict[str, float] = {}
    saved_at, longest_wait = done, 0.0
    try:
        while done < config.steps and not stop:
            numbers = take_step(run, done)
            done += 1
            elapsed = time.perf_counter() - begun
            numbers["tokens_per_s"] = (done - first) * config.batch_rows * run.config.data.seq_len / elapsed
            line.show(done, numbers, (config.steps - done) * elapsed / (done - first))
            longest_wait = max(longest_wait, numbers["data_wait"])
            if done == 1:
                metrics.write({"step": done, "data": {"rows": run.rows.rows, "fullness": run.rows.fullness}})
            if _due(done, config.log_every, config.steps):
                metrics.write({"step": done, **numbers, "data_wait_longest": longest_wait})
                longest_wait = 0.0
            if _due(done, config.validate_every, config.steps):
                validation = validate(run)
                metrics.write({"step": done, "validation": validation})
            if _due(done, config.save_every, config.steps):
                saved_at = done
                _save(run, folder, done)
        if done > saved_at:  # stopped by a signal
            _save(run, folder, done)
    except (FredaError, OSError):  # raised before an update or beside one, so the last state is good: keep it
        if done > saved_at:
            _save(run, folder, done)
        raise
    interrupted = stop[0] if stop and done < config.steps else ""
    if interrupted:
        line.note(f"{line.name}: {interrupted} after step {done} of {config.steps}: saved and stopped")
    saved = checkpoint.latest(folder) or folder
    return Result(saved, done, interrupted, validation, time.perf_counter() - begun)


def _due(done: int, every: int, steps: int) -> bool:
    return done == steps or (every > 0 and done % every == 0)


def _save(run: Run, folder: Path, done: int) -> None:
    keep = run.config.train.keep
    checkpoint.save(folder, run.model, run.tokenizer, run.config.method, run.optimizer, step=done, keep=keep)


def read_batches(run: Run, step: int) -> list[Batch]:
    """This rank's rows of a step, one batch per group."""
    first = step * run.config.train.batch_rows
    return [run.rows.batch(first + share.start, len(share)) for share in run.shares]


def prefetch(run: Run, done: int) -> Prefetcher:
    """The batches of the steps still to do, read ahead, ready to be copied to the device."""
    device = torch.empty(0, device=run.device).device  # with its number: "cuda" would be GPU 0 in a new thread

    def build(step: int) -> list[Batch]:
        return [pinned(batch, device) for batch in read_batches(run, step)]

    return Prefetcher(build, range(done, run.config.train.steps))


def take_step(run: Run, step: int) -> dict[str, Any]:
    """One optimizer step; returns its numbers."""
    begun, config = time.perf_counter(), run.config.train
    read = read_batches(run, step) if run.ahead is None else run.ahead.take(step)
    waited = time.perf_counter() - begun
    batches = [to_device(batch, run.device) for batch in read]
    rate = learning_rate(step, config)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    labels = sum(int(run.method.labels(batch, run.config.method).sum()) for batch in batches)
    total, by_passes = accumulate_gradient(run, batches, step, labels)
    norm = float(torch.nn.utils.clip_grad_norm_(run.model.parameters(), config.clip))
    if not (math.isfinite(total) and math.isfinite(norm)):
        first = step * config.batch_rows
        raise FredaError(
            f"loss {total} and gradient norm {norm} at step {step}, rows {first} to {first + config.batch_rows - 1}: "
            f"stopped before the update; lower train.lr or look at these rows"
        )
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    numbers = {"loss": total, "grad_norm": norm, "lr": rate, "labels": labels}
    numbers |= {"data_wait": waited, "data_wait_share": waited / (time.perf_counter() - begun)}
    return {**numbers, "loss_by_passes": by_passes} if run.method.REFINES else numbers


def accumulate_gradient(run: Run, batches: list[Batch], step: int, labels: int) -> tuple[float, dict[str, float]]:
    """Backward of every group; the mean loss per label, over all groups and by number of passes."""
    config = run.config
    seed = config.train.seed
    counts = pass_numbers(seed, step, len(batches), config.method.passes)
    total, sums = 0.0, dict[int, tuple[float, int]]()
    for batch, share, passes in zip(batches, run.shares, counts, strict=True):
        row = torch.arange(share.start, share.stop)
        at = Step(seed, step, row, step / config.train.steps, passes)
        with autocast(config.train.dtype, run.device):
            loss = run.method.loss(run.model, batch, config.method, at)
        (loss / labels).backward()  # type: ignore[no-untyped-call]
        value, (old, count) = float(loss.detach()), sums.get(passes, (0.0, 0))
        sums[passes] = (old + value, count + int(run.method.labels(batch, config.method).sum()))
        total += value
    return total / labels, {str(passes): value / count for passes, (value, count) in sorted(sums.items())}


@torch.no_grad()
def validate(run: Run) -> dict[str, float]:
    """Mean over the labels of the held-out rows of everything the method reports."""
    config = run.config
    size, count = config.train.group_rows, min(config.train.validation_rows, run.validation_rows.rows)
    sums, labels = dict[str, Tensor | float](), 0
    for first in range(0, count, size):
        batch = to_device(run.validation_rows.batch(first, min(size, count - first)), run.device)
        row = torch.arange(first, first + len(batch.tokens))
        at = Step(config.train.seed, VALIDATION_STEP, row, 1.0, config.method.passes)
        with autocast(config.train.dtype, run.device):
            for name, value in run.method.validate(run.model, batch, config.method, at).items():
                sums[name] = sums.get(name, 0.0) + value
        labels += int(run.method.labels(batch, config.method).sum())
    return {name: float(value) / labels for name, value in sums.items()}


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch where the model is; the copy to a GPU does not hold up the program, if the batch is pinned."""
    return Batch(*(part.to(device, non_blocking=True) for part in batch))


def autocast(dtype: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """bf16 compute over fp32 master weights (M17); nothing for float32."""
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[str]]:
    """A list that fills when SIGINT or SIGTERM arrives; a second signal acts as usual."""
    caught: list[str] = []
    previous: dict[int, Any] = {}

    def remember(number: int, frame: FrameType | None) -> None:
        caught.append(signal.Signals(number).name)
        signal.signal(number, previous[number])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, remember)
    except ValueError:  # not the main thread: signals are somebody else's
        previous.clear()
    try:
        yield caught
    finally:
        for caught_number, handler in previous.items():
            signal.signal(caught_number, handler)
