"""The requests of one method that run side by side: each has a row on the device, from its admission to its end.

A step of the host brings pieces of prompts into the pages, writes the rows of requests that enter or leave, and starts
a pass, all without waiting for the device; then it reads the report of the pass before. So the device always has work,
and the host learns of a block one pass after it has closed. What a forward must have room for is then a guess: the host
knows which requests will close a block for sure, and how often the others do. A request that finds no room waits for
the next pass, and its text is the same (`device.laid_out`). Where drafts are checked, every pass runs one as text, and
there is always room for all candidates.

On a CPU, and where the forwards are made by the Transformer itself, nothing is guessed: every report is read at once.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from freda.decode.config import DecodeConfig
from freda.decode.device import (
    FLOATS,
    WHOLE,
    Decoder,
    ForwardBackend,
    Held,
    Kind,
    Report,
    captured,
    changing,
    enter,
    new_held,
    pass_of,
    record_width,
)
from freda.decode.pages import PIECE_TILE, ForwardShape, Pieces
from freda.decode.request import Pass
from freda.decode.request import Sequence as Text
from freda.decode.staging import Staging
from freda.methods.method import Method
from freda.methods.state import Limits
from freda.model.parts import Parts

FEW_TOKENS = 64  # of a forward that waits for the weights, whose time does not depend on how many they are
FEW_ROWS, LONG = 8, 1024  # so few requests have another form of attention for texts of so many tokens
MOST_PIECES, LEAST_FILL = 64, 128  # prompts in one forward; tokens, of which some may be padding
RIDES = (128, 256, 384, 512, 768, 1024)  # tokens of prompts that ride along with blocks
RECORDS = 16  # rows that are written together

Runs = tuple[Callable[[], Tensor | None], Sequence[Tensor]]  # a function, and what it changes that must be kept


def rounded(count: int, steps: int = 8) -> int:
    """The next of so many sizes between two powers of two, 8 being the least: graphs are made for these."""
    step = max(1, (1 << (count - 1).bit_length()) // (2 * steps)) if count > 8 else 8
    return -(-count // step) * step


class Flight(NamedTuple):
    """A pass that was started: who has a row in it, and how to wait for its report."""

    numbers: np.ndarray  # of the requests in its rows
    read: Callable[[], Report]


class Happened(NamedTuple):
    """What a pass did for a request."""

    text: Text
    seen: Pass | None  # the pass itself, if it is watched
    ids: list[int] | None  # that have become final; none of them: the probabilities are not finite


class Places:
    """Rows of the device for the requests of one method."""

    def __init__(
        self,
        parts: Parts,
        method: Method,
        backend: ForwardBackend,
        stop_ids: Sequence[int],
        size: tuple[int, int],
        *,
        compiled: bool = False,
    ) -> None:
        """`size`: how many requests, and pages of one."""
        self.parts, self.method, self.backend, (self.count, self.table_pages) = parts, method, backend, size
        self.geometry, self.block, self.slots = method.geometry, method.geometry.block, method.geometry.slots
        self.texts: list[Text | None] = [None] * self.count
        self.flights: deque[Flight] = deque()
        self.passes, self.waited = 0, 0.0  # started so far; seconds spent waiting for reports
        self._least = 1 if self.geometry.checked else self.block  # tokens that a pass closes, if it closes any
        # One row more than there are places: what fills up a group of records is written there.
        self._held = new_held(self.count + 1, self.table_pages, parts, self.block, stop_ids)
        self.ahead = backend.graphs  # are reports read after the next pass has started?
        self._pool = torch.cuda.graph_pool_handle() if self.ahead and parts.device.type == "cuda" else None
        self._decoder = Decoder(parts, backend, method, compiled and self._pool is not None)
        self._runs: dict[Any, Callable[[], Tensor | None]] = {}
        self._staging = Staging(parts.device, fixed=self.ahead)
        self._free = list(range(self.count))
        self.filling: deque[Text] = deque()  # prompts that are not wholly in the pages
        self._records: dict[int, list[int]] = {}  # rows to be written before the next pass
        self._limits: Limits | None = None
        zeros = np.zeros(self.count, dtype=np.int64)
        # What the host knows of each row, as of the last report that was read:
        self._numbers = zeros.copy()  # of the request that runs there; 0: none
        self._live = zeros.astype(bool)  # it runs on the device
        self._flying = zeros.astype(bool)  # and is in a pass whose report is still to come
        self._watched = zeros.astype(bool)
        self._pending = zeros.astype(bool)  # the next pass commits a block of it
        self._done, self._most = zeros.copy(), zeros.copy()  # passes over its block, and how many it may have
        self._left = zeros.copy()  # tokens from the beginning of its block to its end
        self._width, self._forwards = zeros.copy(), zeros.copy()  # most candidates; forwards that it took part in
        self._early = 0.0  # how many of the blocks that may close early do so
        self._stalled = False  # whether somebody found no room in the last pass that was read

    # -- coming and going --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.count - len(self._free)

    def add(self, text: Text) -> None:
        """Give a request a row; its prompt is brought into its pages from the next step on."""
        text.row = heapq.heappop(self._free)
        self.texts[text.row] = text
        self.filling.append(text)
        self._limits = None

    def remove(self, text: Text) -> None:
        """Free the row of a request. If it is still running on the device, the row is cleared before the next pass."""
        row = text.row
        if text in self.filling:
            self.filling.remove(text)
        self._records.pop(row, None)
        if self._live[row]:  # the device has not ended it itself
            self._records[row] = self._nobody(row)
        text.nfe = int(self._forwards[row]) if self._numbers[row] == text.index else 0
        self.texts[row], self._live[row], self._flying[row], self._limits = None, False, False, None
        self._numbers[row] = 0
        heapq.heappush(self._free, row)

    def _nobody(self, row: int) -> list[int]:
        """A row without a request, as `device.enter` takes it."""
        return [row, *[0] * (record_width(self.block, self.table_pages) - 1)]

    def _record(self, text: Text, *, real: bool) -> list[int]:
        """A request's row, as `device.enter` takes it."""
        asked, pending, block = text.request, text.pending if real else [], self.block
        found: dict[str, Any] = {name: getattr(asked, name, 0) for name in (*WHOLE, *FLOATS)}
        found |= {"row": text.row, "real": real, "begin": len(text.clean), "known": text.known}
        if real and self.geometry.checked:  # of a blank draft, the known token
            pending = [text.known]
        found |= {"stored": text.stored, "pending": block * bool(pending)}
        found |= {"tail": len(text.tail), "end": len(asked.prompt) + asked.max_new_tokens}
        found |= {"sampled": asked.candidates == "sampled", "gumbel": asked.select == "gumbel"}
        bits = struct.unpack("4q", struct.pack("4d", *(found[name] for name in FLOATS)))
        values = [*(int(found[name]) for name in WHOLE), *bits]
        padded = [tokens + [0] * (block - len(tokens)) for tokens in (text.tail, pending)]
        return [*values, *padded[0], *padded[1], *text.table, *[0] * (self.table_pages - len(text.table))]

    def _begin(self, text: Text) -> None:
        """All of a prompt is in the pages, or will be before the next pass: the request can run."""
        row, asked = text.row, text.request
        self._numbers[row], self._watched[row], self._forwards[row] = text.index, asked.watch, 0
        self._records[row] = self._record(text, real=True)
        self._live[row], self._flying[row], self._pending[row] = True, False, bool(text.pending)
        self._done[row], self._most[row] = 0, asked.passes if self.slots and not self.geometry.checked else 1
        self._left[row] = len(text.tail) + asked.max_new_tokens
        self._width[row] = asked.width

    # -- a step ------------------------------------------------------------------------------------------------------

    def start(self, most: int, *, passes: bool = True) -> tuple[list[Text], bool]:
        """Bring up to `most` tokens of prompts into the pages, write the rows of those that enter or leave, and start a
        pass, unless all have ended by now. Beside running requests prompts come in pieces.

        Returns the requests whose prompts were brought in, and whether a pass was started.
        """
        taken = self._pieces(min(most, self._room()) if passes and self._live.any() else most)
        self._enter()
        total, started = sum(end - begin for _, begin, end in taken), passes and self._worthwhile()
        rides = started and total <= RIDES[-1]  # short prompts, in one forward with the blocks
        pieces = self._staged(taken, self._padded(total, rides=rides)) if taken else None
        if pieces is not None and not rides:
            self._fill_of(pieces)()
        if started:
            self._start_pass(pieces if rides else None)
        return [text for text, _, _ in taken], started

    def _room(self) -> int:
        """How many tokens of prompts may ride beside running requests: a quarter of what waits, but at least so many as
        hardly slow a pass down; rounded down to a size of `RIDES`, so that nothing is padding."""
        waits, cheap = sum(len(text.clean) - text.stored for text in self.filling), RIDES[1]
        return max(size for size in RIDES if size <= max(cheap, waits // 4))

    def _padded(self, total: int, *, rides: bool) -> int:
        """Tokens of prompts in a forward that has room for `total`: riding along, or alone."""
        if not self.ahead:
            return total
        return next(size for size in RIDES if size >= total) if rides else max(LEAST_FILL, rounded(total, 4))

    def _pieces(self, most: int) -> list[tuple[Text, int, int]]:
        """Which tokens of which prompts come next; in whole blocks of their context, first come, first served."""
        whole = self.geometry.context
        taken, room = list[tuple[Text, int, int]](), max(most, whole)
        most_pieces = MOST_PIECES if self.ahead else self.count
        while self.filling and room >= whole and len(taken) < most_pieces:
            text = self.filling[0]
            last = len(text.clean) - self.geometry.held
            end = min(last, text.stored + room // whole * whole)
            if end > text.stored:
                taken.append((text, text.stored, end))
                room -= end - text.stored
                text.stored = end
            if end == last:
                self.filling.popleft()
                self._begin(text)
            else:
                self._records[text.row] = self._record(text, real=False)
        return taken

    def _enter(self) -> None:
        """Write the rows of requests that enter or leave."""
        records, self._records = list(self._records.values()), {}
        for begin in range(0, len(records), RECORDS):
            group = records[begin : begin + RECORDS]
            staged = self._staging.given((RECORDS if self.ahead else len(group), len(group[0])), torch.int64)
            numbers = staged.numpy()
            numbers[: len(group)] = group
            numbers[len(group) :] = 0
            numbers[len(group) :, 0] = self.count  # the row that is nobody's
            there = self._staging.sent(staged)
            held, blank = self._held, self.parts.backbone.blank_id
            self._run_of("enter", lambda: (functools.partial(enter, held, there, blank), []))()  # noqa: B023

    def _staged(self, taken: Sequence[tuple[Text, int, int]], size: int) -> Pieces:
        """Pieces of prompts on the device, filled up to `size` tokens."""
        total = sum(end - begin for _, begin, end in taken)
        count = size // PIECE_TILE + (MOST_PIECES if self.ahead else len(taken))
        staged = self._staging.given((3 * size + 2 * count,), torch.int32)
        numbers = staged.numpy()
        numbers[:] = 0
        ids, rows, position = (numbers[part * size : (part + 1) * size] for part in range(3))
        position[total:] = -1
        at, tiles = 0, list[tuple[int, int]]()
        for text, begin, end in taken:
            here = slice(at, at + end - begin)
            ids[here], rows[here], position[here] = text.clean[begin:end], text.row, np.arange(begin, end)
            tiles += [(at + tile, min(PIECE_TILE, end - begin - tile)) for tile in range(0, end - begin, PIECE_TILE)]
            at += end - begin
        numbers[3 * size : 3 * size + 2 * len(tiles)] = np.ravel(tiles)
        there = self._staging.sent(staged)
        parts = there[: 3 * size].chunk(3)
        return Pieces(parts[0], parts[1], parts[2], there[3 * size :].view(-1, 2), self._held.texts.table)

    def _fill_of(self, pieces: Pieces) -> Callable[[], Tensor | None]:
        """A forward over pieces of prompts alone."""
        shape = ForwardShape(1, self.block, 1, 0, len(pieces.ids), self.geometry.causal)

        def made() -> Runs:
            return functools.partial(self.backend.fill, pieces, shape, self.backend.buffers(shape, False)), []

        return self._run_of(shape, made)

    def _run_of(self, key: Any, made: Callable[[], Runs]) -> Callable[[], Tensor | None]:
        """The function under `key`: captured as a CUDA graph the first time, after which `made` is not called again;
        made anew each time where there are no graphs."""
        if not self.ahead:
            return made()[0]
        if key not in self._runs:
            run, changed = made()
            self._runs[key] = run if self._pool is None else captured(run, changed, self._pool)
        return self._runs[key]

    def prepare(self, like: DecodeConfig, most: int) -> None:
        """Make the graphs of all passes that requests like this one may need, and of prompts of all lengths."""
        if not self.ahead:
            return
        self._records.setdefault(self.count, self._nobody(self.count))
        self._enter()  # to make a graph is to run it: rows of requests that have left must not write to their pages
        limits, block = self.method.limits([like]), self.block
        rides = [size for before, size in itertools.pairwise((0, *RIDES)) if before < most]
        for size in sorted({self._padded(size, rides=False) for size in range(1, most + 1)}, reverse=True):
            self._fill_of(self._staged([], size))
        drafts = {limits.width} if self.geometry.checked else {1, limits.width} if self.slots else {0}
        tops = range(1, self.count + 1)
        forms = {(self._bucket(top, 1 + count), 1 + count) for count in drafts for top in tops}
        for (rows, blocks), prompts in itertools.product(sorted(forms), (0, *rides)):
            pieces = self._staged([], prompts) if prompts else None
            sizes = {self._packed(rows, blocks, size, prompts) for size in range(1, rows * blocks + 1)}
            for packed, long in itertools.product(sorted(sizes), {False, rows <= FEW_ROWS and not prompts}):
                shape = ForwardShape(rows, block, blocks, packed, prompts, self.geometry.causal)
                self._pass_of(Kind(shape, limits, long), pieces)

    # -- passes ------------------------------------------------------------------------------------------------------

    def _worthwhile(self) -> bool:
        """Whether anything will be running in the next pass, as far as is known."""
        ends = self._flying & (self._done + 1 >= self._most) & (self._left <= self._least)
        return bool((self._live & ~ends).any())

    def _start_pass(self, pieces: Pieces | None) -> None:
        limits = self._limits = self._limits or self.method.limits([text.request for text in self.texts if text])
        top = 1 + int(np.flatnonzero(self._live)[-1])
        shape = self._shape(top, limits, 0 if pieces is None else len(pieces.ids))
        few = shape.rows <= FEW_ROWS and not shape.prompts
        long = few and any(text is not None and len(text.clean) > LONG for text in self.texts)
        report = self._pass_of(Kind(shape, limits, long), pieces)()
        assert report is not None
        arrived = self._staging.fetched(report)
        block, candidates = self.block, max(1, shape.blocks - 1)
        self.flights.append(Flight(self._numbers[:top].copy(), lambda: Report(arrived()[:top], block, candidates)))
        self._flying[:] = self._live
        self.passes += 1

    def _pass_of(self, kind: Kind, pieces: Pieces | None) -> Callable[[], Tensor | None]:
        """A pass of this kind, in which pieces of prompts ride along."""

        def made() -> Runs:
            held = self._rows(kind.shape.rows, kind.limits)
            return pass_of(self._decoder, held, kind, pieces), changing(held)

        return self._run_of(kind, made)

    def _rows(self, count: int, limits: Limits) -> Held:
        """The rows of a pass; where candidates are drawn from what passes predict, that is kept, too."""
        state = self._held.state
        if limits.draws and state.probs is None:
            vocabulary = self.parts.backbone.blank_id
            probs = torch.zeros(self.count + 1, self.block, vocabulary, device=self.parts.device)
            self._held = self._held._replace(state=state._replace(probs=probs))
        return self._held.rows(count, probs=limits.draws)

    def _shape(self, top: int, limits: Limits, prompts: int) -> ForwardShape:
        """The shape of the next forward. After one of which there is no report yet, it is partly a guess."""
        live, flying = self._live, self._flying
        closes = flying & (self._done + 1 >= self._most)
        may = int((flying & ~closes).sum())
        # Who found no room in the last pass may have found none in this one: then nobody is sure to have closed.
        fresh = live & np.where(flying, closes & (not self._stalled), self._done == 0)
        drafts = np.where(fresh, 1, self._width if limits.width > 1 else 1)[live]
        several = self.slots > 0 and bool((drafts > 1).any())
        blocks = 1 + (limits.width if several else 1) if self.slots else 1
        commits = (live & ~flying & self._pending).sum() + (closes & (self._left > self.block)).sum()
        spread = (self._early * (1 - self._early) * may) ** 0.5  # the standard deviation of how many close early
        commits += math.ceil(self._early * may + 2 * spread)
        needed = int(commits) + (int(drafts.sum()) if self.slots else 0)
        if self.geometry.checked:  # drafts go on when a block closes, and each is text beside its candidates
            blocks = 1 + limits.width
            needed = int(live.sum()) * blocks
        if not self.ahead:  # nothing is under way, and nothing a guess
            return ForwardShape(top, self.block, blocks, needed, prompts, self.geometry.causal)
        rows = self._bucket(top, blocks)
        packed = self._packed(rows, blocks, rows * blocks if self._stalled else needed, prompts)
        return ForwardShape(rows, self.block, blocks, packed, prompts, self.geometry.causal)

    def _bucket(self, top: int, blocks: int) -> int:
        """The rows of a forward for the first `top`: few have a size of their own; more share one, and are packed."""
        rows = 1 << (top - 1).bit_length()
        return rows if rows < self.count and rows * blocks * self.block <= FEW_TOKENS else self.count

    def _packed(self, rows: int, blocks: int, needed: int, prompts: int) -> int:
        """The blocks of a forward that needs room for so many."""
        whole = rows * blocks
        few = whole * self.block <= FEW_TOKENS
        return whole if few else min(whole, rounded(max(1, needed), 4 if prompts else 8))

    def read(self) -> Iterator[Happened]:
        """Wait for the oldest pass that was started; what it did for every request that has not ended since."""
        flight = self.flights.popleft()
        begun = time.perf_counter()
        report = flight.read()
        self.waited += time.perf_counter() - begun
        numbers = flight.numbers
        same = (numbers > 0) & (numbers == self._numbers[: len(numbers)])  # rows that have not changed hands since
        self._learn(report, same)
        over = (report.closed > 0) | ~report.finite
        told = report.going & same & (over | self._watched[: len(same)])
        ids = report.ids.tolist()
        for row in np.flatnonzero(told).tolist():
            text = self.texts[row]
            assert text is not None
            text.nfe = int(self._forwards[row])
            text.stored = self.geometry.storable(len(text.clean))  # a pass that goes commits what pends
            seen = self._seen(text, report, row) if text.request.watch else None
            final = ids[row][: report.closed[row]] if report.finite[row] else []
            yield Happened(text, seen, final if over[row] else None)

    def _learn(self, report: Report, same: np.ndarray) -> None:
        """What a report says about the rows, as far as they are the `same`."""
        count = len(same)
        went = same & report.going
        self._stalled = bool((self._live[:count] & same & ~report.going).any())
        self._forwards[:count] += went
        may = went & (report.passes < self._most[:count])
        if may.any():
            self._early += 0.2 * (((report.closed > 0) & may).sum() / may.sum() - self._early)
        self._done[:count][went] = report.done[went]
        self._left[:count][went] -= report.closed[went]
        self._pending[:count][went] = report.closed[went] > 0
        self._live[:count][went & report.ended] = False
        if not self.flights:
            self._flying[:] = False

    def _seen(self, text: Text, report: Report, row: int) -> Pass:
        """A pass of a watched request."""
        count = int(report.valid[row, 0])
        given = [place < len(text.tail) for place in range(self.block)]
        cells = (report.ids[row].tolist(), report.prob[row].tolist(), given, (report.committed[row] != 0).tolist())
        about = (int(report.closed[row]), report.candidates[row, :count].tolist(), report.scores[row, :count].tolist())
        number = len(text.clean) // self.block
        return Pass(text.index, number, int(report.passes[row]), *cells, *about, int(report.winner[row, 0]))
