"""Attention of a few new tokens of each request over its pages: a commit, a draft, or several drafts side by side.

A request brings a few new tokens (`ForwardShape`): a block of text, or none, then drafts. All of them see the committed
text in the pages; each draft also sees itself, and the tokens of the block of text that it stands behind. The block of
text sees itself, in both directions or, where committed text is causal, backwards. `BlockPlaces` names the place of
every request's block among those of the forward; a dense forward has all blocks in order, and nobody asks. A program
has a request, a head of keys and some of the query heads that share it, whose tokens are its rows; with few requests
also a part of the text, and the last to come merges the parts (`_attend_parts`), with many the whole text
(`_attend_whole`). It adds up the parts of q, k and v that the product before has left, norms and rotates them. One of
those that have the new tokens also writes the committed block's keys and values into the pages. The grid depends on the
number of requests alone, so one CUDA graph serves texts of all lengths. The plain twin is `transformer.Attention` over
gathered pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from freda.decode.kernels.rowwise import Heads
from freda.decode.pages import BlockPlaces, BlockTable, ForwardShape

STAGES = 3  # chunks of a text under way, where a program has the whole text
MANY = 64  # requests times heads of keys, from which on there is a program for each, and texts are not cut into parts


class Cut(NamedTuple):
    """The division of the work among programs."""

    share: int  # query heads of a program, of those that have the same keys
    splits: int  # parts that a text is cut into at most; 0: none
    chunk: int  # keys looked at together
    warps: int


def cut_for(heads: Heads, shape: ForwardShape, *, long: bool = False) -> Cut:
    """Few requests: many small programs, since what counts is how long one takes. Many: each key is read once.

    On an H200, Qwen3-4B's shape, one request: 128 keys at once by 8 warps are 2 µs a layer faster than 64 over 512
    tokens and 6 µs slower over 4,096. With 20 tokens in a forward, 64 by 4 warps are the best over 4,096 and 1.6 µs
    from the best over 512.
    """
    group, groups, tokens = heads.heads // heads.kv_heads, shape.rows * heads.kv_heads, shape.blocks * shape.block
    shares = [share for share in range(1, group + 1) if group % share == 0]
    if groups >= MANY:
        share = max((share for share in shares if share * tokens <= 64), default=1)
        return Cut(share, 0, 64, 4 if share * tokens <= 32 else 8)
    share = next((share for share in shares if share * tokens >= 16), group)
    splits = 256 // (groups * group // share) - 1
    chunk, warps = (64, 4) if share * tokens > 16 else (64, 8) if long else (128, 8)
    return Cut(share, max(1, min(31, splits)), chunk, warps)


class Scratch(NamedTuple):
    """What `rotary` has written, and memory for attention over parts of a text."""

    shape: ForwardShape
    cut: Cut
    rotary: Tensor  # (2, M, width / 2)
    out: Tensor
    lse: Tensor
    counts: Tensor


def new_scratch(cut: Cut, heads: Heads, shape: ForwardShape, device: torch.device) -> Scratch:
    """Enough for `attend`; the counts are left at zero."""
    teams = shape.rows * heads.heads // cut.share
    size = teams * (cut.splits + 1) * _query_rows(cut, shape) if cut.splits else 0
    angles = torch.empty(2, shape.tokens, heads.width // 2, device=device)
    out, lse = torch.empty(size * heads.width, device=device), torch.empty(size, device=device)
    return Scratch(shape, cut, angles, out, lse, torch.zeros(teams, dtype=torch.int32, device=device))


def _query_rows(cut: Cut, shape: ForwardShape) -> int:
    """With fewer than 64 rows there are no tall tiles of the tensor cores, with which alone loads are pipelined."""
    size: int = triton.next_power_of_2(shape.blocks * shape.block * cut.share)
    return max(16 if cut.splits else 64, size)


def rotary(blocks: BlockPlaces, texts: BlockTable, inv_freq: Tensor, scratch: Scratch) -> None:
    """Cosine and sine of the rotary angles of all new tokens into the scratch."""
    shape = scratch.shape
    _rotary[(shape.rows, shape.blocks * shape.block)](
        *(*blocks, texts.stored, inv_freq, *scratch.rotary),
        BLOCK=shape.block,
        BLOCKS=shape.blocks,
        DENSE=shape.dense,
        HALF=len(inv_freq),
        num_warps=1,
    )


def attend(
    parts: Tensor,
    cache: tuple[Tensor, Tensor],
    blocks: BlockPlaces,
    texts: BlockTable,
    heads: Heads,
    scratch: Scratch,
    out: Tensor,
) -> None:
    """Attention of all new tokens into `out` (M, heads · width), from q, k, v in `parts` (S, M, ·)."""
    shape, cut = scratch.shape, scratch.cut
    norms = heads.q_norm if heads.q_norm is not None else parts, heads.k_norm if heads.k_norm is not None else parts
    bias = heads.bias if heads.bias is not None else parts
    given = (parts, *cache, *blocks, *texts, *norms, bias, *scratch.rotary, out)
    sizes = (shape.tokens, texts.table.stride(0), heads.eps)
    constants = {
        "BLOCK": shape.block,
        "BLOCKS": shape.blocks,
        "DENSE": shape.dense,
        "CAUSAL": shape.causal,
        "GROUP": heads.heads // heads.kv_heads,
        "SHARE": cut.share,
        "KV": heads.kv_heads,
        "HALF": heads.width // 2,
        "PARTS": len(parts),
        "PAGE": cache[0].shape[2],
        "BM": _query_rows(cut, shape),
        "BT": max(16, triton.next_power_of_2(shape.blocks * shape.block)),
        "CHUNK": cut.chunk,
        "NORM": heads.q_norm is not None,
        "BIAS": heads.bias is not None,
        "num_warps": cut.warps,
    }
    teams = shape.rows * heads.heads // cut.share
    if cut.splits:
        _attend_parts[(teams, 1 + cut.splits)](*given, *scratch[3:], *sizes, SPLITS=cut.splits, **constants)
    else:
        _attend_whole[(teams,)](*given, *sizes, STAGES=STAGES, **constants)


@triton.jit  # type: ignore[untyped-decorator]
def _spots(WHERE, request, token, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, DENSE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers that tokens of a request have in the forward, and which of them are in it."""
    real = token < BLOCKS * BLOCK
    if DENSE:
        return request * (BLOCKS * BLOCK) + token, real
    else:
        place = tl.load(WHERE + request * BLOCKS + token // BLOCK, mask=real, other=-1)
        return place * BLOCK + token % BLOCK, place >= 0


@triton.jit  # type: ignore[untyped-decorator]
def _rotary(  # type: ignore[no-untyped-def]
    WHERE, BEHIND, STORED, FREQ, COS, SIN,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, DENSE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    request, token, c = tl.program_id(0), tl.program_id(1) + tl.arange(0, 1), tl.arange(0, HALF)[None, :]
    spot, real = _spots(WHERE, request, token, BLOCK, BLOCKS, DENSE)
    further = tl.load(BEHIND + request * BLOCKS + token // BLOCK) + token % BLOCK
    angle = (tl.load(STORED + request) + further).to(tl.float32)[:, None] * tl.load(FREQ + c)
    tl.store(COS + spot[:, None] * HALF + c, tl.cos(angle), mask=real[:, None])
    tl.store(SIN + spot[:, None] * HALF + c, tl.sin(angle), mask=real[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _half(A, BIASES, place, column, mask, step, PARTS: tl.constexpr, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values that lie in parts, summed."""
    total = tl.load(A + place + column, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(A + part * step + place + column, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(BIASES + column + place * 0, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _to_turn(WEIGHT, COS, SIN, token, mask, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """What `_turned` needs: asked for before anybody waits. Without norms the weights are not looked at."""
    c = tl.arange(0, HALF)
    place = token[:, None] * HALF + c[None, :]
    cos = tl.load(COS + place, mask=mask[:, None], other=0.0)
    sin = tl.load(SIN + place, mask=mask[:, None], other=0.0)
    return cos, sin, tl.load(WEIGHT + c), tl.load(WEIGHT + HALF + c)


@triton.jit  # type: ignore[untyped-decorator]
def _turned(  # type: ignore[no-untyped-def]
    first, second, cos, sin, one, two, eps, KIND: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr
):
    """Both halves of heads, normed and rotated."""
    first, second = first.to(KIND).to(tl.float32), second.to(KIND).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        first = ((first * scale).to(KIND).to(tl.float32) * one.to(tl.float32)[None, :]).to(KIND).to(tl.float32)
        second = ((second * scale).to(KIND).to(tl.float32) * two.to(tl.float32)[None, :]).to(KIND).to(tl.float32)
    return (first * cos - second * sin).to(KIND), (second * cos + first * sin).to(KIND)


@triton.jit  # type: ignore[untyped-decorator]
def _merged(PART, LSE, first, active, BM: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Attention over all parts of a text and the new tokens, eight of which are asked for before the first is waited
    for. Weights are loaded in the shape of what they weigh: nothing goes from thread to thread."""
    i, whole = tl.arange(0, BM)[:, None], tl.arange(0, C)[None, :]
    highest = tl.full((BM, C), float("-inf"), tl.float32)
    total, mixed = tl.zeros((BM, C), tl.float32), tl.zeros((BM, C), tl.float32)
    for some in range(0, active + 1, 8):
        for further in tl.static_range(8):
            slot = (first + tl.minimum(some + further, active)) * BM + i
            values = tl.load(PART + slot * C + whole, cache_modifier=".cg")
            lse = tl.load(LSE + slot + whole * 0, cache_modifier=".cg")
            lse = tl.where(some + further <= active, lse, float("-inf"))
            higher = tl.maximum(highest, lse)
            weight, shrink = tl.exp2(lse - higher), tl.exp2(highest - higher)
            total = total * shrink + weight
            mixed = mixed * shrink + weight * values
            highest = higher
    return mixed / total


@triton.jit  # type: ignore[untyped-decorator]
def _team(GROUP: tl.constexpr, SHARE: tl.constexpr, KV: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The queries of a program: their request and head of keys, and the token and head of each row."""
    TEAMS: tl.constexpr = GROUP // SHARE
    team, i = tl.program_id(0), tl.arange(0, BM)
    kv = team // TEAMS % KV
    return team // (TEAMS * KV), kv, i // SHARE, kv * GROUP + team % TEAMS * SHARE + i % SHARE


@triton.jit  # type: ignore[untyped-decorator]
def _queries(  # type: ignore[no-untyped-def]
    A, QNORM, BIASES, COS, SIN, spot, real, head, tokens, eps,
    WIDTH: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr, KIND: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Both halves of a program's queries."""
    c = tl.arange(0, HALF)
    place, column = spot[:, None] * WIDTH, (head * 2 * HALF)[:, None] + c[None, :]
    cos, sin, one, two = _to_turn(QNORM, COS, SIN, spot, real, HALF)
    first = _half(A, BIASES, place, column, real[:, None], tokens * WIDTH, PARTS, BIAS)
    second = _half(A, BIASES, place, column + HALF, real[:, None], tokens * WIDTH, PARTS, BIAS)
    return _turned(first, second, cos, sin, one, two, eps, KIND, HALF, NORM)


@triton.jit  # type: ignore[untyped-decorator]
def pages_of(TABLE, request, at, table_step, PAGE: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The page of every token of a chunk. It does not wait for how long the text is: the table is filled up."""
    leaf = (at + tl.arange(0, CHUNK)) // PAGE
    return tl.load(TABLE + request * table_step + leaf, mask=leaf < table_step, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _stored(  # type: ignore[no-untyped-def]
    KEYS, VALUES, page, kv, at, end, KV: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr
):
    """Both halves of the keys, and the values, of a chunk of a text; zero behind `end`."""
    j, c, whole = at + tl.arange(0, CHUNK), tl.arange(0, HALF), tl.arange(0, 2 * HALF)
    known = (j < end)[:, None]
    base = ((page.to(tl.int64) * KV + kv) * PAGE + j % PAGE)[:, None] * (2 * HALF)
    k1 = tl.load(KEYS + base + c[None, :], mask=known, other=0.0)
    k2 = tl.load(KEYS + base + HALF + c[None, :], mask=known, other=0.0)
    v = tl.load(VALUES + base + whole[None, :], mask=known, other=0.0)
    return k1, k2, v


@triton.jit
def with_more(scores, v, highest, total, mixed):  # type: ignore[no-untyped-def]
    """What attention has summed up so far, and more keys: their scores, as exponents of two, and their values."""
    higher = tl.maximum(highest, tl.max(scores, 1))
    p = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(highest - higher)
    return (
        higher,
        total * shrink + tl.sum(p, 1),
        mixed * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee"),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _new_tokens(  # type: ignore[no-untyped-def]
    A, KEYS, VALUES, WHERE, BEHIND, TABLE, PENDING, KNORM, BIASES, COS, SIN,
    q1, q2, request, kv, token, real, stored, tokens, table_step, eps, writes,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, DENSE: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr,
    KV: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr, PAGE: tl.constexpr, BT: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Scores of a request's new tokens and their values; who `writes` also stores those that are being committed."""
    KIND: tl.constexpr = KEYS.dtype.element_ty
    C: tl.constexpr = 2 * HALF
    WIDTH: tl.constexpr = (GROUP + 2) * KV * C
    t, c, whole = tl.arange(0, BT), tl.arange(0, HALF), tl.arange(0, C)
    number, mine = _spots(WHERE, request, t, BLOCK, BLOCKS, DENSE)
    spot, field = number[:, None] * WIDTH, ((GROUP * KV + kv) * C) + c[None, :]
    pending = tl.load(PENDING + request)
    cos, sin, one, two = _to_turn(KNORM, COS, SIN, number, mine, HALF)
    first = _half(A, BIASES, spot, field, mine[:, None], tokens * WIDTH, PARTS, BIAS)
    second = _half(A, BIASES, spot, field + HALF, mine[:, None], tokens * WIDTH, PARTS, BIAS)
    values_at = ((GROUP * KV + KV + kv) * C) + whole[None, :]
    nv = _half(A, BIASES, spot, values_at, mine[:, None], tokens * WIDTH, PARTS, BIAS).to(KIND)
    n1, n2 = _turned(first, second, cos, sin, one, two, eps, KIND, HALF, NORM)
    same = token[:, None] // BLOCK == t[None, :] // BLOCK
    behind = tl.load(BEHIND + request * BLOCKS + token // BLOCK, mask=token < BLOCKS * BLOCK, other=0)
    seen = (same | (t[None, :] < behind[:, None])) & mine[None, :]  # drafts see the new text that they stand behind
    if CAUSAL:  # and this text itself only backwards
        seen = seen & ((t[None, :] <= token[:, None]) | (t >= BLOCK)[None, :])
    scores = (tl.dot(q1, tl.trans(n1), input_precision="ieee") + tl.dot(q2, tl.trans(n2), input_precision="ieee")) * (
        1.4426950408889634 / tl.sqrt(C * 1.0)
    )
    fresh = stored + t
    kept = (t < tl.where(writes & (pending > 0), BLOCK, 0)) & mine & (fresh // PAGE < table_step)
    leaf = tl.load(TABLE + request * table_step + fresh // PAGE, mask=kept, other=0).to(tl.int64)
    shelf = ((leaf * KV + kv) * PAGE + fresh % PAGE)[:, None] * C
    tl.store(KEYS + shelf + c[None, :], n1, mask=kept[:, None])
    tl.store(KEYS + shelf + HALF + c[None, :], n2, mask=kept[:, None])
    tl.store(VALUES + shelf + whole[None, :], nv, mask=kept[:, None])
    return tl.where(seen | ~real[:, None], scores, float("-inf")), nv


@triton.jit  # type: ignore[untyped-decorator]
def _attend_whole(  # type: ignore[no-untyped-def]
    A, KEYS, VALUES, WHERE, BEHIND, TABLE, STORED, PENDING, QNORM, KNORM, BIASES, COS, SIN, OUT,
    tokens, table_step, eps,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, DENSE: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr,
    SHARE: tl.constexpr,
    KV: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr,
    BT: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """A program for each request and head of keys: new tokens first, then the text, chunks of it under way."""
    KIND: tl.constexpr = KEYS.dtype.element_ty
    C: tl.constexpr = 2 * HALF
    WIDTH: tl.constexpr = (GROUP + 2) * KV * C
    request, kv, token, head = _team(GROUP, SHARE, KV, BM)
    spot, real = _spots(WHERE, request, token, BLOCK, BLOCKS, DENSE)
    stored = tl.load(STORED + request)
    q1, q2 = _queries(A, QNORM, BIASES, COS, SIN, spot, real, head, tokens, eps, WIDTH, HALF, PARTS, KIND, NORM, BIAS)
    scores, nv = _new_tokens(
        A, KEYS, VALUES, WHERE, BEHIND, TABLE, PENDING, KNORM, BIASES, COS, SIN, q1, q2, request, kv, token, real,
        stored, tokens, table_step, eps, tl.program_id(0) % (GROUP // SHARE) == 0,
        BLOCK, BLOCKS, DENSE, CAUSAL, GROUP, KV, HALF, PARTS, PAGE, BT, NORM, BIAS,
    )  # fmt: skip
    highest = tl.max(scores, 1)
    p = tl.exp2(scores - highest[:, None])
    total, mixed = tl.sum(p, 1), tl.dot(p.to(KIND), nv, input_precision="ieee")
    factor = 1.4426950408889634 / tl.sqrt(C * 1.0)
    for at in tl.range(0, stored, CHUNK, num_stages=STAGES):
        page = pages_of(TABLE, request, at, table_step, PAGE, CHUNK)
        k1, k2, v = _stored(KEYS, VALUES, page, kv, at, stored, KV, HALF, PAGE, CHUNK)
        marks = (
            tl.dot(q1, tl.trans(k1), input_precision="ieee") + tl.dot(q2, tl.trans(k2), input_precision="ieee")
        ) * factor
        marks = tl.where((at + tl.arange(0, CHUNK) < stored)[None, :], marks, float("-inf"))
        highest, total, mixed = with_more(marks, v, highest, total, mixed)
    out = (spot * GROUP * KV + head)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(OUT + out, (mixed / total[:, None]).to(OUT.dtype.element_ty), mask=real[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _attend_parts(  # type: ignore[no-untyped-def]
    A, KEYS, VALUES, WHERE, BEHIND, TABLE, STORED, PENDING, QNORM, KNORM, BIASES, COS, SIN, OUT, PART, LSE, COUNTS,
    tokens, table_step, eps,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, DENSE: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr,
    SHARE: tl.constexpr,
    KV: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, CHUNK: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """A program for each part of a text, and one for the new tokens, part 0; the last of them merges."""
    KIND: tl.constexpr = KEYS.dtype.element_ty
    C: tl.constexpr = 2 * HALF
    WIDTH: tl.constexpr = (GROUP + 2) * KV * C
    team, split = tl.program_id(0), tl.program_id(1)
    request, kv, token, head = _team(GROUP, SHARE, KV, BM)
    begin = tl.maximum(split - 1, 0) * CHUNK  # chunks are dealt out in turn
    page = pages_of(TABLE, request, begin, table_step, PAGE, CHUNK)
    stored = tl.load(STORED + request)
    active = tl.minimum(tl.cdiv(stored, CHUNK), SPLITS)
    if split > active:
        return
    spot, real = _spots(WHERE, request, token, BLOCK, BLOCKS, DENSE)
    whole, slot = tl.arange(0, C), (team * (SPLITS + 1) + split) * BM + tl.arange(0, BM)
    if split == 0:
        q1, q2 = _queries(
            A, QNORM, BIASES, COS, SIN, spot, real, head, tokens, eps, WIDTH, HALF, PARTS, KIND, NORM, BIAS
        )
        scores, nv = _new_tokens(
            A, KEYS, VALUES, WHERE, BEHIND, TABLE, PENDING, KNORM, BIASES, COS, SIN, q1, q2, request, kv, token, real,
            stored, tokens, table_step, eps, team % (GROUP // SHARE) == 0,
            BLOCK, BLOCKS, DENSE, CAUSAL, GROUP, KV, HALF, PARTS, PAGE, BT, NORM, BIAS,
        )  # fmt: skip
        highest = tl.max(scores, 1)
        p = tl.exp2(scores - highest[:, None])
        total = tl.sum(p, 1)
        tl.store(
            PART + slot[:, None] * C + whole[None, :], tl.dot(p.to(KIND), nv, input_precision="ieee") / total[:, None]
        )
        tl.store(LSE + slot, highest + tl.log2(total))
    else:
        k1, k2, v = _stored(KEYS, VALUES, page, kv, begin, stored, KV, HALF, PAGE, CHUNK)
        q1, q2 = _queries(
            A, QNORM, BIASES, COS, SIN, spot, real, head, tokens, eps, WIDTH, HALF, PARTS, KIND, NORM, BIAS
        )
        highest = tl.full((BM,), float("-inf"), tl.float32)
        total, mixed = tl.zeros((BM,), tl.float32), tl.zeros((BM, C), tl.float32)
        factor = 1.4426950408889634 / tl.sqrt(C * 1.0)
        for at in range(begin, stored, SPLITS * CHUNK):
            scores = (
                tl.dot(q1, tl.trans(k1), input_precision="ieee") + tl.dot(q2, tl.trans(k2), input_precision="ieee")
            ) * factor
            scores = tl.where((at + tl.arange(0, CHUNK) < stored)[None, :], scores, float("-inf"))
            highest, total, mixed = with_more(scores, v, highest, total, mixed)
            after = at + SPLITS * CHUNK
            page = pages_of(TABLE, request, after, table_step, PAGE, CHUNK)
            k1, k2, v = _stored(KEYS, VALUES, page, kv, after, stored, KV, HALF, PAGE, CHUNK)
        tl.store(PART + slot[:, None] * C + whole[None, :], mixed / total[:, None])
        tl.store(LSE + slot, highest + tl.log2(total))
    tl.debug_barrier()
    if tl.atomic_add(COUNTS + team, 1, sem="acq_rel", scope="gpu") == active:
        merged = _merged(PART, LSE, team * (SPLITS + 1), active, BM, C)
        tl.atomic_xchg(COUNTS + team, 0)
        out = (spot * GROUP * KV + head)[:, None] * C + whole[None, :]
        tl.store(OUT + out, merged.to(OUT.dtype.element_ty), mask=real[:, None])
