"""Model folders from the checkpoints of other projects: Hugging Face safetensors and GGUF files.

`convert` reads the checkpoint, gives BLANK a row of the embedding table (M4) and writes a model folder. No pickle is
read and no code of the checkpoint is run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freda.data.tokenizer import read_settings, token_text, with_blank
from freda.errors import FredaError
from freda.files import located, read_json, read_text, written_beside
from freda.folders.hugging_face import DTYPES, EMBEDDING, HEAD, check_tensors, dtype_name, family_of, model_config
from freda.folders.model_folder import About, write_files
from freda.folders.tensors import read_safetensors, weight_files
from freda.methods.autoregressive import Autoregressive
from freda.model.config import ModelConfig

TABLE_MULTIPLE = 64  # rows of a table that has to grow: matrix products like round numbers
NEAR_ZERO = 0.1  # a BLANK row shorter than this share of the mean row was never trained


class Checkpoint(NamedTuple):
    """What another project's files hold, in Hugging Face terms."""

    config: dict[str, Any]  # config.json
    tensors: dict[str, Tensor]
    tokenizer_json: str
    settings: dict[str, Any]  # tokenizer_config.json
    stops: list[int | str]  # what ends generation, as ids or texts; the first one ends documents
    notes: list[str]  # what the reader changed, for the user


def convert(
    source: Path, target: Path, *, block_size: int = 4, dtype: str | None = None, replace: bool = False
) -> dict[str, Any]:
    """Make a model folder from a Hugging Face folder or a GGUF file, and say what was done.

    BLANK takes the tokenizer's first free id. The result is still an autoregressive model; training makes it more.
    """
    if dtype is not None and dtype not in DTYPES:
        raise FredaError(f"dtype is {dtype!r}; use one of {', '.join(DTYPES)}")
    method = Autoregressive(block_size=block_size)
    with written_beside(target, replace) as temporary:
        with located(source):
            checkpoint = _read_checkpoint(source, None if dtype is None else DTYPES[dtype])
            tensors, config = checkpoint.tensors, model_config(checkpoint.config)
            if config.tied:
                tensors.pop(HEAD, None)  # some projects store the shared matrix twice
            check_tensors(tensors, config)
            tokenizer = with_blank(checkpoint.tokenizer_json, checkpoint.stops, checkpoint.settings)
            config, blank = _make_room(config, tensors, tokenizer.blank_id)
        write_files(temporary, config, tensors, About(tokenizer, method, "base"))
    return {
        "architecture": family_of(config).architecture,
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "dtype": dtype_name(tensors),
        "vocab_rows": config.vocab_size,
        "blank_id": tokenizer.blank_id,
        "eos_id": tokenizer.eos_id,
        **blank,
        "notes": "; ".join(checkpoint.notes) or "none",
    }


def _make_room(config: ModelConfig, tensors: dict[str, Tensor], blank_id: int) -> tuple[ModelConfig, dict[str, Any]]:
    """Give BLANK a row that means something, and say whether the table had to grow for it."""
    rows = config.vocab_size
    if blank_id > rows:
        raise FredaError(f"the tokenizer does not belong to the weights: it has {blank_id} ids, the table {rows} rows")
    resized = blank_id == rows
    if resized:
        rows = -(-(blank_id + 1) // TABLE_MULTIPLE) * TABLE_MULTIPLE
        for name in {EMBEDDING, HEAD} & tensors.keys():
            tensors[name] = _grown(tensors[name], rows)
    started = _start_blank_row(tensors[EMBEDDING], blank_id)
    summary = {"resized": resized, "blank_row": "mean of the embeddings" if started or resized else "kept"}
    return dataclasses.replace(config, vocab_size=rows), summary


def _grown(table: Tensor, rows: int) -> Tensor:
    """The table with more rows; the new ones are the mean of the old."""
    grown = table.new_empty(rows, table.shape[1])
    grown[: len(table)] = table
    grown[len(table) :] = table.mean(0, dtype=torch.float32)
    return grown


def _start_blank_row(table: Tensor, blank_id: int) -> bool:
    """Start an untrained BLANK at the mean embedding: behind RMSNorm a row near zero would hide α. Says if it did."""
    used = table[:blank_id]
    usual = torch.linalg.vector_norm(used, dim=1, dtype=torch.float32).mean()
    untrained = bool(table[blank_id].float().norm() < NEAR_ZERO * usual)
    if untrained:
        table[blank_id] = used.mean(0, dtype=torch.float32)
    return untrained


def _read_checkpoint(source: Path, dtype: torch.dtype | None) -> Checkpoint:
    if source.suffix == ".gguf" and source.is_file():
        from freda.folders.gguf import read_gguf  # it builds on this module

        return read_gguf(source, dtype)
    if not source.is_dir():
        raise FredaError("this is neither a folder nor a .gguf file; name a checkpoint on this machine")
    return _read_folder(source, dtype)


def _read_folder(folder: Path, dtype: torch.dtype | None) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise FredaError("not a Hugging Face folder: it has no config.json (name a GGUF file itself, not its folder)")
    config = read_json(folder / "config.json")
    if "freda" in config:
        raise FredaError("this is a freda model already; use it as it is")
    model_config(config)  # refuse what is not supported before gigabytes are read
    tokenizer_json = read_text(folder / "tokenizer.json")
    settings = read_settings(folder) if (folder / "tokenizer_config.json").is_file() else {}
    stops = _stops(folder, config, settings)
    return Checkpoint(config, read_safetensors(weight_files(folder), dtype=dtype), tokenizer_json, settings, stops, [])


def _stops(folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any]) -> list[int | str]:
    """What ends generation: as `transformers` generates, or else the tokenizer's end-of-text token."""
    generation = folder / "generation_config.json"
    stops: list[int | str] = []
    for values in (config, read_json(generation) if generation.is_file() else {}):
        ids = values.get("eos_token_id")
        stops += ids if isinstance(ids, list) else [] if ids is None else [ids]
    text = token_text(settings.get("eos_token"))
    return stops or ([] if text is None else [text])
