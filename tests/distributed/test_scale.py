"""32 and 64 ranks, as threads of one process, give what one rank gives."""

import pytest
import torch

from kda_cp import build_cp_context, chunk_kda, chunk_kda_cp, reshard, shard, unshard
from kda_cp.comm import collectives
from kda_cp.comm.plan import make_plan
from kda_cp.testing.compare import draw_inputs, draw_upstream, run
from kda_cp.testing.sharded import TOKENS, TRAINING_OPTIONS
from kda_cp.testing.threads import run_threads

DRAW = {"H": 1, "HV": 3, "K": 8, "V": 12, "raw_gate": True, "A_log": True, "dt_bias": True}
# Documents of one token, of part of a shard and of many; the last one crosses every rank but a few.
CU_SEQLENS = [0, 1, 30, 31, 31, 130, 1100]
OPTIONS = {**TRAINING_OPTIONS, "chunk_size": 16}


@pytest.fixture
def messages_over_the_group(monkeypatch):
    """Ranks compare their calls over the threads' own group: 64 of them are 4032 connections."""
    monkeypatch.setattr(collectives, "open_side_channel", lambda group: group)


def draw():
    states = len(CU_SEQLENS) - 1
    inputs = draw_inputs(CU_SEQLENS[-1], initial_states=states, dtype=torch.float64, **DRAW)
    return inputs, draw_upstream(inputs)


def sharded(group, exchange, layout, inputs, upstream):
    context = build_cp_context(CU_SEQLENS, group, exchange=exchange, layout=layout)
    local = {name: shard(x, context) if name in TOKENS else x for name, x in inputs.items()}
    dlocal = {name: shard(x, context) if name == "o" else x for name, x in upstream.items()}
    return run(chunk_kda_cp, local, dlocal, cp_context=context, **OPTIONS)


OF_TOKENS = ("o", *(f"d{name}" for name in TOKENS))


def assert_close(name, got, want):
    """In float64, each head on its own."""
    if got.dim() > 1:  # [B, T, heads, ..] or [N, heads, ..]; the parameters as they are
        heads = 2 if name in OF_TOKENS else 1
        got, want = (x.movedim(heads, 0).flatten(1) for x in (got, want))
    else:
        got, want = got[:, None], want[:, None]
    assert ((got - want).norm(dim=1) <= 1e-10 * want.norm(dim=1)).all(), name


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("P", [32, 64])
def test_many_ranks_agree_with_one(messages_over_the_group, exchange, layout, P):
    inputs, upstream = draw()
    want = run(chunk_kda, inputs, upstream, cu_seqlens=CU_SEQLENS, **OPTIONS)
    results = run_threads(sharded, exchange, layout, inputs, upstream, ranks=P)
    plan = make_plan(CU_SEQLENS, P, layout=layout)
    assert len(plan.hops(False)) > P / 2  # the long document
    for name, whole in want.items():
        if name in OF_TOKENS:
            for rank, result in enumerate(results):
                mine = [whole[:, start:stop] for start, stop in plan.ranges(rank)]
                assert_close(name, result[name], torch.cat(mine, 1))
        else:  # states have one owner, parameters a part of their gradient on each rank
            assert_close(name, sum(result[name] for result in results), whole)


def moved(group, x):
    one, other = (build_cp_context(CU_SEQLENS, group, layout=n) for n in ("contiguous", "zigzag"))
    there = reshard(shard(x, one), one, other)
    return torch.equal(there, shard(x, other)) and torch.equal(unshard(there, other), x)


def test_tokens_move_between_layouts_of_64_ranks(messages_over_the_group):
    assert all(run_threads(moved, torch.randn(1, CU_SEQLENS[-1], 2), ranks=64))


def one_rank_differs(group):
    context = build_cp_context(CU_SEQLENS, group)
    inputs = {n: shard(x, context) for n, x in draw_inputs(CU_SEQLENS[-1], K=8).items()}
    with pytest.raises(ValueError) as caught:
        chunk_kda_cp(**inputs, cp_context=context, chunk_size=32 if context.rank == 41 else 16)
    return str(caught.value)


def test_the_odd_one_of_64_is_named(messages_over_the_group):
    texts = run_threads(one_rank_differs, ranks=64)
    assert set(texts) == {texts[0]}
    assert texts[0].startswith("rank 41: chunk_size: expected 16, as on ranks 0, 1, 2, 3, 4, 5,")
