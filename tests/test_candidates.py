"""Candidates: the marginal-cost beam against brute force over all subsets, and draws from the proposal."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freda.methods.candidates import choose, contenders, marginal_cost_beam, sample
from freda.methods.draft import Candidates, Prediction, Search, start


def top_two(seed: int, blocks: int, size: int, *, tied: bool = False) -> Prediction:
    """Random top-two tables; `tied` makes all positions equal, so that only the order of subsets decides."""
    generator = torch.Generator().manual_seed(seed)
    second = torch.rand(blocks, size, generator=generator) * 0.45
    first = second + torch.rand(blocks, size, generator=generator) * (1 - 2 * second)
    if tied:
        first, second = torch.full_like(first, 0.5), torch.full_like(first, 0.25)
    ids = torch.arange(size).expand(blocks, -1)
    return Prediction(ids, first, ids + 100, second)


def brute_force(top: Prediction, block: int, free: list[bool], width: int, swaps: int) -> list[list[int]]:
    """Every set of at most `swaps` free positions, sorted by what it costs, ties in the order of enumeration."""
    size = len(free)
    places = [place for place in range(size) if free[place]]
    found = []
    for count in range(swaps + 1):
        for chosen in itertools.combinations(places, count):
            cost = sum(math.log(top.prob[block, j]) - math.log(top.second_prob[block, j]) for j in chosen)
            found.append((cost, chosen))
    best = sorted(found, key=lambda entry: entry[0])[:width]  # Python's sort is stable too
    return [[j + 100 if j in chosen else j for j in range(size)] for _, chosen in best]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(0, 6),
    st.booleans(),
    st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_beam_equals_brute_force(seed: int, size: int, width: int, swaps: int, tied: bool, free: list[bool]) -> None:
    top = top_two(seed, 3, size, tied=tied)
    mask = torch.tensor([free[:size], [True] * size, [False] * size])
    swaps = min(swaps, size)
    found = marginal_cost_beam(top, mask, width=width, swaps=torch.full((3,), swaps), most_swaps=swaps)
    for block in range(3):
        expected = brute_force(top, block, mask[block].tolist(), width, swaps)
        assert found.ids[block][found.valid[block]].tolist() == expected


def test_scores_are_the_log_probability_of_the_free_positions() -> None:
    top = top_two(1, 1, 4)
    free = torch.tensor([[False, True, True, True]])
    found = marginal_cost_beam(top, free, width=4, swaps=torch.tensor([2]), most_swaps=2)
    for row, alpha, score in zip(found.ids[0], found.alpha[0], found.log_prob[0], strict=True):
        chosen = torch.where(row >= 100, top.second_prob[0], top.prob[0])
        torch.testing.assert_close(alpha, chosen)
        torch.testing.assert_close(score, chosen[1:].log().sum())


def test_every_block_has_its_own_number_of_swaps() -> None:
    top = top_two(2, 3, 4)
    found = marginal_cost_beam(top, torch.ones(3, 4).bool(), width=16, swaps=torch.tensor([0, 1, 4]), most_swaps=4)
    assert found.valid.sum(-1).tolist() == [1, 5, 16]


def test_a_second_token_of_probability_zero_is_no_candidate() -> None:
    top = top_two(3, 1, 2)._replace(prob=torch.tensor([[1.0, 0.6]]), second_prob=torch.tensor([[0.0, 0.2]]))
    found = marginal_cost_beam(top, torch.ones(1, 2).bool(), width=4, swaps=torch.tensor([2]), most_swaps=2)
    assert found.ids[found.valid].tolist() == [[0, 1], [0, 101]]


@functools.cache
def switches(size: int, most: int) -> torch.Tensor:
    """Every set of at most `most` of `size` positions, as a mask (S, B)."""
    sets = itertools.chain.from_iterable(itertools.combinations(range(size), count) for count in range(most + 1))
    pairs = [(row, place) for row, chosen in enumerate(sets) for place in chosen]
    mask = torch.zeros(sum(math.comb(size, count) for count in range(most + 1)), size, dtype=torch.bool)
    mask[tuple(torch.tensor(pairs).T)] = True
    return mask


@pytest.mark.parametrize(("size", "swaps"), [(16, 16), (16, 3), (32, 32), (32, 3), (32, 1)])
@pytest.mark.parametrize("width", [1, 7, 32])
def test_beam_of_a_large_block_has_the_cheapest_sets(size: int, swaps: int, width: int) -> None:
    """A set of k positions has 2^k subsets, none dearer than itself: the 32 cheapest sets have at most 5 positions."""
    top = top_two(size + width, 3, size)
    free = torch.rand(3, size, generator=torch.Generator().manual_seed(0)) < torch.tensor([[1.1], [0.7], [0.1]])
    found = marginal_cost_beam(top, free, width=width, swaps=torch.full((3,), swaps), most_swaps=swaps)
    cost = top.prob.double().log() - top.second_prob.double().log()
    every = switches(size, min(swaps, 5))
    for block in range(3):
        possible = every[~(every & ~free[block]).any(-1)]
        cheapest = (possible * cost[block]).sum(-1).sort().values[:width]
        chosen = found.ids[block][found.valid[block]] >= 100
        assert len(chosen.unique(dim=0)) == len(chosen) == len(cheapest) == min(width, len(possible))
        assert not (chosen & ~free[block]).any() and int(chosen.sum(-1).max()) <= swaps
        torch.testing.assert_close((chosen * cost[block]).sum(-1), cheapest, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("size", "width", "most"), [(4, 16, 4), (5, 9, 5), (7, 20, 3), (8, 32, 8), (6, 1, 6)])
def test_contenders_are_the_sets_with_fewer_than_width_below_them(size: int, width: int, most: int) -> None:
    """B is never cheaper than A whatever the costs, if A has no more positions, each at or below one of B's."""
    sets = list(itertools.chain.from_iterable(itertools.combinations(range(size), count) for count in range(most + 1)))

    def never_dearer(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        pairs = zip(reversed(one), reversed(other), strict=False)
        return len(one) <= len(other) and all(low <= high for low, high in pairs)

    kept = [chosen for chosen in sets if sum(never_dearer(one, chosen) for one in sets) <= width]
    assert list(contenders(size, width, most)) == kept


def test_the_order_of_contenders_is_fixed() -> None:
    assert contenders(3, 99, 2) == ((), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2))
    assert len(contenders(4, 99, 9)) == 16


def test_a_wide_beam_of_a_large_block_is_found_quickly() -> None:
    """The widest beam over 64 positions has 2^64 sets to choose from, and looks at a few thousand."""
    assert 256 <= len(contenders(64, 256, 64)) < 5000


@pytest.mark.parametrize("width", [1, 3])
def test_width_of_one_is_the_draft_itself(width: int) -> None:
    top = top_two(4, 5, 4)
    found = marginal_cost_beam(top, torch.ones(5, 4).bool(), width=width, swaps=torch.full((5,), 2), most_swaps=2)
    assert found.ids.shape == (5, width, 4)
    assert torch.equal(found.ids[:, 0], top.ids)


def test_a_token_sampled_against_the_odds_is_not_switched_back() -> None:
    """Its runner-up is the likelier token: a change to it would win by ℓ alone, and undo the temperature."""
    top = Prediction(torch.arange(4)[None], torch.tensor([[0.1, 0.6, 0.0, 0.5]]), torch.arange(4)[None] + 10,
                     torch.tensor([[0.7, 0.3, 0.9, 0.4]]))  # fmt: skip
    found = marginal_cost_beam(top, torch.ones(1, 4).bool(), width=8, swaps=torch.tensor([4]), most_swaps=4)
    real = found.ids[found.valid].tolist()
    assert real == [[0, 1, 2, 3], [0, 1, 2, 13], [0, 11, 2, 3], [0, 11, 2, 13]]
    assert found.valid.tolist() == [[True] * 4 + [False] * 4]


# -- draws from the proposal -----------------------------------------------------------------------------------------


def drawn(count: int, width: int, has_prefix: bool = False, passes: int = 1) -> tuple[Candidates, torch.Tensor]:
    """Candidates of `count` equal blocks of two tokens, out of nine texts, and the distribution they come from."""
    share = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3]]).expand(count, -1, -1)
    ids = torch.zeros(count, 2, dtype=torch.int64)
    prefix = torch.tensor([has_prefix, False]).expand(count, -1)
    draft = start(ids + 2, prefix, 7)._replace(passes=torch.full((count,), passes))
    full = torch.full((count,), width)
    no = torch.zeros(count, dtype=torch.bool)
    search = Search(full, full, torch.zeros(count), ~no, ~no, torch.arange(count))
    position = torch.tensor([[4, 5]]).expand(count, -1)
    return sample(draft, share, search, position, width=width), share


def test_drawn_candidates_are_distinct_and_know_how_often_they_were_drawn() -> None:
    found, share = drawn(400, 5)
    for ids, alpha, weight, valid in zip(*(part.tolist() for part in found[:4]), strict=True):
        real = [tuple(text) for text, ok in zip(ids, valid, strict=True) if ok]
        assert len(set(real)) == len(real) and valid == sorted(valid, reverse=True)
        assert round(sum(math.exp(w) for w, ok in zip(weight, valid, strict=True) if ok)) == 5
        for text, shown in zip(real, alpha, strict=False):
            assert shown == pytest.approx([share[0, 0, text[0]].item(), share[0, 1, text[1]].item()])


def test_choosing_among_distinct_draws_is_choosing_among_all() -> None:
    """With τ = 0 the Gumbel choice among N draws is one draw from the proposal, however equal ones were merged."""
    count = 20_000
    found, share = drawn(count, 4)
    no = torch.zeros(count, dtype=torch.bool)
    search = Search(no.long(), no.long(), torch.zeros(count), ~no, ~no, torch.arange(count))
    winner = choose(found, torch.zeros(count, 4), search, torch.zeros(count, 2, dtype=torch.int64))
    text = found.ids[torch.arange(count), winner]
    frequency = (3 * text[:, 0] + text[:, 1]).bincount(minlength=9) / count
    assert (frequency.view(3, 3) - share[0, 0][:, None] * share[0, 1]).abs().max() < 0.012


def test_given_tokens_and_blank_drafts_are_not_drawn() -> None:
    found, _ = drawn(50, 3, has_prefix=True)
    assert (found.ids[..., 0] == 2).all() and (found.alpha[..., 0] == 1).all()
    assert found.ids[..., 1].unique().tolist() == [0, 1, 2]
    blank, _ = drawn(50, 3, passes=0)
    assert (blank.ids[:, 0] == 7).all() and (blank.alpha == 0).all()
    assert blank.valid.sum(-1).tolist() == [1] * 50
