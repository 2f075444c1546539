"""Adapters on disk and on the command line: trained, resumed, loaded over a base, merged, read by peft, refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import freda
from freda.cli import run
from freda.data.tokenizer import Tokenizer, train_tokenizer
from freda.decode.config import EngineConfig
from freda.decode.engine import Engine
from freda.errors import FredaError
from freda.eval.config import SystemConfig, load_sweep
from freda.eval.sweep import run_sweep
from freda.folders.adapter_folder import base_fingerprint, load_with_adapter, write_adapter
from freda.folders.convert import convert
from freda.folders.model_folder import About, Over, load_model, name_in_file
from freda.methods.self_refine import SelfRefine
from freda.model.config import AdapterConfig, ModelConfig
from freda.model.low_rank import LowRank
from freda.model.parts import ADAPTER
from freda.train import config as configs
from freda.train import loop
from freda.train.config import DataConfig, RunConfig, TrainConfig
from tests.helpers import (
    as_loaded,
    assert_same_logits,
    edit_json,
    edit_tensors,
    method,
    own_model,
    save_model,
    write_hf,
)

SHIFTED = SelfRefine(layout="shifted")
FILES = {"adapter_config.json", "adapter_model.safetensors", "checksums.json", "optimizer", "state.json"}


def settings(shards: Path, **changes: Any) -> RunConfig:
    train = {"steps": 4, "batch_rows": 4, "group_rows": 2, "lr": 1e-2, "warmup_steps": 1, "log_every": 1}
    train |= {"save_every": 2, "validation_rows": 2, **changes.pop("train", {})}
    shape = ModelConfig(dim=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn_dim=48)
    data = DataConfig(path=str(shards), seq_len=64)
    return RunConfig(**{"model": shape, "data": data, "train": TrainConfig(**train), **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def base(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained to predict next tokens."""
    folder = tmp_path_factory.mktemp("base") / "run"
    return loop.train(settings(shards, method=method("autoregressive"), train={"save_every": 0}), folder).checkpoint


def adapter_run(shards: Path, base: Path, rows: str = "draft", **train: Any) -> RunConfig:
    adapter = AdapterConfig(rank=4, rows=rows)  # type: ignore[arg-type]
    changes = {"method": SHIFTED, "adapter": adapter, "model": ModelConfig()}
    return settings(shards, train={"init": str(base), **train}, **changes)


@pytest.fixture(scope="module")
def trained(shards: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of an adapter for each choice of rows."""
    root = tmp_path_factory.mktemp("adapters")
    for rows in ("draft", "all"):
        loop.train(adapter_run(shards, base, rows), root / rows)
    return {rows: root / rows for rows in ("draft", "all")}


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@torch.no_grad()
def write_random(folder: Path, base: Path, config: AdapterConfig) -> Path:
    """An adapter over a base that has weights to be seen."""
    loaded = load_model(base)
    model = loaded.parts
    model.adapt(config)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name_in_file(ADAPTER, name): torch.randn(weight.shape, generator=generator) * 0.3
        for part, name, weight in model.weights()
        if part == ADAPTER
    }
    folder.mkdir()
    about = About(loaded.tokenizer, SHIFTED, "training", Over(config, base, base_fingerprint(base)))
    write_adapter(folder, loaded.backbone.config, tensors, about)
    return folder


def fails(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    capsys.readouterr()
    assert run([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("freda: error: ") and captured.err.count("\n") == 1
    return captured.err


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["draft", "all"])
def test_a_checkpoint_is_the_adapter_alone_and_resumes(rows: str, trained: dict[str, Path], tmp_path: Path) -> None:
    """Cut after step 2, the run gives the very losses and weights of the one that went on."""
    whole, cut = trained[rows], tmp_path / "cut"
    assert {path.name for path in (whole / "checkpoints" / "step-4").iterdir()} == FILES
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step-4")
    (cut / "latest").write_text("step-2\n")
    loop.train(loop.resume_run(cut), cut, resume=True)
    assert losses(cut) == losses(whole)
    left, right = (load_file(run / "checkpoints" / "step-4" / "adapter_model.safetensors") for run in (whole, cut))
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    before = load_file(whole / "checkpoints" / "step-2" / "adapter_model.safetensors")
    assert all(not torch.equal(left[name], before[name]) for name in left), "all of it learns"


def test_a_draft_row_adapter_leaves_the_base_and_its_validation_as_they_are(
    trained: dict[str, Path], base: Path, shards: Path
) -> None:
    def text_loss(run: Path) -> float:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return float(next(line["validation"]["ar"] for line in lines if "validation" in line))

    own = next(json.loads(line) for line in (base.parent.parent / "metrics.jsonl").read_text().splitlines()[::-1])
    assert text_loss(trained["draft"]) == own["validation"]["loss"]
    assert text_loss(trained["all"]) != own["validation"]["loss"]


def test_a_base_that_has_changed_is_not_resumed_over(shards: Path, base: Path, tmp_path: Path) -> None:
    moved = tmp_path / "base"
    shutil.copytree(base, moved)
    loop.train(adapter_run(shards, moved, steps=2), tmp_path / "run")
    weights = load_file(moved / "model.safetensors")
    edit_tensors(moved / "model.safetensors", **{"model.norm.weight": weights["model.norm.weight"] * 1.1})
    with pytest.raises(FredaError, match="is not what it was when the run began"):
        loop.train(replace(loop.resume_run(tmp_path / "run", ["train.steps=3"])), tmp_path / "run", resume=True)


def test_bfloat16_copies_of_an_adapter_learn(shards: Path, base: Path, tmp_path: Path) -> None:
    wide, short = (loop.setup(adapter_run(shards, base, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    table, blank = short.parts.backbone.embed_tokens.weight, short.parts.backbone.blank
    assert blank is not None and torch.equal(blank[0], table[short.tokenizer.blank_id]), "it begins as in the base"
    for step in range(2):
        numbers = [loop.take_step(one, step) for one in (wide, short)]
        assert numbers[1]["loss"] == pytest.approx(numbers[0]["loss"], rel=5e-3)
        assert numbers[1]["grad_norm"] == pytest.approx(numbers[0]["grad_norm"], rel=5e-2)
    before = load_model(base).backbone.get_parameter("layers.0.mlp.up_proj.weight")
    assert torch.equal(short.parts.backbone.get_parameter("layers.0.mlp.up_proj.weight"), before)


# -- over a base -------------------------------------------------------------------------------------------------------


def test_texts_of_the_base_are_the_bases(trained: dict[str, Path], base: Path) -> None:
    """A draft-row adapter, over weights stored as they are and as int8: its autoregressive texts are the base's, and
    its own method is what it was trained as."""
    prompts = ["Q: Mia has 12 shells. She", "Tom buys 7 apples.", "A: 3"]
    convert(base, (small := base.parent / "int8"), dtype="int8")
    for over in (base, small):
        plain, model = freda.load(over), freda.load(over, adapter=trained["draft"])
        assert model.loaded.method == SHIFTED and model.loaded.parts.adapter is not None
        how: dict[str, Any] = {"max_new_tokens": 20, "method": "autoregressive"}
        for more in ({}, {"temperature": 1.0, "seed": 3}):
            texts = [[one.tokens for one in each.generate(prompts, **how, **more)] for each in (plain, model)]
            assert texts[0] == texts[1]
        assert all(one.tpf > 1 for one in model.generate(prompts, max_new_tokens=20, threshold=1e-9))
    shutil.rmtree(small)


def test_an_unconverted_base(tokenizer: Tokenizer, tmp_path: Path, quiet_transformers: None) -> None:
    """Over a checkpoint of transformers, whose table must grow for BLANK, as over the folder converted from it."""
    write_hf(tmp_path / "hf", tokenizer, "qwen3-tied", rows=tokenizer.size - 1)
    convert(tmp_path / "hf", tmp_path / "base")
    adapter = write_random(tmp_path / "adapter", tmp_path / "base", AdapterConfig(rank=2))
    models = [load_with_adapter(tmp_path / name, adapter) for name in ("hf", "base")]
    states = [model.parts.state_dict() for model in models]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert models[0].tokenizer.vocabulary == models[1].tokenizer.vocabulary
    assert models[0].method == models[1].method == SHIFTED


def test_one_on_all_rows_is_merged_when_loaded_and_by_convert(
    trained: dict[str, Path], base: Path, tmp_path: Path
) -> None:
    loaded = load_with_adapter(base, trained["all"])
    assert loaded.parts.adapter is None and not any(isinstance(one, LowRank) for one in loaded.parts.modules())
    summary = convert(base, tmp_path / "merged", adapter=trained["all"])
    assert summary["method"] == "self-refine"
    merged = load_model(tmp_path / "merged")
    assert merged.method == loaded.method and merged.stage == loaded.stage
    states = [one.backbone.state_dict() for one in (loaded, merged)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["embed_tokens.weight"], load_model(base).backbone.embed_tokens.weight)


def test_peft_reads_an_adapter_on_all_rows(tokenizer: Tokenizer, tmp_path: Path, quiet_transformers: None) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    write_hf(tmp_path / "hf", tokenizer, "qwen2-tied", rows=tokenizer.size)
    convert(tmp_path / "hf", tmp_path / "base")
    for rows in ("all", "draft"):
        config = AdapterConfig(rank=2, alpha=3.0, rows=rows)  # type: ignore[arg-type]
        write_random(tmp_path / rows, tmp_path / "base", config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with pytest.raises(Exception, match="FREDA_DRAFT_ROWS"):
        peft.PeftModel.from_pretrained(theirs, tmp_path / "draft")
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "all").eval()
    own = load_with_adapter(tmp_path / "base", tmp_path / "all")
    assert_same_logits(own.backbone, adapted, own.tokenizer)
    blank = torch.tensor([own.tokenizer.blank_id])
    torch.testing.assert_close(adapted.get_input_embeddings()(blank)[0], own.backbone.blank_row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fingerprint_knows_the_weights_and_not_their_precision(
    dtype: torch.dtype, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = own_model(tokenizer)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    save_model(tmp_path / "one", as_loaded(model, tokenizer))
    save_model(tmp_path / "two", as_loaded(model, tokenizer), dtype=dtype)
    model.layers[1].get_parameter("mlp.up_proj.weight").data[0, 5] += 0.1
    save_model(tmp_path / "other", as_loaded(model, tokenizer), dtype=dtype)
    one, two, other = (base_fingerprint(tmp_path / name) for name in ("one", "two", "other"))
    assert one == two != other


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_base_that_does_not_fit(tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = as_loaded(own_model(tokenizer), tokenizer)
    save_model(tmp_path / "base", base)
    adapter = write_random(tmp_path / "adapter", tmp_path / "base", AdapterConfig(rank=2))
    save_model(tmp_path / "wide", as_loaded(own_model(tokenizer, ffn_dim=64), tokenizer))
    letters = train_tokenizer(["Other words of another tokenizer.\n"] * 3, 280)
    save_model(tmp_path / "other", as_loaded(own_model(letters), letters))
    ask = ("hello", "--max-new-tokens", "2", "--adapter")
    words = fails(capsys, "generate", tmp_path / "wide", *ask, adapter)
    assert "belongs to another architecture: its base has ffn_dim 48" in words and "has 64" in words
    assert "with another tokenizer" in fails(capsys, "generate", tmp_path / "other", *ask, adapter)
    assert "is an adapter, not a model; name its base" in fails(capsys, "generate", adapter, "hello")
    assert "is not an adapter" in fails(capsys, "generate", tmp_path / "base", *ask, tmp_path / "base")
    assert "there is no adapter" in fails(capsys, "generate", tmp_path / "base", *ask, tmp_path / "nowhere")
    moved = own_model(tokenizer)
    moved.norm.weight.data *= 1.5
    save_model(tmp_path / "moved", as_loaded(moved, tokenizer))
    for name, noted in (("base", False), ("moved", True)):
        assert run(["generate", str(tmp_path / name), *ask, str(adapter)]) == 0
        assert ("was trained over other weights" in capsys.readouterr().err) == noted


def test_a_damaged_adapter(tokenizer: Tokenizer, tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_model(base, as_loaded(own_model(tokenizer), tokenizer))
    good = write_random(tmp_path / "good", base, AdapterConfig(rank=2))
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    for number, (file, changes, words) in enumerate(
        [
            ("adapter_model.safetensors", {name: None}, "lora_A.weight has shape none"),
            ("adapter_model.safetensors", {"odd": torch.zeros(2)}, "odd has shape"),
            ("adapter_config.json", {"r": 3}, "describes (3, 48)"),
            ("adapter_config.json", {"r": 0}, "adapter.rank is 0"),
            ("adapter_config.json", {"freda": None}, "was not trained by freda"),
            ("adapter_config.json", {"target_modules": None}, "has no target_modules"),
        ]
    ):
        bad = tmp_path / str(number)
        shutil.copytree(good, bad)
        (edit_json if file.endswith("json") else edit_tensors)(bad / file, **changes)  # type: ignore[arg-type]
        with pytest.raises(FredaError) as caught:
            load_with_adapter(base, bad)
        assert words in str(caught.value)


def test_bad_settings(
    trained: dict[str, Path], base: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(configs.dump(adapter_run(shards, base)))
    for setting, words in {
        "adapter.rank=0": "adapter.rank is 0; use 1 or more",
        "adapter.alpha=-1": "adapter.alpha is -1",
        'adapter.targets=["q_proj", "lm_head"]': "adapter.targets has 'lm_head'; use q_proj, k_proj",
        "adapter.targets=[]": "adapter.targets is empty",
        "adapter.rows=text": "adapter.rows is 'text'; use one of draft, all",
        "adapter.rnk=3": "did you mean 'adapter.rank'",
        "method.ar_weight=0.5": "method.ar_weight is 0.5, but with adapter.rows = draft the text is the frozen base's",
        "train.init=": "an adapter needs a base",
    }.items():
        assert words in fails(capsys, "train", tmp_path / "run.toml", "--out", tmp_path / "x", "--set", setting)
    assert configs.load(tmp_path / "run.toml", ["method.ar_weight=0.5", "adapter.rows=all"]).adapter is not None
    words = fails(capsys, "convert", base, tmp_path / "x", "--merge", trained["draft"])
    assert "acts on draft rows only, and cannot be merged" in words
    assert not (tmp_path / "x").exists()
    assert "is a shape with random weights" in fails(
        capsys, "bench", "decode", "tiny", "--device", "cpu", "--adapter", trained["draft"]
    )
    with pytest.raises(FredaError, match="adapters names 3, models 2"):
        SystemConfig(models=("a", "b"), adapters=("x", "y", "z"))


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("rates_once")
def test_commands_take_an_adapter(
    trained: dict[str, Path], base: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(configs.dump(adapter_run(shards, base)))
    assert run(["train", str(tmp_path / "run.toml"), "--dry-run"]) == 0
    assert ", frozen; an adapter of 0.0 M" in capsys.readouterr().out
    over = [str(base), "--adapter", str(trained["draft"])]
    assert run(["generate", *over, "Q: Mia", "--json", "--max-new-tokens", "8", "--threshold", "1e-9"]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "verified"
    assert run(["inspect", str(trained["draft"])]) == 0
    shown = capsys.readouterr().out
    assert "adapter " in shown and "rank 4 on q_proj" in shown and "in the shifted layout" in shown
    small = [
        "--batch",
        "1",
        "--context",
        "8",
        "--new-tokens",
        "8",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "b.json"),
    ]
    assert run(["bench", "decode", *over, *small]) == 0
    assert json.loads((tmp_path / "b.json").read_text())["adapter"] == str(trained["draft"])
    ask = ["--task", "sums", "--data", str(shards), "--limit", "2", "--max-new-tokens", "8"]
    assert run(["eval", *over, *ask]) == 0
    assert (trained["draft"] / "checkpoints" / "step-4" / "eval" / "sums" / "results.json").is_file()
    sweep = (
        f'[sweep]\nparts = ["main"]\ntasks = ["sums"]\nlimit = 2\nmax_new_tokens = 8\n[system.one]\nmodels = "{base}"\n'
    )
    (tmp_path / "sweep.toml").write_text(f'{sweep}adapters = ["{trained["draft"]}", "{trained["all"]}"]\n')
    found = run_sweep(load_sweep(tmp_path / "sweep.toml"), shards, tmp_path / "sweep")
    assert len(set(found["systems"]["one"]["models"])) == 2, "two adapters are two models"


def test_an_engine_says_that_draft_row_adapters_run_without_kernels(
    trained: dict[str, Path], base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_with_adapter(base, trained["draft"], dtype=torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    Engine(loaded, EngineConfig(pages=8))
    assert (
        capsys.readouterr().err
        == "freda: decoding without the GPU kernels: an adapter on draft rows runs without them\n"
    )
