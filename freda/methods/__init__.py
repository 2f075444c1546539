"""The methods by the name that the config and the command line use."""

from __future__ import annotations

from typing import Any

from freda.errors import require
from freda.methods.autoregressive import Autoregressive
from freda.methods.best_of_n import BestOfN
from freda.methods.block_diffusion import BlockDiffusion
from freda.methods.method import Method
from freda.methods.self_refine import SelfRefine
from freda.methods.verified import Verified
from freda.sections import apply_override, build

METHODS: dict[str, type[Method]] = {
    "autoregressive": Autoregressive,
    "block-diffusion": BlockDiffusion,
    "self-refine": SelfRefine,
    "best-of-n": BestOfN,
    "verified": Verified,
}


def method_like(text: str) -> Method:
    """A new method by its name, or by its name and settings: `self-refine:layout=shifted,ar_weight=0.5`."""
    kind, settings = _read(text)
    made: Method = build(kind, settings, "method.")
    return made


def method_named(text: str | None, own: Method) -> Method:
    """The method to decode a model by: its `own`, or the one with this name, and with settings where there are some:
    `verified:tail=blank`. What decoding must repeat of the training it has from `own`."""
    if text is None or text == own.name:
        return own
    kind, settings = _read(text)
    return kind.like(own, settings)


def default_method(own: Method) -> str:
    """The method that a reader of texts wants of a model: `verified` where it can be, else the model's own."""
    layout = own.geometry
    return Verified.name if layout.drafts and layout.shift and layout.causal else own.name


def _read(text: str) -> tuple[type[Method], dict[str, Any]]:
    """The class and the settings in `name:key=value,key=value`."""
    name, _, settings = text.partition(":")
    require(name in METHODS, f"there is no method {name!r}; use one of {', '.join(METHODS)}")
    given: dict[str, Any] = {"method": {}}
    for setting in filter(None, settings.split(",")):
        apply_override(given, f"method.{setting}")
    return METHODS[name], given["method"]
