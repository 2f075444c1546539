"""Matrix products with few rows (tokens), bound by the reading of the weights, and what is done to their results.

A program multiplies 64 rows of a weight, or a part of their columns, with all tokens: the weight is the left factor,
so that the tensor cores' tall tiles are full and every byte of it is read once. Where few tiles would leave the GPU
idle, the columns are split; the last program of a tile adds the parts up in their order, so results do not depend on
timing.

RMS norms cost no kernel of their own. Who writes the residual stream x also writes x·g, g being the weight of the norm
to come, and each tile's share of Σ x²; who multiplies with the normed x takes x·g and scales the result. The plain twin
is a `transformer.Layer`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 64


class Stream(NamedTuple):
    """The residual stream of M tokens, as the products take and leave it."""

    x: Tensor  # (M, D) bf16
    scaled: Tensor  # (M, D) bf16: x·g, for the norm to come
    squares: Tensor  # (tiles, M) fp32: of each tile of columns, Σ x²; what is not written is zero


class Plan(NamedTuple):
    """The division of a product into tiles."""

    splits: int
    chunk: int  # columns at a time
    stages: int
    tile: int = 64  # rows of the weight, the least that the tensor cores' tall tiles take


# Found by trying on an H200 with 8 tokens and Qwen3-4B's shape; splits leave two to four programs a multiprocessor.
PROJECT, RESIDUAL, GATE, HEAD = Plan(2, 64, 5), Plan(5, 128, 4), Plan(1, 128, 3), Plan(1, 128, 3)
PACKED = 128  # columns of int8 whose bytes are mixed, see `packed_by_four`


def in_bytes(plan: Plan, inner: int) -> Plan:
    """The division for int8 weights: twice the columns are as many bytes."""
    chunk = 2 * PACKED if inner % (2 * PACKED) == 0 else PACKED
    return plan._replace(chunk=chunk, stages=3)


def new_stream(
    tokens: int, width: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, tiles: int = 0
) -> Stream:
    """A stream to be written to, in tiles of `add` or in so many."""
    x, scaled = torch.empty(2, tokens, width, device=device, dtype=dtype).unbind()
    return Stream(x, scaled, torch.zeros(tiles or -(-width // RESIDUAL.tile), tokens, device=device))


def embed(ids: Tensor, alpha: Tensor, table: Tensor, blank_id: int, norm: Tensor, out: Stream) -> None:
    """Eq. soft_prediction_embedding of M tokens into `out`, for a norm of weight `norm` to come."""
    tokens, width = out.x.shape
    _embed[(tokens,)](
        *(ids, alpha, table, norm, *out, blank_id, tokens, width, len(out.squares)),
        TILES=triton.next_power_of_2(len(out.squares)),
        WIDTH=triton.next_power_of_2(width),
        num_warps=8,
    )


class Matrix(NamedTuple):
    """A weight (N, K): its numbers, or int8 and a scale for each row."""

    values: Tensor  # of int8, (N, K / 4) as `packed_by_four`
    scales: Tensor | None = None  # (N,) fp32


def project(stream: Stream, weight: Matrix, eps: float, out: Tensor) -> None:
    """The normed stream times weight.T, in parts: their sum over the first dimension of `out` (S, M, N) is it."""
    _launch(stream.scaled, weight, out, PROJECT._replace(splits=len(out)), stream=stream, eps=eps, mode=0)


def gate(stream: Stream, weight: Matrix, eps: float, out: Tensor) -> None:
    """silu(normed · gate.T) · (normed · up.T) into `out` (M, N); `weight` is gate over up, (2N, D)."""
    _launch(stream.scaled, weight, out, GATE, stream=stream, eps=eps, mode=1)


def add(x: Tensor, weight: Matrix, scratch: Scratch, norm: Tensor, stream: Stream) -> None:
    """stream.x += x · weight.T, rescaled for a norm of weight `norm` to come."""
    _launch(x, weight, norm, RESIDUAL, stream=stream, eps=0.0, mode=2, scratch=scratch)


class Scratch(NamedTuple):
    """Memory for sums in parts; the counts are left at zero."""

    parts: Tensor  # (S, M, N) fp32, as flat as it likes to be
    counts: Tensor  # (tiles,) int32


def new_scratch(tokens: int, width: int, device: torch.device) -> Scratch:
    """Enough for `add` to a stream of this width."""
    parts = torch.empty(RESIDUAL.splits * tokens * width, device=device)
    return Scratch(parts, torch.zeros(-(-width // RESIDUAL.tile), dtype=torch.int32, device=device))


def _launch(
    x: Tensor,
    matrix: Matrix,
    out: Tensor,
    plan: Plan,
    *,
    stream: Stream,
    eps: float,
    mode: int,
    scratch: Scratch | None = None,
) -> None:
    weight, scales = matrix
    tokens, inner = x.shape
    if scales is not None:
        plan = in_bytes(plan, inner)
    rows = weight.shape[0] // 2 if mode == 1 else weight.shape[0]
    assert tokens <= MOST_ROWS and inner % plan.chunk == 0 and rows % plan.tile == 0, (x.shape, weight.shape)
    parts, counts = scratch or (out, out)
    _skinny[(rows // (plan.tile // 2 if mode == 1 else plan.tile), plan.splits)](
        *(x, weight, x if scales is None else scales, out, *stream, parts, counts),
        *(tokens, rows, inner, eps, len(stream.squares)),
        MODE=mode,
        SPLITS=plan.splits,
        BM=max(16, triton.next_power_of_2(tokens)),
        BN=plan.tile,
        BK=plan.chunk,
        TILES=triton.next_power_of_2(len(stream.squares)),
        STAGES=plan.stages,
        INT8=scales is not None,
        FAST=x.is_cuda and x.dtype == torch.bfloat16,
        num_warps=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _embed(  # type: ignore[no-untyped-def]
    IDS, ALPHA, TABLE, NORM, X, SCALED, SQUARES, blank, tokens, width, tiles, TILES: tl.constexpr, WIDTH: tl.constexpr
):
    token = tl.program_id(0)
    at = tl.arange(0, WIDTH)
    inside = at < width
    row = tl.load(IDS + token).to(tl.int64)
    alpha = tl.load(ALPHA + token)
    one = tl.load(TABLE + row * width + at, mask=inside, other=0.0).to(tl.float32)
    none = tl.load(TABLE + blank.to(tl.int64) * width + at, mask=inside, other=0.0).to(tl.float32)
    near = tl.where(alpha < 0.5, none + alpha * (one - none), one - (one - none) * (1.0 - alpha))  # as torch.lerp
    x = near.to(X.dtype.element_ty)
    wide = x.to(tl.float32)
    norm = tl.load(NORM + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(X + token * width + at, x, mask=inside)
    tl.store(SCALED + token * width + at, (wide * norm).to(SCALED.dtype.element_ty), mask=inside)
    tile = tl.arange(0, TILES)
    total = tl.where(tile == 0, tl.sum(wide * wide), 0.0)
    tl.store(SQUARES + tile * tokens + token, total, mask=tile < tiles)


def packed_by_four(values: Tensor) -> Tensor:
    """int8 (..., K) as int32 (..., K / 4): of every `PACKED` columns, number 32 j + i is byte j of number i, plus 128.

    So a program reads whole words, takes byte j of all of them, and has columns that lie side by side.
    """
    *rows, inner = values.shape
    words = values.view(*rows, inner // PACKED, 4, PACKED // 4).transpose(-1, -2).contiguous()
    return (words ^ -128).view(torch.int32).view(*rows, inner // 4)


def _byte(number: int) -> tl.constexpr:
    """Two words to two bf16: the byte under the exponent of 2²³, where taking 2²³ + 128 away is exact.

    The instruction that converts integers does 16 a cycle; with it int8 weights were slower than bf16.
    """
    take = f"0x4B000000, 0x744{number};"
    return tl.constexpr(
        "{ .reg .b32 a, b;"
        f" prmt.b32 a, $1, {take} prmt.b32 b, $2, {take}"
        " sub.f32 a, a, 0f4B000080; sub.f32 b, b, 0f4B000080;"
        " cvt.rn.bf16x2.f32 $0, b, a; }"
    )


BYTE_0, BYTE_1, BYTE_2, BYTE_3 = (_byte(number) for number in range(4))


@triton.jit  # type: ignore[untyped-decorator]
def unpacked(words, J: tl.constexpr, KIND: tl.constexpr, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Byte J of every word as a number of the activations' kind."""
    if FAST:
        CODE: tl.constexpr = BYTE_0 if J == 0 else BYTE_1 if J == 1 else BYTE_2 if J == 2 else BYTE_3
        return tl.inline_asm_elementwise(CODE, "=r,r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return (((words >> (8 * J)) & 255) - 128).to(KIND)


@triton.jit  # type: ignore[untyped-decorator]
def multiplied(  # type: ignore[no-untyped-def]
    A, W, n, row, real, first, last, inner,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, INT8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Rows `n` of a weight times rows `row` of A, over the columns from `first` to `last`: (BN, BM)."""
    KIND: tl.constexpr = A.dtype.element_ty
    total = tl.zeros((BN, BM), tl.float32)
    if INT8:
        i = tl.arange(0, BK // 4)
        column = i // 32 * 128 + i % 32
        weight = W + n[:, None].to(tl.int64) * (inner // 4) + i[None, :]
        given = A + row[None, :] * inner + column[:, None]
        for at in tl.range(first, last, BK, num_stages=STAGES):
            words = tl.load(weight + at // 4, eviction_policy="evict_first")
            for j in tl.static_range(4):
                a = tl.load(given + at + 32 * j, mask=real[None, :], other=0.0)
                total = tl.dot(unpacked(words, j, KIND, FAST), a, total, input_precision="ieee")
    else:
        k = tl.arange(0, BK)
        weight = W + n[:, None].to(tl.int64) * inner + k[None, :]
        given = A + row[None, :] * inner + k[:, None]
        for at in tl.range(first, last, BK, num_stages=STAGES):
            a = tl.load(given + at, mask=real[None, :], other=0.0)
            w = tl.load(weight + at, eviction_policy="evict_first")
            total = tl.dot(w, a, total, input_precision="ieee")
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _skinny(  # type: ignore[no-untyped-def]  # noqa: C901
    A, W, SCALES, OUT, X, SCALED, SQUARES, PARTS, COUNTS, tokens, rows, inner, eps, tiles,
    MODE: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, INT8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    n, m = tile * BN + tl.arange(0, BN), tl.arange(0, BM)
    if MODE == 1:  # half of the rows from gate, half from up: one tile for the tensor cores
        HALF: tl.constexpr = BN // 2
        n = tile * HALF + n % HALF + tl.where(n % BN < HALF, 0, rows)
    real = m < tokens
    per = tl.cdiv(inner // BK, SPLITS) * BK
    first = split * per
    last = min(inner, first + per)
    place, t = m[None, :] * rows + n[:, None], tl.arange(0, TILES)
    if MODE < 2:  # what is needed in the end is asked for now
        squares = tl.load(
            SQUARES + t[:, None] * tokens + m[None, :], mask=(t < tiles)[:, None] & real[None, :], other=0.0
        )
    else:
        old = tl.load(X + place, mask=real[None, :], other=0.0)
        norm = tl.load(OUT + n)
    total = multiplied(A, W, n, m, real, first, last, inner, BN, BM, BK, STAGES, INT8, FAST)
    if INT8:
        total = total * tl.load(SCALES + n)[:, None]
    if MODE < 2:  # of a normed stream
        total = total * tl.rsqrt(tl.sum(squares, 0) / inner + eps)[None, :]
    if MODE == 0:
        tl.store(OUT + split * tokens * rows + place, total.to(OUT.dtype.element_ty), mask=real[None, :])
    if MODE == 1:
        gates, ups = tl.split(tl.permute(tl.reshape(total, (2, HALF, BM)), (1, 2, 0)))
        both = gates / (1.0 + tl.exp(-gates)) * ups
        at = m[None, :] * rows + (tile * HALF + tl.arange(0, HALF))[:, None]
        tl.store(OUT + at, both.to(OUT.dtype.element_ty), mask=real[None, :])
    if MODE == 2:
        mine = True
        if SPLITS > 1:
            tl.store(PARTS + split * tokens * rows + place, total, mask=real[None, :])
            tl.debug_barrier()
            mine = tl.atomic_add(COUNTS + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if mine:
            if SPLITS > 1:
                total = tl.zeros((BN, BM), tl.float32)
                for part in tl.static_range(SPLITS):  # in their order, whoever came last
                    total += tl.load(
                        PARTS + part * tokens * rows + place, mask=real[None, :], other=0.0, cache_modifier=".cg"
                    )
                tl.atomic_xchg(COUNTS + tile, 0)
            x = (old.to(tl.float32) + total.to(X.dtype.element_ty).to(tl.float32)).to(X.dtype.element_ty)
            wide = x.to(tl.float32)
            scaled = wide * norm.to(tl.float32)[:, None]
            tl.store(X + place, x, mask=real[None, :])
            tl.store(SCALED + place, scaled.to(SCALED.dtype.element_ty), mask=real[None, :])
            tl.store(SQUARES + tile * tokens + m, tl.sum(wide * wide, 0), mask=real)
