"""Random numbers that belong to a place, not to a moment.

Every draw is a hash of the counters that name it, for instance (seed, step, row, position): the same on CPU and GPU,
in one process or many, whatever else is in the batch, before and after a resume. No generator state is kept anywhere.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


# First counter of every draw, so that no two uses share their numbers: 1, 2, ... in this order.
Purpose = IntEnum("Purpose", "NOISE_LEVEL MASKING REPLACEMENT SAMPLING PASSES SELECTION NEGATIVES CANDIDATES DRAFTS")


def uniform(purpose: Purpose, *counters: Tensor | int) -> Tensor:
    """fp32 numbers strictly inside (0, 1), one for each combination of the broadcast counters."""
    place = next((counter.device for counter in counters if isinstance(counter, Tensor)), None)
    state = torch.full((), int(purpose), dtype=torch.int64, device=place)  # nothing is copied from the host
    for counter in counters:
        if isinstance(counter, Tensor):
            value = counter.long()
        else:
            value = torch.full((), counter, dtype=torch.int64, device=place)
        state = _mix(state.to(value.device) ^ _mix((value & _LOW) + 0x9E3779B9))
        state = _mix(state ^ ((value >> 32) & _LOW))
    return ((state >> 9).float() + 0.5) / 2**23  # 23 bits and a half: exact in fp32, never 0 or 1


def gumbel(purpose: Purpose, *counters: Tensor | int) -> Tensor:
    """Standard Gumbel noise: argmax(logits + gumbel) samples from softmax(logits)."""
    return -(-uniform(purpose, *counters).log()).log()


def _mix(h: Tensor) -> Tensor:
    """Murmur3's 32-bit finaliser, on int64 lanes: every input bit reaches every output bit."""
    h = h & _LOW
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _LOW
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _LOW
    return h ^ (h >> 16)
