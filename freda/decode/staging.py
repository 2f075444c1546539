"""Small things on their way between host and device, without either waiting for the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Staging:
    """Memory from which small things are copied to the device and back without waiting; `fixed`: always to the same
    memory of the device for the same shape, where graphs look for them. Otherwise nothing is kept: there may be any
    number of shapes."""

    def __init__(self, device: torch.device, *, fixed: bool) -> None:
        self._device, self._fixed, self._pinned = device, fixed, fixed and device.type == "cuda"
        self._there: dict[Any, Tensor] = {}
        self._free: dict[Any, deque[tuple[Tensor, Any]]] = {}

    def given(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the host to write to, which nothing is being copied from."""
        if not self._pinned:
            return torch.empty(shape, dtype=dtype)
        ring = self._free.setdefault((shape, dtype), deque())
        if len(ring) < 4:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        memory, copied = ring.popleft()
        copied.synchronize()
        return memory

    def _copied(self, memory: Tensor) -> Any:
        """Remember memory of the host as used until what was started has ended; returns how to wait for that."""
        if not self._pinned:
            return None
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._free.setdefault((tuple(memory.shape), memory.dtype), deque()).append((memory, copied))
        return copied

    def sent(self, memory: Tensor) -> Tensor:
        """The contents of what `given` gave, on the device."""
        if not self._fixed:
            return memory.to(self._device)
        key = (tuple(memory.shape), memory.dtype)
        if key not in self._there:
            self._there[key] = torch.empty(memory.shape, dtype=memory.dtype, device=self._device)
        self._there[key].copy_(memory, non_blocking=True)
        self._copied(memory)
        return self._there[key]

    def fetched(self, there: Tensor) -> Callable[[], Any]:
        """Start copying to the host; the function that is returned waits for it, and gives an array."""
        memory = self.given(tuple(there.shape), there.dtype)
        memory.copy_(there, non_blocking=self._pinned)
        copied = self._copied(memory)

        def read() -> Any:
            if copied is not None:
                copied.synchronize()
            return memory.numpy()

        return read
