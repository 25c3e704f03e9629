"""The past does not know the future, to the bit: forward, and backward for a loss on the past."""

import pytest
import torch

from kda_cp import chunk_kda, fused_recurrent_kda
from kda_cp.testing.compare import assert_bitwise, draw_inputs, run

TOKENS = ("q", "k", "v", "g", "beta")
MODES = {
    "pre-gated": ({}, {}),
    "in the kernel": (
        dict(raw_gate=True, A_log=True, dt_bias=True),
        dict(
            use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
        ),
    ),
}


def past(operator, inputs, known, **options):
    """Results for a loss on the first `known` tokens alone, cut to those tokens."""
    generator = torch.Generator().manual_seed(3)
    _, _, heads, V = inputs["v"].shape
    do = torch.zeros_like(inputs["v"])
    do[:, :known] = torch.randn(1, known, heads, V, generator=generator).to(do.dtype)
    results = run(operator, inputs, {"o": do}, **options)
    for name in ("q", "k", "v", "g", "beta"):
        assert (results[f"d{name}"][:, known:] == 0).all(), f"d{name} of the future"
    return {n: x[:, :known] for n, x in results.items() if n in ("o", *(f"d{m}" for m in TOKENS))}


def longer(inputs, T):
    """The same tokens with others behind them, T in all."""
    known = inputs["q"].shape[1]
    other = draw_inputs(T=T, HV=4, K=24, V=40, seed=9)
    return {
        name: torch.cat([x, other[name][:, known:].to(x.dtype)], 1) if name in TOKENS else x
        for name, x in inputs.items()
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", [-1e-3, -5.0, -50.0, -1000.0])
def test_the_last_gate_reaches_no_earlier_output(last, dtype, mode):
    """T = 22, only the last gate changed: o[:21] and its gradients are bitwise the same."""
    drawn, options = MODES[mode]
    inputs = draw_inputs(T=22, HV=4, K=24, V=40, initial_states=1, dtype=dtype, **drawn)
    changed = {**inputs, "g": inputs["g"].clone()}
    changed["g"][:, 21:] = last
    for operator in (chunk_kda, fused_recurrent_kda):
        before = past(operator, inputs, 21, **options)
        assert_bitwise(past(operator, changed, 21, **options), before)


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("at", [3, 16, 21, 40, 63, 64, 70, 128])
@pytest.mark.parametrize("value", [0.0, -1000.0])
def test_any_later_gate_reaches_no_earlier_output(value, at, chunk_size):
    """A gate of 0 or -1000 in the middle of a block, at its edge, in a later chunk."""
    inputs = draw_inputs(T=140, HV=4, K=24, V=40, initial_states=1)
    changed = {**inputs, "g": inputs["g"].clone()}
    changed["g"][:, at] = value
    before = past(chunk_kda, inputs, at, chunk_size=chunk_size)
    assert_bitwise(past(chunk_kda, changed, at, chunk_size=chunk_size), before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("known", [1, 15, 16, 21, 22, 63, 64, 65])
@pytest.mark.parametrize("T", [33, 66, 140, 700])
def test_more_tokens_reach_no_earlier_output(T, known, mode):
    """Extending a call moves no bit of what it gave before, in any chunk or slab."""
    if known >= T:
        pytest.skip("not longer")
    drawn, options = MODES[mode]
    inputs = draw_inputs(T=known, HV=4, K=24, V=40, initial_states=1, **drawn)
    before = past(chunk_kda, inputs, known, **options)
    assert_bitwise(past(chunk_kda, longer(inputs, T), known, **options), before)


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("at", [5, 16, 63, 64])
def test_no_later_token_reaches_an_earlier_output(name, at):
    """One input of every later token changed; k and beta so that the recurrence does not grow."""
    inputs = draw_inputs(T=100, HV=4, K=24, V=40, initial_states=1)
    changed = {**inputs, name: inputs[name].clone()}
    changed[name][:, at:] *= 0.5 if name in ("k", "beta") else 50
    before = past(chunk_kda, inputs, at)
    assert_bitwise(past(chunk_kda, changed, at), before)


def test_a_document_does_not_know_the_next_one():
    """The same for the last token of document A and document B in one packed row."""
    inputs = draw_inputs(T=100, HV=4, K=24, V=40, initial_states=2)
    changed = {name: x.clone() for name, x in inputs.items()}
    for name in TOKENS:
        changed[name][:, 36] *= 0.5
    upstream = {"o": torch.randn(1, 100, 4, 40), "final_state": torch.randn(2, 4, 24, 40)}
    before = run(chunk_kda, inputs, upstream, cu_seqlens=[0, 37, 100])
    after = run(chunk_kda, changed, upstream, cu_seqlens=[0, 37, 100])
    for name, x in after.items():
        part = (slice(1, 2),) if "state" in name else (slice(None), slice(37, None))
        assert torch.equal(x[part], before[name][part]), name
        assert not torch.equal(x, before[name]), name
