"""Does a scorer pick better drafts? Self-refinement against Best-of-N on the demo's task.

For every setting and seed: the demo's base, self-refinement from it, and three scorers from that (sampled negatives,
beam negatives, sampled negatives with a last layer of the scorer's own); then exact match on held-out problems over
width, τ and passes, paired with self-refinement, and what the choices among candidates get right and wrong.

    python experiments/best_of_n.py --out runs/best-of-n --settings demo short varied --seeds 0 1 2
    python experiments/best_of_n.py --merge runs/best-of-n --results results/best-of-n.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from freda import __version__
from freda.data.prepare import prepare_corpus
from freda.data.synthetic import Problem, grade, problems_of
from freda.decode.generate import Output, Pass, Request, generate
from freda.demo import LONGEST_SOLUTION, THRESHOLD, Plan, make_plan
from freda.eval.teacher_forcing import solution_batch
from freda.methods import METHODS
from freda.methods.best_of_n import beam_slots, frozen_clean_half, proposal, score_slots
from freda.methods.config import MethodConfig
from freda.model.transformer import pick_device
from freda.folders.model_folder import LoadedModel, load_model
from freda.train.config import RunConfig, TrainConfig
from freda.train.loop import train

PROBLEMS = 2000
WIDTHS, TAUS, PASSES = (2, 4), (0.0, 0.1, 0.3, 1.0), (2, 3, 4)
SCORERS: dict[str, dict[str, Any]] = {
    "sampled": {},
    "beam": {"negatives": "beam"},
    "sampled, own last layer": {"scorer_layer": True},
}


def plan_of(setting: str, out: Path, seed: int) -> Plan:
    """The demo's plan, or one that leaves more to be repaired: fewer steps, or several right wordings."""
    plan = make_plan(out, seed, quick=False)
    if setting == "short":
        return replace(plan, tuned=replace(plan.tuned, steps=300))
    if setting == "varied":
        return replace(plan, corpus=replace(plan.corpus, varied=True))
    return plan


def run(setting: str, seed: int, out: Path, device: str, *, quick: bool) -> dict[str, Any]:
    """One setting, one seed."""
    begun, plan = time.perf_counter(), plan_of(setting, out, seed)
    stage2 = TrainConfig(**{**asdict(plan.tuned), "steps": 500, "lr": 1e-3, "init": str(out / "self-refine")})
    if quick:
        plan = replace(plan, base=replace(plan.base, steps=4), tuned=replace(plan.tuned, steps=4))
        stage2 = replace(stage2, steps=4)
    prepare_corpus(plan.corpus, out / "data")
    test = list(itertools.islice(problems_of(plan.corpus, "test"), 16 if quick else PROBLEMS))
    trained = [
        ("autoregressive", MethodConfig(name="autoregressive"), plan.base),
        ("self-refine", MethodConfig(name="self-refine"), plan.tuned),
        *((name, MethodConfig(name="best-of-n", **options), stage2) for name, options in SCORERS.items()),
    ]
    validation = {}
    for name, method, settings in trained:
        settings = replace(settings, device=device, attention="sdpa", validation_rows=128)
        config = RunConfig(corpus=plan.corpus, data=plan.data, model=plan.model, method=method, train=settings)
        validation[name] = train(config, out / name, name=f"{setting} {seed} {name}").validation
    rows = evaluate(out, test, device)
    kinds = {name: judge(load_model(out / name, pick_device(device)), test) for name in SCORERS}
    seconds = round(time.perf_counter() - begun)
    return {
        "setting": setting,
        "seed": seed,
        "seconds": seconds,
        "validation": validation,
        "rows": rows,
        "choices": kinds,
    }


def evaluate(out: Path, test: Sequence[Problem], device: str) -> list[dict[str, Any]]:
    """Exact match over the grid; every row of Best-of-N is paired with self-refinement of as many passes."""
    place = pick_device(device)
    plain, rows = {}, []
    for passes in PASSES:
        loaded = load_model(out / "self-refine", place)
        right, outputs, _ = solve(loaded, test, {"passes": passes})
        plain[passes] = right
        rows.append({"method": "self-refine", "passes": passes, **measured(right, outputs)})
    for name in SCORERS:
        loaded = load_model(out / name, place)
        for passes, width, tau in itertools.product(PASSES, WIDTHS, TAUS):
            if name != "sampled" and (width, passes) not in ((4, 2), (4, 4)):
                continue
            settings = {"passes": passes, "width": width, "tau": tau}
            right, outputs, changed = solve(loaded, test, settings)
            pairs = Counter(zip(plain[passes], right, strict=True))
            paired = {"mended": pairs[False, True], "spoiled": pairs[True, False], "changed": changed}
            rows.append({"method": name, **settings, **measured(right, outputs), **paired})
    return rows


def measured(right: list[bool], outputs: list[Output]) -> dict[str, Any]:
    """Accuracy and forwards. Not the time: several runs share the machine."""
    n, accuracy = len(right), sum(right) / len(right)
    nfe, tokens = sum(output.nfe for output in outputs), sum(len(output.tokens) for output in outputs)
    error = (accuracy * (1 - accuracy) / n) ** 0.5
    return {"n": n, "accuracy": accuracy, "standard_error": error, "nfe": nfe / n, "tpf": tokens / nfe}


def solve(
    loaded: LoadedModel, test: Sequence[Problem], settings: dict[str, Any]
) -> tuple[list[bool], list[Output], float]:
    """Which problems come out right, and in what share of the choices the scorer's winner is not the likeliest."""
    choices: Counter[bool] = Counter()

    def watch(step: Pass) -> None:
        if len(step.candidates) > 1:
            choices[step.winner != 0] += 1

    asked = [
        Request(
            prompt=loaded.tokenizer.encode(problem.prompt),
            threshold=THRESHOLD,
            max_new_tokens=LONGEST_SOLUTION,
            **settings,
        )
        for problem in test
    ]
    scored = METHODS[loaded.method.name].SCORES
    outputs = generate(
        loaded.backbone,
        METHODS[loaded.method.name],
        loaded.method,
        asked,
        stop_ids=loaded.tokenizer.stop_ids,
        watch=watch if scored else None,
    )
    texts = [loaded.tokenizer.decode(output.tokens) for output in outputs]
    right = [grade(problem, text) for problem, text in zip(test, texts, strict=True)]
    return right, outputs, choices[True] / max(1, choices.total())


@torch.no_grad()
def judge(loaded: LoadedModel, test: Sequence[Problem]) -> dict[str, Any]:
    """Blocks of written solutions over their true prefix, after one pass: what choosing by ℓ + τ·s does to them.

    A block is counted as *number* if its candidates differ in a digit, as *end* if they differ in EOS, else as *word*.
    """
    tokenizer, size = loaded.tokenizer, loaded.method.block_size
    counts: dict[str, Counter[str]] = {f"{tau:g}": Counter() for tau in TAUS[1:]}
    examples: dict[str, list[list[str]]] = {"mended": [], "spoiled": []}
    for first in range(0, len(test), 250):
        texts = [(problem.prompt, problem.document) for problem in test[first : first + 250]]
        batch, given = solution_batch(loaded, texts)
        clean = frozen_clean_half(loaded.backbone, batch, loaded.method)
        logits = proposal(loaded.backbone, batch, clean, loaded.method, 1)
        slots = beam_slots(logits, batch, loaded.method)
        values = score_slots(loaded.backbone, batch, clean, slots, loaded.method)
        share = logits.all().log_softmax(-1).gather(-1, slots.ids.transpose(1, 2))  # (R, L, S)
        likely = share.unflatten(1, (-1, size)).sum(2)
        free = ~given.view(len(given), -1, size).any(-1) & (batch.document >= 0)[:, ::size]
        for tau in TAUS[1:]:
            winner = (likely + tau * values).argmax(-1)
            for row, block in (free & (winner != 0)).nonzero().tolist():
                span = slice(block * size, (block + 1) * size)
                truth, texts = batch.tokens[row, span].tolist(), slots.ids[row, :, span].tolist()
                first, chosen = texts[0], texts[winner[row, block]]
                verdict = "mended" if chosen == truth else "spoiled" if first == truth else "wrong either way"
                counts[f"{tau:g}"][f"{verdict}: {kind(tokenizer, first, chosen)}"] += 1
                if tau == 1.0 and verdict in examples and len(examples[verdict]) < 12:
                    examples[verdict].append([tokenizer.decode(text) for text in (truth, first, chosen)])
            counts[f"{tau:g}"]["blocks"] += int(free.sum())
    return {"counts": {tau: dict(count) for tau, count in counts.items()}, "truth, likeliest, chosen": examples}


def kind(tokenizer: Any, first: Sequence[int], chosen: Sequence[int]) -> str:
    """What two candidates of a block differ in."""
    pairs = [(a, b) for a, b in zip(first, chosen, strict=True) if a != b]
    if any(tokenizer.eos_id in pair for pair in pairs):
        return "end"
    return "number" if any(any(c.isdigit() for c in tokenizer.decode(list(pair))) for pair in pairs) else "word"


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/best-of-n"))
    parser.add_argument("--settings", nargs="+", default=["demo", "short", "varied"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="a few steps only")
    parser.add_argument("--merge", type=Path, help="folder whose results are put together")
    parser.add_argument("--results", type=Path, default=Path("results/best-of-n.json"))
    options = parser.parse_args()
    if options.merge:
        runs = [json.loads(path.read_text()) for path in sorted(options.merge.glob("*/results.json"))]
        lines = ",\n".join(json.dumps(found) for found in runs)  # a run a line
        options.results.write_text(f'{{"version": "{__version__}", "runs": [\n{lines}\n]}}\n')
        return
    for setting, seed in itertools.product(options.settings, options.seeds):
        folder = options.out / f"{setting}-{seed}"
        found = run(setting, seed, folder, options.device, quick=options.quick)
        (folder / "results.json").write_text(json.dumps(found) + "\n")
        print(f"{setting} {seed}: {found['seconds']} s", file=sys.stderr)


if __name__ == "__main__":
    main()
