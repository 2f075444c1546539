"""AdamW, its learning rate as a function of the step, and the number of passes each group of rows runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from freda.methods.noise import Purpose, uniform
from freda.model.parts import ADAPTER, BACKBONE, Parts
from freda.train.config import TrainConfig

Copies = Mapping[Tensor, Tensor]  # of weights: their bf16 copies
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, by the names that torch gives them


def make_optimizer(parts: Parts, config: TrainConfig, *, fused: bool = False) -> torch.optim.AdamW:
    """AdamW over all weights that learn; matrices decay, norms and biases do not. A group's `scale` multiplies its
    rate: the backbone, and copies of its layers, may learn slower. `fused` is the library's CUDA kernel."""
    kinds: dict[tuple[bool, bool], list[Tensor]] = {}
    for part, name, weight in parts.weights():
        if weight.requires_grad:
            backbone = part in (BACKBONE, ADAPTER) or name in parts.copied(part)
            kinds.setdefault((weight.dim() >= 2, backbone), []).append(weight)
    groups: list[dict[str, Any]] = []
    for (matrix, backbone), weights in sorted(kinds.items(), reverse=True):
        rates = {"weight_decay": config.weight_decay * matrix, "scale": config.backbone_lr_scale if backbone else 1.0}
        groups.append({"params": weights, **rates})
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=fused)


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients together, summed in fp32 whatever their precision."""
    norms: Sequence[Tensor] = torch._foreach_norm(list(gradients), 2, dtype=torch.float32)
    total: Tensor = torch.stack(list(norms)).norm()
    return total


def clip_and_update(
    optimizer: torch.optim.AdamW, gradients: Sequence[Tensor], norm: float, most: float, copies: Copies | None = None
) -> None:
    """One step of the optimizer with gradients scaled down to the norm `most`. With `copies` the gradients are theirs,
    and one kernel a weight does it all. The library's kernel scales by the attribute that gradient scalers set."""
    scale = min(1.0, most / (norm + 1e-6))
    if copies is not None:
        _update_with_copies(optimizer, copies, scale)
        return
    whole = not isinstance(optimizer.param_groups[0]["params"][0], DTensor)  # sharded weights do not mix with a scalar
    if optimizer.defaults["fused"] and whole:
        factor = torch.tensor(1.0 / scale, device=gradients[0].device) if scale < 1.0 else None
        optimizer.grad_scale = factor  # type: ignore[attr-defined]
    elif scale < 1.0:
        torch._foreach_mul_(list(gradients), scale)
    optimizer.step()


def _update_with_copies(optimizer: torch.optim.AdamW, copies: Copies, scale: float) -> None:
    """AdamW with gradients that are in the weights' bf16 copies, or, where a weight has none, its own."""
    from freda.train import adamw_kernel as adamw

    for group in optimizer.param_groups:
        for weight in group["params"]:
            copy = copies.get(weight)
            gradient = (weight if copy is None else copy).grad
            if gradient is None:
                continue
            state = optimizer.state[weight]
            if not state:
                state |= {"step": torch.tensor(0.0), **{key: torch.zeros_like(weight) for key in MOMENTS}}
            state["step"] += 1
            rates = adamw_rates(group, float(state["step"]), scale)
            adamw.update(weight.detach(), copy, gradient, (state[MOMENTS[0]], state[MOMENTS[1]]), rates)


def adamw_rates(group: Mapping[str, Any], step: float, scale: float) -> tuple[float, ...]:
    """What the kernel needs to know of update number `step` of a group of weights."""
    beta1, beta2 = group["betas"]
    keep = 1.0 - group["lr"] * group["weight_decay"]
    step_size, root = group["lr"] / (1.0 - beta1**step), (1.0 - beta2**step) ** -0.5
    return scale, beta1, beta2, keep, step_size, root, group["eps"]


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of optimizer step `step` (from 0): linear warm-up, then constant or a cosine to 5% of the peak."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def pass_numbers(seed: int, step: int, groups: int, most: int) -> list[int]:
    """t of each group of rows: uniform on 1..most for every group and spread evenly over the groups of a step (M6). A
    function of (seed, step) alone, so every process of a run agrees on it."""
    shift = float(uniform(Purpose.PASSES, seed, step, 0))
    order = uniform(Purpose.PASSES, seed, step, torch.arange(1, groups + 1)).argsort().tolist()
    return [1 + min(most - 1, int(most * (place + shift) / groups)) for place in order]
