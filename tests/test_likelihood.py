"""Likelihood: it sums to one, equals its definition computed naively, and does not depend on the company."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from freda.decode.generate import generate
from freda.decode.request import Request
from freda.errors import FredaError
from freda.eval import likelihood
from freda.eval.likelihood import Scored, choice_log_probs, log_likelihood
from freda.folders.model_folder import LoadedModel
from freda.model.attention import Mask
from freda.model.parts import Parts
from freda.model.scorer import Scorer
from freda.model.transformer import Transformer
from tests.helpers import BLANK, method, tiny_model

BLOCKS = ["self-refine", "block-diffusion", "best-of-n"]
ALL = [*BLOCKS, "autoregressive"]
Pairs = list[tuple[list[int], list[int]]]


def load(name: str, *, size: int = 4, blank: int = BLANK, **settings: Any) -> LoadedModel:
    model = tiny_model()
    model.blank_id = blank  # a smaller vocabulary: logits are cut to the ids below it
    scorer = Scorer(model.config, last_layer=False) if name == "best-of-n" else None
    return LoadedModel(Parts(model, scorer), None, method(name, block_size=size, **settings), "test")  # type: ignore[arg-type]


def words(count: int, seed: int = 0, top: int = BLANK) -> list[int]:
    return torch.randint(0, top, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def some_pairs(least: int = 0) -> Pairs:
    """Contexts of every length modulo a block, some of several blocks, and continuations over block borders."""
    shapes = [*itertools.product(range(least, least + 5), (1, 2, 3, 4, 7)), (37, 9), (40, 1), (53, 5), (90, 2)]
    return [(words(n, 10 * n + m), words(m, 7000 + 10 * n + m)) for n, m in shapes]


def hidden_by_hand(model: Transformer, ids: list[int], size: int) -> Tensor:
    """A plain forward over one row in which a token sees its own and earlier blocks: no packing, no `masks`."""
    block = torch.arange(len(ids)) // size
    mask = (block[:, None] >= block[None, :])[None, None]
    x, position = model.embed_tokens(torch.tensor([ids])), torch.arange(len(ids))[None]
    return model(x, position, Mask(mask, drafts=False)).hidden[0]


@torch.no_grad()
def by_hand(loaded: LoadedModel, context: list[int], continuation: list[int], *, fast: bool = False) -> Tensor:
    """The conditionals (continuation, V) from the definition: one forward for each position."""
    model, size, text = loaded.backbone, loaded.method.block_size, context + continuation
    rows = []
    for place in range(len(context), len(text)):
        if loaded.method.name == "autoregressive":
            rows.append(model.logits(hidden_by_hand(model, text[:place], 1)[-1]))
            continue
        shown = max(len(context), place // size * size) if fast else place
        ids = text[:shown] + [model.blank_id] * (place // size * size + size - shown)
        rows.append(model.logits(hidden_by_hand(model, ids, size)[place]))
    return torch.stack(rows).log_softmax(-1) if rows else torch.empty(0, model.blank_id)


def close(got: list[Scored], expected: list[Scored], tolerance: float = 2e-5) -> bool:
    return all(
        a.greedy == b.greedy and a.tokens == pytest.approx(b.tokens, abs=tolerance, rel=tolerance)
        for a, b in zip(got, expected, strict=True)
    )


# -- against the definition ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("size", [1, 3, 4, 8])
@pytest.mark.parametrize("name", ALL)
def test_equals_one_plain_forward_per_position(name: str, size: int, fast: bool) -> None:
    loaded = load(name, size=size)
    pairs = some_pairs(1 if name == "autoregressive" else 0)
    for (context, continuation), scored in zip(pairs, log_likelihood(loaded, pairs, fast=fast), strict=True):
        log_p = by_hand(loaded, context, continuation, fast=fast)
        expected = log_p[torch.arange(len(continuation)), continuation].tolist()
        assert scored.tokens == pytest.approx(expected, abs=2e-5)
        assert scored.log_prob == pytest.approx(sum(expected), abs=1e-4)
        assert scored.greedy == (log_p.argmax(-1).tolist() == continuation)


def test_fast_is_another_value_where_a_block_has_two_scored_tokens() -> None:
    loaded, pairs = load("self-refine"), [(words(5), words(3, 1)), (words(5), words(1, 1)), (words(7), words(2, 1))]
    exact, fast = log_likelihood(loaded, pairs), log_likelihood(loaded, pairs, fast=True)
    assert exact[0].tokens[0] == pytest.approx(fast[0].tokens[0], abs=1e-5)
    assert abs(exact[0].log_prob - fast[0].log_prob) > 1e-3
    assert close(exact[1:], fast[1:])  # one scored token in each block


@pytest.mark.parametrize("setting", [{"rescale": True}, {"feedback": "hard"}, {"committed_hard": True}])
def test_given_tokens_are_shown_hard_whatever_the_feedback(setting: dict[str, Any]) -> None:
    plain, other = load("self-refine"), load("self-refine", **setting)
    assert close(log_likelihood(other, some_pairs()), log_likelihood(plain, some_pairs()), 1e-4)


def test_a_best_of_n_model_scores_as_self_refinement() -> None:
    assert log_likelihood(load("best-of-n"), some_pairs()) == log_likelihood(load("self-refine"), some_pairs())


def test_blocks_of_one_token_still_predict_at_a_blank() -> None:
    """With B = 1 a draft is one BLANK after the text: not the autoregressive distribution, which has no draft."""
    pairs = some_pairs(1)
    one, causal = log_likelihood(load("self-refine", size=1), pairs), log_likelihood(load("autoregressive"), pairs)
    assert not close(one, causal, 1e-2)


# -- it is a distribution --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_continuations_of_one_length_sum_to_one(name: str, fast: bool) -> None:
    loaded = load(name, blank=5)
    for given, length in itertools.product(range(1, 9), (1, 2, 3)):
        context = words(given, seed=given, top=5)
        pairs = [(context, list(ids)) for ids in itertools.product(range(5), repeat=length)]
        total = math.fsum(math.exp(scored.log_prob) for scored in log_likelihood(loaded, pairs, fast=fast))
        assert total == pytest.approx(1, abs=1e-5), (given, length)


@pytest.mark.parametrize("name", ALL)
def test_the_whole_vocabulary_sums_to_one_across_a_block_border(name: str) -> None:
    context = words(7)
    pairs = [(context, list(ids)) for ids in itertools.product(range(BLANK), repeat=2)]
    scored = log_likelihood(load(name), pairs)
    assert math.fsum(math.exp(one.log_prob) for one in scored) == pytest.approx(1, abs=1e-5)
    assert len({round(one.log_prob, 6) for one in scored}) > 700  # they do differ


def test_chain_rule_over_two_calls() -> None:
    """What is scored first is context for the rest, wherever the text is cut."""
    loaded, text = load("self-refine"), words(14)
    whole = log_likelihood(loaded, [(text[:3], text[3:])])[0].log_prob
    for cut in range(4, 14):
        first, second = log_likelihood(loaded, [(text[:3], text[3:cut]), (text[:cut], text[cut:])])
        assert first.log_prob + second.log_prob == pytest.approx(whole, abs=1e-4)


# -- greedy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_greedy_says_that_every_token_is_the_most_probable(name: str) -> None:
    loaded = load(name)
    for given in range(1, 6):
        context, best = words(given, seed=given), list[int]()
        for _ in range(6):
            best.append(int(by_hand(loaded, context, [*best, 0])[-1].argmax()))
        spoiled = [[*best[:i], (best[i] + 1) % BLANK, *best[i + 1 :]] for i in range(6)]
        assert log_likelihood(loaded, [(context, best)])[0].greedy
        assert not any(scored.greedy for scored in log_likelihood(loaded, [(context, ids) for ids in spoiled]))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("given", [1, 2, 3, 4, 5, 8])
def test_the_first_conditional_is_that_of_the_first_pass_of_decoding(name: str, given: int) -> None:
    loaded, context = load(name), words(given, seed=given)
    asked = [Request(prompt=context, max_new_tokens=1, passes=1, width=1, threshold=2.0)]
    made = generate(loaded.parts, loaded.method, asked, stop_ids=[])[0].tokens
    assert [log_likelihood(loaded, [(context, [token])])[0].greedy for token in range(BLANK)].count(True) == 1
    assert log_likelihood(loaded, [(context, made)])[0].greedy


# -- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_a_pair_does_not_depend_on_the_others_nor_on_their_order(name: str, fast: bool) -> None:
    loaded, pairs = load(name), some_pairs(1)
    alone = [log_likelihood(loaded, [pair], fast=fast)[0] for pair in pairs]
    assert close(log_likelihood(loaded, pairs, fast=fast), alone)
    assert close(log_likelihood(loaded, pairs[::-1], fast=fast)[::-1], alone)
    assert close(log_likelihood(loaded, pairs * 2, fast=fast, batch_tokens=64), alone * 2)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("fast", [False, True])
def test_limits_of_memory_change_nothing(name: str, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, pairs = load(name), some_pairs(1)
    expected = log_likelihood(loaded, pairs, fast=fast)
    monkeypatch.setattr(likelihood, "MOST_DRAFT", 8)
    monkeypatch.setattr(likelihood, "MOST_LOGITS", 3 * BLANK)
    assert close(log_likelihood(loaded, pairs, fast=fast), expected)
    assert close(log_likelihood(loaded, pairs, fast=fast, batch_tokens=1), expected)


def watch(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[int, int]], list[int]]:
    """Record rows and tokens of every forward, and how many positions get logits."""
    forwards: list[tuple[int, int]] = []
    heads: list[int] = []
    forward, logits = loaded.backbone.forward, loaded.backbone.logits

    def seen(x: Tensor, *rest: Any) -> Any:
        forwards.append((x.shape[0], x.shape[1]))
        return forward(x, *rest)

    def counted(hidden: Tensor) -> Tensor:
        heads.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(loaded.backbone, "forward", seen)
    monkeypatch.setattr(loaded.backbone, "logits", counted)
    return forwards, heads


@pytest.mark.parametrize("name", ALL)
def test_forwards_are_bounded_and_logits_are_made_where_they_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, pairs = load(name), some_pairs(1)
    forwards, heads = watch(loaded, monkeypatch)
    log_likelihood(loaded, pairs, batch_tokens=200)
    assert max(rows * tokens for rows, tokens in forwards) <= 200
    assert sum(heads) == sum(len(continuation) for _, continuation in pairs)
    assert len(forwards) < len(pairs)


def test_a_short_draft_part_leaves_room_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen texts of 64 committed tokens and one draft of 4: one forward for the text, one for the drafts."""
    loaded = load("self-refine")
    forwards, _ = watch(loaded, monkeypatch)
    log_likelihood(loaded, [(words(64, seed), [seed]) for seed in range(16)], batch_tokens=16 * 68)
    assert forwards == [(16, 64), (16, 4)]


def test_progress_counts_pairs() -> None:
    told: list[int] = []
    log_likelihood(load("self-refine"), [*some_pairs(), ([1], [])], batch_tokens=200, progress=told.append)
    assert told == sorted(set(told)) and len(told) > 2 and told[-1] == len(some_pairs()) + 1


# -- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_an_empty_continuation_is_certain(name: str) -> None:
    scored = log_likelihood(load(name), [([1, 2], []), ([1, 2], [3]), ([], [])])
    assert scored[0] == scored[2] == Scored(0.0, True, [])
    assert scored[1].log_prob < 0 and log_likelihood(load(name), []) == []


def test_an_empty_context_is_a_blank_block_or_an_error() -> None:
    loaded = load("self-refine", blank=6)
    total = sum(
        math.exp(s.log_prob) for s in log_likelihood(loaded, [([], [a, b]) for a in range(6) for b in range(6)])
    )
    assert total == pytest.approx(1, abs=1e-5)
    with pytest.raises(FredaError, match="begin every context with a token"):
        log_likelihood(load("autoregressive"), [([1], [2]), ([], [2])])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("token", [-1, BLANK, BLANK + 1, 10**6])
def test_ids_out_of_range_are_refused(name: str, token: int) -> None:
    loaded = load(name)
    for pair in (([1, token], [2]), ([1], [2, token])):
        with pytest.raises(FredaError, match=rf"token id {token} .* 0 to 27"):
            log_likelihood(loaded, [([1], [1]), pair])
    with pytest.raises(FredaError, match=f"token id {token} "):
        choice_log_probs(loaded, [[1]], [1, token])


def test_a_batch_of_no_tokens_is_refused() -> None:
    with pytest.raises(FredaError, match="batch_tokens is 0"):
        log_likelihood(load("self-refine"), [([1], [1])], batch_tokens=0)


@pytest.mark.parametrize("name", ALL)
def test_low_precision_weights_are_summed_in_full(name: str) -> None:
    loaded, pairs = load(name), some_pairs(1)
    expected = log_likelihood(loaded, pairs)
    loaded.backbone.to(torch.bfloat16)
    for got, want in zip(log_likelihood(loaded, pairs), expected, strict=True):
        assert got.log_prob == math.fsum(got.tokens)
        assert got.log_prob == pytest.approx(want.log_prob, abs=0.15 * len(got.tokens))
    one = log_likelihood(loaded, [(words(6), [token]) for token in range(BLANK)])
    assert sum(math.exp(scored.log_prob) for scored in one) == pytest.approx(1, abs=1e-3)  # bf16 alone would miss it


# -- one-token choices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_choices_equal_one_token_continuations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(name)
    contexts = [words(n, seed=n) for n in (1, 4, 7, 30, 2, 5, 61)]
    choices = words(4, seed=100)
    pairs = [(context, [token]) for context in contexts for token in choices]
    expected = iter(log_likelihood(loaded, pairs))
    forwards, heads = watch(loaded, monkeypatch)
    table = choice_log_probs(loaded, contexts, choices)
    assert table.shape == (7, 4) and table.dtype == torch.float32
    assert sum(heads) == 7 and all(rows == 7 for rows, _ in forwards)  # one row for a context, not one for a choice
    for row in table.tolist():
        assert row == pytest.approx([next(expected).log_prob for _ in row], abs=2e-5)
    torch.testing.assert_close(choice_log_probs(loaded, contexts, choices, batch_tokens=70), table)


def test_choices_of_nothing() -> None:
    loaded = load("self-refine")
    assert choice_log_probs(loaded, [], [3, 4]).shape == (0, 2)
    assert choice_log_probs(loaded, [[1], [2]], []).shape == (2, 0)


# -- backends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", ["self-refine", "autoregressive"])
def test_flex_equals_sdpa(name: str, fast: bool) -> None:
    loaded, pairs = load(name), some_pairs(1)
    expected = log_likelihood(loaded, pairs, fast=fast)
    loaded.backbone.backend = "flex"
    assert close(log_likelihood(loaded, pairs, fast=fast), expected, 1e-4)


def test_flex_is_shown_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load("self-refine")
    loaded.backbone.backend = "flex"
    forwards, _ = watch(loaded, monkeypatch)
    log_likelihood(loaded, [(words(n, n), words(1 + n % 5, n)) for n in range(4, 250, 40)], batch_tokens=300)
    assert len(forwards) > 5 and {tokens for _, tokens in forwards} <= {128, 256}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize("name", ALL)
def test_cuda_equals_the_cpu(name: str, backend: str) -> None:
    loaded, pairs = load(name)._replace(model=tiny_model(head_dim=32)), some_pairs(1)
    expected = log_likelihood(loaded, pairs)
    loaded.backbone.cuda().backend = backend  # type: ignore[assignment]
    for got, want in zip(log_likelihood(loaded, pairs), expected, strict=True):
        assert got.tokens == pytest.approx(want.tokens, abs=2e-3)
