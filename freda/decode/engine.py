"""Many requests at a time: they enter and leave between passes, over pages of committed text that they share.

`submit` queues a request and returns its `Handle`. Every step admits what fits (first come, first served), brings new
prompts into the cache, makes one pass over everything that is running, one forward for each kind of batch, and files
what happened with the requests. A request reserves all pages it can need when it is admitted, so what has begun always
ends. Its output is what `generate` makes of it alone.

Threads: any number may submit, read and cancel; one steps at a time. A reader without news takes the next step itself,
or waits while another thread does, so no loop has to run in the background. Cancelling never blocks, since it may
happen while a handle is garbage-collected in the middle of a step: it leaves a flag, and whoever steps looks for flags.
"""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch

from freda.decode.batch import RequestBatch
from freda.decode.config import EngineConfig
from freda.decode.device import DeviceBatch, ForwardBackend, Program, prefill
from freda.decode.pages import PagedCache, Pages, page_count
from freda.decode.request import Event, Output, Pass, QueueFull, Request, Sequence
from freda.errors import FredaError, note, require
from freda.folders.model_folder import LoadedModel
from freda.methods import method_named
from freda.methods.method import Method
from freda.model.staircase import MOST_BLOCK
from freda.model.transformer import Transformer

# Engines for at most so many requests are compiled around the forward: some eighty kernels of 2 µs are 6% of a
# forward over few tokens. Compiling takes a while, and pays for an engine that is made for one stream.
MOST_COMPILED = 4

Kind = tuple[Method, bool]  # what a batch has in common: the method, and whether its passes stay on the device


class Handle:
    """A submitted request: iterate over its events, wait for its result, or cancel it.

    A request whose reader goes away is cancelled: when the iteration ends early, or nobody holds the handle any more.
    """

    def __init__(self, engine: Engine, sequence: Sequence) -> None:
        self._engine, self._sequence = engine, sequence

    @property
    def finished(self) -> bool:
        """Whether the request has ended, one way or another."""
        return self._sequence.output is not None

    def __iter__(self) -> Iterator[Event | Pass]:
        mail = self._sequence.mail
        try:
            while True:
                finished = self.finished  # asked first: the last event is filed before the output
                if mail:
                    yield mail.popleft()
                elif finished:
                    return
                else:
                    self._engine.step(lambda: bool(mail) or self.finished)
        finally:
            self.cancel()

    def take(self) -> list[Event | Pass]:
        """The events filed since the last call; takes no step."""
        mail = self._sequence.mail
        return [mail.popleft() for _ in range(len(mail))]

    def result(self) -> Output:
        """Wait for the end of the request."""
        while self._sequence.output is None:
            self._engine.step(lambda: self.finished)
        return self._sequence.output

    def cancel(self) -> None:
        """End the request and free its pages, now or after the current step."""
        if not self.finished:
            self._engine.cancel(self._sequence)

    def __del__(self) -> None:
        if not self.finished:  # this may run anywhere, so it must not wait for a lock
            self._engine.flagged.append(self._sequence)


class Engine:
    """Runs requests of one model."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig = EngineConfig(),
        machine: Callable[[Transformer, Pages], ForwardBackend | None] | None = None,
    ) -> None:
        self.loaded, self.config, self.model = loaded, config, loaded.backbone
        for name in ("max_batch", "page_size", "queue", "prefill"):
            require(getattr(config, name) >= 1, f"{name} is {getattr(config, name)}; use 1 or more")
        size, limit = loaded.method.block_size, self.model.config.max_positions
        self.max_length = min(config.max_length or limit, limit)  # tokens of a prompt and its answer
        page_size = math.lcm(config.page_size, size)
        needed = -(-(self.max_length + size) // page_size)
        count = config.pages or page_count(self.model, page_size, config.max_batch, needed)
        self.pages = Pages(self.model, count, page_size)
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.batches: dict[Kind, RequestBatch] = {}
        self.flagged: deque[Sequence] = deque()  # to be cancelled
        self.passes = 0  # made over batches so far
        self.waited = 0.0  # seconds that the host has waited for reports of the device
        self._current: Kind | None = None  # the batch that is being changed
        self._news = threading.Condition(threading.Lock())
        self._stepper = 0  # the thread that steps; guarded by `_news`, like what is appended to `waiting`
        self._number = 0
        self._programs: dict[tuple[Any, ...], Program] = {}
        self._table_pages = min(self.pages.count, needed)
        self._explained = not config.on_device or not self.model.embed_tokens.weight.is_cuda
        made = machine or functools.partial(_packed_model, int8=config.int8)
        whole = size <= MOST_BLOCK and size & (size - 1) == 0  # blocks that the kernels are made for
        self._machine = made(self.model, self.pages) if config.on_device and whole else None
        if self._machine is None:
            self._explain(_why_plain(self.model, size))

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        self._sweep()
        return bool(self.waiting or self.running)

    def submit(self, request: Request) -> Handle:
        """Queue a request. One that can never run is refused at once; `QueueFull` means: try again later."""
        method = self.check(request)
        reason = method.off_device(self.loaded.parts, request)
        if self._machine is not None and reason:
            self._explain(f"a request needs the plain path: {reason}")
        kind = (method, self._machine is not None and not reason and not request.watch)
        with self._news:
            if len(self.waiting) >= self.config.queue:
                full = f"{len(self.waiting)} requests are waiting, as many as the queue holds"
                raise QueueFull(f"{full}; try again later")
            self._number += 1
            sequence = Sequence(self._number, request, method.layout.block, kind, self.loaded.tokenizer.decode)
            handle = Handle(self, sequence)
            self.waiting.append(sequence)
        self._sweep()
        return handle

    def check(self, request: Request) -> Method:
        """Refuse a request that can never run; returns its method."""
        method = method_named(request.method, self.loaded.method)
        method.check(self.loaded.parts, request, request.prompt)
        length = len(request.prompt) + request.max_new_tokens
        require(
            length <= self.max_length,
            f"prompt and answer have {length} tokens, the limit is {self.max_length}; "
            f"shorten the prompt or ask for fewer new tokens",
        )
        needed = self.pages.needed(length + method.layout.block)
        require(
            needed <= self.pages.count,
            f"the request needs {needed} pages, the engine has {self.pages.count}; ask for fewer tokens or raise pages",
        )
        return method

    def completed(self, requests: Iterable[Request]) -> Generator[tuple[int, Output], None, None]:
        """Run requests and keep the engine full; yields (index, output) as each finishes, whatever the order.

        A request that is refused has finish "error". Ending the iteration early cancels what is left.
        """
        handles: dict[int, Handle] = {}
        numbered = enumerate(requests)
        following = next(numbered, None)
        try:
            while following or handles:
                while following and len(handles) < 2 * self.config.max_batch and (handle := self._offer(following[1])):
                    handles[following[0]] = handle
                    following = next(numbered, None)
                self.step(lambda: any(handle.finished for handle in handles.values()))
                for index in [index for index, handle in handles.items() if handle.finished]:
                    yield index, handles.pop(index).result()
        finally:
            for handle in handles.values():
                handle.cancel()

    def _offer(self, request: Request) -> Handle | None:
        """Submit a request; one that is refused has finished with an error. None if the queue is full."""
        try:
            return self.submit(request)
        except QueueFull:
            return None
        except FredaError as error:
            refused = Sequence(0, request, 1)
            refused.end(Event([], "error", str(error)))
            return Handle(self, refused)

    def run(self, requests: collections.abc.Sequence[Request]) -> list[Output]:
        """Run requests to their end; returns their outputs in order."""
        outputs = dict(self.completed(requests))
        return [outputs[index] for index in range(len(requests))]

    def prepare(self) -> None:
        """Make ready what would otherwise be made while requests run."""

    def admit(self) -> None:
        """Admit what fits and bring it into the cache; a step without its passes, to be timed by itself."""
        self._alone(self._admit, lambda: False)

    def step(self, done: Callable[[], bool] = lambda: False) -> None:
        """Admit what fits and make one pass over all that runs, or wait while another thread does so until `done`."""
        self._alone(self._step, done)

    # -- threads -----------------------------------------------------------------------------------------------------

    def cancel(self, sequence: Sequence) -> None:
        """End a request now, or after the current step. Never blocks."""
        self.flagged.append(sequence)
        self._sweep()

    def _alone(self, work: Callable[[], None], done: Callable[[], bool]) -> None:
        """Do `work` as the only thread that works on the requests, or return as soon as `done`."""
        mine, thread = False, threading.get_ident()
        try:
            with self._news:
                # A thread that finds itself was interrupted twice, in the middle of the end of its step.
                while self._stepper not in (0, thread) and not done():
                    self._news.wait()
                if done():
                    return
                mine, self._stepper = True, thread
            self._guarded(work)
        finally:
            if mine:
                with self._news:
                    self._stepper = 0
                    self._news.notify_all()
            self._sweep()

    @torch.no_grad()
    def _guarded(self, work: Callable[[], None]) -> None:
        """Cancel flagged requests and do `work`; an error or an interrupt leaves nothing half-done behind."""
        try:
            self._cancel_flagged()
            work()
        except BaseException as error:
            self._recover(str(error) or type(error).__name__)
            raise
        finally:
            self._current = None

    def _sweep(self) -> None:
        """Cancel flagged requests, unless another thread is stepping, which will do so afterwards. Never blocks.

        Flags are checked again after the lock is released, since a thread that could not get it has left its flag.
        """
        while self.flagged and self._news.acquire(blocking=False):
            try:
                if self._stepper:
                    return
                self._guarded(lambda: None)
                self._news.notify_all()
            finally:
                self._news.release()

    def _cancel_flagged(self) -> None:
        while self.flagged:
            one = self.flagged.popleft()
            if one.output is not None:
                continue
            if one.index in self.running:
                self._current = one.kind
                batch = self.batches[one.kind]
                batch.leave({batch.sequences.index(one)})
            with contextlib.suppress(ValueError):  # it was running, or its submission was interrupted
                self.waiting.remove(one)
            self._finish(one, Event([], "cancelled"))

    def _recover(self, error: str) -> None:
        """After an error: end the requests of the batch that was being changed, and those in no batch yet.

        Pages are recounted from the requests that are left, and prefixes are forgotten.
        """
        if self._current is not None:
            self.batches.pop(self._current, None)
        whole = {one.index for batch in self.batches.values() for one in batch.sequences}
        for one in [one for one in self.running.values() if one.index not in whole]:
            del self.running[one.index]
            with contextlib.suppress(ValueError):
                self.waiting.remove(one)  # where its admission was interrupted
            if one.output is None:
                one.end(Event([], "error", error))
        self.pages.restore([one.table for one in self.running.values()])

    # -- steps -------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._admit()
        for kind, batch in list(self.batches.items()):
            if batch.sequences:
                self._current = kind
                self._pass(batch)

    def _admit(self) -> None:
        """Move waiting requests in, as long as the first of them fits, and bring their prompts into the cache.

        A request whose first pages are being computed for another waits for the next step, where they are known: sixty
        questions behind the same worked examples compute these once.
        """
        new: dict[Kind, list[Sequence]] = {}
        coming: set[bytes] = set()
        while self.waiting and len(self.running) < self.config.max_batch:
            first = self.waiting[0]
            tokens = len(first.request.prompt) + first.request.max_new_tokens + first.size
            stored = first.clean[: len(first.clean) - first.kind[0].layout.held]
            begins = self.pages.first_unknown(stored, first.size)
            reserved = None if begins in coming else self.pages.reserve(stored, tokens, first.size)
            if reserved is None:
                break
            coming |= {begins} if begins else set()
            first.table, first.stored = reserved
            self.running[first.index] = first
            self.waiting.popleft()
            new.setdefault(first.kind, []).append(first)
        for kind, admitted in new.items():
            self._current = kind
            self._prefill(kind, admitted)
        self._current = None

    def _prefill(self, kind: Kind, admitted: list[Sequence]) -> None:
        cache = PagedCache(self.pages, [one.table for one in admitted], [one.stored for one in admitted])
        method, on_device = kind
        batch = RequestBatch(self.loaded.parts, method, admitted, self.loaded.tokenizer.stop_ids, cache)
        machine = self._machine if on_device else None
        if machine is not None:
            prefill(machine, cache, admitted, method.layout.block, method.layout.held, self.config.prefill)
        batch.prefill(self.config.prefill)  # prompts with known pages, or all of them
        for one in admitted:
            self.pages.learn(one.table, one.clean[: one.stored], one.size)
        running = self.batches.get(kind)
        if running is not None and running.sequences:
            assert isinstance(running.cache, PagedCache)
            running.cache.join(cache)
            running.join(batch)
        elif machine is not None:
            compiled = self.config.max_batch <= MOST_COMPILED
            self.batches[kind] = DeviceBatch(batch, machine, self._programs, self._table_pages, compiled=compiled)
        else:
            self.batches[kind] = batch

    def _pass(self, batch: RequestBatch) -> None:
        """One pass over a batch; what it did for each request is filed with the request."""
        closed, finished = batch.draft_pass(), set()
        self.passes += 1
        for one, seen in batch.passes():
            one.mail.append(seen)
        for row, ids in closed.items():
            one = batch.sequences[row]
            event = one.close_block(ids, batch.stop_ids)
            if event.finish:
                finished.add(row)
                self._finish(one, event)
            else:
                one.mail.append(event)
        batch.next_blocks(finished)

    def _finish(self, one: Sequence, event: Event) -> None:
        """Free the pages of a request, and file its last event and its output; full pages are remembered."""
        if one.table:
            self.pages.learn(one.table, one.clean[: one.stored], one.size)
            self.pages.release(one.table)
            one.table = []
        self.running.pop(one.index, None)
        one.end(event)

    def _explain(self, why: str) -> None:
        """Say once why an engine on a GPU does not use its kernels."""
        if not self._explained:
            self._explained = True
            note(f"decoding without the GPU kernels: {why}")


def _why_plain(model: Transformer, size: int) -> str:
    """Why the kernels are not used for a model."""
    dtype = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    if dtype != "bfloat16":
        return f"the weights are {dtype}; the kernels need bfloat16"
    if size > MOST_BLOCK or size & (size - 1):
        return f"blocks have {size} tokens; the kernels need a power of two, at most {MOST_BLOCK}"
    return "the model's shape is not one that the kernels are made for"


def _packed_model(model: Transformer, pages: Pages, *, int8: bool) -> ForwardBackend | None:
    """The kernels of decoding, where they are made for the model; elsewhere the model does its forwards itself."""
    weight = model.embed_tokens.weight
    if not weight.is_cuda or weight.dtype != torch.bfloat16:
        return None
    from freda.decode import packed

    return packed.PackedModel(model, pages, int8=int8) if packed.fits(model) else None
