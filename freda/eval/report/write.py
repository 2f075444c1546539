"""`freda sweep --draw`: the tables of a sweep as CSV and Markdown, and its figures, from its `sweep.json` alone."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from freda.errors import note
from freda.eval.report.figures import draw
from freda.eval.report.points import Sweep, read_sweep
from freda.eval.report.tables import TABLES, Cell, Interval, Table, WithError

MORE: dict[type | None, tuple[str, ...]] = {None: (), WithError: (" ±",), Interval: (" low", " high")}


def draw_sweep(source: Path, out: Path) -> list[Path]:
    """Write the tables and figures of a sweep; returns their paths. Without matplotlib, which a machine that only
    measures may not have, the tables alone."""
    sweep = Sweep(read_sweep(source))
    out.mkdir(parents=True, exist_ok=True)
    files: dict[Path, str] = {}
    for part in sweep.config.parts:
        tables = [table(sweep) for table in TABLES[part]]
        for name, table in zip((part, f"{part}-summary"), tables, strict=False):
            files[out / f"{name}.csv"] = as_csv(table)
        files[out / f"{part}.md"] = "\n".join(map(as_markdown, tables))
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    if find_spec("matplotlib") is None:
        note(f"no figures without matplotlib; where it is installed: freda sweep --draw {source} --out FOLDER")
        return list(files)
    return [*files, *(path for part in sweep.config.parts for path in draw(sweep, part, out))]


def as_csv(table: Table) -> str:
    """The rows as CSV, one number in a column."""
    kinds = [next((type(c) for c in column if isinstance(c, tuple)), None) for column in zip(*table.rows, strict=True)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = zip(table.header, kinds or [None] * len(table.header), strict=True)
    writer.writerow([heading for name, kind in names for heading in (name, *(f"{name}{more}" for more in MORE[kind]))])
    for row in table.rows:
        cells = zip(row, kinds, strict=True)
        writer.writerow([value for cell, kind in cells for value in _numbers(cell, len(MORE[kind]))])
    return text.getvalue()


def _numbers(cell: Cell, more: int) -> list[Cell]:
    return list(cell) if isinstance(cell, tuple) else [cell, *[None] * more]


def as_markdown(table: Table) -> str:
    """The rows as a Markdown table under its title."""
    rows = table.rows if table.shown is None else table.shown
    numbers = [all(not isinstance(row[place], str) for row in rows) for place in range(len(table.header))]
    lines = [f"### {table.title}", "", _line(table.header)]
    lines.append("|" + "|".join("---:" if number else "---" for number in numbers) + "|")
    lines += [_line([_shown(cell) for cell in row]) for row in rows]
    return "\n".join([*lines, *(["", table.note] if table.note else []), ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(cell: Cell) -> str:
    if cell is None:
        return "–"
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)
