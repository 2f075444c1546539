"""A training run: one TOML file with the sections `[model]`, `[data]`, `[method]`, `[train]` and maybe `[adapter]`.

The resolved config is written beside every run (`dump`), which is enough to repeat or resume it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from freda.errors import require
from freda.methods import METHODS
from freda.methods.method import Method
from freda.methods.self_refine import SelfRefine
from freda.model.config import AdapterConfig, ModelConfig
from freda.sections import build, knob, read_tables, require_at_least, tables_as_toml, to_dict

SECTIONS_OF_0_1 = ("corpus", "mini", "prepare", "source", "benchmark", "decontaminate")
METHOD_OF_0_1 = {field.name for method in METHODS.values() for field in fields(method)}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`[data]`: the token shards a run reads, and how documents become rows."""

    path: str = knob("", "folder of token shards made by `freda prepare`")
    seq_len: int = knob(128, "tokens per row")
    first_row: int = knob(0, "row to begin with, in the order of the seed: a second stage continues after the first")

    def __post_init__(self) -> None:
        require_at_least(1, self, "data", "seq_len")
        require(self.seq_len <= 2**24, f"data.seq_len is {self.seq_len}; use {2**24} or less")
        require_at_least(0, self, "data", "first_row")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """`[train]`: the loop and its optimizer."""

    init: str = knob("", "model folder to start from; empty trains from scratch with [model]")
    steps: int = knob(1000, "optimizer steps")
    batch_rows: int = knob(32, "rows per optimizer step")
    group_rows: int = knob(16, "rows per forward; the rows of one group share the number of passes")
    lr: float = knob(5e-5, "peak learning rate")
    backbone_lr_scale: float = knob(1.0, "factor on lr for everything but a scorer")
    warmup_steps: int = knob(250, "linear warm-up")
    schedule: Literal["constant", "cosine"] = knob("constant", "learning rate after the warm-up")
    weight_decay: float = knob(0.01, "AdamW decay of matrices; norms and biases are left alone")
    beta1: float = knob(0.9, "AdamW")
    beta2: float = knob(0.999, "AdamW")
    clip: float = knob(1.0, "largest gradient norm")
    seed: int = knob(42, "seed of initial weights, row order and all noise")
    validate_every: int = knob(0, "steps between validations; 0 validates at the end only")
    validation_rows: int = knob(64, "rows of the validation shard that are used")
    save_every: int = knob(0, "steps between checkpoints; 0 saves at the end only")
    keep: int = knob(2, "newest checkpoints kept; the one of the lowest validation loss is kept too")
    log_every: int = knob(10, "steps between lines of metrics.jsonl")
    tensorboard: bool = knob(False, "write the metrics for TensorBoard too, into the run folder")
    wandb: str = knob("", "project of Weights & Biases to send the metrics to; empty sends nothing")
    device: str = knob("auto", "auto, cpu or cuda")
    dtype: Literal["auto", "float32", "bfloat16"] = knob(
        "auto", "compute precision: auto is bfloat16 on CUDA, float32 elsewhere; master weights are always float32"
    )
    attention: Literal["auto", "sdpa", "flex", "staircase"] = knob("auto", "auto is staircase on CUDA, sdpa elsewhere")
    compile: Literal["auto", "on", "off"] = knob("auto", "compile the layers; auto does on CUDA")
    activations: float = knob(1.0, "compiled layers: share of activations kept for backward; the rest is recomputed")
    reshard: bool = knob(True, "several processes: free a layer's weights after each forward; false gathers less often")

    def __post_init__(self) -> None:
        require_at_least(1, self, "train", "steps", "batch_rows", "group_rows", "keep", "log_every", "validation_rows")
        require_at_least(0, self, "train", "warmup_steps", "validate_every", "save_every", "weight_decay")
        require(self.batch_rows <= 2**20, f"train.batch_rows is {self.batch_rows}; use {2**20} or less")
        odd = f"train.group_rows {self.group_rows} does not divide train.batch_rows {self.batch_rows}"
        require(self.batch_rows % self.group_rows == 0, odd)
        for name in ("lr", "clip", "backbone_lr_scale"):
            require(getattr(self, name) > 0, f"train.{name} is {getattr(self, name)}; use a positive number")
        require(0 <= self.activations <= 1, f"train.activations is {self.activations}; use 0 to 1")
        odd = f"train.activations is {self.activations}, but only compiled layers recompute"
        require(self.activations == 1 or self.compile != "off", f"{odd}; leave train.compile on")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"train.{name} is {getattr(self, name)}; use 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, resolved."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    method: Method = SelfRefine()
    train: TrainConfig = TrainConfig()
    adapter: AdapterConfig | None = None

    def __post_init__(self) -> None:
        if self.adapter is not None:
            require(bool(self.train.init), "train.init is empty, but an adapter needs a base; name its model folder")
            self.method.check_adapter(self.adapter.rows)
        block, row = self.method.block_size, self.data.seq_len
        legal = ", ".join(str(n) for n in range(2, 65) if row % n == 0) or "1"
        require(row % block == 0, f"method.block_size {block} does not divide data.seq_len {row}; use one of {legal}")


def load(path: Path | None, overrides: Iterable[str] = ()) -> RunConfig:
    """The run that a TOML file describes (or the defaults), with `section.key=value` overrides applied in order."""
    values = read_tables(path, overrides)
    other = next((name for name in SECTIONS_OF_0_1 if name in values), "")
    require(not other, f"[{other}] is a section of `freda prepare`; move it to a file of its own")
    return from_dict(values)


def load_stored(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The config that a run wrote beside itself, with `section.key=value` overrides applied. Version 0.1 wrote the
    sections of `freda prepare`, too, and the settings of all methods."""
    values = {name: section for name, section in read_tables(path, overrides).items() if name not in SECTIONS_OF_0_1}
    method = values.get("method")
    if isinstance(method, dict) and method.get("name") in METHODS:
        own = {field.name for field in fields(METHODS[method["name"]])}
        values["method"] = {key: value for key, value in method.items() if key in own or key not in METHOD_OF_0_1}
    return from_dict(values)


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """A `RunConfig` from nested dictionaries; unknown keys and wrong types are errors."""
    config: RunConfig = build(RunConfig, values, "")
    return config


def dump(config: RunConfig) -> str:
    """The config as TOML; `load` reads it back to the same value."""
    return tables_as_toml(to_dict(config))
