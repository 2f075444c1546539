"""Block diffusion (the paper's BlockDiff baseline): masked diffusion inside a block, left to right over blocks.

Training masks each token of a block with probability t, one t per block, and weighs the loss by 1/t (Eq.
mdm_objective with the linear schedule). Decoding turns masks into tokens and never changes a token again: each pass
reveals the positions of probability η or more, and at least its share of what is left, the surest first. With η above
1 that is the static schedule of K passes; with K = B it is threshold decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.errors import require
from freda.methods.blocks import DraftLoss
from freda.methods.draft import CleanHalf, Draft, Prediction, Rules, advance, clean_half, draft_logits, label_loss
from freda.methods.method import Step
from freda.methods.noise import Purpose, uniform
from freda.model.head import Logits
from freda.model.parts import Parts
from freda.sections import knob


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(DraftLoss):
    """Masked diffusion over blocks."""

    name: str = field(default="block-diffusion", init=False)
    noise_min: float = knob(1e-3, "least noise level t of a block")
    noise_max: float = knob(1.0, "greatest noise level t of a block")

    def __post_init__(self) -> None:
        super().__post_init__()
        levels = f"method.noise_min {self.noise_min} and noise_max {self.noise_max}"
        require(0 < self.noise_min <= self.noise_max <= 1, f"{levels} must satisfy 0 < min <= max <= 1")

    def loss(self, parts: Parts, batch: Batch, step: Step) -> Tensor:
        """Eq. mdm_objective: cross-entropy on masked tokens, weighted by 1/t."""
        level, masked = self.noise(batch, step)
        clean = clean_half(parts.backbone, batch, self.geometry)
        logits = self._logits(parts, batch, clean, masked)
        return self.draft_loss(parts.backbone, batch, clean, logits, step, masked / level)

    def noise(self, batch: Batch, step: Step) -> tuple[Tensor, Tensor]:
        """The noise level t of what each slot predicts, that of its block, and whether it is masked, each (R, L). A
        token that no slot shows is always masked, at level 1."""
        seed, number, row, place = step.counters(batch.tokens)
        level = uniform(Purpose.NOISE_LEVEL, seed, number, row, place // self.block_size)
        level = self.noise_min + (self.noise_max - self.noise_min) * level
        shown = self.geometry.again(place.device).repeat(len(place) // self.block_size)
        level = torch.where(shown, level, 1.0)
        return level, uniform(Purpose.MASKING, seed, number, row, place) < level

    def validate(self, parts: Parts, batch: Batch, step: Step) -> dict[str, Tensor]:
        """The draft's loss on the data, a bound on the negative log-likelihood if all noise levels are used; that of
        pass 1; those of a causal clean half."""
        level, masked = self.noise(batch, step)
        clean, targets = clean_half(parts.backbone, batch, self.geometry), self.geometry.targets(batch)
        noisy, blank = (self._logits(parts, batch, clean, part) for part in (masked, torch.ones_like(masked)))
        numbers = {"loss": label_loss(noisy, targets, masked / level), "pass1": label_loss(blank, targets)}
        return {**numbers, **self.validate_clean(parts.backbone, batch, clean)}

    def _logits(self, parts: Parts, batch: Batch, clean: CleanHalf, masked: Tensor) -> Logits:
        """One pass over the true text, of which some is `masked` (R, L), by the slots that predict it."""
        text = (self.geometry.by_slot(batch.tokens), 1.0 - masked.float())
        shown = self.geometry.shown(clean.known, *(part.view(-1, self.block_size) for part in text))
        ids, alpha = (part.view_as(batch.tokens) for part in shown)
        return draft_logits(parts.backbone, self.embed(parts.backbone, ids, alpha), clean)

    def rows(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """Revealed tokens as they are, BLANK elsewhere."""
        return draft.ids, draft.committed.float()

    def update(self, draft: Draft, prediction: Prediction, rules: Rules) -> Draft:
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
