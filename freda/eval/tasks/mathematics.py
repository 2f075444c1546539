"""GSM8K, 4-shot chain of thought, and MATH-500, 4-shot: word problems and competition mathematics.

GSM8K: the exemplars are the first four of the eight that most projects use (`fewshot/gsm8k_cot_8shot.json`). Strict
match, the headline, takes the number after "The answer is", flexible match the last number of the text.

MATH-500: the exemplars are the four of Minerva (`fewshot/minerva_math_4shot.json`). The answer is what follows "final
answer is", or else the last \\boxed{}; math-verify compares it with the published one. LaTeX can make it hang, so every
answer is graded in a worker process that is killed when it takes too long.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec
from pathlib import Path

from freda.errors import missing_package
from freda.eval.tasks.task import Example, Graded, Task, compared_with_gold, exemplars, json_rows, one_by_one

SHOTS = 4
STRICT = re.compile(r"[Tt]he answer is:?\s*\$?(-?[\d.,]*\d)")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
CALCULATOR = re.compile(r"<<[^>]*>>")  # annotations of the published solutions
FINAL = re.compile(r"final answer is:?\s*(.+?)(?:\.\s*I hope|\.?\s*$)", re.IGNORECASE | re.DOTALL)
SECONDS = 10  # for one answer; 1,000 comparisons of published answers take 2 s
TO_START = 300  # seconds that a process may take to start
LONGEST = 2_000  # characters of an answer that are looked at
Check = Callable[[str, str], bool]


def load_gsm8k(folder: Path, expected: int) -> list[Example]:
    """The test questions behind four exemplars."""
    rows = json_rows(folder / "gsm8k" / "test.jsonl", ("question", "answer"), expected)
    head = exemplars(folder / "fewshot" / "gsm8k_cot_8shot.json", "Q: {question}\nA: {target}\n\n", SHOTS)
    examples = []
    for number, row in enumerate(rows):
        gold = row["answer"].rpartition("####")[2].strip().replace(",", "")
        examples.append(Example(f"gsm8k/{number}", f"{head}Q: {row['question']}\nA:", gold, row))
    return examples


def grade_gsm8k(example: Example, text: str) -> Graded:
    """Strict match, with the verdict of flexible match beside it."""
    found, numbers = STRICT.search(text), NUMBER.findall(text)
    also = {"flexible": bool(numbers) and same_number(numbers[-1], example.gold)}
    if found is None:
        return Graded(False, "no 'The answer is'", "", also)
    return compared_with_gold(same_number(found[1], example.gold), found[1][:40], example, also)


def gsm8k_reference(example: Example) -> str:
    """The published solution in the exemplars' words."""
    solution = CALCULATOR.sub("", str(example.row["answer"]).rpartition("####")[0]).strip()
    return f" {solution} The answer is {example.gold}."


def same_number(one: str, other: str) -> bool:
    """Equality as numbers, whatever the commas and zeros. Decimal, because a float would call neighbours equal."""
    try:
        return Decimal(one.replace(",", "")) == Decimal(other.replace(",", ""))
    except InvalidOperation:
        return False


def load_math500(folder: Path, expected: int) -> list[Example]:
    """The problems behind four exemplars."""
    rows = json_rows(folder / "math500" / "test.jsonl", ("problem", "solution", "answer"), expected)
    template = "Problem:\n{problem}\n\nSolution:\n{solution}\n\n"
    head = exemplars(folder / "fewshot" / "minerva_math_4shot.json", template, SHOTS)
    return [
        Example(f"math500/{n}", f"{head}Problem:\n{r['problem']}\n\nSolution:", r["answer"], r, r.get("subject", ""))
        for n, r in enumerate(rows)
    ]


def grade_math500(examples: Sequence[Example], texts: Sequence[str]) -> list[Graded]:
    """Compare every answer with the published one, in worker processes."""
    pairs = [(example, answer_of(text)) for example, text in zip(examples, texts, strict=True)]
    verdicts, graded = iter(in_workers(same, [(example.gold, answer) for example, answer in pairs if answer])), []
    for example, answer in pairs:
        right = next(verdicts) if answer else None
        why = f"the grader failed, or gave up after {SECONDS} s" if answer else "no answer"
        unknown = Graded(False, why, answer)
        graded.append(unknown if right is None else compared_with_gold(right, answer, example))
    return graded


def in_workers(check: Check, pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
    """The verdicts of `check` on all pairs, from worker processes; None where it failed, ended its process or took too
    long. Then the processes are killed, and new ones go on."""
    found: dict[int, bool | None] = {}
    while waiting := {number: pair for number, pair in enumerate(pairs) if number not in found}:
        found |= _verdicts(check, waiting)
    return [found[number] for number in range(len(pairs))]


def _verdicts(check: Check, pairs: Mapping[int, tuple[str, str]]) -> dict[int, bool | None]:
    """Verdicts by number, up to the first answer that takes too long: then None for it."""
    workers, found = min(os.cpu_count() or 1, len(pairs)), dict[int, bool | None]()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        started = pool.starmap_async(_safely, [(check, "1", "1")] * workers, chunksize=1)
        started.get(TO_START)  # which must not use up an answer's time
        verdicts = {number: pool.apply_async(_safely, (check, *pair)) for number, pair in pairs.items()}
        for number, verdict in verdicts.items():
            verdict.wait(SECONDS)
            if not verdict.ready():
                found[number] = None
                break
        return found | {number: verdict.get() for number, verdict in verdicts.items() if verdict.ready()}


def _safely(check: Check, gold: str, answer: str) -> bool | None:
    """The verdict, or None if the check raises: no answer may end a run."""
    try:
        return check(gold, answer)
    except Exception:
        return None


def answer_of(text: str) -> str:
    """The answer that a solution gives; empty if it gives none."""
    if found := FINAL.search(text):
        return found[1].strip()[:LONGEST]
    _, boxed, rest = text.rpartition("\\boxed{")
    depth = 1
    for place, character in enumerate(rest if boxed else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:place][:LONGEST]
    return ""


def check_math_verify() -> None:
    """Raise if math-verify is missing."""
    if find_spec("math_verify") is None:
        raise missing_package("math-verify", "eval")


def same(gold: str, answer: str) -> bool:
    """Whether `answer` equals `gold`, as mathematics. The order matters: math-verify is not symmetric."""
    from math_verify import parse, verify

    bare = answer if re.fullmatch(r"\$.+\$", answer, re.DOTALL) else f"${answer}$"  # a gold of \$5 begins with no $
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about the next line
    # Its own time limits would call a right answer wrong on a busy machine; ours kills the process, and says so.
    first, second = parse(f"${gold}$", parsing_timeout=None), parse(bare, parsing_timeout=None)
    return bool(first and second and verify(first, second, timeout_seconds=None))


def math500_reference(example: Example) -> str:
    """The published solution in the exemplars' words."""
    return f" {example.row['solution']}\nFinal Answer: The final answer is ${example.gold}$. I hope it is correct."


GSM8K = Task(
    name="gsm8k",
    kind="mathematics",
    rows=1319,
    checksum="79e2b09803333a98",
    shots=SHOTS,
    stops=("Q:", "\n\n"),
    max_new_tokens=512,
    load=load_gsm8k,
    grade_all=one_by_one(grade_gsm8k),
    reference=gsm8k_reference,
)
MATH500 = Task(
    name="math500",
    kind="mathematics",
    rows=500,
    checksum="74fb98f251488617",
    shots=SHOTS,
    stops=("Problem:", "I hope it is correct."),
    max_new_tokens=1024,
    load=load_math500,
    grade_all=grade_math500,
    reference=math500_reference,
    check_ready=check_math_verify,
)
