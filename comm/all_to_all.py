"""The all-to-all: rank j folds one group of heads for all ranks, and sends the states back.

Two collectives, one after the other: the maps of all fragments, cut by heads, go to the ranks that
fold these heads; entry states come back, cut by fragments. A rank receives about
`B HV (K (K + V) + K V)`, however many ranks there are, and keeps every A of its heads alone. The
fold of a head is as long as that of an all-gather, but each head is folded once and not on every
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import torch
from torch import Tensor

from kda_cp.comm.collectives import Work, start_all_to_all
from kda_cp.comm.exchange import (
    Exchange,
    Fold,
    Pending,
    Transitions,
    by_slot,
    fold_entries,
    fold_exit_gradients,
    stack,
)
from kda_cp.comm.layout import pieces
from kda_cp.comm.plan import Fragment

SlotsOf = Callable[[int], tuple[Fragment, ...]]
"""The fragments that a rank has slots for, as `plan.exited`."""


class AllToAllExchange(Exchange):
    """Fold group j of the heads on rank j for everybody."""

    def _start_entry(
        self, b: Tensor, A: Tensor, training: bool, fold: Fold
    ) -> Pending[tuple[Tensor, Transitions]]:
        plan = self.plan
        kinds = ((plan.exited, b), (plan.full, A))
        maps = self._start_to_folders(*kinds)

        def finish() -> tuple[Tensor, Transitions]:
            all_b, all_A = self._wait_at_folder(maps, *kinds)
            start, stop = self._heads(A)
            kept = Transitions(tuple(all_A), stack(all_A.values(), A[:, :, start:stop]))
            entered = [f for f in plan.fragments if f.enters is not None]
            entries = fold_entries(plan, entered, all_b, kept, fold)
            return self._return(entries, plan.entered, b), kept

        return Pending(finish)

    def _start_exit_gradient(
        self, c: Tensor, transitions: Transitions, fold_adjoint: Fold
    ) -> Pending[Tensor]:
        plan = self.plan
        maps = self._start_to_folders((plan.entered, c))

        def finish() -> Tensor:
            (all_c,) = self._wait_at_folder(maps, (plan.entered, c))
            exited = [f for f in plan.fragments if f.exits is not None]
            exits = fold_exit_gradients(plan, exited, all_c, transitions, fold_adjoint)
            return self._return(exits, plan.exited, c)

        return Pending(finish)

    def _heads(self, slots: Tensor) -> tuple[int, int]:
        """The heads that this rank folds, half-open."""
        return pieces(slots.shape[2], self.plan.ranks)[self.rank]

    def _shape_here(self, slots: Tensor) -> tuple[int, ...]:
        """One slot, of the heads that this rank folds."""
        start, stop = self._heads(slots)
        return (slots.shape[1], stop - start, *slots.shape[3:])

    def _start_to_folders(self, *kinds: tuple[SlotsOf, Tensor]) -> Work[Tensor]:
        """Start sending every slot's heads to the ranks that fold them: for each kind its slots."""
        shares = pieces(kinds[0][1].shape[2], self.plan.ranks)
        sent = [x[:, :, start:stop].flatten() for start, stop in shares for _, x in kinds]
        counts = [x.numel() for x in sent]
        return start_all_to_all(
            torch.cat(sent),
            [sum(counts[n : n + len(kinds)]) for n in range(0, len(counts), len(kinds))],
            [
                sum(len(slots_of(source)) * prod(self._shape_here(x)) for slots_of, x in kinds)
                for source in range(self.plan.ranks)
            ],
            self.group,
        )

    def _wait_at_folder(
        self, work: Work[Tensor], *kinds: tuple[SlotsOf, Tensor]
    ) -> list[dict[int, Tensor]]:
        """All ranks' slots of each kind, by fragment: [B, heads folded here, ...]."""
        received, offset = work.wait(), 0
        found: list[dict[int, Tensor]] = [{} for _ in kinds]
        for source in range(self.plan.ranks):
            for by_fragment, (slots_of, x) in zip(found, kinds, strict=True):
                shape = (len(slots_of(source)), *self._shape_here(x))
                rows = received[offset : offset + prod(shape)].view(shape)
                by_fragment |= by_slot(slots_of(source), rows)
                offset += prod(shape)
        return found

    def _return(self, states: Mapping[int, Tensor], slots_of: SlotsOf, like: Tensor) -> Tensor:
        """Send each rank its slots of the heads folded here; return its own, of all heads."""
        sent = [[states[f.index] for f in slots_of(rank)] for rank in range(self.plan.ranks)]
        own = len(slots_of(self.rank))
        shapes = [
            (own, like.shape[1], stop - start, *like.shape[3:])
            for start, stop in pieces(like.shape[2], self.plan.ranks)
        ]
        received = start_all_to_all(
            torch.cat([like.new_empty(0), *(x.flatten() for rows in sent for x in rows)]),
            [sum(x.numel() for x in rows) for rows in sent],
            [prod(shape) for shape in shapes],
            self.group,
        ).wait()
        rows = received.split([prod(shape) for shape in shapes])
        return torch.cat([x.view(shape) for x, shape in zip(rows, shapes, strict=True)], dim=2)
