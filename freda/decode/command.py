"""What `freda generate` does, and how it and `freda chat` open a model."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from freda.decode.api import Model
from freda.decode.config import DecodeConfig, EngineConfig
from freda.decode.request import Request
from freda.decode.show import LiveDrafts
from freda.errors import FredaError, note
from freda.folders.model_folder import LoadedModel, load_model
from freda.folders.resolve import resolve_model_folder
from freda.methods import method_named
from freda.model.device import pick_device, pick_dtype


def open_model(path: Path, device: str, dtype: str, *, method: str | None = None, prompt: str = "") -> LoadedModel:
    """Load a model; a warning says so if it will be decoded by a method that it was not trained for."""
    if prompt and not _is_model(path) and _is_model(Path(prompt)):
        raise FredaError(f"there is no model {path}, but {prompt} is one; name the model first, then the prompt")
    place = pick_device(device)
    loaded = load_model(path, place, pick_dtype(dtype, place))
    chosen = method_named(method, loaded.method)
    if loaded.stage == "base" and chosen.layout.block > 1:
        note(
            f"warning: {path} was converted but never trained to fill blocks, so {chosen.name} will write nonsense; "
            "train it first, or use --method autoregressive"
        )
    elif chosen.name != loaded.method.name:
        note(f"note: {path} was trained as {loaded.method.name}, decoding as {chosen.name}")
    return loaded


def complete(loaded: LoadedModel, request: Request, *, reference: bool = False, pause: float = 0.0) -> dict[str, Any]:
    """Run one request; returns what `freda generate --json` prints.

    A watched request is drawn on stderr, its passes `pause` seconds apart on a terminal. `reference` decodes with the
    plain loop instead of the engine.
    """
    length = len(request.prompt) + request.max_new_tokens
    model = Model(loaded, EngineConfig(max_batch=1, max_length=length, on_device=not reference))
    run = model.reference if reference else model.complete
    if request.watch:
        with LiveDrafts(request.prompt, loaded.tokenizer, pause=pause, keep=True) as live:
            found = run(request, live)
    else:
        found = run(request)
    return {
        "text": found.text,
        "tokens": found.tokens,
        "nfe": found.nfe,
        "tpf": round(found.tpf, 4),
        "seconds": round(found.seconds, 4),
        "finish": found.finish,
        "method": request.method or loaded.method.name,
        "settings": {field.name: getattr(request, field.name) for field in fields(DecodeConfig)},
    }


def _is_model(path: Path) -> bool:
    try:
        return resolve_model_folder(path).is_dir()
    except (FredaError, OSError):  # a prompt may be too long for the name of a file
        return False
