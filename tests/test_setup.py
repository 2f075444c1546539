"""The start of a run with several processes: each holds its rows of the very weights of one process, and no more."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from freda.data.config import CorpusConfig
from freda.data.prepare import prepare_corpus
from freda.data.tokenizer import Tokenizer
from freda.errors import AgreedError, FredaError
from freda.folders.convert import convert
from freda.folders.model_folder import SCORER_FILE, LoadedModel, load_model
from freda.folders.tensors import SCALE
from freda.model.config import ModelConfig
from freda.model.parts import Parts
from freda.model.scorer import Scorer
from freda.model.transformer import Transformer
from freda.train import loop
from freda.train import setup as starting
from freda.train.config import DataConfig, RunConfig, TrainConfig
from freda.train.parallel import Ranks
from tests.helpers import init_weights, method, run_ranks, save_model

# Many small weights, so that holding one whole is far from holding all; biases; a head of its own.
SHAPE = ModelConfig(
    dim=32, layers=6, heads=2, kv_heads=1, head_dim=16, ffn_dim=96, qk_norm=False, qkv_bias=True, tied=False
)
FOLDERS = ("half", "several", "int8", "int8-several")  # as a model may be stored
CASES = ("seed", *FOLDERS, "new-scorer", "resumed")
WORLDS = (2, 3)  # 3 cuts the width into unequal parts, and one row of the scorer's last matrix into 1, 0 and 0
SEED = 5


def scored(case: str) -> bool:
    return case != "seed"


def config(folder: Path, case: str) -> RunConfig:
    scores = scored(case)
    init = {"seed": "", "new-scorer": "plain", "resumed": "plain"}.get(case, case)
    train = TrainConfig(steps=2, batch_rows=6, group_rows=6, save_every=2, seed=SEED, lr=1e-2, warmup_steps=1)
    return RunConfig(
        model=ModelConfig() if scores else SHAPE,
        data=DataConfig(path=str(folder / "data"), seq_len=32),
        method=method("best-of-n", scorer_layer=True) if scores else method(),
        train=replace(train, init=str(folder / init) if init else ""),
    )


def resumed_from(folder: Path, case: str) -> Path | None:
    return folder / "run" / "checkpoints" / "step-2" if case == "resumed" else None


# -- what each rank does ---------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """The most bytes that lived at once in tensors that an operation made or read."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._size = 0  # of those seen, some of which may be gone

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor):
                storage = (leaf.to_local() if isinstance(leaf, DTensor) else leaf).untyped_storage()
                if storage.device.type != "meta":
                    self._size += storage.nbytes() - self._seen.get(storage._cdata, (None, 0))[1]
                    self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if self._size > self.most:
            self._seen = {key: (ref, size) for key, (ref, size) in self._seen.items() if not ref.expired()}
            self._size = sum(size for _, size in self._seen.values())
            self.most = max(self.most, self._size)
        return out


def start_all(ranks: Ranks, folder: Path) -> dict[str, Any]:
    return {
        "started": {case: _started(ranks, folder, case) for case in CASES},
        "refused": {name: _refused(ranks, folder, name) for name in BROKEN},
        "unreadable": _unreadable_on_one_rank(ranks, folder),
    }


def _started(ranks: Ranks, folder: Path, case: str) -> dict[str, float]:
    """Start a run, write down its weights; the bytes that lived at most, those of all weights and of the largest."""
    inner, before = starting.shard, list[int]()

    def shard(root: Any, *arguments: Any, **more: Any) -> None:
        before.append(sum(weight.nbytes for weight in root.parameters() if not weight.is_meta))
        inner(root, *arguments, **more)

    starting.shard = shard
    with LiveBytes() as live:
        run = loop.setup(config(folder, case), resumed_from(folder, case), ranks)
    starting.shard = inner
    weights = {name: weight.full_tensor().detach() for name, weight in run.parts.named_parameters()}
    if ranks.first:
        save_file({**weights, **dict(run.parts.named_buffers())}, folder / f"{case}-{ranks.world}.safetensors")
    learning = {name for name, weight in run.parts.named_parameters() if weight.requires_grad}
    assert learning == {name for name in weights if not scored(case) or name.startswith("scorer.")}
    sizes = [weight.nbytes for weight in weights.values()]
    return {"before": before[0], "most": live.most, "all": sum(sizes), "largest": max(sizes)}


def _refused(ranks: Ranks, folder: Path, name: str) -> str:
    settings = config(folder, "half")
    with pytest.raises(AgreedError) as caught:
        loop.setup(replace(settings, train=replace(settings.train, init=str(folder / name))), None, ranks)
    return str(caught.value)


def _unreadable_on_one_rank(ranks: Ranks, folder: Path) -> str:
    inner = starting.fill_part

    def broken(*arguments: Any) -> None:
        if ranks.rank == 1:
            raise OSError(5, "Input/output error", "model.safetensors")
        inner(*arguments)

    starting.fill_part = broken
    with pytest.raises(AgreedError) as caught:
        loop.setup(config(folder, "half"), None, ranks)
    starting.fill_part = inner
    return str(caught.value)


# -- folders to start from -------------------------------------------------------------------------------------------


def edited(path: Path, name: str, change: Callable[[Tensor], Tensor] | None) -> None:
    """Change a tensor of a file, or take it away."""
    tensors = load_file(path)
    old = tensors.pop(name)
    save_file(tensors if change is None else {**tensors, name: change(old)}, path)


def in_two_files(folder: Path) -> None:
    """Tensors by turns in one file and the other; the scales of int8 matrices never beside them."""
    tensors, files = load_file(folder / "model.safetensors"), ("model-1.safetensors", "model-2.safetensors")
    weights = sorted(name for name in tensors if not name.endswith(SCALE))
    where = {name: files[number % 2] for number, name in enumerate(weights)}
    where |= {name: files[where[name.removesuffix(SCALE)] == files[0]] for name in tensors if name.endswith(SCALE)}
    for file in files:
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "model.safetensors").unlink()


NORM, MATRIX = "model.norm.weight", "model.layers.3.mlp.up_proj.weight"
BROKEN = {  # by name: what one process says
    "cut-off": "model.safetensors is damaged or half-written",
    "missing": f"half-written: the tensor {NORM} is missing",
    "misshapen": f"the tensor {MATRIX} has shape (95, 32), but config.json describes (96, 32)",
    "packed": f"the tensor {MATRIX} is stored as torch.int8; quantised weights are not read",
    "scorer": f"{SCORER_FILE} does not belong to the model: fuse.weight has shape (31, 64)",
}


def break_all(folder: Path, good: Path) -> None:
    """Copies of a model folder, each with something wrong."""
    model = {name: Path(shutil.copytree(good, folder / name)) / "model.safetensors" for name in BROKEN}
    model["cut-off"].write_bytes(model["cut-off"].read_bytes()[:-8])
    edited(model["missing"], NORM, None)
    edited(model["misshapen"], MATRIX, lambda tensor: tensor[:-1].clone())
    edited(model["packed"], MATRIX, lambda tensor: tensor.to(torch.int8))
    edited(folder / "scorer" / SCORER_FILE, "fuse.weight", lambda tensor: tensor[:-1].clone())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("setup")
    prepare_corpus(CorpusConfig(problems=60, validation_problems=8, vocab_size=280), folder / "data")
    tokenizer = Tokenizer.load(folder / "data")
    model = Transformer(replace(SHAPE, vocab_size=tokenizer.size), tokenizer.blank_id)
    init_weights(model, 1)
    save_model(folder / "plain", LoadedModel(Parts(model), tokenizer, method("self-refine"), "I"))
    scorer = Scorer(model.config, last_layer=True)
    init_weights(scorer, 2, model)
    for target, dtype in (("half", torch.bfloat16), ("several", None)):
        save_model(
            folder / target, LoadedModel(Parts(model, scorer), tokenizer, method("best-of-n"), "II"), dtype=dtype
        )
    break_all(folder, folder / "several")
    for target in ("int8", "int8-several"):
        convert(folder / "several", folder / target, dtype="int8")
    in_two_files(folder / "several")
    in_two_files(folder / "int8-several")
    loop.train(config(folder, "resumed"), folder / "run")
    return folder


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[int, list[dict[str, Any]]]:
    return {world: run_ranks(start_all, world, folder) for world in WORLDS}


# -- the tests -------------------------------------------------------------------------------------------------------


def of_one_process(folder: Path, case: str) -> Parts:
    """The weights as nothing of `setup` makes them."""
    if case == "seed":
        tokenizer = Tokenizer.load(folder / "data")
        model = Transformer(replace(SHAPE, vocab_size=tokenizer.size), tokenizer.blank_id)
        init_weights(model, SEED)
        return Parts(model)
    parts = load_model(resumed_from(folder, case) or Path(config(folder, case).train.init)).parts
    if case == "new-scorer":
        parts.scorer = Scorer(parts.backbone.config, last_layer=True)
        init_weights(parts.scorer, SEED, parts.backbone)
    return parts


def named(pairs: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in pairs}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_ranks_have_the_weights_of_one_process(case: str, world: int, folder: Path, said: object) -> None:
    expected = of_one_process(folder, case)
    whole = {**named(expected.named_parameters()), **named(expected.named_buffers())}
    alone = loop.setup(config(folder, case), resumed_from(folder, case)).parts
    ranks = load_file(folder / f"{case}-{world}.safetensors")
    for found in ({**named(alone.named_parameters()), **named(alone.named_buffers())}, ranks):
        assert found.keys() == whole.keys() and len({name for name in whole if "inv_freq" in name}) == 1 + scored(case)
        for name, tensor in whole.items():
            assert torch.equal(found[name], tensor) and found[name].dtype == torch.float32, name


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_no_rank_ever_holds_the_whole_model(case: str, world: int, said: dict[int, list[dict[str, Any]]]) -> None:
    for part in said[world]:
        numbers = part["started"][case]
        assert numbers["before"] == 0, "the model is cut before it has storage"
        share = numbers["all"] / world
        assert share <= numbers["most"] < share + 3 * numbers["largest"] < 0.8 * numbers["all"], numbers


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_with_a_folder_is_said_as_one_process_says_it(
    name: str, folder: Path, said: dict[int, list[dict[str, Any]]]
) -> None:
    with pytest.raises(FredaError) as caught:
        load_model(folder / name)
    assert BROKEN[name] in str(caught.value) and str(caught.value).startswith(f"{folder / name}: ")
    assert {part["refused"][name] for world in WORLDS for part in said[world]} == {str(caught.value)}


def test_a_file_that_one_rank_cannot_read_stops_all(said: dict[int, list[dict[str, Any]]]) -> None:
    for part in (part for world in WORLDS for part in said[world]):
        assert part["unreadable"] == "rank 1: Input/output error: model.safetensors"
