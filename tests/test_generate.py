"""The reference loop: equal to its plain twins, whatever the batch, and counting forwards exactly."""

from __future__ import annotations

import itertools

import pytest
import torch

from freda.decode.generate import generate
from freda.decode.request import Output, Pass, Request
from freda.errors import FredaError
from freda.methods.draft import soft_embedding
from freda.methods.self_refine import SelfRefine
from freda.model.attention import clean_tokens, concat, draft_tokens, make_mask
from freda.model.parts import Parts
from freda.model.transformer import Transformer
from tests.helpers import BLANK, EOS, method, tiny_model

NAMES = ["autoregressive", "block-diffusion", "self-refine"]


def prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, EOS, (length,), generator=generator).tolist() for length in lengths]


def requests(**settings: object) -> list[Request]:
    """Ragged prompts: empty tail, one to three given tokens, shorter than a block."""
    return [
        Request(prompt=p, seed=i, **{"max_new_tokens": 14, **settings})
        for i, p in enumerate(prompts([8, 5, 10, 3, 15, 1]))
    ]  # type: ignore[arg-type]


def run(model: Transformer, name: str, asked: list[Request], **options: object) -> list[Output]:
    return generate(Parts(model), method(name, block_size=4), asked, stop_ids=[EOS], **options)  # type: ignore[arg-type]


def tokens(outputs: list[Output]) -> list[list[int]]:
    return [output.tokens for output in outputs]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "settings", [{"threshold": 0.3, "passes": 3}, {"threshold": 2.0, "passes": 2}, {"temperature": 1.5}]
)
def test_batch_equals_one_by_one_with_equal_counts(model: Transformer, name: str, settings: dict[str, object]) -> None:
    asked = requests(**settings)
    together = run(model, name, asked)
    alone = [run(model, name, [request])[0] for request in asked]
    assert tokens(together) == tokens(alone)
    assert [o.nfe for o in together] == [o.nfe for o in alone]


@pytest.mark.parametrize("name", NAMES)
def test_cached_equals_uncached(model: Transformer, name: str) -> None:
    asked = requests(threshold=0.3)
    assert tokens(run(model, name, asked)) == tokens(run(model, name, asked, cached=False))


@pytest.mark.parametrize("name", ["block-diffusion", "self-refine"])
def test_fused_commit_equals_separate_commit_and_saves_its_forwards(model: Transformer, name: str) -> None:
    asked = requests(threshold=0.3)
    fused, apart = run(model, name, asked), run(model, name, asked, fused=False)
    assert tokens(fused) == tokens(apart)
    for one, two, request in zip(fused, apart, asked, strict=True):
        tail = len(request.prompt) % 4
        blocks = -(-(tail + len(one.tokens)) // 4)
        prefill = 1 if len(request.prompt) >= 4 else 0
        assert two.nfe - one.nfe == (blocks - 1) + prefill  # the last block is never committed


def test_a_prompt_tail_is_given_and_survives(model: Transformer) -> None:
    seen: list[Pass] = []
    prompt = prompts([6])[0]
    run(model, "self-refine", [Request(prompt=prompt, max_new_tokens=6)], watch=seen.append)
    assert all(
        step.ids[:2] == prompt[4:] and step.given == [True, True, False, False] for step in seen if step.block == 1
    )
    assert not any(any(step.given) for step in seen if step.block > 1)


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_threshold_above_one_gives_plain_passes(model: Transformer, passes: int) -> None:
    """K passes written out by hand: whole-text forwards, no cache, no commitment."""
    prompt, text = prompts([6])[0], []
    clean, tail = prompt[:4], prompt[4:]
    for _ in range(3):
        ids = torch.tensor([tail + [BLANK] * (4 - len(tail))])
        alpha = torch.tensor([[1.0] * len(tail) + [0.0] * (4 - len(tail))])
        given = alpha.bool()
        for _ in range(passes):
            logits = naive_pass(model, clean, ids, alpha)
            best = logits.softmax(-1).max(-1)
            ids = torch.where(given, ids, best.indices)
            alpha = torch.where(given, 1.0, best.values)
        clean, text, tail = clean + ids[0].tolist(), text + ids[0, len(tail) :].tolist(), []
    asked = [Request(prompt=prompt, max_new_tokens=10, passes=passes, threshold=1.5)]
    output = generate(Parts(model), SelfRefine(block_size=4), asked, stop_ids=[])[0]
    assert output.tokens == text and output.nfe == 3 * passes


@torch.no_grad()
def naive_pass(model: Transformer, clean: list[int], ids: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    position = torch.arange(len(clean) + 4)[None]
    zero = torch.zeros_like(position)
    rows = concat(
        clean_tokens(zero[:, : len(clean)], position[:, : len(clean)], 4),
        draft_tokens(zero[:, len(clean) :], zero[:, len(clean) :] + len(clean)),
    )
    x = torch.cat([model.embed_tokens(torch.tensor([clean])), soft_embedding(model, ids, alpha)], dim=1)
    hidden, _, _ = model(x, position, make_mask(rows, rows, "sdpa"))
    return model.logits(hidden[:, len(clean) :])


def test_autoregressive_equals_argmax_of_the_causal_forward(model: Transformer) -> None:
    text = prompts([5])[0]
    expected = list(text)
    for _ in range(7):
        position = torch.arange(len(expected))[None]
        rows = clean_tokens(torch.zeros_like(position), position, 1)
        with torch.no_grad():
            hidden, _, _ = model(model.embed_tokens(torch.tensor([expected])), position, make_mask(rows, rows, "sdpa"))
        expected.append(int(model.logits(hidden[:, -1]).argmax()))
    asked = [Request(prompt=text, max_new_tokens=7)]
    output = generate(Parts(model), method("autoregressive"), asked, stop_ids=[])[0]
    assert output.tokens == expected[5:]
    assert output.nfe == 7 and output.tpf == 1.0


def test_text_ends_with_the_first_stop_token_and_no_later(model: Transformer) -> None:
    """Make some token of the greedy text the stop token: the text must end there, in the middle of a block."""
    asked = [Request(prompt=prompts([8])[0], max_new_tokens=20, threshold=0.2)]
    free = generate(Parts(model), SelfRefine(block_size=4), asked, stop_ids=[])[0]
    stop = next(token for place, token in enumerate(free.tokens) if place % 4 == 1 and token not in free.tokens[:place])
    cut = generate(Parts(model), SelfRefine(block_size=4), asked, stop_ids=[stop])[0]
    assert cut.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert cut.finish == "stop" and free.finish == "length" and len(free.tokens) == 20


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"fused": False}, {"cached": False}])
def test_any_of_several_stop_tokens_ends_a_text_even_as_its_first(
    name: str, options: dict[str, bool], model: Transformer
) -> None:
    """Take the stop tokens from the free text: its first token, then two later ones."""
    asked = [Request(prompt=prompts([6])[0], max_new_tokens=16, passes=2, threshold=2.0)]
    free = generate(Parts(model), method(name), asked, stop_ids=[])[0].tokens
    for stops in ([free[0]], [free[9], free[5]]):
        cut = generate(Parts(model), method(name), asked, stop_ids=stops, **options)[0]  # type: ignore[arg-type]
        first = min(free.index(stop) for stop in stops)
        assert cut.tokens == free[: first + 1] and cut.finish == "stop"


@pytest.mark.parametrize("name", NAMES)
def test_stop_tokens_of_the_prompt_do_not_stop(name: str, model: Transformer) -> None:
    """The prompt's last token sits, given, in the first generated block."""
    asked = [Request(prompt=prompts([6])[0], max_new_tokens=9, threshold=2.0)]
    free = generate(Parts(model), method(name), asked, stop_ids=[])[0].tokens
    stop = next(token for token in reversed(asked[0].prompt) if token not in free)
    assert generate(Parts(model), method(name), asked, stop_ids=[stop])[0].tokens == free


@pytest.mark.parametrize("name", NAMES)
def test_other_shapes_decode_alike_with_and_without_cache(name: str) -> None:
    """Untied head, bias, no q/k norm (Qwen2.5), with sampling and top-p."""
    other = tiny_model(4, tied=False, qk_norm=False, qkv_bias=True)
    asked = requests(temperature=1.2, top_p=0.8)
    texts = tokens(run(other, name, asked))
    assert texts == tokens(run(other, name, asked, cached=False)) != tokens(run(other, name, requests()))


def test_max_new_tokens_cuts_inside_a_block(model: Transformer) -> None:
    outputs = [run(model, "self-refine", [Request(prompt=prompts([7])[0], max_new_tokens=n)])[0] for n in (9, 2)]
    assert outputs[1].tokens == outputs[0].tokens[:2] and len(outputs[0].tokens) == 9


def test_seeds_are_per_request_and_repeatable(model: Transformer) -> None:
    same = prompts([8])[0]
    asked = [Request(prompt=same, seed=seed, temperature=2.0, max_new_tokens=12) for seed in (1, 2, 1)]
    first, second, third = tokens(run(model, "self-refine", asked))
    assert first == third != second


def test_requests_of_one_batch_may_have_different_settings(model: Transformer) -> None:
    choices = itertools.product([1, 3], [0.2, 2.0], [0.0, 1.0])
    asked = [
        Request(prompt=prompts([6])[0], passes=p, threshold=t, temperature=c, max_new_tokens=9) for p, t, c in choices
    ]
    assert tokens(run(model, "self-refine", asked)) == [run(model, "self-refine", [r])[0].tokens for r in asked]


def test_every_pass_is_shown_and_counted(model: Transformer) -> None:
    seen: list[Pass] = []
    output = run(
        model, "self-refine", [Request(prompt=prompts([8])[0], max_new_tokens=12, passes=3)], watch=seen.append
    )[0]
    assert len(seen) == output.nfe
    assert [step.number for step in seen if step.block == 2] == list(range(1, 1 + sum(s.block == 2 for s in seen)))
    closed = [token for step in seen if step.closed for token in step.ids]
    assert closed[: len(output.tokens)] == output.tokens


def test_hard_feedback_and_committed_hard_change_what_the_model_sees(model: Transformer) -> None:
    asked = requests(threshold=0.2, passes=4)
    texts = []
    for changed in (
        SelfRefine(),
        SelfRefine(feedback="hard"),
        SelfRefine(committed_hard=True),
        SelfRefine(rescale=True),
    ):
        texts.append(tokens(generate(Parts(model), changed, asked, stop_ids=[])))
    assert all(text != texts[0] for text in texts[1:])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": [BLANK]}, "BLANK"),
        ({"prompt": [-1]}, "vocabulary"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"passes": 0}, "passes"),
        ({"threshold": 0.0}, "threshold"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
    ],
)
def test_bad_requests_are_refused(model: Transformer, settings: dict[str, object], message: str) -> None:
    with pytest.raises(FredaError, match=message):
        run(model, "self-refine", [Request(**{"prompt": [1, 2], **settings})])  # type: ignore[arg-type]


def test_empty_prompt_works_for_blocks_and_is_refused_autoregressively(model: Transformer) -> None:
    assert run(model, "self-refine", [Request(prompt=[], max_new_tokens=6)])[0].tokens
    with pytest.raises(FredaError, match="empty"):
        run(model, "autoregressive", [Request(prompt=[])])
    assert run(model, "self-refine", []) == []


def test_methods_differ() -> None:
    """The equalities above mean little if all methods gave the same text."""
    asked = requests(passes=2, threshold=2.0)
    model = tiny_model(3)
    texts = [tokens(run(model, name, asked)) for name in NAMES]
    assert texts[0] != texts[1] != texts[2] != texts[0]
