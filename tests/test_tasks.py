"""Benchmarks: their prompts, and graders that call right answers right and wrong ones wrong."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest

from freda.errors import FredaError
from freda.eval.tasks import gsm8k, mmlu
from freda.eval.tasks.task import Example, checksum, json_rows

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
    monkeypatch.setattr(gsm8k, "ROWS", 2)
    monkeypatch.setattr(mmlu, "ROWS", 4)
    monkeypatch.setattr(mmlu, "SUBJECTS", 2)
    return tmp_path


def test_gsm8k_prompts_and_references(data: Path) -> None:
    examples = gsm8k.load(data)
    assert [example.gold for example in examples] == ["7", "1200"]
    assert examples[0].prompt.count("Q: ") == 5 and examples[0].prompt.endswith(
        "Q: Ben has 3 boats and buys 4. How many?\nA:"
    )
    assert "What is 3 + 1?" in examples[0].prompt and "What is 4 + 1?" not in examples[0].prompt
    for example in examples:
        text = gsm8k.reference(example)
        assert "<<" not in text
        assert gsm8k.grade(example, text).correct and gsm8k.grade_flexible(example, text).correct
        assert not gsm8k.grade(example, " The answer is 12345.").correct


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
    assert (gsm8k.grade(example, text).correct, gsm8k.grade_flexible(example, text).correct) == (strict, flexible)
    assert strict or gsm8k.grade(example, text).reason != "right"


def test_numbers_are_compared_exactly() -> None:
    assert gsm8k.same_number("1,200", "1200.0") and gsm8k.same_number("0.50", ".5")
    assert not gsm8k.same_number("9007199254740993", "9007199254740992"), "equal as floats"
    assert not gsm8k.same_number("1.2.3", "1")


def test_mmlu_prompts_and_letters(data: Path) -> None:
    examples = mmlu.load(data)
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
    assert all(mmlu.grade(example, mmlu.reference(example)).correct for example in examples)
    assert not mmlu.grade(examples[0], " D").correct
    assert {mmlu.reference(example) for example in examples} <= set(mmlu.CHOICES)


def test_what_is_asked_has_a_checksum(data: Path) -> None:
    first = checksum(gsm8k.load(data))
    assert first == checksum(gsm8k.load(data)) != checksum(mmlu.load(data))
    changed = [QUESTIONS[0] | {"answer": "#### 8"}, QUESTIONS[1]]
    (data / "gsm8k" / "test.jsonl").write_text("\n".join(map(json.dumps, changed)))
    assert checksum(gsm8k.load(data)) != first


def test_files_that_are_not_the_benchmark_are_refused(data: Path) -> None:
    path = data / "gsm8k" / "test.jsonl"
    for content, message in (
        (json.dumps(QUESTIONS[0]), "has 1 rows, the benchmark 2; get the whole file"),
        ('{"question": "x"}\n', "test.jsonl:1 has no field answer; it has question"),
        ("{broken", "test.jsonl:1 is not JSON"),
    ):
        path.write_text(content)
        with pytest.raises(FredaError, match=message):
            gsm8k.load(data)
    path.unlink()
    with pytest.raises(FredaError, match=r"there is no .*test.jsonl; name the folder of the benchmarks with --data"):
        gsm8k.load(data)
    (data / "mmlu" / "test" / "boats_test.csv").write_text("only,three,columns\n")
    with pytest.raises(FredaError, match="question 1 is not a question, four options and a letter"):
        mmlu.load(data)
    (data / "mmlu" / "test" / "boats_test.csv").unlink()
    with pytest.raises(FredaError, match="has 1 subjects, MMLU 2"):
        mmlu.load(data)
    with gzip.open(data / "cut.jsonl.gz", "wb") as file:
        file.write(json.dumps(QUESTIONS[0]).encode() * 500)
    whole = (data / "cut.jsonl.gz").read_bytes()
    (data / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FredaError, match="cut short or damaged"):
        json_rows(data / "cut.jsonl.gz", ())
