"""Shapes of published models, for benchmarks and plans that need no weights."""

from __future__ import annotations

from typing import Any

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
