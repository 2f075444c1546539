"""Times on the device, and the limits they are held against, measured in the same run."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable

import torch


def seconds(function: Callable[[], object], device: torch.device, *, repeats: int = 5, warm_up: int = 1) -> float:
    """The median time of a call; the device's own clock on CUDA."""
    for _ in range(warm_up):
        function()
    if device.type != "cuda":
        return statistics.median(timeit.repeat(function, number=1, repeat=repeats))
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def now(device: torch.device) -> float:
    """The time when all that was given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large product of random matrices: zeros would run faster than real data."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, device, repeats=20, warm_up=5)


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy much larger than the caches."""
    size = (1 << 32) if device.type == "cuda" else (1 << 27)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device, repeats=10, warm_up=2)


def about(device: torch.device) -> dict[str, str]:
    """What a table of times must say about itself."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__}


def kernel_times(call: Callable[[], object], device: torch.device) -> dict[str, tuple[float, int]]:
    """Milliseconds of every kernel that a call runs, by name, and how often; on a CPU, of every operator."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        call()
        if cuda:
            torch.cuda.synchronize()
    total = "self_device_time_total" if cuda else "self_cpu_time_total"
    return {row.key: (getattr(row, total) / 1e3, row.count) for row in seen.key_averages()}


def longest_first(spent: dict[str, tuple[float, int]], most: int) -> list[tuple[str, float, int]]:
    """The kernels of `kernel_times` that took longest, as (name, milliseconds, calls)."""
    return sorted(((name, ms, calls) for name, (ms, calls) in spent.items()), key=lambda row: -row[1])[:most]
