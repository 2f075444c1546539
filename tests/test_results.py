"""What an evaluation leaves behind: its numbers, a folder that survives being killed or damaged, paired differences."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from freda.cli import run
from freda.data.config import CorpusConfig
from freda.data.shards import Manifest
from freda.decode.api import Model
from freda.decode.config import EngineConfig
from freda.errors import FredaError
from freda.eval.command import progress, self_check
from freda.eval.config import EvalSettings
from freda.eval.evaluate import evaluate, fingerprint, result_line
from freda.eval.report.results import compare, read_samples, wilson
from freda.eval.tasks import TASKS, mathematics
from freda.eval.tasks.multiple_choice import GPQA_COLUMNS
from freda.eval.tasks.task import Example, Graded, checksum, json_rows
from freda.files import locked
from freda.folders.model_folder import LoadedModel
from freda.model.parts import Parts
from freda.model.transformer import Transformer
from tests.helpers import answering_model, problems, save_model

SUMS = TASKS["sums"]
SHORT = EvalSettings(max_new_tokens=9, passes=2, threshold=0.3)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return answering_model([p.document for p in problems("train", 50, steps=1, max_number=30, seed=0)], seed=3)


@pytest.fixture
def asked(tmp_path: Path) -> list[Example]:
    Manifest({"corpus": {"generator": 1, **dataclasses.asdict(CorpusConfig(steps=1))}}, 8, 0, 0, "", {}).write(tmp_path)
    return SUMS.load(tmp_path, 5)


def test_the_numbers_of_results_are_those_of_the_samples(
    loaded: LoadedModel, asked: list[Example], tmp_path: Path
) -> None:
    verdicts = iter([True, False, False, True, False])

    def grade_all(some: Any, texts: Any) -> list[Graded]:
        return [Graded(next(verdicts), "so", "") for _ in some]

    task = dataclasses.replace(SUMS, grade_all=grade_all, max_new_tokens=7)
    model = Model(loaded, EngineConfig(max_batch=1))
    found = evaluate(model, task, asked, tmp_path / "out", settings=SHORT)
    _, samples = read_samples(tmp_path / "out")
    assert list(samples) == [example.id for example in asked]
    lines: list[dict[str, Any]] = list(samples.values())
    forwards, tokens = sum(line["nfe"] for line in lines), sum(line["tokens"] for line in lines)
    assert (found["accuracy"], found["correct"]) == (0.4, 2)
    assert found["standard_error"] == pytest.approx(math.sqrt(0.4 * 0.6 / 5))
    assert found["nfe"] == forwards / 5 and found["tpf"] == tokens / forwards
    assert found["seconds"] == pytest.approx(sum(line["seconds"] for line in lines), abs=0.01) and found["seconds"] > 0
    assert all(line["nfe"] >= 1 and "drafts" not in line for line in lines) and found["version"]
    low, high = found["interval"]
    assert (low, high) == pytest.approx((0.1176, 0.7693), abs=1e-4), "Wilson's"
    assert found["truncated"] == sum(line["finish"] == "length" for line in lines) and found["errors"] == 0
    assert found["settings"]["max_new_tokens"] == 7 >= max(line["tokens"] for line in lines), "what was done"
    assert (found["dtype"], found["block_size"]) == ("float32", 4)


def test_damaged_lines_are_asked_again_and_a_damaged_head_is_refused(
    loaded: LoadedModel, asked: list[Example], tmp_path: Path
) -> None:
    whole = evaluate(Model(loaded), SUMS, asked, tmp_path / "out", settings=SHORT)
    path = tmp_path / "out" / "samples.jsonl"
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:2], lines[2][:30], "", "[1]", *lines[4:5], lines[5][:20]]))
    told: list[int] = []
    again = evaluate(
        Model(loaded), SUMS, asked, tmp_path / "out", settings=SHORT, progress=lambda done, total, _: told.append(done)
    )
    assert told == [2, 3, 4, 5] and {**again, "seconds": 0} == {**whole, "seconds": 0}
    assert len(path.read_text().splitlines()) == 6, "nothing damaged is left"
    for first in ("", '{"task": "su', "[]", "{}"):
        path.write_text(first)
        with pytest.raises(FredaError, match="does not begin with what was asked"):
            evaluate(Model(loaded), SUMS, asked, tmp_path / "out", settings=SHORT)


def test_another_model_dtype_setting_or_version_is_refused(
    loaded: LoadedModel, asked: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    evaluate(Model(loaded), SUMS, asked, out, settings=SHORT)
    other = Transformer(loaded.backbone.config, loaded.tokenizer.blank_id)
    other.load_state_dict(loaded.backbone.state_dict())
    with torch.no_grad():
        list(other.parameters())[-1].add_(0.01)
    for changed, settings, message in (
        (loaded._replace(parts=Parts(other)), SHORT, "model .* \\(now"),
        (loaded._replace(method=dataclasses.replace(loaded.method, rescale=True)), SHORT, "rescale False"),
        (loaded, dataclasses.replace(SHORT, threshold=0.5), r"threshold 0.3 \(now 0.5\);"),
    ):
        with pytest.raises(FredaError, match=f"holds another evaluation: {message}"):
            evaluate(Model(changed), SUMS, asked, out, settings=settings)
    monkeypatch.setattr("freda.eval.evaluate.__version__", "9")
    with pytest.raises(FredaError, match=r"version .* \(now 9\)"):
        evaluate(Model(loaded), SUMS, asked, out, settings=SHORT)


def test_two_evaluations_cannot_share_a_folder(loaded: LoadedModel, asked: list[Example], tmp_path: Path) -> None:
    with locked(tmp_path / "out"), pytest.raises(FredaError, match="another process is writing"):
        evaluate(Model(loaded), SUMS, asked, tmp_path / "out", settings=SHORT)
    assert evaluate(Model(loaded), SUMS, asked, tmp_path / "out", settings=SHORT)["n"] == 5


# -- rows that are none ----------------------------------------------------------------------------------------------


def test_rows_without_their_fields_are_refused(tmp_path: Path) -> None:
    for text, message in (("5\n", "x.jsonl:1 is not an object"), ('{"a": null}\n', "x.jsonl:1 has no field a")):
        (tmp_path / "x.jsonl").write_text(text)
        with pytest.raises(FredaError, match=message):
            json_rows(tmp_path / "x.jsonl", ("a",))
    for name in ("mmlu/test", "mmlu/dev", "gpqa", "mbpp"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "mmlu" / "dev" / "x_dev.csv").write_text("q,1,2,3,4,A\n")
    for letter in ("", "AB", "E"):
        (tmp_path / "mmlu" / "test" / "x_test.csv").write_text(f"q,1,2,3,4,{letter}\n")
        with pytest.raises(FredaError, match="question 1 is not a question, four options and a letter"):
            TASKS["mmlu"].load(tmp_path, 1)
    (tmp_path / "gpqa" / "gpqa_diamond.csv").write_text(",".join(GPQA_COLUMNS) + "\nq,1,2,3,4\nq,1,2\n")
    with pytest.raises(FredaError, match="question 2 is not a question and four answers"):
        TASKS["gpqa_diamond"].load(tmp_path, 2)
    row = {"task_id": 2, "text": "x", "code": "x", "test_list": [], "test_setup_code": ""}
    (tmp_path / "mbpp" / "mbpp.jsonl").write_text(json.dumps(row))
    with pytest.raises(FredaError, match="has no row with task_id 3"):
        TASKS["mbpp"].load(tmp_path, 1)


def test_a_check_of_nothing_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "--self-check", "--data", str(tmp_path)]) == 2
    assert "the files of no task" in capsys.readouterr().err


def test_other_tests_have_another_checksum() -> None:
    row = {"test": "assert f(1) == 2", "entry_point": "f", "note": "x"}
    one, same, other = (
        checksum([Example("a", "p", "g", {**row, **changed})]) for changed in ({}, {"note": "y"}, {"test": "pass"})
    )
    assert one == same != other and TASKS["humaneval"].checksum


def test_the_settings_of_the_benchmarks_are_the_papers_and_change_with_intent_only() -> None:
    found = {name: (task.shots, task.rows, task.max_new_tokens, task.stops) for name, task in TASKS.items()}
    code = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
    assert found == {
        "mmlu": (5, 14042, 1, ()),
        "gpqa_diamond": (5, 198, 1, ()),
        "gsm8k": (4, 1319, 512, ("Q:", "\n\n")),
        "math500": (4, 500, 1024, ("Problem:", "I hope it is correct.")),
        "humaneval": (0, 164, 1024, code),
        "humaneval_plus": (0, 164, 1024, code),
        "mbpp": (3, 974, 512, ("[DONE]", "\nYou are")),
        "sums": (0, 2000, 256, ()),
        "mini_math": (0, 2000, 192, ("\nQ:",)),
        "mini_code": (0, 2000, 192, code),
        "mini_logic": (0, 2000, 1, ()),
    }
    assert {name for name, task in TASKS.items() if not task.checksum} == {
        *("gpqa_diamond", "sums", "mini_math", "mini_code", "mini_logic")
    }


def test_math_verify_is_asked_in_its_order_and_the_first_final_answer_counts() -> None:
    pytest.importorskip("math_verify")
    assert mathematics.same("1<x<2", "(1,2)") and not mathematics.same("(1,2)", "1<x<2")
    text = "The final answer is $2$. I hope it is correct. The final answer is $3$. I hope it is correct."
    assert mathematics.answer_of(text) == "$2$"


# -- two of them -----------------------------------------------------------------------------------------------------


def write_answers(folder: Path, right: list[bool], checksum_: str = "abc") -> Path:
    folder.mkdir()
    head = {"task": "gsm8k", "checksum": checksum_, "n": len(right)}
    lines = [head, *({"id": str(n), "correct": ok} for n, ok in enumerate(right))]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_two_evaluations_are_compared_question_by_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_answers(tmp_path / "a", [True] * 50 + [False] * 30 + [True] * 5 + [False] * 15)
    two = write_answers(tmp_path / "b", [True] * 50 + [False] * 30 + [False] * 5 + [True] * 15)
    found = compare(one, two)
    assert (found.n, found.accuracy, found.only) == (100, (0.55, 0.65), (5, 15))
    half = 0.5**0.5  # half a question more for each of the four outcomes: as two of these
    differences = torch.tensor([0.0] * 80 + [-1.0] * 5 + [1.0] * 15 + [-half, half])
    middle, error = float(differences.mean()), float(differences.std(correction=0)) / 102**0.5
    assert found.difference == pytest.approx(0.10)
    assert (found.low, found.high) == pytest.approx((middle - 1.96 * error, middle + 1.96 * error), abs=1e-6)
    assert run(["eval", "--compare", str(one), str(two)]) == 0
    assert "A 55.00, B 65.00: B is +10.00 points (+1.21 to +18.40 at 95%" in capsys.readouterr().out
    same = compare(one, one)
    assert (same.difference, same.low) == (0, -same.high) and 0.01 < same.high < 0.03, "equal, but not for certain"
    unfinished = write_answers(tmp_path / "d", [True] * 99)
    lines = (unfinished / "samples.jsonl").read_text().splitlines()
    (unfinished / "samples.jsonl").write_text("\n".join([*lines[:-1], lines[-1][:9]]))
    with pytest.raises(FredaError, match="d has 98 of 99"):
        compare(unfinished, unfinished)
    for other, message in (
        (write_answers(tmp_path / "c", [True] * 100, "xyz"), "were not asked the same: checksum abc and xyz"),
        (unfinished, "d has 98 of 99 answers"),
        (tmp_path / "nowhere", "holds no samples.jsonl"),
    ):
        with pytest.raises(FredaError, match=message):
            compare(one, other)


def test_questions_that_do_not_fit_are_wrong_and_the_others_go_on(tmp_path: Path) -> None:
    """A model of 64 positions: one prompt is longer than that, one leaves room for a few tokens only."""
    loaded = answering_model(["one two three four"] * 50, seed=0, max_positions=64)
    prompts = ["one two", "#" * 60, "#" * 80, "two three"]
    examples = [Example(f"sums/{n}", prompt, "7", {"solution": ""}) for n, prompt in enumerate(prompts)]
    settings = EvalSettings(max_new_tokens=20, passes=2, threshold=2.0)
    model = Model(loaded, EngineConfig(max_batch=2))
    found = evaluate(model, SUMS, examples, tmp_path / "out", settings=settings)
    lines = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()[1:]]
    assert found["n"] == 4 and found["errors"] == found["finish"]["error"] == 1
    assert "1 errors" in result_line(found) and found["first_error"] == lines[2]["error"]
    assert lines[2]["finish"] == "error" and not lines[2]["correct"]
    assert " 64;" in lines[2]["reason"]
    room = 64 - len(loaded.tokenizer.encode(prompts[1]))
    assert 0 < lines[1]["tokens"] <= room < 20 and lines[3]["finish"] in ("stop", "length")
    assert found["device"] == "CPU" and isinstance(found["commit"], str)


def test_intervals_of_wilson_are_never_empty() -> None:
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4) and wilson(10, 10)[0] == pytest.approx(
        0.7225, abs=1e-4
    )
    assert wilson(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)


def test_a_score_made_of_errors_is_an_error(
    asked: list[Example], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every prompt is longer than the model has positions."""
    small = answering_model(["one two three four"] * 50, seed=0, max_positions=16)
    save_model(tmp_path / "model", small)
    command = ["eval", str(tmp_path / "model"), "--task", "sums", "--data", str(tmp_path), "--limit", "2"]
    assert run(command) == 2
    shown = capsys.readouterr()
    assert "0 of 2" in shown.out and "2 errors" in shown.out and "sums: none of 2 questions" in shown.err
    found = json.loads((tmp_path / "model" / "eval" / "sums" / "results.json").read_text())
    assert (found["errors"], found["correct"]) == (2, 0)


def test_a_missing_grader_is_reported_before_anything_is_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mathematics, "find_spec", lambda name: None)
    for use in (TASKS["math500"].examples, lambda data: self_check(TASKS["math500"], data)):
        with pytest.raises(FredaError, match=r"math-verify.*freda\[eval\]"):
            use(tmp_path)


def test_progress_is_a_line_on_a_terminal_and_sparse_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (True, False):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr("sys.stderr", stream)
        show = progress("x")
        for done in range(4):
            show(done, 3, None)
        assert stream.getvalue().count("\r") == (3 if terminal else 0)
        assert stream.getvalue().count("\n") == (1 if terminal else 2), "the first and the last"
        assert "x: 3 of 3\n" in stream.getvalue()


def test_fingerprints_see_signs_and_places() -> None:
    loaded = answering_model(["one two three four"] * 50, seed=0)
    seen = [fingerprint(loaded)]
    weight = loaded.backbone.layers[0].mlp.up_proj.weight
    assert seen[0] == fingerprint(loaded)
    with torch.no_grad():
        weight.neg_()
        seen.append(fingerprint(loaded))
        weight.copy_(weight.flip(0))
        seen.append(fingerprint(loaded))
        weight[0, 0] += 1e-6
        seen.append(fingerprint(loaded))
    loaded.backbone.bfloat16()
    seen.append(fingerprint(loaded))
    assert len(set(seen)) == 5
