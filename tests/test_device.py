"""Passes that stay on the device make what `generate` makes: with plain forwards here, with kernels on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from freda.decode import device
from freda.decode.batch import RequestBatch
from freda.decode.config import EngineConfig
from freda.decode.device import DeviceBatch, ForwardBackend, prefill
from freda.decode.engine import Engine
from freda.decode.generate import generate
from freda.decode.pages import PagedCache, Pages
from freda.decode.request import Event, Pass, Request, Sequence
from freda.folders.model_folder import LoadedModel
from freda.methods import METHODS
from freda.model.parts import Parts
from freda.model.scorer import Scorer
from freda.model.transformer import Transformer
from tests.helpers import (
    EOS,
    Letters,
    AheadModel,
    alone,
    init_weights,
    method,
    mixed_settings,
    random_prompts,
    scored,
    tiny_model,
)

ALL = tuple(METHODS)
SMALL = EngineConfig(max_batch=3, page_size=8, pages=40, prefill=24)
GREEDY = {"temperature": 0.0, "candidates": "beam"}


@pytest.mark.parametrize("name", ALL)
def test_every_request_is_what_generate_makes_of_it_alone(name: str) -> None:
    """Fourteen requests with settings of their own through five places: they enter, leave, are filled up to eight."""
    model = scored(name)
    config = EngineConfig(max_batch=5, page_size=8, pages=60, prefill=24)
    asked = [Request(prompt=p, **(mixed_settings(n) | GREEDY)) for n, p in enumerate(random_prompts(14, seed=2))]
    engine = Engine(model, config, AheadModel)
    outputs = engine.run(asked)
    assert {type(batch) for batch in engine.batches.values()} == {DeviceBatch}
    for request, output in zip(asked, outputs, strict=True):
        assert (output.tokens, output.nfe, output.finish) == alone(model, request)


def test_requests_by_chance_go_the_plain_way_beside() -> None:
    model = scored("best-of-n")
    engine = Engine(model, SMALL, AheadModel)
    asked = [Request(prompt=p, **mixed_settings(n)) for n, p in enumerate(random_prompts(12))]
    outputs = engine.run(asked)
    assert {(kind.name, on_device) for kind, on_device in engine.batches} == {("best-of-n", True), ("best-of-n", False)}
    for request, output in zip(asked, outputs, strict=True):
        assert (output.tokens, output.nfe, output.finish) == alone(model, request)


@pytest.mark.parametrize("name", ["self-refine", "best-of-n"])
def test_a_watched_request_leaves_the_others_on_the_device(name: str) -> None:
    """It runs in a plain batch of its own, and shows every pass; nothing else changes."""
    model = scored(name)
    asked = [Request(prompt=p, **(mixed_settings(n) | GREEDY)) for n, p in enumerate(random_prompts(4, seed=3))]
    engine = Engine(model, EngineConfig(max_batch=4, page_size=8, pages=60), AheadModel)
    handles = [engine.submit(replace(request, watch=n == 1)) for n, request in enumerate(asked)]
    filed = [list(handle) for handle in handles]
    assert {(kind.name, on_device) for kind, on_device in engine.batches} == {(name, True), (name, False)}
    for n, (handle, request) in enumerate(zip(handles, asked, strict=True)):
        output = handle.result()
        assert (output.tokens, output.nfe, output.finish) == alone(model, request)
        assert sum(isinstance(one, Pass) for one in filed[n]) == (output.nfe if n == 1 else 0)


@pytest.mark.parametrize("most", [8, 7])
def test_passes_go_ahead_of_their_reports_but_not_past_the_end(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The next pass starts before the report of the last is read, and none is made in vain; none of many tokens."""
    monkeypatch.setattr(device, "MOST_AHEAD", most)  # of a request's block to commit and its draft: 4 + 4
    started, read = [0], []
    run, send = AheadModel.run, device._sent
    monkeypatch.setattr(AheadModel, "run", lambda *given: (started.__setitem__(0, started[0] + 1), run(*given))[1])

    def sent(report: Tensor) -> Callable[[], list[list[int]]]:
        told = send(report)
        return lambda: (read.append(started[0]), told())[1]

    monkeypatch.setattr(device, "_sent", sent)
    model = scored("self-refine")
    engine = Engine(model, EngineConfig(max_batch=4, page_size=8, pages=60), AheadModel)
    output = engine.run([Request(prompt=random_prompts(1)[0], max_new_tokens=24, passes=2, threshold=2.0)])[0]
    assert len(output.tokens) == 24 and started[0] == output.nfe == len(read)
    ahead = [begun - number for number, begun in enumerate(read, 1)].count(1)
    assert ahead >= output.nfe - 4 if most == 8 else ahead == 0


def test_tables_are_filled_up_with_the_spare_page() -> None:
    pages = Pages(scored().backbone, 10, 8)
    spare = pages.spare
    found = PagedCache(pages, [[3], [0, 1]], [0, 0]).table(3, 3)
    assert found.tolist() == [[3, spare, spare], [0, 1, spare], [spare] * 3] and found.dtype == torch.int32


def test_padding_commits_nothing() -> None:
    """Nobody ends it: where it is surer than the requests beside it, its text would outgrow its table. A request that
    takes its place does commit."""
    model = scored()
    engine = Engine(model, EngineConfig(max_batch=4, page_size=8, pages=60), AheadModel)
    asked = [Request(prompt=prompt, max_new_tokens=20, passes=2) for prompt in random_prompts(4, seed=9)]
    handles = [engine.submit(request) for request in asked[:3]]
    for _ in range(6):
        engine.step()
    ((key, program),) = engine._programs.items()
    assert key[1] == 4 and program.held[1].stored[:3].min() > 0
    assert program.held[1].stored[3] == program.held[1].pending[3] == 0
    assert all(handle.result().finish for handle in handles)
    assert [output.tokens for output in engine.run(asked)] == [alone(model, one)[0] for one in asked]


def test_more_requests_than_the_largest_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "BUCKETS", (1, 2))
    model = scored()
    engine = Engine(model, EngineConfig(max_batch=3, page_size=8, pages=60), AheadModel)
    asked = [Request(prompt=prompt, max_new_tokens=8) for prompt in random_prompts(3)]
    assert [output.tokens for output in engine.run(asked)] == [alone(model, one)[0] for one in asked]
    assert {size for _, size, _ in engine._programs} >= {64}


def test_one_request_of_many_candidates() -> None:
    """After its first pass, which has one, the next has all."""
    model = scored("best-of-n")
    asked = [Request(prompt=p, max_new_tokens=12, threshold=2.0, width=4, tau=2.0) for p in random_prompts(6, seed=1)]
    for request in asked:
        output = Engine(model, SMALL, AheadModel).run([request])[0]
        assert (output.tokens, output.nfe, output.finish) == alone(model, request)


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
    asked = [Request(prompt=p, max_new_tokens=20, threshold=0.5) for p in random_prompts(4, seed=9)]
    handles = [engine.submit(request) for request in asked]
    for _ in range(3):
        engine.step()
    handles[1].cancel()
    for handle, request in zip(handles, asked, strict=True):
        output = handle.result()
        if handle is not handles[1]:
            assert (output.tokens, output.nfe) == alone(model, request)[:2]


def test_damaged_weights_end_the_request_with_an_error() -> None:
    model = scored()
    with torch.no_grad():
        model.backbone.norm.weight.fill_(float("nan"))
    engine = Engine(model, SMALL, AheadModel)
    events = list(engine.submit(Request(prompt=[1, 2, 3], max_new_tokens=8)))
    assert [event.finish for event in events if isinstance(event, Event)] == ["error"] and not engine.busy


def test_it_can_be_left_out() -> None:
    model = scored()
    engine = Engine(model, EngineConfig(max_batch=2, page_size=8, pages=20, on_device=False), AheadModel)
    engine.run([Request(prompt=[1, 2], max_new_tokens=4)])
    assert not any(isinstance(batch, DeviceBatch) for batch in engine.batches.values())


def test_the_padding_of_a_short_prompt_goes_to_the_spare_page() -> None:
    """It would be written over another's text otherwise."""
    model, tables = scored(), list[list[list[int]]]()
    pages = Pages(model.backbone, 10, 8)

    class Recorder(AheadModel):
        def prefill(self, ids: Tensor, table: Tensor, block_size: int) -> None:
            tables.append(table.tolist())

    texts = [Sequence(0, Request(prompt=[1] * 8), 4), Sequence(1, Request(prompt=[2] * 32), 4)]
    prefill(Recorder(model.backbone, pages), PagedCache(pages, [[3], [0, 1, 2, 4]], [0, 0]), texts, 4, 0, 64)
    assert tables == [[[3, pages.spare, pages.spare, pages.spare], [0, 1, 2, 4]]]
    assert [text.stored for text in texts] == [8, 32]


def test_what_does_not_stay_on_the_device() -> None:
    plain, parts = Request(prompt=[1]), scored().parts
    best = method("best-of-n")
    assert not best.off_device(parts, plain)
    for rule, given, request in (
        (best, scored(last_layer=True).parts, plain),
        (method("best-of-n", rescale=True), parts, plain),
        (best, parts, replace(plain, temperature=0.5)),
        (best, parts, replace(plain, candidates="sampled")),
    ):
        assert rule.off_device(given, request)


# -- on a GPU: kernels and graphs ------------------------------------------------------------------------------------


def gpu_model(name: str, dtype: torch.dtype, **shape: Any) -> LoadedModel:
    sizes = {"dim": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn_dim": 512, "layers": 3, **shape}
    model = tiny_model(**sizes)
    scorer = Scorer(model.config)
    init_weights(scorer, 0, model)
    for part in (model, scorer):
        part.to("cuda", dtype)
        part.inv_freq = part.inv_freq.float()
    return LoadedModel(Parts(model, scorer), Letters(), method(name, block_size=4), "test")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 24), (torch.float32, 3), (torch.bfloat16, 24)], ids=["fp32", "compiled", "bf16"]
)
@pytest.mark.parametrize("name", ALL)
def test_sixty_four_mixed_requests_on_a_gpu(name: str, dtype: torch.dtype, most: int) -> None:
    """In fp32 kernels and graphs give the texts of the reference loop. In bf16 they round less often than the plain
    model does, and texts part where two tokens are nearly as good: they are to be as close to what the same weights
    write in fp32 as the plain model's are."""
    from freda.decode.packed import PackedModel

    def machine(model: Transformer, pages: Pages) -> ForwardBackend:
        made = PackedModel(model, pages)
        if dtype == torch.float32:
            made.prefill = AheadModel(model, pages).prefill  # type: ignore[method-assign]  # cuDNN has no fp32
        return made

    model = gpu_model(name, dtype)
    asked = [Request(prompt=p, **(mixed_settings(n) | GREEDY)) for n, p in enumerate(random_prompts(64, seed=4))]
    exact = gpu_model(name, dtype).parts
    for part in (exact.backbone, exact.scorer):
        assert part is not None
        part.float()
    wanted = generate(exact, model.method, asked, stop_ids=[EOS])
    same = {}
    for on_device in (False, True):
        config = EngineConfig(max_batch=most, page_size=16, pages=300, on_device=on_device)
        engine = Engine(model, config, machine)
        outputs = engine.run(asked)
        kind = DeviceBatch if on_device else RequestBatch
        assert {type(batch) for batch in engine.batches.values()} == {kind} and engine.pages.available == 300
        same[on_device] = sum(one.tokens == two.tokens for one, two in zip(outputs, wanted, strict=True))
    print(f"{name}, {dtype}: of 64 texts {same[True]} are the same, {same[False]} of the plain engine")
    assert same[True] >= (64 if dtype == torch.float32 else same[False] - 12)
