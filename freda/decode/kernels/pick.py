"""The id of every token, the likeliest or a sample, its probability, and the runner-up.

For few tokens without the logits: one program has 64 ids; it leaves of each token the best two of them and the sum of
exponents, and a second kernel merges these. For many the library makes the logits, and they are read once. Logits are
rounded as a matrix product would leave them, and of equal ones the lowest id counts, so the choice is that of the plain
twin, `draft.predict`. Samples are made of logits too (`sample`), with the noise of `methods.noise`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from freda.decode.kernels.skinny import HEAD, Matrix, Stream, in_bytes, multiplied
from freda.methods.draft import Sampling
from freda.methods.noise import Purpose

IDS_AT_ONCE = 4096  # logits of a token that one program reads, or looks at together


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


def sample(
    logits: Tensor, vocabulary: int, sampling: Sampling, position: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `pick_of`, but the first id is drawn as `sampling` says, for tokens at `position` (N, B) of N requests."""
    (count, block), device = position.shape, logits.device
    assert logits.shape[0] == count * block, (logits.shape, position.shape)
    ids = torch.empty(2, count * block, dtype=torch.int64, device=device)
    prob = torch.empty(2, count * block, device=device)
    _sample[(count * block,)](
        *(logits, *sampling, position.contiguous(), ids, prob, logits.stride(0), vocabulary, block),
        PURPOSE=int(Purpose.SAMPLING),
        BITS=16 if logits.dtype == torch.bfloat16 else 32,
        BN=IDS_AT_ONCE,
        STAGES=3,
        num_warps=8,
    )
    return ids[0], prob[0], ids[1], prob[1]


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
def _some(GIVEN, at, columns, vocabulary, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logits of BN ids from `at` on. A load asks which columns there are, a round number, not which ids, whose
    number may be odd: then every logit would be loaded by itself."""
    n = at + tl.arange(0, BN)
    given = tl.load(GIVEN + n, mask=n < columns, other=0.0).to(tl.float32)
    return tl.where(n < vocabulary, given, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _read(GIVEN, LOGITS, IDS, SUMS, columns, vocabulary, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    token, tile = tl.program_id(0), tl.program_id(1)
    count = tl.num_programs(0)
    n, m = tile * BN + tl.arange(0, BN), tl.arange(0, 1)
    logits = _some(GIVEN + token.to(tl.int64) * columns, tile * BN, columns, vocabulary, BN)
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


@triton.jit
def _mix(h):  # type: ignore[no-untyped-def]
    """`noise._mix` in 32 bits."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _counted(state, low, high):  # type: ignore[no-untyped-def]
    """The state of `noise.uniform` after one more counter, given as two words."""
    return _mix(_mix(state ^ _mix(low + 0x9E3779B9)) ^ high)


@triton.jit
def _gumbel(state):  # type: ignore[no-untyped-def]
    """`noise.gumbel` of a final state. The GPU's logarithm is coarse around 1, where the largest noise comes from, so
    there it is a series."""
    point = ((state >> 9).to(tl.float32) + 0.5) / 8388608.0
    left = 1.0 - point
    near = left * (1.0 + left * (0.5 + left * (0.33333334 + left * (0.25 + left * (0.2 + left * 0.16666667)))))
    return -tl.log(tl.where(left < 0.03125, near, -tl.log(point)))


@triton.jit  # type: ignore[untyped-decorator]
def _image(raw, scaled, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Unsigned integers in the order of the scaled logits. Those of bf16 logits are in the order of the logits
    themselves, which no temperature makes equal, so 16 bits are enough."""
    x = raw if BITS == 16 else scaled
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)  # the two zeros are equal
    return tl.where((bits >> 31) > 0, ~bits, bits | 0x80000000) >> (32 - BITS)


@triton.jit  # type: ignore[untyped-decorator]
def _best_two(GIVEN, columns, vocabulary, BN: tl.constexpr, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two highest logits and their ids, the lowest ones of equals."""
    best, second = tl.full((BN,), float("-inf"), tl.float32), tl.full((BN,), float("-inf"), tl.float32)
    place, second_place = tl.full((BN,), 2147483647, tl.int32), tl.full((BN,), 2147483647, tl.int32)
    for at in tl.range(0, vocabulary, BN, num_stages=STAGES):
        raw, n = _some(GIVEN, at, columns, vocabulary, BN), at + tl.arange(0, BN)
        first, other = raw > best, raw > second
        second_place = tl.where(first, place, tl.where(other, n, second_place))
        second = tl.where(first, best, tl.where(other, raw, second))
        best, place = tl.where(first, raw, best), tl.where(first, n, place)
    top = tl.max(best)
    chosen = tl.min(tl.where(best == top, place, 2147483647))
    best, place = tl.where(place == chosen, second, best), tl.where(place == chosen, second_place, place)
    runner = tl.max(best)
    return top, chosen, runner, tl.min(tl.where(best == runner, place, 2147483647))


@triton.jit  # type: ignore[untyped-decorator]
def _sums(GIVEN, columns, vocabulary, heat, best, BN: tl.constexpr, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Σ exp(logit − best), and the same of scaled logits."""
    total, scaled = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    for at in tl.range(0, vocabulary, BN, num_stages=STAGES):
        raw = _some(GIVEN, at, columns, vocabulary, BN)
        total += tl.exp(raw - best)
        scaled += tl.exp(tl.div_rn(raw, heat) - tl.div_rn(best, heat))
    return tl.sum(total), tl.sum(scaled)


@triton.jit  # type: ignore[untyped-decorator]
def _cut(  # type: ignore[no-untyped-def]
    GIVEN, columns, vocabulary, heat, best, wanted, levels, BITS: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr
):
    """The highest image such that ids of it or higher ones have the mass `wanted`, and the mass of the higher ones.

    It is found two bits at a time: in `levels` passes, or, with none, it is 0.
    """
    cut, step, above = tl.cast(0, tl.uint32), tl.cast(1 << (BITS - 2), tl.uint32), tl.cast(0.0, tl.float32)
    for _ in range(levels):
        one, two, three = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
        for at in tl.range(0, vocabulary, BN, num_stages=STAGES):
            raw = _some(GIVEN, at, columns, vocabulary, BN)
            scaled = tl.div_rn(raw, heat)
            image, mass = _image(raw, scaled, BITS), tl.exp(scaled - tl.div_rn(best, heat))
            one += tl.where(image >= cut + step, mass, 0.0)
            two += tl.where(image >= cut + 2 * step, mass, 0.0)
            three += tl.where(image >= cut + 3 * step, mass, 0.0)
        mass1, mass2, mass3 = tl.sum(one), tl.sum(two), tl.sum(three)
        above = tl.where(mass1 < wanted, mass1, tl.where(mass2 < wanted, mass2, tl.where(mass3 < wanted, mass3, above)))
        steps = (mass1 >= wanted).to(tl.uint32) + (mass2 >= wanted).to(tl.uint32) + (mass3 >= wanted).to(tl.uint32)
        cut += steps * step
        step = step >> 2
    return cut, above


@triton.jit  # type: ignore[untyped-decorator]
def _drawn(  # type: ignore[no-untyped-def]
    GIVEN, columns, vocabulary, heat, best, wanted, cut, above, nucleus, state,
    BITS: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The id whose scaled logit and noise together are the highest. With `nucleus`, of ids below the cut none, and of
    those at it the first ones, until they and the higher ones have the mass `wanted`."""
    top, place = tl.full((BN,), float("-inf"), tl.float32), tl.full((BN,), 2147483647, tl.int32)
    before = 0
    for at in tl.range(0, vocabulary, BN, num_stages=STAGES):
        raw, n = _some(GIVEN, at, columns, vocabulary, BN), at + tl.arange(0, BN)
        scaled = tl.div_rn(raw, heat)
        value = scaled + _gumbel(_counted(state, n.to(tl.uint32), 0))
        if nucleus:
            image = _image(raw, scaled, BITS)
            equal = (image == cut).to(tl.int32)
            rank = before + tl.cumsum(equal) - equal
            mass = above + rank.to(tl.float32) * tl.exp(scaled - tl.div_rn(best, heat))
            value = tl.where((image > cut) | ((equal > 0) & (mass < wanted)), value, float("-inf"))
            before += tl.sum(equal)
        higher = value > top
        top, place = tl.where(higher, value, top), tl.where(higher, n, place)
    return tl.min(tl.where(top == tl.max(top), place, 2147483647))


@triton.jit  # type: ignore[untyped-decorator]
def _sample(  # type: ignore[no-untyped-def]
    LOGITS, TEMPERATURE, TOP_P, SEED, POSITION, ID, PROB, columns, vocabulary, block,
    PURPOSE: tl.constexpr, BITS: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    token, count = tl.program_id(0), tl.num_programs(0)
    GIVEN = LOGITS + token.to(tl.int64) * columns
    temperature, top_p = tl.load(TEMPERATURE + token // block), tl.load(TOP_P + token // block)
    seed, position = tl.load(SEED + token // block), tl.load(POSITION + token).to(tl.int64)
    best, chosen, runner, other = _best_two(GIVEN, columns, vocabulary, BN, STAGES)
    best_id = tl.minimum(chosen, vocabulary - 1)  # NaN equals nothing
    heat = tl.maximum(temperature, 1e-6)
    total, scaled_total = _sums(GIVEN, columns, vocabulary, heat, best, BN, STAGES)
    choice = best_id
    if temperature > 0:
        wanted, nucleus = top_p * scaled_total, top_p < 1
        levels = tl.where(nucleus, BITS // 2, 0)
        cut, above = _cut(GIVEN, columns, vocabulary, heat, best, wanted, levels, BITS, BN, STAGES)
        state = _counted(tl.cast(PURPOSE, tl.uint32), seed.to(tl.uint32), (seed >> 32).to(tl.uint32))
        state = _counted(state, position.to(tl.uint32), (position >> 32).to(tl.uint32))
        found = _drawn(GIVEN, columns, vocabulary, heat, best, wanted, cut, above, nucleus, state, BITS, BN, STAGES)
        choice = tl.minimum(found, vocabulary - 1)
    swapped = choice != best_id
    raw = tl.load(GIVEN + choice).to(tl.float32)
    tl.store(ID + token, choice.to(tl.int64))
    tl.store(ID + count + token, tl.minimum(tl.where(swapped, best_id, other), vocabulary - 1).to(tl.int64))
    tl.store(PROB + token, tl.exp(raw - best) / total)
    tl.store(PROB + count + token, tl.exp(tl.where(swapped, best, runner) - best) / total)
