"""Requests to the engine, the events while they run, and their outputs. No torch here."""

from __future__ import annotations

import collections.abc
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from freda.decode.config import DecodeConfig
from freda.decode.stops import StopMatcher
from freda.errors import FredaError, require


class QueueFull(FredaError):
    """The engine has as many waiting requests as its queue holds: try again later."""


@dataclass(frozen=True, kw_only=True)
class Request(DecodeConfig):
    """One sequence to continue, and how."""

    prompt: collections.abc.Sequence[int]
    method: str | None = None  # the model's own by default
    stop: str | collections.abc.Sequence[str] = ()  # strings that end the text; a tuple once checked
    watch: bool = False  # file every pass over a block, too

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "stop", stop_strings(self.stop))


def stop_strings(stop: object) -> tuple[str, ...]:
    """Stop strings as a tuple; one string alone is one stop string."""
    if not isinstance(stop, Iterable):
        raise FredaError(f"stop is {stop!r}; use a string or a list of strings")
    words = (stop,) if isinstance(stop, str) else tuple(stop)
    for word in words:
        require(isinstance(word, str), f"a stop string is {word!r} ({type(word).__name__}); use strings")
        require(bool(word), "a stop string is empty; omit it")
    return words


@dataclass(frozen=True)
class Output:
    """What became of a request."""

    tokens: list[int]  # new tokens, up to and including the stop token
    nfe: int  # forwards that chose or committed tokens of this request
    finish: str  # "stop", "length", "cancelled" or "error"
    seconds: float  # since it was submitted
    error: str = ""

    @property
    def tpf(self) -> float:
        """Tokens per forward."""
        return len(self.tokens) / max(1, self.nfe)


class Event(NamedTuple):
    """A block of a request was committed, or the request has ended."""

    tokens: list[int]  # newly committed
    finish: str = ""  # "stop", "length", "cancelled" or "error"; empty while the request is running
    error: str = ""


class Pass(NamedTuple):
    """One request's block after one pass; for drawing."""

    request: int
    block: int
    number: int  # 1 is the blank draft
    ids: list[int]
    prob: list[float]
    given: list[bool]
    committed: list[bool]
    closed: bool
    candidates: list[list[int]]  # the drafts that this pass has seen
    scores: list[float]  # of the candidates: ℓ + τ·s, without the noise
    winner: int


class Sequence:
    """The progress of one request: its tokens, its pages, and the events that its reader has not seen yet."""

    def __init__(self, index: int, request: Request, size: int, kind: Any = None) -> None:
        whole = len(request.prompt) // size * size
        self.index, self.request, self.size = index, request, size
        self.kind = kind  # which batch of the engine it belongs to
        self.clean = list(request.prompt[:whole])  # committed tokens: whole blocks
        self.tail = list(request.prompt[whole:])  # prompt tokens given in the first generated block
        self.stored = 0  # how many of `clean` are in the cache
        self.new: list[int] = []
        self.nfe = 0
        self.table: list[int] = []  # its pages
        self.matcher: StopMatcher | None = None
        self.mail: deque[Event | Pass] = deque()
        self.output: Output | None = None
        self.begun = time.perf_counter()

    def close_block(self, ids: list[int], stop_ids: set[int]) -> str | None:
        """Append a closed block; returns why the sequence is finished, if it is."""
        given, self.tail = len(self.tail), []
        for token in ids[given:]:
            self.new.append(token)
            if token in stop_ids:
                return "stop"
            if len(self.new) == self.request.max_new_tokens:
                return "length"
        self.clean += ids
        return None

    def end(self, event: Event) -> None:
        """File the last event, then the output: a reader that sees the output has all events."""
        self.mail.append(event)
        seconds = time.perf_counter() - self.begun
        self.output = Output(self.new, self.nfe, event.finish, seconds, event.error)


Watch = Callable[[Pass], None]
