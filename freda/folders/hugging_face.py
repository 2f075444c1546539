"""Checkpoints in the format of Hugging Face: weight names, the shape of a model as `config.json` states it, and a place
for BLANK in a checkpoint that has none.

Names and shapes are checked both ways: every tensor must be there in its shape, and none may be left over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freda.data.tokenizer import Tokenizer, read_settings, token_text, with_blank
from freda.errors import FredaError, require
from freda.files import read_json, read_text
from freda.folders.tensors import read_safetensors, weight_files
from freda.model.config import LLAMA3_SCALING, ModelConfig
from freda.model.parts import DTYPES
from freda.model.transformer import Transformer

TRANSFORMERS = "5.17.0"  # the format of config.json; without it, newer versions warn of a wrong tokenizer
TABLE_MULTIPLE = 64  # rows of a table that has to grow: matrix products are fastest with round numbers
NEAR_ZERO = 0.1  # a BLANK row shorter than this fraction of the mean row was never trained
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
KEYS = {  # of a shape: the names in config.json
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "max_positions": "max_position_embeddings",
}


class Family(NamedTuple):
    """An architecture by its Hugging Face names and the two flags that tell it apart."""

    architecture: str
    model_type: str
    qk_norm: bool
    qkv_bias: bool


class Checkpoint(NamedTuple):
    """The model and tokenizer of another project's files, in Hugging Face terms."""

    config: dict[str, Any]  # config.json
    tensors: dict[str, Tensor]
    tokenizer_json: str
    settings: dict[str, Any]  # tokenizer_config.json
    stops: list[int | str]  # what ends generation, as ids or texts; the first one ends documents
    notes: list[str]  # what the reader changed, for the user


class Adopted(NamedTuple):
    """Another project's checkpoint with a BLANK token."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    tokenizer: Tokenizer
    blank: dict[str, Any]  # what was done for it, for the user


FAMILIES = (
    Family("Qwen3ForCausalLM", "qwen3", qk_norm=True, qkv_bias=False),
    Family("Qwen2ForCausalLM", "qwen2", qk_norm=False, qkv_bias=True),
    Family("LlamaForCausalLM", "llama", qk_norm=False, qkv_bias=False),
)

REFUSED = {  # keys of config.json that change the forward in a way the Transformer does not have
    "attention_bias": "bias on the attention projections",
    "mlp_bias": "bias in the feed-forward",
    "use_sliding_window": "sliding-window attention",
    "num_experts": "mixture of experts",
    "num_local_experts": "mixture of experts",
    "quantization_config": "quantised weights",
}


# -- names and shapes ------------------------------------------------------------------------------------------------


def check_tensors(tensors: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Refuse any but the tensors of this shape, no fewer and no more; the error names the first that is wrong."""
    last = f"model.layers.{config.layers - 1}.input_layernorm.weight"  # before as many layers are made as it says
    require(last in tensors, f"half-written: config.json has {config.layers} layers, but the tensor {last} is missing")
    with torch.device("meta"):
        model = Transformer(config, blank_id=1)  # no shape depends on it
    expected = {hugging_face_name(name): tensor.shape for name, tensor in model.state_dict().items()}
    for name, shape in expected.items():
        require(name in tensors, f"half-written: the tensor {name} is missing")
        seen, kind = tuple(tensors[name].shape), tensors[name].dtype
        require(seen == shape, f"the tensor {name} has shape {seen}, but config.json describes {tuple(shape)}")
        require(kind in DTYPES.values(), f"the tensor {name} is stored as {kind}; quantised weights are not read")
    unknown = next((name for name in tensors if name not in expected), None)
    require(unknown is None, f"the tensor {unknown} has no place in the architecture that config.json names")


def hugging_face_name(name: str) -> str:
    """A weight of the Transformer as Hugging Face names it."""
    return name if name == HEAD else f"model.{name}"


def dtype_name(tensors: Mapping[str, Tensor]) -> str:
    """The precision of a checkpoint, by its embedding."""
    return str(tensors[EMBEDDING].dtype).removeprefix("torch.")


# -- config.json -----------------------------------------------------------------------------------------------------


def model_config(values: Mapping[str, Any]) -> ModelConfig:
    """The shape in a Hugging Face config.json, in the spelling of transformers 4 or 5."""
    family = _family(values)
    refused = next((key for key in REFUSED if values.get(key)), None)
    require(refused is None, f"config.json sets {refused}: {REFUSED.get(refused or '')} is not supported")
    activation = values.get("hidden_act", "silu")
    require(activation == "silu", f"config.json has hidden_act {activation!r}; only silu is supported")
    theta, scaling = _rope(values)
    dim, heads = _whole(values, "hidden_size"), _whole(values, "num_attention_heads")
    defaults = {"kv_heads": heads, "head_dim": dim // heads, "max_positions": ModelConfig.max_positions}
    return ModelConfig(
        **{own: _whole(values, key, defaults.get(own)) for own, key in KEYS.items()},
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_number(values, "rms_norm_eps", ModelConfig.norm_eps),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        tied=bool(values.get("tie_word_embeddings", False)),
    )


def hugging_face_config(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `model_config`: the shape as config.json states it."""
    family = family_of(config)
    scaling = None if config.rope_scaling is None else {"rope_type": "llama3", **config.rope_scaling}
    return {
        "architectures": [family.architecture],
        "transformers_version": TRANSFORMERS,
        "model_type": family.model_type,
        **{key: getattr(config, own) for own, key in KEYS.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "rope_parameters": {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})},
        "rope_theta": config.rope_theta,  # these two say the same as transformers 4 and other engines read it
        "rope_scaling": scaling,
    }


def family_of(config: ModelConfig) -> Family:
    """The Hugging Face family that has these flags."""
    return next(f for f in FAMILIES if (f.qk_norm, f.qkv_bias) == (config.qk_norm, config.qkv_bias))


def _family(values: Mapping[str, Any]) -> Family:
    listed = values.get("architectures") or []
    require(isinstance(listed, list), f"config.json has architectures {listed!r}; it must be a list")
    named = next(iter(listed), None)
    seen = named or values.get("model_type")
    for family in FAMILIES:
        if seen == (family.architecture if named else family.model_type):
            return family
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise FredaError(f"config.json names the architecture {seen!r}, which is not supported; supported: {supported}")


def _rope(values: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base of the rotary frequencies and, where there is one, the Llama-3 scaling."""
    parameters: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        found = values.get(key) or {}
        require(isinstance(found, dict), f"config.json has {key} {found!r:.80}; it must be an object")
        parameters |= found
    theta = _number({**values, **parameters}, "rope_theta", ModelConfig.rope_theta)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    part = parameters.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    require(part == 1.0, "config.json sets partial_rotary_factor: rotating a part of each head is not supported")
    if kind == "default":
        return theta, None
    odd = f"config.json has the rope type {kind!r}, which is not supported; supported: default, llama3"
    require(kind == "llama3", odd)
    missing = next((key for key in LLAMA3_SCALING if key not in parameters), None)
    require(missing is None, f"config.json has the rope type llama3 without its {missing}")
    return theta, {"rope_type": kind, **{key: _number(parameters, key, 0.0) for key in LLAMA3_SCALING}}


def _whole(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value: Any = values.get(key)
    value = default if value is None else value
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and value >= 1, f"config.json has {key} = {value!r:.80}; it must be a whole number of 1 or more")
    return int(value)


def _number(values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key, default)
    right = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30
    require(right, f"config.json has {key} = {value!r:.80}; it must be a number above 0")
    return value if key == "original_max_position_embeddings" else float(value)


# -- folders of other projects -----------------------------------------------------------------------------------------


def read_folder(
    folder: Path, config: dict[str, Any], dtype: torch.dtype | None, device: torch.device | str = "cpu"
) -> Checkpoint:
    """Read a Hugging Face folder whose config.json is `config`; `dtype` casts the weights."""
    model_config(config)  # refuse what is not supported before gigabytes are read
    tokenizer_json = read_text(folder / "tokenizer.json")
    settings = read_settings(folder) if (folder / "tokenizer_config.json").is_file() else {}
    stops = _stops(folder, config, settings)
    tensors = read_safetensors(weight_files(folder), device, dtype)
    return Checkpoint(config, tensors, tokenizer_json, settings, stops, [])


def _stops(folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any]) -> list[int | str]:
    """The tokens at which `transformers` ends generation, or else the tokenizer's end-of-text token."""
    generation = folder / "generation_config.json"
    stops: list[int | str] = []
    for values in (config, read_json(generation) if generation.is_file() else {}):
        ids = values.get("eos_token_id")
        stops += ids if isinstance(ids, list) else [] if ids is None else [ids]
    text = token_text(settings.get("eos_token"))
    return stops or ([] if text is None else [text])


def with_room_for_blank(checkpoint: Checkpoint) -> Adopted:
    """A checkpoint of another project, whose tensors may change, as a model with a BLANK token (M4)."""
    tensors, config = checkpoint.tensors, model_config(checkpoint.config)
    if config.tied:
        tensors.pop(HEAD, None)  # some projects store the shared matrix twice
    check_tensors(tensors, config)
    tokenizer = with_blank(checkpoint.tokenizer_json, checkpoint.stops, checkpoint.settings)
    config, summary = _make_room(config, tensors, tokenizer.blank_id)
    return Adopted(config, tensors, tokenizer, summary)


def _make_room(config: ModelConfig, tensors: dict[str, Tensor], blank_id: int) -> tuple[ModelConfig, dict[str, Any]]:
    """Give BLANK a row of the tables, the mean of the others if it is new or untrained; returns shape and summary.
    Behind RMSNorm, a row near zero would hide α."""
    rows = config.vocab_size
    odd = f"it has {blank_id} ids, the table {rows} rows"
    require(blank_id <= rows, f"the tokenizer does not belong to the weights: {odd}")
    resized = blank_id == rows
    if resized:
        rows = -(-(blank_id + 1) // TABLE_MULTIPLE) * TABLE_MULTIPLE
        for name in {EMBEDDING, HEAD} & tensors.keys():
            mean = tensors[name].mean(0, dtype=torch.float32).to(tensors[name].dtype)
            tensors[name] = torch.cat([tensors[name], mean.expand(rows - blank_id, -1)])
    table = tensors[EMBEDDING]
    lengths = torch.linalg.vector_norm(table[: blank_id + 1], dim=1, dtype=torch.float32)
    untrained = bool(lengths[-1] < NEAR_ZERO * lengths[:-1].mean())
    if untrained:
        table[blank_id] = table[:blank_id].mean(0, dtype=torch.float32)
    summary = {"resized": resized, "blank_row": "mean of the embeddings" if untrained or resized else "kept"}
    return dataclasses.replace(config, vocab_size=rows), summary
