"""What it costs that ranks compare their calls: `check="always"` against "off".

    torchrun --standalone --nproc-per-node 8 -m kda_cp.launch.check_cost

A call here is one of the operator without gradients on shards of 64 tokens, so small that the
comparison shows. Wall time on the host of rank 0, over many calls. On one machine; over a network
each of the ceil(log2 P) rounds of the comparison takes one message's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from kda_cp import build_cp_context, chunk_kda_cp, platform
from kda_cp.comm.agreement import agreement_of
from kda_cp.launch.processes import find_device, number_of_ranks, process_group, this_rank

CALLS, WARM_UP, TOKENS = 300, 30, 64


def main() -> None:
    """Time the calls on the ranks that torchrun started; rank 0 prints a table."""
    if number_of_ranks() == 1:
        raise SystemExit("check_cost: error: expected several ranks, started by torchrun, got one")
    device = find_device(platform.device)
    with process_group(device) as group, torch.no_grad():
        assert group is not None
        agreement, claim = agreement_of(group), {"call": "check_cost"}
        table = Table(title=f"{number_of_ranks()} ranks, {device.type}: microseconds on the host")
        for column in ("", "median", "9 of 10 within"):
            table.add_column(column, justify="right" if column else "left")
        for name, step in (
            ("the comparison alone", lambda: agreement.check(claim, None, wants_gradient=True)),
            ('a call, check="off"', _make_call(group, device, "off")),
            ('a call, check="always"', _make_call(group, device, "always")),
        ):
            times = _time(step, group)
            table.add_row(name, f"{times[CALLS // 2]:.0f}", f"{times[CALLS * 9 // 10]:.0f}")
        if this_rank() == 0:
            Console().print(table)


def _make_call(group: dist.ProcessGroup, device: torch.device, check: str) -> Callable[[], object]:
    context = build_cp_context([0, TOKENS * number_of_ranks()], group, check=check)
    q = torch.full((1, TOKENS, 1, 16), 0.1, device=device)
    return lambda: chunk_kda_cp(q, q, q, -q, q[..., 0], context)


def _time(step: Callable[[], object], group: dist.ProcessGroup) -> list[float]:
    """Microseconds of each call, sorted."""
    times = []
    for call in range(WARM_UP + CALLS):
        if call == WARM_UP:
            dist.barrier(group)
        begun = time.perf_counter()
        step()
        times.append((time.perf_counter() - begun) * 1e6)
    return sorted(times[WARM_UP:])


if __name__ == "__main__":
    main()
