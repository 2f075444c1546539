"""What a method is: a frozen value that owns its settings, its loss, its decoding rule, its arithmetic and its sweep.

A method is a subclass of `Method` whose fields are the keys of the `[method]` section. Training calls `start_from`,
`labels`, `loss`, `validate` and `flops`; decoding calls `candidates`, `choose`, `predict` and `update` around each
forward; a sweep varies the settings that `axes` names. Adding a method is a file in this folder and a line in
`__init__`: nothing outside this folder asks which method it has.

`Method` itself has the defaults of a block method in the paper's layout: a draft in its own rows, each position
predicting its own token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.decode.config import DecodeConfig
from freda.errors import require
from freda.methods.draft import (
    Candidates,
    CleanHalf,
    Draft,
    Prediction,
    Rules,
    Sampling,
    alone,
    clean_half,
    draft_logits,
    likeliest,
    predict,
    soft_embedding,
    start,
)
from freda.methods.state import DecodeState, Limits
from freda.model.config import ModelConfig, head_parameters, layer_parameters
from freda.model.head import Logits
from freda.model.parts import Parts
from freda.model.transformer import Transformer
from freda.sections import build, knob, require_at_least

NEVER = 2.0  # a commitment threshold that no probability reaches


class Step(NamedTuple):
    """Where training stands, for one group of rows: the key of all its noise (M6)."""

    seed: int
    step: int
    row: Tensor  # (R,) int64: row numbers within the step's whole batch
    progress: float  # share of the run that is done, 0 to 1
    passes: int  # t: how many passes this group runs
    total: Callable[[Tensor], Tensor] = lambda numbers: numbers
    """Counts (n,) of these rows to those of the whole group, of which another process may have the rest. All processes
    call it together, equally often; it stays on the device."""

    def counters(self, tokens: Tensor) -> tuple[int, int, Tensor, Tensor]:
        """Counters of the noise of packed tokens (R, L): seed, step, row (R, 1) and place (L,)."""
        row = self.row.to(tokens.device)[:, None]
        return self.seed, self.step, row, torch.arange(tokens.shape[1], device=tokens.device)


MOST_BLOCK = 2**12  # tokens; attention within a block is quadratic


class Layout(NamedTuple):
    """How a block lies in a decoding forward."""

    block: int  # tokens that a pass predicts
    slots: int  # draft tokens of one candidate; 0: the pass predicts after the last committed token

    @property
    def held(self) -> int:
        """Committed tokens that are not stored before a pass, because the pass predicts after them."""
        return 0 if self.slots else 1


class Work(NamedTuple):
    """Operations of one forward over the clean tokens of a step, by what they are."""

    layers: float
    attention: float
    head: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train and decode; its fields are its settings."""

    axes: ClassVar[tuple[str, ...]] = ("passes", "threshold")  # settings of decoding that change what it writes
    refines: ClassVar[bool] = False  # may a later pass change a token? A sweep then measures how stable drafts are
    streams: ClassVar[int] = 2  # token streams with gradient for each clean token: the clean half and the draft

    name: str = dataclasses.field(default="", init=False, metadata={"help": "which method"})
    block_size: int = knob(4, "tokens per block, B", stored=True)

    def __post_init__(self) -> None:
        require_at_least(1, self, "method", "block_size")
        require(self.block_size <= MOST_BLOCK, f"method.block_size is {self.block_size}; use {MOST_BLOCK} or less")

    # -- settings ----------------------------------------------------------------------------------------------------

    @staticmethod
    def variant(values: Mapping[str, Any]) -> tuple[type[Method], dict[str, Any]]:
        """The class that a `[method]` section names, and its other keys."""
        from freda.methods import METHODS

        name = values.get("name", "self-refine")
        require(name in list(METHODS), f"method.name is {name!r}; use one of {', '.join(METHODS)}")
        return METHODS[name], {key: value for key, value in values.items() if key != "name"}

    def stored(self) -> dict[str, Any]:
        """The settings that decoding must repeat, for the model folder."""
        return {key.name: getattr(self, key.name) for key in dataclasses.fields(self) if key.metadata.get("stored")}

    @classmethod
    def restored(cls, section: Mapping[str, Any]) -> Self:
        """The method of a model folder, from the settings that `stored` gave."""
        keys = [key.name for key in dataclasses.fields(cls) if key.metadata.get("stored")]
        for key in keys:
            require(key in section, f"the freda section of config.json has no {key}; write the model again")
        restored: Self = build(cls, {key: section[key] for key in keys}, "method.")
        return restored

    # -- training ----------------------------------------------------------------------------------------------------

    @property
    def training_passes(self) -> int:
        """K: a training step runs 1 to K passes."""
        return 1

    def start_from(self, parts: Parts, proposer: Method | None, source: str) -> set[str]:
        """Make the parts of a model ready to be trained: which there are, and which of them learn.

        `proposer` is what `source`, the model to start from, was trained as; None when a checkpoint of this method is
        resumed, or when the model is new (`source` is empty). Returns the names of parts that are to start at random.
        """
        parts.scorer = None  # it judged the drafts of a backbone that is about to change
        return set()

    def labels(self, batch: Batch) -> Tensor:
        """Which tokens count in the loss, (R, L) bool: every token, the EOS fill too, to learn to close a block."""
        return batch.document >= 0

    def loss(self, parts: Parts, batch: Batch, step: Step) -> Tensor:
        """Training loss summed over the labels, with gradient."""
        raise NotImplementedError

    def validate(self, parts: Parts, batch: Batch, step: Step) -> dict[str, Tensor]:
        """Validation numbers by name, each summed over the labels; one is called `loss`."""
        raise NotImplementedError

    def flops(self, shape: ModelConfig, tokens: int, pairs: int, passes: int) -> float:
        """Useful operations of a training step over `tokens` clean tokens that see `pairs` pairs of query and key.

        A product of a weight with a token is 2 operations, 6 with its backward. Attention counts pairs of a query and a
        key it may see, 4 · heads · width operations forward and twice as many backward.
        """
        layers, head = (2.0 * count * tokens for count in (layer_parameters(shape), head_parameters(shape)))
        return self.work(Work(layers, 4.0 * shape.layers * shape.heads * shape.head_dim * pairs, head), passes)

    def work(self, one: Work, passes: int) -> float:
        """Operations of a step, from those of `one` forward of the clean half (with `one.head`, of the draft)."""
        return 3 * (2 * one.layers + 2 * one.attention + one.head)

    # -- decoding ----------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """How a block lies in a decoding forward."""
        return Layout(self.block_size, self.block_size)

    def check(self, parts: Parts, request: DecodeConfig, prompt: Sequence[int]) -> None:
        """Refuse a request that cannot be decoded."""
        top = parts.backbone.blank_id
        odd = next((token for token in prompt if not 0 <= token < top), None)
        require(odd is None, f"token id {odd} is BLANK or beyond the vocabulary; use ids 0 to {top - 1}")
        held = self.layout.held
        require(len(prompt) >= held, f"the prompt is empty; {self.name} decoding needs {held} token")

    def off_device(self, parts: Parts) -> str:
        """Why the GPU's decoding kernels cannot be used, or nothing."""
        return ""

    def limits(self, requests: Sequence[DecodeConfig]) -> Limits:
        """The most that these requests ask of a forward."""
        return Limits(width=1, swaps=0, samples=any(r.temperature > 0 for r in requests), draws=False)

    def rows(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """What the model sees of a draft: ids (N, B) and their weights α (N, B) against BLANK."""
        raise NotImplementedError

    def embed(self, backbone: Transformer, ids: Tensor, alpha: Tensor) -> Tensor:
        """Shown tokens as the backbone's input, (..., D)."""
        return soft_embedding(backbone, ids, alpha)

    def candidates(self, state: DecodeState, limits: Limits, count: int | None = None) -> Candidates:
        """What the next forward sees of every draft: here the draft itself. A method with several candidates gives
        `count` of them, or as many as are worth a forward."""
        return alone(*self.rows(state.draft))

    def choose(
        self, parts: Parts, state: DecodeState, candidates: Candidates, soft: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The candidate that is kept (R,), and the scores of all (R, C): ℓ + τ·s, without noise.

        `soft` (R, C·B, D) is the backbone's view of the candidates, where there are several.
        """
        return torch.zeros_like(state.begin), candidates.log_prob

    def predict(self, logits: Tensor, sampling: Sampling | None, position: Tensor) -> Prediction:
        """A token for every position of logits (R, B, V)."""
        return predict(logits, sampling, position)

    def update(self, draft: Draft, prediction: Prediction, rules: Rules) -> Draft:
        """The draft after a pass that gave `prediction`; branches on no value, so that a graph can capture it."""
        raise NotImplementedError

    def after_pass(self, state: DecodeState, logits: Tensor, limits: Limits) -> DecodeState:
        """The state after a pass, from the logits (R, B, V) of the chosen candidates."""
        prediction = self.predict(logits, state.sampling if limits.samples else None, state.position)
        draft = self.update(state.draft, prediction, state.rules)
        return state._replace(draft=draft, probs=logits.softmax(-1) if limits.draws else None)

    # -- drafts of packed rows ----------------------------------------------------------------------------------------

    def pass_logits(self, backbone: Transformer, clean: CleanHalf, draft: Draft) -> Logits:
        """One pass over the drafts of all blocks of packed rows, (R, L)."""
        ids, alpha = (part.view_as(clean.position) for part in self.rows(draft))
        return draft_logits(backbone, self.embed(backbone, ids, alpha), clean)

    @torch.no_grad()
    def teacher_forced(
        self, parts: Parts, batch: Batch, given: Tensor, passes: int, *, clean_draft: bool = False
    ) -> Iterator[Tensor]:
        """All blocks of packed rows decoded at once, each after its true prefix: the tokens (R, L) after every pass.

        The drafts begin blank, or with `clean_draft` as the true text, shown as surely as `given` tokens.
        """
        backbone, shape = parts.backbone, (-1, self.block_size)
        clean, tokens = clean_half(backbone, batch, self.block_size), batch.tokens.view(shape)
        draft = start(tokens, given.view(shape), backbone.blank_id)
        if clean_draft:
            draft = draft._replace(ids=tokens, prob=torch.ones_like(draft.prob))
        never = torch.full_like(draft.passes, NEVER, dtype=torch.float32)
        rules = Rules(torch.full_like(draft.passes, passes), never, draft.ids.new_empty(0))
        for _ in range(passes):
            logits = self.pass_logits(backbone, clean, draft)
            draft = self.update(draft, likeliest(logits, draft.ids.shape), rules)
            yield draft.ids.view_as(batch.tokens)


def visible_pairs(lengths: list[int], block_size: int) -> int:
    """Pairs of a token and a key it sees in clean documents of these lengths; drafts over them have as many.

    A clean token of block j sees j + 1 blocks; a drafted one j clean blocks and its own draft.
    """
    blocks = [-(-length // block_size) for length in lengths]
    return sum(block_size * block_size * count * (count + 1) // 2 for count in blocks)


def counted(batch: Batch, block_size: int) -> tuple[int, int]:
    """Tokens of packed rows without padding, and pairs as `visible_pairs` counts them."""
    real = batch.document >= 0
    return int(real.sum()), int(((batch.position // block_size + 1) * block_size * real).sum())
