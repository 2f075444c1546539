"""Checkpoints: a model folder plus what training needs to go on as if it had never stopped.

`runs/x/checkpoints/step-N` is written beside its place and renamed, and only then does `runs/x/latest` name it: killed
at any moment, a run has its last complete checkpoint. The optimizer's moments are safetensors, the rest is JSON. All
noise and the order of rows are functions of the step, so there is no generator state to keep.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from freda.config import MethodConfig
from freda.data.tokenizer import Tokenizer
from freda.errors import FredaError
from freda.model.transformer import Transformer
from freda.model.weights import write_model, written_beside

MOMENTS = ("exp_avg", "exp_avg_sq")


def save(
    run: Path,
    model: Transformer,
    tokenizer: Tokenizer,
    method: MethodConfig,
    optimizer: torch.optim.AdamW,
    *,
    step: int,
    keep: int,
) -> Path:
    """Write `checkpoints/step-N`, point `latest` at it and remove all but the newest `keep`."""
    folder = run / "checkpoints" / f"step-{step}"
    with written_beside(folder, replace=True) as beside:
        write_model(beside, model, tokenizer, method, stage="training")
        save_file(_moments(model, optimizer), beside / "optimizer.safetensors")
        (beside / "state.json").write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
    pointer = run / "latest.tmp"
    pointer.write_text(folder.name + "\n", encoding="utf-8")
    os.replace(pointer, run / "latest")
    for old in _steps(run)[:-keep]:
        shutil.rmtree(run / "checkpoints" / f"step-{old}")
    return folder


def restore(folder: Path, model: Transformer, optimizer: torch.optim.AdamW) -> int:
    """Load a checkpoint's optimizer state; `model` holds its weights already. Returns the number of steps done."""
    try:
        step = int(json.loads((folder / "state.json").read_text(encoding="utf-8"))["step"])
        moments = load_file(folder / "optimizer.safetensors")
        for name, weight in _learning(model):
            optimizer.state[weight] = {
                "step": torch.tensor(float(step)),
                **{moment: moments[f"{moment}.{name}"].to(weight.device) for moment in MOMENTS},
            }
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise FredaError(
            f"{folder} cannot be resumed from: its optimizer state is missing or damaged ({error}); "
            f"start a new run with train.init={folder}"
        ) from None
    return step


def latest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run: the one that `latest` names, or else the newest there is, if any."""
    folders = run / "checkpoints"
    with contextlib.suppress(FileNotFoundError):
        named = folders / (run / "latest").read_text(encoding="utf-8").strip()
        if named.is_dir():
            return named
    steps = _steps(run)
    return folders / f"step-{steps[-1]}" if steps else None


def _steps(run: Path) -> list[int]:
    """The steps of all complete checkpoints, oldest first."""
    names = (path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*"))
    return sorted(int(name) for name in names if name.isdigit())


def _moments(model: Transformer, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    return {
        f"{moment}.{name}": optimizer.state[weight][moment].contiguous()
        for name, weight in _learning(model)
        for moment in MOMENTS
    }


def _learning(model: Transformer) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
