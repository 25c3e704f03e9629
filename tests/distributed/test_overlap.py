"""While states travel, a call does what needs none: a delayed exchange costs less than its delay.

Time is counted, not measured: a walk takes as long as it has chunks and heads, and what a rank
receives is there a given delay after it began to receive.
"""

import pytest
import torch

from kda_cp import build_cp_context, chunk_kda_cp, eager, shard
from kda_cp.comm import collectives
from kda_cp.comm.ring import RingExchange
from kda_cp.testing.compare import draw_inputs

HEADS = 4


class CountedTime:
    """Replaces walks and messages by ones that also count their time."""

    def __init__(self, delay):
        self.now = 0.0
        self.delay = delay

    def __enter__(self):
        self.saved = {n: getattr(eager, n) for n in ("walk_state", "walk_maps", "walk_state_back")}
        for name, walk in self.saved.items():
            setattr(eager, name, self.slow(walk))
        self.work = collectives.Work.__init__, collectives.Work.wait
        init, wait = self.work

        def start(work, group, handles, received, sent):
            init(work, group, handles, received, sent)
            sends_alone = isinstance(received(), list) and not received()  # a hop of a ring
            work.arrives = self.now + (0 if sends_alone else self.delay)

        def arrive(work):
            self.now = max(self.now, work.arrives)
            return wait(work)

        collectives.Work.__init__, collectives.Work.wait = start, arrive
        return self

    def __exit__(self, *exception):
        collectives.Work.__init__, collectives.Work.wait = self.work
        for name, walk in self.saved.items():
            setattr(eager, name, walk)

    def slow(self, walk):
        def walked(of, terms, *arguments, **keywords):
            self.now += sum(chunks.numel() for chunks in of.steps) * terms.w.shape[1]
            return walk(of, terms, *arguments, **keywords)

        return walked


def time_of_passes(group, exchange, cu_seqlens, delay, parts):
    """Counted time of a forward and of its backward on this rank."""
    if parts is not None:
        RingExchange.parts = parts
    try:
        context = build_cp_context(cu_seqlens, group, exchange=exchange, check="off")
        inputs = draw_inputs(cu_seqlens[-1], H=HEADS, K=16)
        local = {name: shard(x, context).requires_grad_() for name, x in inputs.items()}
        with CountedTime(delay) as time:
            o, _ = chunk_kda_cp(**local, cp_context=context, chunk_size=16)
            forward, time.now = time.now, 0.0
            o.sum().backward()
        return forward, time.now
    finally:
        RingExchange.parts = 4


def costs(ranks, exchange, cu_seqlens, delay, parts=None):
    """What the delay costs each of three ranks, forward and backward."""
    slow, quick = (
        torch.tensor(ranks.run(time_of_passes, exchange, cu_seqlens, d, parts, ranks=3))
        for d in (delay, 0)
    )
    return slow - quick


# Each rank holds 320 tokens: the end of one document, one of its own, and the start of another.
DOCUMENTS = [0, 304, 336, 624, 656, 960]
OWN = 288 // 16 * HEADS  # time of the walk of the middle rank's own document


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
def test_documents_of_a_rank_hide_the_exchange(ranks, exchange):
    assert torch.equal(costs(ranks, exchange, DOCUMENTS, OWN), torch.zeros(3, 2))


def test_the_first_of_two_messages_is_hidden(ranks):
    """Rank j folds when the maps are there; what it sends back then, nobody has work left for."""
    assert torch.equal(costs(ranks, "all_to_all", DOCUMENTS, OWN), torch.full((3, 2), OWN))


def test_a_longer_delay_costs_what_the_work_leaves_of_it(ranks):
    cost = costs(ranks, "all_gather", DOCUMENTS, 3 * OWN)
    assert ((cost > 0) & (cost <= 2 * OWN)).all()
    # The middle rank also walks the chunk of 16 tokens that starts (backward: ends) a document.
    assert cost[1].tolist() == [2 * OWN - HEADS] * 2


ONE_DOCUMENT = [0, 960]
PART = 320 // 16  # time of one walk of a shard's chunks for one head, a part of four


def test_other_heads_hide_the_hops_of_a_ring(ranks):
    """One document leaves the middle rank nothing of its own; the maps of other heads are there."""
    delay = 3 * PART
    assert costs(ranks, "ring", ONE_DOCUMENT, delay)[1].tolist() == [0, 0]
    whole = costs(ranks, "ring", ONE_DOCUMENT, delay, parts=1)
    assert whole[1].tolist() == [delay, delay]
