"""The parts of a model, beside each other (the backbone, and what a method adds to it), and where they run.

A part is a module with a file of its own in the model folder and a name of its own in a checkpoint. The Transformer
knows nothing of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from freda.errors import require
from freda.model import adapter
from freda.model.config import AdapterConfig
from freda.model.scorer import Scorer
from freda.model.transformer import Transformer

BACKBONE, ADAPTER = "backbone", "adapter"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Part(NamedTuple):
    """Rows of a weight, to be filled: those that this process holds, or all."""

    tensor: Tensor  # (n, ...); n may be 0
    first: int  # the weight's row that is the first of these

    def of(self, whole: Any) -> Tensor:
        """Select this part from `whole`, the weight as a tensor or in a file."""
        rows: Tensor = whole[self.first : self.first + self.tensor.shape[0]]
        return rows


class Parts(nn.Module):
    """A backbone and, for Best-of-N, a scorer of its drafts; maybe an adapter, whose weights stand in the backbone."""

    adapter: AdapterConfig | None = None

    def __init__(self, backbone: Transformer, scorer: Scorer | None = None) -> None:
        super().__init__()
        self.backbone, self.scorer = backbone, scorer

    def adapt(self, config: AdapterConfig) -> None:
        """Put an adapter on the backbone, without values yet; nothing else learns."""
        self.requires_grad_(False)
        adapter.adapt(self.backbone, config)
        self.adapter = config

    def weights(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Every weight as (part, name in the part, weight); those of an adapter are named as in the backbone."""
        for part, module in self.named_children():
            for name, weight in module.named_parameters():
                yield ADAPTER if part == BACKBONE and adapter.belongs(name) else part, name, weight

    def saved(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """The weights of a checkpoint: all or, where there is an adapter, its own."""
        return (weight for weight in self.weights() if self.adapter is None or weight[0] == ADAPTER)

    def random_weights(self, part: str, seed: int) -> Iterator[tuple[str, Tensor]]:
        """New values of the weights of a part, by name, but of those that begin as copies."""
        if part == ADAPTER:
            return adapter.random_weights(self.backbone, seed)
        module = self.backbone if part == BACKBONE else self.scorer
        assert module is not None
        return module.random_weights(seed)

    def copied(self, part: str) -> dict[str, str]:
        """Weights of a part that begin as copies of the backbone's, by name: the backbone's name of each."""
        last = self.scorer.last_layer if part == "scorer" and self.scorer is not None else None
        names = () if last is None else (name for name, _ in last.named_parameters())
        return {f"last_layer.{name}": f"layers.{self.backbone.config.layers - 1}.{name}" for name in names}

    def exact(self) -> set[str]:
        """Names of the weights that stay in fp32: those of a scorer, whose numbers differ little."""
        others = ((part, name) for part, name, _ in self.weights() if part not in (BACKBONE, ADAPTER))
        return {f"{part}.{name}" for part, name in others if name not in self.copied(part)}

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.backbone.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the backbone."""
        return self.backbone.embed_tokens.weight.dtype


def stored_name(part: str, name: str) -> str:
    """A weight's name among those of all parts: the backbone's names stand alone."""
    return name if part == BACKBONE else f"{part}.{name}"


def pick_device(name: str) -> torch.device:
    """The device of this name; `auto` is CUDA where a GPU is visible."""
    require(name in ("auto", "cpu", "cuda"), f"there is no device {name!r}; use auto, cpu or cuda")
    visible = torch.cuda.is_available()
    require(name != "cuda" or visible, "the device is cuda, but no GPU is visible; use auto or cpu")
    return torch.device("cuda" if visible and name != "cpu" else "cpu")


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision of this name; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    require(name == "auto" or name in DTYPES, f"there is no dtype {name!r}; use one of auto, {', '.join(DTYPES)}")
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]
