"""freda: forward-free block-diffusion language models that refine their own drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freda.decode.api import Model

__version__ = "0.1.0"


def load(path: Any, device: str = "auto", dtype: str = "auto", **engine: Any) -> Model:
    """A model or run folder, ready to generate; see `freda.decode.api`."""
    from freda.decode.api import load as load_model  # torch is loaded when it is needed, not with the package

    return load_model(path, device, dtype, **engine)
