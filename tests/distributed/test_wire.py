"""What a call sends is what the plan says: bytes read off the TCP connections of every rank."""

import sys

import pytest
import torch
import torch.distributed as dist

from kda_cp import build_cp_context, chunk_kda_cp, shard
from kda_cp.comm.plan import make_plan
from kda_cp.comm.selection import EXCHANGES
from kda_cp.comm.traffic import received_bytes
from kda_cp.testing import wire
from kda_cp.testing.compare import draw_inputs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's TCP_INFO")

SIZES = {"heads": 5, "key_dim": 32, "value_dim": 48}
ONE_HEAD = 32 * 48 * 4  # bytes of the smallest thing that could be sent too much: one head's state
# gloo's own words around its messages, and the barriers: less than that.
OVERHEAD = ONE_HEAD // 2

BATCHES = {
    "one document": ([0, 130], {}),
    "one document, zigzag": ([0, 130], {"layout": "zigzag"}),
    "documents": ([0, 37, 90, 130], {}),
    "documents, zigzag": ([0, 37, 90, 130], {"layout": "zigzag"}),
    "an empty rank and shuffled fragments": (
        [0, 130],
        {"fragments": [[(90, 130), (0, 10)], [], [(10, 40)], [(40, 90)]]},
    ),
    "nothing crosses": ([0, 50, 100], {"fragments": [[(0, 50)], [(50, 100)], [], []]}),
}


def bytes_of_a_call(group, exchange, cu_seqlens, layout, training):
    """Bytes received in the forward and in the backward, between barriers."""
    context = build_cp_context(cu_seqlens, group, exchange=exchange, check="off", **layout)
    inputs = draw_inputs(cu_seqlens[-1], H=1, HV=5, K=32, V=48)
    local = {name: shard(x, context).requires_grad_(training) for name, x in inputs.items()}
    received = []

    def measure(step):
        dist.barrier(group)
        before = wire.received_bytes()
        dist.barrier(group)
        result = step()
        dist.barrier(group)
        received.append(wire.received_bytes() - before)
        return result

    with torch.set_grad_enabled(training):
        o, _ = measure(lambda: chunk_kda_cp(**local, cp_context=context))
        if training:
            measure(lambda: o.sum().backward())
    return received


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", BATCHES)
def test_every_rank_receives_the_bytes_of_the_plan(ranks, exchange, name, training):
    cu_seqlens, layout = BATCHES[name]
    plan = make_plan(cu_seqlens, 4, **layout)
    results = ranks.run(bytes_of_a_call, exchange, cu_seqlens, layout, training, ranks=4)
    for rank, received in enumerate(results):
        traffic = received_bytes(plan, exchange, rank, training=training, **SIZES)
        expected = [traffic.forward, traffic.backward][: len(received)]
        for got, want in zip(received, expected, strict=True):
            assert want <= got < want + OVERHEAD, (rank, received, expected)


def test_the_algorithms_differ_as_they_should(ranks):
    """One document over 4 ranks: the ring receives one state, the all-gather every map."""
    totals = {
        exchange: ranks.run(bytes_of_a_call, exchange, [0, 130], {}, True, ranks=4)
        for exchange in EXCHANGES
    }
    last = {exchange: received[3][0] for exchange, received in totals.items()}
    assert last["ring"] < last["all_to_all"] < last["all_gather"]


def test_the_reading_sees_what_is_sent(ranks):
    sizes = [0, 1000, 100_000]
    for got in ranks.run(bytes_of_broadcasts, sizes, ranks=2)[1:]:
        assert [round(n, -3) for n in got] == sizes


def bytes_of_broadcasts(group, sizes):
    received = []
    for size in sizes:
        dist.barrier(group)
        before = wire.received_bytes()
        dist.barrier(group)
        if size:
            dist.broadcast(torch.zeros(size, dtype=torch.uint8), group_src=0, group=group)
        dist.barrier(group)
        received.append(wire.received_bytes() - before)
    return received
