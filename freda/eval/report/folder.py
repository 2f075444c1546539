"""The folder of one evaluation: `samples.jsonl`, a head with what was asked and a line per answer, and `results.json`.

A process may be killed at any moment: files get their names when they are whole, and a line that was cut off or
damaged is skipped, so that its question is asked again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from freda.errors import FredaError

SAMPLES, RESULTS = "samples.jsonl", "results.json"


def read_samples(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The head, which says what was asked, and the answers by their ids; damaged lines are skipped."""
    path = folder / SAMPLES
    if not path.is_file():
        raise FredaError(f"{folder} holds no {SAMPLES}; name the folder of one task that freda eval made")
    first, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    head = _line(first)
    if head is None or "checksum" not in head:
        raise FredaError(f"{path} does not begin with what was asked ({first[:40]!r}); delete it, or choose another")
    samples = [sample for sample in map(_line, lines[:-1]) if sample is not None and {"id", "correct"} <= sample.keys()]
    return head, {sample["id"]: sample for sample in samples}


def _line(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
