"""Metrics for those who watch elsewhere: TensorBoard files in the run folder, Weights & Biases on the net.

Both get the numbers of `metrics.jsonl`, which stays the record of a run. A resumed run goes on under the same name; the
steps it does again are written again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from freda.errors import missing_package
from freda.sections import to_dict
from freda.train.config import RunConfig

Tracker = Callable[[int, Mapping[str, float]], None]  # a step and its numbers


def make_trackers(config: RunConfig, folder: Path) -> list[Tracker]:
    """Those that the config asks for."""
    trackers = []
    if config.train.tensorboard:
        trackers.append(_tensorboard(folder))
    if config.train.wandb:
        trackers.append(_wandb(config.train.wandb, config, folder))
    return trackers


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


def _wandb(project: str, config: RunConfig, folder: Path) -> Tracker:
    try:
        import wandb
    except ImportError:
        raise missing_package("wandb", "track") from None
    name = folder.name
    run = wandb.init(project=project, name=name, id=name, resume="allow", dir=str(folder), config=to_dict(config))

    def track(step: int, numbers: Mapping[str, float]) -> None:
        run.log(dict(numbers), step=step)

    return track
