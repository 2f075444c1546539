"""The packing: nothing lost, nothing twice, documents whole, rows full."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freda.data.loader import Plan, plan
from freda.errors import FredaError


def fullness(packed: Plan, seq_len: int) -> float:
    return float(packed.piece_length.sum()) / (packed.rows * seq_len)


def check(lengths: list[int], seq_len: int, align: int) -> Plan:
    """The promises of `plan`, checked token by token."""
    packed = plan(lengths, seq_len, align)
    times_seen = [np.zeros(length, int) for length in lengths]
    for row in range(packed.rows):
        pieces = packed.pieces(row)
        assert pieces
        assert sum(length for _, _, length in pieces) <= seq_len
        for document, start, length in pieces:
            assert length > 0
            assert start % align == 0
            assert start + length <= lengths[document]
            if lengths[document] <= seq_len:
                assert (start, length) == (0, lengths[document])
            times_seen[document][start : start + length] += 1
    assert all((seen == 1).all() for seen in times_seen)
    return packed


@given(data=st.data(), align=st.sampled_from([1, 4, 8]), units=st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_every_token_once_and_documents_whole(data: st.DataObject, align: int, units: int) -> None:
    blocks = data.draw(st.lists(st.integers(1, 30), max_size=40))
    check([count * align for count in blocks], units * align, align)


@given(blocks=st.lists(st.integers(1, 8), min_size=1, max_size=7))
@settings(max_examples=60, deadline=None)
def test_never_far_from_the_optimum(blocks: list[int]) -> None:
    assert plan(blocks, 8, 1).rows <= fewest_rows(tuple(sorted(blocks, reverse=True)), 8) + 1


def fewest_rows(blocks: tuple[int, ...], row: int, spaces: tuple[int, ...] = ()) -> int:
    """Brute force: each document in every row it fits, or in a new one."""
    if not blocks:
        return len(spaces)
    first, rest = blocks[0], blocks[1:]
    options = [fewest_rows(rest, row, (*spaces, row - first))]
    for index in {spaces.index(space) for space in set(spaces) if space >= first}:
        options.append(fewest_rows(rest, row, (*spaces[:index], spaces[index] - first, *spaces[index + 1 :])))
    return min(options)


def test_a_pattern_that_best_fit_decreasing_misses() -> None:
    # Longest first would pair the 48s and leave 32 tokens of each row empty.
    packed = check([48, 48, 40, 40, 40, 40], 128, 8)
    assert packed.rows == 2
    assert fullness(packed, 128) == 1.0


def test_long_documents_are_cut_into_full_rows_and_a_rest() -> None:
    packed = check([40, 8, 16], 16, 8)
    pieces = sorted(piece for row in range(packed.rows) for piece in packed.pieces(row))
    assert pieces == [(0, 0, 16), (0, 16, 16), (0, 32, 8), (1, 0, 8), (2, 0, 16)]
    assert packed.rows == 4  # the rest of the first document shares a row with the second


def test_realistic_lengths_fill_the_rows() -> None:
    rng = np.random.default_rng(0)
    lengths = (np.exp(rng.normal(6.0, 1.1, 20_000)) // 8 + 1).astype(int) * 8  # web text: median 400, a long tail
    packed = plan(lengths, 2048, 8)
    assert packed.piece_length.sum() == lengths.sum()
    assert fullness(packed, 2048) > 0.995


def test_rows_of_4096_are_at_least_99_percent_full() -> None:
    """Lengths as of a web corpus: log-normal with mean 1,000, one document in thirty longer than a row."""
    lengths = (np.exp(np.random.default_rng(0).normal(6.3, 1.1, 3_000)) // 8 + 1).astype(int) * 8
    assert 950 < lengths.mean() < 1050 and 0.02 < (lengths > 4096).mean() < 0.05
    assert fullness(check(lengths.tolist(), 4096, 8), 4096) >= 0.99


def test_a_million_documents_take_seconds_not_minutes() -> None:
    lengths = (np.random.default_rng(1).gamma(2.0, 20.0, 1_000_000) // 8 + 1).astype(int) * 8
    packed = plan(lengths, 4096, 8)
    assert packed.piece_length.sum() == lengths.sum()
    assert fullness(packed, 4096) > 0.999


def test_same_plan_each_time() -> None:
    lengths = np.random.default_rng(2).integers(1, 40, 500) * 8
    first, second = plan(lengths, 128, 8), plan(lengths.tolist(), 128, 8)
    assert all(np.array_equal(one, two) for one, two in zip(first, second, strict=True))


def test_no_documents() -> None:
    assert plan([], 16, 8).rows == 0


@pytest.mark.parametrize(("seq_len", "advice"), [(100, "use 96 or 104"), (5, "use 8$"), (0, "use 8$")])
def test_row_length_must_be_a_multiple_of_align(seq_len: int, advice: str) -> None:
    with pytest.raises(FredaError, match=f"seq_len {seq_len} is not a multiple .* align 8; {advice}"):
        plan([8], seq_len, 8)


@pytest.mark.parametrize("lengths", [[8, 0], [12], [-8]])
def test_lengths_must_be_multiples_of_align(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="positive multiples of 8"):
        plan(lengths, 16, 8)
