"""The reference loop over blocks: plain, exact, and what every faster path must equal.

All requests go forward together as one batch, each at its own block and pass, until the last is finished; prefill is
nothing but the first commit. What a pass is: `batch.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from freda.decode.batch import Batch, check_requests
from freda.decode.cache import Cache
from freda.decode.request import Output, Pass, Request, Watch
from freda.decode.request import Sequence as Text
from freda.methods.config import MethodConfig
from freda.methods.method import Method, block_size
from freda.model.transformer import Transformer

__all__ = ["Output", "Pass", "Request", "Watch", "generate"]


@torch.no_grad()
def generate(
    model: Transformer,
    method: Method,
    config: MethodConfig,
    requests: Sequence[Request],
    *,
    stop_ids: Sequence[int],
    stopped: Callable[[Sequence[int]], bool] | None = None,
    fused: bool = True,
    cached: bool = True,
    watch: Watch | None = None,
) -> list[Output]:
    """Continue every request. `stopped` is asked after each block whether the new tokens of a text are enough, for stop
    strings. `fused=False` commits in forwards of their own and `cached=False` keeps no cache: the plain twins, with
    equal tokens."""
    check_requests(model, method, config, requests)
    begun = time.perf_counter()
    outputs: dict[int, Output] = {}
    size = block_size(method, config)
    texts = [Text(index, request, size) for index, request in enumerate(requests)]
    longest = max((len(r.prompt) + r.max_new_tokens + size for r in requests), default=0)
    cache = Cache(model, len(requests), longest) if cached else None
    loop = Batch(model, method, config, texts, stop_ids, cache)
    while loop.texts:
        if not fused:
            loop.commit()
        closed = loop.draft_pass()
        if watch is not None:
            loop.show(watch)
        finished = set()
        for row in closed:
            text = loop.texts[row]
            reason = text.close_block(loop.state.draft.ids[row].tolist(), loop.stop_ids)
            if reason is None and stopped is not None and stopped(text.new):
                reason = "stop"
            if reason:
                finished.add(row)
                outputs[text.index] = Output(text.new, text.nfe, reason, time.perf_counter() - begun)
        loop.next_blocks(finished)
    return [outputs[index] for index in range(len(requests))]
