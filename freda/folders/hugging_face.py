"""Checkpoints in the format of Hugging Face: weight names, and the shape of a model as `config.json` states it.

Names and shapes are checked both ways: every tensor must be there in its shape, and none may be left over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freda.errors import FredaError
from freda.model.config import LLAMA3_SCALING, ModelConfig
from freda.model.device import DTYPES as DTYPES
from freda.model.transformer import Transformer

TRANSFORMERS = "5.17.0"  # the format of config.json; without it, newer versions warn of a wrong tokenizer
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Family(NamedTuple):
    """An architecture by its Hugging Face names and the two flags that tell it apart."""

    architecture: str
    model_type: str
    qk_norm: bool
    qkv_bias: bool


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
    """Exactly the tensors of this shape, no fewer and no more; the first one that is not right is named."""
    with torch.device("meta"):
        model = Transformer(config, blank_id=1)  # no shape depends on it
    expected = {hugging_face_name(name): tensor.shape for name, tensor in model.state_dict().items()}
    for name, shape in expected.items():
        if name not in tensors:
            raise FredaError(f"half-written: the tensor {name} is missing")
        if tensors[name].shape != shape:
            seen = tuple(tensors[name].shape)
            raise FredaError(f"the tensor {name} has shape {seen}, but config.json describes {tuple(shape)}")
        if tensors[name].dtype not in DTYPES.values():
            raise FredaError(f"the tensor {name} is stored as {tensors[name].dtype}; quantised weights are not read")
    unknown = next((name for name in tensors if name not in expected), None)
    if unknown is not None:
        raise FredaError(f"the tensor {unknown} has no place in the architecture that config.json names")


def hugging_face_name(name: str) -> str:
    """A weight of the Transformer as Hugging Face names it."""
    return name if name == HEAD else f"model.{name}"


def dtype_name(tensors: Mapping[str, Tensor]) -> str:
    """The precision of a checkpoint, by its embedding."""
    return str(tensors[EMBEDDING].dtype).removeprefix("torch.")


def own_name(name: str) -> str:
    """A weight that Hugging Face names so, as the Transformer names it."""
    return name.removeprefix("model.")


# -- config.json -----------------------------------------------------------------------------------------------------


def model_config(values: Mapping[str, Any]) -> ModelConfig:
    """The shape in a Hugging Face config.json, in the spelling of transformers 4 or 5."""
    family = _family(values)
    refused = next((key for key in REFUSED if values.get(key)), None)
    if refused is not None:
        raise FredaError(f"config.json sets {refused}: {REFUSED[refused]} is not supported")
    if values.get("hidden_act", "silu") != "silu":
        raise FredaError(f"config.json has hidden_act {values['hidden_act']!r}; only silu is supported")
    theta, scaling = _rope(values)
    dim, heads = _whole(values, "hidden_size"), _whole(values, "num_attention_heads")
    return ModelConfig(
        vocab_size=_whole(values, "vocab_size"),
        dim=dim,
        layers=_whole(values, "num_hidden_layers"),
        heads=heads,
        kv_heads=_whole(values, "num_key_value_heads", heads),
        head_dim=_whole(values, "head_dim", dim // heads),
        ffn_dim=_whole(values, "intermediate_size"),
        max_positions=_whole(values, "max_position_embeddings", ModelConfig.max_positions),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(values.get("rms_norm_eps", ModelConfig.norm_eps)),
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
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
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
    architecture = next(iter(values.get("architectures") or []), None)
    for family in FAMILIES:
        if architecture == family.architecture or (
            architecture is None and values.get("model_type") == family.model_type
        ):
            return family
    seen = architecture or values.get("model_type")
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise FredaError(f"config.json names the architecture {seen!r}, which is not supported; supported: {supported}")


def _rope(values: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base of the rotary frequencies and, where there is one, the Llama-3 scaling."""
    parameters = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    theta = float(parameters.get("rope_theta", values.get("rope_theta", ModelConfig.rope_theta)))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if parameters.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise FredaError("config.json sets partial_rotary_factor: rotating a part of each head is not supported")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise FredaError(f"config.json has the rope type {kind!r}, which is not supported; supported: default, llama3")
    missing = [key for key in LLAMA3_SCALING if key not in parameters]
    if missing:
        raise FredaError(f"config.json has the rope type llama3 without its {missing[0]}")
    return theta, {"rope_type": kind, **{key: parameters[key] for key in LLAMA3_SCALING}}


def _whole(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise FredaError(f"config.json has {key} = {value!r}; it must be a whole number of 1 or more")
    return value
