"""The reference loop over blocks: plain, exact, and what every faster path must equal.

All requests go forward together as one batch, each at its own block and pass, until the last is finished; prefill is
nothing but the first commit. What a pass is: `batch.py`.
"""

from __future__ import annotations

import time
from collections import abc
from dataclasses import replace

import torch

from freda.decode.batch import RequestBatch
from freda.decode.pages import PagedCache, Pages
from freda.decode.request import Decode, Output, Request, Sequence, Watch
from freda.methods.method import Method
from freda.model.parts import Parts


@torch.no_grad()
def generate(
    parts: Parts,
    method: Method,
    requests: abc.Sequence[Request],
    *,
    stop_ids: abc.Sequence[int],
    decode: Decode | None = None,
    fused: bool = True,
    cached: bool = True,
    watch: Watch | None = None,
) -> list[Output]:
    """Continue every request; stop strings are found if `decode` can turn tokens into text.

    `watch` gets all passes. `fused=False` commits in forwards of their own and `cached=False` keeps no cache: the plain
    twins, with equal tokens.
    """
    requests = [replace(request, watch=watch is not None) for request in requests]
    for request in requests:
        method.check(parts, request, request.prompt)
    begun, size = time.perf_counter(), method.layout.block
    outputs: dict[int, Output] = {}
    sequences = [Sequence(index, request, size, decode=decode) for index, request in enumerate(requests)]
    cache = None
    if cached and requests:  # one page for each request
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests) + size
        cache = PagedCache(
            Pages(parts.backbone, len(requests), longest), [[row] for row in range(len(requests))], [0] * len(requests)
        )
    loop = RequestBatch(parts, method, sequences, stop_ids, cache)
    while loop.sequences:
        if not fused:
            loop.commit()
        closed = loop.draft_pass()
        if watch is not None:
            for _, seen in loop.passes():
                watch(seen)
        finished = set()
        for row, ids in closed.items():
            one = loop.sequences[row]
            event = one.close_block(ids, loop.stop_ids)
            if event.finish:
                finished.add(row)
                seconds = time.perf_counter() - begun
                outputs[one.index] = Output(one.new, one.nfe, event.finish, seconds, event.error)
        loop.next_blocks(finished)
    return [outputs[index] for index in range(len(requests))]
