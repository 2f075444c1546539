"""The methods by the name that the config and the command line use."""

from __future__ import annotations

import dataclasses

from freda.errors import require
from freda.methods.autoregressive import Autoregressive
from freda.methods.best_of_n import BestOfN
from freda.methods.block_diffusion import BlockDiffusion
from freda.methods.method import Method
from freda.methods.self_refine import SelfRefine

METHODS: dict[str, type[Method]] = {
    "autoregressive": Autoregressive,
    "block-diffusion": BlockDiffusion,
    "self-refine": SelfRefine,
    "best-of-n": BestOfN,
}


def method_named(name: str | None, own: Method) -> Method:
    """The method to decode a model by: its `own`, or the one called `name` with the settings that both have."""
    if name is None or name == own.name:
        return own
    require(name in METHODS, f"there is no method {name!r}; use one of {', '.join(METHODS)}")
    keys = {key.name for key in dataclasses.fields(METHODS[name]) if key.init}
    return METHODS[name](**{key: value for key, value in own.stored().items() if key in keys})
