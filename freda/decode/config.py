"""How a text is continued, and how large an engine is: the options of `freda generate`, `chat`, `eval` and `sweep`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from freda.errors import require
from freda.sections import knob


def _require_numbers(config: Any) -> None:
    """Refuse what is no number in a field whose default is one: Python calls bring values of any type."""
    for field in fields(config):
        value, kind = getattr(config, field.name), type(field.default)
        if kind not in (int, float):
            continue
        right = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        wanted = "a whole number" if kind is int else "a number"
        require(right, f"{field.name} is {value!r:.80} ({type(value).__name__}); use {wanted}")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How one text is continued: the options of `freda generate`, and no section of a run's config."""

    max_new_tokens: int = knob(128, "most tokens to generate")
    passes: int = knob(4, "most passes per block, K")
    threshold: float = knob(0.9, "probability η from which a token is committed; above 1: all passes are made")
    temperature: float = knob(0.0, "temperature of the sampling; 0 takes the most probable token")
    top_p: float = knob(1.0, "sample from the smallest set of tokens with this probability")
    seed: int = knob(0, "seed of the sampling")
    width: int = knob(4, "best-of-n: most candidates per pass, N")
    tau: float = knob(0.1, "best-of-n: weight of the scorer, τ")
    swaps: int = knob(2, "best-of-n: most positions a candidate changes, R")
    candidates: Literal["beam", "sampled"] = knob("beam", "best-of-n: cheapest changes to the draft, or sampled ones")
    select: Literal["argmax", "gumbel"] = knob("argmax", "best-of-n: take the best beam candidate, or sample one")

    def __post_init__(self) -> None:
        _require_numbers(self)
        require(1 <= self.width <= 256, f"width is {self.width}; use 1 to 256")
        require(0 <= self.tau <= 1e6, f"tau is {self.tau}; use 0 to 1e6")
        require(0 <= self.swaps <= 256, f"swaps is {self.swaps}; use 0 to 256")
        require(self.candidates in ("beam", "sampled"), f"candidates is {self.candidates!r}; use beam or sampled")
        require(self.select in ("argmax", "gumbel"), f"select is {self.select!r}; use argmax or gumbel")
        require(1 <= self.max_new_tokens <= 2**20, f"max_new_tokens is {self.max_new_tokens}; use 1 to {2**20}")
        require(1 <= self.passes <= 2**20, f"passes is {self.passes}; use 1 to {2**20}")
        require(
            0 < self.threshold < math.inf,
            f"threshold is {self.threshold}; use a probability above 0, or a number above 1 for never",
        )
        require(0 <= self.temperature < math.inf, f"temperature is {self.temperature}; use 0 (greedy) or more")
        require(0 < self.top_p <= 1, f"top_p is {self.top_p}; use a probability above 0, at most 1")
        require(abs(self.seed) < 2**63, f"seed is {self.seed}; use a number of at most 63 bits")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The size of an engine."""

    max_batch: int = knob(64, "requests that run side by side")
    max_length: int = knob(0, "most tokens of a prompt with its answer; 0: as many positions as the model has")
    page_size: int = knob(16, "tokens of a page; in the paper's layout, the least common multiple with the block size")
    pages: int = knob(0, "pages of the cache; 0: enough for max_batch of the longest sequences, as memory allows")
    queue: int = knob(1024, "requests that may wait")
    prefill: int = knob(4096, "prompt tokens in one forward")
    on_device: bool = knob(True, "keep passes on the GPU, in CUDA graphs, where model and request allow it")
    int8: bool = knob(False, "on a GPU: int8 weights in forwards over few tokens, which wait for the weights")

    def __post_init__(self) -> None:
        _require_numbers(self)
