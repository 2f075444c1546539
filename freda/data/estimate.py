"""`freda prepare --plan`: what a run would do, how much there is of each source, and how long it will take.

The beginning of every source is read, decontaminated and encoded; the numbers for the whole are extrapolated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from freda.data.config import PrepareConfig, PrepareFile
from freda.data.documents import Document, Source, read, rows_of, sources_of
from freda.data.files import COMPRESSED, File
from freda.data.generators import GENERATORS
from freda.data.prepare import budgets, named_tokenizer, with_sources
from freda.data.tasks import Tally, Tools, sample
from freda.data.tokenizer import train_tokenizer

PROBED = 2_000_000  # characters of every source
UNPACKED = 4  # bytes of text in a compressed byte, roughly


class Estimate(NamedTuple):
    """One source: what there is and what is wanted of it."""

    name: str
    files: int  # -1: there are none
    size: int  # bytes on disk
    tokens: int  # about, in one epoch; -1: unknown
    wanted: int
    tokens_per_second: float  # of one process


def estimate(file: PrepareFile, root: Path) -> tuple[list[Estimate], Tools]:
    """All sources, and the tools that the run would use."""
    file = with_sources(file)
    settings, wanted = file.prepare, budgets(file.prepare.tokens, file.source)
    if settings.tokenizer:
        tokenizer = named_tokenizer(settings, root)
    else:
        tokenizer = train_tokenizer(sample(sources_of(file, file.source, root)), settings.vocab_size)
    tools = Tools(file, root, tokenizer)
    return [_estimate(name, source, settings, wanted[name], tools) for name, source in tools.sources.items()], tools


def _estimate(name: str, source: Source, settings: PrepareConfig, wanted: int, tools: Tools) -> Estimate:
    """Probe one source: do with its first records what a task would do, and write nothing."""
    tally, align = Tally(tools, settings, name, part=0), settings.align
    begun, size, stored, tokens, records, whole = time.perf_counter(), 0, 0, 0, 0, True
    for record in read(source, seed=settings.seed):
        _, ids = tally.judge(records + 1, record)
        records += 1
        tokens += 0 if ids is None else (len(ids) // align + 1) * align
        if isinstance(record, Document):
            size += len(record.text) if record.ids is None else record.ids.nbytes
            stored += record.size
        if size >= PROBED:
            whole = False
            break
    rate = tokens / max(time.perf_counter() - begun, 1e-9)
    files = source.files()
    on_disk = {file.path: file.path.stat().st_size for file in files}
    there = tokens if whole else _scaled(tokens, stored, records, source, files)
    return Estimate(name, len(files) or -1, sum(on_disk.values()), there, wanted or there, rate)


def _scaled(tokens: int, stored: int, records: int, source: Source, files: Sequence[File]) -> int:
    """Tokens of the whole source, given those of its first `records` with `stored` bytes; -1 if unknown."""
    if source.generator is not None:
        documents: int = getattr(source.generator, GENERATORS[source.config.kind].training)
        return round(tokens * documents / records)
    if source.config.kind == "parquet":
        return round(tokens * sum(rows_of(file) for file in files) / records)
    whole = sum(_unpacked_size(file) for file in files)
    return round(tokens * whole / stored) if stored else -1


def _unpacked_size(file: File) -> int:
    if file.member:
        return file.size
    return file.path.stat().st_size * (UNPACKED if file.path.name.endswith(COMPRESSED) else 1)


def plan_lines(file: PrepareFile, root: Path, workers: int) -> list[str]:
    """The lines that `freda prepare --plan` prints."""
    found, tools = estimate(file, root)
    lines = [
        f"{'source':<14} {'files':>6} {'on disk':>10} {'tokens there':>14} {'wanted':>14} {'epochs':>7} {'time':>9}"
    ]
    seconds = 0.0
    for one in found:
        there = f"{one.tokens:,}" if one.tokens >= 0 else "unknown"
        epochs = f"{one.wanted / one.tokens:.2f}" if one.tokens > 0 else "?"
        took = max(one.wanted, 0) / max(one.tokens_per_second, 1) / workers
        seconds += took
        files, size = (f"{one.files:,}", f"{one.size / 1e6:,.1f} MB") if one.files >= 0 else ("-", "-")
        wanted = f"{one.wanted:,}" if one.wanted >= 0 else "all"
        lines.append(f"{one.name:<14} {files:>6} {size:>10} {there:>14} {wanted:>14} {epochs:>7} {duration(took):>9}")
    total = sum(max(one.wanted, 0) for one in found)
    lines.append(f"{total:,} tokens, {4 * total / 1e9:.2f} GB, about {duration(seconds)} with {workers} processes")
    lines.append(f"tokenizer of {tools.tokenizer.size:,} ids, encoding with {tools.encoder}")
    for name, info in tools.index.benchmarks.items() if tools.index is not None else ():
        lines.append(
            f"keeps out {name}: {info.indexed:,} of {info.items:,} texts, {info.too_short:,} too short to tell"
        )
    limits = {name: source.epochs for name, source in with_sources(file).source.items()}
    for one in found:
        if 0 < one.tokens * limits[one.name] < one.wanted:
            lines.append(f"would run dry: {one.name}, with epochs={limits[one.name]}")
    return lines


def duration(seconds: float) -> str:
    """A time span in a suitable unit."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
