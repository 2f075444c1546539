"""Several processes of one run inside a test, without torchrun: a server imports torch once, and ranks fork from it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from freda.train.parallel import Ranks, processes

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["freda.train.loop", "tests.ranks"])
PATIENCE = 100  # seconds: a rank that waits for another for ever must not hold up the tests


def fork(function: Callable[..., None], *arguments: object) -> multiprocessing.process.BaseProcess:
    """A process of its own that runs `function`, which is one of a module."""
    process = CONTEXT.Process(target=function, args=arguments)
    process.start()
    return process


def run_ranks(function: Callable[[Ranks, Path], Any], world: int, folder: Path) -> list[Any]:
    """What `function(ranks, folder)` returns on each rank, as JSON carries it."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children = [fork(_rank, function, rank, world, port, folder) for rank in range(world)]
    for child in children:
        child.join(PATIENCE)
    codes = [child.exitcode for child in children]
    for child in children:
        child.kill()
    said = "".join((folder / f"stderr-{rank}").read_text() for rank in range(world))
    assert codes == [0] * world, f"exit codes {codes}\n{said}"
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(world)]


def _rank(function: Callable[[Ranks, Path], Any], rank: int, world: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with _stderr_to(folder / f"stderr-{rank}"), processes() as ranks:
        result = function(ranks, folder)
    (folder / f"result-{rank}.json").write_text(json.dumps(result))


@contextlib.contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        os.dup2(file.fileno(), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        yield
