"""`freda eval --harness`: tasks of lm-evaluation-harness, asked of a freda model.

lm_eval (an optional package) builds the prompts, finds the answers in the texts and counts; this module answers its
requests with our likelihood and our engine. `harness.json` gets its metrics and the forwards, which it cannot count.
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
from typing import Any

from freda import __version__
from freda.decode.api import Model
from freda.decode.request import Output, Request, cut_at_stop
from freda.errors import FredaError, missing_package, require
from freda.eval.config import EvalSettings
from freda.eval.evaluate import about_model, request_for
from freda.eval.likelihood import Pair, log_likelihood
from freda.files import write_whole

HARNESS = "harness.json"
Progress = Callable[[int, int], None]  # requests done, requests in all
GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}  # options that a task may set


class Answerer:
    """Answers requests; `make_lm` turns it into an lm_eval model. `outputs` keeps what was generated, for counting."""

    def __init__(self, model: Model, settings: EvalSettings, progress: Progress) -> None:
        super().__init__()
        self.model, self.settings, self.outputs, self._progress = model, settings, list[Output](), progress

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """log p of every continuation after its context, and whether each of its tokens is the most probable one."""
        pairs = [self._pair(*request.args) for request in requests]
        scored = log_likelihood(self.model.loaded, pairs, progress=lambda done: self._progress(done, len(pairs)))
        return [(one.log_prob, one.greedy) for one in scored]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """log p of whole texts; too long ones are cut as lm_eval cuts them, into windows that see one token before."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        loaded, texts = self.model.loaded, list[list[Pair]]()
        eos, longest = loaded.tokenizer.eos_id, loaded.backbone.config.max_positions - 1
        for request in requests:
            windows = get_rolling_token_windows(loaded.tokenizer.encode(request.args[0]), eos, longest, context_len=1)
            pairs = enumerate(map(make_disjoint_window, windows))
            texts.append([(before if number else self._before(), own) for number, (before, own) in pairs])
        scored = iter(log_likelihood(loaded, [pair for text in texts for pair in text]))
        return [sum((next(scored).log_prob for _ in text), 0.0) for text in texts]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Texts up to the first of each request's stop strings; an empty one where a request cannot be answered."""
        asked = [self._request(number, *request.args) for number, request in enumerate(requests)]
        found: dict[int, Output] = {}
        for index, output in self.model.engine.completed(asked):
            found[index] = output
            self._progress(len(found), len(asked))
        outputs, decode = [found[index] for index in range(len(asked))], self.model.loaded.tokenizer.decode
        self.outputs += outputs
        return [cut_at_stop(decode(out.tokens), one.stop) for out, one in zip(outputs, asked, strict=True)]

    def _pair(self, context: str, continuation: str) -> Pair:
        """Split the tokens of the joint text where the context's own tokens end: a space or a letter that the tokenizer
        joins with what follows belongs to the continuation."""
        encode = self.model.loaded.tokenizer.encode
        alone, whole = encode(context), encode(context + continuation)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(alone, whole, strict=False)))
        return whole[:shared] or self._before(), whole[shared:]

    def _before(self) -> list[int]:
        """The context of a text's first token: empty, or where it is predicted behind a known one, BOS or, if there is
        none, the token that ends a document."""
        tokenizer, held = self.model.loaded.tokenizer, self.model.loaded.method.geometry.held
        return [tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id] * held

    def _request(self, number: int, context: str, options: dict[str, Any]) -> Request:
        """Translate lm_eval's options. The length is the task's own, at most ours; ours where the task sets none."""
        from lm_eval.models.utils import normalize_gen_kwargs

        wanted = normalize_gen_kwargs(options, default_max_gen_toks=self.settings.max_new_tokens)
        odd = next((name for name in wanted if name not in GENERATION and (name, wanted[name]) != ("num_beams", 1)), "")
        if odd:
            raise FredaError(f"the task generates with {odd} = {wanted[odd]!r}, which freda does not support; omit it")
        temperature = wanted.get("temperature", 0.0)
        settings = replace(
            self.settings,
            max_new_tokens=min(self.settings.max_new_tokens, wanted["max_gen_toks"]),
            temperature=temperature,
            top_p=wanted.get("top_p", 1.0),
            seed=self.settings.seed + (number if temperature else 0),  # repeats are to differ
        )
        prompt = self.model.loaded.tokenizer.encode(context)
        return request_for(self.model, prompt, settings, tuple(filter(None, wanted["until"])))


def make_lm(model: Model, settings: EvalSettings, progress: Progress = lambda done, total: None) -> Any:
    """An `Answerer` that lm_eval accepts as one of its models."""
    from lm_eval.api.model import LM

    return type("FredaLM", (Answerer, LM), {})(model, settings, progress)


def check_installed() -> str:
    """The version of lm_eval; an error if it is not installed."""
    try:
        return importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        raise missing_package("lm_eval", "harness") from None


def run_task(lm: Any, name: str, place: Path, limit: int = 0) -> dict[str, Any]:
    """Let lm_eval ask one of its tasks of what `make_lm` returns; gives what `harness.json` in `place` holds."""
    version, begun = check_installed(), time.perf_counter()
    with silence():
        found = simple_evaluate(lm, _registered(name, version), limit)
    failed = [output.error for output in lm.outputs if output.finish == "error"]
    require(not failed or len(failed) < len(lm.outputs), f"{name}: no request could be answered: {failed[:1]}")
    forwards = sum(output.nfe for output in lm.outputs)
    results = {
        "task": name,
        "lm_eval": version,
        "version": __version__,
        **about_model(lm.model.loaded),
        "settings": asdict(lm.settings),
        "metrics": metrics_of(name, found),
        "nfe": forwards / len(lm.outputs) if forwards else None,  # forwards of likelihoods are not counted
        "tpf": sum(len(output.tokens) for output in lm.outputs) / forwards if forwards else None,
        "errors": len(failed),
        "seconds": round(time.perf_counter() - begun, 2),
        "n": sum(count["effective"] for count in found["n-samples"].values()),
    }
    place.mkdir(parents=True, exist_ok=True)
    write_whole(place / HARNESS, json.dumps(results, indent=2) + "\n")
    return results


def _registered(name: str, version: str) -> list[Any]:
    """A task or group of lm_eval's own, with its own files."""
    from lm_eval.defaults import default_gen_kwargs
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    if name not in manager.all_tasks:
        raise FredaError(f"lm_eval {version} has no task {name!r}; list its tasks with: lm-eval ls tasks")
    try:
        found = manager.load([name])
    except Exception as error:
        reason = str(error).strip() or type(error).__name__
        raise FredaError(f"lm_eval cannot load its task {name!r} ({reason}); its files come from the Hub") from error
    for task in found["tasks"].values():
        odd = f"lm_eval's task {name!r} runs programs outside of freda's sandbox"
        safe = not getattr(task, "UNSAFE_CODE", False)
        require(safe, f"{odd}; omit --harness and use humaneval, humaneval_plus or mbpp")
        options = task.config.generation_kwargs
        if options == default_gen_kwargs(task.config.fewshot_delimiter):
            del options["max_gen_toks"]  # lm_eval's 256, where the task says nothing: then --max-new-tokens counts
    return [found["groups"][name]] if name in found["groups"] else list(found["tasks"].values())


def simple_evaluate(lm: Any, tasks: list[Any], limit: int = 0) -> dict[str, Any]:
    """What lm_eval's function of this name returns for these tasks."""
    from lm_eval.evaluator import simple_evaluate as run
    from lm_eval.tasks import TaskManager

    return dict(run(model=lm, tasks=tasks, limit=limit or None, task_manager=TaskManager(include_defaults=False)))


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Suppress lm_eval's notes and progress bars, unless --debug wants them; stdout is for answers in any case."""
    debug = logging.getLogger("freda").isEnabledFor(logging.DEBUG)
    if debug:
        from lm_eval.utils import setup_logging

        setup_logging()
    said = sys.stderr if debug else io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        yield


def metrics_of(name: str, found: dict[str, Any]) -> dict[str, float | None]:
    """Numbers by metric and filter; for a group without a number of its own, also by task."""
    results = found["results"]
    has_own = any("," in key for key in results.get(name, {}))
    named = {"": results[name]} if has_own else {f"{task} ": table for task, table in results.items()}
    return {
        task + key: float(value) if isinstance(value, int | float) and math.isfinite(value) else None
        for task, table in named.items()
        for key, value in table.items()
        if "," in key
    }


def harness_line(found: dict[str, Any]) -> str:
    """The metrics of one task in a line."""
    numbers = ", ".join(f"{key} {value:.4f}" for key, value in found["metrics"].items() if value is not None)
    errors = f", {found['errors']} errors" if found["errors"] else ""
    return f"{found['task']}: lm_eval {numbers} (n = {found['n']}{errors})"
