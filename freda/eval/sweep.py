"""`freda sweep`: many evaluations of several systems, kept in one `sweep.json` that tables and figures are drawn from.

Every part of a sweep (main table, passes, Pareto frontier, ablations) names the settings it needs; what several parts
need is evaluated once. Each evaluation has its folder under `points/` and goes on where it was stopped.

Systems decode on their own schedules: one that refines gets passes × thresholds; block diffusion, which reveals and
never revises, its static schedules of 1 to B passes and the threshold schedule of B passes; autoregressive decoding
has one setting.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from freda import __version__
from freda.errors import FredaError, require
from freda.eval.config import SweepConfig, SweepFile, SystemConfig
from freda.eval.evaluate import Engines, about_model, evaluate, fingerprint
from freda.eval.folder import read_samples
from freda.eval.stability import stability
from freda.eval.tasks import load_examples, tasks_named
from freda.eval.tasks.task import Example, Task, checksum
from freda.files import write_whole
from freda.folders.model_folder import LoadedModel, load_model
from freda.folders.resolve import resolve_model_folder
from freda.methods import METHODS
from freda.methods.method import Method
from freda.sections import to_dict

FILE = "sweep.json"
FORMAT_VERSION = 1
NEVER = 2.0  # a threshold that no probability reaches
Note = Callable[[str], None]


class Setting(NamedTuple):
    """How a system decodes at one point of a sweep."""

    passes: int
    threshold: float
    width: int
    tau: float

    @property
    def folder(self) -> str:
        """A name for its files."""
        return f"passes{self.passes}-threshold{self.threshold:g}-width{self.width}-tau{self.tau:g}"


@dataclass(frozen=True)
class Point:
    """One evaluation: a model of a system on a task with one setting."""

    system: str
    model: int  # which of the system's models
    task: str
    setting: Setting
    n: int
    accuracy: float
    standard_error: float
    nfe: float
    tpf: float
    seconds: float
    right: str  # which answers are right, in the order of the questions: a digit 1 or 0 for each


class Subject(NamedTuple):
    """One model of a system, what it is asked and where its files go."""

    name: str
    number: int
    system: SystemConfig
    loaded: LoadedModel
    asked: Sequence[tuple[Task, list[Example]]]
    place: Path


def run_sweep(
    file: SweepFile,
    data: Path,
    out: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    unpublished: bool = False,
    note: Note = lambda message: None,
) -> dict[str, Any]:
    """Measure everything that is not in `out` yet and write `sweep.json`; returns its content."""
    begun, sweep, tasks = time.perf_counter(), file.sweep, tasks_named(file.sweep.tasks)
    for system in file.system.values():
        for path in system.models:
            resolve_model_folder(Path(path))  # a missing model is told before hours of work, not after
    questions = _questions(file, tasks, data, unpublished=unpublished)
    points: list[Point] = []
    still: list[dict[str, Any]] = []
    systems: dict[str, dict[str, Any]] = {}
    for name, system in file.system.items():
        for number, path in enumerate(system.models):
            loaded = load_model(Path(path), device, dtype)
            kind = {"method": loaded.method.name, "block_size": loaded.method.block_size}
            about = systems.setdefault(name, {**kind, "models": []})
            for key, value in kind.items():
                require(
                    about[key] == value,
                    f"system.{name} has models of two kinds, {key} {about[key]} and {value}; make two systems of it",
                )
            about["models"].append(fingerprint(loaded))
            asked = [(task, questions[name, task.NAME]) for task in tasks]
            subject = Subject(name, number, system, loaded, asked, out / "points" / name / str(number))
            points += _measure(subject, sweep, note)
            still += _stability(subject, sweep, note)
    content = {
        "format": FORMAT_VERSION,
        "version": __version__,
        "config": to_dict(file),
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "systems": systems,
        "tasks": {task.NAME: {"kind": task.KIND, "choices": bool(task.CHOICES)} for task in tasks},
        "checksums": {f"{name}/{task}": checksum(examples) for (name, task), examples in questions.items()},
        "points": [asdict(point) | {"setting": point.setting._asdict()} for point in points],
        "stability": still,
        "seconds": round(time.perf_counter() - begun, 1),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / FILE, json.dumps(content, indent=1) + "\n")
    return content


def _questions(
    file: SweepFile, tasks: Sequence[Task], data: Path, *, unpublished: bool
) -> dict[tuple[str, str], list[Example]]:
    """What every system is asked, read once for each folder of files."""
    known: dict[tuple[Path, str], list[Example]] = {}
    asked = {}
    for name, system in file.system.items():
        folder = Path(system.data) if system.data else data
        for task in tasks:
            if (folder, task.NAME) not in known:
                known[folder, task.NAME] = load_examples(task, folder, file.sweep.limit, unpublished=unpublished)
            asked[name, task.NAME] = known[folder, task.NAME]
    return asked


def _measure(subject: Subject, sweep: SweepConfig, note: Note) -> Iterator[Point]:
    """All points of one model."""
    loaded, system = subject.loaded, subject.system
    wanted = settings_of(sweep, system, METHODS[loaded.method.name], loaded.method.block_size)
    for task, examples in subject.asked:
        chosen = wanted[:1] if task.CHOICES else wanted  # a likelihood knows no passes
        engines: Engines = {}
        for done, setting in enumerate(chosen, start=1):
            folder = subject.place / task.NAME / setting.folder
            decoding = system.decoding(sweep.max_new_tokens, **setting._asdict())
            found = evaluate(
                loaded, task, examples, folder, settings=decoding, batch_size=sweep.batch_size, engines=engines
            )
            samples = read_samples(folder)[1]
            right = "".join("1" if samples[example.id]["correct"] else "0" for example in examples)
            numbers = {key: found[key] for key in ("n", "accuracy", "standard_error", "nfe", "tpf", "seconds")}
            note(
                f"{subject.name} {subject.number} {task.NAME} {done}/{len(chosen)}: {setting.folder} "
                f"{100 * found['accuracy']:.2f}, {found['tpf']:.2f} tokens per forward"
            )
            yield Point(subject.name, subject.number, task.NAME, setting, **numbers, right=right)


def settings_of(sweep: SweepConfig, system: SystemConfig, method: Method, block_size: int) -> list[Setting]:
    """The settings that the parts of the sweep want of a system, each once; the main table's comes first."""
    wanted = [main_setting(system, method)]
    for part in sweep.parts:
        wanted += [canonical(setting, system, method) for setting in PARTS[part](sweep, system, method, block_size)]
    return list(dict.fromkeys(wanted))


def canonical(setting: Setting, system: SystemConfig, method: Method) -> Setting:
    """The setting with values that have no effect put to the system's own, so that equal decoding is one point."""
    own = Setting(system.passes, system.threshold, system.width, system.tau)
    if not method.DRAFTS:
        return own._replace(passes=1)
    if not method.SCORES or setting.passes == 1:  # candidates compete from the second pass on
        setting = setting._replace(width=own.width, tau=own.tau)
    return setting._replace(threshold=own.threshold) if setting.passes == 1 else setting


def main_setting(system: SystemConfig, method: Method) -> Setting:
    """The system's own."""
    return canonical(Setting(system.passes, system.threshold, system.width, system.tau), system, method)


def passes_settings(sweep: SweepConfig, system: SystemConfig, method: Method, block_size: int) -> list[Setting]:
    """Figure iter-scaling: early stop by the threshold with few passes, none with more."""
    own = main_setting(system, method)
    if not method.DRAFTS:
        return []
    if not method.REFINES:
        return [own._replace(passes=k, threshold=NEVER) for k in sweep.passes if k <= block_size]
    stops = sweep.early_stop_passes
    return [own._replace(passes=k, threshold=own.threshold if k <= stops else NEVER) for k in sweep.passes]


def pareto_settings(sweep: SweepConfig, system: SystemConfig, method: Method, block_size: int) -> list[Setting]:
    """Figure pareto-frontier: the joint sweep over passes and thresholds, or the baseline's own schedules."""
    own = main_setting(system, method)
    if not method.DRAFTS:
        return [own]
    if not method.REFINES:
        static = [own._replace(passes=k, threshold=NEVER) for k in range(1, block_size + 1)]
        return static + [own._replace(passes=block_size, threshold=eta) for eta in sweep.thresholds]
    return [own._replace(passes=k, threshold=eta) for k in sweep.passes for eta in sweep.thresholds]


def tau_settings(sweep: SweepConfig, system: SystemConfig, method: Method, block_size: int) -> list[Setting]:
    """Table alpha_ablation; a system without a scorer takes part with its main setting."""
    own = main_setting(system, method)
    return [own._replace(tau=tau) for tau in sweep.taus] if method.SCORES else [own]


def width_settings(sweep: SweepConfig, system: SystemConfig, method: Method, block_size: int) -> list[Setting]:
    """Table bon_width_ablation."""
    own = main_setting(system, method)
    both = [own._replace(passes=k, width=n) for k in sweep.width_passes for n in sweep.widths]
    return both if method.SCORES else []


def _nothing(sweep: SweepConfig, system: SystemConfig, method: Method, block_size: int) -> list[Setting]:
    return []


PARTS: Mapping[str, Callable[[SweepConfig, SystemConfig, Method, int], list[Setting]]] = {
    "main": _nothing,  # its setting is always there
    "passes": passes_settings,
    "pareto": pareto_settings,
    "stability": _nothing,  # measured on published answers, not on generated ones
    "tau": tau_settings,
    "width": width_settings,
}


def _stability(subject: Subject, sweep: SweepConfig, note: Note) -> Iterator[dict[str, Any]]:
    """What further passes change, for systems that refine; kept in files, so that it is measured once."""
    loaded = subject.loaded
    if "stability" not in sweep.parts or not METHODS[loaded.method.name].REFINES:
        return
    passes = max(sweep.passes)
    for task, examples in subject.asked:
        if task.CHOICES:
            continue
        part = examples[: sweep.stability_examples]
        head = {**about_model(loaded), "checksum": checksum(part), "passes": passes, "version": __version__}
        path = subject.place / task.NAME / "stability.json"
        try:
            found = dict(json.loads(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):  # not there, or damaged: measured again
            found = {}
        if {key: found.get(key) for key in head} != head:
            texts = [(example.prompt, example.prompt + task.reference(example)) for example in part]
            found = {**head, "rows": stability(loaded, texts, passes)}
            write_whole(path, json.dumps(found) + "\n")
            note(f"{subject.name} {subject.number} {task.NAME}: stability over {len(part)} published answers")
        yield {"system": subject.name, "model": subject.number, "task": task.NAME, "rows": found["rows"]}


def read_sweep(path: Path) -> dict[str, Any]:
    """The content of a `sweep.json`, or of the folder that holds one; the points as `Point`."""
    path = path / FILE if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["format"]
        require(version == FORMAT_VERSION, f"{path} has format {version}; this version reads {FORMAT_VERSION}")
        missing = [name for name in ("config", "systems", "tasks", "checksums", "stability") if name not in content]
        require(not missing, f"{path} has no {', '.join(missing)}; make it again with freda sweep")
        content["points"] = [Point(**point | {"setting": Setting(**point["setting"])}) for point in content["points"]]
    except FileNotFoundError:
        raise FredaError(f"there is no {path}; make it with freda sweep CONFIG --out FOLDER") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FredaError(f"{path} is not the file of a sweep ({error}); make it again with freda sweep") from None
    return dict(content)
