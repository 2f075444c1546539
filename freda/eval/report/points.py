"""What a sweep has measured: its points, the settings that each of its parts asks for, and scores of several points.

Nothing here, nor in what it imports, loads torch: `sweep.json` alone is enough to draw every table and figure.

A score of several tasks is the mean over the tasks of a kind, and the overall score the mean over the kinds, as in the
paper. Several models of a system are seeds: their score is the mean, its error the standard error over them. With one
model the error is that of the questions, where two tasks with the same questions are not independent samples.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from freda.errors import FredaError, require
from freda.eval.config import SweepConfig, SystemConfig
from freda.eval.report.results import Compared, compared
from freda.files import located, read_json
from freda.sections import build

FILE = "sweep.json"
FORMAT_VERSION = 1
NEVER = 2.0  # a threshold that no probability reaches
OVERALL = "overall"
SAME_QUESTIONS = {"humaneval", "humaneval_plus"}  # one set of questions, two sets of tests


class Setting(NamedTuple):
    """How a system decodes at one point of a sweep."""

    passes: int
    threshold: float
    width: int
    tau: float

    @property
    def folder(self) -> str:
        """The name of the folder that holds its files."""
        return f"passes{self.passes}-threshold{self.threshold:g}-width{self.width}-tau{self.tau:g}"


@dataclass(frozen=True)
class Point:
    """One evaluation: a model of a system on a task with one setting."""

    system: str
    model: int  # which of the system's models
    task: str
    setting: Setting
    n: int
    accuracy: float
    standard_error: float
    nfe: float
    tpf: float
    seconds: float
    right: str  # which answers are right, in the order of the questions: a digit 1 or 0 for each


class Decoding(NamedTuple):
    """What a sweep must know about the method of a system."""

    axes: tuple[str, ...]  # the fields of `Setting` that change its decoding
    refines: bool  # True if later passes revise tokens; otherwise they only reveal further ones
    block_size: int

    @property
    def drafts(self) -> bool:
        """True if it makes several passes over a block."""
        return "passes" in self.axes

    @property
    def scores(self) -> bool:
        """True if a scorer chooses among candidates."""
        return "tau" in self.axes


WITHOUT_AXES = {  # files written before `axes` and `refines` were stored in them
    "autoregressive": {"axes": (), "refines": False},
    "block-diffusion": {"axes": ("passes", "threshold"), "refines": False},
    "self-refine": {"axes": ("passes", "threshold"), "refines": True},
    "best-of-n": {"axes": Setting._fields, "refines": True},
}


def read_sweep(path: Path) -> dict[str, Any]:
    """The content of a `sweep.json`, or of the folder that holds one; the points as `Point`."""
    path = path / FILE if path.is_dir() else path
    require(path.exists(), f"there is no {path}; make it with freda sweep CONFIG --out FOLDER")
    with located(path.parent), told_if_damaged(path):
        content = read_json(path)
        version = content.get("format")
        require(version == FORMAT_VERSION, f"{path} has format {version}; this version reads {FORMAT_VERSION}")
        missing = [name for name in ("config", "systems", "tasks", "checksums", "stability") if name not in content]
        require(not missing, f"{path} has no {', '.join(missing)}; make it again with freda sweep")
        content["points"] = [_point(point) for point in content["points"]]
    return dict(content)


@contextlib.contextmanager
def told_if_damaged(path: Path) -> Iterator[None]:
    """Say of a file whose values are of the wrong kind that it is damaged; --debug shows where it was noticed."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
        raise FredaError(f"{path} is not the file of a sweep ({error}); make it again with freda sweep") from error


def _point(values: Mapping[str, Any]) -> Point:
    """A point of the file; TypeError if a value is not of the kind that tables and figures count with."""
    point = Point(**{**values, "setting": Setting(**values["setting"])})
    numbers = [point.accuracy, point.standard_error, point.nfe, point.tpf, point.seconds, *point.setting]
    if not all(isinstance(one, int | float) for one in (point.model, point.n, *numbers)):
        raise TypeError(f"a point with {numbers}")
    if not all(isinstance(one, str) for one in (point.system, point.task, point.right)) or set(point.right) - {
        "0",
        "1",
    }:
        raise TypeError(f"a point of {point.system!r:.40} on {point.task!r:.40}")
    return point


# -- which settings a part of a sweep measures -----------------------------------------------------------------------


def main_setting(system: SystemConfig, decoding: Decoding) -> Setting:
    """The setting of the main table: the system's own."""
    return Setting(system.passes if decoding.drafts else 1, system.threshold, system.width, system.tau)


def _passes(sweep: SweepConfig, own: Setting, decoding: Decoding) -> list[Setting]:
    """Figure iter-scaling: early stop by the threshold with few passes, none with more."""
    if not decoding.drafts:
        return []
    if not decoding.refines:
        return [own._replace(passes=k, threshold=NEVER) for k in sweep.passes if k <= decoding.block_size]
    stops = sweep.early_stop_passes
    return [own._replace(passes=k, threshold=own.threshold if k <= stops else NEVER) for k in sweep.passes]


def _pareto(sweep: SweepConfig, own: Setting, decoding: Decoding) -> list[Setting]:
    """Figure pareto-frontier: the joint sweep over passes and thresholds. A system that reveals and never revises has
    its static schedules of 1 to B passes and the threshold schedule of B passes."""
    if not decoding.drafts:
        return [own]
    if not decoding.refines:
        static = [own._replace(passes=k, threshold=NEVER) for k in range(1, decoding.block_size + 1)]
        return static + [own._replace(passes=decoding.block_size, threshold=eta) for eta in sweep.thresholds]
    return [own._replace(passes=k, threshold=eta) for k in sweep.passes for eta in sweep.thresholds]


PARTS: Mapping[str, Callable[[SweepConfig, Setting, Decoding], list[Setting]]] = {
    "main": lambda sweep, own, decoding: [own],
    "passes": _passes,
    "pareto": _pareto,
    "stability": lambda sweep, own, decoding: [],  # measured on published answers, not on generated ones
    # Table alpha_ablation; a system without a scorer takes part with its main setting.
    "tau": lambda sweep, own, decoding: [own._replace(tau=t) for t in sweep.taus] if decoding.scores else [own],
    # Table bon_width_ablation, for systems with a scorer.
    "width": lambda sweep, own, decoding: [
        own._replace(passes=k, width=n) for k in sweep.width_passes for n in sweep.widths if decoding.scores
    ],
}


def settings_of(parts: Sequence[str], sweep: SweepConfig, system: SystemConfig, decoding: Decoding) -> list[Setting]:
    """The settings that parts of a sweep measure of a system, in the order of the parts. Values without effect (one
    pass commits everything, candidates compete from the second on) are the system's own: equal decoding is one
    point."""
    own, found = main_setting(system, decoding), dict[Setting, None]()
    for setting in (setting for part in parts for setting in PARTS[part](sweep, own, decoding)):
        live = set(decoding.axes) & ({"passes"} if setting.passes == 1 else set(Setting._fields))
        found[own._replace(**{name: getattr(setting, name) for name in live})] = None
    return list(found)


class Score(NamedTuple):
    """Percent of right answers, its standard error, and tokens per forward."""

    accuracy: float
    error: float
    tpf: float


class Interval(NamedTuple):
    """A difference in points and its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


class Sweep:
    """The points of a sweep by system, task and setting, and scores made of them."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        config = content["config"]
        self.points: list[Point] = content["points"]
        self.stability: list[dict[str, Any]] = content["stability"]
        self.tasks: dict[str, dict[str, Any]] = content["tasks"]
        self.config: SweepConfig = build(SweepConfig, config["sweep"], "sweep.")
        self.systems, self.decoding = dict[str, SystemConfig](), dict[str, Decoding]()
        for name, values in config["system"].items():
            self.systems[name], about = build(SystemConfig, values, f"system.{name}."), content["systems"][name]
            about = WITHOUT_AXES.get(about["method"], {}) | about
            self.decoding[name] = Decoding(tuple(about["axes"]), about["refines"], about["block_size"])
        self.baseline = next((name for name, system in self.systems.items() if system.baseline), None)
        self.checksums: dict[str, str] = content.get("checksums", {})
        self.by_place = {(p.system, p.model, p.task, p.setting): p for p in self.points}

    def panels(self) -> dict[str, list[str]]:
        """The generated tasks by kind; and overall, where there are several kinds."""
        kinds: dict[str, list[str]] = {}
        for task, about in self.tasks.items():
            if not about["choices"]:
                kinds.setdefault(about["kind"], []).append(task)
        return kinds | ({OVERALL: []} if len(kinds) > 1 else {})

    def settings(self, part: str, system: str) -> list[Setting]:
        """The settings of a part that were measured with a system."""
        measured = {point.setting for point in self.points if point.system == system}
        wanted = settings_of([part], self.config, self.systems[system], self.decoding[system])
        return [setting for setting in wanted if setting in measured]

    def main(self, system: str) -> Setting:
        """The setting of the main table."""
        return main_setting(self.systems[system], self.decoding[system])

    def seeds(self, system: str, task: str, setting: Setting) -> list[Point]:
        """The points of all models of a system; none if one of them was not measured."""
        models = range(len(self.systems[system].models))
        places = [(system, model, task, setting) for model in models]
        return [self.by_place[place] for place in places] if all(place in self.by_place for place in places) else []

    def score(self, system: str, panel: str, setting: Setting) -> Score | None:
        """The score of a kind, of all kinds or of one task; None if it was not measured."""
        kinds = self.panels()
        groups = [tasks for tasks in kinds.values() if tasks] if panel == OVERALL else [kinds.get(panel, [panel])]
        points = {task: self.seeds(system, task, setting) for tasks in groups for task in tasks}
        if not all(points.values()):
            return None
        models = range(len(self.systems[system].models))
        found = [mean_score([[points[task][model] for task in tasks] for tasks in groups]) for model in models]
        accuracy, error, tpf = map(statistics.fmean, zip(*found, strict=True))
        if len(found) > 1:
            error = statistics.stdev(seed.accuracy for seed in found) / math.sqrt(len(found))
        return Score(accuracy, error, tpf)

    def scores(self, part: str, system: str, panel: str) -> list[tuple[Setting, Score]]:
        """The settings of a part that were measured, and their scores."""
        found = ((setting, self.score(system, panel, setting)) for setting in self.settings(part, system))
        return [(setting, score) for setting, score in found if score is not None]

    def paired(self, system: str, task: str) -> Compared | None:
        """The system against the baseline, question by question: the fraction of its seeds that are right."""
        if self.baseline is None or system == self.baseline:
            return None
        names = (self.baseline, system)
        seeds = [[point.right for point in self.seeds(name, task, self.main(name))] for name in names]
        first, second = ([statistics.fmean(map(int, marks)) for marks in zip(*one, strict=True)] for one in seeds)
        asked = {self.checksums.get(f"{name}/{task}") for name in names}
        if not first or len(first) != len(second) or len(asked) > 1:
            return None
        return compared(list(zip(first, second, strict=True)))

    def difference(self, system: str, tasks: Sequence[str]) -> Interval | None:
        """The mean over tasks of the differences from the baseline, in points with two digits. Errors of tasks are
        independent, except where they ask the same questions."""
        known = [one for task in tasks if (one := self.paired(system, task)) is not None]
        if not known or len(known) < len(tasks):
            return None
        mean = statistics.fmean(one.difference for one in known)
        middle = statistics.fmean((one.low + one.high) / 2 for one in known)
        halves = {task: (one.high - one.low) / 2 for task, one in zip(tasks, known, strict=True)}
        shared = sum(halves.pop(task, 0.0) for task in SAME_QUESTIONS)
        half = math.hypot(shared, *halves.values()) / len(known)
        return Interval(*(round(100 * value, 2) for value in (mean, middle - half, middle + half)))


def mean_score(groups: Sequence[Sequence[Point]]) -> Score:
    """The score of one model: the mean over the groups of the means over their tasks."""
    means = []
    for points in groups:
        error = math.sqrt(sum(covariance(one, other) for one in points for other in points)) / len(points)
        accuracy, tpf = (statistics.fmean(getattr(p, name) for p in points) for name in ("accuracy", "tpf"))
        means.append(Score(100 * accuracy, 100 * error, tpf))
    accuracy, _, tpf = map(statistics.fmean, zip(*means, strict=True))
    return Score(accuracy, math.hypot(*(mean.error for mean in means)) / len(means), tpf)


def covariance(one: Point, other: Point) -> float:
    """The covariance of one model's accuracies on two tasks: 0 unless they ask the same questions."""
    if one.task == other.task:
        return one.standard_error**2
    if {one.task, other.task} != SAME_QUESTIONS or len(one.right) != len(other.right):
        return 0.0
    both = statistics.fmean(a == b == "1" for a, b in zip(one.right, other.right, strict=True))
    return (both - one.accuracy * other.accuracy) / one.n
