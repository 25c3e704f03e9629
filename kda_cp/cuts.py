"""How a walk over the state is cut: segments of pinned length that run side by side.

A local segment of the plan longer than `tokens` is cut every `tokens` tokens from its first one.
The maps `[b | A]` of the pieces are computed side by side, the fold turns them into the entry
states of the pieces, and then all pieces run side by side (docs/algorithm.md). Here that becomes
tables of integers, as `kernels/state.py` and `kernels/fold.py` read them.

Where the bits of a result come from is a rule of the piece alone, so that a prefix ignores what
follows and a call that is cut in two at a piece's edge goes on as one: the state after a *whole*
piece is always its map's, `A S + b` (or b where S is zero), that after a shorter one the walk's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kda_cp.segments import SegmentTable, Walk, lasting, to_device


@dataclass(frozen=True)
class Cut:
    """The work of one walk; see `kernels/state.py` for the columns of `maps` and `runs`.

    Attributes:
        maps: [m, 7] int64, the walks of maps.
        chains: [c, 4] int64, one fold an instance: first map, first slot, maps, from zero or not.
        runs: [r, 7] int64, the walks of the pieces.
        num_maps: rows of the tensor of maps.
        num_slots: rows of the tensor of states between pieces.
        firsts: (instances, slots): the entry states that chains start from.
        lasts: (instances, slots): the exit states that chains end with.
    """

    maps: Tensor
    chains: Tensor
    runs: Tensor
    num_maps: int
    num_slots: int
    firsts: tuple[Tensor, Tensor]
    lasts: tuple[Tensor, Tensor]
    steps: tuple[tuple[Tensor, Tensor], ...]
    """For each number of a piece: (instances by their place in the walk, maps) that have one."""


@lasting()
def cut_walk(
    table: SegmentTable,
    walk: Walk,
    tokens: int,
    *,
    value_tiles: int,
    map_tiles: tuple[int, int],
    from_zero: bool,
    exits: bool,
    every: bool = False,
) -> Cut:
    """Cut a walk into pieces.

    Args:
        table: the local segments.
        walk: the segment instances to walk.
        tokens: tokens a piece, a multiple of the chunk.
        value_tiles: column tiles of a state.
        map_tiles: column tiles of b and of A.
        from_zero: whether every entry state is zero.
        exits: whether exit states are wanted.
        every: whether the last pieces are mapped as well, whole or not.
    """
    instance = walk.chosen
    length = table.lengths[instance]
    pieces = (length + tokens - 1) // tokens
    # The maps of an instance: of all pieces but the last; of the last too if its end state counts.
    whole = (length % tokens == 0) & exits
    mapped = torch.where(whole | every, pieces, pieces - 1)
    chained = mapped > 0
    slots = torch.where(chained, mapped + 1, 0)
    first_map = mapped.cumsum(0) - mapped
    first_slot = slots.cumsum(0) - slots

    owner, piece = _pieces(mapped)
    items = _items(table, instance, owner, piece, tokens)
    row = first_map[owner] + piece
    zero = torch.zeros_like(row)
    b_tiles, A_tiles = map_tiles
    starts_at_zero = (piece == 0) & from_zero
    maps = _tiled(
        torch.stack([*items, zero, row], 1), torch.where(starts_at_zero, b_tiles, b_tiles + A_tiles)
    )

    owner, piece = _pieces(pieces)
    items = _items(table, instance, owner, piece, tokens)
    entry = torch.where(piece == 0, instance[owner], -1 - (first_slot[owner] + piece))
    last = (piece == pieces[owner] - 1) & ~whole[owner]
    runs = torch.stack([*items, entry, torch.where(last, instance[owner], -1)], 1)
    runs = runs[torch.argsort(runs[:, 2], descending=True, stable=True)]  # the longest start first
    runs = _tiled(runs, torch.full((runs.shape[0],), value_tiles))

    steps = []
    for n in range(int(pieces.max()) if every else 0):
        places = torch.nonzero(pieces > n).flatten()
        steps.append(
            (to_device(places, table.device), to_device(first_map[places] + n, table.device))
        )

    zeros = torch.full_like(first_map, int(from_zero))
    chains = torch.stack([first_map, first_slot, mapped, zeros], 1)[chained]
    firsts = chained if not from_zero else torch.zeros_like(chained)
    device = table.device

    def chosen(which: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        return to_device(instance[which], device), to_device(slot[which], device)

    return Cut(
        maps=to_device(maps, device),
        chains=to_device(chains, device),
        runs=to_device(runs, device),
        num_maps=int(mapped.sum()),
        num_slots=int(slots.sum()),
        firsts=chosen(firsts, first_slot),
        lasts=chosen(whole, first_slot + mapped),
        steps=tuple(steps),
    )


def _pieces(counts: Tensor) -> tuple[Tensor, Tensor]:
    """(owner, number within the owner) of every piece."""
    owner = torch.repeat_interleave(counts)
    return owner, torch.arange(owner.numel()) - (counts.cumsum(0) - counts)[owner]


def _items(
    table: SegmentTable, instance: Tensor, owner: Tensor, piece: Tensor, tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row of the batch, first token, tokens and first chunk of pieces."""
    instance = instance[owner]
    start = piece * tokens
    return (
        instance // table.per_row,
        table.offsets[instance] + start,
        (table.lengths[instance] - start).clamp(max=tokens),
        table.first_chunk[instance] + start // table.chunk_size,
    )


def _tiled(rows: Tensor, tiles: Tensor) -> Tensor:
    """Every row once for each of its column tiles, the tile's number in a last column."""
    owner, tile = _pieces(tiles)
    return torch.cat([rows[owner], tile[:, None]], 1)
