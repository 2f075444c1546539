"""lm-evaluation-harness gets from a model what our own evaluator gets; and `freda eval --harness`."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from freda.cli import run
from freda.data.tokenizer import train_tokenizer
from freda.decode.api import Model
from freda.decode.config import EngineConfig
from freda.errors import FredaError
from freda.eval.config import EvalSettings
from freda.eval.evaluate import evaluate
from freda.eval.harness import harness_line, make_lm, run_task
from freda.eval.likelihood import log_likelihood
from freda.eval.report.results import read_samples
from freda.eval.tasks import TASKS
from freda.folders.model_folder import LoadedModel
from freda.model.config import ModelConfig
from freda.model.parts import Parts
from freda.model.transformer import Transformer
from tests.benchmarks import write_lines, written
from tests.harness_tasks import ask
from tests.helpers import loaded_by, method, save_model

pytest.importorskip("lm_eval")

SHORT = EvalSettings(max_new_tokens=24, passes=2, threshold=0.3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("benchmarks")
    with written(folder):
        yield folder


@pytest.fixture(scope="module")
def models(data: Path) -> dict[str, LoadedModel]:
    """A tiny random model, decoded in two ways, whose tokenizer knows the answer letters."""
    texts = ["Answer: A", "Answer: B", "Answer: C", "Answer: D"] * 50 + [
        e.prompt for e in TASKS["gsm8k"].examples(data)
    ]
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
        name: LoadedModel(Parts(network), tokenizer, method(name), "test") for name in ("self-refine", "autoregressive")
    }


def instances(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=one) for one in arguments]


@pytest.mark.parametrize("method", ["self-refine", "autoregressive"])
def test_likelihoods_are_those_of_our_scorer(method: str, models: dict[str, LoadedModel]) -> None:
    loaded = models[method]
    encode, before = loaded.tokenizer.encode, [] if method == "self-refine" else [loaded.tokenizer.eos_id]
    asked = [("Which?\nAnswer:", letter) for letter in (" A", " B", " C and more")] + [("", "What is 3?"), ("x", "")]
    lm = make_lm(Model(loaded), SHORT)
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
    lm, encode = make_lm(Model(loaded), SHORT), loaded.tokenizer.encode
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
    lm, encode = make_lm(Model(loaded), SHORT), loaded.tokenizer.encode
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
    lm = make_lm(Model(loaded), SHORT)
    whole = lm.generate_until(instances((prompt, free)))[0]
    places = sorted({whole.index(whole[n : n + 2]) for n in range(len(whole) - 1)})  # where a pair of letters is new
    early, late = (whole[place : place + 2] for place in (places[2], places[-1]))
    assert 0 < whole.index(early) < whole.index(late)
    expected, longer = whole[: whole.index(early)], whole[1:13]
    lm = make_lm(Model(loaded), SHORT)
    stops: list[Any] = [[late, early], [], early, [longer]]
    texts = lm.generate_until(instances(*((prompt, {**free, "until": until}) for until in stops)))
    assert texts == [expected, whole, expected, whole[:1]]
    first, full, _, long = (output.nfe for output in lm.outputs)
    assert first < full and long < full, "they did not go on to the end"
    assert make_lm(Model(loaded), SHORT).generate_until(instances((prompt, {"until": ["never" * 99]}))) == [whole]


def test_lengths_are_the_tasks_or_ours_and_never_those_of_lm_eval(models: dict[str, LoadedModel]) -> None:
    def tokens(settings: EvalSettings, options: dict[str, Any]) -> int:
        lm = make_lm(Model(models["autoregressive"]), settings)
        lm.generate_until(instances(("Q: What", {"until": [], **options})))
        return len(lm.outputs[0].tokens)

    assert tokens(SHORT, {"max_gen_toks": 5}) == 5
    assert tokens(SHORT, {"max_gen_toks": 5000}) == tokens(SHORT, {}) == 24
    long = dataclasses.replace(SHORT, max_new_tokens=300)
    assert tokens(long, {}) == 300, "not 256"


def test_options_of_a_generation(models: dict[str, LoadedModel]) -> None:
    lm = make_lm(Model(models["self-refine"]), SHORT)
    greedy = lm._request(3, "x", {"until": "Q:", "do_sample": False, "temperature": 0.7, "num_beams": 1})
    assert (greedy.temperature, greedy.passes, greedy.threshold, greedy.seed) == (0.0, 2, 0.3, 0)
    drawn = lm._request(3, "x", {"until": "Q:", "do_sample": True, "temperature": 0.7, "top_p": 0.9})
    assert (drawn.temperature, drawn.top_p, drawn.seed, drawn.stop) == (0.7, 0.9, 3, ("Q:",))
    with pytest.raises(FredaError, match=r"generates with num_beams = 4, which freda does not support"):
        lm._request(0, "x", {"until": [], "num_beams": 4})


@pytest.mark.parametrize("name", ["sums", "gsm8k", "mmlu", "gpqa_diamond", "mbpp"])
@pytest.mark.parametrize("method", ["self-refine", "autoregressive"])
def test_the_same_model_gives_the_same_answers(
    name: str, method: str, data: Path, models: dict[str, LoadedModel], tmp_path: Path
) -> None:
    loaded, task = models[method], TASKS[name]
    examples = task.examples(data)
    ours = evaluate(Model(loaded, EngineConfig(max_batch=3)), task, examples, tmp_path, settings=SHORT)
    samples = list(read_samples(tmp_path)[1].values())
    lm = make_lm(Model(loaded, EngineConfig(max_batch=5)), SHORT)
    found = ask(lm, name, data, examples)
    assert found.outputs == [sample["output"] for sample in samples]
    assert found.verdicts == [sample["correct"] for sample in samples]
    assert found.accuracy == pytest.approx(ours["accuracy"])
    if not task.choices:
        assert sum(output.nfe for output in lm.outputs) == sum(sample["nfe"] for sample in samples)


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(models: dict[str, LoadedModel], tmp_path: Path) -> Path:
    save_model(tmp_path / "model", models["self-refine"])
    return tmp_path / "model"


def test_the_command_runs_tasks_of_lm_eval(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_registry(tmp_path / "registry", monkeypatch)
    command = ["eval", str(model), "--harness", "--task", "plain", "--out", str(tmp_path / "out"), "--limit", "2"]
    command += ["--max-new-tokens", "12"]
    assert run(command) == 0
    shown, notes = capsys.readouterr()
    assert shown.startswith("plain: lm_eval exact_match,none 0.0000") and shown.count("\n") == 1
    assert "plain by lm_eval: 2 of 2\n" in notes and "it/s" not in notes, "lm_eval is silent"
    found = json.loads((tmp_path / "out" / "plain" / "harness.json").read_text())
    assert (found["n"], found["errors"], found["settings"]["max_new_tokens"]) == (2, 0, 12) and found["tpf"] > 0
    assert run(command, debug=True) == 0
    shown, notes = capsys.readouterr()
    assert shown.count("\n") == 1 and "it/s" in notes, "--debug lets lm_eval speak, on stderr"


def test_requests_that_cannot_be_answered_are_counted(models: dict[str, LoadedModel], tmp_path: Path) -> None:
    lm = make_lm(Model(models["self-refine"]), SHORT)
    texts = lm.generate_until(instances(("x" * 5000, {"until": []}), ("Q: What", {"until": []})))
    assert texts[0] == "" != texts[1] and [output.finish == "error" for output in lm.outputs] == [True, False]


def test_errors_of_the_command(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ["eval", str(model), "--harness", "--data"]

    def complaint(*arguments: str) -> str:
        assert run([*start, *arguments]) == 2
        return capsys.readouterr().err

    assert "batch_size is 0" in complaint(str(data), "--task", "sums", "--batch-size", "0")
    assert "limit is -1" in complaint(str(data), "--task", "sums", "--limit", "-1")
    write_registry(tmp_path / "registry", monkeypatch)
    told = complaint(str(data), "--task", "nosuch")
    assert "has no task 'nosuch'" in told and "lm_eval 0." in told
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


def test_groups_and_lengths_of_lm_evals_tasks(
    models: dict[str, LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_registry(tmp_path / "registry", monkeypatch)
    loaded, settings = models["autoregressive"], dataclasses.replace(SHORT, max_new_tokens=300)
    found = run_task(make_lm(Model(loaded), settings), "plain", tmp_path, limit=2)
    assert (found["n"], found["nfe"]) == (2, 300), "a task without a length has ours, and not lm_eval's 256"
    assert harness_line(found).startswith("plain: lm_eval exact_match,none 0.0000")
    found = run_task(make_lm(Model(loaded), SHORT), "both", tmp_path)
    assert {"plain exact_match,none", "letters acc,none"} <= found["metrics"].keys() and found["n"] == 6


def test_lm_eval_is_loaded_only_when_it_is_asked(tmp_path: Path) -> None:
    loaded = loaded_by(["freda.eval.command", "freda.eval.harness"], tmp_path)
    assert "freda" in loaded and "lm_eval" not in loaded
