"""`freda bench decode --mixed` and `--arrivals` on a CPU: who arrives when, and what is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from freda.bench import decode, traffic
from freda.bench.traffic import Run, Traffic, arrival_times, parse_rate, parse_span
from freda.cli import run
from freda.decode.config import EngineConfig
from freda.decode.engine import Engine
from freda.decode.handle import Handle
from freda.decode.request import Request
from freda.errors import FredaError
from freda.folders.model_folder import LoadedModel
from freda.model.config import ModelConfig
from tests.helpers import scored, use_ahead

pytestmark = pytest.mark.usefixtures("rates_once")
LENGTHS = ("equal", "mixed")
SIZES = ["--batch", "2", "--prompts", "3-17", "--answers", "2-9", "--device", "cpu"]
LOAD = Traffic(2, 17, 9, 2, 2.0, "self-refine", prompts=(3, 17), answers=(2, 9), arrivals=())


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelConfig(vocab_size=64, dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn_dim=32, max_positions=64)
    monkeypatch.setitem(decode.SHAPES, "small", shape)


@pytest.fixture
def model() -> LoadedModel:
    return scored("self-refine")._replace(tokenizer=decode.NoText())


def measured(out: Path, *options: str) -> dict[str, Any]:
    assert run(["bench", "decode", "small", *SIZES, *options, "--out", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_the_table_and_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(tmp_path / "bench.json", "--arrivals", "70%", "--arrivals", "400", "--compare")
    shown = capsys.readouterr().out.splitlines()
    assert found["prompts"] == [3, 17] and found["answers"] == [2, 9] and "rows" not in found
    equal, mixed, share, rate, *compared = rows = found["traffic"]
    lengths = LOAD.lengths()
    mean = round(sum(answer for _, answer in lengths) / 6)
    drawn = sum(answer for _, answer in lengths)
    assert [row["tokens"] for row in rows] == [6 * mean, drawn, drawn, drawn, 6 * mean, drawn]
    assert mixed["share_of_equal"] == pytest.approx(mixed["tokens_per_s"] / equal["tokens_per_s"])
    assert share["offered_per_s"] == pytest.approx(0.7 * mixed["requests_per_s"]) and rate["offered_per_s"] == 400
    assert [row["what"] for row in (equal, mixed)] == [f"plain engine, self-refine, {what}" for what in LENGTHS]
    assert [row["what"] for row in compared] == [f"plain engine, autoregressive, {what}" for what in LENGTHS]
    assert share["what"].endswith("arrivals/s (70% of mixed)") and rate["what"].endswith(", 400 arrivals/s")
    for row in rows:
        assert row["places"] == 2 and row["requests"] == 6 and row["refused"] == 0
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(row["tokens"])
        assert row["requests_per_s"] * row["seconds"] == pytest.approx(6)
        assert row["host_ms_per_pass"] * row["passes_made"] <= 1e3 * row["seconds"] * 1.000001
        for spread in (row["first_block_ms"], row["between_blocks_ms"]):
            assert 0 < spread["median"] <= spread["p99"]
        assert row["between_p99_over_median"] >= 1
    assert equal["longest_queue"] == mixed["longest_queue"] == 6
    times = "first block ms (99%) | between blocks ms (99%) | host ms per pass"
    assert shown[2] == f"| what | places | requests | tokens/s | of equal | {times} |"
    assert [line.count("|") for line in shown[2:]] == [9] * 8
    assert shown[4].startswith("| plain engine, self-refine, equal | 2 | 6 | ")


@pytest.mark.parametrize("method", ["autoregressive", "block-diffusion", "best-of-n"])
def test_every_method_has_its_rows(method: str, tmp_path: Path) -> None:
    rows = measured(tmp_path / "bench.json", "--mixed", "--compare", "--method", method)["traffic"]
    methods = dict.fromkeys([method, "autoregressive"])
    assert [row["what"] for row in rows] == [f"plain engine, {one}, {what}" for one in methods for what in LENGTHS]


def test_every_number_of_places_has_its_rows(tmp_path: Path) -> None:
    rows = measured(tmp_path / "bench.json", "--batch", "1", "--mixed")["traffic"]
    assert [(row["places"], row["requests"]) for row in rows] == [(2, 6), (2, 6), (1, 3), (1, 3)]


def test_the_rows_name_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_ahead(monkeypatch)
    for options, name in ([], "engine with kernels and graphs"), (["--plain"], "plain engine"):
        rows = measured(tmp_path / "bench.json", "--mixed", *options)["traffic"]
        assert [row["what"] for row in rows] == [f"{name}, self-refine, {what}" for what in LENGTHS]


def test_one_block_has_nothing_between(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured(tmp_path / "bench.json", "--mixed", "--prompts", "4-4", "--answers", "1-4")["traffic"]
    assert all(row["between_blocks_ms"] == {} and row["between_p99_over_median"] is None for row in rows)
    assert capsys.readouterr().out.count(" | – | ") == 3  # and the first row is not compared


def test_no_prompt_comes_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The engine would find its pages again, and have no prefill to do."""
    prompts, submit = [], Engine.submit

    def seen(engine: Engine, request: Request, *ended: Any) -> Handle:
        prompts.append(tuple(request.prompt))
        return submit(engine, request, *ended)

    monkeypatch.setattr(Engine, "submit", seen)
    measured(tmp_path / "bench.json", "--prompts", "12-17", "--arrivals", "100", "--arrivals", "50%")
    assert len(prompts) == 2 + 4 * 6 == len(set(prompts))


@pytest.mark.parametrize(
    "options, error",
    [
        (["--prompts", "64-"], "--prompts is '64-'; use a range"),
        (["--prompts", "9"], "--prompts is '9'; use a range"),
        (["--prompts", "9-4"], "--prompts is '9-4'; use a range"),
        (["--answers", "0-4"], "--answers is '0-4'; use a range"),
        (["--arrivals", "0"], "--arrivals is '0'; use requests per second above 0"),
        (["--arrivals", "-1"], "--arrivals is '-1'; use requests"),
        (["--arrivals", "0%"], "--arrivals is '0%'; use requests"),
        (["--arrivals", "often"], "--arrivals is 'often'; use requests"),
        (["--prompts", "9-56"], "prompt and answer have 65 tokens, the model has 64 positions; use shorter --prompts"),
        (["--prompts", "9-10000000000"], "the model has 64 positions"),
        (["--profile"], "--profile is for passes over equal requests"),
        (["--method", "best"], "there is no method 'best'"),
    ],
)
def test_bad_input(options: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "decode", "small", *SIZES, "--mixed", *options]) == 2
    assert error in capsys.readouterr().err


def test_ranges_and_rates() -> None:
    assert parse_span("--prompts", "64-1024") == (64, 1024) and parse_span("--prompts", "7-7") == (7, 7)
    assert parse_rate("70%") == (0.7, True) and parse_rate("2.5") == (2.5, False) and parse_rate(".5%")[1]


def test_lengths_and_arrivals_are_drawn_with_a_seed() -> None:
    many = Traffic(700, 17, 9, 2, 2.0, "self-refine", prompts=(3, 17), answers=(2, 9), arrivals=())
    lengths, times = many.lengths(), arrival_times(2100, 50.0)
    assert lengths == many.lengths() and len(lengths) == 2100
    assert {prompt for prompt, _ in lengths} == {*range(3, 18)} and {answer for _, answer in lengths} == {*range(2, 10)}
    assert times == arrival_times(2100, 50.0) == sorted(times) and times[0] > 0
    assert times[-1] == pytest.approx(2100 / 50, rel=0.1)
    assert [2 * time for time in arrival_times(9, 20.0)] == pytest.approx(arrival_times(9, 10.0))
    gaps = torch.tensor(times).diff(prepend=torch.zeros(1))
    both = torch.stack([gaps, *torch.tensor(lengths, dtype=torch.float32).T])
    assert both.corrcoef().fill_diagonal_(0).abs().max() < 0.1


def test_a_full_queue_refuses_arrivals_and_holds_back_the_rest(model: LoadedModel) -> None:
    requests = decode.random_requests(model, LOAD, lengths=LOAD.lengths())
    config = EngineConfig(max_batch=1, queue=2)
    at_once = Run(Engine(model, config), requests)
    at_once.drive()
    assert at_once.refused == 0 and at_once.longest_queue == 2 and len(at_once.times) == 6
    assert at_once.tokens == sum(request.max_new_tokens for request in requests)
    arriving = Run(Engine(model, config), requests, [0.0, 0.0, 0.0, 0.0, 0.0, 0.05])
    arriving.drive()
    assert arriving.refused >= 3 and arriving.longest_queue == 2 and len(arriving.times) == 6 - arriving.refused


class Clock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.time, self.naps = 0.0, []

    def perf_counter(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.naps.append(seconds)


def test_an_idle_engine_sleeps_until_the_next_arrival(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(traffic, "time", clock)
    monkeypatch.setattr(traffic, "now", lambda device: clock.time)
    late = Run(Engine(model), decode.random_requests(model, LOAD, lengths=[(8, 8)] * 3), [0.5, 0.5, 4.0])
    late.drive()
    assert clock.naps == [0.5, 3.5] and late.slept == late.seconds == 4.0
    assert late.times == [[0.5] * 3, [0.5] * 3, [4.0] * 3]  # the arrival and two blocks


def test_an_error_of_a_request_is_told() -> None:
    damaged = scored("self-refine")._replace(tokenizer=decode.NoText())
    with torch.no_grad():
        damaged.backbone.head_weight.fill_(torch.nan)
    with pytest.raises(FredaError, match="not finite"):
        Run(Engine(damaged), decode.random_requests(damaged, LOAD)).drive()


def test_taking_events_takes_no_step(model: LoadedModel) -> None:
    runner = Engine(model)
    handle = runner.submit(decode.random_requests(model, LOAD, lengths=[(8, 8)])[0])
    assert handle.take() == [] and runner.passes == 0 and runner.waited == 0
    events = []
    while not handle.finished:
        runner.step()
        events += handle.take()
    assert [len(event.tokens) for event in events] == [4, 4] and events[-1].finish == "length"
    assert handle.take() == [] and runner.passes == handle.result().nfe
