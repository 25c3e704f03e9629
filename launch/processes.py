"""The processes of a job: ranks as torchrun started them, their devices, group and progress bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kda_cp import platform

TIMEOUT = timedelta(minutes=10)
"""After which a rank gives up waiting for one that is dead or stalled."""

Show = Callable[[str, float], None]
"""`show(what, done)`: what is under way, and the part of the job that is done."""


def this_rank() -> int:
    """The rank of this process; 0 without torchrun."""
    return int(os.environ.get("RANK", 0))


def number_of_ranks() -> int:
    """How many ranks torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def find_device(name: str) -> torch.device:
    """Choose the device of this rank; ValueError if this machine has not enough of them."""
    here = dict.fromkeys(("cpu", platform.device))
    if name not in here:
        expected = " or ".join(here)
        raise ValueError(f"--device: expected {expected} on this machine, got {name!r}")
    if name == "cpu":
        return torch.device("cpu")
    there, asked = torch.accelerator.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if asked > there:
        raise ValueError(f"--device: expected a device for each of {asked} ranks, got {there}")
    index = int(os.environ.get("LOCAL_RANK", 0))
    torch.accelerator.set_device_index(index)
    return torch.device(name, index)


@contextmanager
def process_group(device: torch.device) -> Iterator[dist.ProcessGroup | None]:
    """The group of all ranks that torchrun started; None without torchrun."""
    if "RANK" not in os.environ:
        yield None
        return
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        timeout=TIMEOUT,
        device_id=None if device.type == "cpu" else device,
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def gather(value: dict[str, Any], group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """Collect one value from every rank, in rank order, on every rank."""
    if group is None:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


@contextmanager
def progress() -> Iterator[Show]:
    """A bar on a terminal's standard error, from rank 0, gone at the end; elsewhere nothing."""
    if this_rank() != 0 or not sys.stderr.isatty():
        yield lambda what, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, done: bar.update(task, description=what, completed=done)
