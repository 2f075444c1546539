"""The part of a row's attention that a causal kernel leaves out: at most two blocks of keys for every query.

One program of the forward merges it into the causal part of 16 queries of one head; one of the backward adds its
gradients to those of the causal part, for 16 queries of all heads that share their keys. Both are bound by
the reading and writing of what they merge. The plain twin of the whole attention is in `model/staircase.py`.

A query at place i stands on the causal diagonal at i − shift. What it is still to see: the clean keys right of the
diagonal, up to the end of the diagonal's block, and, in a draft, the keys of its own block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from freda.model.staircase import Pair, empty_like

LEAST_TILE = 16  # queries of a program, if blocks are no larger; 32 with 4 warps take half as long again


def merge(q: Tensor, clean: Pair, own: Pair | None, causal: Pair, block: int) -> Pair:
    """Attention (R, H, L, C) and logsumexp (R, H, L) over everything, from those of the causal part."""
    rows, heads, length, width = q.shape
    out = empty_like(q)
    lse = torch.empty(rows, heads, length, device=q.device)
    part, part_lse = causal
    keys, values = own or clean
    tile = max(LEAST_TILE, block)
    _merge[(triton.cdiv(length, tile), rows * heads)](
        *(q, *clean, keys, values, part, part_lse.flatten(2).contiguous(), out, lse),
        *(stride for tensor in (q, *clean, keys, values, part, out) for stride in tensor.stride()[:3]),
        *(length, width**-0.5, heads, heads // clean[0].shape[1], block, 0 if own is None else block, tile, width),
        num_warps=tile // 16,
    )
    return out, lse


def gradients(
    upstream: Tensor, q: Tensor, clean: Pair, own: Pair | None, found: Pair, causal: Sequence[Tensor], block: int
) -> list[Tensor]:
    """Gradients of q, of clean keys and values, and of a draft's own; `causal` are those of the causal part."""
    rows, heads, length, width = q.shape
    shift = 0 if own is None else block
    out, lse = found
    for_q = empty_like(q)
    for_clean = tuple(empty_like(part) for part in clean)
    for part in for_clean:
        part[:, :, length - shift :] = 0  # no draft comes after the last block
    keys, values = own or clean
    for_own = tuple(empty_like(part) for part in own or for_clean)
    tensors = (upstream, q, *clean, keys, values, out, *causal, for_q, *for_clean, *for_own)
    tile = max(LEAST_TILE, block)
    _gradients[(triton.cdiv(length, tile), rows * clean[0].shape[1])](
        *(*tensors, lse),
        *(stride for tensor in tensors for stride in tensor.stride()[:3]),
        *(length, width**-0.5, heads, heads // clean[0].shape[1], block, shift, tile, width),
        num_warps=tile // 8,
    )
    return [for_q, *for_clean] if own is None else [for_q, *for_clean, *for_own]


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    Q, K, V, OK, OV, PART, PART_LSE, OUT, LSE,
    q0, q1, q2, k0, k1, k2, v0, v1, v2, ok0, ok1, ok2, ov0, ov1, ov2, p0, p1, p2, o0, o1, o2,
    length, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    kv = head // GROUP
    at, c = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, C)
    inside, diagonal = at < length, at - SHIFT
    after = diagonal >= 0  # the first block of a draft has no text before it
    here, there = inside[:, None], (inside & after)[:, None]
    q = tl.load(Q + row * q0 + head * q1 + at[:, None] * q2 + c[None, :], mask=here, other=0.0)
    k = tl.load(K + row * k0 + kv * k1 + diagonal[:, None] * k2 + c[None, :], mask=there, other=0.0)
    v = tl.load(V + row * v0 + kv * v1 + diagonal[:, None] * v2 + c[None, :], mask=there, other=0.0)
    part = tl.load(PART + row * p0 + head * p1 + diagonal[:, None] * p2 + c[None, :], mask=there, other=0.0)
    lse_at = (row * HEADS + head) * (length - SHIFT) + diagonal
    part_lse = tl.load(PART_LSE + lse_at, mask=inside & after, other=float("-inf"))
    right = (diagonal[None, :] > diagonal[:, None]) & (at[None, :] // BLOCK == at[:, None] // BLOCK)
    right = right & (inside & after)[None, :]
    scores = tl.where(right, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
    highest = tl.maximum(part_lse, tl.max(scores, 1))
    if SHIFT > 0:
        ok = tl.load(OK + row * ok0 + kv * ok1 + at[:, None] * ok2 + c[None, :], mask=here, other=0.0)
        ov = tl.load(OV + row * ov0 + kv * ov1 + at[:, None] * ov2 + c[None, :], mask=here, other=0.0)
        same = (at[None, :] // BLOCK == at[:, None] // BLOCK) & inside[None, :]
        own_scores = tl.where(same, tl.dot(q, tl.trans(ok)) * scale, float("-inf"))
        highest = tl.maximum(highest, tl.max(own_scores, 1))
    highest = tl.where(inside, highest, 0.0)
    weight = tl.exp(part_lse - highest)
    p = tl.exp(scores - highest[:, None])
    total = weight + tl.sum(p, 1)
    mixed = part.to(tl.float32) * weight[:, None] + tl.dot(p.to(v.dtype), v)
    if SHIFT > 0:
        p = tl.exp(own_scores - highest[:, None])
        total += tl.sum(p, 1)
        mixed += tl.dot(p.to(ov.dtype), ov)
    mixed = mixed / total[:, None]
    tl.store(OUT + row * o0 + head * o1 + at[:, None] * o2 + c[None, :], mixed.to(OUT.dtype.element_ty), mask=here)
    tl.store(LSE + (row * HEADS + head) * length + at, highest + tl.log(total), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gradients(  # type: ignore[no-untyped-def]
    DO, Q, K, V, OK, OV, OUT, CQ, CK, CV, DQ, DK, DV, DOK, DOV, LSE,
    do0, do1, do2, q0, q1, q2, k0, k1, k2, v0, v1, v2, ok0, ok1, ok2, ov0, ov1, ov2, o0, o1, o2,
    cq0, cq1, cq2, ck0, ck1, ck2, cv0, cv1, cv2, dq0, dq1, dq2, dk0, dk1, dk2, dv0, dv1, dv2,
    dok0, dok1, dok2, dov0, dov1, dov2,
    length, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    KV: tl.constexpr = HEADS // GROUP
    row, kv = (tl.program_id(1) // KV).to(tl.int64), tl.program_id(1) % KV
    at, c = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, C)
    inside, diagonal = at < length, at - SHIFT
    here, there = inside[:, None], (inside & (diagonal >= 0))[:, None]
    k = tl.load(K + row * k0 + kv * k1 + diagonal[:, None] * k2 + c[None, :], mask=there, other=0.0)
    v = tl.load(V + row * v0 + kv * v1 + diagonal[:, None] * v2 + c[None, :], mask=there, other=0.0)
    dk = tl.load(CK + row * ck0 + kv * ck1 + diagonal[:, None] * ck2 + c[None, :], mask=there, other=0.0).to(tl.float32)
    dv = tl.load(CV + row * cv0 + kv * cv1 + diagonal[:, None] * cv2 + c[None, :], mask=there, other=0.0).to(tl.float32)
    same = (at[None, :] // BLOCK == at[:, None] // BLOCK) & inside[None, :]
    right = same & (diagonal[None, :] > diagonal[:, None]) & (diagonal >= 0)[None, :]
    if SHIFT > 0:
        ok = tl.load(OK + row * ok0 + kv * ok1 + at[:, None] * ok2 + c[None, :], mask=here, other=0.0)
        ov = tl.load(OV + row * ov0 + kv * ov1 + at[:, None] * ov2 + c[None, :], mask=here, other=0.0)
        dok = tl.zeros((TILE, C), tl.float32)
        dov = tl.zeros((TILE, C), tl.float32)
    for member in range(GROUP):
        head = kv * GROUP + member
        q = tl.load(Q + row * q0 + head * q1 + at[:, None] * q2 + c[None, :], mask=here, other=0.0)
        do = tl.load(DO + row * do0 + head * do1 + at[:, None] * do2 + c[None, :], mask=here, other=0.0)
        out = tl.load(OUT + row * o0 + head * o1 + at[:, None] * o2 + c[None, :], mask=here, other=0.0)
        lse = tl.load(LSE + (row * HEADS + head) * length + at, mask=inside, other=0.0)
        mean = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
        dq = tl.load(CQ + row * cq0 + head * cq1 + diagonal[:, None] * cq2 + c[None, :], mask=there, other=0.0)
        dq = dq.to(tl.float32)
        p = tl.where(right, tl.exp(tl.dot(q, tl.trans(k)) * scale - lse[:, None]), 0.0)
        ds = (p * (tl.dot(do, tl.trans(v)) - mean[:, None]) * scale).to(q.dtype)
        dq += tl.dot(ds, k)
        dk += tl.dot(tl.trans(ds), q)
        dv += tl.dot(tl.trans(p.to(do.dtype)), do)
        if SHIFT > 0:
            p = tl.where(same, tl.exp(tl.dot(q, tl.trans(ok)) * scale - lse[:, None]), 0.0)
            ds = (p * (tl.dot(do, tl.trans(ov)) - mean[:, None]) * scale).to(q.dtype)
            dq += tl.dot(ds, ok)
            dok += tl.dot(tl.trans(ds), q)
            dov += tl.dot(tl.trans(p.to(do.dtype)), do)
        tl.store(DQ + row * dq0 + head * dq1 + at[:, None] * dq2 + c[None, :], dq.to(DQ.dtype.element_ty), mask=here)
    tl.store(DK + row * dk0 + kv * dk1 + diagonal[:, None] * dk2 + c[None, :], dk.to(DK.dtype.element_ty), mask=there)
    tl.store(DV + row * dv0 + kv * dv1 + diagonal[:, None] * dv2 + c[None, :], dv.to(DV.dtype.element_ty), mask=there)
    if SHIFT > 0:
        tl.store(
            DOK + row * dok0 + kv * dok1 + at[:, None] * dok2 + c[None, :], dok.to(DOK.dtype.element_ty), mask=here
        )
        tl.store(
            DOV + row * dov0 + kv * dov1 + at[:, None] * dov2 + c[None, :], dov.to(DOV.dtype.element_ty), mask=here
        )
