"""Draws masks.svg, layouts.svg and verified.svg in docs/images from the functions that decoding and training use:
python docs/draw_masks.py

Rows are queries, columns keys, as in the paper's figure attn-mask-design. A test checks that the pictures are current.
"""

from __future__ import annotations

from pathlib import Path

import torch

from freda.decode.config import DecodeConfig
from freda.methods.draft import start
from freda.methods.geometry import Geometry
from freda.methods.state import DecodeState, new_state
from freda.methods.verified import Verified
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


BLANK, KNOWN = 9, 0  # ids of a draft whose tokens are called d1, d2, d3
STORED = 5  # tokens of the text before the known one


def checked_draft() -> DecodeState:
    """A request in the middle of its text, whose draft is about to be checked."""
    blank = torch.full((1, 4), BLANK)
    draft = start(blank, torch.zeros(1, 4, dtype=torch.bool), BLANK)
    draft = draft._replace(ids=torch.tensor([[1, 2, 3, BLANK]]), prob=torch.tensor([[0.9, 0.8, 0.7, 0.0]]))
    known, stops = torch.tensor([KNOWN]), torch.tensor([], dtype=torch.int64)
    return new_state([DecodeConfig()], draft, known + STORED + 1, known, stops)


def verified() -> tuple[list[list[tuple[int, str, float]]], Panel]:
    """What every row of a verified step shows, as (place, label, α), and its mask."""
    state, rule = checked_draft(), Verified()
    found = rule.candidates(state, rule.limits([]))
    text, _ = rule.geometry.shown(state.known, state.draft.ids, state.draft.prob)
    shown, alpha = state.shown(rule.geometry, found)
    names = {KNOWN: "x", BLANK: "░", 1: "d1", 2: "d2", 3: "d3"}
    rows = [[(place, names[token], 1.0) for place, token in enumerate(text[0].tolist())]]
    for first, ids, weights in zip(found.ahead[0].tolist(), shown[0].tolist(), alpha[0].tolist(), strict=True):
        rows.append([(first + at, names[one], a) for at, (one, a) in enumerate(zip(ids, weights, strict=True))])
    position = torch.arange(STORED + 4)[None]
    tokens = [attention.clean_tokens(torch.zeros_like(position), position, rule.geometry.context)]
    for number, first in enumerate(found.ahead[0].tolist()):
        slots = torch.full((1, 4), STORED + first)
        tokens.append(attention.draft_tokens(torch.zeros_like(slots), slots, torch.full_like(slots, number)))
    order = f"[ {STORED} stored | 4 text | 4 candidates of 4 slots ]"
    return rows, ("Who sees whom", order, attention.concat(*tokens))


def step_panel(rows: list[list[tuple[int, str, float]]], left: int) -> tuple[list[str], int]:
    """What the rows of a step show, by position: text dark, shown tokens as strong as their α."""
    wide, high = 40, 26
    out = [
        f'<text x="{left}" y="{TOP - 26}" font-weight="bold">One verified step, B = 4</text>',
        f'<text x="{left}" y="{TOP - 10}" fill="#666">what every row shows, by position</text>',
    ]
    for number, row in enumerate(rows):
        y, name = TOP + number * high, "text" if number == 0 else f"candidate {number - 1}"
        out.append(f'<text x="{left}" y="{y + 17}">{name}</text>')
        for place, label, weight in row:
            x, colour = left + 96 + place * wide, INK["clean"] if number == 0 else INK["draft"]
            cell = f'x="{x}" y="{y}" width="{wide - 2}" height="{high - 2}"'
            out.append(f'<rect {cell} fill="{colour}" fill-opacity="{0.12 + 0.6 * weight:.2f}"/>')
            out.append(f'<text x="{x + wide // 2 - 1}" y="{y + 17}" text-anchor="middle">{label}</text>')
    for place in range(7):
        x = left + 96 + place * wide + wide // 2 - 1
        label = "s" if place == 0 else f"s+{place}"
        out.append(f'<text x="{x}" y="{TOP + 5 * high + 14}" text-anchor="middle" fill="#666">{label}</text>')
    return out, 96 + 7 * wide


def draw_step() -> str:
    """The picture of a verified step."""
    rows, mask = verified()
    elements, width = step_panel(rows, LEFT)
    drawn, more = panel(*mask, LEFT + width + GAP)
    return page([*elements, *drawn], LEFT + width + GAP + more + LEFT, TOP + mask[2].document.shape[1] * CELL)


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
    return page(elements, left, height)


def page(elements: list[str], width: int, height: int) -> str:
    """Elements on white, above a legend."""
    legend = [("clean", "clean sees clean"), ("draft", "draft sees its own block"), ("prefix", "draft sees prefix")]
    for index, (name, text) in enumerate(legend):
        x = LEFT + index * 200
        elements.append(f'<rect x="{x}" y="{height + 20}" width="12" height="12" fill="{INK[name]}"/>')
        elements.append(f'<text x="{x + 18}" y="{height + 31}">{text}</text>')
    size = f'width="{width}" height="{height + 50}" viewBox="0 0 {width} {height + 50}"'
    style = 'font-family="sans-serif" font-size="13"'
    body = "\n".join(elements)
    white = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{white}\n{body}\n</svg>\n'


def pictures() -> dict[Path, str]:
    """All pictures by their paths."""
    drawn = {"masks": draw(masks()), "layouts": draw(layouts()), "verified": draw_step()}
    return {IMAGES / f"{name}.svg": picture for name, picture in drawn.items()}


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for path, picture in pictures().items():
        path.write_text(picture, encoding="utf-8")
        print(path)
