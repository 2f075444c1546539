"""The tables of a sweep, pure functions of its points; and any table as CSV or Markdown."""

from __future__ import annotations

import csv
import io
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from freda.eval.report import published
from freda.eval.report.points import NEVER, OVERALL, Interval, Score, Setting, Sweep

MATCHED = 0.5  # points below the baseline's best that still match it: less is within the noise of any benchmark here


class WithError(NamedTuple):
    """A number and its standard error; two columns of a CSV file."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ± {self.error:.2f}"


Cell = str | int | float | WithError | Interval | None
Row = tuple[Cell, ...]
COLUMNS = {WithError: ("", " ±"), Interval: ("", " low", " high")}  # what is added to their headings in CSV


class Table(NamedTuple):
    """Rows under a heading; numbers are percent unless the heading says otherwise."""

    title: str
    header: tuple[str, ...]
    rows: list[Row]
    note: str = ""
    shown: list[Row] | None = None  # the rows that Markdown shows, if not all


def two_digits(value: float | None) -> Cell:
    """The number as a table shows it."""
    return None if value is None else round(value, 2)


def with_error(score: Score | None) -> Cell:
    """A score as `97.20 ± 0.74`."""
    return None if score is None else WithError(round(score.accuracy, 2), round(score.error, 2))


def mean_of(values: Sequence[float]) -> Cell:
    """The mean, rounded; None if there are no values."""
    return two_digits(statistics.fmean(values)) if values else None


def main_table(sweep: Sweep) -> Table:
    """Table main_results: every system on every task, and its paired difference from the baseline."""
    header = ["system", "passes", "threshold", *sweep.tasks, "average", "tokens per forward"]
    averaged = ["average"] if len(sweep.tasks) > 1 else []
    if sweep.baseline:
        header += [f"{task} − {sweep.baseline}" for task in (*sweep.tasks, *averaged)]
    rows: list[Row] = []
    for system in sweep.systems:
        setting = sweep.main(system)
        scores = {task: sweep.score(system, task, setting) for task in sweep.tasks}
        known = [score.accuracy for score in scores.values() if score is not None]
        speed = [score.tpf for task, score in scores.items() if score and not sweep.tasks[task]["choices"]]
        how = (setting.passes, setting.threshold) if sweep.decoding[system].drafts else (None, None)
        shown: list[Cell] = [system, *how, *map(with_error, scores.values()), mean_of(known), mean_of(speed)]
        if sweep.baseline:
            shown += [sweep.difference(system, [task]) for task in sweep.tasks]
            shown += [sweep.difference(system, list(sweep.tasks)) for _ in averaged]
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
    rows: list[Row] = []
    for panel, system in ((panel, system) for panel in sweep.panels() for system in sweep.systems):
        for setting, score in sweep.scores("passes", system, panel):
            stop = "off" if setting.threshold >= NEVER else f"{setting.threshold:g}"
            rows.append((panel, system, setting.passes, stop, *map(two_digits, score)))
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
    rows: list[Row] = []
    for panel, system in ((panel, system) for panel in pareto_panels(sweep) for system in sweep.systems):
        scores = sweep.scores("pareto", system, panel)
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
    panels, title = pareto_panels(sweep), "Speed-up at matched accuracy"
    header = ("system", *panels, "mean")
    if sweep.baseline is None:
        return Table(title, header, [], "No system of the sweep is marked as the baseline.")
    rows: list[Row] = []
    for system in (name for name in sweep.systems if name != sweep.baseline):
        found = [[sweep.scores("pareto", name, panel) for name in (sweep.baseline, system)] for panel in panels]
        ratios = [speed_up(*([score for _, score in scores] for scores in pair)) for pair in found]
        known = [ratio for ratio in ratios if ratio is not None]
        rows.append((system, *map(two_digits, ratios), mean_of(known) if len(known) == len(ratios) else None))
    low, high = published.SPEED_UP
    rows.append(("paper: average over diffusion baselines", *[None] * len(panels), f"{low} to {high}"))
    note = (
        f"Tokens per forward over those of {sweep.baseline}, each in its fastest setting within {MATCHED} points of "
        f"the best accuracy of {sweep.baseline}; settings that were measured. None: never as good."
    )
    return Table(title, header, rows, note)


def stability_table(sweep: Sweep) -> Table:
    """What every further pass changes, and which answers it turns."""
    rows: list[Row] = []
    for found in sweep.stability:
        for row in found["rows"]:
            tokens = tuple(two_digits(100 * row[name]) for name in ("right", "changed", "mended", "spoiled", "kept"))
            whole = tuple(two_digits(100 * row[name]) if name in row else None for name in ("blocks", "oracle"))
            turned = flips(sweep, found["system"], found["model"], found["task"], int(row["pass"]))
            rows.append((found["system"], found["model"], found["task"], row["pass"], *tokens, *whole, *turned))
    header = ("system", "model", "task", "pass", "right", "changed", "mended", "spoiled", "clean draft kept")
    note = (
        "Percent of the tokens of published answers, each block over its true prefix, no early stop, one candidate; "
        "then of their blocks, without and with a perfect choice among four candidates in this pass. "
        "Answers: generated ones that this number of passes gets right and one pass less does not, and the other way "
        "round, decoded as in the part on passes, early stop included."
    )
    blocks = ("blocks right", "with an oracle")
    return Table("Stability", (*header, *blocks, "answers mended", "answers spoiled"), rows, note)


def tau_table(sweep: Sweep) -> Table:
    """Table alpha_ablation: accuracy against the weight of the scorer."""
    rows: list[Row] = []
    for system in (name for name in sweep.systems if sweep.decoding[name].refines):
        scores = sweep.decoding[system].scores
        for setting in sweep.settings("tau", system):
            paper = published.TAU.get(setting.tau) if scores else published.SELF_REFINE
            rows.append((system, setting.tau if scores else None, *_beside_paper(sweep, system, setting, paper)))
    return Table("Weight of the scorer", ("system", "τ", *_panel_headings(sweep)), rows)


def width_table(sweep: Sweep) -> Table:
    """Table bon_width_ablation: accuracy against the number of candidates."""
    rows: list[Row] = []
    for system in sweep.systems:
        for setting in sweep.settings("width", system):
            paper = published.WIDTH.get((setting.passes, setting.width))
            rows.append((system, setting.passes, setting.width, *_beside_paper(sweep, system, setting, paper)))
    return Table("Number of candidates", ("system", "passes", "width", *_panel_headings(sweep)), rows)


TABLES: dict[str, list[Callable[[Sweep], Table]]] = {
    "main": [main_table],
    "passes": [passes_table],
    "pareto": [pareto_table, speed_up_table],
    "stability": [stability_table],
    "tau": [tau_table],
    "width": [width_table],
}


def papers_panels(sweep: Sweep) -> list[str]:
    """The panels with exactly the tasks of the paper's: others must not stand beside its numbers."""
    kinds = {panel: set(tasks) for panel, tasks in sweep.panels().items() if panel != OVERALL}
    alike = [panel for panel, tasks in kinds.items() if tasks == published.PANEL_TASKS.get(panel)]
    return [*alike, OVERALL] if kinds == published.PANEL_TASKS else alike


def _panel_headings(sweep: Sweep) -> list[str]:
    return [*sweep.panels(), *(f"paper: {panel}" for panel in papers_panels(sweep))]


def _beside_paper(sweep: Sweep, system: str, setting: Setting, paper: Sequence[float] | None) -> list[Cell]:
    ours = [with_error(sweep.score(system, panel, setting)) for panel in sweep.panels()]
    places = [published.PANELS.index(panel) for panel in papers_panels(sweep)]
    return [*ours, *(None if paper is None else paper[place] for place in places)]


def pareto_panels(sweep: Sweep) -> list[str]:
    """One panel for each generated task."""
    return [task for tasks in sweep.panels().values() for task in tasks]


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


# -- as text ---------------------------------------------------------------------------------------------------------


def as_csv(table: Table) -> str:
    """The rows as CSV, one number in a column."""
    by_column = zip(table.header, *table.rows, strict=True)
    columns = [next((COLUMNS[type(c)] for c in cells if isinstance(c, tuple)), ("",)) for cells in by_column]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([name + more for name, names in zip(table.header, columns, strict=True) for more in names])
    for row in table.rows:
        cells = (cell if isinstance(cell, tuple) else (cell,) for cell in row)
        padded = (itertools.zip_longest(names, cell) for names, cell in zip(columns, cells, strict=True))
        writer.writerow([value for pairs in padded for _, value in pairs])
    return text.getvalue()


def as_markdown(table: Table) -> str:
    """The rows as a Markdown table under its title."""
    rows = table.rows if table.shown is None else table.shown
    texts = [any(isinstance(row[place], str) for row in rows) for place in range(len(table.header))]
    marks = ["---" if is_text else "---:" for is_text in texts]
    first, *rest = (f"| {' | '.join(map(_shown, row))} |" for row in (table.header, *rows))
    note = ["", table.note] if table.note else []
    return "\n".join([f"### {table.title}", "", first, f"|{'|'.join(marks)}|", *rest, *note, ""])


def _shown(cell: Cell) -> str:
    if cell is None:
        return "–"
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)
