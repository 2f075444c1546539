"""Put the tables of `results/mini` into `docs/reproduction.md`, and draw its figures.

    python experiments/mini/report.py    # writes the page's tables and docs/images/mini

The page's sentences are written by hand; what stands between `<!-- table NAME -->` and `<!-- end -->` is made here, of
nothing but the sweeps' files.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from freda.data.tokenizer import Tokenizer
from freda.errors import require
from freda.eval.report.points import OVERALL, Setting, Sweep, read_sweep
from freda.eval.report.tables import (
    Cell,
    Table,
    main_table,
    speed_up_table,
    tau_table,
    two_digits,
    width_table,
    with_error,
)
from freda.eval.report.write import as_markdown, draw_sweep
from freda.eval.task import Example, checksum
from freda.eval.tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE, IMAGES = ROOT / "results" / "mini", ROOT / "docs" / "reproduction.md", ROOT / "docs" / "images" / "mini"
SHIPPED = ROOT / "freda" / "assets" / "mini"  # its data folder says how the questions are made, its tokenizer is theirs
MAIN_PASSES = 4  # of the configs' systems
FIGURES = {"a": ["main"], "b": ["passes"], "c": ["pareto", "stability"]}
MARKED = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def scores_table(sweep: Sweep) -> Table:
    """The main table without its differences."""
    return _columns(main_table(sweep), lambda name: " − " not in name)


def differences_table(sweep: Sweep) -> Table:
    """The paired differences alone."""
    return _columns(main_table(sweep), lambda name: name == "system" or " − " in name)


def _columns(table: Table, wanted: Callable[[str], bool]) -> Table:
    places = [place for place, name in enumerate(table.header) if wanted(name)]
    kept = [tuple(row[place] for place in places) for row in (table.header, *table.rows)]
    return Table("", tuple(map(str, kept[0])), kept[1:])


def seeds_table(sweep: Sweep) -> Table:
    """Seed by seed: every task, and the mean over the tasks."""
    count = max(len(system.models) for system in sweep.systems.values())
    rows: list[tuple[Cell, ...]] = []
    for system in sweep.systems:
        found = [
            [sweep.by_place.get((system, seed, t, sweep.main(system))) for t in sweep.tasks] for seed in range(count)
        ]
        shares = [[100 * point.accuracy for point in points if point] for points in found]
        rows.append((system, *(_in_a_row(one) if len(one) == len(sweep.tasks) else None for one in shares)))
    what = " / ".join((*sweep.tasks, "mean"))
    return Table("", (f"system: {what}", *(f"seed {seed}" for seed in range(count))), rows)


def _in_a_row(shares: Sequence[float]) -> str:
    return " / ".join(f"{share:.1f}" for share in (*shares, sum(shares) / len(shares)))


def levels_table(sweep: Sweep) -> Table:
    """Logic by level: how many moves a walk asks for, how many hops a look-up."""

    def level(example: Example) -> str:
        family, number = example.group.split()
        return f"walk, {number}" if family == "walk" else f"look-up, {number}"

    return _by_group(sweep, {"mini_logic": level})


def given_table(sweep: Sweep) -> Table:
    """Every kind by how many tokens of the prompt stand in the first block that is drafted (M8, M12)."""
    tokenizer, size = Tokenizer.load(SHIPPED), max(sweep.block_size.values())

    def given(example: Example) -> str:
        return str(len(tokenizer.encode(example.prompt)) % size)

    def of_walks(example: Example) -> str:  # look-ups are at chance, and of one remainder
        return f"walks, {given(example)}" if example.group.startswith("walk") else ""

    return _by_group(
        sweep,
        {
            "mini_math": lambda example: f"mathematics, {given(example)}",
            "mini_code": lambda example: f"code, {given(example)}",
            "mini_logic": of_walks,
        },
    )


def _by_group(sweep: Sweep, groups: dict[str, Callable[[Example], str]]) -> Table:
    """Percent right of the questions of each group, all seeds together; "" is left out."""
    rows: list[tuple[Cell, ...]] = []
    for task, group in groups.items():
        examples = TASKS[task].examples(SHIPPED / "data", sweep.config.limit)
        named = [group(example) for example in examples]
        right: dict[str, list[str]] = {}  # by system, the answers of all seeds to each question
        for system in sweep.systems:
            same = sweep.checksums[f"{system}/{task}"] == checksum(examples)
            require(same, f"{task} was asked other questions than {SHIPPED} makes; run the sweep again")
            seeds = range(len(sweep.systems[system].models))
            points = [sweep.by_place[system, seed, task, sweep.main(system)] for seed in seeds]
            right[system] = ["".join(answers) for answers in zip(*(point.right for point in points), strict=True)]
        for name in sorted(set(named) - {""}, key=_by_number):
            places = [place for place, one in enumerate(named) if one == name]
            texts = ("".join(right[system][place] for place in places) for system in sweep.systems)
            rows.append((name, len(places), *(f"{100 * text.count('1') / len(text):.1f}" for text in texts)))
    return Table("", ("questions", "number", *sweep.systems), rows)


def _by_number(name: str) -> tuple[str, int]:
    family, _, number = name.rpartition(", ")
    return family, int(number)


def passes_table(sweep: Sweep) -> Table:
    """Accuracy by passes, a row for each system and kind."""
    counts = sorted({s.passes for system in sweep.systems for s in sweep.settings("passes", system)})
    rows: list[tuple[Cell, ...]] = []
    for panel in sweep.panels():
        for system in sweep.systems:
            by_passes = {setting.passes: setting for setting in sweep.settings("passes", system)}
            rows.append((panel, system, *(_score(sweep, system, panel, by_passes.get(count)) for count in counts)))
    return Table("", ("kind", "system", *(f"{count} passes" if count > 1 else "1 pass" for count in counts)), rows)


def ablations_table(sweep: Sweep) -> Table:
    """Every system with 1, 2 and the main number of passes, and its paired differences from the baseline: of what is
    generated, and of what is chosen by likelihood."""
    panels = [panel for panel in sweep.panels() if panel != OVERALL]
    chosen = [task for task, about in sweep.tasks.items() if about["choices"]]
    written = [task for task in sweep.tasks if task not in chosen]
    rows: list[tuple[Cell, ...]] = []
    for system in sweep.systems:
        main = sweep.main(system)
        by_passes = {setting.passes: setting for setting in sweep.settings("passes", system)}
        cells: list[Cell] = [
            " / ".join(_plain(sweep, system, panel, setting) for setting in (by_passes.get(1), by_passes.get(2), main))
            for panel in panels
        ]
        speed = sweep.score(system, OVERALL, main)
        cells += [*(_plain(sweep, system, task, main) for task in chosen), speed and two_digits(speed.tpf)]
        rows.append((system, *cells, sweep.paired_mean(system, written), sweep.paired_mean(system, chosen)))
    header = ("system", *(f"{panel}, 1 / 2 / {MAIN_PASSES} passes" for panel in panels), *chosen, "tokens per forward")
    return Table("", (*header, *(f"{' and '.join(part)} − {sweep.baseline}" for part in (written, chosen))), rows)


def stability_table(sweep: Sweep) -> Table:
    """What every further pass changes, the mean over seeds. One candidate, so a scorer has no part in it."""
    rows: list[tuple[Cell, ...]] = []
    runs: dict[tuple[str, str], list[list[dict[str, float]]]] = {}
    for found in sweep.stability:
        if not sweep.decoding[found["system"]].scores:
            runs.setdefault((found["system"], found["task"]), []).append(found["rows"])
    for (system, task), seeds in runs.items():
        for rounds in zip(*seeds, strict=True):
            shares = (
                _mean([100 * one[name] for one in rounds]) for name in ("right", "changed", "mended", "spoiled", "kept")
            )
            rows.append((system, task, rounds[0]["pass"], *shares))
    return Table("", ("system", "task", "pass", "right", "changed", "mended", "spoiled", "clean draft kept"), rows)


TABLES: dict[str, tuple[str, Callable[[Sweep], Table]]] = {
    "main": ("a", scores_table),
    "differences": ("a", differences_table),
    "seeds": ("a", seeds_table),
    "levels": ("a", levels_table),
    "given": ("a", given_table),
    "compute": ("compute", scores_table),
    "compute-differences": ("compute", differences_table),
    "passes": ("b", passes_table),
    "speed-up": ("c", speed_up_table),
    "stability": ("c", stability_table),
    "tau": ("d", tau_table),
    "width": ("d", width_table),
    "ablations": ("e", ablations_table),
    "scorers": ("f", tau_table),
}


def _mean(values: Sequence[float]) -> Cell:
    return two_digits(sum(values) / len(values))


def _score(sweep: Sweep, system: str, panel: str, setting: Setting | None) -> Cell:
    return None if setting is None else with_error(sweep.score(system, panel, setting))


def _plain(sweep: Sweep, system: str, panel: str, setting: Setting | None) -> str:
    score = None if setting is None else sweep.score(system, panel, setting)
    return "–" if score is None else f"{score.accuracy:.1f}"


def filled(page: str) -> str:
    """The page with its tables made again."""

    def made(found: re.Match[str]) -> str:
        source, table = TABLES[found[2]]
        text = as_markdown(table(Sweep(read_sweep(RESULTS / f"{source}.json"))))
        return f"{found[1]}{text.partition(chr(10) * 2)[2].rstrip()}\n{found[3]}"  # without its title

    return MARKED.sub(made, page)


def draw(folder: Path) -> None:
    """The page's figures."""
    folder.mkdir(parents=True, exist_ok=True)
    for claim, parts in FIGURES.items():
        with tempfile.TemporaryDirectory() as drawn:
            draw_sweep(RESULTS / f"{claim}.json", Path(drawn))
            for part in parts:
                (folder / f"{part}.svg").write_bytes((Path(drawn) / f"{part}.svg").read_bytes())


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    draw(IMAGES)
