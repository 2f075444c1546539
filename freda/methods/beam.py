"""Candidates for a block: the cheapest changes to its best draft (algorithm 4), or samples from its distribution.

Pure functions over N blocks at once. A candidate is embedded with α = the proposal's probability of its tokens, like
any draft; `log_prob` is its proposal score ℓ over the positions that are free.

Shapes: N blocks, B tokens per block, C candidates, S subsets.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor


class Candidates(NamedTuple):
    """C drafts of each block; invalid ones take part in nothing."""

    ids: Tensor  # (N, C, B) int64
    alpha: Tensor  # (N, C, B) fp32: proposal probability of each token
    log_prob: Tensor  # (N, C) fp32: ℓ, sum of log-probabilities over the free positions
    valid: Tensor  # (N, C) bool


class TopTwo(NamedTuple):
    """The two most probable tokens of every position and their probabilities, each (N, B)."""

    ids: Tensor
    prob: Tensor
    second_ids: Tensor
    second_prob: Tensor


@functools.cache
def subsets(block_size: int, most: int) -> tuple[tuple[int, ...], ...]:
    """All sets of at most `most` positions: the empty one, then by size, then in dictionary order."""
    sizes = range(min(most, block_size) + 1)
    return tuple(itertools.chain.from_iterable(itertools.combinations(range(block_size), size) for size in sizes))


def marginal_cost_beam(top: TopTwo, free: Tensor, *, width: int, swaps: Tensor, most_swaps: int) -> Candidates:
    """Algorithm 4: switch a set of at most `swaps` (N,) free positions to their second token; the `width` cheapest.

    The cost of a set is the log-probability it loses. Equal costs keep the order of `subsets`, so the unchanged draft
    comes first. `most_swaps` bounds `swaps` without reading it from the device.
    """
    block_size = free.shape[1]
    chosen = subsets(block_size, most_swaps)
    switched = torch.zeros(len(chosen), block_size, dtype=torch.bool, device=free.device)  # (S, B)
    for row, positions in enumerate(chosen):
        switched[row, list(positions)] = True
    loss = top.prob.log() - top.second_prob.log()
    loss = torch.where(free & (top.second_prob > 0), loss, torch.inf)
    cost = torch.where(switched, loss[:, None], 0.0).sum(-1)  # (N, S)
    cost = torch.where(switched.sum(-1) <= swaps[:, None], cost, torch.inf)
    kept, order = cost.sort(dim=-1, stable=True)
    kept, order = kept[:, :width], order[:, :width]
    return _switch(top, free, switched[order], kept.isfinite())


def _switch(top: TopTwo, free: Tensor, switched: Tensor, valid: Tensor) -> Candidates:
    """The candidates that `switched` (N, C, B) describes."""
    ids = torch.where(switched, top.second_ids[:, None], top.ids[:, None])
    alpha = torch.where(switched, top.second_prob[:, None], top.prob[:, None])
    log_prob = torch.where(free[:, None], alpha.clamp_min(1e-38).log(), 0.0).sum(-1)
    return Candidates(ids, alpha, log_prob, valid)
