"""Passes that stay on the device: what is known of R requests goes from pass to pass without a round trip to the host.

A pass is one function of tensors: candidates, forward, choice, prediction, commitment, and, for blocks that have
closed, the next block, blank, with the closed one to be committed. The host reads back one small report: which blocks
have closed, and with which tokens. On CUDA the whole pass is captured as a graph, once for each number of requests and
each shape of the forward (with or without a commit, one draft or several, short texts or long). Requests enter and
leave by loading the state anew.

`RequestBatch` is the plain twin: it does the same for requests that the kernels are not made for.
"""

from __future__ import annotations

import functools
from collections import abc
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from freda.decode.batch import RequestBatch, closed_blocks, report_of
from freda.decode.pages import BlockTable, ForwardShape, PagedCache
from freda.decode.request import Pass, Sequence
from freda.methods.draft import Candidates, Prediction, merge, start
from freda.methods.method import Method
from freda.methods.state import DecodeState, Limits
from freda.model.parts import Parts

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)  # numbers of requests that graphs are made for
MOST_AHEAD = 64  # tokens of a forward that waits for the weights, whose time does not depend on how many they are
LONG = 1024  # tokens of a text from which on attention has another form

# What a program keeps on the device between two passes: the state of all requests, where their committed text lies, the
# ids (R, B) of the block to commit, and which rows are requests (R,): padding drafts too, but commits nothing.
Held = tuple[DecodeState, BlockTable, Tensor, Tensor]


class ForwardBackend(Protocol):
    """What runs the forwards: `packed.PackedModel`."""

    def buffers(self, requests: int, shape: ForwardShape, long: bool) -> Any:
        """Memory for a forward over the new tokens of so many requests, whose texts are `long` or not."""

    def run(self, given: tuple[Tensor, Tensor], texts: BlockTable, shape: ForwardShape, buffers: Any) -> None:
        """All layers over tokens `given` as (ids, α), each (R · tokens,); what is committed goes into the pages."""

    def prefill(self, ids: Tensor, table: Tensor, block_size: int) -> None:
        """Keys and values of whole prompts (R, L), from their first token on, into the pages that `table` names."""

    def hidden(self, buffers: Any) -> Tensor:
        """The final hidden states of the last forward, (R · tokens, D)."""

    def predict(self, tokens: Tensor, buffers: Any) -> Prediction:
        """The likeliest ids of `tokens` (N, B), which number those of the forward, and the runners-up."""


def prefill(
    backend: ForwardBackend, cache: PagedCache, sequences: abc.Sequence[Sequence], size: int, held: int, most: int
) -> None:
    """Bring prompts of which nothing is stored into the cache, but for their last `held` tokens, about `most` tokens in
    a forward; longer ones by themselves. Prompts of like length go together."""
    spare, device = cache.pages.spare, cache.lengths.device
    new = [row for row, one in enumerate(sequences) if one.stored == 0 and len(one.clean) > held]
    new.sort(key=lambda row: len(sequences[row].clean))
    while new:
        width = len(sequences[new[-1]].clean) - held  # the longest that is left, and as many others as fit
        count = max(1, min(len(new), most // width))
        group, new = new[-count:], new[:-count]
        pages = cache.pages.needed(width)
        ids = [sequences[row].clean[:width] + [0] * (width - len(sequences[row].clean)) for row in group]
        tables = [(cache.tables[row] + [spare] * pages)[:pages] for row in group]
        places = torch.tensor(tables, dtype=torch.int32, device=device)
        backend.prefill(torch.tensor(ids, dtype=torch.int64, device=device), places, size)
        for row in group:
            sequences[row].stored = len(sequences[row].clean) - held
    cache.lengths = torch.tensor([one.stored for one in sequences], dtype=torch.int64, device=device)


# -- one pass --------------------------------------------------------------------------------------------------------
# The functions around the forward return tensors and plain tuples: torch 2.11 damages a named tuple that a compiled
# function returns (its fields cannot be taken apart).


def shown(held: Held, method: Method, limits: Limits, shape: ForwardShape) -> tuple[Tensor, ...]:
    """What a forward sees: ids and α of all its tokens, (R · tokens,) each; and the `Candidates` among them."""
    state, _, pending_ids, _ = held
    found = method.candidates(state, limits, count=max(1, shape.drafts))
    parts = [(pending_ids, torch.ones_like(pending_ids, dtype=torch.float32))] if shape.commit else []
    if shape.drafts:
        parts.append((found.ids.flatten(1), found.alpha.flatten(1)))
    ids, alpha = (torch.cat(part, dim=1).flatten() for part in zip(*parts, strict=True))
    return ids, alpha, *found


def winner(
    parts: Parts, method: Method, state: DecodeState, found: abc.Sequence[Tensor], soft: Tensor | None
) -> Tensor:
    """The candidate among `found` that is kept, (R,)."""
    return method.choose(parts, state, Candidates(*found), soft)[0]


def advance(held: Held, method: Method, prediction: abc.Sequence[Tensor], shape: ForwardShape, blank_id: int) -> Tensor:
    """Bring `held` behind a `Prediction` (R, B); where a block has closed, the next begins. Returns the report.

    The new state is written over the old one here, so that compiled, nothing is copied afterwards.
    """
    state, texts, pending_ids, real = held
    draft = method.update(state.draft, Prediction(*prediction), state.rules)
    closed = draft.closed
    report = report_of(draft)
    fresh = start(draft.ids, torch.zeros_like(draft.given), blank_id)
    state = state._replace(draft=merge(~closed, draft, fresh), begin=state.begin + shape.block * closed)
    stored = texts.stored + texts.pending if shape.commit else texts.stored
    texts = texts._replace(stored=stored, pending=(shape.block * (closed & real)).to(texts.pending))
    after = (state, texts, torch.where(closed[:, None], draft.ids, pending_ids), real)
    for old, new in zip(_changing(held), _changing(after), strict=True):
        old.copy_(new)
    return report


def _changing(held: Held) -> list[Tensor]:
    """The tensors that a pass changes."""
    state, texts, pending_ids, _ = held
    return [*state.draft, state.begin, texts.stored, texts.pending, pending_ids]


def _loaded(held: Held) -> list[Tensor]:
    """The tensors that differ from batch to batch."""
    state, texts, _, real = held
    return [*_changing(held), texts.table, real, *state.rules[:2], *state.search]


@functools.cache
def _around(compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """What comes before a forward, the choice among candidates, and what comes after: some eighty small kernels, 350
    with a scorer, or, compiled, a few."""
    functions = (shown, winner, advance)
    if not compiled:
        return functions
    import torch._dynamo.config

    # Once for each method, number of requests and shape of a forward: more than the 8 that dynamo allows one function.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    first, second, third = (torch.compile(function, dynamic=False) for function in functions)
    return first, second, third


class Program:
    """The passes of batches of one size: their state in memory that stays, and on CUDA their graphs."""

    def __init__(
        self, parts: Parts, backend: ForwardBackend, method: Method, limits: Limits, held: Held, *, compiled: bool
    ) -> None:
        self.parts, self.backend, self.method, self.limits, self.held = parts, backend, method, limits, held
        self._compiled = compiled
        self._runs: dict[tuple[ForwardShape, bool], Callable[[], Tensor]] = {}

    def load(self, held: Held) -> None:
        """Take over the state of another batch of the same size."""
        for old, new in zip(_loaded(self.held), _loaded(held), strict=True):
            old.copy_(new)

    def step(self, shape: ForwardShape, long: bool) -> Tensor:
        """One pass, over long texts or not; returns its `report_of`."""
        if (shape, long) not in self._runs:
            made = self._captured if self.held[2].is_cuda else self._plain
            self._runs[shape, long] = made(shape, long)
        return self._runs[shape, long]()

    def _plain(self, shape: ForwardShape, long: bool) -> Callable[[], Tensor]:
        # The closure must not hold `self`: a cycle would keep the pages of engines that are gone.
        parts, backend, method, limits, held = self.parts, self.backend, self.method, self.limits, self.held
        before, choice, after = _around(self._compiled)
        count, blank_id = len(held[2]), parts.backbone.blank_id
        buffers = backend.buffers(count, shape, long)

        def run() -> Tensor:
            ids, alpha, *found = before(held, method, limits, shape)
            backend.run((ids, alpha), held[1], shape, buffers)
            first = torch.arange(count, device=ids.device)[:, None] * shape.tokens
            tokens = first + torch.arange(shape.block, device=ids.device)
            if shape.drafts:
                several = shape.drafts > 1
                soft = backend.hidden(buffers).view(count, shape.tokens, -1)[:, shape.commit :] if several else None
                best = choice(parts, method, held[0], found, soft)
                tokens = tokens + shape.commit + best[:, None] * shape.block
            report: Tensor = after(held, method, tuple(backend.predict(tokens, buffers)), shape, blank_id)
            return report

        return run

    def _captured(self, shape: ForwardShape, long: bool) -> Callable[[], Tensor]:
        """A pass as a CUDA graph. What is run to warm up is undone, all but the pages, where it writes what the first
        replay will write again."""
        run = self._plain(shape, long)
        before = [tensor.clone() for tensor in _changing(self.held)]
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            with torch.cuda.graph(graph, stream=stream):
                report = run()
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, value in zip(_changing(self.held), before, strict=True):
            tensor.copy_(value)

        def replay(run: Callable[[], Tensor] = run) -> Tensor:  # which holds the memory that the graph writes to
            graph.replay()
            return report

        return replay


# -- a batch ---------------------------------------------------------------------------------------------------------


def _sent(report: Tensor) -> Callable[[], list[list[int]]]:
    """Start copying a report to the host; the function that is returned waits for it."""
    there = torch.cuda.Event() if report.is_cuda else None  # type: ignore[no-untyped-call]
    host = report.to("cpu", non_blocking=True, copy=True)
    if there is not None:
        there.record()

    def read() -> list[list[int]]:
        if there is not None:
            there.synchronize()
        rows: list[list[int]] = host.tolist()
        return rows

    return read


class DeviceBatch(RequestBatch):
    """A batch whose passes stay on the device."""

    cache: PagedCache

    def __init__(
        self,
        base: RequestBatch,
        backend: ForwardBackend,
        programs: dict[tuple[Any, ...], Program],
        table_pages: int,
        *,
        compiled: bool = False,
    ) -> None:
        super().__init__(base.parts, base.method, base.sequences, sorted(base.stop_ids), base.cache)
        self._backend, self._programs, self._table_pages = backend, programs, table_pages
        self._compiled = compiled and self.device.type == "cuda"
        self._program: Program | None = None
        self._fresh_rows = 0  # how many drafts are still blank
        self._ahead: Callable[[], list[list[int]]] | None = None  # the report of a pass that is under way already

    def _load(self) -> Program:
        """The state of all sequences, filled up to the next size that there are graphs for."""
        limits = self.method.limits([one.request for one in self.sequences])
        count = len(self.sequences)
        size = next((bucket for bucket in BUCKETS if bucket >= count), -(-count // 64) * 64)
        held, key = self._held(size), (self.method, size, limits)
        if key not in self._programs:
            self._programs[key] = Program(self.parts, self._backend, self.method, limits, held, compiled=self._compiled)
        else:
            self._programs[key].load(held)
        self._fresh_rows = self.state.draft.passes.tolist().count(0)
        return self._programs[key]

    def _held(self, size: int) -> Held:
        """Padding repeats the first sequence, over the spare page and with nothing stored."""
        more = size - len(self.sequences)
        rows = self._tensor([*range(len(self.sequences)), *[0] * more], torch.int64)
        waiting = [one.clean[one.stored :] for one in self.sequences]
        pending = [len(tokens) for tokens in waiting] + [0] * more
        ids = [tokens or [0] * self.size for tokens in waiting] + [[0] * self.size] * more
        stored = [one.stored for one in self.sequences] + [0] * more
        lengths = (self._tensor(values, torch.int32) for values in (stored, pending))
        texts = BlockTable(self.cache.table(size, self._table_pages), *lengths)
        begin = [len(one.clean) for one in self.sequences] + [0] * more
        state = self.state.rows(rows)._replace(begin=self._tensor(begin, torch.int64))
        real = self._tensor([True] * len(self.sequences) + [False] * more, torch.bool)
        return state, texts, self._tensor(ids, torch.int64), real

    def draft_pass(self) -> dict[int, list[int]]:
        """One forward that commits what is pending and predicts; returns the `closed_blocks`.

        Where there are few tokens, the next pass is started before the report of this one is read, so that the device
        does not wait for the host. Sequences that have joined since then are not in the report, and wait for the next.
        """
        report = self._ahead or self._start()
        self._ahead = self._start() if self._goes_ahead() else None
        rows = report()
        for one, _ in zip(self.sequences, rows, strict=False):
            one.nfe += 1
            one.stored = len(one.clean)
        closed = closed_blocks(rows)
        self._fresh_rows = len(closed)
        return closed

    def _start(self) -> Callable[[], list[list[int]]]:
        """Start a pass of the shape that the sequences need; one that goes ahead allows for all that may come."""
        if self._program is None:
            self._program = self._load()
        pending = self._goes_ahead() or any(one.stored < len(one.clean) for one in self.sequences)
        fresh = self._fresh_rows == len(self.sequences)
        drafts = (1 if fresh else self._program.limits.width) if self.layout.slots else 0
        long = any(len(one.clean) > LONG for one in self.sequences)
        report = self._program.step(ForwardShape(self.size if pending else 0, self.size, drafts), long)
        return _sent(report[: len(self.sequences)])

    def _goes_ahead(self) -> bool:
        """Whether the next pass may start before this one is read: few tokens, among which a block to commit costs
        nothing where there is none; as many candidates whatever happens; and not all sequences at their end."""
        if self._program is None or self._program.limits.width > 1 or len(self.sequences) * 2 * self.size > MOST_AHEAD:
            return False
        return any(len(one.new) + self.size < one.request.max_new_tokens for one in self.sequences)

    def passes(self) -> abc.Iterator[tuple[Sequence, Pass]]:
        """Nothing: watched requests run in a plain batch."""
        return iter(())

    def next_blocks(self, finished: set[int]) -> None:
        """Let finished sequences leave; the next blocks have begun already."""
        if finished:
            self.leave(finished)

    def join(self, other: RequestBatch) -> None:
        """Take over the requests of another batch, whose cache is of the same storage."""
        self._unload()
        super().join(other)

    def leave(self, finished: set[int]) -> None:
        """Drop these rows."""
        self._unload()
        if self._ahead is not None:
            under_way = [row for number, row in enumerate(self._ahead()) if number not in finished]
            self._ahead = (lambda: under_way) if under_way else None
        super().leave(finished)

    def _unload(self) -> None:
        """Take the state back from the program's memory, which other batches may use."""
        if self._program is not None:
            rows = torch.arange(len(self.sequences), device=self.device)
            self.state = self._program.held[0].rows(rows)
            self._program = None
