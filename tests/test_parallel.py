"""Two processes train what one trains: the same losses, gradients and checkpoints, for every method."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from freda.data.config import CorpusConfig
from freda.data.loader import Batch
from freda.data.prepare import prepare_corpus
from freda.errors import AgreedError, FredaError
from freda.folders.adapter_folder import load_with_adapter
from freda.methods.best_of_n import BestOfN
from freda.methods.method import Step
from freda.methods.self_refine import SelfRefine
from freda.model.config import AdapterConfig, ModelConfig
from freda.model.parts import Parts
from freda.train import checkpoint, loop
from freda.train import config as configs
from freda.train.config import DataConfig, RunConfig, TrainConfig
from freda.train.parallel import Ranks
from tests.helpers import freda_on_ranks, method, run_ranks

METHODS = ("autoregressive", "block-diffusion", "self-refine", "shifted", "adapter-draft", "adapter-all")
METHODS += ("best-of-n", "best-of-n-layer", "best-of-n-beam")
TOLERANCE = {"rel": 5e-6, "abs": 5e-6}  # fp32 sums in another order, through four steps; seen: 1e-6
STEPS = 4


def config(folder: Path, name: str, **train: object) -> RunConfig:
    """A run of a method; scorers and adapters start from the base that the tests have made."""
    scores, adapter = name.startswith("best-of-n"), name.partition("adapter-")[2]
    shape = ModelConfig(dim=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn_dim=48, tied=name != "block-diffusion")
    settings: dict[str, Any] = {"steps": STEPS, "batch_rows": 8, "group_rows": 4, "lr": 1e-3, "warmup_steps": 2}
    settings |= {"log_every": 1, "save_every": 2, "validate_every": STEPS, "validation_rows": 5, "keep": 3, "clip": 0.5}
    settings |= {"lr": 3e-3} if scores else {}  # a scorer starts by preferring nothing, and learns slowly
    beam = name.endswith("beam")
    base = str(folder / ("less-raw" if beam else "base"))
    settings |= {"reshard": name != "autoregressive", "init": base if scores or adapter else ""}
    more = {"negatives": "beam", "num_negatives": 15} if beam else {}
    more |= {"scorer_layer": name.endswith("layer")} if scores else {}
    more |= {"layout": "shifted", "ar_weight": 0.5, "teacher": "clean"} if name == "shifted" else {}
    rule = "best-of-n" if scores else "self-refine" if adapter or name == "shifted" else name
    return RunConfig(
        model=ModelConfig() if scores or adapter else shape,
        data=DataConfig(path=str(folder / "data"), seq_len=64),
        method=method(rule, **more),
        train=TrainConfig(**{**settings, **train}),  # type: ignore[arg-type]
        adapter=AdapterConfig(rank=3, rows=adapter) if adapter else None,  # type: ignore[arg-type]
    )


def whole_rows(folder: Path) -> RunConfig:
    """A run whose rows are mostly of one document, which attend without a mask."""
    settings = config(folder, "self-refine", attention="staircase")
    return replace(settings, model=replace(settings.model, head_dim=64))


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(one: Path, two: Path) -> None:
    """Every number of every step and validation, and the weights at the end."""
    lines, others = metrics(one), metrics(two)
    assert [line["step"] for line in lines] == [line["step"] for line in others]
    for line, other in zip(lines, others, strict=True):
        for key in ("loss", "grad_norm", "labels", "loss_by_passes", "validation"):
            assert (key in line) == (key in other)
            if key in line:
                assert other[key] == pytest.approx(line[key], **TOLERANCE), (line["step"], key)
    init = configs.load(one / "config.toml").train.init
    adapter = (one / "checkpoints" / f"step-{STEPS}" / "adapter_config.json").is_file()
    base = [(Path(init), run) if adapter else (run, None) for run in (one, two)]
    left, right = (load_with_adapter(*folders).backbone.state_dict() for folders in base)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        if name == "scorer.mlp.2.bias":
            continue  # adding to all scores changes no choice: its gradient is rounding, and Adam makes steps of that
        assert (right[name] - tensor).norm() <= 1e-4 * tensor.norm(), name  # seen: 9e-6


def cut(run: Path, target: Path, step: int) -> Path:
    """A copy of a finished run as if it had been killed after `step`."""
    shutil.copytree(run, target)
    for folder in (target / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    (target / "latest").write_text(f"step-{step}\n")
    return target


# -- what each of the two ranks does ---------------------------------------------------------------------------------


def train_everything(ranks: Ranks, folder: Path) -> dict[str, Any]:
    for name in METHODS:
        loop.train(config(folder, name), folder / "two" / name, ranks=ranks)
    for name in ("self-refine", "best-of-n-layer", "adapter-draft"):
        begun = folder / "one-two" / name
        loop.train(loop.resume_run(begun), begun, resume=True, ranks=ranks)
    loop.train(config(folder, "self-refine", dtype="bfloat16"), folder / "two" / "bfloat16", ranks=ranks)
    loop.train(whole_rows(folder), folder / "two" / "staircase", ranks=ranks)
    return {
        "unreadable": _error_of_one_rank(ranks, folder),
        "nan": _nan_of_one_rank(ranks, folder),
        "full": [_full_disk_of_one_rank(ranks, folder, where) for where in ("weights", "moments")],
        "stopped": _signal_to_one_rank(ranks, folder),
        "proposer": _message(replace(config(folder, "best-of-n"), method=method("best-of-n", block_size=8)), ranks),
        "damaged": _damaged(ranks, folder),
        "share": _share(ranks, folder),
    }


def _share(ranks: Ranks, folder: Path) -> tuple[float, int]:
    """What part of all weights this rank holds, also after a validation, and in how many pieces they are gathered."""
    run = loop.setup(config(folder, "autoregressive"), None, ranks)
    loop.validate(run)
    weights = list(run.parts.parameters())
    share = sum(weight.to_local().numel() for weight in weights) / sum(weight.numel() for weight in weights)
    return share, sum(isinstance(module, FSDPModule) for module in run.root.modules())


def _message(settings: RunConfig, ranks: Ranks) -> str:
    with pytest.raises(AgreedError) as caught:
        loop.setup(settings, None, ranks)
    return str(caught.value)


def _error_of_one_rank(ranks: Ranks, folder: Path) -> str:
    read = loop.read_batches

    def broken(run: loop.Run, step: int) -> list[Batch]:
        if step == 3 and ranks.rank == 1:
            raise OSError(errno.EIO, "Input/output error", "train-0.bin")
        return read(run, step)

    loop.read_batches = broken
    with pytest.raises(AgreedError) as caught:
        loop.train(config(folder, "autoregressive", save_every=0), folder / "unreadable", ranks=ranks)
    loop.read_batches = read
    return str(caught.value)


def _nan_of_one_rank(ranks: Ranks, folder: Path) -> tuple[str, bool]:
    run = loop.setup(config(folder, "self-refine"), None, ranks)
    calls = list[int]()

    class Broken(SelfRefine):
        def loss(self, parts: Parts, batch: Batch, step: Step) -> torch.Tensor:
            calls.append(1)
            spoilt = float("nan") if (ranks.rank, len(calls)) == (1, 2) else 1.0
            return super().loss(parts, batch, step) * spoilt

    run.config = replace(run.config, method=Broken())
    before = [weight.to_local().clone() for weight in run.parts.parameters()]
    with pytest.raises(AgreedError) as caught:
        loop.take_step(run, 3)
    same = all(torch.equal(old, new.to_local()) for old, new in zip(before, run.parts.parameters(), strict=True))
    return str(caught.value), same


def _full_disk_of_one_rank(ranks: Ranks, folder: Path, where: str) -> str:
    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = (checkpoint, "save_tensors") if where == "weights" else (checkpoint.HuggingFaceStorageWriter, "write_data")
    original = getattr(*target)
    start = checkpoint.Saver.start

    def fills(self: checkpoint.Saver, model: Any, optimizer: Any, step: int, validation: float | None) -> None:
        start(self, model, optimizer, step, validation)
        self.wait()  # the next one meets the full disk
        if step == 2 and ranks.rank == 1:
            setattr(*target, no_space)

    def asynchronous(self: checkpoint.Saver, *arguments: Any) -> None:
        fills(self, *arguments) if arguments[2] == 2 else start(self, *arguments)

    checkpoint.Saver.start = asynchronous  # type: ignore[method-assign]
    with pytest.raises(FredaError) as caught:
        loop.train(config(folder, "autoregressive"), folder / f"full-{where}", ranks=ranks)
    checkpoint.Saver.start = start  # type: ignore[method-assign]
    setattr(*target, original)
    return str(caught.value)


def _signal_to_one_rank(ranks: Ranks, folder: Path) -> tuple[int, str]:
    take = loop.take_step

    def signalled(run: loop.Run, step: int) -> dict[str, Any]:
        if step == 2 and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(run, step)

    loop.take_step = signalled
    result = loop.train(config(folder, "autoregressive", save_every=0), folder / "stopped", ranks=ranks)
    loop.take_step = take
    return result.step, result.interrupted


def _damaged(ranks: Ranks, folder: Path) -> str:
    notes: list[str] = []
    found = checkpoint.resumable(folder / "damaged", ranks, notes.append)
    assert found is not None
    return f"{found.name} {notes[0]}"


# -- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    prepare_corpus(CorpusConfig(problems=120, validation_problems=12, vocab_size=300), folder / "data")
    loop.train(config(folder, "self-refine", steps=3, save_every=0), folder / "base")
    loop.train(config(folder, "self-refine", steps=40, lr=3e-3, save_every=0, validate_every=0), folder / "less-raw")
    for name in METHODS:
        loop.train(config(folder, name), folder / "one" / name)
    for name in ("self-refine", "best-of-n-layer", "adapter-draft"):
        cut(folder / "one" / name, folder / "one-two" / name, 2)
    damaged = cut(folder / "one" / "self-refine", folder / "damaged", 4)
    file = next((damaged / "checkpoints" / "step-4" / "optimizer").iterdir())
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    return folder


@pytest.fixture(scope="module")
def said(folder: Path) -> Iterator[list[dict[str, Any]]]:
    yield run_ranks(train_everything, 2, folder)


@pytest.mark.parametrize("name", METHODS)
def test_two_processes_train_what_one_trains(name: str, folder: Path, said: object) -> None:
    assert_same_run(folder / "one" / name, folder / "two" / name)


def test_the_ranks_of_a_beam_run_have_unlike_counts(folder: Path) -> None:
    """Else the mean over a group could be taken on each rank by itself, and no test would notice."""
    run, counts = loop.setup(config(folder, "best-of-n-beam")), []
    rule = run.method
    assert isinstance(rule, BestOfN)
    for batch in (batch for step in range(STEPS) for batch in loop.read_batches(run, step)):
        slots = rule.beam_slots(rule.proposal(run.parts, batch, passes=2)[1], batch)
        in_row = ((slots.target >= 0) & (batch.document >= 0)[:, :: rule.block_size]).sum(1)
        counts.append((int(in_row[:2].sum()), int(in_row[2:].sum())))
    assert any(left != right for left, right in counts if left and right), counts
    assert any(not left and right for left, right in counts) and (0, 0) in counts, counts


def test_rows_of_one_document_in_two_processes(folder: Path, said: object) -> None:
    """One rank may have whole rows in a group and the other packed ones: what they gather is the same."""
    run = loop.setup(whole_rows(folder))
    halves = [
        tuple(run.rows.batch(first + half, 2).one_document for half in (0, 2)) for first in range(0, 8 * STEPS, 4)
    ]
    assert {(True, False), (True, True)} <= set(halves), "groups of four rows, two for each rank"
    loop.train(whole_rows(folder), folder / "one" / "staircase")
    assert_same_run(folder / "one" / "staircase", folder / "two" / "staircase")


@pytest.mark.parametrize("name", ["self-refine", "best-of-n-layer", "adapter-draft"])
def test_a_run_goes_on_with_another_number_of_processes(name: str, folder: Path, said: object) -> None:
    assert_same_run(folder / "one" / name, folder / "one-two" / name)
    back = cut(folder / "two" / name, folder / "two-one" / name, 2)
    loop.train(loop.resume_run(back), back, resume=True)
    assert_same_run(folder / "one" / name, back)


def test_bfloat16_is_near_float32(folder: Path, said: object) -> None:
    """Two processes gather layers in bfloat16 and sum gradients in fp32; one process computes with copies in it."""
    loop.train(config(folder, "self-refine", dtype="bfloat16"), folder / "one" / "bfloat16")
    for line, other in zip(metrics(folder / "one" / "bfloat16"), metrics(folder / "two" / "bfloat16"), strict=True):
        if "loss" in line:
            assert other["loss"] == pytest.approx(line["loss"], rel=3e-4)
            assert other["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-2)


def test_each_rank_has_half_and_writes_half(folder: Path, said: list[dict[str, Any]]) -> None:
    checkpoint_folder = folder / "two" / "self-refine" / "checkpoints" / "step-4"
    shards = sorted((checkpoint_folder / "optimizer").iterdir())
    assert len(shards) == 2 and shards[0].stat().st_size == pytest.approx(shards[1].stat().st_size, rel=0.1)
    assert {path.name for path in checkpoint_folder.glob("model*")} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    for part in said:
        share, pieces = part["share"]
        assert 0.45 < share < 0.55 and pieces == 3, "two layers, and what is around them"


def test_an_error_of_one_rank_ends_all_with_one_message(folder: Path, said: list[dict[str, Any]]) -> None:
    for part in said:
        part.pop("share", None)
    assert said[0] == said[1], "all ranks say the same, so that the first can speak for all"
    assert said[0]["unreadable"] == "rank 1: Input/output error: train-0.bin"
    assert loop.resume_run(folder / "unreadable").train.steps == STEPS
    assert (folder / "unreadable" / "latest").read_text() == "step-3\n", "the steps before it are kept"
    assert "was trained with 4" in said[0]["proposer"] and "rank" not in said[0]["proposer"]


def test_a_loss_that_is_not_finite_names_step_rank_and_rows(said: list[dict[str, Any]]) -> None:
    message, unchanged = said[0]["nan"]
    assert "loss nan" in message and "at step 3, rank 1, rows 30 to 31: stopped before the update" in message
    assert unchanged and said[1]["nan"][1]


@pytest.mark.parametrize(("number", "where"), [(0, "weights"), (1, "moments")])
def test_a_full_disk_on_one_rank_stops_all_and_harms_nothing(
    number: int, where: str, folder: Path, said: list[dict[str, Any]]
) -> None:
    message, run = said[0]["full"][number], folder / f"full-{where}"
    assert f"cannot write {run / 'checkpoints' / 'step-4'}: rank 1: " in message
    assert "No space left on device" in message
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-2"]
    assert loop.train(loop.resume_run(run), run, resume=True).step == STEPS
    assert_same_run(folder / "one" / "autoregressive", run)


def test_a_signal_to_one_rank_stops_all_at_the_same_step(folder: Path, said: list[dict[str, Any]]) -> None:
    assert said[0]["stopped"] == said[1]["stopped"] == [3, "SIGTERM"]
    assert (folder / "stopped" / "latest").read_text() == "step-3\n"


def test_ranks_verify_a_checkpoint_together(said: list[dict[str, Any]]) -> None:
    for part in said:
        assert part["damaged"].startswith("step-2 ") and "step-4 is damaged (optimizer/shard-00001" in part["damaged"]


@pytest.mark.slow
def test_torchrun(folder: Path) -> None:
    """As a user starts it: one answer, and SIGTERM saves."""
    file, run = folder / "run.toml", folder / "torchrun"
    file.write_text(configs.dump(config(folder, "self-refine", steps=100_000)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch += ["-m", "freda", "train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launch, str(file), "--out", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
    wait_for(run / "latest")
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert errors.count("saved and stopped") == 1 and out.count("checkpoints/step-") == 1, errors
    step = int(out.strip().rsplit("-", 1)[1])
    assert metrics(run)[-1]["step"] == step and (run / "latest").read_text() == f"step-{step}\n"


def test_one_message_for_all_ranks(tmp_path: Path) -> None:
    said = freda_on_ranks("train", tmp_path / "none.toml", "--out", tmp_path / "none", world=2, folder=tmp_path)
    assert [one.code for one in said] == [2, 2]
    assert "".join(one.errors for one in said).count("there is no config file") == 1, said


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
