"""The reference loop over blocks: plain, exact, and what every faster path must equal.

All requests go forward together as one batch, each at its own block and pass, until the last is finished; prefill is
nothing but the first commit. What a pass is: `batch.py`.
"""

from __future__ import annotations

import time
from collections import abc

import torch

from freda.decode.batch import RequestBatch
from freda.decode.cache import Cache
from freda.decode.request import Output, Request, Sequence, Watch
from freda.methods.method import Method
from freda.model.parts import Parts


@torch.no_grad()
def generate(
    parts: Parts,
    method: Method,
    requests: abc.Sequence[Request],
    *,
    stop_ids: abc.Sequence[int],
    stopped: abc.Callable[[abc.Sequence[int]], bool] | None = None,
    fused: bool = True,
    cached: bool = True,
    watch: Watch | None = None,
) -> list[Output]:
    """Continue every request. `stopped` is asked after each block whether the new tokens of a text are enough, for stop
    strings. `fused=False` commits in forwards of their own and `cached=False` keeps no cache: the plain twins, with
    equal tokens."""
    for request in requests:
        method.check(parts, request, request.prompt)
    begun = time.perf_counter()
    outputs: dict[int, Output] = {}
    size = method.layout.block
    texts = [Sequence(index, request, size) for index, request in enumerate(requests)]
    longest = max((len(r.prompt) + r.max_new_tokens + size for r in requests), default=0)
    cache = Cache(parts.backbone, len(requests), longest) if cached else None
    loop = RequestBatch(parts, method, texts, stop_ids, cache)
    while loop.sequences:
        if not fused:
            loop.commit()
        closed = loop.draft_pass()
        if watch is not None:
            loop.show(watch)
        finished = set()
        for row in closed:
            text = loop.sequences[row]
            reason = text.close_block(loop.state.draft.ids[row].tolist(), loop.stop_ids)
            if reason is None and stopped is not None and stopped(text.new):
                reason = "stop"
            if reason:
                finished.add(row)
                outputs[text.index] = Output(text.new, text.nfe, reason, time.perf_counter() - begun)
        loop.next_blocks(finished)
    return [outputs[index] for index in range(len(requests))]
