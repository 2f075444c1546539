"""Autoregressive: the base every other method starts from, and the baseline that makes one token per forward.

In the terms of this package it is a block of one token that needs no draft: the forward that commits the last token
already predicts the next one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from freda.config import MethodConfig
from freda.data.loader import Batch
from freda.methods.draft import Draft, Prediction, Rules, advance
from freda.methods.method import Step
from freda.model.attention import make_mask
from freda.model.masks import clean_tokens
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
    return _token_losses(batch, next_token_logits(model, batch), config).sum()


def validate(model: Transformer, batch: Batch, config: MethodConfig, step: Step) -> dict[str, Tensor]:
    """Loss and share of tokens that are the most probable ones."""
    logits = next_token_logits(model, batch)
    hit = (logits.argmax(-1)[:, :-1] == batch.tokens[:, 1:]) & labels(batch, config)[:, 1:]
    return {"loss": _token_losses(batch, logits, config).sum(), "accuracy": hit.sum()}


def next_token_logits(model: Transformer, batch: Batch) -> Tensor:
    """Logits at i for token i+1, (R, L, V): blocks of one token make the clean mask the causal one."""
    tokens = clean_tokens(batch.document, batch.position, block_size=1)
    mask = make_mask(tokens, tokens, model.backend)
    hidden = model(model.embed_tokens(batch.tokens), batch.position, mask).hidden
    return model.logits(hidden)


def _token_losses(batch: Batch, logits: Tensor, config: MethodConfig) -> Tensor:
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none")
    return losses * labels(batch, config)[:, 1:].flatten()


def rows(draft: Draft, config: MethodConfig) -> tuple[Tensor, Tensor]:
    """Nothing is drafted; the one position is blank until it is chosen."""
    return draft.ids, draft.prob


def update(draft: Draft, prediction: Prediction, rules: Rules) -> Draft:
    """The predicted token is final."""
    return advance(draft, prediction, torch.ones_like(draft.committed), rules)
