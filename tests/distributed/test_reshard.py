"""Tokens move between any two layouts and their gradients back; layers of different layouts."""

import pytest
import torch
import torch.distributed as dist

from kda_cp import build_cp_context, chunk_kda, chunk_kda_cp, reshard, shard
from kda_cp.comm.plan import make_plan
from kda_cp.testing.collectives import count_collectives
from kda_cp.testing.compare import bounds

LAYOUTS = {
    "contiguous": {},
    "zigzag": {"layout": "zigzag"},
    "shuffled": {"fragments": [[(60, 101), (0, 10)], [], [(10, 11), (40, 60), (11, 40)]]},
    "all on one": {"fragments": [[], [(0, 101)], []]},
}


def move(group, here, there, dim, dtype):
    """Tokens of one layout in another, the gradient of their move, and the collectives of both."""
    one, other = (build_cp_context([0, 37, 90], group, num_tokens=101, **x) for x in (here, there))
    torch.manual_seed(3)
    shape = [3, 4, 5]
    shape.insert(dim, 101)
    x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    local = shard(x, one, dim=dim).requires_grad_(dtype.is_floating_point)
    with count_collectives() as counts:
        y = reshard(local, one, other, dim=dim)
        if dtype.is_floating_point:
            y.backward(shard(dy, other, dim=dim))
    names = [call.name for call in counts.calls]
    return y.detach(), shard(x, other, dim=dim), local.grad, shard(dy, one, dim=dim), names


@pytest.mark.parametrize("there", LAYOUTS)
@pytest.mark.parametrize("here", LAYOUTS)
def test_tokens_and_gradients_move_between_any_two_layouts(ranks, here, there):
    answers = ranks.run(move, LAYOUTS[here], LAYOUTS[there], 1, torch.float32, ranks=3)
    for y, expected, dx, dexpected, names in answers:
        assert torch.equal(y, expected)
        assert torch.equal(dx, dexpected)  # a permutation: its adjoint is the way back
        assert names == ["all_to_all_single"] * 2  # one each way


@pytest.mark.parametrize("dim", [0, 2, -1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16], ids=str)
def test_tokens_move_along_any_dimension_in_any_dtype(ranks, dim, dtype):
    where = dim % 4
    answers = ranks.run(move, {}, LAYOUTS["zigzag"], where, dtype, ranks=3)
    for y, expected, *_ in answers:
        assert torch.equal(y, expected)


def test_one_rank_permutes_its_tokens():
    one = build_cp_context(10, None)
    turned = build_cp_context(10, None, fragments=[[(5, 10), (0, 5)]])
    x = torch.arange(20).view(2, 10)
    assert reshard(x, one, turned)[0].tolist() == [5, 6, 7, 8, 9, 0, 1, 2, 3, 4]
    assert torch.equal(reshard(reshard(x, one, turned), turned, one), x)


def test_overlaps_list_the_same_tokens_on_both_sides():
    plans = [make_plan([0, 37, 90], 3, num_tokens=101, **layout) for layout in LAYOUTS.values()]

    def tokens(plan, rank, ranges):
        """Global tokens at these positions of the shard."""
        shard_ = [t for start, stop in plan.ranges(rank) for t in range(start, stop)]
        return [shard_[n] for start, stop in ranges for n in range(start, stop)]

    for a in plans:
        for b in plans:
            seen = []
            for here in range(3):
                for there in range(3):
                    sent = tokens(a, here, a.overlaps(here, b)[there])
                    assert sent == tokens(b, there, b.overlaps(there, a)[here])
                    assert sent == sorted(sent)
                    seen += sent
            assert sorted(seen) == list(range(101))


def test_contexts_that_do_not_go_together_are_refused():
    one, other = build_cp_context(10, None), build_cp_context(11, None)
    with pytest.raises(ValueError, match="to_context: expected the global tokens of from_context"):
        reshard(torch.zeros(1, 10), one, other)
    with pytest.raises(ValueError, match="x: expected 10 local tokens along dimension 1, got 11"):
        reshard(torch.zeros(1, 11), one, one)
    for arguments in ((None, one), (one, 3)):
        with pytest.raises(ValueError, match="_context: expected a context from build_cp_context"):
            reshard(torch.zeros(1, 10), *arguments)


def two_groups(group):
    first, second = (dist.new_group([0, 1]) for _ in range(2))
    contexts = [build_cp_context(10, own) for own in (first, second)]
    with pytest.raises(ValueError) as caught:
        reshard(torch.zeros(5), *contexts, dim=0)
    return str(caught.value)


def test_another_group_of_the_same_ranks_is_refused(own_ranks):
    expected = "every rank: to_context: expected the group of from_context, got another"
    assert own_ranks.run(two_groups, ranks=2) == [expected] * 2


OPTIONS = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
CU_SEQLENS = [0, 37, 37, 100]
WIDTH, HEADS, K = 24, 2, 16


def two_layers(x, weights, layers, between):
    """Two layers of projections and the operator; `between` moves tokens from one to the next."""
    for layer, (weight, run) in enumerate(zip(weights, layers, strict=True)):
        if layer:
            x = between(x)
        projected = (x @ weight).view(*x.shape[:2], HEADS, 4 * K + 1)
        q, k, v, g, beta = projected.split([K, K, K, K, 1], dim=-1)
        o, _ = run(q, k, v, -torch.nn.functional.softplus(g), beta.squeeze(-1), **OPTIONS)
        x = x + o.flatten(2) @ weight[:, : HEADS * K].T
    return x


def draw_layers():
    torch.manual_seed(5)
    x = torch.randn(1, CU_SEQLENS[-1], WIDTH)
    weights = [torch.randn(WIDTH, HEADS * (4 * K + 1)) / WIDTH**0.5 for _ in range(2)]
    return x, weights, torch.randn_like(x)


def sharded_layers(group, exchange, here, there):
    """A layer in one layout and the next in another: output, gradients of x and of the weights."""
    one, other = (
        build_cp_context(CU_SEQLENS, group, exchange=exchange, **layout) for layout in (here, there)
    )
    x, weights, dy = draw_layers()
    local = shard(x, one).requires_grad_()
    weights = [w.requires_grad_() for w in weights]
    layers = [
        lambda *inputs, context=context, **options: chunk_kda_cp(*inputs, context, **options)
        for context in (one, other)
    ]
    y = two_layers(local, weights, layers, lambda x: reshard(x, one, other))
    y.backward(shard(dy, other))
    return y.detach(), local.grad, [w.grad for w in weights]


@pytest.mark.parametrize(
    ("here", "there"),
    [({}, {"layout": "zigzag"}), ({"layout": "zigzag"}, {})],
    ids=["contiguous then zigzag", "zigzag then contiguous"],
)
def test_a_contiguous_layer_and_a_zigzag_one_equal_the_unsharded_two(ranks, exchange, here, there):
    x, weights, dy = (
        y.double() if torch.is_tensor(y) else [w.double() for w in y] for y in draw_layers()
    )
    x, weights = x.requires_grad_(), [w.requires_grad_() for w in weights]

    def reference(*inputs, **options):
        return chunk_kda(*inputs, cu_seqlens=CU_SEQLENS, impl="reference", **options)

    y = two_layers(x, weights, [reference] * 2, lambda x: x)
    y.backward(dy)
    answers = ranks.run(sharded_layers, exchange, here, there, ranks=3)
    one, other = (make_plan(CU_SEQLENS, 3, **layout) for layout in (here, there))
    bound = bounds(torch.float32)["o"]
    for rank, (got, dx, _) in enumerate(answers):
        for found, whole, plan in ((got, y.detach(), other), (dx, x.grad, one)):
            want = torch.cat([whole[:, start:stop] for start, stop in plan.ranges(rank)], 1)
            assert (found - want).norm() < bound * want.norm(), rank
    for layer, weight in enumerate(weights):
        total = sum(dweights[layer] for *_, dweights in answers)
        assert (total - weight.grad).norm() < bound * weight.grad.norm()
