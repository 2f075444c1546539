"""`freda bench data`: how fast documents become shards, compared with the tokenizer libraries alone on the same text.

Everything runs on one core. The end-to-end runs are what `freda prepare` does with one task: read JSON lines, clean,
decontaminate, encode, write, hash; each in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import re
import resource
import tempfile
import timeit
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

from freda.data.config import DocumentsConfig, PrepareConfig, PrepareFile, SourceConfig
from freda.data.decontaminate import Index
from freda.data.documents import first_texts, sources_of
from freda.data.encode import Encoder, make_encoder
from freda.data.prepare import named_tokenizer
from freda.data.tasks import WORK, Task, Worker, benchmark_texts
from freda.errors import require

REPEATS = 3  # of every measurement; the fastest counts, the others were disturbed


def bench_data(file: PrepareFile, root: Path, megabytes: float) -> dict[str, Any]:
    """Measure everything on the first `megabytes` of the sources, taken in turn."""
    require(bool(file.prepare.tokenizer), "prepare.tokenizer is empty; name the tokenizer to measure with")
    require(bool(file.source), "the config names no source; give one with [source.NAME] sections")
    os.environ["RAYON_NUM_THREADS"] = "1"  # the tokenizers library would take all cores
    texts = list(first_texts(list(sources_of(file, file.source, root).values()), None, megabytes * 1e6))
    tokenizer = named_tokenizer(file.prepare, root)
    encoder = make_encoder(tokenizer, texts[:100])
    library = tokenizers.Tokenizer.from_str(tokenizer.json_text)
    tokens, size = _amount(encoder, texts)
    measured = {
        "tokenizers alone": _best(lambda: library.encode_batch_fast(texts, add_special_tokens=False)),
        f"encoder ({encoder.library})": _best(lambda: [encoder.encode(text) for text in texts]),
    }
    if encoder.tiktoken is not None:
        alone = encoder.tiktoken.encode_ordinary
        measured = {"tiktoken alone": _best(lambda: [alone(text) for text in texts]), **measured}
    if file.benchmark:
        shortest = {name: benchmark.shortest for name, benchmark in file.benchmark.items()}
        index = Index(benchmark_texts(sources_of(file, file.benchmark, root)), file.decontaminate, shortest)
        screened = functools.partial(index.screened, texts, str)
        measured["decontamination alone"] = _best(lambda: [clean or index.hits(text) for text, clean in screened()])
    rows = [_row(name, seconds, tokens, size) for name, seconds in measured.items()]
    rows += _end_to_end(file, root, texts, encoder)
    reference = rows[0]["tokens_per_second"]
    for row in rows:
        row["ratio"] = row["tokens_per_second"] / reference
    return {"documents": len(texts), "megabytes": size, "tokens": tokens, "reference": rows[0]["what"], "rows": rows}


def _amount(encoder: Encoder, texts: Sequence[str]) -> tuple[int, float]:
    """How many tokens and megabytes some texts have."""
    return sum(len(encoder.encode(text)) for text in texts), sum(len(text.encode()) for text in texts) / 1e6


def _best(run: Callable[[], object]) -> float:
    return min(timeit.repeat(run, number=1, repeat=REPEATS))


def _end_to_end(file: PrepareFile, root: Path, texts: Sequence[str], encoder: Encoder) -> list[dict[str, Any]]:
    """Whole runs of `prepare`, with and without decontamination, and on a tenth of the text for its memory."""
    rows, none = [], dict[str, DocumentsConfig]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = [("end to end, a tenth", texts[::10], none), ("end to end", texts, none)]
        runs += [("end to end, decontaminated", texts, {**file.benchmark})] if file.benchmark else []
        for title, some, benchmarks in runs:
            lines = (json.dumps({"text": text}) for text in some)
            (folder / "texts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
            tokenizer = str((root / file.prepare.tokenizer).absolute())
            prepare = PrepareConfig(tokenizer=tokenizer, eos=file.prepare.eos, parts=1)
            source = {"texts": SourceConfig(path=str(folder / "texts.jsonl"))}
            own = replace(file, prepare=prepare, source=source, benchmark=benchmarks)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                seconds, memory = pool.submit(_run_task, own, root, folder / title.replace(" ", "-")).result()
            rows.append({**_row(title, seconds, *_amount(encoder, some)), "peak_memory_mb": memory})
    return rows


def _run_task(file: PrepareFile, root: Path, out: Path) -> tuple[float, float]:
    """Best time of the one task, without building the tools that all tasks share, and the peak memory in MB."""
    named_tokenizer(file.prepare, root).save(out / WORK)
    worker, waves = Worker(file, root, out), iter(range(REPEATS))  # a new wave each time, or it would be done already
    best = _best(lambda: worker.run(Task("texts", part=0, wave=next(waves), epoch=0, skip=0, want=0)))
    return best, _peak_memory()


def _peak_memory() -> float:
    """Peak memory of this process in MB. A child inherits ru_maxrss on Linux, so that is the last resort."""
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s*(\d+)", status.read_text()) if status.is_file() else None
    return (int(peak[1]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 1024


def _row(what: str, seconds: float, tokens: int, megabytes: float) -> dict[str, Any]:
    speed = {"tokens_per_second": tokens / seconds, "megabytes_per_second": megabytes / seconds}
    return {"what": what, "seconds": seconds, **speed}


def table_lines(found: dict[str, Any]) -> list[str]:
    """The measurements as text."""
    lines = ["{megabytes:.1f} MB of text, {documents:,} documents, {tokens:,} tokens; one core".format(**found)]
    lines.append(f"{'':<30} {'Mtokens/s':>10} {'MB/s':>8} {'ratio':>7} {'memory':>9}")
    for row in found["rows"]:
        memory = f"{row['peak_memory_mb']:.0f} MB" if "peak_memory_mb" in row else ""
        speed = f"{row['tokens_per_second'] / 1e6:>10.2f} {row['megabytes_per_second']:>8.1f}"
        lines.append(f"{row['what']:<30} {speed} {row['ratio']:>7.2f} {memory:>9}")
    return lines
