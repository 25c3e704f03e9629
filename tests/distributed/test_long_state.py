"""The state through many ranks of slow decay: as exact as one pass, to the bound of the design.

With g = 0 and small beta the state remembers thousands of tokens, so errors of the maps would add
up. The judge is the same walk in float64 over the same stored w, u, kg (and decay).
"""

import pytest
import torch

from kda_cp import build_cp_context, chunk_kda, eager, shard
from kda_cp.comm.plan import make_plan
from kda_cp.segments import SegmentTable
from kda_cp.stages import ChunkTerms, Inputs
from kda_cp.testing.compare import draw_inputs, errors
from kda_cp.validation import make_settings

TOKENS_A_RANK = 4096
OPTIONS = {"use_qk_l2norm_in_kernel": True}


def draw(tokens, decay):
    inputs = draw_inputs(tokens, H=1, K=128, V=64)
    inputs["g"] = torch.full_like(inputs["g"], -decay)
    inputs["beta"] = torch.full_like(inputs["beta"], 0.02)
    return inputs


def final_state(group, tokens, decay):
    context = build_cp_context([0, tokens], group)
    inputs = {name: shard(x, context) for name, x in draw(tokens, decay).items()}
    with torch.no_grad():
        _, state = chunk_kda(**inputs, output_final_state=True, cp_context=context, **OPTIONS)
    return state


@pytest.mark.parametrize("decay", [0.0, 1e-4])
def test_the_state_after_four_ranks_is_that_of_the_same_terms_in_float64(ranks, decay):
    P = 4
    tokens = P * TOKENS_A_RANK
    got = sum(ranks.run(final_state, tokens, decay, ranks=P))
    inputs = draw(tokens, decay)
    one = ranks.run(final_state, tokens, decay, ranks=1)[0]

    names = ("q", "k", "v", "g", "beta")
    stored = Inputs(*(inputs[name] for name in names), None, None)
    settings = make_settings(
        stored,
        None,
        use_gate_in_kernel=False,
        use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False,
        safe_gate=False,
        lower_bound=None,
        **OPTIONS,
    )
    plan = make_plan([0, tokens], 1)
    table = SegmentTable(plan, 0, batch=1, tokens=tokens, chunk_size=64, device=torch.device("cpu"))
    terms = ChunkTerms(*(x.double() for x in eager.chunk_terms(stored, table, settings)))
    want = torch.empty(1, 1, 128, 64, dtype=torch.float64)
    eager.walk_state(table.every, terms, None, exits=want)

    sharded = errors("final_state", got, want).max().item()
    alone = errors("final_state", one, want).max().item()
    print(f"errors of the final state: {P} ranks {sharded:.1e}, one rank {alone:.1e}")
    assert sharded < 1e-5
    assert sharded <= 1.5 * alone, (sharded, alone)
