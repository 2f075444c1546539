"""Handles: readers that interleave, threads, readers that go away, passes that fail; nothing is left behind."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from freda.bench.decode import NoText
from freda.decode.api import Model
from freda.decode.config import EngineConfig
from freda.decode.engine import Engine
from freda.decode.pages import page_keys
from freda.decode.places import Places
from freda.decode.request import Event, Output, Pass, QueueFull, Request, Sequence
from freda.errors import FredaError
from tests.helpers import AheadModel, alone, answering_model, random_prompts, scored

TEXTS = ["Q: one and two?", "Ünïcödé and ünïcödé", "a longer prompt that says nothing at all, but goes on"]
LONG = {"max_new_tokens": 24, "threshold": 2.0}
SMALL = EngineConfig(max_batch=3, page_size=8, pages=60)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(answering_model([*TEXTS, "The answer is 3."] * 20, seed=4), EngineConfig(max_batch=2, pages=64))


def idle(engine: Engine) -> bool:
    return not engine.busy and engine.pages.available == engine.pages.count


def same(engine: Engine, request: Request, output: Output) -> bool:
    return output.tokens == alone(engine.loaded, request)[0]


# -- readers that interleave -----------------------------------------------------------------------------------------


def test_two_streams_at_once_give_both_texts(model: Model) -> None:
    whole = [model.generate(text, **LONG).text for text in TEXTS[:2]]
    pairs = list(zip(*(model.stream(text, **LONG) for text in TEXTS[:2]), strict=False))
    first, second = ("".join(map(str, pieces)) for pieces in zip(*pairs, strict=True))
    assert whole[0].startswith(first) and whole[1].startswith(second) and min(len(first), len(second)) > 4
    left, right = (model.stream(text, **LONG) for text in TEXTS[:2])
    read = [str(next(left)), str(next(left)), str(next(right))]
    assert read[2] + "".join(map(str, right)) == whole[1]
    assert read[0] + read[1] + "".join(map(str, left)) == whole[0] and idle(model.engine)


def test_generate_while_a_stream_is_open(model: Model) -> None:
    whole, other = model.generate(TEXTS[0], **LONG), model.generate(TEXTS[2], **LONG)
    stream = model.stream(TEXTS[0], drafts=True, **LONG)
    next(stream)
    assert model.generate(TEXTS[2], **LONG).tokens == other.tokens
    assert [one.tokens for one in model.generate(TEXTS, **LONG)][2] == other.tokens
    assert "".join(piece for piece in stream if isinstance(piece, str)) == whole.text
    assert stream.output is not None and stream.output.nfe == whole.nfe and idle(model.engine)


def test_outputs_come_as_they_finish_and_refused_requests_among_them() -> None:
    engine = Engine(scored(), EngineConfig(max_batch=2, page_size=8, pages=60, queue=1))
    asked = [
        Request(prompt=p, max_new_tokens=n) for n, p in zip((30, 2, 9, 4, 1), random_prompts(5, seed=3), strict=True)
    ]
    asked.insert(2, Request(prompt=[99], max_new_tokens=2))
    order, outputs = zip(*engine.completed(asked), strict=True)
    assert sorted(order) == list(range(6)) and list(order) != sorted(order), "the short ones first"
    for index, output in zip(order, outputs, strict=True):
        assert same(engine, asked[index], output) if index != 2 else (output.finish, output.tokens) == ("error", [])
    refused = outputs[order.index(2)]
    assert "BLANK" in refused.error and refused.nfe == 0 and idle(engine)
    some = engine.completed(asked)
    next(some)
    some.close()
    assert idle(engine), "what was left is cancelled"


def test_the_queue_may_be_full_of_others_requests() -> None:
    engine = Engine(scored(), EngineConfig(max_batch=1, page_size=8, pages=60, queue=2))
    request = Request(prompt=[1, 2, 3], max_new_tokens=6)
    others = [engine.submit(request) for _ in range(2)]
    with pytest.raises(QueueFull):
        engine.submit(request)
    assert issubclass(QueueFull, FredaError)
    assert [output.finish for _, output in engine.completed([request] * 3)] == [others[0].result().finish] * 3
    assert all(same(engine, request, other.result()) for other in others)


@pytest.mark.parametrize("size", [1, 3, 12, 24, 32])
def test_any_block_size(size: int) -> None:
    made = scored(block_size=size)
    engine = Engine(made, EngineConfig(max_batch=3))
    assert engine.pages.page_size % size == 0
    asked = [Request(prompt=prompt, max_new_tokens=40, threshold=0.5) for prompt in random_prompts(4)]
    for request, output in zip(asked, engine.run(asked), strict=True):
        assert (output.tokens, output.nfe, output.finish) == alone(made, request)
    assert idle(engine)


def test_a_limit_on_the_length_makes_a_small_engine() -> None:
    engine = Engine(scored(), EngineConfig(max_batch=2, max_length=40))
    assert engine.pages.count == 2 * 3 + 1, "44 tokens are three pages of 16"
    with pytest.raises(FredaError, match="41 tokens, the limit is 40"):
        engine.submit(Request(prompt=[1] * 21, max_new_tokens=20))
    assert len(engine.run([Request(prompt=[1] * 20, max_new_tokens=20, threshold=2.0)])) == 1


# -- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [None, AheadModel], ids=["plain", "on_device"])
def test_four_threads_get_the_texts_of_requests_alone(machine: Any) -> None:
    engine = Engine(scored(), SMALL, machine)
    asked = [
        Request(prompt=p, max_new_tokens=n % 13 + 1, threshold=0.5) for n, p in enumerate(random_prompts(40, seed=8))
    ]

    def work(part: int) -> list[tuple[int, Output]]:
        if part == 0:
            return [(index * 4, output) for index, output in engine.completed(asked[::4])]
        found = []
        for index in range(part, len(asked), 4):
            handle = engine.submit(asked[index])
            events = [event for event in handle if isinstance(event, Event)] if part == 1 else []
            output = handle.result()
            assert part != 1 or [token for event in events for token in event.tokens] == output.tokens
            found.append((index, output))
        return found

    with ThreadPoolExecutor(4) as pool:
        outputs = dict(pair for part in pool.map(work, range(4)) for pair in part)
    assert len(outputs) == 40 and all(same(engine, asked[index], output) for index, output in outputs.items())
    assert idle(engine)


def test_cancelling_from_another_thread_wakes_the_reader() -> None:
    engine = Engine(scored()._replace(tokenizer=NoText()), EngineConfig(max_batch=1))
    handle = engine.submit(Request(prompt=[1, 2, 3], max_new_tokens=4000, threshold=2.0, passes=4))
    timer = threading.Timer(0.1, handle.cancel)
    timer.start()
    assert handle.result().finish == "cancelled" and idle(engine)
    timer.join()


def test_cancelling_does_not_wait_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread is in the middle of a step: the flag is seen when it is over."""
    engine = Engine(scored(), SMALL)
    inside, go = threading.Event(), threading.Event()
    plain = engine._pass

    def slow(batch: Any) -> None:
        inside.set()
        assert go.wait(20)
        plain(batch)

    monkeypatch.setattr(engine, "_pass", slow)
    one, two = (engine.submit(Request(prompt=[1, 2, 3], max_new_tokens=40, threshold=2.0)) for _ in range(2))
    thread = threading.Thread(target=engine.step)
    thread.start()
    assert inside.wait(20)
    one.cancel()
    del two
    assert not one.finished
    go.set()
    thread.join()
    assert one.finished and idle(engine)


# -- readers that go away ----------------------------------------------------------------------------------------------


def test_a_reader_that_goes_away_cancels() -> None:
    engine = Engine(scored(), SMALL)
    request = Request(prompt=[1, 2, 3], max_new_tokens=200, threshold=2.0)

    def leaves() -> None:
        for _ in engine.submit(request):
            break

    def raises() -> None:
        for _ in engine.submit(request):
            raise ValueError("the reader's own")

    def forgets() -> None:
        engine.submit(request)

    def forgets_in_a_circle() -> None:
        circle: list[Any] = [engine.submit(request)]
        circle.append(circle)
        next(iter(circle[0]))

    for go_away in (leaves, raises, forgets, forgets_in_a_circle):
        try:
            go_away()
        except ValueError as error:
            assert go_away is raises and str(error)
        gc.collect()
        assert idle(engine), go_away.__name__


def test_a_reader_that_stops_early_cancels_though_the_handle_is_still_held() -> None:
    engine = Engine(scored(), SMALL)
    handle = engine.submit(Request(prompt=[1, 2, 3], max_new_tokens=24, threshold=2.0))
    events = iter(handle)
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert handle.result().finish == "cancelled" and idle(engine)


@pytest.mark.parametrize("backend", [None, AheadModel], ids=["plain", "ahead"])
def test_ten_thousand_random_submits_and_cancels_leave_all_pages_free(backend: Any) -> None:
    """The forwards are left out: it is the book-keeping that is tried."""
    engine = Engine(scored(), EngineConfig(max_batch=6, page_size=8, pages=40, queue=20), backend)
    rng = random.Random(0)

    def pass_of(decoder: object, held: Any, kind: Any, pieces: object) -> Any:
        """Passes that close blocks by chance; some are damaged."""
        rows, numbers = kind[0].rows, 6 + 3 * 4 + 2 + 1 + 4

        def run() -> torch.Tensor:
            report = torch.zeros(rows, numbers, dtype=torch.int32)
            report[:, 0], report[:, 4] = held.real, 1
            report[:, 1] = torch.tensor([4 * (rng.random() < 0.5) for _ in range(rows)])
            report[:, 5] = report[:, 1] == 0
            report[:, 2] = torch.tensor([rng.random() > 0.01 for _ in range(rows)])
            return report

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("freda.decode.places.pass_of", pass_of)
        patch.setattr("freda.decode.plain.PlainModel.fill", lambda *given: None)
        handles, ends = list[Any](), dict[str, int]()
        begun = time.monotonic()
        for number in range(10_000):
            prompt = [rng.randrange(3) for _ in range(rng.choice([3, 16, 40]))]
            try:
                handles.append(engine.submit(Request(prompt=prompt, max_new_tokens=rng.randrange(1, 30))))
            except QueueFull:
                engine.step()
            chance = rng.random()
            if handles and chance < 0.6:
                gone = handles.pop(rng.randrange(len(handles)))
                gone.cancel() if chance < 0.3 else None
                ends[gone.result().finish if gone.finished else ""] = number
            elif chance < 0.7:
                engine.step()
        left = [handle.result() for handle in handles]
    assert {"", "cancelled", "length", "error"} <= ends.keys() and left and idle(engine)
    assert not engine.running and not engine.waiting and not engine.flagged
    assert time.monotonic() - begun < 120


# -- passes that fail -------------------------------------------------------------------------------------------------


def failing(engine: Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int) -> Callable[[], int]:
    """Let the `after`-th forward of the engine's model fail, once."""
    plain, count = engine.model.forward, [0]

    def forward(*given: Any) -> Any:
        count[0] += 1
        if count[0] == after:
            raise error
        return plain(*given)

    monkeypatch.setattr(engine.model, "forward", forward)
    return lambda: count[0]


@pytest.mark.parametrize("after", [1, 2, 5, 9])
@pytest.mark.parametrize("many", [False, True])
def test_an_interrupted_generate_leaves_nothing_behind(many: bool, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = answering_model([*TEXTS, "The answer is 3."] * 20, seed=4)
    model = Model(made, EngineConfig(max_batch=2, pages=64))
    wanted = [model.generate(text, **LONG).tokens for text in TEXTS]
    model = Model(made, EngineConfig(max_batch=2, pages=64))  # one that remembers nothing
    count = failing(model.engine, monkeypatch, KeyboardInterrupt(), after)
    kept = []
    try:
        model.generate(TEXTS * 5 if many else TEXTS[0], **LONG)
    except KeyboardInterrupt as error:
        kept.append(error)  # with its frames, as a notebook would
    assert kept and count() == after
    assert idle(model.engine) and not model.engine.flagged
    assert [one.tokens for one in model.generate(TEXTS, **LONG)] == wanted


@pytest.mark.parametrize("machine", [None, AheadModel], ids=["plain", "on_device"])
def test_a_failing_pass_ends_its_batch_and_no_other(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(scored(), EngineConfig(max_batch=4, page_size=8, pages=60), machine)
    request = Request(prompt=[*range(20)], max_new_tokens=30, threshold=2.0)
    other = replace(request, method="autoregressive")
    handles = [engine.submit(request), engine.submit(replace(request, prompt=[5, 6, 7])), engine.submit(other)]
    engine.step()
    engine.step()
    plain, broken = engine._pass, [True]

    def fails(batch: Any) -> None:
        if broken[0] and batch is engine.batches[engine.loaded.method]:
            broken[0] = False
            raise RuntimeError("out of memory")
        plain(batch)

    monkeypatch.setattr(engine, "_pass", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    ended = [handle.result() for handle in handles[:2]]
    assert [(one.finish, one.error) for one in ended] == [("error", "out of memory")] * 2
    assert list(handles[0])[-1] == Event([], "error", "out of memory")
    assert handles[2].result().tokens == alone(engine.loaded, other)[0]
    reserved = engine.pages.reserve(page_keys(request.prompt, 8, 4), 24)
    assert reserved is not None and reserved[1] == 0, "what a failed pass has written is not used again"
    engine.pages.release(reserved[0])
    assert idle(engine) and same(engine, request, engine.run([request])[0])


@pytest.mark.parametrize("waiting", [False, True])
def test_an_interrupt_at_the_end_of_a_request_leaves_nobody_without_an_end(
    waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that ends by itself, nor one that is cancelled while it waits."""
    engine, end, broken = Engine(scored(), SMALL), Sequence.end, [True]
    handle = engine.submit(Request(prompt=[1, 2, 3], max_new_tokens=6))

    def interrupted(*given: Any) -> None:
        if broken.pop():
            broken.append(False)
            raise KeyboardInterrupt
        broken.append(False)
        end(*given)

    monkeypatch.setattr(Sequence, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        handle.cancel() if waiting else handle.result()
    for _ in range(3):
        engine.step()
    assert handle.finished and idle(engine)


def test_prompts_that_failed_to_come_in_are_not_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(scored(), SMALL)
    handle = engine.submit(Request(prompt=[*range(20)], max_new_tokens=6))
    failing(engine, monkeypatch, RuntimeError("out of memory"), 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.admit()
    assert handle.result().finish == "error" and idle(engine)


def test_an_interrupted_admission_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of giving a request its row."""
    engine = Engine(scored(), SMALL)
    handle, broken = engine.submit(Request(prompt=[*range(20)], max_new_tokens=6)), [True]
    add = Places.add

    def half(places: Places, text: Sequence) -> None:
        add(places, text)
        if broken[0]:
            broken[0] = False
            places.filling.pop()
            raise KeyboardInterrupt

    monkeypatch.setattr(Places, "add", half)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert handle.finished and idle(engine) and not any(len(places) for places in engine.batches.values())


def test_a_second_interrupt_does_not_lock_the_engine_for_ever() -> None:
    engine = Engine(scored(), SMALL)
    engine._stepper = threading.get_ident()  # as if the end of a step had been interrupted
    request = Request(prompt=[1, 2, 3], max_new_tokens=6)
    assert same(engine, request, engine.run([request])[0]) and idle(engine)


def test_wrong_stop_strings_leave_the_engine_as_it_was(model: Model) -> None:
    for stop in ([5], 5, ["a", None], [""]):
        for call in (model.generate, model.stream):
            with pytest.raises(FredaError, match="stop"):
                call(TEXTS[0], stop=stop, **LONG)  # type: ignore[call-overload, operator]
        with pytest.raises(FredaError, match="stop"):
            model.generate(TEXTS, stop=stop, **LONG)  # type: ignore[call-overload]
    assert idle(model.engine) and model.generate(TEXTS[0], **LONG).finish in ("stop", "length")
    text = model.generate(TEXTS[0], **LONG).text
    both = model.generate([TEXTS[0]] * 2, stop=iter([text[3:6]]), **LONG)
    assert both[0].text == both[1].text != text
    assert model.generate(TEXTS[0], stop=text[3:6], **LONG).text == text[: text.find(text[3:6])], (
        "one string, not three"
    )


def test_watching_one_request_does_not_change_the_others(model: Model) -> None:
    wanted = [model.generate(text, **LONG) for text in TEXTS[:2]]
    watched = model.stream(TEXTS[0], drafts=True, **LONG)
    assert isinstance(next(watched), Pass)
    assert model.generate(TEXTS[1], **LONG).tokens == wanted[1].tokens
    assert "".join(one for one in watched if isinstance(one, str)) == wanted[0].text


def test_a_model_says_what_it_is(model: Model) -> None:
    assert all(word in repr(model) for word in ("self-refine", "blocks of 4", "float32", "cpu"))
