"""A block being drafted: its state, what the model sees of it, and what a prediction does to it.

The pieces that the block methods share. All are pure functions on tensors over N blocks at once; N is the requests of
a batch in decoding and all blocks of all rows in training, so both run the very same code. No function branches on a
value or waits for the device.

Shapes: N blocks, B tokens per block, R rows, L tokens per row, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from freda.data.loader import Batch
from freda.methods.geometry import Geometry, Targets
from freda.methods.noise import Purpose, gumbel
from freda.model.attention import Mask, clean_tokens, concat, draft_tokens, make_mask
from freda.model.head import Logits
from freda.model.staircase import Staircase, fits
from freda.model.transformer import KeysValues, Transformer


class Draft(NamedTuple):
    """N blocks in the middle of being drafted."""

    ids: Tensor  # (N, B) int64: the current token of each position, BLANK where there is none
    prob: Tensor  # (N, B) fp32: the model's probability of that token; 0 for BLANK, 1 for what was given
    second_ids: Tensor  # (N, B) int64: the runner-up of each position, where the method looks at it
    second_prob: Tensor  # (N, B) fp32: its probability; 0 where there is none
    given: Tensor  # (N, B) bool: prompt tokens inside the block, never changed
    committed: Tensor  # (N, B) bool: positions the method is sure of after the last pass
    passes: Tensor  # (N,) int64: passes done
    closed: Tensor  # (N,) int64: tokens that are final, from the left; 0 while the block is open


class Rules(NamedTuple):
    """When a block closes; one entry per block, so that every request of a batch can have its own."""

    passes: Tensor  # (N,) int64: K, most passes
    threshold: Tensor  # (N,) fp32: η, probability from which a position is committed; above 1 never
    stop_ids: Tensor  # (E,) int64: tokens that end a text


class Sampling(NamedTuple):
    """How a token is chosen from its distribution; one entry per block."""

    temperature: Tensor  # (N,) fp32: 0 is argmax
    top_p: Tensor  # (N,) fp32: 1 keeps all
    seed: Tensor  # (N,) int64


class Search(NamedTuple):
    """How Best-of-N looks for a better draft; one entry per block. Other methods do not look at it."""

    width: Tensor  # (N,) int64: N, most candidates
    swaps: Tensor  # (N,) int64: R, most positions a candidate changes
    tau: Tensor  # (N,) fp32: τ, weight of the scorer
    sampled: Tensor  # (N,) bool: candidates are draws from the proposal instead of its cheapest changes
    gumbel: Tensor  # (N,) bool: sample the choice, with Gumbel noise, instead of taking the best
    seed: Tensor  # (N,) int64


class Prediction(NamedTuple):
    """What one pass says: a token for every position with its raw probability, and the runner-up where asked for."""

    ids: Tensor  # (N, B) int64
    prob: Tensor  # (N, B) fp32
    second_ids: Tensor  # (N, B) int64
    second_prob: Tensor  # (N, B) fp32: 0 where there is none


class Candidates(NamedTuple):
    """C drafts of each block, seen by one forward; invalid ones take part in nothing."""

    ids: Tensor  # (N, C, B) int64
    alpha: Tensor  # (N, C, B) fp32: weight against BLANK, the proposal's probability of each token
    log_prob: Tensor  # (N, C) fp32: ℓ, sum of log-probabilities over the free positions; if drawn, log of how often
    valid: Tensor  # (N, C) bool; the valid ones come first
    ahead: Tensor  # (N, C) int64: tokens of the draft that are text for it: it begins so many places further right


def start(ids: Tensor, given: Tensor, blank_id: int) -> Draft:
    """Fresh blocks: `ids` where `given`, BLANK elsewhere."""
    return Draft(
        ids=torch.where(given, ids, blank_id),
        prob=given.float(),
        second_ids=torch.where(given, ids, blank_id),
        second_prob=torch.zeros_like(given, dtype=torch.float32),
        given=given,
        committed=given,
        passes=torch.zeros_like(ids[:, 0]),
        closed=torch.zeros_like(ids[:, 0]),
    )


def merge(keep: Tensor, old: Draft, new: Draft) -> Draft:
    """`old` where `keep` (N,) is true, `new` elsewhere."""
    return Draft(*(torch.where(keep if a.dim() == 1 else keep[:, None], a, b) for a, b in zip(old, new, strict=True)))


def advance(old: Draft, new: Prediction, committed: Tensor, rules: Rules) -> Draft:
    """The state after a pass (M11): a block closes when all of it is committed, when a stop token lies in the
    committed run at its left, or when its passes are used up. Closed blocks stay as they are."""
    run = leftmost_run(committed)
    stopped = (run & torch.isin(new.ids, rules.stop_ids) & ~old.given).any(-1)
    passes = old.passes + 1
    closed = committed.all(-1) | stopped | (passes >= rules.passes)
    return merge(old.closed > 0, old, Draft(*new, old.given, committed, passes, closed * old.ids.shape[1]))


def alone(ids: Tensor, alpha: Tensor) -> Candidates:
    """A draft (N, B) as its only candidate."""
    ones = torch.ones_like(ids[:, :1], dtype=torch.bool)
    return Candidates(ids[:, None], alpha[:, None], torch.zeros_like(alpha[:, :1]), ones, torch.zeros_like(ids[:, :1]))


def leftmost_run(confident: Tensor) -> Tensor:
    """The positions (N, B) up to the first that is not confident."""
    return confident.cumprod(-1).bool()


def soft_embedding(model: Transformer, ids: Tensor, alpha: Tensor, *, rescale: bool = False) -> Tensor:
    """Eq. soft_prediction_embedding: α·E(x̂) + (1−α)·E(BLANK), (..., D). Exact at α = 0 and α = 1.

    `rescale` gives the mixture the mean of the two norms, weighted alike, as DMax does.
    """
    precision = torch.promote_types(model.embed_tokens.weight.dtype, torch.float32)  # α has 24 bits, bf16 has 8 (M17)
    blank = model.blank_row.to(precision)
    token = model.embed_tokens(ids)
    weight = alpha[..., None].to(precision)
    mixed = torch.lerp(blank.expand_as(token), token.to(precision), weight)
    if rescale:
        norm = torch.lerp(blank.norm().expand_as(weight), token.to(precision).norm(dim=-1, keepdim=True), weight)
        mixed = mixed * norm / mixed.norm(dim=-1, keepdim=True).clamp_min(1e-6)
    return mixed.to(token.dtype)


def predict(
    logits: Tensor, sampling: Sampling | None = None, position: Tensor | None = None, *, runner_up: bool = False
) -> Prediction:
    """Choose a token for every position of logits (N, B, V). Its probability is always the raw one (M16).

    With `runner_up`, also the most probable other token.
    """
    log_p = logits.log_softmax(-1)
    ids = logits.argmax(-1)
    if sampling is not None:
        assert position is not None
        drawn = _sampled_logits(logits, sampling, position).argmax(-1)
        ids = torch.where(sampling.temperature[:, None] > 0, drawn, ids)
    prob = log_p.gather(-1, ids[..., None])[..., 0].exp()
    if not runner_up:
        return Prediction(ids, prob, ids, torch.zeros_like(prob))
    second = log_p.scatter(-1, ids[..., None], float("-inf")).max(-1)
    return Prediction(ids, prob, second.indices, second.values.exp())


def draw(probs: Tensor, point: Tensor) -> Tensor:
    """Tokens (..., S) drawn from `probs` (..., V), by inverting the distribution at uniform `point`s (..., S)."""
    heights = probs.cumsum(-1)
    drawn = torch.searchsorted(heights, point * heights[..., -1:])
    return drawn.clamp_max(probs.shape[-1] - 1)


def _sampled_logits(logits: Tensor, sampling: Sampling, position: Tensor) -> Tensor:
    """Logits whose argmax is a sample. The noise belongs to (seed, position): the same in every pass, or tokens would
    flicker from pass to pass, and independent of the rest of the batch."""
    scaled = logits / sampling.temperature[:, None, None].clamp_min(1e-6)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    mass = ordered.softmax(-1)
    top_p = sampling.top_p[:, None, None]
    # The token that crosses top_p stays. A sum in fp32 reaches 1 early, so 1 is asked for by itself: it keeps all.
    dropped = (mass.cumsum(-1) - mass >= top_p) & (top_p < 1)
    beyond = torch.zeros_like(dropped).scatter(-1, order, dropped)
    token = torch.arange(logits.shape[-1], device=logits.device)
    noise = gumbel(Purpose.SAMPLING, sampling.seed[:, None, None], position[:, :, None], token)
    return (scaled + noise).masked_fill(beyond, float("-inf"))


# -- drafts of whole rows: training and teacher-forced evaluation ----------------------------------------------------


class CleanHalf(NamedTuple):
    """The committed text of packed rows as a cache (M7): every pass over the draft half sees it."""

    past: list[KeysValues]
    mask: Mask  # draft slots over [clean, draft] keys
    position: Tensor  # (R, L)
    known: Tensor  # (N,) int64: the token of each block's first slot, which a shifted draft shows there
    hidden: Tensor | None  # (R, L, D), which predict the next tokens where the context is causal


def clean_half(model: Transformer, batch: Batch, geometry: Geometry) -> CleanHalf:
    """Run the clean half once; `t` passes then cost t more halves instead of t whole `[draft, clean]` forwards."""
    out = model(model.embed_tokens(batch.tokens), batch.position, clean_mask(model, batch, geometry))
    mask, known = draft_mask(model, batch, geometry), geometry.known(batch.tokens)
    return CleanHalf(out.new, mask, batch.position, known, out.hidden if geometry.causal else None)


def clean_mask(model: Transformer, batch: Batch, geometry: Geometry) -> Mask:
    """The mask of the clean half of packed rows by itself."""
    if _is_staircase(model, batch, geometry.context):
        return Mask(Staircase(geometry.context, draft=False), drafts=False)
    clean = clean_tokens(batch.document, batch.position, geometry.context)
    return make_mask(clean, clean, model.backend, drafts=False)


def draft_mask(model: Transformer, batch: Batch, geometry: Geometry) -> Mask:
    """The mask of drafts of whole rows over [clean, draft] keys."""
    if _is_staircase(model, batch, geometry.block):
        return Mask(Staircase(geometry.block, draft=True), drafts=True)
    clean = clean_tokens(batch.document, batch.position, geometry.context)
    draft = draft_tokens(batch.document, geometry.first(batch.position))
    return make_mask(draft, concat(clean, draft), model.backend, drafts=True)


def packed_drafts(model: Transformer, batch: Batch, geometry: Geometry, count: int) -> tuple[Tensor, Mask]:
    """Positions (R, C·L) and the mask of so many drafts of whole rows side by side, over [clean, drafts] keys."""
    rows, length = batch.tokens.shape
    document, position = (part.repeat(1, count) for part in (batch.document, batch.position))
    candidate = torch.arange(count, device=document.device).repeat_interleave(length).expand(rows, -1)
    clean = clean_tokens(batch.document, batch.position, geometry.context)
    drafts = draft_tokens(document, geometry.first(position), candidate)
    return position, make_mask(drafts, concat(clean, drafts), model.backend, drafts=True)


def _is_staircase(model: Transformer, batch: Batch, block_size: int) -> bool:
    if model.backend != "staircase" or not batch.one_document:
        return False
    config, weight = model.config, model.embed_tokens.weight
    fast = weight.dtype in (torch.bfloat16, torch.float16) or not weight.is_cuda  # the causal kernel is not for fp32
    before = batch.tokens.shape[1] > block_size  # a draft of the only block sees no text: nothing for a causal kernel
    return fast and before and fits(config.heads, config.kv_heads, config.head_dim, block_size)


def draft_logits(model: Transformer, x: Tensor, clean: CleanHalf) -> Logits:
    """One pass over the draft half: embeddings x (R, L, D) to the logits of (R, L) positions."""
    return model.head(model(x, clean.position, clean.mask, clean.past).hidden)


def label_loss(logits: Logits, targets: Targets, weights: Tensor | float = 1.0) -> Tensor:
    """Weighted sum of the cross-entropy of every slot that counts."""
    return logits.cross_entropy(targets.ids, targets.counted * weights)


def likeliest(logits: Logits, shape: Sequence[int], *, runner_up: bool = False) -> Prediction:
    """The most probable token of every position, as `predict` without sampling; in the shape of a draft, (N, B)."""
    found = logits.map(_top_two if runner_up else _top, fused=True)
    return Prediction(*(part.view(*shape) for part in found))


def _top(logits: Tensor) -> tuple[Tensor, ...]:
    best = logits.max(-1)
    prob = (best.values - logits.logsumexp(-1)).exp()
    return best.indices, prob, best.indices, torch.zeros_like(prob)


def _top_two(logits: Tensor) -> tuple[Tensor, ...]:
    return tuple(predict(logits[:, None], runner_up=True)[part][:, 0] for part in range(4))


def right_tokens(logits: Logits, targets: Targets) -> tuple[Tensor, Tensor]:
    """For validation: the sum of the losses as `label_loss`, and how many most probable tokens are the true ones."""
    losses, hit = logits.map(loss_and_hit, targets.ids)
    return (losses * targets.counted).sum(), (hit & targets.counted).sum()


def loss_and_hit(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """The cross-entropy of logits (n, V) with labels (n,), and which labels are the most probable tokens."""
    return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(-1) == labels
