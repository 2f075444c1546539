"""Rows of the device that requests enter and leave, and passes that run ahead of their reports: whatever happens beside
it, a request becomes what `generate` makes of it alone. With plain forwards here, with kernels on a GPU."""

from __future__ import annotations

import random
import weakref
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from freda.decode import places
from freda.decode.config import EngineConfig
from freda.decode.device import Report
from freda.decode.engine import Engine
from freda.decode.generate import generate
from freda.decode.pages import Pages
from freda.decode.places import Places, rounded
from freda.decode.plain import PlainModel
from freda.decode.request import Event, Pass, Request
from freda.folders.model_folder import LoadedModel
from freda.methods import METHODS, method_like
from freda.methods.method import Method
from freda.model.parts import Parts
from freda.model.scorer import Scorer
from tests.helpers import (
    EOS,
    AheadModel,
    Letters,
    alone,
    init_weights,
    method,
    mixed_settings,
    random_prompts,
    scored,
    tiny_model,
)

ALL = tuple(METHODS)  # the last is verified, which has one layout
SMALL = EngineConfig(max_batch=3, page_size=8, pages=40, prefill=24)


def same(model: LoadedModel, request: Request, output: Any) -> bool:
    found: bool = (output.tokens, output.nfe, output.finish) == alone(model, request)
    return found


@pytest.mark.parametrize("few", [0, 64], ids=["packed", "dense"])
@pytest.mark.parametrize(("name", "last_layer"), [*((name, False) for name in ALL), ("best-of-n", True)])
def test_every_request_is_what_generate_makes_of_it_alone(
    name: str, last_layer: bool, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fourteen requests with settings of their own, sampled ones among them, through five places."""
    monkeypatch.setattr(places, "FEW_TOKENS", few)
    model = scored(name, last_layer=last_layer)
    config = EngineConfig(max_batch=5, page_size=8, pages=60, prefill=24)
    asked = [Request(prompt=p, **mixed_settings(n)) for n, p in enumerate(random_prompts(14, seed=2))]
    engine = Engine(model, config, AheadModel)
    outputs = engine.run(asked)
    assert all(same(model, request, output) for request, output in zip(asked, outputs, strict=True))
    assert engine.on_device and engine.pages.available == 60


@pytest.mark.parametrize("name", ["self-refine", "best-of-n"])
def test_who_finds_no_room_waits_and_loses_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is never room for more than half of the blocks."""
    monkeypatch.setattr(places, "FEW_TOKENS", 0)
    shape, stalls = Places._shape, []

    def tight(self: Places, *given: Any) -> Any:
        made = shape(self, *given)
        return made._replace(packed=max(made.blocks, made.packed // 2))

    learn = Places._learn
    monkeypatch.setattr(Places, "_shape", tight)
    monkeypatch.setattr(Places, "_learn", lambda self, *given: (learn(self, *given), stalls.append(self._stalled))[0])
    model = scored(name)
    asked = [Request(prompt=p, **mixed_settings(n)) for n, p in enumerate(random_prompts(12, seed=6))]
    outputs = Engine(model, EngineConfig(max_batch=5, page_size=8, pages=60), AheadModel).run(asked)
    assert all(same(model, request, output) for request, output in zip(asked, outputs, strict=True))
    assert sum(stalls) > 10


@pytest.mark.parametrize("few", [0, 32], ids=["packed", "dense"])
def test_who_waits_for_room_waits_for_all_of_its_candidates(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests in step, half of which find no room in some passes: the next pass was laid out as if they had gone."""
    monkeypatch.setattr(places, "FEW_TOKENS", few)
    shape, rng = Places._shape, random.Random(1)

    def tight(self: Places, *given: Any) -> Any:
        made = shape(self, *given)
        short = made._replace(packed=max(made.blocks, made.packed // 2))
        return made if made.dense or rng.random() < 0.5 else short

    monkeypatch.setattr(Places, "_shape", tight)
    model = scored("best-of-n")
    asked = [
        Request(prompt=p, max_new_tokens=16, passes=2, threshold=2.0, width=4, tau=2.0)
        for p in random_prompts(6, seed=1)
    ]
    outputs = Engine(model, EngineConfig(max_batch=3, page_size=8, pages=60), AheadModel).run(asked)
    assert all(same(model, request, output) for request, output in zip(asked, outputs, strict=True))


@pytest.mark.parametrize("name", ["self-refine", "best-of-n"])
def test_a_watched_request_shows_every_pass_and_changes_nobody(name: str) -> None:
    model = scored(name)
    asked = [Request(prompt=p, **mixed_settings(n)) for n, p in enumerate(random_prompts(4, seed=3))]
    seen: list[Pass] = []
    generate(model.parts, model.method, [asked[1]], stop_ids=[EOS], watch=seen.append)
    for backend in (PlainModel, AheadModel):
        engine = Engine(model, EngineConfig(max_batch=4, page_size=8, pages=60), backend)
        handles = [engine.submit(replace(request, watch=n == 1)) for n, request in enumerate(asked)]
        filed = [list(handle) for handle in handles]
        for n, (handle, request) in enumerate(zip(handles, asked, strict=True)):
            assert same(model, request, handle.result())
            assert sum(isinstance(one, Pass) for one in filed[n]) == (handle.result().nfe if n == 1 else 0)
        for one, two in zip(seen, (one for one in filed[1] if isinstance(one, Pass)), strict=True):
            assert one._replace(request=0, prob=[], scores=[]) == two._replace(request=0, prob=[], scores=[])
            assert one.prob == pytest.approx(two.prob, abs=1e-5)
            assert len(one.scores) == 1 or one.scores == pytest.approx(two.scores, abs=1e-4)


def test_passes_run_ahead_of_their_reports_but_not_past_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pass starts before the report of the last is read, and none is made in vain."""
    started, read, run = [0], [], AheadModel.run
    monkeypatch.setattr(AheadModel, "run", lambda *given: (started.__setitem__(0, started[0] + 1), run(*given))[1])
    made = Report.__init__
    monkeypatch.setattr(Report, "__init__", lambda *given: (read.append(started[0]), made(*given))[1])
    engine = Engine(scored(), EngineConfig(max_batch=4, page_size=8, pages=60), AheadModel)
    output = engine.run([Request(prompt=random_prompts(1)[0], max_new_tokens=24, passes=2, threshold=2.0)])[0]
    assert len(output.tokens) == 24 and started[0] == output.nfe == len(read) == engine.passes
    assert [begun - number for number, begun in enumerate(read, 1)].count(1) == output.nfe - 1


def test_rows_are_written_in_place_and_given_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is written once for each request: the device itself ends texts, at their length or at a stop token."""
    writes: list[list[int]] = []
    enter = places.enter
    monkeypatch.setattr(
        places,
        "enter",
        lambda held, records, blank: (writes.append(records[:, 0].tolist()), enter(held, records, blank))[1],
    )
    model = scored()
    engine = Engine(model, EngineConfig(max_batch=2, page_size=8, pages=60))
    asked = [Request(prompt=p, max_new_tokens=40, passes=2, threshold=0.3) for p in random_prompts(12, seed=3)]
    outputs = engine.run(asked)
    assert all(same(model, request, output) for request, output in zip(asked, outputs, strict=True))
    assert {output.finish for output in outputs} == {"stop", "length"}
    assert sorted({row for group in writes for row in group}) == [0, 1] and sum(map(len, writes)) == len(asked)
    for request in asked:
        engine.run([request])
        assert not engine.batches[model.method]._held.real.any(), "nobody had to tell it"


def test_much_that_waits_comes_faster() -> None:
    """Beside running requests a short prompt comes in small pieces, and many prompts in large ones."""
    engine = Engine(scored(), SMALL, AheadModel)
    rows = engine._places(engine.loaded.method)
    for waits, room in ((100, 256), (1000, 256), (2000, 384), (3200, 768), (9000, 1024)):
        rows.filling = deque([SimpleNamespace(clean=[0] * waits, stored=0)])  # type: ignore[list-item]
        assert rows._room() == room


def test_prompts_come_in_pieces_beside_running_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt does not stop the others: a pass follows every piece, and other prompts share its space."""
    order: list[Any] = []
    staged, start = Places._staged, Places._start_pass

    def pieces(self: Places, taken: Any, size: int) -> Any:
        order.append([end - begin for _, begin, end in taken])
        return staged(self, taken, size)

    monkeypatch.setattr(places, "RIDES", (8, 16))
    monkeypatch.setattr(Places, "_staged", pieces)
    monkeypatch.setattr(Places, "_start_pass", lambda self, *given: (order.append("pass"), start(self, *given))[1])
    model = scored()
    engine = Engine(model, EngineConfig(max_batch=4, page_size=8, pages=100, prefill=64), AheadModel)
    rng = random.Random(1)
    asked = [
        Request(prompt=[rng.randrange(EOS) for _ in range(n)], max_new_tokens=30, threshold=2.0) for n in (3, 90, 20)
    ]
    handles = [engine.submit(asked[0])]
    engine.step()
    handles += [engine.submit(request) for request in asked[1:]]
    outputs = [handle.result() for handle in handles]
    assert all(same(model, request, output) for request, output in zip(asked, outputs, strict=True))
    first = order.index([16])
    assert order[first : first + 13] == [*[[16], "pass"] * 5, [8, 8], "pass", [12]], "88 and 20 tokens, 16 at a time"


def test_what_many_share_is_computed_once_in_pieces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five questions behind the same nine pages, which come 16 tokens at a time beside a running request."""
    sizes: list[int] = []
    staged = Places._staged

    def counted(self: Places, taken: Any, size: int) -> Any:
        sizes.append(sum(end - begin for _, begin, end in taken))
        return staged(self, taken, size)

    monkeypatch.setattr(places, "RIDES", (8, 16))
    monkeypatch.setattr(Places, "_staged", counted)
    model = scored()
    engine = Engine(model, EngineConfig(max_batch=8, page_size=8, pages=200, prefill=64), AheadModel)
    running = engine.submit(Request(prompt=[1, 2, 3], max_new_tokens=60, threshold=2.0))
    engine.step()
    shared = [*range(24)] * 3
    asked = [Request(prompt=[*shared, n, n + 1, n + 2, n + 3], max_new_tokens=6) for n in range(5)]
    handles = [engine.submit(request) for request in asked]
    assert all(same(model, request, handle.result()) for request, handle in zip(asked, handles, strict=True))
    assert sum(sizes) == len(shared) + 5 * 4 and max(sizes) == 16 and running.result().finish


@pytest.mark.parametrize("prefill", [100, 128, 200])
def test_no_length_needs_a_graph_of_its_own(prefill: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was prepared serves prompts and mixtures of all kinds."""
    monkeypatch.setattr(places, "FEW_TOKENS", 16)
    model = scored("best-of-n")
    engine = Engine(model, EngineConfig(max_batch=5, page_size=8, pages=80, prefill=prefill), AheadModel)
    engine.prepare()
    runs = engine.batches[model.method]._runs
    before = set(runs)
    asked = [Request(prompt=p, max_new_tokens=n + 3, threshold=0.3) for n, p in enumerate(random_prompts(16, seed=8))]
    assert all(same(model, request, output) for request, output in zip(asked, engine.run(asked), strict=True))
    assert set(runs) == before and len(before) > 20


def test_preparing_beside_requests_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is made by a run that is undone, but for the pages: one has left, and its pages are another's."""

    def captured(run: Any, changed: Any, pool: object) -> Any:
        before = [tensor.clone() for tensor in changed]
        run()
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        return run

    fill = AheadModel.fill
    monkeypatch.setattr(places, "captured", captured)
    monkeypatch.setattr(AheadModel, "fill", lambda *given: fill(*given) if (given[1].position >= 0).any() else None)
    model = scored()
    engine = Engine(model, EngineConfig(max_batch=2, page_size=8, pages=6, prefill=32), AheadModel)
    engine._places(model.method)._pool = object()
    gone = engine.submit(Request(prompt=[1, 2, 3, 4, 5], max_new_tokens=28, threshold=2.0, passes=1))
    while not gone.take():
        engine.step()
    gone.cancel()
    rest = [
        Request(prompt=[7] * 18, max_new_tokens=16, threshold=2.0, method="autoregressive"),
        Request(prompt=[9] * 3, max_new_tokens=5, threshold=2.0),
    ]
    first = engine.submit(rest[0])
    engine.admit()
    engine.prepare()
    handles = [first, engine.submit(rest[1])]
    engine.step()
    engine.prepare(Request(prompt=(), temperature=1.0))
    assert all(same(model, request, handle.result()) for request, handle in zip(rest, handles, strict=True))


def test_nothing_is_kept_for_lengths_that_come_once() -> None:
    """Without graphs, prompts have any length, and requests any row."""
    engine = Engine(scored(), EngineConfig(max_batch=3, page_size=8, pages=40))
    engine.run([Request(prompt=p, max_new_tokens=5) for p in random_prompts(20, seed=7)])
    staging = next(iter(engine.batches.values()))._staging
    assert not staging._there and not staging._free


def test_sizes_of_graphs() -> None:
    assert [rounded(count) for count in (1, 7, 8, 9, 17, 100, 128, 129, 200)] == [8, 8, 8, 9, 18, 104, 128, 144, 208]
    assert all(count <= rounded(count) <= max(8, count) * 1.125 for count in range(1, 1000))


def test_a_report_is_read_as_it_was_written() -> None:
    numbers = np.zeros((2, 6 + 6 + 2 + 3 + 6), dtype=np.int32)
    numbers[1, :6] = 1, 2, 1, 0, 7, 1
    numbers[1, 6:10] = 11, 12, 1, 0
    numbers[1, 10:12] = np.array([0.5, 0.25], dtype=np.float32).view(np.int32)
    numbers[1, 12:14] = 3, 2
    numbers[1, 14:17] = np.array([1, -2, 3.5], dtype=np.float32).view(np.int32)
    numbers[1, 17:] = range(6)
    report = Report(numbers, 2, 3)
    assert [part[1] for part in (report.going, report.finite, report.ended)] == [True, True, False]
    assert (report.closed[1], report.passes[1], report.done[1]) == (2, 7, 1)
    assert report.ids[1].tolist() == [11, 12] and report.committed[1].tolist() == [1, 0]
    assert report.prob[1].tolist() == [0.5, 0.25] and (report.valid[1, 0], report.winner[1, 0]) == (3, 2)
    assert report.scores[1].tolist() == [1, -2, 3.5] and report.candidates[1].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_one_request_of_many_candidates() -> None:
    """After its first pass, which has one, the next has all."""
    model = scored("best-of-n")
    asked = [Request(prompt=p, max_new_tokens=12, threshold=2.0, width=4, tau=2.0) for p in random_prompts(6, seed=1)]
    assert all(same(model, request, Engine(model, SMALL, AheadModel).run([request])[0]) for request in asked)


def test_nothing_of_an_engine_stays_when_nobody_needs_it() -> None:
    """Not even until the garbage collector comes: the next engine limits its memory."""
    engine = Engine(scored(), SMALL, AheadModel)
    engine.run([Request(prompt=[1, 2, 3], max_new_tokens=8)])
    pages = weakref.ref(engine.pages)
    del engine
    assert pages() is None


def test_cancelling_disturbs_nobody() -> None:
    model = scored()
    engine = Engine(model, EngineConfig(max_batch=4, page_size=8, pages=60), AheadModel)
    asked = [Request(prompt=p, max_new_tokens=20, threshold=0.5) for p in random_prompts(6, seed=9)]
    handles = [engine.submit(request) for request in asked]
    for _ in range(3):
        engine.step()
    handles[1].cancel()
    for number, (handle, request) in enumerate(zip(handles, asked, strict=True)):
        assert number == 1 or same(model, request, handle.result())


def test_a_stop_string_ends_a_request_after_the_next_pass_has_started() -> None:
    model = scored()
    free = Request(prompt=[7, 8, 9], max_new_tokens=40, threshold=2.0)
    text = Letters().decode(alone(model, free)[0])
    engine = Engine(model, SMALL, AheadModel)
    asked = [replace(free, stop=text[4:7]), *(Request(prompt=p, max_new_tokens=16) for p in random_prompts(5, seed=4))]
    outputs = engine.run(asked)
    assert outputs[0].finish == "stop" and Letters().decode(outputs[0].tokens).find(text[4:7]) == 4
    assert all(same(model, request, output) for request, output in zip(asked[1:], outputs[1:], strict=True))


@pytest.mark.parametrize("backend", [PlainModel, AheadModel])
def test_a_request_whose_numbers_are_not_finite_ends_alone(backend: Any) -> None:
    parts = Parts(tiny_model(tied=False))  # a head of its own: the others' numbers stay finite
    model = LoadedModel(parts, Letters(), method(block_size=4), "test")
    with torch.no_grad():
        model.backbone.embed_tokens.weight[5] = float("nan")
    engine = Engine(model, EngineConfig(max_batch=4, page_size=8, pages=60), backend)
    asked = [Request(prompt=p, max_new_tokens=8, threshold=2.0) for p in ([1, 2, 3], [5, 5, 5, 5, 1], [7] * 9)]
    handles = [engine.submit(request) for request in asked]
    events = list(handles[1])
    assert [event.finish for event in events if isinstance(event, Event)] == ["error"]
    assert "not finite" in handles[1].result().error
    for number in (0, 2):
        assert same(model, asked[number], handles[number].result()) and handles[number].result().finish == "length"
    assert not engine.busy and engine.pages.available == 60


def test_it_can_be_left_out() -> None:
    engine = Engine(scored(), EngineConfig(max_batch=2, page_size=8, pages=20, on_device=False))
    engine.run([Request(prompt=[1, 2], max_new_tokens=4)])
    assert not engine.on_device


def test_what_the_kernels_are_not_made_for() -> None:
    parts, best = scored().parts, method("best-of-n")
    assert not best.off_device(parts)
    assert best.off_device(scored(last_layer=True).parts) and method("best-of-n", rescale=True).off_device(parts)


# -- on a GPU: kernels and graphs ------------------------------------------------------------------------------------


def gpu_model(rule: Method, dtype: torch.dtype) -> LoadedModel:
    model = tiny_model(dim=256, heads=4, kv_heads=2, head_dim=64, ffn_dim=512, layers=3)
    scorer = Scorer(model.config)
    init_weights(scorer, 0, model)
    for part in (model, scorer):
        part.to("cuda", dtype)
        part.inv_freq = part.inv_freq.float()
    return LoadedModel(Parts(model, scorer), Letters(), rule, "test")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 24), (torch.float32, 3), (torch.bfloat16, 24)], ids=["fp32", "compiled", "bf16"]
)
@pytest.mark.parametrize("rule", [*ALL, *(f"{name}:layout=shifted" for name in ALL[1:-1]), "verified:width=2"])
def test_sixty_four_mixed_requests_on_a_gpu(rule: str, dtype: torch.dtype, most: int) -> None:
    """In fp32 kernels and graphs give the texts of the reference loop, sampled ones, too. In bf16 they round less often
    than the plain model does, and texts part where two tokens are nearly as good: they are to be as close to what
    the same weights write in fp32 as the plain model's are."""
    from freda.decode.packed import PackedModel

    def kernels(parts: Parts, rule: Method, pages: Pages) -> PackedModel:
        return PackedModel(parts.backbone, pages)

    model = gpu_model(method_like(rule), dtype)
    asked = [Request(prompt=p, **mixed_settings(n)) for n, p in enumerate(random_prompts(64, seed=4))]
    exact = gpu_model(method_like(rule), dtype).parts
    for part in (exact.backbone, exact.scorer):
        assert part is not None
        part.float()
    wanted = generate(exact, model.method, asked, stop_ids=[EOS])
    same = {}
    for backend in (PlainModel, kernels):
        engine = Engine(model, EngineConfig(max_batch=most, page_size=16, pages=300, prefill=64), backend)
        outputs = engine.run(asked)
        assert engine.on_device == (backend is kernels) and engine.pages.available == 300
        same[backend is kernels] = sum(one.tokens == two.tokens for one, two in zip(outputs, wanted, strict=True))
    print(f"{rule}, {dtype}: of 64 texts {same[True]} are the same, {same[False]} of the plain engine")
    assert same[True] >= (64 if dtype == torch.float32 else same[False] - 12)
