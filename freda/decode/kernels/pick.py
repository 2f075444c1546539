"""The likeliest id of every token, its probability, and the runner-up.

For few tokens without the logits: one program has 64 ids; it leaves of each token the best two of them and the sum of
exponents, and a second kernel merges these. For many the library makes the logits, and they are read once. Logits are
rounded as a matrix product would leave them, and of equal ones the lowest id counts, so the choice is that of the plain
twin, `draft.predict`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from freda.decode.kernels.skinny import HEAD, Matrix, Stream, in_bytes, multiplied

IDS_AT_ONCE = 4096  # logits of a token that one program reads


class Partial(NamedTuple):
    """For every tile of ids and every token: the best two logits, their ids, and Σ exp(logit − best)."""

    logits: Tensor  # (2, tiles, M) fp32
    ids: Tensor  # (2, tiles, M) int32
    sums: Tensor  # (tiles, M) fp32


def new_partial(tokens: int, rows: int, device: torch.device, tile: int = HEAD.tile) -> Partial:
    """Memory for `pick` among the ids of `rows` rows of a head."""
    tiles = -(-rows // tile)
    ids = torch.empty(2, tiles, tokens, dtype=torch.int32, device=device)
    return Partial(torch.empty(2, tiles, tokens, device=device), ids, torch.empty(tiles, tokens, device=device))


def pick(
    stream: Stream, tokens: Tensor, matrix: Matrix, vocabulary: int, eps: float, partial: Partial
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Best id, probability, second id and its probability of `tokens` (T,), which number the tokens of the stream."""
    (weight, scales), count, tiles = matrix, len(tokens), partial.sums.shape[0]
    inner = stream.x.shape[1]
    plan = HEAD if scales is None else in_bytes(HEAD, inner)
    _scan[(tiles,)](
        *(stream.scaled, weight, stream.scaled if scales is None else scales, stream.squares, tokens, *partial),
        *(count, stream.x.shape[0], weight.shape[0], vocabulary, inner, eps, len(stream.squares)),
        BM=max(16, triton.next_power_of_2(count)),
        BN=plan.tile,
        BK=plan.chunk,
        TILES=triton.next_power_of_2(len(stream.squares)),
        STAGES=plan.stages,
        INT8=scales is not None,
        FAST=stream.x.is_cuda and stream.x.dtype == torch.bfloat16,
        num_warps=4,
    )
    return _merged(partial, vocabulary)


def pick_of(logits: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The likeliest two ids and their probabilities, from logits (T, V') of which the first `vocabulary` count."""
    partial = new_partial(len(logits), vocabulary, logits.device, IDS_AT_ONCE)
    tiles, count = partial.sums.shape
    _read[(count, tiles)](logits, *partial, logits.stride(0), vocabulary, BN=IDS_AT_ONCE, num_warps=8)
    return _merged(partial, vocabulary)


def _merged(partial: Partial, vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tiles, count = partial.sums.shape
    ids = torch.empty(2, count, dtype=torch.int64, device=partial.ids.device)
    prob = torch.empty(2, count, device=partial.ids.device)
    _merge[(count,)](*partial, ids, prob, count, tiles, vocabulary, TILES=triton.next_power_of_2(tiles), num_warps=8)
    return ids[0], prob[0], ids[1], prob[1]


@triton.jit
def _leave(logits, n, vocabulary, LOGITS, IDS, SUMS, at, step, real):  # type: ignore[no-untyped-def]
    """The best two logits of every token in a tile (ids by tokens), and the sum of its exponentials."""
    logits = tl.where((n < vocabulary)[:, None], logits, float("-inf"))
    best = tl.max(logits, 0)
    place = tl.min(tl.where(logits == best[None, :], n[:, None], 2147483647), 0)
    total = tl.sum(tl.where((n < vocabulary)[:, None], tl.exp(logits - best[None, :]), 0.0), 0)
    others = tl.where(n[:, None] == place[None, :], float("-inf"), logits)
    second = tl.max(others, 0)
    second_place = tl.min(tl.where(others == second[None, :], n[:, None], 2147483647), 0)
    tl.store(LOGITS + at, best, mask=real)
    tl.store(LOGITS + step + at, second, mask=real)
    tl.store(IDS + at, place, mask=real)
    tl.store(IDS + step + at, second_place, mask=real)
    tl.store(SUMS + at, total, mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _read(GIVEN, LOGITS, IDS, SUMS, columns, vocabulary, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    token, tile = tl.program_id(0), tl.program_id(1)
    count = tl.num_programs(0)
    n, m = tile * BN + tl.arange(0, BN), tl.arange(0, 1)
    logits = tl.load(GIVEN + token.to(tl.int64) * columns + n, mask=n < vocabulary, other=0.0).to(tl.float32)
    at = tile * count + token + m
    _leave(logits[:, None], n, vocabulary, LOGITS, IDS, SUMS, at, tl.num_programs(1) * count, m == 0)


@triton.jit  # type: ignore[untyped-decorator]
def _scan(  # type: ignore[no-untyped-def]
    A, W, SCALES, SQUARES, TOKENS, LOGITS, IDS, SUMS, count, all_tokens, rows, vocabulary, inner, eps, tiles,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    INT8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    n, m = tile * BN + tl.arange(0, BN), tl.arange(0, BM)
    real = m < count
    token = tl.load(TOKENS + m, mask=real, other=0)
    row = tl.minimum(n, rows - 1)
    logits = multiplied(A, W, row, token, real, 0, inner, inner, BN, BM, BK, STAGES, INT8, FAST)
    if INT8:
        logits = logits * tl.load(SCALES + row)[:, None]
    t = tl.arange(0, TILES)
    kept = (t < tiles)[:, None] & real[None, :]
    squares = tl.load(SQUARES + t[:, None] * all_tokens + token[None, :], mask=kept, other=0.0)
    logits = logits * tl.rsqrt(tl.sum(squares, 0) / inner + eps)[None, :]
    logits = logits.to(A.dtype.element_ty).to(tl.float32)
    _leave(logits, n, vocabulary, LOGITS, IDS, SUMS, tile * count + m, tl.num_programs(0) * count, real)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(LOGITS, IDS, SUMS, ID, PROB, count, tiles, vocabulary, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    m, tile = tl.program_id(0), tl.arange(0, TILES)
    step, at, inside = tiles * count, tile * count + m, tile < tiles
    value = tl.load(LOGITS + at, mask=inside, other=float("-inf"))
    runner = tl.load(LOGITS + step + at, mask=inside, other=float("-inf"))
    place = tl.load(IDS + at, mask=inside, other=2147483647)
    runner_place = tl.load(IDS + step + at, mask=inside, other=2147483647)
    part = tl.load(SUMS + at, mask=inside, other=0.0)
    best = tl.max(value)
    total = tl.sum(tl.where(inside, part * tl.exp(value - best), 0.0))
    chosen = tl.min(tl.where(value == best, place, 2147483647))
    value = tl.where(place == chosen, runner, value)
    place = tl.where(place == chosen, runner_place, place)
    second = tl.max(value)
    other = tl.min(tl.where(value == second, place, 2147483647))
    tl.store(ID + m, tl.minimum(chosen, vocabulary - 1).to(tl.int64))  # NaN equals nothing
    tl.store(ID + count + m, tl.minimum(other, vocabulary - 1).to(tl.int64))
    tl.store(PROB + m, 1.0 / total)
    tl.store(PROB + count + m, tl.exp(second - best) / total)
