"""The tables of a sweep, from its `sweep.json` alone: pure functions of the points, written as CSV and Markdown.

A score of several tasks is the mean over the tasks of a kind, overall the mean over the kinds, as the paper has it.
Several models of a system are seeds: the score is their mean, its error the standard error over them; with one model it
is that of the questions asked, where two tasks that ask the same questions are no two independent samples.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from freda.eval.config import SweepConfig, SystemConfig
from freda.eval.report import published
from freda.eval.report.compare import Compared, compared
from freda.eval.sweep import NEVER, PARTS, Point, Setting, canonical, main_setting
from freda.methods import METHODS
from freda.sections import build

OVERALL = "overall"
MATCHED = 0.5  # points below the baseline's best that still match it: less is within the noise of any benchmark here
SAME_QUESTIONS = {"humaneval", "humaneval_plus"}  # one set of questions, two sets of tests


class WithError(NamedTuple):
    """A number and its standard error; two columns of a CSV file."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ± {self.error:.2f}"


class Interval(NamedTuple):
    """A difference and its 95% interval; three columns of a CSV file."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


Cell = str | int | float | WithError | Interval | None


class Table(NamedTuple):
    """Rows under a heading; numbers are percent unless the heading says otherwise."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    note: str = ""
    shown: list[tuple[Cell, ...]] | None = None  # the rows that Markdown shows, if not all


class Score(NamedTuple):
    """Percent of right answers, its standard error, and tokens per forward."""

    accuracy: float
    error: float
    tpf: float


class Sweep:
    """The points of a sweep and how to look at them."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        config = content["config"]
        self.points: list[Point] = content["points"]
        self.stability: list[dict[str, Any]] = content["stability"]
        self.tasks: dict[str, dict[str, Any]] = content["tasks"]
        self.config: SweepConfig = build(SweepConfig, config["sweep"], "sweep.")
        self.systems: dict[str, SystemConfig] = {
            name: build(SystemConfig, values, f"system.{name}.") for name, values in config["system"].items()
        }
        self.methods = {name: METHODS[about["method"]] for name, about in content["systems"].items()}
        self.block_size = {name: int(about["block_size"]) for name, about in content["systems"].items()}
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
        """What a part of the sweep wants of a system, in its order."""
        own, method = self.systems[system], self.methods[system]
        wanted = [canonical(s, own, method) for s in PARTS[part](self.config, own, method, self.block_size[system])]
        return [s for s in dict.fromkeys(wanted) if any(p.setting == s and p.system == system for p in self.points)]

    def main(self, system: str) -> Setting:
        """The setting of the main table."""
        return main_setting(self.systems[system], self.methods[system])

    def score(self, system: str, panel: str, setting: Setting) -> Score | None:
        """The score of a kind, of all kinds or of one task; None if it was not measured."""
        kinds = self.panels()
        groups = [tasks for tasks in kinds.values() if tasks] if panel == OVERALL else [kinds.get(panel, [panel])]
        seeds = [self._seed(system, model, groups, setting) for model in range(len(self.systems[system].models))]
        found = [seed for seed in seeds if seed is not None]
        if not found or len(found) < len(seeds):
            return None
        accuracy, error, tpf = (statistics.fmean(values) for values in zip(*found, strict=True))
        if len(found) > 1:
            error = statistics.stdev(seed.accuracy for seed in found) / math.sqrt(len(found))
        return Score(accuracy, error, tpf)

    def _seed(self, system: str, model: int, groups: Sequence[Sequence[str]], setting: Setting) -> Score | None:
        """One model: mean over the groups of the means over their tasks."""
        means = []
        for tasks in groups:
            found = [self.by_place.get((system, model, task, setting)) for task in tasks]
            points = [point for point in found if point is not None]
            if len(points) < len(tasks):
                return None
            error = math.sqrt(sum(covariance(one, other) for one in points for other in points)) / len(points)
            share, tpf = (statistics.fmean(getattr(p, name) for p in points) for name in ("accuracy", "tpf"))
            means.append(Score(100 * share, 100 * error, tpf))
        accuracy, _, tpf = (statistics.fmean(values) for values in zip(*means, strict=True))
        return Score(accuracy, math.sqrt(sum(mean.error**2 for mean in means)) / len(means), tpf)

    def paired(self, system: str, task: str) -> Compared | None:
        """The system against the baseline, question by question, with the main settings. Several seeds answer the same
        questions: what is compared is the share of them that has a question right."""
        if self.baseline is None or system == self.baseline:
            return None
        asked = [self.checksums.get(f"{name}/{task}") for name in (self.baseline, system)]
        first, second = (self._shares(name, task) for name in (self.baseline, system))
        if first is None or second is None or asked[0] != asked[1] or len(first) != len(second):
            return None
        return compared(list(zip(first, second, strict=True)))

    def paired_mean(self, system: str, tasks: Sequence[str]) -> Interval | None:
        """The mean of the tasks' differences; errors are independent but for tasks that ask the same questions."""
        found = [self.paired(system, task) for task in tasks]
        known = [one for one in found if one is not None]
        if not known or len(known) < len(found):
            return None
        mean = statistics.fmean(one.difference for one in known)
        middle = statistics.fmean((one.low + one.high) / 2 for one in known)
        halves = {task: (one.high - one.low) / 2 for task, one in zip(tasks, known, strict=True)}
        shared = sum(halves.pop(task, 0.0) for task in SAME_QUESTIONS)
        half = math.hypot(shared, *halves.values()) / len(known)
        return Interval(*(round(100 * value, 2) for value in (mean, middle - half, middle + half)))

    def _shares(self, system: str, task: str) -> list[float] | None:
        """The share of the system's models that has each question right; None if one of them was not measured."""
        places = [(system, model, task, self.main(system)) for model in range(len(self.systems[system].models))]
        if any(place not in self.by_place for place in places):
            return None
        answers = zip(*(self.by_place[place].right for place in places), strict=True)
        return [statistics.fmean(map(int, seeds)) for seeds in answers]


def covariance(one: Point, other: Point) -> float:
    """Of the shares of right answers of one model on two tasks: none, unless they ask the same questions."""
    if one.task == other.task:
        return one.standard_error**2
    if {one.task, other.task} != SAME_QUESTIONS or len(one.right) != len(other.right):
        return 0.0
    both = statistics.fmean(a == b == "1" for a, b in zip(one.right, other.right, strict=True))
    return (both - one.accuracy * other.accuracy) / one.n


# -- the parts -------------------------------------------------------------------------------------------------------


def main_table(sweep: Sweep) -> Table:
    """Table main_results: every system on every task, and its paired difference from the baseline."""
    header = ["system", "passes", "threshold", *sweep.tasks, "average", "tokens per forward"]
    averaged = ["average"] if len(sweep.tasks) > 1 else []
    if sweep.baseline:
        header += [f"{task} − {sweep.baseline}" for task in (*sweep.tasks, *averaged)]
    rows: list[tuple[Cell, ...]] = []
    for system in sweep.systems:
        setting = sweep.main(system)
        scores = [sweep.score(system, task, setting) for task in sweep.tasks]
        known = [score.accuracy for score in scores if score is not None]
        speed = [s.tpf for s, task in zip(scores, sweep.tasks, strict=True) if s and not sweep.tasks[task]["choices"]]
        how = (setting.passes, setting.threshold) if sweep.methods[system].DRAFTS else (None, None)
        shown: list[Cell] = [system, *how, *map(with_error, scores)]
        shown += [mean_of(known), two_digits(statistics.fmean(speed)) if speed else None]
        if sweep.baseline:
            shown += [interval(sweep.paired(system, task)) for task in sweep.tasks]
            shown += [sweep.paired_mean(system, list(sweep.tasks)) for _ in averaged]
        rows.append(tuple(shown))
    places = [published.TASKS.index(task) if task in published.TASKS else None for task in sweep.tasks]
    if any(place is not None for place in places):
        for name, values in published.MAIN.items():
            cells = [None if place is None else values[place] for place in places]
            known = [cell for cell in cells if cell is not None]
            padding = [None] * (len(header) - 4 - len(cells))
            rows.append((f"paper: {name}", None, None, *cells, mean_of(known), *padding))
    note = (
        "Percent of right answers ± standard error, over the models of a system that has several, else over the "
        "questions; differences in points, paired by question, with 95% intervals over the questions."
    )
    return Table("Main results", tuple(header), rows, note)


def passes_table(sweep: Sweep) -> Table:
    """Figure iter-scaling: accuracy against the number of passes, by kind and overall."""
    rows: list[tuple[Cell, ...]] = []
    for panel in sweep.panels():
        for system in sweep.systems:
            for setting in sweep.settings("passes", system):
                score = sweep.score(system, panel, setting)
                if score is not None:
                    stop = "off" if setting.threshold >= NEVER else f"{setting.threshold:g}"
                    cells = (two_digits(score.accuracy), two_digits(score.error), two_digits(score.tpf))
                    rows.append((panel, system, setting.passes, stop, *cells))
    if OVERALL in papers_panels(sweep):
        rows += [(OVERALL, "paper", passes, None, value, None, None) for passes, value in published.PASSES.items()]
    header = ("panel", "system", "passes", "early stop", "accuracy", "standard error", "tokens per forward")
    note = (
        "The paper gives overall accuracy at one refinement step and after five, in words. It does not say whether its "
        "first step is our first pass or our second: the numbers stand at passes 1 and 5."
    )
    return Table("Accuracy against passes", header, rows, note)


def pareto_table(sweep: Sweep) -> Table:
    """Figure pareto-frontier: every point, and whether no other of its system is both faster and better."""
    rows: list[tuple[Cell, ...]] = []
    for panel in pareto_panels(sweep):
        for system in sweep.systems:
            scores = pareto_scores(sweep, system, panel)
            best = envelope([score for _, score in scores])
            for setting, score in sorted(scores, key=lambda pair: pair[1].tpf):
                cells = (two_digits(score.tpf), two_digits(score.accuracy), two_digits(score.error))
                mark = "yes" if score in best else ""
                rows.append((panel, system, setting.passes, setting.threshold, *cells, mark))
    header = ("panel", "system", "passes", "threshold", "tokens per forward", "accuracy", "standard error", "frontier")
    note = "The frontier alone; all points are in the CSV file. Threshold 2 never stops early."
    return Table("Speed and quality", header, rows, note, [row for row in rows if row[-1]])


def speed_up_table(sweep: Sweep) -> Table:
    """How much faster each system is where it is as good as the baseline at its best."""
    rows: list[tuple[Cell, ...]] = []
    panels = pareto_panels(sweep)
    for system in sweep.systems:
        if sweep.baseline is None or system == sweep.baseline:
            continue
        ratios = [
            speed_up(*([s for _, s in pareto_scores(sweep, name, panel)] for name in (sweep.baseline, system)))
            for panel in panels
        ]
        known = [ratio for ratio in ratios if ratio is not None]
        mean = two_digits(statistics.fmean(known)) if ratios and len(known) == len(ratios) else None
        rows.append((system, *(two_digits(ratio) for ratio in ratios), mean))
    if sweep.baseline is None:
        note = "No system of the sweep is marked as the baseline."
        return Table("Speed-up at matched accuracy", ("system", *panels, "mean"), [], note)
    low, high = published.SPEED_UP
    rows.append(("paper: average over diffusion baselines", *[None] * len(panels), f"{low} to {high}"))
    note = (
        f"Tokens per forward over those of {sweep.baseline}, each in its fastest setting within {MATCHED} points of "
        f"the best accuracy of {sweep.baseline}; settings that were measured. None: never as good."
    )
    return Table("Speed-up at matched accuracy", ("system", *panels, "mean"), rows, note)


def stability_table(sweep: Sweep) -> Table:
    """What every further pass changes, and which answers it turns."""
    rows: list[tuple[Cell, ...]] = []
    for found in sweep.stability:
        for row in found["rows"]:
            shares = tuple(two_digits(100 * row[name]) for name in ("right", "changed", "mended", "spoiled", "kept"))
            turned = flips(sweep, found["system"], found["model"], found["task"], int(row["pass"]))
            rows.append((found["system"], found["model"], found["task"], row["pass"], *shares, *turned))
    header = ("system", "model", "task", "pass", "right", "changed", "mended", "spoiled", "clean draft kept")
    note = (
        "Percent of the tokens of published answers, each block over its true prefix, no early stop, one candidate. "
        "Answers: generated ones that this number of passes gets right and one pass less does not, and the other way "
        "round, decoded as in the part on passes, early stop included."
    )
    return Table("Stability", (*header, "answers mended", "answers spoiled"), rows, note)


def tau_table(sweep: Sweep) -> Table:
    """Table alpha_ablation."""
    rows: list[tuple[Cell, ...]] = []
    for system in sweep.systems:
        if not sweep.methods[system].REFINES:
            continue
        scores = sweep.methods[system].SCORES
        for setting in sweep.settings("tau", system):
            paper = published.TAU.get(setting.tau) if scores else published.SELF_REFINE
            rows.append((system, setting.tau if scores else None, *_beside_paper(sweep, system, setting, paper)))
    return Table("Weight of the scorer", ("system", "τ", *_panel_headings(sweep)), rows)


def width_table(sweep: Sweep) -> Table:
    """Table bon_width_ablation."""
    rows: list[tuple[Cell, ...]] = []
    for system in sweep.systems:
        for setting in sweep.settings("width", system):
            paper = published.WIDTH.get((setting.passes, setting.width))
            rows.append((system, setting.passes, setting.width, *_beside_paper(sweep, system, setting, paper)))
    return Table("Number of candidates", ("system", "passes", "width", *_panel_headings(sweep)), rows)


TABLES = {
    "main": [main_table],
    "passes": [passes_table],
    "pareto": [pareto_table, speed_up_table],
    "stability": [stability_table],
    "tau": [tau_table],
    "width": [width_table],
}


def papers_panels(sweep: Sweep) -> list[str]:
    """The panels whose tasks are those of the paper's: others must not stand beside its numbers."""
    panels = sweep.panels()
    kinds = {panel: set(tasks) for panel, tasks in panels.items() if panel != OVERALL}
    alike = [panel for panel, tasks in kinds.items() if tasks == published.PANEL_TASKS.get(panel)]
    return [*alike, OVERALL] if kinds == published.PANEL_TASKS else alike


def _panel_headings(sweep: Sweep) -> list[str]:
    return [*sweep.panels(), *(f"paper: {panel}" for panel in papers_panels(sweep))]


def _beside_paper(sweep: Sweep, system: str, setting: Setting, paper: Sequence[float] | None) -> list[Cell]:
    panels = sweep.panels()
    ours = [with_error(sweep.score(system, panel, setting)) for panel in panels]
    places = [published.PANELS.index(panel) for panel in papers_panels(sweep)]
    return [*ours, *(None if paper is None else paper[place] for place in places)]


# -- the Pareto frontier ---------------------------------------------------------------------------------------------


def pareto_panels(sweep: Sweep) -> list[str]:
    """One for each generated task."""
    return [task for tasks in sweep.panels().values() for task in tasks]


def pareto_scores(sweep: Sweep, system: str, panel: str) -> list[tuple[Setting, Score]]:
    """All points of a system."""
    found = [(setting, sweep.score(system, panel, setting)) for setting in sweep.settings("pareto", system)]
    return [(setting, score) for setting, score in found if score is not None]


def envelope(scores: Sequence[Score]) -> list[Score]:
    """The scores that no other beats in both accuracy and speed, fastest first."""
    best: list[Score] = []
    for score in sorted(scores, key=lambda s: (-s.tpf, -s.accuracy)):
        if not best or score.accuracy > best[-1].accuracy:
            best.append(score)
    return best


def speed_up(baseline: Sequence[Score], system: Sequence[Score]) -> float | None:
    """Tokens per forward of the system over the baseline's, where both are as good as the baseline at its best."""
    if not baseline:
        return None
    wanted = max(score.accuracy for score in baseline) - MATCHED
    own, other = (max((s.tpf for s in scores if s.accuracy >= wanted), default=0.0) for scores in (baseline, system))
    return other / own if other else None


def flips(sweep: Sweep, system: str, model: int, task: str, passes: int) -> tuple[Cell, Cell]:
    """Answers that `passes` passes mend and spoil, against one pass less; from the part on passes."""
    by_passes = {setting.passes: setting for setting in sweep.settings("passes", system)}
    pair = [sweep.by_place.get((system, model, task, by_passes[k])) for k in (passes - 1, passes) if k in by_passes]
    if len(pair) < 2 or pair[0] is None or pair[1] is None:
        return None, None
    both = list(zip(pair[0].right, pair[1].right, strict=True))
    return both.count(("0", "1")), both.count(("1", "0"))


# -- writing ---------------------------------------------------------------------------------------------------------


def with_error(score: Score | None) -> Cell:
    """A score as `97.20 ± 0.74`."""
    return None if score is None else WithError(round(score.accuracy, 2), round(score.error, 2))


def interval(found: Compared | None) -> Cell:
    """A difference as `+2.00 (+0.61 to +3.39)`."""
    if found is None:
        return None
    return Interval(*(round(100 * value, 2) for value in (found.difference, found.low, found.high)))


def two_digits(value: float | None) -> Cell:
    """Rounded to what a table shows."""
    return None if value is None else round(value, 2)


def mean_of(values: Sequence[float]) -> Cell:
    """The mean, rounded; None of nothing."""
    return two_digits(statistics.fmean(values)) if values else None


def as_csv(table: Table) -> str:
    """The rows as CSV, one number in a column."""
    kinds = [next((type(c) for c in column if isinstance(c, tuple)), None) for column in zip(*table.rows, strict=True)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = zip(table.header, kinds or [None] * len(table.header), strict=True)
    writer.writerow([heading for name, kind in names for heading in (name, *(f"{name}{more}" for more in MORE[kind]))])
    for row in table.rows:
        cells = zip(row, kinds, strict=True)
        writer.writerow([value for cell, kind in cells for value in _numbers(cell, len(MORE[kind]))])
    return text.getvalue()


MORE: dict[type | None, tuple[str, ...]] = {None: (), WithError: (" ±",), Interval: (" low", " high")}


def _numbers(cell: Cell, more: int) -> list[Cell]:
    return list(cell) if isinstance(cell, tuple) else [cell, *[None] * more]


def as_markdown(table: Table) -> str:
    """The rows as a Markdown table under its title."""
    rows = table.rows if table.shown is None else table.shown
    numbers = [all(not isinstance(row[place], str) for row in rows) for place in range(len(table.header))]
    lines = [f"### {table.title}", "", _line(table.header)]
    lines.append("|" + "|".join("---:" if number else "---" for number in numbers) + "|")
    lines += [_line([_shown(cell) for cell in row]) for row in rows]
    return "\n".join([*lines, *(["", table.note] if table.note else []), ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(cell: Cell) -> str:
    if cell is None:
        return "–"
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)
