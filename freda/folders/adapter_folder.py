"""Adapter folders, in the format of PEFT: small weights that are used over those of a base (M23).

    adapter_config.json         rank, targets and base as PEFT reads them, and what decoding must know (`freda`): BLANK,
                                the method with block size and layout, the vocabulary rule, the base's shape, tokenizer
                                and fingerprint
    adapter_model.safetensors   the matrices, and the embedding of BLANK, under PEFT's names

An adapter on all rows is loaded by `peft`, too, and merged into the base when freda loads it. One on draft rows has a
`peft_type` of its own: `peft` would apply it to every token, and must refuse it. The base is a model folder, or a
Hugging Face folder that was never converted, which is then given its BLANK in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freda.errors import note, require
from freda.files import located, read_json, write_json
from freda.folders.hugging_face import HEAD, model_config, read_folder, with_room_for_blank
from freda.folders.model_folder import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    About,
    LoadedModel,
    fill_part,
    filled,
    load_model,
    method_of,
    name_in_file,
    newest_checkpoint,
    resolve_model_folder,
)
from freda.folders.tensors import fill_parts, read_safetensors, save_tensors, weight_files
from freda.methods.autoregressive import Autoregressive
from freda.model.adapter import merge
from freda.model.config import AdapterConfig, ModelConfig
from freda.model.parts import ADAPTER, Part, Parts
from freda.model.transformer import Transformer
from freda.sections import build

VOCABULARY = "below BLANK"  # the ids that may be predicted
PEFT_TYPES = {"all": "LORA", "draft": "FREDA_DRAFT_ROWS"}
TABLE = ("vocab_size", "max_positions")  # of a shape: what a base may have otherwise


# -- writing ---------------------------------------------------------------------------------------------------------


def write_adapter(folder: Path, shape: ModelConfig, tensors: Mapping[str, Tensor], about: About) -> None:
    """Both files of an adapter with these tensors, by their names in the file."""
    tokenizer, method, stage, over = about
    assert over is not None
    adapter, blank = over.adapter, tokenizer.blank_id
    section = {"blank_token_id": blank, "vocabulary": VOCABULARY, "tokenizer": tokenizer.vocabulary}
    section |= {"method": method.name, "stage": stage, **method.stored(), "rows": adapter.rows}
    section |= {"base": {"shape": _shape(shape), "fingerprint": over.fingerprint}}
    values = {
        "peft_type": PEFT_TYPES[adapter.rows],
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(over.base),
        "r": adapter.rank,
        "lora_alpha": adapter.scale * adapter.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": list(adapter.targets),
        "trainable_token_indices": {"embed_tokens": [blank]},
        "freda": section,
    }
    write_json(folder / ADAPTER_CONFIG, values)
    save_tensors(tensors, folder / ADAPTER_FILE)


def base_fingerprint(folder: Path) -> str:
    """Tells the weights of a base from others of their shape, by the first row of each, rounded to bf16: so a copy in
    another precision that rounds to it is the same base."""
    files = weight_files(folder)
    shapes = {name: tensor.shape for name, tensor in read_safetensors(files, "meta").items() if name != HEAD}
    first = {name: Part(torch.empty(1, *shape[1:]), 0) for name, shape in shapes.items()}
    fill_parts(files, first)
    digest = hashlib.sha256()
    for name in sorted(first):
        digest.update(first[name].tensor.bfloat16().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _shape(config: ModelConfig) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return {key: value for key, value in values.items() if key not in TABLE}


# -- reading ---------------------------------------------------------------------------------------------------------


def load_with_adapter(
    path: Path, adapter: Path | None, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> LoadedModel:
    """The model of a folder, with an adapter over it if there is one. One on all rows is merged into the weights."""
    if adapter is None:
        return load_model(path, device, dtype)
    folder, base = resolve_adapter_folder(adapter), resolve_model_folder(path)
    with located(folder):
        config, section = read_adapter_config(folder)
        method = method_of(section)
    loaded = _load_base(base, device, dtype, lambda shape: _check_shape(folder, section, base, shape))
    same = loaded.tokenizer.vocabulary == section["tokenizer"]
    odd = f"the adapter {folder} belongs to a base with another tokenizer than {base}"
    require(same, f"{odd}; name the base that it was trained over")
    if base_fingerprint(base) != section["base"]["fingerprint"]:
        note(f"note: the adapter {folder} was trained over other weights than {base}, of the same shape")
    loaded.parts.scorer = None  # it judged other drafts
    loaded.parts.adapt(config)
    fill_adapter(loaded.parts, folder)
    if config.rows == "all":
        merge(loaded.backbone)
        loaded.parts.adapter = None
    return LoadedModel(loaded.parts, loaded.tokenizer, method, str(section["stage"]))


def resolve_adapter_folder(path: Path) -> Path:
    """The adapter folder that `path` means: itself, or the newest checkpoint of a run folder."""
    require(path.is_dir(), f"there is no adapter {path}; name an adapter's folder or the folder of its run")
    folder = newest_checkpoint(path) or path
    known = (folder / ADAPTER_CONFIG).is_file()
    require(known, f"{path} is not an adapter: it has no {ADAPTER_CONFIG}; train one with an [adapter] section")
    return folder


def read_adapter_config(folder: Path) -> tuple[AdapterConfig, dict[str, Any]]:
    """The adapter in a folder, and its `freda` section."""
    values = read_json(folder / ADAPTER_CONFIG)
    section: Any = values.get("freda")
    require(isinstance(section, dict), "the adapter was not trained by freda, so it does not know how to draft")
    missing = next((key for key in ("vocabulary", "tokenizer", "base", "rows") if key not in section), None)
    require(missing is None, f"the freda section of {ADAPTER_CONFIG} has no {missing}; write the adapter again")
    rule = section["vocabulary"]
    require(rule == VOCABULARY, f"the adapter predicts the ids {rule!r}; this version knows {VOCABULARY!r}")
    keys = {"rank": "r", "alpha": "lora_alpha", "targets": "target_modules"}
    missing = next((key for key in keys.values() if key not in values), None)
    require(missing is None, f"{ADAPTER_CONFIG} has no {missing}; write the adapter again")
    given = {own: values[key] for own, key in keys.items()} | {"rows": section["rows"]}
    return build(AdapterConfig, given, "adapter."), section


def _check_shape(folder: Path, section: Mapping[str, Any], base: Path, shape: ModelConfig) -> None:
    """Refuse a base of another architecture."""
    given = _shape(shape)
    for key, value in section["base"]["shape"].items():
        odd = f"the adapter {folder} belongs to another architecture: its base has {key} {value}"
        require(given.get(key) == value, f"{odd}, {base} has {given.get(key)}; name the base that it was trained over")


def fill_adapter(parts: Parts, folder: Path) -> None:
    """Give an adapter its weights, every one of which must be there in its shape."""
    own = {name: weight.detach() for part, name, weight in parts.weights() if part == ADAPTER}
    with located(folder):
        stored = read_safetensors([folder / ADAPTER_FILE], "meta")
        expected = {name_in_file(ADAPTER, name): tuple(weight.shape) for name, weight in own.items()}
        for name in sorted(expected.keys() | stored.keys()):
            seen, wanted = tuple(stored[name].shape) if name in stored else "none", expected.get(name, "none")
            require(seen == wanted, f"{ADAPTER_FILE}: {name} has shape {seen}, {ADAPTER_CONFIG} describes {wanted}")
    fill_part(folder, ADAPTER, {name: Part(weight, 0) for name, weight in own.items()})


def _load_base(
    folder: Path, device: torch.device | str, dtype: torch.dtype, check: Callable[[ModelConfig], None]
) -> LoadedModel:
    """A model folder, or a folder of another project, with a BLANK in memory. The shape is checked before weights are
    read."""
    with located(folder):
        values = read_json(folder / "config.json")
        shape = model_config(values)
    check(shape)
    if "freda" in values:
        return load_model(folder, device, dtype)
    with located(folder):
        config, tensors, tokenizer, _ = with_room_for_blank(read_folder(folder, values, dtype, device))
        with torch.device("meta"):
            backbone = Transformer(config, tokenizer.blank_id)
        filled(backbone, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    return LoadedModel(Parts(backbone), tokenizer, Autoregressive(), "base")
