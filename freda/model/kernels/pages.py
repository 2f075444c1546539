"""Attention of a few new tokens of each request over its pages: a commit, a draft, or several drafts side by side.

A request brings a few new tokens (`cache.Rows`): a block to commit, or none, then drafts of the next block. All of
them see the committed text in the pages; the drafts also see the block that is being committed, and each its own. One
program has a request, a head of keys and a part of the text; all query heads that share the keys are its rows. It adds
up the parts of q, k and v that the product before has left, norms and rotates them. The program of the new tokens also
writes the committed block's keys and values into the pages. The grid depends on the number of requests alone, so one
CUDA graph serves texts of all lengths. The plain twin is `transformer.Attention` over gathered pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from freda.model.cache import Rows, Texts
from freda.model.kernels.rowwise import Heads

CHUNK = 128  # keys looked at together


class Scratch(NamedTuple):
    """What `rotary` has written, and memory for attention over parts of a text."""

    rotary: Tensor  # (2, M, width / 2)
    out: Tensor
    lse: Tensor
    counts: Tensor


def splits_for(requests: int, kv_heads: int) -> int:
    """Parts of a text: enough programs to keep a GPU busy in one go, no more than are worth their merging, 15 at most:
    `_attend` merges no more."""
    return max(1, min(15, 128 // (requests * kv_heads) - 1))


def new_scratch(requests: int, heads: Heads, rows: Rows, device: torch.device) -> Scratch:
    """Enough for `attend`; the counts are left at zero."""
    groups, splits = requests * heads.kv_heads, splits_for(requests, heads.kv_heads)
    size = groups * (splits + 1) * _query_rows(heads, rows)
    out = torch.empty(size * heads.width, device=device)
    angles = torch.empty(2, requests * rows.tokens, heads.width // 2, device=device)
    counts = torch.zeros(groups, dtype=torch.int32, device=device)
    return Scratch(angles, out, torch.empty(size, device=device), counts)


def _query_rows(heads: Heads, rows: Rows) -> int:
    size: int = triton.next_power_of_2(rows.tokens * heads.heads // heads.kv_heads)
    return max(16, size)


def rotary(texts: Texts, rows: Rows, inv_freq: Tensor, out: Tensor) -> None:
    """Cosine and sine of the rotary angles of all new tokens into `out` (2, M, width / 2)."""
    _rotary[(len(texts.stored), rows.tokens)](
        *(texts.stored, texts.pending, inv_freq, *out, rows.tokens, rows.commit, rows.block),
        HALF=len(inv_freq),
        num_warps=1,
    )


def attend(
    parts: Tensor,
    cache: tuple[Tensor, Tensor],
    texts: Texts,
    heads: Heads,
    rows: Rows,
    scratch: Scratch,
    out: Tensor,
) -> None:
    """Attention of all new tokens into `out` (M, heads · width), from q, k, v in `parts` (P, M, ·)."""
    requests, splits = len(texts.stored), splits_for(len(texts.stored), heads.kv_heads)
    page_size = cache[0].shape[2]
    norms = heads.q_norm if heads.q_norm is not None else parts, heads.k_norm if heads.k_norm is not None else parts
    _attend[(requests * heads.kv_heads, 1 + splits)](
        *(parts, *cache, *texts, *norms, heads.bias if heads.bias is not None else parts),
        *(*scratch.rotary, out, *scratch[1:], requests * rows.tokens, texts.table.stride(0), heads.eps),
        COMMIT=rows.commit,
        BLOCK=rows.block,
        S=rows.tokens,
        GROUP=heads.heads // heads.kv_heads,
        KV=heads.kv_heads,
        HALF=heads.width // 2,
        PARTS=len(parts),
        SPLITS=splits,
        PAGE=page_size,
        BM=_query_rows(heads, rows),
        BT=max(16, triton.next_power_of_2(rows.tokens)),
        CHUNK=CHUNK,
        NORM=heads.q_norm is not None,
        BIAS=heads.bias is not None,
        num_warps=8,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _rotary(STORED, PENDING, FREQ, COS, SIN, count, commit, block, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    request, token = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, HALF)
    further = tl.where(token < commit, token, tl.load(PENDING + request) + (token - commit) % block)
    angle = (tl.load(STORED + request) + further).to(tl.float32) * tl.load(FREQ + c)
    tl.store(COS + (request * count + token) * HALF + c, tl.cos(angle))
    tl.store(SIN + (request * count + token) * HALF + c, tl.sin(angle))


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
    first, second, WEIGHT, COS, SIN, token, mask, eps, KIND: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr
):
    """Both halves of heads, normed and rotated."""
    c = tl.arange(0, HALF)
    first, second = first.to(KIND).to(tl.float32), second.to(KIND).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        one, two = tl.load(WEIGHT + c).to(tl.float32)[None, :], tl.load(WEIGHT + HALF + c).to(tl.float32)[None, :]
        first = ((first * scale).to(KIND).to(tl.float32) * one).to(KIND).to(tl.float32)
        second = ((second * scale).to(KIND).to(tl.float32) * two).to(KIND).to(tl.float32)
    place = token[:, None] * HALF + c[None, :]
    cos = tl.load(COS + place, mask=mask[:, None], other=0.0)
    sin = tl.load(SIN + place, mask=mask[:, None], other=0.0)
    return (first * cos - second * sin).to(KIND), (second * cos + first * sin).to(KIND)


@triton.jit  # type: ignore[untyped-decorator]
def _merged(PART, LSE, group, active, BM: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Attention over all parts of a text and the new tokens, as a sum and its weight."""
    i, whole = tl.arange(0, BM), tl.arange(0, C)
    every = tl.arange(0, 16)[:, None]
    all_lse = tl.load(
        LSE + (group + every) * BM + i[None, :], mask=every <= active, other=float("-inf"), cache_modifier=".cg"
    )
    highest = tl.max(all_lse, 0)
    total = tl.sum(tl.exp2(all_lse - highest[None, :]), 0)
    mixed = tl.zeros((BM, C), tl.float32)
    for first_part in range(0, active + 1, 8):  # eight are asked for before the first is waited for
        for further in tl.static_range(8):
            part = first_part + further
            slot = (group + tl.minimum(part, active)) * BM + i
            weight = tl.exp2(tl.load(LSE + slot, cache_modifier=".cg") - highest)
            weight = tl.where(part <= active, weight, 0.0)
            mixed += weight[:, None] * tl.load(PART + slot[:, None] * C + whole[None, :], cache_modifier=".cg")
    return mixed, total


@triton.jit  # type: ignore[untyped-decorator]
def _share(stored, SPLITS: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Chunks of a text that each of its parts has, and how many parts that makes, none of them empty."""
    chunks = tl.cdiv(stored, CHUNK)
    per = tl.maximum(tl.cdiv(chunks, SPLITS), 1)
    return per, tl.cdiv(chunks, per)


@triton.jit  # type: ignore[untyped-decorator]
def part_of_attention(  # type: ignore[no-untyped-def]
    A, KEYS, VALUES, TABLE, STORED, PENDING, QNORM, KNORM, BIASES, COS, SIN, PART, LSE,
    request, kv, split, tokens, table_step, eps,
    COMMIT: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, GROUP: tl.constexpr, KV: tl.constexpr,
    HALF: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr,
    BT: tl.constexpr, CHUNK: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Attention of a request's new tokens over one part of its text, or, part 0, over each other; into PART and LSE."""
    KIND: tl.constexpr = KEYS.dtype.element_ty
    C: tl.constexpr = 2 * HALF
    WIDTH: tl.constexpr = (GROUP + 2) * KV * C
    stored = tl.load(STORED + request)
    per, active = _share(stored, SPLITS, CHUNK)
    if split <= active:
        i, c, whole, j = tl.arange(0, BM), tl.arange(0, HALF), tl.arange(0, C), tl.arange(0, CHUNK)
        begin = tl.where(split == 0, 0, (split - 1) * per * CHUNK)
        end = tl.where(split == 0, 0, tl.minimum(stored, begin + per * CHUNK))
        known = begin + j < end  # the first chunk is asked for before anything else
        page = tl.load(TABLE + request * table_step + (begin + j) // PAGE, mask=known, other=0).to(tl.int64)
        base = ((page * KV + kv) * PAGE + (begin + j) % PAGE)[:, None] * C
        k1 = tl.load(KEYS + base + c[None, :], mask=known[:, None], other=0.0)
        k2 = tl.load(KEYS + base + HALF + c[None, :], mask=known[:, None], other=0.0)
        v = tl.load(VALUES + base + whole[None, :], mask=known[:, None], other=0.0)
        token, member = i // GROUP, i % GROUP
        real = token < S
        parts_step = tokens * WIDTH
        place = (request * S + token)[:, None] * WIDTH
        column = ((kv * GROUP + member) * C)[:, None] + c[None, :]
        first = _half(A, BIASES, place, column, real[:, None], parts_step, PARTS, BIAS)
        second = _half(A, BIASES, place, column + HALF, real[:, None], parts_step, PARTS, BIAS)
        t = tl.arange(0, BT)  # new keys and values, of part 0 only: asked for now, used at the end
        mine = t < tl.where(split == 0, S, 0)
        spot, field = (request * S + t)[:, None] * WIDTH, ((GROUP * KV + kv) * C) + c[None, :]
        one = _half(A, BIASES, spot, field, mine[:, None], parts_step, PARTS, BIAS)
        two = _half(A, BIASES, spot, field + HALF, mine[:, None], parts_step, PARTS, BIAS)
        values_at = ((GROUP * KV + KV + kv) * C) + whole[None, :]
        nv = _half(A, BIASES, spot, values_at, mine[:, None], parts_step, PARTS, BIAS).to(KIND)
        pending = tl.load(PENDING + request)
        q1, q2 = _turned(first, second, QNORM, COS, SIN, request * S + token, real, eps, KIND, HALF, NORM)
        factor = 1.4426950408889634 / tl.sqrt(C * 1.0)  # exponents of two
        highest = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        mixed = tl.zeros((BM, C), tl.float32)
        for at in range(begin, end, CHUNK):
            scores = (tl.dot(q1, tl.trans(k1)) + tl.dot(q2, tl.trans(k2))) * factor
            scores = tl.where((at + j < end)[None, :], scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            p = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(highest - higher)
            total = total * shrink + tl.sum(p, 1)
            mixed = mixed * shrink[:, None] + tl.dot(p.to(KIND), v)
            highest = higher
            ahead = at + CHUNK + j
            known = ahead < end
            page = tl.load(TABLE + request * table_step + ahead // PAGE, mask=known, other=0).to(tl.int64)
            base = ((page * KV + kv) * PAGE + ahead % PAGE)[:, None] * C
            k1 = tl.load(KEYS + base + c[None, :], mask=known[:, None], other=0.0)
            k2 = tl.load(KEYS + base + HALF + c[None, :], mask=known[:, None], other=0.0)
            v = tl.load(VALUES + base + whole[None, :], mask=known[:, None], other=0.0)
        if split == 0:
            n1, n2 = _turned(one, two, KNORM, COS, SIN, request * S + t, mine, eps, KIND, HALF, NORM)
            same = (token >= COMMIT)[:, None] & ((token[:, None] - COMMIT) // BLOCK == (t[None, :] - COMMIT) // BLOCK)
            commits = token < tl.where(pending > 0, S, COMMIT)  # sees the block that is being committed
            seen = tl.where((t < COMMIT)[None, :], commits[:, None], same) & mine[None, :]
            marks = (tl.dot(q1, tl.trans(n1)) + tl.dot(q2, tl.trans(n2))) * factor
            marks = tl.where(seen | (~real)[:, None], marks, float("-inf"))
            highest = tl.max(marks, 1)
            share = tl.exp2(marks - highest[:, None])
            total = tl.sum(share, 1)
            mixed = tl.dot(share.to(KIND), nv)
            if COMMIT > 0:
                kept = t < tl.where(pending > 0, COMMIT, 0)
                fresh = stored + t
                leaf = tl.load(TABLE + request * table_step + fresh // PAGE, mask=kept, other=0).to(tl.int64)
                shelf = ((leaf * KV + kv) * PAGE + fresh % PAGE)[:, None] * C
                tl.store(KEYS + shelf + c[None, :], n1, mask=kept[:, None])
                tl.store(KEYS + shelf + HALF + c[None, :], n2, mask=kept[:, None])
                tl.store(VALUES + shelf + whole[None, :], nv, mask=kept[:, None])
        slot = ((request * KV + kv) * (SPLITS + 1) + split) * BM + i
        tl.store(PART + slot[:, None] * C + whole[None, :], mixed / total[:, None])
        tl.store(LSE + slot, highest + tl.log2(total))
    return active


@triton.jit  # type: ignore[untyped-decorator]
def merge_if_last(  # type: ignore[no-untyped-def]
    PART, LSE, COUNTS, OUT, group, split, active,
    S: tl.constexpr, GROUP: tl.constexpr, KV: tl.constexpr, C: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The program that finds all other parts of a request's head there merges them into OUT."""
    if split <= active:
        tl.debug_barrier()
        if tl.atomic_add(COUNTS + group, 1, sem="acq_rel", scope="gpu") == active:
            mixed, total = _merged(PART, LSE, group * (SPLITS + 1), active, BM, C)
            tl.atomic_xchg(COUNTS + group, 0)
            i, whole = tl.arange(0, BM), tl.arange(0, C)
            token, head = i // GROUP, (group % KV) * GROUP + i % GROUP
            out = ((group // KV * S + token) * GROUP * KV + head)[:, None] * C + whole[None, :]
            tl.store(OUT + out, (mixed / total[:, None]).to(OUT.dtype.element_ty), mask=(token < S)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    A, KEYS, VALUES, TABLE, STORED, PENDING, QNORM, KNORM, BIASES, COS, SIN, OUT, PART, LSE, COUNTS,
    tokens, table_step, eps,
    COMMIT: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, GROUP: tl.constexpr, KV: tl.constexpr,
    HALF: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr,
    BT: tl.constexpr, CHUNK: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    group, split = tl.program_id(0), tl.program_id(1)
    active = part_of_attention(
        A, KEYS, VALUES, TABLE, STORED, PENDING, QNORM, KNORM, BIASES, COS, SIN, PART, LSE,
        group // KV, group % KV, split, tokens, table_step, eps,
        COMMIT, BLOCK, S, GROUP, KV, HALF, PARTS, SPLITS, PAGE, BM, BT, CHUNK, NORM, BIAS,
    )  # fmt: skip
    merge_if_last(PART, LSE, COUNTS, OUT, group, split, active, S, GROUP, KV, 2 * HALF, SPLITS, BM)
