"""States and gradients that cross ranks: what goes in, what comes out, what stays exactly zero."""

import pytest
import torch

from kda_cp import build_cp_context, chunk_kda, shard, unshard
from kda_cp.testing.compare import assert_bitwise, draw_inputs, draw_upstream, run
from kda_cp.testing.sharded import TRAINING_OPTIONS, ShardedCall, assert_equals_oracle

SMALL = {"H": 1, "HV": 3, "K": 16, "V": 24, "decay": (1e-3, 0.1, 3.0)}
OPTIONS = {"use_qk_l2norm_in_kernel": True, "scale": 0.37}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("given", [True, False], ids=["states given", "no states"])
def test_with_and_without_states(ranks, exchange, layout, given):
    call = ShardedCall(
        [0, 70, 70, 200], {"layout": layout}, SMALL, OPTIONS, states=given, exchange=exchange
    )
    assert_equals_oracle(ranks, call, 4)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_loss_on_the_last_rank_alone_reaches_the_first_through_the_state(ranks, exchange, layout):
    call = ShardedCall(
        [0, 160],
        {"layout": layout},
        SMALL,
        OPTIONS,
        states=False,
        loss_ranks=[3],
        exchange=exchange,
    )
    answers = assert_equals_oracle(ranks, call, 4)
    assert answers[0].results["dv"].any()


def test_a_loss_on_the_first_rank_alone_leaves_later_ranks_exactly_zero(ranks, exchange):
    call = ShardedCall(
        [0, 160], {}, SMALL, OPTIONS, states=False, loss_ranks=[0], exchange=exchange
    )
    answers = assert_equals_oracle(ranks, call, 4)
    for answer in answers[1:]:
        assert all(not x.any() for name, x in answer.results.items() if name.startswith("d"))


def start_after_a_prefix(group, prefix, exchange):
    """Hand the state of an unsharded prefix to the sharded rest, and compare with one pass."""
    total = prefix + 400
    inputs = draw_inputs(total, **SMALL)
    one, final = chunk_kda(**inputs, output_final_state=True, **OPTIONS)
    _, state = chunk_kda(
        **{name: x[:, :prefix] for name, x in inputs.items()}, output_final_state=True, **OPTIONS
    )
    context = build_cp_context([0, 400], group, exchange=exchange)
    rest = {name: shard(x[:, prefix:], context) for name, x in inputs.items()}
    o, last = chunk_kda(
        **rest, initial_state=state, output_final_state=True, cp_context=context, **OPTIONS
    )
    errors = [(unshard(o, context) - one[:, prefix:]).norm() / one[:, prefix:].norm()]
    if context.rank == context.final_state_owner(0):
        errors.append((last - final).norm() / final.norm())
    return max(errors).item()


@pytest.mark.parametrize("prefix", [0, 1, 640, 2592])
def test_start_after_a_prefix(ranks, exchange, prefix):
    assert max(ranks.run(start_after_a_prefix, prefix, exchange, ranks=3)) < 1e-5


def test_zero_beta_on_a_rank_leaves_the_state_that_came_in(ranks, exchange):
    """A rank that starts from zero, or that exchanges only b, fails here."""
    outputs = ranks.run(decay_only_rank, exchange, ranks=3)
    for rank in (1, 2):
        o, expected = outputs[rank]
        assert o.abs().max() > 1e-3
        torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)


def decay_only_rank(group, exchange):
    inputs = draw_inputs(96, **SMALL)
    inputs["beta"][:, 32:] = 0
    context = build_cp_context([0, 96], group, exchange=exchange)
    local = {name: shard(x, context) for name, x in inputs.items()}
    o, _ = chunk_kda(**local, cp_context=context, **OPTIONS)
    whole, _ = chunk_kda(**inputs, **OPTIONS)
    return o, shard(whole, context)


def changed_input(group, exchange, layout, cu_seqlens, token, count):
    """Results with and without `count` tokens from `token` on changed."""
    context = build_cp_context(cu_seqlens, group, exchange=exchange, **layout)
    answers = []
    for change in (False, True):
        inputs = draw_inputs(cu_seqlens[-1], **SMALL)
        if change:
            for x in inputs.values():
                x[:, token : token + count] *= 0.5
        local = {name: shard(x, context) for name, x in inputs.items()}
        upstream = {"o": shard(torch.ones_like(inputs["v"]), context)}
        # Only the outputs before the change have a loss.
        before = shard(torch.arange(cu_seqlens[-1])[None], context) < token
        upstream["o"] = torch.where(before[..., None, None], upstream["o"], 0)
        answers.append(run(chunk_kda, local, upstream, cp_context=context, **OPTIONS))
    return before[0], answers


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"layout": "zigzag"},
        {"fragments": [[(0, 21), (40, 50)], [(21, 40)], [(50, 96)]]},
    ],
    ids=["contiguous", "zigzag", "cut at the changed token"],
)
@pytest.mark.parametrize("token", [21, 95])
def test_the_past_ignores_the_future_to_the_bit(ranks, exchange, layout, token):
    for before, (plain, changed) in ranks.run(
        changed_input, exchange, layout, [0, 96], token, 1, ranks=3
    ):
        assert_bitwise(
            {name: x[:, before] for name, x in plain.items()},
            {name: x[:, before] for name, x in changed.items()},
        )


def test_documents_ignore_each_other_to_the_bit(ranks, exchange):
    cu_seqlens = [0, 50, 96]  # ranks hold 32 tokens each: the edge lies inside rank 1
    for rank, answer in enumerate(ranks.run(changed_document, exchange, cu_seqlens, ranks=3)):
        plain, changed, second = answer
        assert_bitwise(
            {name: x[:, second] for name, x in plain.items()},
            {name: x[:, second] for name, x in changed.items()},
        )
        if rank == 1:
            assert not torch.equal(plain["o"], changed["o"])


def changed_document(group, exchange, cu_seqlens):
    context = build_cp_context(cu_seqlens, group, exchange=exchange)
    second = shard(torch.arange(cu_seqlens[-1])[None], context)[0] >= cu_seqlens[1]
    answers = []
    for change in (False, True):
        inputs = draw_inputs(cu_seqlens[-1], **SMALL)
        if change:
            inputs["v"][:, cu_seqlens[1] - 1] = float("nan")
        local = {name: shard(x, context) for name, x in inputs.items()}
        upstream = {"o": shard(torch.ones_like(inputs["v"]), context)}
        answers.append(run(chunk_kda, local, upstream, cp_context=context, **OPTIONS))
    return *answers, second


def intermediate_states(group, exchange):
    context = build_cp_context([0, 70, 200], group, exchange=exchange)
    inputs = draw_inputs(200, **SMALL)
    local = {name: shard(x, context) for name, x in inputs.items()}
    *_, h = chunk_kda(
        **local, cp_context=context, return_intermediate_states=True, chunk_size=32, **OPTIONS
    )
    *_, every = chunk_kda(
        **inputs,
        cu_seqlens=[0, 70, 200],
        return_intermediate_states=True,
        chunk_size=32,
        impl="reference",
        **OPTIONS,
    )
    return h, every


def test_intermediate_states_count_chunks_from_each_local_segment(ranks, exchange):
    # Rank 0 [0, 67): chunks at 0, 32, 64. Rank 1 [67, 134): the first document's last 3 tokens,
    # then the second's from 70: chunks at 67, 70, 102. Rank 2 [134, 200): 134, 166, 198.
    answers = ranks.run(intermediate_states, exchange, ranks=3)
    assert [h.shape[1] for h, _ in answers] == [3, 3, 3]
    every = answers[0][1]  # chunks at 0, 32, 64; 70, 102, 134, 166, 198
    expected = {(0, 0): 0, (0, 1): 1, (0, 2): 2, (1, 1): 3, (1, 2): 4, (2, 0): 5, (2, 1): 6}
    for (rank, chunk), index in expected.items():
        got = answers[rank][0][:, chunk]
        torch.testing.assert_close(got, every[:, index], rtol=1e-4, atol=1e-5)


def states_the_other_way_round(group, exchange):
    """The same call with states as [.., K, V] and as [.., V, K]."""
    context = build_cp_context([0, 70, 200], group, exchange=exchange)
    inputs = draw_inputs(200, initial_states=2, **SMALL)
    upstream = draw_upstream(inputs)
    local = {n: shard(x, context) if n in "q k v g beta".split() else x for n, x in inputs.items()}
    upstream["o"] = shard(upstream["o"], context)
    options = {"cp_context": context, "return_intermediate_states": True, **OPTIONS}
    plain = run(chunk_kda, local, upstream, **options)
    local["initial_state"], upstream["final_state"] = (
        x.mT.contiguous() for x in (local["initial_state"], upstream["final_state"])
    )
    turned = run(chunk_kda, local, upstream, state_v_first=True, **options)
    for name in ("final_state", "h", "dinitial_state"):
        turned[name] = turned[name].mT
    return plain, turned


def test_state_v_first_turns_every_state(ranks, exchange):
    for plain, turned in ranks.run(states_the_other_way_round, exchange, ranks=3):
        assert_bitwise(turned, plain)


def test_training_options_with_states(ranks, exchange):
    draw = {**SMALL, "raw_gate": True, "A_log": True, "dt_bias": True}
    del draw["decay"]
    call = ShardedCall(
        [0, 1, 90, 200], {"layout": "zigzag"}, draw, TRAINING_OPTIONS, exchange=exchange
    )
    assert_equals_oracle(ranks, call, 4)
