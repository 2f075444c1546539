"""Requests to the engine, what happens while they run, their outputs, and the strings that end them. No torch here."""

from __future__ import annotations

import time
from collections import Counter, abc, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from freda.decode.config import DecodeConfig
from freda.errors import FredaError, require

UNFINISHED = "\ufffd"  # what a decoder makes of a character whose last bytes are still to come
Decode = abc.Callable[[list[int]], str]
DAMAGED = "the model's probabilities are not finite: its weights are damaged, or too large for their precision"


class QueueFull(FredaError):
    """The engine has as many waiting requests as its queue holds: try again later."""


@dataclass(frozen=True, kw_only=True)
class Request(DecodeConfig):
    """One sequence to continue, and how."""

    prompt: abc.Sequence[int]
    method: str | None = None  # the model's own by default
    stop: str | abc.Sequence[str] = ()  # strings that end the text; a tuple once checked
    watch: bool = False  # file every pass over a block, too

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = isinstance(self.prompt, abc.Sequence) and not isinstance(self.prompt, str | bytes | bytearray)
        require(listed, f"the prompt of a request is {self.prompt!r:.80}; use a list of token ids")
        odd = next((one for one in self.prompt if type(one) is not int), 0)
        require(type(odd) is int, f"the prompt of a request holds {odd!r:.80} ({type(odd).__name__}); use token ids")
        named = self.method is None or isinstance(self.method, str)
        require(named, f"method is {self.method!r:.80}; use the name of a method")
        object.__setattr__(self, "stop", stop_strings(self.stop))


def stop_strings(stop: object) -> tuple[str, ...]:
    """Stop strings as a tuple; one string alone is one stop string."""
    if not isinstance(stop, abc.Iterable):
        raise FredaError(f"stop is {stop!r}; use a string or a list of strings")
    words = (stop,) if isinstance(stop, str) else tuple(stop)
    for word in words:
        require(isinstance(word, str), f"a stop string is {word!r} ({type(word).__name__}); use strings")
        require(bool(word), "a stop string is empty; omit it")
    return words


@dataclass(frozen=True)
class Output:
    """What became of a request."""

    tokens: list[int]  # new tokens, up to and including the stop token, or the last of a stop string
    nfe: int  # forwards that chose or committed tokens of this request
    finish: str  # "stop", "length", "cancelled" or "error"
    seconds: float  # since it was submitted
    error: str = ""
    accepted: dict[int, int] = field(default_factory=dict)  # forwards by how many of the tokens they made final

    @property
    def tpf(self) -> float:
        """Tokens per forward."""
        return len(self.tokens) / max(1, self.nfe)


def accepted_in(several: abc.Iterable[abc.Mapping[Any, int]]) -> dict[str, int]:
    """Forwards of several outputs by how many tokens they made final, as files have them."""
    summed: Counter[int] = Counter()
    for accepted in several:
        summed.update({int(tokens): forwards for tokens, forwards in accepted.items()})
    return {str(tokens): summed[tokens] for tokens in sorted(summed)}


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
    closed: int  # tokens that are final now: a prefix of the block, or none
    candidates: list[list[int]]  # the drafts that this pass has seen
    scores: list[float]  # of the candidates: ℓ + τ·s, without the noise
    winner: int


Watch = abc.Callable[[Pass], None]


class Sequence:
    """The progress of one request: its tokens, its pages, and the events that its reader has not seen yet.

    `kind` is the method that decodes it. `decode` turns tokens into text, to find stop strings.
    `ended` collects the numbers of requests that have ended.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        kind: Any,
        decode: Decode | None = None,
        ended: deque[int] | None = None,
    ) -> None:
        self.index, self.request, self.kind, self.geometry = index, request, kind, kind.geometry
        begin = self.geometry.begin(len(request.prompt))
        self.clean = list(request.prompt[:begin])  # committed tokens: all before the draft
        self.tail = list(request.prompt[begin:])  # prompt tokens given in the first draft
        self.stored = 0  # how many of `clean` are in the cache
        self.new: list[int] = []
        self.nfe = 0
        self.closes: Counter[int] = Counter()  # passes that closed a block, by how many new tokens it gave
        self.table: list[int] = []  # its pages
        self.keys: list[bytes] = []  # of the full pages of `clean`, as far as they were asked for
        self.row = -1  # of the device, while it is running
        self.mail: deque[Event | Pass] = deque()
        self.output: Output | None = None
        self.begun = time.perf_counter()
        self._ended = ended
        self._matcher = StopMatcher(decode, request.stop) if decode and request.stop else None

    @property
    def pending(self) -> list[int]:
        """Committed tokens that the next pass stores."""
        return self.clean[self.stored : self.geometry.storable(len(self.clean))]

    @property
    def known(self) -> int:
        """The token before the draft; any, if there is none."""
        return self.clean[-1] if self.clean else 0

    def close_block(self, ids: list[int], stop_ids: abc.Set[int]) -> Event:
        """Append the tokens of a block that has closed; none mean that the model's probabilities are not finite."""
        if not ids:
            return Event([], "error", DAMAGED)
        room = self.request.max_new_tokens - len(self.new)
        new = ids[len(self.tail) :][:room]
        finish = "length" if len(new) == room else ""
        if not stop_ids.isdisjoint(new):
            new, finish = new[: 1 + next(place for place, token in enumerate(new) if token in stop_ids)], "stop"
        if self._matcher is not None and self._matcher.feed(new):
            count = self._up_to_stop(new)
            finish = "stop" if count < len(new) else finish or "stop"
            new = new[:count]
        self.new += new
        self.tail = []
        self.closes[len(new)] += 1
        if not finish:
            self.clean += ids
        return Event(new, finish)

    def _up_to_stop(self, new: list[int]) -> int:
        """How many of these tokens it takes to complete a stop string."""
        assert self._matcher is not None
        again = self._matcher.fresh()
        again.feed(self.new)
        return next((count for count, token in enumerate(new, 1) if again.feed([token])), len(new))

    def made(self, event: Event, seconds: float) -> Output:
        """The output of a request whose last event this is."""
        waiting = Counter({0: self.nfe - self.closes.total()}) + self.closes  # forwards that closed nothing, if any
        return Output(self.new, self.nfe, event.finish, seconds, event.error, dict(sorted(waiting.items())))

    def end(self, event: Event) -> None:
        """File the last event, then the output: a reader that sees the output has all events."""
        self.mail.append(event)
        self.output = self.made(event, time.perf_counter() - self.begun)
        if self._ended is not None:
            self._ended.append(self.index)


# -- stop strings ----------------------------------------------------------------------------------------------------


def cut_at_stop(text: str, stops: abc.Sequence[str]) -> str:
    """The text up to the first stop string in it, or all of it."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


class StopMatcher:
    """Decodes a growing sequence of tokens, finds the first stop string in its text, and says what of it is final.

    A call looks only at the newest tokens and at as much text before them as a stop string can reach back.
    """

    def __init__(self, decode: Decode, stops: abc.Sequence[str] = ()) -> None:
        self.found = False
        self._decode, self._stops = decode, tuple(stops)
        self._reach = max(map(len, self._stops), default=1) - 1
        self._text = ""  # decoded so far, up to the stop string once it is found
        self._rest = ""  # text behind it that ends in an unfinished character
        self._taken = 0  # characters that `take` has returned
        self._window: list[int] = []  # the newest tokens of `_text`, and all tokens of `_rest`
        self._known = 0  # how many of them are in `_text`

    def fresh(self) -> StopMatcher:
        """Another for the same stop strings, which has seen no token."""
        return StopMatcher(self._decode, self._stops)

    def feed(self, tokens: abc.Sequence[int]) -> bool:
        """Take new tokens; returns whether a stop string has appeared."""
        if self.found:
            return True
        self._window += tokens
        # Some known tokens are decoded again: some decoders drop a space at the beginning of what they are given.
        before = self._decode(self._window[: self._known])
        new = self._decode(self._window)[len(before) :]
        searched = max(0, len(self._text) - self._reach)
        if new.endswith(UNFINISHED):
            self._rest = new
        elif new:
            self._text, self._rest = self._text + new, ""
            self._window = self._window[self._known :]
            self._known = len(self._window)
        tail = self._text[searched:] + self._rest
        cut = cut_at_stop(tail, self._stops)
        if len(cut) < len(tail):
            self._text, self._rest, self.found = self._text[:searched] + cut, "", True
        return self.found

    def take(self, *, final: bool = False) -> str:
        """The text that has become final since the last call: no half character, nothing that may begin a stop string.

        With `final` no tokens will follow, and all of it is.
        """
        text = self._text + self._rest
        if not (final or self.found):
            text = text.rstrip(UNFINISHED) if self._rest else text
            text = text[: len(text) - self._begun(text)]
        new, self._taken = text[self._taken :], max(self._taken, len(text))
        return new

    def _begun(self, text: str) -> int:
        """Characters at the end of a text that may be the beginning of a stop string."""
        sizes = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        return max(sizes, default=0)
