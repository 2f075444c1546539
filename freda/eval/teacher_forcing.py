"""Teacher forcing: what a model makes of each block of a known text over its true prefix.

An early mistake does not count again in all blocks after it, so this shows what a pass adds apart from how errors add
up over a text. `stability` asks whether a good draft is a fixed point (section 3.3 of the paper).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.data.synthetic import Item
from freda.folders.model_folder import LoadedModel

MOST_LOGITS = 1 << 28  # in one forward: 1 GiB in fp32
NAMES = ("right", "changed", "mended", "spoiled", "kept")


def token_accuracy(loaded: LoadedModel, problems: Sequence[Item], passes: int) -> float:
    """The fraction of solution tokens that are the written ones after `passes` passes over the true prefix."""
    batch, given, counted = solution_batch(loaded, [(problem.prompt, problem.document) for problem in problems])
    *_, made = loaded.method.teacher_forced(loaded.parts, batch, given, passes)
    return float(((made == batch.tokens) & counted).sum() / counted.sum())


def solution_batch(loaded: LoadedModel, texts: Sequence[tuple[str, str]]) -> tuple[Batch, Tensor, Tensor]:
    """One text a row, filled with EOS to whole blocks; which tokens belong to its prompt, and which to the solution and
    its end, (R, L) bool each. `texts` are pairs of a prompt and the whole text that begins with it."""
    tokenizer, align, device = loaded.tokenizer, loaded.method.block_size, loaded.parts.device
    wholes = [tokenizer.encode(whole) for _, whole in texts]
    prompts = [len(tokenizer.encode(prompt)) for prompt, _ in texts]
    filled = [-(-(len(text) + 1) // align) * align for text in wholes]
    place = torch.arange(max(filled), device=device).expand(len(wholes), -1)
    tokens = torch.tensor([text + [tokenizer.eos_id] * (max(filled) - len(text)) for text in wholes], device=device)
    counts = torch.tensor([filled, [len(text) for text in wholes], prompts], device=device)
    ends, lengths, prompt_ends = counts[:, :, None]
    fill, given = (place > lengths) & (place < ends), place < prompt_ends
    batch = Batch(tokens, torch.where(place < ends, 0, -1).int(), place.int(), fill)
    return batch, given, ~given & (place <= lengths)


def stability(loaded: LoadedModel, texts: Sequence[tuple[str, str]], passes: int) -> list[dict[str, float]]:
    """For every pass, as fractions of the answers' tokens: `right` after it; `changed` by it, of which `mended` (wrong
    before, right now) and `spoiled`; and `kept` of a draft that was the true text. `texts` as for `solution_batch`."""
    longest = max(len(loaded.tokenizer.encode(whole)) for _, whole in texts) + loaded.method.block_size
    rows = max(1, MOST_LOGITS // (longest * loaded.backbone.config.vocab_size))
    sums, total = torch.zeros(passes, len(NAMES), dtype=torch.int64), 0
    for first in range(0, len(texts), rows):
        batch, given, counted = solution_batch(loaded, texts[first : first + rows])
        forced = functools.partial(loaded.method.teacher_forced, loaded.parts, batch, given, passes)
        before = torch.full_like(batch.tokens, -1)  # a blank draft holds no token
        for row, (now, kept) in enumerate(zip(forced(), forced(clean_draft=True), strict=True)):
            right, was_right = now == batch.tokens, before == batch.tokens
            marks = (right, now != before, right & ~was_right, was_right & ~right, kept == batch.tokens)
            sums[row] += torch.stack([(mark & counted).sum() for mark in marks]).cpu()
            before = now
        total += int(counted.sum())
    fractions = (sums / total).tolist()
    return [{"pass": number, **dict(zip(NAMES, row, strict=True))} for number, row in enumerate(fractions, start=1)]
