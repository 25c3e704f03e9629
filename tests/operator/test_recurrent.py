"""The token-by-token operator is the same function as the oracle and as the chunked one."""

from itertools import pairwise

import pytest
import torch

from kda_cp import chunk_kda, fused_recurrent_kda
from kda_cp.testing.compare import (
    assert_bitwise,
    assert_equals_reference,
    assert_similar,
    bounds,
    draw_inputs,
    draw_upstream,
    run,
    run_reference,
)

RAW = dict(raw_gate=True, A_log=True, dt_bias=True)
BOUNDED = dict(use_gate_in_kernel=True, safe_gate=True)
MODES = {
    "pre-gated": ({}, {}),
    "promised": ({}, dict(lower_bound=-20.0)),
    "softplus": (RAW, dict(use_gate_in_kernel=True)),
    "softplus without bias": ({**RAW, "dt_bias": False}, dict(use_gate_in_kernel=True)),
    "bounded": (RAW, dict(BOUNDED, lower_bound=-5.0)),
    "bounded without A_log": ({**RAW, "A_log": False}, dict(BOUNDED, lower_bound=-1)),
    "norm": ({}, dict(use_qk_l2norm_in_kernel=True)),
    "beta": ({}, dict(use_beta_sigmoid_in_kernel=True)),
    "neg": ({}, dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, scale=2)),
}
OPERATORS = {
    "chunk": chunk_kda,
    "recurrent": fused_recurrent_kda,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_every_mode_in_every_dtype(dtype, operator, mode):
    """Forward and all gradients, packed with an empty document, within the dtype's bounds."""
    drawn, options = MODES[mode]
    cu_seqlens = [0, 33, 33, 70]
    inputs = draw_inputs(T=70, HV=4, K=24, V=40, initial_states=3, dtype=dtype, **drawn)
    assert_equals_reference(
        OPERATORS[operator], inputs, draw_upstream(inputs), cu_seqlens=cu_seqlens, **options
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_impl_reference_is_the_oracle(operator, mode):
    """impl="reference" gives the oracle's results, rounded once to the types of the contract."""
    drawn, options = MODES[mode]
    inputs = draw_inputs(T=40, HV=4, K=24, V=40, initial_states=3, **drawn)
    upstream = draw_upstream(inputs)
    options = {**options, "cu_seqlens": [0, 17, 17, 35]}
    got = run(OPERATORS[operator], inputs, upstream, impl="reference", **options)
    for name, want in run_reference(inputs, upstream, **options).items():
        assert got[name].dtype == torch.float32
        torch.testing.assert_close(got[name], want.float(), rtol=1e-6, atol=1e-7)


def test_reference_and_torch_have_the_same_intermediate_states():
    """The third result agrees between implementations, packed, v-first."""
    inputs = draw_inputs(T=100, HV=4, K=24, V=40)
    options = dict(
        cu_seqlens=[0, 70, 70, 100],
        return_intermediate_states=True,
        state_v_first=True,
        output_final_state=True,
    )
    ours, oracle = (
        dict(zip(("o", "final_state", "h"), chunk_kda(**inputs, impl=impl, **options), strict=True))
        for impl in ("torch", "reference")
    )
    assert ours["h"].shape == (1, 3, 4, 40, 24)
    assert_similar(ours, oracle, 1e-5)


@pytest.mark.parametrize("T", [1, 2, 5])
@pytest.mark.parametrize("v_first", [False, True])
def test_a_decode_step(T, v_first):
    """One token or a few of many dense rows, with and without a state, in either layout."""
    inputs = draw_inputs(T=T, B=5, HV=4, K=24, V=24, initial_states=5)
    assert_equals_reference(
        fused_recurrent_kda, inputs, draw_upstream(inputs), state_v_first=v_first
    )
    inputs.pop("initial_state")
    assert_equals_reference(
        fused_recurrent_kda, inputs, draw_upstream(inputs, 5), state_v_first=v_first
    )


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_state_in_place(v_first, impl):
    """The final states are written into initial_state, bitwise what a copy would hold."""
    inputs = draw_inputs(T=3, B=5, HV=4, K=24, V=24, initial_states=5)
    options = dict(output_final_state=True, state_v_first=v_first, impl=impl)
    o, final = fused_recurrent_kda(**inputs, **options)
    state = inputs["initial_state"].clone()
    o_in_place, written = fused_recurrent_kda(
        **{**inputs, "initial_state": state}, inplace_state=True, **options
    )
    assert written is state
    assert torch.equal(written, final) and torch.equal(o_in_place, o)


def test_state_in_place_even_if_it_is_not_returned():
    """Writing and returning are two things."""
    inputs = draw_inputs(T=3, initial_states=1)
    _, final = fused_recurrent_kda(**inputs, output_final_state=True)
    _, none = fused_recurrent_kda(**inputs, inplace_state=True)
    assert none is None and torch.equal(inputs["initial_state"], final)


def test_state_in_place_into_a_slice_of_a_cache():
    """A strided state: only its own elements are written."""
    inputs = draw_inputs(T=1, B=2, initial_states=2)
    cache = torch.full((4, 2, 32, 64), 7.0)
    cache[1:3, :, :, :32] = inputs["initial_state"]
    _, final = fused_recurrent_kda(**inputs, output_final_state=True)
    inputs["initial_state"] = cache[1:3, :, :, :32]
    fused_recurrent_kda(**inputs, inplace_state=True)
    assert torch.equal(cache[1:3, :, :, :32], final)
    cache[1:3, :, :, :32] = 7.0
    assert (cache == 7.0).all()


def test_state_in_place_is_refused_under_a_gradient():
    """It would overwrite what the backward needs; without grad mode it is allowed."""
    inputs = draw_inputs(T=1, initial_states=1)
    inputs["q"].requires_grad_()
    with pytest.raises(ValueError, match=r"inplace_state: expected no gradient .* got"):
        fused_recurrent_kda(**inputs, inplace_state=True)
    with torch.no_grad():
        fused_recurrent_kda(**inputs, inplace_state=True)
    inputs.pop("initial_state")
    with pytest.raises(ValueError, match="inplace_state: expected an initial_state"):
        fused_recurrent_kda(**inputs, inplace_state=True)


def test_decoding_packed_is_decoding_apart_to_the_bit():
    """Documents of 1, 3, 0 and 2 tokens in one row."""
    inputs = draw_inputs(T=6, HV=4, K=24, V=40, initial_states=4)
    cu_seqlens = [0, 1, 4, 4, 6]
    o, final = fused_recurrent_kda(**inputs, cu_seqlens=cu_seqlens, output_final_state=True)
    for n, (start, stop) in enumerate(pairwise(cu_seqlens)):
        part = {m: x[:, start:stop] for m, x in inputs.items() if m != "initial_state"}
        alone = fused_recurrent_kda(
            **part, initial_state=inputs["initial_state"][n : n + 1], output_final_state=True
        )
        assert_bitwise(
            dict(o=alone[0], final_state=alone[1]),
            dict(o=o[:, start:stop], final_state=final[n : n + 1]),
        )


def test_bf16_results_carry_one_rounding():
    """The arithmetic is fp32 behind bf16 inputs: o is the fp64 result to a bf16 rounding, 2**-8."""
    inputs = draw_inputs(T=100, HV=4, K=24, V=40, dtype=torch.bfloat16, initial_states=1)
    upstream = draw_upstream(inputs)
    for operator in OPERATORS.values():
        got = run(operator, inputs, upstream)
        want = run_reference(inputs, upstream)
        assert_similar(got, want, 2**-8 + 1e-4, inputs=inputs)
        states = {n: got[n] for n in ("final_state", "dinitial_state")}
        assert_similar(states, {n: want[n] for n in states}, bounds(torch.float32))
