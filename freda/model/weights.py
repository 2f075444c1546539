"""Model folders: Hugging Face files with a `freda` section, read and written without pickle and without remote code.

    config.json         the shape, as `transformers` reads it, and what decoding must repeat of the training (`freda`)
    model.safetensors   all weights under their Hugging Face names
    scorer.safetensors  the Best-of-N scorer, where there is one
    tokenizer files     see `freda.data.tokenizer`

A folder is written beside its place and renamed, so whatever stands under its name is whole. Loading checks everything
that could make a model wrong without a word: every tensor must be there in its shape, and the tokenizer must be the one
the weights were trained with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freda.data.tokenizer import Tokenizer
from freda.errors import FredaError
from freda.files import located, read_json, written_beside
from freda.methods.config import MethodConfig
from freda.model.config import LLAMA3_SCALING, ModelConfig
from freda.model.device import DTYPES as DTYPES
from freda.model.folders import resolve_model_folder
from freda.model.scorer import Scorer
from freda.model.tensors import Part, fill_parts, read_safetensors, save_tensors, weight_files
from freda.model.transformer import Transformer, rotary_frequencies
from freda.train.config import from_dict

SCORER_FILE = "scorer.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

STORED_SETTINGS = ("block_size", "passes", "feedback", "rescale", "committed_hard")  # of MethodConfig


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


class LoadedModel(NamedTuple):
    """A model folder in memory."""

    model: Transformer
    tokenizer: Tokenizer
    method: MethodConfig
    stage: str


# -- reading a model folder ------------------------------------------------------------------------------------------


def load_model(path: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> LoadedModel:
    """The model in a model or run folder, every tensor read from it: nothing is left at a random value.

    On the device `meta` it has all but values: everything is checked, and `fill_model` reads what a process holds.
    """
    folder = resolve_model_folder(path)
    with located(folder):
        values = read_json(folder / "config.json")
        section = values.get("freda")
        if not isinstance(section, dict):
            raise FredaError(f"a plain Hugging Face checkpoint; run: freda convert {folder} TARGET")
        config, method = model_config(values), _method_config(section)
    tokenizer = Tokenizer.load(folder)
    with located(folder):
        _check_tokenizer(tokenizer, section, config)
        tensors = read_safetensors(weight_files(folder), device, dtype)
        check_tensors(tensors, config)
        model = _build(config, tokenizer.blank_id, tensors)
        if (folder / SCORER_FILE).is_file():
            model.scorer = _load_scorer(folder / SCORER_FILE, config, device, dtype)
    return LoadedModel(model, tokenizer, method, str(section["stage"]))


def fill_model(folder: Path, parts: Mapping[str, Part]) -> None:
    """Read parts of the weights of a model that `load_model` has found in the model folder, by their names in it."""
    backbone = {hugging_face_name(name): part for name, part in parts.items() if not name.startswith("scorer.")}
    scorer = {name.removeprefix("scorer."): part for name, part in parts.items() if name.startswith("scorer.")}
    with located(folder):
        fill_parts(weight_files(folder), backbone)
        if scorer:
            fill_parts([folder / SCORER_FILE], scorer)


def _build(config: ModelConfig, blank_id: int, tensors: Mapping[str, Tensor]) -> Transformer:
    """A Transformer that holds `tensors` themselves; built without storage, because random weights take a while."""
    with torch.device("meta"):
        model = Transformer(config, blank_id)
    model.load_state_dict({_own_name(name): tensor for name, tensor in tensors.items()}, assign=True)
    model.inv_freq = rotary_frequencies(config).to(tensors[EMBEDDING].device)  # a buffer that is never stored
    return model


def _load_scorer(path: Path, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> Scorer:
    """The Best-of-N scorer beside a model, checked against its width."""
    tensors = read_safetensors([path], device, dtype)
    with torch.device("meta"):
        scorer = Scorer(config, last_layer=any(name.startswith("last_layer.") for name in tensors))
    expected = {name: tuple(tensor.shape) for name, tensor in scorer.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise FredaError(
                f"{SCORER_FILE} does not belong to the model: {name} has shape {found.get(name, 'none')}, "
                f"the model needs {expected.get(name, 'none')}; train the scorer again"
            )
    scorer.load_state_dict(tensors, assign=True)
    scorer.inv_freq = rotary_frequencies(config).to(device)
    return scorer


def _method_config(section: Mapping[str, Any]) -> MethodConfig:
    """What the `freda` section says of the training, checked like any other config."""
    keys = ("blank_token_id", "method", "stage", *STORED_SETTINGS)
    missing = next((key for key in keys if key not in section), None)
    if missing is not None:
        raise FredaError(f"the freda section of config.json has no {missing}; write the model again")
    values = {"name": section["method"], **{key: section[key] for key in STORED_SETTINGS}}
    return from_dict({"method": values, "data": {"seq_len": section["block_size"]}}).method  # any row that fits a block


def _check_tokenizer(tokenizer: Tokenizer, section: Mapping[str, Any], config: ModelConfig) -> None:
    if tokenizer.blank_id != section["blank_token_id"]:
        raise FredaError(
            f"the tokenizer does not belong to the weights: its BLANK is {tokenizer.blank_id}, "
            f"config.json says {section['blank_token_id']}; put back the tokenizer files of this model"
        )
    if tokenizer.size > config.vocab_size:
        raise FredaError(
            f"the tokenizer does not belong to the weights: it has {tokenizer.size} ids, the embedding table "
            f"{config.vocab_size} rows; put back the tokenizer files of this model"
        )
    if tokenizer.fingerprint != section.get("tokenizer"):
        raise FredaError(
            f"the tokenizer does not belong to the weights: it is {tokenizer.fingerprint[:8]}, they were trained with "
            f"{str(section.get('tokenizer'))[:8]}; put back the tokenizer files of this model"
        )


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


def _own_name(name: str) -> str:
    return name.removeprefix("model.")


# -- writing a model folder ------------------------------------------------------------------------------------------


def save_model(
    folder: Path,
    model: Transformer,
    tokenizer: Tokenizer,
    method: MethodConfig,
    *,
    stage: str,
    dtype: torch.dtype | None = None,
    replace: bool = False,
) -> None:
    """Write a model folder; `dtype` casts the weights. An existing folder is an error unless it may be replaced."""
    with written_beside(folder, replace) as temporary:
        write_model(temporary, model, tokenizer, method, stage=stage, dtype=dtype)


def write_model(
    folder: Path,
    model: Transformer,
    tokenizer: Tokenizer,
    method: MethodConfig,
    *,
    stage: str,
    dtype: torch.dtype | None = None,
) -> None:
    """The files of `save_model` into a folder that exists, for checkpoints that hold more beside them."""
    state = {name: tensor.detach().to(device="cpu", dtype=dtype) for name, tensor in model.state_dict().items()}
    scorer = {name.removeprefix("scorer."): state.pop(name) for name in list(state) if name.startswith("scorer.")}
    tensors = {hugging_face_name(name): tensor.contiguous() for name, tensor in state.items()}
    write_files(folder, model.config, tensors, tokenizer, method, stage)
    if scorer:
        save_tensors(scorer, folder / SCORER_FILE)


def write_files(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    method: MethodConfig,
    stage: str,
    *,
    file: str = "model.safetensors",
) -> None:
    """config.json, `file` (tensors under their Hugging Face names, the embedding among them), the tokenizer's files."""
    section = {"blank_token_id": tokenizer.blank_id, "tokenizer": tokenizer.fingerprint}
    section |= {"method": method.name, "stage": stage}
    section |= {key: getattr(method, key) for key in STORED_SETTINGS}
    stops = {"bos_token_id": None, "eos_token_id": list(tokenizer.stop_ids)}
    values = {**hugging_face_config(config), "dtype": dtype_name(tensors), **stops, "freda": section}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    save_tensors(tensors, folder / file)
    tokenizer.save(folder)


def dtype_name(tensors: Mapping[str, Tensor]) -> str:
    """The precision of a checkpoint, by its embedding."""
    return str(tensors[EMBEDDING].dtype).removeprefix("torch.")


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
