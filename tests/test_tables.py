"""Tables and figures of a sweep: what they say about its points."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from freda.eval.config import SweepConfig, SystemConfig
from freda.eval.report import published
from freda.eval.report.figures import draw, look_of, passes_figure
from freda.eval.report.points import NEVER, WITHOUT_AXES, Decoding, Point, Score, Setting, Sweep, settings_of
from freda.eval.report.tables import (
    TABLES,
    as_csv,
    as_markdown,
    envelope,
    main_table,
    pareto_table,
    passes_table,
    speed_up,
    speed_up_table,
    stability_table,
    tau_table,
    width_table,
)

SYSTEM = SystemConfig(models=("x",))


def point(system: str, task: str, setting: Setting, right: str, *, model: int = 0, tpf: float = 1.0) -> Point:
    share = right.count("1") / len(right)
    error = (share * (1 - share) / len(right)) ** 0.5
    return Point(system, model, task, setting, len(right), share, error, 8.0, tpf, 1.0, right)


def sweep_of(
    points: list[Point],
    *,
    methods: dict[str, str],
    tasks: dict[str, str],
    about: dict[str, Any] | None = None,
    **sweep: Any,
) -> Sweep:
    models = {name: 1 + max(p.model for p in points if p.system == name) for name in methods}
    names = list(methods)
    content = {
        "config": {
            "sweep": {"tasks": list(tasks), "passes": [1, 2], "thresholds": [0.5, 0.9], "widths": [2, 4], **sweep},
            "system": {name: {"models": ["x"] * models[name], "baseline": name == names[0]} for name in names},
        },
        "systems": {name: {"method": method, "block_size": 4, **(about or {})} for name, method in methods.items()},
        "tasks": {task: {"kind": kind, "choices": kind == "knowledge"} for task, kind in tasks.items()},
        "points": points,
        "stability": [],
    }
    return Sweep(content)


OWN = Setting(4, 0.9, 4, 0.1)
KINDS = {"mmlu": "knowledge", "gsm8k": "mathematics", "math500": "mathematics", "humaneval": "coding"}


def rows_of(table: Any) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(as_csv(table))))


def test_what_a_method_does_comes_from_the_file() -> None:
    """A file of a method that this version does not know has all that tables need."""
    points = [point("a", "gsm8k", OWN._replace(tau=tau), "10") for tau in (0.1, 0.3)]
    sweep = sweep_of(points, methods={"a": "self-refine"}, tasks={"gsm8k": "mathematics"}, taus=[0.1, 0.3])
    assert len(rows_of(tau_table(sweep))) == 1
    content = {"axes": ["passes", "threshold", "tau"], "refines": True, "block_size": 8}
    sweep = sweep_of(points, methods={"a": "new"}, tasks={"gsm8k": "mathematics"}, taus=[0.1, 0.3], about=content)
    assert [row["τ"] for row in rows_of(tau_table(sweep))] == ["0.1", "0.3"] and sweep.decoding["a"].block_size == 8


def test_scores_are_means_of_tasks_then_of_kinds_then_of_seeds() -> None:
    rights = {"mmlu": "1000", "gsm8k": "1110", "math500": "1000", "humaneval": "1111"}
    points = [point("a", task, OWN, right) for task, right in rights.items()]
    points += [point("a", task, OWN, "1" * 4, model=1, tpf=3.0) for task in rights]
    both = sweep_of(points, methods={"a": "self-refine"}, tasks=KINDS)
    one = sweep_of(points[:4], methods={"a": "self-refine"}, tasks=KINDS)
    assert one.panels() == {"mathematics": ["gsm8k", "math500"], "coding": ["humaneval"], "overall": []}
    scored = {panel: one.score("a", panel, OWN) for panel in ("mathematics", "coding", "overall", "gsm8k")}
    assert {panel: score and score.accuracy for panel, score in scored.items()} == {
        **{"mathematics": 50.0, "coding": 100.0, "overall": 75.0, "gsm8k": 75.0}
    }
    binomial = 100 * (0.75 * 0.25 / 4) ** 0.5
    assert scored["mathematics"] == (50.0, pytest.approx((2 * binomial**2) ** 0.5 / 2), 1.0)
    assert scored["overall"] == (75.0, pytest.approx((2 * binomial**2) ** 0.5 / 4), 1.0)
    # two seeds: their mean, and the standard error of 75 and 100
    assert both.score("a", "overall", OWN) == (87.5, pytest.approx(12.5), 2.0)
    assert both.score("a", "overall", OWN._replace(passes=3)) is None
    assert sweep_of(points[:7], methods={"a": "self-refine"}, tasks=KINDS).score("a", "coding", OWN) is None


def test_the_main_table_has_paired_differences_and_the_papers_rows() -> None:
    points = [point("base", "gsm8k", OWN, "1100" * 25), point("ours", "gsm8k", OWN, "1110" * 25)]
    methods = {"base": "block-diffusion", "ours": "self-refine"}
    table = main_table(sweep_of(points, methods=methods, tasks={"gsm8k": "mathematics"}))
    rows = {row["system"]: row for row in rows_of(table)}
    assert (rows["base"]["gsm8k"], rows["base"]["gsm8k ±"]) == ("50.0", "5.0") and rows["base"]["gsm8k − base"] == ""
    assert "+25.00 (+15.94 to +33.08)" in as_markdown(table)
    difference = [rows["ours"][f"gsm8k − base{part}"] for part in ("", " low", " high")]
    assert difference == ["25.0", "15.94", "33.08"], "one number in a column"
    assert rows["paper: BlockDiff-4B"]["gsm8k"] == "77.33" and rows["paper: FReDA-4B (Best-of-N)"]["average"] == "84.15"
    assert "| base | 4 | 0.90 | 50.00 ± 5.00 | 50.00 |" in as_markdown(table)
    fast = [*points, point("ours", "mmlu", OWN, "11" * 50, tpf=9.0), point("base", "mmlu", OWN, "10" * 50, tpf=9.0)]
    both = main_table(sweep_of(fast, methods=methods, tasks={"mmlu": "knowledge", "gsm8k": "mathematics"}))
    assert {row["tokens per forward"] for row in rows_of(both)[:2]} == {"1.0"}, "letters are not generated"
    of_both = {row["system"]: row for row in rows_of(both)}["ours"]
    mean = [float(of_both[f"average − base{part}"]) for part in ("", " low", " high")]
    halves = [float(of_both[f"{t} − base high"]) - float(of_both[f"{t} − base low"]) for t in ("mmlu", "gsm8k")]
    assert mean[0] == 37.5 and mean[2] - mean[1] == pytest.approx(math.hypot(*halves) / 2, abs=0.02)
    some = sweep_of(fast, methods=methods, tasks={"mmlu": "knowledge", "gsm8k": "mathematics"})
    assert some.difference("ours", ["gsm8k"]) == (25.0, 15.94, 33.08) and some.difference("base", ["gsm8k"]) is None
    assert not any(name.startswith("average −") for name in table.header), "of one task it is that task's"
    alone = main_table(
        sweep_of([point("a", "sums", OWN, "10")], methods={"a": "self-refine"}, tasks={"sums": "mathematics"})
    )
    assert [row["system"] for row in rows_of(alone)] == ["a"], "the paper knows no such task"


def test_seeds_are_compared_by_question_and_not_counted_as_more_questions() -> None:
    methods, tasks = {"base": "block-diffusion", "ours": "self-refine"}, {"gsm8k": "mathematics"}
    base = [point("base", "gsm8k", OWN, right, model=n) for n, right in enumerate(("1100" * 9, "1111" * 9))]
    ours = [point("ours", "gsm8k", OWN, "1110" * 9)]
    found = sweep_of(base + ours, methods=methods, tasks=tasks).paired("ours", "gsm8k")
    assert found is not None and found.n == 36
    assert found.accuracy == (0.75, 0.75) and found.difference == 0, "the difference of what the table shows"
    twice = [point("ours", "gsm8k", OWN, "1110" * 9, model=n) for n in range(2)]
    again = sweep_of(base + twice, methods=methods, tasks=tasks).paired("ours", "gsm8k")
    assert again == found, "a model that was counted twice tells nothing new"
    assert sweep_of(base[:1] + twice[:1], methods=methods, tasks=tasks).paired("base", "gsm8k") is None
    other = sweep_of(base + ours, methods=methods, tasks=tasks)
    other.checksums = {"base/gsm8k": "a", "ours/gsm8k": "b"}
    assert other.paired("ours", "gsm8k") is None, "other questions"
    half = sweep_of([*base[:1], point("ours", "gsm8k", OWN, "11")], methods=methods, tasks=tasks)
    assert half.paired("ours", "gsm8k") is None, "fewer questions"


def test_two_tasks_of_the_same_questions_are_not_independent() -> None:
    tasks = {"humaneval": "coding", "humaneval_plus": "coding"}
    points = [point("a", name, OWN, "1110" * 25) for name in tasks]
    score = sweep_of(points, methods={"a": "self-refine"}, tasks=tasks).score("a", "coding", OWN)
    assert score is not None and score.error == pytest.approx(100 * points[0].standard_error), "as one task"
    points[1] = point("a", "humaneval_plus", OWN, "1100" * 25)
    score = sweep_of(points, methods={"a": "self-refine"}, tasks=tasks).score("a", "coding", OWN)
    means = torch.tensor([1.0, 1.0, 0.5, 0.0] * 25)
    assert score is not None and score.error == pytest.approx(10 * float(means.std(correction=0)))
    both = {"mmlu": "knowledge", **tasks}
    answers = {"a": "1100", "b": "1110"}
    points = [point(system, name, OWN, right * 25) for name in both for system, right in answers.items()]
    sweep = sweep_of(points, methods=dict.fromkeys(answers, "self-refine"), tasks=both)
    one, pair = sweep.difference("b", ["humaneval"]), sweep.difference("b", list(tasks))
    assert one is not None and pair == pytest.approx(one), "asked twice, it is no more certain"


def test_the_papers_numbers_stand_beside_its_own_tasks_only() -> None:
    sums_only = sweep_of([point("a", "sums", OWN, "10")], methods={"a": "self-refine"}, tasks={"sums": "mathematics"})
    assert "paper" not in as_markdown(tau_table(sums_only)) + as_markdown(width_table(sums_only))
    mixed = {"gsm8k": "mathematics", "humaneval": "coding"}
    points = [point("a", name, OWN, "10") for name in mixed]
    assert "paper" not in as_csv(passes_table(sweep_of(points, methods={"a": "self-refine"}, tasks=mixed)))


def test_what_the_paper_reports() -> None:
    by_name = {name: dict(zip(published.TASKS, values, strict=True)) for name, values in published.MAIN.items()}
    ours, best = by_name["FReDA-4B (Self-refine)"], by_name["FReDA-4B (Best-of-N)"]
    for row, (mathematics, coding, overall) in ((ours, published.SELF_REFINE), (best, published.TAU[0.1])):
        assert (row["gsm8k"] + row["math500"]) / 2 == pytest.approx(mathematics, abs=0.0051)
        assert (row["humaneval"] + row["humaneval_plus"]) / 2 == pytest.approx(coding, abs=0.0051)
        assert (mathematics + coding) / 2 == pytest.approx(overall, abs=0.0051)
    for mathematics, coding, overall in (*published.TAU.values(), *published.WIDTH.values()):
        assert (mathematics + coding) / 2 == pytest.approx(overall, abs=0.0151)
    assert published.WIDTH[4, 4] == published.TAU[0.1]
    gain = [b - a for a, b in zip(published.MAIN["BlockDiff-4B"], published.MAIN["FReDA-4B (Best-of-N)"], strict=True)]
    assert sum(gain) / 6 == pytest.approx(5.06, abs=0.005), "as the text says"
    assert published.PASSES == {1: 25.9, 5: 56.3} and published.SPEED_UP == (1.5, 1.8)


def test_sweeps_of_choices_alone_and_without_a_baseline_are_drawn(tmp_path: Path) -> None:
    methods = {"a": "block-diffusion", "b": "self-refine"}
    chosen = sweep_of(
        [point(name, "mmlu", OWN, "10") for name in methods], methods=methods, tasks={"mmlu": "knowledge"}
    )
    for part, tables in TABLES.items():
        assert bool(draw(chosen, part, tmp_path)) == (part == "main")
        assert all(as_markdown(table(chosen)) for table in tables)
    chosen.baseline = None
    assert "None" not in as_markdown(speed_up_table(chosen)) and "paper" not in as_csv(speed_up_table(chosen))


def test_a_method_looks_the_same_in_all_sweeps() -> None:
    def looks(*systems: str) -> dict[str, tuple[str, str]]:
        points = [point(system, "gsm8k", OWN, "10") for system in systems]
        sweep = sweep_of(points, methods=dict.fromkeys(systems, "self-refine"), tasks={"gsm8k": "mathematics"})
        sizes = [look_of(sweep, name)["markersize"] for name in systems]
        assert sizes == sorted(sizes, reverse=True), "what is drawn later is smaller, and leaves the others visible"
        return {name: (look["color"], look["marker"]) for name in systems for look in [look_of(sweep, name)]}

    few, many = looks("self-refine", "mine"), looks("base", "block-diffusion", "self-refine", "mine")
    assert few["self-refine"] == many["self-refine"]
    for shown in (few, many, looks("self-refine", "autoregressive", "a", "b", "c", "d", "e")):
        for one in zip(*shown.values(), strict=True):
            assert len(set(one)) == len(shown), "as many colours and as many markers"


def test_envelopes_and_speed_up() -> None:
    fast, middle, slow, beaten = Score(50, 1, 4), Score(70, 1, 3), Score(80, 1, 2), Score(60, 1, 2.5)
    assert envelope([beaten, slow, fast, middle]) == [fast, middle, slow]
    assert envelope([Score(50, 1, 4), Score(60, 1, 4)]) == [Score(60, 1, 4)], "equally fast, but worse"
    baseline = [Score(40, 1, 3), Score(65, 1, 1.5), Score(65, 1, 2)]
    assert speed_up(baseline, [fast, middle, slow]) == 1.5, "70 is enough for 65, at 3 instead of 2 tokens per forward"
    assert speed_up(baseline, [fast]) is None and speed_up([], [fast]) is None
    assert speed_up(baseline, baseline) == 1.0
    noise = Score(65.4, 1, 1)  # slow, and better by what is no difference
    assert speed_up([*baseline, noise], [fast, middle, slow]) == 1.5 and speed_up([noise], [Score(64.8, 1, 4)]) is None
    assert speed_up([Score(65, 1, 1)], [Score(64.5, 1, 4)]) == 4, "half a point is enough"
    half = [point("a", "gsm8k", OWN, "10"), point("b", "gsm8k", OWN, "11"), point("a", "math500", OWN, "11")]
    half += [point("b", "math500", OWN, "10")]
    kinds = {"gsm8k": "mathematics", "math500": "mathematics"}
    sweep = sweep_of(half, methods={"a": "autoregressive", "b": "autoregressive"}, tasks=kinds)
    sweep.by_place = {(*place[:3], sweep.main(place[0])): found for place, found in sweep.by_place.items()}
    sweep.points = [dataclasses.replace(found, setting=sweep.main(found.system)) for found in half]
    row = rows_of(speed_up_table(sweep))[0]
    assert (row["gsm8k"], row["math500"], row["mean"]) == ("1.0", "", ""), "no mean of what is there by chance"


def test_the_parts_of_a_sweep_from_its_points() -> None:
    task = {name: KINDS.get(name, "coding") for name in published.TASKS[2:]}
    methods = {"base": "block-diffusion", "ours": "self-refine", "best": "best-of-n"}
    points = []
    for name in task:
        points += [point("base", name, Setting(k, NEVER, 4, 0.1), "10", tpf=4 / k) for k in (2, 3, 4)]
        points += [point("base", name, Setting(k, 0.9, 4, 0.1), "10", tpf=4 / k) for k in (1, 4)]
        points += [point("ours", name, Setting(1, 0.9, 4, 0.1), "0011", tpf=4.0)]
        points += [point("ours", name, Setting(2, 0.9, 4, 0.1), "1110", tpf=2.5), point("ours", name, OWN, "1110")]
        points += [point("best", name, OWN._replace(tau=tau), "1111", tpf=2.0) for tau in (0.0, 0.1)]
        points += [point("best", name, OWN._replace(width=2), "1110")]
        points += [point("best", name, OWN._replace(passes=2), "1000", tpf=2.0)]
    sweep = sweep_of(points, methods=methods, tasks=task, taus=[0.0, 0.1, 7.0])
    curve = {(row["system"], row["passes"]): row for row in rows_of(passes_table(sweep)) if row["panel"] == "overall"}
    assert curve["ours", "2"]["accuracy"] == "75.0" and curve["ours", "2"]["early stop"] == "0.9"
    assert curve["base", "2"]["early stop"] == "off" and curve["paper", "5"]["accuracy"] == "56.3"
    speeds = {row["system"]: row for row in rows_of(speed_up_table(sweep))}
    shown = as_markdown(pareto_table(sweep))
    assert len(rows_of(pareto_table(sweep))) > shown.count("| yes |") > 0 and "|  |" not in shown, "the frontier alone"
    assert speeds["ours"]["gsm8k"] == "1.0" and speeds["best"]["mean"] == "" and "1.5 to 1.8" in str(speeds)
    weights = rows_of(tau_table(sweep))
    assert [(row["system"], row["τ"], row["paper: overall"]) for row in weights] == [
        *(("ours", "", "63.76"), ("best", "0.0", ""), ("best", "0.1", "65.08")),
    ]
    widths = {(row["passes"], row["width"]): row for row in rows_of(width_table(sweep))}
    assert widths["4", "2"]["overall"] == "75.0" and widths["4", "2"]["paper: coding"] == "60.98"
    sweep.stability = [
        {"system": "ours", "model": 0, "task": "gsm8k", "rows": [stable_row(1), stable_row(2), stable_row(3)]}
    ]
    turned = [(row["pass"], row["answers mended"], row["answers spoiled"]) for row in rows_of(stability_table(sweep))]
    assert turned == [("1", "", ""), ("2", "2", "1"), ("3", "", "")], "0011 against 1110"


def stable_row(number: int) -> dict[str, float]:
    return {"pass": number, "right": 0.5, "changed": 0.1, "mended": 0.06, "spoiled": 0.04, "kept": 0.9}


def many_tasks() -> Sweep:
    """Four tasks of two kinds and one of choices, two seeds, all parts."""
    tasks = {"mmlu": "knowledge", **{name: KINDS.get(name, "coding") for name in published.TASKS[2:]}}
    methods = {"base": "autoregressive", "masked": "block-diffusion", "ours": "self-refine", "best": "best-of-n"}
    whole = SweepConfig(tasks=tuple(tasks))
    points = []
    for number, (name, method) in enumerate(methods.items()):
        decoding = Decoding(**WITHOUT_AXES[method], block_size=4)  # type: ignore[arg-type]
        settings = settings_of(("main", *whole.parts), whole, SYSTEM, decoding)
        for setting in settings:
            for task in tasks if setting == settings[0] else list(tasks)[1:]:
                for model in range(2):
                    right = 30 + 8 * number + 4 * min(setting.passes, 4) + int(10 * setting.threshold) - model
                    answers = "1" * min(right, 100) + "0" * max(0, 100 - right)
                    points.append(point(name, task, setting, answers, model=model, tpf=4 / setting.passes))
    sweep = sweep_of(points, methods=methods, tasks=tasks, passes=[1, 2, 3, 4, 5, 6], thresholds=[0.5, 0.7, 0.9])
    rows = [stable_row(number) for number in range(1, 7)]
    sweep.stability = [
        {"system": s, "model": 0, "task": t, "rows": rows} for s in ("ours", "best") for t in list(tasks)[1:]
    ]
    return sweep


def test_every_part_can_be_drawn_and_tabled_for_many_tasks(tmp_path: Path) -> None:
    sweep = many_tasks()
    for part, tables in TABLES.items():
        assert [path.suffix for path in draw(sweep, part, tmp_path)] == [".png", ".svg"]
        text = "\n".join(as_markdown(table(sweep)) for table in tables)
        assert "paper" in text or part == "stability"
    svg = (tmp_path / "passes.svg").read_text()
    assert all(words in svg for words in ("Mathematics", "Coding", "Overall", "paper (4B)", "passes per block"))
    assert "humaneval" in (tmp_path / "pareto.svg").read_text()
    axes = passes_figure(sweep).axes
    gains = [text.get_text() for text in axes[0].texts]
    assert gains == [f"{4.0 * min(k - 1, 3) + (11.0 if k >= 4 else 0.0):+.1f}" for k in range(2, 7)], "since one pass"
    assert any(list(line.get_xdata()) == [3.5, 3.5] for line in axes[0].lines), "where the early stop goes off"
    only = sweep_of(
        [point("a", "sums", Setting(1, 0.9, 4, 0.1), "10")],
        methods={"a": "autoregressive"},
        tasks={"sums": "mathematics"},
    )
    assert [draw(only, part, tmp_path) for part in ("stability", "tau", "width")] == [[], [], []], "nothing to draw"
