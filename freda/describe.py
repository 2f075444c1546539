"""`freda inspect`: a few lines about a model folder, a run folder or a folder of token shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from freda.data.loader import Batch, Loader
from freda.data.shards import Documents, Manifest, shard_lines
from freda.data.shards import verify as verify_shards
from freda.data.tokenizer import Tokenizer
from freda.errors import missing_package, require
from freda.files import located, read_json
from freda.folders.adapter_folder import read_adapter_config, resolve_adapter_folder
from freda.folders.hugging_face import family_of
from freda.folders.model_folder import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    load_model,
    method_of,
    missing_model,
    model_path,
    newest_checkpoint,
    resolve_model_folder,
)
from freda.folders.tensors import read_safetensors
from freda.methods.blocks import described
from freda.train.metrics import read_metrics

SHOWN_TOKENS = 60  # of the first document


def describe(
    path: Path,
    rows: int = 0,
    seq_len: int = 4096,
    block_size: int = 4,
    histogram: Path | None = None,
    verify: bool = False,
) -> str:
    """Describe the model, run or token shards at `path`. For token shards: `rows` packed rows of `seq_len` tokens as
    text, with blocks marked; a PNG of the document lengths; and a check of all hashes."""
    path = model_path(path)
    if not path.exists():
        raise missing_model(path)
    if (path / "manifest.json").is_file() or (path / ".freda-prepare").is_dir():
        return _shards(
            path, rows, seq_len, block_size, histogram, verify
        )  # refuses shards that are still being written
    return _run(path) if (path / "config.toml").is_file() else _model(path)


def _adapter(path: Path) -> str:
    folder = resolve_adapter_folder(path)
    with located(folder):
        config, section = read_adapter_config(folder)
        method, base = method_of(section), read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    tensors = read_safetensors([folder / ADAPTER_FILE], "meta")
    blank, layout = section["blank_token_id"], described(method.geometry)
    count, shape = sum(tensor.numel() for tensor in tensors.values()), section["base"]["shape"]
    return f"""adapter {path}
  rank {config.rank} on {", ".join(config.targets)}, {config.rows} rows, {count:,} parameters
  over {base}: {shape["layers"]} layers of width {shape["dim"]}
  method {method.name}, blocks of {method.block_size} in {layout}, BLANK is id {blank}"""


def _model(path: Path) -> str:
    if ((newest_checkpoint(path) or path) / ADAPTER_CONFIG).is_file():
        return _adapter(path)
    loaded = load_model(path, "meta")  # the values are not needed
    shape, method = loaded.backbone.config, loaded.method
    count = sum(weight.numel() for weight in loaded.parts.parameters())
    config = read_json(resolve_model_folder(path) / "config.json")
    stored = config["freda"].get("stored_as", config.get("dtype", "float32"))
    scorer = ", a scorer among them" if loaded.scorer is not None else ""
    heads = f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, {'tied' if shape.tied else 'untied'} head"
    layout = f" in {described(method.geometry)}" if method.geometry.drafts else ""
    blank = f"BLANK is id {loaded.tokenizer.blank_id} of {shape.vocab_size} rows"
    return f"""model {path}
  {family_of(shape).architecture}, {count:,} parameters{scorer}, stored as {stored}, stage {loaded.stage}
  {shape.layers} layers of width {shape.dim}, {heads}
  method {method.name}, blocks of {method.block_size}{layout}, {blank}"""


def _run(path: Path) -> str:
    entries = read_metrics(path / "metrics.jsonl") if (path / "metrics.jsonl").is_file() else []
    steps, checks = ([entry for entry in entries if key in entry] for key in ("loss", "validation"))
    lines = [f"  step {entry['step']}, loss {entry['loss']:.4f}" for entry in steps[-1:]]
    for entry in checks[-1:]:
        values = ", ".join(f"{name} {value:.4f}" for name, value in entry["validation"].items())
        lines.append(f"  validation at step {entry['step']}: {values}")
    return "\n".join([f"run {path}", *lines, _model(path)])


def _shards(path: Path, rows: int, seq_len: int, block_size: int, histogram: Path | None, verify: bool) -> str:
    require(rows >= 0, f"rows is {rows}; use 0 or more")
    require(block_size >= 1, f"block_size is {block_size}; use 1 or more")
    require(histogram is None or histogram.suffix == ".png", f"histogram is {histogram}; name a .png file")
    manifest = Manifest.read(path)
    documents, tokenizer = Documents(path, "train", manifest), Tokenizer.load(path)
    lengths = documents.lengths()
    lines = [f"token shards {path}, documents aligned to {manifest.align}, tokenizer {manifest.tokenizer[:8]}"]
    lines += [*shard_lines(manifest), "lengths of training documents, in tokens:", *_histogram_lines(lengths)]
    if rows:
        loader = Loader(path, "train", seq_len=seq_len, seed=0)
        shape = f"{loader.rows:,} rows of {seq_len}, {100 * loader.fullness:.2f}% full"
        lines.append(f"{shape}; ‖ document, | block of {block_size}")
        for number in range(min(rows, loader.rows)):
            lines += [f"row {number}", _row_text(loader.batch(number, 1), tokenizer, block_size)]
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
    counts = np.bincount(np.ceil(np.log2(lengths)).astype(int)).tolist()
    bars = ["█" * max(1, round(40 * count / max(counts))) for count in counts]
    return [f"  up to {2**power:>8,} {counts[power]:>10,} {bar}" for power, bar in enumerate(bars) if counts[power]]


def _draw_histogram(lengths: NDArray[np.int64], target: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_package("matplotlib", "plot") from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.hist(lengths, bins=np.geomspace(lengths.min(), lengths.max() + 1, 60).tolist())
    axes.set(xscale="log", xlabel="tokens per document", ylabel="documents", title=f"{len(lengths):,} documents")
    figure.savefig(target)


def _row_text(batch: Batch, tokenizer: Tokenizer, size: int) -> str:
    """A packed row: ‖ begins a document, | begins a block of `size` tokens, · is padding."""
    text, pieces = "", tokenizer.pieces(batch.tokens[0].tolist())
    for piece, document, place in zip(pieces, batch.document[0].tolist(), batch.position[0].tolist(), strict=True):
        border = "‖" if place == 0 else "|" if place % size == 0 else ""
        text += "·" if document < 0 else border + piece
    return text
