"""Keys and values of committed text, in pages that requests share where their texts begin alike.

A page holds `page_size` tokens, whole blocks of their context. The keys and values of committed text depend on the text
up to the end of their block and on nothing else, so a full page is identified by the hash of all tokens up to its end
(and the size of these blocks, which decides who sees whom; causal text has blocks of one token). A request whose prompt
begins with known pages uses them instead of computing them. Pages that no request uses are kept until their space is
needed; the least recently used go first.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from freda.errors import require
from freda.model.attention import Tokens, stored_tokens
from freda.model.transformer import KeysValues, Transformer

MOST_TOKENS = 65_536  # on a CPU, unless the number of pages is given
PIECE_TILE = 64  # tokens of a prompt whose attention is computed together
FREE_PART = 0.8  # of a GPU's free memory, at most; prompts and graphs need the rest


def page_count(model: Transformer, page_size: int, max_batch: int, needed: int) -> int:
    """Pages of an engine: for `max_batch` sequences of `needed` pages each, or for fewer, if memory is short."""
    config, weight = model.config, model.embed_tokens.weight
    most = MOST_TOKENS // page_size
    if weight.is_cuda:
        token_size = 2 * config.layers * config.kv_heads * config.head_dim * weight.element_size()
        free, _ = torch.cuda.mem_get_info(weight.device)
        free += torch.cuda.memory_reserved(weight.device) - torch.cuda.memory_allocated(weight.device)
        free -= sum(part.numel() * part.element_size() for part in model.parameters())  # packed, they are held twice
        most = int(FREE_PART * free) // (page_size * token_size)
    return max(needed, min(most, max_batch * needed)) + 1


class Pages:
    """The storage of an engine: `count` pages for all requests together."""

    def __init__(self, model: Transformer, count: int, page_size: int) -> None:
        require(count >= 1, f"pages is {count}; use 1 or more")
        config, weight = model.config, model.embed_tokens.weight
        # One page more: padding is written there, so that every row writes the same number of tokens.
        shape = (count + 1, config.kv_heads, page_size, config.head_dim)
        self.storage = weight.new_zeros(config.layers, 2, *shape)
        self.layers = [KeysValues(self.storage[n, 0], self.storage[n, 1]) for n in range(config.layers)]
        self.count, self.page_size, self.spare = count, page_size, count
        self._free = list(range(count))[::-1]
        self._users: dict[int, int] = {}  # page: requests that use it
        self._known: dict[bytes, int] = {}  # hash of a text up to the end of a page: that page
        self._hash: dict[int, bytes] = {}  # the inverse of `_known`
        self._unused: OrderedDict[int, None] = OrderedDict()  # known pages that nobody uses, longest unused first

    @property
    def available(self) -> int:
        """Pages that a new request could get."""
        return len(self._free) + len(self._unused)

    def needed(self, tokens: int) -> int:
        """Pages of a text of so many tokens."""
        return -(-tokens // self.page_size)

    def first_unknown(self, keys: Sequence[bytes]) -> bytes | None:
        """The first of a text's `page_keys` whose page is not stored; None if all are."""
        return next((key for key in keys if key not in self._known), None)

    def reserve(self, keys: Sequence[bytes], tokens: int) -> tuple[list[int], int] | None:
        """Pages for `tokens` tokens of a text with these `page_keys`, and how many tokens are stored there already.

        None if there are not enough pages now.
        """
        shared = [self._known[key] for key in itertools.takewhile(self._known.__contains__, keys)]
        missing = self.needed(tokens) - len(shared)
        if missing > self.available - sum(page in self._unused for page in shared):
            return None
        for page in shared:
            self._unused.pop(page, None)
            self._users[page] = self._users.get(page, 0) + 1
        table = shared + [self._take() for _ in range(missing)]
        return table, len(shared) * self.page_size

    def _take(self) -> int:
        if not self._free:
            page, _ = self._unused.popitem(last=False)
            del self._known[self._hash.pop(page)]
            self._free.append(page)
        page = self._free.pop()
        self._users[page] = 1
        return page

    def learn(self, table: Sequence[int], keys: Sequence[bytes]) -> None:
        """Remember the first pages of a table, which are full of a text with these `page_keys`."""
        for key, page in zip(keys, table, strict=False):
            if key not in self._known and page not in self._hash:
                self._known[key], self._hash[page] = page, key

    def restore(self, tables: Sequence[Sequence[int]]) -> None:
        """Recount: these tables are in use, all other pages are free, and no prefix is remembered."""
        self._users = dict(Counter(page for table in tables for page in table))
        self._free = [page for page in range(self.count)[::-1] if page not in self._users]
        self._known, self._hash, self._unused = {}, {}, OrderedDict()

    def release(self, table: Sequence[int]) -> None:
        """Give back the pages of a request."""
        for page in reversed(table):  # the end of a text is the first to be forgotten
            self._users[page] -= 1
            if self._users[page] == 0:
                del self._users[page]
                if page in self._hash:
                    self._unused[page] = None
                else:
                    self._free.append(page)


def page_keys(text: Sequence[int], page_size: int, context: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """The hash of a text up to the end of each of its full pages; `known` are the first of them."""
    keys, step = list(known), 8 * page_size
    rest = array("q", text[len(keys) * page_size :]).tobytes()
    key = keys[-1] if keys else context.to_bytes(4, "little")
    for begin in range(0, len(rest) - step + 1, step):
        key = hashlib.blake2b(key + rest[begin : begin + step], digest_size=16).digest()
        keys.append(key)
    return keys


class ForwardShape(NamedTuple):
    """The tokens of a forward: blocks of requests, packed, and prompts that ride along."""

    rows: int  # requests, R
    block: int  # tokens of a block, B
    blocks: int  # most blocks of one request, J: number 0 is to be committed, the others are drafts
    packed: int  # blocks in the forward, P; R · J: every block has a place of its own; 0: prompts alone
    prompts: int = 0  # tokens of prompts, T, behind the blocks
    causal: bool = False  # committed text is causal, not bidirectional inside blocks

    @property
    def tokens(self) -> int:
        """Tokens of the forward."""
        return self.packed * self.block + self.prompts

    @property
    def context(self) -> int:
        """Tokens of a block of committed text."""
        return 1 if self.causal else self.block

    @property
    def dense(self) -> bool:
        """Whether every block of every request has a place of its own."""
        return self.packed == self.rows * self.blocks


class BlockTable(NamedTuple):
    """Where the committed text of R requests lies, on the device."""

    table: Tensor  # (R, most pages) int32
    stored: Tensor  # (R,) int32: committed tokens in the pages
    pending: Tensor  # (R,) int32: tokens that the next forward runs as text, and stores: a block or 0


class BlockPlaces(NamedTuple):
    """Where the blocks of R requests lie in a forward, and in their texts: number 0 is text, the others are drafts."""

    where: Tensor  # (R, J) int32: the place of each among the packed ones; -1: not in this forward
    behind: Tensor  # (R, J) int32: how many of the pending tokens stand before it; 0 for the pending ones themselves


class Pieces(NamedTuple):
    """Pieces of prompts to be stored, packed: whole blocks of any requests, each behind what is stored of it.

    All are int32 on the device.
    """

    ids: Tensor  # (T,)
    row: Tensor  # (T,): of the block table
    position: Tensor  # (T,): place in the text; -1: padding
    tiles: Tensor  # (n, 2): first token of at most PIECE_TILE tokens of one piece, and how many; 0: none
    table: Tensor  # (rows, pages): the block table


class PagedCache:
    """The pages of one batch as a cache, a row for each request.

    `write` stores the committed tokens of a forward, `past` and `tokens` show what is stored. Sequences may differ in
    length; unused slots belong to document -1, which no text sees.
    """

    def __init__(self, pages: Pages, table: Tensor, lengths: Tensor) -> None:
        self.pages, self.table, self.lengths = pages, table.long(), lengths.long()  # (R, most pages), (R,) stored

    def keep(self, rows: Tensor) -> None:
        """Drop all sequences but `rows`."""
        self.table, self.lengths = self.table[rows], self.lengths[rows]

    @torch.no_grad()
    def write(self, new: Sequence[KeysValues], position: Tensor, real: Tensor) -> None:
        """Store keys and values of a forward's first tokens. `position`, `real` (R, W): places, and which are text."""
        if position.shape[1] == 0:
            return
        size = self.pages.page_size
        number = torch.where(real, position, 0).long()
        page = torch.where(real, self.table.gather(1, number // size), self.pages.spare)
        for stored, fresh in zip(self.pages.layers, new, strict=True):
            for target, source in zip(stored, fresh, strict=True):
                values = source[:, :, : position.shape[1]].transpose(1, 2).to(target.dtype)  # (R, W, Hkv, C)
                target[page, :, number % size] = values

    def past(self) -> list[KeysValues]:
        """Every layer's keys and values up to the longest text, each (R, Hkv, K, C)."""
        used = int(self.lengths.max())
        table = self.table[:, : self.pages.needed(used)]

        def gathered(stored: Tensor) -> Tensor:  # stored[table]: (R, pages, Hkv, page size, C)
            return stored[table].transpose(1, 2).flatten(2, 3)[:, :, :used]

        return [KeysValues(*map(gathered, layer)) for layer in self.pages.layers]

    def tokens(self, block_size: int) -> Tokens:
        """The mask vectors of what `past` returns, each (R, K)."""
        return stored_tokens(self.lengths, block_size)
