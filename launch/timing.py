"""What one call costs: time on the device, time on the host, memory; and what a copy moves.

Two times of a call on a GPU, because each hides something. `call_ms` is what a caller waits for who
does nothing else: where the host issues kernels slower than the device runs them, it is the host's
time. `kernel_times` is what the device computes, whatever the host does; it leaves out the gaps
between kernels, which a faster host or a graph would close but for a few microseconds each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType

COPY_BYTES = {"cpu": 2**26}
"""Size of the copy that measures bandwidth, where it is not 1 GiB."""

PROFILED_CALLS, HOST_CALLS = 10, 20

Work = Callable[[], object]


def call_ms(call: Work, device: torch.device, *, warmup_ms: float, repeat_ms: float) -> float:
    """Milliseconds of one call, the median of as many as fit into `repeat_ms`.

    On a GPU between two events around the call, the L2 cache overwritten before it
    (`triton.testing.do_bench`); on a CPU by the clock.
    """
    if device.type != "cpu":
        from triton.testing import do_bench

        return float(do_bench(call, warmup=warmup_ms, rep=repeat_ms, return_mode="median"))
    for budget in (warmup_ms, repeat_ms):
        times: list[float] = []
        while not times or sum(times) < budget:
            began = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - began))
    return median(times)


def host_ms(call: Work, device: torch.device) -> float | None:
    """Milliseconds until a call returns while the device is idle, the median; None on a CPU."""
    if device.type == "cpu":
        return None
    times = []
    for _ in range(HOST_CALLS):
        torch.accelerator.synchronize(device)
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    torch.accelerator.synchronize(device)
    return median(times)


@dataclass(frozen=True)
class Kernel:
    """What the device ran under one name during one call (copies and fills count as well)."""

    name: str
    ms: float
    launches: float


def kernel_times(call: Work, device: torch.device) -> list[Kernel] | None:
    """Device time of one call by kernel, longest first, the mean of several; None on a CPU.

    Nothing clears the L2 cache between the calls: inputs that fit into it are read from it.
    """
    if device.type == "cpu":
        return None
    activity: Any = getattr(torch.profiler.ProfilerActivity, device.type.upper())
    call()
    torch.accelerator.synchronize(device)
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(PROFILED_CALLS):
            call()
        torch.accelerator.synchronize(device)
    return sum_kernels(profile.key_averages(), PROFILED_CALLS)


def sum_kernels(events: Any, calls: int) -> list[Kernel]:
    """Kernels of one call out of a profile's averages over `calls` of them, longest first.

    The host's own events and marked ranges are left out; time there is in microseconds.
    """
    kernels = [
        Kernel(event.key, event.self_device_time_total / 1e3 / calls, event.count / calls)
        for event in events
        if event.device_type != DeviceType.CPU and not event.is_user_annotation
    ]
    if not kernels:
        raise RuntimeError("the profiler saw no kernel")
    return sorted(kernels, key=lambda kernel: -kernel.ms)


def peak_bytes(call: Work, device: torch.device) -> int | None:
    """Bytes that a call allocates at its peak, o included, above what is there; None on a CPU."""
    if device.type == "cpu":
        return None
    torch.accelerator.synchronize(device)
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    call()
    torch.accelerator.synchronize(device)
    return torch.accelerator.max_memory_allocated(device) - before


def copy_bandwidth(device: torch.device, *, warmup_ms: float, repeat_ms: float) -> float:
    """Bytes a second that a large copy on the device moves, those read plus those written."""
    size = COPY_BYTES.get(device.type, 2**30)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    ms = call_ms(lambda: target.copy_(source), device, warmup_ms=warmup_ms, repeat_ms=repeat_ms)
    return 2 * size / (ms / 1e3)
