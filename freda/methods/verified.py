"""Verified decoding: the model's own autoregressive text, several tokens a forward (M24).

A rule for decoding, over any model of the shifted layout, however it was trained. The committed text of that layout is
an autoregressive model's, so a draft can be checked by running it as text. Known text ends in x, with the draft d1, d2,
d3 behind it; one forward has, for B = 4,

    position     s    s+1  s+2  s+3  s+4  s+5  s+6
    text         x    d1   d2   d3                    causal, and stored: says what should stand behind each
    candidate 0  x    ░    ░    ░                     the next draft, if none of d1, d2, d3 is right
    candidate 1       d1   ░    ░    ░                if d1 alone is
    candidate 2            d2   ░    ░    ░
    candidate 3                 d3   ░    ░    ░      if all are

Let a be the number of tokens, from the left, that are the model's own choices. They and its choice y behind them become
text: a + 1 tokens. Candidate a saw the text up to its first slot. That slot's guess is replaced by y; what the others
predict is the draft behind y. Keys and values of rejected tokens are written over later.

A choice is a function of the text before it and of noise that belongs to (seed, position) (M16). So is a choice of the
autoregressive method: the texts are equal, token for token, greedy and sampled. Drafts are chosen with the same noise,
which makes them agree more often.

With `tail = "refine"` a candidate shows the old draft behind the rejected token, each token with its α, and goes on
refining it. Fewer candidates than lengths (`width`) are those for the likeliest lengths, by the draft's probabilities.
If another length comes out, the old tail is the next draft, or, where there is none, a blank one; the next forward then
checks that, and is not lost: it makes at least one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.decode.config import DecodeConfig
from freda.errors import FredaError, require
from freda.methods.blocks import described
from freda.methods.draft import Candidates, Draft, Prediction, leftmost_run, start
from freda.methods.geometry import Geometry
from freda.methods.method import Step
from freda.methods.self_refine import Refining
from freda.methods.state import DecodeState, Limits, Seen
from freda.model.parts import Parts
from freda.sections import knob

MOST_PASSES = 16


@dataclass(frozen=True, kw_only=True)
class Verified(Refining):
    """Drafts that are kept as far as the autoregressive model agrees. The last token of a draft is always BLANK: B
    tokens are text after a pass at most, and the last of them is chosen, not drafted."""

    axes: ClassVar[tuple[str, ...]] = ()  # it writes the same text with any settings
    refines: ClassVar[bool] = False  # and no token of it is ever changed
    trains: ClassVar[bool] = False

    name: str = field(default="verified", init=False)
    layout: Literal["paper", "shifted"] = knob("shifted", "the model's layout: shifted", stored=True)
    passes: int = knob(1, "passes over a draft before it is checked; the first is in the forward that checks the last")
    tail: Literal["refine", "blank"] = knob("refine", "where a token was rejected: refine the draft behind it, or not")
    width: int = knob(0, "most candidates, those for the likeliest numbers of accepted tokens; 0: one for each")

    def __post_init__(self) -> None:
        super().__post_init__()
        need = "verified decoding needs causal text and slots that predict the next token"
        layout = super().geometry
        require(layout.shift == 1 and layout.causal, f"{need}; the model has {described(layout)}: use its own method")
        require(self.passes <= MOST_PASSES, f"method.passes is {self.passes}; use 1 to {MOST_PASSES}")
        require(0 <= self.width <= self.block_size, f"method.width is {self.width}; use 0 to {self.block_size}")

    @property
    def geometry(self) -> Geometry:
        """The shifted layout, whose drafts are checked."""
        return Geometry(self.block_size, shift=1, causal=True, checked=True)

    def loss(self, parts: Parts, batch: Batch, step: Step) -> Tensor:
        """There is nothing to train."""
        raise FredaError('verified decodes models of other methods; train self-refine with layout = "shifted"')

    def limits(self, requests: Sequence[DecodeConfig]) -> Limits:
        """A candidate for each number of accepted tokens, or fewer."""
        return super().limits(requests)._replace(width=self.width or self.block_size)

    def checks(self, draft: Draft) -> Tensor:
        """Those that had their passes, and blank ones, behind which the text goes on by itself."""
        return (draft.passes == 0) | (draft.passes >= self.passes)

    def candidates(self, state: DecodeState, limits: Limits, count: int | None = None) -> Candidates:
        """The next drafts, by how much of this one is accepted; of a draft that is to be refined, itself alone."""
        draft, size = state.draft, self.block_size
        length = torch.arange(size, device=draft.ids.device)
        begin = torch.cat([torch.ones_like(draft.prob[:, :1]), draft.prob[:, :-1]], dim=1)
        reached = begin.cumprod(-1)  # (R, B): how probable it is that so many are right; 0 behind the draft's end
        likely = torch.where(reached > 0, reached * (1 - draft.prob), -1.0)
        ahead = likely.argsort(dim=-1, descending=True, stable=True)[:, : limits.width].sort(dim=-1).values
        valid = reached.gather(1, ahead) > 0
        place = (ahead[..., None] + length).clamp_max(size - 1)  # (R, C, B): of the old draft, at the same positions
        ids, alpha = (part[:, None].expand(place.shape).gather(2, place) for part in draft[:2])
        blank = (length == 0) | (self.tail == "blank")  # the rejected token, or all
        ids, alpha = torch.where(blank, draft.ids[:, None, -1:], ids), torch.where(blank, 0.0, alpha)
        checked, first = self.checks(draft)[:, None], length[: limits.width] == 0
        found = Candidates(
            torch.where(checked[..., None], ids, draft.ids[:, None]),
            self.feedback_weight(torch.where(checked[..., None], alpha, draft.prob[:, None])),
            likely.gather(1, ahead),
            torch.where(checked, valid, first),
            torch.where(checked, ahead, 0),
        )
        if count is None:
            count = int(found.valid.sum(-1).max())
        return Candidates(*(part[:, :count] for part in found))

    def choose(
        self, parts: Parts, state: DecodeState, candidates: Candidates, soft: Tensor | None, text: Prediction | None
    ) -> tuple[Tensor, Tensor]:
        """The candidate for the number of accepted tokens; any, if there is none. Scores say how probable each was."""
        accepted = self._accepted(state.draft, text)
        return ((candidates.ahead == accepted[:, None]) & candidates.valid).int().argmax(-1), candidates.log_prob

    def _accepted(self, draft: Draft, text: Prediction | None) -> Tensor:
        """How many tokens of each draft are accepted, (R,); none of one that was not checked."""
        assert text is not None
        return leftmost_run((draft.ids == text.ids) & self.checks(draft)[:, None]).sum(-1)

    def settle(self, state: DecodeState, prediction: Prediction, seen: Seen, blank_id: int) -> tuple[Draft, Draft]:
        """What was accepted and the token behind it are final. What the chosen candidate predicts is the next draft; if
        there was no candidate, what is left of the old one."""
        (found, winner, text), old = seen, state.draft
        assert text is not None
        checked, accepted = self.checks(old), self._accepted(old, text)
        closed = torch.where(checked, accepted + 1, 0)
        place = torch.arange(self.block_size, device=old.ids.device)
        told = Prediction(*(torch.where(checked[:, None], *pair) for pair in zip(text, prediction, strict=True)))
        draft = Draft(*told, old.given, place < closed[:, None], old.passes + 1, closed)
        ahead, valid = (part.gather(1, winner[:, None])[:, 0] for part in (found.ahead, found.valid))
        drafted = (ahead == accepted) & valid
        # A candidate's first slot has guessed the token that is chosen now; a draft that was refined goes on whole.
        first = torch.where(drafted, checked.long(), accepted + 1)[:, None] + place
        kept = (first < self.block_size) & (place < self.block_size - 1)
        if self.tail == "blank":
            kept = kept & drafted[:, None]
        first = first.clamp_max(self.block_size - 1)
        source = zip(prediction[:2], old[:2], strict=True)
        ids, prob = (torch.where(drafted[:, None], new, left).gather(1, first) for new, left in source)
        following = start(ids, kept, blank_id)._replace(
            prob=torch.where(kept, prob, 0.0),
            given=old.given,
            committed=old.given,
            passes=torch.where(drafted, torch.where(checked, 1, draft.passes), 0),
        )
        return draft, following
