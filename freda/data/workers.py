"""How the tasks of a wave are run: in this process, in several, or shared among processes that torchrun has started."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from freda.data.config import PrepareFile
from freda.data.shards import ID
from freda.data.tasks import Outcome, Task, Worker
from freda.errors import FredaError

PR_SET_PDEATHSIG = 1  # an option of prctl on Linux
Runner = Callable[[Sequence[Task]], Sequence[Outcome]]


@contextlib.contextmanager
def runner(file: PrepareFile, root: Path, out: Path, workers: int) -> Iterator[tuple[Worker, Runner]]:
    """The worker of this process, and the function that runs the tasks of a wave."""
    worker = Worker(file, root, out)
    alone: Any = contextlib.nullcontext(lambda tasks: [worker.run(task) for task in tasks])
    with alone if workers == 1 else _pool(worker, workers) as run:
        yield worker, run


_worker: Worker | None = None  # in a process of the pool


def _start_process(worker: Worker, parent: int) -> None:
    global _worker
    with contextlib.suppress(OSError, AttributeError):  # Linux: a parent that is killed must not leave us writing
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed while we were starting
        os._exit(1)
    _worker = worker


def _run_in_process(task: Task) -> Outcome:
    assert _worker is not None
    return _worker.run(task)


@contextlib.contextmanager
def _pool(worker: Worker, workers: int) -> Iterator[Runner]:
    """Spawn worker processes; forked ones would inherit the locks of other threads."""
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_process, (worker, os.getpid()))

    def run(tasks: Sequence[Task]) -> list[Outcome]:
        # Ctrl-C is not for the processes started here, even while they start: the parent handles it and stops them.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            futures = [pool.submit(_run_in_process, task) for task in tasks]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        for future in as_completed(futures):
            future.result()  # an error ends the run at once, whichever task it is of
        return [future.result() for future in futures]

    try:
        with _sigterm_as_exit():
            yield run
        pool.shutdown()
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()  # its unfinished shards keep their .part name
            process.join()
        if isinstance(error, BrokenProcessPool):
            advice = "what is finished is kept: run freda prepare again with fewer --workers"
            raise FredaError(f"a worker process was killed, perhaps for lack of memory; {advice}") from None
        raise


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does, workers included."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def torchrun(file: PrepareFile, root: Path, out: Path) -> Iterator[tuple[Worker, Runner]]:
    """Share tasks among the processes of torchrun, on one machine or on many with a shared folder: each takes every
    world-th task of a wave; then all exchange their outcomes."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        shared = [file]
        dist.broadcast_object_list(shared)  # rank 0 has provided the tokenizer and found the revisions
        worker = Worker(shared[0], root, out)

        def run(tasks: Sequence[Task]) -> list[Outcome]:
            own: list[Outcome] | FredaError
            try:
                own = [worker.run(task) for task in tasks[rank::world]]
            except FredaError as error:  # sent to all, or they would wait for us
                own = error
            gathered: list[Any] = [None] * world
            dist.all_gather_object(gathered, own)
            for part in gathered:
                if isinstance(part, FredaError):
                    raise part
            return [gathered[place % world][place // world] for place in range(len(tasks))]

        yield worker, run
        dist.barrier()  # nobody leaves before the manifest is written
    finally:
        dist.destroy_process_group()


def progress(out: Path, total: int) -> contextlib.AbstractContextManager[object]:
    """A line on stderr, if that is a terminal. It reads the sizes of the shards, so that no task has to report."""

    def on_disk() -> int:
        sizes = 0
        for path in out.glob("train-*.bin*"):
            with contextlib.suppress(OSError):  # renamed since it was listed
                sizes += path.stat().st_size
        return sizes // ID.itemsize

    begun, before = time.perf_counter(), on_disk()

    def line() -> str:
        tokens = on_disk()
        rate = (tokens - before) / max(time.perf_counter() - begun, 1e-9)
        left = f" of {total:,} tokens, {max(0, total - tokens) / rate:,.0f} s left" if total and rate else " tokens"
        return f"{tokens:,}{left}, {rate / 1e6:.2f} M/s"

    live = Live(get_renderable=line, console=Console(stderr=True), refresh_per_second=2, transient=True)
    return live if sys.stderr.isatty() else contextlib.nullcontext()
