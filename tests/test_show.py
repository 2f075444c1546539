"""Drawing drafts: marks without colour, colour by confidence, and in place on a terminal."""

from __future__ import annotations

import io
import re

import pytest

from freda.data.tokenizer import Tokenizer, train_tokenizer
from freda.decode.request import Pass
from freda.decode.show import COLOURS, LiveDrafts, candidate_lines, colour, legend, pass_line


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["Mia has 12 shells."] * 20, 300)


def passes(tokenizer: Tokenizer) -> list[Pass]:
    ids = tokenizer.encode("Mia has 1")
    blank = tokenizer.blank_id
    given = [True, False, False, False]
    first = Pass(
        0,
        0,
        1,
        [*ids[:2], blank, blank],
        [1.0, 0.95, 0.2, 0.1],
        given,
        [True, True, False, False],
        False,
        [ids],
        [0.0],
        0,
    )
    return [first, first._replace(number=2, ids=[*ids[:3], tokenizer.eos_id], committed=[True] * 4, closed=True)]


def test_a_line_marks_what_is_committed(tokenizer: Tokenizer) -> None:
    line = pass_line(passes(tokenizer)[0], tokenizer).plain
    assert line.startswith("block 0   pass 1")
    assert "✓0.95" in line and "?0.20" in line and "░" in line
    assert "1.00" not in line, "given tokens have no confidence to show"


def test_candidates_show_their_scores_and_the_winner(tokenizer: Tokenizer) -> None:
    step = passes(tokenizer)[1]
    assert candidate_lines(step, tokenizer) == [], "one candidate is no choice"
    rivals = step._replace(candidates=[step.ids, step.ids[::-1]], scores=[-0.5, 1.25], winner=1)
    first, second = (line.plain for line in candidate_lines(rivals, tokenizer))
    assert "-0.500" in first and "→" not in first and "1.250" in second and "→" in second


def test_colour_follows_confidence() -> None:
    assert len({colour(prob) for prob in (0.95, 0.7, 0.4, 0.1)}) == 4
    assert colour(0.9) == colour(1.0) and colour(0.0) == colour(0.29)


def test_plain_lines_without_a_terminal(tokenizer: Tokenizer) -> None:
    file = io.StringIO()
    with LiveDrafts([], tokenizer, file=file) as drafts:
        for step in passes(tokenizer):
            drafts(step)
    lines = file.getvalue().splitlines()
    assert len(lines) == 2 and "\x1b" not in file.getvalue() and "■" in lines[1]


def test_in_place_on_a_terminal(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    file = io.StringIO()
    with LiveDrafts([], tokenizer, file=file) as drafts:
        drafts.console._force_terminal = True
        for step in passes(tokenizer):
            drafts(step)
    shown = file.getvalue()
    assert "block 0, pass 1: 2 of 4 committed" in shown and "block 0, pass 2: 4 of 4 committed" in shown
    assert "\x1b[" in shown, "colours and cursor movements"


@pytest.mark.parametrize("keep", [False, True])
def test_the_table_stays_on_a_terminal_with_its_legend(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    file = io.StringIO()
    with LiveDrafts([], tokenizer, file=file, keep=keep) as drafts:
        drafts.console._force_terminal = True
        for step in passes(tokenizer):
            drafts(step)
        drawn = len(file.getvalue())
    left = file.getvalue()[drawn:]
    assert (left.count("block 0 ") == 2 and all(mark in left for mark in "✓■→░")) == keep


def test_the_legend_names_every_colour_and_mark() -> None:
    line = legend()
    assert {span.style for span in line.spans} >= {style for _, style in COLOURS}
    assert all(f"{least:g}" in line.plain for least, _ in COLOURS)


def test_narrow_terminals_break_between_words(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    file = io.StringIO()
    with LiveDrafts([], tokenizer, file=file, keep=True) as drafts:
        drafts.console._force_terminal = True
        drafts(passes(tokenizer)[1])
    words = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).split()
    assert "committed," in words and "candidate," in words, "no word is cut in two"
