"""Adapters: low-rank changes of a Transformer's linear layers, and an embedding of BLANK, beside frozen weights (M23).

With `rows = "draft"` they act on draft slots alone: committed text, its keys, values and logits are the base's own, bit
for bit. With `rows = "all"` they act on every token, and can be merged into the weights. Which tokens are draft slots
every forward knows from its mask; the Transformer passes it on, and `LowRank` is the one place that looks at it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from freda.model.config import TARGETS, AdapterConfig
from freda.model.low_rank import LowRank
from freda.model.transformer import Transformer, sampled_weights

BLANK = "blank"  # the name of BLANK's embedding among the weights


def adapt(backbone: Transformer, config: AdapterConfig) -> None:
    """Put an adapter on a Transformer, without values yet. Its weights learn, all others are frozen."""
    backbone.requires_grad_(False)
    for holder, name, layer in _linear_layers(backbone):
        if name in config.targets:
            setattr(holder, name, LowRank(layer, config))
    backbone.blank = nn.Parameter(torch.empty_like(backbone.embed_tokens.weight[:1]))


def merge(backbone: Transformer) -> None:
    """Take an adapter on all rows off a Transformer again, its changes added to the weights."""
    for holder, name, layer in _linear_layers(backbone):
        if isinstance(layer, LowRank):
            assert layer.all_rows
            setattr(holder, name, layer.merged())
    assert backbone.blank is not None
    with torch.no_grad():
        backbone.embed_tokens.weight[backbone.blank_id] = backbone.blank[0]
    backbone.blank = None


def belongs(name: str) -> bool:
    """Whether a weight of an adapted Transformer is the adapter's."""
    return name == BLANK or ".lora_" in name


def random_weights(backbone: Transformer, seed: int) -> Iterator[tuple[str, Tensor]]:
    """New values of an adapter's matrices, by name: A has std 1/√inputs and B is zero, so that nothing changes at
    first."""
    own = ((name, weight) for name, weight in backbone.named_parameters() if ".lora_" in name)
    return sampled_weights(own, seed, lambda name, w: 0.0 if ".lora_B." in name else w.shape[1] ** -0.5)


def _linear_layers(backbone: Transformer) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers that an adapter may change, each with the module that holds it and its name there."""
    holders = [holder for layer in backbone.layers for holder in layer.children()]
    for holder, name in itertools.product(holders, TARGETS):
        if isinstance(found := getattr(holder, name, None), nn.Linear):
            yield holder, name, found
