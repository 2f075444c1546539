"""Where a model runs, and in which precision: `auto` is a GPU and bfloat16, or without one the CPU and float32."""

from __future__ import annotations

import torch

from freda.errors import require

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
