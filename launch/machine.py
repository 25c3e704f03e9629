"""What messages and folds cost on a machine of nodes: cited, set by hand, or measured here.

`launch/predict.py` computes with these numbers, which mean there what its text says.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kda_cp.comm import affine
from kda_cp.comm.collectives import start_all_gather, start_all_to_all
from kda_cp.launch.processes import gather

# Sources of the defaults:
# [A] https://github.com/togethercomputer/together-nccl-tests: benchmarks/H100/results/
#     20260305_220043/all_gather_ring.out (nccl-tests, 8 H100)
# [B] the same: benchmarks/B200/sendrecv-p2p-scaling/P2P_Bandwidth_Scaling_2to64_Nodes.md (nodes of
#     8 B200, a ConnectX-7 of 400 Gb/s for each)
# [C] https://github.com/togethercomputer/together-dgxc-benchmarking:
#     worklog/2026-04-20_nccl_collective_scaling_report.md (the cluster of [B])
# [D] https://github.com/NVIDIA/nccl: src/graph/tuning.cc at 5067397 (what NCCL itself reckons with)
# [E] measured by us on one H200 (docs/measurements.md); the fold with K = V = 128 in fp32
# [F] https://github.com/deepseek-ai/DeepEP/issues/3 (2 nodes of 8 H100, NVLink off)


@dataclass(frozen=True)
class Link:
    """One direction between two GPUs."""

    latency_s: float
    step_s: float
    bandwidth: float  # B/s


NVLINK = Link(
    latency_s=12e-6,  # [D] 8.4 us for an operation and 3.4 for a step ("Simple"); not measured
    step_s=3.4e-6,  # [D] a step of a ring ("Simple"); [A] gives 3.5, fitted from 16 to 128 MiB
    bandwidth=320e9,  # [A] fitted from 16 to 128 MiB; 358e9 at 8 GiB
)
NETWORK = Link(
    latency_s=30e-6,  # [B] on 2 nodes 35 us at 64 KiB to 26 at 2 MiB, beside what bandwidth takes
    step_s=14e-6,  # [D] a step of a ring ("Simple")
    bandwidth=43e9,  # [B] on 2 and 4 nodes; in an all-gather [C] 43 to 40 for each NIC
)


@dataclass(frozen=True)
class Machine:
    """Nodes of equal GPUs. The defaults are H100s or H200s, each with a NIC of 400 Gb/s."""

    ranks_per_node: int = 8
    nvlink: Link = NVLINK
    network: Link = NETWORK
    launch_s: float = 25e-6  # [E] of an all-gather 25 to 37 us in a row, 40 to 71 one by one
    message_s: float = 1e-6  # [D] to post a message on Intel, 2 on AMD; [F] is nearer to 0.6
    fold_launch_s: float = 35e-6  # [E] `A @ S + b` issued from Python, 25 to 44 us
    fold_s: float = 6e-6  # [E] on the device, by CUDA graph
    fold_flops: float = 37e12  # [E] 35e12 to 41e12, from 1 to 64 heads

    def node(self, rank: int) -> int:
        """The node of a rank: ranks are numbered node by node."""
        return rank // self.ranks_per_node

    def link(self, source: int, target: int) -> Link:
        """What carries a message between two ranks."""
        return self.nvlink if self.node(source) == self.node(target) else self.network

    def fold_step(self, heads: int, key_dim: int, value_dim: int) -> float:
        """Seconds of one `A S + b` of so many heads (times batch) on the device."""
        return self.fold_s + 2 * heads * key_dim * key_dim * value_dim / self.fold_flops

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_machine(path: Path) -> Machine:
    """Read what `Machine.write` wrote; what is left out has its default."""
    try:
        machine: Machine = _filled(Machine(), json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ValueError(f"expected the file of a machine, got {path}: {error}") from None
    return machine


POSITIVE = ("ranks_per_node", "bandwidth", "fold_flops")
"""Fields that cannot be 0."""


def _filled(default: Any, values: Any) -> Any:
    """Return the dataclass `default` with the values of a dictionary, checked."""
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, got {values!r}")
    known = [f.name for f in fields(default)]
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"expected names among {known}, got {name!r}")
        old = getattr(default, name)
        if is_dataclass(old):
            value = _filled(old, value)
        else:
            least = "above 0" if name in POSITIVE else "of at least 0"
            kind = "an integer" if isinstance(old, int) else "a number"
            right = isinstance(value, (int, type(old))) and not isinstance(value, bool)
            if not right or not value >= 0 or (value == 0 and name in POSITIVE):
                raise ValueError(f"{name}: expected {kind} {least}, got {value!r}")
        default = replace(default, **{name: value})
    return default


# Measuring ---------------------------------------------------------------------------------------

SMALL, LARGE = 256, 2**21
"""Floats of a message whose latency counts, and of one whose bandwidth does: 1 KiB, 8 MiB."""

FOLDS, REPEATS = 64, 15
"""Steps of a timed chain of folds; how often each thing is timed."""


def measure(
    group: dist.ProcessGroup, device: torch.device, heads: int, key_dim: int, value_dim: int
) -> Machine:
    """Measure the machine that `group` runs on: all ranks that torchrun started. Collective.

    Ping-pong between two neighbours of the first node, and between it and the next; a small
    all-gather and all-to-all; folds. A link that is not there (one node, or one rank a node) keeps
    its default. On a GPU a hop takes no less than its host takes to issue it.
    """
    ranks = dist.get_world_size(group)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    nodes, x = -(-ranks // local), torch.zeros(SMALL, device=device)

    def gather_all() -> Any:
        return start_all_gather(x, group)

    launch = seconds(group, device, gather_all, issue=True)
    machine = replace(Machine(), ranks_per_node=local, launch_s=launch)
    if local > 1:
        node = dist.new_group(range(local))  # every rank takes part in making it
        inside = dist.get_rank(group) < local
        whole = seconds(group, device, lambda: start_all_gather(x, node) if inside else None)
        step = max(whole - launch, 0.0) / (local - 1)
        machine = replace(machine, nvlink=_measure_link(group, device, (0, 1), step))
    if nodes > 1:
        whole = seconds(group, device, gather_all)
        step = max(whole - launch - (ranks - nodes) * machine.nvlink.step_s, 0.0) / (nodes - 1)
        ends = (local - 1, local)
        machine = replace(machine, network=_measure_link(group, device, ends, step))
    if ranks > 2:
        rows, each = torch.zeros(ranks, 1, device=device), [1] * ranks
        whole = seconds(group, device, lambda: start_all_to_all(rows, each, each, group))
        one = launch + machine.link(0, ranks - 1).latency_s
        machine = replace(machine, message_s=max(whole - one, 0.0) / (ranks - 2))
    issue, work, flops = _measure_fold(group, device, heads, key_dim, value_dim)
    return replace(machine, fold_launch_s=issue, fold_s=work, fold_flops=flops)


def _measure_link(
    group: dist.ProcessGroup, device: torch.device, ends: tuple[int, int], step: float
) -> Link:
    a, b = ends
    one_way = []
    for count in (SMALL, LARGE):
        x = torch.zeros(count, device=device)

        def there_and_back(x: Tensor = x) -> None:
            pass_on(x, a, b, group)
            pass_on(x, b, a, group)

        one_way.append(seconds(group, device, there_and_back) / 2)
    small, large = one_way
    return Link(small, step, x.element_size() * (LARGE - SMALL) / max(large - small, 1e-9))


def _measure_fold(
    group: dist.ProcessGroup, device: torch.device, heads: int, key_dim: int, value_dim: int
) -> tuple[float, float, float]:
    many, issue, work = max(heads, 8), 0.0, []
    for count in (1, many):
        A = torch.eye(key_dim, device=device).expand(count, -1, -1) / 2
        b = torch.ones(count, key_dim, value_dim, device=device)

        def chain(A: Tensor = A, b: Tensor = b) -> None:
            S = b
            for _ in range(FOLDS):
                S = affine.apply(A, b, S)

        if device.type == "cuda":  # a host's clock would not see what the device takes
            issue = seconds(group, device, chain, issue=True) / FOLDS
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                chain()
            work.append(seconds(group, device, graph.replay) / FOLDS)
        else:
            work.append(seconds(group, device, chain) / FOLDS)
    head = max(work[1] - work[0], 1e-9) / (many - 1)
    return issue, max(work[0] - head, 0.0), 2 * key_dim * key_dim * value_dim / head


def pass_on(x: Tensor, source: int, target: int, group: dist.ProcessGroup) -> None:
    """Send x from one rank of the group to another; the others do nothing."""
    ends = {source: (dist.isend, target), target: (dist.irecv, source)}
    if dist.get_rank(group) in ends:
        start, peer = ends[dist.get_rank(group)]
        message = dist.P2POp(start, x, dist.get_global_rank(group, peer), group)
        for handle in dist.batch_isend_irecv([message]):
            handle.wait()


def seconds(
    group: dist.ProcessGroup,
    device: torch.device,
    start: Callable[[], Any],
    *,
    issue: bool = False,
) -> float:
    """Time `start` and the `wait` of what it returns, if it does; or with `issue`, `start` alone.

    All ranks begin together. The median of each rank, and of these the longest. Collective.
    """
    times = []
    for _ in range(REPEATS + 2):
        dist.barrier(group)
        _finish(device)
        began = time.perf_counter()
        work = start()
        issued = time.perf_counter()
        if work is not None:
            work.wait()
        _finish(device)
        times.append((issued if issue else time.perf_counter()) - began)
    return max(rank["seconds"] for rank in gather({"seconds": median(times[2:])}, group))


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
