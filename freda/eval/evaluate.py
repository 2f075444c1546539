"""A model on a benchmark: answers by generation or by likelihood, graded, stored one by one, summed up.

Every answer is a line of `samples.jsonl` as soon as it is graded, so a run that was stopped resumes with the questions
that are left; `results.json` is written at the end. Both say what was asked (a checksum of all prompts), how, and by
which version: numbers under one name are numbers of one thing. The score does not depend on the batch size.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freda import __version__
from freda.decode.api import Model
from freda.decode.config import DecodeConfig
from freda.decode.request import Request, accepted_in, cut_at_stop
from freda.errors import require
from freda.eval.config import EvalSettings
from freda.eval.likelihood import choice_log_probs
from freda.eval.report.results import RESULTS, SAMPLES, read_samples, wilson
from freda.eval.tasks.task import Example, Graded, Task, checksum
from freda.files import locked, write_whole
from freda.folders.model_folder import LoadedModel
from freda.model.parts import stored_name

SHOWN_PROMPTS = 3
BITS_AT_ONCE = 1 << 24
Progress = Callable[[int, int, float | None], None]  # answers so far, answers in all, accuracy of the graded ones
Sample = dict[str, Any]
Answers = Iterator[tuple[int, Sample]]  # number of the question, and its answer


def evaluate(
    model: Model,
    task: Task,
    examples: Sequence[Example],
    out: Path,
    *,
    settings: EvalSettings,
    progress: Progress = lambda done, total, accuracy: None,
) -> dict[str, Any]:
    """Answer all examples, or those that an earlier run in `out` has not; returns the content of `results.json`."""
    require(bool(examples), f"there is no question of {task.name}; look at the files")
    settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, task.max_new_tokens))
    head = {
        "task": task.name,
        "n": len(examples),
        "shots": task.shots,
        "checksum": checksum(examples),
        **about_model(model.loaded),
        "settings": _asked(task, settings),
        "version": __version__,
    }
    with locked(out):
        found = _resume(out, head)

        def report(ungraded: int = 0) -> None:
            accuracy = sum(sample["correct"] for sample in found.values()) / len(found) if found else None
            progress(len(found) + ungraded, len(examples), accuracy)

        report()
        left = [example for example in examples if example.id not in found]
        for graded in _answers(model, task, left, settings, report) if left else ():
            found |= {sample["id"]: sample for sample in graded}
            with open(out / SAMPLES, "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(sample) + "\n" for sample in graded))
            report()
        samples = {example.id: found[example.id] for example in examples}
        _write_samples(out, head, samples)  # in the order of the questions
        device = model.loaded.parts.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        made_by = {"commit": _commit(), "device": name}  # may change between two parts of a run
        shown = {"prompts": [example.prompt for example in examples[:SHOWN_PROMPTS]]}
        results = {**head, **made_by, **_summary(list(samples.values())), **shown}
        write_whole(out / RESULTS, json.dumps(results, indent=2) + "\n")
    return results


def result_line(found: dict[str, Any]) -> str:
    """The results of one task in a line: score, 95% interval, speed, and what went wrong."""
    low, high = (f"{100 * bound:.2f}" for bound in found["interval"])
    score = f"{100 * found['accuracy']:.2f} ({low} to {high} at 95%; {found['correct']} of {found['n']})"
    also = "".join(f", {rule} {100 * accuracy:.2f}" for rule, accuracy in found["also"].items())
    wrong = "".join(f", {found[what]} {what}" for what in ("errors", "truncated") if found[what])
    return f"{found['task']}: {score}{also}, {found['tpf']:.2f} tokens per forward{wrong}"


# -- answers ---------------------------------------------------------------------------------------------------------


def request_for(model: Model, prompt: Sequence[int], settings: EvalSettings, stop: Sequence[str]) -> Request:
    """A request with no more new tokens than the model has positions for after the prompt."""
    room = model.loaded.backbone.config.max_positions - len(prompt)
    fitted = replace(settings, max_new_tokens=max(1, min(settings.max_new_tokens, room)))
    return Request(**_decoding(fitted), prompt=prompt, stop=tuple(stop), method=settings.method or None)


def _decoding(settings: DecodeConfig) -> dict[str, Any]:
    return {field.name: getattr(settings, field.name) for field in fields(DecodeConfig)}


def _asked(task: Task, settings: EvalSettings) -> dict[str, Any]:
    """The settings that the answers depend on, as results have them."""
    if not task.choices:
        method = {"method": settings.method} if settings.method else {}
        return {**_decoding(settings), **method, "by": "generation"}
    other = {} if settings.likelihood == "auto" else {"likelihood": settings.likelihood}
    return {"by": "likelihood", **other}


def _answers(
    model: Model, task: Task, examples: Sequence[Example], settings: EvalSettings, report: Callable[[int], None]
) -> Iterator[list[Sample]]:
    """Answer and grade questions, as many at a time as the engine runs; `report` gets the number that wait for it."""
    answer, begun = _choose if task.choices else _generate, time.perf_counter()
    pending: list[tuple[Example, Sample]] = []
    for number, (index, line) in enumerate(answer(model, task, examples, settings), start=1):
        pending.append((examples[index], line))
        if len(pending) < model.engine.config.max_batch and number < len(examples):
            report(len(pending))
            continue
        seconds = round((time.perf_counter() - begun) / len(pending), 4)
        yield [{**sample, "seconds": seconds} for sample in _graded(task, pending)]
        pending, begun = [], time.perf_counter()


def _generate(model: Model, task: Task, examples: Sequence[Example], settings: EvalSettings) -> Answers:
    """Continue the prompts up to the task's stop strings, in the order in which they finish."""
    tokenizer = model.loaded.tokenizer
    requests = [request_for(model, tokenizer.encode(one.prompt), settings, task.stops) for one in examples]
    for index, output in model.engine.completed(requests):
        text = cut_at_stop(tokenizer.decode(output.tokens), task.stops)
        counts = {"tokens": len(output.tokens), "nfe": output.nfe, "accepted": accepted_in([output.accepted])}
        yield index, {"output": text, **counts, "finish": output.finish, "error": output.error}


def _choose(model: Model, task: Task, examples: Sequence[Example], settings: EvalSettings) -> Answers:
    """Take the most likely of the task's one-token answers, from one forward over each prompt."""
    encode, size = model.loaded.tokenizer.encode, model.engine.config.max_batch
    before, choices = encode(examples[0].prompt), list[int]()
    for text in task.choices:
        *unchanged, token = encode(examples[0].prompt + text)
        odd = f"the answer {text!r} is not one token for this model's tokenizer"
        require(unchanged == before, f"{odd}, so it cannot be chosen by likelihood")
        choices.append(token)
    for first in range(0, len(examples), size):
        contexts = [encode(example.prompt) for example in examples[first : first + size]]
        scores = choice_log_probs(model.loaded, contexts, choices, reading=settings.likelihood).tolist()
        for index, row in enumerate(scores, start=first):
            best = task.choices[max(range(len(row)), key=row.__getitem__)]
            yield index, {"output": best, "tokens": 1, "nfe": 1, "finish": "choice", "error": "", "log_probs": row}


def _graded(task: Task, answers: Sequence[tuple[Example, Sample]]) -> Iterator[Sample]:
    """Grade answers; what could not be asked is wrong, with the error as the reason."""
    verdicts = task.grade_all([example for example, _ in answers], [line["output"] for _, line in answers])
    for (example, line), graded in zip(answers, verdicts, strict=True):
        verdict = Graded(False, line["error"], "", graded.also) if line["finish"] == "error" else graded
        about = {"id": example.id, "group": example.group, "prompt": example.prompt}
        yield {**about, **line, "gold": example.gold, **verdict._asdict(), "also": dict(verdict.also)}


# -- what is stored --------------------------------------------------------------------------------------------------


def _resume(out: Path, head: dict[str, Any]) -> dict[str, Sample]:
    """The answers of an earlier run of the same evaluation; a new folder gets a head that says what is asked."""
    if not (out / SAMPLES).is_file():
        _write_samples(out, head, {})
        return {}
    found, samples = read_samples(out)
    settings = found.get("settings")
    require(
        isinstance(settings, dict), f"{out / SAMPLES} has no settings in its first line; delete it, or choose another"
    )
    before, now = ({**one, **one["settings"], "settings": None} for one in (found, head))
    changed = {key: f"{key} {before.get(key)} (now {now[key]})" for key in now if before.get(key) != now[key]}
    if "n" in changed:
        changed.pop("checksum", None)  # other questions, which is nothing new
    what = ", ".join(changed.values())
    require(not changed, f"{out} holds another evaluation: {what}; choose another folder: --out")
    _write_samples(out, head, samples)  # without damaged lines
    return samples


def _write_samples(out: Path, head: dict[str, Any], samples: dict[str, Sample]) -> None:
    write_whole(out / SAMPLES, "".join(json.dumps(line) + "\n" for line in (head, *samples.values())))


def _summary(samples: Sequence[Sample]) -> dict[str, Any]:
    n, right = len(samples), sum(sample["correct"] for sample in samples)
    accuracy, nfe = right / n, sum(sample["nfe"] for sample in samples)
    finish = Counter(sample["finish"] for sample in samples)
    names = sorted({sample["group"] for sample in samples} - {""})
    groups = {name: [sample["correct"] for sample in samples if sample["group"] == name] for name in names}
    return {
        "accuracy": accuracy,
        "standard_error": math.sqrt(accuracy * (1 - accuracy) / n),
        "interval": list(wilson(right, n)),
        "correct": right,
        "errors": finish["error"],
        "first_error": next((sample["error"] for sample in samples if sample["finish"] == "error"), ""),
        "truncated": finish["length"],  # ended by the limit on new tokens
        "also": {rule: sum(sample["also"][rule] for sample in samples) / n for rule in samples[0]["also"]},
        "groups": {name: {"n": len(marks), "accuracy": sum(marks) / len(marks)} for name, marks in groups.items()},
        "nfe": nfe / n,
        "tpf": sum(sample["tokens"] for sample in samples) / max(1, nfe),
        "accepted": accepted_in(sample.get("accepted", {}) for sample in samples),
        "seconds": round(sum(sample["seconds"] for sample in samples), 2),
        "finish": dict(finish),
    }


def about_model(loaded: LoadedModel) -> dict[str, Any]:
    """The facts that tell one model from another in a file of results."""
    method, dtype = loaded.method, str(loaded.parts.dtype).removeprefix("torch.")
    return {"method": method.name, "model": fingerprint(loaded), "dtype": dtype, **method.stored()}


@functools.cache
def _commit() -> str:
    """The commit of the checkout that this file belongs to; empty for an installed package."""
    here: dict[str, Any] = {"cwd": Path(__file__).parent, "stderr": subprocess.DEVNULL, "text": True, "timeout": 10}
    try:
        subprocess.check_output(["git", "ls-files", "--error-unmatch", __file__], **here)
        return str(subprocess.check_output(["git", "describe", "--always", "--dirty", "--abbrev=12"], **here)).strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def fingerprint(loaded: LoadedModel) -> str:
    """Tell models apart by a sum over the bits of every weight, each times its place, exact on every device."""
    named = {stored_name(part, name): weight for part, name, weight in loaded.parts.weights()}
    sums = [(name, _bit_sum(weight.detach())) for name, weight in sorted(named.items())]
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:16]


def _bit_sum(weight: Tensor) -> int:
    """Σ bits · (2 · place + 1), modulo 2⁶⁴."""
    bits = weight.contiguous().view(torch.int16 if weight.element_size() == 2 else torch.int32).flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, len(bits), BITS_AT_ONCE):
        part = bits[first : first + BITS_AT_ONCE].long()
        total += (part * (2 * torch.arange(first, first + len(part), device=bits.device) + 1)).sum()
    return int(total)
