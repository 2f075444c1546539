"""Scores of a model on the embedded word problems: exact match of free generation, and teacher-forced token accuracy.

Exact match is what a user sees: the number after "The answer is" in the generated solution. Token accuracy gives every
block its true prefix and asks how many tokens of the written solution the model makes itself; it has less noise, and it
shows what a pass adds apart from how errors add up over a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.data.synthetic import Problem, grade
from freda.decode.generate import Output, Request, generate
from freda.folders.model_folder import LoadedModel
from freda.methods import METHODS

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Score:
    """A share of right answers, and what it cost."""

    n: int
    accuracy: float
    standard_error: float  # of a share of n independent answers
    nfe: float  # mean forwards per answer
    tpf: float  # all new tokens over all forwards
    seconds: float


def exact_match(
    loaded: LoadedModel,
    problems: Sequence[Problem],
    settings: dict[str, Any],
    *,
    batch_size: int = 128,
    progress: Progress | None = None,
) -> tuple[Score, list[Output]]:
    """Solve every problem with the model's own method; `settings` are fields of `Request`."""
    tokenizer, method = loaded.tokenizer, METHODS[loaded.method.name]
    outputs: list[Output] = []
    seconds = 0.0
    for first in range(0, len(problems), batch_size):
        asked = [Request(prompt=tokenizer.encode(p.prompt), **settings) for p in problems[first : first + batch_size]]
        made = generate(loaded.backbone, method, loaded.method, asked, stop_ids=tokenizer.stop_ids)
        seconds += max(output.seconds for output in made)
        outputs += made
        if progress is not None:
            progress(len(outputs))
    right = [grade(p, tokenizer.decode(o.tokens)) for p, o in zip(problems, outputs, strict=True)]
    return score(right, outputs, seconds), outputs


def score(right: Sequence[bool], outputs: Sequence[Output], seconds: float) -> Score:
    """Sum up graded outputs."""
    n, share = len(right), sum(right) / len(right)
    nfe, tokens = sum(o.nfe for o in outputs), sum(len(o.tokens) for o in outputs)
    return Score(n, share, math.sqrt(share * (1 - share) / n), nfe / n, tokens / nfe, seconds)


def token_accuracy(loaded: LoadedModel, problems: Sequence[Problem], passes: int) -> float:
    """Share of solution tokens that are the written ones after `passes` passes over the true prefix."""
    batch, given = solution_batch(loaded, [(problem.prompt, problem.document) for problem in problems])
    *_, made = loaded.method.teacher_forced(loaded.parts, batch, given, passes)
    counted = ~given & (batch.document >= 0) & ~batch.fill
    return float(((made == batch.tokens) & counted).sum() / counted.sum())


def solution_batch(loaded: LoadedModel, texts: Sequence[tuple[str, str]]) -> tuple[Batch, Tensor]:
    """One text a row, filled with EOS to whole blocks, and which tokens belong to its prompt, (R, L); `texts` are pairs
    of a prompt and the whole text that begins with it."""
    tokenizer, align = loaded.tokenizer, loaded.method.block_size
    wholes = [tokenizer.encode(whole) for _, whole in texts]
    prompts = [len(tokenizer.encode(prompt)) for prompt, _ in texts]
    filled = [-(-(len(text) + 1) // align) * align for text in wholes]
    width = max(filled)
    device = loaded.backbone.embed_tokens.weight.device
    place = torch.arange(width, device=device).expand(len(wholes), -1)
    tokens = torch.tensor([text + [tokenizer.eos_id] * (width - len(text)) for text in wholes], device=device)
    ends, lengths, given = (
        torch.tensor(counts, device=device)[:, None] for counts in (filled, [len(text) for text in wholes], prompts)
    )
    document = torch.where(place < ends, 0, -1).int()
    return Batch(tokens, document, place.int(), (place > lengths) & (place < ends)), place < given
