"""Benchmarks: their prompts, and graders that call right answers right and wrong ones wrong."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
from pathlib import Path

import pytest

from freda.cli import run
from freda.data.config import CorpusConfig, MiniConfig
from freda.data.mini import GENERATORS
from freda.data.shards import Manifest
from freda.data.tokenizer import train_tokenizer
from freda.decode.api import Model
from freda.decode.config import EngineConfig
from freda.decode.request import cut_at_stop
from freda.errors import FredaError
from freda.eval.command import self_check
from freda.eval.config import EvalSettings
from freda.eval.evaluate import evaluate
from freda.eval.tasks import TASKS, mathematics
from freda.eval.tasks.multiple_choice import CHOICES, GPQA_COLUMNS
from freda.eval.tasks.task import Example, Graded, checksum, json_rows, one_by_one
from freda.folders.model_folder import LoadedModel
from tests.benchmarks import in_this_process, resize
from tests.graders import die_of_seven, hang_on_seven
from tests.helpers import answering_model, problems, save_model

QUESTIONS = [
    {"question": "Ben has 3 boats and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7 boats.\n#### 7"},
    {"question": "A farm has 1,000 hens and 200 more come. How many?", "answer": "1,000 + 200 = 1,200.\n#### 1,200"},
]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The layout of the real files, with a few questions of our own."""
    for folder in ("gsm8k", "fewshot", "mmlu/test", "mmlu/dev"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "gsm8k" / "test.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    shots = [
        {"question": f"What is {n} + 1?", "target": f"{n} + 1 = {n + 1}. The answer is {n + 1}."} for n in range(8)
    ]
    (tmp_path / "fewshot" / "gsm8k_cot_8shot.json").write_text(json.dumps({"samples": shots}))
    for name, count in (("dev", 6), ("test", 2)):
        for subject in ("boats", "old_ships"):
            with open(tmp_path / "mmlu" / name / f"{subject}_{name}.csv", "w", newline="") as file:
                rows = [
                    [f"{subject} {n}, which?", "one", "two\nlines", "three", "four", "ABCD"[n % 4]]
                    for n in range(count)
                ]
                csv.writer(file).writerows(rows)
    problems = [("Half of one?", r"\frac{1}{2}"), ("A price?", r"\$32,\!348"), ("Which?", r"(-\infty, 3]")]
    rows = [{"problem": p, "solution": f"So it is $\\boxed{{{a}}}$.", "answer": a} for p, a in problems]
    (tmp_path / "math500").mkdir()
    (tmp_path / "math500" / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shot = {"problem": "One and one?", "solution": "Final Answer: The final answer is $2$. I hope it is correct."}
    (tmp_path / "fewshot" / "minerva_math_4shot.json").write_text(json.dumps({"samples": [shot] * 4}))
    code = {
        "task_id": "Own/0",
        "prompt": 'def double(x):\n    """Twice x."""\n',
        "canonical_solution": "    return 2 * x\n",
        "entry_point": "double",
        "test": "def check(candidate):\n    assert candidate(3) == 6\n",
        "base_input": [[3]],
        "plus_input": [[0], [-2.5]],
        "atol": 0,
    }
    for folder, name in (("humaneval", "HumanEval"), ("humanevalplus", "HumanEvalPlus")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(json.dumps(code).encode()))
    programs = [
        {
            "task_id": number,
            "text": f"Write a function to add {number}.",
            "code": f"def add(x):\r\n    return x + {number}",
            "test_list": [f"assert add(1) == {number + 1}"],
            "test_setup_code": "",
        }
        for number in (2, 3, 4, 11, 12)
    ]
    (tmp_path / "mbpp").mkdir()
    (tmp_path / "mbpp" / "mbpp.jsonl").write_text("\n".join(map(json.dumps, programs)))
    (tmp_path / "gpqa").mkdir()
    with open(tmp_path / "gpqa" / "gpqa_diamond.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["Id", *GPQA_COLUMNS])
        table.writerows([[n, f"Question {n}?", f"right {n}", "wrong a", "wrong b", "wrong c"] for n in range(25)])
    corpus = {"generator": 1, **dataclasses.asdict(CorpusConfig(steps=2, max_number=60))}
    mini = {"generator": GENERATORS["mini_math"].version, **dataclasses.asdict(MiniConfig())}
    Manifest({"corpus": corpus, "mini": mini}, 8, 0, 0, "", {}).write(tmp_path)
    resize(monkeypatch, math500=3, humaneval=1, humaneval_plus=1, mbpp=5, gpqa_diamond=25, sums=12, gsm8k=2, mmlu=4)
    resize(monkeypatch, mini_math=12, mini_code=12, mini_logic=12)
    return tmp_path


def test_gsm8k_prompts_and_references(data: Path) -> None:
    examples = TASKS["gsm8k"].examples(data)
    assert [example.gold for example in examples] == ["7", "1200"]
    assert examples[0].prompt.count("Q: ") == 5 and examples[0].prompt.endswith(
        "Q: Ben has 3 boats and buys 4. How many?\nA:"
    )
    assert "What is 3 + 1?" in examples[0].prompt and "What is 4 + 1?" not in examples[0].prompt
    for example in examples:
        text = mathematics.gsm8k_reference(example)
        assert "<<" not in text
        graded = mathematics.grade_gsm8k(example, text)
        assert graded.correct and graded.also == {"flexible": True}
        assert not mathematics.grade_gsm8k(example, " The answer is 12345.").correct


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("So 3 + 4 = 7. The answer is 7.", True, True),
        ("The answer is $7.00.", True, True),
        ("The answer is 7, I think. Or 8?", True, False),
        ("The answer is 07", True, True),
        ("The answer is 8. No: the answer is 7.", False, True),
        ("It is 7", False, True),
        ("The answer is seven.", False, False),
        ("The answer is 7.5.", False, False),
        ("The answer is -7.", False, False),
        ("", False, False),
        ("The answer is " + "7" * 10_000 + ".", False, False),
        ("The answer is ...", False, False),
    ],
)
def test_gsm8k_answers(text: str, strict: bool, flexible: bool) -> None:
    example = Example("x", "", "7", {})
    graded = mathematics.grade_gsm8k(example, text)
    assert (graded.correct, graded.also["flexible"]) == (strict, flexible)
    assert strict or graded.reason != "right"


def test_numbers_are_compared_exactly() -> None:
    assert mathematics.same_number("1,200", "1200.0") and mathematics.same_number("0.50", ".5")
    assert not mathematics.same_number("9007199254740993", "9007199254740992"), "equal as floats"
    assert not mathematics.same_number("1.2.3", "1")


def test_mmlu_prompts_and_letters(data: Path) -> None:
    examples = TASKS["mmlu"].examples(data)
    assert [example.id for example in examples] == [
        "mmlu/boats/0",
        "mmlu/boats/1",
        "mmlu/old_ships/0",
        "mmlu/old_ships/1",
    ]
    prompt = examples[2].prompt
    assert prompt.startswith("The following are multiple choice questions (with answers) about old ships.\n\n")
    assert prompt.count("Answer:") == 6 and prompt.endswith(
        "old_ships 0, which?\nA. one\nB. two\nlines\nC. three\nD. four\nAnswer:"
    )
    assert "Answer: A\n\n" in prompt and "old_ships 5" not in prompt
    task = TASKS["mmlu"]
    references = [task.reference(example) for example in examples]
    assert all(one.correct for one in task.grade_all(examples, references))
    assert not task.grade_all(examples[:1], [" D"])[0].correct and set(references) <= set(task.choices) == set(CHOICES)


def test_math_answers(data: Path) -> None:
    half, price, interval = TASKS["math500"].examples(data)
    assert half.prompt.count("Problem:") == 5 and half.prompt.endswith("Problem:\nHalf of one?\n\nSolution:")
    cases = (
        (half, "The final answer is $0.5$. I hope it is correct.", True),
        (half, "We get $\\boxed{\\frac{2}{4}}$ in the end", True),
        (half, "Final Answer: The final answer is $\\frac12$", True),
        (half, "The final answer is $2$. I hope it is correct.", False),
        (half, "It is a half.", False),
        (half, "\\boxed{" + "{" * 50, False),
        (half, "The final answer is $" + "9" * 10_000 + "$", False),
        (price, "The final answer is $32348$. I hope it is correct.", True),
        (interval, "The final answer is $(-\\infty,3]$. I hope it is correct.", True),
        (interval, "The final answer is $(-\\infty,3)$. I hope it is correct.", False),
    )
    graded = mathematics.grade_math500([example for example, _, _ in cases], [text for _, text, _ in cases])
    for (_, text, right), found in zip(cases, graded, strict=True):
        assert found.correct == right, (text[:60], found)


@pytest.mark.slow
def test_a_grader_that_hangs_is_given_up(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "SECONDS", 2)
    monkeypatch.setattr(mathematics, "same", hang_on_seven)
    example = TASKS["math500"].examples(data)[0]
    answers = ["The final answer is $5$.", "The final answer is $7$.", "The final answer is $5$."]
    graded = mathematics.grade_math500([example] * 3, answers)
    assert [one.correct for one in graded] == [True, False, True]
    assert graded[1].reason == "the grader failed, or gave up after 2 s"
    monkeypatch.setattr(mathematics, "same", die_of_seven)  # and what ends its process, or fails, ends no run
    assert [one.correct for one in mathematics.grade_math500([example] * 3, answers)] == [True, False, True]
    assert mathematics.in_workers(die_of_seven, [("1", "x"), ("1", "5")]) == [None, True]


@pytest.mark.parametrize("name", TASKS)
def test_the_harness_checks_itself(data: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    found = self_check(TASKS[name], data)
    assert (found.references, found.wrong, found.failures) == (found.n, 0, [])
    assert found.passed or name == "mmlu", "four guesses say little"


def test_gpqa_options_are_shuffled_once_and_for_all(data: Path) -> None:
    examples = TASKS["gpqa_diamond"].examples(data)
    assert len(examples) == 20 and examples[0].id == "gpqa_diamond/5", "five are exemplars"
    assert examples[0].prompt.count("Answer:") == 6 and "Question 4?" in examples[0].prompt
    assert len({example.gold for example in examples}) == 4, "the right answer is not always first"
    for example in examples:
        last = example.prompt.rpartition("Question ")[2]
        assert f"{example.gold}. right {example.row['Id']}" in last
    assert [e.prompt for e in TASKS["gpqa_diamond"].examples(data)] == [e.prompt for e in examples]
    (data / "gpqa" / "gpqa_diamond.csv").write_text("x\n" + "1\n" * 25)
    with pytest.raises(FredaError, match="has no column 'Question'; it has x"):
        TASKS["gpqa_diamond"].examples(data)


def test_mbpp_asks_the_test_rows(data: Path) -> None:
    examples = TASKS["mbpp"].examples(data)
    assert [example.id for example in examples] == ["mbpp/11", "mbpp/12"]
    assert examples[0].prompt.count("[DONE]") == 3 and examples[0].prompt.endswith("assert add(1) == 12\n[BEGIN]\n")
    texts = ["def add(x):\n    return x + 11\n[DONE]\nnonsense(", "def add(x):\n    return x"]
    texts = [cut_at_stop(text, TASKS["mbpp"].stops) for text in texts]
    assert [one.correct for one in TASKS["mbpp"].grade_all([examples[0]] * 2, texts)] == [True, False]


def test_a_guess_must_be_right_as_often_as_guessing_is(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = self_check(TASKS["gpqa_diamond"], data)
    assert found.passed and not found._replace(guessed=0.25 + 4.1 * (0.25 * 0.75 / found.n) ** 0.5).passed
    assert not found._replace(n=10_000, references=10_000, guessed=0.23).passed
    assert not found._replace(references=found.n - 1).passed


def test_a_wrong_grader_is_found(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "same_number", lambda one, other: False)
    found = self_check(TASKS["gsm8k"], data)
    assert not found.passed and found.references == 0 and found.failures[0].startswith("gsm8k/0: 7 is not 7")
    kind = one_by_one(lambda example, text: Graded(True, "right", ""))
    found = self_check(dataclasses.replace(TASKS["gsm8k"], grade_all=kind), data)
    assert found.wrong == 2 and not found.passed


def test_code_is_cut_and_executed(data: Path) -> None:
    for name in ("humaneval", "humaneval_plus"):
        task, example = TASKS[name], TASKS[name].examples(data)[0]
        texts = [cut_at_stop(text, task.stops) for text in ("    return x + x\n\nprint(1 / 0)", "    return x * x")]
        assert [one.correct for one in task.grade_all([example] * 2, texts)] == [True, False]


def test_what_is_asked_has_a_checksum(data: Path) -> None:
    first = checksum(TASKS["gsm8k"].examples(data))
    assert first == checksum(TASKS["gsm8k"].examples(data)) != checksum(TASKS["mmlu"].examples(data))
    changed = [QUESTIONS[0] | {"answer": "#### 8"}, QUESTIONS[1]]
    (data / "gsm8k" / "test.jsonl").write_text("\n".join(map(json.dumps, changed)))
    assert checksum(TASKS["gsm8k"].examples(data)) != first


def test_word_problems_are_those_that_the_shards_hold_out(data: Path) -> None:
    examples = TASKS["sums"].examples(data)
    expected = problems("test", 12, steps=2, max_number=60, seed=0)
    assert [(e.prompt, e.gold) for e in examples] == [(p.prompt, str(p.answer)) for p in expected]
    right, wrong = examples[0].gold, str(int(examples[0].gold) + 1)
    texts = [f" 1 + 1 = {wrong}. The answer is {right}.", f"The answer is {right}. The answer is {wrong}.", right]
    graded = TASKS["sums"].grade_all([examples[0]] * 3, texts)
    assert [one.correct for one in graded] == [True, False, False]
    assert graded[1].reason == f"{wrong} is not {right}" and graded[2].reason.startswith("no 'The answer is'")
    Manifest({"corpus": {"generator": 0}}, 8, 0, 0, "", {}).write(data)
    with pytest.raises(FredaError, match="was made by version 0 of the generator, this is 1"):
        TASKS["sums"].examples(data)
    Manifest({"source.web": {}}, 8, 0, 0, "", {}).write(data)
    with pytest.raises(FredaError, match="name shards that do with --data"):
        TASKS["sums"].examples(data)
    for name in ("sums", "mini_math", "mini_code", "mini_logic"):
        with pytest.raises(FredaError, match=r"nowhere .*--data"):
            TASKS[name].examples(Path("nowhere"))


def test_other_questions_than_the_published_are_refused(data: Path) -> None:
    task = dataclasses.replace(TASKS["gsm8k"], checksum=checksum(TASKS["gsm8k"].examples(data))[:16])
    assert len(task.examples(data)) == 2 and len(task.examples(data, 1)) == 1
    assert self_check(task, data).published
    changed = [QUESTIONS[0] | {"answer": "#### 8"}, QUESTIONS[1]]
    (data / "gsm8k" / "test.jsonl").write_text("\n".join(map(json.dumps, changed)))
    with pytest.raises(FredaError, match=r"questions of gsm8k are not the published ones .* --unpublished"):
        task.examples(data, 1)
    assert task.examples(data, 1, unpublished=True)[0].gold == "8"
    assert self_check(task, data).published is False and self_check(TASKS["mmlu"], data).published is None


def test_files_that_are_not_the_benchmark_are_refused(data: Path) -> None:
    path = data / "gsm8k" / "test.jsonl"
    for content, message in (
        (json.dumps(QUESTIONS[0]), "has 1 rows, the benchmark 2; get the whole file"),
        ('{"question": "x"}\n', "test.jsonl:1 has no field answer; it has question"),
        ("{broken", "test.jsonl:1 is not JSON"),
    ):
        path.write_text(content)
        with pytest.raises(FredaError, match=message):
            TASKS["gsm8k"].examples(data)
    path.unlink()
    with pytest.raises(FredaError, match=r"there is no .*test.jsonl; .*--download.*--data"):
        TASKS["gsm8k"].examples(data)
    (data / "mmlu" / "test" / "boats_test.csv").write_text("only,three,columns\n")
    with pytest.raises(FredaError, match="question 1 is not a question, four options and a letter"):
        TASKS["mmlu"].examples(data)
    (data / "mmlu" / "test" / "boats_test.csv").unlink()
    with pytest.raises(FredaError, match="has 2 rows, the benchmark 4"):
        TASKS["mmlu"].examples(data)
    with gzip.open(data / "cut.jsonl.gz", "wb") as file:
        file.write(json.dumps(QUESTIONS[0]).encode() * 500)
    whole = (data / "cut.jsonl.gz").read_bytes()
    (data / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FredaError, match="cut short or damaged"):
        json_rows(data / "cut.jsonl.gz", ())


# -- a model on a benchmark ------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path, data: Path) -> LoadedModel:
    """A tiny random model whose tokenizer knows the answer letters."""
    texts = ["Answer: A", "Answer: B", "Answer: C", "Answer: D"] * 50 + [
        e.prompt for e in TASKS["gsm8k"].examples(data)
    ]
    return answering_model(texts, 330, seed=3)


SHORT = EvalSettings(max_new_tokens=12, passes=2, threshold=0.3)


def answers(folder: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()[1:]]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.mark.parametrize("name", ["gsm8k", "mmlu"])
def test_the_score_does_not_depend_on_the_batch_size(name: str, data: Path, model: LoadedModel, tmp_path: Path) -> None:
    task = TASKS[name]
    examples = task.examples(data)
    one, many = (
        evaluate(Model(model, EngineConfig(max_batch=size)), task, examples, tmp_path / str(size), settings=SHORT)
        for size in (1, 3)
    )
    timeless = [{key: value for key, value in found.items() if key != "seconds"} for found in (one, many)]
    assert timeless[0] == timeless[1]
    for first, second in zip(answers(tmp_path / "1"), answers(tmp_path / "3"), strict=True):
        scores = [line.pop("log_probs", [0.0]) for line in (first, second)]
        assert first == second and scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert one["also"] == ({"flexible": 0.0} if name == "gsm8k" else {})
    assert {part: found["n"] for part, found in one["groups"].items()} == (
        {"boats": 2, "old_ships": 2} if name == "mmlu" else {}
    )
    assert answers(tmp_path / "1")[0]["prompt"] == examples[0].prompt
    assert one["n"] == len(examples) and one["nfe"] > 0 and len(one["prompts"]) == min(3, len(examples))
    assert json.loads((tmp_path / "1" / "results.json").read_text()) == one


def test_an_evaluation_goes_on_where_it_was(data: Path, model: LoadedModel, tmp_path: Path) -> None:
    examples = TASKS["mmlu"].examples(data)
    task, engine = TASKS["mmlu"], Model(model, EngineConfig(max_batch=2))
    whole = evaluate(engine, task, examples, tmp_path / "whole", settings=SHORT)
    evaluate(engine, task, examples, tmp_path / "cut", settings=SHORT)
    path = tmp_path / "cut" / "samples.jsonl"
    lines = path.read_text().splitlines()
    older = json.dumps({**json.loads(lines[2]), "drafts": 0})  # a field that earlier versions wrote
    path.write_text("\n".join([*lines[:2], older]) + "\n" + lines[3][:20])  # killed while it wrote the third answer
    told: list[int] = []
    again = evaluate(
        engine, task, examples, tmp_path / "cut", settings=SHORT, progress=lambda done, total, _: told.append(done)
    )
    assert told == [2, 3, 4] and len(answers(tmp_path / "cut")) == 4
    assert (again["correct"], again["checksum"]) == (whole["correct"], whole["checksum"])
    with pytest.raises(FredaError, match=r"holds another evaluation: n 4 \(now 3\); choose"):
        evaluate(engine, task, examples[:3], tmp_path / "cut", settings=SHORT)


def test_stop_strings_end_an_answer(data: Path, model: LoadedModel, tmp_path: Path) -> None:
    examples = TASKS["gsm8k"].examples(data)
    free = evaluate(Model(model), TASKS["gsm8k"], examples, tmp_path / "free", settings=SHORT)
    first = str(answers(tmp_path / "free")[0]["output"])
    task = dataclasses.replace(TASKS["gsm8k"], stops=(first[2:4],))
    evaluate(Model(model), task, examples[:1], tmp_path / "cut", settings=SHORT)
    cut = answers(tmp_path / "cut")[0]
    assert cut["output"] == first[: first.find(first[2:4])] and cut["finish"] == "stop"
    assert int(cut["tokens"]) < 12 and free["finish"]["length"] >= 1  # type: ignore[call-overload]


def test_answers_that_are_no_token_cannot_be_chosen(data: Path, model: LoadedModel, tmp_path: Path) -> None:
    other = train_tokenizer(["nothing"], 270)
    with pytest.raises(FredaError, match="the answer ' A' is not one token for this model's tokenizer"):
        task = TASKS["mmlu"]
        evaluate(Model(model._replace(tokenizer=other)), task, task.examples(data), tmp_path / "out", settings=SHORT)


def test_the_command(
    data: Path,
    model: LoadedModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_this_process(monkeypatch)
    save_model(tmp_path / "model", model)
    place = ["--data", str(data), "--task", "mmlu"]
    assert run(["eval", str(tmp_path / "model"), *place, "--out", str(tmp_path / "out"), "--limit", "3"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("mmlu: ") and "of 3), 1.00 tokens per forward" in shown.out
    assert "3 of 3" in shown.err and (tmp_path / "out" / "mmlu" / "results.json").is_file()
    assert run(["eval", "--self-check", "--data", str(data), "--task", "gsm8k"]) == 0
    assert "gsm8k            ok     references 2/2, wrong answers 0" in capsys.readouterr().out
    (data / "gpqa" / "gpqa_diamond.csv").unlink()
    assert run(["eval", "--self-check", "--data", str(data)]) == 0
    shown = capsys.readouterr()
    assert "math500          ok" in shown.out and "gpqa_diamond     not checked: there is no" in shown.out
    assert run(["eval", "--self-check", "--data", str(data), "--task", "gpqa_diamond"]) == 2
    assert "--download" in capsys.readouterr().err
    for arguments, message in (
        (["eval"], "name a model and a --task, or check the graders with --self-check"),
        (
            ["eval", str(tmp_path / "model"), "--task", "gsm9k"],
            "there is no task 'gsm9k'; use one of mmlu, gpqa",
        ),
        (["eval", str(tmp_path / "model"), *place, "--limit", "-1"], "limit is -1; use 0 (all) or more"),
        (["eval", str(tmp_path / "nowhere"), *place], "there is no model"),
    ):
        assert run(arguments) == 2
        assert message in capsys.readouterr().err
