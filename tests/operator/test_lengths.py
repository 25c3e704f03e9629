"""Every length is right, in every chunk size, whatever lies around the buffers."""

import pytest
import torch

from kda_cp import chunk_kda
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
)

LENGTHS = [1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 80, 127, 129, 1000]


def surrounded(tensors, filling, after):
    """The same values as views into larger buffers filled with `filling`."""

    def surround(x):
        buffer = torch.full((x.numel() + 333 + after,), filling, dtype=x.dtype)
        view = buffer[333 : 333 + x.numel()].view(x.shape)
        return view.copy_(x)

    return {name: surround(x) for name, x in tensors.items()}


@pytest.mark.parametrize("T", LENGTHS)
def test_every_length_dense(T):
    """Two dense rows of T tokens, all results."""
    inputs = draw_inputs(T=T, B=2, HV=4, K=24, V=40, initial_states=2)
    assert_equals_reference(chunk_kda, inputs, draw_upstream(inputs), impl="torch")


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("chunk_size", [16, 32])
def test_every_length_in_smaller_chunks(T, chunk_size):
    """The chunk size changes no result."""
    inputs = draw_inputs(T=min(T, 129), H=1, HV=2, K=16, initial_states=1)
    assert_equals_reference(
        chunk_kda, inputs, draw_upstream(inputs), impl="torch", chunk_size=chunk_size
    )


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_packed_lengths(chunk_size, dtype):
    """Documents of 65, 66, 71 and 79 tokens in one row."""
    cu_seqlens = torch.tensor([0, 65, 131, 202, 281])
    inputs = draw_inputs(T=281, HV=4, K=24, V=40, initial_states=4, dtype=dtype)
    assert_equals_reference(
        chunk_kda,
        inputs,
        draw_upstream(inputs),
        impl="torch",
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )


@pytest.mark.parametrize("after", [0, 4096], ids=["at the end", "inside"])
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_memory_around_the_buffers_is_never_read(layout, after):
    """NaN, inf or 1e4 around every input and upstream gradient: the same bits as with nothing."""
    cu_seqlens = [0, 65, 80] if layout == "packed" else None
    B = 1 if cu_seqlens else 2
    inputs = draw_inputs(T=80, B=B, HV=4, K=24, V=40, initial_states=2)
    upstream = draw_upstream(inputs)
    options = {"impl": "torch", "cu_seqlens": cu_seqlens}
    plain = run(chunk_kda, inputs, upstream, **options)
    for filling in (float("nan"), float("inf"), 1e4):
        got = run(
            chunk_kda,
            surrounded(inputs, filling, after),
            surrounded(upstream, filling, after),
            **options,
        )
        assert_bitwise(got, plain)


def test_rows_past_the_last_sequence_are_padding():
    """Tokens after cu_seqlens[-1] give o = 0, gradients 0, and may hold NaN, upstream too."""
    cu_seqlens = [0, 30, 70]
    inputs = draw_inputs(T=100, HV=4, K=16, initial_states=2, raw_gate=True, A_log=True)
    upstream = draw_upstream(inputs)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][:, 70:] = float("nan")
    upstream["o"][:, 70:] = float("nan")
    options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "impl": "torch"}
    got = run(chunk_kda, inputs, upstream, cu_seqlens=cu_seqlens, **options)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert (got[name][:, 70:] == 0).all(), name
        got[name] = got[name][:, :70]
    cut = {n: x[:, :70] if x.dim() > 1 and n != "initial_state" else x for n, x in inputs.items()}
    upstream["o"] = upstream["o"][:, :70]
    alone = run(chunk_kda, cut, upstream, cu_seqlens=cu_seqlens, **options)
    assert_bitwise(got, alone)


def test_dg_at_the_last_token_of_each_chunk():
    """Scored on its own, where an error of the chunk's end would hide among 64 tokens."""
    inputs = draw_inputs(T=1024, HV=3, H=3, K=16)
    upstream = draw_upstream(inputs)
    got, want = assert_equals_reference(chunk_kda, inputs, upstream, impl="torch")
    for name in ("dg", "dk", "dbeta"):
        for rows in (slice(63, None, 64), slice(64, None, 64)):
            assert errors(name, got[name][:, rows], want[name][:, rows]).max() < 1e-5, name


def test_a_weak_decay_over_4096_tokens_keeps_its_digits():
    """With beta = 0, g = -8e-5 the factor is 0.7206, which a bf16 gate would make 1."""
    T = 4096
    inputs = draw_inputs(T=T, H=1, K=16, initial_states=1)
    inputs["beta"] = torch.zeros_like(inputs["beta"])
    inputs["g"] = torch.full_like(inputs["g"], -8e-5)
    upstream = draw_upstream(inputs)
    got = run(chunk_kda, inputs, upstream, impl="torch")
    g = torch.tensor(-8e-5, dtype=torch.float32).double()
    factor = (T * g).exp()
    assert abs(factor - 0.7206) < 1e-4
    S_0 = inputs["initial_state"].double()
    torch.testing.assert_close(got["final_state"].double(), factor * S_0, rtol=2e-6, atol=0)

    decay = (torch.arange(1, T + 1) * g).exp()[None, :, None, None]
    o = 0.25 * torch.einsum("bthk,bhkv->bthv", decay * inputs["q"].double(), S_0)
    assert errors("o", got["o"], o).max() < 1e-5
    want = run_reference(inputs, upstream)
    assert_similar(got, want, bounds(torch.float32), inputs=inputs)
