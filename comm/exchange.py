"""Exchange of states between ranks: from the maps of local fragments to their entry states.

One object serves one call shape: it knows the plan, this rank and the group, and it moves maps,
never tokens. Both directions are split into `start_*`, which issues the collectives and returns at
once, and `Pending.wait()`, which folds; work that needs no remote state goes between the two.
Every rank of the group starts the same collectives in the same order, whatever it owns. Where no
sequence crosses ranks nothing is sent; a reset's A and an identity are neither computed nor sent.

A slot is one local fragment: `entered`, `exited` and `full` slots are those of
`plan.entered(rank)`, `plan.exited(rank)` and `plan.full(rank)`, in that order.
Shapes: states [slots, B, HV, K, V], transitions [slots, B, HV, K, K], of one float type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kda_cp.comm.collectives import Work, start_all_gather, start_all_to_all
from kda_cp.comm.plan import Fragment, Plan

T = TypeVar("T")

Fold = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`fold(A, b, S)`: one step of a fold, as `affine.apply` and `affine.apply_adjoint`. The caller
hands it in, so that a kernel may do it and this folder need not know kernels."""


class Pending(Generic[T]):
    """The result of an exchange under way; `wait()` gives it, once."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish

    def wait(self) -> T:
        """Wait for the collectives and fold. Raises RuntimeError when called twice."""
        if self._finish is None:
            raise RuntimeError("this exchange has already been waited for")
        finish, self._finish = self._finish, None
        return finish()


class Transitions:
    """The A of every fragment that this rank folds with, its own and those it received.

    The forward collects them and the backward uses them again, transposed: they are never sent
    twice. `A` [fragments, B, HV, K, K] in the order of `indices`, the fragments' global order.
    """

    def __init__(self, indices: tuple[int, ...], A: Tensor) -> None:
        if len(indices) != A.shape[0]:
            raise RuntimeError(f"{len(indices)} fragments but {A.shape[0]} transitions")
        self.indices = indices
        self.A = A
        self._row = {index: row for row, index in enumerate(indices)}

    def of(self, fragment: Fragment) -> Tensor:
        """A [B, HV, K, K] of one fragment."""
        if fragment.index not in self._row:
            raise RuntimeError(f"the transition of fragment {fragment.index} was not kept")
        return self.A[self._row[fragment.index]]


class AllGatherExchange:
    """Gather every state slot on every rank, send each A to the ranks that fold with it.

    Args:
        plan: who owns which fragment.
        rank: this process's rank in `group`.
        group: the context-parallel group; None only where the plan has one rank.
    """

    def __init__(self, plan: Plan, rank: int, group: dist.ProcessGroup | None) -> None:
        if group is None and plan.ranks > 1:
            raise ValueError(f"group: expected a group of {plan.ranks} ranks, got None")
        self.plan = plan
        self.rank = rank
        self.group = group

    def start_entry(
        self, b: Tensor, A: Tensor, training: bool, fold: Fold
    ) -> Pending[tuple[Tensor, Transitions]]:
        """Start turning local maps into local entry states. Collective.

        Args:
            b: [exited slots, B, HV, K, V], exit states for a zero entry (a reset's are final).
            A: [full slots, B, HV, K, K].
            training: whether a backward follows, which needs the A of later ranks as well. The
                same on every rank.
            fold: one step of the fold, `affine.apply` or what computes the same.

        Returns:
            Pending entry states [entered slots, B, HV, K, V] and the transitions for the backward.
        """
        exited, full = self.plan.exited(self.rank), self.plan.full(self.rank)
        _expect_slots("b", b, len(exited))
        _expect_slots("A", A, len(full))
        states = self._start_states(b, backward=False)
        transitions = self._start_transitions(A, training)

        def finish() -> tuple[Tensor, Transitions]:
            state_of = self._wait_states(states, b, exited, backward=False)
            kept = self._wait_transitions(transitions, A, training)
            entries = []
            for fragment in self.plan.entered(self.rank):
                reset, *between = self.plan.entry_chain(fragment.index)
                S = state_of[reset.index]
                for earlier in between:
                    S = fold(kept.of(earlier), state_of[earlier.index], S)
                entries.append(S)
            return _stack(entries, b), kept

        return Pending(finish)

    def start_exit_gradient(
        self, c: Tensor, transitions: Transitions, fold_adjoint: Fold
    ) -> Pending[Tensor]:
        """Start turning local adjoint maps into gradients of local exit states. Collective.

        Args:
            c: [entered slots, B, HV, K, V], gradients of the entry states when no gradient comes
                from later fragments.
            transitions: what the forward kept.
            fold_adjoint: one step of the fold, `affine.apply_adjoint` or what computes the same.

        Returns:
            Pending gradients [exited slots, B, HV, K, V] of the exit states.
        """
        entered = self.plan.entered(self.rank)
        _expect_slots("c", c, len(entered))
        states = self._start_states(c, backward=True)

        def finish() -> Tensor:
            gradient_of = self._wait_states(states, c, entered, backward=True)
            exits = []
            for fragment in self.plan.exited(self.rank):
                *between, last = self.plan.exit_chain(fragment.index)
                dS = gradient_of[last.index]
                for later in reversed(between):
                    dS = fold_adjoint(transitions.of(later), gradient_of[later.index], dS)
                exits.append(dS)
            return _stack(exits, c)

        return Pending(finish)

    def _start_states(self, slots: Tensor, backward: bool) -> Work | None:
        if not self.plan.exchanges_states:
            return None
        assert self.group is not None
        padded = slots.new_zeros((self.plan.state_slots(backward), *slots.shape[1:]))
        padded[: slots.shape[0]] = slots
        return start_all_gather(padded, self.group)

    def _wait_states(
        self, work: Work | None, own: Tensor, owned: tuple[Fragment, ...], backward: bool
    ) -> dict[int, Tensor]:
        if work is None:
            return {f.index: own[slot] for slot, f in enumerate(owned)}
        gathered = work.wait()
        slots_of = self.plan.entered if backward else self.plan.exited
        return {
            f.index: gathered[rank, slot]
            for rank in range(self.plan.ranks)
            for slot, f in enumerate(slots_of(rank))
        }

    def _start_transitions(self, A: Tensor, training: bool) -> Work | None:
        if not self.plan.exchanges_transitions(training):
            return None
        assert self.group is not None
        slot = {f.index: s for s, f in enumerate(self.plan.full(self.rank))}
        sends = [self._sent(self.rank, target, training) for target in range(self.plan.ranks)]
        rows = [slot[f.index] for target in sends for f in target]
        return start_all_to_all(
            A[torch.tensor(rows, dtype=torch.int64, device=A.device)],
            [len(target) for target in sends],
            [len(self._sent(source, self.rank, training)) for source in range(self.plan.ranks)],
            self.group,
        )

    def _wait_transitions(self, work: Work | None, own: Tensor, training: bool) -> Transitions:
        full = self.plan.full(self.rank)
        if work is None:
            return Transitions(tuple(f.index for f in full), own)
        received = [
            f for source in range(self.plan.ranks) for f in self._sent(source, self.rank, training)
        ]
        indices = tuple(f.index for f in (*full, *received))
        return Transitions(indices, torch.cat([own, work.wait()]))

    def _sent(self, source: int, target: int, training: bool) -> tuple[Fragment, ...]:
        if source == target:
            return ()
        return self.plan.transition_sends(source, target, training)


def _expect_slots(name: str, slots: Tensor, expected: int) -> None:
    if slots.dim() != 5 or slots.shape[0] != expected:
        raise RuntimeError(
            f"{name}: expected [{expected}, B, HV, K, ..] for the plan's slots, "
            f"got {list(slots.shape)}"
        )


def _stack(states: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(states) if states else like.new_empty((0, *like.shape[1:]))
