"""The benchmarks' files from the Hugging Face Hub, written in the layout that the tasks read.

Existing files stay as they are. The tasks check the number of rows and the checksum of all questions afterwards, so a
dataset that has changed cannot pass for the benchmark. The exemplars of GSM8K and MATH-500 are in the package lm_eval.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import importlib.util
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from freda.errors import FredaError, missing_package
from freda.eval.tasks.task import Task

Row = Mapping[str, Any]
ELSEWHERE = {
    "humaneval_plus": "is on the Hub only with test code, which has a defect: put HumanEvalPlus.jsonl.gz, v0.1.10 "
    "of the project evalplus, into the folder humanevalplus"
}


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
        hint = "check the network and, for a dataset behind an agreement, log in with: huggingface-cli login"
        raise FredaError(f"cannot get {dataset} from the Hugging Face Hub ({str(error)[:200]}); {hint}") from None


def _write_lines(dataset: str, config: str | None, splits: Sequence[str], path: Path) -> None:
    """Write the rows of all splits; those of several (MBPP) in the order of their numbers."""
    rows = [row for split in splits for row in hub_rows(dataset, config, split)]
    if len(splits) > 1:
        rows.sort(key=lambda row: row["task_id"])
    text = "".join(json.dumps(dict(row)) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def _write_mmlu(split: str, folder: Path) -> None:
    """Write a CSV file for each subject, as in the authors' archive."""
    folder.mkdir()
    rows = sorted(hub_rows("cais/mmlu", "all", split), key=lambda row: str(row["subject"]))  # stable within a subject
    for subject, own in itertools.groupby(rows, key=lambda row: row["subject"]):
        with open(folder / f"{subject}_{split}.csv", "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([row["question"], *row["choices"], "ABCD"[row["answer"]]] for row in own)


def _write_gpqa(path: Path) -> None:
    rows = hub_rows("Idavidrein/gpqa", "gpqa_diamond", "train")
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def _write_gsm8k_exemplars(path: Path) -> None:
    import yaml

    plain: Any = type("Plain", (yaml.SafeLoader,), {})
    plain.add_multi_constructor("!", lambda loader, suffix, node: None)  # the tags of lm_eval name functions
    source = Path(_harness_folders()[0], "tasks", "gsm8k", "gsm8k-cot.yaml")
    samples = yaml.load(source.read_text(encoding="utf-8"), Loader=plain)["fewshot_config"]["samples"]
    path.write_text(json.dumps({"samples": samples}, indent=1), encoding="utf-8")


def _write_minerva_exemplars(path: Path) -> None:
    _harness_folders()
    samples = importlib.import_module("lm_eval.tasks.minerva_math.utils").list_fewshot_samples()
    path.write_text(json.dumps({"samples": samples}, indent=1), encoding="utf-8")


def _harness_folders() -> list[str]:
    found = importlib.util.find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        raise missing_package("lm_eval", "harness")
    return found.submodule_search_locations


MBPP_SPLITS = ("prompt", "test", "validation", "train")
FETCH: dict[str, dict[str, Callable[[Path], None]]] = {
    "gsm8k": {
        "gsm8k/test.jsonl": partial(_write_lines, "openai/gsm8k", "main", ("test",)),
        "fewshot/gsm8k_cot_8shot.json": _write_gsm8k_exemplars,
    },
    "math500": {
        "math500/test.jsonl": partial(_write_lines, "HuggingFaceH4/MATH-500", None, ("test",)),
        "fewshot/minerva_math_4shot.json": _write_minerva_exemplars,
    },
    "mmlu": {"mmlu/dev": partial(_write_mmlu, "dev"), "mmlu/test": partial(_write_mmlu, "test")},
    "gpqa_diamond": {"gpqa/gpqa_diamond.csv": _write_gpqa},
    "humaneval": {"humaneval/HumanEval.jsonl.gz": partial(_write_lines, "openai/openai_humaneval", None, ("test",))},
    "mbpp": {"mbpp/mbpp.jsonl": partial(_write_lines, "google-research-datasets/mbpp", "full", MBPP_SPLITS)},
}
