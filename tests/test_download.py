"""Benchmark files from the Hub, here a stand-in for it, in the layout that the tasks read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from freda.cli import run
from freda.errors import FredaError
from freda.eval import download as downloads
from freda.eval.download import FETCH, download
from freda.eval.tasks import TASKS
from freda.eval.tasks.multiple_choice import GPQA_COLUMNS
from tests.benchmarks import resize

CODE = {
    "prompt": "def f():\n",
    "canonical_solution": "    return 1\n",
    "test": "def check(f): pass",
    "entry_point": "f",
}
HUB: dict[tuple[str, str | None, str], list[dict[str, Any]]] = {
    ("openai/gsm8k", "main", "test"): [{"question": "One and one?", "answer": "1 + 1 = 2\n#### 2"}] * 2,
    ("HuggingFaceH4/MATH-500", None, "test"): [{"problem": "1?", "solution": "1", "answer": "1"}] * 3,
    ("openai/openai_humaneval", None, "test"): [{"task_id": "HumanEval/0", **CODE}],
    ("Idavidrein/gpqa", "gpqa_diamond", "train"): [{c: f"{c}, {n}\n" for c in GPQA_COLUMNS} for n in range(7)],
    **{
        ("cais/mmlu", "all", split): [
            {"question": f"{subject}?", "choices": ["a", "b, c", "d", "e"], "answer": n % 4, "subject": subject}
            for subject in ("boats", "ships")
            for n in range(5)
        ]
        for split in ("dev", "test")
    },
    **{
        ("google-research-datasets/mbpp", "full", split): [
            {"task_id": n, "text": "t", "code": "c", "test_list": ["assert 1"], "test_setup_code": ""} for n in numbers
        ]
        for split, numbers in (("test", [11, 12]), ("prompt", [2, 3, 4]), ("train", [900]), ("validation", [550]))
    },
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the datasets that were asked for."""
    asked: list[str] = []

    def rows(dataset: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append(dataset)
        return HUB[dataset, config, split]

    def exemplars(path: Path) -> None:
        shot = {"question": "q", "target": "The answer is 1.", "problem": "p", "solution": "s"}
        path.write_text(json.dumps({"samples": [shot] * 8}))

    monkeypatch.setattr(downloads, "hub_rows", rows)
    for name, file in (("gsm8k", "gsm8k_cot_8shot"), ("math500", "minerva_math_4shot")):
        monkeypatch.setitem(FETCH[name], f"fewshot/{file}.json", exemplars)
    resize(monkeypatch, gsm8k=2, humaneval=1, mbpp=7, gpqa_diamond=7, mmlu=10, math500=3)
    return asked


@pytest.mark.parametrize("name", FETCH)
def test_what_is_downloaded_can_be_read(name: str, hub: list[str], tmp_path: Path) -> None:
    made = download(TASKS[name], tmp_path)
    assert made and all(path.exists() for path in made)
    examples = TASKS[name].examples(tmp_path)
    expected = {"gsm8k": 2, "math500": 3, "humaneval": 1, "gpqa_diamond": 2, "mmlu": 10, "mbpp": 2}
    assert len(examples) == expected[name]
    assert not [path for path in tmp_path.rglob("tmp*")], "nothing half written is left"
    asked = len(hub)
    assert download(TASKS[name], tmp_path) == [] and len(hub) == asked, "what is there stays"


def test_letters_and_commas_survive(hub: list[str], tmp_path: Path) -> None:
    download(TASKS["mmlu"], tmp_path)
    second = TASKS["mmlu"].examples(tmp_path)[1]
    assert second.gold == "B" and "B. b, c\n" in second.prompt


def test_a_broken_download_leaves_nothing(hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path) -> None:
        path.write_text("half")
        raise FredaError("the line is dead")

    monkeypatch.setitem(FETCH["humaneval"], "humaneval/HumanEval.jsonl.gz", fails)
    with pytest.raises(FredaError, match="the line is dead"):
        download(TASKS["humaneval"], tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_command_downloads(hub: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "--download", "--task", "gsm8k", "--data", str(tmp_path)]) == 0
    assert str(tmp_path / "gsm8k" / "test.jsonl") in capsys.readouterr().out
    assert run(["eval", "--download", "--task", "humaneval_plus", "--data", str(tmp_path)]) == 2
    assert "is on the Hub only with test code" in capsys.readouterr().err
    assert run(["eval", "--download", "--task", "sums", "--data", str(tmp_path)]) == 2
    assert "sums needs no download" in capsys.readouterr().err


def test_no_network_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def dead(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", dead)
    with pytest.raises(FredaError, match=r"cannot get openai/gsm8k from the Hugging Face Hub \(no route\)"):
        download(TASKS["gsm8k"], tmp_path)
