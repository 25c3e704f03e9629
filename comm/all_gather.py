"""The all-gather: every rank gets every map it needs and folds for itself.

Forward, one padded all-gather of all b, and one all-to-all that brings each A to the ranks that
fold with it; backward, one all-gather of all c, as the forward brought the A already. Two
collectives that do not wait for each other, so it is the quickest where links are fast, and the
one that receives and keeps most: up to (P - 2) HV K K transitions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_cp.comm.collectives import Work, start_all_gather, start_all_to_all
from kda_cp.comm.exchange import (
    Exchange,
    Fold,
    Pending,
    Transitions,
    fold_entries,
    fold_exit_gradients,
    stack,
)
from kda_cp.comm.plan import Fragment


class AllGatherExchange(Exchange):
    """Gather every state slot on every rank, send each A to the ranks that fold with it."""

    def _start_entry(
        self, b: Tensor, A: Tensor, training: bool, fold: Fold
    ) -> Pending[tuple[Tensor, Transitions]]:
        states = self._start_states(b, backward=False)
        transitions = self._start_transitions(A, training)

        def finish() -> tuple[Tensor, Transitions]:
            all_b = self._wait_states(states, backward=False)
            kept = self._wait_transitions(transitions, A, training)
            entered = self.plan.entered(self.rank)
            entries = fold_entries(self.plan, entered, all_b, kept, fold)
            return stack(entries.values(), b), kept

        return Pending(finish)

    def _start_exit_gradient(
        self, c: Tensor, transitions: Transitions, fold_adjoint: Fold
    ) -> Pending[Tensor]:
        states = self._start_states(c, backward=True)

        def finish() -> Tensor:
            all_c = self._wait_states(states, backward=True)
            exited = self.plan.exited(self.rank)
            exits = fold_exit_gradients(self.plan, exited, all_c, transitions, fold_adjoint)
            return stack(exits.values(), c)

        return Pending(finish)

    def _start_states(self, slots: Tensor, backward: bool) -> Work[Tensor]:
        padded = slots.new_zeros((self.plan.state_slots(backward), *slots.shape[1:]))
        padded[: slots.shape[0]] = slots
        return start_all_gather(padded, self.group)

    def _wait_states(self, work: Work[Tensor], backward: bool) -> dict[int, Tensor]:
        gathered = work.wait()
        slots_of = self.plan.entered if backward else self.plan.exited
        return {
            f.index: gathered[rank, slot]
            for rank in range(self.plan.ranks)
            for slot, f in enumerate(slots_of(rank))
        }

    def _start_transitions(self, A: Tensor, training: bool) -> Work[Tensor] | None:
        if not self.plan.exchanges_transitions(training):
            return None
        slot = {f.index: s for s, f in enumerate(self.plan.full(self.rank))}
        sends = [self._sent(self.rank, target, training) for target in range(self.plan.ranks)]
        rows = [slot[f.index] for target in sends for f in target]
        return start_all_to_all(
            A[torch.tensor(rows, dtype=torch.int64, device=A.device)],
            [len(target) for target in sends],
            [len(self._sent(source, self.rank, training)) for source in range(self.plan.ranks)],
            self.group,
        )

    def _wait_transitions(
        self, work: Work[Tensor] | None, own: Tensor, training: bool
    ) -> Transitions:
        full = self.plan.full(self.rank)
        if work is None:
            return Transitions(tuple(f.index for f in full), own)
        received = [
            f for source in range(self.plan.ranks) for f in self._sent(source, self.rank, training)
        ]
        indices = tuple(f.index for f in (*full, *received))
        return Transitions(indices, torch.cat([own, work.wait()]))

    def _sent(self, source: int, target: int, training: bool) -> tuple[Fragment, ...]:
        return self.plan.transition_sends(source, target, training)
