"""The Best-of-N scorer: one number for how much more likely a candidate block is in the data than in the proposal.

Two channels, each RMS-normed: the backbone's hidden states of the candidate (soft) and the embeddings of its tokens
(hard). They are fused by a projection, go through one Qwen3-style layer that sees the block only (positions 0..B−1),
are averaged over the block and scored by a small MLP (paper, appendix C.2; M19).

The soft channel is what the backbone makes of a candidate, or, with a `last_layer` of the scorer's own, what a trained
copy of the backbone's last layer makes of it (M9). The copy sees the committed text as the backbone's layer has stored
it, so that one cache serves both, and the backbone proposes as before.

Shapes: N blocks (one for each candidate), B tokens per block, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from freda.model.attention import Mask
from freda.model.config import ModelConfig
from freda.model.transformer import (
    Forward,
    KeysValues,
    Layer,
    RMSNorm,
    Transformer,
    rotary_angles,
    rotary_frequencies,
    sampled_weights,
)


class Scorer(nn.Module):
    """Scores candidate blocks of one backbone."""

    inv_freq: Tensor

    def __init__(self, backbone: ModelConfig, *, last_layer: bool = False) -> None:
        super().__init__()
        self.last_layer = Layer(backbone) if last_layer else None
        self.config = config = replace(backbone, qk_norm=True, qkv_bias=False)
        self.soft_norm = RMSNorm(config.dim, config.norm_eps)
        self.hard_norm = RMSNorm(config.dim, config.norm_eps)
        self.fuse = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.layer = Layer(config)
        self.mlp = nn.Sequential(nn.Linear(config.dim, config.dim // 2), nn.GELU(), nn.Linear(config.dim // 2, 1))
        self.register_buffer("inv_freq", rotary_frequencies(config), persistent=False)

    def soft_channel(
        self, backbone: Transformer, out: Forward, position: Tensor, mask: Mask, past: KeysValues | None
    ) -> Tensor:
        """The hidden states (R, T, D) to be scored of T draft tokens that the backbone has seen as `out`.

        `mask` lets the draft tokens see `past`, the last layer's keys and values of committed text, and themselves.
        """
        if self.last_layer is None:
            return out.hidden
        seen: Tensor = self.last_layer(out.beneath, rotary_angles(position, backbone.inv_freq), mask.seen, past)[0]
        normed: Tensor = backbone.norm(seen)
        return normed

    def forward(self, hidden: Tensor, embedding: Tensor, counted: Tensor) -> Tensor:
        """Scores (N,) in fp32 of blocks with `hidden` and `embedding` (N, B, D); `counted` (N, B) are averaged over."""
        hidden, embedding = (part.to(self.fuse.weight.dtype) for part in (hidden, embedding))  # it may be wider
        fused = self.fuse(torch.cat([self.soft_norm(hidden), self.hard_norm(embedding)], dim=-1))
        position = torch.arange(hidden.shape[1], device=hidden.device)[None]
        seen = counted[:, None, None, :] | torch.eye(hidden.shape[1], dtype=torch.bool, device=hidden.device)
        out, _ = self.layer(fused, rotary_angles(position, self.inv_freq), seen, None)
        weight = counted[..., None].to(out.dtype)
        pooled = (out * weight).sum(1) / weight.sum(1).clamp_min(1)  # (N, D)
        score: Tensor = self.mlp(pooled)[:, 0].float()
        return score

    def random_weights(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """All weights but those of a last layer, by name: std 1/√inputs. The MLP's last layer starts at zero, so that a
        new scorer prefers nothing."""
        own = (pair for pair in self.named_parameters() if not pair[0].startswith("last_layer."))
        return sampled_weights(own, seed, lambda name, w: 0.0 if name.startswith("mlp.2") else w.shape[1] ** -0.5)
