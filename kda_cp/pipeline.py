"""The order of the stages, forward and backward, for one rank or many.

Nothing here asks how many ranks there are: the pipeline hands the maps of its segments to an
exchange and asks it for entry states; where no sequence crosses ranks the exchange answers at
once, with no communication.

Forward: terms -> maps -> exchange starts -> fresh segments -> exchange ends -> entered segments.
Backward: terms and states again -> adjoint maps -> exchange starts -> closed segments -> exchange
ends -> exiting segments -> gradients of the terms.

An exchange may ask for the heads in parts. Then the maps of one part are computed while those of
the part before travel, and its entered segments while those of the next do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_cp.comm.exchange import Exchange, Transitions
from kda_cp.comm.layout import pieces
from kda_cp.comm.plan import Fragment
from kda_cp.platform import exact_products
from kda_cp.segments import SegmentTable, Walk
from kda_cp.stages import ChunkTerms, ForwardStages, Inputs, Settings, Stages


@dataclass(frozen=True)
class Call:
    """One call of the operator: everything but its tensors."""

    settings: Settings
    table: SegmentTable
    exchange: Exchange
    stages: ForwardStages[Any]
    stages_back: Stages
    output_final_state: bool
    output_intermediate_states: bool
    training: bool
    """Whether a backward may follow on any rank; the same on all of them."""
    keep_terms: bool
    """Whether the forward's chunk terms are kept for the backward instead of computed again; only
    where both are of the same implementation."""


class Saved(NamedTuple):
    """What the backward needs besides the inputs."""

    entry: Tensor
    """[instances, HV, K, V] entry state of every local segment"""
    transitions: tuple[Transitions, ...]
    """for each part of the heads"""
    terms: ChunkTerms | None


class Outputs(NamedTuple):
    """The results of a forward pass, and what its backward needs."""

    o: Tensor
    """[B, T, HV, V] in v's dtype"""
    final_state: Tensor | None
    """[N, HV, K, V], zero where another rank owns the sequence's last token"""
    h: Tensor | None
    """[B, NT, HV, K, V] entry state of each chunk"""
    saved: Saved


def forward(call: Call, inputs: Inputs, initial_state: Tensor | None) -> Outputs:
    """Run the forward pass. Collective over the exchange's group."""
    with exact_products(inputs.q.device.type):
        return _forward(call, inputs, initial_state)


def backward(
    call: Call, inputs: Inputs, saved: Saved, do: Tensor | None, dfinal: Tensor | None
) -> tuple[list[Tensor | None], Tensor]:
    """Run the backward pass. Collective over the exchange's group.

    Args:
        call: as in the forward.
        inputs: as in the forward.
        saved: what the forward returned.
        do: [B, T, HV, V], or None for zero.
        dfinal: [N, HV, K, V], or None for zero; read where the sequence's last token lies.

    Returns:
        Gradients of `inputs` in their order, and of the initial state [N, HV, K, V], zero where
        another rank owns the sequence's first token.
    """
    with exact_products(inputs.q.device.type):
        return _backward(call, inputs, saved, do, dfinal)


def _forward(call: Call, inputs: Inputs, initial_state: Tensor | None) -> Outputs:
    table, stages = call.table, call.stages
    terms = stages.chunk_terms(inputs, table, call.settings)
    state = (*inputs.g.shape[2:], inputs.v.shape[-1])  # HV, K, V

    def new_zeros(count: int) -> Tensor:
        return inputs.v.new_zeros((count, *state), dtype=inputs.state_dtype)

    entry = new_zeros(table.instances)
    starts = None  # entry states of the segments that start their sequence; None is zero
    if initial_state is not None:
        instances, rows = table.starting
        entry[instances] = initial_state[rows]
        starts = entry

    plan, rank = table.plan, table.rank
    parts = [(heads, terms.of_heads(heads)) for heads in _parts(call, state[0])]
    pending = []
    exits = torch.empty_like(entry) if parts or call.output_final_state else None
    for heads, part in parts:
        assert exits is not None
        b = exits[:, heads]
        entries = None if starts is None else starts[:, heads]
        stages.walk_state(table.reset_maps, part, entries, exits=b)
        b_full, A = stages.walk_maps(table.full_maps, part)
        b[table.full_maps.instances] = b_full
        A = _select((table.full_maps, A), wanted=table.full_slots)
        b = _by_slot(b[table.exited_slots], plan.exited(rank), table)
        A = _by_slot(A, plan.full(rank), table)
        pending.append(call.exchange.start_entry(b, A, call.training, stages.fold))

    values = stages.new_outputs(inputs, table)
    h = new_zeros(table.chunks) if call.output_intermediate_states else None
    exits = exits if call.output_final_state else None
    stages.walk_state(table.fresh, terms, starts, exits=exits, o=values, h=h)
    kept = []
    for (heads, part), exchanged in zip(parts, pending, strict=True):
        entry_slots, transitions = exchanged.wait()
        kept.append(transitions)
        entry[table.entered_slots, heads] = entry_slots.flatten(0, 1)
        stages.walk_state(
            table.entered,
            part,
            entry[:, heads],
            exits=None if exits is None else exits[:, heads],
            o=stages.outputs_of_heads(values, heads),
            h=None if h is None else h[:, heads],
        )

    call.exchange.finish_sending()

    final_state = None
    if exits is not None:
        final_state = new_zeros(table.num_states)
        instances, rows = table.ending
        final_state[rows] = exits[instances]
        if initial_state is not None:
            final_state[table.passing] = initial_state[table.passing]
    return Outputs(
        o=stages.finish_outputs(values, inputs, table),
        final_state=final_state,
        h=None if h is None else h.view(table.batch, table.chunks_per_row, *state),
        saved=Saved(entry, tuple(kept), terms if call.keep_terms else None),
    )


def _backward(
    call: Call, inputs: Inputs, saved: Saved, do: Tensor | None, dfinal: Tensor | None
) -> tuple[list[Tensor | None], Tensor]:
    table, stages = call.table, call.stages_back
    terms = saved.terms or stages.chunk_terms(inputs, table, call.settings)
    entry = saved.entry
    h = entry.new_empty((table.chunks, *entry.shape[1:]))
    stages.walk_state(table.every, terms, entry, h=h)
    if do is None:
        dvalues = torch.zeros_like(terms.u)
    else:
        dvalues = stages.gather_values(do, table, entry.dtype)

    dexit = torch.zeros_like(entry)
    if dfinal is not None:
        instances, rows = table.ending
        dexit[instances] = dfinal[rows]
    # Adjoint maps: what reaches the entry states if nothing comes from later fragments.
    parts = [(heads, terms.of_heads(heads)) for heads in _parts(call, entry.shape[1])]
    pending = []
    for (heads, part), transitions in zip(parts, saved.transitions, strict=True):
        dwalked = dexit[table.entered.instances, heads]
        c = stages.walk_state_back(table.entered, part, dvalues[:, heads], dwalked)
        c = _select((table.entered, c), wanted=table.entered_slots)
        c = _by_slot(c, table.plan.entered(table.rank), table)
        pending.append(call.exchange.start_exit_gradient(c, transitions, stages.fold_adjoint))

    dv_new, dh = torch.empty_like(terms.u), torch.empty_like(h)
    dentry_closed = stages.walk_state_back(
        table.closed, terms, dvalues, dexit[table.closed.instances], dv_new=dv_new, dh=dh
    )
    dentry_exiting = entry.new_empty((table.exiting.size, *entry.shape[1:]))
    for (heads, part), exchanged in zip(parts, pending, strict=True):
        dexit[table.exited_slots, heads] = exchanged.wait().flatten(0, 1)
        dentry_exiting[:, heads] = stages.walk_state_back(
            table.exiting,
            part,
            dvalues[:, heads],
            dexit[table.exiting.instances, heads],
            dv_new=dv_new[:, heads],
            dh=dh[:, heads],
        )

    call.exchange.finish_sending()

    dinitial = entry.new_zeros((table.num_states, *entry.shape[1:]))
    instances, rows = table.starting
    dinitial[rows] = _select(
        (table.closed, dentry_closed), (table.exiting, dentry_exiting), wanted=instances
    )
    if dfinal is not None:
        dinitial[table.passing] = dfinal[table.passing]
    grads = stages.chunk_terms_back(inputs, table, call.settings, terms, h, dvalues, dv_new, dh)
    return grads, dinitial


def _parts(call: Call, value_heads: int) -> list[slice]:
    """The heads whose states go from fragment to fragment together; none where no state does."""
    plan = call.exchange.plan
    if not plan.exchanges_states and not call.table.entered.size:
        return []
    # States between fragments of one rank do not travel: then all heads at once.
    count = min(call.exchange.parts, value_heads) if plan.exchanges_states else 1
    return [slice(*piece) for piece in pieces(value_heads, count)]


def _select(*walked: tuple[Walk, Tensor], wanted: Tensor) -> Tensor:
    """The rows of walked values that belong to the wanted instances, in their order."""
    instances = torch.cat([walk.instances for walk, _ in walked])
    values = torch.cat([values for _, values in walked])
    position = torch.argsort(instances)
    return values[position[torch.searchsorted(instances[position], wanted)]]


def _by_slot(values: Tensor, fragments: Sequence[Fragment], table: SegmentTable) -> Tensor:
    """[slots * batch, ...] to [slots, batch, ...], also where the batch has no rows."""
    return values.view(len(fragments), table.batch, *values.shape[1:])
