"""Draws docs/images/refine.svg, the README's picture of a text being refined, from a trained model:

python docs/draw_drafts.py runs/demo/self-refine "Q: ..."
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from freda.decode.generate import generate
from freda.decode.request import Request
from freda.decode.show import pass_line
from freda.folders.model_folder import load_model
from freda.methods import METHODS

TARGET = Path(__file__).parent / "images" / "refine.svg"


def draw(model: Path, prompt: str) -> str:
    """The passes of one text as an SVG picture."""
    loaded = load_model(model)
    console = Console(record=True, width=86, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(prompt, style="blue", markup=False)
    asked = [Request(prompt=loaded.tokenizer.encode(prompt))]
    rule, stops = METHODS[loaded.method.name], loaded.tokenizer.stop_ids
    output = generate(
        loaded.backbone,
        rule,
        loaded.method,
        asked,
        stop_ids=stops,
        watch=lambda step: console.print(pass_line(step, loaded.tokenizer), soft_wrap=True),
    )[0]
    console.print(loaded.tokenizer.decode(output.tokens).strip(), style="bold")
    console.print(f"{len(output.tokens)} tokens in {output.nfe} forwards", style="dim")
    svg = console.export_svg(title="freda generate --show-drafts", unique_id="drafts", theme=MONOKAI)
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.S)  # the viewer's own monospace font, nothing fetched


if __name__ == "__main__":
    TARGET.write_text(draw(Path(sys.argv[1]), sys.argv[2].replace("\\n", "\n")), encoding="utf-8")
    print(TARGET)
