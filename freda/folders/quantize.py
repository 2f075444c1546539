"""Matrices stored as int8: a quarter of the bytes of fp32, read back as the numbers they stand for.

Each row has a scale of its own, its largest magnitude over 127; a weight is off by at most half a step of it. Vectors
(norms, biases) stay as they are. In a safetensors file the int8 matrix has the weight's name and its scales stand
beside it under the name with `.int8_scale`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

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
    """Must a tensor of a file be kept as it is until `unpacked` has seen its partner?"""
    return tensor.dtype == torch.int8 or name.endswith(SCALE)


def unpacked(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The weights that packed tensors stand for; others as they are. An int8 matrix without scales stays int8."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            continue
        scale = tensors.get(name + SCALE)
        made[name] = tensor if scale is None else (tensor.float() * scale[..., None]).to(dtype or torch.float32)
    return made


def quantize_model(source: Path, target: Path) -> dict[str, int]:
    """Write a model folder with int8 matrices; says how many bytes its weights took and take."""
    from safetensors.torch import load_file, save_file

    from freda.files import written_beside
    from freda.folders.model_folder import SCORER_FILE, load_model, write_model

    loaded = load_model(source)
    before = after = 0
    with written_beside(target) as folder:
        write_model(folder, loaded)
        for file in ("model.safetensors", SCORER_FILE):
            path = folder / file
            if path.is_file():
                before += path.stat().st_size
                save_file(packed(load_file(path)), path, metadata={"format": "pt"})
                after += path.stat().st_size
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["freda"]["stored_as"] = "int8"
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return {"bytes_before": before, "bytes_after": after}
