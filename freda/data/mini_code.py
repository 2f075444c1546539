"""Small Python functions from a sentence: a few transformations of a list of numbers or of a text, and what to return.

The sentence determines the program line by line; a step may be shown by an example instead (`code_shown`). The content
is what the function does, not how it is worded or composed: its key is a hash of what it returns for all `PROBES`, so
two programs that do the same are in the same split. The probes are also the tests: a program passes if and only if it
has that key.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from freda.data.config import MiniConfig
from freda.data.synthetic import Item, between, pick

State = Literal["numbers", "text", "words"]
PROBES: dict[str, tuple[Any, ...]] = {
    "numbers": (
        *([], [7], [3, 1, 2], [5, 5, 2, 8, 5], [-4, 10, 0, 6], [12, 9, 15, 3, 21, 8], [2, 4, 6, 8, 10, 12, 14]),
        *([-1, -7, 3, -2, 30, 18, 5, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [20, 11, 11, 13, 2, 17, 4]),
        *([16, 7, -3, 24, 7, 1, 13, 19, 6], [25, 14, 3, 9, 28, 2, 5, 22, 10, 17, 8]),
    ),
    "text": (
        *("", "a", "Tree", "hello world", "One two Three", "a bb ccc dddd eeeee", "Red apples and 12 green pears"),
        *("banana bread", "My cat sat on the mat", "zebra Yak x 7 owl", "moon sun star moon tea"),
        *("The end of a long day in June", "level noon deed was"),
    ),
}
LEAST_OUTPUTS = 5  # distinct results that a function must have for its probes to be worth asking for
SHOWN = 40  # inputs from which examples of a step are chosen
JUDGING = 6  # probes, the last and richest ones, on which every step must make a difference
NAMES = ("solve", "task", "change", "compute", "apply", "work", "process", "convert", "make", "answer")
ARGUMENTS = {"numbers": ("xs", "numbers", "values", "nums", "data"), "text": ("s", "text", "line", "sentence")}
LETTERS = tuple("aeinorst")
CONSTANTS = {name: tuple(map(str, range(2, end))) for name, end in (("k", 10), ("n", 6), ("f", 6), ("t", 21))}
CONSTANTS |= {"a": LETTERS, "b": LETTERS}


class Operation(NamedTuple):
    """A Python expression for the variable `v`, what it makes of what, and how to ask for it."""

    takes: State
    makes: State
    expression: str
    phrases: tuple[str, ...]


STATES: tuple[State, State, State] = ("numbers", "text", "words")
N, T, W = STATES
OPERATIONS = (
    Operation(N, N, "[x + {k} for x in {v}]", ("add {k} to each number", "increase every number by {k}")),
    Operation(N, N, "[x - {k} for x in {v}]", ("subtract {k} from each number", "lower every number by {k}")),
    Operation(N, N, "[x * {f} for x in {v}]", ("multiply each number by {f}", "make every number {f} times as large")),
    Operation(N, N, "[x // {f} for x in {v}]", ("divide each number by {f}, rounding down", "floor-divide all by {f}")),
    Operation(N, N, "[x % {k} for x in {v}]", ("take each number modulo {k}", "replace numbers by remainders of {k}")),
    Operation(N, N, "[x * x for x in {v}]", ("square each number", "replace every number by its square")),
    Operation(N, N, "[-x for x in {v}]", ("negate each number", "flip the sign of every number")),
    Operation(N, N, "[abs(x) for x in {v}]", ("take absolute values", "drop the sign of each number")),
    Operation(N, N, "[min(x, {t}) for x in {v}]", ("cap the numbers at {t}", "let no number be larger than {t}")),
    Operation(N, N, "[max(x, {t}) for x in {v}]", ("raise small numbers to {t}", "let no number be smaller than {t}")),
    Operation(N, N, "[x for x in {v} if x > {t}]", ("keep numbers above {t}", "drop all that is not larger than {t}")),
    Operation(N, N, "[x for x in {v} if x < {t}]", ("keep numbers below {t}", "drop all that is not smaller than {t}")),
    Operation(N, N, "[x for x in {v} if x != {t}]", ("remove every {t}", "leave out numbers equal to {t}")),
    Operation(N, N, "[x for x in {v} if x % 2 == 0]", ("keep the even numbers", "remove odd numbers")),
    Operation(N, N, "[x for x in {v} if x % 2 == 1]", ("keep the odd numbers", "remove even numbers")),
    Operation(N, N, "[x for x in {v} if x % {f} == 0]", ("keep multiples of {f}", "keep what {f} divides")),
    Operation(N, N, "list(dict.fromkeys({v}))", ("remove duplicates", "keep the first of equal numbers only")),
    Operation(N, N, "sorted({v})", ("sort the numbers", "put the numbers in ascending order")),
    Operation(N, N, "sorted({v}, reverse=True)", ("sort from large to small", "put the numbers in descending order")),
    Operation(N, N, "{v}[::-1]", ("reverse the list", "turn the list around")),
    Operation(N, N, "{v}[::2]", ("take every second number", "skip every other number")),
    Operation(N, N, "{v}[:{n}]", ("keep the first {n}", "cut the list after {n} numbers")),
    Operation(N, N, "{v}[-{n}:]", ("keep the last {n}", "cut off all but the last {n}")),
    Operation(N, N, "{v}[{n}:]", ("drop the first {n}", "remove {n} numbers from the front")),
    Operation(N, N, "{v}[:-{n}]", ("drop the last {n}", "remove {n} numbers from the end")),
    Operation(N, N, "{v} + [{k}]", ("append {k}", "put {k} at the end")),
    Operation(N, N, "[{k}] + {v}", ("prepend {k}", "put {k} in front")),
    Operation(N, N, "{v} + {v}", ("repeat the list twice", "append the list to itself")),
    Operation(N, N, "[b - a for a, b in zip({v}, {v}[1:])]", ("take differences of neighbours", "list the increases")),
    Operation(N, N, "[a + b for a, b in zip({v}, {v}[1:])]", ("add neighbours", "take sums of neighbours")),
    Operation(N, N, "[i * x for i, x in enumerate({v})]", ("multiply numbers by their index", "weigh by position")),
    Operation(T, T, "{v}.upper()", ("make all letters capital", "convert to upper case")),
    Operation(T, T, "{v}.lower()", ("make all letters small", "convert to lower case")),
    Operation(T, T, "{v}.swapcase()", ("swap the case", "exchange capital and small letters")),
    Operation(T, T, "{v}.title()", ("write words with a capital", "convert to title case")),
    Operation(T, T, "{v}[::-1]", ("reverse the text", "turn the text around")),
    Operation(T, T, "{v}[::2]", ("take every second character", "skip every other character")),
    Operation(T, T, "{v}[:{k}]", ("keep the first {k} characters", "cut the text after {k} characters")),
    Operation(T, T, "{v}[-{k}:]", ("keep the last {k} characters", "cut off all but the last {k} characters")),
    Operation(T, T, "{v}[{n}:]", ("drop the first {n} characters", "remove {n} characters from the front")),
    Operation(T, T, "{v}[:-{n}]", ("drop the last {n} characters", "remove {n} characters from the end")),
    Operation(T, T, '{v}.replace(" ", "")', ("remove spaces", "delete all blanks")),
    Operation(T, T, '{v}.replace(" ", "_")', ("replace spaces by underscores", "write underscores for blanks")),
    Operation(T, T, '{v}.replace("{a}", "{b}")', ("replace {a} by {b}", "write {b} for every {a}")),
    Operation(T, T, '{v}.replace("{a}", "")', ("remove every {a}", "delete the letter {a}")),
    Operation(T, T, '"".join(c for c in {v} if c not in "aeiou")', ("remove small vowels", "delete a, e, i, o and u")),
    Operation(T, T, '"".join(c * {f} for c in {v})', ("write each character {f} times", "repeat characters {f} times")),
    Operation(T, T, '"".join(sorted({v}))', ("sort the characters", "put the characters in order")),
    Operation(T, T, '{v} + "{a}"', ("append the letter {a}", "put {a} at the end")),
    Operation(T, T, '"{a}" + {v}', ("prepend the letter {a}", "put {a} in front")),
    Operation(T, W, "{v}.split()", ("split into words", "make a list of the words")),
    Operation(T, W, '{v}.split("{a}")', ("split at every {a}", "cut the text at the letter {a}")),
    Operation(W, W, "{v}[::-1]", ("reverse the list", "turn the list around")),
    Operation(W, W, "sorted({v})", ("sort the list", "put the list in order")),
    Operation(W, W, "sorted({v}, key=len)", ("sort by length", "put short ones first")),
    Operation(W, W, "[w for w in {v} if len(w) > {n}]", ("keep those longer than {n}", "drop those up to length {n}")),
    Operation(W, W, "[w for w in {v} if len(w) < {k}]", ("keep those shorter than {k}", "drop lengths from {k} on")),
    Operation(W, W, '[w for w in {v} if "{a}" in w]', ("keep those with the letter {a}", "drop those without {a}")),
    Operation(W, W, '[w for w in {v} if "{a}" not in w]', ("keep those without the letter {a}", "drop those with {a}")),
    Operation(W, W, "[w[::-1] for w in {v}]", ("reverse each word", "turn every word around")),
    Operation(W, W, "[w[:{n}] for w in {v}]", ("cut each word to {n} letters", "keep {n} letters of every word")),
    Operation(W, W, "[w.upper() for w in {v}]", ("write each word in capitals", "make every word upper case")),
    Operation(W, W, "{v}[:{n}]", ("keep the first {n}", "cut the list after {n} words")),
    Operation(W, W, "{v}[{n}:]", ("drop the first {n}", "remove {n} words from the front")),
    Operation(W, N, "[len(w) for w in {v}]", ("take the length of each word", "replace every word by its length")),
)
RETURNS = (
    Operation(N, N, "{v}", ("the list", "the result")),
    Operation(N, N, "sum({v})", ("the sum", "the total")),
    Operation(N, N, "len({v})", ("how many there are", "the length of the list")),
    Operation(N, N, "max({v}, default=0)", ("the largest or 0", "the maximum, 0 if there is none")),
    Operation(N, N, "min({v}, default=0)", ("the smallest or 0", "the minimum, 0 if there is none")),
    Operation(N, N, "sum(x > {t} for x in {v})", ("how many are above {t}", "the count of numbers over {t}")),
    Operation(N, N, "sum(x % 2 == 0 for x in {v})", ("how many are even", "the count of even numbers")),
    Operation(T, T, "{v}", ("the text", "the result")),
    Operation(T, T, "len({v})", ("the number of characters", "the length of the text")),
    Operation(T, T, '{v}.count("{a}")', ("how often {a} occurs", "the count of {a}")),
    Operation(W, W, "{v}", ("the list", "the result")),
    Operation(W, W, '" ".join({v})', ("the words joined by spaces", "all of it as one text with spaces")),
    Operation(W, W, '"-".join({v})', ("the words joined by hyphens", "all of it as one text with hyphens")),
    Operation(W, W, "len({v})", ("how many there are", "the length of the list")),
    Operation(W, W, "max({v}, key=len, default='')", ("the longest", "the first of the longest words")),
)
FRAMES = (
    ("{First}", ", then {next}", ", and return {end}."),
    ("{First}", ". Then {next}", ". Return {end}."),
    ("First {first}", ", then {next}", ", finally return {end}."),
    ("Return {end} after these steps: {first}", "; {next}", "."),
    ("1. {First}", ". {number}. {Next}", ". {last}. Return {end}."),
)
OPENINGS = {
    "numbers": ("", "", "Given a list of numbers: ", "{v} is a list of whole numbers. "),
    "text": ("", "", "Given a text: ", "{v} is a string. "),
}


class Used(NamedTuple):
    """An operation with its constants, and the function it computes."""

    operation: Operation
    constants: dict[str, str]
    function: Callable[[Any], Any]

    def line(self, variable: str) -> str:
        """The expression of this step as source code."""
        return self.operation.expression.format(v=variable, **self.constants)


class Function(NamedTuple):
    """The steps of a function; the last one is the expression it returns."""

    family: State
    steps: tuple[Used, ...]
    key: str


def _uses(operation: Operation) -> list[Used]:
    """The operation with every choice of its constants."""
    names = [name for name in CONSTANTS if f"{{{name}}}" in operation.expression]
    choices = itertools.product(*(CONSTANTS[name] for name in names))
    found = [dict(zip(names, values, strict=True)) for values in choices if len(set(values)) == len(values)]
    sources = [operation.expression.format(v="v", **constants) for constants in found]  # of the tables above only
    return [Used(operation, one, eval(f"lambda v: {source}")) for one, source in zip(found, sources, strict=True)]


STEPS, ENDS = (
    {state: [_uses(operation) for operation in table if operation.takes == state] for state in STATES}
    for table in (OPERATIONS, RETURNS)
)


def _telling(state: State) -> list[tuple[Any, list[str]]]:
    """Short inputs, each with the results (as text) that only one step gives: such a result identifies the step."""
    rng, uses = random.Random(f"shown {state}"), list(itertools.chain.from_iterable(STEPS[state]))
    found = []
    for _ in range(SHOWN):
        numbers = [between(rng, -3, 24) for _ in range(6)]
        words = [pick(rng, ("tea", "Moon", "stars", "on", "sea", "Rain", "note", "is", "trees")) for _ in range(4)]
        example = {"numbers": numbers, "text": " ".join(words[:3]), "words": words}[state]
        results = collections.Counter(repr(use.function(example)) for use in uses)
        found.append((example, [result for result, count in results.items() if count == 1]))
    return found


TELLING = {state: _telling(state) for state in STATES}


def draw(rng: random.Random, config: MiniConfig) -> Function:
    """Draw a function that is worth asking for."""
    count = between(rng, config.code_steps_from, config.code_steps_to)
    return next(filter(None, (_drawn(rng, count) for _ in itertools.count())))


def _drawn(rng: random.Random, count: int) -> Function | None:
    """Draw a function with `count` steps; None unless every step matters and the results differ enough."""
    state = family = pick(rng, STATES[:2])
    steps = list[Used]()
    for _ in range(count):
        steps.append(pick(rng, pick(rng, STEPS[state])))
        state = steps[-1].operation.makes
    steps.append(pick(rng, pick(rng, ENDS[state])))
    outputs = [_result(steps, probe) for probe in PROBES[family]]
    if len(set(map(repr, outputs))) < LEAST_OUTPUTS:
        return None
    known = list(zip(PROBES[family], outputs, strict=True))[-JUDGING:]
    for place, step in enumerate(steps[:-1]):
        without = steps[:place] + steps[place + 1 :]
        same_type = step.operation.takes == step.operation.makes  # any other step cannot be omitted
        if same_type and all(_result(without, probe) == output for probe, output in known):
            return None
    key = hashlib.sha256(f"{family} {outputs}".encode()).hexdigest()[:24]
    return Function(family, tuple(steps), key)


def _result(steps: Sequence[Used], value: Any) -> Any:
    return functools.reduce(lambda made, step: step.function(made), steps, value)


def told(content: Function, rng: random.Random, config: MiniConfig) -> Item:
    """Write the head of the function with its docstring, and its body as the solution."""
    name, variable = pick(rng, NAMES), pick(rng, ARGUMENTS[content.family])
    *steps, last = content.steps
    shown = between(rng, 0, len(steps) - 1) if rng.random() < config.code_shown else -1
    sentence = pick(rng, OPENINGS[content.family]).format(v=variable) + _sentence(content, rng, shown)
    body = [f"\n    {variable} = {step.line(variable)}" for step in steps] + [f"\n    return {last.line(variable)}\n"]
    # The line end belongs to the body: with the indentation after it, it is one token, which a prompt must not cut.
    head = f'def {name}({variable}):\n    """{sentence}"""'
    solution = "".join(body)
    return Item(head, solution, solution, content.key, len(steps), content.family, name)


def _sentence(content: Function, rng: random.Random, shown: int) -> str:
    """All steps in words; step `shown` by an example, if the example identifies it."""
    start, following, end = pick(rng, FRAMES)
    *steps, returned = [pick(rng, used.operation.phrases).format(**used.constants) for used in content.steps]
    if shown >= 0:
        example, telling = pick(rng, TELLING[content.steps[shown].operation.takes])
        result = repr(content.steps[shown].function(example))
        steps[shown] = f"do what makes {result} of {example!r}" if result in telling else steps[shown]
    words = {"first": steps[0], "First": _capital(steps[0]), "end": returned, "last": len(steps) + 1}
    numbered = enumerate(steps[1:], start=2)
    middle = [following.format(next=step, Next=_capital(step), number=number) for number, step in numbered]
    return start.format(**words) + "".join(middle) + end.format(**words)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def result(program: str, name: str, given: Any) -> Any:
    """What a generated program returns. It is executed without a sandbox: never pass what a model wrote."""
    space: dict[str, Any] = {}
    exec(program, space)
    return space[name](given)


def tests_of(item: Item) -> str:
    """A function `check(candidate)` that compares all probes with what the reference returns."""
    cases = [(probe, result(item.document, item.entry_point, probe)) for probe in PROBES[item.family]]
    return (
        "def check(candidate):\n"
        f"    for given, expected in {cases!r}:\n"
        "        found = candidate(given)\n"
        '        assert found == expected, f"{given!r} gives {found!r:.80}, not {expected!r:.80}"\n'
    )
