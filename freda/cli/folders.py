"""`freda convert` and `inspect`: model folders, run folders and shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from freda.cli.app import app
from freda.errors import FredaError


@app.command(
    epilog="Examples: **freda convert ~/models/Qwen3-0.6B-Base models/qwen3-0.6b**; "
    "a copy in another precision: **freda convert runs/mine models/mine --dtype bfloat16**; "
    "an adapter merged into its base: **freda convert models/qwen3-0.6b models/mine --merge runs/adapter**"
)
def convert(
    source: Annotated[Path, Argument(help="A Hugging Face folder, a GGUF file, or a freda model or run folder.")],
    target: Annotated[Path, Argument(help="Model folder to write.")],
    block_size: Annotated[int | None, Option(help="Stored with a Hugging Face or GGUF model; 4 by default.")] = None,
    dtype: Annotated[
        str | None,
        Option(help="float32, bfloat16, float16 or int8; the source's by default, bfloat16 of quantised GGUF."),
    ] = None,
    int8: Annotated[bool, Option("--int8", help="The same as --dtype int8.")] = False,
    merge: Annotated[Path | None, Option(help="An adapter on all rows, to be merged into the weights.")] = None,
) -> None:
    """Make a model folder from another project's checkpoint, or copy a freda model in another precision."""
    from freda.folders.convert import convert as write_model_folder

    if int8 and dtype is not None:
        raise FredaError(f"--int8 and --dtype {dtype} cannot be combined; omit one of them")
    precision = "int8" if int8 else dtype
    summary = write_model_folder(source, target, block_size=block_size, dtype=precision, adapter=merge)
    for name, value in summary.items():
        print(f"{name}: {value}")


@app.command(epilog="Examples: **freda inspect mini**; **freda inspect runs/demo/data --rows 2**")
def inspect(
    path: Annotated[Path, Argument(help="A model, run or shards folder, or the name of a bundled model.")],
    rows: Annotated[int, Option(help="Shards: packed rows to show, with documents and blocks marked.")] = 0,
    seq_len: Annotated[int, Option(help="Shards: tokens per row.")] = 4096,
    block_size: Annotated[int, Option(help="Shards: tokens per block.")] = 4,
    histogram: Annotated[Path | None, Option(help="Shards: draw the document lengths as a PNG.")] = None,
    verify: Annotated[bool, Option("--verify", help="Shards: read all of them and check their hashes.")] = False,
) -> None:
    """Describe what a folder holds."""
    from freda.describe import describe

    print(describe(path, rows, seq_len, block_size, histogram, verify))
