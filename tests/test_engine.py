"""The engine makes of every request what the reference loop makes of it alone, whatever else it is doing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from freda.decode.config import EngineConfig
from freda.decode.engine import Engine
from freda.decode.pages import Pages, page_count, page_keys
from freda.decode.request import Event, Pass, QueueFull, Request
from freda.errors import FredaError
from tests.helpers import EOS, Letters, alone, mixed_settings, random_prompts, scored

ALL = ("autoregressive", "block-diffusion", "self-refine", "best-of-n")
SMALL = EngineConfig(max_batch=3, page_size=8, pages=40, prefill=24)


@pytest.mark.parametrize(("name", "last_layer"), [*((name, False) for name in ALL), ("best-of-n", True)])
def test_every_request_is_what_generate_makes_of_it_alone(name: str, last_layer: bool) -> None:
    """Twelve requests with settings of their own, through three places and prompts in pieces."""
    model = scored(name, last_layer=last_layer)
    asked = [Request(prompt=prompt, **mixed_settings(n)) for n, prompt in enumerate(random_prompts(12))]
    outputs = Engine(model, SMALL).run(asked)
    for request, output in zip(asked, outputs, strict=True):
        assert (output.tokens, output.nfe, output.finish) == alone(model, request)


def test_methods_side_by_side() -> None:
    model = scored()
    engine = Engine(model, EngineConfig(max_batch=8, page_size=8, pages=100))
    asked = [
        Request(prompt=p, method=ALL[n % 4], **mixed_settings(n)) for n, p in enumerate(random_prompts(16, seed=5))
    ]
    for request, found in zip(asked, engine.run(asked), strict=True):
        assert (found.tokens, found.nfe, found.finish) == alone(model, request), request.method
    assert engine.pages.available == 100, "all pages are given back"


def test_requests_that_begin_alike_share_pages() -> None:
    model = scored()
    engine = Engine(model, EngineConfig(max_batch=2, page_size=8, pages=40))
    begin = [n % EOS for n in range(30)]
    first, second = (Request(prompt=[*begin, *end], max_new_tokens=8) for end in ([1, 2, 3], [4, 5]))
    written: list[int] = []
    forward = model.backbone.forward

    def watched(x: torch.Tensor, *rest: Any) -> Any:
        written.append(x.shape[1])
        return forward(x, *rest)

    model.backbone.forward = watched  # type: ignore[method-assign]
    outputs = engine.run([first])
    assert max(written) == 32, "the whole blocks of the first prompt"
    written.clear()
    outputs += engine.run([second])
    assert max(written) == 8, "three pages of eight are known; eight tokens are left"
    model.backbone.forward = forward  # type: ignore[method-assign]
    for request, output in zip((first, second), outputs, strict=True):
        assert output.tokens == alone(model, request)[0]
    # Block-causal pages are not the causal ones.
    causal = engine.submit(replace(first, method="autoregressive")).result()
    assert causal.tokens == alone(model, replace(first, method="autoregressive"))[0]


def test_what_many_share_is_computed_once() -> None:
    """Five questions behind the same three pages, asked at once."""
    model = scored()
    engine = Engine(model, EngineConfig(max_batch=8, page_size=8, pages=80, prefill=400))
    asked = [Request(prompt=[*range(24), n, n + 1, n + 2, n + 3], max_new_tokens=6) for n in range(5)]
    stored: list[int] = []
    forward = model.backbone.forward

    def watched(x: torch.Tensor, *rest: Any) -> Any:
        stored.append(x.shape[0] * x.shape[1])
        return forward(x, *rest)

    model.backbone.forward = watched  # type: ignore[method-assign]
    handles = [engine.submit(request) for request in asked]
    engine.step()
    assert len(engine.running) == 1 and stored[0] == 28, "the first alone"
    stored.clear()
    engine.step()
    assert len(engine.running) == 5 and stored[0] == 4 * 4, "the others only what is theirs"
    outputs = [handle.result() for handle in handles]
    model.backbone.forward = forward  # type: ignore[method-assign]
    for output, request in zip(outputs, asked, strict=True):
        assert output.tokens == alone(model, request)[0]


def test_generated_text_is_remembered_too() -> None:
    model = scored()
    engine = Engine(model, EngineConfig(max_batch=1, page_size=8, pages=300))
    asked = [Request(prompt=prompt[:4], max_new_tokens=30, threshold=2.0) for prompt in random_prompts(20)]
    found = zip(asked, engine.run(asked), strict=True)
    text = next([*r.prompt, *o.tokens] for r, o in found if len(r.prompt) == 4 and len(o.tokens) > 20)
    reserved = engine.pages.reserve(page_keys(text[:16], 8, 4), 24)
    assert reserved is not None and reserved[1] == 16
    engine.pages.release(reserved[0])
    follow = Request(prompt=text[:18], max_new_tokens=6)
    assert engine.run([follow])[0].tokens == alone(model, follow)[0]


def test_few_pages_make_requests_wait_and_forget_the_oldest() -> None:
    model = scored()
    engine = Engine(model, EngineConfig(max_batch=8, page_size=8, pages=9))
    asked = [Request(prompt=prompt[:20], max_new_tokens=12) for prompt in random_prompts(10, seed=7)]
    handles = [engine.submit(request) for request in asked]
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, len(engine.running))
    assert 1 < most < 8, "nine pages hold only some of them"
    for handle, request in zip(handles, asked, strict=True):
        assert handle.result().tokens == alone(model, request)[0]


def test_first_come_first_served() -> None:
    engine = Engine(scored(), EngineConfig(max_batch=1, page_size=8, pages=40))
    handles = [engine.submit(Request(prompt=p, max_new_tokens=4)) for p in random_prompts(4)]
    finished: list[int] = []
    while engine.busy:
        engine.step()
        finished += [n for n, handle in enumerate(handles) if handle.finished and n not in finished]
    assert finished == [0, 1, 2, 3]


def test_cancelling_frees_pages_at_once_and_disturbs_nobody() -> None:
    model = scored()
    engine = Engine(model, EngineConfig(max_batch=3, page_size=8, pages=60))
    asked = [Request(prompt=prompt, max_new_tokens=30, threshold=2.0, passes=3) for prompt in random_prompts(4, seed=2)]
    handles = [engine.submit(request) for request in asked]
    for _ in range(4):
        engine.step()
    before = engine.pages.available
    handles[1].cancel()
    assert engine.pages.available > before and handles[1].result().finish == "cancelled"
    handles[3].cancel()  # still waiting
    handles[3].cancel()
    outputs = [handle.result() for handle in handles]
    for place in (0, 2):
        assert outputs[place].tokens == alone(model, asked[place])[0]
    partial = outputs[1].tokens
    assert partial == alone(model, asked[1])[0][: len(partial)]
    assert outputs[3].tokens == [] and engine.pages.available == 60 and not engine.busy


def test_events_bring_the_text_block_by_block() -> None:
    model = scored()
    engine = Engine(model)
    request = Request(prompt=[1, 2, 3, 4, 5], max_new_tokens=14, threshold=2.0)
    handle = engine.submit(replace(request, watch=True))
    filed = list(handle)
    seen = [one for one in filed if isinstance(one, Pass)]
    events = [one for one in filed if isinstance(one, Event)]
    tokens = [token for event in events for token in event.tokens]
    assert tokens == handle.result().tokens == alone(model, request)[0]
    assert len(events[0].tokens) == 3, "one token of the block was given"
    assert [event.finish for event in events[:-1]] == [""] * (len(events) - 1) and events[-1].finish
    assert len(seen) == handle.result().nfe and seen[0].block == 1 and isinstance(filed[0], Pass)
    assert list(handle) == [], "every event is read once"


def test_stop_strings_across_blocks() -> None:
    model = scored()
    free = Engine(model).run([Request(prompt=[7, 8, 9], max_new_tokens=40, threshold=2.0)])[0]
    text = Letters().decode(free.tokens)
    stop = text[4:7]  # from one block (tokens 1 to 4 and on) into the next
    assert text.find(stop) == 4
    cut = Engine(model).run([Request(prompt=[7, 8, 9], max_new_tokens=40, threshold=2.0, stop=stop)])[0]
    assert cut.finish == "stop" and stop in Letters().decode(cut.tokens) and len(cut.tokens) < len(free.tokens)
    assert cut.tokens == free.tokens[: len(cut.tokens)]


def test_long_stop_strings_are_found() -> None:
    model = scored()
    found = (
        (prompt, Engine(model).run([Request(prompt=prompt, max_new_tokens=110, threshold=2.0)])[0])
        for prompt in random_prompts(40, seed=9)
    )
    prompt, free = next((prompt, output) for prompt, output in found if len(output.tokens) == 110)
    stop = Letters().decode(free.tokens)[4:94]  # longer than what is looked at for short ones
    cut = Engine(model).run([Request(prompt=prompt, max_new_tokens=110, threshold=2.0, stop=stop)])[0]
    assert cut.finish == "stop" and 94 <= len(cut.tokens) < 104


def test_what_cannot_run_is_refused_alone() -> None:
    model = scored()
    engine = Engine(model, EngineConfig(max_batch=2, page_size=8, pages=5, queue=2))
    good = Request(prompt=[1, 2, 3], max_new_tokens=6)
    handles = [engine.submit(good)]
    for request, message in (
        (Request(prompt=[1] * 30, max_new_tokens=20), "needs 7 pages, the engine has 5"),
        (Request(prompt=[1] * 5000, max_new_tokens=20), "5020 tokens, the limit is 4096"),
        (Request(prompt=[99], max_new_tokens=2), "BLANK or beyond the vocabulary"),
        (replace(good, method="magic"), "no method 'magic'"),
        (Request(prompt=[], max_new_tokens=2, method="autoregressive"), "prompt is empty"),
    ):
        with pytest.raises(FredaError, match=message):
            engine.submit(request)
    for stop, message in (([""], "empty"), ([5], "5"), (5, "5"), (["a", None], "None")):
        with pytest.raises(FredaError, match=message):
            Request(prompt=[1], stop=stop)  # type: ignore[arg-type]
    assert Request(prompt=[1], stop="abc").stop == ("abc",) and Request(prompt=[1], stop=["a", "b"]).stop == ("a", "b")
    handles.append(engine.submit(good))
    with pytest.raises(QueueFull, match="2 requests"):
        engine.submit(good)
    expected = alone(model, good)[0]
    assert [handle.result().tokens for handle in handles] == [expected] * 2
    with pytest.raises(FredaError, match="max_batch is 0"):
        Engine(model, EngineConfig(max_batch=0))


def test_damaged_weights_end_the_request_with_an_error() -> None:
    model = scored()
    with torch.no_grad():
        model.backbone.embed_tokens.weight[5] = float("nan")
    engine = Engine(model)
    bad, good = engine.run([Request(prompt=prompt, max_new_tokens=4) for prompt in ([5, 5, 5, 5], [1, 2])])
    assert bad.finish == "error" and "not finite" in bad.error and good.finish
    assert engine.pages.available == engine.pages.count and not engine.busy


def test_pages_are_counted() -> None:
    pages = Pages(scored().backbone, 6, 8)
    one = pages.reserve(page_keys([1] * 16, 8, 4), 20)
    assert one is not None and (len(one[0]), one[1], pages.available) == (3, 0, 3)
    assert pages.reserve(page_keys([2] * 8, 8, 4), 32) is None, "four are not there"
    pages.learn(one[0], page_keys([1] * 16, 8, 4))
    two = pages.reserve(page_keys([1] * 17, 8, 4), 24)
    assert two is not None and two[0][:2] == one[0][:2] and two[1] == 16 and pages.available == 2
    other = pages.reserve(page_keys([1] * 16, 8, 1), 16)
    assert other is not None and other[1] == 0, "another block size, another text"
    for table in (one, two, other):
        pages.release(table[0])
    assert pages.available == 6
    again = pages.reserve(page_keys([1] * 16, 8, 4), 16)
    assert again is not None and again[1] == 16, "remembered though nobody used it"
    pages.release(again[0])
    everything = pages.reserve(page_keys([3] * 48, 8, 4), 48)
    assert everything is not None and everything[1] == 0
    pages.release(everything[0])
    forgotten = pages.reserve(page_keys([1] * 16, 8, 4), 16)
    assert forgotten is not None and forgotten[1] == 0


def test_pages_are_as_many_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = scored().backbone
    token = 2 * 2 * 2 * 8 * 4  # keys and values of two layers, two heads of eight, in fp32
    assert page_count(model, 16, max_batch=3, needed=10) == 31
    assert page_count(model, 16, max_batch=1000, needed=10) == 65_536 // 16 + 1
    weights = sum(part.numel() * part.element_size() for part in model.parameters())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2000)
    for pages, found in (
        (100, 81),
        (5, 11),
        (10**6, 101),
    ):  # a part of what is free; one sequence at least; no more than needed
        free = pages * 16 * token + weights - 1000
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**12))
        assert page_count(model, 16, max_batch=10, needed=10) == found
