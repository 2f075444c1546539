"""`freda train --dry-run`: what a run will need, before it is started: arithmetic, memory, time.

The counts are exact for full rows of one document each (packed documents see less of each other). Memory is an estimate
whose largest part, activations, was held against an H200: 56 GB measured for 2 rows of 4,096 through 36 layers of
width 2,560, 60 GB estimated. Time is arithmetic over a rate, which `freda bench train` measures.
"""

from __future__ import annotations

from pathlib import Path

from freda.errors import FredaError, require
from freda.files import read_json
from freda.folders.hugging_face import model_config
from freda.folders.model_folder import resolve_model_folder
from freda.model.config import ModelConfig, adapter_parameters, all_parameters
from freda.model.shapes import SHAPES
from freda.train.config import RunConfig

# Of one H200 with the 4B shape, 2 rows of 4,096: 60% of its matmul rate. So it was with FlexAttention and the library's
# AdamW, which packed rows and several processes use; rows of one document on one GPU reach 500 and more.
TFLOPS = 460.0


def plan_lines(config: RunConfig, *, gpus: int, tflops: float, shape_name: str = "") -> list[str]:
    """What is printed."""
    require(gpus >= 1, f"gpus is {gpus}; use 1 or more")
    require(tflops >= 0, f"tflops is {tflops}; use a positive number, or 0 for an H200's")
    tflops = tflops or TFLOPS
    train, method, seq_len = config.train, config.method, config.data.seq_len
    odd = f"train.group_rows {train.group_rows} cannot be shared among {gpus} GPUs; use a multiple"
    require(train.group_rows % gpus == 0, odd)
    shape = planned_shape(config, shape_name)
    tokens = train.batch_rows * seq_len
    size, most = method.geometry.size([seq_len]).times(train.batch_rows), method.training_passes
    flops = sum(method.flops(shape, size, t, config.adapter) for t in range(1, most + 1)) / most
    seconds = flops / gpus / (tflops * 1e12)
    lines = [
        f"model        {counted_as(all_parameters(shape), 3)} parameters{_learnt(config, shape)}",
        f"step         {train.batch_rows} rows of {seq_len}: {tokens:,} tokens; {flops_as(flops)} useful"
        + (f", mean over 1 to {most} passes" if most > 1 else ""),
        f"run          {train.steps:,} steps, {counted_as(train.steps * tokens, 2)} tokens, "
        f"{flops * train.steps:.2e} FLOP",
        f"per forward  {train.group_rows // gpus} rows on each of {gpus} GPUs",
    ]
    lines += [f"{name:<12} {size / 1e9:.1f} GB" for name, size in memory(config, shape, gpus).items()]
    days, hours = divmod(seconds * train.steps / 3600, 24)
    whole = f"{int(days)} days {hours:.1f} hours" if days or hours > 1 / 6 else f"{3600 * hours:.0f} seconds"
    return [*lines, f"time         {seconds:.2f} s a step, {whole} at {tflops:.0f} useful TFLOP/s a GPU"]


def _learnt(config: RunConfig, shape: ModelConfig) -> str:
    if config.adapter is None:
        return ""
    return f", frozen; an adapter of {counted_as(adapter_parameters(shape, config.adapter), 3)}"


def counted_as(count: float, digits: int) -> str:
    """A large number in billions, one below a tenth of that in millions."""
    return f"{count / 1e9:.{digits}f} B" if count >= 1e8 else f"{count / 1e6:.1f} M"


def flops_as(flops: float) -> str:
    """Operations of a step, by the size of the model."""
    return f"{flops / 1e15:.1f} PFLOP" if flops >= 1e14 else f"{flops / 1e12:.2f} TFLOP"


def planned_shape(config: RunConfig, name: str) -> ModelConfig:
    """The shape asked for by name, of the model to start from, or of the [model] section."""
    if name:
        require(name in SHAPES, f"there is no shape {name!r}; use one of {', '.join(SHAPES)}")
        return SHAPES[name]
    if not config.train.init:
        return config.model
    try:
        return model_config(read_json(resolve_model_folder(Path(config.train.init)) / "config.json"))
    except FredaError as error:
        raise FredaError(f"{error}; or name the shape to plan with: --shape {', '.join(SHAPES)}") from None


def memory(config: RunConfig, shape: ModelConfig, gpus: int) -> dict[str, float]:
    """Bytes on each GPU by what they hold, and their sum."""
    train, weights, adapter = config.train, all_parameters(shape), config.adapter
    streams = 1 if adapter is not None and adapter.rows == "draft" else config.method.streams
    rows = train.group_rows // gpus
    half = train.dtype != "float32"  # auto: on a GPU
    short = half and gpus == 1 and train.batch_rows == train.group_rows  # as Run.updates_copies
    learnt = 14 if short else 16  # fp32: weight, two moments and gradient, which may be bf16
    frozen, added = not streams or adapter is not None, 0 if adapter is None else adapter_parameters(shape, adapter)
    states = (weights * (4 if frozen else learnt) + added * learnt) / gpus
    gathered = 2.0 * weights if half and (gpus == 1 or not train.reshard) else 0.0
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    width = 2 if half else 4
    kept = width * (2 * shape.dim + 3 * query + 4 * key + 3 * shape.ffn_dim) * shape.layers
    activations = float(kept) * rows * config.data.seq_len * streams * train.activations
    parts = {"states": states, "bf16 copies": gathered, "activations": activations}
    return {**{name: size for name, size in parts.items() if size}, "in all": sum(parts.values())}
