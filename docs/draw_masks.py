"""Draws docs/images/masks.svg and layouts.svg from the very functions that the model uses: python docs/draw_masks.py

Rows are queries, columns keys, as in the paper's figure attn-mask-design. A test checks that the pictures are current.
"""

from __future__ import annotations

from pathlib import Path

import torch

from freda.methods.geometry import Geometry
from freda.model import attention
from freda.model.attention import CLEAN, Tokens

IMAGES = Path(__file__).parent / "images"
CELL, GAP, TOP, LEFT = 9, 70, 64, 20
INK = {"clean": "#4c78a8", "draft": "#f58518", "prefix": "#9ecae9", "hidden": "#f3f3f3"}


Panel = tuple[str, str, Tokens]


def masks() -> list[Panel]:
    """Title, order of the parts, and the tokens of each picture: the masks of the paper's layout."""
    position = torch.arange(16)[None]
    document = torch.zeros_like(position)
    packed = torch.cat([torch.arange(8), torch.arange(8)])[None]
    two = (torch.arange(16) // 8)[None]
    clean = attention.clean_tokens(document, position, 4)
    draft = attention.draft_tokens(document, position // 4 * 4)
    copies = [
        attention.draft_tokens(document, position // 4 * 4, torch.full_like(position, number)) for number in range(2)
    ]
    pack = attention.concat(attention.draft_tokens(two, packed // 4 * 4), attention.clean_tokens(two, packed, 4))
    return [
        ("Autoregressive", "one token per block", attention.clean_tokens(document, position, 1)),
        ("Committed text", "block-causal", clean),
        ("Self-refinement", "[ draft | clean ]", attention.concat(draft, clean)),
        ("Two documents packed", "[ draft | clean ]", pack),
        ("Best-of-N", "[ candidate 1 | candidate 2 | clean ]", attention.concat(*copies, clean)),
    ]


def layouts() -> list[Panel]:
    """Training, [ draft | clean ], and one decoding forward behind a prompt of seven tokens, in both layouts."""
    found, position = list[Panel](), torch.arange(16)[None]
    document = torch.zeros_like(position)
    for name, geometry in (("Paper", Geometry(4)), ("Shifted", Geometry(4, shift=1, causal=True))):
        draft = attention.draft_tokens(document, geometry.first(position))
        clean = attention.clean_tokens(document, position, geometry.context)
        found.append((f"{name}: training", "[ draft | clean ]", attention.concat(draft, clean)))
        stored = geometry.begin(7) - geometry.shift  # then the first block has closed and is committed
        text = attention.clean_tokens(document[:, : stored + 4], position[:, : stored + 4], geometry.context)
        slots = attention.draft_tokens(document[:, :4], torch.full((1, 4), stored + 4))
        order = f"[ {stored} stored | 4 to commit | 4 slots ]"
        found.append((f"{name}: decoding, block 2", order, attention.concat(text, slots)))
    return found


def kind(tokens: Tokens, query: int, key: int) -> str:
    """Which colour a cell has."""
    if tokens.stream[0, query] == CLEAN:
        return "clean"
    return "prefix" if tokens.stream[0, key] == CLEAN else "draft"


def panel(title: str, order: str, tokens: Tokens, left: int) -> tuple[list[str], int]:
    """One picture as SVG elements, and its width: a path for each colour over a light square."""
    grid = attention.dense(tokens, tokens)[0].tolist()
    paths: dict[str, list[str]] = {}
    for query, row in enumerate(grid):
        for key, seen in enumerate(row):
            if seen:
                name = kind(tokens, query, key)
                paths.setdefault(name, []).append(
                    f"M{left + key * CELL} {TOP + query * CELL}h{CELL - 1}v{CELL - 1}h-{CELL - 1}z"
                )
    side = len(grid) * CELL
    out = [
        f'<text x="{left}" y="{TOP - 26}" font-weight="bold">{title}</text>',
        f'<text x="{left}" y="{TOP - 10}" fill="#666">{order}</text>',
        f'<rect x="{left}" y="{TOP}" width="{side}" height="{side}" fill="{INK["hidden"]}"/>',
    ]
    out += [f'<path fill="{INK[name]}" d="{"".join(parts)}"/>' for name, parts in sorted(paths.items())]
    return out, max(side, 190)


def draw(panels: list[Panel]) -> str:
    """A whole picture."""
    elements: list[str] = []
    left, height = LEFT, 0
    for title, order, tokens in panels:
        drawn, width = panel(title, order, tokens, left)
        elements += drawn
        left += width + GAP
        height = max(height, TOP + tokens.document.shape[1] * CELL)
    legend = [("clean", "clean sees clean"), ("draft", "draft sees its own block"), ("prefix", "draft sees prefix")]
    for index, (name, text) in enumerate(legend):
        x = LEFT + index * 200
        elements.append(f'<rect x="{x}" y="{height + 20}" width="12" height="12" fill="{INK[name]}"/>')
        elements.append(f'<text x="{x + 18}" y="{height + 31}">{text}</text>')
    size = f'width="{left}" height="{height + 50}" viewBox="0 0 {left} {height + 50}"'
    style = 'font-family="sans-serif" font-size="13"'
    body = "\n".join(elements)
    page = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{page}\n{body}\n</svg>\n'


def pictures() -> dict[Path, str]:
    """Both pictures by their paths."""
    return {IMAGES / "masks.svg": draw(masks()), IMAGES / "layouts.svg": draw(layouts())}


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for path, picture in pictures().items():
        path.write_text(picture, encoding="utf-8")
        print(path)
