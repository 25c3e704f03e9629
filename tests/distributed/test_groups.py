"""Groups: any subgroup, a DeviceMesh dimension, none at all; calls that alternate between them."""

import dataclasses

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from kda_cp import (
    build_cp_context,
    chunk_kda,
    chunk_kda_cp,
    platform,
    reduce_gradients,
    shard,
    unshard,
)
from kda_cp.testing.compare import assert_bitwise, draw_inputs, draw_upstream, run
from kda_cp.testing.sharded import TRAINING_OPTIONS, ShardedCall, assert_equals_oracle

DRAW = {"H": 1, "HV": 2, "K": 16, "V": 16, "raw_gate": True, "A_log": True, "dt_bias": True}
CALL = ShardedCall([0, 37, 100], {}, DRAW, TRAINING_OPTIONS)


def test_no_group_is_the_ordinary_operator_to_the_bit():
    inputs = draw_inputs(100, initial_states=2, **DRAW)
    upstream = draw_upstream(inputs)
    context = build_cp_context([0, 37, 100], None)
    sharded = run(chunk_kda_cp, inputs, upstream, cp_context=context, **TRAINING_OPTIONS)
    plain = run(chunk_kda, inputs, upstream, cu_seqlens=[0, 37, 100], **TRAINING_OPTIONS)
    assert_bitwise(sharded, plain)


def one_rank_against_none(group):
    inputs = draw_inputs(100, initial_states=2, **DRAW)
    upstream = draw_upstream(inputs)
    return [
        run(
            chunk_kda_cp,
            inputs,
            upstream,
            cp_context=build_cp_context([0, 37, 100], one, layout=layout),
            **TRAINING_OPTIONS,
        )
        for one in (group, None)
        for layout in ("contiguous", "zigzag")
    ]


def test_a_group_of_one_rank_is_the_ordinary_operator_to_the_bit(ranks):
    first, *others = ranks.run(one_rank_against_none, ranks=1)[0]
    for other in others:
        assert_bitwise(first, other)


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2], [3]]], ids=str)
def test_subgroups_of_a_world_work_side_by_side(ranks, groups, exchange):
    call = dataclasses.replace(CALL, exchange=exchange)
    for members, answers in zip(groups, ranks.run_groups(call, groups), strict=True):
        want = ranks.run(call, ranks=len(members))
        for got, same in zip(answers, want, strict=True):
            assert_bitwise(got.results, same.results)
    assert_equals_oracle(ranks, call, 2)


def alternate(group, cu_seqlens, exchange):
    """Forward of two calls with different layouts, then their backwards in the same order."""
    leaves, losses = [], []
    for layout, bounds in (("contiguous", cu_seqlens), ("zigzag", [0, cu_seqlens[-1]])):
        context = build_cp_context(bounds, group, layout=layout, exchange=exchange)
        inputs = draw_inputs(cu_seqlens[-1], **DRAW)
        local = {
            n: shard(x, context) if n in "q k v g beta".split() else x for n, x in inputs.items()
        }
        leaves.append({n: x.clone().requires_grad_() for n, x in local.items()})
        o, _ = chunk_kda_cp(**leaves[-1], cp_context=context, **TRAINING_OPTIONS)
        losses.append((o, shard(draw_upstream(inputs)["o"], context)))
    for o, upstream in losses:
        (o * upstream).sum().backward()
    return [{n: x.grad for n, x in leaf.items()} for leaf in leaves]


def test_backward_of_an_earlier_call_after_a_later_forward(ranks, exchange):
    for P in (2, 4, 2):  # group sizes alternate in the same processes
        answers = ranks.run(alternate, [0, 37, 100], exchange, ranks=P)
        for number, (layout, bounds) in enumerate(
            (({"layout": "contiguous"}, [0, 37, 100]), ({"layout": "zigzag"}, [0, 100]))
        ):
            call = ShardedCall(
                bounds, layout, DRAW, TRAINING_OPTIONS, states=False, exchange=exchange
            )
            alone = ranks.run(call, ranks=P)
            for got, want in zip(answers, alone, strict=True):
                want = {n[1:]: x for n, x in want.results.items() if n.startswith("d")}
                assert_bitwise(got[number], {n: want[n] for n in got[number]})


def on_a_mesh(group):
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    context = build_cp_context([0, 37, 100], mesh["cp"])
    inputs, upstream = CALL.draw_global(context.size)
    return CALL.run_on(context, inputs, upstream)


def test_a_mesh_dimension_is_its_group(ranks, own_ranks):
    answers = zip(own_ranks.run(on_a_mesh, ranks=3), ranks.run(CALL, ranks=3), strict=True)
    for mesh, group in answers:
        assert_bitwise(mesh.results, group.results)


def refuse_two_dimensions(group):
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "cp"))
    with pytest.raises(ValueError, match="group: expected a one-dimensional DeviceMesh"):
        build_cp_context([0, 8], mesh)
    answer = build_cp_context([0, 8], mesh["cp"])
    return answer.size, answer.rank


def test_a_mesh_of_two_dimensions_is_refused_and_its_dimension_taken(own_ranks):
    assert own_ranks.run(refuse_two_dimensions, ranks=4) == [(2, 0), (2, 1), (2, 0), (2, 1)]


def tokens_both_ways(group, layout, dim):
    context = build_cp_context([0, 37, 100], group, **layout)
    torch.manual_seed(3)
    shape = [3, 4, 5]
    shape.insert(dim, 100)
    x = torch.randn(shape, dtype=torch.float64)
    local = shard(x.requires_grad_(), context, dim=dim)
    (local * (1 + context.rank)).sum().backward()
    y = local.detach().requires_grad_()
    back = unshard(y, context, dim=dim)
    # Every rank puts another loss on the whole; the gradient is the sum over ranks.
    (back * (1 + context.rank)).sum().backward()
    return x.detach(), x.grad, back.detach(), y.grad


@pytest.mark.parametrize("dim", [0, 1, 3])
@pytest.mark.parametrize(
    "layout",
    [{}, {"layout": "zigzag"}, {"fragments": [[(60, 100), (0, 10)], [], [(10, 60)]]}],
    ids=["contiguous", "zigzag", "fragments"],
)
def test_shard_and_unshard_are_inverse_and_their_backwards_adjoint(ranks, layout, dim):
    answers = ranks.run(tokens_both_ways, layout, dim, ranks=3)
    plan = ShardedCall([0, 37, 100], layout).plan(3)
    for rank, (x, dx, back, dy) in enumerate(answers):
        assert torch.equal(back, x)
        expected = torch.zeros_like(x)
        for start, stop in plan.ranges(rank):
            expected.narrow(dim, start, stop - start).fill_(1 + rank)
        assert torch.equal(dx, expected)
        assert torch.equal(dy, torch.full_like(dy, 1 + 2 + 3))


def test_tokens_of_another_length_are_refused():
    context = build_cp_context([0, 10], None)
    with pytest.raises(ValueError, match="x: expected 10 global tokens along dimension 1, got 9"):
        shard(torch.zeros(1, 9), context)
    with pytest.raises(ValueError, match="x: expected 10 local tokens along dimension -1, got 3"):
        unshard(torch.zeros(1, 3), context, dim=-1)
    for wrong in (None, torch.zeros(1)):
        for call in (shard, unshard, lambda x, context: reduce_gradients([x], context)):
            with pytest.raises(ValueError, match="cp_context: expected a context from build"):
                call(torch.zeros(1, 10), wrong)
    with pytest.raises(ValueError, match="x: expected a tensor, got list"):
        shard([0] * 10, context)
    with pytest.raises(ValueError, match=r"parameters: expected tensors.*got Linear"):
        reduce_gradients(torch.nn.Linear(1, 1), context)
    with pytest.raises(ValueError, match="dim: expected a dimension of a 2-dimensional x, got 2"):
        shard(torch.zeros(1, 10), context, dim=2)


def sum_small_to_large(group):
    context = build_cp_context(4, group)
    x = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    (unshard(x, context, dim=0) * (256.0 if context.rank == 0 else 1.0)).sum().backward()
    return x.grad.item()


def test_gradients_of_unshard_are_summed_in_fp32(ranks):
    # 256 + 1 is 256 in bf16; 259, rounded once, is 260.
    assert ranks.run(sum_small_to_large, ranks=4) == [260.0] * 4


def on_machines(group):
    platform._answers["machine"] = "one" if group.rank() in (0, 2) else f"own {group.rank()}"
    try:
        return build_cp_context(10, group).ranks_per_node
    finally:
        del platform._answers["machine"]


def test_a_context_knows_the_most_ranks_on_one_machine(ranks):
    assert ranks.run(on_machines, ranks=4) == [2] * 4


def reduce_some(group):
    context = build_cp_context([0, 10], group)
    a, b = torch.zeros(3, requires_grad=True), torch.zeros(2, 2, requires_grad=True)
    half = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    frozen = torch.zeros(4)
    a.grad = torch.full_like(a, 1.0 + context.rank)
    half.grad = torch.full_like(half, 2.0)
    if context.rank == 1:  # a rank without a gradient counts as zero
        b.grad = torch.ones_like(b)
    reduce_gradients([a, frozen, b, half], context)
    reduce_gradients(iter([]), context)
    return a.grad, b.grad, half.grad, frozen.grad


def test_reduce_gradients_sums_over_the_group(ranks):
    for a, b, half, frozen in ranks.run(reduce_some, ranks=3):
        assert a.tolist() == [6.0] * 3
        assert b.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert half.tolist() == [6.0, 6.0]
        assert frozen is None
