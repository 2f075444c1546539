"""`freda sweep`: many evaluations of several systems, kept in one `sweep.json` that tables and figures are drawn from.

Every part of a sweep (main table, passes, Pareto frontier, ablations) names the settings it needs; a setting that
several parts need is evaluated once. Each evaluation has its folder under `points/` and resumes where it was stopped.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from freda import __version__
from freda.decode.api import Model, load
from freda.errors import FredaError, note, require
from freda.eval.config import SweepConfig, SweepFile, SystemConfig
from freda.eval.evaluate import about_model, evaluate, fingerprint
from freda.eval.report.points import FILE, FORMAT_VERSION, Decoding, Point, settings_of
from freda.eval.report.results import read_samples
from freda.eval.tasks import tasks_named
from freda.eval.tasks.task import Example, Task, checksum
from freda.eval.teacher_forcing import stability
from freda.files import read_json, write_whole
from freda.folders.adapter_folder import resolve_adapter_folder
from freda.folders.model_folder import resolve_model_folder
from freda.methods import method_named
from freda.sections import to_dict


class Subject(NamedTuple):
    """One model of a system, the questions it is asked and the folder of its files."""

    name: str
    number: int
    system: SystemConfig
    model: Model
    decoding: Decoding
    asked: Sequence[tuple[Task, list[Example]]]
    place: Path


def run_sweep(
    file: SweepFile, data: Path, out: Path, *, device: str = "auto", dtype: str = "auto", unpublished: bool = False
) -> dict[str, Any]:
    """Measure everything that is not in `out` yet and write `sweep.json`; returns its content."""
    begun, sweep = time.perf_counter(), file.sweep
    tasks = tasks_named(sweep.tasks, isolated=sweep.isolation)
    for path, adapter in (pair for system in file.system.values() for pair in system.folders()):
        resolve_model_folder(Path(path))  # a missing model is reported before hours of work, not after
        if adapter is not None:
            resolve_adapter_folder(Path(adapter))
    questions = _questions(file, tasks, data, unpublished)
    points, stable, systems = list[Point](), list[dict[str, Any]](), dict[str, dict[str, Any]]()
    for name, number, pair in ((n, i, pair) for n, s in file.system.items() for i, pair in enumerate(s.folders())):
        model = load(pair[0], device, dtype, adapter=pair[1], max_batch=sweep.batch_size)
        about, method = about_model(model.loaded), method_named(file.system[name].method or None, model.loaded.method)
        decoding = Decoding(method.axes, method.refines, method.block_size)
        kind = {"method": method.name, "layout": about.get("layout", "paper"), **decoding._asdict()}
        known = systems.setdefault(name, {**kind, "models": []})
        for key, value in kind.items():
            two = f"system.{name} has models of two kinds, {key} {known[key]} and {value}"
            require(known[key] == value, f"{two}; make it two systems")
        known["models"].append(fingerprint(model.loaded))
        asked, place = [(task, questions[name, task.name]) for task in tasks], out / "points" / name / str(number)
        subject = Subject(name, number, file.system[name], model, decoding, asked, place)
        points += _measure(subject, sweep)
        stable += _stability(subject, sweep)
    content = {
        "format": FORMAT_VERSION,
        "version": __version__,
        "config": to_dict(file),
        "device": model.loaded.parts.device.type,
        "dtype": about["dtype"],
        "systems": systems,
        "tasks": {task.name: {"kind": task.kind, "choices": bool(task.choices)} for task in tasks},
        "checksums": {f"{name}/{task}": checksum(examples) for (name, task), examples in questions.items()},
        "points": [asdict(point) | {"setting": point.setting._asdict()} for point in points],
        "stability": stable,
        "seconds": round(time.perf_counter() - begun, 1),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / FILE, json.dumps(content, indent=1) + "\n")
    return content


def _questions(
    file: SweepFile, tasks: Sequence[Task], data: Path, unpublished: bool
) -> dict[tuple[str, str], list[Example]]:
    """The questions by system and task, read once for each folder of files."""
    read = functools.cache(lambda task, folder: task.examples(folder, file.sweep.limit, unpublished=unpublished))
    systems = file.system.items()
    return {(name, task.name): read(task, Path(one.data or data)) for name, one in systems for task in tasks}


def _measure(subject: Subject, sweep: SweepConfig) -> Iterator[Point]:
    """All points of one model. A choice by likelihood does not depend on the setting and is measured once."""
    wanted = settings_of(["main", *sweep.parts], sweep, subject.system, subject.decoding)
    for task, examples in subject.asked:
        chosen = wanted[:1] if task.choices else wanted
        for done, setting in enumerate(chosen, start=1):
            folder = subject.place / task.name / setting.folder
            decoding = subject.system.decoding(sweep.max_new_tokens, **setting._asdict())
            found = evaluate(subject.model, task, examples, folder, settings=decoding)
            samples = read_samples(folder)[1]
            right = "".join("1" if samples[example.id]["correct"] else "0" for example in examples)
            numbers = {key: found[key] for key in ("n", "accuracy", "standard_error", "nfe", "tpf", "seconds")}
            errors = f", {found['errors']} errors" if found["errors"] else ""
            score = f"{100 * found['accuracy']:.2f}, {found['tpf']:.2f} tokens per forward{errors}"
            note(f"{subject.name} {subject.number} {task.name} {done}/{len(chosen)}: {setting.folder} {score}")
            yield Point(subject.name, subject.number, task.name, setting, **numbers, right=right)


def _stability(subject: Subject, sweep: SweepConfig) -> Iterator[dict[str, Any]]:
    """What further passes change, for systems that refine; kept in files, so that it is measured once."""
    if "stability" not in sweep.parts or not subject.decoding.refines:
        return
    loaded, passes = subject.model.loaded, max(sweep.passes)
    for task, examples in ((task, examples) for task, examples in subject.asked if not task.choices):
        part = examples[: sweep.stability_examples]
        head = {**about_model(loaded), "checksum": checksum(part), "passes": passes, "version": __version__}
        path = subject.place / task.name / "stability.json"
        found: dict[str, Any] = {}
        with contextlib.suppress(FredaError):  # missing, or damaged: measured again
            found = read_json(path)
        if {key: found.get(key) for key in head} != head:
            texts = [(example.prompt, example.prompt + task.reference(example)) for example in part]
            found = {**head, "rows": stability(loaded, texts, passes)}
            write_whole(path, json.dumps(found) + "\n")
            note(f"{subject.name} {subject.number} {task.name}: stability over {len(part)} published answers")
        yield {"system": subject.name, "model": subject.number, "task": task.name, "rows": found["rows"]}
