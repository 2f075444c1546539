"""The forwards of decoding, made by the Transformer itself: on a CPU, in any precision, for any method and model.

The plain twin of `packed.PackedModel`: the same interface, over keys and values that are gathered from the pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from freda.decode.pages import BlockPlaces, BlockTable, ForwardShape, PagedCache, Pages, Pieces
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
    places: Tensor  # (R, T): which packed token each is
    committed: int  # tokens of each row that belong to the block to commit


class PlainModel:
    """A model over the pages of an engine, decoded by one method."""

    graphs = False

    def __init__(self, parts: Parts, method: Method, pages: Pages) -> None:
        self.parts, self.model, self.method, self.pages = parts, parts.backbone, method, pages

    def buffers(self, shape: ForwardShape, long: bool) -> list[Ran]:
        """Where the last forward is kept, in one part or two."""
        return []

    def run(
        self,
        given: tuple[Tensor, Tensor],
        blocks: BlockPlaces,
        texts: BlockTable,
        shape: ForwardShape,
        buffers: list[Ran],
        pieces: Pieces | None = None,
    ) -> None:
        """As `ForwardBackend.run` says; prompts first, by themselves."""
        if pieces is not None:
            self.fill(pieces, shape, buffers)
        where, behind = blocks
        commits = (where[:, :1] >= 0) & (texts.pending > 0)[:, None]
        where = torch.where(torch.cat([commits, where[:, 1:] >= 0], dim=1), where, -1)
        buffers.clear()
        for rows in _groups((where >= 0).sum(-1)):
            some = BlockTable(*(part[rows] for part in texts))
            buffers.append(self._ran(given, BlockPlaces(where[rows], behind[rows]), some, shape))

    def _ran(self, given: tuple[Tensor, Tensor], blocks: BlockPlaces, texts: BlockTable, shape: ForwardShape) -> Ran:
        """A forward over some rows, side by side."""
        device, block = texts.stored.device, shape.block
        kept = (blocks.where >= 0).any(0)  # numbers of blocks that some have
        where, place = blocks.where[:, kept], torch.arange(block, device=device)
        numbers = torch.arange(len(kept), device=device)[kept]
        index = (where.clamp_min(0).long()[..., None] * block + place).flatten(1)  # (R, T)
        number = numbers.repeat_interleave(block).expand_as(index)
        first = (texts.stored[:, None] + blocks.behind[:, kept]).repeat_interleave(block, dim=1)
        position = first + place.repeat(len(numbers))
        here = (where >= 0).repeat_interleave(block, dim=1)
        document, committed = torch.where(here, 0, -1), block * int(kept[0])
        text, draft = slice(0, committed), slice(committed, None)
        tokens = concat(
            clean_tokens(document[:, text], position[:, text], shape.context),
            draft_tokens(document[:, draft], first[:, draft], number[:, draft]),
        )
        cache = PagedCache(self.pages, texts.table, texts.stored)
        keys, past = concat(cache.tokens(shape.context), tokens), cache.past()
        ids, alpha = (part[index] for part in given)
        drafted = self.method.embed(self.model, ids[:, draft], alpha[:, draft])
        x = torch.cat([self.model.embed_tokens(ids[:, text]), drafted], dim=1)
        out: Forward = self.model(x, position, make_mask(tokens, keys, self.model.backend), past)
        cache.write(out.new, position[:, text], here[:, text])
        return Ran(out, position, tokens, keys, past, index, committed)

    def soft(self, tokens: Tensor, buffers: list[Ran]) -> Tensor:
        """What the scorer sees of `tokens`, which number those of the last forward."""
        return self._packed(map(self._seen_by_scorer, buffers), buffers, tokens)

    def _seen_by_scorer(self, ran: Ran) -> Tensor:
        """Of the tokens of a forward, (R, T, D); zeros for blocks to commit, if the scorer has a layer of its own."""
        begin, scorer = ran.committed, self.parts.scorer
        if scorer is None or scorer.last_layer is None:
            return ran.out.hidden
        drafts = Tokens(*(part[:, begin:] for part in ran.tokens))
        mask = make_mask(drafts, ran.keys, self.model.backend)
        new = KeysValues(*(part[:, :, :begin] for part in ran.out.new[-1]))
        seen = KeysValues(*(torch.cat(pair, dim=2) for pair in zip(ran.past[-1], new, strict=True)))
        out = ran.out._replace(hidden=ran.out.hidden[:, begin:], beneath=ran.out.beneath[:, begin:])
        found = scorer.soft_channel(self.model, out, ran.position[:, begin:], mask, seen)
        return F.pad(found, (0, 0, begin, 0))

    def predict(
        self,
        tokens: Tensor,
        buffers: list[Ran],
        sampling: Sampling | None = None,
        position: Tensor | None = None,
    ) -> Prediction:
        """The method's choice for each of `tokens` (N, B)."""
        assert position is not None
        return self.method.predict(self.logits(tokens, buffers), sampling, position)

    def logits(self, tokens: Tensor, buffers: list[Ran]) -> Tensor:
        """All logits of `tokens` (N, B), in fp32."""
        return self.model.logits(self._packed((ran.out.hidden for ran in buffers), buffers, tokens))

    def _packed(self, hidden: Iterable[Tensor], ran: Sequence[Ran], tokens: Tensor) -> Tensor:
        """What belongs to the rows of forwards, (R, T, D) each, by packed token, of `tokens`; of padding, anything."""
        weight = self.model.embed_tokens.weight
        packed = weight.new_zeros(int(max([tokens.max(), *(one.places.max() for one in ran)])) + 1, weight.shape[1])
        for values, one in zip(hidden, ran, strict=True):
            here = one.tokens.document >= 0
            packed[one.places[here]] = values[here].to(packed)
        return packed[tokens]

    def fill(self, pieces: Pieces, shape: ForwardShape, buffers: list[Ran]) -> None:
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
        tokens = clean_tokens(torch.where(there, 0, -1), position, shape.context)
        keys = concat(cache.tokens(shape.context), tokens)
        mask = make_mask(tokens, keys, self.model.backend, drafts=False)
        cache.write(self.model(self.model.embed_tokens(ids), position, mask, cache.past()).new, position, there)


def _groups(counts: Tensor) -> list[Tensor]:
    """Rows with so many blocks each (R,), those without any left out: all side by side, or few and many apart, if that
    saves a quarter of the tokens."""
    rows = torch.argsort(counts)[int((counts == 0).sum()) :]
    if len(rows) == 0:
        return []
    sizes, first = counts[rows], torch.arange(len(rows), device=rows.device)
    tokens = first * sizes[(first - 1).clamp_min(0)] + (len(rows) - first) * sizes[-1]  # if the second begins here
    cut = int(tokens.argmin())
    return [rows] if 4 * tokens[cut] > 3 * tokens[0] else [rows[:cut], rows[cut:]]
