"""Exchange of states between ranks: from the maps of local fragments to their entry states.

One object serves one call shape: it knows the plan, this rank and the group, and it moves maps or
states, never tokens. Both directions are split into `start_*`, which starts communicating and
returns at once, and `Pending.wait()`; work that needs no remote state goes between the two. What
every algorithm shares is here; each has a file of its own: `all_gather.py`, `ring.py`,
`all_to_all.py`.

Every rank issues the same collectives in the same order, whatever it owns; messages between two
ranks follow the plan's hops. Where no sequence crosses ranks nothing is sent; a reset's A is
neither computed nor sent.

A slot is one local fragment: `entered`, `exited` and `full` slots are those of
`plan.entered(rank)`, `plan.exited(rank)` and `plan.full(rank)`, in that order.
Shapes: states [slots, B, HV, K, V], transitions [slots, B, HV, K, K], of one float type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kda_cp.comm.plan import Fragment, Plan

T = TypeVar("T")

Fold = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`fold(A, b, S)`: one step of a fold, as `affine.apply` and `affine.apply_adjoint`. The caller
hands it in, so that a kernel may do it and this folder need not know kernels."""

ByFragment = Mapping[int, Tensor]
"""One tensor for each of some fragments, by the fragment's index."""


class Pending(Generic[T]):
    """The result of an exchange under way; `wait()` gives it, once."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish

    def wait(self) -> T:
        """Wait for what travels, and fold. Raises RuntimeError when called twice."""
        if self._finish is None:
            raise RuntimeError("this exchange has already been waited for")
        finish, self._finish = self._finish, None
        return finish()


class Transitions:
    """The A that this rank folds with: of its own fragments, and of those whose A it received.

    The forward collects them and the backward uses them again, transposed: they are never sent
    twice. `A` [fragments, B, heads, K, K] in the order of `indices`.
    """

    def __init__(self, indices: tuple[int, ...], A: Tensor) -> None:
        if len(indices) != A.shape[0]:
            raise RuntimeError(f"{len(indices)} fragments but {A.shape[0]} transitions")
        self.indices = indices
        self.A = A
        self._row = {index: row for row, index in enumerate(indices)}

    def __getitem__(self, index: int) -> Tensor:
        """A [B, heads, K, K] of the fragment `index`."""
        if index not in self._row:
            raise RuntimeError(f"the transition of fragment {index} was not kept")
        return self.A[self._row[index]]


class Exchange(ABC):
    """One algorithm of the exchange, for one rank of a plan.

    Args:
        plan: who owns which fragment.
        rank: this process's rank in `group`.
        group: the context-parallel group; None only where the plan has one rank.
    """

    parts: ClassVar[int] = 1
    """Into how many groups of heads the caller should cut a call and exchange each on its own, so
    that the states of one travel while another computes. A promise on speed, not a condition."""

    def __init__(self, plan: Plan, rank: int, group: dist.ProcessGroup | None) -> None:
        if group is None and plan.ranks > 1:
            raise ValueError(f"group: expected a group of {plan.ranks} ranks, got None")
        self.plan = plan
        self.rank = rank
        self._group = group

    @property
    def group(self) -> dist.ProcessGroup:
        """The group; only where the plan exchanges states."""
        assert self._group is not None
        return self._group

    def start_entry(
        self, b: Tensor, A: Tensor, training: bool, fold: Fold
    ) -> Pending[tuple[Tensor, Transitions]]:
        """Start turning local maps into local entry states. Collective.

        Args:
            b: [exited slots, B, HV, K, V], exit states for a zero entry (a reset's are final).
            A: [full slots, B, HV, K, K].
            training: whether a backward follows. The same on every rank.
            fold: one step of the fold, `affine.apply` or what computes the same.

        Returns:
            Pending entry states [entered slots, B, HV, K, V] and the transitions for the backward.
        """
        plan, rank = self.plan, self.rank
        _expect_slots("b", b, len(plan.exited(rank)))
        _expect_slots("A", A, len(plan.full(rank)))
        if plan.exchanges_states:
            return self._start_entry(b, A, training, fold)

        def finish() -> tuple[Tensor, Transitions]:
            own = Transitions(tuple(f.index for f in plan.full(rank)), A)
            by_fragment = by_slot(plan.exited(rank), b)
            entries = fold_entries(plan, plan.entered(rank), by_fragment, own, fold)
            return stack(entries.values(), b), own

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
        plan, rank = self.plan, self.rank
        _expect_slots("c", c, len(plan.entered(rank)))
        if plan.exchanges_states:
            return self._start_exit_gradient(c, transitions, fold_adjoint)

        def finish() -> Tensor:
            by_fragment = by_slot(plan.entered(rank), c)
            exits = fold_exit_gradients(
                plan, plan.exited(rank), by_fragment, transitions, fold_adjoint
            )
            return stack(exits.values(), c)

        return Pending(finish)

    def finish_sending(self) -> None:
        """Wait until what `Pending.wait()` left on its way to other ranks has arrived there."""
        return  # most algorithms leave nothing

    @abstractmethod
    def _start_entry(
        self, b: Tensor, A: Tensor, training: bool, fold: Fold
    ) -> Pending[tuple[Tensor, Transitions]]: ...

    @abstractmethod
    def _start_exit_gradient(
        self, c: Tensor, transitions: Transitions, fold_adjoint: Fold
    ) -> Pending[Tensor]: ...


def fold_entries(
    plan: Plan, wanted: Sequence[Fragment], b: ByFragment, A: Transitions, fold: Fold
) -> dict[int, Tensor]:
    """Entry states of the wanted fragments, by index in their order: folds from left to right.

    Needs the b of every fragment in their entry chains, and the A of the full ones. A step that
    several of them share is done once.
    """
    entry: dict[int, Tensor] = {}
    for fragment in wanted:
        index, chain = fragment.index, list[Fragment]()
        while index not in entry and not (chain and not chain[-1].full):
            index -= 1
            chain.append(plan.fragments[index])
        for f in reversed(chain):
            own = b[f.index]
            entry[f.index + 1] = fold(A[f.index], own, entry[f.index]) if f.full else own
    return {fragment.index: entry[fragment.index] for fragment in wanted}


def fold_exit_gradients(
    plan: Plan, wanted: Sequence[Fragment], c: ByFragment, A: Transitions, fold_adjoint: Fold
) -> dict[int, Tensor]:
    """Gradients of the exit states of the wanted fragments: folds from right to left.

    Needs the c of every fragment in their exit chains, and the A of the full ones.
    """
    gradient: dict[int, Tensor] = {}
    for fragment in reversed(wanted):
        index, chain = fragment.index, list[Fragment]()
        while index not in gradient and not (chain and not chain[-1].full):
            index += 1
            chain.append(plan.fragments[index])
        for f in reversed(chain):
            own = c[f.index]
            gradient[f.index - 1] = (
                fold_adjoint(A[f.index], own, gradient[f.index]) if f.full else own
            )
    return {fragment.index: gradient[fragment.index] for fragment in wanted}


def by_slot(fragments: Iterable[Fragment], slots: Tensor) -> dict[int, Tensor]:
    """The rows of `slots` under the indices of the fragments they belong to."""
    return {f.index: row for f, row in zip(fragments, slots, strict=True)}


def stack(states: Iterable[Tensor], like: Tensor) -> Tensor:
    """Stack states into slots; none of them gives no slots, shaped like `like` otherwise."""
    states = list(states)
    return torch.stack(states) if states else like.new_empty((0, *like.shape[1:]))


def _expect_slots(name: str, slots: Tensor, expected: int) -> None:
    if slots.dim() != 5 or slots.shape[0] != expected:
        raise RuntimeError(
            f"{name}: expected [{expected}, B, HV, K, ..] for the plan's slots, "
            f"got {list(slots.shape)}"
        )
