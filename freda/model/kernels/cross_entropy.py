"""Loss and gradient of a chunk of logits in one kernel: each row is read twice, the second time mostly from the cache,
and its gradient written over it. The plain twin is `head.plain_loss_and_gradient`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


def loss_and_gradient(logits: Tensor, labels: Tensor, weights: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The weighted sum of the losses of logits (n, V'), and its gradient by them, which takes their place."""
    rows, columns = logits.shape
    losses = torch.empty(rows, device=logits.device)
    _cross_entropy[(rows,)](logits, labels, weights, losses, columns, vocabulary, BLOCK=BLOCK, num_warps=16)
    return losses.sum(), logits


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(logits, labels, weights, losses, columns, vocabulary, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    label, weight = tl.load(labels + row), tl.load(weights + row)
    place = tl.arange(0, BLOCK)
    highest, total = float("-inf"), 0.0
    for first in range(0, vocabulary, BLOCK):
        x = tl.load(logits + first + place, mask=first + place < vocabulary, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher))
        highest = higher
    log_sum = highest + tl.log(total)
    right = tl.load(logits + label).to(tl.float32)
    tl.store(losses + row, (log_sum - right) * weight)
    for first in range(0, columns, BLOCK):
        here = first + place
        x = tl.load(logits + here, mask=here < vocabulary, other=float("-inf")).to(tl.float32)
        gradient = (tl.exp(x - log_sum) - tl.where(here == label, 1.0, 0.0)) * weight
        tl.store(logits + here, gradient.to(logits.dtype.element_ty), mask=here < columns)
