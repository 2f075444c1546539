"""`freda sweep --draw`: the tables of a sweep as CSV and Markdown, its figures as PNG and SVG, from `sweep.json` alone.

One colour is one system in all figures. Bands and bars are one standard error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from freda.errors import note
from freda.eval.report import published, tables
from freda.eval.report.points import NEVER, OVERALL, Score, Sweep, read_sweep, told_if_damaged
from freda.eval.report.tables import envelope, papers_panels, pareto_panels

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#595959")  # safe for colour blindness
RESERVED = ("autoregressive", "block-diffusion", "self-refine", "best-of-n")  # systems with a colour of their own
MARKERS, DASHES = "osD^vPX", ("-", "--", ":", "-.")
GREY = "#8c8c8c"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "freda",  # the same data, the same file
}
PANEL = (2.7, 2.35)  # inches
LEGEND_ENTRY = 1.45


def draw_sweep(source: Path, out: Path) -> list[Path]:
    """Write the tables and, where there is matplotlib, the figures of a sweep; returns their paths."""
    content, files = read_sweep(source), dict[Path, str]()
    with told_if_damaged(source):
        sweep = Sweep(content)
        tabled = {part: [table(sweep) for table in tables.TABLES[part]] for part in sweep.config.parts}
    for part, made in tabled.items():
        for name, table in zip((part, f"{part}-summary"), made, strict=False):
            files[out / f"{name}.csv"] = tables.as_csv(table)
        files[out / f"{part}.md"] = "\n".join(map(tables.as_markdown, made))
    out.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    if find_spec("matplotlib") is None:
        note(f"no figures without matplotlib; where it is installed: freda sweep --draw {source} --out FOLDER")
        return list(files)
    return [*files, *(path for part in sweep.config.parts for path in draw(sweep, part, out))]


def draw(sweep: Sweep, part: str, folder: Path) -> list[Path]:
    """Draw a part of the sweep as PNG and SVG; nothing where there is nothing to draw."""
    if part != "main" and not sweep.panels():
        return []  # likelihoods have no passes, thresholds or candidates
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = DRAWINGS[part](sweep)
        if figure is None:
            return []
        png, svg = folder / f"{part}.png", folder / f"{part}.svg"
        figure.savefig(png, dpi=200, metadata={"Software": None})
        figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return [png, svg]


def _panels(titles: Sequence[str], rows: int = 1) -> tuple[Any, list[Any]]:
    """A figure and its grid of titled panels, with room above for the legend that `_finish` adds."""
    from matplotlib.figure import Figure

    columns = -(-len(titles) // rows)
    figure = Figure((max(4.2, PANEL[0] * columns), PANEL[1] * rows + 0.45), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, title in itertools.zip_longest(axes.flat, titles):
        axis.set_visible(title is not None)
        axis.set_title(title or "")
    return figure, list(axes.flat[: len(titles)])


def _finish(figure: Any, axes: Sequence[Any], label: str, height: str = "right answers (%)") -> Any:
    """Label the axes, keep percent near 100 and below, and put one legend above all panels. An axis covers at least two
    points, so that differences of next to nothing look like it."""
    for axis in axes:
        axis.set_xlabel(label)
        bottom, top = axis.get_ylim()
        top = min(top, 100 + 0.06 * (100 - min(bottom, 98.0)))
        axis.set_ylim(min(bottom, top - 2.0), top)
    axes[0].set_ylabel(height)
    entries = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    fitting = max(1, int(figure.get_size_inches()[0] / LEGEND_ENTRY))
    figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=min(fitting, len(entries)))
    return figure


def look_of(sweep: Sweep, system: str) -> dict[str, Any]:
    """Colour and marker of a system. A reserved name looks the same in all sweeps; others take what is left."""
    taken = {name: place for place, name in enumerate(RESERVED) if name in sweep.systems}
    free = (place for place in itertools.count() if place not in taken.values())
    place = {name: taken[name] if name in taken else next(free) for name in sweep.systems}[system]
    size = max(3.0, 6.0 - 0.8 * list(sweep.systems).index(system))  # where curves lie on each other, the lower shows
    look = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
    return {**look, "label": system, "markersize": size}


def _curve(axis: Any, points: Sequence[tuple[float, Score]], **look: Any) -> None:
    """A line over (x, score) pairs with a band of one standard error; nothing without points."""
    if points:
        x, middle, error = zip(*((x, score.accuracy, score.error) for x, score in points), strict=True)
        axis.plot(x, middle, **look)
        low, high = ([m + sign * e for m, e in zip(middle, error, strict=True)] for sign in (-1, 1))
        axis.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _level(axis: Any, sweep: Sweep, system: str, panel: str) -> None:
    """A system without the varied setting, as a dashed level."""
    score = sweep.score(system, panel, sweep.main(system))
    if score is not None:
        axis.axhline(score.accuracy, linestyle="--", color=look_of(sweep, system)["color"], label=system, linewidth=1.1)


def _above(axis: Any, text: str, place: tuple[float, float], height: float, colour: str = "black") -> None:
    axis.annotate(text, place, (0, height), textcoords="offset points", ha="center", fontsize=7, color=colour)


# -- the parts -------------------------------------------------------------------------------------------------------


def main_figure(sweep: Sweep) -> Any:
    """Every system on every task, with error bars; the paper's numbers in grey where it has them."""
    rows = -(-len(sweep.tasks) // 4)
    figure, axes = _panels(list(sweep.tasks), rows=rows)
    first_of_row = axes[:: -(-len(axes) // rows)]
    for axis, task in zip(axes, sweep.tasks, strict=True):
        names: list[str] = []
        for system in sweep.systems:
            score = sweep.score(system, task, sweep.main(system))
            if score is not None:
                look = {**look_of(sweep, system), "label": None}
                axis.errorbar(score.accuracy, len(names), xerr=score.error, capsize=2.5, **look)
                _above(axis, f"{score.accuracy:.1f}", (score.accuracy, len(names)), 5)
                names.append(system)
        for name, values in published.MAIN.items() if task in published.TASKS else ():
            value = values[published.TASKS.index(task)]
            axis.plot(value, len(names), "|", color=GREY, markersize=9, markeredgewidth=2)
            _above(axis, f"{value:.1f}", (value, len(names)), 5, GREY)
            names.append(f"paper: {name}")
        axis.set_yticks(range(len(names)), names if axis in first_of_row else [])
        axis.set_ylim(len(names) - 0.4, -0.6)
        axis.margins(x=0.15)
        axis.set_xlabel("right answers (%)")
    return figure


def passes_figure(sweep: Sweep) -> Any:
    """Figure iter-scaling. Above the points: what the better of the refining systems has gained since one pass."""
    settings = [setting for system in sweep.systems for setting in sweep.settings("passes", system)]
    stops = {setting.passes for setting in settings if setting.threshold < NEVER}
    off = {setting.passes for setting in settings} - stops

    def curves(axis: Any, panel: str) -> None:
        best: dict[int, float] = {}
        for system in sweep.systems:
            known = [(setting.passes, score) for setting, score in sweep.scores("passes", system, panel)]
            if not known:
                _level(axis, sweep, system, panel)
            _curve(axis, known, **look_of(sweep, system))
            for passes, score in known if sweep.decoding[system].refines else ():
                best[passes] = max(best.get(passes, 0.0), score.accuracy)
        for passes in sorted(best)[1:]:
            _above(axis, f"{best[passes] - best[min(best)]:+.1f}", (passes, best[passes]), 6)
        if panel == OVERALL and panel in papers_panels(sweep):
            axis.plot(*zip(*published.PASSES.items(), strict=True), "--x", color=GREY, label="paper (4B)")
        if stops and off:  # a dotted line where the early stop is switched off
            axis.axvline((max(stops) + min(off)) / 2, color=GREY, linestyle=":", linewidth=1)
        axis.xaxis.get_major_locator().set_params(integer=True)

    return _by_kind(sweep, "passes per block", curves)


def pareto_figure(sweep: Sweep) -> Any:
    """Figure pareto-frontier: all points faint, the frontier as a line."""
    panels = pareto_panels(sweep)
    figure, axes = _panels(panels, rows=-(-len(panels) // 4))
    for axis, panel in zip(axes, panels, strict=True):
        for system in sweep.systems:
            scores, look = [score for _, score in sweep.scores("pareto", system, panel)], look_of(sweep, system)
            best = envelope(scores)
            axis.scatter([s.tpf for s in scores], [s.accuracy for s in scores], s=9, color=look["color"], alpha=0.25)
            axis.plot([s.tpf for s in best], [s.accuracy for s in best], **look)
            if best and system == sweep.baseline:
                axis.axhline(max(s.accuracy for s in best), color=look["color"], linestyle=":", linewidth=1)
        axis.margins(0.08)
    return _finish(figure, axes, "tokens per forward")


def stability_figure(sweep: Sweep) -> Any:
    """Tokens that each pass mends and spoils, and how much of a clean draft it keeps."""
    if not sweep.stability:
        return None
    figure, axes = _panels(("Right tokens", "Changed by a pass", "Clean draft kept"))
    tasks = list(dict.fromkeys(found["task"] for found in sweep.stability))
    dashes = dict(zip(tasks, itertools.cycle(DASHES), strict=False))
    spoiled = {"label": None, "alpha": 0.45, "markerfacecolor": "white"}
    for found in (found for found in sweep.stability if found["model"] == 0):  # one seed; the table has every one
        label = found["system"] if len(tasks) == 1 else f"{found['system']}, {found['task']}"
        look = look_of(sweep, found["system"]) | {"linestyle": dashes[found["task"]], "label": label}
        lines = ((0, "right", look), (1, "mended", look), (2, "kept", look), (1, "spoiled", look | spoiled))
        for place, name, own in lines:
            rows = found["rows"][place % 2 :]  # the first pass changes nothing: it fills blanks
            axes[place].plot([row["pass"] for row in rows], [100 * row[name] for row in rows], **own)
    axes[1].annotate("filled: mended, open: spoiled", (0.98, 0.95), xycoords="axes fraction", ha="right", fontsize=7.5)
    for axis in axes:
        axis.xaxis.get_major_locator().set_params(integer=True)
    changed = axes[1].get_ylim()
    _finish(figure, axes, "pass", "tokens of published answers (%)")
    axes[1].set_ylim(changed)  # a fraction of a percent, which is to be seen
    return figure


def tau_figure(sweep: Sweep) -> Any:
    """Table alpha_ablation as curves, the paper's in grey."""

    def curves(axis: Any, panel: str) -> None:
        for system in sweep.systems:
            if sweep.decoding[system].scores:
                known = sweep.scores("tau", system, panel)
                _curve(axis, [(setting.tau, score) for setting, score in known], **look_of(sweep, system))
            elif sweep.decoding[system].refines:
                _level(axis, sweep, system, panel)
        if panel in papers_panels(sweep):
            place = published.PANELS.index(panel)
            points = [(tau, values[place]) for tau, values in published.TAU.items()]
            axis.plot(*zip(*points, strict=True), "--x", color=GREY, label="paper (4B)")
        axis.set_xscale("symlog", linthresh=0.1)

    scored = any(decoding.scores for decoding in sweep.decoding.values())
    return _by_kind(sweep, "weight of the scorer, τ", curves) if scored else None


def width_figure(sweep: Sweep) -> Any:
    """Table bon_width_ablation as curves: one for each number of passes."""
    scoring = [name for name in sweep.systems if sweep.decoding[name].scores]

    def curves(axis: Any, panel: str) -> None:
        for system in scoring:
            known = sweep.scores("width", system, panel)
            for number, passes in enumerate(dict.fromkeys(setting.passes for setting, _ in known)):
                look = look_of(sweep, system) | {"label": f"{system}, {passes} passes", "marker": MARKERS[number]}
                look["linestyle"] = DASHES[number % len(DASHES)]
                _curve(axis, [(s.width, score) for s, score in known if s.passes == passes], **look)
        axis.xaxis.get_major_locator().set_params(integer=True)

    return _by_kind(sweep, "candidates, N", curves) if scoring else None


def _by_kind(sweep: Sweep, label: str, curves: Callable[[Any, str], None]) -> Any:
    """A panel for each kind of task, drawn by `curves`."""
    figure, axes = _panels([panel.capitalize() for panel in sweep.panels()])
    for axis, panel in zip(axes, sweep.panels(), strict=True):
        curves(axis, panel)
        axis.margins(y=0.15)
    return _finish(figure, axes, label)


DRAWINGS: dict[str, Callable[[Sweep], Any]] = {
    "main": main_figure,
    "passes": passes_figure,
    "pareto": pareto_figure,
    "stability": stability_figure,
    "tau": tau_figure,
    "width": width_figure,
}
