"""Do models write the letter that they choose by likelihood? Walks of the mini suite, by number of passes.

    python experiments/mini/written.py results/mini/written.json self-refine=mini \
        block-diffusion=runs/mini-suite/0/block-diffusion base=runs/mini-suite/0/base

NAME=MODEL for each model; 400 walks, greedy, no early stop, a Best-of-N model without its scorer. The models of
docs/reproduction.md were int8 (freda convert --int8), on a CPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import freda
from freda.eval.report.points import NEVER
from freda.eval.tasks import TASKS
from freda.eval.tasks.task import Example
from freda.folders.model_folder import ASSETS

WALKS, PASSES = 400, (1, 2, 4)


def written(name: str, examples: list[Example]) -> dict[int, float]:
    """The share of walks whose letter is written correctly, by passes; an autoregressive model has one pass only."""
    model, found = freda.load(name), {}
    for passes in PASSES if model.loaded.method.axes else PASSES[:1]:
        settings = {"passes": passes, "threshold": NEVER, "tau": 0.0, "max_new_tokens": 4}
        answers = model.generate([example.prompt for example in examples], **settings)
        right = [answer.text.strip()[:1] == example.gold for answer, example in zip(answers, examples, strict=True)]
        found[passes] = sum(right) / len(right)
        print(f"{name}, {passes}: {100 * found[passes]:.2f}")
    return found


def main() -> None:
    """Give all models the same walks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    chosen = parser.parse_args()
    asked = TASKS["mini_logic"].examples(ASSETS / "mini" / "data")
    walks = [example for example in asked if example.group.startswith("walk")][:WALKS]
    pairs = (model.partition("=")[::2] for model in chosen.models)
    found = {name: written(path, walks) for name, path in pairs}
    chosen.out.write_text(json.dumps({"walks": len(walks), "right": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
