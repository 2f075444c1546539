"""Is a good draft a fixed point? What further passes change, and what they leave alone (section 3.3 of the paper).

Measured on the tasks' published answers, every block over its true prefix, so that an early mistake does not count
again in all blocks after it: how many tokens a pass changes, how many it mends and spoils, and how much of a draft that
is already right it keeps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from freda.eval.run import solution_batch
from freda.folders.model_folder import LoadedModel

MOST_LOGITS = 1 << 28  # of one forward: 1 GiB in fp32
NAMES = ("right", "changed", "mended", "spoiled", "kept")


def stability(loaded: LoadedModel, texts: Sequence[tuple[str, str]], passes: int) -> list[dict[str, float]]:
    """For every pass, as shares of the tokens of the answers: `right` after it; `changed` by it, of which `mended`
    (wrong before, right now) and `spoiled`; and `kept` of a draft that was the true text before the first pass.

    `texts` are pairs of a prompt and the whole text that begins with it.
    """
    longest = max(len(loaded.tokenizer.encode(whole)) for _, whole in texts) + loaded.method.block_size
    rows = max(1, MOST_LOGITS // (longest * loaded.backbone.config.vocab_size))
    sums = torch.zeros(passes, len(NAMES), dtype=torch.int64)
    counted = 0
    for first in range(0, len(texts), rows):
        found, tokens = _counts(loaded, texts[first : first + rows], passes)
        sums, counted = sums + found, counted + tokens
    shares = (sums / counted).tolist()
    return [{"pass": number, **dict(zip(NAMES, row, strict=True))} for number, row in enumerate(shares, start=1)]


def _counts(loaded: LoadedModel, texts: Sequence[tuple[str, str]], passes: int) -> tuple[Tensor, int]:
    """The sums over these texts, (passes, names), and the number of tokens that count."""
    batch, given = solution_batch(loaded, texts)
    counted = ~given & (batch.document >= 0) & ~batch.fill
    forced = functools.partial(loaded.method.teacher_forced, loaded.parts, batch, given, passes)
    drafts, clean = forced(), forced(clean_draft=True)
    before = torch.full_like(batch.tokens, -1)  # a blank draft holds no token
    rows = []
    for now, kept in zip(drafts, clean, strict=True):
        right, was_right = now == batch.tokens, before == batch.tokens
        marks = (right, now != before, right & ~was_right, was_right & ~right, kept == batch.tokens)
        rows.append(torch.stack([(mark & counted).sum() for mark in marks]))
        before = now
    return torch.stack(rows).cpu(), int(counted.sum())
