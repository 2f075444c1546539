"""The command line: parse, call, print. Answers go to stdout, everything else to stderr.

Nothing heavy is imported at module level, so that `freda --help` answers at once; every command imports what it needs.
Only this module ends the process.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from freda import __version__
from freda.bench.command import bench
from freda.decode.config import DecodeConfig, EngineConfig
from freda.errors import AgreedError, FredaError, note
from freda.options import Device, Dtype, Method, ModelPath, Settings, Stop, decode_options

# Typer carries a click of its own or uses the package, by version; either way this is its error for wrong usage.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="freda",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Language models that draft a block of tokens, look at their own draft, and refine it.",
    epilog="Start with **freda chat mini**, a bundled model, and **freda demo**, which trains four small ones and "
    "shows one refining its drafts, in a few minutes on two cores.",
)

Unpublished = Annotated[
    bool, typer.Option("--unpublished", help="Accept benchmark files whose checksum is not the published one.")
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"freda {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(epilog="Example: **freda demo --out runs/demo**")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the corpus, the models and results.json.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of the corpus, the weights and all noise.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke test: a few steps of everything.")] = False,
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
    config: Annotated[Path, typer.Argument(help="A TOML file with [source.NAME] sections, or [corpus].")],
    out: Annotated[Path, typer.Argument(help="Folder for the token shards.")],
    data: Annotated[Path, typer.Option(help="Folder that relative paths in the config start from.")] = Path(),
    workers: Annotated[int, typer.Option(help="Processes; 0 takes one per core.")] = 0,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what would be done and how long it takes.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the shards of another corpus in OUT.")] = False,
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
    config: Annotated[Path | None, typer.Argument(help="A TOML file; see docs/config.md.")] = None,
    out: Annotated[Path | None, typer.Option(help="New run folder.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Run folder to resume; --set train.steps=N extends it.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what the run needs.")] = False,
    gpus: Annotated[int, typer.Option(help="--dry-run: GPUs to plan for.")] = 1,
    tflops: Annotated[
        float, typer.Option(help="--dry-run: useful TFLOP/s of a GPU, from freda bench train; 0 takes an H200's.")
    ] = 0.0,
    shape: Annotated[str, typer.Option(help="--dry-run: shape to plan with, where train.init is not there.")] = "",
    set_: Settings = [],  # noqa: B006
) -> None:
    """Train a model; stop it with Ctrl-C and continue with --resume."""
    from freda.train import config as configs

    if dry_run:
        from freda.train.plan import plan_lines

        plan = plan_lines(configs.load(config, set_), gpus=gpus, tflops=tflops, shape_name=shape)
        print("\n".join(plan))
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


@app.command(
    epilog="Examples: **freda generate mini $'Q: Mia has 4500 coins. She loses 312. How many?\\nA:' --show-drafts**; "
    '**freda generate runs/demo/self-refine "Q: Mia has 12 shells." --json**'
)
@decode_options
def generate(
    model: ModelPath,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    method: Method = None,
    decode: DecodeConfig = DecodeConfig(),
    stop: Stop = [],  # noqa: B006
    reference: Annotated[
        bool, typer.Option("--reference", help="Decode with the plain loop that the engine must equal.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Show every pass of every block.")] = False,
    pause: Annotated[float, typer.Option(help="Seconds between passes shown on a terminal.")] = 0.15,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Continue a text."""
    from freda.decode.command import complete, open_model
    from freda.decode.request import Request

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise FredaError("the prompt is empty; give the text to continue")
    how: dict[str, Any] = {**asdict(decode), "method": method, "stop": stop, "watch": show_drafts}
    loaded = open_model(model, device, dtype, method=method, prompt=text)
    answer = complete(loaded, Request(prompt=loaded.tokenizer.encode(text), **how), reference=reference, pause=pause)
    if as_json:
        print(json.dumps(answer, ensure_ascii=False))
        return
    print(answer["text"])
    counts = f"{len(answer['tokens'])} tokens in {answer['nfe']} forwards: {answer['tpf']:.2f} tokens per forward"
    print(f"{counts}, {answer['seconds']:.2f} s ({answer['method']})", file=sys.stderr)


@app.command(
    epilog="Examples: **freda chat mini**; **freda chat models/qwen3-0.6b --raw**; from a pipe: "
    "**echo 'Mia has 4500 coins. She loses 312. How many does she have in the end?' | freda chat mini**. "
    "In it: /reset, /set passes=2, /help, /quit"
)
@decode_options
def chat(
    model: ModelPath,
    method: Method = None,
    decode: DecodeConfig = DecodeConfig(max_new_tokens=256),
    system: Annotated[str, typer.Option(help="System prompt, for a model that has a chat template.")] = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue what is typed as it is: no template, no Q: and A:.")
    ] = False,
    drafts: Annotated[
        bool | None,
        typer.Option(
            "--show-drafts/--no-drafts",
            "--drafts",
            help="Show every pass of every block; by default if stdout is a terminal.",
        ),
    ] = None,
    pause: Annotated[float, typer.Option(help="Seconds between passes shown on a terminal.")] = 0.05,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Ask a model questions and watch it refine its answers."""
    from freda.decode.api import Model
    from freda.decode.chat import Chat, messages, reader, talk
    from freda.decode.command import open_model

    opened = Model(open_model(model, device, dtype, method=method), EngineConfig(max_batch=1), name=str(model))
    conversation = Chat(opened, decode, method=method, raw=raw, system=system)
    if sys.stdin.isatty():
        note(f"{model}: ask; /help says what else there is{conversation.suggestions()}")
    shown = sys.stdout.isatty() if drafts is None else drafts
    talk(conversation, messages(reader(sys.stdin)), sys.stdout, drafts=shown, pause=pause, keep=bool(drafts))


@app.command(
    epilog="Examples: **freda convert ~/models/Qwen3-0.6B-Base models/qwen3-0.6b**; "
    "a copy in another precision: **freda convert runs/mine models/mine --dtype bfloat16**"
)
def convert(
    source: Annotated[Path, typer.Argument(help="A Hugging Face folder, a GGUF file, or a freda model or run folder.")],
    target: Annotated[Path, typer.Argument(help="Model folder to write.")],
    block_size: Annotated[
        int | None, typer.Option(help="Block size stored with a Hugging Face or GGUF model; 4 by default.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16 or int8; by default the source's own, bfloat16 for a quantised GGUF file."
        ),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="The same as --dtype int8.")] = False,
) -> None:
    """Make a model folder from another project's checkpoint, or copy a freda model in another precision."""
    from freda.folders.convert import convert as write_model_folder

    if int8 and dtype is not None:
        raise FredaError(f"--int8 and --dtype {dtype} cannot be combined; omit one of them")
    summary = write_model_folder(source, target, block_size=block_size, dtype="int8" if int8 else dtype)
    for name, value in summary.items():
        print(f"{name}: {value}")


@app.command(
    "eval",
    epilog="Examples: **freda eval mini --limit 100**; "
    "**freda eval runs/mine --task gsm8k --data benchmarks --download --out runs/mine/eval**; "
    "**freda eval runs/mine --harness --task hellaswag**; "
    "**freda eval --self-check --data benchmarks**; **freda eval --compare runs/a/gsm8k runs/b/gsm8k**",
)
@decode_options
def evaluate_(
    model: Annotated[
        Path | None, typer.Argument(help="A model folder, a run folder, or the name of a bundled model.")
    ] = None,
    task: Annotated[
        list[str],
        typer.Option(help="A benchmark, for example gsm8k; may be repeated. A bundled model brings its own."),
    ] = [],  # noqa: B006
    data: Annotated[
        Path | None, typer.Option(help="Folder of the benchmarks' files; benchmarks by default, or a bundled model's.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="For samples.jsonl and results.json; MODEL/eval by default, runs/eval for a bundled model."),
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="First get missing files from the Hugging Face Hub.")
    ] = False,
    unpublished: Unpublished = False,
    limit: Annotated[int, typer.Option(help="Only the first questions; 0 asks all.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Questions answered side by side.")] = 64,
    decode: DecodeConfig = DecodeConfig(max_new_tokens=1024),
    device: Device = "auto",
    dtype: Dtype = "auto",
    harness: Annotated[
        bool, typer.Option("--harness", help="Let lm-evaluation-harness ask; --task names tasks of its own.")
    ] = False,
    self_check: Annotated[bool, typer.Option("--self-check", help="Grade the published answers instead.")] = False,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Instead: paired difference of two folders, one task's each.")
    ] = None,
) -> None:
    """Answer a benchmark's questions and grade the answers; a run that was stopped resumes where it was."""
    if compare is not None:
        from freda.eval.report import compare as comparing

        print(comparing.compared_line(comparing.compare(*compare)))
        return
    from freda.eval import command

    if not harness:
        task, data = command.own_questions(model, task, data)
        if download:
            command.download_tasks(task, data)
            if model is None and not self_check:
                return
    if self_check:
        if not command.check_graders(task, data or Path("benchmarks")):
            raise typer.Exit(1)
        return
    if model is None or not task:
        raise FredaError("name a model and a --task, or check the graders with --self-check")
    what: dict[str, Any] = {"tasks": task, "data": data or Path("benchmarks"), "out": out, "settings": decode}
    how: dict[str, Any] = {"limit": limit, "unpublished": unpublished, "batch_size": batch_size}
    job = command.EvalJob(model=model, **what, **how, device=device, dtype=dtype)
    (command.ask_by_harness if harness else command.evaluate_tasks)(job)


@app.command(
    epilog="Examples: **freda sweep configs/sweep-demo.toml --data runs/demo/data --out runs/demo-sweep**; "
    "draw again from a file: **freda sweep --draw results/demo-sweep.json --out figures**"
)
def sweep(
    config: Annotated[Path | None, typer.Argument(help="A TOML file with [sweep] and [system.NAME].")] = None,
    out: Annotated[Path, typer.Option(help="Folder for sweep.json, the tables and the figures.")] = Path("runs/sweep"),
    data: Annotated[Path, typer.Option(help="Folder of the benchmarks' files.")] = Path("benchmarks"),
    draw: Annotated[Path | None, typer.Option(help="Instead: a sweep.json, or its folder, to draw again.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    unpublished: Unpublished = False,
    set_: Settings = [],  # noqa: B006
) -> None:
    """Measure systems over passes, thresholds and candidates, and draw the paper's tables and figures of them."""
    if (config is None) == (draw is None):
        raise FredaError("give a config to measure, or --draw FILE to draw what was measured")
    if config is not None:
        from freda.eval.config import load_sweep

        file = load_sweep(config, set_)  # a wrong config fails before torch is loaded
        from freda.eval.sweep import run_sweep

        try:
            run_sweep(file, data, out, device=device, dtype=dtype, unpublished=unpublished)
        except KeyboardInterrupt:
            note("interrupted; the same command resumes where it was")
            raise typer.Exit(130) from None
    from freda.eval.report.write import draw_sweep

    for path in draw_sweep(draw or out, out):
        print(path)


app.add_typer(bench, name="bench")


@app.command(epilog="Examples: **freda inspect mini**; **freda inspect runs/demo/data --rows 2**")
def inspect(
    path: Annotated[
        Path, typer.Argument(help="A model folder, a run folder, a bundled model's name, or a folder of token shards.")
    ],
    rows: Annotated[int, typer.Option(help="Shards: packed rows to show, with documents and blocks marked.")] = 0,
    seq_len: Annotated[int, typer.Option(help="Shards: tokens per row.")] = 4096,
    block_size: Annotated[int, typer.Option(help="Shards: tokens per block.")] = 4,
    histogram: Annotated[Path | None, typer.Option(help="Shards: draw the document lengths as a PNG.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Shards: read all of them and check their hashes.")] = False,
) -> None:
    """Describe what a folder holds."""
    from freda.describe import ShardView, describe

    print(describe(path, ShardView(rows, seq_len, block_size, histogram, verify)))


def main() -> NoReturn:
    """Run the command line; the only exit of the program."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1  # accepted anywhere on the line
    sys.exit(run(arguments, debug=debug))


def run(arguments: list[str], *, debug: bool = False) -> int:
    """Carry out one command line; returns the exit code."""
    logging.getLogger("freda").setLevel(logging.DEBUG if debug else logging.WARNING)
    try:
        code = app(args=arguments, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (typer.Abort, KeyboardInterrupt):
        return _complain("interrupted", 130)
    except (FredaError, UsageError) as error:
        if debug:
            traceback.print_exc()
        told_by_first = isinstance(error, AgreedError | UsageError) and os.environ.get("RANK", "0") != "0"
        return 2 if told_by_first else _complain(_usage(error), 2)
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        return 0
    except OSError as error:  # a full disk, a missing permission: the user's to fix, wherever it was met
        if debug:
            traceback.print_exc()
        return _complain(f"{error.strerror or error}: {error.filename or 'while writing'}", 2)


def _usage(error: Exception) -> str:
    """What an error says; one of wrong usage with the nearest option, or, where something is missing, an example."""
    if not isinstance(error, UsageError):
        return str(error)
    message = str(getattr(error, "format_message", error.__str__)()).rstrip(".")
    command = getattr(getattr(error, "ctx", None), "command", None)
    example = (getattr(command, "epilog", None) or "").split("**")[1:2]
    return f"{message}; for example: {example[0]}" if "Missing" in message and example else message


def _complain(problem: Any, code: int) -> int:
    message = " ".join(str(problem).split())
    print(f"freda: error: {message}", file=sys.stderr)
    return code
