"""Matrices as int8: near to what they were, a quarter of the bytes, and a model folder like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from freda.cli import run
from freda.data.tokenizer import train_tokenizer
from freda.errors import FredaError
from freda.folders.model_folder import SCORER_FILE, LoadedModel, load_model
from freda.folders.tensors import SCALE, packed, unpacked
from freda.model.config import ModelConfig
from freda.model.parts import Parts
from freda.model.scorer import Scorer
from freda.model.transformer import Transformer
from tests.helpers import init_weights, method, save_model


def test_weights_are_off_by_half_a_step_at_most() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(40, 64, generator=generator) * torch.logspace(-4, 2, 40)[:, None]
    matrix[3] = 0
    vector = torch.randn(64, generator=generator)
    stored = packed({"w": matrix, "norm": vector})
    assert stored["w"].dtype == torch.int8 and stored["w" + SCALE].shape == (40,) and stored["norm"] is vector
    back = unpacked(stored, torch.float32)
    assert back.keys() == {"w", "norm"}
    assert ((back["w"] - matrix).abs() <= stored["w" + SCALE][:, None] * 0.5001).all()
    assert not back["w"][3].any(), "a row of zeros stays one"
    assert unpacked(stored, torch.bfloat16)["w"].dtype == torch.bfloat16
    assert torch.equal(packed(back)["w"], stored["w"]), "packing again changes nothing"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = train_tokenizer(["one two three"] * 50, 300)
    shape = ModelConfig(vocab_size=tokenizer.size, dim=64, layers=2, heads=2, kv_heads=2, head_dim=32, ffn_dim=128)
    model = Transformer(shape, tokenizer.blank_id)
    init_weights(model, 0)
    scorer = Scorer(shape)
    init_weights(scorer, 0, model)
    save_model(tmp_path / "model", LoadedModel(Parts(model, scorer), tokenizer, method("best-of-n"), "test"))
    return tmp_path / "model"


def test_a_model_folder_as_int8(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", str(folder), str(tmp_path / "small"), "--int8"]) == 0
    sizes = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert int(sizes["bytes_after"]) < 0.3 * int(sizes["bytes_before"])
    whole, small = load_model(folder), load_model(tmp_path / "small")
    assert small.method == whole.method and small.stage == whole.stage and small.scorer is not None
    stored = load_file(tmp_path / "small" / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
    for (name, one), (_, two) in zip(whole.parts.state_dict().items(), small.parts.state_dict().items(), strict=True):
        assert two.dtype == torch.float32 and (one - two).abs().max() <= one.abs().max() / 200, name
    assert load_model(tmp_path / "small", dtype=torch.bfloat16).backbone.embed_tokens.weight.dtype == torch.bfloat16
    assert run(["generate", str(tmp_path / "small"), "one two", "--max-new-tokens", "4", "--json"]) == 0
    assert run(["convert", str(folder), str(tmp_path / "x"), "--int8", "--dtype", "float16"]) == 2


def test_copies_in_other_precisions(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder = tmp_path / "run"
    (run_folder / "checkpoints").mkdir(parents=True)
    folder.rename(run_folder / "checkpoints" / "step-3")
    (run_folder / "latest").write_text("step-3")
    (run_folder / "checkpoints" / "step-3" / "training.state").write_text("only training needs it")
    whole = load_model(run_folder)
    copies = {"same": None, "half": "bfloat16", "int8": "int8", "back": "float32", "int8-same": None, "wide": "float32"}
    sources = {"back": tmp_path / "half", "int8-same": tmp_path / "int8", "wide": tmp_path / "int8"}
    for name, dtype in copies.items():
        source = sources.get(name, run_folder)
        assert run(["convert", str(source), str(tmp_path / name), *(["--dtype", dtype] if dtype else [])]) == 0
        said = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
        stored = "int8" if "int8" in name else dtype or "float32"
        assert (said["dtype"], said["method"], said["stage"]) == (stored, "best-of-n", "test")
        copy = load_model(tmp_path / name)
        assert copy.method == whole.method and copy.tokenizer.fingerprint == whole.tokenizer.fingerprint
        state, expected = copy.parts.state_dict(), whole.parts.state_dict()
        assert state.keys() == expected.keys() and int(said["parameters"]) == sum(t.numel() for t in expected.values())
        if name == "same":
            assert all(torch.equal(state[key], expected[key]) for key in expected)
        if name in ("half", "back"):
            assert all(torch.equal(state[key], expected[key].bfloat16().float()) for key in expected)
        assert run(["inspect", str(tmp_path / name)]) == 0 and f"stored as {stored}" in capsys.readouterr().out
        assert not (tmp_path / name / "training.state").exists()
    half = load_file(tmp_path / "half" / "model.safetensors") | load_file(tmp_path / "half" / SCORER_FILE)
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    files = [tmp_path / name / "model.safetensors" for name in ("int8", "int8-same")]
    one, two = (load_file(file) for file in files)
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert all(torch.equal(wide[key], weight) for key, weight in unpacked(one, torch.float32).items())
    assert all(torch.equal(one[key], two[key]) for key in one if one[key].dtype == torch.int8)


def test_scales_that_are_missing_are_told(folder: Path, tmp_path: Path) -> None:
    run(["convert", str(folder), str(tmp_path / "small"), "--int8"])
    from safetensors.torch import save_file

    path = tmp_path / "small" / "model.safetensors"
    stored = load_file(path)
    del stored["model.layers.0.mlp.up_proj.weight" + SCALE]
    save_file(stored, path)
    with pytest.raises(FredaError, match=r"up_proj.weight is stored as torch.int8; quantised weights are not read"):
        load_model(tmp_path / "small")
