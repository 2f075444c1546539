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
from freda.methods.draft import Draft, Prediction, Rules, advance, clean_half, draft_logits, label_loss
from freda.methods.method import Method, Step
from freda.methods.noise import Purpose, uniform
from freda.model.parts import Parts
from freda.sections import knob


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(Method):
    """Masked diffusion over blocks."""

    name: str = field(default="block-diffusion", init=False)
    noise_min: float = knob(1e-3, "least noise level t of a block")
    noise_max: float = knob(1.0, "greatest noise level t of a block")

    def __post_init__(self) -> None:
        super().__post_init__()
        levels = f"method.noise_min {self.noise_min} and noise_max {self.noise_max}"
        require(0 < self.noise_min <= self.noise_max <= 1, f"{levels} must satisfy 0 < min <= max <= 1")

    def loss(self, parts: Parts, batch: Batch, step: Step) -> Tensor:
        """Eq. mdm_objective: cross-entropy on masked positions, weighted by 1/t."""
        level, masked = self.noise(batch, step)
        return self._label_loss(parts, batch, 1.0 - masked.float(), masked / level)

    def noise(self, batch: Batch, step: Step) -> tuple[Tensor, Tensor]:
        """The noise level t of each token's block and which tokens are masked, each (R, L)."""
        seed, number, row, place = step.counters(batch.tokens)
        level = uniform(Purpose.NOISE_LEVEL, seed, number, row, place // self.block_size)
        level = self.noise_min + (self.noise_max - self.noise_min) * level
        return level, uniform(Purpose.MASKING, seed, number, row, place) < level

    def validate(self, parts: Parts, batch: Batch, step: Step) -> dict[str, Tensor]:
        """The training loss, a bound on the negative log-likelihood if all noise levels are used; that of pass 1."""
        blank = self._label_loss(parts, batch, torch.zeros_like(batch.tokens).float())
        return {"loss": self.loss(parts, batch, step), "pass1": blank}

    def _label_loss(self, parts: Parts, batch: Batch, alpha: Tensor, weights: Tensor | float = 1.0) -> Tensor:
        """The loss of one pass over the true text, shown with weights `alpha` (R, L) against BLANK."""
        clean = clean_half(parts.backbone, batch, self.block_size)
        x = self.embed(parts.backbone, batch.tokens, alpha)
        return label_loss(draft_logits(parts.backbone, x, clean), batch, weights)

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
