"""The forwards of decoding, made by the Transformer itself: on a CPU, in any precision, for any method and model.

The plain twin of `packed.PackedModel`: the same interface, over keys and values that are gathered from the pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from freda.decode.pages import BlockTable, ForwardShape, PagedCache, Pages, Pieces
from freda.methods.draft import Prediction, Sampling
from freda.methods.method import Method
from freda.model.attention import Tokens, clean_tokens, concat, draft_tokens, make_mask
from freda.model.parts import Parts
from freda.model.transformer import Forward, KeysValues


class Ran(NamedTuple):
    """A forward that was made: what there was, and what came out."""

    out: Forward
    position: Tensor  # (R, T)
    tokens: Tokens  # (R, T) each
    keys: Tokens  # (R, K) each: of what is stored, and of the tokens
    past: list[KeysValues]
    packed: Tensor  # (R, T): which packed token each is
    committed: int  # tokens of each row that belong to the block to commit


class PlainModel:
    """A model over the pages of an engine, decoded by one method."""

    graphs = False

    def __init__(self, parts: Parts, method: Method, pages: Pages) -> None:
        self.parts, self.model, self.method, self.pages = parts, parts.backbone, method, pages

    def buffers(self, shape: ForwardShape, long: bool) -> dict[str, Ran]:
        """Where the last forward is kept."""
        return {}

    def run(
        self,
        given: tuple[Tensor, Tensor],
        where: Tensor,
        texts: BlockTable,
        shape: ForwardShape,
        buffers: dict[str, Ran],
        pieces: Pieces | None = None,
    ) -> None:
        """All layers over blocks of tokens `given` as (ids, α), each (P · B,), and over pieces of prompts; prompts and
        blocks to commit go into the pages."""
        if pieces is not None:
            self.fill(pieces, shape, buffers)
        block, device = shape.block, where.device
        commits = ((where[:, :1] >= 0) & (texts.pending > 0)[:, None]).expand(-1, block)  # (R, B)
        first = 0 if shape.blocks == 1 or bool(commits.any()) else 1  # a block to commit has no place if there is none
        where, place = where[:, first:], torch.arange(block, device=device)
        index = (where.clamp_min(0).long()[..., None] * block + place).flatten(1)  # (R, T)
        number = torch.arange(first, shape.blocks, device=device).repeat_interleave(block).expand_as(index)
        further = torch.where(number > 0, texts.pending[:, None], 0)
        position = texts.stored[:, None] + further + place.repeat(where.shape[1])
        here = torch.where(number > 0, (where >= 0).repeat_interleave(block, dim=1), commits.repeat(1, where.shape[1]))
        document, committed = torch.where(here, 0, -1), block * (1 - first)
        text, draft = (slice(0, committed), slice(committed, None))
        tokens = concat(
            clean_tokens(document[:, text], position[:, text], block),
            draft_tokens(document[:, draft], position[:, draft], block, number[:, draft]),
        )
        cache = PagedCache(self.pages, texts.table, texts.stored)
        keys, past = concat(cache.tokens(block), tokens), cache.past()
        ids, alpha = (part[index] for part in given)
        drafted = self.method.embed(self.model, ids[:, draft], alpha[:, draft])
        x = torch.cat([self.model.embed_tokens(ids[:, text]), drafted], dim=1)
        out: Forward = self.model(x, position, make_mask(tokens, keys, self.model.backend), past)
        buffers["ran"] = Ran(out, position, tokens, keys, past, index, committed)
        cache.write(out.new, position[:, text], commits[:, text])

    def _packed(self, hidden: Tensor, ran: Ran) -> Tensor:
        """Hidden states of a forward's rows, (R, T, D), by packed token."""
        index = ran.packed[:, -hidden.shape[1] :]
        packed = hidden.new_zeros(int(ran.packed.max()) + 1, hidden.shape[-1])
        here = ran.tokens.document[:, -hidden.shape[1] :] >= 0
        packed[index[here]] = hidden[here]
        return packed

    def soft(self, tokens: Tensor, buffers: dict[str, Ran]) -> Tensor:
        """What the scorer sees of `tokens`, which number those of the last forward."""
        ran, scorer = buffers["ran"], self.parts.scorer
        if scorer is None or scorer.last_layer is None:
            return self._packed(ran.out.hidden, ran)[tokens]
        begin = ran.committed
        drafts = Tokens(*(part[:, begin:] for part in ran.tokens))
        mask = make_mask(drafts, ran.keys, self.model.backend)
        new = KeysValues(*(part[:, :, :begin] for part in ran.out.new[-1]))
        seen = KeysValues(*(torch.cat(pair, dim=2) for pair in zip(ran.past[-1], new, strict=True)))
        out = ran.out._replace(hidden=ran.out.hidden[:, begin:], beneath=ran.out.beneath[:, begin:])
        return self._packed(scorer.soft_channel(self.model, out, ran.position[:, begin:], mask, seen), ran)[tokens]

    def predict(
        self,
        tokens: Tensor,
        buffers: dict[str, Ran],
        sampling: Sampling | None = None,
        position: Tensor | None = None,
    ) -> Prediction:
        """The method's choice for each of `tokens` (N, B)."""
        assert position is not None
        return self.method.predict(self.logits(tokens, buffers), sampling, position)

    def logits(self, tokens: Tensor, buffers: dict[str, Ran]) -> Tensor:
        """All logits of `tokens` (N, B), in fp32."""
        ran = buffers["ran"]
        return self.model.logits(self._packed(ran.out.hidden, ran)[tokens])

    def fill(self, pieces: Pieces, shape: ForwardShape, buffers: dict[str, Ran]) -> None:
        """Keys and values of pieces of prompts into the pages, all pieces side by side."""
        real, table = pieces.position >= 0, pieces.table
        rows, piece = torch.unique(pieces.row[real], return_inverse=True)
        begin = torch.full_like(rows, 2**30).scatter_reduce(0, piece, pieces.position[real], "amin")
        place = (pieces.position[real] - begin[piece]).long()
        sizes = (len(rows), int(place.max()) + 1)
        ids = torch.zeros(sizes, dtype=torch.int64, device=table.device)
        ids[piece, place] = pieces.ids[real].long()
        there = torch.zeros(sizes, dtype=torch.bool, device=table.device)
        there[piece, place] = True
        position = begin[:, None] + torch.arange(sizes[1], device=table.device)
        cache = PagedCache(self.pages, table[rows.long()], begin)
        tokens = clean_tokens(torch.where(there, 0, -1), position, shape.block)
        mask = make_mask(tokens, concat(cache.tokens(shape.block), tokens), self.model.backend)
        cache.write(self.model(self.model.embed_tokens(ids), position, mask, cache.past()).new, position, there)
