"""A model on a benchmark: answers by generation or by likelihood, graded, kept one by one, summed up.

Every answer is a line of `samples.jsonl` as soon as its batch is graded, so a run that was stopped goes on with the
next question; `results.json` is written at the end. What is asked (checksum of all prompts), how, and by which code
stands in both: numbers under one name are numbers of one thing. The score does not depend on the batch size.
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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freda import __version__
from freda.decode.batch import Request
from freda.decode.config import DecodeConfig, EngineConfig
from freda.decode.engine import Engine
from freda.decode.stops import cut_at_stop
from freda.errors import FredaError, require
from freda.eval.folder import RESULTS, SAMPLES, read_samples
from freda.eval.likelihood import choice_log_probs
from freda.eval.tasks.task import Example, Graded, Task, checksum
from freda.files import locked, write_whole
from freda.folders.model_folder import LoadedModel
from freda.methods import METHODS

SHOWN_PROMPTS = 3
PAGE = 16  # tokens
BITS_AT_ONCE = 1 << 24
Engines = dict[EngineConfig, Engine]  # of one model: the last, by its size
Progress = Callable[[int, int, float], None]  # answers done, answers in all, share of right ones so far


def evaluate(
    loaded: LoadedModel,
    task: Task,
    examples: Sequence[Example],
    out: Path,
    *,
    settings: DecodeConfig,
    batch_size: int = 64,
    progress: Progress | None = None,
    engines: Engines | None = None,
) -> dict[str, Any]:
    """Answer all examples, or those that an earlier run in `out` has not; returns what `results.json` holds.

    Who evaluates a model with many settings passes the same `engines`: pages, and on a GPU graphs, are made once.
    """
    require(batch_size >= 1, f"batch_size is {batch_size}; use 1 or more")
    require(bool(examples), f"there is no question of {task.NAME}; look at the files")
    settings = settings_of(task, settings)
    head = {
        "task": task.NAME,
        "n": len(examples),
        "shots": task.SHOTS,
        "checksum": checksum(examples),
        **about_model(loaded),
        "settings": {"by": "likelihood"} if task.CHOICES else {**asdict(settings), "by": "generation"},
        "version": __version__,
    }
    with locked(out):
        samples = _resume(out, head)
        left = [example for example in examples if example.id not in samples]
        with open(out / SAMPLES, "a", encoding="utf-8") as file:
            generates, known = bool(left) and not task.CHOICES, {} if engines is None else engines
            engine = _engine(loaded, left, settings, batch_size, known) if generates else None
            for made in _answers(loaded, engine, task, left, settings, batch_size):
                samples |= {sample["id"]: sample for sample in made}
                file.write("".join(json.dumps(sample) + "\n" for sample in made))
                file.flush()
                if progress is not None:
                    progress(len(samples), len(examples), sum(s["correct"] for s in samples.values()) / len(samples))
        samples = {example.id: samples[example.id] for example in examples}
        shown = {"prompts": [example.prompt for example in examples[:SHOWN_PROMPTS]]}
        results = {**head, **made_by(loaded), **_summary(list(samples.values())), **shown}
        write_whole(out / RESULTS, json.dumps(results, indent=2) + "\n")
    return results


def settings_of(task: Task, settings: DecodeConfig) -> DecodeConfig:
    """How a task is answered: its answers may be shorter than what is asked for."""
    return replace(settings, max_new_tokens=min(settings.max_new_tokens, task.MAX_NEW_TOKENS))


def fitted(loaded: LoadedModel, settings: DecodeConfig, prompt: Sequence[int]) -> DecodeConfig:
    """Settings with no more new tokens than the model has positions for behind the prompt."""
    room = loaded.backbone.config.max_positions - len(prompt)
    return replace(settings, max_new_tokens=max(1, min(settings.max_new_tokens, room)))


def about_model(loaded: LoadedModel) -> dict[str, Any]:
    """What tells one model from another in a file of results."""
    config = loaded.method
    knobs = {name: getattr(config, name) for name in ("block_size", "feedback", "rescale", "committed_hard")}
    dtype = str(loaded.backbone.embed_tokens.weight.dtype).removeprefix("torch.")
    return {"method": config.name, "model": fingerprint(loaded), "dtype": dtype, **knobs}


def made_by(loaded: LoadedModel) -> dict[str, Any]:
    """What also stands in the results, but does not keep a run from going on: the commit of a checkout, the device."""
    device = loaded.backbone.embed_tokens.weight.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"commit": _commit(), "device": name}


@functools.cache
def _commit() -> str:
    """The commit of the checkout that this file belongs to; empty for an installed package."""
    folder = Path(__file__).parent
    asked = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        tracked = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "--error-unmatch", __file__], capture_output=True
        )
        found = subprocess.run(asked, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if tracked.returncode == 0 and found.returncode == 0 else ""


def _answers(
    loaded: LoadedModel,
    engine: Engine | None,
    task: Task,
    examples: Sequence[Example],
    settings: DecodeConfig,
    batch_size: int,
) -> Iterator[list[dict[str, Any]]]:
    """Answered and graded questions, batch by batch."""
    for first in range(0, len(examples), batch_size):
        part = examples[first : first + batch_size]
        begun = time.perf_counter()
        lines = _choose(loaded, task, part) if engine is None else _generate(engine, task, part, settings)
        seconds = (time.perf_counter() - begun) / len(part)
        graded = task.grade_all(part, [line["output"] for line in lines])
        for place, line in enumerate(lines):
            if line["finish"] == "error":
                graded[place] = Graded(False, line["error"], "")
        yield [_sample(*one, seconds) for one in zip(part, lines, graded, strict=True)]


def fingerprint(loaded: LoadedModel) -> str:
    """Tells models apart: a sum over the bits of every weight, each times its place, which is exact on every device."""
    sums = [(name, _bit_sum(weight)) for name, weight in sorted(loaded.backbone.state_dict().items())]
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:16]


def _bit_sum(weight: Tensor) -> int:
    """Σ bits · (2 · place + 1), modulo 2⁶⁴."""
    bits = weight.contiguous().view(torch.int16 if weight.element_size() == 2 else torch.int32).flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, len(bits), BITS_AT_ONCE):
        part = bits[first : first + BITS_AT_ONCE].long()
        total += (part * (2 * torch.arange(first, first + len(part), device=bits.device) + 1)).sum()
    return int(total)


def _resume(out: Path, head: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The answers of an earlier run of the same thing; a new folder begins with what is asked."""
    path = out / SAMPLES
    if not path.is_file():
        write_whole(path, json.dumps(head) + "\n")
        return {}
    found, samples = read_samples(out)
    before, now = ({**one, **one.get("settings", {}), "settings": None} for one in (found, head))
    changed = {key: f"{key} {before.get(key)} (now {now[key]})" for key in now if before.get(key) != now[key]}
    if "n" in changed:
        changed.pop("checksum", None)  # of other questions, which says nothing more
    if changed:
        raise FredaError(f"{out} holds another evaluation: {', '.join(changed.values())}; choose another folder: --out")
    write_whole(path, "".join(json.dumps(line) + "\n" for line in (head, *samples.values())))
    return samples


def _engine(
    loaded: LoadedModel, examples: Sequence[Example], settings: DecodeConfig, batch_size: int, known: Engines
) -> Engine:
    """An engine with pages for the longest questions side by side; exemplars that all share are stored once more."""
    page = math.lcm(PAGE, loaded.method.block_size)
    longest = max(len(loaded.tokenizer.encode(example.prompt)) for example in examples)
    longest = min(longest + settings.max_new_tokens, loaded.backbone.config.max_positions) + loaded.method.block_size
    pages = (min(batch_size, len(examples)) + 1) * -(-longest // page)
    config = EngineConfig(max_batch=batch_size, page_size=page, pages=pages, queue=batch_size)
    if config not in known:
        known.clear()  # an engine packs the weights anew: two of them would hold them twice
        known[config] = Engine(loaded, config)
    return known[config]


def _generate(engine: Engine, task: Task, examples: Sequence[Example], settings: DecodeConfig) -> list[dict[str, Any]]:
    """Continue the prompts, up to the task's stop strings. What cannot be asked is an answer with an error."""
    tokenizer, drafts = engine.loaded.tokenizer, METHODS[engine.loaded.method.name].DRAFTS
    lines: list[dict[str, Any]] = []
    numbers: list[int | None] = []
    for example in examples:
        nothing = {"output": "", "tokens": 0, "nfe": 0, "drafts": 0, "finish": "error", "error": ""}
        try:
            prompt = tokenizer.encode(example.prompt)
            request = Request(**asdict(fitted(engine.loaded, settings, prompt)), prompt=prompt)
            numbers.append(engine.submit(request, stop=task.STOPS))
        except FredaError as error:
            numbers.append(None)
            nothing["error"] = str(error)
        lines.append(nothing)
    errors: dict[int, str] = {}
    while engine.busy:
        errors |= {event.request: event.error for event in engine.step() if event.error}
    for line, number in zip(lines, numbers, strict=True):
        if number is not None:
            output = engine.outputs.pop(number)
            line |= {
                "output": cut_at_stop(tokenizer.decode(output.tokens), task.STOPS),
                "tokens": len(output.tokens),
                "nfe": output.nfe,
                "drafts": output.nfe if drafts else 0,  # committing goes with the next block's first draft
                "finish": output.finish,
                "error": errors.get(number, ""),
            }
    return lines


def _choose(loaded: LoadedModel, task: Task, examples: Sequence[Example]) -> list[dict[str, Any]]:
    """The most likely of the task's one-token answers, from one forward."""
    tokenizer = loaded.tokenizer
    contexts = [tokenizer.encode(example.prompt) for example in examples]
    choices = [_one_token(loaded, examples[0].prompt, text) for text in task.CHOICES]
    scores = choice_log_probs(loaded, contexts, [choices] * len(contexts))
    best = scores.argmax(-1).tolist()
    return [
        {"output": task.CHOICES[index], "tokens": 1, "nfe": 1, "drafts": 0, "finish": "choice", "log_probs": row}
        for index, row in zip(best, scores.tolist(), strict=True)
    ]


def _one_token(loaded: LoadedModel, prompt: str, choice: str) -> int:
    """The id of an answer, which must be one token that leaves the prompt's tokens as they are."""
    before, after = loaded.tokenizer.encode(prompt), loaded.tokenizer.encode(prompt + choice)
    if after[:-1] != before:
        raise FredaError(f"the answer {choice!r} is not one token for this model's tokenizer; it cannot be chosen so")
    return after[-1]


def _sample(example: Example, line: dict[str, Any], verdict: Graded, seconds: float) -> dict[str, Any]:
    return {
        "id": example.id,
        "group": example.group,
        "prompt": example.prompt,
        **line,
        "gold": example.gold,
        "answer": verdict.answer,
        "correct": verdict.correct,
        "reason": verdict.reason,
        "also": dict(verdict.also),
        "seconds": round(seconds, 4),
    }


def _summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    n, right = len(samples), sum(sample["correct"] for sample in samples)
    share, nfe = right / n, sum(sample["nfe"] for sample in samples)
    return {
        "accuracy": share,
        "standard_error": math.sqrt(share * (1 - share) / n),
        "correct": right,
        "also": {rule: sum(sample["also"][rule] for sample in samples) / n for rule in samples[0]["also"]},
        "groups": _by_group(samples),
        "nfe": nfe / n,
        "tpf": sum(sample["tokens"] for sample in samples) / max(1, nfe),
        "seconds": round(sum(sample["seconds"] for sample in samples), 2),
        "finish": dict(Counter(sample["finish"] for sample in samples)),
    }


def _by_group(samples: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Accuracy of each part of the benchmark, where it has parts."""
    names = sorted({sample["group"] for sample in samples} - {""})
    parts = {name: [sample["correct"] for sample in samples if sample["group"] == name] for name in names}
    return {name: {"n": len(right), "accuracy": sum(right) / len(right)} for name, right in parts.items()}
