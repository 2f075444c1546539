"""`freda bench train`: optimizer steps of a shape with random weights, as a share of the matmul rate of the same run.

What counts is useful arithmetic (`Method.flops`): recomputation earns nothing, and a pass without gradient only its
forward. The steps are those of `freda train`, with data that needs no files; `--compare` adds the plain twins.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from freda.bench.decode import random_parts
from freda.bench.rates import about, kernel_times, longest_first, matmul_rate, seconds
from freda.data.loader import Batch, Loader
from freda.data.tokenizer import Tokenizer
from freda.errors import FredaError, note, require
from freda.methods import method_like
from freda.methods.draft import CleanHalf, clean_half, clean_mask, draft_mask
from freda.methods.geometry import Geometry
from freda.methods.method import Method, Step
from freda.methods.self_refine import Refining
from freda.model import head
from freda.model.attention import Backend, attend, pick_backend
from freda.model.config import ModelConfig
from freda.model.parts import Parts, pick_device
from freda.model.shapes import SHAPES
from freda.model.transformer import Transformer
from freda.train import loop
from freda.train.config import DataConfig, RunConfig, TrainConfig
from freda.train.optim import clip_and_update, make_optimizer, total_norm
from freda.train.parallel import Root
from freda.train.setup import Run, compile_layers

NOTHING = cast(Tokenizer, None)  # a bench writes no model


@dataclass(frozen=True)
class Load:
    """The steps to be measured."""

    shape: str
    seq_len: int
    rows: int
    documents: int  # per row, of equal length
    passes: Sequence[int]
    method: str
    activations: float

    def __post_init__(self) -> None:
        require(self.shape in SHAPES, f"there is no shape {self.shape!r}; use one of {', '.join(SHAPES)}")
        whole = self.seq_len % (self.rule.block_size * self.documents) == 0
        require(whole, f"{self.documents} documents of whole blocks do not fill {self.seq_len} tokens")

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""
        return SHAPES[self.shape]

    @property
    def rule(self) -> Method:
        """The method."""
        return method_like(self.method)

    def batch(self, first: int, count: int, *, blank: int) -> Batch:
        """Packed rows of random tokens, in place of a `Loader`'s; those of a number are always the same."""
        shape, length = (count, self.seq_len), self.seq_len // self.documents
        tokens = torch.randint(0, blank, shape, generator=torch.Generator().manual_seed(first))
        place = torch.arange(self.seq_len, dtype=torch.int32).expand(shape)
        none = torch.zeros(shape, dtype=torch.bool)
        return Batch(tokens, place // length, place % length, none, one_document=self.documents == 1)


def bench_train(load: Load, *, compare: bool, profile: bool, device: str) -> dict[str, Any]:
    """Measure everything; returns what the table shows."""
    place = pick_device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    rate = matmul_rate(place, dtype)
    note(f"matmul rate {rate / 1e12:.1f} TFLOP/s")
    run = make_run(load, place, dtype)
    table = [_step_row(run, load, passes, rate) for passes in load.passes]
    found: dict[str, Any] = {
        **about(place),
        **asdict(load),
        "dtype": str(dtype).removeprefix("torch."),
        "matmul_tflops": rate / 1e12,
        "peak_gb": torch.cuda.max_memory_allocated(place) / 1e9 if place.type == "cuda" else None,
        "steps": table,
        "mean_share": statistics.fmean(row["share"] for row in table),
        "parts": list(_pieces(run, cast(Refining, load.rule))) if load.rule.refines else [],
    }
    if profile:
        found["profile"] = _profile(run)
    if compare:
        del run
        found["compare"] = list(_compared(load, place, dtype, rate))
    return found


def make_run(
    load: Load, device: torch.device, dtype: torch.dtype, *, compiled: bool = True, backend: Backend | None = None
) -> Run:
    """A run as `freda train` would set it up, without files; only on a GPU are layers compiled."""
    parts = random_parts(load.config, load.rule, device, torch.float32)
    parts.backbone.backend = backend or pick_backend("auto", device)
    if compiled and device.type == "cuda":
        compile_layers(parts.backbone, load.activations)
    settings: dict[str, Any] = {"batch_rows": load.rows, "group_rows": load.rows, "lr": 1e-6}
    train = TrainConfig(**settings, dtype=str(dtype).removeprefix("torch."))  # type: ignore[arg-type]
    config = RunConfig(model=load.config, data=DataConfig(seq_len=load.seq_len), method=load.rule, train=train)
    batch = functools.partial(load.batch, blank=parts.backbone.blank_id)
    rows = cast(Loader, SimpleNamespace(batch=batch))
    run = Run(config, parts, NOTHING, rows, rows, device, Root(parts))
    run.optimizer = make_optimizer(parts, config.train, fused=device.type == "cuda" and not run.updates_copies)
    return run


def _step_row(run: Run, load: Load, passes: int, rate: float) -> dict[str, Any]:
    """Whole optimizer steps, all with the same number of passes."""
    run.passes, numbers = passes, iter(range(10**6))
    time = seconds(lambda: loop.take_step(run, next(numbers)), run.device, warm_up=3)
    tokens, lengths = load.rows * load.seq_len, [load.seq_len // load.documents] * load.documents
    flops = load.rule.flops(load.config, load.rule.geometry.size(lengths).times(load.rows), passes)
    share = flops / time / rate
    note(f"step with {passes} passes: {1e3 * time:.1f} ms, {100 * share:.1f}% of the matmul rate")
    rates = {"tokens_per_s": tokens / time, "tflops": flops / 1e12, "share": share}
    return {"passes": passes, "seconds": time, **rates}


def _pieces(run: Run, method: Refining) -> Iterator[dict[str, Any]]:
    """Pieces of a step by themselves, for a method that refines drafts."""
    rows = run.config.train.batch_rows
    batch, geometry = loop.to_device(run.rows.batch(0, rows), run.device), method.geometry
    at = Step(0, 0, torch.arange(rows), 0.0, 1)

    def timed(name: str, function: Callable[[Parts], object], *, gradient: bool = False) -> dict[str, Any]:
        def call() -> None:
            with torch.set_grad_enabled(gradient):
                run.call(function)

        return _part(name, seconds(call, run.device, warm_up=2))

    def one_pass(parts: Parts, clean: CleanHalf) -> None:
        method.refine(parts.backbone, clean, method.blank_draft(parts.backbone, batch))

    def whole(parts: Parts) -> None:
        method.loss(parts, batch, at).backward()  # type: ignore[no-untyped-call]

    def attention(parts: Parts) -> None:
        _attention(parts.backbone, batch, geometry, backward=torch.is_grad_enabled())

    def clean_text(parts: Parts) -> CleanHalf:
        return clean_half(parts.backbone, batch, geometry)

    yield timed("forward of both halves, no gradient", lambda parts: one_pass(parts, clean_text(parts)))
    with torch.no_grad():
        clean = run.call(clean_text)
    yield timed("a pass without gradient", lambda parts: one_pass(parts, clean))
    yield timed("forward and backward, 1 pass", whole, gradient=True)
    yield timed("loss with its gradients", lambda parts: _loss_alone(parts.backbone, batch), gradient=True)
    yield timed("attention of all layers, forward", attention)
    yield timed("attention of all layers, with backward", attention, gradient=True)
    for weight in (*run.parts.parameters(), *run.root.copies.values()):
        weight.grad = None
    yield _optimizer_part(run)


def _part(name: str, time: float) -> dict[str, Any]:
    note(f"{name}: {1e3 * time:.1f} ms")
    return {"part": name, "seconds": time}


def _optimizer_part(run: Run) -> dict[str, Any]:
    copies = run.root.copies if run.updates_copies else None
    learnt = [(copies or {}).get(weight, weight) for weight in run.parts.parameters() if weight.requires_grad]
    gradients = [torch.full_like(weight, 1e-6) for weight in learnt]
    for weight, gradient in zip(learnt, gradients, strict=True):
        weight.grad = gradient

    def update() -> None:
        clip_and_update(run.optimizer, gradients, float(total_norm(gradients)), 1.0, copies)

    found = _part("norm, clipping and update", seconds(update, run.device, warm_up=1))
    for weight in learnt:
        weight.grad = None
    return found


def _loss_alone(model: Transformer, batch: Batch) -> None:
    device, shape = batch.tokens.device, (*batch.tokens.shape, model.config.dim)
    hidden = torch.randn(shape, device=device, dtype=model.head_weight.dtype, requires_grad=True)
    weights = torch.ones(batch.tokens.shape, device=device)
    model.head(hidden).cross_entropy(batch.tokens, weights).backward()  # type: ignore[no-untyped-call]


def _attention(model: Transformer, batch: Batch, geometry: Geometry, *, backward: bool) -> None:
    """Attention of both halves, as often as there are layers."""
    shape, device, dtype = model.config, batch.tokens.device, model.head_weight.dtype
    rows, length = batch.tokens.shape

    def random(heads: int) -> Tensor:
        made = torch.randn(rows, length, heads, shape.head_dim, device=device, dtype=dtype)
        return made.transpose(1, 2).requires_grad_(backward)

    q, clean, own = random(shape.heads), *((random(shape.kv_heads), random(shape.kv_heads)) for _ in range(2))
    halves = ((clean, None, clean_mask(model, batch, geometry)), (own, clean, draft_mask(model, batch, geometry)))
    for new, past, mask in halves * shape.layers:
        out = attend(q, new, past, mask.seen)
        if backward:
            torch.autograd.grad(out, (q, *new, *(past or ())), out)


# -- where the time goes ----------------------------------------------------------------------------------------------

KINDS = (  # of kernels, by a part of their names; the first that fits
    ("attention", ("sdpa", "fmha", "flash", "flex_attention", "_merge", "_gradients", "cudnn")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "xmma", "splitK")),
    ("optimizer, casts and norms of gradients", ("multi_tensor", "_adamw", "lpnorm")),
    ("loss", ("_cross_entropy",)),
    ("fused elementwise", ("triton_",)),
)


def kind_of(kernel: str) -> str:
    """What a kernel of this name does."""
    return next((kind for kind, parts in KINDS if any(part in kernel for part in parts)), "other")


def _profile(run: Run) -> dict[str, Any]:
    """One step with one pass: milliseconds by kind of kernel, and the longest kernels."""
    run.passes = 1
    loop.take_step(run, 0)
    spent = kernel_times(lambda: loop.take_step(run, 1), run.device)
    kinds = dict.fromkeys([kind for kind, _ in KINDS] + ["other"], 0.0)
    for name, (time, _) in spent.items():
        kinds[kind_of(name)] += time
    kernels = [{"name": name[:120], "ms": ms, "calls": calls} for name, ms, calls in longest_first(spent, 30)]
    return {"kinds_ms": kinds, "kernels": kernels}


# -- the plain twins -------------------------------------------------------------------------------------------------


def _compared(load: Load, device: torch.device, dtype: torch.dtype, rate: float) -> Iterator[dict[str, Any]]:
    """Steps of one pass: as they are, and with one thing at a time done plainly."""
    variants: dict[str, dict[str, Any]] = {"as it is": {}, "eager layers": {"compiled": False}}
    if device.type == "cuda":  # elsewhere it has no backward
        variants["flex attention"] = {"backend": "flex"}
    variants |= {"dense mask": {"backend": "sdpa"}, "full logits": {}}
    for name, changes in variants.items():
        note(name)
        try:
            with _full_logits() if name == "full logits" else contextlib.nullcontext():
                yield {"variant": name, **_step_row(make_run(load, device, dtype, **changes), load, 1, rate)}
        except (torch.OutOfMemoryError, FredaError) as error:
            yield {"variant": name, "error": str(error) if isinstance(error, FredaError) else "out of memory"}
        if device.type == "cuda":
            torch.cuda.empty_cache()


@contextlib.contextmanager
def _full_logits() -> Iterator[None]:
    """Logits of all positions at once, their loss by autograd."""

    def plain(self: head.Logits, labels: Tensor, weights: Tensor) -> Tensor:
        losses = F.cross_entropy(self.all().flatten(0, -2), labels.flatten(), reduction="none")
        return (losses * weights.flatten()).sum()

    chunked, head.Logits.cross_entropy = head.Logits.cross_entropy, plain  # type: ignore[method-assign]
    try:
        yield
    finally:
        head.Logits.cross_entropy = chunked  # type: ignore[method-assign]


# -- the table -------------------------------------------------------------------------------------------------------


def table_lines(found: dict[str, Any]) -> list[str]:
    """The printed tables."""
    memory = "" if found["peak_gb"] is None else f", {found['peak_gb']:.0f} GB at the peak"
    lines = [
        f"{found['shape']}, {found['rows']} rows of {found['seq_len']}, {found['method']}, {found['dtype']}, "
        f"{found['device']}: matmul {found['matmul_tflops']:.1f} TFLOP/s{memory}"
    ]
    rates = ("ms", "clean tokens/s", "share of the matmul rate")
    steps = [_step_cells(f"{row['passes']} passes", row) for row in found["steps"]]
    lines += _table(("step", *rates), [*steps, ("mean", "", "", f"{100 * found['mean_share']:.1f}%")])
    lines += _table(("part", "ms"), [(part["part"], f"{1e3 * part['seconds']:.1f}") for part in found["parts"]])
    kinds = found.get("profile", {}).get("kinds_ms", {})
    lines += _table(("kernels of a step with 1 pass", "ms"), [(kind, f"{ms:.1f}") for kind, ms in kinds.items()])
    variants = [_step_cells(row["variant"], row) for row in found.get("compare", ())]
    return lines + _table(("variant, 1 pass", *rates), variants)


def _table(header: Sequence[str], rows: Sequence[Iterable[str]]) -> list[str]:
    """The lines of a Markdown table, none if it has no rows."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return ["", lines[0], f"|---|{'---:|' * (len(header) - 1)}", *lines[1:]] if rows else []


def _step_cells(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    if "error" in row:
        return name, row["error"], "", ""
    return name, f"{1e3 * row['seconds']:.1f}", f"{row['tokens_per_s']:,.0f}", f"{100 * row['share']:.1f}%"
