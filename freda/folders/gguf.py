"""GGUF files, the format of llama.cpp, read as Hugging Face checkpoints.

Weights are dequantised one tensor at a time. The metadata is read here and not through `transformers`, whose reader
needs one more package, ignores the head width of Qwen3 and the rotary scaling of Llama 3, and builds a different
tokenizer in every version. Three things differ from a Hugging Face checkpoint and are undone:

- Llama's query and key rows are stored in the order of the original rotary pairing;
- Llama-3 scaling is a tensor of factors instead of four numbers;
- quantised files of models with one shared matrix hold it twice, as embedding and, in finer steps, as head.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor

from freda.errors import FredaError, optional, require
from freda.folders.gguf_header import check_header
from freda.folders.hugging_face import FAMILIES, Checkpoint, family_of, model_config
from freda.model.config import ModelConfig
from freda.model.transformer import rotary_frequencies

CONFIG_KEYS = {  # Hugging Face name: GGUF name below the architecture
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "num_experts": "expert_count",
}
MODULES = {  # GGUF name: Hugging Face name
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_EMBEDDING, GGUF_HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # stored types that are not quantised
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
INSTEAD = "convert the Hugging Face checkpoint instead"
SAME_MATRIX = 0.98  # cosine above which two quantised matrices are copies of one
ROWS_COMPARED = 4096
ENDS = ("<|im_end|>", "<|endoftext|>")  # files of Qwen name one of them and mean both
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's token types
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {  # llama.cpp's name of a pre-tokenizer: the expression that cuts text into words
    "qwen2": WORDS + r"\p{N}" + REST,
    "llama-bpe": WORDS + r"\p{N}{1,3}" + REST,
    "smollm": r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+",
}


def read_gguf(path: Path, dtype: torch.dtype | None) -> Checkpoint:
    """Read a GGUF file. Without `dtype`, float weights keep theirs and quantised ones become bfloat16."""
    package = optional("gguf", "gguf")
    check_header(path)
    with _understood():
        return _read(_open(package, path), dtype)


@contextlib.contextmanager
def _understood() -> Iterator[None]:
    """Metadata of wrong types, missing or damaged, in one line; a panic of the tokenizer's library is no Exception."""
    try:
        yield
    except (FredaError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        what = f"{type(error).__name__}: {error}"[:200]
        raise FredaError(f"the metadata of the file is damaged ({what}); download it again") from None


def _read(reader: Any, dtype: torch.dtype | None) -> Checkpoint:
    fields = {name: field.contents() for name, field in reader.fields.items()}
    stored = {tensor.name: tensor for tensor in reader.tensors}
    require("tokenizer.ggml.tokens" in fields, f"the file has no tokenizer; {INSTEAD}")
    if dtype is None:
        table = stored.get(GGUF_EMBEDDING)
        dtype = FLOATS.get("" if table is None else table.tensor_type.name, torch.bfloat16)
    kinds = sorted({tensor.tensor_type.name for tensor in stored.values()} - FLOATS.keys())
    notes = [f"{', '.join(kinds)} dequantised to {str(dtype).removeprefix('torch.')}"] if kinds else []
    notes += _tie_copies(stored)
    config = _config(fields, stored)
    bos = fields.get("tokenizer.ggml.bos_token_id")
    bos_token = None if bos is None else fields["tokenizer.ggml.tokens"][bos]
    settings = {"chat_template": fields.get("tokenizer.chat_template"), "bos_token": bos_token}
    tokenizer_json, tensors = _tokenizer_json(fields), _tensors(stored, model_config(config), dtype)
    return Checkpoint(config, tensors, tokenizer_json, settings, _stops(fields), notes)


def _open(package: Any, path: Path) -> Any:
    try:
        reader = package.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise FredaError(f"not a whole GGUF file ({error}); download it again") from None
    parts, advice = reader.fields.get("split.count"), "llama-gguf-split --merge FIRST_PART OUT.gguf"
    require(parts is None or parts.contents() <= 1, f"one part of a split model; join all parts: {advice}")
    return reader


# -- the shape -------------------------------------------------------------------------------------------------------


def _config(fields: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """config.json from the metadata; `model_config` has defaults for what the metadata omits."""
    kind = str(fields.get("general.architecture"))
    values = {name: fields[f"{kind}.{key}"] for name, key in CONFIG_KEYS.items() if f"{kind}.{key}" in fields}
    if fields.get(f"{kind}.rope.scaling.type", "none") != "none":
        values["rope_scaling"] = {"rope_type": fields[f"{kind}.rope.scaling.type"]}
    architecture = next((family.architecture for family in FAMILIES if family.model_type == kind), kind)
    config = {**values, "model_type": kind, "architectures": [architecture]}
    config |= {"vocab_size": len(fields["tokenizer.ggml.tokens"]), "tie_word_embeddings": GGUF_HEAD not in stored}
    if ROPE_FACTORS in stored:
        config["rope_scaling"] = _llama3_scaling(model_config(config), _dequantised(stored[ROPE_FACTORS]))
    return config


def _llama3_scaling(config: ModelConfig, factors: Tensor) -> dict[str, Any]:
    """The four numbers behind the factors by which Llama-3 scaling divides the rotary frequencies."""
    scaling = {"rope_type": "llama3", "factor": round(float(factors.max()), 3), **LLAMA3_SCALING}
    plain = rotary_frequencies(config)
    scaled = rotary_frequencies(ModelConfig(**{**vars(config), "rope_scaling": scaling}))
    same = factors.shape == plain.shape and torch.allclose(plain / scaled, factors, rtol=1e-3)
    require(same, f"{ROPE_FACTORS} is not the scaling of Llama 3; {INSTEAD}")
    return scaling


# -- the weights -----------------------------------------------------------------------------------------------------


def _tensors(stored: Mapping[str, Any], config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights under their Hugging Face names, cast to `dtype` one by one."""
    llama = family_of(config).model_type == "llama"
    reordered = {"q_proj": config.heads, "k_proj": config.kv_heads} if llama else {}  # llama.cpp reorders their rows
    tensors = {}
    for gguf_name in (name for name in stored if name != ROPE_FACTORS):
        name, weight = _hugging_face_name(gguf_name), _dequantised(stored[gguf_name])
        module = name.split(".")[-2:][0]
        if module in reordered:  # from neighbouring pairs to (first half, second half) of a head's rows
            pairs = weight.view(reordered[module], -1, 2, weight.shape[-1])
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        tensors[name] = weight.to(dtype)
    return tensors


def _hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`; an unknown name is returned unchanged."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in MODULES:
        return name
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{MODULES[match[2]]}.{match[3]}"


def _dequantised(tensor: Any, step: int = 1) -> Tensor:
    """Every `step`-th row of a stored tensor as float32."""
    quants = optional("gguf.quants", "gguf")
    try:
        values = quants.dequantize(np.ascontiguousarray(tensor.data[::step]), tensor.tensor_type)
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise FredaError(f"the tensor {tensor.name} is quantised as {kind}, which cannot be read; use Q8_0") from None
    return torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: the file is mapped read-only


def _tie_copies(stored: dict[str, Any]) -> list[str]:
    """Tie embedding and head again if they are quantised copies of one matrix; the head, the finer copy, is kept."""
    if GGUF_EMBEDDING not in stored or GGUF_HEAD not in stored:
        return []
    step = max(1, len(stored[GGUF_HEAD].data) // ROWS_COMPARED)
    embedding, head = (_dequantised(stored[name], step).double().flatten() for name in (GGUF_EMBEDDING, GGUF_HEAD))
    cosine = F.cosine_similarity(embedding, head, dim=0).item() if embedding.shape == head.shape else 0.0
    if cosine <= SAME_MATRIX:
        return []
    stored[GGUF_EMBEDDING] = stored.pop(GGUF_HEAD)
    return [f"embedding and head are copies of one matrix (cosine {cosine:.4f}): tied again, the head's copy kept"]


# -- the tokenizer ---------------------------------------------------------------------------------------------------


def _stops(fields: Mapping[str, Any]) -> list[int | str]:
    """The tokens that end generation: the file's own, and like llama.cpp all tokens that end a turn or a document."""
    own = [fields[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in fields]
    types = fields.get("tokenizer.ggml.token_type", ())
    named = zip(fields["tokenizer.ggml.tokens"], types, strict=False)
    return own + [index for index, (token, type_) in enumerate(named) if token in ENDS and type_ == CONTROL]


def _tokenizer_json(fields: Mapping[str, Any]) -> str:
    """tokenizer.json of a byte-level BPE, from vocabulary, merges and token types."""
    kind, split = fields.get("tokenizer.ggml.model"), str(fields.get("tokenizer.ggml.pre"))
    known = ", ".join(f"gpt2/{name}" for name in SPLITS)
    odd = f"the tokenizer {kind}/{split} of a GGUF file is not supported (only {known}); {INSTEAD}"
    require(kind == "gpt2" and split in SPLITS, odd)
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    used = max((index + 1 for index, type_ in enumerate(types) if type_ != UNUSED), default=0)  # fill of the table
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens[:used])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    if split == "qwen2":
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    splits = tokenizers.pre_tokenizers
    words = splits.Split(tokenizers.Regex(SPLITS[split]), behavior="isolated")
    tokenizer.pre_tokenizer = splits.Sequence([words, splits.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    for special, type_ in ((True, CONTROL), (False, USER_DEFINED)):
        added = [token for token, kind in zip(tokens[:used], types, strict=False) if kind == type_]
        tokenizer.add_tokens([tokenizers.AddedToken(token, special=special, normalized=False) for token in added])
    text: str = tokenizer.to_str()
    return text
