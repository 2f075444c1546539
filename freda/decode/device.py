"""Passes that stay on the device: what is known of R requests goes from pass to pass without a round trip to the host.

A pass is one function of tensors: candidates, forward, choice, prediction, commitment, and, for blocks that have
closed, the next block, blank, with the closed one to be committed. The host reads back one small report: which blocks
have closed, and with which tokens. On CUDA the whole pass is captured as a graph, once for each number of requests and
each form of the forward (with or without a commit, one draft or several, short texts or long). Requests enter and leave
by loading the state anew.

It does what `Batch` does, which is its plain twin, where nobody draws by chance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from freda.decode.batch import Batch
from freda.decode.config import DecodeConfig
from freda.decode.pages import PagedCache
from freda.decode.request import Sequence as Text
from freda.decode.request import Watch
from freda.decode.shapes import BlockTable, ForwardShape
from freda.decode.state import DecodeState, Limits, candidates_of, chosen, limits_of, settled
from freda.methods.config import MethodConfig
from freda.methods.draft import Candidates, Prediction, merge, start
from freda.methods.method import Method
from freda.model.scorer import Scorer
from freda.model.transformer import Transformer

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)  # numbers of requests that graphs are made for
MOST_AHEAD = 64  # tokens of a forward that waits for the weights, whose time does not depend on how many they are
LONG = 1024  # tokens of a text from which on attention has another form


class ForwardBackend(Protocol):
    """What runs the forwards: `packed.PackedModel`."""

    def buffers(self, requests: int, rows: ForwardShape, long: bool) -> Any:
        """Memory for a forward over the new tokens of so many requests; are their texts long?"""

    def run(self, given: tuple[Tensor, Tensor], texts: BlockTable, rows: ForwardShape, buffers: Any) -> None:
        """All layers over tokens `given` as (ids, α), each (R · rows,); what is committed goes into the pages."""

    def prefill(self, ids: Tensor, table: Tensor, block_size: int) -> None:
        """Keys and values of whole prompts (R, L), from their first token on, into the pages that `table` names."""

    def hidden(self, buffers: Any) -> Tensor:
        """What the forward left, (R · rows, D)."""

    def predict(self, tokens: Tensor, buffers: Any) -> Prediction:
        """The likeliest ids of `tokens` (N, B), which number those of the forward, and the runners-up."""


class State(NamedTuple):
    """R requests between two passes."""

    lanes: DecodeState
    texts: BlockTable
    pending_ids: Tensor  # (R, B) int64: the block to commit, where there is one
    real: Tensor  # (R,) bool: a request; padding drafts too, but commits nothing, or its text would outgrow its table

    def tensors(self) -> list[Tensor]:
        """What a pass changes."""
        return [*self.lanes.draft, self.lanes.begin, self.texts.stored, self.texts.pending, self.pending_ids]

    def loaded(self) -> list[Tensor]:
        """That, and what differs from batch to batch."""
        return [*self.tensors(), self.texts.table, self.real, *self.lanes.rules[:2], *self.lanes.search]


class Setting(NamedTuple):
    """What does not change while a batch runs."""

    model: Transformer
    machine: ForwardBackend
    method: Method
    config: MethodConfig
    limits: Limits
    compiled: bool = False  # what is around the forward


def stays_on_device(model: Transformer, config: MethodConfig, request: DecodeConfig) -> bool:
    """Can a request be decoded by these passes? Not if it draws tokens or candidates by chance, which wants all logits,
    nor with a scorer that has a last layer of its own or embeddings that are rescaled."""
    own_layer = isinstance(model.scorer, Scorer) and model.scorer.last_layer is not None
    by_chance = request.temperature > 0 or request.candidates == "sampled"
    return not (by_chance or own_layer or config.rescale)


def prefill(machine: ForwardBackend, cache: PagedCache, texts: Sequence[Text], size: int, last: int, most: int) -> None:
    """Bring the prompts of `texts` of which nothing is stored into the cache, but for their `last` tokens, about `most`
    tokens in a forward; longer ones by themselves. BlockTable of like length go together."""
    spare, device = cache.pages.spare, cache.lengths.device
    new = [row for row, text in enumerate(texts) if text.stored == 0 and len(text.clean) > last]
    new.sort(key=lambda row: len(texts[row].clean))
    while new:
        width = len(texts[new[-1]].clean) - last  # the longest that is left, and as many others as fit
        count = max(1, min(len(new), most // width))
        group, new = new[-count:], new[:-count]
        pages = cache.pages.needed(width)
        ids = [texts[row].clean[:width] + [0] * (width - len(texts[row].clean)) for row in group]
        tables = [(cache.tables[row] + [spare] * pages)[:pages] for row in group]
        places = torch.tensor(tables, dtype=torch.int32, device=device)
        machine.prefill(torch.tensor(ids, dtype=torch.int64, device=device), places, size)
        for row in group:
            texts[row].stored = len(texts[row].clean) - last
    cache.lengths = torch.tensor([text.stored for text in texts], dtype=torch.int64, device=device)


def one_pass(state: State, setting: Setting, rows: ForwardShape, buffers: Any) -> Tensor:
    """A pass over `state`, which it changes. Its report is (R, 2 + B) int64: has the block closed, is it sound, ids."""
    machine, size, count = setting.machine, rows.block, len(state.pending_ids)
    before, choice, after = _around(setting.compiled)
    ids, alpha, *found = before(state, setting.method, setting.config, setting.limits, rows)
    machine.run((ids, alpha), state.texts, rows, buffers)
    first = torch.arange(count, device=ids.device)[:, None] * rows.tokens
    tokens = first + torch.arange(size, device=ids.device)
    if rows.drafts:
        scored = setting.method.SCORES and rows.drafts > 1
        soft = machine.hidden(buffers).view(count, rows.tokens, -1)[:, rows.commit :] if scored else None
        chosen_one = choice(setting.model, setting.method, state.lanes, found, soft)
        tokens = tokens + rows.commit + chosen_one[:, None] * size
    prediction = tuple(machine.predict(tokens, buffers))
    report: Tensor = after(state, setting.method, prediction, rows, setting.model.blank_id)
    return report


# What these three give back are tensors and plain tuples: a named tuple that a compiled function returns is damaged in
# torch 2.11 (its fields cannot be taken apart).


def shown(state: State, method: Method, config: MethodConfig, limits: Limits, rows: ForwardShape) -> tuple[Tensor, ...]:
    """What a forward sees: ids and α of all its tokens, (R · rows,) each; and the `Candidates` among them."""
    found = candidates_of(state.lanes, method, config, limits, count=max(1, rows.drafts))
    parts = [(state.pending_ids, torch.ones_like(state.pending_ids, dtype=torch.float32))] if rows.commit else []
    if rows.drafts:
        parts.append((found.ids.flatten(1), found.alpha.flatten(1)))
    ids, alpha = (torch.cat(part, dim=1).flatten() for part in zip(*parts, strict=True))
    return ids, alpha, *found


def winner(
    model: Transformer, method: Method, lanes: DecodeState, found: Sequence[Tensor], soft: Tensor | None
) -> Tensor:
    """Which of the candidates `found` goes on, (R,)."""
    return chosen(model, method, lanes, Candidates(*found), soft).winner


def advance(state: State, method: Method, prediction: Sequence[Tensor], rows: ForwardShape, blank_id: int) -> Tensor:
    """Bring the state behind a `Prediction` (R, B); returns the report. Where a block has closed, the next begins.

    The new state is written over the old one here, so that compiled, nothing is copied afterwards.
    """
    lanes, texts, pending_ids, real = state
    lanes = settled(lanes, method, Prediction(*prediction))
    draft, closed = lanes.draft, lanes.draft.closed
    sound = draft.prob.isfinite().all(-1)
    report = torch.cat([torch.stack([closed, sound], dim=1).long(), draft.ids], dim=1)
    fresh = start(draft.ids, torch.zeros_like(draft.given), blank_id)
    lanes = lanes._replace(draft=merge(~closed, draft, fresh), begin=lanes.begin + rows.block * closed)
    stored = texts.stored + texts.pending if rows.commit else texts.stored
    texts = texts._replace(stored=stored, pending=(rows.block * (closed & real)).to(texts.pending))
    after = State(lanes, texts, torch.where(closed[:, None], draft.ids, pending_ids), real)
    for old, new in zip(state.tensors(), after.tensors(), strict=True):
        old.copy_(new)
    return report


@functools.cache
def _around(compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """What comes before a forward, the choice among candidates, and what comes after: some eighty small kernels, 350
    with a scorer, or, compiled, a few."""
    functions = (shown, winner, advance)
    if not compiled:
        return functions
    import torch._dynamo.config

    # Once for each method, number of requests and form of a forward: more than the 8 that dynamo allows one function.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    first, second, third = (torch.compile(function, dynamic=False) for function in functions)
    return first, second, third


class Program:
    """The passes of batches of one size: their state in memory that stays, and on CUDA their graphs."""

    def __init__(self, state: State, setting: Setting) -> None:
        self.state, self.setting = state, setting
        self._runs: dict[tuple[ForwardShape, bool], Callable[[], Tensor]] = {}

    def load(self, state: State) -> None:
        """Take over another state of the same size."""
        for old, new in zip(self.state.loaded(), state.loaded(), strict=True):
            old.copy_(new)

    def step(self, rows: ForwardShape, long: bool) -> Tensor:
        """One pass, over long texts or not; returns its report."""
        if (rows, long) not in self._runs:
            made = self._captured if self.state.pending_ids.is_cuda else self._plain
            self._runs[rows, long] = made(rows, long)
        return self._runs[rows, long]()

    def _plain(self, rows: ForwardShape, long: bool) -> Callable[[], Tensor]:
        state, setting = self.state, self.setting  # not `self`: a circle would keep the pages of engines that are gone
        buffers = setting.machine.buffers(len(state.pending_ids), rows, long)

        def run() -> Tensor:
            return one_pass(state, setting, rows, buffers)

        return run

    def _captured(self, rows: ForwardShape, long: bool) -> Callable[[], Tensor]:
        """The same as a CUDA graph. What is run to warm up is undone: all but the pages, where it writes what the first
        replay will write again."""
        run = self._plain(rows, long)
        before = [tensor.clone() for tensor in self.state.tensors()]
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            with torch.cuda.graph(graph, stream=stream):
                report = run()
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, value in zip(self.state.tensors(), before, strict=True):
            tensor.copy_(value)

        def replay(run: Callable[[], Tensor] = run) -> Tensor:  # which holds the memory that the graph writes to
            graph.replay()
            return report

        return replay


class Report:
    """What a pass has to say, on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor.to("cpu", non_blocking=True, copy=True)
        self._there = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if self._there is not None:
            self._there.record()

    def read(self) -> list[list[int]]:
        """Its rows, as soon as they are there."""
        if self._there is not None:
            self._there.synchronize()
        rows: list[list[int]] = self._host.tolist()
        return rows

    def __len__(self) -> int:
        return len(self._host)

    def rows(self, rows: Sequence[int]) -> Report:
        """Only these."""
        if self._there is not None:
            self._there.synchronize()
        return Report(self._host[list(rows)])


class DeviceBatch(Batch):
    """A batch whose passes stay on the device."""

    cache: PagedCache

    def __init__(
        self,
        base: Batch,
        machine: ForwardBackend,
        programs: dict[tuple[Any, ...], Program],
        table_pages: int,
        *,
        compiled: bool = False,
    ) -> None:
        super().__init__(base.model, base.method, base.config, base.texts, sorted(base.stop_ids), base.cache)
        self._machine, self._programs, self._table_pages = machine, programs, table_pages
        self._compiled = compiled and self.device.type == "cuda"
        self._program: Program | None = None
        self._fresh_rows = set[int]()  # whose draft is still blank
        self._report: list[list[int]] = []  # of the last pass; empty if that was a plain one
        self._ahead: Report | None = None  # of a pass that is under way already

    def _load(self) -> Program:
        """The state of all texts, filled up to the next size that there are graphs for."""
        limits = limits_of(self.method, [text.request for text in self.texts])
        size = next((bucket for bucket in BUCKETS if bucket >= len(self.texts)), -(-len(self.texts) // 64) * 64)
        state = self._state(size)
        key = (self.method.__name__, size, limits)  # type: ignore[attr-defined]
        if key not in self._programs:
            setting = Setting(self.model, self._machine, self.method, self.config, limits, self._compiled)
            self._programs[key] = Program(state, setting)
        else:
            self._programs[key].load(state)
        passes = self.state.draft.passes.tolist()
        self._fresh_rows = {row for row, done in enumerate(passes) if done == 0}
        return self._programs[key]

    def _state(self, size: int) -> State:
        """Padding repeats the first text, over the spare page and with nothing stored."""
        more = size - len(self.texts)
        rows = self._tensor([*range(len(self.texts)), *[0] * more], torch.int64)
        waiting = [text.clean[text.stored :] for text in self.texts]
        pending = [len(tokens) for tokens in waiting] + [0] * more
        ids = [tokens or [0] * self.size for tokens in waiting] + [[0] * self.size] * more
        stored = [text.stored for text in self.texts] + [0] * more
        lengths = (self._tensor(values, torch.int32) for values in (stored, pending))
        texts = BlockTable(self.cache.table(size, self._table_pages), *lengths)
        lanes = self.state.rows(rows)._replace(begin=self._tensor([*map(_begin, self.texts), *[0] * more], torch.int64))
        real = self._tensor([True] * len(self.texts) + [False] * more, torch.bool)
        return State(lanes, texts, self._tensor(ids, torch.int64), real)

    def draft_pass(self) -> list[int]:
        """One forward that commits what is pending and predicts; returns the rows whose block has closed.

        Where there are few tokens, the next pass is started before the report of this one is read, so that the device
        does not wait for the host. What has joined since then is not in the report, and waits for the next.
        """
        if self.watched and self._ahead is None:
            return self._plain_pass()
        report = self._start() if self._ahead is None else self._ahead
        self._ahead = self._start() if self._program is not None and self._goes_ahead() else None
        self._report = report.read()
        seen = min(len(self.texts), len(self._report))
        for text in self.texts[:seen]:
            text.nfe += 1
            text.stored = len(text.clean)
        self._report += [[0, 1] + [0] * self.size] * (len(self.texts) - seen)
        closed = [row for row in range(seen) if self._report[row][0]]
        self._fresh_rows = set(closed)
        return closed

    def _start(self) -> Report:
        """Start a pass of the form that the texts want; one that goes ahead takes what may come of the last."""
        if self._program is None:
            self._program = self._load()
        pending = self._goes_ahead() or any(text.stored < len(text.clean) for text in self.texts)
        width = self._program.setting.limits.width if self.method.SCORES else 1
        drafts = 0 if not self.method.DRAFTS else 1 if len(self._fresh_rows) == len(self.texts) else width
        long = any(len(text.clean) > LONG for text in self.texts)
        report = self._program.step(ForwardShape(self.size if pending else 0, self.size, drafts), long)
        return Report(report[: len(self.texts)])

    def _goes_ahead(self) -> bool:
        """Few tokens, among which a block to commit costs nothing where there is none; and not all at their end."""
        few = len(self.texts) * 2 * self.size <= MOST_AHEAD
        ending = all(len(text.new) + self.size >= text.request.max_new_tokens for text in self.texts)
        return few and not ending and not self.method.SCORES and not self.watched

    def _plain_pass(self) -> list[int]:
        """A pass as `Batch` does it, where somebody wants to see the drafts."""
        self._unload()
        self._report = []
        self.cache.lengths = self._tensor([text.stored for text in self.texts], torch.int64)
        return super().draft_pass()

    def sound(self) -> list[bool]:
        """Whose probabilities are numbers?"""
        return [bool(row[1]) for row in self._report[: len(self.texts)]] if self._report else super().sound()

    def block(self, row: int) -> list[int]:
        """The tokens of a draft after the last pass."""
        return [int(token) for token in self._report[row][2:]] if self._report else super().block(row)

    def show(self, watch: Watch) -> None:
        """A pass that was under way before anybody watched is not shown."""
        if not self._report:
            super().show(watch)

    def next_blocks(self, finished: set[int]) -> None:
        """After a pass on the device the next blocks have begun already; let finished texts leave."""
        if not self._report:
            super().next_blocks(finished)
        elif finished:
            self.leave(finished)

    def join(self, other: Batch) -> None:
        """Take over the requests of another batch, whose cache is of the same storage."""
        self._unload()
        super().join(other)

    def leave(self, finished: set[int]) -> None:
        """Drop these rows."""
        self._unload()
        if self._ahead is not None:
            left = [row for row in range(len(self._ahead)) if row not in finished]
            self._ahead = self._ahead.rows(left) if left else None
        super().leave(finished)

    def _unload(self) -> None:
        """Back from the program's memory, which other batches may use."""
        if self._program is not None:
            rows = torch.arange(len(self.texts), device=self.device)
            self.state = self._program.state.lanes.rows(rows)
            self._program = None


def _begin(text: Text) -> int:
    return len(text.clean)
