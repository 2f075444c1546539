"""Malformed inputs end in one line: named cases that once did not, and some of the fuzzer's."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import fuzz
from tests.seeds import SEEDS, make_seeds

SECONDS = 4.0  # of the fuzzer; `make fuzz` runs it for longer


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeds")
    make_seeds(folder)
    return folder


def end_of(seed: str, seeds: Path, work: Path, change: Callable[[Path], object], *more: str) -> tuple[int, str]:
    """Exit code and standard error of a seed's command after `change` of its folder."""
    shutil.copytree(seeds / SEEDS[seed].folder, work / "in", symlinks=True)
    change(work / "in")
    parts = (*SEEDS[seed].command, *more)
    arguments = [part.replace("IN", str(work / "in")).replace("OUT", str(work / "out")) for part in parts]
    code, said, seconds = fuzz.in_process(arguments, work)
    assert not fuzz.judge(code, said, seconds)
    return code, said


def set_json(name: str, **values: Any) -> Callable[[Path], object]:
    """Change values of a JSON file; `a__b` is a value inside a value."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        for key, value in values.items():
            *outer, last = key.split("__")
            node = content
            for part in outer:
                node = node[part]
            node[last] = value
        (folder / name).write_text(json.dumps(content))

    return change


def put(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: ((folder / name).unlink(), make(folder / name))


def gguf_with(place: int, form: str, value: int) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        data = bytearray((folder / "model.gguf").read_bytes())
        struct.pack_into(form, data, place, value)
        (folder / "model.gguf").write_bytes(data)

    return change


@pytest.mark.parametrize("seed", SEEDS)
def test_the_seeds_are_valid(seed: str, seeds: Path, tmp_path: Path) -> None:
    if seed != "draw":  # the tests of sweeps draw
        assert end_of(seed, seeds, tmp_path, lambda folder: None)[0] == 0


DEEP = b'{"a": ' * 100_000
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("seed", "change", "said"),
    [
        ("generate", put("config.json", DEEP), "config.json is not valid JSON: it is nested too deeply"),
        ("generate", put("config.json", b'{"a": ' + b"9" * 5000 + b"}"), "config.json is not valid JSON: Exceeds"),
        ("generate", put("tokenizer.json", DEEP), "tokenizer.json is not a valid tokenizer"),
        ("generate", put("tokenizer_config.json", DEEP), "nested too deeply"),
        ("generate", instead("config.json", os.mkfifo), "config.json"),
        ("generate", instead("tokenizer.json", lambda p: p.symlink_to("/dev/zero")), "no plain file"),
        ("generate", set_json("config.json", architectures=5), "architectures 5; it must be a list"),
        ("generate", set_json("config.json", rms_norm_eps=None), "rms_norm_eps = None"),
        ("generate", set_json("config.json", rms_norm_eps="x"), "rms_norm_eps = 'x'"),
        ("generate", set_json("config.json", rope_parameters=[1]), "rope_parameters [1]; it must be an object"),
        ("generate", set_json("config.json", rope_parameters__rope_theta=[1]), "rope_theta = [1]"),
        ("generate", set_json("config.json", num_hidden_layers=10**5), "use 4096 or less"),
        ("generate", set_json("config.json", num_hidden_layers=4000), "has 4000 layers, but the tensor"),
        ("generate", set_json("config.json", vocab_size=10**12), "model.vocab_size"),
        ("generate", set_json("config.json", freda__block_size=10**9), "method.block_size is 1000000000"),
        ("generate", set_json("tokenizer_config.json", stop_tokens=[[1]]), "stop_tokens"),
        ("generate", set_json("tokenizer_config.json", eos_token="\ud800"), "surrogates not allowed"),
        ("generate", set_json("config.json", freda__method=["x"]), "names the method ['x']"),
        ("generate sharded", set_json(INDEX, weight_map=None), "no weight_map"),
        ("generate sharded", set_json(INDEX, weight_map={"a": 5}), "no weight_map"),
        ("generate sharded", set_json(INDEX, weight_map={"a": "../x"}), "no file of this folder"),
        ("generate sharded", set_json(INDEX, weight_map={"a": "/etc/x"}), "no file of this folder"),
        ("convert gguf", gguf_with(8, "<Q", 2**60), "claims"),
        ("convert gguf", gguf_with(16, "<Q", 2**60), "claims"),
        ("convert gguf", gguf_with(24, "<Q", 2**60), "claims"),
        ("convert gguf", put("model.gguf", b"GGUF"), "cut short"),
        ("inspect shards", set_json("manifest.json", align="8"), "align is '8'"),
        ("inspect shards", set_json("manifest.json", eos_id=None), "eos_id is None"),
        ("inspect shards", put("manifest.json", DEEP), "nested too deeply"),
        ("train config", put("run.toml", b"a = " + b"[" * 100_000), "is not valid TOML: it is nested too deeply"),
        ("train config", put("run.toml", b"a = " + b"9" * 5000), "is not valid TOML"),
        ("train config", put("run.toml", b"[train]\nlr = inf"), "train.lr is inf"),
        ("train config", put("run.toml", b"[data]\nseq_len = 1000000000000"), "data.seq_len"),
        ("train config", put("run.toml", b"[model]\ndim = 100000000"), "model.dim"),
        ("train config", instead("run.toml", lambda p: p.symlink_to("/dev/zero")), "no plain file"),
        ("prepare config", put("prepare.toml", b"[prepare]\nparts = 100000000"), "prepare.parts"),
        ("prepare config", put("prepare.toml", b"[prepare]\nalign = 1000000000"), "prepare.align"),
        ("prepare config", put("prepare.toml", b"[prepare]\nvocab_size = 1000000000000"), "prepare.vocab_size"),
        ("compare", put("a/samples.jsonl", DEEP), "does not begin with what was asked"),
        ("draw", put("sweep.json", b"[1]"), "sweep.json is not a JSON object"),
        ("draw", set_json("sweep.json", stability=[{"rows": [{"pass": 1, "right": "x"}]}]), "not the file of a sweep"),
    ],
)  # fmt: skip
def test_malformed_inputs_are_one_line(
    seed: str, change: Callable[[Path], object], said: str, seeds: Path, tmp_path: Path
) -> None:
    code, errors = end_of(seed, seeds, tmp_path, change)
    assert code == 2 and said in errors, errors


def test_a_bomb_is_not_unpacked(seeds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lzma

    from freda import files
    from freda.errors import FredaError

    monkeypatch.setattr(files, "MOST_BYTES", 2**20)
    bomb = tmp_path / "tokenizer.json.xz"
    bomb.write_bytes(lzma.compress(bytes(2**24), preset=0))
    with pytest.raises(FredaError, match=r"tokenizer.json.xz cannot be read: it has more than 1 MB"):
        files.read_text(bomb)
    bomb.write_bytes(lzma.compress(b"x" * 2**20, preset=0))
    assert len(files.read_text(bomb)) == 2**20


def test_a_prompt_beyond_the_positions_is_refused_by_every_command(seeds: Path, tmp_path: Path) -> None:
    shutil.copytree(seeds / "model", tmp_path / "in")
    set_json("config.json", max_position_embeddings=64)(tmp_path / "in")
    for more in ([], ["--reference"], ["--json"]):
        code, said, _ = fuzz.in_process(["generate", str(tmp_path / "in"), "Tom has " * 200, *more], tmp_path)
        assert code == 2 and "the limit is 64" in said, said


def test_the_fuzzer_finds_nothing(seeds: Path) -> None:
    """Cases of a fixed seed, as many as there is time for."""
    found = [one for _, one in fuzz.findings(range(10**6), 0, seeds, time.monotonic() + SECONDS) if one is not None]
    assert not found, "\n".join(f"{one.case}\n{one.problem}" for one in found)


def test_the_fuzzer_would_find_it(seeds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback, an end without a line, a changed input: what it looks for, it sees."""
    monkeypatch.setattr(fuzz, "run", lambda arguments: [][0])
    assert "IndexError" in str(fuzz.case(1, 0, seeds))
    monkeypatch.setattr(fuzz, "run", lambda arguments: 2)
    assert "0 lines of error" in str(fuzz.case(1, 0, seeds))
    monkeypatch.setattr(fuzz, "run", lambda arguments: bytearray(2**34) and 0)
    assert "MemoryError" in str(fuzz.case(1, 0, seeds))
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    monkeypatch.setattr(fuzz, "run", lambda arguments: time.sleep(9))
    assert "no end after 1 s" in str(fuzz.case(1, 0, seeds))
    monkeypatch.setattr(fuzz, "run", lambda arguments: Path("in/new").write_text("x") and 0)
    number = next(n for n in range(99) if not _writes(n))
    assert "an input was changed" in str(fuzz.case(number, 0, seeds))


def _writes(number: int) -> bool:
    import random

    return SEEDS[random.Random(f"0 {number}").choice(list(SEEDS))].writes
