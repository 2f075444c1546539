"""The mini suite: contents of one split only, answers that are right, graders that are not fooled."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from freda.data import mini, mini_code, mini_math
from freda.data.config import DocumentsConfig, MiniConfig, PrepareConfig, PrepareFile, SourceConfig
from freda.data.documents import Document, Source, read
from freda.data.mini import GENERATORS
from freda.data.mini_logic import World
from freda.data.mini_math import Calculation, Step
from freda.data.prepare import prepare
from freda.data.shards import Manifest
from freda.data.synthetic import Item, Split, split_of
from freda.data.tokenizer import Tokenizer
from freda.decode.request import cut_at_stop
from freda.errors import FredaError
from freda.eval.command import self_check
from freda.eval.tasks import TASKS
from freda.eval.tasks.task import Example

PLAIN = MiniConfig(documents=200, validation_documents=20)
KINDS = tuple(mini.KINDS)
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
MADE: dict[tuple[mini.MiniKind, Split, MiniConfig], list[Item]] = {}  # the first of each, made once for all tests


def items(kind: mini.MiniKind, split: Split, count: int, config: MiniConfig = PLAIN) -> list[Item]:
    made = MADE.setdefault((kind, split, config), [])
    made += [mini.item(kind, config, split, number) for number in range(len(made), count)]
    return made[:count]


@cache
def questions(kind: mini.MiniKind) -> list[Item]:
    return mini.questions(kind, PLAIN, "test", 2000)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of shards of all three kinds."""
    out = tmp_path_factory.mktemp("mini") / "data"
    sources = {kind: SourceConfig(kind=kind) for kind in KINDS}
    prepare(PrepareFile(mini=PLAIN, prepare=PrepareConfig(vocab_size=2048, parts=2), source=sources), out)
    return out


# -- splits ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_content_of_a_test_question_is_in_training(kind: mini.MiniKind) -> None:
    asked = {item.key for item in questions(kind)}
    assert len(asked) == 2000
    count = 2_000 if kind == "mini_code" else 8_000  # functions take five times as long to find
    trained = {item.key for item in items(kind, "train", count)}
    assert len(trained) > 0.6 * count and not asked & trained
    other = dataclasses.replace(PLAIN, seed=5)
    assert not asked & {item.key for item in items(kind, "train", 1_000, other)}, "whatever the seed"


@pytest.mark.parametrize("kind", KINDS)
def test_the_splits_are_those_of_the_keys(kind: mini.MiniKind) -> None:
    for split in SPLITS:
        assert {split_of(item.key) for item in items(kind, split, 100)} == {split}


def test_calculations_that_differ_in_order_only_are_one() -> None:
    add, take, double, half = Step("add", 5), Step("take", 3), Step("times", 2), Step("share", 2)
    assert Calculation(12, (add, take), False).key == Calculation(12, (take, add), False).key
    assert Calculation(12, (Step("add", 5),), False).key == Calculation(5, (Step("add", 12),), False).key
    assert Calculation(4, (Step("parcels", 3, 7),), False).key == Calculation(4, (Step("parcels", 7, 3),), False).key
    assert Calculation(12, (add, double), False).key != Calculation(12, (double, add), False).key
    assert Calculation(12, (double, half), False).key == Calculation(12, (half, double), False).key
    assert Calculation(12, (add,), False).key != Calculation(12, (add,), True).key


def test_functions_that_do_the_same_are_one() -> None:
    """By an independent look at what the programs do: equal behaviour, equal key, and the other way round."""
    by_key = collections.defaultdict(set)
    for item in items("mini_code", "train", 1500):
        behaviour = [
            repr(mini_code.result(item.document, item.entry_point, probe)) for probe in mini_code.PROBES[item.family]
        ]
        by_key[item.key].add((item.family, *behaviour))
    assert all(len(found) == 1 for found in by_key.values())
    assert len({behaviour for found in by_key.values() for behaviour in found}) == len(by_key)


def test_worlds_are_the_same_however_they_are_told() -> None:
    inside = World("inside", 2, (("key", "cup"), ("pen", "jar"), ("nut", "tin"), ("ring", "mug")), (0, 1, 1, 3))
    assert inside.key == inside._replace(chains=inside.chains[::-1], letters=inside.letters[::-1]).key
    assert inside.key != inside._replace(letters=inside.letters[::-1]).key
    swap = World("swap", 4, (("k",), ("l",), ("m",), ("n",)), (0, 0, 2, 3), ((0, 1), (2, 3), (1, 2)))
    assert swap.key == swap._replace(swaps=((3, 2), (1, 0), (1, 2))).key
    assert swap.key != swap._replace(swaps=((0, 1), (1, 2), (2, 3))).key
    assert swap._replace(swaps=()).key == swap._replace(swaps=(), family="inside").key


def test_the_same_items_in_every_process() -> None:
    code = (
        "import hashlib; from freda.data.config import MiniConfig; from freda.data import mini\n"
        "made = [tuple(mini.item(kind, MiniConfig(), split, n)) for kind in mini.KINDS\n"
        "        for split in ('train', 'validation', 'test') for n in range(40)]\n"
        "print(hashlib.sha256(repr(made).encode()).hexdigest())"
    )
    command = [sys.executable, "-c", code]
    digests = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_texts_of_this_version() -> None:
    """If you change the texts on purpose, raise `mini.VERSION` and put the new digests here."""
    digests = {
        kind: hashlib.sha256("\n".join(one.document for split in SPLITS for one in items(kind, split, 30)).encode())
        for kind in KINDS
    }
    assert {kind: digest.hexdigest()[:16] for kind, digest in digests.items()} == DIGESTS


def test_too_easy_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mini, "PATIENCE", 100)
    with pytest.raises(FredaError, match=r"mini_code has about \d+ contents in the test split, not 2000"):
        mini.questions("mini_code", MiniConfig(code_steps_from=1, code_steps_to=1), "test", 2000)
    with pytest.raises(FredaError, match=r"math_steps_from is 4 and mini\.math_steps_to 3"):
        MiniConfig(math_steps_from=4, math_steps_to=3)


# -- answers, computed anew ------------------------------------------------------------------------------------------


def test_equations_hold_and_lead_from_the_question_to_the_answer() -> None:
    for item in items("mini_math", "train", 3000):
        equations = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)\.", item.solution)
        results = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
        for left, sign, right, result in equations:
            assert results[sign](int(left), int(right)) == int(result) <= PLAIN.math_max_number
            assert sign != "/" or int(left) % int(right) == 0
        assert item.solution.endswith(f"{equations[-1][3]}. The answer is {item.answer}.")
        known = set(re.findall(r"\d+", item.prompt))
        for left, _, right, result in equations:
            assert {left, right} <= known, "all numbers are given or worked out before"
            known.add(result)


def told_total(question: str) -> int:
    """The total of a story, from its words."""
    total = 0
    for sentence in re.split(r"(?<=[.?]) ", question):
        numbers = [int(number) for number in re.findall(r"\d+", sentence)]
        if not numbers or re.search(r"also has|shop has|day|years old|cost", sentence):
            continue
        if re.search(r"boxes|bags with|each of|packs", sentence):
            total += numbers[0] * numbers[1]
        elif "times as many" in sentence:
            total *= numbers[0]
        elif re.search(r"equal", sentence):
            total //= numbers[0]
        elif re.search(r"gives away|loses|sells|takes|gone|gives \d+", sentence):
            total -= numbers[0]
        else:
            total += numbers[0]
    return total


def test_stories_say_what_is_calculated() -> None:
    stories = [item for item in items("mini_math", "test", 400) if item.family == "story"]
    assert len(stories) > 200
    for item in stories:
        assert told_total(item.prompt.removeprefix("Q: ").partition("\n")[0]) == int(item.answer), item.prompt


def test_deductions_follow_from_their_facts() -> None:
    found: collections.Counter[str] = collections.Counter()
    for item in items("mini_logic", "test", 1000):
        if item.family == "walk":
            continue
        story, answer = item.document.split("\nAnswer: ")
        facts, _, question = story.rpartition(". ")
        asked, *others = re.findall(r"(\w+) ([ABCD])\.", answer)
        assert question == f"Where is {asked[0]}?"
        assert asked[1] == item.answer and item.document.startswith(f"{item.prompt} {item.answer}.")
        for one, letter in (asked, *others):
            assert ended(f"{facts}.", one)[0] == letter, item.document
        assert ended(f"{facts}.", asked[0])[1] == item.level
        assert len({asked, *others}) == min(PLAIN.logic_conclusions, answer.count(".")) >= 4
        found[item.family] += 1
    assert len(found) == 3 and min(found.values()) > 100


def test_walks_lead_where_they_say() -> None:
    """Every place that is said follows from the one said before it and the moves between."""
    walks = [item for item in items("mini_logic", "test", 1000) if item.family == "walk"]
    assert 400 < len(walks) < 600
    for item in walks:
        assert item.document == f"{item.prompt} {item.answer}."
        start, *rounds = item.document.removeprefix("Walk from ").removesuffix(".").split(". ")
        place = "ABCD".index(start)
        for moves, _, letter in (text.partition(", now at ") for text in rounds):
            place += sum({"left": 1, "right": -1, "across": 2}[move] for move in moves.split())
            assert "ABCD"[place % 4] == letter, item.document
        assert item.level == len(moves.split())


def ended(facts: str, one: str) -> tuple[str, int]:
    """The letter to which the facts lead from a thing or person, and how many of them it takes."""
    links = dict(re.findall(r" (\w+) (\w+)\.", facts.partition(" Swap")[0] + "."))
    hops = 0
    while one in links:
        one, hops = links[one], hops + 1
    for pair in re.findall(r"Swap ([ABCD]) and ([ABCD])", facts):
        one, hops = {pair[0]: pair[1], pair[1]: pair[0]}.get(one, one), hops + 1
    return one, hops


def test_lessons_are_for_training_only() -> None:
    made = {split: items("mini_logic", split, 2000) for split in ("train", "test")}  # type: ignore[arg-type]
    assert not any(item.lesson for item in made["test"])
    assert 0.6 < sum(item.lesson for item in made["train"]) / 2000 < 0.75
    facts = {
        split: {
            item.prompt.partition(" Swap")[0].partition(" Where")[0].count(".")
            for item in made[split]
            if item.family == "swap"
        }
        for split in made
    }
    assert facts == {"train": set(range(1, 9)), "test": {8}}


def test_right_letters_are_even() -> None:
    counts = collections.Counter(item.answer for item in questions("mini_logic"))
    assert set(counts) == set("ABCD")
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 16.3  # chi squared, one in a thousand


def test_levels_and_families_are_all_there() -> None:
    for kind, levels in (("mini_math", "math_steps"), ("mini_code", "code_steps"), ("mini_logic", "logic_hops")):
        made = items(kind, "train", 2000)  # type: ignore[arg-type]
        least, most = getattr(PLAIN, f"{levels}_from"), getattr(PLAIN, f"{levels}_to")
        assert {item.level for item in made if item.family != "walk"} == set(range(least, most + 1))
        if kind == "mini_logic":
            assert {item.level for item in made if item.family == "walk"} == set(range(least, 4 * most + 1))
    harder = MiniConfig(math_steps_from=7, math_steps_to=8, logic_hops_from=6, logic_hops_to=6, math_max_number=999)
    assert min(item.level for item in items("mini_math", "test", 50, harder)) == 7
    made = items("mini_logic", "test", 400, harder)
    assert {item.level for item in made if item.family != "walk"} == {6}
    assert {item.level for item in made if item.family == "walk"} == set(range(6, 25))


def test_wordings_vary_and_solutions_do_not() -> None:
    made = items("mini_code", "train", 3_000)
    bodies = collections.defaultdict(set)
    for item in made:
        bodies[item.prompt].add(item.solution)
    assert len(bodies) > 2_950 and all(len(found) == 1 for found in bodies.values())


# -- as a source -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_parts_make_the_whole(kind: mini.MiniKind) -> None:
    source = Source(DocumentsConfig(kind=kind), generator=PLAIN)
    whole = list(read(source))
    parts = [list(read(source, part=part, parts=3)) for part in range(3)]
    assert [one for row in itertools.zip_longest(*parts) for one in row if one is not None] == whole
    assert all(isinstance(one, Document) for one in whole)
    assert collections.Counter(one.split for one in whole) == {"train": 200, "validation": 20}  # type: ignore[union-attr]
    assert whole[0].split == "validation", "a budget of tokens must not leave them out"  # type: ignore[union-attr]


def test_every_made_kind_has_its_generator() -> None:
    from freda.data.config import MADE

    assert tuple(GENERATORS) == MADE


# -- as tasks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_graders_check_themselves(kind: str, shards: Path) -> None:
    task = TASKS[kind]
    assert task.rows >= 2000
    checked = self_check(dataclasses.replace(task, rows=20) if kind == "mini_code" else task, shards)
    assert checked.passed and not checked.failures, checked


def test_wrong_programs_fail(shards: Path) -> None:
    task = TASKS["mini_code"]
    examples = task.load(shards, 8)
    shifted = [example.gold for example in examples[1:]] + [examples[0].gold]
    assert not any(one.correct for one in task.grade_all(examples, shifted)), "another function, or another variable"
    argument = [re.search(r"\((\w+)\)", example.prompt)[1] for example in examples]  # type: ignore[index]
    unchanged = [f"\n    return {name}\n" for name in argument]
    assert not any(one.correct for one in task.grade_all(examples, unchanged))
    rest = [f"{example.gold}\n\ndef more(x):\n    boom" for example in examples]
    cut = [cut_at_stop(text, task.stops) for text in rest]
    assert all(one.correct for one in task.grade_all(examples, cut)), "what follows the function is cut off"


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_ends_where_a_token_of_its_document_does(kind: mini.MiniKind, shards: Path) -> None:
    """Or the model is asked to go on from tokens that no document has: it says end of text."""
    tokenizer = Tokenizer.load(shards)
    for item in items(kind, "test", 400):
        prompt = tokenizer.encode(item.prompt)
        assert tokenizer.encode(item.document)[: len(prompt)] == prompt, item.document
        for choice in TASKS[kind].choices:
            assert tokenizer.encode(item.prompt + choice)[:-1] == prompt, choice


def test_difficulty_comes_from_the_shards(shards: Path, tmp_path: Path) -> None:
    examples = TASKS["mini_math"].examples(shards)
    levels = range(PLAIN.math_steps_from, PLAIN.math_steps_to + 1)
    assert isinstance(examples[0], Example) and {one.group for one in examples} == {f"steps {n}" for n in levels}
    assert [one.prompt for one in examples] == [one.prompt for one in questions("mini_math")]


def test_tables_have_no_two_phrases_alike() -> None:
    """A phrase with two meanings would make a question nobody can answer."""
    for table in (mini_code.OPERATIONS, mini_code.RETURNS):
        for state in ("numbers", "text", "words"):
            phrases = [phrase for one in table if one.takes == state for phrase in one.phrases]
            assert len(set(phrases)) == len(phrases), state
    told = [sentence for sentences in mini_math.TOLD.values() for sentence in sentences]
    assert len(set(told)) == len(told)


DIGESTS = {
    "mini_math": "1b95f3cd00e20412",
    "mini_code": "856940de9cf7bce8",
    "mini_logic": "62527f62e68e25f7",
}


# -- questions to a trained model --------------------------------------------------------------------------------------


def shards_of(folder: Path, settings: MiniConfig, version: int = mini.VERSION) -> Path:
    folder.mkdir()
    source = {"mini": {"generator": version, **dataclasses.asdict(settings)}}
    Manifest(source, align=4, eos_id=0, blank_id=1, tokenizer="", splits={}).write(folder)
    return folder


def test_a_message_becomes_the_beginning_of_a_document() -> None:
    assert mini.prompt_of("How many?") == mini.prompt_of("Q: How many?\nA:") == ("Q: How many?\nA:", ())
    assert mini.prompt_of("Walk from A. left, now at") == ("Walk from A. left, now at", (".",))
    assert mini.prompt_of('def f(x):\n    """Add."""') == ('def f(x):\n    """Add."""', ())
    assert mini.prompt_of("Facts: a. b.") == ("Facts: a. b.\nAnswer:", (".",))
    choice = "Who?\nA. Mia\nB. Tom\nC. Ann\nD. Leo"
    assert mini.prompt_of(choice) == mini.prompt_of(choice + "\nAnswer:") == (choice + "\nAnswer:", ())


def test_held_out_questions_are_as_difficult_as_the_shards(tmp_path: Path) -> None:
    settings = MiniConfig(math_steps_from=3, math_steps_to=3, seed=5)
    folder = shards_of(tmp_path / "shards", settings)
    assert mini.held_out(folder) == [mini.item(kind, settings, "test", 0).prompt for kind in mini.KINDS]
    assert {item.level for item in mini.questions_of("mini_math", folder, 4)} == {3}
    for prompt in mini.held_out(folder):
        typed = prompt.removesuffix("\nA:").removeprefix("Q: ").partition("\nAnswer:")[0]
        assert prompt.startswith(mini.prompt_of(typed)[0]) and mini.prompt_of(prompt)[0] == prompt


def test_questions_of_another_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FredaError, match=f"{mini.VERSION}"):
        mini.held_out(shards_of(tmp_path / "shards", MiniConfig(), mini.VERSION - 1))
