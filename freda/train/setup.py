"""What a run has before its first step: model, data, method and optimizer, checked against each other.

A model is put together without storage, cut among the processes, and only then given its weights: each process makes or
reads the rows that it holds, a weight at a time, and none ever holds the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from freda.bench.rates import matmul_rate
from freda.data.loader import Loader, Prefetcher, rank_rows
from freda.data.tokenizer import Tokenizer
from freda.errors import FredaError, require
from freda.methods import METHODS
from freda.methods.config import MethodConfig
from freda.methods.method import Method
from freda.model.attention import pick_backend
from freda.model.config import ModelConfig
from freda.model.folders import resolve_model_folder
from freda.model.scorer import Scorer
from freda.model.transformer import Transformer, pick_device, rotary_frequencies
from freda.model.weights import fill_model, load_model
from freda.train.config import RunConfig
from freda.train.optim import make_optimizer
from freda.train.parallel import Ranks, Root, check_gpu, own_parts, shard

T = TypeVar("T")


@dataclass
class Run:
    """Everything a step needs."""

    config: RunConfig
    method: Method
    model: Transformer
    tokenizer: Tokenizer
    rows: Loader
    validation_rows: Loader
    device: torch.device
    root: Root  # calls the method's functions on the model, with all weights it needs
    ranks: Ranks = Ranks()
    optimizer: torch.optim.AdamW = field(init=False)
    shares: list[range] = field(init=False)  # this rank's rows of each group, numbered within the step
    ahead: Prefetcher | None = None  # None: a step reads its batches itself
    matmul_rate: float = 0.0  # of the device, operations a second; 0: not measured

    def __post_init__(self) -> None:
        train = self.config.train
        self.shares = rank_rows(train.batch_rows, train.group_rows, rank=self.ranks.rank, world=self.ranks.world)

    @property
    def updates_copies(self) -> bool:
        """Do bf16 copies of the weights keep their gradients until the update, which writes weight and copy? Not where
        several groups add up: their sum wants fp32."""
        alone = not self.root.sharded and len(self.shares) == 1
        return alone and self.device.type == "cuda" and self.config.train.dtype == "bfloat16"

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """`function(model, *arguments)` in the run's precision; several processes gather the weights in it."""
        if self.config.train.dtype == "bfloat16" and not self.root.sharded:
            return self.root.in_bfloat16(function, *arguments)
        result: T = self.root(function, *arguments)
        return result


class Origin(NamedTuple):
    """Where the weights of a run come from."""

    folder: Path | None  # a model folder; None: from the seed
    new_scorer: bool = False  # the folder has none: it comes from the seed


def setup(config: RunConfig, resume_from: Path | None = None, ranks: Ranks = Ranks()) -> Run:
    """Model, data and optimizer of a run, checked against each other; the weights of a checkpoint to resume from."""
    device = pick_device(config.train.device)
    run, origin = ranks.agree(lambda: _assemble(config, resume_from, device, ranks))
    if config.train.compile == "on" or (config.train.compile == "auto" and device.type == "cuda"):
        compile_layers(run.model, config.train.activations)
    if ranks.world > 1:
        shard(run.root, config.train.dtype, device, ranks, reshard=config.train.reshard)
    run.root.to_empty(device=device)
    ranks.agree(lambda: fill(run.model, origin, config.train.seed))
    fused = device.type == "cuda" and not run.updates_copies
    run.optimizer = make_optimizer(run.model, config.train, fused=fused)  # over what each rank has
    if device.type == "cuda":
        run.matmul_rate = matmul_rate(device, torch.bfloat16 if config.train.dtype == "bfloat16" else torch.float32)
    return run


@torch.no_grad()
def fill(model: Transformer, origin: Origin, seed: int) -> None:
    """Give a model that has nothing but storage its weights; of a sharded one, this rank's part of each."""
    for module in (model, model.scorer):
        if module is not None:  # buffers that are never stored
            module.inv_freq = rotary_frequencies(model.config).to(model.inv_freq.device)
    parts = own_parts(model)
    if origin.folder is None:
        for name, whole in model.random_weights(seed):
            parts[name].tensor.copy_(parts[name].of(whole))
        return
    stored = {name: part for name, part in parts.items() if not (origin.new_scorer and name.startswith("scorer."))}
    fill_model(origin.folder, stored)
    if origin.new_scorer:
        assert isinstance(model.scorer, Scorer)
        for name, whole in model.scorer.random_weights(seed):
            part = parts[f"scorer.{name}"]
            part.tensor.copy_(part.of(whole))
        if model.scorer.last_layer is not None:  # as the backbone's, whose rows are cut alike
            for name, _ in model.scorer.last_layer.named_parameters():
                beneath = parts[f"layers.{model.config.layers - 1}.{name}"]
                parts[f"scorer.last_layer.{name}"].tensor.copy_(beneath.tensor)


def compile_layers(model: Transformer, activations: float) -> None:
    """Compile the forward of every layer; they share the code of one. `activations` is the share kept for backward.

    Only the forward, not the module: what FSDP does before and after it stays outside.
    """
    import torch._dynamo.config
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = activations
    # Halves, with and without gradient, in training and validation: more than the 8 that dynamo allows one function.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=False, fullgraph=True)


def _assemble(config: RunConfig, resume_from: Path | None, device: torch.device, ranks: Ranks) -> tuple[Run, Origin]:
    """Everything that can be wrong, before anything is shared out; the model has no storage yet."""
    check_gpu(device, ranks)
    require(bool(config.data.path), "data.path is empty; name a folder made by freda prepare")
    shards, seq_len, seed = Path(config.data.path), config.data.seq_len, config.train.seed
    rows = Loader(shards, "train", seq_len=seq_len, seed=seed)
    align, block = rows.manifest.align, config.method.block_size
    require(
        align % block == 0,
        f"method.block_size {block} does not divide the shards' align {align}; prepare them with align={block}",
    )
    model, tokenizer, origin = _initial_model(config, resume_from)
    model.backend = pick_backend(config.train.attention, device)
    rows.check_tokenizer(tokenizer)
    method = METHODS[config.method.name]
    if method.SCORES:
        origin = origin._replace(new_scorer=_freeze_for_scorer(model, config))
    else:
        model.scorer = None  # it judged the drafts of a backbone that is about to change
    run = Run(
        config=replace(config, model=model.config),  # what the run has, not what was asked for
        method=method,
        model=model,
        tokenizer=tokenizer,
        rows=rows,
        validation_rows=Loader(shards, "validation", seq_len=seq_len, seed=seed),
        device=device,
        root=Root(model),
        ranks=ranks,
    )
    return run, origin


def _freeze_for_scorer(model: Transformer, config: RunConfig) -> bool:
    """Stage II: only the scorer learns; a model without one gets a new one. Did it?"""
    require(bool(config.train.init), "train.init is empty; best-of-n starts from a self-refine model")
    model.requires_grad_(False)
    wanted = config.method.scorer_layer
    new = model.scorer is None
    if new:
        with torch.device("meta"):
            model.scorer = Scorer(model.config, last_layer=wanted)
    assert isinstance(model.scorer, Scorer)
    require(
        (model.scorer.last_layer is not None) == wanted,
        f"method.scorer_layer is {str(wanted).lower()}, but the scorer of {config.train.init} was trained otherwise; "
        f"set it to {str(not wanted).lower()}, or start from the self-refine model",
    )
    model.scorer.requires_grad_(True)
    return new


def _initial_model(config: RunConfig, resume_from: Path | None) -> tuple[Transformer, Tokenizer, Origin]:
    """The checkpoint, the model to start from, or a new one: in this order. Without storage, but fit to be filled."""
    if resume_from is not None:
        loaded = load_model(resume_from, "meta")
        return loaded.model, loaded.tokenizer, Origin(resume_from)
    if config.train.init:
        folder = resolve_model_folder(Path(config.train.init))  # once: a run may write its next checkpoint meanwhile
        loaded = load_model(folder, "meta")
        _check_shape(config.model, loaded.model.config)
        if METHODS[config.method.name].SCORES:
            _check_proposer(config, loaded.method)
        return loaded.model, loaded.tokenizer, Origin(folder)
    tokenizer = Tokenizer.load(Path(config.data.path))
    shape = config.model if config.model.vocab_size else replace(config.model, vocab_size=tokenizer.size)
    require(
        shape.vocab_size >= tokenizer.size,
        f"model.vocab_size {shape.vocab_size} is below the tokenizer's {tokenizer.size}; use 0 to take the tokenizer's",
    )
    with torch.device("meta"):
        model = Transformer(shape, tokenizer.blank_id)
    return model, tokenizer, Origin(None)


def _check_proposer(config: RunConfig, found: MethodConfig) -> None:
    """A scorer judges the drafts of the model it starts from, so it must see them as that model does."""
    init = config.train.init
    require(
        METHODS[found.name].REFINES,
        f"train.init {init} was trained as {found.name}; best-of-n starts from a self-refine model",
    )
    for key in ("block_size", "feedback", "rescale", "committed_hard"):
        asked, trained = getattr(config.method, key), getattr(found, key)
        require(asked == trained, f"method.{key} is {asked}, but {init} was trained with {trained}; use the same")


def _check_shape(asked: ModelConfig, found: ModelConfig) -> None:
    """A [model] section beside `train.init` must not say something else than the checkpoint."""
    asked = replace(asked, vocab_size=asked.vocab_size or found.vocab_size)
    if asked not in (found, replace(ModelConfig(), vocab_size=found.vocab_size)):  # the latter: none was given
        key = next(key for key, value in vars(asked).items() if value != getattr(found, key))
        raise FredaError(
            f"model.{key} is {getattr(asked, key)}, but the model of train.init has {getattr(found, key)}; "
            f"leave the [model] section away"
        )
