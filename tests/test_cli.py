"""The command line end to end: prepare, train, resume, generate, inspect, convert; its manners and its errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from freda.cli import run
from freda.data.config import load_prepare
from freda.data.tokenizer import BLANK_TEXT, train_tokenizer
from freda.model.config import ModelConfig
from freda.train import config as configs
from freda.train.config import DataConfig, RunConfig, TrainConfig


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards (`data`), a config and a run, made by the commands themselves."""
    root = tmp_path_factory.mktemp("cli")
    config = RunConfig(
        model=ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn_dim=48),
        data=DataConfig(path=str(root / "data"), seq_len=96),
        train=TrainConfig(steps=4, batch_rows=2, group_rows=2, lr=1e-3, warmup_steps=1, validation_rows=2),
    )
    (root / "run.toml").write_text(configs.dump(config))
    (root / "corpus.toml").write_text("[corpus]\nproblems = 100\nvalidation_problems = 8\nvocab_size = 300\n")
    assert run(["prepare", str(root / "corpus.toml"), str(root / "data")]) == 0
    assert run(["train", str(root / "run.toml"), "--out", str(root / "run"), "--set", "train.save_every=2"]) == 0
    return root


def fails(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Run a command that must fail; returns its one line."""
    capsys.readouterr()
    assert run([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("freda: error: ") and captured.err.count("\n") == 1
    return captured.err


def test_the_run_folder_holds_what_is_needed_to_go_on(trained: Path) -> None:
    folder = trained / "run"
    assert (folder / "latest").read_text() == "step-4\n"
    assert configs.load(folder / "config.toml").train.save_every == 2, "the resolved config, overrides included"
    assert {"model.safetensors", "config.json", "tokenizer.json", "optimizer", "state.json", "checksums.json"} <= {
        path.name for path in (folder / "checkpoints" / "step-4").iterdir()
    }


def test_generate_json(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "Q: Mia has 12 shells."
    arguments = ["generate", str(trained / "run"), prompt, "--json", "--max-new-tokens", "10", "--passes", "2"]
    assert run(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {"text", "tokens", "nfe", "tpf", "seconds", "method", "settings"} <= answer.keys()
    assert len(answer["tokens"]) <= 10 and answer["method"] == "self-refine" and answer["settings"]["passes"] == 2
    assert answer["tpf"] == pytest.approx(len(answer["tokens"]) / answer["nfe"], abs=1e-3)


def test_generate_shows_drafts_as_plain_lines(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(trained / "run"), "Q:", "--show-drafts", "--max-new-tokens", "6", "--passes", "2"]) == 0
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("block ")]
    assert lines[0].startswith("block 0   pass 1") and lines[1].startswith("block 0   pass 2")
    assert "\x1b" not in captured.err, "no escape codes where there is no terminal"
    assert "tokens per forward" in captured.err


def test_every_method_decodes_any_model(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("autoregressive", "block-diffusion"):
        assert run(["generate", str(trained / "run"), "Q:", "--method", name, "--max-new-tokens", "4"]) == 0
        assert f"was trained as self-refine, decoding as {name}" in capsys.readouterr().err


def test_inspect(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, words in [
        ("data", ("train: 100 documents", "validation: 8 documents", "first document: Q|:|")),
        ("run", ("step 4, loss", "validation at step 4: loss", "method self-refine, blocks of 4")),
        ("run/checkpoints/step-4", ("Qwen3ForCausalLM", "1 layers of width 32, 2/1 heads of 16, tied head")),
    ]:
        assert run(["inspect", str(trained / path)]) == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words), out


def test_bad_input_of_generate(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained / "run"
    assert f"contains {BLANK_TEXT} at character 3" in fails(capsys, "generate", folder, f"ab {BLANK_TEXT}")
    assert "there is no model" in fails(capsys, "generate", tmp_path / "none", "x")
    assert "no config.json" in fails(capsys, "generate", tmp_path, "x")
    assert "there is no method 'dream'" in fails(capsys, "generate", folder, "x", "--method", "dream")
    assert "passes is 0" in fails(capsys, "generate", folder, "x", "--passes", "0")
    assert "seed is 999" in fails(capsys, "generate", folder, "x", "--seed", "99999999999999999999")
    assert "max_new_tokens is 100000000" in fails(capsys, "generate", folder, "x", "--max-new-tokens", "100000000")
    assert "there is no dtype 'int8'" in fails(capsys, "generate", folder, "x", "--dtype", "int8")
    assert "there is no device 'tpu'" in fails(capsys, "generate", folder, "x", "--device", "tpu")
    for extra in ((), ("--reference",)):  # the model has 4,096 positions
        assert "the limit is 4096" in fails(capsys, "generate", folder, "one two " * 4000, *extra)


def test_bad_input_of_train(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = trained / "run.toml", tmp_path / "new"
    assert "give a config and --out" in fails(capsys, "train", config)
    assert "omit --out" in fails(capsys, "train", "--resume", trained / "run", "--out", out)
    assert "is not empty" in fails(capsys, "train", config, "--out", trained / "run")
    assert "did you mean 'train.lr'" in fails(capsys, "train", config, "--out", out, "--set", "train.lrr=1")
    assert "seq_len 100 is not a multiple of the shards' align 8; use 96 or 104" in fails(
        capsys, "train", config, "--out", out, "--set", "data.seq_len=100"
    )


def test_a_place_that_cannot_be_written_is_one_line(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = fails(capsys, "prepare", trained / "corpus.toml", "/proc/nothing/data")
    assert "No such file or directory: /proc/nothing" in message


def test_usage_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such option" in fails(capsys, "generate", "--nope")
    assert "No such command" in fails(capsys, "frobnicate")


@pytest.mark.slow
def test_debug_shows_the_trace_and_help_is_fast() -> None:
    command = [sys.executable, "-m", "freda"]
    failed = subprocess.run(
        [*command, "prepare", "/nowhere", "out", "--debug"], capture_output=True, text=True, check=False
    )
    assert failed.returncode == 2 and "Traceback" in failed.stderr and "freda: error: " in failed.stderr
    loaded = "import sys, freda.cli; print(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    seen = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout
    assert seen.strip() == "[]", "the command line must not load heavy packages before a command needs them"
    begun = time.monotonic()
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    assert all(name in shown for name in ("demo", "prepare", "train", "generate", "convert", "inspect"))
    assert time.monotonic() - begun < 5, "far above the aim of 0.3 s: only a heavy import takes so long"


@pytest.mark.slow
def test_demo_the_quick_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freda.demo.LONGEST_ANSWER", 8)  # of the bundled model
    monkeypatch.setattr("freda.demo.LONGEST_SOLUTION", 8)
    out = tmp_path / "demo"
    for _ in range(2):  # a second demo replaces the first
        assert run(["demo", "--quick", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("autoregressive", "block-diffusion", "self-refine", "tokens per forward"))
    results = json.loads((out / "results.json").read_text())
    assert [(row["method"], row["passes"]) for row in results["rows"]] == [
        ("autoregressive", 1),
        *(("block-diffusion", n) for n in (1, 2, 3, 4)),
        *(("self-refine", n) for n in (1, 2, 3, 4)),
        *(("best-of-n", n) for n in (2, 3, 4)),
    ]
    for folder in (tmp_path / "mine", out):  # a folder of the user's, and one that the user has put something into
        folder.mkdir(exist_ok=True)
        (folder / "results.json").write_text("{}")
        (folder / "thesis.tex").write_text("important")
        assert "which no demo made" in fails(capsys, "demo", "--quick", "--out", folder)
        assert (folder / "thesis.tex").exists() and (folder / "results.json").exists()


# -- data ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A config, a source and a benchmark, with a tokenizer like that of a checkpoint."""
    lines = [json.dumps({"text": f"Story {n}: " + "the river runs to the sea " * (n % 5 + 1)}) for n in range(60)]
    (tmp_path / "stories.jsonl").write_text("\n".join(lines))
    (tmp_path / "exam.csv").write_text("the fox runs to the river and the bear sleeps in the deep dark wood,yes\n")
    train_tokenizer(lines, 300).save(tmp_path / "tokenizer")
    (tmp_path / "data.toml").write_text(
        '[prepare]\ntokenizer = "tokenizer"\nparts = 2\nvalidation_share = 0.1\n'
        '[source.stories]\npath = "stories.jsonl"\n'
        '[benchmark.exam]\nkind = "table"\npath = "exam.csv"\nfield = "0"\n'
    )
    return tmp_path


def test_prepare_and_inspect(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = [str(corpus / "data.toml"), str(corpus / "out"), "--data", str(corpus)]
    assert run(["prepare", *place, "--plan"]) == 0
    assert "stories" in capsys.readouterr().out and not (corpus / "out").exists()
    assert run(["prepare", *place, "--workers", "1"]) == 0
    written = capsys.readouterr()
    assert "train: " in written.out and "kept out exam (1 of 1 texts): nothing found" in written.out
    assert "tokenizing with tokenizers (" in written.err
    picture = corpus / "lengths.png"
    shown = ["--rows", "2", "--seq-len", "64", "--histogram", str(picture), "--verify"]
    assert run(["inspect", str(corpus / "out"), *shown]) == 0
    lines = capsys.readouterr().out.splitlines()
    held = re.search(r"^train: (\d+) documents, ([\d,]+) tokens$", written.out, re.M)
    packed = re.search(r"^(\d+) rows of 64, ([\d.]+)% full;", "\n".join(lines), re.M)
    assert held is not None and packed is not None
    documents, tokens = int(held[1]), int(held[2].replace(",", ""))
    counts = {int(found[1]): int(found[2]) for line in lines if (found := re.match(r" +up to +(\d+) +(\d+) █+$", line))}
    assert counts.keys() == {16, 32, 64} and sum(counts.values()) == documents
    assert float(packed[2]) == round(100 * tokens / (64 * int(packed[1])), 2)
    rows = [lines[lines.index(f"row {number}") + 1] for number in range(2)]
    assert all(row.startswith("‖") and row.replace("|", "").count("‖Story ") == row.count("‖") for row in rows)
    assert lines[-2:] == [f"wrote {picture}", "all hashes are right"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    for size in ("2", "8"):
        assert run(["inspect", str(corpus / "out"), "--rows", "1", "--seq-len", "64", "--block-size", size]) == 0
        row = capsys.readouterr().out.splitlines()[-1]
        assert row.count("|") + row.count("‖") == 64 // int(size)
    for option, value in (("--block-size", "0"), ("--rows", "-1"), ("--histogram", "x.xyz")):
        assert f"{option[2:].replace('-', '_')} is {value}" in fails(capsys, "inspect", corpus / "out", option, value)


def test_prepare_says_what_is_wrong(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = corpus / "data.toml", corpus / "out"
    data = ("--data", corpus)
    for arguments, message in (
        (("--set", "source.stories.path=nowhere.jsonl"), "nowhere.jsonl; relative paths start from the folder given"),
        (
            ("--set", "source.stories.shaer=2"),
            "'source.stories.shaer'; did you mean 'source.stories.share'?",
        ),
        (("--set", "source.stories.kind=pdf"), "source.stories.kind is 'pdf'; use one of jsonl"),
        (("--set", "source.stories.share=-1"), "source.stories: share is -1.0; use a positive number"),
        (("--set", "source.a/b.path=x"), "[source.a/b] has a name that is no file name"),
        (("--set", "prepare.tokenizer=nowhere"), "there is no folder"),
        (("--set", "prepare.eos=<end>"), "no token '<end>'"),
        (("--workers", "-1"), "workers is -1; use 1 or more, or 0 for one per core"),
    ):
        assert message in fails(capsys, "prepare", config, out, *data, *arguments)
    assert not (out / "manifest.json").exists()


def test_bench_data(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "data", str(corpus / "data.toml"), "--data", str(corpus), "--megabytes", "0.01"]
    assert run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["what"] for row in found["rows"]] == [
        "tokenizers alone",
        "encoder (tokenizers)",
        "decontamination alone",
        "end to end, a tenth",
        "end to end",
        "end to end, decontaminated",
    ]
    assert all(row["tokens_per_second"] > 0 for row in found["rows"]) and found["rows"][0]["ratio"] == 1
    assert run(arguments) == 0 and "Mtokens/s" in capsys.readouterr().out
    assert "prepare.tokenizer is empty" in fails(capsys, *arguments, "--set", 'prepare.tokenizer=""')
    assert run(["bench"]) == 0 and "data" in capsys.readouterr().out


def test_the_shipped_data_configs_are_the_papers_mixture() -> None:
    for name in ("data-paper", "data-mini"):
        config = load_prepare(Path(__file__).parent.parent / "configs" / f"{name}.toml")
        shares = sorted(source.share for source in config.source.values())
        assert sum(shares) == pytest.approx(1.0) and {0.36, 0.22, 0.02} <= set(shares)
        assert {"gsm8k", "math500", "humaneval", "mmlu"} <= config.benchmark.keys()
