"""Checkpoints of other projects in Hugging Face terms, and the reader of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freda.data.tokenizer import read_settings, token_text
from freda.files import read_json, read_text
from freda.folders.hugging_face import model_config
from freda.folders.tensors import read_safetensors, weight_files


class Checkpoint(NamedTuple):
    """The model and tokenizer of another project's files."""

    config: dict[str, Any]  # config.json
    tensors: dict[str, Tensor]
    tokenizer_json: str
    settings: dict[str, Any]  # tokenizer_config.json
    stops: list[int | str]  # what ends generation, as ids or texts; the first one ends documents
    notes: list[str]  # what the reader changed, for the user


def read_folder(folder: Path, config: dict[str, Any], dtype: torch.dtype | None) -> Checkpoint:
    """Read a Hugging Face folder whose config.json is `config`; `dtype` casts the weights."""
    model_config(config)  # refuse what is not supported before gigabytes are read
    tokenizer_json = read_text(folder / "tokenizer.json")
    settings = read_settings(folder) if (folder / "tokenizer_config.json").is_file() else {}
    stops = _stops(folder, config, settings)
    return Checkpoint(config, read_safetensors(weight_files(folder), dtype=dtype), tokenizer_json, settings, stops, [])


def _stops(folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any]) -> list[int | str]:
    """The tokens at which `transformers` ends generation, or else the tokenizer's end-of-text token."""
    generation = folder / "generation_config.json"
    stops: list[int | str] = []
    for values in (config, read_json(generation) if generation.is_file() else {}):
        ids = values.get("eos_token_id")
        stops += ids if isinstance(ids, list) else [] if ids is None else [ids]
    text = token_text(settings.get("eos_token"))
    return stops or ([] if text is None else [text])
