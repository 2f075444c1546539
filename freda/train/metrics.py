"""What a run says about itself: `metrics.jsonl`, one JSON object a line, one line on the terminal, and trackers.

A line of metrics is a step (`step`, `loss`, ...), a validation (`step`, `validation`: {name: mean}) or, once at step 1,
the data (`data`: its rows and the share of their positions that hold a document). `data_wait` is how many seconds the
step waited for its batches, `data_wait_share` the share of its time, `data_wait_longest` the longest wait of a step
since the line before. `tflops` are the useful operations a second of one device (`Method.flops`), `matmul_share` is
their share of the rate of a large matrix product, measured as the run began. TensorBoard and Weights & Biases get the
same numbers; there a resumed run continues under the same name, and the steps it does again are written again.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from freda.errors import missing_package
from freda.files import parse_json, read_text, write_whole
from freda.sections import to_dict
from freda.train.config import RunConfig


def metrics_writer(config: RunConfig, folder: Path, steps_done: int) -> Callable[[dict[str, Any]], None]:
    """A function that writes a line of metrics, which is then on disk, and tells the trackers. First, the lines of
    steps that a resumed run will do again are dropped."""
    path, trackers = folder / "metrics.jsonl", make_trackers(config, folder)
    if path.exists():
        kept = [line for line in read_text(path, "replace").splitlines() if _step_of(line) <= steps_done]
        write_whole(path, "".join(line + "\n" for line in kept))

    def write(numbers: dict[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(numbers) + "\n")
        for track in trackers:
            track(numbers["step"], dict(scalars(numbers)))

    return write


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a run, without one that a crash cut short."""
    lines = read_text(path, "replace").splitlines()
    return [parse_json(line) for line in lines if _step_of(line) < float("inf")]


def _step_of(line: str) -> float:
    """The step of a line; a line cut short by a crash counts as never written."""
    try:
        return int(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return float("inf")


class ProgressLine:
    """The line `name  step 120/400  loss 1.234 ...`: redrawn in place on a terminal, within the context `live`; now and
    then printed elsewhere."""

    PLAIN_INTERVAL = 10.0  # seconds between lines when stderr is not a terminal

    def __init__(self, name: str, steps: int, *, silent: bool = False) -> None:
        self.name, self.steps, self.silent = name, steps, silent
        self.console, self.printed = Console(stderr=True, quiet=silent), time.monotonic()
        drawn = self.console.is_terminal and not silent
        self.live = Live(console=self.console, refresh_per_second=8) if drawn else contextlib.nullcontext()

    def show(self, step: int, numbers: dict[str, Any], seconds_left: float) -> None:
        """Draw the state after `step` steps."""
        line = f"{self.name}  step {step}/{self.steps}  loss {numbers['loss']:.3f}  lr {numbers['lr']:.1e}"
        line += f"  {numbers['tokens_per_s']:,.0f} tokens/s  {seconds_left:.0f} s left"
        due = time.monotonic() - self.printed > self.PLAIN_INTERVAL or step == self.steps
        if isinstance(self.live, Live):
            self.live.update(Text(line))
        elif due and not self.silent:
            self.printed = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    def note(self, message: str) -> None:
        """Print a line that stays."""
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)


Tracker = Callable[[int, Mapping[str, float]], None]  # a step and its numbers


def make_trackers(config: RunConfig, folder: Path) -> list[Tracker]:
    """The trackers that the config asks for."""
    made = [_tensorboard(folder)] if config.train.tensorboard else []
    return [*made, _wandb(config, folder)] if config.train.wandb else made


def scalars(numbers: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """A line of metrics as flat names with numbers: `validation/loss`."""
    for name, value in numbers.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            yield f"{prefix}{name}", float(value)


def _tensorboard(folder: Path) -> Tracker:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise missing_package("tensorboard", "track") from None
    writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def track(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return track


def _wandb(config: RunConfig, folder: Path) -> Tracker:
    try:
        import wandb
    except ImportError:
        raise missing_package("wandb", "track") from None
    name, project = folder.name, config.train.wandb
    run = wandb.init(project=project, name=name, id=name, resume="allow", dir=str(folder), config=to_dict(config))
    return lambda step, numbers: run.log(dict(numbers), step=step)
