"""Many requests at a time: they enter and leave between passes, over pages of committed text that they share.

Every `step` admits what fits (first come, first served), brings new prompts into the cache, and makes one pass over
everything that is running, one forward for each method in use. A request reserves all pages it can need when it is
admitted, so what has begun always ends. Its output is what `generate` makes of it alone.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from freda.decode.batch import Batch, Output, Request, Text, Watch, check_requests
from freda.decode.config import EngineConfig
from freda.decode.device import DeviceBatch, ForwardBackend, Program, prefill, stays_on_device
from freda.decode.pages import PagedCache, Pages
from freda.errors import require
from freda.folders.model_folder import LoadedModel
from freda.methods import METHODS
from freda.methods.config import MethodName
from freda.methods.method import block_size
from freda.model.staircase import MOST_BLOCK
from freda.model.transformer import Transformer

# Most requests of an engine whose passes are compiled around the forward: some eighty kernels of 2 µs are 6% of a
# forward over few tokens. Compiling takes a while, and pays for an engine that is made for one stream.
MOST_COMPILED = 4
LOOK_BACK = 64  # tokens at the end of a text in which stop strings are looked for, beside the new block


class Event(NamedTuple):
    """What a step did for a request."""

    request: int
    tokens: list[int]  # newly committed
    finish: str  # "stop", "length", "cancelled" or "error"; empty: it goes on
    error: str = ""


class _Running:
    """A request that has been admitted, or waits."""

    def __init__(
        self, number: int, request: Request, kind: tuple[MethodName, bool], stop: Sequence[str], size: int
    ) -> None:
        self.number, self.kind, self.stop, self.size = number, kind, tuple(stop), size
        self.text = Text(number, request, size)
        self.table: list[int] = []
        self.begun = time.perf_counter()


class Engine:
    """Runs requests of one model. Not for several threads at once."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig = EngineConfig(),
        machine: Callable[[Transformer, Pages], ForwardBackend | None] | None = None,
    ) -> None:
        self.loaded, self.config, self.model = loaded, config, loaded.backbone
        for name in ("max_batch", "page_size", "queue", "prefill"):
            require(getattr(config, name) >= 1, f"{name} is {getattr(config, name)}; use 1 or more")
        size = loaded.method.block_size
        require(
            config.page_size % size == 0,
            f"page_size {config.page_size} is no multiple of the model's block size {size}",
        )
        longest = self.model.config.max_positions + size
        automatic = min(65_536, config.max_batch * longest) // config.page_size + 1
        self.pages = Pages(self.model, config.pages or automatic, config.page_size)
        self.waiting: deque[_Running] = deque()
        self.running: dict[int, _Running] = {}
        self.batches: dict[tuple[MethodName, bool], Batch] = {}  # by method, and whether passes stay on the device
        made = machine or functools.partial(_packed_model, int8=config.int8)
        whole = size <= MOST_BLOCK and size & (size - 1) == 0  # blocks that the kernels are made for
        self._machine = made(self.model, self.pages) if config.on_device and whole else None
        self._programs: dict[tuple[Any, ...], Program] = {}
        self._table_pages = min(self.pages.count, self.pages.needed(longest))
        self.outputs: dict[int, Output] = {}
        self._number = 0

    @property
    def busy(self) -> bool:
        """Is there anything to do?"""
        return bool(self.waiting or self.running)

    def submit(self, request: Request, *, method: str | None = None, stop: Sequence[str] = ()) -> int:
        """Queue a request; returns its number. One that can never run is refused at once."""
        name = method or self.loaded.method.name
        require(name in METHODS, f"there is no method {name!r}; use one of {', '.join(METHODS)}")
        rule, config = METHODS[name], self.loaded.method  # type: ignore[index]
        check_requests(self.model, rule, config, [request])
        require(all(stop), "a stop string is empty; leave it away")
        require(
            len(self.waiting) < self.config.queue,
            f"{len(self.waiting)} requests are waiting already, as many as the queue holds; try again later",
        )
        size = block_size(rule, config)
        length = len(request.prompt) + request.max_new_tokens
        require(
            length <= self.model.config.max_positions,
            f"prompt and answer have {length} tokens, the model is made for {self.model.config.max_positions}; "
            f"shorten the prompt or ask for fewer new tokens",
        )
        needed = self.pages.needed(length + size)
        require(
            needed <= self.pages.count,
            f"the request needs {needed} pages, the engine has {self.pages.count}; ask for fewer tokens or raise pages",
        )
        self._number += 1
        on_device = self._machine is not None and stays_on_device(self.model, config, request)
        kind: Any = (name, on_device)
        self.waiting.append(_Running(self._number, request, kind, stop, size))
        return self._number

    def cancel(self, number: int) -> None:
        """End a request now; its pages are free at once."""
        found = next((one for one in (*self.waiting, *self.running.values()) if one.number == number), None)
        if found is None:
            return
        if found in self.waiting:
            self.waiting.remove(found)
        else:
            batch = self.batches[found.kind]
            batch.leave({next(row for row, text in enumerate(batch.texts) if text.index == number)})
        self._finish(found, "cancelled")

    @torch.no_grad()
    def step(self, watch: Watch | None = None) -> list[Event]:
        """Admit what fits and make one pass over all that runs."""
        self.admit()
        events: list[Event] = []
        for batch in [batch for batch in self.batches.values() if batch.texts]:
            events += self._pass(batch, watch)
        return events

    def run(self, requests: Sequence[Request], **settings: object) -> list[Output]:
        """Run requests to their end, in order; `settings` are those of `submit`, for all."""
        numbers = []
        for request in requests:
            while len(self.waiting) >= self.config.queue:
                self.step()
            numbers.append(self.submit(request, **settings))  # type: ignore[arg-type]
        while self.busy:
            self.step()
        return [self.outputs.pop(number) for number in numbers]

    # -- inside ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def admit(self) -> None:
        """Move waiting requests in, as long as the first of them fits, and bring their prompts into the cache.

        One whose beginning is being computed for another waits for the next step, where it is known: sixty questions
        behind the same worked examples compute these once.
        """
        new: dict[tuple[MethodName, bool], list[_Running]] = {}
        coming: set[bytes] = set()
        while self.waiting and len(self.running) < self.config.max_batch:
            first = self.waiting[0]
            text, size = first.text, first.size
            last = 0 if METHODS[first.kind[0]].DRAFTS else 1  # what must not be stored before the first pass
            tokens = len(text.request.prompt) + text.request.max_new_tokens + size
            stored = text.clean[: len(text.clean) - last]
            begins = self.pages.first_unknown(stored, size)
            reserved = None if begins in coming else self.pages.reserve(stored, tokens, size)
            if reserved is None:
                break
            coming |= {begins} if begins else set()
            first.table, text.stored = reserved
            self.running[first.number] = self.waiting.popleft()
            new.setdefault(first.kind, []).append(first)
        for kind, admitted in new.items():
            self._prefill(kind, admitted)

    def _prefill(self, kind: tuple[MethodName, bool], admitted: Sequence[_Running]) -> None:
        cache = PagedCache(self.pages, [one.table for one in admitted], [one.text.stored for one in admitted])
        texts, stops = [one.text for one in admitted], self.loaded.tokenizer.stop_ids
        batch = Batch(self.model, METHODS[kind[0]], self.loaded.method, texts, stops, cache)
        if kind[1] and self._machine is not None:
            last = 0 if METHODS[kind[0]].DRAFTS else 1
            prefill(self._machine, cache, texts, admitted[0].size, last, self.config.prefill)
        batch.prefill(self.config.prefill)  # what begins like another text, or everything
        for one in admitted:
            self.pages.learn(one.table, one.text.clean[: one.text.stored], one.size)
        if kind in self.batches and self.batches[kind].texts:
            running = self.batches[kind]
            assert isinstance(running.cache, PagedCache)
            running.cache.join(cache)
            running.join(batch)
        elif kind[1] and self._machine is not None:
            compiled = self.config.max_batch <= MOST_COMPILED
            programs, width = self._programs, self._table_pages
            self.batches[kind] = DeviceBatch(batch, self._machine, programs, width, compiled=compiled)
        else:
            self.batches[kind] = batch

    def _pass(self, batch: Batch, watch: Watch | None) -> list[Event]:
        """One pass over a batch, and what it finished."""
        batch.watched = watch is not None
        closed = set(batch.draft_pass())
        if watch is not None:
            batch.show(watch)
        sound = batch.sound()
        events, finished = [], set()
        for row, text in enumerate(batch.texts):
            one = self.running[text.index]
            if not sound[row]:
                finished.add(row)
                events.append(
                    Event(one.number, [], "error", "the model's probabilities are not numbers: damaged weights")
                )
                self._finish(one, "error")
            elif row in closed:
                before = len(text.new)
                reason = text.close_block(batch.block(row), batch.stop_ids)
                reason = reason if reason else "stop" if self._stopped(one) else ""
                events.append(Event(one.number, text.new[before:], reason))
                if reason:
                    finished.add(row)
                    self._finish(one, reason)
        batch.next_blocks(finished)
        return events

    def _stopped(self, one: _Running) -> bool:
        if not one.stop:
            return False
        longest = max(len(stop.encode()) for stop in one.stop)  # no token is shorter than a byte
        tail = self.loaded.tokenizer.decode(one.text.new[-(max(LOOK_BACK, longest) + one.size) :])
        return any(stop in tail for stop in one.stop)

    def _finish(self, one: _Running, reason: str) -> None:
        """Write down what came of a request, and free its pages; full ones are remembered."""
        if one.table:
            self.pages.learn(one.table, one.text.clean[: one.text.stored], one.size)
            self.pages.release(one.table)
            one.table = []
        self.running.pop(one.number, None)
        text = one.text
        self.outputs[one.number] = Output(text.new, text.nfe, reason, time.perf_counter() - one.begun)


def _packed_model(model: Transformer, pages: Pages, *, int8: bool) -> ForwardBackend | None:
    """The kernels of decoding, where they are made for the model; elsewhere the model does its forwards itself."""
    weight = model.embed_tokens.weight
    if not weight.is_cuda or weight.dtype != torch.bfloat16:
        return None
    from freda.decode import packed

    return packed.PackedModel(model, pages, int8=int8) if packed.fits(model) else None
