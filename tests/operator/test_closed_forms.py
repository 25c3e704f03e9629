"""Both operators reproduce formulas that can be written down by hand, to fp64 rounding."""

from functools import partial

import pytest
import torch

from kda_cp import chunk_kda, fused_recurrent_kda
from kda_cp.testing.compare import draw_inputs

chunk = partial(chunk_kda, impl="torch")
both = pytest.mark.parametrize("operator", [chunk, fused_recurrent_kda], ids=["chunk", "recurrent"])


def same(x, y):
    torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)


def one_key(T=150, K=24, V=16):
    """Inputs whose tokens all have the same unit key, and q = k; g = 0, beta = 1."""
    inputs = draw_inputs(T=T, K=K, V=V, dtype=torch.float64)
    key = inputs["k"][:, :1]
    inputs["q"] = inputs["k"] = key.expand(1, T, 2, K)
    inputs["g"] = torch.zeros_like(inputs["g"])
    inputs["beta"] = torch.ones_like(inputs["beta"])
    return inputs, key[0, 0]


@both
def test_hand_check_of_two_tokens(operator):
    """Decay comes first, then the delta correction: o = (1/4, 1/32)."""
    one = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    g = torch.tensor([0.5, 0.25], dtype=torch.float64).log().view(1, 2, 1, 1)
    beta = torch.full((1, 2, 1), 0.5, dtype=torch.float64)
    o, state = operator(one, one, 0 * one, g, beta, 1, one[:, :1], True)
    same(o.flatten(), torch.tensor([0.25, 0.03125], dtype=torch.float64))
    same(state.flatten(), torch.tensor([0.03125], dtype=torch.float64))


@both
def test_c1_one_key_returns_the_newest_value(operator):
    """With one unit key and beta = 1 the state holds the last value alone."""
    inputs, key = one_key()
    o, state = operator(**inputs, scale=0.37, output_final_state=True)
    same(o, 0.37 * inputs["v"])
    same(state[0], key.unsqueeze(-1) * inputs["v"][0, -1].unsqueeze(-2))


@both
def test_c2_beta_two_alternates(operator):
    """With beta = 2 a reflection: twice the value at even tokens, nothing at odd ones."""
    inputs, _ = one_key()
    inputs["beta"] = 2 * inputs["beta"]
    inputs["v"] = inputs["v"][:, :1].expand_as(inputs["v"])
    o, _ = operator(**inputs, scale=0.37)
    same(o[:, ::2], 2 * 0.37 * inputs["v"][:, ::2])
    same(o[:, 1::2], torch.zeros_like(o[:, 1::2]))


@both
def test_c3_beta_zero_only_decays_the_state(operator):
    """Nothing is written: o, the final state and dS_0 are the decayed S_0 and its adjoint."""
    inputs = draw_inputs(T=150, K=24, V=16, decay=0.02, initial_states=1, dtype=torch.float64)
    inputs["beta"] = torch.zeros_like(inputs["beta"])
    S_0 = inputs["initial_state"].requires_grad_()
    o, state = operator(**inputs, scale=0.37, output_final_state=True)
    decay = inputs["g"].cumsum(1).exp()[0]  # [T, HV, K]
    expected = 0.37 * torch.einsum("thk,thk,hkv->thv", inputs["q"][0], decay, S_0[0])
    same(o[0], expected)
    same(state[0], decay[-1].unsqueeze(-1) * S_0[0])

    do, dS_T = torch.randn_like(o), torch.randn_like(state)
    (dS_0,) = torch.autograd.grad([o, state], S_0, [do, dS_T])
    from_o = 0.37 * torch.einsum("thk,thk,thv->hkv", decay, inputs["q"][0], do[0])
    same(dS_0[0], decay[-1].unsqueeze(-1) * dS_T[0] + from_o)


@both
@pytest.mark.parametrize("t0", [0, 5, 16, 63, 64, 100])
def test_c4_a_gate_of_minus_1000_forgets_everything(operator, t0):
    """From t0 on nothing depends on what came before, in either direction, and dg there is 0."""
    T = 150
    inputs = draw_inputs(T=T, K=16, initial_states=1)
    inputs["g"][:, t0] = -1000.0
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    o, state = operator(**leaves, output_final_state=True)
    (o[:, t0:].square().sum() + state.square().sum()).backward()
    for name in ("q", "k", "v", "g", "beta"):
        assert (leaves[name].grad[:, :t0] == 0).all(), name
    assert (leaves["g"].grad[:, t0] == 0).all()
    assert (leaves["initial_state"].grad == 0).all()

    alone = {name: x[:, t0:].detach() for name, x in inputs.items() if name != "initial_state"}
    o_alone, state_alone = operator(**alone, output_final_state=True)
    torch.testing.assert_close(o[:, t0:], o_alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, state_alone, rtol=1e-5, atol=1e-6)


@both
def test_c5_one_token_from_an_empty_state(operator):
    """T = 1: o = scale beta (q . k) v."""
    inputs = draw_inputs(T=1, B=3, HV=4, K=24, V=16, dtype=torch.float64)
    o, _ = operator(**inputs)
    dots = (inputs["q"] * inputs["k"]).sum(-1).repeat_interleave(2, dim=2)
    same(o, 24**-0.5 * (inputs["beta"] * dots).unsqueeze(-1) * inputs["v"])


@both
def test_c6_a_token_of_zeros_is_the_identity(operator):
    """A token with beta = 0 and g = 0 leaves the state as it is."""
    inputs = draw_inputs(T=90, K=24, V=16, initial_states=1, dtype=torch.float64)
    silent = torch.arange(90) % 3 == 1
    inputs["beta"][:, silent] = 0
    inputs["g"][:, silent] = 0
    o, state = operator(**inputs, output_final_state=True)
    kept = {n: x if n == "initial_state" else x[:, ~silent] for n, x in inputs.items()}
    o_kept, state_kept = operator(**kept, output_final_state=True)
    same(o[:, ~silent], o_kept)
    same(state, state_kept)
