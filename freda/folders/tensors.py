"""Tensors of safetensors files: all of them, what they are without their values, or the rows that a process holds.

A matrix may be stored as int8, a quarter of the bytes of fp32: each row has a scale of its own, its largest magnitude
over 127, and a weight is off by at most half a step of it. The int8 matrix has the weight's name, and its scales have
that name with `.int8_scale` added. Vectors (norms, biases) stay as they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from freda.errors import FredaError, require
from freda.files import read_json
from freda.model.parts import Part

SCALE = ".int8_scale"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: one, or the shards that an index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    advice = "write safetensors with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
    pickled = not index.is_file() and any(folder.glob("pytorch_model*.bin"))
    seen = "its weights are a pickle (pytorch_model.bin), which is never read because it can run code"
    require(not pickled, f"{seen}; {advice}")
    require(index.is_file(), "half-written: model.safetensors is missing; write or download the folder again")
    files: Any = read_json(index).get("weight_map")
    listed = isinstance(files, dict) and files and all(isinstance(name, str) for name in files.values())
    require(bool(listed), f"{index.name} has no weight_map of tensors and their files; write or download it again")
    names = sorted(set(files.values()))
    outside = next((name for name in names if Path(name).name != name), None)
    require(outside is None, f"{index.name} names {outside!r:.80}, which is no file of this folder; it is not read")
    missing = next((name for name in names if not (folder / name).is_file()), None)
    require(missing is None, f"half-written: {missing} of {index.name} is missing")
    return [folder / name for name in names]


def read_safetensors(
    paths: Sequence[Path], device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """All tensors of some files, cast one by one so that only one is ever held twice. On the device `meta` they have
    shape and dtype and no values, which are not read."""
    tensors = {}
    described = torch.device(device).type == "meta"
    for path in paths:
        with _readable(path), safe_open(path, framework="pt", device="cpu" if described else str(device)) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                tensor = _described(file.get_slice(name)) if described else file.get_tensor(name)
                int8 = tensor.dtype == torch.int8 or name.endswith(SCALE)  # not cast before both are combined
                odd = f"the tensor {name} is stored as {tensor.dtype}; quantised weights are not read"
                require(int8 or tensor.is_floating_point(), odd)
                tensors[name] = tensor if int8 else tensor.to(dtype=dtype)
    found = unpacked(tensors, dtype)
    return {name: tensor for name, tensor in found.items() if not name.endswith(".rotary_emb.inv_freq")}


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file that others may read as the umask allows; the library alone makes it private."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, for instance
        raise OSError(str(error)) from error
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def fill_parts(paths: Sequence[Path], parts: Mapping[str, Part]) -> None:
    """Give parts of tensors their values. All are in the files, under these names and as `read_safetensors` has them.
    No other rows of the files are read, and one part at a time is held twice."""
    with contextlib.ExitStack() as stack:
        holders: dict[str, tuple[Path, Any]] = {}
        for path in paths:
            with _readable(path):
                file = stack.enter_context(safe_open(path, framework="pt"))
                holders |= dict.fromkeys(file.keys(), (path, file))
        for name, part in parts.items():
            if part.tensor.numel():
                found = {key: _rows(*holders[key], key, part) for key in {name, name + SCALE} & holders.keys()}
                part.tensor.copy_(unpacked(found, part.tensor.dtype)[name])


def _rows(path: Path, file: Any, name: str, part: Part) -> Tensor:
    with _readable(path):
        return part.of(file.get_slice(name))


def _described(stored: Any) -> Tensor:
    """A tensor of a file without its values."""
    shape = stored.get_shape()
    return torch.empty(shape, dtype=stored[:0].dtype if shape else stored[...].dtype, device="meta")


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise FredaError(f"{path.name} is damaged or half-written ({error}); write or download it again") from None


# -- int8 -------------------------------------------------------------------------------------------------------------


def packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with their matrices as int8."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        made[name] = tensor
        if tensor.dim() > 1:
            scale = tensor.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
            made[name] = (tensor.float() / scale).round().clamp(-127, 127).to(torch.int8)
            made[name + SCALE] = scale[..., 0]
    return made


def unpacked(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The weights that packed tensors represent; the other tensors, and int8 matrices without scales, are unchanged."""
    made = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE)}
    for name in made.keys() & {key.removesuffix(SCALE) for key in tensors.keys() - made.keys()}:
        scale = tensors[name + SCALE]
        odd = (
            f"{name}{SCALE} has shape {tuple(scale.shape)}; the weight {tuple(made[name].shape)} needs one for each row"
        )
        require(scale.shape == made[name].shape[:-1] and scale.is_floating_point(), odd)
        made[name] = (made[name].float() * scale[..., None]).to(dtype or torch.float32)
    return made
