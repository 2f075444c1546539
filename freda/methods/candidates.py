"""Candidates for a block and the choice among them (M10).

Candidates are the cheapest changes to the best draft (algorithm 4), or independent draws from the proposal. Either way
each is embedded like any draft, with α = the proposal's probability of its tokens. For the beam, `log_prob` is the
proposal score ℓ over the positions that are free. Draws carry ℓ in their frequency already: equal ones are merged, and
`log_prob` is the log of how often the text was drawn, so that a choice by Gumbel noise among the distinct texts has the
very frequencies of one among all draws (Eq. finite_candidate_softmax).

Pure functions over N blocks of B tokens at once; C candidates, S subsets.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from freda.methods.draft import Candidates, Draft, Prediction, Search, draw
from freda.methods.noise import Purpose, gumbel, uniform


@functools.cache
def contenders(block_size: int, width: int, most: int) -> tuple[tuple[int, ...], ...]:
    """The sets of at most `most` positions that can be among the `width` cheapest, whatever the costs are; by size.

    Positions are named by rank, the cheapest being 0. Moving a position of a set to a lower rank, or dropping one,
    never raises the cost, so a set can be among the `width` cheapest only if fewer than `width` others can be reached
    from it that way. A best-first search from the empty set finds them without a look at all 2^B.
    """
    below: dict[tuple[int, ...], set[tuple[int, ...]]] = {(): {()}}  # each kept set: those it is never cheaper than
    level: list[tuple[int, ...]] = [()]
    while level:
        grown = {child for chosen in level for child in _above(chosen, block_size) if len(child) <= most}
        whole = [chosen for chosen in grown if all(one in below for one in _below(chosen))]
        reached = {chosen: {chosen}.union(*(below[one] for one in _below(chosen))) for chosen in whole}
        level = [chosen for chosen in whole if len(reached[chosen]) <= width]
        below |= {chosen: reached[chosen] for chosen in level}
    return tuple(sorted(below, key=lambda chosen: (len(chosen), chosen)))


def _above(chosen: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """The sets one step dearer: a position moved up a rank, or the cheapest added."""
    added = [(0, *chosen)] if 0 not in chosen and size > 0 else []
    free = [rank for rank in chosen if rank + 1 < size and rank + 1 not in chosen]
    return added + [tuple(sorted({*chosen, rank + 1} - {rank})) for rank in free]


def _below(chosen: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The sets one step cheaper: a position moved down a rank, or the cheapest dropped."""
    dropped = [chosen[1:]] if chosen[0] == 0 else []
    free = [rank for rank in chosen if rank > 0 and rank - 1 not in chosen]
    return dropped + [tuple(sorted({*chosen, rank - 1} - {rank})) for rank in free]


@functools.cache
def _switched(block_size: int, width: int, most: int, device: torch.device) -> Tensor:
    """`contenders` as a mask over ranks, (S, B). Made once: a CUDA graph cannot copy from the host."""
    chosen = contenders(block_size, width, most)
    return torch.tensor([[rank in one for rank in range(block_size)] for one in chosen], device=device)


def propose(draft: Draft, search: Search, *, width: int, swaps: int) -> Candidates:
    """The beam's candidates of the next pass, at most `width` with `swaps` swaps; of a blank draft, itself alone."""
    top = Prediction(draft.ids, draft.prob, draft.second_ids, draft.second_prob)
    found = marginal_cost_beam(top, ~draft.given, width=width, swaps=search.swaps, most_swaps=swaps)
    rank = torch.arange(found.valid.shape[1], device=draft.ids.device)
    return found._replace(valid=found.valid & (rank < search.width[:, None]))


def sample(draft: Draft, probs: Tensor, search: Search, position: Tensor, *, width: int) -> Candidates:
    """`search.width` draws, at most `width`, from `probs` (N, B, V), which the last pass gave; the distinct ones. Noise
    belongs to (seed, `position` (N, B), pass, number). A draft without a pass has one candidate, itself."""
    number = torch.arange(width, device=probs.device)
    counters = (search.seed[:, None, None], position[..., None], draft.passes[:, None, None], number)
    drawn = draw(probs, uniform(Purpose.CANDIDATES, *counters))  # (N, B, C)
    prob = probs.gather(-1, drawn).transpose(1, 2)
    fixed = (draft.given | (draft.passes == 0)[:, None])[:, None]
    ids = torch.where(fixed, draft.ids[:, None], drawn.transpose(1, 2))  # (N, C, B)
    alpha = torch.where(fixed, draft.prob[:, None], prob)
    asked = number < search.width[:, None]
    same = (ids[:, :, None] == ids[:, None]).all(-1) & asked[:, None]  # (N, C, C)
    first = asked & (same.int().argmax(-1) == number)
    found = Candidates(ids, alpha, same.sum(-1).clamp_min(1).float().log(), first, torch.zeros_like(ids[..., 0]))
    order = (~first).int().argsort(dim=1, stable=True)
    row = torch.arange(len(ids), device=ids.device)[:, None]
    return Candidates(*(part[row, order] for part in found))


def merge_candidates(take_second: Tensor, first: Candidates, second: Candidates) -> Candidates:
    """`second` where `take_second` (N,) is true, `first` elsewhere."""
    pairs = zip(first, second, strict=True)
    return Candidates(*(torch.where(take_second.view(-1, *[1] * (a.dim() - 1)), b, a) for a, b in pairs))


def choose(candidates: Candidates, scores: Tensor, search: Search, place: Tensor) -> Tensor:
    """The winner (N,): argmax of ℓ + τ·s, plus Gumbel noise where the choice is sampled, as it always is for draws. The
    noise belongs to the request's seed and to `place` (N, P), for instance (position, pass)."""
    value = candidates.log_prob + search.tau[:, None] * scores
    rank = torch.arange(value.shape[1], device=value.device)
    counters = [part[:, None] for part in (search.seed, *place.unbind(-1))]
    noise = gumbel(Purpose.SELECTION, *counters, rank)
    value = torch.where((search.gumbel | search.sampled)[:, None], value + noise, value)
    return value.masked_fill(~candidates.valid, float("-inf")).argmax(-1)


def marginal_cost_beam(top: Prediction, free: Tensor, *, width: int, swaps: Tensor, most_swaps: int) -> Candidates:
    """Algorithm 4: switch a set of at most `swaps` (N,) free positions to their second token; the `width` cheapest.

    The cost of a set is the log-probability it loses. Of equally cheap sets the smaller comes first, so the unchanged
    draft is the first candidate. A token that sampling took against the odds stays: its runner-up would be the likelier
    one, and switching back would undo the temperature. `most_swaps` bounds `swaps` without reading it from the device.
    """
    switched = _switched(free.shape[1], width, most_swaps, free.device)  # (S, B) over ranks
    loss = top.prob.log() - top.second_prob.log()
    loss = torch.where(free & (top.second_prob > 0) & (top.second_prob <= top.prob), loss, torch.inf)
    ranked, place = loss.sort(dim=-1, stable=True)  # (N, B)
    cost = torch.where(switched, ranked[:, None], 0.0).sum(-1)  # (N, S)
    cost = torch.where(switched.sum(-1) <= swaps[:, None], cost, torch.inf)
    kept, order = cost.sort(dim=-1, stable=True)
    missing = (0, max(0, width - len(switched)))  # fewer sets than asked for: the first is repeated, and not valid
    kept, order = F.pad(kept[:, :width], missing, value=torch.inf), F.pad(order[:, :width], missing)
    rank = place.argsort(dim=-1)  # (N, B): of each position
    chosen = switched[order].gather(-1, rank[:, None].expand(-1, width, -1))  # (N, C, B) over positions
    ids = torch.where(chosen, top.second_ids[:, None], top.ids[:, None])
    alpha = torch.where(chosen, top.second_prob[:, None], top.prob[:, None])
    log_prob = torch.where(free[:, None], alpha.clamp_min(1e-38).log(), 0.0).sum(-1)
    return Candidates(ids, alpha, log_prob, kept.isfinite(), torch.zeros_like(ids[..., 0]))
