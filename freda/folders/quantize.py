"""Matrices stored as int8: a quarter of the bytes of fp32.

Each row has a scale of its own, its largest magnitude over 127; a weight is off by at most half a step of it. Vectors
(norms, biases) stay as they are. In a safetensors file the int8 matrix has the weight's name, and its scales have that
name with `.int8_scale` added.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SCALE = ".int8_scale"


def packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with their matrices as int8."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            made[name] = tensor
            continue
        scale = tensor.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
        made[name] = (tensor.float() / scale).round().clamp(-127, 127).to(torch.int8)
        made[name + SCALE] = scale[..., 0]
    return made


def stays_packed(name: str, tensor: Tensor) -> bool:
    """Whether a tensor of a file must not be cast before `unpacked` has combined it with its partner."""
    return tensor.dtype == torch.int8 or name.endswith(SCALE)


def unpacked(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The weights that packed tensors represent; the other tensors, and int8 matrices without scales, are unchanged."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            continue
        scale = tensors.get(name + SCALE)
        made[name] = tensor if scale is None else (tensor.float() * scale[..., None]).to(dtype or torch.float32)
    return made
