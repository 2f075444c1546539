"""Files in the layout of the benchmarks, with questions that are hard to copy."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freda.data.config import CorpusConfig, MiniConfig
from freda.data.mini import GENERATORS
from freda.data.shards import Manifest
from freda.eval.tasks import TASKS
from freda.eval.tasks.multiple_choice import GPQA_COLUMNS

ODD = " {{7 * 7}} {% raw %} 'a' \"b\" <c> & naïve — π\t"  # nothing of it may be taken for a template, or changed


def resize(patch: pytest.MonkeyPatch, **rows: int) -> None:
    """Let tasks expect files of these many rows, which are not the published ones."""
    for name, count in rows.items():
        patch.setitem(TASKS, name, dataclasses.replace(TASKS[name], rows=count, checksum=""))


def in_this_process(patch: pytest.MonkeyPatch) -> None:
    """Let math-verify compare here: what its processes do is tested with graders that hang and die."""
    for module in ("freda.eval.tasks.mathematics", "tests.harness_tasks"):
        patch.setattr(f"{module}.in_workers", lambda check, pairs: [check(*pair) for pair in pairs])


@contextlib.contextmanager
def written(folder: Path) -> Iterator[None]:
    """All of them in `folder`; inside, the tasks expect these and not the published ones."""
    counts = {"gsm8k": 16, "math500": 6, "humaneval": 3, "humaneval_plus": 3, "mbpp": 7, "gpqa_diamond": 12}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)  # runs programs for a second
        in_this_process(patch)
        resize(patch, **counts, mmlu=5, sums=16, mini_math=16, mini_code=3, mini_logic=5)
        write_texts(folder)
        write_programs(folder)
        write_choices(folder)
        corpus = {"generator": 1, **dataclasses.asdict(CorpusConfig(steps=2, max_number=60))}
        mini = {"generator": GENERATORS["mini_math"].version, **dataclasses.asdict(MiniConfig())}
        Manifest({"corpus": corpus, "mini": mini}, 8, 0, 0, "", {}).write(folder)
        yield


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def write_texts(folder: Path) -> None:
    sums = [
        {"question": f"{n}{ODD} and {n}?", "answer": f"It is <<{n}+{n}={2 * n}>>.\n#### 1,{n:03}"} for n in range(16)
    ]
    write_lines(folder / "gsm8k" / "test.jsonl", sums)
    answers = [r"\frac{1}{2}", r"\$32,\!348", r"(-\infty, 3]", r"\{1, 2\}", "[2, 5]", "7"]
    maths = [{"problem": f"{a}{ODD}", "solution": f"So $\\boxed{{{a}}}$.", "answer": a} for a in answers]
    write_lines(folder / "math500" / "test.jsonl", maths)
    shots = [{"question": f"What is {n}{ODD}?", "target": f"{n}. The answer is {n}."} for n in range(8)]
    solved = [
        {"problem": f"{n}?{ODD}", "solution": f"[{n}] The final answer is ${n}$. I hope it is correct."}
        for n in range(6)
    ]
    for name, samples in (("gsm8k_cot_8shot", shots), ("minerva_math_4shot", solved)):
        (folder / "fewshot").mkdir(exist_ok=True)
        (folder / "fewshot" / f"{name}.json").write_text(json.dumps({"samples": samples}))


def write_programs(folder: Path) -> None:
    functions = [
        {
            "task_id": f"Own/{n}",
            "prompt": f'def add(x):\n    """{n}{ODD}"""\n',
            "canonical_solution": f"    return x + {n}\n",
            "entry_point": "add",
            "test": f"def check(candidate):\n    assert candidate(3) == {n + 3}\n",
        }
        for n in range(3)
    ]
    inputs = {"base_input": [[3]], "plus_input": [[0], [-2.5], [10**30]], "atol": 0}
    write_lines(folder / "humaneval" / "HumanEval.jsonl.gz", functions)
    write_lines(folder / "humanevalplus" / "HumanEvalPlus.jsonl.gz", [{**row, **inputs} for row in functions])
    programs = [
        {
            "task_id": n,
            "text": f"Write a function to add {n}.{ODD}",
            "code": f"def add(x):\r\n    return x + {n}",
            "test_list": [f"assert add(1) + extra == {n + 2}"] * (1 + n % 4),
            "test_setup_code": "extra = 1",
        }
        for n in (2, 3, 4, 10, 11, 12, 511)
    ]
    write_lines(folder / "mbpp" / "mbpp.jsonl", programs)


def write_choices(folder: Path) -> None:
    for name, sizes in (("dev", (6, 7)), ("test", (3, 2))):
        (folder / "mmlu" / name).mkdir(parents=True)
        for subject, size in zip(("boats", "old_ships"), sizes, strict=True):
            with open(folder / "mmlu" / name / f"{subject}_{name}.csv", "w", newline="", encoding="utf-8") as file:
                options = ("NA", "0.50", " two\nlines ", ODD)  # as they are, not as a table reader understands them
                rows = [[f" {n}{ODD}", *options, "ABCD"[n % 4]] for n in range(size)]
                csv.writer(file).writerows(rows)
    (folder / "gpqa").mkdir()
    with open(folder / "gpqa" / "gpqa_diamond.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["Id", *GPQA_COLUMNS])
        table.writerows([[n, f"{n}{ODD}", f"right {n} ", "NA", f"{ODD}b", "1e3"] for n in range(12)])
