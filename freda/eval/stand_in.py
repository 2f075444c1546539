"""A stand-in for `Request` and `Engine.completed` of `freda.decode`, which are on their way; the merge deletes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from freda.decode.batch import Request as BatchRequest
from freda.decode.config import DecodeConfig
from freda.decode.engine import Engine
from freda.errors import FredaError


@dataclass(frozen=True, kw_only=True)
class Request(DecodeConfig):
    """One sequence to continue, and how."""

    prompt: Sequence[int]
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Output:
    """What became of a request."""

    tokens: list[int]
    nfe: int
    finish: str
    seconds: float
    error: str = ""


def completed(engine: Engine, requests: Sequence[Request]) -> Iterator[tuple[int, Output]]:
    """Run requests and yield (index, output) as each finishes; a refused one is an output with finish "error"."""
    waiting, places, errors = list(enumerate(requests)), dict[int, int](), dict[int, str]()
    while waiting or places:
        while waiting and len(engine.waiting) < engine.config.queue:
            index, request = waiting.pop(0)
            values = asdict(request)
            stop = values.pop("stop")
            try:
                places[engine.submit(BatchRequest(**values), stop=stop)] = index
            except FredaError as error:
                yield index, Output([], 0, "error", 0.0, str(error))
        errors |= {event.request: event.error for event in engine.step() if event.error}
        for number in [number for number in places if number in engine.outputs]:
            made = engine.outputs.pop(number)
            told = errors.get(number, "")
            yield places.pop(number), Output(made.tokens, made.nfe, made.finish, made.seconds, told)
