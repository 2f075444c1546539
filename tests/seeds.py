"""Valid inputs of every kind, from which the fuzzer makes invalid ones, and the commands that read them."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.torch import load_file, save_file

from freda.data.config import CorpusConfig
from freda.data.prepare import prepare_corpus
from freda.data.tokenizer import EOS_TEXT
from freda.folders.gguf import MODULES
from freda.folders.tensors import packed
from freda.train.config import load as load_run
from freda.train.loop import train
from freda.train.parallel import Ranks
from tests.helpers import answering_model, save_model

TEXTS = ["Tom has 12 apples and buys 7 more. How many?\n"] * 3
RUN = """
[model]
dim = 32
layers = 1
heads = 2
kv_heads = 1
head_dim = 16
ffn_dim = 48
[data]
path = "in/data"
seq_len = 96
[train]
steps = 1
batch_rows = 2
group_rows = 2
warmup_steps = 1
validation_rows = 2
"""
PREPARE = """
[prepare]
align = 4
vocab_size = 280
parts = 2
validation_share = 0.2
[source.lines]
kind = "jsonl"
path = "docs"
[source.books]
kind = "text"
path = "books.tar"
[benchmark.asked]
path = "asked.jsonl"
field = "question"
"""


class Seed(NamedTuple):
    """A command, IN and OUT standing for its folders, the folder of its inputs, and which of them are mutated."""

    command: tuple[str, ...]
    folder: str
    files: str = "*"
    writes: bool = False  # into its input, as resuming does


GENERATE = ("generate", "IN", "Tom has", "--max-new-tokens", "2", "--device", "cpu")
EVAL_LIMITS = ("--unpublished", "--limit", "2", "--max-new-tokens", "2")
SEEDS: dict[str, Seed] = {
    "generate": Seed(GENERATE, "model"),
    "generate sharded": Seed(GENERATE, "sharded"),
    "generate config": Seed(GENERATE, "model", "config.json"),
    "generate int8": Seed(GENERATE, "int8"),
    "inspect model": Seed(("inspect", "IN"), "model"),
    "convert": Seed(("convert", "IN", "OUT", "--dtype", "float32"), "plain"),
    "convert gguf": Seed(("convert", "IN/model.gguf", "OUT"), "gguf"),
    "inspect shards": Seed(("inspect", "IN", "--rows", "1", "--seq-len", "96"), "data"),
    "train": Seed(("train", "IN/run.toml", "--out", "OUT"), "train"),
    "train config": Seed(("train", "IN/run.toml", "--out", "OUT"), "train", "run.toml"),
    "dry run": Seed(("train", "IN/run.toml", "--dry-run"), "train", "run.toml"),
    "resume": Seed(("train", "--resume", "IN/run", "--set", "train.steps=2"), "resume", writes=True),
    "prepare": Seed(("prepare", "IN/prepare.toml", "OUT", "--data", "IN", "--workers", "1"), "sources"),
    "prepare config": Seed(("prepare", "IN/prepare.toml", "OUT", "--data", "IN", "--plan"), "sources", "*.toml"),
    "compare": Seed(("eval", "--compare", "IN/a", "IN/b"), "evals"),
    "eval": Seed(
        ("eval", "IN/model", "--task", "gsm8k", "--data", "IN/data", "--out", "OUT", *EVAL_LIMITS),
        "benchmarks",
        "*.json*",
    ),
    "draw": Seed(("sweep", "--draw", "IN", "--out", "OUT"), "sweep"),
}


def make_seeds(folder: Path) -> None:
    """Write all of them."""
    loaded = answering_model(TEXTS, seed=1)
    model = folder / "model"
    save_model(model, loaded)
    tensors = load_file(model / "model.safetensors")
    for name in ("sharded", "int8", "plain"):
        shutil.copytree(model, folder / name)
    (folder / "sharded" / "model.safetensors").unlink()
    names, index = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / "sharded" / f"part-{number}.safetensors")
        index |= dict.fromkeys(part, f"part-{number}.safetensors")
    (folder / "sharded" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file(packed(tensors), folder / "int8" / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (folder / "plain" / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "freda"}))
    (folder / "gguf").mkdir()
    write_gguf(folder / "gguf" / "model.gguf", config, tensors, loaded.tokenizer.json_text)
    _training(folder)
    _documents(folder / "sources")
    _results(folder, model)


def write_gguf(path: Path, config: dict[str, Any], tensors: dict[str, Any], tokenizer: str) -> None:
    """The model as a GGUF file."""
    import gguf

    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    bpe = json.loads(tokenizer)["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
    rows = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, EOS_TEXT, *(f"[PAD{index}]" for index in range(len(tokens) + 1, rows))])
    writer.add_token_types([1] * len(tokens) + [3] + [5] * (rows - len(tokens) - 1))
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in bpe["merges"]])
    writer.add_eos_token_id(len(tokens))
    writer.add_bos_token_id(len(tokens))
    theirs = {ours: gguf_name for gguf_name, ours in MODULES.items()}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        layer = module.removeprefix("model.layers.").partition(".") if module.startswith("model.layers.") else None
        known = f"blk.{layer[0]}.{theirs[layer[2]]}" if layer else theirs[module]
        writer.add_tensor(f"{known}.{kind}", np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _training(folder: Path) -> None:
    data = folder / "data"
    prepare_corpus(CorpusConfig(problems=60, validation_problems=8, vocab_size=300), data)
    for name in ("train", "resume"):
        shutil.copytree(data, folder / name / "data")
    (folder / "train" / "run.toml").write_text(RUN)
    config = folder / "resume.toml"
    config.write_text(RUN.replace("in/data", str(data)))
    train(load_run(config, ()), folder / "resume" / "run", name="run", ranks=Ranks())
    config.unlink()
    resolved = folder / "resume" / "run" / "config.toml"
    resolved.write_text(resolved.read_text().replace(str(data), "in/data"))


def _documents(folder: Path) -> None:
    (folder / "docs").mkdir(parents=True)
    lines = [json.dumps({"text": f"Document {n} has words, {n} of them, and ends here."}) for n in range(12)]
    (folder / "docs" / "a.jsonl").write_text("\n".join(lines[:6]) + "\n")
    (folder / "docs" / "b.jsonl.gz").write_bytes(gzip.compress(("\n".join(lines[6:]) + "\n").encode()))
    (folder / "asked.jsonl").write_text(
        json.dumps({"question": "What is it that ends here, one two three four?"}) + "\n"
    )
    with tarfile.open(folder / "books.tar", "w") as archive:
        for name in ("one.txt", "two.txt"):
            member = tarfile.TarInfo(name)
            member.size = 60
            archive.addfile(member, io.BytesIO(b"A book of some words that go on for a while, and then end.\n\n"))
    (folder / "prepare.toml").write_text(PREPARE)


def _results(folder: Path, model: Path) -> None:
    head = {"task": "gsm8k", "checksum": "x", "n": 2, "settings": {"passes": 4}, "model": {"a": 1}}
    answers = [
        {"id": f"q/{n}", "correct": bool(n), "nfe": 3, "tokens": 2, "text": "x", "seconds": 0.1} for n in range(2)
    ]
    for name in ("a", "b"):
        place = folder / "evals" / name
        place.mkdir(parents=True)
        (place / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (head, *answers)))
    benchmarks = folder / "benchmarks"
    shutil.copytree(model, benchmarks / "model")
    (benchmarks / "data" / "gsm8k").mkdir(parents=True)
    (benchmarks / "data" / "fewshot").mkdir()
    row = {"question": "Tom has 1 apple. How many?", "answer": "He has one.\n#### 1"}
    (benchmarks / "data" / "gsm8k" / "test.jsonl").write_text((json.dumps(row) + "\n") * 1319)
    samples = [{"question": "How many?", "target": "The answer is 1."}] * 8
    (benchmarks / "data" / "fewshot" / "gsm8k_cot_8shot.json").write_text(json.dumps({"samples": samples}))
    (folder / "sweep").mkdir()
    shutil.copy(Path(__file__).parents[1] / "results" / "demo-sweep.json", folder / "sweep" / "sweep.json")
