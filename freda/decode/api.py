"""`freda.load`: a model in Python, with an engine behind it.

model = freda.load("mini")
model.generate("Q: Mia has 1200 shells. She finds 513 more. How many shells does she have in the end?\\nA:").text
for piece in model.stream("Q: ..."):
    print(piece, end="")

Any number of streams and calls may be open at the same time, in any number of threads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, overload

from freda.decode.config import DecodeConfig, EngineConfig
from freda.decode.engine import Engine
from freda.decode.generate import generate
from freda.decode.handle import Handle
from freda.decode.request import Output, Pass, Request, StopMatcher, Watch, cut_at_stop
from freda.errors import FredaError, note, require
from freda.folders.adapter_folder import load_with_adapter
from freda.folders.model_folder import LoadedModel
from freda.methods import default_method, method_named
from freda.model.parts import pick_device, pick_dtype


@dataclass(frozen=True)
class Completion(Output):
    """What became of a prompt: the output of its request, and the text, without the stop string."""

    text: str = ""


FolderName = str | os.PathLike[str]


def load(
    path: FolderName, device: str = "auto", dtype: str = "auto", *, adapter: FolderName | None = None, **engine: Any
) -> Model:
    """A model or run folder, or an `adapter` over one, ready to use; `engine` are fields of `EngineConfig`, for
    instance max_batch=32."""
    require(isinstance(path, str | os.PathLike), f"the path is {path!r:.80}; name a model or run folder")
    for name, value in (("device", device), ("dtype", dtype)):
        require(isinstance(value, str), f"{name} is {value!r:.80}; use a string, for instance auto")
    _known(engine, [field.name for field in fields(EngineConfig)], "an engine has no setting")
    place = pick_device(device)
    over = None if adapter is None else Path(adapter)
    loaded = load_with_adapter(Path(path), over, place, pick_dtype(dtype, place))
    return Model(loaded, EngineConfig(**engine), name=str(path))


def open_model(
    path: Path, device: str, dtype: str, method: str | None = None, adapter: Path | None = None
) -> LoadedModel:
    """Load a model; a warning says so if it will be decoded by a method that it was not trained for."""
    place = pick_device(device)
    loaded = load_with_adapter(path, adapter, place, pick_dtype(dtype, place))
    chosen = method_named(method, loaded.method)
    if loaded.stage == "base" and chosen.geometry.drafts and not chosen.geometry.checked:
        note(
            f"warning: {path} was converted but never trained to fill blocks, so {chosen.name} will write nonsense; "
            "train it first, or use --method autoregressive"
        )
    elif chosen.name != loaded.method.name:
        note(f"note: {adapter or path} was trained as {loaded.method.name}, decoding as {chosen.name}")
    return loaded


def named_or_default(method: str | None, loaded: LoadedModel) -> str:
    """The method that was asked for, or the one that a reader of texts wants of the model; says which, if it is not the
    model's own."""
    chosen = method or default_method(loaded.method)
    if method is None and chosen != loaded.method.name:
        own = f"--method {loaded.method.name} decodes as the model was trained"
        note(f"note: decoding as {chosen}, the model's own autoregressive text in fewer forwards; {own}")
    return chosen


class Model:
    """A loaded model with its engine.

    Settings of a call are the fields of `DecodeConfig` (passes, threshold, max_new_tokens, ...), `method`, another one
    than the model's own, as "verified" or "verified:tail=blank", and `stop`, a string or strings that end the text.
    """

    def __init__(self, loaded: LoadedModel, engine: EngineConfig = EngineConfig(), *, name: str = "") -> None:
        self.loaded, self.name, self.engine = loaded, name, Engine(loaded, engine)

    def __repr__(self) -> str:
        weight, method = self.loaded.backbone.embed_tokens.weight, self.loaded.method
        count = sum(part.numel() for part in self.loaded.backbone.parameters())
        kind = f"{method.name}, blocks of {method.block_size}, {count:,} parameters"
        return f"<freda.Model {self.name}: {kind}, {str(weight.dtype).removeprefix('torch.')} on {weight.device}>"

    @overload
    def generate(self, prompts: str, **settings: Any) -> Completion: ...

    @overload
    def generate(self, prompts: Sequence[str], **settings: Any) -> list[Completion]: ...

    def generate(self, prompts: str | Sequence[str], **settings: Any) -> Completion | list[Completion]:
        """Continue one prompt, or many side by side.

        Among many, one that cannot be continued has finish "error" and says why; a prompt alone raises the error.
        """
        common = Request(prompt=(), **checked(settings))
        listed = isinstance(prompts, str) or (
            isinstance(prompts, Sequence) and not isinstance(prompts, bytes | bytearray)
        )
        require(listed, f"prompts is {prompts!r:.80} ({type(prompts).__name__}); use a string or a list of strings")
        if isinstance(prompts, str):
            return self.complete(replace(common, prompt=self.loaded.tokenizer.encode(prompts)))
        outputs, asked = dict[int, Output](), dict[int, Request]()
        for index, prompt in enumerate(prompts):
            try:
                asked[index] = replace(common, prompt=self.loaded.tokenizer.encode(prompt))
            except FredaError as error:
                outputs[index] = Output([], 0, "error", 0.0, str(error))
        places = list(asked)
        with contextlib.closing(self.engine.completed(asked.values())) as finished:
            outputs |= {places[number]: output for number, output in finished}
        return [self._completion(outputs[index], common) for index in range(len(prompts))]

    def stream(self, prompt: str, *, drafts: bool = False, **settings: Any) -> Stream:
        """The text as its blocks are committed; with `drafts`, every pass over a block as well.

        Ending the iteration early cancels the request.
        """
        request = self.request(prompt, watch=drafts, **checked(settings))
        return Stream(self.engine.submit(request), StopMatcher(self.loaded.tokenizer.decode, request.stop))

    def complete(self, request: Request, watch: Watch | None = None) -> Completion:
        """Run one request to its end; `watch` gets its passes, if it is a watched one."""
        handle = self.engine.submit(request)
        try:
            for event in handle:
                if watch is not None and isinstance(event, Pass):
                    watch(event)
            return self._completion(handle.result(), request, raises=True)
        finally:
            handle.cancel()  # if it was interrupted: whoever catches that may keep the handle alive

    def reference(self, request: Request, watch: Watch | None = None) -> Completion:
        """Run one request with `generate`, the plain loop that the engine must equal."""
        tokenizer, request = self.loaded.tokenizer, self.engine.begun(request)
        method = self.engine.check(request)
        how: dict[str, Any] = {"stop_ids": tokenizer.stop_ids, "decode": tokenizer.decode, "watch": watch}
        return self._completion(generate(self.loaded.parts, method, [request], **how)[0], request, raises=True)

    def request(self, prompt: str, **settings: Any) -> Request:
        """The request for a prompt; `settings` are fields of `Request`."""
        return Request(prompt=self.loaded.tokenizer.encode(prompt), **settings)

    def _completion(self, output: Output, request: Request, *, raises: bool = False) -> Completion:
        require(not raises or output.finish != "error", output.error)
        return Completion(**vars(output), text=cut_at_stop(self.loaded.tokenizer.decode(output.tokens), request.stop))


class Stream(Iterator[str | Pass]):
    """The pieces of a text as they become final, among them passes if the request is watched."""

    def __init__(self, handle: Handle, matcher: StopMatcher) -> None:
        self._handle, self._pieces = handle, self._read(handle, matcher)

    def __next__(self) -> str | Pass:
        return next(self._pieces)

    def close(self) -> None:
        """Cancel the request, unless it has finished."""
        self._pieces.close()
        self._handle.cancel()

    @property
    def output(self) -> Output | None:
        """The tokens and forwards of the request; None before its end."""
        return self._handle.result() if self._handle.finished else None

    @staticmethod
    def _read(handle: Handle, matcher: StopMatcher) -> Generator[str | Pass, None, None]:
        for event in handle:
            if isinstance(event, Pass):
                yield event
                continue
            matcher.feed(event.tokens)
            if piece := matcher.take(final=bool(event.finish)):
                yield piece
            require(event.finish != "error", event.error)


def checked(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of a call; one that does not exist is an error."""
    _known(settings, [*(field.name for field in fields(DecodeConfig)), "method", "stop"], "there is no setting")
    return settings


def _known(names: Iterable[str], known: Sequence[str], complaint: str) -> None:
    for name in names:
        require(name in known, f"{complaint} {name!r}; use {', '.join(sorted(known))}")
