"""Modes, settings, reuse and a repeated backward change no result of the sharded operator."""

import pytest
import torch

from kda_cp import build_cp_context, chunk_kda_cp, shard, unshard
from kda_cp.testing.compare import assert_bitwise
from kda_cp.testing.sharded import TRAINING_OPTIONS, ShardedCall

DRAW = {"H": 1, "HV": 2, "K": 16, "V": 24, "raw_gate": True, "A_log": True, "dt_bias": True}
CALL = ShardedCall([0, 37, 100], {"layout": "zigzag"}, DRAW, TRAINING_OPTIONS)
MODES = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "default device": lambda: torch.device("meta"),
}


def train_after(group, exchange, mode):
    """Results of training on a context that is new, and on one made and used under a mode."""
    inputs, upstream = CALL.draw_global(group.size())
    with MODES[mode]():
        context = build_cp_context(CALL.cu_seqlens, group, exchange=exchange, **CALL.layout)
        assert context.cu_seqlens.device.type == "cpu"
        local = {n: shard(inputs[n], context) for n in ("q", "k", "v", "g", "beta")}
        rest = {n: x for n, x in inputs.items() if n not in local}
        o, _ = chunk_kda_cp(**local, **rest, cp_context=context, **TRAINING_OPTIONS)
        unshard(o, context)
    new = build_cp_context(CALL.cu_seqlens, group, exchange=exchange, **CALL.layout)
    return [CALL.run_on(one, inputs, upstream).results for one in (new, context)]


@pytest.mark.parametrize("mode", MODES)
def test_a_context_first_used_under_a_mode_trains_to_the_same_bits(ranks, exchange, mode):
    for new, used in ranks.run(train_after, exchange, mode, ranks=3):
        assert_bitwise(used, new)


def build_on_a_tensor_that_cannot_be_read(group):
    arguments = {"cu_seqlens": [0, 10]}
    if group.rank() == 1:
        arguments["cu_seqlens"] = torch.empty(2, dtype=torch.int64, device="meta")
    try:
        build_cp_context(group=group, **arguments)
    except (ValueError, NotImplementedError) as error:
        return str(error)


def test_any_error_of_one_rank_is_raised_on_all(ranks):
    errors = ranks.run(build_on_a_tensor_that_cannot_be_read, ranks=3)
    assert errors[0].startswith("rank 1: ") and errors == [errors[0]] * 3


def under_a_setting(group, exchange, name):
    """Results without a setting of the caller's and with it."""
    context = build_cp_context(CALL.cu_seqlens, group, exchange=exchange, **CALL.layout)
    inputs, upstream = CALL.draw_global(group.size())
    plain = CALL.run_on(context, inputs, upstream).results
    if name == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain, CALL.run_on(context, inputs, upstream).results
    torch.set_float32_matmul_precision(name)
    try:
        return plain, CALL.run_on(context, inputs, upstream).results
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("name", ["autocast", "high", "medium"])
def test_no_setting_of_the_caller_changes_a_fold(ranks, exchange, name):
    for plain, same in ranks.run(under_a_setting, exchange, name, ranks=4):
        assert_bitwise(same, plain)


def go_backward_twice(group, exchange, keep):
    context = build_cp_context(CALL.cu_seqlens, group, exchange=exchange, **CALL.layout)
    inputs, upstream = CALL.draw_global(group.size())
    tokens = ("q", "k", "v", "g", "beta")
    local = {n: shard(x, context) if n in tokens else x for n, x in inputs.items()}
    leaves = {n: x.clone().requires_grad_() for n, x in local.items()}
    outputs = chunk_kda_cp(
        **leaves,
        cp_context=context,
        output_final_state=True,
        disable_recompute=keep,
        **TRAINING_OPTIONS,
    )
    dy = [shard(upstream["o"], context), upstream["final_state"]]
    first = torch.autograd.grad(outputs, list(leaves.values()), dy, retain_graph=True)
    second = torch.autograd.grad(outputs, list(leaves.values()), dy)
    return [dict(zip(leaves, grads, strict=True)) for grads in (first, second)]


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed terms", "kept terms"])
def test_a_second_backward_gives_the_same_bits(ranks, exchange, keep):
    for first, second in ranks.run(go_backward_twice, exchange, keep, ranks=3):
        assert_bitwise(second, first)


def loss_on_final_states_alone(group, exchange):
    """Gradients where rank 0 leaves its o out of the loss, and where all have it times 0."""
    context = build_cp_context(CALL.cu_seqlens, group, exchange=exchange, **CALL.layout)
    inputs, upstream = CALL.draw_global(group.size())
    zero = {**upstream, "o": torch.zeros_like(upstream["o"])}
    alone = {"final_state": upstream["final_state"]} if context.rank == 0 else zero
    return [CALL.run_on(context, inputs, dy).results for dy in (alone, zero)]


def test_a_final_state_may_be_all_that_a_rank_has_a_loss_on(ranks, exchange):
    for alone, zero in ranks.run(loss_on_final_states_alone, exchange, ranks=3):
        assert_bitwise(alone, zero)


def calls_on_one_context(group, exchange):
    """Calls of other batch and chunk sizes, on one context and on a new one each."""
    shared = build_cp_context(50, group, exchange=exchange)
    pairs = []
    for rows, chunk_size in ((1, 64), (3, 64), (3, 16), (1, 16), (1, 64)):
        draw = {**DRAW, "B": rows}
        call = ShardedCall(50, {}, draw, {**TRAINING_OPTIONS, "chunk_size": chunk_size})
        data = call.draw_global(group.size())
        new = build_cp_context(50, group, exchange=exchange)
        pairs.append([call.run_on(context, *data).results for context in (shared, new)])
    return pairs


def test_a_context_serves_calls_of_any_batch_and_chunk_size(ranks, exchange):
    for pairs in ranks.run(calls_on_one_context, exchange, ranks=3):
        for shared, new in pairs:
            assert_bitwise(shared, new)
