"""What a run has before its first step: model, data, method and optimizer, checked against each other.

A model is put together without storage, cut among the processes, and only then given its weights: each process makes or
reads the rows that it holds, a weight at a time, and none ever holds the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch

from freda.bench.rates import matmul_rate
from freda.data.loader import Loader, Prefetcher, rank_rows
from freda.data.tokenizer import Tokenizer
from freda.errors import require
from freda.folders.adapter_folder import base_fingerprint, read_adapter_config
from freda.folders.model_folder import Over, fill_part, load_model, resolve_model_folder
from freda.methods.method import Method
from freda.model.adapter import BLANK
from freda.model.attention import pick_backend
from freda.model.config import ModelConfig
from freda.model.parts import ADAPTER, BACKBONE, Part, Parts, pick_device
from freda.model.scorer import Scorer
from freda.model.transformer import Transformer, rotary_frequencies
from freda.train.config import RunConfig
from freda.train.optim import make_optimizer
from freda.train.parallel import Ranks, Root, check_gpu, own_rows, shard

T = TypeVar("T")
Sources = dict[str, Path]  # the folders that parts of a model are read from


@dataclass
class Run:
    """Everything a step needs."""

    config: RunConfig
    parts: Parts
    tokenizer: Tokenizer
    rows: Loader
    validation_rows: Loader
    device: torch.device
    root: Root  # calls the method's functions on the model, with all weights it needs
    ranks: Ranks = Ranks()
    over: Over | None = None  # an adapter, and its base
    optimizer: torch.optim.AdamW = field(init=False)
    shares: list[range] = field(init=False)  # this rank's rows of each group, numbered within the step
    ahead: Prefetcher | None = None  # None: a step reads its batches itself
    matmul_rate: float = 0.0  # of the device, operations a second; 0: not measured
    passes: int = 0  # that every group runs, for a bench; 0: numbers drawn for each step

    def __post_init__(self) -> None:
        train = self.config.train
        self.shares = rank_rows(train.batch_rows, train.group_rows, rank=self.ranks.rank, world=self.ranks.world)

    @property
    def method(self) -> Method:
        """What is trained."""
        return self.config.method

    @property
    def updates_copies(self) -> bool:
        """Whether bf16 copies of the weights keep their gradients until the update, which writes weight and copy. Not
        where several groups add up: their sum needs fp32."""
        alone = not self.root.sharded and len(self.shares) == 1
        return alone and self.device.type == "cuda" and self.config.train.dtype == "bfloat16"

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """`function(parts, *arguments)` in the run's precision; several processes gather the weights in it."""
        if self.config.train.dtype == "bfloat16" and not self.root.sharded:
            return self.root.in_bfloat16(function, *arguments)
        result: T = self.root(function, *arguments)
        return result


def setup(config: RunConfig, resume_from: Path | None = None, ranks: Ranks = Ranks()) -> Run:
    """Model, data and optimizer of a run, checked against each other; the weights of a checkpoint to resume from."""
    device = pick_device(config.train.device)
    if config.train.dtype == "auto":
        config = replace(config, train=replace(config.train, dtype="bfloat16" if device.type == "cuda" else "float32"))
    run, sources = ranks.agree(lambda: _assemble(config, resume_from, device, ranks))
    if config.train.compile == "on" or (config.train.compile == "auto" and device.type == "cuda"):
        compile_layers(run.parts.backbone, config.train.activations)
    if ranks.world > 1:
        shard(run.root, config.train.dtype, device, ranks, reshard=config.train.reshard)
    run.root.to_empty(device=device)
    ranks.agree(lambda: fill(run.parts, sources, config.train.seed))
    fused = device.type == "cuda" and not run.updates_copies
    run.optimizer = make_optimizer(run.parts, config.train, fused=fused)  # over what each rank has
    if device.type == "cuda":
        run.matmul_rate = matmul_rate(device, torch.bfloat16 if config.train.dtype == "bfloat16" else torch.float32)
    return run


@torch.no_grad()
def fill(parts: Parts, sources: Sources, seed: int) -> None:
    """Give a model that has nothing but storage its weights, those of each part from its source or, without one, from
    the seed; a rank of several, its rows of each."""
    rows = dict[str, dict[str, Part]]()
    for part, name, weight in parts.weights():
        rows.setdefault(part, {})[name] = own_rows(weight)
    for module in parts.children():
        assert isinstance(module, Transformer | Scorer)
        module.inv_freq = rotary_frequencies(parts.backbone.config).to(parts.device)  # a buffer that is never stored
    for part, own in rows.items():
        if part in sources:
            fill_part(sources[part], part, own)
            continue
        for name, whole in parts.random_weights(part, seed):
            own[name].tensor.copy_(own[name].of(whole))
        for name, source in parts.copied(part).items():  # whose rows are cut alike
            own[name].tensor.copy_(rows[BACKBONE][source].tensor)
        if part == ADAPTER:  # BLANK begins as it is in the base's table
            blank = Part(own[BLANK].tensor, parts.backbone.blank_id)
            fill_part(sources[BACKBONE], BACKBONE, {"embed_tokens.weight": blank})


def compile_layers(model: Transformer, activations: float) -> None:
    """Compile the forward of every layer; they share the code of one. `activations` is the share kept for backward.
    Only the forward, not the module: what FSDP does before and after it stays outside."""
    import torch._dynamo.config
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = activations
    # Halves, with and without gradient, in training and validation: more than the 8 that dynamo allows one function.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=False, fullgraph=True)


def _assemble(config: RunConfig, resume_from: Path | None, device: torch.device, ranks: Ranks) -> tuple[Run, Sources]:
    """The run, checked, whose model has no storage yet; and what `fill` needs."""
    check_gpu(device, ranks)
    require(bool(config.data.path), "data.path is empty; name a folder made by freda prepare")
    shards, seq_len, seed = Path(config.data.path), config.data.seq_len, config.train.seed
    rows = Loader(shards, "train", seq_len=seq_len, seed=seed)
    align, block = rows.manifest.align, config.method.block_size
    odd = f"method.block_size {block} does not divide the shards' align {align}"
    require(align % block == 0, f"{odd}; prepare them with align={block}")
    parts, tokenizer, sources = _initial_model(config, resume_from)
    parts.backbone.backend = pick_backend(config.train.attention, device)
    rows.check_tokenizer(tokenizer)
    run = Run(
        config=replace(config, model=parts.backbone.config),  # what the run has, not what was asked for
        parts=parts,
        tokenizer=tokenizer,
        rows=rows,
        validation_rows=Loader(shards, "validation", seq_len=seq_len, seed=seed),
        device=device,
        root=Root(parts),
        ranks=ranks,
        over=_over(config, sources),
    )
    return run, sources


def _over(config: RunConfig, sources: Sources) -> Over | None:
    """The adapter of a run, and its base, which must be what it was when the run began."""
    if config.adapter is None:
        return None
    over = Over(config.adapter, sources[BACKBONE], base_fingerprint(sources[BACKBONE]))
    if ADAPTER in sources:
        begun = read_adapter_config(sources[ADAPTER])[1]["base"]["fingerprint"]
        same = begun == over.fingerprint
        require(same, f"the base {over.base} is not what it was when the run began; put it back, or start a new run")
    return over


def _initial_model(config: RunConfig, resume_from: Path | None) -> tuple[Parts, Tokenizer, Sources]:
    """The checkpoint, the model to start from, or a new one: in this order. Without storage, but fit to be filled. An
    adapter's checkpoint is the adapter alone, over the model to start from."""
    method, init, adapter = config.method, config.train.init, config.adapter
    if resume_from is not None or init:
        own = None if adapter is not None else resume_from
        folder = own or resolve_model_folder(Path(init))  # once: a run may write its next checkpoint meanwhile
        loaded = load_model(folder, "meta")
        if own is None:
            _check_shape(config.model, loaded.backbone.config)
        new = method.start_from(loaded.parts, None if resume_from else loaded.method, init)
        sources = {part: folder for part, _ in loaded.parts.named_children() if part not in new}
        if adapter is not None:
            loaded.parts.adapt(adapter)
            sources |= {ADAPTER: resume_from} if resume_from is not None else {}
        return loaded.parts, loaded.tokenizer, sources
    tokenizer = Tokenizer.load(Path(config.data.path))
    shape = config.model if config.model.vocab_size else replace(config.model, vocab_size=tokenizer.size)
    odd = f"model.vocab_size {shape.vocab_size} is below the tokenizer's {tokenizer.size}"
    require(shape.vocab_size >= tokenizer.size, f"{odd}; use 0 to take the tokenizer's")
    with torch.device("meta"):
        parts = Parts(Transformer(shape, tokenizer.blank_id))
    method.start_from(parts, None, "")
    return parts, tokenizer, {}


def _check_shape(asked: ModelConfig, found: ModelConfig) -> None:
    """A [model] section beside `train.init` must not contradict the checkpoint."""
    asked = replace(asked, vocab_size=asked.vocab_size or found.vocab_size)
    given = asked != replace(ModelConfig(), vocab_size=found.vocab_size)
    for key, value in vars(asked).items() if given else ():
        odd = f"model.{key} is {value}, but the model of train.init has {getattr(found, key)}"
        require(value == getattr(found, key), f"{odd}; omit the [model] section")
