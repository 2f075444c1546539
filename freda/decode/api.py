"""`freda.load`: a model in Python, with an engine behind it.

model = freda.load("runs/demo/self-refine")
model.generate("Q: Mia has 12 shells. She finds 5 more. How many shells now?\\nA:").text
for piece in model.stream("Q: ..."):
    print(piece, end="")
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, overload

from freda.decode.batch import Output, Pass, Request
from freda.decode.config import DecodeConfig, EngineConfig
from freda.decode.engine import Engine, Event
from freda.decode.stops import cut_at_stop
from freda.errors import FredaError, require
from freda.folders.hugging_face import DTYPES
from freda.folders.model_folder import LoadedModel, load_model
from freda.model.transformer import pick_device

UNFINISHED = "\ufffd"  # what a decoder makes of a character whose last bytes are still to come


@dataclass(frozen=True)
class Completion:
    """What became of a prompt."""

    text: str
    tokens: list[int]
    nfe: int  # forwards
    finish: str  # "stop", "length" or "error"
    error: str = ""
    seconds: float = 0.0

    @property
    def tpf(self) -> float:
        """Tokens per forward."""
        return len(self.tokens) / max(1, self.nfe)


def load(path: str | os.PathLike[str], device: str = "auto", dtype: str = "float32", **engine: Any) -> Model:
    """A model or run folder, ready to use; `engine` are fields of `EngineConfig`, for instance max_batch=32."""
    require(dtype in DTYPES, f"there is no dtype {dtype!r}; use one of {', '.join(DTYPES)}")
    known = {field.name for field in fields(EngineConfig)}
    unknown = next((name for name in engine if name not in known), None)
    require(unknown is None, f"an engine has no {unknown}; it has {', '.join(sorted(known))}")
    return Model(load_model(Path(path), pick_device(device), DTYPES[dtype]), EngineConfig(**engine))


class Model:
    """A loaded model. Settings of a call are the fields of `DecodeConfig`: passes, threshold, temperature, ..."""

    def __init__(self, loaded: LoadedModel, engine: EngineConfig = EngineConfig()) -> None:
        self.loaded, self.engine = loaded, Engine(loaded, engine)

    @overload
    def generate(
        self, prompts: str, *, method: str | None = None, stop: Sequence[str] = (), **settings: Any
    ) -> Completion: ...

    @overload
    def generate(
        self, prompts: Sequence[str], *, method: str | None = None, stop: Sequence[str] = (), **settings: Any
    ) -> list[Completion]: ...

    def generate(
        self, prompts: str | Sequence[str], *, method: str | None = None, stop: Sequence[str] = (), **settings: Any
    ) -> Completion | list[Completion]:
        """Continue one prompt or many side by side. Of many, one that cannot be continued has finish "error" and says
        why; a prompt alone raises the error."""
        DecodeConfig(**checked(settings))
        if isinstance(prompts, str):
            return self._collect([self._submit(prompts, method, stop, settings)], stop)[0]
        numbers: list[int | str] = []
        for prompt in prompts:
            while len(self.engine.waiting) >= self.engine.config.queue:
                self.engine.step()
            try:
                numbers.append(self._submit(prompt, method, stop, settings))
            except FredaError as error:
                numbers.append(str(error))
        return self._collect(numbers, stop)

    def stream(
        self,
        prompt: str,
        *,
        method: str | None = None,
        stop: Sequence[str] = (),
        drafts: bool = False,
        **settings: Any,
    ) -> Iterator[str | Pass]:
        """The text as its blocks are committed; with `drafts`, every pass over a block as well. Ending the iteration
        early cancels the request."""
        number = self._submit(prompt, method, stop, checked(settings))
        tokens: list[int] = []
        said = 0
        seen: list[Pass] = []
        finish = ""
        try:
            while not finish:
                events = self.engine.step(seen.append if drafts else None)
                yield from (one for one in seen if one.request == number)
                seen.clear()
                for event in (event for event in events if event.request == number):
                    tokens += event.tokens
                    finish = event.finish
                    text = self._stable(tokens, stop, event)
                    yield from [text[said:]] if len(text) > said else []
                    said = max(said, len(text))
                    require(finish != "error", event.error)
        finally:
            self.engine.cancel(number)
            self.engine.outputs.pop(number, None)

    def _submit(self, prompt: str, method: str | None, stop: Sequence[str], settings: dict[str, Any]) -> int:
        request = Request(prompt=self.loaded.tokenizer.encode(prompt), **checked(settings))
        return self.engine.submit(request, method=method, stop=stop)

    def _collect(self, numbers: Sequence[int | str], stop: Sequence[str]) -> list[Completion]:
        errors: dict[int, str] = {}
        wanted = {number for number in numbers if isinstance(number, int)}
        while wanted - self.engine.outputs.keys():
            errors |= {event.request: event.error for event in self.engine.step() if event.error}
        return [
            Completion("", [], 0, "error", number)
            if isinstance(number, str)
            else self._completion(self.engine.outputs.pop(number), stop, errors.get(number, ""))
            for number in numbers
        ]

    def _completion(self, output: Output, stop: Sequence[str], error: str) -> Completion:
        text = cut_at_stop(self.loaded.tokenizer.decode(output.tokens), stop)
        return Completion(text, output.tokens, output.nfe, output.finish, error, output.seconds)

    def _stable(self, tokens: Sequence[int], stop: Sequence[str], event: Event) -> str:
        """What of a text cannot change any more: no half character, nothing that may begin a stop string."""
        whole = self.loaded.tokenizer.decode(tokens)
        text = cut_at_stop(whole, stop)
        if event.finish or len(text) < len(whole):
            return text
        text = text.rstrip(UNFINISHED)
        held = [size for word in stop for size in range(1, len(word)) if text.endswith(word[:size])]
        return text[: len(text) - max(held, default=0)]


def checked(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a call; one that does not exist is an error."""
    known = {field.name for field in fields(DecodeConfig)}
    unknown = next((name for name in settings if name not in known), None)
    require(unknown is None, f"there is no setting {unknown!r}; use {', '.join(sorted(known))}, method or stop")
    return settings
