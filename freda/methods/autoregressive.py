"""Autoregressive: the base every other method starts from, and the baseline that makes one token per forward.

In the terms of this package it is a block of one token that needs no draft: the forward that commits the last token
already predicts the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.methods.draft import Draft, Prediction, Rules, advance, clean_mask, likeliest, loss_and_hit
from freda.methods.method import Layout, Method, Step, Work
from freda.model.head import Logits
from freda.model.parts import Parts


@dataclass(frozen=True, kw_only=True)
class Autoregressive(Method):
    """Next-token prediction. `block_size` is kept for the block methods that are trained from such a model."""

    axes: ClassVar[tuple[str, ...]] = ()
    streams: ClassVar[int] = 1

    name: str = field(default="autoregressive", init=False)

    @property
    def layout(self) -> Layout:
        """One token, predicted after the last committed one."""
        return Layout(block=1, slots=0)

    def labels(self, batch: Batch) -> Tensor:
        """Every token that follows another of its document; the EOS fill of the last block is skipped (M1)."""
        follows = torch.zeros_like(batch.fill)
        follows[:, 1:] = batch.document[:, 1:] == batch.document[:, :-1]
        return follows & (batch.document >= 0) & ~batch.fill

    def loss(self, parts: Parts, batch: Batch, step: Step) -> Tensor:
        """Cross-entropy of each token given those before it."""
        return next_token_logits(parts, batch).cross_entropy(batch.tokens.roll(-1, dims=1), self._predicts(batch))

    def validate(self, parts: Parts, batch: Batch, step: Step) -> dict[str, Tensor]:
        """Loss, and how many tokens are the most probable ones."""
        losses, hit = next_token_logits(parts, batch).map(loss_and_hit, batch.tokens.roll(-1, dims=1))
        counted = self._predicts(batch)
        return {"loss": (losses * counted).sum(), "accuracy": (hit & counted).sum()}

    def _predicts(self, batch: Batch) -> Tensor:
        """Which positions are followed by a token that counts."""
        return self.labels(batch).roll(-1, dims=1)  # a row's first token follows none, so nothing comes round

    def work(self, one: Work, passes: int) -> float:
        """One forward and its backward."""
        return 3 * sum(one)

    def rows(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """Nothing is drafted; the one position is blank until it is chosen."""
        return draft.ids, draft.prob

    def update(self, draft: Draft, prediction: Prediction, rules: Rules) -> Draft:
        """The predicted token is final."""
        return advance(draft, prediction, torch.ones_like(draft.committed), rules)

    @torch.no_grad()
    def teacher_forced(
        self, parts: Parts, batch: Batch, given: Tensor, passes: int, *, clean_draft: bool = False
    ) -> Iterator[Tensor]:
        """The most probable token after every true prefix; passes change nothing."""
        made = torch.full_like(batch.tokens, -1)
        made[:, 1:] = likeliest(next_token_logits(parts, batch), batch.tokens.shape).ids[:, :-1]
        for _ in range(passes):
            yield made


def next_token_logits(parts: Parts, batch: Batch) -> Logits:
    """Logits at i for token i+1, (R, L): blocks of one token make the clean mask the causal one."""
    backbone = parts.backbone
    mask = clean_mask(backbone, batch, block_size=1)
    return backbone.head(backbone(backbone.embed_tokens(batch.tokens), batch.position, mask).hidden)
