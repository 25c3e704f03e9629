"""No gate is too strong or too weak, no key too correlated: finite and accurate for any g <= 0."""

import pytest
import torch

from kda_cp import chunk_kda, eager
from kda_cp.segments import SegmentTable
from kda_cp.stages import Inputs, Settings
from kda_cp.testing.compare import (
    assert_equals_reference,
    assert_similar,
    bounds,
    draw_inputs,
    draw_upstream,
    run,
    run_reference,
)

T = 150
TIGHT = 1e-5
"""What fp32 arithmetic without cancellation leaves; the general bound is 1e-4."""


def drawn(**options):
    return draw_inputs(**{"T": T, "HV": 4, "K": 24, "V": 16, "initial_states": 1, **options})


def check(inputs, bound=None, **options):
    return assert_equals_reference(
        chunk_kda, inputs, draw_upstream(inputs), bound, impl="torch", **options
    )


@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("g", [-0.1, -5.0, -5.5, -5.95, -8.0, -11.2, -20.0, -50.0, -200.0, -1e3])
def test_constant_gates(g, chunk_size):
    """One gate everywhere, from weak to far beyond what a quotient of exponentials could hold."""
    inputs = drawn()
    inputs["g"] = torch.full_like(inputs["g"], g)
    check(inputs, chunk_size=chunk_size)


@pytest.mark.parametrize("g", [-0.1, -5.0, -8.0, -20.0, -50.0])
def test_strong_gates_lose_no_digit_of_dg(g):
    """Score dg relative to itself, without the allowance for cancelling terms: none cancel here."""
    inputs = drawn()
    inputs["g"] = torch.full_like(inputs["g"], g)
    upstream = draw_upstream(inputs)
    got = run(chunk_kda, inputs, upstream, impl="torch")
    assert_similar(got, run_reference(inputs, upstream), TIGHT)


def test_half_the_channels_remember_and_half_forget():
    """Channels of -1e-4 beside channels of -50."""
    inputs = drawn()
    inputs["g"] = torch.where(torch.arange(24) % 2 == 0, -1e-4, -50.0).expand_as(inputs["g"])
    check(inputs)


@pytest.mark.parametrize("block", [1, 3, 16, 64])
@pytest.mark.parametrize("strong", [-0.1, -5.0, -50.0, -1000.0])
def test_blocks_of_strong_gates_alternate_with_none(strong, block):
    """Blocks of tokens at the bound and at 0 in turn."""
    inputs = drawn()
    blocks = torch.arange(T)[:, None, None] // block
    inputs["g"] = torch.where(blocks % 2 == 0, strong, 0.0).expand_as(inputs["g"]).contiguous()
    check(inputs, TIGHT)


@pytest.mark.parametrize("seed", range(3))
def test_gates_of_0_and_a_tenth_and_minus_1000_within_a_chunk_lose_no_digit(seed):
    """Token by token and channel by channel, any of 0, -0.1 and -1000: exact to fp32 rounding."""
    inputs = drawn(T=200, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(0, 12, inputs["g"].shape, generator=generator).clamp(max=2)
    inputs["g"] = torch.tensor([0.0, -1000.0, -0.1])[pick]
    check(inputs, TIGHT)


@pytest.mark.parametrize("where", ["everywhere", "half the tokens", "half the channels"])
def test_no_decay(where):
    """No gate is the plain delta rule."""
    inputs = drawn()
    silent = torch.ones_like(inputs["g"], dtype=torch.bool)
    if where == "half the tokens":
        silent[:, ::2] = False
    if where == "half the channels":
        silent[..., ::2] = False
    inputs["g"] = torch.where(silent, 0.0, inputs["g"])
    check(inputs)


@pytest.mark.parametrize("lower_bound", [-5.0, -1.0, -0.1])
@pytest.mark.parametrize("block", [16, 64])
def test_saturated_gates_in_the_kernel(lower_bound, block):
    """Blocks of raw gates of +-100 and 0: at the bound, at no decay, and between."""
    inputs = drawn(raw_gate=True, A_log=True, dt_bias=True)
    blocks = torch.arange(T)[:, None, None] // block % 3
    inputs["g"] = inputs["g"] + (torch.tensor([100.0, -100.0, 0.0])[blocks])
    check(inputs, use_gate_in_kernel=True, safe_gate=True, lower_bound=lower_bound)


@pytest.mark.parametrize("shift", [-100.0, 0.0, 30.0])
def test_softplus_gate_over_its_range(shift):
    """From exp(-100) to -30 times the rate."""
    inputs = drawn(raw_gate=True, A_log=True, dt_bias=True)
    inputs["g"] = inputs["g"] + shift
    check(inputs, use_gate_in_kernel=True)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("length", [64, 256])
def test_correlated_keys(rho, length):
    """Unit keys of correlation rho, g = 0, beta = 1: where an inverse by squaring breaks down."""
    inputs = correlated(rho, length, K=64)
    check(inputs)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, 0.99])
def test_inverse_of_correlated_keys(rho):
    """The strictly lower part of the inverse, read off as the u of v = identity."""
    inputs = correlated(rho, 64, K=64)
    inputs["v"] = torch.eye(64).view(1, 64, 1, 64)
    settings = Settings(1.0, 64, False, False, None, False, 1.0)
    call = Inputs(*(inputs[name] for name in ("q", "k", "v", "g", "beta")), None, None)
    terms = eager.chunk_terms(call, one_sequence(64), settings)
    k = inputs["k"][0, :, 0].double()
    system = torch.eye(64, dtype=torch.float64) + (k @ k.T).tril(-1)
    inverse = torch.linalg.inv(system).tril(-1)
    found = terms.u[0, 0].double().tril(-1)
    assert (found - inverse).norm() < 2e-6 * inverse.norm()
    assert (terms.u[0, 0].triu(1) == 0).all()


def correlated(rho, length, K):
    """Unit keys sqrt(rho) k0 + sqrt(1 - rho) noise, g = 0, beta = 1, one head."""
    inputs = draw_inputs(T=length, H=1, K=K, initial_states=1)
    generator = torch.Generator().manual_seed(7)
    k0, noise = (
        torch.nn.functional.normalize(torch.randn(n, K, generator=generator), dim=-1)
        for n in (1, length)
    )
    keys = rho**0.5 * k0 + (1 - rho) ** 0.5 * noise
    inputs["k"] = torch.nn.functional.normalize(keys, dim=-1).view(1, length, 1, K)
    inputs["g"] = torch.zeros_like(inputs["g"])
    inputs["beta"] = torch.ones_like(inputs["beta"])
    return inputs


def one_sequence(length):
    from kda_cp import build_cp_context

    context = build_cp_context(length, None)
    device = torch.device("cpu")
    table: SegmentTable = context.segment_table(batch=1, chunk_size=64, device=device)
    return table


@pytest.mark.parametrize("scale", [None, 1, 1.0, 0.37, -0.5])
def test_scale_reaches_every_gradient(scale):
    """None, an int, a fraction and a negative scale."""
    check(drawn(), scale=scale)


def test_beta_is_not_clamped():
    """Write strengths from -0.4 to 1.9 are taken as they are."""
    inputs = drawn()
    inputs["beta"] = -0.4 + 2.3 * inputs["beta"]
    check(inputs)


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_beta_logits(allow_neg_eigval):
    """The gradient goes to the logits, through the sigmoid and its factor."""
    inputs = drawn()
    inputs["beta"] = 6 * inputs["beta"] - 3
    check(inputs, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=allow_neg_eigval)


def test_norm_in_the_kernel():
    """Take q and k of any length; dq and dk through the norm."""
    inputs = drawn()
    inputs["k"] = 3 * inputs["k"]
    inputs["k"][:, 5] *= 1e-3  # where the epsilon counts
    inputs["q"][:, 6] *= 1e-4
    check(inputs, use_qk_l2norm_in_kernel=True)


def test_a_zero_key_and_a_zero_query_are_normalised_to_zero():
    """No division by zero, forward or backward."""
    inputs = drawn()
    inputs["k"][:, 5] = 0
    inputs["q"][:, 6] = 0
    check(inputs, use_qk_l2norm_in_kernel=True)


def test_bounds_hold_in_bf16_at_the_bound():
    """bf16 with gates at -5 on blocks of 16, all results."""
    inputs = drawn(dtype=torch.bfloat16)
    blocks = torch.arange(T)[:, None, None] // 16
    g = torch.where(blocks % 2 == 0, -5.0, 0.0).expand_as(inputs["g"])
    inputs["g"] = g.to(torch.bfloat16).contiguous()
    check(inputs, bounds(torch.bfloat16))
