"""Attention of a few new tokens of each request over its pages: a commit, a draft, or several drafts side by side.

A request brings S new tokens: a block to commit, or none, then C drafts of the next block. All of them see the committed
text in the pages; the drafts also see the block that is being committed, and each its own. One program has a request, a
head of keys and a part of the text; all query heads that share the keys are its rows. It adds up the parts of q, k and v
that the product before has left, norms and rotates them, and the program of the last part also writes the committed
block's keys and values into the pages. The grid depends on the number of requests alone, so one CUDA graph serves texts
of all lengths. The plain twin is `transformer.Attention` over gathered pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64  # keys looked at together


class Texts(NamedTuple):
    """Where the texts of R requests are, on the device."""

    table: Tensor  # (R, most pages) int32
    stored: Tensor  # (R,) int32: committed tokens in the pages
    pending: Tensor  # (R,) int32: tokens that this forward commits: a block or 0


class Heads(NamedTuple):
    """What the attention of a layer is made of."""

    heads: int
    kv_heads: int
    width: int
    eps: float
    inv_freq: Tensor  # (width / 2,)
    q_norm: Tensor | None  # (width,)
    k_norm: Tensor | None
    bias: Tensor | None  # ((heads + 2 kv_heads) · width,)


class Rows(NamedTuple):
    """The new tokens of every request."""

    commit: int  # places for a block to commit: 0 or the block size
    block: int
    drafts: int

    @property
    def count(self) -> int:
        """Tokens of a request."""
        return self.commit + self.block * self.drafts


class Scratch(NamedTuple):
    """Memory for attention over parts of a text."""

    out: Tensor
    lse: Tensor
    counts: Tensor


def splits_for(requests: int, kv_heads: int) -> int:
    """Parts of a text: enough programs to keep a GPU's multiprocessors busy, and no more than are worth their merging."""
    return max(1, min(16, 128 // (requests * kv_heads)))


def new_scratch(requests: int, heads: Heads, rows: Rows, device: torch.device) -> Scratch:
    """Enough for `attend`; the counts are left at zero."""
    groups, splits = requests * heads.kv_heads, splits_for(requests, heads.kv_heads)
    size = groups * splits * _query_rows(heads, rows)
    out = torch.empty(size * heads.width, device=device)
    return Scratch(out, torch.empty(size, device=device), torch.zeros(groups, dtype=torch.int32, device=device))


def _query_rows(heads: Heads, rows: Rows) -> int:
    size: int = triton.next_power_of_2(rows.count * heads.heads // heads.kv_heads)
    return max(16, size)


def attend(
    parts: Tensor, cache: tuple[Tensor, Tensor], texts: Texts, heads: Heads, rows: Rows, out: Tensor, scratch: Scratch
) -> None:
    """Attention of all new tokens into `out` (M, heads · width), from q, k, v in `parts` (P, M, ·)."""
    requests, splits = len(texts.stored), splits_for(len(texts.stored), heads.kv_heads)
    pages, _, page_size, _ = cache[0].shape
    norms = heads.q_norm if heads.q_norm is not None else parts, heads.k_norm if heads.k_norm is not None else parts
    _attend[(requests * heads.kv_heads, splits)](
        *(parts, *cache, *texts, *norms, heads.bias if heads.bias is not None else parts, heads.inv_freq, out, *scratch),
        *(requests * rows.count, texts.table.stride(0), heads.eps),
        COMMIT=rows.commit,
        BLOCK=rows.block,
        S=rows.count,
        GROUP=heads.heads // heads.kv_heads,
        KV=heads.kv_heads,
        HALF=heads.width // 2,
        PARTS=len(parts),
        SPLITS=splits,
        PAGE=page_size,
        BM=_query_rows(heads, rows),
        BT=max(16, triton.next_power_of_2(rows.count)),
        CHUNK=CHUNK,
        NORM=heads.q_norm is not None,
        BIAS=heads.bias is not None,
        num_warps=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _half(A, BIASES, place, column, mask, step, PARTS: tl.constexpr, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values that lie in parts, summed and rounded as a product would leave them."""
    total = tl.load(A + place + column, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(A + part * step + place + column, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(BIASES + column + place * 0, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _turned(  # type: ignore[no-untyped-def]
    first, second, WEIGHT, FREQ, position, eps, KIND: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr
):
    """Both halves of heads, normed and rotated."""
    c = tl.arange(0, HALF)
    first, second = first.to(KIND).to(tl.float32), second.to(KIND).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        one, two = tl.load(WEIGHT + c).to(tl.float32)[None, :], tl.load(WEIGHT + HALF + c).to(tl.float32)[None, :]
        first = ((first * scale).to(KIND).to(tl.float32) * one).to(KIND).to(tl.float32)
        second = ((second * scale).to(KIND).to(tl.float32) * two).to(KIND).to(tl.float32)
    angle = position.to(tl.float32)[:, None] * tl.load(FREQ + c)[None, :]
    cos, sin = tl.cos(angle), tl.sin(angle)
    return (first * cos - second * sin).to(KIND), (second * cos + first * sin).to(KIND)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    A, KEYS, VALUES, TABLE, STORED, PENDING, QNORM, KNORM, BIASES, FREQ, OUT, PART, LSE, COUNTS,
    tokens, table_step, eps,
    COMMIT: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, GROUP: tl.constexpr, KV: tl.constexpr,
    HALF: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr,
    BT: tl.constexpr, CHUNK: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = KEYS.dtype.element_ty
    C: tl.constexpr = 2 * HALF
    WIDTH: tl.constexpr = (GROUP + 2) * KV * C
    request, kv, split = tl.program_id(0) // KV, tl.program_id(0) % KV, tl.program_id(1)
    stored, pending = tl.load(STORED + request), tl.load(PENDING + request)
    i, c, whole = tl.arange(0, BM), tl.arange(0, HALF), tl.arange(0, C)
    token, member = i // GROUP, i % GROUP
    real = token < S
    step = tokens * WIDTH
    place = (request * S + token)[:, None] * WIDTH
    column = ((kv * GROUP + member) * C)[:, None] + c[None, :]
    position = stored + tl.where(token < COMMIT, token, pending + (token - COMMIT) % BLOCK)
    first = _half(A, BIASES, place, column, real[:, None], step, PARTS, BIAS)
    second = _half(A, BIASES, place, column + HALF, real[:, None], step, PARTS, BIAS)
    q1, q2 = _turned(first, second, QNORM, FREQ, position, eps, KIND, HALF, NORM)
    factor = 1.4426950408889634 / tl.sqrt(C * 1.0)  # exponents of two
    highest = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, C), tl.float32)
    per = tl.cdiv(tl.cdiv(stored, CHUNK), SPLITS) * CHUNK
    begin = split * per
    end = min(stored, begin + per)
    for at in range(begin, end, CHUNK):
        key = at + tl.arange(0, CHUNK)
        known = key < end
        page = tl.load(TABLE + request * table_step + key // PAGE, mask=known, other=0).to(tl.int64)
        base = ((page * KV + kv) * PAGE + key % PAGE)[:, None] * C
        k1 = tl.load(KEYS + base + c[None, :], mask=known[:, None], other=0.0)
        k2 = tl.load(KEYS + base + HALF + c[None, :], mask=known[:, None], other=0.0)
        v = tl.load(VALUES + base + whole[None, :], mask=known[:, None], other=0.0)
        scores = (tl.dot(q1, tl.trans(k1)) + tl.dot(q2, tl.trans(k2))) * factor
        scores = tl.where(known[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(p, 1)
        mixed = mixed * shrink[:, None] + tl.dot(p.to(KIND), v)
        highest = higher
    if split == SPLITS - 1:  # the new tokens themselves
        t = tl.arange(0, BT)
        mine = t < S
        place = (request * S + t)[:, None] * WIDTH
        column = ((GROUP * KV + kv) * C) + c[None, :]
        position = stored + tl.where(t < COMMIT, t, pending + (t - COMMIT) % BLOCK)
        first = _half(A, BIASES, place, column, mine[:, None], step, PARTS, BIAS)
        second = _half(A, BIASES, place, column + HALF, mine[:, None], step, PARTS, BIAS)
        k1, k2 = _turned(first, second, KNORM, FREQ, position, eps, KIND, HALF, NORM)
        column = ((GROUP * KV + KV + kv) * C) + whole[None, :]
        v = _half(A, BIASES, place, column, mine[:, None], step, PARTS, BIAS).to(KIND)
        same = (token >= COMMIT)[:, None] & (
            (token[:, None] - COMMIT) // BLOCK == (t[None, :] - COMMIT) // BLOCK
        )
        commits = token < tl.where(pending > 0, S, COMMIT)  # sees the block that is being committed
        seen = tl.where((t < COMMIT)[None, :], commits[:, None], same) & mine[None, :]
        scores = (tl.dot(q1, tl.trans(k1)) + tl.dot(q2, tl.trans(k2))) * factor
        scores = tl.where(seen | (~real)[:, None], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(p, 1)
        mixed = mixed * shrink[:, None] + tl.dot(p.to(KIND), v)
        highest = higher
        if COMMIT > 0:
            kept = t < tl.where(pending > 0, COMMIT, 0)
            page = tl.load(TABLE + request * table_step + position // PAGE, mask=kept, other=0).to(tl.int64)
            base = ((page * KV + kv) * PAGE + position % PAGE)[:, None] * C
            tl.store(KEYS + base + c[None, :], k1, mask=kept[:, None])
            tl.store(KEYS + base + HALF + c[None, :], k2, mask=kept[:, None])
            tl.store(VALUES + base + whole[None, :], v, mask=kept[:, None])
    last = True
    if SPLITS > 1:
        slot = (tl.program_id(0) * SPLITS + split) * BM + i
        some = total > 0  # a part of a short text may be empty
        safe = tl.where(some, total, 1.0)
        tl.store(PART + slot[:, None] * C + whole[None, :], mixed / safe[:, None])
        tl.store(LSE + slot, tl.where(some, highest + tl.log2(safe), float("-inf")))
        tl.debug_barrier()
        last = tl.atomic_add(COUNTS + tl.program_id(0), 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        if SPLITS > 1:
            highest = tl.full((BM,), float("-inf"), tl.float32)
            for part in range(SPLITS):
                slot = (tl.program_id(0) * SPLITS + part) * BM + i
                highest = tl.maximum(highest, tl.load(LSE + slot, cache_modifier=".cg"))
            total = tl.zeros((BM,), tl.float32)
            mixed = tl.zeros((BM, C), tl.float32)
            for part in range(SPLITS):
                slot = (tl.program_id(0) * SPLITS + part) * BM + i
                weight = tl.exp2(tl.load(LSE + slot, cache_modifier=".cg") - highest)
                total += weight
                mixed += weight[:, None] * tl.load(PART + slot[:, None] * C + whole[None, :], cache_modifier=".cg")
            tl.atomic_xchg(COUNTS + tl.program_id(0), 0)
        out = (request * S + token)[:, None] * (GROUP * KV * C) + ((kv * GROUP + member) * C)[:, None] + whole[None, :]
        tl.store(OUT + out, (mixed / total[:, None]).to(OUT.dtype.element_ty), mask=real[:, None])
