"""`freda eval`: tasks by name, one folder of results each, asked by us or by lm_eval; and the check of the graders."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from freda.data.generators import GENERATORS
from freda.data.shards import Manifest
from freda.decode.config import DecodeConfig
from freda.errors import FredaError, note, require
from freda.eval.config import SweepFile
from freda.eval.download import FETCH, download
from freda.eval.evaluate import evaluate
from freda.eval.report.compare import compare, compared_line
from freda.eval.report.figures import draw
from freda.eval.report.tables import TABLES, Sweep, as_csv, as_markdown
from freda.eval.selfcheck import self_check
from freda.eval.sweep import read_sweep, run_sweep
from freda.eval.tasks import TASKS, load_examples, tasks_named
from freda.eval.tasks.task import Example
from freda.folders.hugging_face import DTYPES
from freda.folders.model_folder import LoadedModel, load_model
from freda.folders.resolve import packaged_folder, resolve_model_folder
from freda.model.transformer import pick_device

EVALS = Path("runs/eval")  # of packaged models
PUBLISHED = {True: " as published", False: ", not the published questions", None: ""}


def check_graders(names: Sequence[str], data: Path) -> bool:
    """Run every task's grader on the published answers and print what it says; True if all can be trusted."""
    trusted, checked = True, 0
    for task in tasks_named(names):
        try:
            found = self_check(task, data)
        except FredaError as error:
            if names:
                raise
            print(f"{task.NAME:<16} not checked: {error}")
            continue
        guess = "" if found.guessed is None else f", a random guess {100 * found.guessed:.1f}%"
        verdict = "ok" if found.passed else "WRONG"
        print(
            f"{found.task:<16} {verdict:<6} references {found.references:,}/{found.n:,}, wrong answers {found.wrong}"
            f"{guess}; {found.seconds:.1f} s, checksum {found.checksum[:8]}{PUBLISHED[found.published]}"
        )
        for failure in found.failures:
            print(f"    {failure}")
        trusted, checked = trusted and found.passed, checked + 1
    require(checked > 0, f"{data} has the files of no task; name the folder of the benchmarks with --data")
    return trusted


def download_tasks(names: Sequence[str], data: Path) -> None:
    """Get the files of the named tasks, or of all that the Hub has, that are not in `data`; their paths on stdout."""
    for name in [task.NAME for task in tasks_named(names)] if names else FETCH:
        for path in download(TASKS[name], data):
            print(path)


def compare_folders(first: Path, second: Path) -> None:
    """The paired difference of two evaluations on stdout."""
    print(compared_line(compare(first, second)))


def own_questions(model: Path | None, tasks: list[str], data: Path | None) -> tuple[list[str], Path]:
    """The tasks and the folder of their files, as asked for. A packaged model brings those it was trained for: in its
    folder `data` is the manifest that they are made from."""
    folder = None if model is None else packaged_folder(model)
    brought: list[str] = []
    if folder is not None and (folder / "data").is_dir():
        made = Manifest.read(folder / "data").source
        brought = [kind for kind, generator in GENERATORS.items() if kind in TASKS and generator.section in made]
    if model is not None and not tasks and not brought:
        resolve_model_folder(model)  # a name that is wrong is told first
        raise FredaError("name a --task; only a packaged model that brings its questions needs none")
    if folder is None or not set(tasks) <= set(brought):
        return tasks, data or Path("benchmarks")
    return tasks or brought, data or folder / "data"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What `freda eval MODEL` was asked for."""

    model: Path
    tasks: Sequence[str]
    data: Path
    out: Path | None
    settings: DecodeConfig
    limit: int
    unpublished: bool
    batch_size: int
    device: str
    dtype: str

    def __post_init__(self) -> None:
        require(self.limit >= 0, f"limit is {self.limit}; use 0 (all) or more")
        require(self.dtype in DTYPES, f"there is no dtype {self.dtype!r}; use one of {', '.join(DTYPES)}")

    def place(self, task: str) -> Path:
        """The folder of a task's results: with the model, but not inside the package, where a first look (`limit`) has
        a folder of its own."""
        if self.out is not None:
            return self.out / task
        if packaged_folder(self.model) is None:
            return resolve_model_folder(self.model) / "eval" / task
        return EVALS / (f"{self.model}-{self.limit}" if self.limit else str(self.model)) / task

    def examples(self, task: str) -> list[Example]:
        """The questions of a task of ours."""
        return load_examples(TASKS[task], self.data, self.limit, unpublished=self.unpublished)

    def load(self) -> LoadedModel:
        """The model, once the questions have been found."""
        return load_model(self.model, pick_device(self.device), DTYPES[self.dtype])


def evaluate_tasks(asked: Asked) -> None:
    """Evaluate the model on every task; a line on stdout for each."""
    questions = [(task, asked.examples(task.NAME)) for task in tasks_named(asked.tasks)]
    loaded = asked.load()
    for task, examples in questions:
        place, show = asked.place(task.NAME), _progress(task.NAME)
        how = {"settings": asked.settings, "batch_size": asked.batch_size, "progress": show}
        try:
            found = evaluate(loaded, task, examples, place, **how)
        except KeyboardInterrupt:
            note(f"interrupted; the answers so far are in {place}, and the same command goes on with the next question")
            raise
        also = "".join(f", {rule} {100 * share:.2f}" for rule, share in found["also"].items())
        print(
            f"{task.NAME}: {100 * found['accuracy']:.2f} ± {100 * found['standard_error']:.2f} "
            f"({found['correct']} of {found['n']}){also}, {found['tpf']:.2f} tokens per forward; {place}"
        )


def ask_by_harness(asked: Asked) -> None:
    """Let lm-evaluation-harness ask the tasks, ours or its own; a line on stdout for each."""
    from freda.eval.harness import check_installed, harness_line, run_task

    check_installed()
    questions = {name: asked.examples(name) if name in TASKS else None for name in asked.tasks}
    loaded = asked.load()
    for name, examples in questions.items():
        place, counts = asked.place(name), {"batch_size": asked.batch_size, "limit": asked.limit}
        show = _progress(f"{name} by lm_eval")
        found = run_task(
            loaded, name, examples, place, data=asked.data, settings=asked.settings, **counts, progress=show
        )
        print(f"{harness_line(found)}; {place}")


def _progress(name: str) -> Any:
    stream = sys.stderr  # of now: lm_eval runs with another one
    end = "\r" if stream.isatty() else "\n"

    def show(done: int, total: int, share: float | None = None) -> None:
        last = "\n" if done == total else end
        right = "" if share is None else f", {100 * share:.1f}% right so far"
        print(f"{name}: {done:,} of {total:,}{right}", end=last, file=stream, flush=True)

    return show


def measure_sweep(
    file: SweepFile,
    data: Path,
    out: Path,
    *,
    unpublished: bool,
    note: Callable[[str], None],
    device: str,
    dtype: str,
) -> None:
    """Run a sweep to its end."""
    require(dtype in DTYPES, f"there is no dtype {dtype!r}; use one of {', '.join(DTYPES)}")
    where, precision = pick_device(device), DTYPES[dtype]
    run_sweep(file, data, out, device=where, dtype=precision, unpublished=unpublished, note=note)


def draw_sweep(source: Path, out: Path) -> list[Path]:
    """Tables and figures of a sweep, from its file; returns what was written. Without matplotlib,
    which a machine that only measures may not have, the tables."""
    sweep = Sweep(read_sweep(source))
    out.mkdir(parents=True, exist_ok=True)
    made = []
    for part in sweep.config.parts:
        tables = [table(sweep) for table in TABLES[part]]
        for name, table in zip((part, f"{part}-summary"), tables, strict=False):
            made.append(out / f"{name}.csv")
            made[-1].write_text(as_csv(table), encoding="utf-8")
        made.append(out / f"{part}.md")
        made[-1].write_text("\n".join(map(as_markdown, tables)), encoding="utf-8")
    if find_spec("matplotlib") is None:
        note(f"no figures without matplotlib; where it is installed: freda sweep --draw {source} --out FOLDER")
        return made
    return made + [path for part in sweep.config.parts for path in draw(sweep, part, out)]
