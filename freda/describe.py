"""`freda inspect`: what a model folder, a run folder or a folder of token shards holds, in a few lines."""

from __future__ import annotations

from pathlib import Path

from freda.data.shards import Manifest, Shard
from freda.data.tokenizer import Tokenizer
from freda.errors import FredaError
from freda.model.weights import family_of, load_model
from freda.train.metrics import read_metrics

SHOWN_TOKENS = 60  # of the first document


def describe(path: Path) -> str:
    """Look at what is there and describe it."""
    if not path.exists():
        raise FredaError(f"there is nothing at {path}")
    if (path / "manifest.json").is_file():
        return _shards(path)
    if (path / "config.toml").is_file():
        return _run(path)
    return _model(path)


def _model(path: Path) -> str:
    loaded = load_model(path)
    shape, method = loaded.model.config, loaded.method
    count = sum(weight.numel() for weight in loaded.model.parameters())
    return "\n".join(
        [
            f"model {path}",
            f"  {family_of(shape).architecture}, {count:,} parameters, stage {loaded.stage}",
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


def _shards(path: Path) -> str:
    manifest = Manifest.read(path)
    tokenizer = Tokenizer.load(path)
    lines = [f"token shards {path}, documents aligned to {manifest.align}, tokenizer {manifest.tokenizer[:8]}"]
    for name, split in manifest.splits.items():
        lines.append(f"  {name}: {split.documents:,} documents, {split.tokens:,} tokens")
    first = Shard(path, "train", manifest).document(0).tolist()
    lines.append("  first document: " + "|".join(tokenizer.pieces(first[:SHOWN_TOKENS])))
    return "\n".join(lines)
