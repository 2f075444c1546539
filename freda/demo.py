"""`freda demo`: from a corpus to models that refine their drafts, in a few minutes on two cores.

The bundled model answers a question of each kind first. Then a corpus of word problems, an autoregressive base, and
from the same weights with the same rows one continuation as block diffusion and one as self-refinement, which gets a
Best-of-N scorer; a table of what each gets right with 1 to 4 passes, and three problems being refined pass by pass.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from freda import __version__
from freda.data.config import CorpusConfig
from freda.data.mini import held_out
from freda.data.prepare import prepare_corpus
from freda.data.synthetic import Item, grade, problems_of
from freda.decode.api import Model
from freda.decode.config import EngineConfig
from freda.decode.request import Pass
from freda.decode.show import LiveDrafts, legend, pass_line
from freda.errors import FredaError
from freda.eval.teacher_forcing import token_accuracy
from freda.files import write_whole
from freda.folders.model_folder import load_model, packaged_folder
from freda.methods.autoregressive import Autoregressive
from freda.methods.best_of_n import BestOfN
from freda.methods.block_diffusion import BlockDiffusion
from freda.methods.method import Method
from freda.methods.self_refine import SelfRefine
from freda.model.config import ModelConfig
from freda.train.config import DataConfig, RunConfig, TrainConfig
from freda.train.loop import train

PASSES = (1, 2, 3, 4)
BATCH = 128  # problems solved side by side
THRESHOLD = 0.9
LONGEST_SOLUTION = 48  # tokens; the written ones have at most 33
NOISE_MIN = 0.3  # of block diffusion: weights 1/t of small t add little but variance; 51 → 73 exact match (LOG.md)
RESULTS, MARKER = "results.json", ".freda-demo"
BUNDLED = Path("mini")  # the bundled model, which answers first
LONGEST_ANSWER, PAUSE = 192, 0.1  # its tokens; seconds between its passes on a terminal


@dataclass(frozen=True)
class Plan:
    """The sizes of a demo."""

    corpus: CorpusConfig
    data: DataConfig
    model: ModelConfig
    base: TrainConfig
    tuned: TrainConfig  # block diffusion and self-refinement alike
    scorer: TrainConfig  # Best-of-N, on top of self-refinement
    test_problems: int


def make_plan(out: Path, seed: int, *, quick: bool) -> Plan:
    """The sizes of the demo; `quick` is a smoke test of a few steps."""
    rates: dict[str, Any] = {"lr": 3e-3, "warmup_steps": 30, "beta2": 0.98, "schedule": "cosine"}
    base = TrainConfig(steps=700, batch_rows=8, group_rows=8, **rates, seed=seed, keep=1)
    tuned = replace(base, steps=600, group_rows=4, lr=4e-3, warmup_steps=10, init=str(out / "autoregressive"))
    plan = Plan(
        corpus=CorpusConfig(
            problems=30_000, steps=3, max_number=99, max_change=9, carry=False, varied=False, seed=seed
        ),
        data=DataConfig(path=str(out / "data"), seq_len=192),
        model=ModelConfig(dim=128, layers=2, heads=4, kv_heads=4, head_dim=32, ffn_dim=384),
        base=base,
        tuned=tuned,
        scorer=replace(tuned, steps=150, batch_rows=4, group_rows=2, lr=1e-3, init=str(out / "self-refine")),
        test_problems=500,
    )
    if not quick:
        return plan
    few = {"steps": 3, "warmup_steps": 1, "validation_rows": 2}
    small: dict[str, Any] = {name: replace(getattr(plan, name), **few) for name in ("base", "tuned", "scorer")}
    small["corpus"] = replace(plan.corpus, problems=300, validation_problems=64)
    small["model"] = replace(plan.model, dim=32, layers=1, ffn_dim=96)
    return replace(plan, **small, test_problems=4)


def run_demo(out: Path, *, seed: int, quick: bool) -> None:
    """Run the whole demo: the table and the drafts go to stdout, progress to stderr."""
    begun, plan, console = time.perf_counter(), make_plan(out, seed, quick=quick), Console(highlight=False)
    _clear(out)
    _show_bundled(console)
    _say("1/6 writing a corpus of word problems")
    prepare_corpus(plan.corpus, out / "data")
    models = {}
    stages: list[tuple[Method, TrainConfig]] = [
        (Autoregressive(), plan.base),
        (BlockDiffusion(noise_min=NOISE_MIN), plan.tuned),
        (SelfRefine(), plan.tuned),
        (BestOfN(), plan.scorer),
    ]
    for number, (method, settings) in enumerate(stages, start=2):
        _say(f"{number}/6 training: {method.name}")
        models[method.name] = _train(plan, out / method.name, method, settings)
    _say(f"6/6 solving {plan.test_problems} held-out problems with 1 to 4 passes")
    test = list(itertools.islice(problems_of(plan.corpus, "test"), plan.test_problems))
    rows = [row for name, model in models.items() for row in _scores(name, model, test)]
    console.print(_table(rows, plan.test_problems))
    _show_refinement(console, models["self-refine"], test)
    seconds = time.perf_counter() - begun
    results = {"version": __version__, "seed": seed, "seconds": round(seconds), "plan": asdict(plan), "rows": rows}
    write_whole(out / RESULTS, json.dumps(results, indent=2) + "\n")
    _say(f"done in {seconds:.0f} s; results in {out / RESULTS}. Watch it live:")
    # repr writes the line break as \n and puts quotes around: with $ in front, that is how a shell reads it
    print(f"{_program()} generate {out / 'self-refine'} ${test[0].prompt!r} --show-drafts", file=sys.stderr)


def _program() -> str:
    """The name this was called by: .venv/bin/freda, if make did."""
    return sys.argv[0] if sys.argv[0].endswith("freda") else "freda"


def _say(message: str) -> None:
    print(f"demo: {message}", file=sys.stderr, flush=True)


def _clear(out: Path) -> None:
    """Empty the folder of an earlier demo: remove what that made and nothing else."""
    made = {"data", "autoregressive", "block-diffusion", "self-refine", "best-of-n", RESULTS, MARKER}
    found = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if found - made or (found and MARKER not in found):
        raise FredaError(f"{out} holds {min(found - made or found)}, which no demo made; choose another folder: --out")
    for name in found - {RESULTS, MARKER}:
        shutil.rmtree(out / name)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).write_text("freda demo may replace what is in this folder.\n", encoding="utf-8")


def _train(plan: Plan, folder: Path, method: Method, settings: TrainConfig) -> Model:
    config = RunConfig(data=plan.data, model=plan.model, method=method, train=settings)
    result = train(config, folder, name=method.name)
    if result.interrupted:
        raise FredaError(f"stopped by {result.interrupted}; start the demo again with: freda demo")
    return Model(load_model(folder), EngineConfig(max_batch=BATCH, max_length=plan.data.seq_len))


def _scores(name: str, model: Model, test: list[Item]) -> list[dict[str, Any]]:
    """One row of the table for each number of passes."""
    rows, axes = [], model.loaded.method.axes
    scores = "width" in axes  # candidates compete from the second pass on
    for passes in (PASSES[1:] if scores else PASSES) if axes else PASSES[:1]:
        settings: dict[str, Any] = {"passes": passes, "threshold": THRESHOLD, "max_new_tokens": LONGEST_SOLUTION}
        begun = time.perf_counter()
        found = model.generate([problem.prompt for problem in test], **settings)
        seconds = time.perf_counter() - begun
        right = sum(grade(problem, one.text) for problem, one in zip(test, found, strict=True)) / len(test)
        nfe, tokens = sum(one.nfe for one in found), sum(len(one.tokens) for one in found)
        score = {"n": len(test), "accuracy": right, "standard_error": (right * (1 - right) / len(test)) ** 0.5}
        speed = {"nfe": nfe / len(test), "tpf": tokens / nfe, "seconds": seconds}
        accuracy = None if scores else token_accuracy(model.loaded, test, passes)  # of drafts without a choice
        rows.append({"method": name, **settings, **score, **speed, "token_accuracy": accuracy})
    return rows


def _table(rows: list[dict[str, Any]], count: int) -> Table:
    table = Table(title=f"{count} held-out problems", title_justify="left")
    for heading in ("method", "passes", "exact match", "token accuracy", "tokens per forward"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for previous, row in zip([None, *rows], rows, strict=False):
        if previous is not None and previous["method"] != row["method"]:
            table.add_section()
        exact = f"{100 * row['accuracy']:.1f} ± {100 * row['standard_error']:.1f}"
        tokens = "-" if row["token_accuracy"] is None else f"{100 * row['token_accuracy']:.1f}"
        table.add_row(row["method"], str(row["passes"]), exact, tokens, f"{row['tpf']:.2f}")
    return table


def _show_bundled(console: Console) -> None:
    """A held-out question of each kind, answered by the bundled model; nothing where none is bundled."""
    folder = packaged_folder(BUNDLED)
    if folder is None:
        return
    questions = held_out(folder / "data")
    _say(f"first, {len(questions)} questions to {BUNDLED}, a model bundled with freda")
    model = Model(load_model(folder), EngineConfig(max_batch=1))
    for question in questions:
        console.print(question, style="blue", markup=False, soft_wrap=True)
        with LiveDrafts((), model.loaded.tokenizer, file=sys.stdout, pause=PAUSE) as drafts:
            found = model.complete(model.request(question, max_new_tokens=LONGEST_ANSWER, watch=True), drafts)
        console.print(found.text.rstrip("\n"), markup=False, soft_wrap=True)
        console.print(f"{len(found.tokens)} tokens in {found.nfe} forwards\n", style="dim")
    _say(f"ask it more with: {_program()} chat {BUNDLED}; now a tiny model is trained here")


def _show_refinement(console: Console, model: Model, test: list[Item]) -> None:
    """Three problems pass by pass, chosen so that something changes: solved, with a token revised on the way."""
    console.print("\nThree problems being refined:")
    console.print(legend(), end="\n\n")
    shown = 0
    for problem in test:
        watched: list[Pass] = []
        request = model.request(problem.prompt, watch=True, threshold=THRESHOLD, max_new_tokens=LONGEST_SOLUTION)
        found = model.complete(request, watched.append)
        revised = any(one.block == two.block and one.ids != two.ids for one, two in itertools.pairwise(watched))
        if not (grade(problem, found.text) and revised) and problem is not test[-1]:
            continue
        console.print(problem.prompt, style="blue", markup=False)
        for step in watched:
            console.print(pass_line(step, model.loaded.tokenizer), soft_wrap=True)
        console.print(f"{len(found.tokens)} tokens in {found.nfe} forwards\n", style="dim")
        shown += 1
        if shown == 3:
            return
