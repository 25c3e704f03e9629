"""What a call communicates and holds: nothing needless, the plan's bytes, 1/P of the memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kda_cp import build_cp_context, chunk_kda_cp, eager, shard
from kda_cp.comm.traffic import received_bytes
from kda_cp.testing.collectives import count_collectives
from kda_cp.testing.memory import peak_allocated_bytes
from kda_cp.testing.sharded import TRAINING_OPTIONS, ShardedCall

DRAW = {"H": 1, "HV": 2, "K": 16, "V": 24, "raw_gate": True, "A_log": True}
HV, K, V = 2, 16, 24


def collectives(ranks, P, cu_seqlens, **layout):
    call = ShardedCall(cu_seqlens, layout, DRAW, TRAINING_OPTIONS)
    answers = ranks.run(call, ranks=P)
    kinds = {"all_gather_single": "gather", "all_gather_into_tensor": "gather"}
    return (
        call.plan(P),
        [
            [
                [kinds.get(c.name, c.name) for c in calls]
                for calls in (answer.forward, answer.backward)
            ]
            for answer in answers
        ],
        answers,
    )


def test_none_where_no_sequence_crosses_ranks(ranks):
    for layout in ({}, {"fragments": [[(0, 16)], [(32, 48), (16, 32)], [(48, 64)]]}):
        _, kinds, _ = (
            collectives(ranks, 3, [0, 16, 32, 48, 64], **layout)
            if layout
            else (collectives(ranks, 4, [0, 16, 32, 48, 64]))
        )
        assert all(kind == [[], []] for kind in kinds)


def test_two_contiguous_ranks_exchange_states_alone(ranks):
    _, kinds, answers = collectives(ranks, 2, [0, 64])
    assert kinds == [[["gather"], ["gather"]]] * 2
    for answer in answers:
        assert answer.forward[0].bytes_sent == 4 * HV * K * V


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_transitions_go_forward_once_and_never_back(ranks, layout):
    _, kinds, _ = collectives(ranks, 4, [0, 200], layout=layout)
    assert kinds == [[["gather", "all_to_all_single"], ["gather"]]] * 4


@pytest.mark.parametrize("P", [2, 3, 4])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_bytes_received_are_the_plan_s(ranks, P, layout):
    plan, _, answers = collectives(ranks, P, [0, 37, 200], layout=layout)
    for rank, answer in enumerate(answers):
        traffic = received_bytes(plan, "all_gather", rank, heads=HV, key_dim=K, value_dim=V)
        # An all-gather's output holds this rank's own block as well, which nobody sent.
        own = [
            sum(c.bytes_sent for c in calls if "gather" in c.name)
            for calls in (answer.forward, answer.backward)
        ]
        received = [
            sum(c.bytes_received for c in calls) for calls in (answer.forward, answer.backward)
        ]
        assert received[0] - own[0] == traffic.forward
        assert received[1] - own[1] == traffic.backward


@pytest.mark.parametrize(("heads", "parts"), [(1, 1), (2, 2), (4, 4), (6, 4)])
def test_a_ring_passes_the_heads_in_at_most_four_parts(ranks, heads, parts):
    draw = {"H": 1, "HV": heads, "K": 16, "V": 16}
    call = ShardedCall([0, 60], {}, draw, {}, exchange="ring")
    for rank, answer in enumerate(ranks.run(call, ranks=3)):
        hops = parts * (2 if rank == 1 else 1)
        assert [len(answer.forward), len(answer.backward)] == [hops, hops]


def bytes_of_inference(group):
    context = build_cp_context([0, 37, 200], group)
    inputs, _ = ShardedCall([0, 37, 200], draw=DRAW, states=False).draw_global(context.size)
    local = {n: shard(x, context) if n != "A_log" else x for n, x in inputs.items()}
    with torch.no_grad(), count_collectives() as counts:
        chunk_kda_cp(**local, cp_context=context, **TRAINING_OPTIONS)
    own = sum(c.bytes_sent for c in counts.calls if "gather" in c.name)
    return counts.bytes_received - own


def test_without_a_backward_to_come_transitions_go_to_later_ranks_alone(ranks):
    plan = ShardedCall([0, 37, 200]).plan(4)
    for rank, received in enumerate(ranks.run(bytes_of_inference, ranks=4)):
        sizes = {"heads": HV, "key_dim": K, "value_dim": V}
        assert received == received_bytes(plan, "all_gather", rank, training=False, **sizes).forward


def step(context, tokens, K=16):
    shape = (1, tokens, 2, K)
    q, k, v, g = (torch.randn(shape).requires_grad_() for _ in range(4))
    beta = torch.rand(shape[:3]).requires_grad_()
    o, _ = chunk_kda_cp(q, k, v, -g.exp(), beta, context, use_qk_l2norm_in_kernel=True)
    o.sum().backward()


def peak_of_a_step(group, tokens):
    # Slabs of chunks bound the temporaries by a constant; small ones leave what grows with T.
    eager.SLAB_ELEMENTS, before = 2**15, eager.SLAB_ELEMENTS
    try:
        context = build_cp_context([0, tokens], group)
        step(context, context.num_tokens)  # index tables and lazily made buffers
        return peak_allocated_bytes(lambda: step(context, context.num_tokens))
    finally:
        eager.SLAB_ELEMENTS = before


def test_a_rank_needs_the_memory_of_its_share_and_the_states_it_exchanges(ranks):
    """So at a fixed global length, memory falls as 1/P but for the slab's constant."""
    tokens, P, heads, K = 2048, 4, 2, 16
    whole = ranks.run(peak_of_a_step, tokens, ranks=1)[0]
    share = ranks.run(peak_of_a_step, tokens // P, ranks=1)[0]
    shared = ranks.run(peak_of_a_step, tokens, ranks=P)
    # All ranks' b and A and this rank's own, each held at most twice while it is sent or stacked.
    states = 2 * 2 * P * heads * (K * K + K * K) * 4
    assert max(shared) <= share + states
    assert share < whole / 2.5


class LongestDimension(TorchDispatchMode):
    """The most elements along any dimension of any tensor made under the mode."""

    longest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.longest = max(self.longest, *x.shape, 0)
        return result


def longest_dimension(group, tokens):
    context = build_cp_context([0, tokens], group)
    with LongestDimension() as mode:
        step(context, context.num_tokens)
    return mode.longest


def test_no_tensor_of_global_length(ranks):
    tokens = 16384
    assert ranks.run(longest_dimension, tokens, ranks=1)[0] >= tokens  # the mode sees them
    # A dimension may run over tokens and the two heads.
    assert max(ranks.run(longest_dimension, tokens, ranks=4)) <= 2 * tokens // 4
