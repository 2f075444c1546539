"""Stop strings in a text that grows: found at once, never shown, and no half characters."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from freda.data.tokenizer import Tokenizer
from freda.decode.request import StopMatcher, cut_at_stop
from tests.helpers import answering_model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return answering_model(["Ünïcödé, 日本語 and plain text. The end.\n"] * 20, 290, seed=0).tokenizer


@pytest.mark.parametrize("seed", range(30))
def test_what_is_taken_adds_up_to_the_text_before_the_first_stop(tokenizer: Tokenizer, seed: int) -> None:
    """Random ids, half characters among them, in pieces of random size; stop strings that are in the text, or begin."""
    rng = random.Random(seed)
    ids = tokenizer.encode("Ünïcödé 日本語: ") + [rng.randrange(tokenizer.size) for _ in range(80)]
    whole = tokenizer.decode(ids)
    begin = rng.randrange(len(whole) - 8)
    stops = [[], [whole[begin : begin + rng.randrange(1, 8)]], ["never there", whole[begin : begin + 3] + "☃"]][
        seed % 3
    ]
    matcher, given, taken = StopMatcher(tokenizer.decode, stops), 0, ""
    while given < len(ids) and not matcher.found:
        size = rng.randrange(1, 6)
        found, given = matcher.feed(ids[given : given + size]), given + size
        shown = tokenizer.decode(ids[:given])
        assert found == matcher.found == (cut_at_stop(shown, stops) != shown)
        taken += matcher.take()
        assert cut_at_stop(whole, stops).startswith(taken)
    assert taken + matcher.take(final=True) == cut_at_stop(tokenizer.decode(ids[:given]), stops)
    assert matcher.take(final=True) == ""


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    letters = "".join
    matcher = StopMatcher(letters, ["stop", "\n\n"])  # type: ignore[arg-type]
    told = []
    for piece in ("a st", "ep, \n", "st", "o", "p and more"):
        matcher.feed(piece)  # type: ignore[arg-type]
        told.append(matcher.take())
    assert told == ["a ", "step, ", "\n", "", ""] and matcher.found


def test_only_the_tail_is_decoded() -> None:
    seen = []

    def decode(ids: object) -> str:
        text = "".join(ids)  # type: ignore[arg-type, call-overload]
        seen.append(len(text))
        return str(text)

    matcher = StopMatcher(decode, ["never"])
    for _ in range(500):
        matcher.feed("abcd")  # type: ignore[arg-type]
        matcher.take()
    assert max(seen) <= 8


def test_graders_need_no_torch() -> None:
    code = "import sys, freda.decode.request; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
