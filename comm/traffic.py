"""Bytes that each algorithm of the exchange moves: integers only, from the plan and the sizes.

`received_bytes` is what one rank receives from the others for one call of the operator. The
algorithms are those of `exchange.py`; tests hold each figure to what sockets report.
"""

from __future__ import annotations

from dataclasses import dataclass

from kda_cp.comm.layout import pieces
from kda_cp.comm.plan import Plan

ALGORITHMS = ("all_gather", "ring", "all_to_all")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank receives from the others in the forward and in the backward."""

    forward: int
    backward: int


def received_bytes(
    plan: Plan,
    algorithm: str,
    rank: int,
    *,
    heads: int,
    key_dim: int,
    value_dim: int,
    batch: int = 1,
    itemsize: int = 4,
    training: bool = True,
) -> Traffic:
    """Bytes `rank` receives; b, c are [batch, heads, K, V] and A [batch, heads, K, K].

    all_gather  Forward: every other rank's b, padded to `state_slots`, and each A that this rank
                folds (in training for both passes, kept). Backward: c, padded.
    ring        One state for every fragment entered from another rank (backward: exited to another
                rank). A stays at home.
    all_to_all  Rank j folds head group j for everybody. It receives that group's share of every
                remote slot (b and, if full, A, which it keeps), then the entry states of its own
                fragments for the heads of the other groups; backward likewise with c and exit
                gradients. No padding. Groups are as even as possible, the remainder one head each
                to the first ranks.
    """
    counts = {
        "all_gather": _all_gather_counts,
        "ring": _ring_counts,
        "all_to_all": _all_to_all_counts,
    }
    if algorithm not in counts:
        raise ValueError(f"algorithm: expected one of {ALGORITHMS}, got {algorithm!r}")
    if not 0 <= rank < plan.ranks:
        raise ValueError(f"rank: expected a number in [0, {plan.ranks}), got {rank}")
    states, transitions, gradients = (0, 0, 0)
    if plan.exchanges_states:
        states, transitions, gradients = counts[algorithm](plan, rank, heads, training)
    row = batch * key_dim * itemsize
    return Traffic(
        forward=row * (states * value_dim + transitions * key_dim),
        backward=row * gradients * value_dim if training else 0,
    )


# Each returns (b, A, c): one-head matrices that `rank` receives.


def _all_gather_counts(plan: Plan, rank: int, heads: int, training: bool) -> tuple[int, int, int]:
    sends = (plan.transition_sends(source, rank, training) for source in range(plan.ranks))
    padded = heads * (plan.ranks - 1)
    transitions = heads * sum(map(len, sends))
    return padded * plan.state_slots(False), transitions, padded * plan.state_slots(True)


def _ring_counts(plan: Plan, rank: int, heads: int, training: bool) -> tuple[int, int, int]:
    entered = sum(plan.fragments[f.index - 1].rank != rank for f in plan.entered(rank))
    exited = sum(plan.fragments[f.index + 1].rank != rank for f in plan.exited(rank))
    return heads * entered, 0, heads * exited


def _all_to_all_counts(plan: Plan, rank: int, heads: int, training: bool) -> tuple[int, int, int]:
    start, stop = pieces(heads, plan.ranks)[rank]
    group, returned = stop - start, heads - (stop - start)
    others = [f for f in plan.fragments if f.rank != rank]
    return (
        group * sum(f.exits is not None for f in others) + returned * len(plan.entered(rank)),
        group * sum(f.full for f in others),
        group * sum(f.enters is not None for f in others) + returned * len(plan.exited(rank)),
    )
