"""Best-of-N refinement: several candidates of a draft go through one packed forward, and a scorer picks the winner.

Stage II training (algorithm 1, M9): the backbone is frozen. For every block the clean text and n negatives, drawn
independently from the proposal after t passes, are embedded alike, with α = the proposal's probability of each token,
and scored; the scorer learns to tell the clean one (Eq. bon_loss). Its optimum is the log density ratio between data
and proposal. Duplicates among the negatives are kept: their gradient vanishes, and leaving them out would bend the
optimum. Decoding (algorithm 3) is self-refinement whose draft is chosen from the beam (`methods/beam.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from freda.config import MethodConfig
from freda.data.loader import Batch
from freda.methods.beam import marginal_cost_beam
from freda.methods.draft import clean_half, predict, soft_embedding
from freda.methods.method import Step
from freda.methods.noise import Purpose, uniform
from freda.methods.self_refine import initial_draft, refine, rows, update
from freda.model.attention import make_mask
from freda.model.masks import clean_tokens, concat, draft_tokens
from freda.model.scorer import Scorer
from freda.model.transformer import Transformer

__all__ = ["DRAFTS", "REFINES", "SCORES", "labels", "loss", "rows", "update", "validate"]

DRAFTS = True
REFINES = True
SCORES = True


class Slots(NamedTuple):
    """What competes in every block: S texts of packed rows and the proposal's probability of each token."""

    ids: Tensor  # (R, S, L) int64
    alpha: Tensor  # (R, S, L) fp32
    target: Tensor  # (R, L/B) int64: which slot is the clean text; -1 where none is


def labels(batch: Batch, config: MethodConfig) -> Tensor:
    """One label per block: its first token stands for it."""
    return (batch.document >= 0) & (batch.position % config.block_size == 0)


def loss(model: Transformer, batch: Batch, config: MethodConfig, step: Step) -> Tensor:
    """Eq. bon_loss, summed over the blocks: −s(clean) + log Σ exp s(slot)."""
    slots = _slots(model, batch, config, step)
    return _block_losses(slots, score_slots(model, batch, slots, config), batch, config).sum()


def validate(model: Transformer, batch: Batch, config: MethodConfig, step: Step) -> dict[str, Tensor]:
    """NCE, how often the clean text ranks first, and how many blocks have a negative that differs from it."""
    slots = sampled_slots(model, batch, config, step)
    scores = score_slots(model, batch, slots, config)
    real = labels(batch, config).view(-1, config.block_size)[:, 0].view(slots.target.shape)
    blocks = _by_block(slots.ids, config)
    differs = (blocks[:, :, 1:] != blocks[:, :, :1]).any(-1)  # (R, L/B, S-1)
    wrong = (scores[:, :, 1:] >= scores[:, :, :1]) & differs
    first = ~wrong.any(-1)
    return {
        "loss": _block_losses(slots, scores, batch, config).sum(),
        "rank_accuracy": (first & real).sum(),
        "true_negatives": (differs.any(-1) & real).sum(),
    }


def _slots(model: Transformer, batch: Batch, config: MethodConfig, step: Step) -> Slots:
    made = sampled_slots if config.negatives == "sampled" else beam_slots
    return made(model, batch, config, step)


def proposal(model: Transformer, batch: Batch, config: MethodConfig, passes: int) -> Tensor:
    """Logits (R, L, V) of the last of `passes` passes from the blank draft: the distribution of the candidates."""
    with torch.no_grad():
        clean = clean_half(model, batch, config.block_size)
        draft = initial_draft(model, batch, config, None)
        for _ in range(passes):
            logits, draft = refine(model, clean, draft, config)
    return logits


def sampled_slots(model: Transformer, batch: Batch, config: MethodConfig, step: Step) -> Slots:
    """The clean text in slot 0 and `num_negatives` independent draws from the proposal."""
    share = proposal(model, batch, config, step.passes).softmax(-1)
    negatives = [_draw(share, step, number) for number in range(config.num_negatives)]
    ids = torch.stack([batch.tokens, *negatives], dim=1)
    alpha = torch.stack([share.gather(-1, text[..., None])[..., 0] for text in ids.unbind(1)], dim=1)
    blocks = (batch.tokens.shape[0], batch.tokens.shape[1] // config.block_size)
    return Slots(ids, alpha, torch.zeros(blocks, dtype=torch.int64, device=ids.device))


def _draw(share: Tensor, step: Step, number: int) -> Tensor:
    """One text drawn from `share` (R, L, V), by inverting the distribution at keyed uniform numbers."""
    row = step.row.to(share.device)[:, None]
    place = torch.arange(share.shape[1], device=share.device)
    point = uniform(Purpose.NEGATIVES, step.seed, step.step, row, place, number)
    heights = share.cumsum(-1)
    drawn = torch.searchsorted(heights, (point * heights[..., -1])[..., None])[..., 0]
    return drawn.clamp_max(share.shape[-1] - 1)


def beam_slots(model: Transformer, batch: Batch, config: MethodConfig, step: Step) -> Slots:
    """The ablation of M9: beam candidates and no extra slot, so a block counts only if its clean text is among them."""
    logits = proposal(model, batch, config, step.passes)
    size, width = config.block_size, 1 + config.num_negatives
    top = predict(logits.view(-1, size, logits.shape[-1]), runner_up=True)
    free = torch.ones_like(top.ids, dtype=torch.bool)
    swaps = torch.full_like(top.ids[:, 0], size)
    found = marginal_cost_beam(top, free, width=width, swaps=swaps, most_swaps=size)
    clean = batch.tokens.view(-1, 1, size)
    hit = (found.ids == clean).all(-1) & found.valid  # (blocks, S)
    target = torch.where(hit.any(-1), hit.int().argmax(-1), -1)
    shape = (batch.tokens.shape[0], -1, width, size)
    ids, alpha = (part.view(shape).transpose(1, 2).flatten(2) for part in (found.ids, found.alpha))
    return Slots(ids, alpha, target.view(batch.tokens.shape[0], -1))


def score_slots(model: Transformer, batch: Batch, slots: Slots, config: MethodConfig) -> Tensor:
    """One packed forward [slot_1 | ... | slot_S] over the clean text, then the scorer: scores (R, L/B, S)."""
    scorer = model.scorer
    assert isinstance(scorer, Scorer)
    with torch.no_grad():
        hidden = _packed_hidden(model, batch, slots, config)
        embedding = model.embed_tokens(slots.ids)
    rows, count, length, width = hidden.shape
    blocks = (rows, count, length // config.block_size, config.block_size)
    counted = (batch.document >= 0)[:, None].expand(-1, count, -1).reshape(-1, config.block_size)
    hidden, embedding = (part.reshape(*blocks, width).flatten(0, 2) for part in (hidden, embedding))
    scores: Tensor = scorer(hidden, embedding, counted).view(blocks[:3])
    return scores.transpose(1, 2)


def _packed_hidden(model: Transformer, batch: Batch, slots: Slots, config: MethodConfig) -> Tensor:
    """Hidden states (R, S, L, D) of all slots; slots do not see each other."""
    rows, count, length = slots.ids.shape
    clean = clean_tokens(batch.document, batch.position, config.block_size)
    repeat = (1, count)
    slot = torch.arange(count, device=batch.tokens.device).repeat_interleave(length).expand(rows, -1)
    document, position = batch.document.repeat(repeat), batch.position.repeat(repeat)
    draft = draft_tokens(document, position, config.block_size, slot)
    _, past = model(model.embed_tokens(batch.tokens), batch.position, make_mask(clean, clean, model.backend))
    x = soft_embedding(model, slots.ids.flatten(1), slots.alpha.flatten(1), rescale=config.rescale)
    hidden: Tensor = model(x, position, make_mask(draft, concat(clean, draft), model.backend), past)[0]
    return hidden.view(rows, count, length, -1)


def _block_losses(slots: Slots, scores: Tensor, batch: Batch, config: MethodConfig) -> Tensor:
    """−log softmax of the clean slot, 0 for padding and for blocks without one: (R, L/B) fp32."""
    real = labels(batch, config).view(-1, config.block_size)[:, 0].view(slots.target.shape) & (slots.target >= 0)
    picked = scores.float().log_softmax(-1).gather(-1, slots.target.clamp_min(0)[..., None])[..., 0]
    return torch.where(real, -picked, 0.0)


def _by_block(ids: Tensor, config: MethodConfig) -> Tensor:
    """Slots (R, S, L) as (R, L/B, S, B)."""
    rows, count, _ = ids.shape
    return ids.view(rows, count, -1, config.block_size).transpose(1, 2)
