"""Continue one text with a model on disk: what `freda generate` does, as a function."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from freda.config import DecodeConfig
from freda.decode.generate import Output, Request, generate
from freda.decode.show import LiveDrafts
from freda.errors import FredaError
from freda.methods import METHODS
from freda.model.transformer import pick_device
from freda.model.weights import DTYPES, load_model


def complete(
    path: Path,
    text: str,
    settings: dict[str, Any],
    *,
    method: str | None = None,
    device: str = "auto",
    dtype: str = "float32",
    pause: float | None = None,
) -> dict[str, Any]:
    """Continue `text`; `settings` are the fields of `Request`. With `pause`, every pass is drawn on stderr.

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
        print(f"freda: note: {path} was trained as {loaded.method.name}, decoding as {name}", file=sys.stderr)
    request = Request(prompt=loaded.tokenizer.encode(text), **settings)
    length, limit = len(request.prompt) + request.max_new_tokens, loaded.model.config.max_positions
    if length > limit:
        print(f"freda: note: {length} tokens asked for, but the model is meant for {limit} positions", file=sys.stderr)

    def run(watch: LiveDrafts | None) -> Output:
        rule, stop_ids = METHODS[name], loaded.tokenizer.stop_ids
        return generate(loaded.model, rule, loaded.method, [request], stop_ids=stop_ids, watch=watch)[0]

    if pause is None:
        output = run(None)
    else:
        with LiveDrafts(request.prompt, loaded.tokenizer, pause=pause) as drafts:
            output = run(drafts)
    return {
        "text": loaded.tokenizer.decode(output.tokens),
        "tokens": output.tokens,
        "nfe": output.nfe,
        "tpf": round(output.tpf, 4),
        "seconds": round(output.seconds, 4),
        "finish": output.finish,
        "method": name,
        "settings": settings,
    }
