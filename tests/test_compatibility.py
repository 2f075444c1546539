"""Files as version 0.1 wrote them: they load, or the error says what to do. Its runs are resumed in test_checkpoint."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freda.cli import run
from freda.data.config import load_prepare
from freda.data.loader import Loader
from freda.data.shards import Documents, Manifest
from freda.data.tokenizer import train_tokenizer
from freda.decode.api import Model
from freda.errors import FredaError
from freda.eval.config import EvalSettings
from freda.eval.evaluate import evaluate
from freda.eval.report.results import read_samples
from freda.eval.tasks import TASKS
from freda.folders.model_folder import ASSETS, LoadedModel, load_model
from freda.methods.autoregressive import Autoregressive
from freda.methods.best_of_n import BestOfN
from freda.methods.block_diffusion import BlockDiffusion
from freda.methods.method import Method
from freda.methods.self_refine import SelfRefine
from freda.model.config import ModelConfig
from freda.model.parts import Parts
from freda.model.scorer import Scorer
from freda.model.transformer import Transformer
from freda.train import config as configs
from tests.helpers import init_weights, save_model

PASSAGES = ["Q: Tom has 12 apples. He buys 7 more. How many apples?\nA: 12 + 7 = 19. The answer is 19."] * 3
CORPUS = {  # of manifest.json
    "generator": 1,
    "problems": 60,
    "validation_problems": 8,
    "steps": 1,
    "max_number": 99,
    "max_change": 0,
    "carry": True,
    "varied": True,
    "vocab_size": 300,
    "align": 8,
    "seed": 0,
}
SETTINGS = {  # of samples.jsonl
    "max_new_tokens": 8,
    "passes": 2,
    "threshold": 0.9,
    "temperature": 0.0,
    "top_p": 1.0,
    "seed": 0,
    "width": 4,
    "tau": 0.1,
    "swaps": 2,
    "candidates": "beam",
    "select": "argmax",
    "by": "generation",
}
SECTION = {"stage": "training", "block_size": 8, "passes": 3}  # of config.json, with those of the drafts
DRAFTS = {"feedback": "hard", "rescale": True, "committed_hard": False}


def written(folder: Path, method: str) -> LoadedModel:
    """A model folder whose `freda` section has the keys of 0.1, which were those of all methods."""
    tokenizer = train_tokenizer(PASSAGES, 300)
    shape = ModelConfig(vocab_size=tokenizer.size, dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn_dim=48)
    network = Transformer(shape, tokenizer.blank_id)
    init_weights(network, 3)
    parts = Parts(network, Scorer(shape) if method == "best-of-n" else None)
    made = LoadedModel(parts, tokenizer, SelfRefine(), "training")
    save_model(folder, made)
    ids = {"blank_token_id": tokenizer.blank_id, "tokenizer": tokenizer.fingerprint}
    values = json.loads((folder / "config.json").read_text())
    values["freda"] = {**ids, "method": method, **SECTION, **DRAFTS}
    (folder / "config.json").write_text(json.dumps(values))
    return made


@pytest.mark.parametrize(
    "method",
    [
        Autoregressive(block_size=8),
        BlockDiffusion(block_size=8),
        SelfRefine(block_size=8, feedback="hard", rescale=True),
        BestOfN(block_size=8, feedback="hard", rescale=True),
    ],
    ids=lambda method: method.name,
)
def test_model_folders(method: Method, tmp_path: Path) -> None:
    made = written(tmp_path / "model", method.name)
    loaded = load_model(tmp_path / "model")
    assert loaded.method == method and loaded.stage == "training"
    assert (loaded.scorer is not None) == (method.name == "best-of-n")
    for name, weight in made.backbone.state_dict().items():
        assert torch.equal(loaded.backbone.state_dict()[name], weight)
    assert Model(loaded).generate("Q: Tom", max_new_tokens=9).tokens


def test_the_bundled_model_is_such_a_folder() -> None:
    section = json.loads((ASSETS / "mini" / "config.json").read_text())["freda"]
    assert {"block_size", "passes", "feedback", "rescale", "committed_hard"} <= section.keys()
    assert load_model(ASSETS / "mini").method == BestOfN(block_size=4)


def test_model_folders_with_less_are_refused_by_the_missing_key(tmp_path: Path) -> None:
    written(tmp_path / "model", "self-refine")
    path = tmp_path / "model" / "config.json"
    values = json.loads(path.read_text())
    del values["freda"]["block_size"]
    path.write_text(json.dumps(values))
    with pytest.raises(FredaError, match="block_size"):
        load_model(tmp_path / "model")


# -- shards ------------------------------------------------------------------------------------------------------------


def write_shards(folder: Path) -> list[list[int]]:
    """Shards and manifest of 0.1; returns the training documents."""
    folder.mkdir()
    tokenizer = train_tokenizer(PASSAGES, 300)
    tokenizer.save(folder)
    documents = [
        [1 + number, 2, 3, 4, 5, 6, tokenizer.eos_id, tokenizer.eos_id] * (1 + number % 2) for number in (0, 1, 2)
    ]
    splits: dict[str, Any] = {}
    for split, texts in (("train", documents), ("validation", documents[:1])):
        name = f"{split}-sums-00000"
        np.array([token for text in texts for token in text], "<i4").tofile(folder / f"{name}.bin")
        np.cumsum([len(text) for text in texts]).astype("<i8").tofile(folder / f"{name}.idx")
        sums = {kind: hashlib.sha256((folder / f"{name}.{kind}").read_bytes()).hexdigest() for kind in ("bin", "idx")}
        counts = {"documents": len(texts), "tokens": sum(map(len, texts))}
        shard = {"name": name, "source": "sums", **counts, "sha256": sums["bin"], "sha256_idx": sums["idx"]}
        splits[split] = {**counts, "shards": [shard]}
    manifest = {
        "source": {"prepare": {"seed": 0, "align": 8}, "source.sums": {"kind": "sums"}, "corpus": CORPUS},
        "align": 8,
        "eos_id": tokenizer.eos_id,
        "blank_id": tokenizer.blank_id,
        "tokenizer": tokenizer.fingerprint,
        "splits": splits,
        "dropped": {},
        "examples": [],
        "contamination": {},
        "version": 2,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2))
    return documents


def test_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = write_shards(tmp_path / "data")
    found = Documents(tmp_path / "data", "train", Manifest.read(tmp_path / "data"))
    assert [found.document(number).tolist() for number in range(len(found))] == documents
    assert Loader(tmp_path / "data", "train", seq_len=16, seed=0).batch(0, 2).tokens.shape == (2, 16)
    assert run(["inspect", str(tmp_path / "data"), "--verify"]) == 0
    assert f"{len(documents)} documents" in capsys.readouterr().out


def test_shards_of_another_layout_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "data")
    path = tmp_path / "data" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 1}))
    with pytest.raises(FredaError, match=r"version.*prepare"):
        Manifest.read(tmp_path / "data")


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def evaluated(tmp_path: Path) -> Path:
    """An evaluation of four questions as 0.1 left it, in `eval` beside its model and its shards."""
    written(tmp_path / "model", "self-refine")
    model = Model(load_model(tmp_path / "model"))
    write_shards(tmp_path / "data")
    examples = TASKS["sums"].examples(tmp_path / "data", 4)
    evaluate(model, TASKS["sums"], examples, tmp_path / "eval", settings=EvalSettings(max_new_tokens=8, passes=2))
    path = tmp_path / "eval" / "samples.jsonl"
    head, *samples = (json.loads(line) for line in path.read_text().splitlines())
    head = {key: head[key] for key in ("task", "n", "shots", "checksum", "method", "model", "dtype", "version")}
    head |= {"block_size": 8, **DRAFTS, "settings": SETTINGS}
    kept = (
        "id",
        "group",
        "prompt",
        "output",
        "tokens",
        "nfe",
        "finish",
        "error",
        "gold",
        "answer",
        "correct",
        "reason",
    )
    lines = [{**{key: one[key] for key in (*kept, "also", "seconds")}, "drafts": one["nfe"]} for one in samples]
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))
    return tmp_path


def test_a_stopped_evaluation_is_resumed(evaluated: Path) -> None:
    path = evaluated / "eval" / "samples.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:3]))
    (evaluated / "eval" / "results.json").unlink()
    examples = TASKS["sums"].examples(evaluated / "data", 4)
    seen: list[int] = []
    found = evaluate(
        Model(load_model(evaluated / "model")),
        TASKS["sums"],
        examples,
        evaluated / "eval",
        settings=EvalSettings(max_new_tokens=8, passes=2),
        progress=lambda done, total, accuracy: seen.append(done),
    )
    assert seen[0] == 2 and found["n"] == 4
    _, samples = read_samples(evaluated / "eval")
    assert list(samples) == [example.id for example in examples] and "drafts" in samples[examples[0].id]


def test_results_are_compared(evaluated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(evaluated / "eval", evaluated / "other")
    assert run(["eval", "--compare", str(evaluated / "eval"), str(evaluated / "other")]) == 0
    assert "n = 4" in capsys.readouterr().out


# -- config files ------------------------------------------------------------------------------------------------------


def test_a_file_of_all_sections_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """0.1 read the sections of `freda prepare` and of `freda train` from one file."""
    path = tmp_path / "all.toml"
    path.write_text("[corpus]\nproblems = 60\n[model]\ndim = 32\n")
    with pytest.raises(FredaError, match=r"\[corpus\].*freda prepare.*file of its own"):
        configs.load(path)
    with pytest.raises(FredaError, match=r"\[model\].*freda train.*file of its own"):
        load_prepare(path)
