"""Requests side by side: what a pass shows of each draft, and what it makes of the answer.

The reference loop (`generate`) and the engine differ in how they batch, cache and run the forward; what happens around
it is here, once: candidates before, choice, prediction and commitment after. Tensors have a row for every request, on
the device; what must be known on the host (`Limits`) is known from the requests, so nothing here waits for the device
but the number of candidates that are worth a forward.

Shapes: R requests, B tokens per block, C candidates, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from freda.decode.config import DecodeConfig
from freda.methods.candidates import choose, merge_candidates, propose, sample
from freda.methods.config import MethodConfig
from freda.methods.draft import (
    Candidates,
    Draft,
    Prediction,
    Rules,
    Sampling,
    Search,
    alone,
    feedback_weight,
    predict,
    soft_embedding,
    start,
)
from freda.methods.method import Method
from freda.model.attention import make_mask
from freda.model.masks import Tokens
from freda.model.scorer import Scorer
from freda.model.transformer import Forward, KeysValues, Transformer


class DecodeState(NamedTuple):
    """The state of R requests, each at its own block and pass."""

    draft: Draft  # (R, B) each
    begin: Tensor  # (R,) int64: position of the draft's first token
    rules: Rules
    sampling: Sampling
    search: Search
    share: Tensor | None = None  # (R, B, V): what the last pass gave, where candidates are drawn from it

    @property
    def position(self) -> Tensor:
        """Positions of the drafts' tokens, (R, B)."""
        return self.begin[:, None] + torch.arange(self.draft.ids.shape[1], device=self.begin.device)

    def rows(self, rows: Tensor) -> DecodeState:
        """Only these requests, in this order."""
        return DecodeState(
            Draft(*(part[rows] for part in self.draft)),
            self.begin[rows],
            self.rules._replace(passes=self.rules.passes[rows], threshold=self.rules.threshold[rows]),
            Sampling(*(part[rows] for part in self.sampling)),
            Search(*(part[rows] for part in self.search)),
            None if self.share is None else self.share[rows],
        )


class Limits(NamedTuple):
    """The most that any request of a batch limits."""

    width: int
    swaps: int
    samples: bool  # chooses tokens by chance
    draws: bool  # draws its candidates from the proposal


class Choice(NamedTuple):
    """Which of the candidates that a forward has seen goes on."""

    winner: Tensor  # (R,) int64
    scores: Tensor  # (R, C) fp32: ℓ + τ·s, without the noise


def limits_of(method: Method, requests: Sequence[DecodeConfig]) -> Limits:
    """What the host must know of these requests. Width and swaps are nothing to a method without a scorer."""
    return Limits(
        width=max((r.width for r in requests), default=1) if method.SCORES else 1,
        swaps=max((r.swaps for r in requests), default=0) if method.SCORES else 0,
        samples=any(r.temperature > 0 for r in requests),
        draws=method.SCORES and any(r.candidates == "sampled" for r in requests),
    )


def new_state(requests: Sequence[DecodeConfig], draft: Draft, begin: Tensor, stop_ids: Tensor) -> DecodeState:
    """Requests at the beginning of their first block."""

    def row(values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=begin.device)

    seeds = row([r.seed for r in requests], torch.int64)
    rules = Rules(
        row([r.passes for r in requests], torch.int64), row([r.threshold for r in requests], torch.float32), stop_ids
    )
    sampling = Sampling(
        row([r.temperature for r in requests], torch.float32), row([r.top_p for r in requests], torch.float32), seeds
    )
    search = Search(
        row([r.width for r in requests], torch.int64),
        row([r.swaps for r in requests], torch.int64),
        row([r.tau for r in requests], torch.float32),
        row([r.candidates == "sampled" for r in requests], torch.bool),
        row([r.select == "gumbel" for r in requests], torch.bool),
        seeds,
    )
    return DecodeState(draft, begin, rules, sampling, search)


def joined(first: DecodeState, second: DecodeState) -> DecodeState:
    """The requests of both. Who has no share yet has had no pass either, and nothing is drawn for it."""

    def both(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(pair) for pair in zip(one, other, strict=True)]

    rules = both(first.rules[:2], second.rules[:2])
    return DecodeState(
        Draft(*both(first.draft, second.draft)),
        torch.cat([first.begin, second.begin]),
        Rules(rules[0], rules[1], first.rules.stop_ids),
        Sampling(*both(first.sampling, second.sampling)),
        Search(*both(first.search, second.search)),
        _joined_shares(first, second),
    )


def _joined_shares(first: DecodeState, second: DecodeState) -> Tensor | None:
    known = next((state.share for state in (first, second) if state.share is not None), None)
    if known is None:
        return None
    missing = [known.new_zeros(len(state.begin), *known.shape[1:]) for state in (first, second)]
    shares = [
        none if state.share is None else state.share for state, none in zip((first, second), missing, strict=True)
    ]
    return torch.cat(shares)


def fresh_drafts(tails: Sequence[Sequence[int]], size: int, blank_id: int, device: torch.device) -> Draft:
    """Blank blocks but for the tokens of a prompt that sit in them, (R, B)."""
    ids = [[*tail, *[0] * (size - len(tail))] for tail in tails]
    given = [[place < len(tail) for place in range(size)] for tail in tails]
    shape = (len(tails), size)
    tokens = torch.tensor(ids, dtype=torch.int64, device=device).view(shape)
    return start(tokens, torch.tensor(given, dtype=torch.bool, device=device).view(shape), blank_id)


def candidates_of(
    state: DecodeState, method: Method, config: MethodConfig, limits: Limits, *, count: int | None = None
) -> Candidates:
    """What the forward sees of every draft: the draft itself, or several candidates side by side, `count` of them or as
    many as are worth a forward."""
    if not method.SCORES:
        return alone(*method.rows(state.draft, config))
    found = propose(state.draft, state.search, width=limits.width, swaps=limits.swaps)
    if state.share is not None:
        drawn = sample(state.draft, state.share, state.search, state.position, width=limits.width)
        found = merge_candidates(state.search.sampled, found, drawn)
    if count is None:
        count = int(found.valid.sum(-1).max())  # the valid ones come first; a blank draft has one
    found = Candidates(*(part[:, :count] for part in found))
    return found._replace(alpha=feedback_weight(found.alpha, config))


def embedded(model: Transformer, candidates: Candidates, config: MethodConfig) -> Tensor:
    """All candidates of every request side by side, (R, C·B, D)."""
    return soft_embedding(model, candidates.ids.flatten(1), candidates.alpha.flatten(1), rescale=config.rescale)


def soft_channel(
    model: Transformer,
    out: Forward,
    position: Tensor,
    tokens: Tokens,
    keys: Tokens,
    past: Sequence[KeysValues] | None,
    committed: int,
) -> Tensor:
    """What the scorer sees of the draft part of a forward, which begins after `committed` tokens: (R, C·B, D)."""
    scorer = model.scorer
    assert isinstance(scorer, Scorer)
    of_draft = out._replace(hidden=out.hidden[:, committed:], beneath=out.beneath[:, committed:])
    if scorer.last_layer is None:
        return of_draft.hidden
    draft = Tokens(*(part[:, committed:] for part in tokens))
    seen = KeysValues(*(part[:, :, :committed] for part in out.new[-1]))
    if past is not None:
        seen = KeysValues(*(torch.cat(pair, dim=2) for pair in zip(past[-1], seen, strict=True)))
    mask = make_mask(draft, keys, model.backend)
    return scorer.soft_channel(model, of_draft, position[:, committed:], mask, seen)


def chosen(
    model: Transformer, method: Method, state: DecodeState, candidates: Candidates, soft: Tensor | None
) -> Choice:
    """The candidate that goes on; `soft` (R, C·B, D) is the scorer's view of all of them."""
    rows, count = candidates.valid.shape
    if soft is None or not method.SCORES:
        return Choice(torch.zeros_like(state.begin), candidates.log_prob)
    assert isinstance(model.scorer, Scorer)
    embedding = model.embed_tokens(candidates.ids).flatten(0, 1)
    counted = torch.ones_like(candidates.ids, dtype=torch.bool).flatten(0, 1)
    size = candidates.ids.shape[-1]
    score = model.scorer(soft.reshape(rows * count, size, -1), embedding, counted).view(rows, count)
    place = torch.stack([state.begin, state.draft.passes], dim=-1)
    winner = choose(candidates, score, state.search, place)
    return Choice(winner, candidates.log_prob + state.search.tau[:, None] * score)


def after_pass(state: DecodeState, method: Method, logits: Tensor, limits: Limits) -> DecodeState:
    """The drafts that a pass leaves, from the logits (R, B, V) of the chosen candidates."""
    sampling = state.sampling if limits.samples else None
    prediction = predict(logits, sampling, state.position, runner_up=method.SCORES)
    return settled(state, method, prediction)._replace(share=logits.softmax(-1) if limits.draws else None)


def settled(state: DecodeState, method: Method, prediction: Prediction) -> DecodeState:
    """The drafts after a prediction (R, B)."""
    return state._replace(draft=method.update(state.draft, prediction, state.rules))
