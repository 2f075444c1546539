"""Does the loader keep up? Packing at scale, rows per second of one thread, and how long training steps wait.

Lengths are log-normal with a mean of 1,000 tokens (σ = 1.1), 3.4% of them longer than a row of 4,096; ids are random.

    python experiments/loader.py --out runs/loader --documents 10000000
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freda.data.loader import Batch, Loader, plan
from freda.data.shards import SPLITS, Manifest, ShardWriter, SplitInfo
from freda.data.tokenizer import train_tokenizer
from freda.methods.autoregressive import Autoregressive
from freda.model.config import ModelConfig
from freda.train import loop
from freda.train.config import DataConfig, RunConfig, TrainConfig

SEQ_LEN, ALIGN, MEAN, SIGMA = 4096, 8, 1000, 1.1
SHARD_TOKENS = 25_000_000  # 100 MB


def draw_lengths(count: int) -> NDArray[np.int64]:
    """Document lengths, before EOS and fill."""
    return np.random.default_rng(0).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, count).astype(np.int64)


def measure_packing(documents: int) -> None:
    """Seconds, fullness and peak memory of a plan."""
    lengths = (draw_lengths(documents) // ALIGN + 1) * ALIGN
    before, begun = peak_memory(), time.perf_counter()
    packed = plan(lengths, SEQ_LEN, ALIGN)
    seconds, full = time.perf_counter() - begun, packed.piece_length.sum() / (packed.rows * SEQ_LEN)
    print(
        f"packing: {documents:,} documents, {lengths.sum() / 1e9:.2f} B tokens into {packed.rows:,} rows in "
        f"{seconds:.1f} s, {full:.4%} full, peak {peak_memory() - before:.0f} MB above the process before it"
    )


def peak_memory() -> float:
    """Peak memory of this process in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def write_shards(folder: Path) -> None:
    """Random ids in documents of realistic lengths."""
    folder.mkdir(parents=True)
    rng, tokenizer = np.random.default_rng(1), train_tokenizer(["some text"], 260)
    splits = {}
    for split, tokens in zip(SPLITS, (SHARD_TOKENS, 20_000), strict=True):
        with ShardWriter(folder, split, eos_id=tokenizer.eos_id, align=ALIGN) as writer:
            for length in draw_lengths(tokens // MEAN):
                writer.add(rng.integers(0, 256, length))  # type: ignore[arg-type]
        splits[split] = SplitInfo.of([writer.info("random")])
    tokenizer.save(folder)
    ids: dict[str, Any] = {"eos_id": tokenizer.eos_id, "blank_id": tokenizer.blank_id}
    Manifest(source={}, align=ALIGN, tokenizer=tokenizer.fingerprint, splits=splits, **ids).write(folder)


def measure_reading(folder: Path) -> None:
    """Rows per second over an epoch, from the disk and then from memory."""
    with (folder / "train.bin").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # forget what is in memory
    loader = Loader(folder, "train", seq_len=SEQ_LEN, seed=0)
    for name, first in (("from disk", 0), ("from memory", loader.rows)):
        begun, longest = time.perf_counter(), 0.0
        for row in range(first, first + loader.rows, 16):
            started = time.perf_counter()
            loader.batch(row, 16)
            longest = max(longest, time.perf_counter() - started)
        rate = loader.rows / (time.perf_counter() - begun)
        print(
            f"reading {name}: {rate:,.0f} rows/s, {rate * SEQ_LEN / 1e6:.0f} M tokens/s, "
            f"longest batch of 16 rows {longest * 1e3:.1f} ms; {loader.fullness:.4%} full"
        )


def measure_waits(folder: Path, steps: int, late_ms: int) -> None:
    """The waits of a short run, with and without prefetching; every fifth read is late by so many milliseconds."""
    config = RunConfig(
        model=ModelConfig(dim=16, layers=1, heads=1, kv_heads=1, head_dim=16, ffn_dim=16),
        data=DataConfig(path=str(folder), seq_len=SEQ_LEN),
        method=Autoregressive(),
        train=TrainConfig(steps=steps, batch_rows=4, group_rows=2, lr=1e-3, validation_rows=1),
    )
    run, read = loop.setup(config), loop.read_batches

    def late(run: loop.Run, step: int) -> list[Batch]:
        time.sleep(late_ms / 1e3 if step % 5 == 4 else 0)
        return read(run, step)

    loop.read_batches = late
    for ahead in (False, True):
        with loop.prefetch(run, 0) if ahead else contextlib.nullcontext() as run.ahead:
            begun = time.perf_counter()
            first, *waits = [1e3 * loop.take_step(run, step)["data_wait"] for step in range(steps)]
            per_step = (time.perf_counter() - begun) / steps
        print(
            f"waits {'with' if ahead else 'without'} prefetching, reads late by {late_ms} ms: first {first:.2f} ms, "
            f"then mean {np.mean(waits):.3f} ms, longest {max(waits):.3f} ms; a step takes {per_step:.2f} s"
        )
    loop.read_batches = read


def main() -> None:
    """Measure packing, reading and waits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    parser.add_argument("--documents", type=int, default=2_000_000)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure_packing(options.documents)
    if not options.out.exists():
        write_shards(options.out)
    measure_reading(options.out)
    for late_ms in (0, 400):
        measure_waits(options.out, options.steps, late_ms)


if __name__ == "__main__":
    main()
