"""What block methods share: the choice of a layout, and a loss of drafts that keeps what an autoregressive model knows.

With causal context the clean half of a training step is the autoregressive model itself, and its hidden states are
there anyway (M7). So for the price of a head it goes on learning next tokens (`ar_weight`, M21), and for that of
another it can teach the drafts its own distributions (`teacher`, M22): a draft is a function of the text before it, and
so are these, while the data may have gone on in another of several right ways.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.errors import require
from freda.methods.draft import CleanHalf, label_loss, right_tokens
from freda.methods.geometry import Geometry, next_tokens
from freda.methods.method import Method, Step, Work
from freda.model.head import Logits
from freda.model.parts import Parts
from freda.model.transformer import Transformer
from freda.sections import knob


@dataclass(frozen=True, kw_only=True)
class BlockMethod(Method):
    """A method that drafts blocks, in one of the layouts."""

    layout: Literal["paper", "shifted"] = knob(
        "paper",
        "paper: slots predict their own tokens; shifted: the next ones, over causal context",
        stored=True,
        absent="paper",
    )
    shift: bool | None = knob(
        None, "ablation: slots predict the next token; unset: as the layout has it", stored=True, absent=None
    )
    context: Literal["block", "causal"] | None = knob(
        None,
        "ablation: committed text sees ahead inside blocks, or is causal; unset: as the layout has it",
        stored=True,
        absent=None,
    )

    @property
    def geometry(self) -> Geometry:
        """The layout, or what was asked for of its parts."""
        shifted = self.layout == "shifted"
        causal = shifted if self.context is None else self.context == "causal"
        return Geometry(self.block_size, int(shifted if self.shift is None else self.shift), causal)

    def start_from(self, parts: Parts, proposer: Method | None, source: str) -> set[str]:
        """As `Method` does; drafts of another layout are no beginning."""
        if proposer is not None and proposer.geometry.drafts:
            check_layout(self.geometry, proposer.geometry, source)
        return super().start_from(parts, proposer, source)


def check_layout(asked: Geometry, trained: Geometry, source: str) -> None:
    """Refuse to go on from a model whose drafts lie otherwise."""
    odd = f"method.layout: {described(asked)} is asked for, but {source} was trained with {described(trained)}"
    require(asked[1:] == trained[1:], f"{odd}; use that, or start from an autoregressive model")


def described(geometry: Geometry) -> str:
    """A layout in words, by its name where it has one."""
    named = {(0, False): "the paper's layout", (1, True): "the shifted layout"}
    other = f"shift = {str(bool(geometry.shift)).lower()} and {'causal' if geometry.causal else 'block'} context"
    return named.get((geometry.shift, geometry.causal), other)


@dataclass(frozen=True, kw_only=True)
class DraftLoss(BlockMethod):
    """A block method that trains the backbone: the loss of its drafts, and beside it that of the clean half."""

    ar_weight: float = knob(0.0, "weight of the clean half's next-token loss beside the draft's; causal context only")
    teacher: Literal["data", "clean"] = knob(
        "data", "what drafts learn: the text, or the next-token distributions of the clean half (shifted layout only)"
    )
    teacher_temperature: float = knob(1.0, "temperature of the clean half's distributions as a teacher")

    def __post_init__(self) -> None:
        super().__post_init__()
        weight, geometry = self.ar_weight, self.geometry
        require(0 <= weight < math.inf, f"method.ar_weight is {weight}; use 0 or more")
        odd = f"method.ar_weight is {weight}, but text that sees ahead inside its blocks has no next-token loss"
        require(weight == 0 or geometry.causal, f'{odd}; use layout = "shifted"')
        odd = f"method.teacher is {self.teacher}, but {described(geometry)} has no such teacher"
        require(self.teacher == "data" or (geometry.causal and geometry.shift == 1), f'{odd}; use layout = "shifted"')
        odd = f"method.teacher_temperature is {self.teacher_temperature}"
        require(0 < self.teacher_temperature < math.inf, f"{odd}; use a positive number")

    def check_adapter(self, rows: str) -> None:
        """Where only drafts change, the clean half has nothing to learn (M21)."""
        odd = f"method.ar_weight is {self.ar_weight}, but with adapter.rows = {rows} the text is the frozen base's"
        require(rows == "all" or self.ar_weight == 0, f"{odd}; use 0")

    def counts(self, batch: Batch) -> list[int]:
        """The labels of drafts, and those of the clean half."""
        return super().counts(batch) + ([int(next_tokens(batch).counted.sum())] if self.ar_weight else [])

    def draft_loss(
        self, backbone: Transformer, batch: Batch, clean: CleanHalf, logits: Logits, step: Step, weights: Tensor | float
    ) -> Tensor:
        """The loss of drafts with `logits` (R, L), each slot weighted, summed over the labels; with `ar_weight` w,
        (draft + w · clean half) / (1 + w), where each is a mean over its own labels of the step (M21)."""
        targets = self.geometry.targets(batch)
        if self.teacher == "data":
            loss = label_loss(logits, targets, weights)
        else:
            assert clean.hidden is not None
            teacher = backbone.head(clean.hidden)
            taught = targets.counted & ~targets.fill  # the fill is no text of the autoregressive model's
            loss = logits.divergence(teacher, self.teacher_temperature, targets.ids, taught, targets.counted * weights)
        if not self.ar_weight:
            return loss
        assert clean.hidden is not None
        labels, others = step.counts or self.counts(batch)
        text = label_loss(backbone.head(clean.hidden), next_tokens(batch))
        return (loss + self.ar_weight * text * (labels / max(1, others))) / (1 + self.ar_weight)

    def validate_clean(self, backbone: Transformer, batch: Batch, clean: CleanHalf) -> dict[str, Tensor]:
        """Of the clean half where it predicts next tokens: their loss, `ar`, and accuracy, over their own labels."""
        if clean.hidden is None:
            return {}
        targets = next_tokens(batch)
        loss, right = right_tokens(backbone.head(clean.hidden), targets)
        count = targets.counted.sum()
        return {"ar": torch.stack([loss, count]), "ar_accuracy": torch.stack([right, count])}

    def work(self, one: Work, passes: int) -> float:
        """As usual, and the heads of the clean half: with gradient to learn, without to teach."""
        heads = one.learnt * bool(self.ar_weight) + (self.teacher == "clean")
        return super().work(one, passes) + one.head * heads
