"""All layers of a forward over few tokens in one launch: a program on every multiprocessor, which stays.

Between kernels a GPU's memory rests for two to three microseconds, five times a layer, while a layer of Qwen3-4B's
shape streams in 47. Here the programs meet at a counter instead, and before they wait each asks for the first tiles of
the weights that it will need next.

A product is cut into units of a tile of rows and a chunk of columns, in order; each program has an equal run of them.
Where a tile belongs to several programs, the last to come adds the parts up in their order. Attention is shared out by
request, head of keys and part of the text. The plain twin is `packed.PackedModel` kernel by kernel, whose twin is the
Transformer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from freda.model.cache import Rows, Texts
from freda.model.kernels import pages
from freda.model.kernels.skinny import Stream

TILE, CHUNK, STAGES = 128, 128, 4  # rows and columns of a unit; units under way
MOST_TOKENS = 32


class Stacked(NamedTuple):
    """The weights of all L layers."""

    qkv: Tensor  # (L, ·, D)
    out: Tensor
    gate_up: Tensor
    down: Tensor
    input_norms: Tensor  # (L + 1, D): of every layer, and the final one
    post_norms: Tensor  # (L, D)
    q_norms: Tensor | None  # (L, width)
    k_norms: Tensor | None
    biases: Tensor | None  # (L, ·)
    scales: tuple[Tensor, ...] = ()  # of the first four, (L, ·) each, where these are int8


class Memory(NamedTuple):
    """What the programs leave for each other."""

    stream: Stream
    qkv: Tensor  # (M, ·)
    attended: Tensor  # (M, heads · width)
    inner: Tensor  # (M, ffn)
    rotary: Tensor  # (2, M, width / 2)
    part: Tensor  # attention over parts of the texts
    lse: Tensor
    sums: Tensor  # parts of products, a few tiles a program
    counts: Tensor  # of a product's parts that are there, by tile; left at zero
    heads_there: Tensor  # of attention's, by request and head; left at zero
    met: Tensor  # programs that have come to a meeting


class Shape(NamedTuple):
    """Sizes that the kernel is compiled for."""

    heads: int
    kv_heads: int
    width: int
    eps: float
    splits: int
    programs: int


def new_memory(weights: Stacked, requests: int, rows: Rows, shape: Shape, dtype: torch.dtype) -> Memory:
    """For forwards over the new tokens of so many requests, whose stream is of `dtype`."""
    device = weights.out.device
    tokens, width = requests * rows.tokens, weights.out.shape[1]
    slots = requests * shape.kv_heads * (shape.splits + 1) * _query_rows(shape, rows)

    def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(sizes, device=device, dtype=dtype)

    x, scaled = empty(2, tokens, width, dtype=dtype).unbind()
    tiles = max(weights.qkv.shape[1] // TILE, weights.gate_up.shape[1] // TILE)
    return Memory(
        stream=Stream(x, scaled, torch.zeros(width // TILE, tokens, device=device)),
        qkv=empty(tokens, weights.qkv.shape[1], dtype=dtype),
        attended=empty(tokens, weights.out.shape[2], dtype=dtype),
        inner=empty(tokens, weights.down.shape[2], dtype=dtype),
        rotary=empty(2, tokens, shape.width // 2),
        part=empty(slots, shape.width),
        lse=empty(slots),
        sums=empty(_slots(weights, shape) * shape.programs, TILE, _token_rows(tokens)),
        counts=torch.zeros(tiles, dtype=torch.int32, device=device),
        heads_there=torch.zeros(requests * shape.kv_heads, dtype=torch.int32, device=device),
        met=torch.zeros(1, dtype=torch.int32, device=device),
    )


def _slots(weights: Stacked, shape: Shape) -> int:
    """The most tiles that a program has a part of."""
    sizes = [(part.shape[1] // TILE, part.shape[2] // CHUNK) for part in weights[:4]]
    return max(-(-tiles * chunks // shape.programs) // chunks + 2 for tiles, chunks in sizes)


def _query_rows(shape: Shape, rows: Rows) -> int:
    size: int = triton.next_power_of_2(rows.tokens * shape.heads // shape.kv_heads)
    return max(16, size)


def _token_rows(tokens: int) -> int:
    size: int = triton.next_power_of_2(tokens)
    return max(16, size)


def run(weights: Stacked, storage: Tensor, texts: Texts, rows: Rows, shape: Shape, memory: Memory) -> None:
    """All layers over the stream that `skinny.embed` has written; `storage` (L, 2, pages, heads, page, width)."""
    tokens, width = memory.stream.x.shape
    memory.met.zero_()
    some = memory.qkv
    norms = [some if part is None else part for part in (weights.q_norms, weights.k_norms, weights.biases)]
    _whole[(shape.programs,)](
        *(*memory.stream, memory.qkv, memory.attended, memory.inner, *memory.rotary, memory.part, memory.lse),
        *(memory.sums, memory.counts, memory.heads_there, memory.met, *weights[:6], *norms, storage, *texts),
        *(weights.scales or (some,) * 4),
        *(tokens, len(texts.stored), len(weights.qkv), texts.table.stride(0)),
        *(storage.stride(0), storage.stride(1), shape.eps),
        D=width,
        F=weights.down.shape[2],
        H=shape.heads,
        KV=shape.kv_heads,
        HALF=shape.width // 2,
        S=rows.tokens,
        COMMIT=rows.commit,
        BLOCK=rows.block,
        SPLITS=shape.splits,
        PAGE=storage.shape[4],
        P=shape.programs,
        BM=_token_rows(tokens),
        BQ=_query_rows(shape, rows),
        BT=_token_rows(rows.tokens),
        KEYS_AT_ONCE=pages.CHUNK,
        NORM=weights.q_norms is not None,
        BIAS=weights.biases is not None,
        TILE=TILE,
        CHUNK=CHUNK,
        STAGES=STAGES,
        SLOTS=_slots(weights, shape),
        AHEAD=storage.is_cuda,
        INT8=bool(weights.scales),
        num_warps=8,
    )


@triton.jit
def _meet(MET, target):  # type: ignore[no-untyped-def]
    """Wait until all programs are here; what they wrote before can be read after."""
    tl.debug_barrier()
    seen = tl.atomic_add(MET, 1, sem="acq_rel", scope="gpu") + 1
    while seen < target:
        seen = tl.atomic_add(MET, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def _rows_of(tile, rows, MODE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of a weight in a tile; of gate and up, half each."""
    n = tl.arange(0, TILE)
    if MODE == 1:
        HALF_TILE: tl.constexpr = TILE // 2
        n = tile * HALF_TILE + n % HALF_TILE + tl.where(n < HALF_TILE, 0, rows)
    else:
        n = tile * TILE + n
    return n


@triton.jit  # type: ignore[untyped-decorator]
def _ask_ahead(  # type: ignore[no-untyped-def]
    W,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    MODE: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    BK: tl.constexpr,
):
    """Ask the memory for this program's first units of a weight."""
    CHUNKS: tl.constexpr = INNER // BK
    PER: tl.constexpr = (ROWS // (TILE // 2 if MODE == 1 else TILE) * CHUNKS + P - 1) // P
    LINES: tl.constexpr = BK // 64
    unit = tl.program_id(0) * PER
    i = tl.arange(0, TILE * LINES)
    row = _rows_of(unit // CHUNKS, ROWS, MODE, TILE)
    for further in tl.static_range(3):
        at = (row * INNER)[:, None].to(tl.int64) + ((unit % CHUNKS + further) * BK + tl.arange(0, LINES) * 64)[None, :]
        address = (W + tl.reshape(at, (TILE * LINES,))).to(tl.int64) + i * 0
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    total, tile, SCALES, OUT, X, SCALED, SQUARES, NEXT_NORM, tokens, eps,
    ROWS: tl.constexpr, MODE: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr,
    INT8: tl.constexpr,
):  # fmt: skip
    """What becomes of a tile of a product, (TILE, BM), that is complete."""
    m, n = tl.arange(0, BM), _rows_of(tile, ROWS, MODE, TILE)
    real = m < tokens
    if INT8:
        total = total * tl.load(SCALES + n)[:, None]
    if MODE < 2:
        TILES: tl.constexpr = D // TILE
        t = tl.arange(0, 64)
        kept = (t < TILES)[:, None] & real[None, :]
        squares = tl.load(SQUARES + t[:, None] * tokens + m[None, :], mask=kept, other=0.0)
        total = total * tl.rsqrt(tl.sum(squares, 0) / D + eps)[None, :]
    if MODE == 0:
        at = m[None, :] * ROWS + n[:, None]
        tl.store(OUT + at, total.to(OUT.dtype.element_ty), mask=real[None, :])
    if MODE == 1:
        HALF_TILE: tl.constexpr = TILE // 2
        gates, ups = tl.split(tl.permute(tl.reshape(total, (2, HALF_TILE, BM)), (1, 2, 0)))
        both = gates / (1.0 + tl.exp(-gates)) * ups
        at = m[None, :] * ROWS + (tile * HALF_TILE + tl.arange(0, HALF_TILE))[:, None]
        tl.store(OUT + at, both.to(OUT.dtype.element_ty), mask=real[None, :])
    if MODE == 2:
        at = m[None, :] * D + n[:, None]
        x = tl.load(X + at, mask=real[None, :], other=0.0).to(tl.float32)
        x = (x + total.to(X.dtype.element_ty).to(tl.float32)).to(X.dtype.element_ty)
        wide = x.to(tl.float32)
        norm = tl.load(NEXT_NORM + n).to(tl.float32)[:, None]
        tl.store(X + at, x, mask=real[None, :])
        tl.store(SCALED + at, (wide * norm).to(SCALED.dtype.element_ty), mask=real[None, :])
        tl.store(SQUARES + tile * tokens + m, tl.sum(wide * wide, 0), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    A, W, SCALES, OUT, X, SCALED, SQUARES, NEXT_NORM, SUMS, COUNTS, tokens, eps,
    ROWS: tl.constexpr, INNER: tl.constexpr, MODE: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BM: tl.constexpr,
    TILE: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, SLOTS: tl.constexpr,
    INT8: tl.constexpr,
):  # fmt: skip
    """This program's units of a product.

    MODE 0: of the normed stream; 1: that, through the gate; 2: added to the stream. One loop for all units, so that the
    memory does not rest between tiles; it only puts sums down. What is done with them comes after it: a loop with a
    barrier in it is not pipelined.
    """
    CHUNKS: tl.constexpr = INNER // BK
    UNITS: tl.constexpr = ROWS // (TILE // 2 if MODE == 1 else TILE) * CHUNKS
    PER: tl.constexpr = (UNITS + P - 1) // P
    program = tl.program_id(0)
    m, k, i = tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, TILE)
    real, place = m < tokens, i[:, None] * BM + m[None, :]
    begin = program * PER
    end = tl.minimum(UNITS, begin + PER)
    total = tl.zeros((TILE, BM), tl.float32)
    for unit in tl.range(begin, end, num_stages=STAGES):
        tile, chunk = unit // CHUNKS, unit % CHUNKS
        n = _rows_of(tile, ROWS, MODE, TILE)
        w = tl.load(W + n[:, None].to(tl.int64) * INNER + chunk * BK + k[None, :], eviction_policy="evict_first")
        w = w.to(A.dtype.element_ty)
        a = tl.load(A + m[None, :] * INNER + chunk * BK + k[:, None], mask=real[None, :], other=0.0)
        total = tl.dot(w, a, total)
        if (chunk == CHUNKS - 1) | (unit == end - 1):
            tl.store(SUMS + (SLOTS * program + tile - begin // CHUNKS) * TILE * BM + place, total)
            total = tl.zeros((TILE, BM), tl.float32)
    tl.debug_barrier()
    for number in tl.static_range(PER // CHUNKS + 2):
        tile = begin // CHUNKS + number
        if tile * CHUNKS < end:
            first, last = tile * CHUNKS // PER, (tile * CHUNKS + CHUNKS - 1) // PER  # programs that have a part of it
            if tl.atomic_add(COUNTS + tile, 1, sem="acq_rel", scope="gpu") == last - first:
                parts = tl.zeros((TILE, BM), tl.float32)
                for further in tl.static_range(CHUNKS // PER + 2):  # asked for all at once
                    other = tl.minimum(first + further, last)
                    slot = SLOTS * other + tile - other * PER // CHUNKS
                    part = tl.load(SUMS + slot * TILE * BM + place, cache_modifier=".cg")
                    parts += tl.where(first + further <= last, part, 0.0)
                tl.atomic_xchg(COUNTS + tile, 0)
                _finish(
                    parts, tile, SCALES, OUT, X, SCALED, SQUARES, NEXT_NORM, tokens, eps, ROWS, MODE, D, BM, TILE, INT8
                )


@triton.jit  # type: ignore[untyped-decorator]
def _whole(  # type: ignore[no-untyped-def]
    X, SCALED, SQUARES, QKV, ATTENDED, INNER, COS, SIN, PART, LSE, SUMS, COUNTS, HEADS_THERE, MET,
    WQKV, WOUT, WGATE, WDOWN, NORMS, POST, QNORM, KNORM, BIASES, STORAGE, TABLE, STORED, PENDING,
    SQKV, SOUT, SGATE, SDOWN,
    tokens, requests, layers, table_step, layer_step, value_step, eps,
    D: tl.constexpr, F: tl.constexpr, H: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, S: tl.constexpr,
    COMMIT: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, PAGE: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr, KEYS_AT_ONCE: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, SLOTS: tl.constexpr,
    AHEAD: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * HALF
    WIDTH: tl.constexpr = (H + 2 * KV) * C
    GROUP: tl.constexpr = H // KV
    program = tl.program_id(0)
    meeting = 0
    for layer in range(layers):
        at = tl.full((), 0, tl.int64) + layer
        gate, out, down = WGATE + at * 2 * F * D, WOUT + at * D * H * C, WDOWN + at * D * F
        _product(
            SCALED, WQKV + at * WIDTH * D, SQKV + at * WIDTH, QKV, X, SCALED, SQUARES, NORMS, SUMS, COUNTS, tokens, eps,
            WIDTH, D, 0, D, P, BM, TILE, CHUNK, STAGES, SLOTS, INT8,
        )  # fmt: skip
        if AHEAD:
            _ask_ahead(out, D, H * C, 2, P, TILE, CHUNK)
        meeting += P
        _meet(MET, meeting)
        keys = STORAGE + at * layer_step
        for item in range(program, requests * KV * (SPLITS + 1), P):
            group, split = item % (requests * KV), item // (requests * KV)
            active = pages.part_of_attention(
                QKV, keys, keys + value_step, TABLE, STORED, PENDING, QNORM + at * C, KNORM + at * C,
                BIASES + at * WIDTH, COS, SIN, PART, LSE, group // KV, group % KV, split, tokens, table_step, eps,
                COMMIT, BLOCK, S, GROUP, KV, HALF, 1, SPLITS, PAGE, BQ, BT, KEYS_AT_ONCE, NORM, BIAS,
            )  # fmt: skip
            pages.merge_if_last(PART, LSE, HEADS_THERE, ATTENDED, group, split, active, S, GROUP, KV, C, SPLITS, BQ)
        meeting += P
        _meet(MET, meeting)
        _product(
            ATTENDED, out, SOUT + at * D, QKV, X, SCALED, SQUARES, POST + at * D, SUMS, COUNTS, tokens, eps,
            D, H * C, 2, D, P, BM, TILE, CHUNK, STAGES, SLOTS, INT8,
        )  # fmt: skip
        if AHEAD:
            _ask_ahead(gate, F, D, 1, P, TILE, CHUNK)
        meeting += P
        _meet(MET, meeting)
        _product(
            SCALED, gate, SGATE + at * 2 * F, INNER, X, SCALED, SQUARES, NORMS, SUMS, COUNTS, tokens, eps,
            F, D, 1, D, P, BM, TILE, CHUNK, STAGES, SLOTS, INT8,
        )  # fmt: skip
        if AHEAD:
            _ask_ahead(down, D, F, 2, P, TILE, CHUNK)
        meeting += P
        _meet(MET, meeting)
        _product(
            INNER, down, SDOWN + at * D, QKV, X, SCALED, SQUARES, NORMS + (at + 1) * D, SUMS, COUNTS, tokens, eps,
            D, F, 2, D, P, BM, TILE, CHUNK, STAGES, SLOTS, INT8,
        )  # fmt: skip
        if AHEAD and layer + 1 < layers:
            _ask_ahead(WQKV + (at + 1) * WIDTH * D, WIDTH, D, 0, P, TILE, CHUNK)
        meeting += P
        _meet(MET, meeting)
