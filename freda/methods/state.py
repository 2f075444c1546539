"""What decoding knows of R requests between two passes: one row of tensors for each, all on the device.

The reference loop and the engine differ in how they batch, cache and run a forward. What a method sees around it is
this state, so that nothing a method does has to be written twice.

Shapes: R requests, B tokens per block, C candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from freda.decode.config import DecodeConfig
from freda.methods.draft import Candidates, Draft, Prediction, Rules, Sampling, Search, start
from freda.methods.geometry import Geometry


class DecodeState(NamedTuple):
    """R requests, each at its own block and pass."""

    draft: Draft  # (R, B) each
    begin: Tensor  # (R,) int64: position of the draft's first token
    known: Tensor  # (R,) int64: the token before it, which a shifted draft shows in its first slot
    rules: Rules
    sampling: Sampling
    search: Search
    probs: Tensor | None = None  # (R, B, V): what the last pass predicted, kept where candidates are sampled from it

    @property
    def position(self) -> Tensor:
        """Positions of the drafts' tokens, (R, B)."""
        return self.begin[:, None] + torch.arange(self.draft.ids.shape[1], device=self.begin.device)

    def shown(self, geometry: Geometry, found: Candidates) -> tuple[Tensor, Tensor]:
        """What the slots of candidates show, ids and α, (R, C, B): each behind the last token that is text for it."""
        text = torch.cat([self.known[:, None], self.draft.ids], dim=1)  # (R, 1 + B)
        return geometry.shown(text.gather(1, found.ahead), found.ids, found.alpha)

    def rows(self, rows: Tensor | slice) -> DecodeState:
        """The state of the requests that `rows` names, in that order; of a slice, in the same memory."""
        return DecodeState(
            Draft(*(part[rows] for part in self.draft)),
            self.begin[rows],
            self.known[rows],
            self.rules._replace(passes=self.rules.passes[rows], threshold=self.rules.threshold[rows]),
            Sampling(*(part[rows] for part in self.sampling)),
            Search(*(part[rows] for part in self.search)),
            None if self.probs is None else self.probs[rows],
        )


class Seen(NamedTuple):
    """What a forward has seen beside the prediction that goes on."""

    candidates: Candidates
    winner: Tensor  # (R,) int64: the candidate that goes on
    text: Prediction | None  # (R, B) each: the choices of drafts that were run as text, where they are checked


class Limits(NamedTuple):
    """The most that any request of a batch asks for: what the host must know to lay out a forward."""

    width: int  # candidates
    swaps: int  # positions that a candidate changes
    samples: bool  # does any request sample its tokens?
    draws: bool  # does any request sample its candidates?


def new_state(
    requests: Sequence[DecodeConfig], draft: Draft, begin: Tensor, known: Tensor, stop_ids: Tensor
) -> DecodeState:
    """Requests at the beginning of their first block."""

    def row(name: str, dtype: torch.dtype, equals: str | None = None) -> Tensor:
        values = [getattr(request, name) for request in requests]
        values = values if equals is None else [value == equals for value in values]
        return torch.tensor(values, dtype=dtype, device=begin.device)

    whole, real = torch.int64, torch.float32
    seed = row("seed", whole)
    rules = Rules(row("passes", whole), row("threshold", real), stop_ids)
    sampling = Sampling(row("temperature", real), row("top_p", real), seed)
    sampled, gumbel = row("candidates", torch.bool, "sampled"), row("select", torch.bool, "gumbel")
    search = Search(row("width", whole), row("swaps", whole), row("tau", real), sampled, gumbel, seed)
    return DecodeState(draft, begin, known, rules, sampling, search)


def fresh_drafts(tails: Sequence[Sequence[int]], size: int, blank_id: int, device: torch.device) -> Draft:
    """Blank blocks (R, B), but for the tail of a prompt that sits at the beginning of each."""
    ids = [[*tail, *[0] * (size - len(tail))] for tail in tails]
    given = [[place < len(tail) for place in range(size)] for tail in tails]
    shape = (len(tails), size)
    tokens = torch.tensor(ids, dtype=torch.int64, device=device).view(shape)
    return start(tokens, torch.tensor(given, dtype=torch.bool, device=device).view(shape), blank_id)
