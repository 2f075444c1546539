"""What stands between the matrix products of many tokens: a residual sum with its norm, the gate, and what makes
queries, keys and values of a product. One kernel each, one program a token. The plain twins are `transformer.RMSNorm`,
`transformer.FeedForward` and `transformer.Attention`."""

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


def spread(
    qkv: Tensor,
    heads: Heads,
    inv_freq: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    table: Tensor,
) -> None:
    """Queries, keys and values of R whole prompts of L places, normed and rotated, from their product `qkv` (R · L, ·).

    `out` are (R, L, heads, width) each; keys and values also go into the pages that `table` (R, pages) int32 names.
    """
    rows, length = out[0].shape[:2]
    total = heads.heads + 2 * heads.kv_heads
    norms = heads.q_norm if heads.q_norm is not None else qkv, heads.k_norm if heads.k_norm is not None else qkv
    _spread[(length, rows)](
        *(qkv, *norms, heads.bias if heads.bias is not None else qkv, inv_freq, *out, *cache, table, length),
        *(table.stride(0), heads.eps),
        H=heads.heads,
        KV=heads.kv_heads,
        HALF=heads.width // 2,
        ALL=triton.next_power_of_2(total),
        PAGE=cache[0].shape[2],
        NORM=heads.q_norm is not None,
        BIAS=heads.bias is not None,
        num_warps=4,
    )


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


@triton.jit  # type: ignore[untyped-decorator]
def _spread(  # type: ignore[no-untyped-def]
    A, QNORM, KNORM, BIASES, FREQ, Q, K, V, KEYS, VALUES, TABLE, length, table_step, eps,
    H: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, ALL: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * HALF
    KIND: tl.constexpr = Q.dtype.element_ty
    place, row = tl.program_id(0), tl.program_id(1)
    token = (row * length + place).to(tl.int64)
    head, c = tl.arange(0, ALL)[:, None], tl.arange(0, HALF)[None, :]
    is_q, is_k, is_v = head < H, (head >= H) & (head < H + KV), (head >= H + KV) & (head < H + 2 * KV)
    given = head < H + 2 * KV
    at = A + token * (H + 2 * KV) * C + head * C + c
    first, second = tl.load(at, mask=given, other=0.0), tl.load(at + HALF, mask=given, other=0.0)
    first, second = first.to(tl.float32), second.to(tl.float32)
    if BIAS:
        first = (first + tl.load(BIASES + head * C + c, mask=given, other=0.0).to(tl.float32)).to(KIND).to(tl.float32)
        second += tl.load(BIASES + head * C + HALF + c, mask=given, other=0.0).to(tl.float32)
        second = second.to(KIND).to(tl.float32)
    one, two = first, second
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / C + eps)[:, None]
        norm1 = tl.where(is_q, tl.load(QNORM + c).to(tl.float32), tl.load(KNORM + c).to(tl.float32))
        norm2 = tl.where(is_q, tl.load(QNORM + HALF + c).to(tl.float32), tl.load(KNORM + HALF + c).to(tl.float32))
        one = ((first * scale).to(KIND).to(tl.float32) * norm1).to(KIND).to(tl.float32)
        two = ((second * scale).to(KIND).to(tl.float32) * norm2).to(KIND).to(tl.float32)
    angle = place.to(tl.float32) * tl.load(FREQ + c)
    cos, sin = tl.cos(angle), tl.sin(angle)
    turned1, turned2 = (one * cos - two * sin).to(KIND), (two * cos + one * sin).to(KIND)
    to_q = Q + token * H * C + head * C + c
    tl.store(to_q, turned1, mask=is_q)
    tl.store(to_q + HALF, turned2, mask=is_q)
    to_k = token * KV * C + (head - H) * C + c
    tl.store(K + to_k, turned1, mask=is_k)
    tl.store(K + to_k + HALF, turned2, mask=is_k)
    to_v = token * KV * C + (head - H - KV) * C + c
    tl.store(V + to_v, first.to(KIND), mask=is_v)
    tl.store(V + to_v + HALF, second.to(KIND), mask=is_v)
    page = tl.load(TABLE + row * table_step + place // PAGE).to(tl.int64)
    key = ((page * KV + head - H) * PAGE + place % PAGE) * C + c
    tl.store(KEYS + key, turned1, mask=is_k)
    tl.store(KEYS + key + HALF, turned2, mask=is_k)
    value = ((page * KV + head - H - KV) * PAGE + place % PAGE) * C + c
    tl.store(VALUES + value, first.to(KIND), mask=is_v)
    tl.store(VALUES + value + HALF, second.to(KIND), mask=is_v)
