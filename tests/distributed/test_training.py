"""How training drives the operator over ranks: recomputed, interleaved, accumulated, in any group.

Each call gives the bits it gives alone, with exactly the exchanges that its passes need.
"""

import dataclasses
import random
import weakref
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from kda_cp import build_cp_context, chunk_kda_cp, reduce_gradients, shard, unshard
from kda_cp.comm.selection import EXCHANGES
from kda_cp.testing import compare
from kda_cp.testing.collectives import count_collectives
from kda_cp.testing.compare import assert_bitwise, assert_similar, run_reference
from kda_cp.testing.sharded import PARAMETERS, TOKENS, TRAINING_OPTIONS, ShardedCall

OPTIONS = {**TRAINING_OPTIONS, "lower_bound": -0.05}  # so weak that states cross ranks
DRAW = {"H": 1, "HV": 2, "K": 16, "V": 16, "raw_gate": True, "A_log": True, "dt_bias": True}
CALL = ShardedCall([0, 37, 96], {}, DRAW, OPTIONS)


def context_of(call, group):
    return build_cp_context(call.cu_seqlens, group, exchange=call.exchange, **call.layout)


def start(call, context, **parameters):
    """The forward of a call: its leaves, its results, and the gradients to send back from them."""
    inputs, upstream = call.draw_global(context.size)
    leaves = {n: shard(x, context) if n in TOKENS else x for n, x in inputs.items()}
    leaves = {n: x.requires_grad_() for n, x in leaves.items()} | parameters
    outputs = chunk_kda_cp(**leaves, cp_context=context, output_final_state=True, **call.options)
    upstream["o"] = shard(upstream["o"], context)
    return leaves, dict(zip(("o", "final_state"), outputs, strict=True)), upstream


def finish(leaves, results, upstream):
    """The backward; all results by the names that `ShardedCall` gives them."""
    torch.autograd.backward(list(results.values()), list(upstream.values()))
    grads = {f"d{n}": x.grad for n, x in leaves.items()}
    return {n: x.detach() for n, x in results.items()} | grads


def each_alone(group, calls, name=None):
    return [(of_group(call, name) if name else call)(group) for call in calls]


# Activation checkpointing -------------------------------------------------------------------------

WIDTHS = [16, 16, 32, 32, 2]  # of one token's q, k, v, g and beta
WAYS = [("always", "nothing", None), ("always", "saved elsewhere", None)]
WAYS += [("always", "both layers", True), ("always", "both layers", False)]
WAYS += [(check, "each layer", again) for check in ("always", "off") for again in (True, False)]
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
ALL_TO_ALL, HOP = "all_to_all_single", "batch_isend_irecv"


def layer(x, weight, A_log, context):
    """One projection for all five inputs, the operator, and its heads side by side."""
    *qkvg, beta = (x @ weight).split(WIDTHS, -1)
    qkvg = [part.unflatten(-1, (-1, 16)) for part in qkvg]
    o, _ = chunk_kda_cp(*qkvg, beta, context, A_log=A_log, **OPTIONS)
    return o.flatten(2)


def two_layers(x, weight_1, A_log_1, weight_2, A_log_2, context):
    return layer(layer(x, weight_1, A_log_1, context), weight_2, A_log_2, context)


def train(group, exchange, check, wrapped, reentrant):
    """A forward of two layers and a backward: results, and the exchanges of both passes."""
    context = build_cp_context([0, 60], group, exchange=exchange, check=check)
    torch.manual_seed(1)
    leaves = [shard(torch.randn(1, 60, 32), context)]
    for number in range(2):
        leaves += [0.3 * torch.randn(32, sum(WIDTHS)), torch.full((2,), number / 2)]
    leaves = [x.requires_grad_() for x in leaves]
    elsewhere = torch.autograd.graph.save_on_cpu if wrapped == "saved elsewhere" else nullcontext
    with count_collectives() as counts, elsewhere():
        if wrapped == "each layer":
            y = checkpoint(layer, *leaves[:3], context, use_reentrant=reentrant)
            y = checkpoint(layer, y, *leaves[3:], context, use_reentrant=reentrant)
        elif wrapped == "both layers":
            y = checkpoint(two_layers, *leaves, context, use_reentrant=reentrant)
        else:
            y = two_layers(*leaves, context)
        forward = len(counts.calls)
        y.square().sum().backward()
    results = {"y": y.detach(), **{f"d{n}": x.grad for n, x in enumerate(leaves)}}
    return results, counts.calls[:forward], counts.calls[forward:]


def train_each_way(group, exchange):
    return [train(group, exchange, *way) for way in WAYS]


def test_checkpointing_changes_no_bit_and_repeats_only_the_forward_s_exchanges(ranks, exchange):
    for rank, answers in enumerate(ranks.run(train_each_way, exchange, ranks=3)):
        # One document over three ranks. all_gather: a forward gathers b and sends A1 to those who
        # fold with it, a backward gathers c. ring: each of two parts of the heads hops 0 -> 1 -> 2
        # or back, and rank 1 takes part in both hops. all_to_all: there and back, in each pass.
        once, back = {
            "all_gather": ([GATHER, ALL_TO_ALL], [GATHER]),
            "ring": ([HOP] * 2 * (1, 2, 1)[rank],) * 2,
            "all_to_all": ([ALL_TO_ALL] * 2,) * 2,
        }[exchange]
        for (_, wrapped, reentrant), (results, *passes) in zip(WAYS, answers, strict=True):
            assert_bitwise(results, answers[0][0])
            again = 2 if "layer" in wrapped else 0
            forward, backward = (Counter(c.name for c in calls) for calls in passes)
            assert forward == Counter(2 * once)
            assert backward == Counter(again * once + 2 * back)
            if exchange == "all_gather":
                # Rank 2 needs A1 for its entry state, rank 0 for its exit gradient. It gets none
                # from the forward of a reentrant checkpoint, which no backward follows.
                forward, backward = (
                    [c.numel_received / (2 * 16 * 16) for c in calls if c.name == ALL_TO_ALL]
                    for calls in passes
                )
                assert forward == 2 * [(0 if reentrant else 1, 0, 1)[rank]]
                assert backward == again * [(1, 0, 1)[rank]]


# Micro-batches ------------------------------------------------------------------------------------

ZIGZAG = dataclasses.replace(CALL, cu_seqlens=[0, 96], layout={"layout": "zigzag"})
FRAGMENTS = {"fragments": [[(64, 96)], [(52, 64), (0, 20)], [(20, 52)]]}
KEPT = {**OPTIONS, "disable_recompute": True}
MICRO_BATCHES = [  # packed ones of 32 tokens a rank: only their places differ
    CALL,
    ZIGZAG,
    dataclasses.replace(CALL, draw={**DRAW, "seed": 2}),
    dataclasses.replace(CALL, cu_seqlens=[0, 5, 50, 96], layout=FRAGMENTS),
    dataclasses.replace(CALL, cu_seqlens=40, draw={**DRAW, "B": 2, "HV": 3}),
    dataclasses.replace(ZIGZAG, draw={**DRAW, "K": 24, "dtype": torch.bfloat16}, options=KEPT),
]
SHARED = {2: 0, 5: 1}  # micro-batches that use the context of another
ORDERS = [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (2, 5, 0, 3, 1, 4)]


def all_forward_then_all_backward(group, calls, order):
    contexts = [context_of(call, group) for call in calls]
    contexts = [contexts[SHARED.get(n, n)] for n in range(len(calls))]
    with count_collectives() as counts:
        started = [start(*pair) for pair in zip(calls, contexts, strict=True)]
        results = {n: finish(*started[n]) for n in order}
    return [results[n] for n in range(len(calls))], counts.calls


def test_micro_batches_go_backward_in_any_order(ranks, exchange):
    calls = [dataclasses.replace(call, exchange=exchange) for call in MICRO_BATCHES]
    alone = ranks.run(each_alone, calls, ranks=3)
    for order in ORDERS:
        answers = ranks.run(all_forward_then_all_backward, calls, order, ranks=3)
        for (results, counted), single in zip(answers, alone, strict=True):
            for got, want in zip(results, single, strict=True):
                assert_bitwise(got, want.results)
            expected = [c for one in single for c in one.forward]
            assert counted == expected + [c for n in order for c in single[n].backward]


def accumulate(group, calls, parameters):
    """Forward one micro-batch ahead of backward, all into the same leaves; then one reduction."""
    leaves = {n: x.requires_grad_() for n, x in parameters.items()}
    ahead = None
    for call in calls:
        ahead, now = start(call, context_of(call, group), **leaves), ahead
        if now is not None:
            finish(*now)
    finish(*ahead)
    with count_collectives() as counts:
        reduce_gradients(leaves.values(), context_of(calls[0], group))
    return {f"d{n}": x.grad for n, x in leaves.items()}, counts.by_name


def test_accumulated_gradients_of_parameters_are_reduced_once(ranks, exchange):
    calls = [dataclasses.replace(MICRO_BATCHES[n], exchange=exchange) for n in (1, 2, 3)]
    parameters = {n: calls[0].draw_global(3)[0][n] for n in PARAMETERS}
    want = Counter()
    for call in calls:
        inputs, upstream = call.draw_global(3)
        inputs |= parameters
        of_call = run_reference(inputs, upstream, cu_seqlens=call.cu_seqlens, **call.options)
        want.update({f"d{n}": of_call[f"d{n}"] for n in PARAMETERS})
    answers = ranks.run(accumulate, calls, parameters, ranks=3)
    for grads, counted in answers:
        assert_similar(grads, want, compare.bounds(torch.float32))
        assert_bitwise(grads, answers[0][0])
        assert counted == {"all_reduce": 1}


# Calls whose o has no loss on any rank ------------------------------------------------------------


def leave_one_out(group, call):
    """Two calls on one context, a loss on the first alone; then a third call."""
    context = context_of(call, group)
    used, unused = start(call, context), start(call, context)
    with count_collectives() as counts:
        results = finish(*used)
    del used, unused
    third = finish(*start(call, context))
    kept = weakref.ref(context)
    del context
    return results, third, counts.calls, kept() is None


def test_a_call_that_no_rank_goes_backward_through_leaves_nothing_behind(ranks, exchange):
    call = dataclasses.replace(ZIGZAG, exchange=exchange)
    alone = ranks.run(call, ranks=3)
    answers = ranks.run(leave_one_out, call, ranks=3)
    for (results, third, backward, gone), want in zip(answers, alone, strict=True):
        assert_bitwise(results, want.results)
        assert_bitwise(third, want.results)
        assert backward == want.backward
        assert gone


def hand_the_state_on(group, exchange, inputs, do, lengths):
    """One document in calls of these lengths; the loss is on the last call's o alone."""
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    options = {"initial_state": None, "output_final_state": True, **OPTIONS}
    offset = 0
    for length in lengths:
        context = build_cp_context([0, length], group, layout="zigzag", exchange=exchange)
        part = compare.take(leaves, slice(offset, offset + length))
        local = {n: shard(x, context) if n in TOKENS else x for n, x in part.items()}
        # Under zigzag rank 0 holds both ends: the state goes on where it came out.
        o, options["initial_state"] = chunk_kda_cp(**local, cp_context=context, **options)
        offset += length
    (o * shard(do[:, -length:], context)).sum().backward()
    reduce_gradients(leaves.values(), context)
    return {"o": unshard(o.detach(), context), **{f"d{n}": x.grad for n, x in leaves.items()}}


def test_a_state_handed_from_call_to_call_carries_the_gradient_back(ranks, exchange):
    lengths = (70, 50, 40)
    inputs = compare.draw_inputs(sum(lengths), **DRAW)
    upstream = compare.draw_upstream(inputs)
    upstream["o"][:, : -lengths[-1]] = 0
    want = run_reference(inputs, upstream, **OPTIONS)
    want["o"] = want["o"][:, -lengths[-1] :]
    for got in ranks.run(hand_the_state_on, exchange, inputs, upstream["o"], lengths, ranks=3):
        assert_similar(got, want, compare.bounds(torch.float32))


# Groups -------------------------------------------------------------------------------------------

GROUPS = {"all": [[0, 1, 2, 3]], "halves": [[0, 1], [2, 3]], "crossed": [[0, 2], [1, 3]]}
GROUPS |= {"three and one": [[0, 1, 2], [3]], "single": [[0], [1], [2], [3]]}


def of_group(call, name):
    """Groups side by side have documents of their own, so that none can pass for another."""
    first = next(members[0] for members in GROUPS[name] if dist.get_rank() in members)
    return dataclasses.replace(call, cu_seqlens=[0, 37 + first, 96])


def calls_in_flight(group, calls, names, order, on_mesh):
    """Forward of each call in its group, then the backwards in another order."""
    if on_mesh:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "cp"))
        made = {"halves": mesh["cp"], "crossed": mesh["dp"]}
    else:  # every worker makes every group
        made = {n: dist.new_subgroups_by_enumeration(GROUPS[n])[0] for n in dict.fromkeys(names)}
    pairs = [(of_group(call, name), made[name]) for call, name in zip(calls, names, strict=True)]
    started = [start(call, context_of(call, own)) for call, own in pairs]
    results = {n: finish(*started[n]) for n in order}
    return [results[n] for n in range(len(calls))]


@pytest.mark.parametrize("on_mesh", [False, True])
def test_calls_in_groups_in_flight(ranks, own_ranks, on_mesh):
    """Of every algorithm, too: a process holds all groups' calls, and each gives its own bits."""
    names = ["halves", "crossed", "halves"] if on_mesh else [*GROUPS, "halves"]
    names = [name for name in names for _ in EXCHANGES]
    calls = [
        dataclasses.replace(
            CALL if n % 2 else ZIGZAG, draw={**DRAW, "seed": n}, exchange=list(EXCHANGES)[n % 3]
        )
        for n in range(len(names))
    ]
    order = random.Random(5).sample(range(len(calls)), len(calls))
    answers = own_ranks.run(calls_in_flight, calls, names, order, on_mesh, ranks=4)
    for name in dict.fromkeys(names):
        chosen = [n for n, other in enumerate(names) if other == name]
        alone = ranks.run_groups(each_alone, GROUPS[name], [calls[n] for n in chosen], name)
        for members, of_members in zip(GROUPS[name], alone, strict=True):
            for worker, singles in zip(members, of_members, strict=True):
                for n, want in zip(chosen, singles, strict=True):
                    assert_bitwise(answers[worker][n], want.results)
