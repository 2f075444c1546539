"""The shapes of a Transformer and of an adapter, `[model]` and `[adapter]` of a run, and how many weights they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from freda.errors import require
from freda.sections import knob, require_at_least

MOST = {  # what no model comes near
    **{"vocab_size": 2**24, "layers": 2**12, "max_positions": 2**26},
    **dict.fromkeys(("dim", "heads", "kv_heads", "head_dim", "ffn_dim"), 2**20),
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # what an adapter may change
LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`[model]`: the shape of a Transformer trained from scratch. With `train.init` the checkpoint's shape is used."""

    vocab_size: int = knob(0, "rows of the embedding table; 0 takes the tokenizer's")
    dim: int = knob(128, "width of the residual stream")
    layers: int = knob(4, "number of transformer layers")
    heads: int = knob(4, "query heads")
    kv_heads: int = knob(4, "key and value heads (grouped-query attention when fewer than heads)")
    head_dim: int = knob(32, "width of one head")
    ffn_dim: int = knob(384, "inner width of the feed-forward")
    max_positions: int = knob(4096, "longest document the model is meant for")
    rope_theta: float = knob(10_000.0, "base of the rotary frequencies")
    rope_scaling: Mapping[str, Any] | None = knob(None, "Llama-3 frequency scaling, as in the checkpoint's config")
    norm_eps: float = knob(1e-6, "epsilon of RMSNorm")
    qk_norm: bool = knob(True, "RMSNorm on queries and keys (Qwen3)")
    qkv_bias: bool = knob(False, "bias on the query, key and value projections (Qwen2.5)")
    tied: bool = knob(True, "head and embedding share one matrix")

    def __post_init__(self) -> None:
        require_at_least(1, self, "model", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim", "max_positions")
        for name, most in MOST.items():
            require(getattr(self, name) <= most, f"model.{name} is {getattr(self, name)}; use {most} or less")
        divides = self.heads % self.kv_heads == 0
        require(divides, f"model.kv_heads {self.kv_heads} does not divide model.heads {self.heads}")
        odd = "model.qk_norm and model.qkv_bias are both true"
        both = self.qk_norm and self.qkv_bias
        require(not both, f"{odd}; Qwen3 has the norm, Qwen2.5 the bias, no family has both")
        missing = [key for key in LLAMA3_SCALING if self.rope_scaling is not None and key not in self.rope_scaling]
        require(not missing, f"model.rope_scaling has no {', '.join(missing)}; only the scaling of Llama 3 is known")
        require(self.head_dim % 2 == 0, f"model.head_dim is {self.head_dim}; rotary embedding needs an even number")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """`[adapter]`: low-rank matrices to train over the frozen weights of `train.init`. Without it all weights learn."""

    rank: int = knob(32, "rank of the matrices")
    alpha: float | None = knob(None, "their product is multiplied by alpha / rank; unset: by 1")
    targets: tuple[str, ...] = knob(TARGETS, "linear layers that have them")
    rows: Literal["draft", "all"] = knob(
        "draft", "draft: only drafts are changed, committed text is the base's, bit for bit; all: every token"
    )

    def __post_init__(self) -> None:
        require_at_least(1, self, "adapter", "rank")
        require(self.alpha is None or self.alpha > 0, f"adapter.alpha is {self.alpha}; use a positive number")
        odd = next((name for name in self.targets if name not in TARGETS), None)
        require(odd is None, f"adapter.targets has {odd!r}; use {', '.join(TARGETS)}")
        require(bool(self.targets), f"adapter.targets is empty; use {', '.join(TARGETS)}")

    @property
    def scale(self) -> float:
        """The factor on the product of the matrices."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


def layer_parameters(shape: ModelConfig) -> int:
    """Parameters of all layers, norms included."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = shape.dim * (2 * query + 2 * key)
    small = 2 * shape.dim + 2 * shape.head_dim * shape.qk_norm + (query + 2 * key) * shape.qkv_bias
    return shape.layers * (attention + 3 * shape.dim * shape.ffn_dim + small)


def head_parameters(shape: ModelConfig) -> int:
    """Parameters of the head alone."""
    return shape.vocab_size * shape.dim


def all_parameters(shape: ModelConfig) -> int:
    """Parameters of a model without a scorer."""
    return layer_parameters(shape) + head_parameters(shape) * (1 if shape.tied else 2) + shape.dim


def adapter_parameters(shape: ModelConfig, adapter: AdapterConfig) -> int:
    """Parameters of an adapter."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sides = {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": query}  # beside the width, which all have
    ends = sum(shape.dim + sides.get(name, shape.ffn_dim) for name in set(adapter.targets))
    return shape.layers * adapter.rank * ends + shape.dim
