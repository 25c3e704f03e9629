"""Who owns which tokens, which maps exist and who sends what to whom: integers only, no tensors.

`make_plan` turns the *global* boundaries of the packed sequences, a number of ranks and a layout
into a frozen `Plan`. It is a pure function: every rank derives the same plan on its own.

Vocabulary
    sequence   tokens [cu_seqlens[n], cu_seqlens[n + 1]) of the global stream; may be empty. Tokens
               from cu_seqlens[-1] on belong to no sequence (padding).
    fragment   a non-empty contiguous global token range on one rank. Ranges adjacent both in the
               shard and globally are one fragment: a cut that moves no state does not exist here.
    shard      all tokens of one rank, in shard order (explicit fragments: not always global order).
    segment    the part of one sequence that lies in one fragment; never empty.
    map        what a fragment does to the state that leaves it: S_out = A S_in + b. It is *full* if
               and only if one sequence has tokens before and after the fragment; every other map is
               a *reset* (A = 0).
    slot       a fragment's place in an exchange. Forward, the exited fragments have one (their b
               and, if full, their A); backward, the entered ones (their c). A rank's slots are in
               global order.

An edge is *crossed* by a sequence with tokens on both of its sides. In the example sequence 1
crosses both inner edges and rank 1 sees only its middle, so fragment 1 is full. A digit is a token
and names its sequence (modulo 10), `.` is a token of another rank, `-` would be padding:

>>> print(make_plan((0, 2, 9, 12), 3))
12 tokens, 3 sequences, 3 ranks, contiguous
rank 0  0011........
rank 1  ....1111....
rank 2  ........1222
fragment  rank  tokens   offset  kind   enters  exits
       0     0  [0, 4)        0  reset       -      1
       1     1  [4, 8)        0  full        1      1
       2     2  [8, 12)       0  reset       1      -

    entry state of fragment 2   = A1 b0 + b1     entry_chain(2): fragments 0 and 1
    exit gradient of fragment 0 = c1 + A1^T c2   exit_chain(0): fragments 1 and 2

So A1 goes to rank 2 (forward) and, in training, to rank 0. A0 and A2 are resets and nobody needs
them. With two contiguous ranks no fragment is full and no A exists at all.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from kda_cp.comm.layout import Range, lay_out, read_boundaries, read_fragments, read_integer


@dataclass(frozen=True, slots=True)
class Fragment:
    """A maximal range of global tokens that is contiguous in one rank's shard as well."""

    index: int  # position in global token order
    rank: int
    start: int
    stop: int
    offset: int  # of its first token in the shard
    enters: int | None  # the sequence that crosses the left edge
    exits: int | None  # the sequence that crosses the right edge

    @property
    def full(self) -> bool:
        """Whether one sequence has tokens before and after, so that the map needs its A."""
        return self.enters is not None and self.enters == self.exits


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one sequence inside one fragment: what is walked from one entry state."""

    sequence: int
    start: int
    stop: int
    offset: int  # of its first token in the shard
    fragment: int  # Fragment.index
    starts: bool  # holds the sequence's first token
    ends: bool  # holds the sequence's last token

    @property
    def length(self) -> int:
        return self.stop - self.start


Hop = tuple[int, int]
"""Fragments (from, to), by index: neighbours on different ranks that a state passes between."""


@dataclass(frozen=True)
class Plan:
    """The division of a packed stream over ranks, as built and checked by `make_plan`."""

    cu_seqlens: tuple[int, ...]
    num_tokens: int
    ranks: int
    layout: str  # "contiguous", "zigzag" or "fragments"
    fragments: tuple[Fragment, ...]  # in global order, an exact cover of [0, num_tokens)

    # Shards: what lies where on one rank.

    def ranges(self, rank: int) -> tuple[Range, ...]:
        """Global token ranges of the shard, merged, in shard order."""
        return tuple((f.start, f.stop) for f in self._shard(rank))

    def shard_tokens(self, rank: int) -> int:
        return sum(f.stop - f.start for f in self._owned(rank))

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """Segments in shard order; two of one sequence may touch there, in different fragments."""
        if rank not in self._segments:
            self._segments[rank] = tuple(s for f in self._shard(rank) for s in self._cut(f))
        return self._segments[rank]

    def local_cu_seqlens(self, rank: int) -> tuple[int, ...]:
        """Boundaries of `segments(rank)` in the shard, from 0; padding at its end is not covered.

        Boundaries cannot express a hole: explicit fragments that put padding before tokens of a
        sequence are a ValueError here, while `segments` serves them.
        """
        bounds = [0]
        for segment in self.segments(rank):
            if segment.offset != bounds[-1]:
                raise ValueError(
                    f"fragments: expected tokens past cu_seqlens[-1] = {self.cu_seqlens[-1]} at a "
                    f"shard's end to have local cu_seqlens, got {self.ranges(rank)} on rank {rank}"
                )
            bounds.append(segment.offset + segment.length)
        return tuple(bounds)

    # Slots and chains: which maps exist and in which order they fold.

    def entered(self, rank: int) -> tuple[Fragment, ...]:
        """This rank's fragments that need an entry state: its slots in the backward."""
        return tuple(f for f in self._owned(rank) if f.enters is not None)

    def exited(self, rank: int) -> tuple[Fragment, ...]:
        """This rank's fragments that a state leaves: its slots in the forward."""
        return tuple(f for f in self._owned(rank) if f.exits is not None)

    def full(self, rank: int) -> tuple[Fragment, ...]:
        """This rank's fragments whose A somebody needs (the next fragment, at least)."""
        return tuple(f for f in self._owned(rank) if f.full)

    def entry_chain(self, index: int) -> tuple[Fragment, ...]:
        """The fragments whose maps, folded left to right, give the entry state of fragment `index`.

        The first one holds the sequence's first token and is a reset; all the others are full.
        """
        if self._fragment(index).enters is None:
            raise ValueError(
                f"index: expected the index of an entered fragment, got {self.fragments[index]}"
            )
        first = index - 1
        while self.fragments[first].full:
            first -= 1
        return self.fragments[first:index]

    def exit_chain(self, index: int) -> tuple[Fragment, ...]:
        """The later fragments the sequence leaving `index` reaches; only the last is not full."""
        if self._fragment(index).exits is None:
            raise ValueError(
                f"index: expected the index of an exited fragment, got {self.fragments[index]}"
            )
        last = index + 1
        while self.fragments[last].full:
            last += 1
        return self.fragments[index + 1 : last + 1]

    # Exchange: who sends what to whom. Chains are runs of neighbours: what two ranks share in one
    # shows at an edge between ranks, so a pass over the edges decides.

    @property
    def exchanges_states(self) -> bool:
        """Whether any rank needs a slot of another, in either pass: all ranks then join."""
        return any(b.enters is not None and a.rank != b.rank for a, b in pairwise(self.fragments))

    def exchanges_transitions(self, backward: bool) -> bool:
        """Whether any `transition_sends(.., backward)` is non-empty: all ranks then join."""
        edges = pairwise(self.fragments)
        return any(a.rank != b.rank and (a.full or (backward and b.full)) for a, b in edges)

    def transition_sends(self, source: int, target: int, backward: bool) -> tuple[Fragment, ...]:
        """Full fragments of `source` whose A `target` needs, in global order; none from itself.

        The forward needs those in the entry chains of target's fragments. `backward` adds those in
        its exit chains, so that one exchange in the forward serves both passes.
        """
        fulls = self.full(source)
        last_entered, first_exited = self._reach[self._checked(target)]
        if source == target:
            return ()
        return tuple(
            f
            for f in fulls
            if f.index < last_entered.get(f.exits, -1)
            or (backward and f.index > first_exited.get(f.enters, f.index))
        )

    def hops(self, backward: bool) -> tuple[tuple[Hop, ...], ...]:
        """The edges between ranks that states cross, step by step, as a ring passes them on.

        Forward, step 0 holds the edges that a reset's exit state crosses, step n those that a state
        reaches after n others; backward the same from the sequence's last fragment. One contiguous
        sequence takes `P - 1` steps (zigzag: `2P - 2`). Within a step, hops are in global order.
        """
        return self._hops[backward]

    def overlaps(self, rank: int, other: Plan) -> list[list[Range]]:
        """For each rank of `other`, a plan of the same tokens: what it holds of `rank`'s shard.

        As half-open ranges of positions in the shard here, in the order of the global tokens.
        """
        found: list[list[Range]] = [[] for _ in range(other.ranks)]
        for f in self._owned(rank):
            first = bisect_right(other._starts, f.start) - 1
            for g in other.fragments[first:]:
                if g.start >= f.stop:
                    break
                low, high = max(f.start, g.start), min(f.stop, g.stop)
                found[g.rank].append((f.offset + low - f.start, f.offset + high - f.start))
        return found

    def state_slots(self, backward: bool) -> int:
        """Slots a rank contributes to a padded all-gather of states: the most that any rank has."""
        slots = self.entered if backward else self.exited
        return max(len(slots(rank)) for rank in range(self.ranks))

    def initial_state_owner(self, sequence: int) -> int:
        """The rank that holds the first token of `sequence`; 0 if it is empty."""
        start, stop = self._bounds(sequence)
        return self._owner(start) if start < stop else 0

    def final_state_owner(self, sequence: int) -> int:
        """The rank that holds the last token of `sequence`; 0 if it is empty."""
        start, stop = self._bounds(sequence)
        return self._owner(stop - 1) if start < stop else 0

    # Picture.

    def draw(self, width: int = 72) -> str:
        """Ranks (rows) over tokens (columns), then the fragments.

        Past `width` tokens a column shows the first of the tokens it stands for, so what is short
        may not show; the table is exact.
        """
        columns = min(self.num_tokens, max(width, 1))
        rows = [["."] * columns for _ in range(self.ranks)]
        for column in range(columns):
            token = column * self.num_tokens // columns
            in_sequence = token < self.cu_seqlens[-1]
            mark = str((bisect_right(self.cu_seqlens, token) - 1) % 10) if in_sequence else "-"
            rows[self._owner(token)][column] = mark
        digits, sequences = len(str(self.ranks - 1)), len(self.cu_seqlens) - 1
        lines = [
            f"{self.num_tokens} tokens, {sequences} sequences, {self.ranks} ranks, {self.layout}",
            *(f"rank {rank:{digits}}  {''.join(row)}".rstrip() for rank, row in enumerate(rows)),
        ]
        ranges = [f"[{f.start}, {f.stop})" for f in self.fragments]
        span = max(map(len, ["tokens", *ranges]))
        lines.append(f"fragment  rank  {'tokens':{span}}  offset  kind   enters  exits")
        for f, tokens in zip(self.fragments, ranges, strict=True):
            kind = "full" if f.full else "reset"
            enters, exits = ("-" if s is None else s for s in (f.enters, f.exits))
            place = f"{f.index:8}  {f.rank:4}  {tokens:{span}}  {f.offset:6}"
            lines.append(f"{place}  {kind:5}  {enters:>6}  {exits:>5}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.draw()

    # Lookups, made once a plan; `frozen` does not stop `cached_property`, which writes to __dict__.

    @cached_property
    def _by_rank(self) -> tuple[tuple[Fragment, ...], ...]:
        owned: list[list[Fragment]] = [[] for _ in range(self.ranks)]
        for fragment in self.fragments:
            owned[fragment.rank].append(fragment)
        return tuple(map(tuple, owned))

    @cached_property
    def _segments(self) -> dict[int, tuple[Segment, ...]]:
        return {}  # filled a rank at a time: a rank asks for its own, of many

    @cached_property
    def _hops(self) -> tuple[tuple[tuple[Hop, ...], ...], ...]:
        return tuple(
            tuple(map(tuple, _hops(self.fragments, backward))) for backward in (False, True)
        )

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(f.start for f in self.fragments)

    @cached_property
    def _reach(self) -> tuple[tuple[dict[int | None, int], dict[int | None, int]], ...]:
        """For each rank: by sequence, its last fragment entered and its first fragment exited.

        A rank needs the A of a full fragment exactly if it has an entered one of that sequence
        later (forward) or an exited one earlier (backward): no chain need be walked.
        """
        reach: tuple[tuple[dict[int | None, int], dict[int | None, int]], ...]
        reach = tuple(({}, {}) for _ in range(self.ranks))
        for f in self.fragments:
            last_entered, first_exited = reach[f.rank]
            if f.enters is not None:
                last_entered[f.enters] = f.index
            if f.exits is not None:
                first_exited.setdefault(f.exits, f.index)
        return reach

    def _cut(self, fragment: Fragment) -> Iterable[Segment]:
        cu, start, stop = self.cu_seqlens, fragment.start, fragment.stop
        first = bisect_right(cu, start) - 1
        for n in range(first, min(bisect_left(cu, stop), len(cu) - 1)):
            low, high = max(cu[n], start), min(cu[n + 1], stop)
            if low < high:
                offset = fragment.offset + low - start
                yield Segment(n, low, high, offset, fragment.index, low == cu[n], high == cu[n + 1])

    def _owner(self, token: int) -> int:
        return self.fragments[bisect_right(self._starts, token) - 1].rank

    # Python would read a negative index from the end: the wrong rank, silently.

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank: expected a number in [0, {self.ranks}), got {rank}")
        return rank

    def _owned(self, rank: int) -> tuple[Fragment, ...]:
        return self._by_rank[self._checked(rank)]

    def _shard(self, rank: int) -> list[Fragment]:
        return sorted(self._owned(rank), key=lambda f: f.offset)

    def _fragment(self, index: int) -> Fragment:
        if not 0 <= index < len(self.fragments):
            raise ValueError(f"index: expected a number in [0, {len(self.fragments)}), got {index}")
        return self.fragments[index]

    def _bounds(self, sequence: int) -> Range:
        if not 0 <= sequence < len(self.cu_seqlens) - 1:
            raise ValueError(
                f"sequence: expected a number in [0, {len(self.cu_seqlens) - 1}), got {sequence}"
            )
        return self.cu_seqlens[sequence], self.cu_seqlens[sequence + 1]


def make_plan(
    cu_seqlens: Sequence[int],
    ranks: int,
    *,
    layout: str = "contiguous",
    fragments: Sequence[Sequence[Range]] | None = None,
    num_tokens: int | None = None,
) -> Plan:
    """Divide a packed stream of sequences over ranks.

    Args:
        cu_seqlens: global boundaries, from 0, non-decreasing (equal neighbours: an empty sequence).
            A row of a dense batch is (0, T); all rows share the plan.
        ranks: P, at least 1. Fewer tokens than ranks are legal; a shard may be empty.
        layout: "contiguous" (P pieces of [0, T), the remainder one token each to the first) or
            "zigzag" (2P such pieces, rank r holds pieces r and 2P - 1 - r).
        fragments: for each rank its half-open (start, stop) in shard order; together an exact cover
            of [0, T), in any order and sizes. `layout` is then ignored, "fragments" recorded.
        num_tokens: T; None means cu_seqlens[-1]. Tokens from cu_seqlens[-1] on are owned, but
            belong to no sequence.

    Raises:
        ValueError: names the argument, what was expected and what came.
    """
    cu = read_boundaries(cu_seqlens)
    count = read_integer("ranks", ranks)
    if count < 1:
        raise ValueError(f"ranks: expected at least 1, got {count}")
    total = cu[-1] if num_tokens is None else read_integer("num_tokens", num_tokens)
    if total < cu[-1]:
        raise ValueError(f"num_tokens: expected at least cu_seqlens[-1] = {cu[-1]}, got {total}")
    if fragments is None:
        shards = lay_out(layout, count, total)
    else:
        shards, layout = read_fragments(fragments, count, total), "fragments"
    return Plan(cu, total, count, layout, _fragments(cu, shards))


def _fragments(cu: tuple[int, ...], shards: list[list[Range]]) -> tuple[Fragment, ...]:
    """Drop what is empty, merge what is adjacent twice, sort globally and look at the edges."""
    merged: list[tuple[int, int, int, int]] = []  # start, stop, rank, offset
    for rank, shard in enumerate(shards):
        offset, end = 0, -1
        for start, stop in shard:
            if start == stop:
                continue
            if start == end:
                merged[-1] = (merged[-1][0], stop, *merged[-1][2:])
            else:
                merged.append((start, stop, rank, offset))
            offset, end = offset + stop - start, stop
    return tuple(
        Fragment(index, rank, start, stop, offset, _crossing(cu, start), _crossing(cu, stop))
        for index, (start, stop, rank, offset) in enumerate(sorted(merged))
    )


def _hops(fragments: tuple[Fragment, ...], backward: bool) -> list[list[Hop]]:
    steps: list[list[Hop]] = []
    step = 0
    for here, there in pairwise(fragments[::-1] if backward else fragments):
        if not here.full:
            step = 0
        if (here.enters if backward else here.exits) is None or here.rank == there.rank:
            continue
        if step == len(steps):
            steps.append([])
        steps[step].append((here.index, there.index))
        step += 1
    return [sorted(hops) for hops in steps]


def _crossing(cu: tuple[int, ...], edge: int) -> int | None:
    """The sequence with tokens on both sides of `edge`."""
    # The last boundary at or before the edge opens the sequence (or padding) of token `edge`.
    n = bisect_right(cu, edge) - 1
    return n if n < len(cu) - 1 and cu[n] < edge else None
