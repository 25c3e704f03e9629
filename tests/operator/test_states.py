"""States go in and come out: given or not, differentiated or not, cut, carried and transposed."""

import itertools

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
    errors,
    run,
    run_reference,
    take,
)

FP32 = bounds(torch.float32)


@pytest.mark.parametrize("with_do", [True, False])
@pytest.mark.parametrize("with_dfinal", [True, False])
@pytest.mark.parametrize("with_initial", [True, False])
def test_every_combination_of_states_and_gradients(with_initial, with_dfinal, with_do):
    """Loss of o alone, the final state alone, both; from a state or from none."""
    if not (with_do or with_dfinal):
        pytest.skip("nothing to differentiate")
    inputs = draw_inputs(T=100, B=2, HV=4, K=24, V=40, initial_states=2 * with_initial)
    upstream = draw_upstream(inputs, final_states=2)
    upstream = {
        name: dy for name, dy in upstream.items() if (with_do if name == "o" else with_dfinal)
    }
    got, _ = assert_equals_reference(chunk_kda, inputs, upstream, impl="torch")
    if with_initial:
        assert got["dinitial_state"].dtype == torch.float32


def test_a_loss_of_o_alone_may_still_ask_for_the_final_state():
    """An unused final state gets no gradient and changes none."""
    inputs = draw_inputs(T=70, initial_states=1)
    upstream = draw_upstream(inputs, final_states=0)
    asked = run(chunk_kda, inputs, upstream, impl="torch", output_final_state=True)
    plain = run(chunk_kda, inputs, upstream, impl="torch")
    asked.pop("final_state")
    assert_bitwise(asked, plain)


@pytest.mark.parametrize(
    "wanted",
    [["initial_state"], ["q"], ["k"], ["v"], ["g"], ["beta"], ["A_log"], ["dt_bias"], ["k", "v"]],
    ids=",".join,
)
def test_only_some_inputs_require_a_gradient(wanted):
    """Each gradient is bitwise what it is when all are asked for; the others are None."""
    options = {"use_gate_in_kernel": True, "impl": "torch"}
    inputs = draw_inputs(T=70, raw_gate=True, A_log=True, dt_bias=True, initial_states=1)
    upstream = draw_upstream(inputs)
    every = run(chunk_kda, inputs, upstream, **options)
    some = run(chunk_kda, inputs, upstream, wanted=wanted, **options)
    assert set(some) == {"o", "final_state", *(f"d{name}" for name in wanted)}
    assert_bitwise(some, {name: every[name] for name in some})


def test_no_state_is_a_state_of_zeros():
    """None equals explicit zeros bitwise, backward included."""
    inputs = draw_inputs(T=130, B=2, HV=4)
    upstream = draw_upstream(inputs, final_states=2)
    zeros = torch.zeros(2, 4, 32, 32)
    none = run(chunk_kda, inputs, upstream, impl="torch")
    given = run(chunk_kda, {**inputs, "initial_state": zeros}, upstream, impl="torch")
    given.pop("dinitial_state")
    assert_bitwise(given, none)


@pytest.mark.parametrize("operator", [chunk_kda, fused_recurrent_kda])
@pytest.mark.parametrize("v_first", [False, True])
def test_layout_of_an_unsymmetric_rank_one_state(operator, v_first):
    """K = 64, V = 128 and S = a b^T: o = scale (q . a) b, and the state comes back as it was."""
    inputs = draw_inputs(T=1, H=1, K=64, V=128, dtype=torch.float64)
    inputs["beta"] = torch.zeros_like(inputs["beta"])
    inputs["g"] = torch.zeros_like(inputs["g"])
    a = torch.arange(64, dtype=torch.float64) - 20
    b = torch.arange(128, dtype=torch.float64) ** 1.5
    state = (a[:, None] * b).view(1, 1, 64, 128)
    state = state.mT.contiguous() if v_first else state
    o, final = operator(
        **inputs, initial_state=state, output_final_state=True, state_v_first=v_first
    )
    expected = 64**-0.5 * (inputs["q"].flatten() @ a) * b
    torch.testing.assert_close(o.flatten(), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(final, state, rtol=1e-12, atol=0)


@pytest.mark.parametrize("K", [24, 40])
def test_v_first_is_the_transpose_of_every_state(K):
    """initial, final, intermediate states and their gradients; K != V and K = V."""
    inputs = draw_inputs(T=130, HV=4, K=K, V=40, initial_states=1)
    upstream = draw_upstream(inputs)
    options = {"impl": "torch", "return_intermediate_states": True}
    k_first = run(chunk_kda, inputs, upstream, **options)
    transposed = {**inputs, "initial_state": inputs["initial_state"].mT.contiguous()}
    dfinal = {**upstream, "final_state": upstream["final_state"].mT.contiguous()}
    v_first = run(chunk_kda, transposed, dfinal, state_v_first=True, **options)
    for name in ("final_state", "h", "dinitial_state"):
        assert name == "dinitial_state" or v_first[name].is_contiguous(), name
        v_first[name] = v_first[name].mT
    assert_bitwise(v_first, k_first)


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 512, 960, 999])
def test_a_call_cut_in_two_equals_one_call(cut):
    """The state carried forward and its gradient back; bitwise where the cut is a chunk's edge."""
    inputs = draw_inputs(T=1000, K=16, initial_states=1)
    upstream = draw_upstream(inputs)
    whole = run(chunk_kda, inputs, upstream, impl="torch")
    parts = in_two(chunk_kda, chunk_kda, inputs, upstream, cut)
    assert_similar(parts, whole, FP32, inputs=inputs)
    if cut % 64 == 0:
        assert_bitwise(parts, whole)


@pytest.mark.parametrize("cut", [1, 17, 64, 100, 129])
def test_prefill_then_decode_equals_one_pass(cut):
    """First part by chunk_kda, second by fused_recurrent_kda, differentiated through both."""
    inputs = draw_inputs(T=130, HV=4, K=24, V=40, initial_states=1)
    upstream = draw_upstream(inputs)
    parts = in_two(chunk_kda, fused_recurrent_kda, inputs, upstream, cut)
    assert_similar(parts, run_reference(inputs, upstream), FP32, inputs=inputs)


def test_prefill_then_decode_token_by_token():
    """Twenty steps of one token, the state updated in place."""
    inputs = draw_inputs(T=90, B=2, HV=4, K=24, V=40)
    prefill = {name: x[:, :70] for name, x in inputs.items()}
    with torch.no_grad():
        o, state = chunk_kda(**prefill, output_final_state=True, impl="torch")
        steps = [o]
        for t in range(70, 90):
            token = {name: x[:, t : t + 1] for name, x in inputs.items()}
            o, same = fused_recurrent_kda(
                **token, initial_state=state, output_final_state=True, inplace_state=True
            )
            assert same is state
            steps.append(o)
    want = run_reference(inputs, {}, wanted=[], output_final_state=True)
    got = {"o": torch.cat(steps, 1), "final_state": state}
    assert_similar(got, want, FP32)


def in_two(first, second, inputs, upstream, cut):
    """One call as two that hand the state over, with all results put together again."""
    T = inputs["q"].shape[1]
    head, tail = (take(inputs, part) for part in (slice(cut), slice(cut, T)))
    _, middle = first(**head, output_final_state=True)
    tail_results = run(
        second, {**tail, "initial_state": middle.detach()}, take(upstream, slice(cut, T))
    )
    head_results = run(
        first, head, {"o": upstream["o"][:, :cut], "final_state": tail_results["dinitial_state"]}
    )
    results = {
        name: torch.cat([head_results[name], tail_results[name]], 1)
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta")
    }
    results["final_state"] = tail_results["final_state"]
    results["dinitial_state"] = head_results["dinitial_state"]
    return results


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_intermediate_states_are_the_entry_states_of_the_chunks(chunk_size, layout):
    """T = 130: states before 0, 64, 128; the one at 128 with the last two tokens gives o[128:]."""
    cu_seqlens = [0, 0, 70, 71, 130] if layout == "packed" else None
    B, N = (1, 4) if cu_seqlens else (2, 2)
    inputs = draw_inputs(T=130, B=B, HV=4, K=24, V=40, initial_states=N)
    _, _, states = reference_states(inputs, cu_seqlens)
    o, final_state, h = chunk_kda(
        **inputs,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        impl="torch",
        return_intermediate_states=True,
    )
    bounds_of = cu_seqlens or [0, 130]
    firsts = [t for a, b in itertools.pairwise(bounds_of) for t in range(a, b, chunk_size)]
    assert final_state is None
    assert h.shape == (B, len(firsts), 4, 24, 40) and h.dtype == torch.float32
    assert errors("h", h, states[:, firsts]).max() < 1e-5

    if cu_seqlens is None and chunk_size == 64:
        last = {n: x[:, 128:] for n, x in inputs.items() if n != "initial_state"}
        again, _ = chunk_kda(**last, initial_state=h[:, 2], impl="torch")
        assert torch.equal(again, o[:, 128:])


def reference_states(inputs, cu_seqlens):
    from kda_cp.reference import recurrent_kda_reference

    return recurrent_kda_reference(
        **inputs, output_final_state=True, cu_seqlens=cu_seqlens, return_states=True
    )


@pytest.mark.parametrize("final", [True, False])
def test_intermediate_states_are_free_under_training(final):
    """They are not differentiated, and asking for them changes no other bit."""
    inputs = draw_inputs(T=130, initial_states=1)
    upstream = draw_upstream(inputs, final_states=int(final))
    plain = run(chunk_kda, inputs, upstream, impl="torch")
    asked = run(chunk_kda, inputs, upstream, impl="torch", return_intermediate_states=True)
    asked.pop("h")
    assert_bitwise(asked, plain)
    leaf = inputs["q"].requires_grad_()
    assert not chunk_kda(**{**inputs, "q": leaf}, return_intermediate_states=True)[2].requires_grad


@pytest.mark.parametrize("training", [True, False])
def test_keeping_the_terms_changes_no_bit(training):
    """disable_recompute trades memory for time, nothing else."""
    inputs = draw_inputs(T=150, HV=4, initial_states=3, raw_gate=True, A_log=True, dt_bias=True)
    upstream = draw_upstream(inputs)
    options = {"use_gate_in_kernel": True, "cu_seqlens": [0, 65, 65, 150], "impl": "torch"}
    wanted = None if training else []
    plain = run(chunk_kda, inputs, upstream, wanted=wanted, **options)
    kept = run(chunk_kda, inputs, upstream, wanted=wanted, disable_recompute=True, **options)
    assert_bitwise(kept, plain)
