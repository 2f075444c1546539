"""AdamW, its learning rate as a function of the step, and the number of passes each group of rows runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from freda.config import TrainConfig
from freda.methods.noise import Purpose, uniform
from freda.model.transformer import Transformer


def make_optimizer(model: Transformer, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over all weights that learn; matrices decay, norms and biases do not.

    A group's `scale` multiplies its rate: the backbone may learn slower than the scorer, whose own last layer counts as
    backbone.
    """
    kinds: dict[tuple[bool, bool], list[Tensor]] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            backbone = not name.startswith("scorer.") or name.startswith("scorer.last_layer.")
            kinds.setdefault((weight.dim() >= 2, backbone), []).append(weight)
    groups = [
        {
            "params": weights,
            "weight_decay": config.weight_decay if matrix else 0.0,
            "scale": config.backbone_lr_scale if backbone else 1.0,
        }
        for (matrix, backbone), weights in sorted(kinds.items(), reverse=True)
    ]
    fused = any(
        weight.is_cuda for weights in kinds.values() for weight in weights
    )  # one kernel that reads and writes every state once
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=fused)


def clip_and_update(optimizer: torch.optim.AdamW, gradients: Sequence[Tensor], norm: float, most: float) -> None:
    """One step of the optimizer with gradients scaled down to the norm `most`.

    The fused kernel scales while it reads them, by the attribute that gradient scalers set: half a pass over all less.
    """
    scale = min(1.0, most / (norm + 1e-6))
    whole = not isinstance(optimizer.param_groups[0]["params"][0], DTensor)  # sharded weights do not mix with a scalar
    if optimizer.defaults["fused"] and whole:
        factor = torch.tensor(1.0 / scale, device=gradients[0].device) if scale < 1.0 else None
        optimizer.grad_scale = factor  # type: ignore[attr-defined]
    elif scale < 1.0:
        torch._foreach_mul_(list(gradients), scale)
    optimizer.step()


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of optimizer step `step` (from 0): linear warm-up, then constant or a cosine to 5% of the peak."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def pass_numbers(seed: int, step: int, groups: int, most: int) -> list[int]:
    """t of each group of rows: uniform on 1..most for every group and spread evenly over the groups of a step (M6).

    A function of (seed, step) alone, so every process of a run agrees on it.
    """
    shift = float(uniform(Purpose.PASSES, seed, step, 0))
    order = uniform(Purpose.PASSES, seed, step, torch.arange(1, groups + 1)).argsort().tolist()
    return [1 + min(most - 1, int(most * (place + shift) / groups)) for place in order]
