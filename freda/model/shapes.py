"""Shapes of published models, and the arithmetic of a shape: its parameters, and the pairs that attention computes."""

from __future__ import annotations

from typing import Any

from freda.data.loader import Batch
from freda.model.config import ModelConfig

_QWEN3: dict[str, Any] = {"vocab_size": 151_936, "head_dim": 128, "kv_heads": 8}
_QWEN3 |= {"rope_theta": 1e6, "max_positions": 32_768}
QWEN3_BLANK = 151_669  # the first free id of its tokenizer

SHAPES: dict[str, ModelConfig] = {
    "qwen3-0.6b": ModelConfig(dim=1024, layers=28, heads=16, ffn_dim=3072, **_QWEN3),
    "qwen3-1.7b": ModelConfig(dim=2048, layers=28, heads=16, ffn_dim=6144, **_QWEN3),
    "qwen3-4b": ModelConfig(dim=2560, layers=36, heads=32, ffn_dim=9728, **_QWEN3),
    "qwen3-8b": ModelConfig(dim=4096, layers=36, heads=32, ffn_dim=12_288, tied=False, **_QWEN3),
    "tiny": ModelConfig(vocab_size=512, dim=128, layers=2, heads=4, kv_heads=4, head_dim=32, ffn_dim=384),
}


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


def visible_pairs(lengths: list[int], block_size: int) -> int:
    """Pairs of a token and a key it sees in clean documents of these lengths; drafts over them have as many.

    A clean token of block j sees j + 1 blocks; a drafted one j clean blocks and its own draft.
    """
    blocks = [-(-length // block_size) for length in lengths]
    return sum(block_size * block_size * count * (count + 1) // 2 for count in blocks)


def counted(batch: Batch, block_size: int) -> tuple[int, int]:
    """Tokens of packed rows without padding, and pairs as `visible_pairs` counts them."""
    real = batch.document >= 0
    return int(real.sum()), int(((batch.position // block_size + 1) * block_size * real).sum())
