"""`freda bench`: its commands. Nothing heavy is imported at module level."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from freda.cli.app import Adapter, Device, Dtype, Settings, app
from freda.decode.config import EngineConfig
from freda.errors import require
from freda.files import write_whole

bench = typer.Typer(help="Measure speed beside limits that are measured in the same run.", invoke_without_command=True)
app.add_typer(bench, name="bench")


@bench.callback()
def _bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@bench.command("data", epilog="Example: **freda bench data configs/data-mini.toml --data ~/corpora**")
def bench_data(
    config: Annotated[Path, Argument(help="A TOML file with [source.NAME] sections: where the text is from.")],
    data: Annotated[Path, Option(help="Folder that relative paths in the config start from.")] = Path(),
    megabytes: Annotated[float, Option(help="Text to measure on.")] = 50.0,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
    set_: Settings = [],  # noqa: B006
) -> None:
    """Documents to shards: tokens per second of one core, beside the tokenizer libraries alone."""
    from freda.bench.data import bench_data as measure
    from freda.bench.data import table_lines
    from freda.data.config import load_prepare

    found = measure(load_prepare(config, set_), data, megabytes)
    print(json.dumps(found) if as_json else "\n".join(table_lines(found)))


@bench.command(
    "train", epilog="Example: **freda bench train --shape qwen3-4b --rows 2 --out results/bench-train.json**"
)
def bench_train(
    shape: Annotated[str, Option(help="tiny, qwen3-0.6b, qwen3-1.7b, qwen3-4b or qwen3-8b.")] = "qwen3-4b",
    rows: Annotated[int, Option(help="Rows of a step.")] = 2,
    seq_len: Annotated[int, Option(help="Tokens per row.")] = 4096,
    documents: Annotated[int, Option(help="Documents per row, of equal length.")] = 1,
    passes: Annotated[list[int], Option(help="Passes of a step; may be repeated.")] = [1, 2, 3],  # noqa: B006
    method: Annotated[str, Option(help="Method to train; NAME, or NAME:KEY=VALUE,... with settings.")] = "self-refine",
    activations: Annotated[float, Option(help="Share of activations kept for backward.")] = 1.0,
    compare: Annotated[bool, Option("--compare", help="Add plain variants, each in the same run.")] = False,
    profile: Annotated[bool, Option("--profile", help="Add the time of every kind of kernel.")] = False,
    device: Device = "auto",
    out: Annotated[Path | None, Option(help="Also write all numbers here, as JSON.")] = None,
) -> None:
    """Optimizer steps with random weights: tokens per second, and the share of the matmul rate of the same run."""
    from freda.bench.train import Load, table_lines
    from freda.bench.train import bench_train as measure

    load = Load(shape, seq_len, rows, documents, passes, method, activations)
    found = measure(load, compare=compare, profile=profile, device=device)
    _report(found, table_lines(found), out)


@bench.command(
    "decode",
    epilog="Examples: **freda bench decode runs/demo/self-refine --batch 1 --batch 16 --compare**, "
    "**freda bench decode qwen3-4b --batch 128 --mixed --arrivals 70% --out mixed.json**",
)
def bench_decode(
    model: Annotated[str, Argument(help="A model folder, or a shape with random weights, as qwen3-4b.")],
    batch: Annotated[list[int], Option(help="Requests side by side; may be repeated.")] = [1],  # noqa: B006
    context: Annotated[list[int], Option(help="Tokens of a prompt; may be repeated.")] = [512],  # noqa: B006
    new_tokens: Annotated[int, Option(help="Tokens to make for each request.")] = 64,
    passes: Annotated[int, Option(help="Most passes per block.")] = 2,
    threshold: Annotated[float, Option(help="Probability that commits a token; above 1: all passes are made.")] = 2.0,
    method: Annotated[str, Option(help="How to decode; for a shape also NAME:layout=shifted.")] = "self-refine",
    compare: Annotated[bool, Option("--compare", help="Add other decoders of the same weights and prompts.")] = False,
    plain: Annotated[bool, Option("--plain", help="The engine without its kernels and CUDA graphs.")] = False,
    int8: Annotated[bool, Option("--int8", help="Weights as int8, where the kernels have few tokens.")] = False,
    profile: Annotated[bool, Option("--profile", help="Add the time of every kernel in a forward.")] = False,
    mixed: Annotated[bool, Option("--mixed", help="3 requests per place: of equal, then of mixed lengths.")] = False,
    prompts: Annotated[str, Option(help="With --mixed: tokens of a prompt, drawn uniformly.")] = "64-1024",
    answers: Annotated[str, Option(help="With --mixed: tokens of an answer, drawn uniformly.")] = "16-512",
    arrivals: Annotated[
        list[str], Option(help="Then let them arrive: so many a second, or 70% of --mixed's; may be repeated.")
    ] = [],  # noqa: B006
    adapter: Adapter = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: Annotated[Path | None, Option(help="Also write all numbers here, as JSON.")] = None,
) -> None:
    """The engine's forwards and tokens per second, beside the copy and matmul rates of the same run."""
    from freda.bench.decode import Case, Measured, table_lines
    from freda.bench.decode import bench_decode as measure

    what = Measured(model, adapter, device, dtype)
    engine = EngineConfig(on_device=not plain, int8=int8)
    if mixed or arrivals:
        from freda.bench import traffic

        require(not profile, "--profile is for passes over equal requests; omit it, or omit --mixed and --arrivals")
        spans = traffic.parse_span("--prompts", prompts), traffic.parse_span("--answers", answers)
        rates = tuple(traffic.parse_rate(rate) for rate in arrivals)
        rules = (spans[0][1], spans[1][1], passes, threshold, method)
        loads = [traffic.Traffic(places, *rules, *spans, rates) for places in batch]
        found = traffic.bench_traffic(what, loads, engine, compare=compare)
        _report(found, traffic.table_lines(found), out)
        return
    sizes = [Case(rows, tokens, new_tokens, passes, threshold, method) for rows in batch for tokens in context]
    found = measure(what, sizes, engine, compare=compare, profile=profile)
    _report(found, table_lines(found), out)


def _report(found: dict[str, Any], lines: list[str], out: Path | None) -> None:
    print("\n".join(lines))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, json.dumps(found, indent=1) + "\n")
