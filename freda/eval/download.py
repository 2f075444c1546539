"""The benchmarks' files from the Hugging Face Hub, written in the layout that the tasks read.

Existing files stay as they are. The tasks check the number of rows and the checksum of all questions afterwards, so a
dataset that has changed on the Hub cannot pass for the benchmark. The exemplars of GSM8K and MATH-500 are not on the
Hub; the package lm_eval has them.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from freda.errors import FredaError, missing_package
from freda.eval.tasks.task import Task

Row = Mapping[str, Any]


def download(task: Task, folder: Path) -> list[Path]:
    """Write the files of a task that are not in `folder` yet; returns them."""
    if task.name not in FETCH:
        raise FredaError(f"{task.name} {ELSEWHERE.get(task.name, 'needs no download')}; omit --download")
    made: list[Path] = []
    for name, write in FETCH[task.name].items():
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as beside:  # so that half a file never has its name
                write(Path(beside) / path.name)
                os.replace(Path(beside) / path.name, path)
            made.append(path)
    return made


def hub_rows(dataset: str, config: str | None, split: str) -> list[Row]:
    """All rows of a split."""
    try:
        import datasets
    except ImportError:
        raise missing_package("datasets", "data") from None
    try:
        return list(datasets.load_dataset(dataset, config, split=split))
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise FredaError(
            f"cannot get {dataset} from the Hugging Face Hub ({str(error)[:200]}); check the network and, "
            f"for a dataset behind an agreement, log in with: huggingface-cli login"
        ) from None


def _json_lines(dataset: str, config: str | None, splits: Sequence[str]) -> Callable[[Path], None]:
    """A function that writes the rows of all splits; of several (MBPP) in the order of their numbers."""

    def write(path: Path) -> None:
        rows = [row for split in splits for row in hub_rows(dataset, config, split)]
        if len(splits) > 1:
            rows.sort(key=lambda row: row["task_id"])
        text = "".join(json.dumps(dict(row)) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text, mtime=0) if dataset.endswith("humaneval") else text)

    return write


def _mmlu_tables(split: str) -> Callable[[Path], None]:
    """A function that writes a CSV file for each subject, as in the authors' archive."""

    def write(folder: Path) -> None:
        folder.mkdir()
        subjects: dict[str, list[list[str]]] = {}
        for row in hub_rows("cais/mmlu", "all", split):
            line = [row["question"], *row["choices"], "ABCD"[row["answer"]]]
            subjects.setdefault(row["subject"], []).append(line)
        for subject, lines in subjects.items():
            with open(folder / f"{subject}_{split}.csv", "w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows(lines)

    return write


def _gpqa_table(path: Path) -> None:
    rows = hub_rows("Idavidrein/gpqa", "gpqa_diamond", "train")
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def _gsm8k_exemplars(path: Path) -> None:
    import yaml

    plain: Any = type("Plain", (yaml.SafeLoader,), {})
    plain.add_multi_constructor("!", lambda loader, suffix, node: None)  # the tags of lm_eval name functions
    source = _harness_folder() / "tasks" / "gsm8k" / "gsm8k-cot.yaml"
    samples = yaml.load(source.read_text(encoding="utf-8"), Loader=plain)["fewshot_config"]["samples"]
    path.write_text(json.dumps({"samples": samples}, indent=1), encoding="utf-8")


def _minerva_exemplars(path: Path) -> None:
    _harness_folder()
    samples = importlib.import_module("lm_eval.tasks.minerva_math.utils").list_fewshot_samples()
    path.write_text(json.dumps({"samples": samples}, indent=1), encoding="utf-8")


def _harness_folder() -> Path:
    found = importlib.util.find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        raise missing_package("lm_eval", "harness")
    return Path(found.submodule_search_locations[0])


FETCH: dict[str, dict[str, Callable[[Path], None]]] = {
    "gsm8k": {
        "gsm8k/test.jsonl": _json_lines("openai/gsm8k", "main", ("test",)),
        "fewshot/gsm8k_cot_8shot.json": _gsm8k_exemplars,
    },
    "math500": {
        "math500/test.jsonl": _json_lines("HuggingFaceH4/MATH-500", None, ("test",)),
        "fewshot/minerva_math_4shot.json": _minerva_exemplars,
    },
    "mmlu": {"mmlu/dev": _mmlu_tables("dev"), "mmlu/test": _mmlu_tables("test")},
    "gpqa_diamond": {"gpqa/gpqa_diamond.csv": _gpqa_table},
    "humaneval": {"humaneval/HumanEval.jsonl.gz": _json_lines("openai/openai_humaneval", None, ("test",))},
    "mbpp": {
        "mbpp/mbpp.jsonl": _json_lines(
            "google-research-datasets/mbpp", "full", ("prompt", "test", "validation", "train")
        )
    },
}
ELSEWHERE = {
    "humaneval_plus": "is on the Hub only with test code, which has a defect: put HumanEvalPlus.jsonl.gz, v0.1.10 "
    "of the project evalplus, into the folder humanevalplus",
}
