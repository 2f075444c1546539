"""Keys and values of committed text, in pages that requests share where their texts begin alike.

A page holds `page_size` tokens, whole blocks of them. The keys and values of committed text depend on the text up to
the end of their block and on nothing else, so a full page is identified by the hash of all tokens up to its end (and
the block size, which decides who sees whom). A request whose prompt begins with known pages uses them instead of
computing them. Pages that no request uses are kept until their space is needed; the least recently used go first.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from freda.errors import require
from freda.model.attention import Tokens, stored_tokens
from freda.model.transformer import KeysValues, Transformer

MOST_TOKENS = 65_536  # on a CPU, unless the number of pages is given
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

    def first_unknown(self, text: Sequence[int], block_size: int) -> bytes | None:
        """The hash up to the end of the first full page of a text that is not stored; None if all are."""
        return next((key for key in _keys(text, self.page_size, block_size) if key not in self._known), None)

    def reserve(self, text: Sequence[int], tokens: int, block_size: int) -> tuple[list[int], int] | None:
        """Pages for `tokens` tokens that begin with `text`, and how many of these are stored there already.

        None if there are not enough pages now.
        """
        keys = _keys(text, self.page_size, block_size)
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

    def learn(self, table: Sequence[int], text: Sequence[int], block_size: int) -> None:
        """Remember the pages of a table that are full of stored text, for requests that begin like it."""
        key, size = _first_key(block_size), self.page_size
        for number, page in zip(range(len(text) // size), table, strict=False):
            key = self._hash.get(page) or _next_key(key, text[number * size : (number + 1) * size])
            if key not in self._known:
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


def _keys(text: Sequence[int], page_size: int, block_size: int) -> Iterator[bytes]:
    """The hash of a text up to the end of each of its full pages."""
    key = _first_key(block_size)
    for end in range(page_size, len(text) + 1, page_size):
        key = _next_key(key, text[end - page_size : end])
        yield key


def _first_key(block_size: int) -> bytes:
    return block_size.to_bytes(4, "little")


def _next_key(key: bytes, page: Sequence[int]) -> bytes:
    """The hash of a text up to the end of a page, from that up to its beginning."""
    return hashlib.blake2b(key + array("q", page).tobytes(), digest_size=16).digest()


class ForwardShape(NamedTuple):
    """The new tokens of each request in a forward: a block to commit, and drafts of the next."""

    commit: int  # places for a block to commit: 0 or the block size
    block: int
    drafts: int

    @property
    def tokens(self) -> int:
        """New tokens of one request."""
        return self.commit + self.block * self.drafts


class BlockTable(NamedTuple):
    """Where the committed text of R requests lies, on the device."""

    table: Tensor  # (R, most pages) int32
    stored: Tensor  # (R,) int32: committed tokens in the pages
    pending: Tensor  # (R,) int32: tokens that the next forward commits: a block or 0


class PagedCache:
    """The pages of one batch as a cache, a row for each request.

    `write` stores the committed tokens of a forward, `past` and `tokens` show what is stored. Sequences may differ in
    length; unused slots belong to document -1, which no text sees.
    """

    def __init__(self, pages: Pages, tables: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        self.pages, self.tables = pages, [list(table) for table in tables]
        device = pages.layers[0].keys.device
        self.lengths = torch.tensor(list(lengths), dtype=torch.int64, device=device)  # (R,) tokens stored
        self._tensors()

    def _tensors(self) -> None:
        """The tables as a tensor, (R, most pages), filled up with the spare page."""
        most = max((len(table) for table in self.tables), default=0)
        filled = [table + [self.pages.spare] * (most - len(table)) for table in self.tables]
        self._table = torch.tensor(filled, dtype=torch.int64, device=self.lengths.device).view(len(filled), most)

    def table(self, rows: int, pages: int) -> Tensor:
        """The tables as the kernels take them, (rows, pages) int32, filled up with the spare page."""
        here = self._table[:, :pages].int()
        below, beside = rows - here.shape[0], pages - here.shape[1]
        return torch.nn.functional.pad(here, (0, beside, 0, below), value=self.pages.spare)

    def join(self, other: PagedCache) -> None:
        """Take over the rows of another cache of the same pages."""
        require(other.pages is self.pages, "caches of two storages cannot be joined")
        self.tables += other.tables
        self.lengths = torch.cat([self.lengths, other.lengths])
        self._tensors()

    def keep(self, rows: Tensor) -> None:
        """Drop all sequences but `rows`; whoever reserved their pages releases them."""
        self.tables = [self.tables[row] for row in rows.tolist()]
        self.lengths = self.lengths[rows]
        self._tensors()

    @torch.no_grad()
    def write(self, new: Sequence[KeysValues], position: Tensor, real: Tensor) -> None:
        """Store keys and values of a forward's first tokens. `position`, `real` (R, W): places, and which are text."""
        if position.shape[1] == 0:
            return
        size = self.pages.page_size
        number = torch.where(real, position, 0).long()
        page = torch.where(real, self._table.gather(1, number // size), self.pages.spare)
        for stored, fresh in zip(self.pages.layers, new, strict=True):
            for target, source in zip(stored, fresh, strict=True):
                values = source[:, :, : position.shape[1]].transpose(1, 2).to(target.dtype)  # (R, W, Hkv, C)
                target[page, :, number % size] = values
        self.lengths = self.lengths + real.sum(-1)

    def past(self) -> list[KeysValues]:
        """Every layer's keys and values up to the longest text, each (R, Hkv, K, C)."""
        used = int(self.lengths.max())
        table = self._table[:, : self.pages.needed(used)]

        def gathered(stored: Tensor) -> Tensor:  # stored[table]: (R, pages, Hkv, page size, C)
            return stored[table].transpose(1, 2).flatten(2, 3)[:, :, :used]

        return [KeysValues(*map(gathered, layer)) for layer in self.pages.layers]

    def tokens(self, block_size: int) -> Tokens:
        """The mask vectors of what `past` returns, each (R, K)."""
        return stored_tokens(self.lengths, block_size)
