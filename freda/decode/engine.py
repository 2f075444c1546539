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
import gc
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace

import torch

from freda.decode.config import EngineConfig
from freda.decode.device import ForwardBackend
from freda.decode.handle import Handle
from freda.decode.pages import Pages, page_count, page_keys
from freda.decode.places import Places
from freda.decode.plain import PlainModel
from freda.decode.request import Event, Output, QueueFull, Request, Sequence
from freda.errors import FredaError, note, require
from freda.folders.model_folder import LoadedModel
from freda.methods import method_named
from freda.methods.method import Method
from freda.model.parts import Parts
from freda.model.staircase import MOST_BLOCK

# Engines for at most so many requests are compiled around the forward: some eighty kernels of 2 µs are 6% of a
# forward over few tokens. Compiling takes a while, and pays for an engine that is made for one stream.
MOST_COMPILED = 4


class Engine:
    """Runs requests of one model."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig = EngineConfig(),
        backend: Callable[[Parts, Method, Pages], ForwardBackend] | None = None,
    ) -> None:
        self.loaded, self.config, self.model = loaded, config, loaded.backbone
        for name in ("max_batch", "page_size", "queue", "prefill"):
            require(getattr(config, name) >= 1, f"{name} is {getattr(config, name)}; use 1 or more")
        require(config.max_length >= 0, f"max_length is {config.max_length}; use 0 (all positions) or more")
        geometry, limit = loaded.method.geometry, self.model.config.max_positions
        self.max_length = min(config.max_length or limit, limit)  # tokens of a prompt and its answer
        # Pages hold whole blocks. An autoregressive model may be asked to decode blocks in the paper's layout, too.
        page_size = math.lcm(config.page_size, geometry.context if geometry.drafts else loaded.method.block_size)
        needed = -(-(self.max_length + loaded.method.block_size) // page_size)
        count = config.pages or page_count(self.model, page_size, config.max_batch, needed)
        self.pages = Pages(self.model, count, page_size)
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.batches: dict[Method, Places] = {}
        self.flagged: deque[Sequence] = deque()  # to be cancelled
        self._current: Method | None = None  # the batch that is being changed
        self._news = threading.Condition(threading.Lock())
        self._stepper = 0  # the thread that steps; guarded by `_news`, like what is appended to `waiting`
        self._number = 0
        self._table_pages = min(self.pages.count, needed)
        self._stop_ids = set(loaded.tokenizer.stop_ids)
        self._explained = not config.on_device or not self.model.embed_tokens.weight.is_cuda
        self._made, self._packed = backend, None if backend else self._packed_model()

    def _packed_model(self) -> ForwardBackend | None:
        """The kernels of decoding, where they are made for the model; elsewhere the model does its forwards itself."""
        weight, size = self.model.embed_tokens.weight, self.loaded.method.block_size
        if not self.config.on_device or not weight.is_cuda:
            return None
        if self.loaded.parts.adapter is not None:  # they would need its matrices, for the rows of drafts
            why = "an adapter on draft rows runs without them"
        elif weight.dtype != torch.bfloat16:
            why = f"the weights are {str(weight.dtype).removeprefix('torch.')}; the kernels need bfloat16"
        elif size > MOST_BLOCK or size & (size - 1):
            why = f"blocks have {size} tokens; the kernels need a power of two, at most {MOST_BLOCK}"
        else:
            from freda.decode import packed

            if packed.fits(self.model):
                return packed.PackedModel(self.model, self.pages, int8=self.config.int8)
            why = "the model's shape is not one that the kernels are made for"
        self._explain(why)
        return None

    def _backend(self, method: Method) -> ForwardBackend:
        """What makes the forwards of a method."""
        if self._made is not None:
            return self._made(self.loaded.parts, method, self.pages)
        if self._packed is not None:
            reason = method.off_device(self.loaded.parts)
            if not reason:
                return self._packed
            self._explain(reason)
        return PlainModel(self.loaded.parts, method, self.pages)

    @property
    def passes(self) -> int:
        """Passes that were started so far."""
        return sum(places.passes for places in list(self.batches.values()))

    @property
    def waited(self) -> float:
        """Seconds that the host has waited for the device so far."""
        return sum(places.waited for places in list(self.batches.values()))

    @property
    def on_device(self) -> bool:
        """Whether any of the requests so far were decoded by the kernels."""
        return any(places.ahead for places in list(self.batches.values()))

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        self._sweep()
        return bool(self.waiting or self.running)

    def submit(self, request: Request, ended: deque[int] | None = None) -> Handle:
        """Queue a request. One that can never run is refused at once; `QueueFull` means: try again later.

        When it has ended, its number is appended to `ended`.
        """
        request = self.begun(request)
        method = self.check(request)
        with self._news:
            if len(self.waiting) >= self.config.queue:
                full = f"{len(self.waiting)} requests are waiting, as many as the queue holds"
                raise QueueFull(f"{full}; try again later")
            self._number += 1
            decode = self.loaded.tokenizer.decode
            sequence = Sequence(self._number, request, method, decode, ended)
            handle = Handle(self, sequence)
            self.waiting.append(sequence)
        self._sweep()
        return handle

    def begun(self, request: Request) -> Request:
        """The request; an empty prompt becomes BOS, if the method predicts behind a known token and there is one."""
        require(isinstance(request, Request), f"the request is {request!r:.80}; make a Request")
        if request.prompt or not method_named(request.method, self.loaded.method).geometry.held:
            return request
        bos = self.loaded.tokenizer.bos_id
        return request if bos is None else replace(request, prompt=[bos])

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
        needed = self.pages.needed(length + method.geometry.block)
        require(
            needed <= self.pages.count,
            f"the request needs {needed} pages, the engine has {self.pages.count}; ask for fewer tokens or raise pages",
        )
        return method

    def completed(self, requests: Iterable[Request]) -> Generator[tuple[int, Output], None, None]:
        """Run requests and keep the engine full; yields (index, output) as each finishes, whatever the order.

        A request that is refused has finish "error". Ending the iteration early cancels what is left.
        """
        handles: dict[int, tuple[int, Handle]] = {}
        ended: deque[int] = deque()
        numbered = enumerate(requests)
        following = next(numbered, None)
        try:
            while following or handles:
                full = len(handles) >= 2 * self.config.max_batch
                handle = None if following is None or full else self._offer(following[1], ended)
                if following and handle:
                    handles[handle.number] = (following[0], handle)
                    following = next(numbered, None)
                    continue
                if not ended:
                    self.step(lambda: bool(ended))
                while ended:
                    index, handle = handles.pop(ended.popleft())
                    yield index, handle.result()
        finally:
            for _, handle in handles.values():
                handle.cancel()

    def _offer(self, request: Request, ended: deque[int]) -> Handle | None:
        """Submit a request; one that is refused has finished with an error. None if the queue is full."""
        try:
            return self.submit(request, ended)
        except QueueFull:
            return None
        except FredaError as error:
            with self._news:
                self._number += 1
                refused = Sequence(self._number, request, self.loaded.method, ended=ended)
            refused.end(Event([], "error", str(error)))
            return Handle(self, refused)

    def run(self, requests: collections.abc.Sequence[Request]) -> list[Output]:
        """Run requests to their end; returns their outputs in order."""
        outputs = dict(self.completed(requests))
        return [outputs[index] for index in range(len(requests))]

    def prepare(self, request: Request | None = None) -> None:
        """Make all that requests like this one may need beforehand: on a GPU, graphs for every number of them."""
        asked = request or Request(prompt=())
        method = method_named(asked.method, self.loaded.method)
        gc.collect()
        gc.freeze()  # every capture looks for garbage, among a million objects of torch
        try:
            self._alone(lambda: self._places(method).prepare(asked, self.config.prefill), lambda: False)
        finally:
            gc.unfreeze()

    def admit(self) -> None:
        """Admit what fits and bring it into the cache, without a pass: prefill, to be timed by itself."""

        def work() -> None:
            self._admit()
            for method, places in self.batches.items():
                self._current = method
                while places.filling:
                    self._start(places, passes=False)

        self._alone(work, lambda: False)

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
            one = self.flagged[0]  # the flag stays until it is over, in case of an interrupt
            if one.output is None:
                if one.index in self.running:
                    self._current = one.kind
                    self.batches[one.kind].remove(one)
                with contextlib.suppress(ValueError):  # it was running, or its submission was interrupted
                    self.waiting.remove(one)
                self._finish(one, Event([], "cancelled"))
            self._current = None
            self.flagged.popleft()

    def _recover(self, error: str) -> None:
        """After an error: end the requests of the batch that was being changed, and those in no batch yet.

        Pages are recounted from the requests that are left, and prefixes are forgotten.
        """
        if self._current is not None:
            self.batches.pop(self._current, None)
        whole = {one.index for places in self.batches.values() for one in places.texts if one is not None}
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
        for method, places in list(self.batches.items()):
            if len(places) or places.flights:
                self._current = method
                self._pass(places)

    def _admit(self) -> None:
        """Give waiting requests pages and a row, as long as the first of them fits.

        A request whose first unknown page is being computed for another waits until it is known: sixty questions behind
        the same worked examples compute these once, though they may come in pieces.
        """
        filling = [text for places in self.batches.values() for text in places.filling] if self.waiting else []
        coming = {self.pages.first_unknown(self._prompt_keys(text)) for text in filling} - {None}
        while self.waiting and len(self.running) < self.config.max_batch:
            first = self.waiting[0]
            tokens = len(first.request.prompt) + first.request.max_new_tokens + first.geometry.block
            keys = self._prompt_keys(first)
            begins = self.pages.first_unknown(keys)
            reserved = None if begins in coming else self.pages.reserve(keys, tokens)
            if reserved is None:
                break
            coming |= {begins} - {None}
            first.table, first.stored = reserved
            self.running[first.index] = first
            self.waiting.popleft()
            places, self._current = self._places(first.kind), first.kind
            places.add(first)
            self._current = None

    def _places(self, method: Method) -> Places:
        """The rows of a method's requests."""
        if method not in self.batches:
            backend = self._backend(method)
            compiled = self.config.max_batch <= MOST_COMPILED
            size, stops = (self.config.max_batch, self._table_pages), self.loaded.tokenizer.stop_ids
            self.batches[method] = Places(self.loaded.parts, method, backend, stops, size, compiled=compiled)
        return self.batches[method]

    def _pass(self, places: Places) -> None:
        """Start a pass and read the one before; what it did for each request is filed with the request."""
        started = self._start(places)
        if not places.flights or (started and places.ahead and len(places.flights) < 2):
            return
        for one, seen, ids in places.read():
            if seen is not None:
                one.mail.append(seen)
            if ids is None:
                continue
            event = one.close_block(ids, self._stop_ids)
            if event.finish:
                places.remove(one)
                self._finish(one, event)
            else:
                one.mail.append(event)

    def _start(self, places: Places, *, passes: bool = True) -> bool:
        """Start what comes next on the device; full pages of prompts that it fills can be shared from then on."""
        filled, started = places.start(self.config.prefill, passes=passes)
        for one in filled:
            self.pages.learn(one.table, self._keys(one, one.stored))
        return started

    def _prompt_keys(self, one: Sequence) -> list[bytes]:
        """The keys of the full pages of a prompt, as far as it is stored before its first pass."""
        return self._keys(one, len(one.clean) - one.geometry.held)

    def _keys(self, one: Sequence, stored: int) -> list[bytes]:
        """The keys of the full pages among the first `stored` tokens of a request's text."""
        size = self.pages.page_size
        if len(one.keys) < stored // size:
            one.keys = page_keys(one.clean[:stored], size, one.geometry.context, one.keys)
        return one.keys[: stored // size]

    def _finish(self, one: Sequence, event: Event) -> None:
        """Free the pages of a request, and file its last event and its output; full pages are remembered."""
        if one.table:
            self.pages.learn(one.table, self._keys(one, one.stored))
            self.pages.release(one.table)
            one.table = []
        one.end(event)
        self.running.pop(one.index, None)  # last: who is neither running nor ended would never end

    def _explain(self, why: str) -> None:
        """Say once why an engine on a GPU does not use its kernels."""
        if not self._explained:
            self._explained = True
            note(f"decoding without the GPU kernels: {why}")
