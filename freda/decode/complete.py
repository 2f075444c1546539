"""Continue one text with a model on disk: what `freda generate` does, as a function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from freda.decode.config import DecodeConfig, EngineConfig
from freda.decode.engine import Engine
from freda.decode.generate import Output, Request, generate
from freda.decode.show import LiveDrafts
from freda.decode.stops import cut_at_stop
from freda.errors import FredaError, note, require
from freda.folders.hugging_face import DTYPES
from freda.folders.model_folder import LoadedModel, load_model
from freda.methods import METHODS
from freda.model.transformer import pick_device

PAGE = 64  # tokens


def complete(
    path: Path,
    text: str,
    settings: dict[str, Any],
    *,
    method: str | None = None,
    stop: Sequence[str] = (),
    reference: bool = False,
    device: str = "auto",
    dtype: str = "float32",
    pause: float | None = None,
) -> dict[str, Any]:
    """Continue `text`; `settings` are the fields of `Request`. With `pause`, every pass is drawn on stderr. `reference`
    takes the plain loop instead of the engine: the same tokens, whatever the length.

    Returns what `freda generate --json` prints.
    """
    if dtype not in DTYPES:
        raise FredaError(f"there is no dtype {dtype!r}; use one of {', '.join(DTYPES)}")
    DecodeConfig(**settings)  # wrong settings fail before the model is loaded
    loaded = load_model(path, pick_device(device), DTYPES[dtype])
    name = method or loaded.method.name
    if name not in METHODS:
        raise FredaError(f"there is no method {name!r}; use one of {', '.join(METHODS)}")
    if name != loaded.method.name:
        note(f"note: {path} was trained as {loaded.method.name}, decoding as {name}")
    request = Request(prompt=loaded.tokenizer.encode(text), **settings)
    length, limit = len(request.prompt) + request.max_new_tokens, loaded.backbone.config.max_positions
    if length > limit:
        note(f"note: {length} tokens asked for, but the model is meant for {limit} positions")
        reference = True  # the engine keeps to what a model is meant for

    def run(watch: LiveDrafts | None) -> Output:
        if not reference:
            return _by_engine(loaded, request, name, stop, watch)
        rule, stop_ids = METHODS[name], loaded.tokenizer.stop_ids

        def stopped(tokens: Sequence[int]) -> bool:
            return any(word in loaded.tokenizer.decode(tokens) for word in stop)

        options = {"stop_ids": stop_ids, "stopped": stopped if stop else None, "watch": watch}
        return generate(loaded.backbone, rule, loaded.method, [request], **options)[0]  # type: ignore[arg-type]

    if pause is None:
        output = run(None)
    else:
        with LiveDrafts(request.prompt, loaded.tokenizer, pause=pause) as drafts:
            output = run(drafts)
    return {
        "text": cut_at_stop(loaded.tokenizer.decode(output.tokens), stop),
        "tokens": output.tokens,
        "nfe": output.nfe,
        "tpf": round(output.tpf, 4),
        "seconds": round(output.seconds, 4),
        "finish": output.finish,
        "method": name,
        "settings": settings,
    }


def _by_engine(
    loaded: LoadedModel, request: Request, method: str, stop: Sequence[str], watch: LiveDrafts | None
) -> Output:
    page = math.lcm(PAGE, loaded.method.block_size)
    pages = -(-(len(request.prompt) + request.max_new_tokens + loaded.method.block_size) // page)
    engine = Engine(loaded, EngineConfig(max_batch=1, page_size=page, pages=pages))
    number = engine.submit(request, method=method, stop=stop)
    while engine.busy:
        for event in engine.step(watch):
            require(event.finish != "error", event.error)
    return engine.outputs[number]
