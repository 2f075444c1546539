"""Block diffusion (the paper's BlockDiff baseline): masked diffusion inside a block, left to right over blocks.

Training masks each token of a block with probability t, one t per block, and weighs the loss by 1/t (Eq.
mdm_objective with the linear schedule). Decoding turns masks into tokens and never changes a token again: each pass
reveals the positions of probability η or more, and at least its share of what is left, the surest first. With η above
1 that is the static schedule of K passes; with K = B it is threshold decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.methods.config import MethodConfig
from freda.methods.draft import Draft, Prediction, Rules, advance, clean_half, draft_logits, label_loss, soft_embedding
from freda.methods.method import Step
from freda.methods.noise import Purpose, uniform
from freda.model.transformer import Transformer

DRAFTS = True
REFINES = False
SCORES = False


def labels(batch: Batch, config: MethodConfig) -> Tensor:
    """Every token, the EOS fill too: the model learns to close a block."""
    return batch.document >= 0


def loss(model: Transformer, batch: Batch, config: MethodConfig, step: Step) -> Tensor:
    """Eq. mdm_objective: cross-entropy on masked positions, weighted by 1/t."""
    level, masked = noise(batch, config, step)
    clean = clean_half(model, batch, config.block_size)
    x = soft_embedding(model, batch.tokens, 1.0 - masked.float())
    return label_loss(draft_logits(model, x, clean), batch, masked / level)


def noise(batch: Batch, config: MethodConfig, step: Step) -> tuple[Tensor, Tensor]:
    """The noise level t of each token's block and which tokens are masked, each (R, L)."""
    row = step.row.to(batch.tokens.device)[:, None]
    place = torch.arange(batch.tokens.shape[1], device=row.device)
    level = uniform(Purpose.NOISE_LEVEL, step.seed, step.step, row, place // config.block_size)
    level = config.noise_min + (config.noise_max - config.noise_min) * level
    masked = uniform(Purpose.MASKING, step.seed, step.step, row, place) < level
    return level, masked


def validate(model: Transformer, batch: Batch, config: MethodConfig, step: Step) -> dict[str, Tensor]:
    """The training loss (which bounds the negative log-likelihood if all noise levels are used) and that of pass 1."""
    clean = clean_half(model, batch, config.block_size)
    x = soft_embedding(model, batch.tokens, torch.zeros_like(batch.tokens).float())
    blank = label_loss(draft_logits(model, x, clean), batch)
    return {"loss": loss(model, batch, config, step), "pass1": blank}


def rows(draft: Draft, config: MethodConfig) -> tuple[Tensor, Tensor]:
    """Revealed tokens as they are, BLANK elsewhere."""
    return draft.ids, draft.committed.float()


def update(draft: Draft, prediction: Prediction, rules: Rules) -> Draft:
    """Reveal what is sure enough, and at least ceil(masked / passes left) positions."""
    masked = ~draft.committed
    confidence = torch.where(masked, prediction.prob, -1.0)
    passes_left = (rules.passes - draft.passes).clamp_min(1)
    quota = (masked.sum(-1) + passes_left - 1) // passes_left
    rank = confidence.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    reveal = masked & ((confidence >= rules.threshold[:, None]) | (rank < quota[:, None]))
    ids, prob = torch.where(reveal, prediction.ids, draft.ids), torch.where(reveal, prediction.prob, draft.prob)
    shown = prediction._replace(ids=ids, prob=prob)
    return advance(draft, shown, draft.committed | reveal, rules)
