"""A context serves every later call, whatever modes it was first used under."""

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


def train_after(group, mode):
    """Results of training on a context that is new, and on one made and used under a mode."""
    inputs, upstream = CALL.draw_global(group.size())
    with MODES[mode]():
        context = build_cp_context(CALL.cu_seqlens, group, **CALL.layout)
        assert context.cu_seqlens.device.type == "cpu"
        local = {n: shard(inputs[n], context) for n in ("q", "k", "v", "g", "beta")}
        rest = {n: x for n, x in inputs.items() if n not in local}
        o, _ = chunk_kda_cp(**local, **rest, cp_context=context, **TRAINING_OPTIONS)
        unshard(o, context)
    new = build_cp_context(CALL.cu_seqlens, group, **CALL.layout)
    return [CALL.run_on(one, inputs, upstream).results for one in (new, context)]


@pytest.mark.parametrize("mode", MODES)
def test_a_context_first_used_under_a_mode_trains_to_the_same_bits(ranks, mode):
    for new, used in ranks.run(train_after, mode, ranks=3):
        assert_bitwise(used, new)


def build_on_a_tensor_that_cannot_be_read(group):
    arguments = {"cu_seqlens": [0, 10]}
    if group.rank() == 1:
        arguments["cu_seqlens"] = torch.empty(2, dtype=torch.int64, device="meta")
    try:
        build_cp_context(group=group, **arguments)
    except ValueError as error:
        return str(error)


def test_any_error_of_one_rank_is_raised_on_all(ranks):
    errors = ranks.run(build_on_a_tensor_that_cannot_be_read, ranks=3)
    assert errors[0].startswith("rank 1: ") and errors == [errors[0]] * 3
