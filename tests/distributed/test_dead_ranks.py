"""A rank that dies or stalls: the others end with an error that says so, within the timeout."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from kda_cp import build_cp_context, chunk_kda_cp, eager, shard
from kda_cp.testing.compare import draw_inputs
from kda_cp.testing.ranks import RankError

P, VICTIM = 4, 2
SURVIVORS = [rank for rank in range(P) if rank != VICTIM]
# Each moment is a stage of a step; a rank that fails there leaves the others in the next exchange.
STAGES = {"forward": "walk_maps", "backward": "walk_state_back"}


def steps_until_one_fails(group, exchange, moment, fail, timeout, folder):
    """Train for a few steps, in the second of which the victim fails."""
    own = dist.new_group(timeout=timedelta(seconds=timeout))
    victim = group.rank() == VICTIM
    inputs = draw_inputs(80, H=1, HV=4, K=16)
    try:
        for step in range(4):
            if victim and (moment == "first build" or (moment == "build" and step == 1)):
                fail()
            context = build_cp_context([0, 80], own, exchange=exchange)
            local = {name: shard(x, context).requires_grad_() for name, x in inputs.items()}
            if victim and moment in STAGES and step == 1:
                setattr(eager, STAGES[moment], lambda *_, **__: fail())
            o, _ = chunk_kda_cp(**local, cp_context=context)
            o.sum().backward()
    except RuntimeError as error:
        (folder / f"rank {group.rank()}").write_text(str(error))
        os._exit(1)  # as an error that nobody catches ends a rank


def die():
    os._exit(7)


def stall():
    time.sleep(60)


def errors_of_survivors(pool, folder, *arguments):
    """What each rank but the victim raised, and how long the whole run took."""
    begun = time.monotonic()
    with pytest.raises(RankError):
        pool.run(steps_until_one_fails, *arguments, folder, ranks=P)
    took = time.monotonic() - begun
    return {rank: (folder / f"rank {rank}").read_text() for rank in SURVIVORS}, took


@pytest.mark.parametrize("moment", ["first build", "build", "forward", "backward"])
def test_the_others_hear_of_a_rank_that_died(own_ranks, exchange, moment, tmp_path):
    # Nothing tells gloo of a rank that died before it ever connected, but the timeout.
    timeout = 2 if moment == "first build" else 40
    errors, took = errors_of_survivors(own_ranks, tmp_path, exchange, moment, die, timeout)
    assert took < 40
    for rank, error in errors.items():
        assert error.startswith(
            f"communication failed on rank {rank} of a context-parallel group of 4: another rank "
            "died, raised an error alone, or did not make the same call within the group's timeout"
        )


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_the_others_wait_for_a_rank_that_stalls_as_long_as_the_timeout(own_ranks, moment, tmp_path):
    errors, took = errors_of_survivors(own_ranks, tmp_path, "auto", moment, stall, 5)
    assert took < 50  # the stall lasts longer
    for rank, error in errors.items():
        assert error.startswith(f"communication failed on rank {rank} of a context-parallel group")


def fail_half_way_and_repeat(group, exchange):
    """A call that fails on all ranks while states travel, the same call again, and one before."""
    context = build_cp_context([0, 80], group, exchange=exchange)
    local = {n: shard(x, context) for n, x in draw_inputs(80, H=1, HV=4, K=16).items()}
    before, _ = chunk_kda_cp(**local, cp_context=context)
    walk_state = eager.walk_state

    def fail_at_the_fresh_segments(*arguments, o=None, **keywords):
        if o is not None:
            raise MemoryError("no room")
        return walk_state(*arguments, **keywords)

    eager.walk_state = fail_at_the_fresh_segments
    try:
        with pytest.raises(MemoryError):
            chunk_kda_cp(**local, cp_context=context)
    finally:
        eager.walk_state = walk_state
    again, _ = chunk_kda_cp(**local, cp_context=context)
    return before, again


def test_a_call_that_failed_half_way_on_all_ranks_can_be_repeated(ranks, exchange):
    for before, again in ranks.run(fail_half_way_and_repeat, exchange, ranks=P):
        assert torch.equal(before, again)
