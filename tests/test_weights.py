"""Model folders: the logits of `transformers` in both directions, and a clear word for everything that is wrong."""

import copy
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from freda.data.tokenizer import BLANK_TEXT, EOS_TEXT, Tokenizer, train_tokenizer
from freda.errors import FredaError
from freda.files import PART, beside, written_beside
from freda.folders.convert import convert
from freda.folders.gguf import SPLITS, _tie_copies
from freda.folders.hugging_face import EMBEDDING, HEAD
from freda.folders.model_folder import LoadedModel, load_model, save_model
from freda.folders.resolve import resolve_model_folder
from freda.model import masks
from freda.model.attention import make_mask
from freda.model.config import ModelConfig
from freda.model.parts import Parts
from freda.model.transformer import Transformer
from tests.helpers import method

TOLERANCE = 1e-4
LENGTH = 40
# An original context this short makes the scaling change the logits of a short text.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
METHOD = method("self-refine", block_size=3, feedback="hard", rescale=True, committed_hard=True)

TRANSFORMERS_CASES = {
    "qwen3-tied": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", {"num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": False}),
    "qwen2-tied": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-untied": ("Llama", {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": False}),
    "llama3-tied": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
}
OWN_CASES = {
    "Qwen3ForCausalLM": {"head_dim": 16, "rope_theta": 1e6},
    "Qwen2ForCausalLM": {"qk_norm": False, "qkv_bias": True, "tied": False},
    "LlamaForCausalLM": {"qk_norm": False, "head_dim": 16, "norm_eps": 1e-5},
    "LlamaForCausalLM-llama3": {"qk_norm": False, "tied": False, "rope_scaling": LLAMA3},
}


# -- helpers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["Tom has 12 apples and buys 7 more.\n"] * 3, 280)


@pytest.fixture(scope="module", autouse=True)
def quiet_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


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


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Weights of a size that makes any mistake visible; norms and biases too, which start at one and zero."""
    generator = torch.Generator().manual_seed(0)
    for _, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator) * 0.2
        weight.copy_(noise if weight.dim() > 1 else noise + 1)


def own_model(tokenizer: Tokenizer, **changes: Any) -> Transformer:
    values = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_dim": 48} | changes
    model = Transformer(ModelConfig(vocab_size=tokenizer.size, **values), tokenizer.blank_id)
    randomise(model)
    return model


def as_loaded(model: Transformer, tokenizer: Tokenizer, stage: str = "I") -> LoadedModel:
    return LoadedModel(Parts(model), tokenizer, METHOD, stage)


def write_hf(
    folder: Path, tokenizer: Tokenizer, case: str, *, rows: int, dtype: torch.dtype = torch.float32, **save: Any
) -> Any:
    """A checkpoint of `transformers` with a tokenizer that has no BLANK; returns the model."""
    import transformers

    family, changes = copy.deepcopy(TRANSFORMERS_CASES[case])  # transformers writes into the rope parameters
    values = {**SHAPE, **changes, "vocab_size": rows, "eos_token_id": tokenizer.eos_id, "bos_token_id": None}
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**values)).eval()
    randomise(model)
    model.to(dtype).save_pretrained(folder, **save)
    write_plain_tokenizer(folder, tokenizer)
    return model


def write_plain_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(folder)
    edit_json(folder / "tokenizer.json", added_tokens=[eos_entry(folder)])


def eos_entry(folder: Path) -> dict[str, Any]:
    added: list[dict[str, Any]] = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return next(token for token in added if token["content"] != BLANK_TEXT)


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def edit_tensors(path: Path, **changes: Tensor | None) -> None:
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, metadata={"format": "pt"})


def some_ids(tokenizer: Tokenizer) -> Tensor:
    return torch.randint(0, tokenizer.eos_id, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def own_logits(model: Transformer, ids: Tensor) -> Tensor:
    position = torch.arange(ids.shape[1]).expand_as(ids)
    tokens = masks.clean_tokens(torch.zeros_like(ids), position, block_size=1)
    hidden, _, _ = model(model.embed_tokens(ids), position, make_mask(tokens, tokens, "sdpa"))
    return model.logits(hidden)


@torch.no_grad()
def their_logits(model: Any, ids: Tensor, tokenizer: Tokenizer) -> Tensor:
    logits: Tensor = model(ids).logits[..., : tokenizer.blank_id]
    return logits


def assert_same_logits(own: Transformer, theirs: Any, tokenizer: Tokenizer) -> None:
    ids = some_ids(tokenizer)
    expected = their_logits(theirs, ids, tokenizer)
    assert expected.std() > 0.5  # otherwise the tolerance would say nothing
    assert (own_logits(own, ids) - expected).abs().max() < TOLERANCE


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


def test_weights_module_does_not_import_transformers() -> None:
    code = "import sys, freda.folders.model_folder, freda.folders.gguf as ours; "
    code += "print({'transformers', 'gguf'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


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


# -- writing ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """No file may grow beyond 20,000 bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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


# -- GGUF ------------------------------------------------------------------------------------------------------------

GGUF_NAMES = {  # Hugging Face module: GGUF module, written down apart from the reader's own table
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The name llama.cpp gives a tensor of transformers."""
    whole = {EMBEDDING: "token_embd.weight", "model.norm.weight": "output_norm.weight", HEAD: "output.weight"}
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{GGUF_NAMES[module]}.{kind}"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `LlamaModel.permute`, as its convert_hf_to_gguf.py has it."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, theirs: Any, tokenizer: Tokenizer, *, eos: str = EOS_TEXT, **extra: np.ndarray) -> None:
    """A GGUF file in float32 as llama.cpp writes it; `extra` are more tensors, quantised where they are bytes."""
    gguf = pytest.importorskip("gguf")
    config, kind = theirs.config, theirs.config.model_type
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    add_gguf_tokenizer(writer, tokenizer, config.vocab_size, "llama-bpe" if kind == "llama" else "qwen2", eos)
    for name, tensor in theirs.state_dict().items():
        if (name == HEAD and config.tie_word_embeddings) or gguf_name(name) in extra:
            continue
        array = tensor.numpy()
        if kind == "llama" and name.endswith("q_proj.weight"):
            array = permute(array, config.num_attention_heads)
        if kind == "llama" and name.endswith("k_proj.weight"):
            array = permute(array, config.num_key_value_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    for name, array in extra.items():
        quantised = array.dtype == np.uint8
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType.Q8_0 if quantised else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_gguf_tokenizer(writer: Any, tokenizer: Tokenizer, rows: int, split: str, eos: str) -> None:
    """Vocabulary and merges; rows without a token are called [PADn] and marked unused, as llama.cpp does."""
    model = json.loads(tokenizer.json_text)["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    control = list(dict.fromkeys([EOS_TEXT, eos]))
    used = [*tokens, *control]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list([*used, *(f"[PAD{index}]" for index in range(len(used), rows))])
    writer.add_token_types([1] * len(tokens) + [3] * len(control) + [5] * (rows - len(used)))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(used.index(eos))
    writer.add_bos_token_id(len(tokens))
    writer.add_chat_template("{{ messages }}")


@pytest.mark.parametrize("case", ["qwen3-tied", "qwen2-tied", "llama-untied"])
def test_gguf_has_the_logits_of_its_source(case: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = write_hf(tmp_path / "source", tokenizer, case, rows=tokenizer.size + 3)
    write_gguf(tmp_path / "model.gguf", theirs, tokenizer)
    summary = convert(tmp_path / "model.gguf", tmp_path / "target")
    loaded = load_model(tmp_path / "target")
    assert_same_logits(loaded.backbone, theirs, tokenizer)
    assert (summary["architecture"], summary["dtype"]) == (type(theirs).__name__, "float32")
    assert (summary["resized"], summary["blank_id"]) == (False, tokenizer.blank_id)
    assert (summary["notes"], loaded.backbone.config.tied) == ("none", case.endswith("-tied"))
    assert loaded.tokenizer.stop_ids == tokenizer.stop_ids
    assert loaded.tokenizer.settings["chat_template"] == "{{ messages }}"
    text = "Tom has apples<|endoftext|>"
    assert loaded.tokenizer.encode(text) == tokenizer.encode(text)


def test_gguf_stops_at_the_end_of_a_turn_and_of_a_document(tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = write_hf(tmp_path / "source", tokenizer, "qwen2-tied", rows=tokenizer.size + 3)
    write_gguf(tmp_path / "m.gguf", theirs, tokenizer, eos="<|im_end|>")
    convert(tmp_path / "m.gguf", tmp_path / "target")
    turn, document = tokenizer.eos_id + 1, tokenizer.eos_id
    assert load_model(tmp_path / "target").tokenizer.stop_ids == (turn, document)


def test_gguf_with_two_copies_of_one_matrix_is_tied_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    quants = pytest.importorskip("gguf.quants")
    theirs = write_hf(tmp_path / "source", tokenizer, "qwen2-tied", rows=tokenizer.size)
    table = theirs.get_input_embeddings().weight.detach().numpy()
    Q8 = quants.GGMLQuantizationType.Q8_0
    coarse = np.round(table * 8) / 8
    fine = quants.quantize(table, Q8)
    write_gguf(tmp_path / "m.gguf", theirs, tokenizer, **{"token_embd.weight": coarse, "output.weight": fine})
    summary = convert(tmp_path / "m.gguf", tmp_path / "target")
    model = load_model(tmp_path / "target").backbone
    assert model.config.tied
    pair = torch.from_numpy(coarse).flatten(), torch.from_numpy(quants.dequantize(fine, Q8)).flatten()
    cosine = torch.nn.functional.cosine_similarity(*pair, dim=0).item()
    for dtype in ("float32", "bfloat16"):  # compared before the weights are rounded
        notes = convert(tmp_path / "m.gguf", tmp_path / dtype, dtype=dtype)["notes"]
        assert f"Q8_0 dequantised to {dtype}" in notes and f"cosine {cosine:.4f}" in notes
    assert "float32" in summary["notes"]
    expected = quants.dequantize(fine, Q8)
    assert np.array_equal(model.embed_tokens.weight.detach().numpy(), expected)
    assert np.abs(expected - table).max() < 0.01


def test_copies_of_a_large_matrix_are_compared_exactly() -> None:
    """Sums of millions of float32 products are off by more than the digits of the note."""
    kind = pytest.importorskip("gguf").GGMLQuantizationType.F32
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(4096, 896, generator=generator)
    embedding = head + 0.04 * torch.randn(4096, 896, generator=generator)
    cosine = torch.nn.functional.cosine_similarity(head.double().flatten(), embedding.double().flatten(), dim=0)
    matrices = {"token_embd.weight": embedding, "output.weight": head}
    stored = {name: SimpleNamespace(data=matrix.numpy(), tensor_type=kind) for name, matrix in matrices.items()}
    kept = stored["output.weight"]
    (note,) = _tie_copies(stored)
    assert stored == {"token_embd.weight": kept} and f"cosine {cosine.item():.4f}" in note


def test_quantised_gguf_becomes_bfloat16(tokenizer: Tokenizer, tmp_path: Path) -> None:
    quants = pytest.importorskip("gguf.quants")
    theirs = write_hf(tmp_path / "source", tokenizer, "qwen3-tied", rows=tokenizer.size)
    table = theirs.get_input_embeddings().weight.detach().numpy()
    packed = quants.quantize(table, quants.GGMLQuantizationType.Q8_0)
    write_gguf(tmp_path / "m.gguf", theirs, tokenizer, **{"token_embd.weight": packed})
    half = convert(tmp_path / "m.gguf", tmp_path / "half")
    assert half["dtype"] == "bfloat16" and half["notes"] == "Q8_0 dequantised to bfloat16"
    assert convert(tmp_path / "m.gguf", tmp_path / "wide", dtype="float32")["dtype"] == "float32"


def llama3_factors(theta: float, head_dim: int, factor: float = 8.0, high: float = 4.0) -> np.ndarray:
    """`rope_freqs.weight` as llama.cpp writes it for Llama 3.1 (low 1, high 4, original context 8192)."""
    factors = []
    for frequency in theta ** -(np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * np.pi / frequency
        smooth = (8192 / wavelength - 1) / (high - 1)
        factors.append(1 / ((1 - smooth) / factor + smooth) if 0 < smooth < 1 else 1.0 if smooth >= 1 else factor)
    return np.array(factors, dtype=np.float32)


def test_gguf_scaling_of_llama_3_is_recovered(tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = write_hf(tmp_path / "source", tokenizer, "llama-untied", rows=tokenizer.size)
    factors = llama3_factors(10_000.0, 16)
    assert len(set(factors)) > 2  # kept, blended and slowed frequencies
    write_gguf(tmp_path / "good.gguf", theirs, tokenizer, **{"rope_freqs.weight": factors})
    convert(tmp_path / "good.gguf", tmp_path / "target")
    scaling = load_model(tmp_path / "target").backbone.config.rope_scaling
    assert scaling == LLAMA3 | {"original_max_position_embeddings": 8192}
    write_gguf(
        tmp_path / "bad.gguf", theirs, tokenizer, **{"rope_freqs.weight": llama3_factors(10_000.0, 16, high=9.0)}
    )
    with pytest.raises(FredaError, match=r"rope_freqs\.weight is not the scaling of Llama 3"):
        convert(tmp_path / "bad.gguf", tmp_path / "other")


def test_gguf_files_that_cannot_be_read(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_file(path: Path, message: str) -> None:
        with pytest.raises(FredaError, match=message):
            convert(path, tmp_path / "target")

    path = tmp_path / "m.gguf"
    theirs = write_hf(tmp_path / "source", tokenizer, "qwen3-tied", rows=tokenizer.size)
    write_gguf(path, theirs, tokenizer, **{"blk.0.attn_q.bias": np.zeros(64, dtype=np.float32)})
    refuse_file(path, r"m\.gguf: the tensor model\.layers\.0\.self_attn\.q_proj\.bias has no place")
    for kept in (-1000, 2000, 3):
        path.write_bytes(path.read_bytes()[:kept])
        refuse_file(path, r"m\.gguf: not a whole GGUF file")
    monkeypatch.setitem(sys.modules, "gguf", None)
    refuse_file(path, r"needs the package 'gguf'.*pip install 'freda\[gguf\]'")


def test_a_tokenizer_of_the_same_size_with_other_ids_is_noticed(model_folder: Path) -> None:
    """Two digits swapped: everything fits, and every number would come out wrong."""
    file = model_folder / "tokenizer.json"
    values = json.loads(file.read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    file.write_text(json.dumps(values))
    refuse(model_folder, r"does not belong to the weights: it is \w{8}, they were trained with \w{8}")


@given(st.text(st.sampled_from("ab éß12٣ \n\t'.,s")))
def test_smollm_splits_digits_then_words(text: str) -> None:
    """llama.cpp's `smollm` as one expression against its definition: digits apart, then GPT-2's words."""
    splits = tokenizers.pre_tokenizers
    words = splits.ByteLevel(add_prefix_space=False, use_regex=True)
    defined = splits.Sequence([splits.Digits(individual_digits=True), words])
    ours = splits.Sequence(
        [
            splits.Split(tokenizers.Regex(SPLITS["smollm"]), behavior="isolated"),
            splits.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert ours.pre_tokenize_str(text) == defined.pre_tokenize_str(text)
