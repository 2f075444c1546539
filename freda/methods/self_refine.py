"""Self-refinement, the paper's method: the model sees its own draft again and revises it.

Training (algorithm 1, stage I): draw t from 1..K, make t−1 passes without gradient from a blank draft, and train the
last pass to predict the clean block (Eq. self_refine_loss). The intermediate states are the model's own drafts; there
is no corruption process. Decoding (algorithm 2): the same passes; the leftmost run of positions of probability η or
more is committed, recomputed after each pass, and until the block closes every position may be revised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.methods.config import MethodConfig
from freda.methods.draft import (
    CleanHalf,
    Draft,
    Prediction,
    Rules,
    advance,
    clean_half,
    draft_logits,
    draw,
    feedback_weight,
    label_loss,
    leftmost_run,
    likeliest,
    right_tokens,
    soft_embedding,
    start,
)
from freda.methods.method import Step
from freda.methods.noise import Purpose, uniform
from freda.model.head import Logits
from freda.model.transformer import Transformer

DRAFTS = True
REFINES = True
SCORES = False
COMMITTED_IN_TRAINING = 0.9  # η of the `committed_hard` ablation while training
VALIDATION_PASSES = 4


def labels(batch: Batch, config: MethodConfig) -> Tensor:
    """Every token, the EOS fill too: the model learns to close a block."""
    return batch.document >= 0


def loss(model: Transformer, batch: Batch, config: MethodConfig, step: Step) -> Tensor:
    """Eq. self_refine_loss after t−1 passes without gradient (M6, M7): nothing is kept of them but the draft."""
    clean = clean_half(model, batch, config.block_size)
    draft = initial_draft(model, batch, config, step)
    with torch.no_grad():
        for _ in range(step.passes - 1):
            _, draft = refine(model, clean, draft, config, step)
    return label_loss(pass_logits(model, clean, draft, config), batch)


def refine(
    model: Transformer, clean: CleanHalf, draft: Draft, config: MethodConfig, step: Step | None = None
) -> tuple[Logits, Draft]:
    """One pass over the drafts of all blocks of packed rows: its logits (R, L) and the drafts it leaves.

    The drafts are greedy, as decoding makes them, unless a training `step` wants them drawn (`drafts = "sampled"`).
    """
    logits = pass_logits(model, clean, draft, config)
    if step is not None and config.drafts == "sampled":
        prediction = sampled(logits, draft, step)
    else:
        prediction = likeliest(logits, draft.ids.shape)
    never = torch.full_like(draft.passes, 2, dtype=torch.float32)
    threshold = torch.full_like(never, COMMITTED_IN_TRAINING) if config.committed_hard else never
    rules = Rules(draft.passes + 2, threshold, draft.ids.new_empty(0))
    draft = update(draft, prediction, rules)
    return logits, draft._replace(closed=torch.zeros_like(draft.closed))  # teacher-forced drafts never end early


def sampled(logits: Logits, draft: Draft, step: Step) -> Prediction:
    """Every token drawn from its marginal, other draws in every pass, with its own probability; in a draft's shape."""
    rows, length = logits.hidden.shape[:2]
    row = step.row.to(draft.ids.device)[:, None]
    place = torch.arange(length, device=row.device)
    number = draft.passes[:, None].expand_as(draft.ids).reshape(rows, length)
    point = uniform(Purpose.DRAFTS, step.seed, step.step, row, place, number)
    ids, prob = (part.view_as(draft.ids) for part in logits.map(_drawn, point))
    return Prediction(ids, prob, ids, torch.zeros_like(prob))


def _drawn(logits: Tensor, point: Tensor) -> tuple[Tensor, ...]:
    """Of logits (n, V): the tokens at uniform points (n,), and their probabilities."""
    share = logits.softmax(-1)
    ids = draw(share, point[:, None])
    return ids[:, 0], share.gather(-1, ids)[:, 0]


def pass_logits(model: Transformer, clean: CleanHalf, draft: Draft, config: MethodConfig) -> Logits:
    """One pass over the drafts of all blocks of packed rows, (R, L)."""
    ids, alpha = (part.view_as(clean.position) for part in rows(draft, config))
    return draft_logits(model, soft_embedding(model, ids, alpha, rescale=config.rescale), clean)


def initial_draft(model: Transformer, batch: Batch, config: MethodConfig, step: Step | None) -> Draft:
    """Blank blocks, some positions of which show the truth while training (M8). (N, B) with N = R·L/B."""
    tokens = batch.tokens.view(-1, config.block_size)
    draft = start(tokens, torch.zeros_like(tokens, dtype=torch.bool), model.blank_id)
    if step is None:
        return draft
    shown = replaced(batch, config, step)
    return draft._replace(ids=torch.where(shown, tokens, draft.ids), prob=shown.float())


def replaced(batch: Batch, config: MethodConfig, step: Step) -> Tensor:
    """Which positions of the first draft show their true token, (N, B)."""
    row = step.row.to(batch.tokens.device)[:, None]
    place = torch.arange(batch.tokens.shape[1], device=row.device)
    point = uniform(Purpose.REPLACEMENT, step.seed, step.step, row, place)
    shown = (point < replacement_share(config, step.progress)).view(-1, config.block_size)
    if config.replacement == "prefix":  # as many as independent draws show, but from the left: a prompt's tail
        shown = torch.arange(config.block_size, device=row.device) < shown.sum(-1, keepdim=True)
    return shown


def replacement_share(config: MethodConfig, progress: float) -> float:
    """r: falls linearly over the first half of the run, then stays."""
    return config.replacement_start + (config.replacement_end - config.replacement_start) * min(1.0, 2 * progress)


def validate(model: Transformer, batch: Batch, config: MethodConfig, step: Step) -> dict[str, Tensor]:
    """Loss and token accuracy of each pass from blank drafts over clean text."""
    clean = clean_half(model, batch, config.block_size)
    draft = initial_draft(model, batch, config, None)
    numbers: dict[str, Tensor] = {}
    for index in range(1, VALIDATION_PASSES + 1):
        logits, draft = refine(model, clean, draft, config)
        numbers[f"pass{index}"], numbers[f"accuracy{index}"] = right_tokens(logits, batch)
    return {"loss": numbers[f"pass{min(config.passes, VALIDATION_PASSES)}"], **numbers}


def rows(draft: Draft, config: MethodConfig) -> tuple[Tensor, Tensor]:
    """Eq. soft_prediction_embedding's α (M5): the probability of the shown token; 1 for given tokens."""
    alpha = feedback_weight(draft.prob, config)
    if config.committed_hard:
        alpha = torch.where(draft.committed, 1.0, alpha)
    return draft.ids, alpha


def update(draft: Draft, prediction: Prediction, rules: Rules) -> Draft:
    """Take over the whole prediction, except where tokens were given; commit the leftmost sure run (M11, M12)."""
    prediction = prediction._replace(
        ids=torch.where(draft.given, draft.ids, prediction.ids),
        prob=torch.where(draft.given, 1.0, prediction.prob),
    )
    committed = leftmost_run(draft.given | (prediction.prob >= rules.threshold[:, None]))
    return advance(draft, prediction, committed, rules)
