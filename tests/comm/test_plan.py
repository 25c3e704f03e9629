"""Claims about `comm/plan.py` and `comm/traffic.py`, judged by `Scan`.

The scan finds the same answers by looking at every token.

In order: the documented picture, fixed layouts, edges by hand, random plans against the scan, the
meaning of the chains (integer maps folded along them), bytes, error texts, size.
"""

from __future__ import annotations

import doctest
import inspect
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_cp.comm import plan as plan_module
from kda_cp.comm.plan import Fragment, Plan, Segment, make_plan
from kda_cp.comm.traffic import Traffic, received_bytes

Table = list[list[tuple[int, int]]]


class Scan:
    """A plan made token by token from an explicit table of ranges; slow and without arithmetic."""

    def __init__(self, cu_seqlens: list[int], table: Table, num_tokens: int) -> None:
        self.cu, self.num_tokens, self.ranks = cu_seqlens, num_tokens, len(table)
        shards = [[t for a, b in shard for t in range(a, b)] for shard in table]
        self.place = {t: (r, i) for r, shard in enumerate(shards) for i, t in enumerate(shard)}
        self.sequence: list[int | None] = [None] * num_tokens
        for n in range(len(cu_seqlens) - 1):
            for t in range(cu_seqlens[n], cu_seqlens[n + 1]):
                self.sequence[t] = n
        self.tokens: list[list[int]] = []  # of each fragment
        for t in range(num_tokens):
            rank, offset = self.place[t]
            if t == 0 or self.place[t - 1] != (rank, offset - 1):
                self.tokens.append([])
            self.tokens[-1].append(t)
        self.fragments = tuple(self.fragment(i) for i in range(len(self.tokens)))

    def crossing(self, edge: int) -> int | None:
        both = set(self.sequence[:edge]) & set(self.sequence[edge:]) - {None}
        assert len(both) <= 1
        return both.pop() if both else None

    def fragment(self, i: int) -> Fragment:
        first, stop = self.tokens[i][0], self.tokens[i][-1] + 1
        rank, offset = self.place[first]
        return Fragment(i, rank, first, stop, offset, self.crossing(first), self.crossing(stop))

    def holders(self, sequence: int | None) -> list[int]:
        return [i for i, ts in enumerate(self.tokens) if sequence in {self.sequence[t] for t in ts}]

    def segments(self, rank: int) -> tuple[Segment, ...]:
        found = []
        for i, tokens in enumerate(self.tokens):
            for n in range(len(self.cu) - 1):
                mine = [t for t in tokens if self.sequence[t] == n and self.place[t][0] == rank]
                if mine:
                    whole = [t for t in range(self.num_tokens) if self.sequence[t] == n]
                    starts, ends = mine[0] == whole[0], mine[-1] == whole[-1]
                    offset = self.place[mine[0]][1]
                    found.append(Segment(n, mine[0], mine[-1] + 1, offset, i, starts, ends))
        return tuple(sorted(found, key=lambda s: s.offset))

    def entry_chain(self, i: int) -> tuple[Fragment, ...]:
        holders = self.holders(self.fragments[i].enters)
        return tuple(self.fragments[j] for j in holders if j < i)

    def exit_chain(self, i: int) -> tuple[Fragment, ...]:
        holders = self.holders(self.fragments[i].exits)
        return tuple(self.fragments[j] for j in holders if j > i)

    def needs(self, target: int, backward: bool) -> tuple[set[int], set[int]]:
        """Indices of the fragments whose slots, and whose A, `target` folds in one pass."""
        slots: set[int] = set()
        transitions: set[int] = set()
        for f in self.fragments:
            if f.rank != target or (f.exits if backward else f.enters) is None:
                continue
            chain = self.exit_chain(f.index) if backward else self.entry_chain(f.index)
            slots |= {g.index for g in chain}
            transitions |= {g.index for g in (chain[:-1] if backward else chain[1:])}
        return slots, transitions

    def sends(self, source: int, target: int, backward: bool) -> tuple[Fragment, ...]:
        needed = self.needs(target, False)[1] | (self.needs(target, True)[1] if backward else set())
        mine = (f for f in self.fragments if f.index in needed and f.rank == source != target)
        return tuple(mine)


def pieces(num_tokens: int, count: int) -> list[tuple[int, int]]:
    """Cut as dealing cards would: token by token, round after round."""
    sizes = [0] * count
    for t in range(num_tokens):
        sizes[t % count] += 1
    return [(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(count)]


def random_case(rng: random.Random) -> tuple[list[int], Table, dict[str, Any]]:
    """cu_seqlens, the table of ranges it should come to, and the keywords that ask for it."""
    ranks, count = rng.choice([1, 2, 2, 3, 3, 4, 5, 6]), rng.randint(0, 7)
    cu = [0]
    for _ in range(count):
        cu.append(cu[-1] + rng.choice([0, 0, 1, 1, 2, 3, 5, 8, 13, 24]))
    total = cu[-1] + rng.choice([0, 0, 0, 1, 7])
    layout = rng.choice(["contiguous", "zigzag", "fragments"])
    if layout == "contiguous":
        table = [[piece] for piece in pieces(total, ranks)]
        return cu, table, {"layout": layout, "num_tokens": total}
    if layout == "zigzag":
        cut = pieces(total, 2 * ranks)
        table = [[cut[r], cut[2 * ranks - 1 - r]] for r in range(ranks)]
        return cu, table, {"layout": layout, "num_tokens": total}
    # Sorted draws repeat, so some ranges are empty; neighbours often land on one rank, in order.
    bounds = sorted([0, total, *(rng.randint(0, total) for _ in range(rng.randint(0, 9)))])
    table = [[] for _ in range(ranks)]
    for piece in pairwise(bounds):
        table[rng.randrange(ranks)].append(piece)
    if rng.random() < 0.5:
        for shard in table:
            rng.shuffle(shard)
    return cu, table, {"fragments": table, "num_tokens": total}


def random_plans(count: int = 500) -> list[tuple[Plan, Scan]]:
    rng = random.Random(20240607)
    cases = [random_case(rng) for _ in range(count)]
    return [
        (make_plan(cu, len(table), **keywords), Scan(cu, table, keywords["num_tokens"]))
        for cu, table, keywords in cases
    ]


PLANS = random_plans()


def received(plan: Plan, algorithm: str, rank: int, **sizes: Any) -> Traffic:
    return received_bytes(
        plan, algorithm, rank, **{"heads": 4, "key_dim": 3, "value_dim": 5} | sizes
    )


# The documented picture.


def test_documentation_shows_what_draw_prints() -> None:
    module = doctest.testmod(plan_module)
    assert (module.attempted, module.failed) == (1, 0)
    readme = Path(inspect.getfile(plan_module)).with_name("README.md")
    page = doctest.testfile(str(readme), module_relative=False, encoding="utf-8")
    assert (page.attempted, page.failed) == (2, 0)


def test_draw_marks_padding_and_scales_long_streams() -> None:
    lines = make_plan((0, 40, 40, 80), 2, num_tokens=100).draw(width=10).splitlines()
    assert lines[1:3] == ["rank 0  00002.....", "rank 1  .....222--"]
    assert str(make_plan((0,), 1)).splitlines()[1] == "rank 0"


# Fixed layouts.


@pytest.mark.parametrize(
    ("tokens", "ranks", "layout", "expected"),
    [
        (10, 4, "contiguous", [[(0, 3)], [(3, 6)], [(6, 8)], [(8, 10)]]),
        (10, 2, "zigzag", [[(0, 3), (8, 10)], [(3, 8)]]),  # rank 1 holds neighbours: merged
        (12, 3, "zigzag", [[(0, 2), (10, 12)], [(2, 4), (8, 10)], [(4, 8)]]),
        (2, 4, "contiguous", [[(0, 1)], [(1, 2)], [], []]),
        (3, 2, "zigzag", [[(0, 1)], [(1, 3)]]),
        (1, 3, "zigzag", [[(0, 1)], [], []]),
        (0, 3, "contiguous", [[], [], []]),
        (9, 1, "contiguous", [[(0, 9)]]),
        (9, 1, "zigzag", [[(0, 9)]]),
    ],
)
def test_layout_gives_these_ranges(
    tokens: int, ranks: int, layout: str, expected: list[list[tuple[int, int]]]
) -> None:
    plan = make_plan((0, tokens), ranks, layout=layout)
    assert [list(plan.ranges(r)) for r in range(ranks)] == expected
    assert [plan.shard_tokens(r) for r in range(ranks)] == [
        sum(b - a for a, b in shard) for shard in expected
    ]
    assert (plan.layout, plan.num_tokens, plan.ranks) == (layout, tokens, ranks)


def test_explicit_fragments_keep_shard_order_drop_empty_and_override_the_layout() -> None:
    table = [[(5, 10), (0, 0), (0, 2)], [(2, 3), (3, 3), (3, 5)]]
    plan = make_plan((0, 10), 2, layout="no such layout", fragments=table)
    assert plan.layout == "fragments"
    assert plan.ranges(0) == ((5, 10), (0, 2)) and plan.ranges(1) == ((2, 5),)
    assert [f.offset for f in plan.fragments] == [5, 0, 0]
    assert plan.local_cu_seqlens(0) == (0, 5, 7)


def test_one_rank_is_one_fragment_unless_tokens_are_permuted() -> None:
    whole = make_plan((0, 4, 9), 1)
    assert whole.fragments == (Fragment(0, 0, 0, 9, 0, None, None),)
    assert make_plan((0, 4, 9), 1, fragments=[[(0, 3), (3, 9)]]).fragments == whole.fragments
    permuted = make_plan((0, 9), 1, fragments=[[(3, 9), (0, 3)]])
    assert [(f.start, f.offset, f.enters, f.exits) for f in permuted.fragments] == [
        (0, 6, None, 0),
        (3, 0, 0, None),
    ]
    assert permuted.entry_chain(1) == permuted.fragments[:1]
    assert not permuted.exchanges_states and permuted.state_slots(False) == 1


@pytest.mark.parametrize("algorithm", ["all_gather", "ring", "all_to_all"])
def test_one_rank_exchanges_nothing(algorithm: str) -> None:
    plan = make_plan((0, 9), 1, fragments=[[(6, 9), (3, 6), (0, 3)]])
    assert len(plan.full(0)) == 1
    assert not plan.exchanges_states and not plan.exchanges_transitions(True)
    assert received(plan, algorithm, 0) == Traffic(0, 0)


# Edges by hand.


@pytest.mark.parametrize(("boundary", "crosses"), [(5, True), (6, False), (7, True)])
def test_a_boundary_at_a_rank_edge_moves_no_state_one_token_aside_does(
    boundary: int, crosses: bool
) -> None:
    plan = make_plan((0, boundary, 12), 2)  # the edge is at 6
    assert plan.exchanges_states is crosses
    crossing = {5: 1, 6: None, 7: 0}[boundary]
    assert plan.fragments[0].exits == plan.fragments[1].enters == crossing
    assert plan.full(0) == plan.full(1) == ()


@pytest.mark.parametrize("cu_seqlens", [(0, 0, 6, 6, 6, 12, 12), (0, 0, 0, 5, 5, 12), (0, 0)])
def test_empty_sequences_change_no_edge_and_belong_to_rank_0(cu_seqlens: tuple[int, ...]) -> None:
    plan = make_plan(cu_seqlens, 2)
    dense = make_plan(sorted(set(cu_seqlens)), 2)
    for f, g in zip(plan.fragments, dense.fragments, strict=True):
        assert (f.start, f.stop, f.enters is None) == (g.start, g.stop, g.enters is None)
    assert plan.local_cu_seqlens(1) == dense.local_cu_seqlens(1)
    empty = [n for n in range(len(cu_seqlens) - 1) if cu_seqlens[n] == cu_seqlens[n + 1]]
    assert len(empty) >= 1
    assert {plan.initial_state_owner(n) for n in empty} == {0}
    assert {plan.final_state_owner(n) for n in empty} == {0}


def test_a_sequence_over_three_ranks_makes_the_middle_full() -> None:
    plan = make_plan((0, 2, 9, 12), 3)
    assert [f.full for f in plan.fragments] == [False, True, False]
    assert plan.entry_chain(2) == plan.fragments[:2] and plan.exit_chain(0) == plan.fragments[1:]
    assert plan.transition_sends(1, 2, False) == plan.full(1) == plan.fragments[1:2]
    assert plan.transition_sends(1, 0, False) == () and plan.transition_sends(1, 0, True) != ()
    assert plan.initial_state_owner(1) == 0 and plan.final_state_owner(1) == 2


def test_a_fragment_that_holds_an_end_of_its_sequence_is_a_reset() -> None:
    # Exactly the first, and exactly the last token of the long sequence lies in the middle ranks.
    plan = make_plan((0, 7, 9, 16), 4)
    assert [(f.enters, f.exits) for f in plan.fragments] == [(None, 0), (0, 1), (1, 2), (2, None)]
    assert not any(f.full for f in plan.fragments)
    assert plan.exchanges_states and not plan.exchanges_transitions(True)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=9), st.integers(0, 5))
def test_two_contiguous_ranks_never_need_a_transition(lengths: list[int], padding: int) -> None:
    cu = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    plan = make_plan(cu, 2, num_tokens=cu[-1] + padding)
    assert not any(f.full for f in plan.fragments) and not plan.exchanges_transitions(True)


def test_padding_is_owned_but_in_no_segment() -> None:
    plan = make_plan((0, 5), 3, num_tokens=12)
    assert [plan.shard_tokens(r) for r in range(3)] == [4, 4, 4]
    assert [plan.local_cu_seqlens(r) for r in range(3)] == [(0, 4), (0, 1), (0,)]
    assert plan.fragments[1].exits is None and plan.fragments[2].enters is None


def test_padding_before_tokens_has_segments_but_no_local_cu_seqlens() -> None:
    plan = make_plan((0, 5), 1, num_tokens=8, fragments=[[(5, 8), (0, 5)]])
    assert plan.segments(0) == (Segment(0, 0, 5, 3, 0, True, True),)
    with pytest.raises(ValueError, match=r"^fragments: expected tokens past .* = 5 .* on rank 0$"):
        plan.local_cu_seqlens(0)


# Random plans against the scan.


def test_random_plans_reach_the_cases_that_matter() -> None:
    plans = [plan for plan, _ in PLANS]
    assert any(p.exchanges_transitions(True) and not p.exchanges_transitions(False) for p in plans)
    assert any(p.full(r) and not p.exchanges_states for p in plans for r in range(p.ranks))
    assert any(len(p.full(r)) > 1 for p in plans for r in range(p.ranks))
    assert any(p.shard_tokens(r) == 0 for p in plans for r in range(p.ranks))
    assert any(p.num_tokens < p.ranks for p in plans)


def test_fragments_and_their_edges_are_those_of_the_scan() -> None:
    for plan, scan in PLANS:
        assert plan.fragments == scan.fragments
        for rank in range(plan.ranks):
            mine = [f for f in scan.fragments if f.rank == rank]
            in_shard = sorted(mine, key=lambda f: f.offset)
            assert plan.ranges(rank) == tuple((f.start, f.stop) for f in in_shard)
            assert plan.shard_tokens(rank) == sum(p[0] == rank for p in scan.place.values())
            assert plan.entered(rank) == tuple(f for f in mine if f.enters is not None)
            assert plan.exited(rank) == tuple(f for f in mine if f.exits is not None)
            assert plan.full(rank) == tuple(f for f in plan.entered(rank) if f.enters == f.exits)


def test_segments_are_those_of_the_scan() -> None:
    for plan, scan in PLANS:
        for rank in range(plan.ranks):
            segments = plan.segments(rank)
            assert segments == scan.segments(rank)
            bounds = [0]
            for segment in segments:
                bounds.append(bounds[-1] + segment.length)
            if [s.offset for s in segments] == bounds[:-1]:
                assert plan.local_cu_seqlens(rank) == tuple(bounds)
            else:  # padding in front, only ever by an explicit table
                assert plan.layout == "fragments" and plan.num_tokens > plan.cu_seqlens[-1]


def test_owners_hold_the_first_and_the_last_token() -> None:
    for plan, scan in PLANS:
        for n in range(len(scan.cu) - 1):
            tokens = [t for t in range(plan.num_tokens) if scan.sequence[t] == n]
            first, last = ([tokens[0], tokens[-1]]) if tokens else (None, None)
            assert plan.initial_state_owner(n) == (0 if first is None else scan.place[first][0])
            assert plan.final_state_owner(n) == (0 if last is None else scan.place[last][0])


def test_chains_are_those_of_the_scan() -> None:
    for plan, scan in PLANS:
        for f in plan.fragments:
            if f.enters is not None:
                assert plan.entry_chain(f.index) == scan.entry_chain(f.index)
            if f.exits is not None:
                assert plan.exit_chain(f.index) == scan.exit_chain(f.index)


def test_sends_are_those_of_the_scan() -> None:
    for plan, scan in PLANS:
        pairs = [(s, t) for s in range(plan.ranks) for t in range(plan.ranks)]
        for backward in (False, True):
            sends = [plan.transition_sends(s, t, backward) for s, t in pairs]
            assert sends == [scan.sends(s, t, backward) for s, t in pairs]
            assert plan.exchanges_transitions(backward) is any(sends)
            remote = any(
                scan.fragments[i].rank != rank
                for rank in range(plan.ranks)
                for i in scan.needs(rank, backward)[0]
            )
            assert plan.exchanges_states is remote  # the same in both passes


def test_state_slots_are_the_most_of_any_rank() -> None:
    for plan, scan in PLANS:
        for backward in (False, True):
            edges = [(f.rank, f.enters if backward else f.exits) for f in scan.fragments]
            crossed = [rank for rank, edge in edges if edge is not None]
            assert plan.state_slots(backward) == max(map(crossed.count, range(plan.ranks)))


# What the chains are for: integer maps modulo a prime, so that a fold is exact.


def test_folding_the_chains_gives_the_states_and_gradients_of_one_walk() -> None:
    prime, rng = 10_007, random.Random(3)
    for plan, scan in PLANS:
        a = [rng.randrange(prime) for _ in range(plan.num_tokens)]
        b = [rng.randrange(prime) for _ in range(plan.num_tokens)]
        same = [t > 0 and scan.sequence[t] == scan.sequence[t - 1] for t in range(plan.num_tokens)]
        before, after = (
            [0] * plan.num_tokens,
            [0] * plan.num_tokens,
        )  # state entering, gradient leaving
        for t in range(1, plan.num_tokens):
            before[t] = (a[t - 1] * before[t - 1] + b[t - 1]) % prime if same[t] else 0
        for t in reversed(range(plan.num_tokens - 1)):
            after[t] = (a[t + 1] * after[t + 1] + b[t + 1]) % prime if same[t + 1] else 0
        for f in plan.fragments:
            if f.enters is not None:
                state = 0
                for g in plan.entry_chain(f.index):
                    for t in range(g.start, g.stop):  # the map of g, applied
                        state = (a[t] * (state if same[t] else 0) + b[t]) % prime
                assert state == before[f.start]
            if f.exits is not None:
                gradient = 0
                for g in reversed(plan.exit_chain(f.index)):
                    for t in reversed(range(g.start, g.stop)):
                        keeps = t + 1 < plan.num_tokens and same[t + 1]
                        gradient = (a[t] * (gradient if keeps else 0) + b[t]) % prime
                assert gradient == after[f.stop - 1]


def test_hops_pass_each_state_on_as_soon_as_it_can_be_there() -> None:
    for plan, _ in PLANS:
        for backward in (False, True):
            # The step in which a state can leave a fragment: as it enters it, or one hop later.
            arrives: dict[int, int] = {}
            expected: dict[int, list[tuple[int, int]]] = {}
            order = plan.fragments[::-1] if backward else plan.fragments
            for here, there in pairwise(order):
                if (here.enters if backward else here.exits) is None:
                    continue
                step = arrives[here.index] if here.full else 0
                if here.rank != there.rank:
                    expected.setdefault(step, []).append((here.index, there.index))
                arrives[there.index] = step + (here.rank != there.rank)
            found = plan.hops(backward)
            assert found == tuple(tuple(sorted(expected[n])) for n in range(len(expected)))
            edges = {tuple(sorted(hop)) for step in found for hop in step}
            assert len(edges) == sum(map(len, found))
            assert bool(edges) is plan.exchanges_states


def test_a_ring_takes_p_minus_1_hops_and_zigzag_twice_that() -> None:
    for backward in (False, True):
        assert len(make_plan((0, 6400), 64).hops(backward)) == 63
        assert len(make_plan((0, 6400), 64, layout="zigzag").hops(backward)) == 126
        # Documents that cross one edge each wait for nobody.
        assert len(make_plan((0, 15, 25, 40), 4).hops(backward)) == 1
    assert make_plan((0, 30), 3).hops(False) == (((0, 1),), ((1, 2),))
    assert make_plan((0, 30), 3).hops(True) == (((2, 1),), ((1, 0),))


# Bytes.

EVERY_SIZE: dict[str, Any] = {"heads": 32, "key_dim": 128, "value_dim": 128}
STATE = 32 * 128 * 128 * 4  # b, c or A of all heads: 2 MiB


def test_all_gather_keeps_124_mib_of_transitions_at_64_ranks() -> None:
    plan = make_plan((0, 6400), 64)
    for rank, transitions in [(0, 62), (1, 61), (63, 62)]:
        traffic = received_bytes(plan, "all_gather", rank, **EVERY_SIZE)
        assert traffic == Traffic((63 + transitions) * STATE, 63 * STATE)
    assert 62 * STATE == 124 * 2**20
    inference = received_bytes(plan, "all_gather", 0, **EVERY_SIZE, training=False)
    assert inference == Traffic(63 * STATE, 0)  # rank 0 has no entry chain


def test_ring_moves_a_state_for_each_edge_from_another_rank() -> None:
    contiguous = make_plan((0, 6400), 64)
    expected = {0: Traffic(0, STATE), 7: Traffic(STATE, STATE), 63: Traffic(STATE, 0)}
    for rank, traffic in expected.items():
        assert received_bytes(contiguous, "ring", rank, **EVERY_SIZE) == traffic
    zigzag = make_plan((0, 6400), 64, layout="zigzag")
    expected = {
        0: Traffic(STATE, STATE),
        7: Traffic(2 * STATE, 2 * STATE),
        63: Traffic(STATE, STATE),
    }
    for rank, traffic in expected.items():
        assert received_bytes(zigzag, "ring", rank, **EVERY_SIZE) == traffic


def test_all_to_all_receives_its_share_of_every_slot_and_its_own_states() -> None:
    plan = make_plan((0, 30), 3)  # one full fragment, on rank 1
    # 4 heads: groups of 2, 1, 1. b and c are 3 x 5, A is 3 x 3, 4 bytes.
    b, transition = 3 * 5 * 4, 3 * 3 * 4
    assert received(plan, "all_to_all", 0) == Traffic(2 * b + 2 * transition, (2 * 2 + 2) * b)
    assert received(plan, "all_to_all", 1) == Traffic((1 + 3) * b, (1 + 3) * b)
    assert received(plan, "all_to_all", 2) == Traffic((2 + 3) * b + transition, b)
    # Fewer heads than ranks: rank 2 folds nothing and gets its entry state back.
    assert received(plan, "all_to_all", 2, heads=2) == Traffic(2 * b, 0)


def test_all_gather_counts_what_the_scan_needs() -> None:
    for plan, scan in PLANS:
        exchanged = plan.exchanges_states
        for rank in range(plan.ranks):
            for training in (False, True):
                needed = sum(len(scan.sends(s, rank, training)) for s in range(plan.ranks))
                padded = (plan.ranks - 1) * exchanged * 4 * 3 * 5 * 4
                forward = padded * plan.state_slots(False) + needed * 4 * 3 * 3 * 4
                backward = padded * plan.state_slots(True) * training
                assert received(plan, "all_gather", rank, training=training) == Traffic(
                    forward, backward
                )


def test_every_algorithm_is_silent_exactly_without_an_exchange() -> None:
    for plan, _ in PLANS:
        for algorithm in ("all_gather", "ring", "all_to_all"):
            total = sum(received(plan, algorithm, r).forward for r in range(plan.ranks))
            assert (total > 0) is plan.exchanges_states


@pytest.mark.parametrize("algorithm", ["all_gather", "ring", "all_to_all"])
def test_bytes_are_proportional_to_batch_and_itemsize(algorithm: str) -> None:
    plan = make_plan((0, 50), 5, layout="zigzag")
    for rank in range(5):
        one = received(plan, algorithm, rank)
        six = received(plan, algorithm, rank, batch=3, itemsize=8)
        assert six == Traffic(6 * one.forward, 6 * one.backward)
        assert received(plan, algorithm, rank, training=False).backward == 0


# Error texts.


@pytest.mark.parametrize(
    ("arguments", "keywords", "text"),
    [
        (((), 1), {}, "cu_seqlens: expected at least one boundary (a 0), got an empty sequence"),
        ((7, 1), {}, "cu_seqlens: expected a sequence of ints, got 7"),
        (((1, 2), 1), {}, "cu_seqlens: expected 0 first, got 1"),
        (
            ((0, 7, 5), 1),
            {},
            "cu_seqlens: expected non-decreasing boundaries, got 5 after 7 at position 2",
        ),
        (((0, 7.0), 1), {}, "cu_seqlens[1]: expected an int, got 7.0"),
        (((False, 7), 1), {}, "cu_seqlens[0]: expected an int, got False"),
        (((0, 7), 0), {}, "ranks: expected at least 1, got 0"),
        (((0, 7), True), {}, "ranks: expected an int, got True"),
        (((0, 7), 2.0), {}, "ranks: expected an int, got 2.0"),
        (
            ((0, 7), 1),
            {"num_tokens": 6},
            "num_tokens: expected at least cu_seqlens[-1] = 7, got 6",
        ),
        (((0, 7), 1), {"num_tokens": 7.0}, "num_tokens: expected an int, got 7.0"),
        (
            ((0, 7), 1),
            {"layout": "striped"},
            "layout: expected one of ('contiguous', 'zigzag'), got 'striped'",
        ),
    ],
)
def test_a_wrong_argument_is_named(
    arguments: tuple[Any, Any], keywords: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError) as error:
        make_plan(*arguments, **keywords)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("fragments", "text"),
    [
        ([[(0, 7)]], "fragments: expected a list of 2 lists, one a rank, got 1"),
        (3, "fragments: expected a list of 2 lists, one a rank, got 3"),
        ([[(0, 7)], 3], "fragments[1]: expected a list of (start, stop), got 3"),
        ([[(0, 7)], [(7,)]], "fragments[1][0]: expected a pair (start, stop), got (7,)"),
        ([[(0, 7)], [7, 7]], "fragments[1][0]: expected a pair (start, stop), got 7"),
        ([[(0, 7.0)], []], "fragments[0][0][1]: expected an int, got 7.0"),
        ([[(0, 4), (7, 4)], []], "fragments[0][1]: expected 0 <= start <= stop <= 7, got (7, 4)"),
        ([[(-1, 7)], []], "fragments[0][0]: expected 0 <= start <= stop <= 7, got (-1, 7)"),
        ([[(0, 8)], []], "fragments[0][0]: expected 0 <= start <= stop <= 7, got (0, 8)"),
        ([[(2, 7)], []], "COVER, got a gap: no rank holds [0, 2)"),
        ([[(0, 3)], [(5, 7)]], "COVER, got a gap: no rank holds [3, 5)"),
        ([[(0, 3)], [(3, 6)]], "COVER, got a gap: no rank holds [6, 7)"),
        ([[], []], "COVER, got a gap: no rank holds [0, 7)"),
        ([[(4, 7)], [(0, 5)]], "COVER, got an overlap: [4, 5) on rank 1 and rank 0"),
        ([[(0, 7), (2, 3)], []], "COVER, got an overlap: [2, 3) on rank 0 and rank 0"),
    ],
)
def test_a_wrong_table_is_named(fragments: Any, text: str) -> None:
    with pytest.raises(ValueError) as error:
        make_plan((0, 7), 2, fragments=fragments)
    cover = "fragments: expected each token of [0, 7) exactly once"
    assert str(error.value) == text.replace("COVER", cover)


def test_questions_about_what_is_not_there_raise() -> None:
    plan = make_plan((0, 2, 9, 12), 3)
    for ask in (plan.ranges, plan.segments, plan.entered, plan.full, plan.shard_tokens):
        for rank in (-1, 3):
            with pytest.raises(
                ValueError, match=rf"^rank: expected a number in \[0, 3\), got {rank}$"
            ):
                ask(rank)
    with pytest.raises(ValueError, match=r"^rank: expected"):
        plan.transition_sends(0, -1, False)
    with pytest.raises(ValueError, match=r"^sequence: expected a number in \[0, 3\), got -1$"):
        plan.final_state_owner(-1)
    with pytest.raises(ValueError, match=r"^index: expected a number in \[0, 3\), got -1$"):
        plan.exit_chain(-1)
    with pytest.raises(ValueError, match=r"^index: expected the index of an entered fragment"):
        plan.entry_chain(0)
    with pytest.raises(ValueError, match=r"^index: expected the index of an exited fragment"):
        plan.exit_chain(2)
    with pytest.raises(ValueError, match=r"^algorithm: expected one of .*, got 'tree'$"):
        received(plan, "tree", 0)


# Size.


def test_large_plans_are_made_at_once() -> None:
    # Process time: other work on the machine must not make this red.
    start = time.process_time()
    plan = make_plan(range(0, 700_001, 10), 8)
    assert len(plan.segments(3)) == 8750
    assert time.process_time() - start < 1
    start = time.process_time()
    plan = make_plan((0, 1_000_000), 1024, layout="zigzag")
    assert sum(len(plan.transition_sends(5, target, True)) for target in range(1024)) > 0
    assert plan.state_slots(True) == 2
    assert time.process_time() - start < 1
