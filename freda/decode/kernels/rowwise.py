"""What stands between the matrix products of many tokens: a residual sum with its norm, and the gate.

One kernel each, one program a token. The plain twins are `transformer.RMSNorm` and `transformer.FeedForward`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Heads(NamedTuple):
    """What the attention of a layer is made of."""

    heads: int
    kv_heads: int
    width: int
    eps: float
    q_norm: Tensor | None  # (width,)
    k_norm: Tensor | None
    bias: Tensor | None  # ((heads + 2 kv_heads) · width,)


def add_norm(x: Tensor, more: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    """x (M, D) += more; out = RMSNorm(x)."""
    tokens, width = x.shape
    _add_norm[(tokens,)](
        *(x, x if more is None else more, weight, out, width, eps),
        ADD=more is not None,
        WIDTH=triton.next_power_of_2(width),
        num_warps=8,
    )


def gate(both: Tensor, out: Tensor) -> None:
    """out (M, N) = silu(both[:, :N]) · both[:, N:]."""
    tokens, width = out.shape
    _gate[(tokens, triton.cdiv(width, 1024))](both, out, width, BLOCK=1024, num_warps=4)


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(X, MORE, WEIGHT, OUT, width, eps, ADD: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, WIDTH)
    inside = at < width
    place = tl.program_id(0).to(tl.int64) * width + at
    x = tl.load(X + place, mask=inside, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(MORE + place, mask=inside, other=0.0).to(tl.float32)).to(X.dtype.element_ty)
        tl.store(X + place, x, mask=inside)
    wide = x.to(tl.float32)
    scaled = (wide * tl.rsqrt(tl.sum(wide * wide) / width + eps)).to(X.dtype.element_ty).to(tl.float32)
    weight = tl.load(WEIGHT + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + place, (scaled * weight).to(OUT.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gate(BOTH, OUT, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gates = tl.load(BOTH + token * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(BOTH + token * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    gates = (gates / (1.0 + tl.exp(-gates))).to(OUT.dtype.element_ty).to(tl.float32)
    tl.store(OUT + token * width + at, (gates * ups).to(OUT.dtype.element_ty), mask=inside)
