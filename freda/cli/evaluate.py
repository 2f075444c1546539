"""`freda eval` and `sweep`: how good models are, and how fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from freda.cli.app import Adapter, Device, Dtype, Settings, app, decode_options
from freda.errors import FredaError, note
from freda.eval.config import EvalSettings

NoIsolation = Annotated[
    bool, Option("--no-isolation", help="Run programs even where the kernel cannot isolate them (SECURITY.md).")
]
Unpublished = Annotated[bool, Option("--unpublished", help="Accept files whose checksum is not the published one.")]


@app.command(
    "eval",
    epilog="Examples: **freda eval mini --limit 100**; "
    "**freda eval runs/mine --task gsm8k --data benchmarks --download --out runs/mine/eval**; "
    "**freda eval runs/mine --harness --task hellaswag**; "
    "**freda eval --self-check --data benchmarks**; **freda eval --compare runs/a/gsm8k runs/b/gsm8k**",
)
@decode_options
def evaluate_(
    model: Annotated[Path | None, Argument(help="A model folder, run folder, or bundled model's name.")] = None,
    task: Annotated[list[str], Option(help="A benchmark; may be repeated. Bundled models bring theirs.")] = [],  # noqa: B006
    data: Annotated[Path | None, Option(help="Folder of their files; benchmarks, or a bundled model's.")] = None,
    out: Annotated[
        Path | None, Option(help="Folder for the results; MODEL/eval by default, runs/eval for a bundled model.")
    ] = None,
    download: Annotated[bool, Option("--download", help="First get missing files from the Hugging Face Hub.")] = False,
    unpublished: Unpublished = False,
    limit: Annotated[int, Option(help="Only the first questions; 0 asks all.")] = 0,
    batch_size: Annotated[int, Option(help="Questions answered side by side.")] = 64,
    decode: EvalSettings = EvalSettings(max_new_tokens=1024),
    adapter: Adapter = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    no_isolation: NoIsolation = False,
    harness: Annotated[bool, Option("--harness", help="Let lm-evaluation-harness ask tasks of its own.")] = False,
    self_check: Annotated[bool, Option("--self-check", help="Grade the published answers instead.")] = False,
    compare: Annotated[tuple[Path, Path] | None, Option(help="Instead: paired difference of two results.")] = None,
) -> None:
    """Answer a benchmark's questions and grade the answers; a run that was stopped resumes where it was."""
    if compare is not None:
        from freda.eval.report import results

        print(results.compared_line(results.compare(*compare)))
        return
    from freda.eval import command

    if not harness:
        task, data = command.own_questions(model, task, data)
        if download:
            command.download_tasks(task, data)
            if model is None and not self_check:
                return
    if self_check:
        if not command.check_graders(task, data or Path("benchmarks"), isolated=not no_isolation):
            raise typer.Exit(1)
        return
    if model is None or not task:
        raise FredaError("name a model and a --task, or check the graders with --self-check")
    what: dict[str, Any] = {"tasks": task, "data": data or Path("benchmarks"), "out": out, "settings": decode}
    how: dict[str, Any] = {"limit": limit, "unpublished": unpublished, "isolated": not no_isolation}
    how |= {"batch_size": batch_size, "device": device, "dtype": dtype}
    job = command.EvalJob(model=model, adapter=adapter, **what, **how)
    (command.ask_by_harness if harness else command.evaluate_tasks)(job)


@app.command(
    epilog="Examples: **freda sweep configs/sweep-demo.toml --data runs/demo/data --out runs/demo-sweep**; "
    "draw again from a file: **freda sweep --draw results/demo-sweep.json --out figures**"
)
def sweep(
    config: Annotated[Path | None, Argument(help="A TOML file with [sweep] and [system.NAME].")] = None,
    out: Annotated[Path, Option(help="Folder for sweep.json, the tables and the figures.")] = Path("runs/sweep"),
    data: Annotated[Path, Option(help="Folder of the benchmarks' files.")] = Path("benchmarks"),
    draw: Annotated[Path | None, Option(help="Instead: a sweep.json, or its folder, to draw again.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    unpublished: Unpublished = False,
    no_isolation: NoIsolation = False,
    set_: Settings = [],  # noqa: B006
) -> None:
    """Measure systems over passes, thresholds and candidates, and draw the paper's tables and figures of them."""
    if (config is None) == (draw is None):
        raise FredaError("give a config to measure, or --draw FILE to draw what was measured")
    if config is not None:
        from freda.eval.config import load_sweep

        set_ = [*set_, "sweep.isolation=false"] if no_isolation else set_
        file = load_sweep(config, set_)  # a wrong config fails before torch is loaded
        from freda.eval.sweep import run_sweep

        try:
            run_sweep(file, data, out, device=device, dtype=dtype, unpublished=unpublished)
        except KeyboardInterrupt:
            note("interrupted; the same command resumes where it was")
            raise typer.Exit(130) from None
    from freda.eval.report.figures import draw_sweep

    for path in draw_sweep(draw or out, out):
        print(path)
