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
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from freda import __version__
from freda.bench.command import Settings, bench
from freda.decode.config import DecodeConfig
from freda.errors import AgreedError, FredaError, note

# Typer carries a click of its own or uses the package, by version; either way this is its error for wrong usage.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="freda",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Language models that draft a block of tokens, look at their own draft, and refine it.",
    epilog="Start with **freda chat mini**, a model that comes along, and **freda demo**, which trains four small ones "
    "and shows one refining, in a few minutes on two cores.",
)

DECODING = DecodeConfig()


def _version(wanted: bool) -> None:
    if wanted:
        print(f"freda {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(epilog="Example: **freda demo --out runs/demo**")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the corpus, the models and results.json.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of the corpus, the weights and all noise.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A few steps only: tries the way, not the models.")] = False,
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
    set_: Settings = [],  # noqa: B006
) -> None:
    """Turn documents into token shards; started again, it goes on where it was."""
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
        manifest = write_shards(resolved, out, root=data, workers=processes, note=note)
    except KeyboardInterrupt:
        note("interrupted; the same command goes on with it")
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
def generate(
    model: Annotated[Path, typer.Argument(help="A model folder, a run folder, or the name of a packaged model.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    method: Annotated[
        str | None,
        typer.Option(help="best-of-n, self-refine, block-diffusion or autoregressive; the model's own by default."),
    ] = None,
    passes: Annotated[int, typer.Option(help="Most passes per block, K.")] = DECODING.passes,
    threshold: Annotated[
        float, typer.Option(help="Probability from which a token is committed; over 1: never.")
    ] = DECODING.threshold,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to make.")] = DECODING.max_new_tokens,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.")] = DECODING.temperature,
    top_p: Annotated[float, typer.Option(help="Sample from the smallest set with this probability.")] = DECODING.top_p,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = DECODING.seed,
    width: Annotated[int, typer.Option(help="best-of-n: most candidates per pass, N.")] = DECODING.width,
    tau: Annotated[float, typer.Option(help="best-of-n: weight of the scorer.")] = DECODING.tau,
    swaps: Annotated[int, typer.Option(help="best-of-n: most positions a candidate changes, R.")] = DECODING.swaps,
    candidates: Annotated[
        str, typer.Option(help="best-of-n: beam, the cheapest changes to the draft, or sampled, random draws.")
    ] = DECODING.candidates,
    select: Annotated[str, typer.Option(help="best-of-n: argmax, or gumbel to choose by chance.")] = DECODING.select,
    stop: Annotated[list[str], typer.Option(help="A text that ends the answer; may be repeated.")] = [],  # noqa: B006
    reference: Annotated[bool, typer.Option("--reference", help="The plain loop instead of the engine.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Show every pass of every block.")] = False,
    pause: Annotated[float, typer.Option(help="Seconds between passes shown on a terminal.")] = 0.15,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Precision of the weights: float32 or bfloat16.")] = "float32",
) -> None:
    """Continue a text."""
    from freda.decode.complete import complete

    settings = {
        "max_new_tokens": max_new_tokens,
        "passes": passes,
        "threshold": threshold,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "width": width,
        "tau": tau,
        "swaps": swaps,
        "candidates": candidates,
        "select": select,
    }
    text = sys.stdin.read() if prompt == "-" else prompt
    place = {"device": device, "dtype": dtype}
    seen = pause if show_drafts else None
    answer = complete(model, text, settings, method=method, stop=stop, reference=reference, **place, pause=seen)
    if as_json:
        print(json.dumps(answer, ensure_ascii=False))
        return
    print(answer["text"])
    print(
        f"{len(answer['tokens'])} tokens in {answer['nfe']} forwards: {answer['tpf']:.2f} tokens per forward, "
        f"{answer['seconds']:.2f} s ({answer['method']})",
        file=sys.stderr,
    )


@app.command(
    epilog="Examples: **freda chat mini**; **freda chat models/qwen3-0.6b --raw**; from a pipe: "
    "**echo 'Mia has 4500 coins. She loses 312. How many does she have in the end?' | freda chat mini**. "
    "In it: /reset, /set passes=2, /help, /quit"
)
def chat(
    model: Annotated[Path, typer.Argument(help="A model folder, a run folder, or the name of a packaged model.")],
    method: Annotated[str | None, typer.Option(help="Decode as another method than the model's own.")] = None,
    passes: Annotated[int, typer.Option(help="Most passes per block, K.")] = DECODING.passes,
    threshold: Annotated[float, typer.Option(help="Probability from which a token is committed.")] = DECODING.threshold,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.")] = DECODING.temperature,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = DECODING.seed,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue what is typed as it is: no template, no Q: and A:.")
    ] = False,
    drafts: Annotated[
        bool | None, typer.Option(help="Show every pass of every block; by default if stdout is a terminal.")
    ] = None,
    pause: Annotated[float, typer.Option(help="Seconds between passes shown on a terminal.")] = 0.05,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Precision of the weights: float32 or bfloat16.")] = "float32",
) -> None:
    """Ask a model questions and watch it refine its answers."""
    from freda.decode.api import load
    from freda.decode.chat import Chat, messages, reader, suggestions, talk

    settings = {"passes": passes, "threshold": threshold, "max_new_tokens": max_new_tokens}
    settings |= {"temperature": temperature, "seed": seed}
    conversation = Chat(load(model, device, dtype, max_batch=1), settings, method=method, raw=raw)
    if sys.stdin.isatty():
        note(f"{model}: ask; /help says what else there is{suggestions(model)}")
    shown = sys.stdout.isatty() if drafts is None else drafts
    talk(conversation, messages(reader(sys.stdin)), sys.stdout, drafts=shown, pause=pause)


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
    "**freda eval runs/mine --task gsm8k --data ~/benchmarks --out runs/mine/eval**; "
    "**freda eval runs/mine --harness --task gsm8k --data ~/benchmarks**; "
    "**freda eval --self-check --data ~/benchmarks**; **freda eval --compare runs/a/gsm8k runs/b/gsm8k**",
)
def evaluate_(
    model: Annotated[
        Path | None, typer.Argument(help="A model folder, a run folder, or the name of a packaged model.")
    ] = None,
    task: Annotated[
        list[str],
        typer.Option(help="A benchmark, for example gsm8k; may be repeated. A packaged model brings its own."),
    ] = [],  # noqa: B006
    data: Annotated[
        Path | None, typer.Option(help="Folder of the benchmarks' files; benchmarks by default, or a packaged model's.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="For samples.jsonl and results.json; MODEL/eval by default, runs/eval for a packaged model."),
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Get files that are not there from the Hugging Face Hub first.")
    ] = False,
    unpublished: Annotated[
        bool, typer.Option("--unpublished", help="Ask files whose checksum is not the benchmark's.")
    ] = False,
    limit: Annotated[int, typer.Option(help="Only the first questions; 0 asks all.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Questions answered side by side.")] = 64,
    passes: Annotated[int, typer.Option(help="Most passes per block, K.")] = DECODING.passes,
    threshold: Annotated[float, typer.Option(help="Probability from which a token is committed.")] = DECODING.threshold,
    width: Annotated[int, typer.Option(help="best-of-n: most candidates per pass, N.")] = DECODING.width,
    tau: Annotated[float, typer.Option(help="best-of-n: weight of the scorer.")] = DECODING.tau,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer; a task may set less.")] = 1024,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Precision of the weights: float32 or bfloat16.")] = "float32",
    harness: Annotated[
        bool, typer.Option("--harness", help="Let lm-evaluation-harness ask, and compare; its own tasks work too.")
    ] = False,
    self_check: Annotated[bool, typer.Option("--self-check", help="Grade the published answers instead.")] = False,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Instead: paired difference of two folders, one task's each.")
    ] = None,
) -> None:
    """Answer a benchmark's questions and grade them; stopped, it goes on with the next question."""
    from freda.eval import command

    if compare is not None:
        command.compare_folders(*compare)
        return
    task, data = command.own_questions(model, task, data)
    if download:
        command.download_tasks(task, data)
        if model is None and not self_check:
            return
    if self_check:
        if not command.check_graders(task, data):
            raise typer.Exit(1)
        return
    if model is None or not task:
        raise FredaError("name a model and a --task, or check the graders with --self-check")
    settings = DecodeConfig(passes=passes, threshold=threshold, width=width, tau=tau, max_new_tokens=max_new_tokens)
    what: dict[str, Any] = {"tasks": task, "data": data, "limit": limit, "unpublished": unpublished, "out": out}
    how: dict[str, Any] = {"settings": settings, "batch_size": batch_size, "device": device, "dtype": dtype}
    (command.ask_by_harness if harness else command.evaluate_tasks)(command.Asked(model=model, **what, **how))


@app.command(
    epilog="Examples: **freda sweep configs/sweep-demo.toml --data runs/demo/data --out runs/demo-sweep**; "
    "draw again from a file: **freda sweep --draw results/demo-sweep.json --out figures**"
)
def sweep(
    config: Annotated[Path | None, typer.Argument(help="A TOML file with [sweep] and [system.NAME].")] = None,
    out: Annotated[Path, typer.Option(help="Folder for sweep.json, the tables and the figures.")] = Path("runs/sweep"),
    data: Annotated[Path, typer.Option(help="Folder of the benchmarks' files.")] = Path("benchmarks"),
    draw: Annotated[Path | None, typer.Option(help="Instead: a sweep.json, or its folder, to draw again.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Precision of the weights: float32 or bfloat16.")] = "float32",
    unpublished: Annotated[
        bool, typer.Option("--unpublished", help="Ask files whose checksum is not the benchmark's.")
    ] = False,
    set_: Settings = [],  # noqa: B006
) -> None:
    """Measure systems over passes, thresholds and candidates; the paper's tables and figures of them."""
    if (config is None) == (draw is None):
        raise FredaError("give a config to measure, or --draw FILE to draw what was measured")
    from freda.eval.command import draw_sweep, measure_sweep
    from freda.eval.config import load_sweep

    if config is not None:
        try:
            place = {"device": device, "dtype": dtype}
            measure_sweep(load_sweep(config, set_), data, out, unpublished=unpublished, note=note, **place)
        except KeyboardInterrupt:
            note("interrupted; the same command goes on with it")
            raise typer.Exit(130) from None
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
        return 2 if told_by_first else _complain(error, 2)
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        return 0
    except OSError as error:  # a full disk, a missing permission: the user's to fix, wherever it was met
        if debug:
            traceback.print_exc()
        return _complain(f"{error.strerror or error}: {error.filename or 'while writing'}", 2)


def _complain(problem: Any, code: int) -> int:
    message = " ".join(str(problem).split())
    print(f"freda: error: {message}", file=sys.stderr)
    return code
