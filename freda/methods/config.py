"""What a method is trained with: the `[method]` section of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from freda.errors import require
from freda.sections import knob

MethodName = Literal["autoregressive", "block-diffusion", "self-refine", "best-of-n"]


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """`[method]`: what is trained. Everything decoding must repeat is stored in the model folder."""

    name: MethodName = knob("self-refine", "autoregressive, block-diffusion, self-refine or best-of-n")
    block_size: int = knob(4, "tokens per block, B")
    passes: int = knob(3, "self-refine, best-of-n: most passes in training, K; a step runs t ~ Unif{1..K}")
    feedback: Literal["soft", "hard"] = knob("soft", "self-refine, best-of-n: what the next pass sees of a prediction")
    rescale: bool = knob(False, "self-refine, best-of-n: rescale the soft embedding to its expected norm (DMax)")
    committed_hard: bool = knob(False, "self-refine: show committed positions as hard tokens")
    drafts: Literal["greedy", "sampled"] = knob("greedy", "self-refine: tokens of drafts that training passes leave")
    replacement: Literal["iid", "prefix"] = knob("iid", "self-refine: which blanks show the truth in the first draft")
    replacement_start: float = knob(0.3, "self-refine: share of blanks that show the truth at the start")
    replacement_end: float = knob(0.1, "self-refine: the same share from half of the run on")
    negatives: Literal["sampled", "beam"] = knob("sampled", "best-of-n: what the scorer learns to tell from the truth")
    num_negatives: int = knob(4, "best-of-n: negatives per block")
    scorer_layer: bool = knob(False, "best-of-n: the scorer trains a copy of the backbone's last layer, kept with it")
    noise_min: float = knob(1e-3, "block-diffusion: least noise level t of a block")
    noise_max: float = knob(1.0, "block-diffusion: greatest noise level t of a block")

    def __post_init__(self) -> None:
        require(self.block_size >= 1, f"method.block_size is {self.block_size}; use 1 or more")
        require(self.passes >= 1, f"method.passes is {self.passes}; use 1 or more")
        require(self.num_negatives >= 1, f"method.num_negatives is {self.num_negatives}; use 1 or more")
        require(
            not (self.name == "best-of-n" and self.committed_hard),
            "method.committed_hard is true; best-of-n shows every candidate by its probability: leave it false",
        )
        for name in ("replacement_start", "replacement_end"):
            require(0 <= getattr(self, name) <= 1, f"method.{name} is {getattr(self, name)}; use 0 to 1")
        require(
            0 < self.noise_min <= self.noise_max <= 1,
            f"method.noise_min {self.noise_min} and noise_max {self.noise_max} must satisfy 0 < min <= max <= 1",
        )
