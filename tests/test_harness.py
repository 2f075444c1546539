"""lm-evaluation-harness hears from a model what we hear, and `freda eval --harness` compares."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from freda.methods.config import MethodConfig

from freda.cli import run
from freda.data.tokenizer import train_tokenizer
from freda.decode.config import DecodeConfig
from freda.errors import FredaError
from freda.eval.evaluate import evaluate
from freda.eval.harness import harness_line, make_lm, run_task
from freda.eval.likelihood import log_likelihood
from freda.eval.tasks import TASKS, gsm8k
from freda.folders.model_folder import LoadedModel, save_model
from freda.model.config import ModelConfig
from freda.model.transformer import Transformer
from tests.benchmarks import write_lines, written

pytest.importorskip("lm_eval")

SHORT = DecodeConfig(max_new_tokens=24, passes=2, threshold=0.3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("benchmarks")
    with written(folder):
        yield folder


@pytest.fixture(scope="module")
def models(data: Path) -> dict[str, LoadedModel]:
    """A tiny random model, decoded in two ways, whose tokenizer knows the answer letters."""
    texts = ["Answer: A", "Answer: B", "Answer: C", "Answer: D"] * 50 + [e.prompt for e in gsm8k.load(data)]
    tokenizer = train_tokenizer(texts, 330)
    shape = ModelConfig(
        vocab_size=tokenizer.size, dim=32, layers=1, heads=2, kv_heads=2, head_dim=16, ffn_dim=48, max_positions=2048
    )
    network = Transformer(shape, tokenizer.blank_id)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.dim() > 1:  # large enough that it does not say one thing for ever
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
    return {
        name: LoadedModel(network, tokenizer, MethodConfig(name=name), "test")  # type: ignore[arg-type]
        for name in ("self-refine", "autoregressive")
    }


def instances(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=one) for one in arguments]


@pytest.mark.parametrize("method", ["self-refine", "autoregressive"])
def test_likelihoods_are_those_of_our_scorer(method: str, models: dict[str, LoadedModel]) -> None:
    loaded = models[method]
    encode, before = loaded.tokenizer.encode, [] if method == "self-refine" else [loaded.tokenizer.eos_id]
    asked = [("Which?\nAnswer:", letter) for letter in (" A", " B", " C and more")] + [("", "What is 3?"), ("x", "")]
    lm = make_lm(loaded, SHORT, 2)
    found = lm.loglikelihood(instances(*asked))
    context = encode("Which?\nAnswer:")
    pairs = [(context, encode(context_and[0] + context_and[1])[len(context) :]) for context_and in asked[:3]]
    pairs += [(before, encode("What is 3?")), (encode("x"), [])]
    for (log_prob, greedy), scored in zip(found, log_likelihood(loaded, pairs), strict=True):
        assert log_prob == pytest.approx(scored.log_prob, abs=1e-4) and greedy == scored.greedy
    assert found[-1] == (0.0, True) and not all(greedy for _, greedy in found)
    one_token = next(pair for number in range(99) if (pair := most_probable(loaded, f"{number}?")) is not None)
    assert lm.loglikelihood(instances(one_token))[0][1], "the most probable token is the greedy one"


def most_probable(loaded: LoadedModel, context: str) -> tuple[str, str] | None:
    """A context and the most probable token after it, where that is a text."""
    tokens = loaded.tokenizer.encode(context)
    scored = log_likelihood(loaded, [(tokens, [token]) for token in range(loaded.tokenizer.blank_id)])
    best = max(range(len(scored)), key=lambda token: scored[token].log_prob)
    text = loaded.tokenizer.decode([best])
    return (context, text) if loaded.tokenizer.encode(context + text) == [*tokens, best] else None


def test_a_text_is_cut_where_its_tokens_are(models: dict[str, LoadedModel]) -> None:
    loaded = models["self-refine"]
    lm, encode = make_lm(loaded, SHORT, 2), loaded.tokenizer.encode
    whole = encode("Answer: A")
    for context, continuation in (("Answer: ", "A"), ("Ans", "wer: A")):
        given, scored = lm._pair(context, continuation)
        assert [*given, *scored] == whole, "no tokens that this text does not have"
        assert loaded.tokenizer.decode(scored).endswith(continuation) and scored


@pytest.mark.parametrize("method", ["self-refine", "autoregressive"])
def test_whole_texts_are_scored_once(
    method: str, models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = models[method]
    monkeypatch.setattr(loaded.backbone, "config", dataclasses.replace(loaded.backbone.config, max_positions=64))
    lm, encode = make_lm(loaded, SHORT, 2), loaded.tokenizer.encode
    before = [] if method == "self-refine" else [loaded.tokenizer.eos_id]
    short, long = encode("What is 3?"), encode("What is 3? " * 30)
    assert 2 * 63 < len(long) < 3 * 63
    found = lm.loglikelihood_rolling(instances(("What is 3?",), ("What is 3? " * 30,), ("",)))
    # 63 positions, windows that see a token of what came before, the last as much as fits
    pairs = [(before, long[:63]), (long[62:63], long[63:126]), (long[len(long) - 64 : 126], long[126:])]
    whole, *windows = log_likelihood(loaded, [(before, short), *pairs])
    assert found[0] == pytest.approx(whole.log_prob, abs=1e-3) and found[2] == 0.0
    assert found[1] == pytest.approx(sum(scored.log_prob for scored in windows), abs=1e-2)
    assert sum(len(scored.tokens) for scored in windows) == len(long)


def test_texts_stop_at_the_first_of_all_stops(models: dict[str, LoadedModel]) -> None:
    loaded = models["self-refine"]
    prompt, free = "Q: What is 3 and 4?\nA:", {"until": [], "max_gen_toks": 24}
    lm = make_lm(loaded, SHORT, 4)
    whole = lm.generate_until(instances((prompt, free)))[0]
    places = sorted({whole.index(whole[n : n + 2]) for n in range(len(whole) - 1)})  # where a pair of letters is new
    early, late = (whole[place : place + 2] for place in (places[2], places[-1]))
    assert 0 < whole.index(early) < whole.index(late)
    expected, longer = whole[: whole.index(early)], whole[1:13]
    lm = make_lm(loaded, SHORT, 4)
    stops: list[Any] = [[late, early], [], early, [longer]]
    texts = lm.generate_until(instances(*((prompt, {**free, "until": until}) for until in stops)))
    assert texts == [expected, whole, expected, whole[:1]]
    first, full, _, long = (output.nfe for output in lm.outputs)
    assert first < full and long < full, "they did not go on to the end"
    assert make_lm(loaded, SHORT, 4).generate_until(instances((prompt, {"until": ["never" * 99]}))) == [whole]


def test_lengths_are_the_tasks_or_ours_and_never_those_of_lm_eval(models: dict[str, LoadedModel]) -> None:
    def tokens(settings: DecodeConfig, options: dict[str, Any]) -> int:
        lm = make_lm(models["autoregressive"], settings, 1)
        lm.generate_until(instances(("Q: What", {"until": [], **options})))
        return len(lm.outputs[0].tokens)

    assert tokens(SHORT, {"max_gen_toks": 5}) == 5
    assert tokens(SHORT, {"max_gen_toks": 5000}) == tokens(SHORT, {}) == 24
    long = dataclasses.replace(SHORT, max_new_tokens=300)
    assert tokens(long, {}) == 300, "not 256"


def test_options_of_a_generation(models: dict[str, LoadedModel]) -> None:
    lm = make_lm(models["self-refine"], SHORT, 2)
    greedy, _ = lm._asked(3, "x", {"until": "Q:", "do_sample": False, "temperature": 0.7, "num_beams": 1})
    assert (greedy.temperature, greedy.passes, greedy.threshold, greedy.seed) == (0.0, 2, 0.3, 0)
    drawn, stops = lm._asked(3, "x", {"until": "Q:", "do_sample": True, "temperature": 0.7, "top_p": 0.9})
    assert (drawn.temperature, drawn.top_p, drawn.seed, stops) == (0.7, 0.9, 3, ("Q:",))
    with pytest.raises(FredaError, match=r"generates with num_beams = 4, which freda has not"):
        lm._asked(0, "x", {"until": [], "num_beams": 4})


@pytest.mark.parametrize("name", ["sums", "gsm8k", "mmlu", "gpqa_diamond", "mbpp"])
@pytest.mark.parametrize("method", ["self-refine", "autoregressive"])
def test_the_same_model_gives_the_same_answers(
    name: str, method: str, data: Path, models: dict[str, LoadedModel], tmp_path: Path
) -> None:
    loaded, task = models[method], TASKS[name]
    examples = task.load(data)
    evaluate(loaded, task, examples, tmp_path, settings=SHORT, batch_size=3)
    for batch_size in (3, 5):
        found = run_task(loaded, name, examples, tmp_path, data=data, settings=SHORT, batch_size=batch_size)
        ours = json.loads((tmp_path / "results.json").read_text())
        assert found["freda"] == {"accuracy": ours["accuracy"], "outputs_equal": len(examples), "differ": []}
        assert found["accuracy"] == pytest.approx(ours["accuracy"])
        if not task.CHOICES:
            assert (found["nfe"], found["tpf"]) == pytest.approx((ours["nfe"], ours["tpf"]))


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(models: dict[str, LoadedModel], tmp_path: Path) -> Path:
    network, tokenizer, method, _ = models["self-refine"]
    save_model(tmp_path / "model", network, tokenizer, method, stage="test")
    return tmp_path / "model"


def test_the_command_compares(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    command = ["eval", str(model), "--task", "sums", "--data", str(data), "--out", str(out), "--limit", "7"]
    command += ["--max-new-tokens", "12"]
    assert run([*command, "--harness"]) == 0
    shown, notes = capsys.readouterr()
    assert shown.startswith("sums: lm_eval 0.00 ± 0.00 (exact_match,strict-match; n = 7), 7 of 7 prompts equal to ours")
    assert "no results.json" in shown and shown.count("\n") == 1
    assert notes == "sums by lm_eval: 7 of 7\n", "lm_eval is silent"
    assert run(command) == 0 and run([*command, "--harness"]) == 0
    shown = capsys.readouterr().out
    assert "freda eval 0.00: the same output on 7, the same verdict on 7 of 7; " in shown
    samples = out / "sums" / "samples.jsonl"
    samples.write_text(samples.read_text().replace('"correct": false', '"correct": true', 2))
    assert run([*command, "--harness"]) == 0
    assert "the same verdict on 5 of 7, not on sums/0, sums/1; " in capsys.readouterr().out
    assert json.loads((out / "sums" / "harness.json").read_text())["freda"]["differ"] == ["sums/0", "sums/1"]
    assert run([*command, "--harness", "--passes", "1"]) == 0
    assert "not compared: results.json has another settings; " in capsys.readouterr().out
    assert run([*command, "--harness"], debug=True) == 0
    shown, notes = capsys.readouterr()
    assert shown.count("\n") == 1 and "it/s" in notes, "--debug lets lm_eval speak, on stderr"


def test_a_long_list_of_differences_is_cut() -> None:
    found = {"task": "t", "metric": "acc,none", "accuracy": 0.5, "standard_error": None, "n": 9, "prompts_equal": 9}
    ours = {"accuracy": 0.25, "outputs_equal": 2, "differ": [f"t/{n}" for n in range(7)]}
    assert harness_line({**found, "freda": ours}).endswith("on 2 of 9, not on t/0, t/1, t/2, t/3, t/4 and 2 more")


def test_errors_of_the_command(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ["eval", str(model), "--harness", "--data"]

    def complaint(*arguments: str) -> str:
        assert run([*start, *arguments]) == 2
        return capsys.readouterr().err

    assert "there is no" in complaint(str(tmp_path), "--task", "gsm8k") and not (model / "eval").exists()
    assert "batch_size is 0" in complaint(str(data), "--task", "sums", "--batch-size", "0")
    assert "limit is -1" in complaint(str(data), "--task", "sums", "--limit", "-1")
    write_registry(tmp_path / "registry", monkeypatch)
    told = complaint(str(data), "--task", "nosuch")
    assert "there is no task 'nosuch'; use one of mmlu, gpqa_diamond" in told and "one of lm_eval 0." in told
    assert "runs programs outside of freda's sandbox" in complaint(str(data), "--task", "unsafe")
    assert "lm_eval cannot load its task 'broken'" in complaint(str(data), "--task", "broken")

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert "pip install 'freda[harness]'" in complaint(str(data), "--task", "gsm8k")


def write_registry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that lm_eval has and we have not; without its own, which take seconds to list."""
    from lm_eval.tasks import TaskManager

    folder.mkdir()
    write_lines(folder / "rows.jsonl", [{"text": f"What is {n}?", "target": "x"} for n in range(3)])
    files = {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "cache")}
    common = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
    common |= {"doc_to_text": "text", "doc_to_target": "target"}
    tasks: dict[str, dict[str, Any]] = {
        "plain": {"output_type": "generate_until"},
        "letters": {"output_type": "multiple_choice", "doc_to_choice": ["x", "y"]},
        "unsafe": {"output_type": "generate_until", "unsafe_code": True},
        "broken": {"output_type": "generate_until", "test_split": "nowhere"},
    }
    for name, config in tasks.items():  # JSON is YAML
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **config}))
    (folder / "both.yaml").write_text(json.dumps({"group": "both", "task": ["plain", "letters"]}))
    found = functools.partial(TaskManager, include_path=str(folder), include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", found)


def test_tasks_that_only_lm_eval_has(
    models: dict[str, LoadedModel], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_registry(tmp_path / "registry", monkeypatch)
    loaded, settings = models["autoregressive"], dataclasses.replace(SHORT, max_new_tokens=300)
    found = run_task(loaded, "plain", None, tmp_path, data=data, settings=settings, limit=2)
    assert (found["n"], found["nfe"]) == (2, 300), "a task without a length has ours, and not lm_eval's 256"
    assert harness_line(found).startswith("plain: lm_eval exact_match,none 0.0000") and "metric" not in found
    found = run_task(loaded, "both", None, tmp_path, data=data, settings=SHORT)
    assert {"plain exact_match,none", "letters acc,none"} <= found["metrics"].keys() and found["n"] == 6


def test_lm_eval_is_loaded_only_when_it_is_asked() -> None:
    code = "import sys; import freda.eval.command, freda.eval.harness; sys.exit('lm_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
