"""Autoregressive: the base every other method starts from, and the baseline that makes one token per forward.

In the terms of this package it is a block of one token that needs no draft: the forward that commits the last token
already predicts the next one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.methods.config import MethodConfig
from freda.methods.draft import Draft, Prediction, Rules, advance, clean_mask, loss_and_hit
from freda.methods.method import Step
from freda.model.head import Logits
from freda.model.transformer import Transformer

DRAFTS = False
REFINES = False
SCORES = False


def labels(batch: Batch, config: MethodConfig) -> Tensor:
    """Every token that follows another of its document; the EOS fill of the last block is skipped (M1)."""
    follows = torch.zeros_like(batch.fill)
    follows[:, 1:] = batch.document[:, 1:] == batch.document[:, :-1]
    return follows & (batch.document >= 0) & ~batch.fill


def loss(model: Transformer, batch: Batch, config: MethodConfig, step: Step) -> Tensor:
    """Cross-entropy of each token given those before it."""
    return next_token_logits(model, batch).cross_entropy(_next_tokens(batch), _predicts(batch, config))


def validate(model: Transformer, batch: Batch, config: MethodConfig, step: Step) -> dict[str, Tensor]:
    """Loss and share of tokens that are the most probable ones."""
    losses, hit = next_token_logits(model, batch).map(loss_and_hit, _next_tokens(batch))
    counted = _predicts(batch, config)
    return {"loss": (losses * counted).sum(), "accuracy": (hit & counted).sum()}


def next_token_logits(model: Transformer, batch: Batch) -> Logits:
    """Logits at i for token i+1, (R, L): blocks of one token make the clean mask the causal one."""
    mask = clean_mask(model, batch, block_size=1)
    return model.head(model(model.embed_tokens(batch.tokens), batch.position, mask).hidden)


def _next_tokens(batch: Batch) -> Tensor:
    """The token after each; of the last of a row its first, which `_predicts` leaves out."""
    return batch.tokens.roll(-1, dims=1)


def _predicts(batch: Batch, config: MethodConfig) -> Tensor:
    """Which positions are followed by a token that counts."""
    return labels(batch, config).roll(-1, dims=1)  # a row's first token follows none, so nothing comes round


def rows(draft: Draft, config: MethodConfig) -> tuple[Tensor, Tensor]:
    """Nothing is drafted; the one position is blank until it is chosen."""
    return draft.ids, draft.prob


def update(draft: Draft, prediction: Prediction, rules: Rules) -> Draft:
    """The predicted token is final."""
    return advance(draft, prediction, torch.ones_like(draft.committed), rules)
