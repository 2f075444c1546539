"""The pieces of drafting: commitment, closing, soft embeddings, choice of tokens."""

from __future__ import annotations

import pytest
import torch

from freda.methods import draft as draft_module
from freda.methods.autoregressive import Autoregressive
from freda.methods.block_diffusion import BlockDiffusion
from freda.methods.draft import Draft, Prediction, Rules, Sampling, leftmost_run, predict, soft_embedding, start
from freda.methods.self_refine import SelfRefine
from freda.model.transformer import Transformer
from tests.helpers import BLANK, EOS

REFINE, DIFFUSION = SelfRefine(block_size=4), BlockDiffusion(block_size=4)


def rules(passes: int = 4, threshold: float = 0.9, count: int = 1) -> Rules:
    return Rules(torch.full((count,), passes), torch.full((count,), threshold), torch.tensor([EOS]))


def prediction(ids: list[int], prob: list[float]) -> Prediction:
    tokens, shares = torch.tensor([ids]), torch.tensor([prob])
    return Prediction(tokens, shares, tokens, torch.zeros_like(shares))


def blank(given: list[int] | None = None) -> Draft:
    tokens = (given or []) + [0] * (4 - len(given or []))
    mask = torch.tensor([[place < len(given or []) for place in range(4)]])
    return start(torch.tensor([tokens]), mask, BLANK)


def test_leftmost_run_ends_at_the_first_doubt() -> None:
    sure = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    assert leftmost_run(sure).int().tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]


def test_self_refine_commits_the_leftmost_run_and_revises_the_rest() -> None:
    draft = REFINE.update(blank(), prediction([1, 2, 3, 4], [0.95, 0.5, 0.99, 0.99]), rules())
    assert draft.committed.tolist() == [[True, False, False, False]] and not draft.closed
    draft = REFINE.update(draft, prediction([9, 8, 3, 4], [0.4, 0.95, 0.99, 0.99]), rules())
    assert draft.ids.tolist() == [[9, 8, 3, 4]], "a committed position may still be revised"
    assert not draft.committed.any(), "commitment is recomputed in each pass"
    draft = REFINE.update(draft, prediction([9, 8, 3, 4], [0.9, 0.95, 0.99, 0.99]), rules())
    assert draft.closed.item() and draft.passes.item() == 3


def test_self_refine_closes_when_passes_are_used_up() -> None:
    draft = blank()
    for _ in range(3):
        assert not draft.closed.item()
        draft = REFINE.update(draft, prediction([1, 2, 3, 4], [0.1] * 4), rules(passes=3))
    assert draft.closed.item() and draft.ids.tolist() == [[1, 2, 3, 4]]


def test_a_stop_token_closes_only_inside_the_committed_run() -> None:
    sure = REFINE.update(blank(), prediction([1, EOS, 3, 4], [0.95, 0.95, 0.2, 0.2]), rules())
    unsure = REFINE.update(blank(), prediction([1, EOS, 3, 4], [0.5, 0.95, 0.2, 0.2]), rules())
    assert sure.closed.item() and not unsure.closed.item()


def test_given_tokens_stay_and_do_not_stop() -> None:
    draft = REFINE.update(blank([7, EOS]), prediction([1, 2, 3, 4], [0.1, 0.1, 0.95, 0.2]), rules())
    assert draft.ids.tolist() == [[7, EOS, 3, 4]]
    assert draft.prob[0, :2].tolist() == [1.0, 1.0]
    assert draft.committed.tolist() == [[True, True, True, False]] and not draft.closed.item()


def test_a_closed_block_is_left_alone() -> None:
    closed = REFINE.update(blank(), prediction([1, 2, 3, 4], [0.99] * 4), rules())
    after = REFINE.update(closed, prediction([5, 6, 7, 8], [0.99] * 4), rules())
    assert after.ids.tolist() == [[1, 2, 3, 4]] and after.passes.item() == 1


def test_block_diffusion_static_schedule_reveals_the_surest_first() -> None:
    never = rules(passes=2, threshold=2.0)
    draft = DIFFUSION.update(blank(), prediction([1, 2, 3, 4], [0.2, 0.9, 0.1, 0.8]), never)
    assert draft.ids.tolist() == [[BLANK, 2, BLANK, 4]] and not draft.closed
    draft = DIFFUSION.update(draft, prediction([5, 6, 7, 8], [0.2, 0.99, 0.1, 0.99]), never)
    assert draft.ids.tolist() == [[5, 2, 7, 4]] and draft.closed.item(), "revealed tokens never change"


def test_block_diffusion_threshold_reveals_all_that_is_sure_and_at_least_one() -> None:
    many = DIFFUSION.update(blank(), prediction([1, 2, 3, 4], [0.95, 0.95, 0.1, 0.95]), rules())
    assert many.committed.tolist() == [[True, True, False, True]]
    one = DIFFUSION.update(blank(), prediction([1, 2, 3, 4], [0.2, 0.3, 0.1, 0.25]), rules())
    assert one.committed.tolist() == [[False, True, False, False]]


def test_block_diffusion_static_schedule_with_a_given_head() -> None:
    draft = blank([7])
    counts = []
    for _ in range(2):
        draft = DIFFUSION.update(draft, prediction([1, 2, 3, 4], [0.9, 0.2, 0.1, 0.3]), rules(2, 2.0))
        counts.append(int(draft.committed.sum()))
    assert counts == [3, 4] and draft.ids[0, 0] == 7  # three blanks in two passes: two, then one


def test_autoregressive_closes_after_one_pass() -> None:
    draft = start(torch.tensor([[0]]), torch.tensor([[False]]), BLANK)
    draft = Autoregressive().update(draft, prediction([5], [0.01]), rules())
    assert draft.closed.item() and draft.ids.item() == 5


def test_soft_embedding_is_the_equation_and_exact_at_its_ends(model: Transformer) -> None:
    table = model.embed_tokens.weight
    ids, alpha = torch.tensor([[3, 4, 5]]), torch.tensor([[0.0, 0.3, 1.0]])
    out = soft_embedding(model, ids, alpha)[0]
    assert torch.equal(out[0], table[BLANK]) and torch.equal(out[2], table[5])
    torch.testing.assert_close(out[1], 0.3 * table[4] + 0.7 * table[BLANK])


def test_rescaled_embedding_has_the_expected_norm(model: Transformer) -> None:
    table = model.embed_tokens.weight
    out = soft_embedding(model, torch.tensor([[4]]), torch.tensor([[0.3]]), rescale=True)[0, 0]
    expected = 0.3 * table[4].norm() + 0.7 * table[BLANK].norm()
    torch.testing.assert_close(out.norm(), expected)


def test_greedy_choice_and_its_probability() -> None:
    logits = torch.randn(2, 4, 11)
    chosen = predict(logits)
    assert torch.equal(chosen.ids, logits.argmax(-1))
    torch.testing.assert_close(chosen.prob, logits.softmax(-1).amax(-1))


def test_the_runner_up_is_the_best_other_token() -> None:
    logits = torch.randn(2, 4, 11)
    chosen = predict(logits, runner_up=True)
    best = logits.softmax(-1).topk(2, dim=-1)
    assert torch.equal(torch.stack([chosen.ids, chosen.second_ids], dim=-1), best.indices)
    torch.testing.assert_close(torch.stack([chosen.prob, chosen.second_prob], dim=-1), best.values)
    assert not predict(logits).second_prob.any(), "none unless it is asked for"


def sampling(temperature: float, top_p: float = 1.0, seed: int = 0, count: int = 1) -> Sampling:
    return Sampling(torch.full((count,), temperature), torch.full((count,), top_p), torch.full((count,), seed))


def test_sampling_has_the_right_frequencies_and_reports_the_raw_probability() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(1, 20_000, 4)
    chosen = predict(logits, sampling(0.7), torch.arange(20_000)[None])
    share = chosen.ids[0].bincount(minlength=4) / 20_000
    assert (share - (logits[0, 0] / 0.7).softmax(0)).abs().max() < 0.015
    torch.testing.assert_close(chosen.prob[0], logits[0, 0].softmax(0)[chosen.ids[0]])


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    chosen = predict(probs.log().expand(1, 5_000, 4), sampling(1.0, top_p=0.6), torch.arange(5_000)[None])
    assert set(chosen.ids.flatten().tolist()) == {0, 1}


def test_top_p_of_one_keeps_all_however_large_the_vocabulary() -> None:
    """A running sum in fp32 reaches 1 long before 150,000 small probabilities are summed."""
    logits = torch.randn(1, 2, 150_000, generator=torch.Generator().manual_seed(0)) * 3
    kept = draft_module._sampled_logits(logits, sampling(1.0), torch.arange(2)[None]).isfinite()
    assert kept.all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_noise_belongs_to_seed_and_position(temperature: float) -> None:
    logits = torch.randn(1, 6, 11)
    position = torch.arange(6)[None]
    first = predict(logits, sampling(temperature), position)
    again = predict(logits.expand(2, -1, -1), sampling(temperature, count=2), position.expand(2, -1))
    assert torch.equal(first.ids[0], again.ids[1])
    if temperature:
        assert not torch.equal(first.ids, predict(logits, sampling(1.0, seed=1), position).ids)
