"""The mask rule against a brute-force definition, and what it must hide."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freda.model import attention
from freda.model.attention import CLEAN, DRAFT, Tokens, make_mask
from tests.helpers import packed_batch


def brute_force(q: tuple[int, int, int, int], k: tuple[int, int, int, int]) -> bool:
    """The rule in words, one pair at a time: (stream, document, block, candidate)."""
    if q[1] != k[1]:
        return False  # another document
    if q[0] == CLEAN and k[0] == DRAFT:
        return False  # clean text never sees a draft
    if q[0] == CLEAN and k[0] == CLEAN:
        return k[2] <= q[2]  # block-causal
    if q[0] == DRAFT and k[0] == CLEAN:
        return k[2] < q[2]  # committed prefix only, never the clean version of its own block
    return q[2:] == k[2:]  # own block of own candidate, both directions


token = st.tuples(st.integers(0, 1), st.integers(-1, 2), st.integers(0, 4), st.integers(0, 2))


@given(st.lists(token, min_size=1, max_size=12), st.lists(token, min_size=1, max_size=12))
def test_dense_mask_is_the_rule(queries: list[tuple[int, ...]], keys: list[tuple[int, ...]]) -> None:
    query = Tokens(*torch.tensor(queries, dtype=torch.int32).T[:, None])
    key = Tokens(*torch.tensor(keys, dtype=torch.int32).T[:, None])
    expected = [[brute_force(q, k) for k in keys] for q in queries]  # type: ignore[arg-type]
    assert attention.dense(query, key)[0].tolist() == expected


def dual_stream() -> Tokens:
    batch = packed_batch([[8, 12, 4], [16, 8], [12]])
    clean = attention.clean_tokens(batch.document, batch.position, 4)
    return attention.concat(attention.draft_tokens(batch.document, batch.position // 4 * 4), clean)


def test_every_row_sees_itself() -> None:
    """No query, padding included, is left without a key: softmax over nothing would be NaN."""
    tokens = dual_stream()
    assert torch.diagonal(attention.dense(tokens, tokens), dim1=1, dim2=2).all()


def test_flex_mask_equals_dense_mask() -> None:
    tokens = dual_stream()
    flex = make_mask(tokens, tokens, "flex").seen
    rows, length = tokens.document.shape
    row, q, k = torch.meshgrid(torch.arange(rows), torch.arange(length), torch.arange(length), indexing="ij")
    assert not isinstance(flex, torch.Tensor)
    assert torch.equal(flex.mask_mod(row, torch.tensor(0), q, k), attention.dense(tokens, tokens))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_one_document_clean_mask_is_block_causal(size: int) -> None:
    position = torch.arange(8)[None]
    tokens = attention.clean_tokens(torch.zeros_like(position), position, size)
    block = torch.arange(8) // size
    assert torch.equal(attention.dense(tokens, tokens)[0], block[:, None] >= block[None, :])


def test_candidates_do_not_see_each_other() -> None:
    position = torch.arange(4).repeat(3)[None]
    candidate = torch.arange(3).repeat_interleave(4)[None]
    tokens = attention.draft_tokens(torch.zeros_like(position), position // 4 * 4, candidate)
    assert torch.equal(attention.dense(tokens, tokens)[0], torch.block_diag(*[torch.ones(4, 4)] * 3).bool())
    assert (tokens.stream == DRAFT).all()
