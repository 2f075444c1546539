"""What a run says about itself: `metrics.jsonl`, one JSON object a line, and one line on the terminal.

A line of metrics is a step (`step`, `loss`, ...), a validation (`step`, `validation`: {name: mean}) or, once at step 1,
the data (`data`: its rows and the share of their positions that hold a document). `data_wait` is how many seconds the
step waited for its batches, `data_wait_share` the share of its time, `data_wait_longest` the longest wait of a step
since the line before. `tflops` are the useful operations a second of one device (`flops.py`), `matmul_share` is their
share of the rate of a large matrix product, measured as the run began.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from freda.files import write_whole


class MetricsFile:
    """Appends to `metrics.jsonl`; a resumed run first drops the lines of steps it will do again.

    `silent`: of several processes all but one write nothing.
    """

    def __init__(self, path: Path, *, steps_done: int, silent: bool = False) -> None:
        self.path, self.silent = path, silent
        if path.exists() and not silent:
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= steps_done]
            write_whole(path, "".join(line + "\n" for line in kept))

    def write(self, numbers: dict[str, Any]) -> None:
        """Add one line; it is on disk when this returns."""
        if self.silent:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(numbers) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a run, without one that a crash cut short."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if _step_of(line) < float("inf")]


def _step_of(line: str) -> float:
    """The step of a line; a line cut short by a crash counts as never written."""
    try:
        return int(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")


class ProgressLine:
    """The line `name  step 120/400  loss 1.234 ...`: redrawn in place on a terminal, now and then printed elsewhere."""

    PLAIN_INTERVAL = 10.0  # seconds between lines when stderr is not a terminal

    def __init__(self, name: str, steps: int, *, silent: bool = False) -> None:
        self.name, self.steps = name, steps
        self.console = Console(stderr=True, quiet=silent)
        self.silent = silent
        self.live = Live(console=self.console, refresh_per_second=8)
        self.printed = time.monotonic()

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self.silent:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal and not self.silent:
            self.live.stop()

    def show(self, step: int, numbers: dict[str, Any], seconds_left: float) -> None:
        """Draw the state after `step` steps."""
        if self.silent:
            return
        line = (
            f"{self.name}  step {step}/{self.steps}  loss {numbers['loss']:.3f}  lr {numbers['lr']:.1e}  "
            f"{numbers['tokens_per_s']:,.0f} tokens/s  {seconds_left:.0f} s left"
        )
        if self.console.is_terminal:
            self.live.update(Text(line))
        elif time.monotonic() - self.printed > self.PLAIN_INTERVAL or step == self.steps:
            self.printed = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    def note(self, message: str) -> None:
        """A line that stays."""
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)
