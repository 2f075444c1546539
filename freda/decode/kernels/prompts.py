"""Attention of prompts that are being stored: pieces of them (`Pieces`), each behind what is stored of its request.

`spread` makes queries, keys and values of a product; keys and values go into the pages. `attend` then reads all keys
from there, those of the piece too: a token sees everything up to the end of its block; in causal text that is itself. A
program has some tokens of a tile and the query heads that share a head of keys; most of the text all of its tokens see,
and only the last chunks of keys need a mask. Grids depend on the numbers of tokens and tiles alone, so one CUDA graph
serves all pieces of a size. The plain twin is `transformer.Attention` over gathered pages.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from freda.decode.kernels.pages import pages_of, with_more
from freda.decode.kernels.rowwise import Heads
from freda.decode.pages import PIECE_TILE, Pieces

Shelves = tuple[Tensor, Tensor]  # keys and values of a layer in pages
MOST_ROWS = 128  # of a program: tokens times the query heads that share a head of keys
CHUNK = 64  # keys looked at together


def spread(qkv: Tensor, pieces: Pieces, heads: Heads, inv_freq: Tensor, shelves: Shelves, q: Tensor) -> None:
    """Queries, keys and values of T tokens, normed and rotated, from their product `qkv` (T, ·): queries into `q`
    (T, heads · width), keys and values into the pages. Of padding nothing is written."""
    keys, table = shelves[0], pieces.table
    norms = heads.q_norm if heads.q_norm is not None else qkv, heads.k_norm if heads.k_norm is not None else qkv
    bias = heads.bias if heads.bias is not None else qkv
    _spread[(len(qkv),)](
        *(qkv, pieces.row, pieces.position, *norms, bias, inv_freq, *shelves, table, q, table.stride(0), heads.eps),
        H=heads.heads,
        KV=heads.kv_heads,
        HALF=heads.width // 2,
        ALL=triton.next_power_of_2(heads.heads + 2 * heads.kv_heads),
        PAGE=keys.shape[2],
        NORM=heads.q_norm is not None,
        BIAS=heads.bias is not None,
        num_warps=4,
    )


def attend(q: Tensor, pieces: Pieces, heads: Heads, context: int, shelves: Shelves, out: Tensor) -> None:
    """Attention of all tokens with queries `q` (T, heads · width) over the pages, into `out` of the same shape; blocks
    of text have `context` tokens."""
    keys, table = shelves[0], pieces.table
    group = heads.heads // heads.kv_heads
    rows = min(MOST_ROWS, max(64, triton.next_power_of_2(PIECE_TILE * group)))
    _attend[(len(pieces.tiles), heads.kv_heads, triton.cdiv(PIECE_TILE, rows // group))](
        *(q, *shelves, table, pieces.row, pieces.position, pieces.tiles, out, table.stride(0), context),
        GROUP=group,
        KV=heads.kv_heads,
        C=heads.width,
        PAGE=keys.shape[2],
        BM=rows,
        CHUNK=CHUNK,
        STAGES=3,
        num_warps=8 if rows > 64 else 4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _spread(  # type: ignore[no-untyped-def]
    A, ROW, POSITION, QNORM, KNORM, BIASES, FREQ, KEYS, VALUES, TABLE, Q, table_step, eps,
    H: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, ALL: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * HALF
    KIND: tl.constexpr = Q.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(POSITION + token)
    if place < 0:
        return
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
    page = tl.load(TABLE + tl.load(ROW + token) * table_step + place // PAGE).to(tl.int64)
    key = ((page * KV + head - H) * PAGE + place % PAGE) * C + c
    tl.store(KEYS + key, turned1, mask=is_k)
    tl.store(KEYS + key + HALF, turned2, mask=is_k)
    value = ((page * KV + head - H - KV) * PAGE + place % PAGE) * C + c
    tl.store(VALUES + value, first.to(KIND), mask=is_v)
    tl.store(VALUES + value + HALF, second.to(KIND), mask=is_v)


@triton.jit  # type: ignore[untyped-decorator]
def _chunk(  # type: ignore[no-untyped-def]
    KEYS, VALUES, TABLE, q, row, kv, at, end, table_step,
    KV: tl.constexpr, C: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Scores of a chunk of keys, as exponents of two, and its values; zero behind `end`, unless it is WHOLE."""
    j, c = at + tl.arange(0, CHUNK), tl.arange(0, C)
    page = pages_of(TABLE, row, at, table_step, PAGE, CHUNK)
    base = ((page.to(tl.int64) * KV + kv) * PAGE + j % PAGE)[:, None] * C + c[None, :]
    if WHOLE:
        k, v = tl.load(KEYS + base), tl.load(VALUES + base)
    else:
        known = (j < end)[:, None]
        k, v = tl.load(KEYS + base, mask=known, other=0.0), tl.load(VALUES + base, mask=known, other=0.0)
    return tl.dot(q, tl.trans(k), input_precision="ieee") * (1.4426950408889634 / tl.sqrt(C * 1.0)), v


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    Q, KEYS, VALUES, TABLE, ROW, POSITION, TILES, OUT, table_step, block,
    GROUP: tl.constexpr, KV: tl.constexpr, C: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, kv, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    TOKENS: tl.constexpr = BM // GROUP
    first = tl.load(TILES + 2 * tile) + part * TOKENS
    count = tl.minimum(tl.load(TILES + 2 * tile + 1) - part * TOKENS, TOKENS)
    if count <= 0:
        return
    i, c = tl.arange(0, BM), tl.arange(0, C)
    real, token = i // GROUP < count, first + i // GROUP
    place = (token.to(tl.int64) * (GROUP * KV) + kv * GROUP + i % GROUP)[:, None] * C + c[None, :]
    q = tl.load(Q + place, mask=real[:, None], other=0.0)
    row, begin = tl.load(ROW + first), tl.load(POSITION + first)
    limit = (tl.where(real, begin + i // GROUP, begin) // block + 1) * block  # a row sees the keys before it
    end = ((begin + count - 1) // block + 1) * block
    whole = (begin // block + 1) * block // CHUNK * CHUNK  # all rows see the keys before it
    highest = tl.full((BM,), float("-inf"), tl.float32)
    total, mixed = tl.zeros((BM,), tl.float32), tl.zeros((BM, C), tl.float32)
    for at in tl.range(0, whole, CHUNK, num_stages=STAGES):
        scores, v = _chunk(KEYS, VALUES, TABLE, q, row, kv, at, end, table_step, KV, C, PAGE, CHUNK, True)
        highest, total, mixed = with_more(scores, v, highest, total, mixed)
    for at in range(whole, end, CHUNK):
        scores, v = _chunk(KEYS, VALUES, TABLE, q, row, kv, at, end, table_step, KV, C, PAGE, CHUNK, False)
        scores = tl.where((at + tl.arange(0, CHUNK))[None, :] < limit[:, None], scores, float("-inf"))
        highest, total, mixed = with_more(scores, v, highest, total, mixed)
    tl.store(OUT + place, (mixed / total[:, None]).to(OUT.dtype.element_ty), mask=real[:, None])
