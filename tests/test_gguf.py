"""GGUF files: the logits of the checkpoint they were made from, tokenizers, quantised matrices, broken files."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from freda.data.tokenizer import EOS_TEXT, Tokenizer
from freda.errors import FredaError
from freda.folders.convert import convert
from freda.folders.gguf import SPLITS, _tie_copies
from freda.folders.hugging_face import EMBEDDING, HEAD
from freda.folders.model_folder import load_model
from tests.helpers import LLAMA3, assert_same_logits, write_hf

pytestmark = pytest.mark.usefixtures("quiet_transformers")


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
