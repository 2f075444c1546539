"""Draws docs/images/refine.svg, the README's picture of a text being refined:

python docs/draw_drafts.py mini "Q: ..."     # with the question of the README
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

import freda
from freda.decode.show import pass_line

TARGET = Path(__file__).parent / "images" / "refine.svg"


def draw(path: str, prompt: str) -> str:
    """The passes of one text as an SVG picture."""
    model = freda.load(path)
    console = Console(record=True, width=86, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(prompt, style="blue", markup=False)
    text, passes = "", 0
    for piece in model.stream(prompt, method="self-refine", drafts=True):
        if isinstance(piece, str):
            text += piece
        else:
            passes += 1
            console.print(pass_line(piece, model.loaded.tokenizer), soft_wrap=True)
    console.print(text.strip(), style="bold")
    console.print(f"{passes} passes", style="dim")
    svg = console.export_svg(title="freda generate --show-drafts", unique_id="drafts", theme=MONOKAI)
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.S)  # the viewer's own monospace font, nothing fetched


if __name__ == "__main__":
    TARGET.write_text(draw(sys.argv[1], sys.argv[2].replace("\\n", "\n")), encoding="utf-8")
    print(TARGET)
