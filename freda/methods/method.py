"""What a method is: a module with these functions, passed around as a value.

`train` calls `labels`, `loss` and `validate`; `decode` calls `rows` and `update` around each forward. A method sees its
own section of the config and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from freda.data.loader import Batch
from freda.methods.config import MethodConfig
from freda.methods.draft import Draft, Prediction, Rules
from freda.model.transformer import Transformer


def alone(numbers: Tensor) -> Tensor:
    """`Step.total` where one process has all rows of a group."""
    return numbers


class Step(NamedTuple):
    """Where training stands, for one group of rows: the key of all its noise (M6)."""

    seed: int
    step: int
    row: Tensor  # (R,) int64: row numbers within the step's whole batch
    progress: float  # share of the run that is done, 0 to 1
    passes: int  # t: how many passes this group runs
    total: Callable[[Tensor], Tensor] = alone
    """Counts (n,) of these rows to those of the whole group, of which another process may have the rest. All call it
    together, as often; it stays on the device."""


class Method(Protocol):
    """The functions of a method's module."""

    DRAFTS: bool
    """True: a forward carries the rows of a draft and predicts at them. False: it predicts after the last token."""

    REFINES: bool
    """True: training runs `Step.passes` passes. False: it has one, and `Step.passes` means nothing."""

    SCORES: bool
    """True: from the second pass on, a scorer chooses among several candidates of the draft."""

    def labels(self, batch: Batch, config: MethodConfig) -> Tensor:
        """Which tokens count in the loss, (R, L) bool."""

    def loss(self, model: Transformer, batch: Batch, config: MethodConfig, step: Step) -> Tensor:
        """Training loss summed over the labels, with gradient."""

    def validate(self, model: Transformer, batch: Batch, config: MethodConfig, step: Step) -> dict[str, Tensor]:
        """Named validation numbers, each summed over the labels."""

    def rows(self, draft: Draft, config: MethodConfig) -> tuple[Tensor, Tensor]:
        """What the model sees of a draft: ids (N, B) and their weights α (N, B) against BLANK."""

    def update(self, draft: Draft, prediction: Prediction, rules: Rules) -> Draft:
        """The draft after a pass that gave `prediction`."""


def block_size(method: Method, config: MethodConfig) -> int:
    """Tokens per block in decoding; a method that does not draft makes one token at a time."""
    return config.block_size if method.DRAFTS else 1
