"""Model folders: the logits of `transformers` in both directions, and a clear word for everything that is wrong."""

import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from freda.data.tokenizer import Tokenizer, train_tokenizer
from freda.errors import FredaError
from freda.files import PART, beside, written_beside
from freda.folders.convert import convert
from freda.folders.hugging_face import EMBEDDING, HEAD
from freda.folders.model_folder import load_model, resolve_model_folder
from tests.helpers import (
    LLAMA3,
    METHOD,
    TRANSFORMERS_CASES,
    as_loaded,
    assert_same_logits,
    contents,
    edit_json,
    edit_tensors,
    loaded_by,
    own_logits,
    own_model,
    save_model,
    some_ids,
    write_hf,
)

pytestmark = pytest.mark.usefixtures("quiet_transformers")

OWN_CASES = {
    "Qwen3ForCausalLM": {"head_dim": 16, "rope_theta": 1e6},
    "Qwen2ForCausalLM": {"qk_norm": False, "qkv_bias": True, "tied": False},
    "LlamaForCausalLM": {"qk_norm": False, "head_dim": 16, "norm_eps": 1e-5},
    "LlamaForCausalLM-llama3": {"qk_norm": False, "tied": False, "rope_scaling": LLAMA3},
}


@pytest.fixture(scope="module")
def saved_folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    save_model(folder, as_loaded(own_model(tokenizer), tokenizer))
    return folder


@pytest.fixture
def model_folder(saved_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_folder, tmp_path / "model"))


@pytest.fixture(scope="module")
def hf_folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "source"
    write_hf(folder, tokenizer, "qwen3-tied", rows=tokenizer.size + 3)
    return folder


@pytest.fixture
def source(hf_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(hf_folder, tmp_path / "source"))


# -- the same logits as transformers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TRANSFORMERS_CASES)
def test_converted_checkpoint_has_the_logits_of_transformers(case: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = write_hf(tmp_path / "source", tokenizer, case, rows=tokenizer.size + 3)
    summary = convert(tmp_path / "source", tmp_path / "target")
    loaded = load_model(tmp_path / "target")
    assert_same_logits(loaded.backbone, theirs, tokenizer)
    assert summary["architecture"] == type(theirs).__name__
    assert summary["parameters"] == theirs.num_parameters()
    assert (loaded.method.name, loaded.stage, loaded.method.block_size) == ("autoregressive", "base", 4)


@pytest.mark.parametrize("case", OWN_CASES)
def test_transformers_reads_our_folder(case: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    import transformers

    model = own_model(tokenizer, **OWN_CASES[case])
    save_model(tmp_path / "model", as_loaded(model, tokenizer))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(theirs).__name__ == case.split("-")[0]
    assert theirs.generation_config.eos_token_id == [tokenizer.eos_id]
    assert_same_logits(model, theirs, tokenizer)


@pytest.mark.parametrize("case", ["qwen3-tied", "llama3-tied"])
def test_config_of_transformers_4_is_read_alike(case: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = tmp_path / "source"
    theirs = write_hf(source, tokenizer, case, rows=tokenizer.size)
    rope = json.loads((source / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    scaling = rope if rope["rope_type"] == "llama3" else None
    edit_json(source / "config.json", rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
    convert(source, tmp_path / "target")
    loaded = load_model(tmp_path / "target").backbone
    assert_same_logits(loaded, theirs, tokenizer)
    edit_json(source / "config.json", rope_theta=theta * 100, rope_scaling=None)  # the keys are what is read
    convert(source, tmp_path / "other")
    ids = some_ids(tokenizer)
    assert (own_logits(load_model(tmp_path / "other").backbone, ids) - own_logits(loaded, ids)).abs().max() > 0.01


def test_head_dim_defaults_to_the_width_over_the_heads(tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = write_hf(tmp_path / "source", tokenizer, "qwen2-tied", rows=tokenizer.size)
    edit_json(tmp_path / "source" / "config.json", head_dim=None)
    convert(tmp_path / "source", tmp_path / "target")
    assert_same_logits(load_model(tmp_path / "target").backbone, theirs, tokenizer)


def test_sharded_checkpoint(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = tmp_path / "source"
    theirs = write_hf(source, tokenizer, "qwen3-untied", rows=tokenizer.size, max_shard_size="40KB")
    assert len(list(source.glob("model-*.safetensors"))) > 1
    convert(source, tmp_path / "target")
    assert_same_logits(load_model(tmp_path / "target").backbone, theirs, tokenizer)
    next(source.glob("model-00002*")).unlink()
    with pytest.raises(FredaError, match=r"half-written: model-00002.* is missing"):
        convert(source, tmp_path / "other")


@pytest.mark.parametrize("case", OWN_CASES)
def test_everything_saved_comes_back(case: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    original = own_model(tokenizer, **OWN_CASES[case])
    save_model(tmp_path / "model", as_loaded(original, tokenizer))
    loaded = load_model(tmp_path / "model")
    assert (loaded.method, loaded.stage) == (METHOD, "I")
    assert loaded.tokenizer.fingerprint == tokenizer.fingerprint
    assert loaded.backbone.config == original.config
    assert torch.equal(loaded.backbone.inv_freq, original.inv_freq)
    for name, tensor in original.state_dict().items():
        assert torch.equal(loaded.backbone.state_dict()[name], tensor)
    assert all(weight.requires_grad for weight in loaded.backbone.parameters())


def test_dtype_of_loading_and_saving(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_model(tmp_path / "half", as_loaded(own_model(tokenizer), tokenizer), dtype=torch.bfloat16)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}
    model = load_model(tmp_path / "half", dtype=torch.bfloat16).backbone
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert model.inv_freq.dtype == torch.float32  # angles in bfloat16 would be off by whole turns


def test_run_folder_means_its_newest_checkpoint(model_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(model_folder, run / "checkpoints" / "step-100")
    with pytest.raises(FredaError, match="no finished checkpoint"):
        resolve_model_folder(run)
    (run / "latest").write_text("step-100\n")
    assert resolve_model_folder(run) == run / "checkpoints" / "step-100"
    assert load_model(run).stage == "I"
    (run / "latest").write_text("step-200\n")
    with pytest.raises(FredaError, match=r"latest names the checkpoint 'step-200', but there is no folder"):
        resolve_model_folder(run)


def test_weights_module_does_not_import_transformers(tmp_path: Path) -> None:
    loaded = loaded_by(["freda.folders.model_folder", "freda.folders.gguf"], tmp_path)
    assert "torch" in loaded and not {"transformers", "gguf"} & loaded


# -- BLANK and the table ---------------------------------------------------------------------------------------------


def test_a_free_row_becomes_blank_without_resizing(source: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    before = load_file(source / "model.safetensors")
    summary = convert(source, tmp_path / "target")
    after = load_file(tmp_path / "target" / "model.safetensors")
    assert (summary["resized"], summary["blank_row"]) == (False, "kept")
    assert (summary["vocab_rows"], summary["blank_id"]) == (tokenizer.size + 3, tokenizer.blank_id)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("scale", [0.0, 0.05])
def test_a_row_near_zero_starts_as_the_mean(scale: float, source: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    table = load_file(source / "model.safetensors")[EMBEDDING]
    table[tokenizer.blank_id] *= scale
    edit_tensors(source / "model.safetensors", **{EMBEDDING: table})
    summary = convert(source, tmp_path / "target")
    after = load_file(tmp_path / "target" / "model.safetensors")[EMBEDDING]
    assert (summary["resized"], summary["blank_row"]) == (False, "mean of the embeddings")
    assert torch.allclose(after[tokenizer.blank_id], table[: tokenizer.blank_id].mean(0))
    assert torch.equal(after[tokenizer.blank_id + 1 :], table[tokenizer.blank_id + 1 :])
    assert torch.equal(load_file(source / "model.safetensors")[EMBEDDING], table)  # the source is not written to


@pytest.mark.parametrize("case", ["qwen3-tied", "qwen3-untied"])
def test_a_full_table_grows_to_a_round_number(case: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = write_hf(tmp_path / "source", tokenizer, case, rows=tokenizer.blank_id)
    summary = convert(tmp_path / "source", tmp_path / "target")
    assert (summary["resized"], summary["blank_row"]) == (True, "mean of the embeddings")
    assert summary["vocab_rows"] == 320
    loaded = load_model(tmp_path / "target").backbone
    table = theirs.get_input_embeddings().weight
    assert loaded.embed_tokens.weight.shape == loaded.head_weight.shape == (320, 32)
    assert torch.allclose(loaded.embed_tokens.weight[tokenizer.blank_id], table.mean(0), atol=1e-6)
    assert_same_logits(loaded, theirs, tokenizer)


def test_a_table_smaller_than_the_tokenizer_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_hf(tmp_path / "source", tokenizer, "qwen3-tied", rows=tokenizer.blank_id - 1)
    with pytest.raises(FredaError, match=r"does not belong to the weights: it has \d+ ids, the table \d+ rows"):
        convert(tmp_path / "source", tmp_path / "target")


def test_a_second_copy_of_a_tied_matrix_is_dropped(source: Path, tmp_path: Path) -> None:
    table = load_file(source / "model.safetensors")[EMBEDDING]
    edit_tensors(source / "model.safetensors", **{HEAD: table.clone()})
    convert(source, tmp_path / "target")
    assert HEAD not in load_file(tmp_path / "target" / "model.safetensors")


def test_dtype_is_kept_unless_asked_for(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_hf(tmp_path / "source", tokenizer, "qwen3-tied", rows=tokenizer.size, dtype=torch.bfloat16)
    assert convert(tmp_path / "source", tmp_path / "kept")["dtype"] == "bfloat16"
    assert convert(tmp_path / "source", tmp_path / "wide", dtype="float32")["dtype"] == "float32"
    kept, wide = (load_file(tmp_path / name / "model.safetensors")[EMBEDDING] for name in ("kept", "wide"))
    assert (kept.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert convert(tmp_path / "source", tmp_path / "int8", dtype="int8")["dtype"] == "int8"
    near = load_model(tmp_path / "int8").backbone.embed_tokens.weight
    assert 0 < (near - wide).abs().max() <= wide.abs().max() / 200
    with pytest.raises(FredaError, match="dtype is 'int4'; use one of float32, bfloat16, float16, int8"):
        convert(tmp_path / "source", tmp_path / "other", dtype="int4")


def test_stop_tokens_come_from_the_checkpoint(source: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    eos = tokenizer.eos_id
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [65, eos]}))
    convert(source, tmp_path / "both")
    assert load_model(tmp_path / "both").tokenizer.stop_ids == (eos, 65)
    edit_json(source / "config.json", eos_token_id=None)
    convert(source, tmp_path / "generation")
    assert load_model(tmp_path / "generation").tokenizer.stop_ids == (65, eos)
    (source / "generation_config.json").unlink()
    edit_json(source / "tokenizer_config.json", eos_token={"content": "!"})
    convert(source, tmp_path / "tokenizer")
    assert load_model(tmp_path / "tokenizer").tokenizer.stop_ids == tuple(tokenizer.encode("!"))


# -- what is wrong with a model folder -------------------------------------------------------------------------------


def refuse(folder: Path, message: str) -> None:
    with pytest.raises(FredaError, match=message):
        load_model(folder)


def test_paths_that_are_no_model(model_folder: Path, tmp_path: Path) -> None:
    refuse(tmp_path / "none", "there is no model .*none")
    refuse(model_folder / "config.json", r"is a file, not a model folder")
    (model_folder / "config.json").unlink()
    refuse(model_folder, r"not a model folder: it has no config\.json")


def test_a_plain_checkpoint_says_convert(source: Path) -> None:
    refuse(source, f"plain Hugging Face checkpoint; run: freda convert {source} TARGET")


def test_a_damaged_config(model_folder: Path) -> None:
    (model_folder / "config.json").write_text("{")
    refuse(model_folder, r"model: config\.json is not valid JSON")


def test_a_damaged_freda_section(model_folder: Path) -> None:
    section = json.loads((model_folder / "config.json").read_text())["freda"]
    edit_json(model_folder / "config.json", freda=section | {"method": "magic"})
    refuse(model_folder, r"config\.json names the method 'magic'; this version has autoregressive")
    edit_json(model_folder / "config.json", freda={key: section[key] for key in section if key != "feedback"})
    refuse(model_folder, r"freda section of config\.json has no feedback")
    edit_json(model_folder / "config.json", freda=section | {"block_size": "4"})
    refuse(model_folder, "method.block_size is '4'")


def test_missing_weights(model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    refuse(model_folder, r"half-written: model\.safetensors is missing")
    (model_folder / "pytorch_model.bin").write_bytes(b"")
    refuse(model_folder, r"pickle \(pytorch_model\.bin\), which is never read")


@pytest.mark.parametrize("kept", [0, 4, 500, -1])
def test_truncated_weights(kept: int, model_folder: Path) -> None:
    path = model_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refuse(model_folder, r"model\.safetensors is damaged or half-written")


def test_missing_misshaped_and_foreign_tensors(model_folder: Path) -> None:
    path, name = model_folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weight = load_file(path)[name]
    edit_tensors(path, **{name: None})
    refuse(model_folder, f"half-written: the tensor {name} is missing")
    edit_tensors(path, **{name: weight[1:].clone()})
    refuse(model_folder, rf"{name} has shape \(47, 32\), but config.json describes \(48, 32\)")
    edit_tensors(path, **{name: weight, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})
    refuse(model_folder, r"the tensor model\.layers\.0\.self_attn\.q_proj\.bias has no place")


def test_a_tokenizer_of_another_model(model_folder: Path, tokenizer: Tokenizer) -> None:
    section = json.loads((model_folder / "config.json").read_text())["freda"]
    train_tokenizer(["abc"], 260).save(model_folder)
    refuse(model_folder, rf"does not belong to the weights: its BLANK is 259, config\.json says {tokenizer.blank_id}")
    larger = train_tokenizer(["Tom has 12 apples and buys 7 more pears today.\n"], 300)
    larger.save(model_folder)
    edit_json(model_folder / "config.json", freda=section | {"blank_token_id": larger.blank_id})
    refuse(model_folder, rf"it has {larger.size} ids, the embedding table {tokenizer.size} rows")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"'GPT2LMHeadModel', which is not supported; supported: Qwen3ForCau"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "'Qwen3MoeForCausalLM', which is not supported"),
        ({"architectures": [], "model_type": "mamba"}, "'mamba', which is not supported"),
        ({"num_experts": 8}, "sets num_experts: mixture of experts is not supported"),
        ({"attention_bias": True}, "sets attention_bias: bias on the attention projections is not supported"),
        ({"mlp_bias": True}, "sets mlp_bias"),
        ({"use_sliding_window": True}, "sets use_sliding_window"),
        ({"quantization_config": {"bits": 4}}, "sets quantization_config: quantised weights"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; only silu"),
        ({"hidden_size": None}, "hidden_size = None"),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope type 'yarn', which is not supported; supported: default, ll",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "llama3 without its low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear'"),
    ],
)
def test_unsupported_architectures(changes: dict[str, Any], message: str, source: Path, tmp_path: Path) -> None:
    edit_json(source / "config.json", **changes)
    with pytest.raises(FredaError, match=message) as error:
        convert(source, tmp_path / "target")
    assert str(source) in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_sources_that_cannot_be_converted(source: Path, model_folder: Path, tmp_path: Path) -> None:
    def refuse_source(path: Path, message: str) -> None:
        with pytest.raises(FredaError, match=message):
            convert(path, tmp_path / "target")

    refuse_source(tmp_path / "none", "there is no model .*none")
    with pytest.raises(FredaError, match="block_size is 8"):
        convert(model_folder, tmp_path / "target", block_size=8)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    refuse_source(source, r"pickle.*write safetensors with transformers")
    (source / "tokenizer.json").unlink()
    refuse_source(source, r"source: tokenizer\.json is missing")
    (source / "config.json").unlink()
    refuse_source(source, r"it has no config\.json")


def test_a_tokenizer_of_the_same_size_with_other_ids_is_noticed(model_folder: Path) -> None:
    """Two digits swapped: everything fits, and every number would come out wrong."""
    file = model_folder / "tokenizer.json"
    values = json.loads(file.read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    file.write_text(json.dumps(values))
    refuse(model_folder, r"does not belong to the weights: it is \w{8}, they were trained with \w{8}")


# -- writing ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """No file may grow beyond 20,000 bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files_only")
def test_a_write_error_leaves_nothing_behind(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(FredaError, match=r"cannot write .*/new: .*File too large.*; nothing else was touched"):
        save_model(tmp_path / "new", as_loaded(own_model(tokenizer), tokenizer))
    assert list(tmp_path.iterdir()) == []


def test_a_write_error_keeps_the_older_folder(
    model_folder: Path, tokenizer: Tokenizer, request: pytest.FixtureRequest
) -> None:
    before = contents(model_folder)
    request.getfixturevalue("small_files_only")
    with pytest.raises(FredaError, match="cannot write"):
        save_model(model_folder, as_loaded(own_model(tokenizer), tokenizer, "II"), replace=True)
    assert contents(model_folder) == before
    assert [path.name for path in model_folder.parent.iterdir()] == ["model"]


def test_an_existing_folder_is_replaced_only_when_asked(model_folder: Path, tokenizer: Tokenizer) -> None:
    (model_folder / "leftover.bin").write_bytes(b"")
    with pytest.raises(FredaError, match="model exists already"):
        save_model(model_folder, as_loaded(own_model(tokenizer), tokenizer, "II"))
    assert load_model(model_folder).stage == "I"
    save_model(model_folder, as_loaded(own_model(tokenizer), tokenizer, "II"), replace=True)
    assert load_model(model_folder).stage == "II"
    assert not (model_folder / "leftover.bin").exists()
    assert [path.name for path in model_folder.parent.iterdir()] == ["model"]


def test_an_interrupted_body_leaves_nothing_and_a_stale_one_is_no_obstacle(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), written_beside(tmp_path / "a") as temporary:
        (temporary / "file").write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    beside(tmp_path / "a").mkdir()
    (beside(tmp_path / "a") / "stale").write_text("")
    with written_beside(tmp_path / "a") as temporary:
        assert not (tmp_path / "a").exists()
        (temporary / "file").write_text("whole")
    assert contents(tmp_path) == {"a/file": b"whole"}


def test_a_rename_that_fails_puts_the_older_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").write_text("old")
    rename = Path.rename

    def fail_for_new(self: Path, target: Path) -> Path:
        if self.name.endswith(PART):
            raise OSError("no rename today")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_new)
    with pytest.raises(FredaError, match="no rename today"), written_beside(tmp_path / "a", replace=True):
        pass
    assert contents(tmp_path) == {"a/old": b"old"}
