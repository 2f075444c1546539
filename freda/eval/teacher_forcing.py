"""Teacher forcing: what a model makes of each block of a known text over its true prefix.

An early mistake does not count again in all blocks after it, so this shows what a pass adds apart from how errors add
up over a text. `stability` asks whether a good draft is a fixed point (section 3.3 of the paper), and how many blocks a
perfect choice among the candidates of Best-of-N would mend: a scorer can gain no more than that in a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.data.synthetic import Item
from freda.folders.model_folder import LoadedModel

MOST_LOGITS = 1 << 28  # in one forward: 1 GiB in fp32
NAMES = ("right", "changed", "mended", "spoiled", "kept")
BLOCKS = ("blocks", "oracle")  # of all blocks
WIDTH, SWAPS = 4, 2  # candidates of the oracle, as decoding has them by default


def token_accuracy(loaded: LoadedModel, problems: Sequence[Item], passes: int) -> float:
    """The fraction of solution tokens that are the written ones after `passes` passes over the true prefix."""
    batch, given, counted = solution_batch(loaded, [(problem.prompt, problem.document) for problem in problems])
    *_, made = loaded.method.teacher_forced(loaded.parts, batch, given, passes)
    return float(((made == batch.tokens) & counted).sum() / counted.sum())


def solution_batch(loaded: LoadedModel, texts: Sequence[tuple[str, str]]) -> tuple[Batch, Tensor, Tensor]:
    """One text a row, filled with EOS to whole blocks; which tokens belong to its prompt, and which to the solution and
    its end, (R, L) bool each. `texts` are pairs of a prompt and the whole text that begins with it. Blocks lie as they
    do when the prompt is continued: where the context is causal, padding before a text sees to it."""
    tokenizer, geometry, device = loaded.tokenizer, loaded.method.geometry, loaded.parts.device
    wholes = [tokenizer.encode(whole) for _, whole in texts]
    prompts = [len(tokenizer.encode(prompt)) for prompt, _ in texts]
    before = [geometry.padding(prompt) for prompt in prompts]
    filled = [
        -(-(pad + len(text) + 1) // geometry.block) * geometry.block for pad, text in zip(before, wholes, strict=True)
    ]
    counts = torch.tensor([before, filled, [len(text) for text in wholes], prompts], device=device)
    pads, ends, lengths, prompt_ends = counts[:, :, None]
    place = torch.arange(max(filled), device=device).expand(len(wholes), -1) - pads
    end = [tokenizer.eos_id] * max(filled)
    rows = [(end[:pad] + text + end)[: len(end)] for pad, text in zip(before, wholes, strict=True)]
    real = (place >= 0) & (place < ends - pads)
    batch = Batch(
        torch.tensor(rows, device=device),
        torch.where(real, 0, -1).int(),
        torch.where(real, place, 0).int(),
        (place > lengths) & real,
    )
    given = place < prompt_ends
    return batch, given, ~given & (place <= lengths)


def stability(loaded: LoadedModel, texts: Sequence[tuple[str, str]], passes: int) -> list[dict[str, float]]:
    """For every pass, as fractions of the answers' tokens: `right` after it; `changed` by it, of which `mended` (wrong
    before, right now) and `spoiled`; and `kept` of a draft that was the true text. As fractions of the answers' blocks:
    `blocks` that are right after it, and would be if an `oracle` chose the candidate that it sees. `texts` as for
    `solution_batch`."""
    longest = max(len(loaded.tokenizer.encode(whole)) for _, whole in texts) + 2 * loaded.method.block_size
    rows = max(1, MOST_LOGITS // (WIDTH * longest * loaded.backbone.config.vocab_size))
    sums, totals = (torch.zeros(*size, len(NAMES) + len(BLOCKS)).double() for size in ((passes,), ()))
    for first in range(0, len(texts), rows):
        batch, given, counted = solution_batch(loaded, texts[first : first + rows])
        asked = (loaded.parts, batch, given, passes)
        drafts = loaded.method.choices(*asked, width=WIDTH, swaps=SWAPS)
        kept_drafts = loaded.method.teacher_forced(*asked, clean_draft=True)
        before = torch.full_like(batch.tokens, -1)  # a blank draft holds no token
        some = _by_block(loaded, counted).any(-1)
        for row, (made, kept) in enumerate(zip(drafts, kept_drafts, strict=True)):
            now = made[:, 0]
            right, was_right = now == batch.tokens, before == batch.tokens
            marks = (right, now != before, right & ~was_right, was_right & ~right, kept == batch.tokens)
            wrong = [_by_block(loaded, (one != batch.tokens) & counted).any(-1) for one in made.unbind(1)]  # (N,) each
            found = [*(mark & counted for mark in marks), some & ~wrong[0], some & ~torch.stack(wrong).all(0)]
            sums[row] += torch.stack([mark.sum() for mark in found]).cpu()
            before = now
        totals += torch.tensor([*[int(counted.sum())] * len(NAMES), *[int(some.sum())] * len(BLOCKS)])
    fractions = (sums / totals).tolist()
    names = (*NAMES, *BLOCKS)
    return [{"pass": number, **dict(zip(names, row, strict=True))} for number, row in enumerate(fractions, start=1)]


def _by_block(loaded: LoadedModel, marks: Tensor) -> Tensor:
    """Marks of tokens (R, L) by the blocks that predict them, (N, B)."""
    geometry = loaded.method.geometry
    return geometry.by_slot(marks).reshape(-1, geometry.block)
