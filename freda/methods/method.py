"""What a method is: a frozen value that owns its settings, its loss, its decoding rule, its arithmetic and its sweep.

A method is a subclass of `Method` whose fields are the keys of the `[method]` section. Training calls `start_from`,
`labels`, `loss`, `validate` and `flops`; decoding calls `candidates`, `choose`, `predict` and `settle` around each
forward; a sweep varies the settings that `axes` names. Adding a method is a file in this folder and a line in
`__init__`: nothing outside this folder asks which method it has.

`Method` itself has the defaults of a block method in the paper's layout; `blocks.BlockMethod` has the choice of one.
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
    merge,
    predict,
    soft_embedding,
    start,
)
from freda.methods.geometry import Counted, Geometry
from freda.methods.state import DecodeState, Limits, Seen
from freda.model.config import AdapterConfig, ModelConfig, head_parameters, layer_parameters
from freda.model.head import Logits
from freda.model.parts import Parts
from freda.model.transformer import Transformer
from freda.sections import build, knob, require_at_least

NEVER = 2.0  # a commitment threshold that no probability reaches
MOST_BLOCK = 2**12  # tokens; attention within a block is quadratic


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
    counts: Sequence[int] = ()  # `Method.counts` of the whole step; none: these rows are all there is

    def counters(self, tokens: Tensor) -> tuple[int, int, Tensor, Tensor]:
        """Counters of the noise of packed tokens (R, L): seed, step, row (R, 1) and place (L,)."""
        row = self.row.to(tokens.device)[:, None]
        return self.seed, self.step, row, torch.arange(tokens.shape[1], device=tokens.device)


class Work(NamedTuple):
    """Operations of one forward over the clean tokens of a step, by what they are."""

    layers: float
    clean: float  # attention of the clean half
    draft: float  # attention of a draft over the clean half
    head: float
    learnt: int = 3  # a product with a weight in a step with gradient, in forwards: 2 where the weight is frozen
    text: bool = True  # whether gradient flows through the clean half

    @property
    def one_pass(self) -> float:
        """A pass over the draft half, without gradient."""
        return self.layers + self.draft + self.head

    @property
    def clean_step(self) -> float:
        """The clean half of a step, with its gradient if there is one."""
        return self.learnt * self.layers + 3 * self.clean if self.text else self.layers + self.clean

    @property
    def draft_step(self) -> float:
        """The pass with gradient; keys and values of text without one need none."""
        return self.learnt * (self.layers + self.head) + (3 if self.text else 2) * self.draft


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train and decode; its fields are its settings."""

    axes: ClassVar[tuple[str, ...]] = ("passes", "threshold")  # settings of decoding that change what it writes
    refines: ClassVar[bool] = False  # may a later pass change a token? A sweep then measures how stable drafts are
    streams: ClassVar[int] = 2  # token streams with gradient for each clean token: the clean half and the draft
    trains: ClassVar[bool] = True  # False: a rule that decodes models of other methods

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
        trained = [known for known, kind in METHODS.items() if kind.trains]
        odd = f"method.name is {name!r}, which decodes models of other methods and trains none"
        require(name in trained, f"{odd}; use one of {', '.join(trained)}")
        return METHODS[name], {key: value for key, value in values.items() if key != "name"}

    @classmethod
    def like(cls, own: Method, given: Mapping[str, Any]) -> Self:
        """This method for a model that was trained as `own`: with the stored settings that both have, and those `given`
        in addition, which must not contradict them."""
        keys = {key.name for key in dataclasses.fields(cls) if key.init}
        stored = [key.name for key in dataclasses.fields(own) if key.metadata.get("stored")]
        shared = {name: getattr(own, name) for name in stored if name in keys}
        for name in given.keys() & shared.keys():
            odd = f"method.{name} is {given[name]}, but the model was trained with {shared[name]}"
            require(given[name] == shared[name], f"{odd}; omit it")
        made: Self = build(cls, {**given, **shared}, "method.")
        return made

    def stored(self) -> dict[str, Any]:
        """The settings that decoding must repeat, for the model folder, without those that are what a folder means that
        does not have them."""
        keys = [key for key in dataclasses.fields(self) if key.metadata.get("stored")]
        values = {key.name: (getattr(self, key.name), key.metadata.get("absent", ...)) for key in keys}
        return {name: value for name, (value, absent) in values.items() if value != absent}

    @classmethod
    def restored(cls, section: Mapping[str, Any]) -> Self:
        """The method of a model folder, from the settings that `stored` gave."""
        values = {}
        for key in (key for key in dataclasses.fields(cls) if key.metadata.get("stored")):
            there = key.name in section or "absent" in key.metadata
            require(there, f"the freda section of config.json has no {key.name}; write the model again")
            values[key.name] = section.get(key.name, key.metadata.get("absent"))
        restored: Self = build(cls, values, "method.")
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

    def check_adapter(self, rows: str) -> None:
        """Refuse to train an adapter on these rows."""

    def labels(self, batch: Batch) -> Tensor:
        """Which slots count in the loss, (R, L) bool: all that predict a token, the EOS fill too, to learn to close a
        block."""
        return self.geometry.targets(batch).counted

    def counts(self, batch: Batch) -> list[int]:
        """What the loss of a step is divided by, for these rows: the labels, and whatever else the method counts."""
        return [int(self.labels(batch).sum())]

    def loss(self, parts: Parts, batch: Batch, step: Step) -> Tensor:
        """Training loss summed over the labels, with gradient."""
        raise NotImplementedError

    def validate(self, parts: Parts, batch: Batch, step: Step) -> dict[str, Tensor]:
        """Validation numbers by name, each summed over the labels, or with a count of its own, (2,): sum and count. One
        is called `loss`."""
        raise NotImplementedError

    def flops(self, shape: ModelConfig, size: Counted, passes: int, adapter: AdapterConfig | None = None) -> float:
        """Useful operations of a training step over packed rows of this size, as `geometry` counts them.

        A product of a weight with a token is 2 operations, 6 with its backward, 4 where an adapter is trained: its own
        products, some percent, are not counted. Attention counts pairs of a query and a key it may see, 4 · heads ·
        width operations forward and twice as many backward.
        """
        layers, head = (2.0 * count * size.tokens for count in (layer_parameters(shape), head_parameters(shape)))
        pair = 4.0 * shape.layers * shape.heads * shape.head_dim
        one = Work(layers, pair * size.clean_pairs, pair * size.draft_pairs, head)
        if adapter is not None:
            one = one._replace(learnt=2, text=adapter.rows == "all")
        return self.work(one, passes)

    def work(self, one: Work, passes: int) -> float:
        """Operations of a step, from those of `one` forward: here both halves, with gradient."""
        return one.clean_step + one.draft_step

    # -- decoding ----------------------------------------------------------------------------------------------------

    @property
    def geometry(self) -> Geometry:
        """How blocks lie in training and decoding."""
        return Geometry(self.block_size)

    def check(self, parts: Parts, request: DecodeConfig, prompt: Sequence[int]) -> None:
        """Refuse a request that cannot be decoded."""
        top = parts.backbone.blank_id
        odd = next((token for token in prompt if not 0 <= token < top), None)
        require(odd is None, f"token id {odd} is BLANK or beyond the vocabulary; use ids 0 to {top - 1}")
        empty = f"the prompt is empty, and {self.name} decoding here predicts behind a known token"
        require(len(prompt) >= self.geometry.held, f"{empty}; begin with one, BOS if the tokenizer has it")

    def off_device(self, parts: Parts) -> str:
        """Why the GPU's decoding kernels cannot be used, or nothing."""
        return ""

    def limits(self, requests: Sequence[DecodeConfig]) -> Limits:
        """The most that these requests ask of a forward."""
        return Limits(width=1, swaps=0, samples=any(r.temperature > 0 for r in requests), draws=False)

    def rows(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """What the next pass sees of a draft: ids (N, B) and their weights α (N, B) against BLANK. In which slots they
        are shown is a matter of the geometry."""
        raise NotImplementedError

    def embed(self, backbone: Transformer, ids: Tensor, alpha: Tensor) -> Tensor:
        """Shown tokens as the backbone's input, (..., D)."""
        return soft_embedding(backbone, ids, alpha)

    def candidates(self, state: DecodeState, limits: Limits, count: int | None = None) -> Candidates:
        """What the next forward sees of every draft: here the draft itself. A method with several candidates gives
        `count` of them, or as many as are worth a forward."""
        return alone(*self.rows(state.draft))

    def choose(
        self, parts: Parts, state: DecodeState, candidates: Candidates, soft: Tensor | None, text: Prediction | None
    ) -> tuple[Tensor, Tensor]:
        """The candidate that is kept (R,), and the scores of all (R, C): ℓ + τ·s, without noise.

        `soft` (R, C·B, D) is the backbone's view of the candidates, where there are several; `text` (R, B) what drafts
        predict that were run as text, where they are checked.
        """
        return torch.zeros_like(state.begin), candidates.log_prob

    def predict(self, logits: Tensor, sampling: Sampling | None, position: Tensor) -> Prediction:
        """A token for every position of logits (R, B, V)."""
        return predict(logits, sampling, position)

    def update(self, draft: Draft, prediction: Prediction, rules: Rules) -> Draft:
        """The draft after a pass that gave `prediction`; branches on no value, so that a graph can capture it."""
        raise NotImplementedError

    def settle(self, state: DecodeState, prediction: Prediction, seen: Seen, blank_id: int) -> tuple[Draft, Draft]:
        """The drafts after a pass, of which `closed` tokens are final, and those that the next pass goes on with: here
        the same, or blank ones where a block has closed."""
        draft = self.update(state.draft, prediction, state.rules)
        return draft, merge(draft.closed == 0, draft, start(draft.ids, torch.zeros_like(draft.given), blank_id))

    def checks(self, draft: Draft) -> Tensor:
        """Which drafts the next pass runs as text, too, to be kept as far as it predicts them: (N,) bool."""
        return torch.zeros_like(draft.closed, dtype=torch.bool)

    # -- drafts of packed rows ----------------------------------------------------------------------------------------

    def pass_logits(self, backbone: Transformer, clean: CleanHalf, draft: Draft) -> Logits:
        """One pass over the drafts of all blocks of packed rows, (R, L)."""
        shown = self.geometry.shown(clean.known, *self.rows(draft))
        ids, alpha = (part.view_as(clean.position) for part in shown)
        return draft_logits(backbone, self.embed(backbone, ids, alpha), clean)

    def packed_rows(self, backbone: Transformer, clean: CleanHalf, ids: Tensor, alpha: Tensor) -> Tensor:
        """C drafts of all blocks of packed rows, (R, C, L), as the input of one forward, (R, C·L, D)."""
        rows, count, length = ids.shape
        blocks = (part.reshape(rows, count, -1, self.block_size) for part in (ids, alpha))
        shown = self.geometry.shown(clean.known.view(rows, 1, -1), *blocks)
        return self.embed(backbone, *(part.reshape(rows, count * length) for part in shown))

    @torch.no_grad()
    def teacher_forced(
        self, parts: Parts, batch: Batch, given: Tensor, passes: int, *, clean_draft: bool = False
    ) -> Iterator[Tensor]:
        """All blocks of packed rows decoded at once, each after its true prefix: the tokens (R, L) after every pass.

        The drafts begin blank, or with `clean_draft` as the true text, shown as surely as `given` tokens.
        """
        backbone, geometry = parts.backbone, self.geometry
        clean = clean_half(backbone, batch, geometry)
        tokens, given = (geometry.by_slot(part).view(-1, self.block_size) for part in (batch.tokens, given))
        draft = start(tokens, given, backbone.blank_id)
        if clean_draft:
            draft = draft._replace(ids=tokens, prob=torch.ones_like(draft.prob))
        never = torch.full_like(draft.passes, NEVER, dtype=torch.float32)
        rules = Rules(torch.full_like(draft.passes, passes), never, draft.ids.new_empty(0))
        for _ in range(passes):
            logits = self.pass_logits(backbone, clean, draft)
            draft = self.update(draft, likeliest(logits, draft.ids.shape), rules)
            yield geometry.by_token(draft.ids.view_as(batch.tokens))

    def choices(
        self, parts: Parts, batch: Batch, given: Tensor, passes: int, *, width: int, swaps: int
    ) -> Iterator[Tensor]:
        """As `teacher_forced`, with what a pass makes of every draft that it might be shown: tokens (R, C, L), of which
        the first go on. Here a pass has one draft."""
        for made in self.teacher_forced(parts, batch, given, passes):
            yield made[:, None]
