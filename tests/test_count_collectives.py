"""`count_collectives`: every call counts once, with its size, and the block leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from kda_cp.testing.collectives import count_collectives
from kda_cp.testing.ranks import RankPool

F, B = "float32", "bfloat16"


def call_each(group: dist.ProcessGroup) -> list[tuple[Any, ...]]:
    """Issue every function once on two ranks; return what was counted."""
    me = dist.get_rank(group)
    other = 1 - me
    x = torch.ones(6)
    half = torch.ones(4, dtype=torch.bfloat16)
    before = {name: getattr(dist, name) for name in ("all_reduce", "isend", "barrier")}
    with count_collectives() as counts:
        dist.all_gather_into_tensor(torch.empty(12), x, group=group)
        dist.all_gather([torch.empty(6), torch.empty(6)], x, group=group)
        dist.all_to_all_single(output=torch.empty(6), input=x, group=group)
        dist.all_reduce(x, group=group)
        dist.reduce_scatter_tensor(torch.empty(3), x, group=group)
        dist.broadcast(half, group_src=0, group=group)
        if me == 0:
            dist.send(half, group_dst=other, group=group)
            dist.recv(half, group_src=other, group=group)
        else:
            dist.recv(half, group_src=other, group=group)
            dist.send(half, group_dst=other, group=group)
        works = [
            dist.isend(x, group_dst=other, group=group),
            dist.irecv(torch.empty(6), group_src=other, group=group),
        ]
        for work in works:
            work.wait()
        operations = [
            dist.P2POp(dist.isend, x, group=group, group_peer=other),
            dist.P2POp(dist.irecv, torch.empty(6), group=group, group_peer=other),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        dist.all_gather_object([None, None], "text", group=group)
        dist.barrier(group)
    dist.all_reduce(x, group=group)  # after the block
    assert before == {name: getattr(dist, name) for name in before}, "not undone"
    assert counts.bytes_sent == sum(call.bytes_sent for call in counts.calls)
    return [
        (c.name, c.numel_sent, c.bytes_sent, c.numel_received, c.bytes_received)
        for c in counts.calls
    ]


def test_each_call_counts_once_with_its_size(ranks: RankPool) -> None:
    first, second = ranks.run(call_each, ranks=2)
    send, receive = ("send", 4, 8, 0, 0), ("recv", 0, 0, 4, 8)
    assert first == [
        ("all_gather_into_tensor", 6, 24, 12, 48),
        ("all_gather", 6, 24, 12, 48),
        ("all_to_all_single", 6, 24, 6, 24),
        ("all_reduce", 6, 24, 6, 24),
        ("reduce_scatter_tensor", 6, 24, 3, 12),
        ("broadcast", 4, 8, 4, 8),
        send,
        receive,
        ("isend", 6, 24, 0, 0),
        ("irecv", 0, 0, 6, 24),
        ("batch_isend_irecv", 6, 24, 6, 24),
        ("all_gather_object", 0, 0, 0, 0),
        ("barrier", 0, 0, 0, 0),
    ]
    assert second == [*first[:6], receive, send, *first[8:]]


def test_an_exception_undoes_the_counting() -> None:
    before = dist.all_reduce
    with pytest.raises(KeyError), count_collectives():
        assert dist.all_reduce is not before
        raise KeyError
    assert dist.all_reduce is before
