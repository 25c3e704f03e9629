"""What an exchange of states takes on a machine of nodes: a model of latencies and bandwidths.

`predict_seconds` is a pure function of a plan, an algorithm, the sizes and a `Machine` (the numbers
and their sources: launch/machine.py). Nothing is run. P ranks are numbered node by node, R a node.

Two clocks   The host issues one thing after the other: `launch_s` for a collective or a message,
             `fold_launch_s` for a step of a fold. The device does each after the one before it, and
             not before it is issued. Why: Python issues a fold slower than a GPU computes it.
fold         Steps one after the other, each fold_s + 2 HV K K V B / fold_flops: with all heads in
             an all_gather, over a rank's own chains; with ceil(HV / P) heads in an all_to_all, over
             all chains; with HV / G heads in a hop of a ring, over one fragment.
gather       (P - N) nvlink.step_s + (N - 1) network.step_s for N nodes, and bytes received by
             min(nvlink, R network) of bandwidth. Why: NCCL passes every block round a ring, P - 1
             steps; a node takes in P - 1 blocks, its own too, through its R NICs together.
all-to-all   latency_s of the slowest link in use, message_s for each peer after the first, and
             max(bytes inside / nvlink, bytes outside / network) of the busiest rank. Why: nothing
             is shared; what comes from outside passes the NIC of the rank that it is for.
hop          latency_s + bytes / bandwidth of the edge's link, then a step of the fold.

all_gather   Forward: a gather of b, padded; an all-to-all of the A that ranks fold with; the fold.
             Backward: a gather of c, padded; the fold.
ring         G = min(HV, 4) groups of heads follow each other: the slowest hop of each step of
             `plan.hops`, one after the other, and G - 1 times the slowest of all. At least what the
             busiest host issues: G times its messages and folds.
all_to_all   An all-to-all of b and A (backward: of c) to the ranks that fold; the fold; an
             all-to-all of states back, issued after the fold.

Limits       An exchange alone: no overlap with the operator's own work, which hides part of it. No
             contention of hops, jobs or switches: with every node sending to the next at once, [B]
             of machine.py has 43 GB/s a NIC on 4 nodes, 26 on 8, 15 on 16 and more. Bandwidth does
             not depend on the size. Of an all-to-all of A only what is received counts. No NVLS,
             SHARP or PAT (NCCL's tree for one rank a node, a quarter faster below 1 MiB a rank).
How far off  Ring all_gather of 2 GiB in [C] (NVLink 650 GB/s): on 2, 8, 16, 32 and 64 nodes 5.9,
             6.8, 7.4, 9.0 and 9.5 ms, by the model 5.9, 6.4, 6.8, 7.4 and 8.6. Our H200 pair, 4
             MiB: 0.040 ms, by the model 0.042. NCCL's messages and all-to-alls over many nodes:
             compared with nothing. Gloo, measured on one host of 16 cores with 2, 4 and 8 ranks:
             a ring took 1.1 to 1.8 times what was predicted, an all-gather 1.3 to 4.8 times, as
             its flows share one memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from kda_cp.comm.layout import pieces
from kda_cp.comm.plan import Plan
from kda_cp.comm.ring import RingExchange
from kda_cp.comm.traffic import ALGORITHMS
from kda_cp.launch.machine import Machine

ITEM = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class Prediction:
    """Seconds from the start of an exchange to its result on the last rank."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class _Call:
    """One call of the operator on a machine."""

    plan: Plan
    machine: Machine
    heads: int
    key_dim: int
    value_dim: int
    batch: int
    training: bool

    @property
    def state(self) -> int:
        """Bytes of one head of a b or c."""
        return self.batch * self.key_dim * self.value_dim * ITEM

    @property
    def transition(self) -> int:
        """Bytes of one head of an A."""
        return self.batch * self.key_dim * self.key_dim * ITEM

    def fold_step(self, heads: int) -> float:
        return self.machine.fold_step(self.batch * heads, self.key_dim, self.value_dim)


def predict_seconds(
    plan: Plan,
    algorithm: str,
    machine: Machine,
    *,
    heads: int,
    key_dim: int,
    value_dim: int,
    batch: int = 1,
    training: bool = True,
) -> Prediction:
    """Predict what an exchange takes in each direction; sizes as in `traffic.received_bytes`."""
    models = {"all_gather": _all_gather, "ring": _ring, "all_to_all": _all_to_all}
    if algorithm not in models:
        raise ValueError(f"algorithm: expected one of {ALGORITHMS}, got {algorithm!r}")
    if not plan.exchanges_states:
        return Prediction(0.0, 0.0)
    call = _Call(plan, machine, heads, key_dim, value_dim, batch, training)
    model = models[algorithm]
    return Prediction(model(call, False), model(call, True) if training else 0.0)


def gather_seconds(machine: Machine, ranks: int, block: int) -> float:
    """Seconds of an all-gather of `block` bytes from each rank, once it is issued."""
    nodes = -(-ranks // machine.ranks_per_node)
    steps = (ranks - nodes) * machine.nvlink.step_s + (nodes - 1) * machine.network.step_s
    bandwidth = machine.nvlink.bandwidth
    if nodes > 1:
        bandwidth = min(bandwidth, machine.ranks_per_node * machine.network.bandwidth)
    return steps + (ranks - 1) * block / bandwidth


def all_to_all_seconds(machine: Machine, inside: int, outside: int, peers: int) -> float:
    """Seconds of an all-to-all, once it is issued, for a rank with these bytes and peers."""
    if not peers:
        return 0.0
    latency = (machine.network if outside else machine.nvlink).latency_s
    latency += (peers - 1) * machine.message_s
    return latency + max(inside / machine.nvlink.bandwidth, outside / machine.network.bandwidth)


class _Clocks:
    """The host issues and the device works; neither waits for the other without need."""

    def __init__(self) -> None:
        self.host = self.device = 0.0

    def then(self, issue: float, work: float, times: int = 1) -> None:
        for _ in range(times):
            self.host += issue
            self.device = max(self.device, self.host) + work


def _all_gather(call: _Call, backward: bool) -> float:
    plan, machine, clocks = call.plan, call.machine, _Clocks()
    block = plan.state_slots(backward) * call.heads * call.state
    clocks.then(machine.launch_s, gather_seconds(machine, plan.ranks, block))
    if not backward and plan.exchanges_transitions(call.training):
        row = call.heads * call.transition
        needs = transition_needs(plan, machine, call.training)
        received = (
            all_to_all_seconds(machine, inside * row, outside * row, inside + outside)
            for _, inside, outside in needs
        )
        clocks.then(machine.launch_s, max(received))
    steps = max(sum(map(len, chains[backward])) for chains in fold_needs(plan))
    clocks.then(machine.fold_launch_s, call.fold_step(call.heads), steps)
    return clocks.device


def _all_to_all(call: _Call, backward: bool) -> float:
    plan, machine, clocks = call.plan, call.machine, _Clocks()
    shares = [stop - start for start, stop in pieces(call.heads, plan.ranks)]
    ranks = range(plan.ranks)
    states = [[len(slots(r)) * call.state for r in ranks] for slots in (plan.exited, plan.entered)]
    maps, returned = states[backward], states[not backward]
    if not backward:
        maps = [m + len(plan.full(r)) * call.transition for r, m in zip(ranks, maps, strict=True)]
    clocks.then(machine.launch_s, _shared_out_seconds(machine, shares, maps))
    steps = sum(f.full for f in plan.fragments)
    clocks.then(machine.fold_launch_s, call.fold_step(shares[0]), steps)
    clocks.then(machine.launch_s, _shared_out_seconds(machine, shares, returned))
    return clocks.device


def _shared_out_seconds(machine: Machine, shares: Sequence[int], weights: Sequence[int]) -> float:
    """An all-to-all in which rank r sends rank j shares[j] * weights[r] bytes, or the reverse."""
    worst, size = 0.0, machine.ranks_per_node
    for mine, others in ((shares, weights), (weights, shares)):
        everything, partners = sum(others), sum(other > 0 for other in others)
        for start in range(0, len(mine), size):
            near = sum(others[start : start + size])
            for own, other in zip(
                mine[start : start + size], others[start : start + size], strict=True
            ):
                inside, outside = own * (near - other), own * (everything - near)
                peers = partners - (other > 0) if own else 0
                worst = max(worst, all_to_all_seconds(machine, inside, outside, peers))
    return worst


def _ring(call: _Call, backward: bool) -> float:
    plan, machine = call.plan, call.machine
    groups = min(call.heads, RingExchange.parts)
    heads = -(-call.heads // groups)
    fold = call.fold_step(heads)
    issued = [len(plan.full(rank)) * machine.fold_launch_s for rank in range(plan.ranks)]
    slowest = []
    for step in plan.hops(backward):
        hops = []
        for here, there in ((plan.fragments[a], plan.fragments[b]) for a, b in step):
            link = machine.link(here.rank, there.rank)
            travel = link.latency_s + heads * call.state / link.bandwidth
            hops.append(travel + (fold if there.full else 0.0))
            issued[here.rank] += machine.launch_s
            issued[there.rank] += machine.launch_s
        slowest.append(max(hops))
    device = machine.launch_s + sum(slowest) + (groups - 1) * max(slowest)
    return max(device, groups * max(issued))


# The A that a rank folds with: in each sequence those of the full fragments before its last entered
# one (forward) and after its first exited one (backward). So ranges of indices, not pairs of ranks.


def fold_needs(plan: Plan) -> list[tuple[list[range], list[range]]]:
    """For each rank the full fragments, by index, in its entry chains and in its exit chains."""
    first, last = (list(range(len(plan.fragments))) for _ in range(2))
    for f in plan.fragments:
        if f.full:
            first[f.index] = first[f.index - 1]  # the reset in which its sequence begins
    for f in reversed(plan.fragments):
        if f.full:
            last[f.index] = last[f.index + 1]
    needs = []
    for rank in range(plan.ranks):
        entered = {f.enters: f.index for f in plan.entered(rank)}
        exited = {f.exits: f.index for f in reversed(plan.exited(rank))}
        entry = [range(first[index - 1] + 1, index) for index in entered.values()]
        exits = [range(index + 1, last[index + 1]) for index in exited.values()]
        needs.append((entry, exits))
    return needs


def transition_needs(plan: Plan, machine: Machine, training: bool) -> list[tuple[int, int, int]]:
    """For each rank how many A are its own, come from its node and come from outside."""
    of_node: dict[int, list[int]] = {}
    for f in plan.fragments:
        if f.full:
            of_node.setdefault(machine.node(f.rank), []).append(f.index)
    needs = []
    for rank, (entry, exits) in enumerate(fold_needs(plan)):
        wanted: list[range] = []
        for r in sorted([*entry, *(exits if training else ())], key=lambda r: r.start):
            if wanted and r.start <= wanted[-1].stop:
                before = wanted.pop()
                r = range(before.start, max(before.stop, r.stop))
            wanted.append(r)
        own = [f.index for f in plan.full(rank)]
        near = _count(of_node.get(machine.node(rank), []), wanted)
        needs.append((len(own), near - _count(own, wanted), sum(map(len, wanted)) - near))
    return needs


def _count(indices: Sequence[int], ranges: Sequence[range]) -> int:
    """How many of the sorted indices lie in the ranges, which do not overlap."""
    return sum(bisect_left(indices, r.stop) - bisect_left(indices, r.start) for r in ranges)


def kept_bytes(plan: Plan, algorithm: str, *, heads: int, key_dim: int, batch: int = 1) -> int:
    """Bytes of A that the rank with the most keeps for the backward."""
    if algorithm == "all_gather":
        most = max(map(sum, transition_needs(plan, Machine(), True)))
    elif algorithm == "ring":
        most = max(len(plan.full(rank)) for rank in range(plan.ranks))
    else:
        most, heads = sum(f.full for f in plan.fragments), -(-heads // plan.ranks)
    return most * heads * batch * key_dim * key_dim * ITEM
