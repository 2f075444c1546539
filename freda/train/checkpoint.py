"""Checkpoints: a model folder plus what training needs to go on as if it had never stopped.

`runs/x/checkpoints/step-N` is written beside its place and renamed, and only then does `runs/x/latest` name it: killed
at any moment, a run has its last complete checkpoint. The optimizer's moments are safetensors, the rest is JSON. All
noise and the order of rows are functions of the step, so there is no generator state to keep.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from freda.config import MethodConfig
from freda.data.tokenizer import Tokenizer
from freda.errors import FredaError
from freda.model.transformer import Transformer
from freda.model.weights import load_model, write_model, written_beside

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


def restore(run: Path, model: Transformer, optimizer: torch.optim.AdamW) -> int:
    """Load the newest checkpoint into `model` and `optimizer`; returns the number of steps done."""
    folder = latest(run)
    model.load_state_dict(load_model(folder).model.state_dict())
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        moments = load_file(folder / "optimizer.safetensors")
    except FileNotFoundError as error:
        raise FredaError(f"{folder} is not a training checkpoint: {Path(error.filename).name} is missing") from None
    step = int(state["step"])
    for name, weight in model.named_parameters():
        optimizer.state[weight] = {
            "step": torch.tensor(float(step)),
            **{moment: moments[f"{moment}.{name}"].to(weight.device) for moment in MOMENTS},
        }
    return step


def latest(run: Path) -> Path:
    """The newest complete checkpoint of a run."""
    if not run.is_dir():
        raise FredaError(f"there is no run folder {run}")
    try:
        folder = run / "checkpoints" / (run / "latest").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise FredaError(
            f"{run} holds no complete checkpoint: the run was interrupted before its first save; "
            f"delete the folder and start again, with a smaller train.save_every"
        ) from None
    if not folder.is_dir():
        raise FredaError(
            f"{run / 'latest'} names {folder.name}, which does not exist; complete: {_steps(run) or 'none'}"
        )
    return folder


def _steps(run: Path) -> list[int]:
    """The steps of all complete checkpoints, oldest first."""
    names = (path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*"))
    return sorted(int(name) for name in names if name.isdigit())


def _moments(model: Transformer, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    return {
        f"{moment}.{name}": optimizer.state[weight][moment].contiguous()
        for name, weight in model.named_parameters()
        for moment in MOMENTS
    }
