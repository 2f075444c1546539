"""Drafts made visible: each pass of a block as a line of tokens, coloured by confidence.

On a terminal `LiveDrafts` redraws the text in place while it is being made, and leaves a table of all passes if asked;
elsewhere every pass is a plain line. A committed token carries a mark that does not depend on colour.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from freda.data.tokenizer import Tokenizer
from freda.decode.request import Pass

COMMITTED, OPEN = "✓", "?"
# Confidence from which a colour is used, the surest first.
COLOURS = ((0.9, "bold green"), (0.6, "yellow"), (0.3, "dark_orange"), (0.0, "red"))
CELL = 8  # columns of one token, so that the passes of a block line up


def colour(prob: float) -> str:
    """The style of a token of this probability."""
    return next(style for least, style in COLOURS if prob >= least)


def pass_line(step: Pass, tokenizer: Tokenizer) -> Text:
    """One pass of one block: its tokens, each with its mark and probability."""
    line = Text().append(f"block {step.block:<3} pass {step.number}  ", style="dim")
    pieces = (piece.replace(" ", "·") for piece in tokenizer.pieces(step.ids))  # a space is a token like any other
    for piece, prob, given, committed in zip(pieces, step.prob, step.given, step.committed, strict=True):
        if given:
            line.append(f" {piece:<{CELL}}     ", style="blue")
        else:
            line.append(f" {piece:<{CELL}}{COMMITTED if committed else OPEN}{prob:.2f}", style=colour(prob))
    return line


def candidate_lines(step: Pass, tokenizer: Tokenizer) -> list[Text]:
    """The candidates that a pass chose from, with ℓ + τ·s and a mark for the winner; nothing if there was no choice."""
    lines = []
    for number, (ids, score) in enumerate(zip(step.candidates, step.scores, strict=True)):
        mark, style = ("→", "bold") if number == step.winner else (" ", "dim")
        text = "".join(piece.replace(" ", "·") for piece in tokenizer.pieces(ids))
        lines.append(Text(f"    {mark} {text:<{4 * CELL}} {score:8.3f}", style=style))
    return lines if len(lines) > 1 else []


def legend() -> Text:
    """What the marks and colours of a table of passes mean."""
    line = Text("a line is one pass over a block: ", style="dim")
    for (least, style), name in zip(COLOURS, ("sure", "likely", "unsure", "a guess"), strict=True):
        line.append(f"{name} (from {least:g})", style=style).append(", ", style="dim")
    marks = f"{COMMITTED} committed, {OPEN} open, ░ blank, ■ end of the text, blue: given by the prompt"
    return line.append(f"{marks}; → the chosen candidate, with its score ℓ + τ·s", style="dim")


class LiveDrafts:
    """Draws the passes of one request as they happen; with `keep`, they stay on the terminal as a table."""

    def __init__(
        self,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        *,
        file: TextIO | None = None,
        pause: float = 0.0,
        keep: bool = False,
    ) -> None:
        self.tokenizer, self.pause = tokenizer, pause
        self.console = Console(file=file or sys.stderr, highlight=False)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)
        self.ids = list(prompt)
        self.kept: list[Pass] | None = [] if keep else None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()
        if self.kept:
            self.console.print(legend())
        for step in self.kept or []:
            self._print(step)

    def __call__(self, step: Pass) -> None:
        """Show one pass."""
        if self.console.is_terminal:
            self.live.update(self._picture(step), refresh=True)
            time.sleep(self.pause)
            if self.kept is not None:
                self.kept.append(step)
        else:
            self._print(step, soft_wrap=True)
        if step.closed:
            final = zip(step.ids[: step.closed], step.given, strict=False)
            self.ids += [token for token, given in final if not given]

    def _print(self, step: Pass, *, soft_wrap: bool = False) -> None:
        for line in (*candidate_lines(step, self.tokenizer), pass_line(step, self.tokenizer)):
            self.console.print(line, soft_wrap=soft_wrap)

    def _picture(self, step: Pass) -> Text:
        """The text so far, the block in its colours, and a line that names the block and the pass."""
        picture = Text(self.tokenizer.decode(self.ids))
        for token, prob, given, committed in zip(step.ids, step.prob, step.given, step.committed, strict=True):
            if not given:
                piece = self.tokenizer.decode([token]) or self.tokenizer.pieces([token])[0]
                picture.append(piece, style=colour(prob) + " underline" * committed)
        done = f"{sum(step.committed)} of {len(step.ids)} committed"
        picture.append(f"\n\nblock {step.block}, pass {step.number}: {done}", style="dim")
        for line in candidate_lines(step, self.tokenizer):
            picture.append("\n").append_text(line)
        lines = picture.wrap(self.console, self.console.width)
        return Text("\n").join(lines[-(self.console.height - 1) :])  # the end of a long text, where things happen
