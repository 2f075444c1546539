"""`freda bench decode`: forwards and tokens per second of the engine, beside the limits of the same run.

With one stream, a forward reads every weight once: the fraction of the copy rate says how close it is to what the
memory allows. With `--compare`, the engine's own autoregressive decoder, `generate` of Hugging Face and the reference
loop, one request at a time, run with the same weights and prompts. Prompts are random ids and no text ends early, so
all rows generate the same number of tokens. Every block gets all its passes, unless a threshold of at most 1 lets the
model close blocks by its confidence.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from freda.bench import hugging_face
from freda.bench.rates import about, copy_rate, kernel_times, longest_first, matmul_rate, now
from freda.data.tokenizer import Tokenizer
from freda.decode.config import EngineConfig
from freda.decode.engine import Engine
from freda.decode.generate import generate
from freda.decode.request import Request, accepted_in
from freda.errors import note, require
from freda.folders.adapter_folder import load_with_adapter
from freda.folders.model_folder import LoadedModel
from freda.methods import method_like, method_named
from freda.methods.method import Method
from freda.model.config import ModelConfig, layer_parameters
from freda.model.parts import Parts, pick_device, pick_dtype
from freda.model.shapes import QWEN3_BLANK, SHAPES
from freda.model.transformer import Transformer, rotary_frequencies

NEVER = 2.0  # the threshold that no probability reaches
WARM_TOKENS = 8  # of a call before the one that is measured
MOST_ONE_BY_ONE = 16  # requests through the reference loop: more would take minutes and be no faster


@dataclass(frozen=True)
class Case:
    """One measurement."""

    batch: int
    context: int  # tokens of each prompt
    new_tokens: int
    passes: int  # most for a block
    threshold: float  # above 1: all passes are made
    method: str  # as `method_like` reads it


class Limits(NamedTuple):
    """The rates of the device, measured in the same run."""

    copy: float  # bytes per second, read and written
    matmul: float  # operations per second


class NoText(Tokenizer):
    """The tokenizer of what is measured: no token stops a text, and nothing is decoded."""

    def __init__(self) -> None:
        pass

    @property
    def stop_ids(self) -> list[int]:  # type: ignore[override]
        """No token ends a text."""
        return []

    def decode(self, ids: Iterable[int]) -> str:
        """An empty text, whatever the tokens."""
        return ""


class Measured(NamedTuple):
    """What is measured: a shape with random weights or a model folder, maybe with an adapter; and where."""

    model: str
    adapter: Path | None = None
    device: str = "auto"
    dtype: str = "auto"


def bench_decode(
    what: Measured,
    sizes: Sequence[Case],
    engine: EngineConfig = EngineConfig(),
    *,
    compare: bool = False,
    profile: bool = False,
) -> dict[str, Any]:
    """Measure a model in cases of one method, passes and threshold; returns what the table shows."""
    first = sizes[0]
    loaded, limits, about_run = opened(what, first.method)
    methods = dict.fromkeys([first.method, *["autoregressive"] * compare])
    cases = [replace(case, method=name) for name in methods for case in sizes]
    rows = [_measured(loaded, case, limits, engine, profile=profile) for case in cases]
    if compare:
        rows += _hugging_face(loaded, sizes, limits)
        rows += [_one_by_one(loaded, case) for case in sizes]
    return {
        **about_run,
        **({"transformers": hugging_face.version()} if compare else {}),
        "passes": first.passes,
        "threshold": first.threshold,
        "rows": rows,
    }


def opened(what: Measured, method: str) -> tuple[LoadedModel, Limits, dict[str, Any]]:
    """A model, the rates of the device, and what a report says about both."""
    place = pick_device(what.device)
    precision = pick_dtype(what.dtype, place)
    loaded = _model(what, place, precision, method_like(method))
    limits = Limits(copy_rate(place), matmul_rate(place, precision))
    note(f"copy {limits.copy / 1e12:.3f} TB/s, matmul {limits.matmul / 1e12:.1f} TFLOP/s")
    about_run = {
        **about(place),
        "model": what.model,
        **({} if what.adapter is None else {"adapter": str(what.adapter)}),
        "dtype": str(precision).removeprefix("torch."),
        "parameters": sum(weight.numel() for weight in loaded.backbone.parameters()),
        "copy_tb": limits.copy / 1e12,
        "matmul_tflops": limits.matmul / 1e12,
    }
    return loaded, limits, about_run


def _model(what: Measured, device: torch.device, dtype: torch.dtype, method: Method) -> LoadedModel:
    """A model folder, or random weights in a shape, with the parts that the method needs."""
    if what.model not in SHAPES:
        return load_with_adapter(Path(what.model), what.adapter, device, dtype)._replace(tokenizer=NoText())
    shapeless = f"--adapter {what.adapter} needs a model folder, but {what.model} is a shape with random weights"
    require(what.adapter is None, f"{shapeless}; name the adapter's base")
    parts = random_parts(SHAPES[what.model], method, device, dtype)
    return LoadedModel(parts, NoText(), method, "bench")


def random_parts(shape: ModelConfig, method: Method, device: torch.device, dtype: torch.dtype) -> Parts:
    """Random weights in a shape, with the parts that the method needs."""
    with torch.device("meta"):
        parts = Parts(Transformer(shape, min(QWEN3_BLANK, shape.vocab_size - 1)))
    method.start_from(parts, None, "random weights")
    parts = parts.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for weight in parts.parameters():
            weight.normal_(0, 0.02, generator=generator) if weight.dim() > 1 else weight.fill_(1.0)
    for part in parts.children():
        part.inv_freq = rotary_frequencies(shape).to(device)  # in fp32: angles in bf16 would be off by whole turns
    return parts


def random_requests(
    loaded: LoadedModel, case: Case, *, seed: int = 1, lengths: Sequence[Sequence[int]] = ()
) -> list[Request]:
    """Requests with different prompts, so that no pages are shared; also with different `lengths`."""
    generator, top = torch.Generator().manual_seed(seed), loaded.backbone.blank_id
    rules = Request(prompt=(), passes=case.passes, threshold=case.threshold, method=case.method)
    requests = []
    for number, (prompt, answer) in enumerate(lengths or [(case.context, case.new_tokens)] * case.batch):
        ids = torch.randint(0, top, (prompt,), generator=generator).tolist()
        requests.append(replace(rules, prompt=ids, max_new_tokens=answer, seed=number))
    return requests


def _warm_up(engine: Engine, case: Case) -> None:
    """Make every graph, and run every kernel once."""
    requests = random_requests(engine.loaded, case, seed=0)
    engine.prepare(requests[0])
    few = min(case.new_tokens, 3 * engine.loaded.method.block_size)
    engine.run([replace(request, max_new_tokens=few) for request in requests])


def _measured(
    loaded: LoadedModel, case: Case, limits: Limits, config: EngineConfig, *, profile: bool
) -> dict[str, Any]:
    """One row of the engine: the prefill, timed by itself, then steps until all requests are done."""
    forget(loaded)
    engine = Engine(loaded, replace(config, max_batch=case.batch, max_length=case.context + case.new_tokens))
    _warm_up(engine, case)
    name, on_device, int8 = engine_name(engine)
    handles = [engine.submit(request) for request in random_requests(loaded, case)]
    begun = now(loaded.parts.device)
    engine.admit()
    prefilled = now(loaded.parts.device)
    before = engine.passes
    while engine.busy:
        engine.step()
    ended = now(loaded.parts.device)
    outputs = [handle.result() for handle in handles]
    tokens, nfe = sum(len(output.tokens) for output in outputs), sum(output.nfe for output in outputs)
    row = {
        **_start_of_row(f"{name}, {case.method}", case),
        "on_device": on_device,
        "int8": int8,
        **_of_passes(loaded, engine.passes - before, tokens, ended - prefilled, limits, int8=int8),
        **_of_prefill(loaded, case, prefilled - begun, limits),
        **_end_of_row(loaded, tokens, nfe, ended - begun),
        "accepted": accepted_in(output.accepted for output in outputs),
    }
    return {**row, "kernels": _kernels(engine, case)} if profile else row


def engine_name(engine: Engine) -> tuple[str, bool, bool]:
    """What ran the requests so far, in words; whether passes stayed on the device, and whether with int8 weights."""
    on_device, int8 = engine.on_device, engine.on_device and engine.config.int8
    return f"engine with kernels and graphs{', int8' * int8}" if on_device else "plain engine", on_device, int8


def _kernels(engine: Engine, case: Case) -> list[dict[str, Any]]:
    """Microseconds of every kind of kernel in a forward over two blocks after the prefill, the longest first."""
    few = replace(case, new_tokens=min(case.new_tokens, 2 * engine.loaded.method.block_size))
    handles = [engine.submit(request) for request in random_requests(engine.loaded, few, seed=2)]
    engine.admit()
    before = engine.passes

    def run() -> None:
        for handle in handles:
            handle.result()

    spent = longest_first(kernel_times(run, engine.loaded.parts.device), 16)
    forwards = engine.passes - before
    return [{"name": name[:80], "us": 1e3 * ms / forwards, "calls": calls / forwards} for name, ms, calls in spent]


def _start_of_row(what: str, case: Case) -> dict[str, Any]:
    note(f"{what}, batch {case.batch}, context {case.context}")
    return {"what": what, **{key: value for key, value in asdict(case).items() if key != "method"}}


def _end_of_row(loaded: LoadedModel, tokens: int, nfe: int, seconds: float) -> dict[str, Any]:
    """The columns of a row about all that was done; the peak of memory is that since `forget`, weights included."""
    memory = torch.cuda.max_memory_allocated() / 1e9 if loaded.parts.device.type == "cuda" else None
    note(f"{tokens / seconds:.1f} tokens/s with prefill")
    return {"tokens_per_s_with_prefill": tokens / seconds, "tpf": tokens / nfe, "memory_gb": memory}


def _of_passes(
    loaded: LoadedModel, forwards: int, tokens: int, seconds: float, limits: Limits, *, int8: bool = False
) -> dict[str, float]:
    """The columns of a row about the forwards after the prefill."""
    sizes = ((one.numel(), 1 if int8 and one.dim() > 1 else one.element_size()) for one in loaded.backbone.parameters())
    weights = sum(count * size for count, size in sizes)
    return {
        "passes_seconds": seconds,
        "seconds_per_forward": seconds / forwards,
        "forwards_per_s": forwards / seconds,
        "weights_share_of_copy": weights * forwards / seconds / limits.copy,
        "tokens_per_s": tokens / seconds,
    }


def _of_prefill(loaded: LoadedModel, case: Case, seconds: float, limits: Limits) -> dict[str, float]:
    tokens = case.batch * case.context
    return {
        "prefill_seconds": seconds,
        "prefill_tokens_per_s": tokens / seconds,
        "prefill_share_of_matmul": 2.0 * layer_parameters(loaded.backbone.config) * tokens / seconds / limits.matmul,
    }


def _hugging_face(loaded: LoadedModel, cases: Sequence[Case], limits: Limits) -> list[dict[str, Any]]:
    """Rows of `generate` of transformers, a batch at a time; the first token comes with the prefill."""
    what = "Hugging Face generate, autoregressive"
    if hugging_face.version() is None:
        note("transformers is not installed: nothing to compare with")
        return [_start_of_row(f"{what}: transformers is not installed", case) for case in cases]
    theirs, rows = hugging_face.borrowed(loaded.backbone), []
    for case in cases:
        forget(loaded)
        row = _start_of_row(what, case)
        few, prompts = ([request.prompt for request in random_requests(loaded, case, seed=seed)] for seed in (0, 1))
        hugging_face.timed_generate(theirs, few, min(case.new_tokens, WARM_TOKENS))
        made = hugging_face.timed_generate(theirs, prompts, case.new_tokens)
        forwards, tokens = case.new_tokens - 1, sum(map(len, made.tokens))
        if forwards:
            row |= _of_passes(loaded, forwards, case.batch * forwards, made.passes, limits)
        row |= _of_prefill(loaded, case, made.prefill, limits)
        rows.append(row | _end_of_row(loaded, tokens, tokens, made.prefill + made.passes))
    return rows


def _one_by_one(loaded: LoadedModel, case: Case) -> dict[str, Any]:
    """A row of the reference loop with its cache, one request at a time."""
    forget(loaded)
    row = _start_of_row(f"reference loop one by one, {case.method}", case)
    requests, method = random_requests(loaded, case)[:MOST_ONE_BY_ONE], method_named(case.method, loaded.method)
    begun = now(loaded.parts.device)
    made = [generate(loaded.parts, method, [request], stop_ids=loaded.tokenizer.stop_ids)[0] for request in requests]
    seconds = now(loaded.parts.device) - begun
    tokens, nfe = sum(len(output.tokens) for output in made), sum(output.nfe for output in made)
    return row | {"forwards_per_s": nfe / seconds, **_end_of_row(loaded, tokens, nfe, seconds)}


def forget(loaded: LoadedModel) -> None:
    """Free what the last row has left, so that the peak of memory is the next row's own."""
    gc.collect()
    if loaded.parts.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


COLUMNS = {  # of the table: from which value of a row, times what, and how it is printed
    "forwards/s": ("forwards_per_s", 1, ",.1f"),
    "ms per forward": ("seconds_per_forward", 1e3, ",.3f"),
    "weights over copy rate": ("weights_share_of_copy", 1, ".1%"),
    "tokens/s": ("tokens_per_s", 1, ",.1f"),
    "with prefill": ("tokens_per_s_with_prefill", 1, ",.1f"),
    "tokens per forward": ("tpf", 1, ".2f"),
    "prefill tokens/s": ("prefill_tokens_per_s", 1, ",.1f"),
    "peak GB": ("memory_gb", 1, ".2f"),
}


def heading(found: dict[str, Any]) -> str:
    """The line above a table."""
    rule = f"{found['passes']} passes for every block"
    if found["threshold"] <= 1:
        rule = f"at most {found['passes']} passes for a block, which closes from probability {found['threshold']:g} on"
    return (
        f"{found['model']}, {_scaled(found['parameters'], 'M', 'B')} parameters, {found['dtype']}, {found['device']}: "
        f"copy {_scaled(1e9 * found['copy_tb'], 'GB/s', 'TB/s')}, "
        f"matmul {_scaled(1e9 * found['matmul_tflops'], 'GFLOP/s', 'TFLOP/s')}; {rule}"
    )


def table_lines(found: dict[str, Any]) -> list[str]:
    """The printed table."""
    lines = [
        heading(found),
        "",
        f"| what | batch | context | {' | '.join(COLUMNS)} |",
        f"|---|---:|---:|{'---:|' * len(COLUMNS)}",
    ]
    for row in found["rows"]:
        cells = [cell(row.get(key), times, form) for key, times, form in COLUMNS.values()]
        lines.append(f"| {' | '.join([row['what'], str(row['batch']), str(row['context']), *cells])} |")
    for row in found["rows"]:
        if "kernels" in row:
            where = f"{row['what']}, batch {row['batch']}, context {row['context']}"
            lines += ["", f"| kernels of a forward: {where} | calls | µs |", "|---|---:|---:|"]
            lines += [f"| {kernel['name']} | {kernel['calls']:.1f} | {kernel['us']:.1f} |" for kernel in row["kernels"]]
    return lines


def _scaled(value: float, millions: str, billions: str) -> str:
    return f"{value / 1e9:.3f} {billions}" if value >= 1e9 else f"{value / 1e6:.3f} {millions}"


def cell(value: float | None, times: float, form: str) -> str:
    """A number as the table shows it; a dash where there is none."""
    return "–" if value is None else format(times * value, form)
