"""freda: forward-free block-diffusion language models that refine their own drafts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freda.decode.api import Model

__version__ = "0.1.0"

# OpenMP's threads spin while they wait for each other, and on a core that another program uses this makes training 3 to
# 15 times slower. A short spin before they sleep costs nothing on an idle machine (LOG.md). Read when torch is first
# imported; the user's own setting stands.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def load(path: Any, device: str = "auto", dtype: str = "auto", *, adapter: Any = None, **engine: Any) -> Model:
    """A model or run folder, or an adapter over one, ready to generate; see `freda.decode.api`."""
    from freda.decode.api import load as load_model  # torch is loaded when it is needed, not with the package

    return load_model(path, device, dtype, adapter=adapter, **engine)
