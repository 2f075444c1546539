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
from freda.errors import require
from freda.methods.draft import (
    Draft,
    Prediction,
    Rules,
    advance,
    clean_mask,
    label_loss,
    likeliest,
    right_tokens,
)
from freda.methods.geometry import NEXT_TOKEN, Geometry, next_tokens
from freda.methods.method import Method, Step, Work
from freda.model.head import Logits
from freda.model.parts import Parts


@dataclass(frozen=True, kw_only=True)
class Autoregressive(Method):
    """Next-token prediction. `block_size` is kept for the block methods that are trained from such a model."""

    axes: ClassVar[tuple[str, ...]] = ()
    streams: ClassVar[int] = 1

    name: str = field(default="autoregressive", init=False)

    @property
    def geometry(self) -> Geometry:
        """One token, predicted after the last committed one."""
        return NEXT_TOKEN

    def check_adapter(self, rows: str) -> None:
        """There are no draft rows."""
        odd = f"adapter.rows is {rows}, but autoregressive training has no drafts"
        require(rows == "all", f'{odd}; use rows = "all", or a method with drafts')

    def labels(self, batch: Batch) -> Tensor:
        """Every token with a next one in its document, unless that is EOS fill (M1)."""
        return next_tokens(batch).counted

    def loss(self, parts: Parts, batch: Batch, step: Step) -> Tensor:
        """Cross-entropy of each token given those before it."""
        return label_loss(next_token_logits(parts, batch), next_tokens(batch))

    def validate(self, parts: Parts, batch: Batch, step: Step) -> dict[str, Tensor]:
        """Loss, and how many tokens are the most probable ones."""
        loss, right = right_tokens(next_token_logits(parts, batch), next_tokens(batch))
        return {"loss": loss, "accuracy": right}

    def work(self, one: Work, passes: int) -> float:
        """One forward of the clean half and its backward."""
        return one.clean_step + one.learnt * one.head

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
        made = NEXT_TOKEN.by_token(likeliest(next_token_logits(parts, batch), batch.tokens.shape).ids)
        for _ in range(passes):
            yield made


def next_token_logits(parts: Parts, batch: Batch) -> Logits:
    """Logits at i for token i+1, (R, L): blocks of one token make the clean mask the causal one."""
    backbone = parts.backbone
    mask = clean_mask(backbone, batch, NEXT_TOKEN)
    return backbone.head(backbone(backbone.embed_tokens(batch.tokens), batch.position, mask).hidden)
