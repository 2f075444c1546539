"""Where the slots of a block lie, what they show and what they predict: the paper's layout and the shifted one.

A block of B slots is B input tokens of a forward whose hidden states predict B tokens, the draft. A layout has two
parts, which `Geometry` keeps apart so that each can be ablated (M20):

    shift    A slot predicts its own token (the paper) or the next one, as in the autoregressive model. Shifted, the
             first slot shows the last known token, and each prediction is shown one slot further right in the next
             pass; the last one is never shown.
    context  Committed text sees ahead inside its blocks (the paper), or is causal, as in the autoregressive model. It
             then knows no block grid: the blocks of a request begin behind its prompt, wherever that ends.

    position          s    s+1  s+2  s+3  s+4                position   s    s+1  s+2  s+3  s+4
    paper     shows   d0   d1   d2   d3              shifted    shows   x_s  d1   d2   d3
              draft   d0   d1   d2   d3                         draft        d1   d2   d3   d4

Methods, loops and kernels ask the geometry and never test for the name of a layout. Tokens that a pass predicts are
called the draft; `begin` is the position of its first token, in the picture s or s+1.

Shapes: N blocks, B tokens per block, R rows, L tokens per row, C candidates.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from freda.data.loader import Batch

T = TypeVar("T", int, Tensor)


class Targets(NamedTuple):
    """What the slots of packed rows predict, each (R, L)."""

    ids: Tensor  # int64; without meaning where it is not counted
    counted: Tensor  # bool: there is such a token in the slot's document
    fill: Tensor  # bool: the token is one of the EOS that fill up a document


class Counted(NamedTuple):
    """The size of packed rows without padding, for the arithmetic of a step."""

    tokens: int
    clean_pairs: int  # of a clean token and a key it sees
    draft_pairs: int  # of a draft slot and a key it sees

    def times(self, count: int) -> Counted:
        """The size of so many of them."""
        return Counted(*(count * part for part in self))


class Geometry(NamedTuple):
    """How blocks lie in training and decoding."""

    block: int  # tokens that a pass predicts, B
    shift: int = 0  # 1: a slot predicts the next token
    causal: bool = False  # the context is causal
    drafts: bool = True  # False: there are no slots; a pass predicts behind the last committed token, as it stores it
    checked: bool = False  # a pass also runs the draft as text, and keeps as much of it as this text predicts

    @property
    def context(self) -> int:
        """Tokens of a block of committed text, inside which they see each other in both directions; 1 is causal."""
        return 1 if self.causal else self.block

    @property
    def slots(self) -> int:
        """Slots of one candidate."""
        return self.block if self.drafts else 0

    @property
    def held(self) -> int:
        """Tokens before a draft that are not stored when its first pass begins."""
        return self.shift

    @property
    def lead(self) -> int:
        """Known tokens at the head of a block's slots."""
        return self.shift if self.drafts else 0

    # -- decoding ----------------------------------------------------------------------------------------------------

    def begin(self, prompt: T) -> T:
        """The position of the first draft's first token, behind a prompt of so many tokens. The prompt's tokens from
        there on stand in the draft, given (M12); with causal context there are none."""
        return (prompt - self.shift) // self.context * self.context + self.shift

    def storable(self, known: int) -> int:
        """How many of `known` tokens are stored when a pass over the next block has been made."""
        return known - self.lead

    def shown(self, known: Tensor, ids: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """What the slots show, ids and α, of drafts `ids` with weights `alpha` (..., B) behind `known` (...) tokens."""
        if not self.lead:
            return ids, alpha
        head = known[..., None].expand(*ids.shape[:-1], 1)
        return (
            torch.cat([head, ids[..., :-1]], dim=-1),
            torch.cat([torch.ones_like(alpha[..., :1]), alpha[..., :-1]], dim=-1),
        )

    # -- packed rows, whose documents begin at the border of a block (M1) ----------------------------------------------

    def again(self, device: torch.device) -> Tensor:
        """Which tokens of a draft the next pass shows, (B,) bool."""
        return torch.arange(self.block, device=device) < self.block - self.lead

    def known(self, tokens: Tensor) -> Tensor:
        """The tokens of the first slots of packed rows (R, L): (N,)."""
        return tokens.reshape(-1, self.block)[:, 0]

    def first(self, position: Tensor) -> Tensor:
        """The position of the first slot of each slot's block, (R, L)."""
        rows, length = position.shape
        return position.view(rows, -1, self.block)[..., :1].expand(-1, -1, self.block).reshape(rows, length)

    def targets(self, batch: Batch) -> Targets:
        """What each slot predicts: its own token, or the next one of its document."""
        real = batch.document >= 0
        if not self.shift:
            return Targets(batch.tokens, real, batch.fill)
        ids, document, fill = (part.roll(-1, dims=1) for part in (batch.tokens, batch.document, batch.fill))
        counted = real & (document == batch.document)
        counted[:, -1] = False
        return Targets(ids, counted, fill)

    def by_slot(self, tokens: Tensor) -> Tensor:
        """What belongs to the tokens of packed rows (R, L), at the slots that predict them; 0 where there is none."""
        return F.pad(tokens[:, self.shift :], (0, self.shift))

    def padding(self, prompt: int) -> int:
        """Places to leave free before a document in a row, so that a block begins where decoding begins one behind a
        prompt of so many tokens."""
        return (self.shift - self.begin(prompt)) % self.block

    def by_token(self, slots: Tensor) -> Tensor:
        """What belongs to the slots of packed rows (..., L), at the tokens that they predict; -1 where no slot does."""
        return F.pad(slots[..., : slots.shape[-1] - self.shift], (self.shift, 0), value=-1)

    def size(self, lengths: list[int]) -> Counted:
        """The size of documents of these lengths."""
        blocks = [-(-length // self.block) for length in lengths]
        drafts = sum(self.block**2 * count * (count + 1) // 2 for count in blocks)
        causal = sum(length * (length + 1) // 2 for length in lengths)
        return Counted(sum(lengths), causal if self.causal else drafts, drafts)

    def size_of(self, batch: Batch) -> Counted:
        """The size of packed rows, padding left out."""
        real = batch.document >= 0
        clean, drafts = ((batch.position // n + 1) * n * real for n in (self.context, self.block))
        return Counted(int(real.sum()), int(clean.sum()), int(drafts.sum()))


NEXT_TOKEN = Geometry(1, shift=1, causal=True, drafts=False)  # autoregressive


def next_tokens(batch: Batch) -> Targets:
    """What an autoregressive model, or the clean half of a causal context, predicts: all but the EOS fill (M1)."""
    targets = NEXT_TOKEN.targets(batch)
    return targets._replace(counted=targets.counted & ~targets.fill)
