"""`kda_cp.testing.ranks`: results come by rank, and every way a rank can fail is told by name."""

from __future__ import annotations

import os
import signal
import time
import types

import pytest
import torch
import torch.distributed as dist

from kda_cp.testing.ranks import RankError, RankPool

BASE = 100


def module_level_helper(rank: int) -> int:
    return BASE + rank


def rank_and_sum(group: dist.ProcessGroup, factor: int) -> tuple[int, int, int]:
    """(rank, size, sum over ranks of factor * 2^(worker)); the sum tells who took part."""
    total = torch.tensor([factor * 2 ** dist.get_rank()])
    dist.all_reduce(total, group=group)
    return dist.get_rank(group), dist.get_world_size(group), int(total.item())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_by_rank(ranks: RankPool, size: int) -> None:
    expected = [(rank, size, 3 * (2**size - 1)) for rank in range(size)]
    assert ranks.run(rank_and_sum, 3, ranks=size) == expected


@pytest.mark.parametrize("members", [[0, 2], [1, 3], [2], [1, 2, 3]])
def test_members_form_the_group(ranks: RankPool, members: list[int]) -> None:
    total = sum(2**worker for worker in members)
    expected = [(rank, len(members), total) for rank in range(len(members))]
    assert ranks.run(rank_and_sum, 1, members=members) == expected


def test_groups_run_at_the_same_time(own_ranks: RankPool) -> None:
    def meet_everyone(group: dist.ProcessGroup) -> tuple[int, int, int]:
        # Passes only if the workers of all groups are in their call together: all are of the world,
        # which in a pool of its own has these four workers and no more.
        dist.barrier()
        return rank_and_sum(group, 1)

    for groups in [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 3], [2]]]:
        expected = [
            [(rank, len(group), sum(2**worker for worker in group)) for rank in range(len(group))]
            for group in groups
        ]
        assert own_ranks.run_groups(meet_everyone, groups) == expected


def test_a_call_sees_its_modules_names_and_its_own_arguments(ranks: RankPool) -> None:
    captured = 7

    def work(group: dist.ProcessGroup, common: str, own: int) -> tuple[int, str, int, int]:
        return module_level_helper(dist.get_rank(group)), common, own, captured

    assert ranks.run(work, "x", ranks=2, per_rank=[(10,), (20,)]) == [
        (100, "x", 10, 7),
        (101, "x", 20, 7),
    ]


def test_tensors_are_sent_by_value(ranks: RankPool) -> None:
    def work(group: dist.ProcessGroup, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x.add_(dist.get_rank(group)), torch.get_num_threads()

    x = torch.arange(5, dtype=torch.bfloat16)
    results = ranks.run(work, x, ranks=2)
    assert torch.equal(x, torch.arange(5, dtype=torch.bfloat16))
    assert torch.equal(results[0][0], x) and torch.equal(results[1][0], x + 1)
    assert [threads for _, threads in results] == [1, 1]


def test_an_exception_names_its_rank(ranks: RankPool) -> None:
    def work(group: dist.ProcessGroup) -> None:
        if dist.get_rank(group) == 1:
            raise KeyError("the reason")
        dist.barrier(group)  # waits for the rank that never comes

    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 raised KeyError: 'the reason'") as caught:
        ranks.run(work, ranks=2)
    assert caught.value.ranks == (1,)
    assert 'raise KeyError("the reason")' in str(caught.value), "the traceback is missing"
    assert __file__ in str(caught.value)
    assert time.monotonic() - start < 30, "the other rank was waited for"
    assert ranks.run(rank_and_sum, 1, ranks=2) == [(0, 2, 3), (1, 2, 3)]


def test_an_exception_on_all_ranks_keeps_the_workers(ranks: RankPool) -> None:
    def work(group: dist.ProcessGroup) -> None:
        raise ValueError("everywhere")

    def process_id(group: dist.ProcessGroup) -> int:
        return os.getpid()

    before = ranks.run(process_id, ranks=2)
    with pytest.raises(RankError, match="everywhere"):
        ranks.run(work, ranks=2)
    assert ranks.run(process_id, ranks=2) == before


def test_a_failure_in_a_group_names_rank_and_worker(ranks: RankPool) -> None:
    def work(group: dist.ProcessGroup) -> None:
        if dist.get_rank() == 3:
            raise ValueError("here")

    with pytest.raises(RankError, match=r"rank 1 \(worker 3\) of \[1, 3\] raised ValueError: here"):
        ranks.run_groups(work, [[0, 2], [1, 3]])


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_dead_rank_is_named(ranks: RankPool, how: str) -> None:
    def work(group: dist.ProcessGroup, how: str) -> None:
        dist.barrier(group)
        if dist.get_rank(group) == 2:
            if how == "exit":
                os._exit(5)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier(group)

    start = time.monotonic()
    expected = {"exit": r"rank 2 died \(exit code 5\)", "kill": r"rank 2 died \(exit code -9\)"}
    with pytest.raises(RankError, match=expected[how]) as caught:
        ranks.run(work, how, ranks=3)
    assert caught.value.ranks == (2,)
    assert time.monotonic() - start < 60
    assert ranks.run(rank_and_sum, 1, ranks=3) == [(rank, 3, 7) for rank in range(3)]


def test_a_hanging_rank_is_named_and_shows_where_it_is(ranks: RankPool) -> None:
    def hang_in_here() -> None:
        time.sleep(600)

    def work(group: dist.ProcessGroup) -> None:
        if dist.get_rank(group) == 1:
            hang_in_here()

    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 did not answer within 5 s") as caught:
        ranks.run(work, ranks=3, timeout=5)
    assert caught.value.ranks == (1,)
    assert "hang_in_here" in str(caught.value) and __file__ in str(caught.value)
    assert time.monotonic() - start < 30
    assert ranks.run(rank_and_sum, 1, ranks=3) == [(rank, 3, 7) for rank in range(3)]


def test_an_interrupted_call_leaves_nothing_behind(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    waiting = types.SimpleNamespace(wait=interrupt)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("kda_cp.testing.ranks.connection", waiting)
        ranks.run(rank_and_sum, 1, ranks=2)
    assert ranks.run(rank_and_sum, 5, ranks=2) == [(0, 2, 15), (1, 2, 15)]


def test_wrong_requests_are_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="either ranks or members"):
        ranks.run(rank_and_sum, 1)
    with pytest.raises(ValueError, match="below the pool's size 8"):
        ranks.run(rank_and_sum, 1, members=[0, 8])
    with pytest.raises(ValueError, match="disjoint"):
        ranks.run_groups(rank_and_sum, [[0, 1], [1, 2]], 1)
    with pytest.raises(ValueError, match="ascending"):
        ranks.run(rank_and_sum, 1, members=[1, 0])
    with pytest.raises(ValueError, match="per_rank of length 2"):
        ranks.run(rank_and_sum, ranks=2, per_rank=[(1,)])
