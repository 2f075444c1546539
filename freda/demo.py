"""`freda demo`: the whole way in a few minutes on two cores.

A corpus of word problems, an autoregressive base, and from the same weights with the same rows one continuation as
block diffusion and one as self-refinement; then a table of what each gets right with 1 to 4 passes, and three problems
being refined pass by pass.
"""

from __future__ import annotations

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
from freda.config import Config, CorpusConfig, DataConfig, MethodConfig, MethodName, ModelConfig, TrainConfig, to_dict
from freda.data.prepare import prepare
from freda.data.synthetic import Problem, grade, problems
from freda.decode.generate import Pass, Request, generate
from freda.decode.show import pass_line
from freda.errors import FredaError
from freda.eval.run import exact_match, token_accuracy
from freda.methods import METHODS
from freda.model.weights import LoadedModel, load_model
from freda.train.loop import new_run, train

PASSES = (1, 2, 3, 4)
THRESHOLD = 0.9
LONGEST_SOLUTION = 40  # tokens; the written ones have at most 25


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    corpus: CorpusConfig
    model: ModelConfig
    base: TrainConfig
    tuned: TrainConfig  # block diffusion and self-refinement alike
    test_problems: int


def make_plan(seed: int, *, quick: bool) -> Plan:
    """The sizes of the demo; `quick` only tries the way."""
    corpus = CorpusConfig(problems=30_000, steps=1, max_number=20, seed=seed)
    model = ModelConfig(dim=128, layers=3, heads=4, kv_heads=4, head_dim=32, ffn_dim=384)
    base = TrainConfig(
        steps=420, batch_rows=16, group_rows=16, lr=3e-3, warmup_steps=30, schedule="cosine", seed=seed, keep=1
    )
    tuned = replace(base, steps=150, group_rows=8, lr=1.5e-3, warmup_steps=10)
    if quick:
        corpus = replace(corpus, problems=300, validation_problems=64)
        base, tuned = replace(base, steps=4, warmup_steps=1), replace(tuned, steps=3, warmup_steps=1)
    return Plan(corpus, model, base, tuned, test_problems=16 if quick else 400)


def run_demo(out: Path, *, seed: int, quick: bool) -> None:
    """Everything, with its output on stdout and its progress on stderr."""
    begun, plan, console = time.perf_counter(), make_plan(seed, quick=quick), Console(highlight=False)
    _clear(out)
    say("writing the corpus")
    prepare(plan.corpus, out / "data")
    base = _train(plan, out, "autoregressive", plan.base)
    models = {"autoregressive": base}
    for name in ("block-diffusion", "self-refine"):
        models[name] = _train(plan, out, name, replace(plan.tuned, init=str(out / "autoregressive")))
    corpus = plan.corpus
    test = problems("test", plan.test_problems, steps=corpus.steps, max_number=corpus.max_number, seed=seed)
    rows = [row for loaded in models.values() for row in _scores(loaded, test)]
    console.print(_table(rows, plan.test_problems))
    _show_refinement(console, models["self-refine"], test)
    seconds = time.perf_counter() - begun
    results = {"version": __version__, "seed": seed, "seconds": seconds, "plan": to_dict(plan), "rows": rows}
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    say(f"{seconds:.0f} s in all; results in {out / 'results.json'}. Now try:")
    say(f'  freda generate {out / "self-refine"} "{test[0].prompt!s}" --show-drafts'.replace("\n", "$'\\n'"))


def say(message: str) -> None:
    """Progress for the person who watches."""
    print(f"demo: {message}", file=sys.stderr, flush=True)
