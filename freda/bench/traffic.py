"""`freda bench decode --mixed` and `--arrivals`: requests of many lengths, at once or by and by.

Equal requests, all of the mean lengths, show what a mixture costs. Arrivals are a Poisson process.
The time of a request begins when it arrives; its reader sees a block after the step that filed it.
"""

from __future__ import annotations

import itertools
import random
import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from freda.bench.decode import Case, Measured, cell, engine_name, forget, heading, opened, random_requests
from freda.bench.rates import now
from freda.decode.config import EngineConfig
from freda.decode.engine import Engine
from freda.decode.handle import Handle
from freda.decode.request import Event, QueueFull, Request
from freda.errors import note, require
from freda.folders.model_folder import LoadedModel

SEED = 1  # of lengths and arrivals
Span = tuple[int, int]  # lengths to draw from, both ends included
Rate = tuple[float, bool]  # a number, and whether it is a share of what the mixed row has reached


@dataclass(frozen=True)
class Traffic(Case):
    """What one engine is asked; its context and new tokens are the greatest lengths."""

    prompts: Span
    answers: Span
    arrivals: tuple[Rate, ...]

    def lengths(self) -> list[tuple[int, int]]:
        """Of prompts and answers, drawn uniformly for three requests per place."""
        draw, count = random.Random(SEED), 3 * self.batch
        return [(draw.randint(*self.prompts), draw.randint(*self.answers)) for _ in range(count)]


def parse_span(option: str, text: str) -> Span:
    """The range in an option."""
    low, high = map(int, text.split("-")) if re.fullmatch(r"\d+-\d+", text) else (0, 0)
    require(1 <= low <= high, f"{option} is {text!r}; use a range from 1 or more upwards, as 64-1024")
    return low, high


def parse_rate(text: str) -> Rate:
    """The rate in `--arrivals`."""
    number = float(text.removesuffix("%")) if re.fullmatch(r"\d*\.?\d+%?", text) else 0.0
    usage = "use requests per second above 0, or a share of those of the mixed row, as 70%"
    require(number > 0, f"--arrivals is {text!r}; {usage}")
    return (number / 100, True) if text.endswith("%") else (number, False)


def arrival_times(count: int, rate: float) -> list[float]:
    """When requests arrive, in seconds from the start; drawn independently of their lengths."""
    draw = random.Random(SEED + 1)
    return list(itertools.accumulate(draw.expovariate(rate) for _ in range(count)))


def bench_traffic(what: Measured, loads: list[Traffic], engine: EngineConfig, *, compare: bool) -> dict[str, Any]:
    """Measure a model; loads differ in places. Returns what the table shows."""
    first = loads[0]
    loaded, _, about_run = opened(what, first.method)
    others = {"autoregressive"} - {first.method} if compare else set()
    loads = loads + [replace(load, method=name, arrivals=()) for name in others for load in loads]
    return {
        **about_run,
        **{key: getattr(first, key) for key in ("passes", "threshold", "prompts", "answers")},
        "queue": engine.queue,
        "seed": SEED,
        "traffic": [row for load in loads for row in _rows(loaded, load, engine)],
    }


def _rows(loaded: LoadedModel, load: Traffic, config: EngineConfig) -> list[dict[str, Any]]:
    """The rows of one engine, each with prompts of its own, since the engine remembers prompts."""
    forget(loaded)
    most, limit = load.context + load.new_tokens, loaded.backbone.config.max_positions
    longest = f"the longest prompt and answer have {most} tokens, the model has {limit} positions"
    require(most <= limit, f"{longest}; use shorter --prompts or --answers")
    engine = Engine(loaded, replace(config, max_batch=load.batch, max_length=most))
    least, greatest = zip(load.prompts, load.answers, strict=True)
    spread = np.linspace(least, greatest, load.batch).astype(int).tolist()
    warm = random_requests(loaded, load, seed=0, lengths=spread)
    begun = now(loaded.parts.device)
    engine.prepare(warm[0])
    note(f"prepared in {now(loaded.parts.device) - begun:.1f} s")
    engine.run(warm)
    lengths = load.lengths()
    means = np.mean(lengths, axis=0).round().astype(int).tolist()
    equal = random_requests(loaded, load, seed=1, lengths=[means] * len(lengths))
    mixed = random_requests(loaded, load, seed=2, lengths=lengths)
    rows = [_row("equal", load, Run(engine, equal)), _row("mixed", load, Run(engine, mixed))]
    rows[1]["share_of_equal"] = rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"]
    for seed, (number, is_share) in enumerate(load.arrivals, 3):
        rate = number * rows[1]["requests_per_s"] if is_share else number
        requests = random_requests(loaded, load, seed=seed, lengths=lengths)
        run = Run(engine, requests, arrival_times(len(requests), rate))
        what = f"{rate:.3g} arrivals/s" + f" ({number:.0%} of mixed)" * is_share
        rows.append(_row(what, load, run) | {"offered_per_s": rate})
    return rows


class Run:
    """Sends requests to an engine as they arrive, and reads their blocks.

    A full queue refuses them. Without `arrivals` all are there at the start and wait for the queue.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], arrivals: Sequence[float] = ()) -> None:
        self.engine, self.arrivals = engine, arrivals
        self.coming = deque(zip(arrivals or [0.0] * len(requests), requests, strict=True))
        self.reading: dict[Handle, list[float]] = {}  # requests under way, and their times:
        self.times: list[list[float]] = []  # of all requests, the arrival and every block
        self.tokens = self.refused = self.longest_queue = 0
        self.seconds = self.slept = 0.0  # all of them, and those with nothing to do

    def drive(self) -> None:
        """Submit what has arrived, then step, until all requests have ended."""
        begun = now(self.engine.loaded.parts.device)
        while self.coming or self.reading:
            moment = time.perf_counter() - begun
            self._submit(moment)
            if self.reading:
                self.engine.step()
                self._read(time.perf_counter() - begun)
            elif self.coming:
                time.sleep(self.coming[0][0] - moment)
                self.slept += time.perf_counter() - begun - moment
        self.seconds = time.perf_counter() - begun

    def _submit(self, moment: float) -> None:
        """Submit what has arrived by this moment."""
        while self.coming and self.coming[0][0] <= moment:
            arrived, request = self.coming[0]
            try:
                self.times.append(self.reading.setdefault(self.engine.submit(request), [arrived]))
            except QueueFull:
                if not self.arrivals:
                    break
                self.refused += 1
            self.coming.popleft()
        self.longest_queue = max(self.longest_queue, len(self.engine.waiting))

    def _read(self, moment: float) -> None:
        """Take what has been filed by this moment."""
        ended = []
        for handle, times in self.reading.items():
            for event in handle.take():
                assert isinstance(event, Event)  # no request is watched
                require(event.finish != "error", event.error)
                times.append(moment)
                self.tokens += len(event.tokens)
                ended += [handle] * bool(event.finish)
        for handle in ended:
            del self.reading[handle]


def _row(what: str, load: Traffic, run: Run) -> dict[str, Any]:
    """Drive a run; returns its row. Sleep is no time of the host."""
    engine, passes, waited = run.engine, run.engine.passes, run.engine.waited
    what = f"{engine_name(engine)[0]}, {load.method}, {what}"
    note(f"{what}, {load.batch} places")
    run.drive()
    passes, waited = engine.passes - passes, engine.waited - waited
    between = _spread([gap for times in run.times for gap in np.diff(times[1:])])
    note(f"{run.tokens / run.seconds:.1f} tokens/s")
    return {
        "what": what,
        "places": load.batch,
        "requests": len(run.times) + run.refused,
        "refused": run.refused,
        "longest_queue": run.longest_queue,
        "tokens": run.tokens,
        "seconds": run.seconds,
        "passes_made": passes,
        "tokens_per_s": run.tokens / run.seconds,
        "requests_per_s": len(run.times) / run.seconds,
        "host_ms_per_pass": 1e3 * (run.seconds - run.slept - waited) / passes,
        "first_block_ms": _spread([times[1] - times[0] for times in run.times]),
        "between_blocks_ms": between,
        "between_p99_over_median": between["p99"] / between["median"] if between else None,
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """The median and the 99th percentile, in ms; empty where there is nothing."""
    if not seconds:
        return {}
    median, p99 = 1e3 * np.percentile(seconds, (50, 99))
    return {"median": float(median), "p99": float(p99)}


def table_lines(found: dict[str, Any]) -> list[str]:
    """The printed table."""
    titles = "what | places | requests | tokens/s | of equal"
    times = "first block ms (99%) | between blocks ms (99%) | host ms per pass"
    lines = [heading(found), "", f"| {titles} | {times} |", f"|---|{'---:|' * 7}"]
    for row in found["traffic"]:
        cells = [row["what"], str(row["places"]), f"{row['requests']}"]
        cells[-1] += f", {row['refused']} refused" * bool(row["refused"])
        cells += [f"{row['tokens_per_s']:,.1f}", cell(row.get("share_of_equal"), 1, ".1%")]
        for spread in (row["first_block_ms"], row["between_blocks_ms"]):
            cells.append("{median:,.1f} ({p99:,.1f})".format(**spread) if spread else "–")
        lines.append(f"| {' | '.join(cells)} | {row['host_ms_per_pass']:,.3f} |")
    return lines
