"""`freda eval`: tasks by name, a folder of results for each, asked by freda or by lm_eval; `--self-check`.

The self-check grades the published answers, which must all be right, a constant wrong answer, which never may be, and
random choices, which must be right as often as guessing is.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from freda.data.mini import GENERATORS
from freda.data.shards import Manifest
from freda.decode.api import Model, open_model
from freda.decode.config import EngineConfig
from freda.errors import FredaError, note, require
from freda.eval.config import EvalSettings
from freda.eval.download import FETCH, download
from freda.eval.evaluate import evaluate, result_line
from freda.eval.tasks import TASKS, tasks_named
from freda.eval.tasks.task import Task, checksum
from freda.folders.adapter_folder import resolve_adapter_folder
from freda.folders.model_folder import packaged_folder, resolve_model_folder

EVALS = Path("runs/eval")  # results of bundled models
EVERY = 10.0  # seconds between two lines of progress in a log
PUBLISHED = {True: " as published", False: ", not the published questions", None: ""}
WRONG = " Nobody knows."  # an answer to no question


@dataclass(frozen=True, kw_only=True)
class EvalJob:
    """One call of `freda eval MODEL`."""

    model: Path
    adapter: Path | None
    tasks: Sequence[str]
    data: Path
    out: Path | None
    settings: EvalSettings
    limit: int
    unpublished: bool
    isolated: bool
    batch_size: int
    device: str
    dtype: str

    def __post_init__(self) -> None:
        require(self.limit >= 0, f"limit is {self.limit}; use 0 (all) or more")
        require(self.batch_size >= 1, f"batch_size is {self.batch_size}; use 1 or more")

    def place(self, task: str) -> Path:
        """The folder of a task's results: inside the model's or the adapter's; of a bundled model elsewhere, one for
        each `limit`."""
        if self.out is not None:
            return self.out / task
        if self.adapter is not None:
            return resolve_adapter_folder(self.adapter) / "eval" / task
        if packaged_folder(self.model) is None:
            return resolve_model_folder(self.model) / "eval" / task
        return EVALS / (f"{self.model}-{self.limit}" if self.limit else str(self.model)) / task

    def load(self) -> Model:
        """The model, once the questions have been found."""
        method = self.settings.method or None
        loaded = open_model(self.model, self.device, self.dtype, method, self.adapter)
        return Model(loaded, EngineConfig(max_batch=self.batch_size), name=str(self.model))


def own_questions(model: Path | None, tasks: list[str], data: Path | None) -> tuple[list[str], Path]:
    """The tasks and the folder of their files. A bundled model brings the tasks that it was trained for: in its folder
    `data` is the manifest that their questions are made from."""
    folder = None if model is None else packaged_folder(model)
    brought: list[str] = []
    if folder is not None and (folder / "data").is_dir():
        made = Manifest.read(folder / "data").source
        brought = [kind for kind, generator in GENERATORS.items() if kind in TASKS and generator.section in made]
    if model is not None and not tasks and not brought:
        resolve_model_folder(model)  # a wrong name is reported first
        raise FredaError("name a --task; only a bundled model that brings its questions needs none")
    if folder is None or not set(tasks) <= set(brought):
        return tasks, data or Path("benchmarks")
    return tasks or brought, data or folder / "data"


def evaluate_tasks(job: EvalJob) -> None:
    """Evaluate the model on every task; a line on stdout for each. Tasks of nothing but errors are an error."""
    tasks = tasks_named(job.tasks, isolated=job.isolated)
    questions = [task.examples(job.data, job.limit, unpublished=job.unpublished) for task in tasks]
    model, failed = job.load(), list[str]()
    for task, examples in zip(tasks, questions, strict=True):
        place = job.place(task.name)
        try:
            found = evaluate(model, task, examples, place, settings=job.settings, progress=progress(task.name))
        except KeyboardInterrupt:
            note(f"interrupted; the answers so far are in {place}, and the same command resumes there")
            raise
        print(f"{result_line(found)}; {place}", flush=True)
        if found["errors"] == found["n"]:
            failed.append(f"{task.name}: none of {found['n']} questions could be answered ({found['first_error']})")
    require(not failed, "; ".join(failed))


def ask_by_harness(job: EvalJob) -> None:
    """Let lm-evaluation-harness ask tasks of its own; a line on stdout for each."""
    from freda.eval.harness import check_installed, harness_line, make_lm, run_task

    check_installed()
    model = job.load()
    for name in job.tasks:
        lm, place = make_lm(model, job.settings, progress(f"{name} by lm_eval")), job.place(name)
        print(f"{harness_line(run_task(lm, name, place, job.limit))}; {place}", flush=True)


def progress(name: str) -> Callable[..., None]:
    """Report how many answers there are: a line that is rewritten on a terminal, a line now and then elsewhere."""
    stream = sys.stderr  # bound now: lm_eval runs with another one
    terminal, shown = stream.isatty(), -EVERY

    def show(done: int, total: int, accuracy: float | None = None) -> None:
        nonlocal shown
        last, now = done == total, time.monotonic()
        if last or terminal or now - shown >= EVERY:
            right = "" if accuracy is None else f", {100 * accuracy:.1f}% right so far"
            end = "\r" if terminal and not last else "\n"
            print(f"{name}: {done:,} of {total:,}{right}", end=end, file=stream, flush=True)
            shown = now

    return show


def download_tasks(names: Sequence[str], data: Path) -> None:
    """Download the files of the named tasks, or of all on the Hub, that are not in `data`; their paths on stdout."""
    for name in [task.name for task in tasks_named(names)] if names else FETCH:
        for path in download(TASKS[name], data):
            print(path)


class Checked(NamedTuple):
    """The grader of one task on n references and on as many wrong answers."""

    n: int
    references: int  # graded as right
    wrong: int  # wrong answers graded as right
    guessed: float | None  # accuracy of random choices; None where the answer is generated
    checksum: str
    published: bool | None  # whether the questions are the published ones; None where that is not known
    seconds: float
    failures: list[str]  # ids and reasons of the first references that are not right

    @property
    def passed(self) -> bool:
        """Whether the grader can be trusted. Guesses may be off by four standard errors."""
        even = self.guessed is None or abs(self.guessed - 0.25) < 4 * (0.25 * 0.75 / self.n) ** 0.5
        return self.references == self.n and self.wrong == 0 and even


def check_graders(names: Sequence[str], data: Path, *, isolated: bool = True) -> bool:
    """Check the graders of the named tasks, or of all whose files are there, a line for each; True if all are right."""
    checked = []
    for task in tasks_named(names, isolated=isolated):
        try:
            checked.append(found := self_check(task, data))
        except FredaError as error:
            if names:
                raise
            print(f"{task.name:<16} not checked: {error}")
            continue
        verdict, right = "ok" if found.passed else "WRONG", f"references {found.references:,}/{found.n:,}"
        guess = "" if found.guessed is None else f", a random guess {100 * found.guessed:.1f}%"
        made = f"{found.seconds:.1f} s, checksum {found.checksum[:8]}{PUBLISHED[found.published]}"
        print(f"{task.name:<16} {verdict:<6} {right}, wrong answers {found.wrong}{guess}; {made}")
        print("".join(f"    {failure}\n" for failure in found.failures), end="")
    require(bool(checked), f"{data} holds the files of no task; get them with --download, or name their folder: --data")
    return all(found.passed for found in checked)


def self_check(task: Task, folder: Path) -> Checked:
    """Grade the references, a constant wrong answer and, where there are choices, random ones."""
    task.check_ready()
    begun, examples = time.perf_counter(), task.load(folder, task.rows)
    found, generator = checksum(examples), random.Random(0)

    def right(texts: Iterable[str]) -> int:
        return sum(one.correct for one in task.grade_all(examples, list(texts)))

    graded = task.grade_all(examples, [task.reference(example) for example in examples])
    return Checked(
        n=len(examples),
        references=sum(one.correct for one in graded),
        wrong=right(WRONG for _ in examples),
        guessed=right(generator.choice(task.choices) for _ in examples) / len(examples) if task.choices else None,
        checksum=found,
        published=found.startswith(task.checksum) if task.checksum else None,
        seconds=time.perf_counter() - begun,
        failures=[f"{e.id}: {g.reason}" for e, g in zip(examples, graded, strict=True) if not g.correct][:5],
    )
