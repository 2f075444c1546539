"""The tables and figures of `docs/reproduction.md`, from the files of `results/mini` alone.

python experiments/mini/report.py    # draws docs/images/mini
python docs/write_numbers.py         # writes the tables into the page, as the blocks mini/NAME
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from freda.data.tokenizer import Tokenizer
from freda.errors import require
from freda.eval.report.figures import draw_sweep
from freda.eval.report.points import OVERALL, Setting, Sweep, read_sweep
from freda.eval.report.tables import (
    Cell,
    Table,
    as_markdown,
    main_table,
    speed_up,
    speed_up_table,
    tau_table,
    two_digits,
    width_table,
    with_error,
)
from freda.eval.tasks import TASKS
from freda.eval.tasks.task import Example, checksum

ROOT = Path(__file__).resolve().parents[2]
RESULTS, IMAGES = ROOT / "results" / "mini", ROOT / "docs" / "images" / "mini"
SHIPPED = ROOT / "freda" / "assets" / "mini"  # its data folder says how the questions were made; same tokenizer
MAIN_PASSES = 4  # of the configs' systems
FIGURES = {"a": ["main"], "b": ["passes"], "c": ["pareto", "stability"]}
KINDS = {"mini_math": "mathematics", "mini_code": "code", "mini_logic": "logic"}
KNOWN = 0.95  # share of walks of a length that a model must get right to be said to know them


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
    tokenizer, size = Tokenizer.load(SHIPPED), max(decoding.block_size for decoding in sweep.decoding.values())

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
        examples = questions(task, sweep.config.limit)
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
        rows.append((system, *cells, sweep.difference(system, written), sweep.difference(system, chosen)))
    header = ("system", *(f"{panel}, 1 / 2 / {MAIN_PASSES} passes" for panel in panels), *chosen, "tokens per forward")
    return Table("", (*header, *(f"{' and '.join(part)} − {sweep.baseline}" for part in (written, chosen))), rows)


def stability_table(sweep: Sweep) -> Table:
    """What every further pass changes, the mean over seeds. One candidate, so a scorer would change nothing."""
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


def readme_table(sweep: Sweep) -> Table:
    """The main comparison in one digit, as the README shows it."""
    rows: list[tuple[Cell, ...]] = []
    for system in ("autoregressive", "block-diffusion", "self-refine"):
        scores = [sweep.score(system, task, sweep.main(system)) for task in KINDS]
        shown = [f"{score.accuracy:.1f}" for score in scores if score]
        written = [score.tpf for score in scores[:2] if score]
        rows.append((system, *shown, f"{statistics.fmean(written):.2f}"))
    return Table("", ("trained as", *KINDS.values(), "tokens per forward"), rows)


def fixed_schedules_table(sweep: Sweep) -> Table:
    """The speed-up if block diffusion decodes by a fixed number of tokens per pass only, without a threshold."""
    tasks, rows = ("mini_math", "mini_code"), []
    for system in ("self-refine", "best-of-n"):
        ratios = fixed_schedule_ratios(sweep, system, tasks)
        rows.append((system, *map(two_digits, ratios), _mean(ratios)))
    return Table("", ("system", *tasks, "mean"), rows)


def fixed_schedule_ratios(sweep: Sweep, system: str, tasks: Sequence[str]) -> list[float]:
    """By task, tokens per forward over those of the fastest fixed schedule, at matched accuracy."""
    found = []
    for task in tasks:
        fixed = [score for setting, score in sweep.scores("pareto", "block-diffusion", task) if setting.threshold > 1]
        found.append(speed_up(fixed, [score for _, score in sweep.scores("pareto", system, task)]) or 0.0)
    return found


def walks_table(sweep: Sweep) -> Table:
    """The longest walks that a model knows, with all shorter ones, by steps of training."""
    compute, ablations = sweep_of("compute"), sweep_of("e")
    rows: list[tuple[Cell, ...]] = [("0 (the bases)", *[_longest(sweep, "base")] * 2)]
    pair = ("block-diffusion-reference", "reference")
    rows.append(("400 (seed 0)", *(_longest(ablations, system) for system in pair)))
    rows.append(("800", *(_longest(sweep, system) for system in ("block-diffusion", "self-refine"))))
    pair = ("block-diffusion-compute", "self-refine-longer")
    rows.append(("936 and 1,200 (seed 0)", *(_longest(compute, system) for system in pair)))
    return Table("", ("steps", "block diffusion, moves by seed", "self-refinement, moves by seed"), rows)


def _longest(sweep: Sweep, system: str) -> str:
    examples = questions("mini_logic", sweep.config.limit)
    found = []
    for seed in range(len(sweep.systems[system].models)):
        right = sweep.by_place[system, seed, "mini_logic", sweep.main(system)].right
        by_level: dict[int, list[bool]] = {}
        for example, one in zip(examples, right, strict=True):
            family, level = example.group.split()
            if family == "walk":
                by_level.setdefault(int(level), []).append(one == "1")
        failed = (level for level, answers in sorted(by_level.items()) if statistics.fmean(answers) < KNOWN)
        found.append(str(next(failed, max(by_level) + 1) - 1))
    return ", ".join(found)


def written_table(_: Sweep) -> Table:
    """Walks whose letter is written, by passes; an autoregressive model has one number."""
    found = json.loads((RESULTS / "written.json").read_text(encoding="utf-8"))
    passes = sorted({one for by_passes in found["right"].values() for one in by_passes})
    rows: list[tuple[Cell, ...]] = [
        (system, *(f"{100 * by_passes[one]:.1f}" if one in by_passes else "–" for one in passes))
        for system, by_passes in found["right"].items()
    ]
    return Table("", (f"{found['walks']} walks, percent right", *(f"passes {one}" for one in passes)), rows)


# -- the claims ------------------------------------------------------------------------------------------------------


def claims_table(sweep: Sweep) -> Table:
    """Every claim of the paper, its number, and ours. The verdicts are written by hand: read them after a new run."""
    rows = [*_claims_a(sweep), *_claims_b(sweep_of("b")), *_claims_c(sweep_of("c")), *_claims_d(sweep_of("d"))]
    return Table("", ("", "claim", "paper", "here", "holds?"), [*rows, *_claims_e(sweep_of("e"))])


def _claims_a(sweep: Sweep) -> list[tuple[Cell, ...]]:
    compute = sweep_of("compute")
    gains = {task: _gains(sweep, task, "self-refine", "block-diffusion") for task in KINDS}
    spread = "; ".join(
        f"{KINDS[task]} {statistics.fmean(gain):+.2f} (seeds {min(gain):+.2f} to {max(gain):+.2f})"
        for task, gain in gains.items()
    )
    average = statistics.fmean(one for gain in gains.values() for one in gain)
    scorer = statistics.fmean(one for task in KINDS for one in _gains(sweep, task, "best-of-n", "self-refine"))
    longer = statistics.fmean(one for task in KINDS for one in _gains(compute, task, "best-of-n", "self-refine-longer"))
    ours, base, tuned = (_average(sweep, system) for system in ("self-refine", "base", "autoregressive"))
    equal = "; ".join(f"{kind} {compute.difference('self-refine', [task])}" for task, kind in KINDS.items())
    return [
        (
            "a",
            "self-refinement beats block diffusion on average over tasks",
            "+4.18 points",
            f"{spread}; average {average:+.2f}",
            "for mathematics and code, not for logic, and so not on average",
        ),
        (
            "a",
            "Best-of-N is better still",
            "+5.06 over block diffusion, +0.88 over self-refinement with as many tokens",
            f"{scorer:+.2f} over the self-refinement it starts from, within what bf16 rounding changes; "
            f"{longer:+.1f} against self-refinement trained on as many tokens (one seed)",
            "no",
        ),
        (
            "a",
            "both match the autoregressive model",
            "about the base's level",
            f"{ours:.1f} on average; the base {base:.1f}, the base trained on as many tokens {tuned:.1f}",
            "no",
        ),
        ("a", "self-refinement against block diffusion at equal compute (one seed)", "not reported", equal, "for code"),
    ]


def _claims_b(sweep: Sweep) -> list[tuple[Cell, ...]]:
    ours, scored = (_by_passes(sweep, system) for system in ("self-refine", "best-of-n"))
    return [
        (
            "b",
            "accuracy rises steeply up to 3 passes, then is flat",
            "steep to 3",
            f"mathematics and code: {_list(ours)} by passes",
            "in shape; two passes suffice here",
        ),
        ("b", "Best-of-N is ahead with more passes", "ahead", f"{_list(scored)} by passes", "no"),
    ]


def _claims_c(sweep: Sweep) -> list[tuple[Cell, ...]]:
    tasks = ("mini_math", "mini_code")
    pairs = ([[s for _, s in sweep.scores("pareto", name, task)] for name in _COMPARED] for task in tasks)
    threshold = statistics.fmean(speed_up(*pair) or 0.0 for pair in pairs)
    fixed = statistics.fmean(fixed_schedule_ratios(sweep, "self-refine", tasks))
    later = [float(str(row[4])) for row in stability_table(sweep).rows if int(str(row[2])) > 2]
    return [
        (
            "c",
            "faster than diffusion baselines at matched accuracy",
            "1.5 to 1.8 times; baselines on their native schedules",
            f"{threshold:.2f} times block diffusion decoding by threshold, {fixed:.1f} times its fixed schedules",
            "only against fixed schedules",
        ),
        (
            "c",
            "further passes do no harm",
            "argued, not measured",
            f"after pass 2 a pass changes at most {max(later):.2f}% of tokens",
            "yes",
        ),
    ]


_COMPARED = ("block-diffusion", "self-refine")


def _claims_d(sweep: Sweep) -> list[tuple[Cell, ...]]:
    settings = [s for part in ("tau", "width") for s in sweep.settings(part, "best-of-n") if s.passes == MAIN_PASSES]
    scores = [score.accuracy for s in settings if (score := sweep.score("best-of-n", OVERALL, s))]
    here = f"mathematics and code: {min(scores):.1f} to {max(scores):.1f} for every τ (0 too) and N"
    return [("d", "a small scorer weight is best, more candidates help", "τ = 0.1, N = 4", here, "no effect")]


def _claims_e(sweep: Sweep) -> list[tuple[Cell, ...]]:
    changed = {"passes-1": "K = 1 instead of 3", "hard-feedback": "hard feedback", "no-replacement": "no replacement"}
    found = {what: sweep.difference(name, ["mini_math", "mini_code"]) for name, what in changed.items()}
    here = "; ".join(f"{what} {difference}" for what, difference in found.items())
    claim = "training on own drafts, soft feedback and replacement matter"
    return [("e", claim, "argued, no ablation", f"{here} in mathematics and code (one seed)", "the first clearly")]


def _gains(sweep: Sweep, task: str, one: str, other: str) -> list[float]:
    """Points by which a system is ahead of another, seed by seed."""
    seeds = range(min(len(sweep.systems[system].models) for system in (one, other)))
    right = ([sweep.by_place[name, seed, task, sweep.main(name)].accuracy for name in (one, other)] for seed in seeds)
    return [100 * (first - second) for first, second in right]


def _average(sweep: Sweep, system: str) -> float:
    scores = [sweep.score(system, task, sweep.main(system)) for task in KINDS]
    return statistics.fmean(score.accuracy for score in scores if score)


def _by_passes(sweep: Sweep, system: str) -> list[float]:
    found = (sweep.score(system, OVERALL, setting) for setting in sweep.settings("passes", system))
    return [score.accuracy for score in found if score]


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


TABLES: dict[str, tuple[str, Callable[[Sweep], Table]]] = {
    "claims": ("a", claims_table),
    "readme": ("a", readme_table),
    "main": ("a", scores_table),
    "differences": ("a", differences_table),
    "seeds": ("a", seeds_table),
    "levels": ("a", levels_table),
    "given": ("a", given_table),
    "walks": ("a", walks_table),
    "written": ("a", written_table),
    "compute": ("compute", scores_table),
    "compute-differences": ("compute", differences_table),
    "passes": ("b", passes_table),
    "speed-up": ("c", speed_up_table),
    "fixed-schedules": ("c", fixed_schedules_table),
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


@cache
def questions(task: str, limit: int = 0) -> list[Example]:
    """The questions that the bundled model is asked, made once."""
    return TASKS[task].examples(SHIPPED / "data", limit)


@cache
def sweep_of(claim: str) -> Sweep:
    """The sweep of a claim."""
    return Sweep(read_sweep(RESULTS / f"{claim}.json"))


def block(name: str) -> str:
    """A table as Markdown, without its title."""
    source, table = TABLES[name]
    return as_markdown(table(sweep_of(source))).partition("\n\n")[2].rstrip()


def draw(folder: Path) -> None:
    """Draw the page's figures."""
    folder.mkdir(parents=True, exist_ok=True)
    for claim, parts in FIGURES.items():
        with tempfile.TemporaryDirectory() as drawn:
            draw_sweep(RESULTS / f"{claim}.json", Path(drawn))
            for part in parts:
                (folder / f"{part}.svg").write_bytes((Path(drawn) / f"{part}.svg").read_bytes())


if __name__ == "__main__":
    draw(IMAGES)
