"""`kda_cp.testing.threads`: ranks in threads communicate right, fail by name and leave no trace."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from kda_cp.testing import threads
from kda_cp.testing.ranks import RankError
from kda_cp.testing.threads import run_threads

World = Callable[[], AbstractContextManager[None]]
SIZES = pytest.mark.parametrize("size", [5, 64])


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather x [n] into [P, n]."""
    gathered = x.new_empty(dist.get_world_size(group), *x.shape)
    # torch 2.13 gave the collective this name and deprecated the older one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered.flatten(), x, group=group, async_op=True).wait()
    return gathered


def threads_of_ranks() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


@pytest.fixture
def real_world(monkeypatch: pytest.MonkeyPatch) -> World:
    """`with real_world():` this process is the one rank of a world of gloo."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")

    @contextmanager
    def world() -> Iterator[None]:
        # Made of a store in memory, without a port.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()

    return world


@SIZES
def test_results_come_by_rank(size: int) -> None:
    def work(group: dist.ProcessGroup, text: str, number: int) -> tuple[Any, ...]:
        same = isinstance(group, dist.ProcessGroup) and group is dist.group.WORLD
        ranks = (dist.get_rank(), dist.get_rank(group), dist.get_global_rank(group, group.rank()))
        return same, ranks, dist.get_world_size(group), text * number

    assert run_threads(work, "ab", 2, ranks=size) == [
        (True, (rank, rank, rank), size, "abab") for rank in range(size)
    ]


def test_a_rank_begins_with_gradients_and_one_thread() -> None:
    def work(group: dist.ProcessGroup) -> tuple[bool, int]:
        return torch.is_grad_enabled(), torch.get_num_threads()

    with torch.no_grad():
        assert run_threads(work, ranks=3) == [(True, 1)] * 3


@SIZES
def test_collectives_give_what_each_rank_put_in(size: int) -> None:
    arrived: list[int] = []

    def work(group: dist.ProcessGroup) -> tuple[Any, ...]:
        me = dist.get_rank(group)
        gathered = all_gather(torch.tensor([me, me * me]), group)
        total, largest = torch.tensor([me, 1]), torch.tensor([-me, me])
        dist.all_reduce(total, group=group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group, async_op=True).wait()
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": "x" * me}, group=group)
        arrived.append(me)
        dist.barrier(group)
        return gathered.tolist(), total.tolist(), largest.tolist(), objects, len(arrived)

    ranks = range(size)
    expected = (
        [[rank, rank * rank] for rank in ranks],
        [sum(ranks), size],
        [0, size - 1],
        [{"rank": "x" * rank} for rank in ranks],
        size,
    )
    assert run_threads(work, ranks=size) == [expected] * size


@SIZES
def test_an_uneven_all_to_all_moves_each_row_to_its_rank(size: int) -> None:
    def rows(source: int, target: int) -> list[list[int]]:
        return [[source, target, row] for row in range((source + 2 * target) % 3)]

    def work(group: dist.ProcessGroup) -> list[list[int]]:
        me, ranks = dist.get_rank(group), range(size)
        sends, receives = [len(rows(me, r)) for r in ranks], [len(rows(r, me)) for r in ranks]
        sent = torch.tensor([row for r in ranks for row in rows(me, r)]).reshape(-1, 3)
        received = sent.new_empty(sum(receives), 3)
        dist.all_to_all_single(received, sent, receives, sends, group=group, async_op=True).wait()
        return received.tolist()

    assert run_threads(work, ranks=size) == [
        [row for source in range(size) for row in rows(source, me)] for me in range(size)
    ]


@SIZES
def test_messages_go_around_a_ring_in_both_directions(size: int) -> None:
    def work(group: dist.ProcessGroup) -> tuple[float, float]:
        me = dist.get_rank(group)
        left, right = (me - 1) % size, (me + 1) % size
        from_left, from_right = torch.empty(1), torch.empty(2, 1)
        for handle in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, from_left, left, group),
                dist.P2POp(dist.irecv, from_right, right, group),
                dist.P2POp(dist.isend, torch.tensor([me + 0.25]), right, group),
                dist.P2POp(dist.isend, torch.tensor([[me + 0.5], [0.0]]), left, group),
            ]
        ):
            handle.wait()
        return from_left.item(), from_right[0].item()

    assert run_threads(work, ranks=size) == [
        ((me - 1) % size + 0.25, (me + 1) % size + 0.5) for me in range(size)
    ]


def test_messages_between_two_ranks_keep_their_order() -> None:
    def work(group: dist.ProcessGroup) -> list[float]:
        x = torch.zeros(1)
        if dist.get_rank(group) == 0:
            dist.barrier(group)  # the other one has posted what it receives
            for number in range(4):
                x.fill_(number)
                dist.isend(x, 1, group).wait()  # x may be used again at once
            dist.send(x + 1, 1, group)
            return []
        # Posted in one order and waited for in the other: the order of posting is what counts.
        received = [torch.empty(1) for _ in range(5)]
        handles = [dist.irecv(y, 0, group) for y in received[:4]]
        dist.barrier(group)
        for handle in reversed(handles):
            handle.wait()
        received[0] += 0.5
        handles[0].wait()  # again, which fills nothing
        dist.recv(received[4], 0, group)
        return [y.item() for y in received]

    assert run_threads(work, ranks=2)[1] == [0.5, 1, 2, 3, 4]


def test_messages_of_other_tags_and_groups_are_others() -> None:
    def work(group: dist.ProcessGroup) -> list[float]:
        other = dist.new_group([0, 1])
        x = torch.empty(3)
        if dist.get_rank(group) == 0:
            dist.send(torch.tensor([1.0]), 1, group)
            dist.send(torch.tensor([2.0]), 1, group, tag=7)
            dist.send(torch.tensor([3.0]), 1, other)
        elif dist.get_rank(group) == 1:
            dist.recv(x[0:1], 0, other)
            dist.recv(x[1:2], 0, group, tag=7)
            dist.recv(x[2:3], 0, group)
        return x.tolist()

    assert run_threads(work, ranks=3)[1] == [3, 2, 1]


@pytest.mark.parametrize("sent", [torch.zeros(1), torch.zeros(3, dtype=torch.float64)])
def test_a_message_of_another_size_or_type_is_refused(sent: torch.Tensor) -> None:
    def work(group: dist.ProcessGroup) -> None:
        if dist.get_rank(group) == 0:
            dist.send(sent, 1, group)
        else:
            dist.recv(torch.zeros(3), 0, group)

    expected = r"rank 1 raised ValueError: expected a message of 3 elements of torch.float32, got"
    with pytest.raises(RankError, match=expected):
        run_threads(work, ranks=2)


@pytest.mark.parametrize("half", [dist.isend, dist.irecv])
def test_half_of_a_message_is_told_by_name(half: Any) -> None:
    def work(group: dist.ProcessGroup) -> None:
        if dist.get_rank(group) == 1:
            half(torch.zeros(1), 2, group)

    with pytest.raises(RankError, match=r"rank 1 (sent|awaits) what rank 2 did not") as caught:
        run_threads(work, ranks=3)
    assert caught.value.ranks == (1,)


def test_a_store_is_shared_by_the_group() -> None:
    def work(group: dist.ProcessGroup) -> bytes:
        if dist.get_rank(group) == 0:
            group.get_group_store().set("key", "text")
        return group.get_group_store().get("key")

    assert run_threads(work, ranks=3) == [b"text"] * 3


@SIZES
def test_backward_communicates_on_the_thread_of_its_rank(size: int) -> None:
    class Scale(torch.autograd.Function):
        """x times 1; its gradient is that of all ranks, one after the other, times 1 to P."""

        @staticmethod
        def forward(context: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
            context.group, context.thread = group, threading.get_ident()
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            assert threading.get_ident() == context.thread
            gathered = all_gather(gradient.contiguous(), context.group)
            return (torch.arange(1, size + 1)[:, None] * gathered).sum(0), None

    def work(group: dist.ProcessGroup) -> list[float]:
        x = torch.zeros(2, requires_grad=True)
        (Scale.apply(x, group) * torch.tensor([1.0, dist.get_rank(group)])).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    first = sum(rank + 1 for rank in range(size))
    second = sum((rank + 1) * rank for rank in range(size))
    assert run_threads(work, ranks=size) == [[first, second]] * size


def test_a_rank_that_raises_ends_all_and_is_told_by_name() -> None:
    def work(group: dist.ProcessGroup) -> None:
        me = dist.get_rank(group)
        dist.barrier(group)
        if me == 3:
            raise KeyError("the reason")
        if me % 3 == 0:
            dist.recv(torch.zeros(1), 3, group)
        elif me % 3 == 1:
            all_gather(torch.zeros(1), group)
        else:
            while True:  # meets the end of the call when it communicates next
                dist.isend(torch.zeros(1), 3, group)
                time.sleep(0.01)

    with pytest.raises(RankError, match="rank 3 raised KeyError: 'the reason'") as caught:
        run_threads(work, ranks=64)
    assert caught.value.ranks == (3,)
    assert 'raise KeyError("the reason")' in str(caught.value)
    assert threads_of_ranks() == []


def test_a_silent_rank_is_told_and_keeps_out_of_later_calls(
    real_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_GRACE", 1.0)
    release_2, release_3 = threading.Event(), threading.Event()

    def hang(group: dist.ProcessGroup) -> None:
        me = dist.get_rank(group)
        if me == 0:
            dist.recv(torch.zeros(1), 2, group)
        if me == 2:
            release_2.wait()
            dist.barrier(group)
        if me == 3:
            release_3.wait()

    def work(group: dist.ProcessGroup, left_behind: threading.Thread) -> list[list[int]]:
        if dist.get_rank(group) == 0:
            release_2.set()
            left_behind.join(30)
            assert not left_behind.is_alive(), "takes part in a collective of this call"
        return all_gather(torch.tensor([dist.get_rank(group)]), group).tolist()

    try:
        with pytest.raises(RankError, match=r"ranks \[2\] did not answer within 2 s") as caught:
            run_threads(hang, ranks=5, timeout=2)
        assert caught.value.ranks == (0, 2, 3)
        assert "release_2.wait()" in str(caught.value)
        rank_2, rank_3 = threads_of_ranks()
        assert run_threads(work, rank_2, ranks=3) == [[[0], [1], [2]]] * 3
        with real_world():
            release_3.set()
            rank_3.join(30)
            assert not rank_3.is_alive()
            assert dist.is_initialized(), "destroyed what is not its own"
    finally:
        release_2.set()
        release_3.set()
        for thread in threads_of_ranks():
            thread.join(30)


def test_the_process_is_left_as_it_was(real_world: World) -> None:
    def state() -> tuple[Any, ...]:
        return (
            dist.is_initialized(),
            distributed_c10d._world,
            sys.excepthook,
            torch.get_num_threads(),
            torch._C._is_multithreading_enabled(),
            threads_of_ranks(),
        )

    def work(group: dist.ProcessGroup, wrong: bool) -> list[list[int]]:
        if wrong:
            raise KeyError
        return all_gather(torch.tensor([dist.get_rank(group)]), group).tolist()

    torch_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        before = state()
        assert before[3:] == (3, True, [])
        for size in (5, 3):
            assert run_threads(work, False, ranks=size) == [[[rank] for rank in range(size)]] * size
            assert state() == before
        with pytest.raises(RankError):
            run_threads(work, True, ranks=3)
        assert state() == before
    finally:
        torch.set_num_threads(torch_threads)

    resolved = []

    def resolve() -> None:  # as autograd's threads find the group of a functional collective
        resolved.append(distributed_c10d._resolve_process_group(dist.group.WORLD.group_name))

    with real_world():
        x = torch.tensor([3.0])
        dist.all_reduce(x)
        assert (x.item(), dist.get_world_size(), dist.get_backend()) == (3, 1, "gloo")
        with pytest.raises(ValueError, match="initialised in this process already"):
            run_threads(work, False, ranks=2)
        dist.all_reduce(x)
        thread = threading.Thread(target=resolve)
        thread.start()
        thread.join(30)
        assert resolved == [dist.group.WORLD]
        resolved.clear()
    assert run_threads(work, False, ranks=2) == [[[0], [1]]] * 2


def test_calls_that_cannot_be_are_refused() -> None:
    def nest(group: dist.ProcessGroup) -> None:
        run_threads(lambda group: None, ranks=2)

    with pytest.raises(ValueError, match="at least 1, got 0"):
        run_threads(nest, ranks=0)
    with pytest.raises(RankError, match="initialised in this process already"):
        run_threads(nest, ranks=2)
