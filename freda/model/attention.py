"""Attention over a mask given by token vectors: two backends, one answer.

`sdpa` builds the dense mask and works everywhere, backward included. `flex` evaluates `masks.visible` from the vectors
inside the kernel, tile by tile, and skips tiles in which nothing is visible. It is the fast path on CUDA; on CPU it has
no backward. Finding those tiles still evaluates the rule densely, once per forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from freda.model import masks
from freda.model.masks import Tokens

Backend = Literal["sdpa", "flex"]
Mask = Tensor | BlockMask


def make_mask(query: Tokens, key: Tokens, backend: Backend) -> Mask:
    """The mask of one forward, built once and shared by all layers."""
    if backend == "sdpa":
        return masks.dense(query, key)[:, None]  # (R, 1, Q, K)

    def visible(row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return masks.visible(Tokens(*(v[row, q] for v in query)), Tokens(*(v[row, k] for v in key)))

    rows, queries = query.document.shape
    keys = key.document.shape[1]
    return create_block_mask(visible, rows, None, queries, keys, device=query.document.device)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Softmax attention. q (R, H, Q, C); k and v (R, Hkv, K, C) with Hkv dividing H; returns (R, H, Q, C)."""
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        out = _flex(q.is_cuda)(q, k, v, block_mask=mask, enable_gqa=grouped)
        assert isinstance(out, Tensor)
        return out
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


@functools.cache
def _flex(compiled: bool) -> Callable[..., object]:
    """On CUDA only the compiled kernel avoids the dense scores; on CPU the plain one serves the parity test."""
    if compiled:
        return torch.compile(flex_attention, dynamic=False)
    return flex_attention


def pick_backend(name: str, device: torch.device) -> Backend:
    """Resolve `auto`: flex on CUDA, sdpa elsewhere."""
    if name == "auto":
        return "flex" if device.type == "cuda" else "sdpa"
    return "flex" if name == "flex" else "sdpa"
