"""Which token ranges each rank holds: the two named layouts, and tables that a user wrote.

A layout is a list of shards, one a rank; a shard is a list of half-open global ranges in the order
of its tokens. Integers only. Texts of errors name the argument, what was expected and what came.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import pairwise

LAYOUTS = ("contiguous", "zigzag")

Range = tuple[int, int]
"""Half-open (start, stop) of global tokens."""


def lay_out(layout: str, ranks: int, total: int) -> list[list[Range]]:
    """The shards of a named layout over [0, total).

    "contiguous": P pieces, the remainder one token each to the first. "zigzag": 2P such pieces,
    rank r holds pieces r and 2P - 1 - r.
    """
    if layout == "contiguous":
        return [[piece] for piece in pieces(total, ranks)]
    if layout == "zigzag":
        cut = pieces(total, 2 * ranks)
        return [[cut[r], cut[-1 - r]] for r in range(ranks)]
    raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")


def pieces(total: int, count: int) -> list[Range]:
    """[0, total) in `count` ranges, the remainder one each to the first; some may be empty."""
    size, extra = divmod(total, count)
    bounds = [i * size + min(i, extra) for i in range(count + 1)]
    return list(pairwise(bounds))


def read_integer(name: str, value: object) -> int:
    """An int, or what is one to Python; a bool is none."""
    try:
        if isinstance(value, bool):  # True would pass as 1
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name}: expected an int, got {value!r}") from None


def read_boundaries(cu_seqlens: Sequence[int]) -> tuple[int, ...]:
    """Boundaries of packed sequences: 0 first, non-decreasing."""
    if not isinstance(cu_seqlens, Iterable):
        raise ValueError(f"cu_seqlens: expected a sequence of ints, got {cu_seqlens!r}")
    cu = tuple(read_integer(f"cu_seqlens[{i}]", x) for i, x in enumerate(cu_seqlens))
    if not cu:
        raise ValueError("cu_seqlens: expected at least one boundary (a 0), got an empty sequence")
    if cu[0] != 0:
        raise ValueError(f"cu_seqlens: expected 0 first, got {cu[0]}")
    for i, (a, b) in enumerate(pairwise(cu), start=1):
        if b < a:
            came = f"{b} after {a} at position {i}"
            raise ValueError(f"cu_seqlens: expected non-decreasing boundaries, got {came}")
    return cu


def read_fragments(
    fragments: Sequence[Sequence[Range]], ranks: int, total: int
) -> list[list[Range]]:
    """The shards of an explicit table: an exact cover of [0, total), empty ranges allowed."""
    if not isinstance(fragments, Sequence) or len(fragments) != ranks:
        came = f"{len(fragments)}" if isinstance(fragments, Sequence) else repr(fragments)
        raise ValueError(f"fragments: expected a list of {ranks} lists, one a rank, got {came}")
    shards = []
    for rank, ranges in enumerate(fragments):
        if not isinstance(ranges, Sequence):
            raise ValueError(f"fragments[{rank}]: expected a list of (start, stop), got {ranges!r}")
        names = (f"fragments[{rank}][{i}]" for i in range(len(ranges)))
        shards.append([_read_range(n, r, total) for n, r in zip(names, ranges, strict=True)])
    held = sorted((a, b, rank) for rank, shard in enumerate(shards) for a, b in shard if a < b)
    end, holder = 0, 0
    for start, stop, rank in [*held, (total, total, ranks)]:
        expected = f"fragments: expected each token of [0, {total}) exactly once"
        if start > end:
            raise ValueError(f"{expected}, got a gap: no rank holds [{end}, {start})")
        if start < end:
            twice = f"[{start}, {min(stop, end)}) on rank {holder} and rank {rank}"
            raise ValueError(f"{expected}, got an overlap: {twice}")
        end, holder = stop, rank
    return shards


def _read_range(name: str, value: object, total: int) -> Range:
    if not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(f"{name}: expected a pair (start, stop), got {value!r}")
    start, stop = (read_integer(f"{name}[{i}]", x) for i, x in enumerate(value))
    if not 0 <= start <= stop <= total:
        raise ValueError(f"{name}: expected 0 <= start <= stop <= {total}, got ({start}, {stop})")
    return start, stop
