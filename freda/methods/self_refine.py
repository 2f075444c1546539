"""Self-refinement, the paper's method: the model sees its own draft again and revises it.

Training (algorithm 1, stage I): draw t from 1..K, make t−1 passes without gradient from a blank draft, and train the
last pass to predict the clean block (Eq. self_refine_loss). The intermediate states are the model's own drafts; there
is no corruption process. Decoding (algorithm 2): the same passes; the leftmost run of positions of probability η or
more is committed, recomputed after each pass, and until the block closes every position may be revised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.errors import require
from freda.methods.blocks import BlockMethod, DraftLoss
from freda.methods.candidates import marginal_cost_beam
from freda.methods.draft import (
    CleanHalf,
    Draft,
    Prediction,
    Rules,
    advance,
    clean_half,
    draw,
    leftmost_run,
    likeliest,
    packed_drafts,
    right_tokens,
    soft_embedding,
    start,
)
from freda.methods.method import NEVER, Step, Work
from freda.methods.noise import Purpose, uniform
from freda.model.head import Logits
from freda.model.parts import Parts
from freda.model.transformer import Transformer
from freda.sections import knob, require_at_least

COMMITTED_IN_TRAINING = 0.9  # η of the `committed_hard` ablation while training
VALIDATION_PASSES = 4


@dataclass(frozen=True, kw_only=True)
class Refining(BlockMethod):
    """Drafts that are shown to the model again: what self-refinement and Best-of-N have in common."""

    refines: ClassVar[bool] = True

    passes: int = knob(3, "most passes in training, K; a step runs t ~ Unif{1..K}")
    feedback: Literal["soft", "hard"] = knob("soft", "what the next pass sees of a prediction", stored=True)
    rescale: bool = knob(False, "rescale the soft embedding to its expected norm (DMax)", stored=True)
    committed_hard: bool = knob(False, "show committed positions as hard tokens", stored=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "method", "passes")

    @property
    def training_passes(self) -> int:
        """K."""
        return self.passes

    def feedback_weight(self, prob: Tensor) -> Tensor:
        """α of shown tokens of probability `prob` (M5): that, or 1 with hard feedback; BLANK's 0 stays 0."""
        return (prob > 0).float() if self.feedback == "hard" else prob

    def embed(self, backbone: Transformer, ids: Tensor, alpha: Tensor) -> Tensor:
        """Eq. soft_prediction_embedding, (..., D)."""
        return soft_embedding(backbone, ids, alpha, rescale=self.rescale)

    def rows(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """Eq. soft_prediction_embedding's α (M5): the probability of the shown token; 1 for given tokens."""
        alpha = self.feedback_weight(draft.prob)
        if self.committed_hard:
            alpha = torch.where(draft.committed, 1.0, alpha)
        return draft.ids, alpha

    def update(self, draft: Draft, prediction: Prediction, rules: Rules) -> Draft:
        """Take over the whole prediction, except where tokens were given; commit the leftmost sure run (M11, M12)."""
        ids = torch.where(draft.given, draft.ids, prediction.ids)
        prob = torch.where(draft.given, 1.0, prediction.prob)
        committed = leftmost_run(draft.given | (prob >= rules.threshold[:, None]))
        return advance(draft, prediction._replace(ids=ids, prob=prob), committed, rules)

    def off_device(self, parts: Parts) -> str:
        """Why the GPU's decoding kernels cannot be used, or nothing."""
        return "method.rescale is on" if self.rescale else ""

    def blank_draft(self, backbone: Transformer, batch: Batch) -> Draft:
        """Blank blocks for all of packed rows, (N, B) with N = R·L/B."""
        tokens = batch.tokens.view(-1, self.block_size)
        return start(tokens, torch.zeros_like(tokens, dtype=torch.bool), backbone.blank_id)

    def refined(self, draft: Draft, prediction: Prediction) -> Draft:
        """Drafts of packed rows after a prediction. Teacher-forced drafts never close: they get all their passes."""
        eta = COMMITTED_IN_TRAINING if self.committed_hard else NEVER
        threshold = torch.full_like(draft.passes, eta, dtype=torch.float32)
        draft = self.update(draft, prediction, Rules(draft.passes + 2, threshold, draft.ids.new_empty(0)))
        return draft._replace(closed=torch.zeros_like(draft.closed))

    def refine(self, backbone: Transformer, clean: CleanHalf, draft: Draft) -> tuple[Logits, Draft]:
        """One greedy pass over the drafts of all blocks of packed rows: its logits (R, L) and the drafts it leaves."""
        logits = self.pass_logits(backbone, clean, draft)
        return logits, self.refined(draft, likeliest(logits, draft.ids.shape))

    @torch.no_grad()
    def choices(
        self, parts: Parts, batch: Batch, given: Tensor, passes: int, *, width: int, swaps: int
    ) -> Iterator[Tensor]:
        """After every pass, what became of `width` candidates, the beam's (M10), of the drafts before it; the drafts
        themselves are the first."""
        backbone, geometry, rows = parts.backbone, self.geometry, len(batch.tokens)
        clean = clean_half(backbone, batch, geometry)
        position, mask = packed_drafts(backbone, batch, geometry, width)
        tokens, given = (geometry.by_slot(part).view(-1, self.block_size) for part in (batch.tokens, given))
        draft = start(tokens, given, backbone.blank_id)
        most = torch.full_like(draft.passes, swaps)
        for _ in range(passes):
            found = marginal_cost_beam(Prediction(*draft[:4]), ~given, width=width, swaps=most, most_swaps=swaps)
            shown = (
                torch.where(found.valid[..., None], part, part[:, :1]).view(rows, -1, width, self.block_size)
                for part in (found.ids, self.feedback_weight(found.alpha))
            )
            ids, alpha = (part.transpose(1, 2).flatten(2) for part in shown)
            x = self.packed_rows(backbone, clean, ids, alpha)
            logits = backbone.head(backbone(x, position, mask, clean.past).hidden)
            made = likeliest(logits, (rows, width, -1, self.block_size), runner_up=True)
            yield geometry.by_token(torch.where(given.view(rows, 1, -1), tokens.view(rows, 1, -1), made.ids.flatten(2)))
            draft = self.refined(draft, Prediction(*(part[:, 0].reshape(draft.ids.shape) for part in made)))


@dataclass(frozen=True, kw_only=True)
class SelfRefine(Refining, DraftLoss):
    """Training on the model's own multi-pass drafts."""

    name: str = field(default="self-refine", init=False)
    drafts: Literal["greedy", "sampled"] = knob("greedy", "tokens of the drafts that training passes leave")
    replacement: Literal["iid", "prefix"] = knob("iid", "which blanks show the truth in the first draft")
    replacement_start: float = knob(0.3, "share of blanks that show the truth at the start")
    replacement_end: float = knob(0.1, "share of blanks that show the truth from half of the run on")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("replacement_start", "replacement_end"):
            require(0 <= getattr(self, name) <= 1, f"method.{name} is {getattr(self, name)}; use 0 to 1")

    def loss(self, parts: Parts, batch: Batch, step: Step) -> Tensor:
        """Eq. self_refine_loss after t−1 passes without gradient (M6, M7): nothing is kept of them but the draft."""
        backbone = parts.backbone
        clean = clean_half(backbone, batch, self.geometry)
        draft = self.initial_draft(backbone, batch, step)
        with torch.no_grad():
            for _ in range(step.passes - 1):
                draft = self.training_pass(backbone, clean, draft, step)
        return self.draft_loss(backbone, batch, clean, self.pass_logits(backbone, clean, draft), step, 1.0)

    def training_pass(self, backbone: Transformer, clean: CleanHalf, draft: Draft, step: Step) -> Draft:
        """The drafts after a pass: greedy, as decoding makes them, or with `drafts = "sampled"` drawn from it."""
        if self.drafts == "greedy":
            return self.refine(backbone, clean, draft)[1]
        return self.refined(draft, sampled(self.pass_logits(backbone, clean, draft), draft, step))

    def initial_draft(self, backbone: Transformer, batch: Batch, step: Step) -> Draft:
        """Blank blocks, some tokens of which are the true ones while training (M8)."""
        draft, shown = self.blank_draft(backbone, batch), self.replaced(batch, step)
        truth = self.geometry.by_slot(batch.tokens).view_as(draft.ids)
        return draft._replace(ids=torch.where(shown, truth, draft.ids), prob=shown.float())

    def replaced(self, batch: Batch, step: Step) -> Tensor:
        """Which tokens of the first draft are the true ones, (N, B): a share of those that have slots, which falls over
        half of the run."""
        start, end = self.replacement_start, self.replacement_end
        point = uniform(Purpose.REPLACEMENT, *step.counters(batch.tokens))
        shown = (point < start + (end - start) * min(1.0, 2 * step.progress)).view(-1, self.block_size)
        shown = shown & self.geometry.again(shown.device)
        if self.replacement == "prefix":  # as many as independent draws show, but from the left: a prompt's tail
            shown = torch.arange(self.block_size, device=shown.device) < shown.sum(-1, keepdim=True)
        return shown

    def validate(self, parts: Parts, batch: Batch, step: Step) -> dict[str, Tensor]:
        """Loss and token accuracy of each pass from blank drafts over clean text; those of a causal clean half."""
        backbone = parts.backbone
        clean, draft = clean_half(backbone, batch, self.geometry), self.blank_draft(backbone, batch)
        numbers, targets = dict[str, Tensor](), self.geometry.targets(batch)
        for index in range(1, VALIDATION_PASSES + 1):
            logits, draft = self.refine(backbone, clean, draft)
            numbers[f"pass{index}"], numbers[f"accuracy{index}"] = right_tokens(logits, targets)
        last = numbers[f"pass{min(self.passes, VALIDATION_PASSES)}"]
        return {"loss": last, **numbers, **self.validate_clean(backbone, batch, clean)}

    def work(self, one: Work, passes: int) -> float:
        """The pass with gradient, and the forwards of those without."""
        return super().work(one, passes) + (passes - 1) * one.one_pass


def sampled(logits: Logits, draft: Draft, step: Step) -> Prediction:
    """Every token drawn from its marginal, other draws in every pass, with its own probability; in a draft's shape."""
    place = logits.hidden[..., 0]  # (R, L)
    number = draft.passes[:, None].expand_as(draft.ids).reshape(place.shape)
    point = uniform(Purpose.DRAFTS, *step.counters(place), number)
    ids, prob = (part.view_as(draft.ids) for part in logits.map(_drawn, point))
    return Prediction(ids, prob, ids, torch.zeros_like(prob))


def _drawn(logits: Tensor, point: Tensor) -> tuple[Tensor, ...]:
    """From logits (n, V), the tokens at uniform points (n,), and their probabilities."""
    probs = logits.softmax(-1)
    ids = draw(probs, point[:, None])
    return ids[:, 0], probs.gather(-1, ids)[:, 0]
