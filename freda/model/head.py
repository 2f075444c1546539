"""Logits that are computed when they are wanted, a chunk of positions at a time.

A row of 4,096 tokens over 151,669 ids is 2.5 GB of fp32 logits, several times over with their softmax and gradient. No
one needs all of them at once: a loss wants one number a position, a draft its most probable token. `Logits` holds what
they are made of; `map` and `cross_entropy` make those of one chunk, use them and forget them. `all` is the plain twin.

On CUDA what is done to a chunk is one kernel over its bf16 logits, whose columns are rounded up to a multiple of 64:
151,669 is odd, and the matrix products then ran on kernels without aligned loads. They alone took 83 ms of a 4B step
over one row on an H200; rounded up, the whole loss takes 25.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_LOGITS = 1 << 29  # held at once: 1 GB in bf16, 3,539 positions of Qwen3's vocabulary
ALIGNED = 64  # columns of the matrix products
ChunkFunction = Callable[..., tuple[Tensor, ...]]
Pair = tuple[Tensor, Tensor]


class Logits(NamedTuple):
    """The logits of some positions over the ids below `vocabulary`, not computed yet."""

    hidden: Tensor  # (..., D)
    weight: Tensor  # (V', D) with V' ≥ vocabulary: the rows beyond it are computed and never used
    vocabulary: int

    def all(self) -> Tensor:
        """All at once, (..., vocabulary) in fp32."""
        return F.linear(self.hidden, self.weight[: self.vocabulary]).float()

    def map(self, function: ChunkFunction, *others: Tensor, fused: bool = False) -> tuple[Tensor, ...]:
        """`function(logits (n, vocabulary) fp32, *others)` over all positions, chunk by chunk.

        `others` and what comes back have entries for each position, (..., *). `fused` compiles the function on CUDA: it
        must then be one of a module, not made anew for every call.
        """
        shape = self.hidden.shape[:-1]
        positions = self.hidden.flatten(0, -2)
        flat = [other.flatten(0, len(shape) - 1) for other in others]
        piece = _on_raw(function, self.vocabulary, fused and positions.is_cuda)
        found = [
            piece(F.linear(positions[part], self.weight), *(other[part] for other in flat))
            for part in chunks(len(positions), len(self.weight))
        ]
        return tuple(torch.cat(pieces).view(*shape, *pieces[0].shape[1:]) for pieces in zip(*found, strict=True))

    def cross_entropy(self, labels: Tensor, weights: Tensor) -> Tensor:
        """Σ weights · −log softmax[labels], a scalar in fp32; labels and weights (...).

        The gradients are made beside the loss, while the logits of a chunk are there: nothing is computed twice, and
        nothing of a chunk is kept.
        """
        labels, weights = labels.flatten(), weights.flatten().float()

        def piece(logits: Tensor, part: slice) -> Pair:
            return loss_and_gradient(logits, labels[part], weights[part], self.vocabulary)

        total: Tensor = _ChunkedLoss.apply(self.hidden.flatten(0, -2), self.weight, piece, 1)  # type: ignore[no-untyped-call]
        return total

    def divergence(
        self, teacher: Logits, temperature: float, labels: Tensor, taught: Tensor, weights: Tensor
    ) -> Tensor:
        """Σ weights · KL(target ‖ softmax), a scalar in fp32. The target of a position is the teacher's softmax at this
        temperature where it is `taught`, elsewhere its label; labels, taught and weights (...). Nothing flows back to
        the teacher."""
        labels, taught, weights = labels.flatten(), taught.flatten(), weights.flatten().float()
        states, matrix = teacher.hidden.detach().flatten(0, -2) / temperature, teacher.weight.detach()
        compute = _compiled(soft_loss_and_gradient) if states.is_cuda else soft_loss_and_gradient

        def piece(logits: Tensor, part: slice) -> Pair:
            given = (states[part] @ matrix.T, labels[part], taught[part], weights[part])
            loss, gradient = compute(logits, *given, self.vocabulary)
            return loss, gradient

        total: Tensor = _ChunkedLoss.apply(self.hidden.flatten(0, -2), self.weight, piece, 2)  # type: ignore[no-untyped-call]
        return total


def aligned(vocabulary: int, rows: int) -> int:
    """How many of the `rows` of a head to multiply with, for the logits of `vocabulary` ids."""
    return min(rows, -(-vocabulary // ALIGNED) * ALIGNED)


def chunks(positions: int, vocabulary: int) -> list[slice]:
    """Parts of all positions, small enough for their logits to be held; equal where that is possible, because code
    compiled for one size is compiled again for another."""
    least = max(1, -(-positions * vocabulary // MOST_LOGITS))
    count = next((c for c in range(least, 2 * least) if positions % c == 0), least)
    size = max(1, -(-positions // count))
    return [slice(first, min(first + size, positions)) for first in range(0, max(1, positions), size)]


@functools.cache
def _on_raw(function: ChunkFunction, vocabulary: int, compiled: bool) -> ChunkFunction:
    """The function on logits as the product leaves them: in its precision, with columns too many."""

    def on_raw(raw: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return function(raw[:, :vocabulary].float(), *others)

    return torch.compile(on_raw, dynamic=False) if compiled else on_raw


# -- the loss --------------------------------------------------------------------------------------------------------


class _ChunkedLoss(torch.autograd.Function):
    """The sum of a loss over chunks of logits: `piece` gives the loss of a chunk and its gradient by the logits, of
    which it has so many `copies` at once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, piece: Callable[[Tensor, slice], Pair], copies: int
    ) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        for_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in chunks(len(hidden), copies * len(weight)):
            logits = hidden[part] @ weight.T
            loss, gradient = piece(logits, part)
            total += loss
            if for_hidden is not None:
                for_hidden[part] = gradient @ weight
            if for_weight is not None:
                _add_product(for_weight, gradient, hidden[part])
        ctx.save_for_backward(for_hidden, for_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        for_hidden, for_weight = ctx.saved_tensors
        scale = upstream[0]
        if for_weight is not None:  # scaled and rounded in one go: it has a row for every id
            rounded = torch.empty_like(for_weight, dtype=ctx.weight_dtype)
            for_weight = torch.mul(for_weight, scale, out=rounded)
        return None if for_hidden is None else for_hidden * scale.to(for_hidden.dtype), for_weight, None, None


def plain_loss_and_gradient(logits: Tensor, labels: Tensor, weights: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The weighted sum of the losses of logits (n, V'), and its gradient by them, in their precision."""
    place = torch.arange(logits.shape[-1], device=logits.device)
    log_p = logits.float().masked_fill(place >= vocabulary, float("-inf")).log_softmax(-1)
    is_label = place == labels[:, None]
    loss = -(torch.where(is_label, log_p, 0.0).sum(-1) * weights).sum()
    return loss, ((log_p.exp() - is_label.float()) * weights[:, None]).to(logits.dtype)


def loss_and_gradient(logits: Tensor, labels: Tensor, weights: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """`plain_loss_and_gradient`, on CUDA by a kernel that writes the gradient over the logits."""
    if logits.is_cuda:
        from freda.model.kernels import cross_entropy

        return cross_entropy.loss_and_gradient(logits, labels, weights, vocabulary)
    return plain_loss_and_gradient(logits, labels, weights, vocabulary)


def soft_loss_and_gradient(
    logits: Tensor, teacher: Tensor, labels: Tensor, taught: Tensor, weights: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """The weighted sum of the divergences of logits (n, V') from their targets, the teacher's logits (n, V') or labels,
    and its gradient by them, in their precision."""
    place = torch.arange(logits.shape[-1], device=logits.device)
    log_p, log_t = (
        part.float().masked_fill(place >= vocabulary, float("-inf")).log_softmax(-1) for part in (logits, teacher)
    )
    log_t = torch.where(taught[:, None], log_t, torch.where(place == labels[:, None], 0.0, float("-inf")))
    target = log_t.exp()
    losses = torch.where(target > 0, target * (log_t - log_p), 0.0).sum(-1)
    return (losses * weights).sum(), ((log_p.exp() - target) * weights[:, None]).to(logits.dtype)


@functools.cache
def _compiled(function: ChunkFunction) -> ChunkFunction:
    return torch.compile(function, dynamic=False)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total (fp32) += left.T @ right, summed in fp32 whatever the precision of the factors."""
    if left.dtype == torch.float32:
        total.addmm_(left.T, right)
    elif left.is_cuda:
        torch.addmm(total, left.T, right, out_dtype=torch.float32, out=total)
    else:
        total += left.T.float() @ right.float()
