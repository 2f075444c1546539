"""What `freda generate` does, and how it and `freda chat` open a model: with a word about what will not work well."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from freda.decode.api import Completion, Model
from freda.decode.config import DecodeConfig, EngineConfig
from freda.decode.request import Request
from freda.decode.show import LiveDrafts
from freda.errors import FredaError, note, require
from freda.folders.model_folder import LoadedModel, load_model
from freda.folders.resolve import resolve_model_folder
from freda.methods import method_named
from freda.model.device import pick_device, pick_dtype


def open_model(path: Path, device: str, dtype: str, *, method: str | None = None) -> LoadedModel:
    """Load a model, and say so where a method will decode it that it was not trained for."""
    place = pick_device(device)
    loaded = load_model(path, place, pick_dtype(dtype, place))
    used = method_named(method, loaded.method)
    if loaded.stage == "base" and used.layout.block > 1:
        note(
            f"warning: {path} was converted but never trained to fill blocks, so {used.name} will write nonsense; "
            "train it first, or use --method autoregressive"
        )
    elif used.name != loaded.method.name:
        note(f"note: {path} was trained as {loaded.method.name}, decoding as {used.name}")
    return loaded


def complete(
    path: Path,
    text: str,
    decode: DecodeConfig,
    *,
    method: str | None = None,
    stop: Sequence[str] = (),
    reference: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    pause: float | None = None,
) -> dict[str, Any]:
    """Continue `text`; returns what `freda generate --json` prints.

    With `pause`, every pass is drawn on stderr, so many seconds apart on a terminal. `reference` decodes with the plain
    loop instead of the engine.
    """
    require(bool(text.strip()), "the prompt is empty; give the text to continue")
    if not _is_model(path) and _is_model(Path(text)):
        raise FredaError(f"there is no model {path}, but {text} is one; name the model first, then the prompt")
    loaded = open_model(path, device, dtype, method=method)
    prompt, settings = loaded.tokenizer.encode(text), asdict(decode)
    request = Request(prompt=prompt, method=method, stop=stop, watch=pause is not None, **settings)
    length = len(prompt) + decode.max_new_tokens
    model = Model(loaded, EngineConfig(max_batch=1, max_length=length, on_device=not reference), name=str(path))
    with contextlib.ExitStack() as stack:
        live = None
        if pause is not None:
            live = stack.enter_context(LiveDrafts(prompt, loaded.tokenizer, pause=pause, keep=True))
        found: Completion = (model.reference if reference else model.complete)(request, live)
    return {
        "text": found.text,
        "tokens": found.tokens,
        "nfe": found.nfe,
        "tpf": round(found.tpf, 4),
        "seconds": round(found.seconds, 4),
        "finish": found.finish,
        "method": method or loaded.method.name,
        "settings": settings,
    }


def _is_model(path: Path) -> bool:
    try:
        return resolve_model_folder(path).is_dir()
    except (FredaError, OSError):  # a prompt may be too long for the name of a file
        return False
