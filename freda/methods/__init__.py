"""The methods by the name that the config and the command line use."""

from __future__ import annotations

import dataclasses
from typing import Any

from freda.errors import require
from freda.methods.autoregressive import Autoregressive
from freda.methods.best_of_n import BestOfN
from freda.methods.block_diffusion import BlockDiffusion
from freda.methods.method import Method
from freda.methods.self_refine import SelfRefine
from freda.sections import apply_override, build

METHODS: dict[str, type[Method]] = {
    "autoregressive": Autoregressive,
    "block-diffusion": BlockDiffusion,
    "self-refine": SelfRefine,
    "best-of-n": BestOfN,
}


def method_like(text: str) -> Method:
    """A new method by its name, or by its name and settings: `self-refine:layout=shifted,ar_weight=0.5`."""
    name, _, settings = text.partition(":")
    _check_name(name)
    given: dict[str, Any] = {"method": {"name": name}}
    for setting in filter(None, settings.split(",")):
        apply_override(given, f"method.{setting}")
    kind, values = Method.variant(given["method"])
    made: Method = build(kind, values, "method.")
    return made


def method_named(name: str | None, own: Method) -> Method:
    """The method to decode a model by: its `own`, or the one called `name` with the settings that both have."""
    if name is None or name == own.name:
        return own
    _check_name(name)
    keys = {key.name for key in dataclasses.fields(METHODS[name]) if key.init}
    return METHODS[name](**{key: value for key, value in own.stored().items() if key in keys})


def _check_name(name: str) -> None:
    require(name in METHODS, f"there is no method {name!r}; use one of {', '.join(METHODS)}")
