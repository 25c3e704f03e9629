"""The collectives of the operator: the only place in the package that communicates tensors.

Each starts without waiting and returns the receiving tensor and a handle; `wait()` on the handle
before reading. All are collective over `group`: every rank calls, in the same order, with shapes
that the plan gave to all of them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor


class Work:
    """A started collective: the buffers it reads and writes, kept alive until it is waited for."""

    def __init__(self, handle: dist.Work | None, received: Tensor, sent: Tensor) -> None:
        self._handle = handle
        self._received = received
        self._sent = sent

    def wait(self) -> Tensor:
        """Wait until the received tensor may be read (on CUDA, by the current stream)."""
        if self._handle is not None:
            self._handle.wait()
        return self._received


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> Work:
    """Start gathering `x`, of one shape on every rank, into [P, *x.shape]."""
    received = x.new_empty((dist.get_world_size(group), *x.shape))
    x = x.contiguous()
    # torch 2.13 gave the collective this name and deprecated the older one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    handle = gather(received.flatten(0, 1), x, group=group, async_op=True)
    return Work(handle, received, x)


def start_all_to_all(
    x: Tensor, sends: Sequence[int], receives: Sequence[int], group: dist.ProcessGroup
) -> Work:
    """Start sending `sends[r]` rows of x [sum(sends), ...] to rank r, receiving `receives[r]`."""
    received = x.new_empty((sum(receives), *x.shape[1:]))
    x = x.contiguous()
    handle = dist.all_to_all_single(
        received, x, list(receives), list(sends), group=group, async_op=True
    )
    return Work(handle, received, x)


def all_reduce_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum `x` over the ranks, in place."""
    dist.all_reduce(x, op=dist.ReduceOp.SUM, group=group)
    return x


def all_gather_object(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Gather one small picklable value from every rank, in rank order."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
