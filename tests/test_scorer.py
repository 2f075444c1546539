"""The scorer: a function of one block alone."""

from __future__ import annotations

import pytest
import torch

from freda.model.attention import clean_tokens, make_mask
from freda.model.scorer import Scorer
from tests.helpers import init_weights, tiny_model


@pytest.fixture
def scorer() -> Scorer:
    model = Scorer(tiny_model().config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return model


def blocks(count: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden, embedding = (torch.randn(count, 4, 32, generator=generator) for _ in range(2))
    return hidden, embedding, torch.ones(count, 4, dtype=torch.bool)


def test_a_new_scorer_prefers_nothing() -> None:
    fresh = Scorer(tiny_model().config)
    init_weights(fresh, 0, tiny_model())
    assert torch.equal(fresh(*blocks()), torch.zeros(3))


def test_a_block_is_scored_by_itself(scorer: Scorer) -> None:
    hidden, embedding, counted = blocks()
    scores = scorer(hidden, embedding, counted)
    alone = torch.cat([scorer(hidden[i : i + 1], embedding[i : i + 1], counted[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(scores, alone)
    assert scores.unique().numel() == 3


def test_both_channels_and_the_order_of_tokens_count(scorer: Scorer) -> None:
    hidden, embedding, counted = blocks()
    scores = scorer(hidden, embedding, counted)
    for changed in ((hidden + 0.5, embedding), (hidden, embedding + 0.5), (hidden.flip(1), embedding.flip(1))):
        assert not torch.allclose(scorer(*changed, counted), scores, atol=1e-4)


def test_positions_that_do_not_count_change_nothing(scorer: Scorer) -> None:
    hidden, embedding, counted = blocks()
    counted = counted.clone()
    counted[:, 3] = False
    noisy = hidden.clone()
    noisy[:, 3] += 5
    torch.testing.assert_close(scorer(noisy, embedding, counted), scorer(hidden, embedding, counted))


def test_a_scorers_own_layer_starts_as_the_backbones() -> None:
    model = tiny_model(qk_norm=False, qkv_bias=True)
    scorer = Scorer(model.config, last_layer=True)
    init_weights(scorer, 0, model)
    assert scorer.layer.self_attn.q_norm.weight.shape == (8,), "the scorer's layer is of Qwen3's kind"
    position = torch.arange(8)[None]
    tokens = clean_tokens(torch.zeros_like(position), position, 4)
    x, mask = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0)), make_mask(tokens, tokens, "sdpa")
    out = model(x, position, mask)
    torch.testing.assert_close(scorer.soft_channel(model, out, position, mask, None), out.hidden)
