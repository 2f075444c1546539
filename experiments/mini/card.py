"""Put a model and its card into `freda/assets`; every number of the card is read from a file.

    python experiments/mini/card.py --run RUN --model INT8 --evals EVALS --data SHARDS --out freda/assets/mini

RUN is the training, INT8 the output of `freda convert --int8`, EVALS/whole and EVALS/int8 the results of `freda eval`
for both. A model of more than 25 MB, or one that loses half a point or more by int8 (mean of the tasks), is refused.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from freda.data.shards import Manifest
from freda.errors import FredaError, require
from freda.files import written_beside
from freda.folders.model_folder import load_model
from freda.train import config as configs

MOST_BYTES, MOST_LOSS = 25_000_000, 0.005
TASKS = {"mini_math": "mathematics", "mini_code": "code", "mini_logic": "logic"}

CARD = """# {name}

A language model of {parameters} parameters that drafts {block_size} tokens at a time and refines its own drafts. It is
bundled with `freda`, so that there is something to try without a download. It answers questions of the
[mini suite]({suite}): made-up word problems, small Python functions and deductions, in English. It has read no other
text, knows nothing of the world, and answers each question without memory of the one before.

```
freda chat {name}
freda generate {name} "{question}" --show-drafts
freda eval {name}
```

## What it does

Held-out questions, whose contents are not in the training data; {passes} passes, threshold {threshold}, on {device}:

| kind | questions | right (%) | standard error | tokens per forward | before int8 (%) |
|---|---:|---:|---:|---:|---:|
{rows}

The method is {method}; other numbers of passes and the baselines trained from the same base are in `results/mini`.
Logic answers are chosen by likelihood, in one forward, among four letters: 25% are right by chance. Precision: {dtype}.

| kind, family of questions | percent right by level: steps, hops of a look-up (inside, with, swap), moves of a walk |
|---|---|
{levels}

Numbers are mostly of three or four digits; with smaller ones, or with words and phrasings that the suite does not have,
the model goes astray. Do not rely on any answer.

## How it was made

{stages}

```
{command}
```

The data is the mini suite alone, {tokens:,} tokens (made by the first command), in rows of {seq_len:,}. AdamW; the
configs are in `configs/mini`. The weights are int8 with a scale for each row: {megabytes:.1f} MB in all.
Apache-2.0, like the code.
"""


def results(evals: Path, kind: str) -> dict[str, dict[str, Any]]:
    """The results of `freda eval`, by task."""
    found = {}
    for task in TASKS:
        path = evals / kind / task / "results.json"
        require(path.is_file(), f"there is no {path}; run freda eval first")
        found[task] = json.loads(path.read_text(encoding="utf-8"))
    return found


def stages(run: Path) -> list[configs.RunConfig]:
    """The trainings that led to a run, the first one first."""
    path = run / "config.toml"
    require(path.is_file(), f"{run} is not a run folder: it has no config.toml")
    config = configs.load(path)
    if not config.train.init:
        return [config]
    beside = run.parent / Path(config.train.init).name  # if the folder of all runs was moved
    return [*stages(beside if beside.is_dir() else Path(config.train.init)), config]


def stage_line(number: int, config: configs.RunConfig) -> str:
    """A line of the card about one training."""
    tokens = config.train.steps * config.train.batch_rows * config.data.seq_len
    what = f"{config.train.steps:,} steps, {tokens / 1e6:.1f} M tokens"
    return f"{number}. {config.method.name}: {what}, learning rate {config.train.lr:g}, seed {config.train.seed}."


def table_row(kind: str, found: dict[str, Any], before: float) -> str:
    """A line of the card's table; `before` is the accuracy without int8."""
    right, error = 100 * found["accuracy"], 100 * found["standard_error"]
    return f"| {kind} | {found['n']:,} | {right:.1f} | {error:.1f} | {found['tpf']:.2f} | {100 * before:.1f} |"


def level_rows(kind: str, found: dict[str, Any]) -> list[str]:
    """Percent right at each level, a line for each family of questions."""
    families: dict[str, list[str]] = {}
    for group, part in found["groups"].items():
        family, level = group.split()
        families.setdefault(family, []).append(f"{level}: {100 * part['accuracy']:.0f}")
    return [f"| {kind}, {family} | {', '.join(shares)} |" for family, shares in families.items()]


def card(name: str, run: Path, model: Path, evals: Path, data: Path) -> str:
    """The text of the card."""
    whole, small, loaded = results(evals, "whole"), results(evals, "int8"), load_model(model)
    size = sum(path.stat().st_size for path in model.iterdir())
    require(size <= MOST_BYTES, f"{model} has {size:,} bytes; at most {MOST_BYTES:,} are shipped")
    lost = sum(whole[task]["accuracy"] - small[task]["accuracy"] for task in TASKS) / len(TASKS)
    require(lost < MOST_LOSS, f"int8 costs {100 * lost:.2f} points; less than {100 * MOST_LOSS} are allowed")
    rows = [table_row(kind, small[task], whole[task]["accuracy"]) for task, kind in TASKS.items()]
    made, decoding = stages(run), small["mini_math"]["settings"]
    return CARD.format(
        name=name,
        parameters=f"{sum(weight.numel() for weight in loaded.backbone.parameters()) / 1e6:.1f} M",
        suite="../../../docs/mini.md",
        question=small["mini_math"]["prompts"][0].removesuffix("\nA:"),
        device=small["mini_math"]["device"],
        dtype=small["mini_math"]["dtype"],
        passes=decoding["passes"],
        threshold=decoding["threshold"],
        block_size=loaded.method.block_size,
        method=loaded.method.name,
        rows="\n".join(rows),
        levels="\n".join(row for task, kind in TASKS.items() for row in level_rows(kind, small[task])),
        stages="\n".join(stage_line(number, config) for number, config in enumerate(made, start=1)),
        command=f"SEEDS={made[-1].train.seed} experiments/mini/train.sh\n"
        f"REPLACE=1 experiments/mini/ship.sh {run.name} {made[-1].train.seed}",
        seq_len=made[-1].data.seq_len,
        tokens=Manifest.read(data).splits["train"].tokens,
        megabytes=size / 1e6,
    )


def ship(run: Path, model: Path, evals: Path, data: Path, out: Path, *, over: bool) -> None:
    """Write the folder completely or not at all; with `over`, replace an older one."""
    text = card(out.name, run, model, evals, data)
    with written_beside(out, over) as made:
        shutil.copytree(model, made, ignore=shutil.ignore_patterns("eval"), dirs_exist_ok=True)
        (made / "README.md").write_text(text, encoding="utf-8")
        (made / "data").mkdir()
        questions = replace(Manifest.read(data), splits={}, examples=[])  # how the questions are made, without shards
        questions.write(made / "data")
        for path in made.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors writes files that only their owner can read


def main() -> int:
    """Read the arguments, say what is wrong in one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("run", "model", "evals", "data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--replace", action="store_true", help="replace an older model in OUT")
    chosen = parser.parse_args()
    try:
        ship(chosen.run, chosen.model, chosen.evals, chosen.data, chosen.out, over=chosen.replace)
    except FredaError as error:
        print(f"card: error: {error}", file=sys.stderr)
        return 2
    print(chosen.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
