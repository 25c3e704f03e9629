"""Every exchange gives a fragment the fold of all maps before it, and its adjoint, on gloo ranks.

The judge folds the maps of one sequence one after the other in one process.
"""

import pytest
import torch

from kda_cp.comm import affine
from kda_cp.comm.exchange import Pending, Transitions
from kda_cp.comm.plan import make_plan
from kda_cp.comm.selection import EXCHANGES
from kda_cp.testing.collectives import count_collectives

B, HV, K, V = 2, 3, 4, 5

LAYOUTS = {
    "one sequence, 2 ranks": ([0, 40], 2, {}),
    "one sequence, 4 ranks": ([0, 41], 4, {}),
    "zigzag, 3 ranks": ([0, 50], 3, {"layout": "zigzag"}),
    "documents, zigzag, 4 ranks": ([0, 3, 30, 31, 64], 4, {"layout": "zigzag"}),
    "documents, 4 ranks": ([0, 37, 88, 128], 4, {"num_tokens": 130}),
    "more ranks than tokens": ([0, 1, 3], 4, {}),
    "edge on a document": ([0, 16, 32], 2, {}),
    "shuffled fragments": (
        [0, 5, 40],
        3,
        {"fragments": [[(30, 40), (0, 8)], [], [(20, 30), (8, 11), (11, 20)]]},
    ),
    "both neighbours at home": ([0, 30], 2, {"fragments": [[(10, 20), (0, 10)], [(20, 30)]]}),
}


def draw_maps(plan, seed):
    """For every fragment b, A and c: alike on every rank, different everywhere."""
    torch.manual_seed(seed)

    def draw(*tail):
        return torch.randn(len(plan.fragments), B, HV, *tail, dtype=torch.float64)

    return draw(K, V), draw(K, K), draw(K, V)


def exchange_both_ways(group, algorithm, cu_seqlens, ranks, options):
    rank = group.rank()
    plan = make_plan(cu_seqlens, ranks, **options)
    b, A, c = draw_maps(plan, seed=5)

    def pick(x, fragments):
        return x[[f.index for f in fragments]]

    exchange = EXCHANGES[algorithm](plan, rank, group)
    with count_collectives() as forward:
        entry, kept = exchange.start_entry(
            pick(b, plan.exited(rank)), pick(A, plan.full(rank)), True, affine.apply
        ).wait()
    with count_collectives() as backward:
        dexit = exchange.start_exit_gradient(
            pick(c, plan.entered(rank)), kept, affine.apply_adjoint
        ).wait()
        exchange.finish_sending()
    return entry, dexit, forward.by_name, backward.by_name, forward.bytes_sent, backward.bytes_sent


@pytest.mark.parametrize("algorithm", EXCHANGES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_entry_states_and_exit_gradients_equal_the_serial_fold(ranks, name, algorithm):
    cu_seqlens, P, options = LAYOUTS[name]
    plan = make_plan(cu_seqlens, P, **options)
    b, A, c = draw_maps(plan, seed=5)
    entry, dexit = {}, {}
    for f in plan.fragments:  # global order
        if f.exits is not None:
            state = b[f.index]
            if f.full:
                state = A[f.index] @ entry[f.index] + state
            entry[f.index + 1] = state
    for f in reversed(plan.fragments):
        if f.enters is not None:
            gradient = c[f.index]
            if f.full:
                gradient = A[f.index].mT @ dexit[f.index] + gradient
            dexit[f.index - 1] = gradient

    results = ranks.run(exchange_both_ways, algorithm, cu_seqlens, P, options, ranks=P)
    for rank, (got_entry, got_dexit, *_) in enumerate(results):
        entered, exited = plan.entered(rank), plan.exited(rank)
        assert len(got_entry) == len(entered) and len(got_dexit) == len(exited)
        for slot, f in enumerate(entered):
            torch.testing.assert_close(got_entry[slot], entry[f.index], rtol=1e-12, atol=1e-12)
        for slot, f in enumerate(exited):
            torch.testing.assert_close(got_dexit[slot], dexit[f.index], rtol=1e-12, atol=1e-12)


GATHER, SEND, HOP = "all_gather", "all_to_all", "hop"


@pytest.mark.parametrize(
    ("name", "algorithm", "forward", "backward"),
    [
        ("one sequence, 2 ranks", "all_gather", [GATHER], [GATHER]),  # nobody needs an A
        ("one sequence, 4 ranks", "all_gather", [GATHER, SEND], [GATHER]),  # which keeps the A
        ("documents, 4 ranks", "all_gather", [GATHER], [GATHER]),  # no document spans a shard
        ("one sequence, 4 ranks", "all_to_all", [SEND, SEND], [SEND, SEND]),
        *[("edge on a document", algorithm, [], []) for algorithm in EXCHANGES],
    ],
)
def test_collectives_are_those_that_somebody_needs(ranks, name, algorithm, forward, backward):
    cu_seqlens, P, options = LAYOUTS[name]
    for result in ranks.run(exchange_both_ways, algorithm, cu_seqlens, P, options, ranks=P):
        kinds = [sorted(kind_of(c) for c in calls.elements()) for calls in result[2:4]]
        assert kinds == [sorted(forward), sorted(backward)]


def test_a_rank_takes_part_in_its_own_hops_of_a_ring_alone(ranks):
    cu_seqlens, P, options = LAYOUTS["one sequence, 4 ranks"]
    results = ranks.run(exchange_both_ways, "ring", cu_seqlens, P, options, ranks=P)
    for _, _, forward, backward, *_ in results:
        assert forward == backward and {kind_of(c) for c in forward} == {HOP}
    assert [sum(result[2].values()) for result in results] == [1, 2, 2, 1]


def count_folds(group, algorithm):
    """Folds of one sequence over the ranks, forward and backward."""
    rank, P = group.rank(), group.size()
    plan = make_plan([0, 8 * P], P)
    b, A, c = draw_maps(plan, seed=5)
    exchange = EXCHANGES[algorithm](plan, rank, group)
    counts = [0, 0]

    def counted(direction, step):
        def fold(*arguments):
            counts[direction] += 1
            return step(*arguments)

        return fold

    own = [[f.index for f in fragments(rank)] for fragments in (plan.exited, plan.full)]
    pending = exchange.start_entry(b[own[0]], A[own[1]], True, counted(0, affine.apply))
    _, kept = pending.wait()
    c = c[[f.index for f in plan.entered(rank)]]
    exchange.start_exit_gradient(c, kept, counted(1, affine.apply_adjoint)).wait()
    exchange.finish_sending()
    return counts


def test_no_step_of_a_fold_is_done_twice(ranks):
    P = 6
    for rank, counts in enumerate(ranks.run(count_folds, "all_to_all", ranks=P)):
        assert counts == [P - 2, P - 2]  # of its heads, all of the chain
        gather = ranks.run(count_folds, "all_gather", ranks=P)[rank]
        assert gather == [max(rank - 1, 0), max(P - rank - 2, 0)]
    inner = [1] * (P - 2)
    assert [c[0] for c in ranks.run(count_folds, "ring", ranks=P)] == [0, *inner, 0]


def kind_of(collective: str) -> str:
    if collective == "batch_isend_irecv":
        return HOP
    return SEND if collective.startswith("all_to_all") else GATHER


def test_inference_sends_fewer_transitions_than_training(ranks):
    cu_seqlens, P, options = LAYOUTS["one sequence, 4 ranks"]
    training = ranks.run(exchange_both_ways, "all_gather", cu_seqlens, P, options, ranks=P)
    # Rank 1's A serves ranks 2 and 3 forward, and rank 0 only backward.
    plan = make_plan(cu_seqlens, P, **options)
    assert [len(plan.transition_sends(1, to, False)) for to in range(4)] == [0, 0, 1, 1]
    assert [len(plan.transition_sends(1, to, True)) for to in range(4)] == [1, 0, 1, 1]
    state, transition = 8 * B * HV * K * V, 8 * B * HV * K * K
    assert training[1][4] == state + 3 * transition
    assert training[0][4] == state  # a reset sends no A


def test_waiting_twice_raises():
    pending = Pending(lambda: 1)
    assert pending.wait() == 1
    with pytest.raises(RuntimeError, match="already been waited for"):
        pending.wait()


@pytest.mark.parametrize("algorithm", EXCHANGES)
def test_wrong_slots_raise(algorithm):
    exchange = EXCHANGES[algorithm](make_plan([0, 8], 1), 0, None)
    none = torch.zeros(0, B, HV, K, V)
    with pytest.raises(RuntimeError, match=r"b: expected \[0, B, HV, K"):
        exchange.start_entry(
            torch.zeros(1, B, HV, K, V), torch.zeros(0, B, HV, K, K), True, affine.apply
        )
    with pytest.raises(RuntimeError, match=r"A: expected \[0, B, HV, K"):
        exchange.start_entry(none, torch.zeros(1, B, HV, K, K), True, affine.apply)
    with pytest.raises(RuntimeError, match=r"c: expected \[0, B, HV, K"):
        kept = Transitions((), torch.zeros(0, B, HV, K, K))
        exchange.start_exit_gradient(torch.zeros(2, B, HV, K, V), kept, affine.apply_adjoint)


@pytest.mark.parametrize("algorithm", EXCHANGES)
def test_several_ranks_without_a_group_raise(algorithm):
    with pytest.raises(ValueError, match="group: expected a group of 2 ranks, got None"):
        EXCHANGES[algorithm](make_plan([0, 8], 2), 0, None)


def test_a_transition_that_was_not_kept_raises():
    kept = Transitions((3,), torch.zeros(1, B, HV, K, K))
    with pytest.raises(RuntimeError, match="transition of fragment 0 was not kept"):
        kept[0]
    with pytest.raises(RuntimeError, match="2 fragments but 1 transitions"):
        Transitions((0, 1), torch.zeros(1, B, HV, K, K))
