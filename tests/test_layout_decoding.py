"""Decoding in the layouts beside the paper's: equal to its plain twins, and with one slot a block autoregressive."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freda.decode import places
from freda.decode.config import EngineConfig
from freda.decode.engine import Engine
from freda.decode.generate import generate
from freda.decode.plain import PlainModel
from freda.decode.request import Output, Pass, Request
from freda.errors import FredaError
from freda.eval.likelihood import Reading, choice_log_probs, log_likelihood
from freda.folders.model_folder import LoadedModel
from freda.methods.draft import soft_embedding
from freda.methods.method import Method
from freda.model.attention import Mask, clean_tokens, concat, draft_tokens, make_mask
from freda.model.parts import Parts
from freda.model.transformer import Transformer
from tests.helpers import (
    BLANK,
    EOS,
    LAYOUTS,
    AheadModel,
    Letters,
    alone,
    method,
    mixed_settings,
    random_prompts,
    scored,
    scored_model,
    tiny_model,
)

BLOCKS = ["block-diffusion", "self-refine", "best-of-n"]


def requests(**settings: Any) -> list[Request]:
    """Prompts of every length modulo a block, one token among them."""
    prompts = [prompt[:length] for prompt, length in zip(random_prompts(40, 3), (8, 5, 10, 3, 7, 1), strict=False)]
    return [Request(prompt=p, seed=i, **{"max_new_tokens": 14, "tau": 2.0, **settings}) for i, p in enumerate(prompts)]


def run(parts: Parts, rule: Method, asked: list[Request], **options: Any) -> list[Output]:
    return generate(parts, rule, asked, stop_ids=[EOS], **options)


def tokens(outputs: list[Output]) -> list[list[int]]:
    return [output.tokens for output in outputs]


# -- the reference loop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("settings", [{"threshold": 0.3, "passes": 3}, {"temperature": 1.5}], ids=["greedy", "sampled"])
def test_batch_cache_and_fused_commit_change_nothing(name: str, layout: str, settings: dict[str, Any]) -> None:
    parts, rule, asked = scored_model(), method(name, block_size=4, **LAYOUTS[layout]), requests(**settings)
    together = run(parts, rule, asked)
    one_by_one = [run(parts, rule, [request])[0] for request in asked]
    assert [(o.tokens, o.nfe) for o in together] == [(o.tokens, o.nfe) for o in one_by_one]
    assert tokens(together) == tokens(run(parts, rule, asked, cached=False))
    apart = run(parts, rule, asked, fused=False)
    assert tokens(together) == tokens(apart)
    for fused, other, request in zip(together, apart, asked, strict=True):
        begin = rule.geometry.begin(len(request.prompt))
        blocks = -(-(len(request.prompt) - begin + len(fused.tokens)) // 4)
        assert other.nfe - fused.nfe == blocks - 1 + (begin > rule.geometry.shift)  # the last is never committed


@pytest.mark.parametrize("passes", [1, 2])
def test_passes_written_out_by_hand(model: Transformer, passes: int) -> None:
    """Whole-text forwards, no cache: the known token, then what was predicted, each a slot further right."""
    prompt = random_prompts(1)[0][:7]
    text = list(prompt)
    for _ in range(3):
        *before, known = text
        ids, alpha = [BLANK] * 4, [0.0] * 4
        for _ in range(passes):
            position = torch.arange(len(before) + 4)[None]
            first = torch.full((1, 4), len(before))
            rows = concat(
                clean_tokens(torch.zeros(1, len(before)), position[:, : len(before)], 1),
                draft_tokens(torch.zeros(1, 4), first),
            )
            shown = soft_embedding(model, torch.tensor([[known, *ids[:3]]]), torch.tensor([[1.0, *alpha[:3]]]))
            with torch.no_grad():
                x = torch.cat([model.embed_tokens(torch.tensor([before])), shown], dim=1)
                hidden = model(x, position, make_mask(rows, rows, "sdpa")).hidden[:, len(before) :]
                best = model.logits(hidden).softmax(-1).max(-1)
            ids, alpha = best.indices[0].tolist(), best.values[0].tolist()
        text += ids
    asked = [Request(prompt=prompt, max_new_tokens=10, passes=passes, threshold=1.5)]
    output = generate(Parts(model), method(layout="shifted"), asked, stop_ids=[])[0]
    assert output.tokens == text[7:17] and output.nfe == 3 * passes


@pytest.mark.parametrize("name", ["block-diffusion", "self-refine"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.3, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_one_slot_a_block_is_autoregressive_decoding(name: str, settings: dict[str, Any]) -> None:
    """Token for token and forward for forward, by the reference loop and by the engine, with any threshold."""
    rule = method(name, block_size=1, layout="shifted")
    loaded = LoadedModel(Parts(tiny_model()), Letters(), rule, "test")
    asked = requests(passes=1, **settings)
    expected = run(loaded.parts, method("autoregressive"), asked)
    found = [
        run(loaded.parts, rule, asked),
        Engine(loaded, EngineConfig(max_batch=4, page_size=8, pages=60)).run(asked),
    ]
    for outputs in found:
        assert [(o.tokens, o.nfe, o.finish) for o in outputs] == [(o.tokens, o.nfe, o.finish) for o in expected]
    again = run(loaded.parts, rule, requests(passes=3, threshold=2.0, **settings))
    assert tokens(again) == tokens(expected), "further passes see the same token"


def test_no_prompt_tail_and_blocks_where_the_prompt_ends(model: Transformer) -> None:
    seen: list[Pass] = []
    prompt = random_prompts(1)[0][:6]
    asked = [Request(prompt=prompt, max_new_tokens=8, passes=1)]
    output = generate(Parts(model), method(layout="shifted"), asked, stop_ids=[], watch=seen.append)[0]
    assert not any(any(step.given) for step in seen) and [step.ids for step in seen] == [
        output.tokens[:4],
        output.tokens[4:],
    ]


def test_a_text_needs_a_known_token() -> None:
    loaded = scored(layout="shifted")
    with pytest.raises(FredaError, match=r"the prompt is empty, and self-refine decoding here predicts behind a known"):
        run(loaded.parts, loaded.method, [Request(prompt=[])])

    class Beginning(Letters):
        bos_id = 5

    begun = Engine(loaded._replace(tokenizer=Beginning())).run([Request(prompt=[], max_new_tokens=6)])[0]
    assert begun.tokens == alone(loaded, Request(prompt=[5], max_new_tokens=6))[0]
    causal = scored(context="causal")
    assert run(causal.parts, causal.method, [Request(prompt=[], max_new_tokens=6)])[0].tokens, "slots of their own"


# -- the engine --------------------------------------------------------------------------------------------------------


WAYS: list[tuple[str, Any, int]] = [("shifted", PlainModel, 0), ("shifted", AheadModel, 0), ("shifted", AheadModel, 64)]


@pytest.mark.parametrize(("layout", "backend", "few"), [*WAYS, *((name, AheadModel, 0) for name in list(LAYOUTS)[1:])])
@pytest.mark.parametrize("name", BLOCKS)
def test_every_request_is_what_generate_makes_of_it_alone(
    name: str, layout: str, backend: Any, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve requests with settings of their own through five places, prompts in pieces; forwards that are packed, or
    have a place for every block."""
    monkeypatch.setattr(places, "FEW_TOKENS", few)
    model = scored(name, last_layer=name == "best-of-n" and few == 0, **LAYOUTS[layout])
    engine = Engine(model, EngineConfig(max_batch=5, page_size=6, pages=90, prefill=24), backend)
    asked = [Request(prompt=p, **mixed_settings(n)) for n, p in enumerate(random_prompts(12, seed=11))]
    for request, output in zip(asked, engine.run(asked), strict=True):
        assert (output.tokens, output.nfe, output.finish) == alone(model, request)
    assert engine.pages.available == 90


def test_methods_of_one_model_side_by_side_share_pages() -> None:
    """Committed text of the shifted layout is autoregressive text: what one method has stored, another finds."""
    model = scored(layout="shifted")
    engine = Engine(model, EngineConfig(max_batch=4, page_size=8, pages=100))
    prompt = [n % EOS for n in range(30)]
    stored: list[int] = []
    forward = model.backbone.forward

    def watched(x: torch.Tensor, *rest: Any) -> Any:
        stored.append(x.shape[1])
        return forward(x, *rest)

    model.backbone.forward = watched  # type: ignore[method-assign]
    for number, name in enumerate(["self-refine", "autoregressive", "block-diffusion", "best-of-n"]):
        request = Request(prompt=prompt, max_new_tokens=9, method=name)
        stored.clear()
        output = engine.run([request])[0]
        first = stored[0]
        assert (output.tokens, output.nfe) == alone(model, request)[:2]
        assert first == (5 if number else 29), "three pages of eight are known"


def test_pages_of_any_size_are_shared_at_their_border() -> None:
    model = scored(layout="shifted")
    engine = Engine(model, EngineConfig(max_batch=2, page_size=7, pages=60))
    assert engine.pages.page_size == 7 and Engine(scored(), EngineConfig(page_size=7)).pages.page_size == 28
    begin = [n % EOS for n in range(23)]
    for end in ([1, 2, 3], [4]):
        request = Request(prompt=[*begin, *end], max_new_tokens=8)
        assert engine.run([request])[0].tokens == alone(model, request)[0]
    reserved = engine.pages.reserve(engine._prompt_keys(sequence(engine, [*begin, 9])), 30)
    assert reserved is not None and reserved[1] == 21


def test_only_what_is_stored_is_remembered() -> None:
    """The last known token is not: its page is full one block later."""
    model = scored(layout="shifted")
    engine = Engine(model, EngineConfig(max_batch=1, page_size=9, pages=40))
    found = (
        (p[:1], engine.run([Request(prompt=p[:1], max_new_tokens=12, threshold=2.0)])[0]) for p in random_prompts(9)
    )
    text = next([*prompt, *output.tokens] for prompt, output in found if output.finish == "length")
    reserved = engine.pages.reserve(engine._prompt_keys(sequence(engine, text[:12])), 12)
    assert reserved is not None and reserved[1] == 0, "eight of its nine tokens were stored"
    engine.pages.release(reserved[0])
    request = Request(prompt=text[:12], max_new_tokens=8)
    assert engine.run([request])[0].tokens == alone(model, request)[0]


def test_prompts_come_in_pieces_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    staged = places.Places._staged

    def counted(self: places.Places, taken: Any, size: int) -> Any:
        sizes.append(sum(end - begin for _, begin, end in taken))
        return staged(self, taken, size)

    monkeypatch.setattr(places.Places, "_staged", counted)
    model, request = scored(layout="shifted"), Request(prompt=list(range(13)), max_new_tokens=5)
    output = Engine(model, EngineConfig(max_batch=1, page_size=8, pages=9, prefill=5)).run([request])[0]
    assert sizes == [5, 5, 2] and output.tokens == alone(model, request)[0]


def sequence(engine: Engine, prompt: list[int]) -> Any:
    from freda.decode.request import Sequence

    return Sequence(1, Request(prompt=prompt), engine.loaded.method)


def test_watched_passes_are_those_of_the_reference_loop() -> None:
    model = scored("best-of-n", layout="shifted")
    request = Request(prompt=random_prompts(1)[0], max_new_tokens=12, threshold=2.0, passes=3, tau=2.0, watch=True)
    seen: list[Pass] = []
    run(model.parts, model.method, [request], watch=seen.append)
    handle = Engine(model, EngineConfig(max_batch=2, page_size=8, pages=40)).submit(request)
    for one, two in zip(seen, [event for event in handle if isinstance(event, Pass)], strict=True):
        plain = {"request": 0, "prob": [], "scores": []}
        assert one._replace(**plain) == two._replace(**plain)


# -- likelihood --------------------------------------------------------------------------------------------------------


def load(rule: Method, blank: int = BLANK) -> LoadedModel:
    model = tiny_model()
    model.blank_id = blank
    return LoadedModel(Parts(model), None, rule, "test")  # type: ignore[arg-type]


def words(count: int, seed: int = 0, top: int = BLANK) -> list[int]:
    return torch.randint(0, top, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def pairs() -> list[tuple[list[int], list[int]]]:
    shapes = [(1, 1), (1, 6), (2, 3), (4, 5), (5, 1), (7, 9), (30, 2)]
    return [(words(n, 10 * n + m), words(m, 700 + n + m)) for n, m in shapes]


@torch.no_grad()
def by_hand(loaded: LoadedModel, context: list[int], continuation: list[int], fast: bool) -> list[float]:
    """M15 with blocks that begin where decoding begins them: one forward for each scored token."""
    model, geometry, text = loaded.backbone, loaded.method.geometry, context + continuation
    origin, found = geometry.begin(len(context)), []
    for place in range(len(context), len(text)):
        begin = origin + (place - origin) // 4 * 4
        known = max(begin, len(context)) if fast else place
        first = begin - geometry.shift
        slots = [text[i] if i < known else BLANK for i in range(first, first + 4)]
        ids = torch.tensor([text[:first] + slots])
        i = torch.arange(len(ids[0]))
        committed = (i[:, None] >= i) if geometry.causal else (i[:, None] // 4 >= i // 4)
        mask = torch.where(i[:, None] >= first, torch.ones_like(committed), committed & (i < first))
        out = model(model.embed_tokens(ids), i[None], Mask(mask[None, None], drafts=False))
        hidden = out.hidden[0, place - geometry.shift]
        found.append(float(model.logits(hidden).log_softmax(-1)[text[place]]))
    return found


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_likelihood_by_drafts_equals_one_forward_per_token(layout: str, fast: bool) -> None:
    loaded = load(method(block_size=4, **LAYOUTS[layout]))
    for (context, continuation), scored_ in zip(
        pairs(), log_likelihood(loaded, pairs(), reading="blocks", fast=fast), strict=True
    ):
        assert scored_.tokens == pytest.approx(by_hand(loaded, context, continuation, fast), abs=2e-5)


def test_by_default_the_shifted_layout_is_scored_as_the_autoregressive_model() -> None:
    shifted, plain = load(method(layout="shifted")), load(method("autoregressive"))
    expected = log_likelihood(plain, pairs())
    assert log_likelihood(shifted, pairs()) == log_likelihood(shifted, pairs(), reading="tokens") == expected
    drafts = log_likelihood(shifted, pairs(), reading="blocks")
    assert all(abs(one.log_prob - two.log_prob) > 1e-3 for one, two in zip(drafts, expected, strict=True))
    contexts = [context for context, _ in pairs()]
    texts, other = (choice_log_probs(shifted, contexts, [1, 2], reading=reading) for reading in ("tokens", "blocks"))
    assert torch.equal(choice_log_probs(shifted, contexts, [1, 2]), texts) and not torch.allclose(texts, other)
    assert log_likelihood(load(method(context="causal")), pairs()) == log_likelihood(
        load(method(context="causal")), pairs(), reading="blocks"
    ), "slots of their own tokens: the text predicts nothing that was trained"


@pytest.mark.parametrize("reading", ["tokens", "blocks"])
def test_both_readings_sum_to_one(reading: Reading) -> None:
    loaded = load(method(layout="shifted"), blank=5)
    for given in (1, 2, 4, 5):
        context = words(given, top=5)
        every = [(context, [a, b]) for a in range(5) for b in range(5)]
        total = sum(torch.tensor(one.log_prob).exp() for one in log_likelihood(loaded, every, reading=reading))
        assert float(total) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("rule", "reading", "message"),
    [
        (method(), "tokens", "likelihood is tokens, but text of this self-refine model sees ahead"),
        (method("autoregressive"), "blocks", "likelihood is blocks, but autoregressive has none"),
        (method(), "best", "likelihood is 'best'; use auto, tokens or blocks"),
    ],
)
def test_readings_that_a_model_does_not_have(rule: Method, reading: Any, message: str) -> None:
    with pytest.raises(FredaError, match=message):
        log_likelihood(load(rule), pairs(), reading=reading)
    with pytest.raises(FredaError, match="a context is empty"):
        log_likelihood(load(method(layout="shifted")), [([], [1])])
