"""`freda demo`, `prepare` and `train`: from documents to models."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from freda.cli.app import Settings, app
from freda.errors import FredaError, note


@app.command(epilog="Example: **freda demo --out runs/demo**")
def demo(
    out: Annotated[Path, Option(help="Folder for the corpus, the models and results.json.")] = Path("runs/demo"),
    seed: Annotated[int, Option(help="Seed of the corpus, the weights and all noise.")] = 0,
    quick: Annotated[bool, Option("--quick", help="A smoke test: a few steps of everything.")] = False,
) -> None:
    """Train four small models on word problems and watch one refine its drafts."""
    from freda.demo import run_demo

    run_demo(out, seed=seed, quick=quick)


@app.command(
    epilog="Examples: **freda prepare configs/corpus-sums.toml runs/sums/data**; "
    "**freda prepare configs/data-mini.toml runs/mini/data --data ~/corpora --plan**; on many machines: "
    "**torchrun --nnodes 4 --nproc-per-node 32 -m freda prepare configs/data-paper.toml /shared/paper**"
)
def prepare(
    config: Annotated[Path, Argument(help="A TOML file with [source.NAME] sections, or [corpus].")],
    out: Annotated[Path, Argument(help="Folder for the token shards.")],
    data: Annotated[Path, Option(help="Folder that relative paths in the config start from.")] = Path(),
    workers: Annotated[int, Option(help="Processes; 0 takes one per core.")] = 0,
    plan: Annotated[bool, Option("--plan", help="Only say what would be done and how long it takes.")] = False,
    replace: Annotated[bool, Option("--replace", help="Replace the shards of another corpus in OUT.")] = False,
    set_: Settings = [],  # noqa: B006
) -> None:
    """Turn documents into token shards; started again after an interruption, it resumes."""
    from freda.data.config import load_prepare
    from freda.data.estimate import plan_lines
    from freda.data.prepare import prepare as write_shards
    from freda.data.shards import shard_lines

    resolved, processes = load_prepare(config, set_), workers or os.cpu_count() or 1
    if workers < 0:
        raise FredaError(f"workers is {workers}; use 1 or more, or 0 for one per core")
    if plan:
        print("\n".join(plan_lines(resolved, data, processes)))
        return
    try:
        manifest = write_shards(resolved, out, root=data, workers=processes, replace_other=replace, note=note)
    except KeyboardInterrupt:
        note("interrupted; the same command resumes it")
        raise typer.Exit(130) from None
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(shard_lines(manifest)))


@app.command(
    epilog="Examples: **freda train runs/demo/self-refine/config.toml --out runs/mine --set method.passes=2**; "
    "if it was stopped: **freda train --resume runs/mine**; to train it longer: "
    "**freda train --resume runs/mine --set train.steps=9000**; what a run needs: "
    "**freda train configs/freda-4b-stage1.toml --dry-run --gpus 64 --shape qwen3-4b**"
)
def train(
    config: Annotated[Path | None, Argument(help="A TOML file; see docs/config.md.")] = None,
    out: Annotated[Path | None, Option(help="New run folder.")] = None,
    resume: Annotated[Path | None, Option(help="Run folder to resume; --set train.steps=N extends it.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only say what the run needs.")] = False,
    gpus: Annotated[int, Option(help="--dry-run: GPUs to plan for.")] = 1,
    tflops: Annotated[float, Option(help="--dry-run: TFLOP/s, from freda bench train; 0 takes an H200's.")] = 0.0,
    shape: Annotated[str, Option(help="--dry-run: shape to plan with, where train.init is not there.")] = "",
    set_: Settings = [],  # noqa: B006
) -> None:
    """Train a model; stop it with Ctrl-C and continue with --resume."""
    from freda.train import config as configs

    if dry_run:
        from freda.train.plan import plan_lines

        print("\n".join(plan_lines(configs.load(config, set_), gpus=gpus, tflops=tflops, shape_name=shape)))
        return
    if (config is None) == (resume is None) or (config is not None and out is None):
        raise FredaError("give a config and --out RUN to start a run, or --resume RUN to continue one")
    if resume is not None and out is not None:
        raise FredaError(f"--resume {resume} writes into that run; omit --out")
    folder = out or resume
    assert folder is not None

    def settings() -> configs.RunConfig:
        return loop.resume_run(folder, set_) if config is None else configs.load(config, set_)

    if config is not None and os.environ.get("WORLD_SIZE", "1") == "1":
        settings()  # a wrong config fails before torch is loaded
    from freda.train import loop
    from freda.train.parallel import processes

    with processes() as ranks:
        resolved = ranks.agree(settings)
        result = loop.train(resolved, folder, resume=resume is not None, name=folder.name, ranks=ranks)
    if ranks.first:
        print(result.checkpoint)
    if result.interrupted and ranks.first:
        print(f"resume with: freda train --resume {folder}", file=sys.stderr)
    if result.interrupted == "SIGINT":
        raise typer.Exit(130)
