"""`freda prepare --plan`: what a run would do, how much there is of each source, and how long it will take.

The beginning of every source is read, decontaminated and encoded; the numbers for the whole are extrapolated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from freda.data.config import PrepareFile
from freda.data.documents import Document, Source, read, rows_of, sources_of
from freda.data.files import COMPRESSED, File
from freda.data.mini import GENERATORS
from freda.data.prepare import budgets, named_tokenizer, with_sources
from freda.data.tasks import Tally, Worker, sample
from freda.data.tokenizer import train_tokenizer

PROBED = 2_000_000  # characters of every source
UNPACKED = 4  # bytes of text in a compressed byte, roughly


class Estimate(NamedTuple):
    """One source: what there is and what is wanted of it."""

    name: str
    files: int
    size: int  # bytes on disk
    tokens: int  # about, in one epoch; -1: unknown
    wanted: int
    tokens_per_second: float  # of one process


def estimate(file: PrepareFile, root: Path) -> tuple[list[Estimate], Worker]:
    """All sources, and a worker with the tools that the run would use."""
    file = with_sources(file)
    settings, wanted = file.prepare, budgets(file.prepare.tokens, file.source)
    if settings.tokenizer:
        tokenizer = named_tokenizer(settings, root)
    else:
        tokenizer = train_tokenizer(sample(sources_of(file, file.source, root)), settings.vocab_size)
    worker = Worker(file, root, Path(), tokenizer)
    return [_estimate(name, source, wanted[name], worker) for name, source in worker.sources.items()], worker


def _estimate(name: str, source: Source, wanted: int, worker: Worker) -> Estimate:
    """Probe one source: do with its first records what a task would do, and write nothing."""
    tally, align = Tally(worker, name, part=0), worker.settings.align
    begun, size, stored, tokens, number, whole = time.perf_counter(), 0, 0, 0, 0, True
    for number, record in enumerate(read(source, seed=worker.settings.seed), start=1):
        _, ids = tally.judge(number, record)
        tokens += 0 if ids is None else (len(ids) // align + 1) * align
        if isinstance(record, Document):
            size += len(record.text) if record.ids is None else record.ids.nbytes
            stored += record.size
        whole = size < PROBED
        if not whole:
            break
    rate = tokens / max(time.perf_counter() - begun, 1e-9)
    files = source.files()
    on_disk = {file.path: file.path.stat().st_size for file in files}
    there = tokens if whole else _scaled(tokens, stored, number, source, files)
    return Estimate(name, len(files), sum(on_disk.values()), there, wanted or there, rate)


def _scaled(tokens: int, stored: int, records: int, source: Source, files: Sequence[File]) -> int:
    """Tokens of the whole source, given those of its first `records` with `stored` bytes; -1 if unknown."""
    if source.generator is not None:
        documents: int = getattr(source.generator, GENERATORS[source.config.kind].training)
        return round(tokens * documents / records)
    if source.config.kind == "parquet":
        return round(tokens * sum(rows_of(file) for file in files) / records)
    unpacked = {file: UNPACKED if file.path.name.endswith(COMPRESSED) else 1 for file in files}
    whole = sum(file.size if file.member else file.path.stat().st_size * times for file, times in unpacked.items())
    return round(tokens * whole / stored) if stored else -1


def plan_lines(file: PrepareFile, root: Path, workers: int) -> list[str]:
    """The lines that `freda prepare --plan` prints."""
    file = with_sources(file)
    found, worker = estimate(file, root)
    rows, seconds = [("source", "files", "on disk", "tokens there", "wanted", "epochs", "time")], 0.0
    for one in found:
        there = f"{one.tokens:,}" if one.tokens >= 0 else "unknown"
        reads = f"{one.wanted / one.tokens:.2f}" if one.tokens > 0 else "?"
        took = max(one.wanted, 0) / max(one.tokens_per_second, 1) / workers
        seconds += took
        files, size = (f"{one.files:,}", f"{one.size / 1e6:,.1f} MB") if one.files else ("-", "-")
        wanted = f"{one.wanted:,}" if one.wanted >= 0 else "all"
        rows.append((one.name, files, size, there, wanted, reads, duration(took)))
    lines = ["{:<14} {:>6} {:>10} {:>14} {:>14} {:>7} {:>9}".format(*row) for row in rows]
    total = sum(max(one.wanted, 0) for one in found)
    lines.append(f"{total:,} tokens, {4 * total / 1e9:.2f} GB, about {duration(seconds)} with {workers} processes")
    lines.append(f"tokenizer of {worker.tokenizer.size:,} ids, encoding with {worker.encoder}")
    for name, info in worker.index.benchmarks.items() if worker.index is not None else ():
        texts = f"{info.indexed:,} of {info.items:,} texts, {info.too_short:,} too short to tell"
        lines.append(f"keeps out {name}: {texts}")
    for one in found:
        epochs = file.source[one.name].epochs
        if 0 < one.tokens * epochs < one.wanted:
            lines.append(f"would run dry: {one.name}, with {epochs=}")
    return lines


def duration(seconds: float) -> str:
    """A time span in a suitable unit."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
