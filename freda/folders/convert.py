"""Model folders from Hugging Face folders, GGUF files, other model folders in another precision, and merged adapters.

A checkpoint of another project gets a row of the embedding table for BLANK (M4) and stays an autoregressive model until
it is trained. No pickle is read and no code of a checkpoint is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from freda.data.tokenizer import Tokenizer
from freda.errors import require
from freda.files import beside, located, read_json, write_json, written_beside
from freda.folders.adapter_folder import load_with_adapter, read_adapter_config, resolve_adapter_folder
from freda.folders.gguf import read_gguf
from freda.folders.hugging_face import (
    EMBEDDING,
    Checkpoint,
    dtype_name,
    family_of,
    hugging_face_name,
    read_folder,
    with_room_for_blank,
)
from freda.folders.model_folder import SCORER_FILE, About, load_model, resolve_model_folder, write_files
from freda.folders.tensors import packed, read_safetensors, save_tensors, weight_files
from freda.methods.autoregressive import Autoregressive
from freda.model.parts import DTYPES

INT8 = "int8"
PRECISIONS = (*DTYPES, INT8)
BLOCK_SIZE = 4  # of a checkpoint that does not know blocks yet


def convert(
    source: Path,
    target: Path,
    *,
    block_size: int | None = None,
    dtype: str | None = None,
    adapter: Path | None = None,
) -> dict[str, Any]:
    """Write `source` as a model folder, with an `adapter` on all rows merged into it, and return a summary.

    The source is a Hugging Face folder, a GGUF file, or a model or run folder of freda, which is copied. `dtype` is one
    of `PRECISIONS`; without it weights keep theirs, but for those of a quantised GGUF file, which become bfloat16.
    """
    require(dtype is None or dtype in PRECISIONS, f"dtype is {dtype!r}; use one of {', '.join(PRECISIONS)}")
    cast = DTYPES.get(dtype or "")
    gguf = source.suffix == ".gguf" and source.is_file()
    place = source if gguf else resolve_model_folder(source)
    with written_beside(target) as temporary, located(place):
        config = {} if gguf else read_json(place / "config.json")
        own = config.get("freda")
        if adapter is not None:
            require(block_size is None, f"block_size is {block_size}, but an adapter has its own; omit it")
            dtype = dtype or (own or {}).get("stored_as")
            summary = _merge(place, config, adapter, temporary, cast)
        elif isinstance(own, dict):
            require(block_size is None, f"block_size is {block_size}, but a freda model keeps its own; omit it")
            dtype = dtype or own.get("stored_as")
            summary = _copy(place, config, temporary, cast)
        else:
            checkpoint = read_gguf(place, cast) if gguf else read_folder(place, config, cast)
            summary = _write_checkpoint(checkpoint, temporary, block_size)
        if dtype == INT8:
            summary |= _store_as_int8(temporary)
    return summary


def _write_checkpoint(checkpoint: Checkpoint, target: Path, block_size: int | None) -> dict[str, Any]:
    """Write another project's checkpoint as a model folder with a BLANK token."""
    config, tensors, tokenizer, blank = with_room_for_blank(checkpoint)
    method = Autoregressive(block_size=BLOCK_SIZE if block_size is None else block_size)
    write_files(target, config, tensors, About(tokenizer, method, "base"))
    parameters = sum(tensor.numel() for tensor in tensors.values())
    summary = {"architecture": family_of(config).architecture, "parameters": parameters, "dtype": dtype_name(tensors)}
    summary |= {"vocab_rows": config.vocab_size, "blank_id": tokenizer.blank_id, "eos_id": tokenizer.eos_id, **blank}
    return {**summary, "notes": "; ".join(checkpoint.notes) or "none"}


# -- copies in another precision -------------------------------------------------------------------------------------


def _copy(folder: Path, config: dict[str, Any], target: Path, cast: torch.dtype | None) -> dict[str, Any]:
    """Write a freda model again without what training keeps beside it; `cast` changes the precision."""
    stage, parameters = load_model(folder, "meta").stage, 0  # checks everything but the values
    for file, paths in (("model.safetensors", weight_files(folder)), (SCORER_FILE, [*folder.glob(SCORER_FILE)])):
        tensors = read_safetensors(paths, dtype=cast)
        parameters += sum(tensor.numel() for tensor in tensors.values())
        if EMBEDDING in tensors:
            config["dtype"] = dtype_name(tensors)
        if tensors:
            save_tensors(tensors, target / file)
    config["freda"].pop("stored_as", None)
    write_json(target / "config.json", config)
    Tokenizer.load(folder).save(target)
    described = {"architecture": config["architectures"][0], "parameters": parameters, "dtype": config["dtype"]}
    return {**described, "method": config["freda"]["method"], "stage": stage}


def _merge(
    folder: Path, config: dict[str, Any], adapter: Path, target: Path, cast: torch.dtype | None
) -> dict[str, Any]:
    """Write a base with an adapter on all rows merged into its weights; `cast` changes the precision."""
    odd = f"{adapter} acts on draft rows only, and cannot be merged into weights that all rows share"
    rows = read_adapter_config(resolve_adapter_folder(adapter))[0].rows
    require(rows == "all", f"{odd}; use it with --adapter")
    stored = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
    loaded = load_with_adapter(folder, adapter, "cpu", cast or stored)
    tensors = {hugging_face_name(name): tensor for name, tensor in loaded.backbone.state_dict().items()}
    write_files(target, loaded.backbone.config, tensors, About(loaded.tokenizer, loaded.method, loaded.stage))
    described = {"architecture": family_of(loaded.backbone.config).architecture, "dtype": dtype_name(tensors)}
    return {**described, "method": loaded.method.name, "stage": loaded.stage}


def _store_as_int8(folder: Path) -> dict[str, Any]:
    """Replace the matrices of a model folder by int8 ones; returns the bytes of its weights before and after."""
    files = sorted(folder.glob("*.safetensors"))
    before = sum(path.stat().st_size for path in files)
    for path in files:
        save_tensors(packed(read_safetensors([path])), beside(path))  # not over a file that is still mapped
        beside(path).replace(path)
    config = read_json(folder / "config.json")
    config["freda"]["stored_as"] = INT8
    write_json(folder / "config.json", config)
    after = sum(path.stat().st_size for path in files)
    return {"dtype": INT8, "bytes_before": before, "bytes_after": after}
