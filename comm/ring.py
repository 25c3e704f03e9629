"""The ring: states alone pass from each fragment to the next; every A stays at home.

A rank receives the entry state of a fragment, applies the fragment's map and sends the exit state
on. It receives the least of the three, `B HV K V` for each fragment entered from another rank, and
keeps only its own A. But the last rank waits for P - 1 hops, one after the other (zigzag: 2P - 2).
To hide them, callers cut the heads into `parts`: while one part's states travel on, the ranks they
have passed already compute with them.

The first hop of every sequence needs nothing from elsewhere and starts at once; the others are
driven by `wait()`. All ranks go through the hops of the plan in one order, so that no two ranks
wait for each other, even where a transport carries one message at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor

from kda_cp.comm.collectives import Work, start_hop
from kda_cp.comm.exchange import Exchange, Fold, Pending, Transitions, by_slot, stack
from kda_cp.comm.plan import Fragment, Hop, Plan


class RingExchange(Exchange):
    """Pass states from neighbour to neighbour."""

    parts: ClassVar[int] = 4

    def __init__(self, plan: Plan, rank: int, group: dist.ProcessGroup | None) -> None:
        super().__init__(plan, rank, group)
        # Also what is received, until it is waited for: gloo gives up a message whose handle goes.
        self._under_way: list[Work[list[Tensor]]] = []
        self._hops = {backward: _hops_of(plan, rank, backward) for backward in (False, True)}

    def finish_sending(self) -> None:
        """Wait until what `Pending.wait()` left on its way to other ranks has arrived there."""
        under_way, self._under_way = self._under_way, []
        for work in under_way:
            work.wait()

    def _start_entry(
        self, b: Tensor, A: Tensor, training: bool, fold: Fold
    ) -> Pending[tuple[Tensor, Transitions]]:
        plan, rank = self.plan, self.rank
        own = Transitions(tuple(f.index for f in plan.full(rank)), A)
        relay = self._start_relay(plan.exited(rank), b, own, fold, backward=False)

        def finish() -> tuple[Tensor, Transitions]:
            entry = relay()
            return stack([entry[f.index] for f in plan.entered(rank)], b), own

        return Pending(finish)

    def _start_exit_gradient(
        self, c: Tensor, transitions: Transitions, fold_adjoint: Fold
    ) -> Pending[Tensor]:
        plan, rank = self.plan, self.rank
        relay = self._start_relay(plan.entered(rank), c, transitions, fold_adjoint, backward=True)

        def finish() -> Tensor:
            gradient = relay()
            return stack([gradient[f.index] for f in plan.exited(rank)], c)

        return Pending(finish)

    def _start_relay(
        self,
        handing_on: Sequence[Fragment],
        slots: Tensor,
        A: Transitions,
        fold: Fold,
        *,
        backward: bool,
    ) -> Callable[[], dict[int, Tensor]]:
        """Start the first hop; the function returned does the others, and gives what arrived where.

        `slots` are the b (backward: the c) of this rank's fragments that hand a state on.
        """
        fragments, step = self.plan.fragments, -1 if backward else 1
        own = by_slot(handing_on, slots)
        arrived: dict[int, Tensor] = {}
        leaving: dict[int, Tensor] = {}

        def leave(index: int, state: Tensor) -> None:
            """Hand on the state that leaves fragment `index`, through all that this rank holds."""
            while fragments[index + step].rank == self.rank:
                index += step
                arrived[index] = state
                if not fragments[index].full:
                    return
                state = fold(A[index], own[index], state)
            leaving[index] = state

        def start(hops: Sequence[Hop]) -> tuple[list[int], Work[list[Tensor]]]:
            sends = [
                (leaving.pop(source), fragments[target].rank)
                for source, target in hops
                if fragments[source].rank == self.rank
            ]
            receives = [hop for hop in hops if fragments[hop[1]].rank == self.rank]
            sources = [fragments[source].rank for source, _ in receives]
            work = start_hop(sends, sources, slots, self.group)
            self._under_way.append(work)
            return [target for _, target in receives], work

        for fragment in handing_on:
            if not fragment.full:
                leave(fragment.index, own[fragment.index])
        first, later = self._hops[backward]
        started = start(first)

        def finish() -> dict[int, Tensor]:
            targets, work = started
            for hops in (*later, ()):
                if targets:  # else nothing comes, and nobody here need wait for what goes
                    self._under_way.remove(work)
                    for index, state in zip(targets, work.wait(), strict=True):
                        arrived[index] = state
                        if fragments[index].full:
                            leave(index, fold(A[index], own[index], state))
                targets, work = start(hops)
            return arrived

        return finish


def _hops_of(
    plan: Plan, rank: int, backward: bool
) -> tuple[tuple[Hop, ...], tuple[tuple[Hop, ...], ...]]:
    """The hops of `rank`: in the first step, which waits for nothing, and in each later one."""
    steps = [
        tuple(hop for hop in step if rank in {plan.fragments[index].rank for index in hop})
        for step in plan.hops(backward)
    ]
    return (steps[0] if steps else ()), tuple(filter(None, steps[1:]))
