"""Best-of-N refinement: several candidates of a draft go through one packed forward, and a scorer picks the winner.

Stage II training (algorithm 1, M9): the backbone is frozen. For every block the clean text and n negatives, drawn
independently from the proposal after t passes, are embedded alike, with α = the proposal's probability of each token,
and scored; the scorer learns to tell the clean one (Eq. bon_loss). Its optimum is the log density ratio between data
and proposal. Duplicates among the negatives are kept: their gradient vanishes, and leaving them out would bend the
optimum. Decoding (algorithm 3) is self-refinement whose draft is chosen from the beam (`methods/candidates.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.methods.candidates import marginal_cost_beam
from freda.methods.config import MethodConfig
from freda.methods.draft import CleanHalf, clean_half, draw, feedback_weight, likeliest, soft_embedding
from freda.methods.method import Step
from freda.methods.noise import Purpose, uniform
from freda.methods.self_refine import initial_draft, refine, rows, update
from freda.model.attention import make_mask
from freda.model.head import Logits
from freda.model.masks import clean_tokens, concat, draft_tokens
from freda.model.scorer import Scorer
from freda.model.transformer import Forward, Transformer

__all__ = ["DRAFTS", "REFINES", "SCORES", "labels", "loss", "rows", "update", "validate"]

DRAFTS = True
REFINES = True
SCORES = True
VALIDATED_TAU = (0.0, 0.1, 1.0)


class Slots(NamedTuple):
    """What competes in every block: S texts of packed rows and the proposal's probability of each token."""

    ids: Tensor  # (R, S, L) int64
    alpha: Tensor  # (R, S, L) fp32
    target: Tensor  # (R, L/B) int64: which slot is the clean text; -1 where none is
    valid: Tensor  # (R, L/B, S) bool: slots that hold a text; the others take part in nothing


def labels(batch: Batch, config: MethodConfig) -> Tensor:
    """One label per block: its first token stands for it."""
    return (batch.document >= 0) & (batch.position % config.block_size == 0)


def loss(model: Transformer, batch: Batch, config: MethodConfig, step: Step) -> Tensor:
    """Eq. bon_loss, summed over the blocks: −s(clean) + log Σ exp s(slot).

    With beam negatives a block counts only if its clean text is a candidate. The mean over those of the group stands
    for all its blocks; a group without any teaches nothing. Which blocks count is known only after the proposal, so the
    processes that share a group add up their counts here.
    """
    clean = frozen_clean_half(model, batch, config)
    logits = proposal(model, batch, clean, config, step.passes)
    made = sampled_slots if config.negatives == "sampled" else beam_slots
    slots = made(logits, batch, config, step)
    real = _real(batch, config)
    counted = real & (slots.target >= 0)
    losses = block_losses(slots, score_slots(model, batch, clean, slots, config))
    summed = torch.where(counted, losses, 0.0).sum()
    if config.negatives == "sampled":  # every block counts
        return summed
    count = step.total(torch.stack([real.sum(), counted.sum()]))
    return summed * (count[0] / count[1].clamp_min(1))


def validate(model: Transformer, batch: Batch, config: MethodConfig, step: Step) -> dict[str, Tensor]:
    """Over all blocks, whatever the negatives of the training were:

    - `loss`: NCE against draws from the proposal; `rank_accuracy`: how often no draw that differs from the clean text
      scores as high; `true_negatives`: how many blocks have a draw that differs;
    - `found`: how often the clean text is among the beam's candidates; `choice0`, `choice0.1`, `choice1`: how often it
      has the highest ℓ + τ·s among the candidates and itself, for these τ. τ = 0 is the proposal without a scorer.
    """
    clean, real = frozen_clean_half(model, batch, config), _real(batch, config)
    logits = proposal(model, batch, clean, config, step.passes)
    slots = sampled_slots(logits, batch, config, step)
    scores = score_slots(model, batch, clean, slots, config)
    wrong = (scores[:, :, 1:] >= scores[:, :, :1]) & _differs(slots, config)
    numbers = {
        "loss": torch.where(real, block_losses(slots, scores), 0.0),
        "rank_accuracy": ~wrong.any(-1) & real,
        "true_negatives": _differs(slots, config).any(-1) & real,
        **_choices(model, batch, clean, logits, config),
    }
    return {name: value.sum() for name, value in numbers.items()}


def _choices(
    model: Transformer, batch: Batch, clean: CleanHalf, logits: Logits, config: MethodConfig
) -> dict[str, Tensor]:
    """The part of `validate` about the choice among {clean text, beam candidates}, for every block."""
    real = _real(batch, config)
    beam = beam_slots(logits, batch, config)
    ids = torch.cat([batch.tokens[:, None], beam.ids], dim=1)
    prob = _probability(logits, ids)
    valid = torch.cat([torch.ones_like(beam.valid[..., :1]), beam.valid], dim=-1)
    slots = Slots(ids, feedback_weight(prob, config), torch.zeros_like(real, dtype=torch.int64), valid)
    scores = score_slots(model, batch, clean, slots, config)  # (R, L/B, S)
    likely = _by_block(prob, config).clamp_min(1e-38).log().sum(-1)
    differs = _differs(slots, config)
    numbers = {"found": ~differs.all(-1) & real}
    for tau in VALIDATED_TAU:
        value = likely + tau * scores
        lost = (value[:, :, 1:] >= value[:, :, :1]) & differs
        numbers[f"choice{tau:g}"] = ~lost.any(-1) & real
    return numbers


def frozen_clean_half(model: Transformer, batch: Batch, config: MethodConfig) -> CleanHalf:
    """The clean text as a cache, run once for the drafts and for all slots (M7)."""
    with torch.no_grad():
        return clean_half(model, batch, config.block_size)


def proposal(model: Transformer, batch: Batch, clean: CleanHalf, config: MethodConfig, passes: int) -> Logits:
    """Logits (R, L) of the last of `passes` passes from the blank draft: the distribution of the candidates."""
    with torch.no_grad():
        draft = initial_draft(model, batch, config, None)
        for _ in range(passes):
            logits, draft = refine(model, clean, draft, config)
    return logits


def sampled_slots(logits: Logits, batch: Batch, config: MethodConfig, step: Step) -> Slots:
    """The clean text in slot 0 and `num_negatives` independent draws from the proposal `logits`."""
    row = step.row.to(batch.tokens.device)[:, None, None]
    place = torch.arange(batch.tokens.shape[1], device=row.device)[:, None]
    number = torch.arange(config.num_negatives, device=row.device)
    point = uniform(Purpose.NEGATIVES, step.seed, step.step, row, place, number)  # (R, L, n)
    ids, prob = (part.transpose(1, 2) for part in logits.map(_truth_and_draws, batch.tokens, point))
    first = torch.zeros_like(_real(batch, config), dtype=torch.int64)
    valid = torch.ones_like(first, dtype=torch.bool)[..., None].expand(-1, -1, ids.shape[1])
    return Slots(ids, feedback_weight(prob, config), first, valid)


def _truth_and_draws(logits: Tensor, truth: Tensor, point: Tensor) -> tuple[Tensor, ...]:
    """The true tokens (n,) and those drawn at uniform `point`s (n, S-1), and the probability of each: (n, S)."""
    share = logits.softmax(-1)
    ids = torch.cat([truth[:, None], draw(share, point)], dim=1)
    return ids, share.gather(-1, ids)


def _probability(logits: Logits, ids: Tensor) -> Tensor:
    """The probability (R, S, L) of each token of the texts `ids`."""
    return logits.map(_gathered, ids.transpose(1, 2))[0].transpose(1, 2)


def _gathered(logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    return (logits.softmax(-1).gather(-1, ids),)


def beam_slots(logits: Logits, batch: Batch, config: MethodConfig, step: Step | None = None) -> Slots:
    """The ablation of M9: beam candidates and no extra slot, so a block counts only if its clean text is among them.

    Nothing is random here: `step` has no part in it.
    """
    size, width = config.block_size, 1 + config.num_negatives
    top = likeliest(logits, (-1, size), runner_up=True)
    free = torch.ones_like(top.ids, dtype=torch.bool)
    swaps = torch.full_like(top.ids[:, 0], size)
    found = marginal_cost_beam(top, free, width=width, swaps=swaps, most_swaps=size)
    clean = batch.tokens.view(-1, 1, size)
    hit = (found.ids == clean).all(-1) & found.valid  # (blocks, S)
    target = torch.where(hit.any(-1), hit.int().argmax(-1), -1)
    shape = (batch.tokens.shape[0], -1, width, size)
    ids, alpha = (part.view(shape).transpose(1, 2).flatten(2) for part in (found.ids, found.alpha))
    valid = found.valid.view(batch.tokens.shape[0], -1, width)
    return Slots(ids, feedback_weight(alpha, config), target.view(batch.tokens.shape[0], -1), valid)


def score_slots(model: Transformer, batch: Batch, clean: CleanHalf, slots: Slots, config: MethodConfig) -> Tensor:
    """One packed forward [slot_1 | ... | slot_S] over the clean text, then the scorer: scores (R, L/B, S)."""
    scorer = model.scorer
    assert isinstance(scorer, Scorer)
    hidden = _packed_hidden(model, scorer, batch, clean, slots, config)
    with torch.no_grad():
        embedding = model.embed_tokens(slots.ids)
    rows, count, length, width = hidden.shape
    blocks = (rows, count, length // config.block_size, config.block_size)
    counted = (batch.document >= 0)[:, None].expand(-1, count, -1).reshape(-1, config.block_size)
    hidden, embedding = (part.reshape(*blocks, width).flatten(0, 2) for part in (hidden, embedding))
    scores: Tensor = scorer(hidden, embedding, counted).view(blocks[:3])
    return scores.transpose(1, 2)


def _packed_hidden(
    model: Transformer, scorer: Scorer, batch: Batch, clean: CleanHalf, slots: Slots, config: MethodConfig
) -> Tensor:
    """The scorer's soft channel (R, S, L, D) of all slots, which do not see each other. The backbone learns nothing."""
    rows, count, length = slots.ids.shape
    text = clean_tokens(batch.document, batch.position, config.block_size)
    repeat = (1, count)
    slot = torch.arange(count, device=batch.tokens.device).repeat_interleave(length).expand(rows, -1)
    document, position = batch.document.repeat(repeat), batch.position.repeat(repeat)
    draft = draft_tokens(document, position, config.block_size, slot)
    mask = make_mask(draft, concat(text, draft), model.backend)
    with torch.no_grad():
        x = soft_embedding(model, slots.ids.flatten(1), slots.alpha.flatten(1), rescale=config.rescale)
        out: Forward = model(x, position, mask, clean.past)
    return scorer.soft_channel(model, out, position, mask, clean.past[-1]).view(rows, count, length, -1)


def block_losses(slots: Slots, scores: Tensor) -> Tensor:
    """−log softmax of the clean slot among the valid ones, (R, L/B) fp32; without meaning where there is none."""
    scores = scores.float().masked_fill(~slots.valid, float("-inf"))
    return -scores.log_softmax(-1).gather(-1, slots.target.clamp_min(0)[..., None])[..., 0]


def _real(batch: Batch, config: MethodConfig) -> Tensor:
    """Which blocks are text and not padding, (R, L/B) bool."""
    return (batch.document >= 0)[:, :: config.block_size]


def _differs(slots: Slots, config: MethodConfig) -> Tensor:
    """Which slots after the first hold another text than the first, (R, L/B, S-1)."""
    blocks = _by_block(slots.ids, config)
    return (blocks[:, :, 1:] != blocks[:, :, :1]).any(-1) & slots.valid[:, :, 1:]


def _by_block(ids: Tensor, config: MethodConfig) -> Tensor:
    """Slots (R, S, L) as (R, L/B, S, B)."""
    rows, count, _ = ids.shape
    return ids.view(rows, count, -1, config.block_size).transpose(1, 2)
