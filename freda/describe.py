"""`freda inspect`: what a model folder, a run folder or a folder of token shards holds, in a few lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from freda.data.loader import Loader
from freda.data.shards import Documents, Manifest, shard_lines
from freda.data.shards import verify as verify_shards
from freda.data.tokenizer import Tokenizer
from freda.errors import FredaError, require
from freda.files import read_json
from freda.folders.hugging_face import family_of
from freda.folders.model_folder import load_model
from freda.folders.resolve import model_path, packaged, resolve_model_folder
from freda.train.metrics import read_metrics

SHOWN_TOKENS = 60  # of the first document


def describe(path: Path) -> str:
    """Look at what is there and describe it."""
    path = model_path(path)
    if not path.exists():
        also = f", and no packaged model of that name; there is {', '.join(packaged())}" if packaged() else ""
        raise FredaError(f"there is nothing at {path}{also}")
    if (path / "manifest.json").is_file():
        return describe_shards(path)
    if (path / ".freda-prepare").is_dir():
        return describe_shards(path)  # which says that they are half written
    if (path / "config.toml").is_file():
        return _run(path)
    return _model(path)


def _model(path: Path) -> str:
    loaded = load_model(path)
    shape, method = loaded.model.config, loaded.method
    count = sum(weight.numel() for weight in loaded.model.parameters())
    stored = read_json(resolve_model_folder(path) / "config.json").get("freda", {}).get("stored_as", "")
    return "\n".join(
        [
            f"model {path}",
            f"  {family_of(shape).architecture}, {count:,} parameters"
            f"{', a scorer among them' if loaded.model.scorer is not None else ''}"
            f"{f', stored as {stored}' if stored else ''}, stage {loaded.stage}",
            f"  {shape.layers} layers of width {shape.dim}, {shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, "
            f"{'tied' if shape.tied else 'untied'} head",
            f"  method {method.name}, blocks of {method.block_size}, BLANK is id {loaded.model.blank_id} "
            f"of {shape.vocab_size} rows",
        ]
    )


def _run(path: Path) -> str:
    lines = [f"run {path}"]
    metrics = path / "metrics.jsonl"
    if metrics.is_file():
        numbers = read_metrics(metrics)
        steps = [entry for entry in numbers if "loss" in entry]
        checks = [entry for entry in numbers if "validation" in entry]
        if steps:
            lines.append(f"  step {steps[-1]['step']}, loss {steps[-1]['loss']:.4f}")
        if checks:
            values = ", ".join(f"{name} {value:.4f}" for name, value in checks[-1]["validation"].items())
            lines.append(f"  validation at step {checks[-1]['step']}: {values}")
    return "\n".join([*lines, _model(path)])


# -- token shards ----------------------------------------------------------------------------------------------------


def describe_shards(
    path: Path,
    *,
    rows: int = 0,
    seq_len: int = 4096,
    block_size: int = 4,
    histogram: Path | None = None,
    verify: bool = False,
) -> str:
    """Counts, lengths and, if asked for, packed rows as text, a picture of the lengths, and a check of all hashes."""
    require(rows >= 0, f"rows is {rows}; use 0 or more")
    require(block_size >= 1, f"block_size is {block_size}; use 1 or more")
    require(histogram is None or histogram.suffix == ".png", f"histogram is {histogram}; name a .png file")
    manifest = Manifest.read(path)
    documents, tokenizer = Documents(path, "train", manifest), Tokenizer.load(path)
    lengths = documents.lengths()
    lines = [f"token shards {path}, documents aligned to {manifest.align}, tokenizer {manifest.tokenizer[:8]}"]
    lines += [*shard_lines(manifest), "lengths of training documents, in tokens:", *_histogram_lines(lengths)]
    if rows:
        lines += _row_lines(path, tokenizer, rows, seq_len, block_size)
    else:
        first = tokenizer.pieces(documents.document(0)[:SHOWN_TOKENS].tolist())
        lines.append("first document: " + "|".join(first))
    if histogram is not None:
        _draw_histogram(lengths, histogram)
        lines.append(f"wrote {histogram}")
    if verify:
        verify_shards(path, manifest)
        lines.append("all hashes are right")
    return "\n".join(lines)


def _histogram_lines(lengths: NDArray[np.int64]) -> list[str]:
    """Documents by length, in powers of two, as bars."""
    powers = np.ceil(np.log2(lengths)).astype(int)
    counts = np.bincount(powers)
    longest = int(counts.max())
    return [
        f"  up to {2**power:>8,} {count:>10,} {'█' * max(1, round(40 * count / longest))}"
        for power, count in enumerate(counts.tolist())
        if count
    ]


def _draw_histogram(lengths: NDArray[np.int64], target: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise FredaError("drawing needs the package matplotlib; pip install 'freda[plot]'") from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.hist(lengths, bins=np.geomspace(lengths.min(), lengths.max() + 1, 60).tolist())
    axes.set(xscale="log", xlabel="tokens per document", ylabel="documents", title=f"{len(lengths):,} documents")
    figure.savefig(target)


def _row_lines(path: Path, tokenizer: Tokenizer, rows: int, seq_len: int, block_size: int) -> list[str]:
    """Packed rows as text: ‖ begins a document, | begins a block, · is padding."""
    loader = Loader(path, "train", seq_len=seq_len, seed=0)
    lines = [
        f"{loader.rows:,} rows of {seq_len}, {100 * loader.fullness:.2f}% full; ‖ document, | block of {block_size}"
    ]
    for number in range(min(rows, loader.rows)):
        batch = loader.batch(number, 1)
        pieces = tokenizer.pieces(batch.tokens[0].tolist())
        cells = zip(pieces, batch.document[0].tolist(), batch.position[0].tolist(), strict=True)
        text = "".join(
            "·" if document < 0 else _border(position, block_size) + piece for piece, document, position in cells
        )
        lines += [f"row {number}", text]
    return lines


def _border(position: int, block_size: int) -> str:
    return "‖" if position == 0 else "|" if position % block_size == 0 else ""
