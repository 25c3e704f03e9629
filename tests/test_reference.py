"""The oracle against arithmetic that needs no oracle: hand values, closed forms, symmetries.

Everything is fp64 and on the CPU. Tolerances are fp64 rounding: T * K additions of terms of size 1
lose about 1e-14, so 1e-12 passes only exact formulas.
"""

import pytest
import torch

from kda_cp.reference import recurrent_kda_reference as reference

F64 = torch.float64
GATES = {
    "pre-gated": {},
    "softplus": {"use_gate_in_kernel": True},
    "safe": {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.0},
}


def close(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=atol)


def draw(B=1, T=9, H=1, HV=2, K=3, V=4, seed=0):
    """Inputs with beta |k|^2 <= 2 and mild decay: q, k, v, g, beta."""
    r = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=r, dtype=F64)

    k = torch.nn.functional.normalize(normal(B, T, H, K), dim=-1)
    beta = torch.sigmoid(normal(B, T, HV))
    return normal(B, T, H, K), k, normal(B, T, HV, V), -normal(B, T, HV, K).abs(), beta


def draw_state(N, HV, K, V, seed=1):
    return torch.randn(N, HV, K, V, generator=torch.Generator().manual_seed(seed), dtype=F64)


def one_key(T, K=4, V=3, beta=1.0):
    """One unit key for all tokens, q = k, g = 0: k [K], v [1, T, 1, V] and the five inputs."""
    key = torch.tensor([0.5, -0.5, 0.5, 0.5], dtype=F64)[:K]
    k = key.expand(1, T, 1, K)
    v = draw(T=T, HV=1, K=K, V=V)[2]
    return key, v, (k, k, v, torch.zeros(1, T, 1, K, dtype=F64), v.new_full((1, T, 1), beta))


def test_hand_check_decay_comes_before_the_correction():
    one = torch.ones(1, 2, 1, 1, dtype=F64)
    g = torch.tensor([0.5, 0.25], dtype=F64).log().view(1, 2, 1, 1)
    o, state = reference(
        one, one, 0 * one, g, 0.5 * one[..., 0], 1, one[:, :1], output_final_state=True
    )
    close(o.flatten(), torch.tensor([0.25, 0.03125], dtype=F64), atol=1e-16)
    close(state.flatten(), torch.tensor([0.03125], dtype=F64), atol=1e-16)


def test_c1_one_key_with_beta_one_returns_the_latest_value():
    key, v, inputs = one_key(T=50)
    o, state = reference(*inputs, scale=0.37, output_final_state=True)
    close(o, 0.37 * v)
    close(state[0, 0], key[:, None] * v[0, -1, 0])


def test_c2_one_key_with_beta_two_alternates():
    _, v, inputs = one_key(T=50, beta=2.0)
    v = v[:, :1].expand_as(v)
    q, k, _, g, beta = inputs
    o, _ = reference(q, k, v, g, beta, scale=0.37)
    close(o[:, 0::2], 2 * 0.37 * v[:, 0::2])
    close(o[:, 1::2], 0 * v[:, 1::2])


def test_c3_beta_zero_only_decays_forward_and_backward():
    q, k, v, g, _ = draw(T=7, H=2, HV=2)
    S0 = draw_state(1, 2, 3, 4).requires_grad_()
    do, dS = torch.randn_like(v), torch.randn_like(S0)
    o, state = reference(q, k, v, g, v.new_zeros(1, 7, 2), 0.37, S0, True)
    decay = g.cumsum(1).exp()  # [1, T, HV, K]
    close(o, 0.37 * torch.einsum("bthk,bthk,bhkv->bthv", q, decay, S0))
    close(state, decay[:, -1].unsqueeze(-1) * S0)
    (dS0,) = torch.autograd.grad((o * do).sum() + (state * dS).sum(), S0)
    close(
        dS0,
        decay[:, -1].unsqueeze(-1) * dS + 0.37 * torch.einsum("bthk,bthk,bthv->bhkv", decay, q, do),
    )


def test_c4_a_total_decay_cuts_the_past_off():
    q, k, v, g, beta = draw(T=10)
    g[:, 6] = -1000.0
    S0 = draw_state(1, 2, 3, 4)
    g.requires_grad_()
    o, state = reference(q, k, v, g, beta, None, S0, True)
    restarted = reference(*(x[:, 6:] for x in (q, k, v, g, beta)), output_final_state=True)
    assert torch.equal(o[:, 6:], restarted[0]) and torch.equal(state, restarted[1])
    (dg,) = torch.autograd.grad(o.sum() + state.sum(), g)
    assert torch.equal(dg[:, 6], torch.zeros_like(dg[:, 6]))
    assert dg[:, 5].abs().min() > 0  # through o[5], so the zero above is no accident


def test_c5_one_token_from_zero():
    q, k, v, g, beta = draw(T=1, H=2, HV=2)
    o, _ = reference(q, k, v, g, beta, scale=0.37)
    close(o, 0.37 * beta[..., None] * (q * k).sum(-1, keepdim=True) * v)


def test_c6_beta_zero_without_decay_is_the_identity():
    q, k, v, g, beta = draw(T=1)
    S0 = draw_state(1, 2, 3, 4)
    _, state = reference(q, k, v, 0 * g, 0 * beta, None, S0, True)
    assert torch.equal(state, S0)


def test_scale_none_is_the_inverse_root_of_k_and_any_value_multiplies():
    inputs = draw()
    unscaled, _ = reference(*inputs, scale=1)
    close(reference(*inputs)[0], 3**-0.5 * unscaled)
    for scale in (1.0, 0.37, -0.5, 2, 0):
        close(reference(*inputs, scale=scale)[0], scale * unscaled)


def test_packed_equals_separate_bitwise_with_empty_sequences_and_rows_past_the_end():
    cu_seqlens = torch.tensor([0, 0, 3, 4, 4, 9])
    inputs = [x.requires_grad_() for x in draw(T=11, H=2, HV=4)]
    S0 = draw_state(5, 4, 3, 4).requires_grad_()
    do = torch.randn(1, 11, 4, 4, dtype=F64)
    o, state = reference(*inputs, None, S0, True, cu_seqlens=cu_seqlens)
    packed = torch.autograd.grad((o * do).sum() + state.sum(), [*inputs, S0])
    assert torch.equal(o[:, 9:], torch.zeros(1, 2, 4, 4, dtype=F64))
    assert all(torch.equal(d[:, 9:], torch.zeros_like(d[:, 9:])) for d in packed[:5])
    for n, (start, stop) in enumerate([(0, 0), (0, 3), (3, 4), (4, 4), (4, 9)]):
        mine = [x[:, start:stop].detach().requires_grad_() for x in inputs]
        s0 = S0[n : n + 1].detach().requires_grad_()
        o_n, state_n = reference(*mine, None, s0, True)
        assert torch.equal(o[:, start:stop], o_n) and torch.equal(state[n : n + 1], state_n)
        alone = torch.autograd.grad((o_n * do[:, start:stop]).sum() + state_n.sum(), [*mine, s0])
        for joint, single in zip(packed[:5], alone[:5], strict=True):
            assert torch.equal(joint[:, start:stop], single)
        assert torch.equal(packed[5][n : n + 1], alone[5])


def test_no_token_at_all_returns_the_initial_state_and_passes_its_gradient():
    inputs = [x.requires_grad_() for x in draw(T=0)]
    S0 = draw_state(3, 2, 3, 4).requires_grad_()
    o, state = reference(*inputs, None, S0, True, cu_seqlens=[0, 0, 0, 0])
    assert o.shape == (1, 0, 2, 4) and torch.equal(state, S0)
    grads = torch.autograd.grad(o.sum() + (2 * state).sum(), [*inputs, S0])
    assert torch.equal(grads[-1], torch.full_like(S0, 2.0))


def test_dense_rows_equal_separate_calls():
    inputs, S0 = draw(B=3, H=2, HV=4), draw_state(3, 4, 3, 4)
    o, state = reference(*inputs, None, S0, True)
    for b in range(3):
        one = slice(b, b + 1)
        o_b, state_b = reference(*(x[one] for x in inputs), None, S0[one], True)
        assert torch.equal(o[one], o_b) and torch.equal(state[one], state_b)


def test_nan_in_one_sequence_leaves_the_others_untouched():
    cu_seqlens = [0, 3, 7, 9]
    q, k, v, g, beta = draw()
    S0 = draw_state(3, 2, 3, 4)
    clean = reference(q, k, v, g, beta, None, S0, True, cu_seqlens=cu_seqlens)
    for x in (v[:, 3:7], k[:, 3:7], g[:, 3:7], beta[:, 3:7], S0[1]):
        x.fill_(torch.nan)
    o, state = reference(q, k, v, g, beta, None, S0, True, cu_seqlens=cu_seqlens)
    for row in (slice(0, 3), slice(7, 9)):
        assert torch.equal(o[:, row], clean[0][:, row])
    assert torch.equal(state[[0, 2]], clean[1][[0, 2]]) and o[:, 3:7].isnan().all()


@pytest.mark.parametrize(("H", "HV"), [(1, 2), (2, 8), (3, 6)])
def test_grouped_heads_equal_repeated_queries_and_keys(H, HV):
    q, k, v, g, beta = draw(H=H, HV=HV)
    q.requires_grad_(), k.requires_grad_()
    q_all, k_all = (
        x.detach()[:, :, [hv // (HV // H) for hv in range(HV)]].requires_grad_() for x in (q, k)
    )
    o, _ = reference(q, k, v, g, beta)
    o_all, _ = reference(q_all, k_all, v, g, beta)
    assert torch.equal(o, o_all)
    do = torch.randn_like(o)
    grouped = torch.autograd.grad(o, (q, k), do)
    for mine, every in zip(grouped, torch.autograd.grad(o_all, (q_all, k_all), do), strict=True):
        close(mine, every.unflatten(2, (H, HV // H)).sum(3))


def test_state_v_first_is_the_transposed_state_in_and_out():
    inputs = draw(T=3, H=1, HV=1, K=64, V=128)
    S0 = torch.outer(torch.arange(64.0), torch.arange(128.0) ** 2)[None, None].to(F64)
    o, state, states = reference(*inputs, None, S0, True, return_states=True)
    S0_v_first = S0.transpose(-1, -2).contiguous()
    o_v, state_v, states_v = reference(
        *inputs, None, S0_v_first, True, state_v_first=True, return_states=True
    )
    assert state.shape == (1, 1, 64, 128) and state_v.shape == (1, 1, 128, 64)
    assert torch.equal(o, o_v) and torch.equal(state, state_v.transpose(-1, -2))
    assert torch.equal(states, states_v.transpose(-1, -2)) and torch.equal(states[:, 0], S0)


@pytest.mark.parametrize("cut", [0, 1, 4, 8, 9])
def test_carrying_the_state_over_a_cut_changes_nothing(cut):
    inputs, S0 = draw(H=2, HV=4), draw_state(1, 4, 3, 4)
    o, state = reference(*inputs, None, S0, True)
    first, carried = reference(*(x[:, :cut] for x in inputs), None, S0, True)
    second, final = reference(*(x[:, cut:] for x in inputs), None, carried, True)
    assert torch.equal(o, torch.cat([first, second], 1)) and torch.equal(state, final)


def test_returned_states_are_the_states_before_each_token():
    cu_seqlens = [0, 4, 4, 7]
    inputs, S0 = draw(), draw_state(3, 2, 3, 4)
    *_, states = reference(*inputs, None, S0, cu_seqlens=cu_seqlens, return_states=True)
    assert states.shape == (1, 9, 2, 3, 4)
    for n, start, stop in ((0, 0, 4), (2, 4, 7)):
        for t in range(start, stop):
            prefix = (x[:, start:t] for x in inputs)
            assert torch.equal(states[:, t], reference(*prefix, None, S0[n : n + 1], True)[1])
    assert torch.equal(states[:, 7:], torch.zeros_like(states[:, 7:]))


def test_final_state_is_none_unless_asked_for():
    assert reference(*draw())[1] is None


def test_options_equal_the_inputs_they_stand_for():
    q, k, v, g, logits = draw(H=2, HV=2)
    A_log, dt_bias = torch.tensor([-0.3, 0.7], dtype=F64), torch.linspace(-1, 1, 6, dtype=F64)
    z, rate = g + dt_bias.view(2, 3), A_log.exp().view(2, 1)
    unit = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)]
    beta = torch.sigmoid(logits)
    F = torch.nn.functional
    gate = {"A_log": A_log, "dt_bias": dt_bias, "use_gate_in_kernel": True}
    safe = {**gate, "safe_gate": True, "lower_bound": -2.0}
    sig = {"use_beta_sigmoid_in_kernel": True}

    def same(explicit, **options):
        close(reference(q, k, v, g, logits, **options)[0], reference(*explicit)[0])

    same((*unit, v, g, logits), use_qk_l2norm_in_kernel=True)
    same((q, k, v, g, beta), **sig)
    same((q, k, v, g, 2 * beta), allow_neg_eigval=True, **sig)
    same((q, k, v, -rate * F.softplus(z), logits), **gate)
    same((q, k, v, -2 * torch.sigmoid(rate * z), logits), **safe)
    same((q, k, v, -2 * torch.sigmoid(z), logits), **{**safe, "A_log": None})
    same((q, k, v, -2 * torch.sigmoid(rate * g), logits), **{**safe, "dt_bias": None})
    same((q, k, v, g, logits), lower_bound=-5.0)  # a promise about g, not an activation


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_every_input_agree_with_finite_differences(gate, packed):
    options = {
        "cu_seqlens": [0, 2, 2, 5] if packed else None,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "scale": 0.37,
        **GATES[gate],
    }
    B, N = (1, 3) if packed else (2, 2)
    inputs = [*draw(B=B, T=5, H=1, HV=2, K=2, V=3), draw_state(N, 2, 2, 3)]
    if options.get("use_gate_in_kernel"):
        inputs += [torch.tensor([-0.3, 0.7], dtype=F64), torch.linspace(-1, 1, 4, dtype=F64)]

    def run(q, k, v, g, beta, S0, A_log=None, dt_bias=None):
        return reference(
            q, k, v, g, beta, initial_state=S0, output_final_state=True,
            A_log=A_log, dt_bias=dt_bias, **options,
        )  # fmt: skip

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in inputs])


@pytest.mark.parametrize("gate", ["softplus", "safe"])
def test_extreme_gate_and_beta_logits_have_finite_gradients(gate):
    q, k, v, g, beta = draw()
    g.view(-1)[:5] = torch.tensor([-1e4, -800.0, 0.0, 800.0, 1e4])
    beta.view(-1)[:5] = torch.tensor([-1e4, -800.0, 0.0, 800.0, 1e4])
    options = {"use_beta_sigmoid_in_kernel": True, "A_log": v.new_zeros(2), **GATES[gate]}
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta, options["A_log"])]
    o, _ = reference(*inputs[:5], **options)
    assert o.isfinite().all()
    assert all(d.isfinite().all() for d in torch.autograd.grad(o.sum(), inputs))


def test_results_have_the_judges_dtype_and_gradients_the_inputs():
    inputs = [x.to(torch.bfloat16).requires_grad_() for x in draw()]
    o, state = reference(*inputs, output_final_state=True)
    assert o.dtype == state.dtype == F64
    assert {d.dtype for d in torch.autograd.grad(o.sum(), inputs)} == {torch.bfloat16}
    single, state = reference(*inputs, output_final_state=True, dtype=torch.float32)
    assert single.dtype == state.dtype == torch.float32
    torch.testing.assert_close(single, o.float(), rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(reference(*inputs, dtype=torch.float32)[0], single)


def test_inputs_are_left_as_they_were():
    inputs = [*draw(), draw_state(1, 2, 3, 4)]
    before = [x.clone() for x in inputs]
    reference(*inputs[:5], None, inputs[5], True)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"safe_gate": True}, "safe_gate"),
        ({"A_log": torch.zeros(2)}, "A_log"),
        ({"dt_bias": torch.zeros(6)}, "dt_bias"),
        ({"use_gate_in_kernel": True}, "A_log"),
        ({"use_gate_in_kernel": True, "safe_gate": True}, "lower_bound"),
        (
            {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "lower_bound": -5.0},
            "lower_bound",
        ),
        ({"allow_neg_eigval": True}, "allow_neg_eigval"),
    ],
)
def test_an_option_without_effect_is_refused_by_name(options, name):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        reference(*draw(), **options)


def test_shapes_that_would_mix_sequences_or_heads_are_refused():
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected B = 1 .* got B = 2"):
        reference(*draw(B=2), cu_seqlens=[0, 9])
    with pytest.raises(ValueError, match=r"^v: expected HV divisible by H = 2, got HV = 3"):
        reference(*draw(H=2, HV=3))
    with pytest.raises(RuntimeError):  # three states for two sequences
        reference(*draw(), None, draw_state(3, 2, 3, 4), cu_seqlens=[0, 4, 9])


@pytest.mark.parametrize("tokens", [0, 5])
def test_no_sequences_at_all(tokens: int) -> None:
    x = torch.randn(1, tokens, 1, 4)
    o, state = reference(
        x, x, x, -x.abs(), torch.rand(1, tokens, 1), cu_seqlens=[0], output_final_state=True
    )
    assert o.shape == x.shape and not o.any()
    assert state.shape == (0, 1, 4, 4)
