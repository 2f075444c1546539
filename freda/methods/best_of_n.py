"""Best-of-N refinement: several candidates of a draft go through one packed forward, and a scorer picks the winner.

Stage II training (algorithm 1, M9): the backbone is frozen. For every block the clean text and n negatives, drawn
independently from the proposal after t passes, are embedded alike, with α = the proposal's probability of each token,
and scored; the scorer learns to tell the clean one (Eq. bon_loss). Its optimum is the log density ratio between data
and proposal. Duplicates among the negatives are kept: their gradient vanishes, and dropping them would bend the
optimum. Decoding (algorithm 3) is self-refinement whose draft is chosen from the beam (`methods/candidates.py`).

In the shifted layout a candidate is the B tokens that a block predicts. The backbone sees those that have slots, all
but the last; the scorer's hard channel has all B, each beside the hidden state of the slot that predicted it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.decode.config import DecodeConfig
from freda.errors import FredaError, require
from freda.methods.blocks import check_layout
from freda.methods.candidates import choose, marginal_cost_beam, merge_candidates, propose, sample
from freda.methods.draft import (
    Candidates,
    CleanHalf,
    Prediction,
    Sampling,
    clean_half,
    draw,
    likeliest,
    packed_drafts,
    predict,
)
from freda.methods.method import Method, Step, Work
from freda.methods.noise import Purpose, uniform
from freda.methods.self_refine import Refining
from freda.methods.state import DecodeState, Limits
from freda.model.head import Logits
from freda.model.parts import Parts
from freda.model.scorer import Scorer
from freda.model.transformer import Forward
from freda.sections import knob, require_at_least

VALIDATED_TAU = (0.0, 0.1, 1.0)


class Slots(NamedTuple):
    """What competes in every block: S texts of packed rows, by the draft's slots that predict them, and the proposal's
    probability of each token."""

    ids: Tensor  # (R, S, L) int64
    alpha: Tensor  # (R, S, L) fp32
    target: Tensor  # (R, L/B) int64: which slot is the clean text; -1 where none is
    valid: Tensor  # (R, L/B, S) bool: slots that hold a text; the others take part in nothing


@dataclass(frozen=True, kw_only=True)
class BestOfN(Refining):
    """Self-refinement with a learned choice among candidates."""

    axes: ClassVar[tuple[str, ...]] = ("passes", "threshold", "width", "tau")
    streams: ClassVar[int] = 0  # the backbone is frozen

    name: str = field(default="best-of-n", init=False)
    negatives: Literal["sampled", "beam"] = knob("sampled", "what the scorer learns to tell from the truth")
    num_negatives: int = knob(4, "negatives per block")
    scorer_layer: bool = knob(False, "the scorer trains a copy of the backbone's last layer, kept with it")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "method", "num_negatives")
        hint = "best-of-n shows every candidate by its probability: use false"
        require(not self.committed_hard, f"method.committed_hard is true; {hint}")
        odd = f"method.block_size is {self.block_size}: a shifted block of one slot shows nothing of a candidate"
        require(self.geometry.lead < self.block_size, f"{odd}; use 2 or more")

    # -- training ----------------------------------------------------------------------------------------------------

    def start_from(self, parts: Parts, proposer: Method | None, source: str) -> set[str]:
        """Stage II: only the scorer learns; a model without one gets a new one."""
        stage_one = "best-of-n starts from a self-refine model"
        require(bool(source), f"train.init is empty; {stage_one}")
        if proposer is not None:  # a scorer judges drafts, so it must see them as the model that makes them does
            odd = f"train.init {source} was trained as {proposer.name}; {stage_one}"
            require(isinstance(proposer, Refining), odd)
            check_layout(self.geometry, proposer.geometry, source)
            for key, trained in proposer.stored().items():
                asked = getattr(self, key)
                require(asked == trained, f"method.{key} is {asked}, but {source} was trained with {trained}; use that")
        parts.requires_grad_(False)
        if parts.scorer is None:
            with torch.device("meta"):
                parts.scorer = Scorer(parts.backbone.config, last_layer=self.scorer_layer)
            return {"scorer"}
        asked, other = (str(value).lower() for value in (self.scorer_layer, not self.scorer_layer))
        odd = f"method.scorer_layer is {asked}, but the scorer of {source} was trained otherwise"
        alike = (parts.scorer.last_layer is not None) == self.scorer_layer
        require(alike, f"{odd}; set it to {other}, or start from the self-refine model")
        parts.scorer.requires_grad_(True)
        return set()

    def check_adapter(self, rows: str) -> None:
        """The backbone is frozen as it is."""
        raise FredaError("best-of-n trains a scorer and no adapter; omit the [adapter] section")

    def labels(self, batch: Batch) -> Tensor:
        """One label per block: its first token stands for it."""
        return (batch.document >= 0) & (batch.position % self.block_size == 0)

    def loss(self, parts: Parts, batch: Batch, step: Step) -> Tensor:
        """Eq. bon_loss, summed over the blocks: −s(clean) + log Σ exp s(slot).

        With beam negatives a block counts only if its clean text is a candidate, and the mean over those of the group
        stands for all its blocks. Which count is known only here, so the processes that share a group add them up here.
        """
        clean, logits = self.proposal(parts, batch, step.passes)
        every = self.negatives == "sampled"  # every block counts
        slots = self.sampled_slots(logits, batch, step) if every else self.beam_slots(logits, batch)
        real = self._real(batch)
        counted = real & (slots.target >= 0)
        losses = block_losses(slots, self.score_slots(parts, batch, clean, slots))
        summed = torch.where(counted, losses, 0.0).sum()
        if every:
            return summed
        count = step.total(torch.stack([real.sum(), counted.sum()]))
        return summed * (count[0] / count[1].clamp_min(1))

    def validate(self, parts: Parts, batch: Batch, step: Step) -> dict[str, Tensor]:
        """Over all blocks, whatever the negatives of the training were:

        - `loss`: NCE against draws from the proposal; `rank_accuracy`: how often no draw that differs from the clean
          text scores as high; `true_negatives`: how many blocks have a draw that differs;
        - `found`: how often the clean text is among the beam's candidates; `choice0`, `choice0.1`, `choice1`: how often
          it has the highest ℓ + τ·s of the candidates and itself, for these τ. τ = 0 is the proposal without a scorer.
        """
        (clean, logits), real = self.proposal(parts, batch, step.passes), self._real(batch)
        slots = self.sampled_slots(logits, batch, step)
        scores, differs = self.score_slots(parts, batch, clean, slots), self._differs(slots)
        numbers = {
            "loss": torch.where(real, block_losses(slots, scores), 0.0),
            "rank_accuracy": _first_wins(scores, differs) & real,
            "true_negatives": differs.any(-1) & real,
            **self._choices(parts, batch, clean, logits),
        }
        return {name: value.sum() for name, value in numbers.items()}

    def _choices(self, parts: Parts, batch: Batch, clean: CleanHalf, logits: Logits) -> dict[str, Tensor]:
        """The part of `validate` about the choice among {clean text, beam candidates}, for every block."""
        real = self._real(batch)
        beam = self.beam_slots(logits, batch)
        ids = torch.cat([self.geometry.targets(batch).ids[:, None], beam.ids], dim=1)
        prob = logits.map(_gathered, ids.transpose(1, 2))[0].transpose(1, 2)  # (R, S, L): of each token
        valid = torch.cat([torch.ones_like(beam.valid[..., :1]), beam.valid], dim=-1)
        slots = Slots(ids, self.feedback_weight(prob), torch.zeros_like(real, dtype=torch.int64), valid)
        scores = self.score_slots(parts, batch, clean, slots)  # (R, L/B, S)
        likely = self._by_block(prob).clamp_min(1e-38).log().sum(-1)
        differs = self._differs(slots)
        chosen = {f"choice{tau:g}": _first_wins(likely + tau * scores, differs) & real for tau in VALIDATED_TAU}
        return {"found": ~differs.all(-1) & real, **chosen}

    @torch.no_grad()
    def proposal(self, parts: Parts, batch: Batch, passes: int) -> tuple[CleanHalf, Logits]:
        """The clean text as a cache, run once for the drafts and for all slots (M7), and the logits (R, L) of the last
        of `passes` passes from the blank draft: the distribution of the candidates."""
        clean, draft = clean_half(parts.backbone, batch, self.geometry), self.blank_draft(parts.backbone, batch)
        for _ in range(passes):
            logits, draft = self.refine(parts.backbone, clean, draft)
        return clean, logits

    def sampled_slots(self, logits: Logits, batch: Batch, step: Step) -> Slots:
        """The clean text in slot 0 and `num_negatives` independent draws from the proposal `logits`."""
        seed, number, row, place = step.counters(batch.tokens)
        negative = torch.arange(self.num_negatives, device=row.device)
        point = uniform(Purpose.NEGATIVES, seed, number, row[..., None], place[:, None], negative)  # (R, L, n)
        truth = self.geometry.targets(batch)
        ids, prob = (part.transpose(1, 2) for part in logits.map(_truth_and_draws, truth.ids, point))
        ids = torch.where(truth.counted[:, None], ids, truth.ids[:, None])  # where there is no label, nothing differs
        first = torch.zeros_like(self._real(batch), dtype=torch.int64)
        valid = torch.ones_like(first, dtype=torch.bool)[..., None].expand(-1, -1, ids.shape[1])
        return Slots(ids, self.feedback_weight(prob), first, valid)

    def beam_slots(self, logits: Logits, batch: Batch) -> Slots:
        """The ablation of M9: beam candidates alone; a block counts only if its clean text is one of them."""
        rows, size, width = len(batch.tokens), self.block_size, 1 + self.num_negatives
        truth, free, _ = (part.view(-1, size) for part in self.geometry.targets(batch))
        top = likeliest(logits, (-1, size), runner_up=True)
        top = top._replace(ids=torch.where(free, top.ids, truth))
        swaps = torch.full_like(top.ids[:, 0], size)
        found = marginal_cost_beam(top, free, width=width, swaps=swaps, most_swaps=size)
        hit = (found.ids == truth[:, None]).all(-1) & found.valid  # (blocks, S)
        target = torch.where(hit.any(-1), hit.int().argmax(-1), -1).view(rows, -1)
        ids, alpha = (p.view(rows, -1, width, size).transpose(1, 2).flatten(2) for p in (found.ids, found.alpha))
        return Slots(ids, self.feedback_weight(alpha), target, found.valid.view(rows, -1, width))

    def score_slots(self, parts: Parts, batch: Batch, clean: CleanHalf, slots: Slots) -> Tensor:
        """One packed forward [slot_1 | ... | slot_S], which do not see each other, over the clean text; then the
        scorer, which alone has a gradient: scores (R, L/B, S)."""
        assert parts.scorer is not None
        rows, count, _ = slots.ids.shape
        position, mask = packed_drafts(parts.backbone, batch, self.geometry, count)
        with torch.no_grad():
            embedding = parts.backbone.embed_tokens(slots.ids)
            x = self.packed_rows(parts.backbone, clean, slots.ids, slots.alpha)
            out: Forward = parts.backbone(x, position, mask, clean.past)
        hidden = parts.scorer.soft_channel(parts.backbone, out, position, mask, clean.past[-1])
        hidden, embedding = (part.reshape(-1, self.block_size, part.shape[-1]) for part in (hidden, embedding))
        counted = self.geometry.targets(batch).counted.repeat(1, count).view(-1, self.block_size)
        scores: Tensor = parts.scorer(hidden, embedding, counted)
        return scores.view(rows, count, -1).transpose(1, 2)

    def _real(self, batch: Batch) -> Tensor:
        """Which blocks are text and not padding, (R, L/B) bool."""
        return (batch.document >= 0)[:, :: self.block_size]

    def _differs(self, slots: Slots) -> Tensor:
        """Which slots after the first hold another text than the first, (R, L/B, S-1)."""
        blocks = self._by_block(slots.ids)
        return (blocks[:, :, 1:] != blocks[:, :, :1]).any(-1) & slots.valid[:, :, 1:]

    def _by_block(self, ids: Tensor) -> Tensor:
        """Slots (R, S, L) as (R, L/B, S, B)."""
        rows, count, _ = ids.shape
        return ids.view(rows, count, -1, self.block_size).transpose(1, 2)

    def work(self, one: Work, passes: int) -> float:
        """Forwards of the clean half, the passes and the slots; the scorer is small beside them."""
        slot = one.layers + one.draft
        return one.layers + one.clean + passes * one.one_pass + (1 + self.num_negatives) * slot

    # -- decoding ----------------------------------------------------------------------------------------------------

    def check(self, parts: Parts, request: DecodeConfig, prompt: Sequence[int]) -> None:
        """Refuse a request that cannot be decoded."""
        require(parts.scorer is not None, "the model has no scorer; train one with method.name=best-of-n")
        odd = f"swaps is {request.swaps}, more than a block has positions"
        require(request.swaps <= self.block_size, f"{odd}; use 0 to {self.block_size}")
        super().check(parts, request, prompt)

    def off_device(self, parts: Parts) -> str:
        """Why the GPU's decoding kernels cannot be used, or nothing."""
        if parts.scorer is not None and parts.scorer.last_layer is not None:
            return "the scorer has a last layer of its own"
        return super().off_device(parts)

    def limits(self, requests: Sequence[DecodeConfig]) -> Limits:
        """The most that these requests ask of a forward."""
        width, swaps = (max((getattr(r, key) for r in requests), default=0) for key in ("width", "swaps"))
        draws = any(r.candidates == "sampled" for r in requests)
        return super().limits(requests)._replace(width=max(1, width), swaps=swaps, draws=draws)

    def candidates(self, state: DecodeState, limits: Limits, count: int | None = None) -> Candidates:
        """The cheapest changes to each draft, or draws from what the last pass predicted (M10)."""
        found = propose(state.draft, state.search, width=limits.width, swaps=limits.swaps)
        if state.probs is not None:
            drawn = sample(state.draft, state.probs, state.search, state.position, width=limits.width)
            found = merge_candidates(state.search.sampled, found, drawn)
        if count is None:
            count = int(found.valid.sum(-1).max())  # the valid ones come first; a blank draft has one
        found = Candidates(*(part[:, :count] for part in found))
        return found._replace(alpha=self.feedback_weight(found.alpha))

    def choose(
        self, parts: Parts, state: DecodeState, candidates: Candidates, soft: Tensor | None, text: Prediction | None
    ) -> tuple[Tensor, Tensor]:
        """argmax of ℓ + τ·s, with Gumbel noise where the request asks for it."""
        if soft is None:
            return super().choose(parts, state, candidates, soft, text)
        rows, count, size = candidates.ids.shape
        assert parts.scorer is not None
        embedding = parts.backbone.embed_tokens(candidates.ids).flatten(0, 1)
        counted = torch.ones_like(candidates.ids, dtype=torch.bool).flatten(0, 1)
        score = parts.scorer(soft.reshape(rows * count, size, -1), embedding, counted).view(rows, count)
        place = torch.stack([state.begin, state.draft.passes], dim=-1)
        winner = choose(candidates, score, state.search, place)
        return winner, candidates.log_prob + state.search.tau[:, None] * score

    def predict(self, logits: Tensor, sampling: Sampling | None, position: Tensor) -> Prediction:
        """A token and its runner-up for every position of logits (R, B, V)."""
        return predict(logits, sampling, position, runner_up=True)


def _truth_and_draws(logits: Tensor, truth: Tensor, point: Tensor) -> tuple[Tensor, ...]:
    """The true tokens (n,) and those drawn at uniform `point`s (n, S-1), and the probability of each: (n, S)."""
    probs = logits.softmax(-1)
    ids = torch.cat([truth[:, None], draw(probs, point)], dim=1)
    return ids, probs.gather(-1, ids)


def _first_wins(value: Tensor, differs: Tensor) -> Tensor:
    """Where none of the other slots that differ from the first has as high a value (R, L/B, S) as the first."""
    return ~((value[:, :, 1:] >= value[:, :, :1]) & differs).any(-1)


def _gathered(logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    return (logits.softmax(-1).gather(-1, ids),)


def block_losses(slots: Slots, scores: Tensor) -> Tensor:
    """−log softmax of the clean slot among the valid ones, (R, L/B) fp32; without meaning where there is none."""
    scores = scores.float().masked_fill(~slots.valid, float("-inf"))
    return -scores.log_softmax(-1).gather(-1, slots.target.clamp_min(0)[..., None])[..., 0]
