"""`freda eval --harness`: the same model, asked by lm-evaluation-harness, and its verdicts beside ours.

lm_eval (an optional package) builds the prompts, finds the answers in the texts and counts; this module answers its
requests with our likelihood and our decoding. `harness.json` gets its metrics, the forwards, which it cannot count,
and, where `results.json` of our own evaluator lies in the same folder and belongs to the same model, settings and
questions, on which questions the two disagree.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import itertools
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from freda import __version__
from freda.decode.config import DecodeConfig
from freda.decode.engine import LOOK_BACK
from freda.decode.generate import Output, Request, generate
from freda.decode.stops import cut_at_stop
from freda.errors import FredaError, missing_package, require
from freda.eval.evaluate import about_model, fitted, settings_of
from freda.eval.folder import RESULTS, read_samples
from freda.eval.harness_tasks import HARNESS_TASKS
from freda.eval.likelihood import Pair, log_likelihood
from freda.eval.sandbox import isolation
from freda.eval.tasks import TASKS
from freda.eval.tasks.task import Example, checksum
from freda.files import write_whole
from freda.folders.model_folder import LoadedModel
from freda.methods import METHODS

HARNESS = "harness.json"
SHOWN_IDS = 5
Progress = Callable[[int, int], None]  # requests done, requests in all
GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}  # what a task may ask of a generation


class Instance(Protocol):
    """A request of lm_eval."""

    args: tuple[Any, ...]


# -- the model, as lm_eval sees it -----------------------------------------------------------------------------------


class Answerer:
    """Answers requests; `make_lm` makes an lm_eval model of it. `outputs` keeps what was generated, for counting."""

    def __init__(
        self, loaded: LoadedModel, settings: DecodeConfig, batch_size: int, progress: Progress | None = None
    ) -> None:
        super().__init__()
        self.loaded, self.settings, self.batch_size = loaded, settings, batch_size
        self.method, self.outputs = METHODS[loaded.method.name], list[Output]()
        self._progress = progress or (lambda done, total: None)

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """log p of every continuation after its context, and whether each of its tokens is the most probable one."""
        pairs = [self._pair(*request.args) for request in requests]
        scored = log_likelihood(self.loaded, pairs, progress=lambda done: self._progress(done, len(pairs)))
        return [(one.log_prob, one.greedy) for one in scored]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """log p of whole texts. One that is longer than the model's positions is cut as lm_eval cuts it, into windows
        that see one token of what came before."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        longest, pairs, owners = self.loaded.backbone.config.max_positions - 1, list[Pair](), list[int]()
        for number, request in enumerate(requests):
            tokens = self.loaded.tokenizer.encode(request.args[0])
            windows = get_rolling_token_windows(tokens, self.loaded.tokenizer.eos_id, longest, context_len=1)
            for first, window in enumerate(map(make_disjoint_window, windows)):
                pairs.append(window if first else (self._before(), window[1]))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, scored in zip(owners, log_likelihood(self.loaded, pairs), strict=True):
            sums[number] += scored.log_prob
        return sums

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Texts up to the first of a request's stop strings. Neighbours that stop alike go side by side."""
        asked = [self._asked(number, *request.args) for number, request in enumerate(requests)]
        texts: list[str] = []
        for stops, group in itertools.groupby(asked, key=lambda one: one[1]):
            alike = [request for request, _ in group]
            for first in range(0, len(alike), self.batch_size):
                texts += self._texts(alike[first : first + self.batch_size], stops)
                self._progress(len(texts), len(asked))
        return texts

    def _pair(self, context: str, continuation: str) -> Pair:
        """The two as tokens of their joint text, cut where the context's own tokens end: a space or a letter that the
        tokenizer joins with what follows belongs to the continuation."""
        alone, whole = self.loaded.tokenizer.encode(context), self.loaded.tokenizer.encode(context + continuation)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(alone, whole, strict=False)))
        return whole[:shared] or self._before(), whole[shared:]

    def _before(self) -> list[int]:
        """What stands before a text: nothing, or for an autoregressive model the token that ends the one before."""
        return [] if self.method.DRAFTS else [self.loaded.tokenizer.eos_id]

    def _asked(self, number: int, context: str, options: dict[str, Any]) -> tuple[Request, tuple[str, ...]]:
        """lm_eval's options in ours. The length is the task's own, at most ours; ours where the task sets none."""
        from lm_eval.models.utils import normalize_gen_kwargs

        wanted = normalize_gen_kwargs(options, default_max_gen_toks=self.settings.max_new_tokens)
        odd = next((name for name in wanted if name not in GENERATION and (name, wanted[name]) != ("num_beams", 1)), "")
        if odd:
            raise FredaError(f"the task generates with {odd} = {wanted[odd]!r}, which freda has not; leave it out")
        temperature = wanted.get("temperature", 0.0)
        prompt = self.loaded.tokenizer.encode(context)
        length = replace(self.settings, max_new_tokens=min(self.settings.max_new_tokens, wanted["max_gen_toks"]))
        settings = {
            **asdict(fitted(self.loaded, length, prompt)),
            "temperature": temperature,
            "top_p": wanted.get("top_p", 1.0),
            "seed": self.settings.seed + (number if temperature else 0),  # repeats are to differ
        }
        return Request(**settings, prompt=prompt), tuple(filter(None, wanted["until"]))

    def _texts(self, batch: Sequence[Request], stops: Sequence[str]) -> list[str]:
        tokenizer, longest = self.loaded.tokenizer, max((len(stop.encode()) for stop in stops), default=0)
        looked_at = max(LOOK_BACK, longest + self.loaded.method.block_size)

        def stopped(tokens: Sequence[int]) -> bool:
            text = tokenizer.decode(tokens[-looked_at:])
            return any(stop in text for stop in stops)

        made = generate(
            self.loaded.backbone, self.method, self.loaded.method, batch, stop_ids=tokenizer.stop_ids, stopped=stopped
        )
        self.outputs += made
        return [cut_at_stop(tokenizer.decode(output.tokens), stops) for output in made]


def make_lm(loaded: LoadedModel, settings: DecodeConfig, batch_size: int, progress: Progress | None = None) -> Any:
    """An `Answerer` that lm_eval takes for one of its models."""
    from lm_eval.api.model import LM

    return type("FredaLM", (Answerer, LM), {})(loaded, settings, batch_size, progress)


# -- a task -----------------------------------------------------------------------------------------------------------


def check_installed() -> str:
    """The version of lm_eval; an error if it is not installed."""
    try:
        return importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        raise missing_package("lm_eval", "harness") from None


def run_task(
    loaded: LoadedModel,
    name: str,
    examples: Sequence[Example] | None,
    place: Path,
    *,
    data: Path,
    settings: DecodeConfig,
    batch_size: int = 64,
    limit: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Let lm_eval ask one task; returns what `harness.json` in `place` holds.

    `examples` are our own evaluator's, already cut to the limit: lm_eval is given as many questions, and what it asks
    is compared with them. They are None for a task that only lm_eval has, which then reads its files from the Hub.
    """
    require(batch_size >= 1, f"batch_size is {batch_size}; use 1 or more")
    version, begun = check_installed(), time.perf_counter()
    if examples is not None:
        settings = settings_of(TASKS[name], settings)
    lm = make_lm(loaded, settings, batch_size, progress)
    if examples is not None and HARNESS_TASKS[name].metric.endswith(",sandbox"):
        isolation()  # says what the kernel does not grant, before lm_eval is made silent
    with _silence():
        tasks = _own(name, data, len(examples)) if examples is not None else _registered(name, version)
        found = _simple_evaluate(lm, tasks, limit if examples is None else 0)
    by_choice = examples is not None and bool(TASKS[name].CHOICES)
    forwards = sum(output.nfe for output in lm.outputs)
    results = {
        "task": name,
        "lm_eval": version,
        "version": __version__,
        **about_model(loaded),
        "settings": {"by": "likelihood"} if by_choice else {**asdict(settings), "by": "generation"},
        "metrics": _metrics(name, found),
        "nfe": forwards / len(lm.outputs) if forwards else None,  # of likelihoods lm_eval's requests are not counted
        "tpf": sum(len(output.tokens) for output in lm.outputs) / forwards if forwards else None,
        "seconds": round(time.perf_counter() - begun, 2),
        "n": sum(count["effective"] for count in found["n-samples"].values()),
    }
    if examples is not None:
        results |= _beside_ours(name, examples, _samples(name, found), results, place)
    place.mkdir(parents=True, exist_ok=True)
    write_whole(place / HARNESS, json.dumps(results, indent=2) + "\n")
    return results


def _own(name: str, data: Path, count: int) -> list[Any]:
    """A task of ours in lm_eval's terms; parts make a group whose metric counts every question once."""
    from lm_eval.api.group import Group
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.config.group import GroupConfig

    parts = [ConfigurableTask(config=config) for config in HARNESS_TASKS[name].configs(data, count)]
    if parts[0].task_name == name:
        return parts
    metric = HARNESS_TASKS[name].metric.partition(",")[0]
    group = Group.from_config(GroupConfig(name, aggregate_metric_list=[{"metric": metric, "weight_by_size": True}]))
    for part in parts:
        group.add(part)
    return [group]


def _registered(name: str, version: str) -> list[Any]:
    """A task of lm_eval's own, with its own files."""
    from lm_eval.defaults import default_gen_kwargs
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    if name not in manager.all_tasks:
        known = ", ".join(HARNESS_TASKS)
        raise FredaError(
            f"there is no task {name!r}; use one of {known}, or one of lm_eval {version}: lm-eval ls tasks"
        )
    try:
        found = manager.load([name])
    except Exception as error:
        reason = str(error).strip() or type(error).__name__
        raise FredaError(f"lm_eval cannot load its task {name!r} ({reason}); its files come from the Hub") from error
    for task in found["tasks"].values():
        if getattr(task, "UNSAFE_CODE", False):
            raise FredaError(
                f"lm_eval's task {name!r} runs programs outside of freda's sandbox; use humaneval, humaneval_plus, mbpp"
            )
        options = task.config.generation_kwargs
        if options == default_gen_kwargs(task.config.fewshot_delimiter):
            del options["max_gen_toks"]  # lm_eval's 256, where the task says nothing: then --max-new-tokens counts
    return [found["groups"][name]] if name in found["groups"] else list(found["tasks"].values())


def _simple_evaluate(lm: Any, tasks: list[Any], limit: int) -> dict[str, Any]:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    found: dict[str, Any] = simple_evaluate(
        model=lm, tasks=tasks, limit=limit or None, task_manager=TaskManager(include_defaults=False)
    )
    return found


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps lm_eval's notes and progress bars back, unless --debug wants them; stdout is for answers in any case."""
    if logging.getLogger("freda").isEnabledFor(logging.DEBUG):
        from lm_eval.utils import setup_logging

        setup_logging()
        with contextlib.redirect_stdout(sys.stderr):
            yield
    else:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield


# -- what it found ----------------------------------------------------------------------------------------------------


def _metrics(name: str, found: dict[str, Any]) -> dict[str, float | None]:
    """Numbers by metric and filter; of tasks that share a name but no number, by task as well."""
    tables = {
        task: {key: value for key, value in table.items() if "," in key} for task, table in found["results"].items()
    }
    named = {"": tables[name]} if tables.get(name) else {f"{task} ": table for task, table in tables.items()}
    return {
        task + key: float(value) if isinstance(value, int | float) and math.isfinite(value) else None
        for task, table in named.items()
        for key, value in table.items()
    }


def _samples(name: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """The logged samples of the compared metric, in the order of the questions: prompt, output and verdict."""
    metric, _, chosen = HARNESS_TASKS[name].metric.partition(",")
    choices, samples = TASKS[name].CHOICES, []
    for part in found["samples"].values():
        for sample in sorted((one for one in part if one["filter"] == chosen), key=lambda one: one["doc_id"]):
            first = [answers[0] for answers in sample["resps"]]
            output = choices[max(range(len(first)), key=lambda index: first[index][0])] if choices else first[0]
            prompt = sample["arguments"][0][0]
            samples.append({"prompt": prompt, "output": output, "correct": bool(sample[metric])})
    return samples


def _beside_ours(
    name: str, examples: Sequence[Example], samples: list[dict[str, Any]], results: dict[str, Any], place: Path
) -> dict[str, Any]:
    """The headline, how many prompts are ours byte for byte, and the comparison with our evaluator's answers."""
    metric = HARNESS_TASKS[name].metric
    equal = sum(one["prompt"] == example.prompt for one, example in zip(samples, examples, strict=True))
    beside = {
        "metric": metric,
        "accuracy": results["metrics"][metric],
        "standard_error": results["metrics"][metric.replace(",", "_stderr,")],
        "checksum": checksum(examples),
        "prompts_equal": equal,
    }
    return {**beside, "freda": _compared(examples, samples, {**results, **beside}, place)}


def _compared(
    examples: Sequence[Example], samples: list[dict[str, Any]], results: dict[str, Any], place: Path
) -> dict[str, Any] | None:
    """Question by question beside `results.json`; None without it, and what differs where it is of something else."""
    if not (place / RESULTS).is_file():
        return None
    ours = json.loads((place / RESULTS).read_text(encoding="utf-8"))
    other = [key for key in ("model", "dtype", "settings", "n", "checksum") if ours.get(key) != results[key]]
    if other:
        return {"other": other}
    answers = read_samples(place)[1]
    pairs = [(answers[example.id], sample) for example, sample in zip(examples, samples, strict=True)]
    return {
        "accuracy": ours["accuracy"],
        "outputs_equal": sum(answer["output"] == sample["output"] for answer, sample in pairs),
        "differ": [answer["id"] for answer, sample in pairs if answer["correct"] != sample["correct"]],
    }


def harness_line(found: dict[str, Any]) -> str:
    """One task in a line."""
    if "metric" not in found:
        numbers = ", ".join(f"{key} {value:.4f}" for key, value in found["metrics"].items() if value is not None)
        return f"{found['task']}: lm_eval {numbers} (n = {found['n']})"
    error = found["standard_error"]
    spread = "" if error is None else f" ± {100 * error:.2f}"
    line = (
        f"{found['task']}: lm_eval {100 * found['accuracy']:.2f}{spread} ({found['metric']}; n = {found['n']}), "
        f"{found['prompts_equal']} of {found['n']} prompts equal to ours"
    )
    ours = found["freda"]
    if ours is None:
        return f"{line}; no {RESULTS} of freda eval to compare with"
    if "other" in ours:
        return f"{line}; not compared: {RESULTS} has another {', another '.join(ours['other'])}"
    differ = ours["differ"]
    more = f" and {len(differ) - SHOWN_IDS} more" if len(differ) > SHOWN_IDS else ""
    which = f", not on {', '.join(differ[:SHOWN_IDS])}{more}" if differ else ""
    return (
        f"{line}; freda eval {100 * ours['accuracy']:.2f}: the same output on {ours['outputs_equal']}, "
        f"the same verdict on {found['n'] - len(differ)} of {found['n']}{which}"
    )
