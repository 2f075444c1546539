"""The one Transformer: Qwen3, Qwen2.5 and Llama shapes as flags of `ModelConfig`, not as copies.

It maps embeddings to hidden states and knows no noise, no rank and no request: the mask says who sees whom, and `past`
holds the keys and values of text that came before. The forward returns the keys and values of the tokens it was given,
so the caller decides what to keep: training uses those of the clean half for every pass over the draft, decoding
writes those of a committed block into its cache. Module names are the Hugging Face names (see `folders.hugging_face`).

Shapes: R rows, T tokens, K keys, D width, H heads, C head width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from freda.model.attention import Backend, Drafts, Mask, Seen, attend
from freda.model.config import ModelConfig
from freda.model.head import Logits, aligned
from freda.model.low_rank import LowRank, project

ONE_PRODUCT = 1024  # tokens from which queries, keys and values are projected together


class KeysValues(NamedTuple):
    """What one layer remembers of some tokens: keys (rotated) and values, each (R, Hkv, T, C)."""

    keys: Tensor
    values: Tensor


class Forward(NamedTuple):
    """What a forward over T tokens leaves."""

    hidden: Tensor  # (R, T, D) after the final norm
    new: list[KeysValues]  # of the tokens, in every layer
    beneath: Tensor  # (R, T, D): what the last layer was given


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 as the checkpoints were trained."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, over `past` and the given tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, width = config.dim, config.head_dim
        self.head_dim = width
        self.q_proj = nn.Linear(dim, config.heads * width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(dim, config.kv_heads * width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(dim, config.kv_heads * width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * width, dim, bias=False)
        self.q_norm = RMSNorm(width, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(width, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Seen, past: KeysValues | None, drafts: Drafts = False
    ) -> tuple[Tensor, KeysValues]:
        """x (R, T, D) to (R, T, D), and the keys and values of x."""
        rows, length, _ = x.shape
        q, k, v = (part.view(rows, length, -1, self.head_dim) for part in self._project(x, drafts))
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)  # (R, H, T, C)
        q, k = rotate(q, rotary), rotate(k, rotary)
        new = KeysValues(k, v)
        out = attend(q, new, past, mask)
        return project(self.o_proj, out.transpose(1, 2).reshape(rows, length, -1), drafts), new

    def _project(self, x: Tensor, drafts: Drafts) -> Sequence[Tensor]:
        """Queries, keys and values of x (R, T, D), before their norms.

        Over many tokens on a GPU in one product: one with a grouped key's or value's matrix alone is too narrow and
        runs at half the rate. Over few, copying the matrices side by side would cost more than it gains. An adapter
        changes what comes out; any other wrapped layer is called as the module it is.
        """
        parts = (self.q_proj, self.k_proj, self.v_proj)
        known = all(type(part) in (nn.Linear, LowRank) for part in parts)
        if not known or not x.is_cuda or x.shape[0] * x.shape[1] < ONE_PRODUCT:
            return [project(part, x, drafts) for part in parts]
        bias = None if self.q_proj.bias is None else torch.cat([part.bias for part in parts])
        together = F.linear(x, torch.cat([part.weight for part in parts]), bias)
        found = zip(parts, torch.split(together, [part.out_features for part in parts], dim=-1), strict=True)
        return [part.changed(out, x, drafts) if isinstance(part, LowRank) else out for part, out in found]


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor, drafts: Drafts = False) -> Tensor:
        """(R, T, D) to (R, T, D)."""
        gate, up = project(self.gate_proj, x, drafts), project(self.up_proj, x, drafts)
        return project(self.down_proj, F.silu(gate) * up, drafts)


class Layer(nn.Module):
    """One transformer layer, pre-norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Seen, past: KeysValues | None, drafts: Drafts = False
    ) -> tuple[Tensor, KeysValues]:
        """x (R, T, D) to (R, T, D), and the keys and values of x."""
        attended, new = self.self_attn(self.input_layernorm(x), rotary, mask, past, drafts)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x), drafts), new


class Transformer(nn.Module):
    """Embedding, layers, final norm and head.

    `blank_id` is the id of BLANK; logits are cut to the ids below it, so that loss, confidence, choice and likelihood
    all speak of the same vocabulary, and neither BLANK nor an unused row of the table can ever be predicted.

    An adapter (`model.adapter`) makes its linear layers `LowRank` and gives BLANK an embedding beside the table.
    """

    inv_freq: Tensor
    blank: nn.Parameter | None  # (1, D): an adapter's embedding of BLANK

    def __init__(self, config: ModelConfig, blank_id: int) -> None:
        super().__init__()
        assert 0 < blank_id < config.vocab_size, (blank_id, config.vocab_size)
        self.config, self.blank_id = config, blank_id
        self.backend: Backend = "sdpa"  # how masks are made for this model; see `attention`
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = None if config.tied else nn.Linear(config.dim, config.vocab_size, bias=False)
        self.register_buffer("inv_freq", rotary_frequencies(config), persistent=False)
        self.register_parameter("blank", None)

    def forward(self, x: Tensor, position: Tensor, mask: Mask, past: Sequence[KeysValues] | None = None) -> Forward:
        """Embeddings x (R, T, D) at `position` (R, T), seeing `past` and each other as `mask` (T over K) allows."""
        rotary = rotary_angles(position, self.inv_freq)
        new = []
        for index, layer in enumerate(self.layers):
            beneath = x
            x, kept = layer(x, rotary, mask.seen, None if past is None else past[index], mask.drafts)
            new.append(kept)
        return Forward(self.norm(x), new, beneath)

    def head(self, hidden: Tensor) -> Logits:
        """Logits over the ids below BLANK of hidden states (..., D), computed lazily."""
        return Logits(hidden, self.head_weight[: aligned(self.blank_id, self.config.vocab_size)], self.blank_id)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states (..., D) over all ids below BLANK: fp32, (..., blank_id)."""
        return self.head(hidden).all()

    @property
    def blank_row(self) -> Tensor:
        """The embedding of BLANK, (D,)."""
        return self.embed_tokens.weight[self.blank_id] if self.blank is None else self.blank[0]

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix, (V, D)."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def random_weights(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """All weights by name, a function of the seed alone: std 1/√D, residual outputs scaled down by depth.

        That is the usual 0.02 at D = 2,500. With 0.02 at D = 96 and 128, look-ups were not learned at all (LOG.md).
        """

        def std(name: str, weight: Tensor) -> float:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            return float((self.config.dim * (2 * self.config.layers if residual else 1)) ** -0.5)

        return sampled_weights(self.named_parameters(), seed, std)


def sampled_weights(
    weights: Iterable[tuple[str, Tensor]], seed: int, std: Callable[[str, Tensor], float]
) -> Iterator[tuple[str, Tensor]]:
    """New values of named weights: matrices are sampled, norms are 1 and biases 0. One after the other, so that a
    process that holds a part of each never holds them all."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(weights):
        if weight.dim() < 2:
            yield name, torch.full(weight.shape, 0.0 if name.endswith("bias") else 1.0)
        else:
            yield name, torch.randn(weight.shape, generator=generator) * std(name, weight)


def rotary_angles(position: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles at `position` (R, T), each (R, 1, T, C) in fp32."""
    angles = position[:, None, :, None].float() * inv_freq  # (R, 1, T, C/2)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of x (R, H, T, C), halves paired as in the Hugging Face checkpoints."""
    cos, sin = rotary
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each pair of channels, (C/2,), with Llama-3 scaling where the config asks for it."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequency = 1.0 / (config.rope_theta**exponent)
    if config.rope_scaling is None:
        return frequency
    scaling = config.rope_scaling  # slows down wavelengths beyond the original context, and blends towards short ones
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)  # rotations within that context
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = frequency * (blend + (1 - blend) / scaling["factor"])
    return scaled
