"""What the ranks make of their reports: which error, whom it names, and what counts as right."""

import gc
import os
import sys

import pytest
import torch
import torch.distributed as dist

from kda_cp.comm import agreement
from kda_cp.comm.agreement import Report, agreement_of, find_disagreement
from kda_cp.comm.collectives import SideGroup


def report(claim=None, error=None):
    return Report(
        claim or {},
        kind=None if error is None else type(error).__name__,
        text=None if error is None else str(error),
        node="",
    )


def test_equal_claims_are_no_disagreement():
    assert find_disagreement([report({"q": "a", "v": "b"})] * 5) is None
    assert find_disagreement([report({})]) is None


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ("aab", "rank 2: q: expected a, as on ranks 0, 1, got b"),
        ("baa", "rank 0: q: expected a, as on ranks 1, 2, got b"),  # most ranks are right
        ("ab", "rank 1: q: expected a, as on rank 0, got b"),  # of equals the lowest
        ("abbaa", "rank 1: q: expected a, as on ranks 0, 3, 4, got b"),
        ("a" * 11 + "b", "rank 11: q: expected a, as on ranks 0, 1, 2, 3, 4, 5, 6, 7, ..., got b"),
    ],
)
def test_the_odd_one_is_named(values, text):
    error = find_disagreement([report({"k": "same", "q": value}) for value in values])
    assert type(error) is ValueError and str(error) == text


def test_a_missing_argument_is_named():
    error = find_disagreement(
        [report({"q": "a"}), report({"q": "a", "x": "b"}), report({"q": "a"})]
    )
    assert str(error) == "rank 1: x: expected nothing, as on ranks 0, 2, got b"


def test_an_error_comes_before_a_difference():
    reports = [report({"q": "a"}), report({}, ValueError("v: bad")), report({"q": "b"})]
    assert str(find_disagreement(reports)) == "rank 1: v: bad"


def test_ranks_with_the_same_error_are_named_together():
    bad, worse = report({}, ValueError("v: bad")), report({}, ValueError("v: worse"))
    assert str(find_disagreement([bad, bad])) == "every rank: v: bad"
    assert str(find_disagreement([worse, bad, worse])) == "ranks 0, 2: v: worse"


def test_what_nothing_serves_stays_that_kind_of_error():
    reports = [report({}), report({}, NotImplementedError("impl: not yet"))]
    error = find_disagreement(reports)
    assert type(error) is NotImplementedError and str(error) == "rank 1: impl: not yet"


def side_group_answers(group):
    side = SideGroup(group)
    rank, size = group.rank(), group.size()
    maxima = [
        side.maximum(torch.tensor([place == rank, -rank, rank])).tolist() for place in range(size)
    ]
    texts = [side.gather("x" * rank), side.gather(""), side.gather("größer" if rank else "")]
    return maxima, texts


@pytest.mark.parametrize("P", [1, 2, 3, 5, 8])
def test_messages_between_hosts_reach_every_rank(ranks, P):
    for maxima, texts in ranks.run(side_group_answers, ranks=P):
        assert maxima == [[1, 0, P - 1]] * P  # whichever rank alone has the 1
        assert texts == [["x" * r for r in range(P)], [""] * P, ["", *["größer"] * (P - 1)]]


def test_fingerprints_tell_claims_apart():
    claims = [{"a": "x", "b": "y"}, {"a": "y", "b": "x"}, {"a": "xb"}, {"ab": "x"}, {}]
    claims += [{"a": str(n)} for n in range(10_000)]
    prints = {agreement._fingerprint(claim) for claim in claims}
    assert len(prints) == len(claims) and all(0 <= number < 2**56 for number in prints)


def made_once(group):
    connected = []
    agreement.connect, connect = connected.append, agreement.connect
    try:
        first = agreement_of(group)
        return agreement_of(group) is first, len(connected)
    finally:
        agreement.connect = connect


def test_a_group_has_one_agreement_and_is_connected_once(own_ranks):
    assert own_ranks.run(made_once, ranks=2) == [(True, 1)] * 2


def threads_after_each_of_many_groups(group):
    counts = []
    for _ in range(4):
        own = dist.new_group([0, 1])
        agreement_of(own)
        dist.destroy_process_group(own)
        del own
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_an_agreement_ends_with_its_group(own_ranks):
    for counts in own_ranks.run(threads_after_each_of_many_groups, ranks=2):
        assert counts[-1] <= counts[0]


def checks(group):
    agreement = agreement_of(group)
    one = group.rank() == 1
    return [
        agreement.check({"q": "a"}, None, wants_gradient=False),
        agreement.check({"q": "a"}, None, wants_gradient=one),
        agreement.check({"q": "a"}, None, wants_gradient=True),
    ]


def test_a_gradient_wanted_on_one_rank_is_wanted(ranks):
    assert ranks.run(checks, ranks=3) == [[False, True, True]] * 3
