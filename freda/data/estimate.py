"""`freda prepare --plan`: what would be done, how much there is of each source, and how long it will take.

A little of every source is read, decontaminated and encoded for this; the numbers for the whole are in proportion.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from freda.config import Config, SourceConfig
from freda.data.documents import COMPRESSED, Document, find, read
from freda.data.prepare import budgets, named_tokenizer, with_sources
from freda.data.tasks import Tools, sample
from freda.data.tokenizer import train_tokenizer

PROBED = 2_000_000  # bytes of text of every source
UNPACKED = 4  # bytes of text in a byte of packed text, as a rule


class Estimate(NamedTuple):
    """One source: what is there and what is wanted of it. -1 is unknown."""

    name: str
    files: int
    size: int  # bytes on disk
    tokens: int  # about, in one epoch
    wanted: int
    tokens_per_second: float  # of one process


def estimate(config: Config, root: Path) -> tuple[list[Estimate], Tools]:
    """All sources, and the tools that the run would use."""
    config = with_sources(config)
    if config.prepare.tokenizer:
        tokenizer = named_tokenizer(config, root)
    else:
        texts = (text for source in config.source.values() for text in sample(source, root, config))
        tokenizer = train_tokenizer(texts, config.prepare.vocab_size)
    tools = Tools(config, root, tokenizer)
    return [_estimate(name, source, config, root, tools) for name, source in config.source.items()], tools


def _estimate(name: str, source: SourceConfig, config: Config, root: Path, tools: Tools) -> Estimate:
    """Probe one source."""
    begun, size, tokens, whole = time.perf_counter(), 0, 0, True
    for record in read(source, root, config.corpus, seed=config.prepare.seed):
        if isinstance(record, Document):
            ids = record.ids if record.ids is not None else tools.encoder.encode(record.text)
            if tools.index is not None:
                tools.index.hits(record.text)
            size += len(record.text.encode("utf-8", "replace")) if record.ids is None else record.ids.nbytes
            tokens += (len(ids) // config.prepare.align + 1) * config.prepare.align
        if size >= PROBED:
            whole = False
            break
    rate = tokens / (time.perf_counter() - begun)
    files = (
        {} if source.kind in ("huggingface", "sums") else {f.path: f.path.stat().st_size for f in find(source, root)}
    )
    unpacked = sum(count * (UNPACKED if path.name.endswith(COMPRESSED) else 1) for path, count in files.items())
    there = tokens if whole else round(tokens * unpacked / size) if files else -1
    return Estimate(name, len(files), sum(files.values()), there, budgets(config)[name] or there, rate)


def plan_lines(config: Config, root: Path, workers: int) -> list[str]:
    """The plan as text."""
    found, tools = estimate(config, root)
    lines = [
        f"{'source':<14} {'files':>6} {'on disk':>10} {'tokens there':>14} {'wanted':>14} {'epochs':>7} {'time':>9}"
    ]
    seconds = 0.0
    for one in found:
        there = f"{one.tokens:,}" if one.tokens >= 0 else "unknown"
        epochs = f"{one.wanted / one.tokens:.2f}" if one.tokens > 0 else "?"
        took = max(one.wanted, 0) / one.tokens_per_second / workers
        seconds += took
        size = f"{one.size / 1e6:,.1f} MB"
        lines.append(
            f"{one.name:<14} {one.files:>6} {size:>10} {there:>14} {one.wanted:>14,} {epochs:>7} {duration(took):>9}"
        )
    total = sum(max(one.wanted, 0) for one in found)
    why = f" ({tools.encoder.reason})" if tools.encoder.reason else ""
    lines.append(f"{total:,} tokens, {4 * total / 1e9:.2f} GB, about {duration(seconds)} with {workers} processes")
    lines.append(f"tokenizer of {tools.tokenizer.size:,} ids, encoding with {tools.encoder.library}{why}")
    for name, info in tools.index.benchmarks.items() if tools.index is not None else ():
        lines.append(
            f"keeps out {name}: {info.indexed:,} of {info.items:,} texts, {info.too_short:,} too short to tell"
        )
    limits = {name: source.epochs for name, source in with_sources(config).source.items()}
    for one in found:
        if 0 < one.tokens * limits[one.name] < one.wanted:
            lines.append(f"would run dry: {one.name}, with epochs={limits[one.name]}")
    return lines


def duration(seconds: float) -> str:
    """A time span in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
