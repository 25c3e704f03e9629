"""On a GPU: the cases that broke other implementations, put to the Triton kernels.

Skipped without CUDA; run by hand there with `pytest tests/kernels/test_cases_gpu.py -m '' -n 8`.
The judge is the recurrence in fp64, on the same card. The backward is that of `impl="torch"`, which
tests/operator/ holds to the same cases: here most tests look at the forward alone. Few sizes, so
that tests share compiled kernels.
"""

from __future__ import annotations

import fcntl
import itertools
import pathlib
import subprocess
import sys
import tempfile
import warnings
from contextlib import contextmanager

import pytest
import torch

from kda_cp import build_cp_context, chunk_kda, chunk_kda_cp, fused_recurrent_kda, platform
from kda_cp import compiled as kernels
from kda_cp.kernels import configs
from kda_cp.reference import recurrent_kda_reference
from kda_cp.stages import Inputs, Settings
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
from kda_cp.testing.sharded import TRAINING_OPTIONS

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(platform.device != "cuda", reason="needs a CUDA GPU"),
    pytest.mark.timeout(400),
]

EVEN = {"H": 2, "HV": 4, "K": 64, "V": 64}
ODD = {"H": 2, "HV": 4, "K": 60, "V": 72}
"""Sizes of most tests: channels that fill their tiles, and channels that do not."""

RAW = {"raw_gate": True, "A_log": True, "dt_bias": True}

FP32 = bounds(torch.float32)
ROUNDED = 2**-6
"""Bound in bf16 of one head of one short sequence, where nothing averages out: a row passes some
four roundings of 2^-9 and cancels to a half. The figures of bf16 are held by
`test_every_dtype` and `test_bf16_at_the_size_of_a_model`."""

TF32 = {name: bound / 2 for name, bound in bounds(torch.bfloat16).items()}
"""Bound of `precision="tf32"`: its operands have 11 significant bits for bf16's 8, but the rest is
cut off instead of rounded: they lose up to 2^-10 each, towards zero, where bf16 loses 2^-9."""

SIZES = pytest.mark.parametrize("sizes", [EVEN, ODD], ids=["even", "odd"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def the_card(request):
    """Tests share the card, but for slow ones, which have it to themselves, in whatever process."""
    alone = request.node.get_closest_marker("slow") is not None
    with open(pathlib.Path(tempfile.gettempdir()) / "kda_cp_test_card.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def drawn(T, *, dtype=torch.float32, sizes=EVEN, **options):
    inputs = draw_inputs(T, **{**sizes, "dtype": dtype, **options})
    return {name: x.to(DEVICE) for name, x in inputs.items()}


def upstream_of(inputs, final_states=None):
    return {name: x.to(DEVICE) for name, x in draw_upstream(inputs, final_states).items()}


def forward(inputs, **options):
    """The results of a call by name, without a backward; the final state among them."""
    options = {"impl": "triton", "output_final_state": True, **options}
    return run(chunk_kda, inputs, {}, wanted=[], **options)


def check(inputs, bound=None, *, backward=False, **options):
    """Hold a call from all its inputs to the recurrence; with a backward, every gradient too."""
    if bound is None:
        bound = FP32 if inputs["q"].dtype == torch.float32 else ROUNDED
    states = inputs["initial_state"].shape[0] if "initial_state" in inputs else 0
    upstream = upstream_of(inputs, states)
    wanted = None if backward else []
    return assert_equals_reference(
        chunk_kda, inputs, upstream, bound, wanted=wanted, impl="triton", **options
    )


def piece_of(inputs, chunk_size=64):
    """Tokens at which a sequence of these inputs is cut into pieces that run side by side."""
    HV, K = inputs["g"].shape[2:]
    return configs.segment_chunks(HV, K, inputs["v"].shape[-1], chunk_size) * chunk_size


# 1: lengths ---------------------------------------------------------------------------------------

LENGTHS = [1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 80, 127, 129, 1000]


@DTYPES
@SIZES
@pytest.mark.parametrize("T", LENGTHS)
def test_every_length(T, sizes, dtype):
    check(drawn(T, B=2, sizes=sizes, dtype=dtype, initial_states=2))


@pytest.mark.parametrize("chunk_size", [16, 32])
@pytest.mark.parametrize("T", [1, 15, 17, 33, 65, 129])
def test_lengths_in_smaller_chunks(T, chunk_size):
    check(drawn(T, initial_states=1), chunk_size=chunk_size)


@DTYPES
@SIZES
@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("rest", [-64, -1, 0, 1, 70])
def test_lengths_around_the_edge_of_a_piece(pieces, rest, sizes, dtype):
    inputs = drawn(1, sizes=sizes)
    T = pieces * piece_of(inputs) + rest
    check(drawn(T, sizes=sizes, dtype=dtype, initial_states=1))
    check(drawn(T, sizes=sizes, dtype=dtype))


@SIZES
def test_packed_lengths_with_every_gradient(sizes):
    inputs = drawn(281, sizes=sizes, initial_states=4)
    check(inputs, backward=True, cu_seqlens=[0, 65, 131, 202, 281])


def surrounded(tensors, filling, after):
    """The same values in the midst, or at the end, of larger buffers."""

    def surround(x):
        buffer = torch.full((x.numel() + 336 + after,), filling, dtype=x.dtype, device=x.device)
        return buffer[336 : 336 + x.numel()].view(x.shape).copy_(x)

    return {name: surround(x) for name, x in tensors.items()}


@DTYPES
@SIZES
@pytest.mark.parametrize("packed", [False, True])
def test_memory_around_the_buffers_is_never_read(packed, sizes, dtype):
    """Cases 1 and 4: NaN, inf or 1e4 before and behind every input, or right to its end."""
    cu_seqlens = [0, 65, 79] if packed else None
    B = 1 if packed else 2
    inputs = drawn(80, B=B, sizes=sizes, dtype=dtype, initial_states=2, **RAW)
    options = {"cu_seqlens": cu_seqlens, "return_intermediate_states": True, **TRAINING_OPTIONS}
    plain = forward(inputs, **options)
    for filling, after in itertools.product((float("nan"), float("inf"), 1e4), (0, 4096)):
        assert_bitwise(forward(surrounded(inputs, filling, after), **options), plain)


def test_tokens_past_the_last_sequence_are_not_read():
    inputs = drawn(150, initial_states=2)
    want = forward(take(inputs, slice(130)), cu_seqlens=[0, 33, 130])
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][:, 130:] = float("nan")
    got = forward(inputs, cu_seqlens=[0, 33, 130])
    assert (got["o"][:, 130:] == 0).all()
    assert_bitwise({**got, "o": got["o"][:, :130]}, want)


# 2, 3, 12: gates, keys, scale, beta ---------------------------------------------------------------


@DTYPES
@SIZES
@pytest.mark.parametrize("g", [-0.1, -5.0, -5.5, -5.95, -8.0, -11.2, -20.0, -50.0, -200.0, -1e3])
def test_constant_gates(g, sizes, dtype):
    inputs = drawn(150, sizes=sizes, dtype=dtype, initial_states=1)
    inputs["g"] = torch.full_like(inputs["g"], g)
    check(inputs)
    if g >= -5:
        check(inputs, lower_bound=-5.0)  # with the promise, the path of bounded gates


@pytest.mark.parametrize("g", [-0.1, -5.0, -20.0, -200.0])
def test_gradients_under_constant_gates(g):
    inputs = drawn(150, initial_states=1)
    inputs["g"] = torch.full_like(inputs["g"], g)
    check(inputs, backward=True)


@DTYPES
@SIZES
def test_half_the_channels_remember_and_half_forget(sizes, dtype):
    inputs = drawn(150, sizes=sizes, dtype=dtype, initial_states=1)
    channels = torch.arange(sizes["K"], device=DEVICE)
    gates = torch.where(channels % 2 == 0, -1e-4, -50.0).to(dtype)
    inputs["g"] = gates.expand_as(inputs["g"]).contiguous()
    check(inputs)


@DTYPES
@pytest.mark.parametrize("block", [1, 3, 16, 64])
@pytest.mark.parametrize("strong", [-0.1, -5.0, -50.0, -1000.0])
def test_blocks_of_strong_gates_alternate_with_none(strong, block, dtype):
    inputs = drawn(150, dtype=dtype, initial_states=1)
    blocks = torch.arange(150, device=DEVICE)[:, None, None] // block
    gates = torch.where(blocks % 2 == 0, strong, 0.0).to(dtype)
    inputs["g"] = gates.expand_as(inputs["g"]).contiguous()
    check(inputs)
    if strong >= -5:
        check(inputs, lower_bound=-5.0)


@pytest.mark.parametrize("where", ["everywhere", "half the tokens", "half the channels"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_no_decay(where, lower_bound):
    inputs = drawn(150, initial_states=1)
    silent = torch.ones_like(inputs["g"], dtype=torch.bool)
    if where == "half the tokens":
        silent[:, ::2] = False
    if where == "half the channels":
        silent[..., ::2] = False
    inputs["g"] = torch.where(silent, 0.0, inputs["g"]).clamp(min=-5.0)
    check(inputs, lower_bound=lower_bound)


@pytest.mark.parametrize("lower_bound", [-5.0, -1.0, -0.1])
@pytest.mark.parametrize("block", [16, 64])
@DTYPES
def test_saturated_gates_in_the_kernel(block, lower_bound, dtype):
    """Blocks of raw gates of +-100 and 0: at the bound, at no decay, and between."""
    inputs = drawn(150, dtype=dtype, initial_states=1, **RAW)
    blocks = torch.arange(150, device=DEVICE)[:, None, None] // block % 3
    shifts = torch.tensor([100.0, -100.0, 0.0], dtype=dtype, device=DEVICE)
    inputs["g"] = inputs["g"] + shifts[blocks]
    check(inputs, use_gate_in_kernel=True, safe_gate=True, lower_bound=lower_bound)


@pytest.mark.parametrize("shift", [-100.0, 0.0, 30.0])
@DTYPES
def test_softplus_gate_over_its_range(shift, dtype):
    inputs = drawn(150, dtype=dtype, initial_states=1, **RAW)
    inputs["g"] = inputs["g"] + shift
    check(inputs, use_gate_in_kernel=True)


def correlated(rho, length, dtype):
    """Unit keys sqrt(rho) k0 + sqrt(1 - rho) noise, g = 0, beta = 1, the first of two heads."""
    inputs = drawn(length, initial_states=1)
    generator = torch.Generator().manual_seed(7)
    k0, noise = (
        torch.nn.functional.normalize(torch.randn(n, EVEN["K"], generator=generator), dim=-1)
        for n in (1, length)
    )
    keys = torch.nn.functional.normalize(rho**0.5 * k0 + (1 - rho) ** 0.5 * noise, dim=-1)
    inputs["k"][0, :, 0] = keys.to(DEVICE)
    inputs["g"] = torch.zeros_like(inputs["g"])
    inputs["beta"] = torch.ones_like(inputs["beta"])
    return {name: x if "state" in name else x.to(dtype) for name, x in inputs.items()}


@DTYPES
@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, 0.99])
def test_correlated_keys(rho, dtype):
    """In fp32 o and the states; in both types the inverse itself, on its strictly lower part."""
    if dtype == torch.float32:
        for length in (64, 256):
            check(correlated(rho, length, dtype))
    inputs = correlated(rho, 64, dtype)
    call = Inputs(*(inputs[name] for name in ("q", "k", "v", "g", "beta")), None, None)
    table = build_cp_context(64, None).segment_table(
        batch=1, chunk_size=64, device=inputs["q"].device
    )
    settings = Settings(1.0, 64, False, False, None, False, 1.0)
    T = kernels.chunk_terms(call, table, settings).chunks.TA[0, 0, :64].double()
    k = inputs["k"][0, :, 0].double()
    one = torch.eye(64, dtype=torch.float64, device=DEVICE)
    inverse = torch.linalg.inv(one + (k @ k.T).tril(-1)).tril(-1)
    error = (T.tril(-1) - inverse).norm() / inverse.norm()
    print(f"strictly lower inverse, rho {rho}, {dtype}: {error:.1e}")
    # bf16: entries of the system sum products of rounded keys, and the inverse is stored rounded.
    assert error < (5e-6 if dtype == torch.float32 else ROUNDED)
    assert (T.triu(1) == 0).all()


@pytest.mark.parametrize("scale", [None, 1, 1.0, 0.37, -0.5])
def test_scale_reaches_every_gradient(scale):
    check(drawn(150, initial_states=1), backward=True, scale=scale)


def test_beta_is_not_clamped():
    inputs = drawn(150, initial_states=1)
    inputs["beta"] = -0.4 + 2.3 * inputs["beta"]
    check(inputs, backward=True)


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_beta_logits(allow_neg_eigval):
    inputs = drawn(150, initial_states=1)
    inputs["beta"] = 6 * inputs["beta"] - 3
    options = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": allow_neg_eigval}
    check(inputs, backward=True, **options)


@SIZES
def test_norm_in_the_kernel(sizes):
    """Keys of any length, tiny ones where the epsilon counts, and zeros."""
    inputs = drawn(150, sizes=sizes, initial_states=1)
    inputs["k"] = 3 * inputs["k"]
    inputs["k"][:, 5] *= 1e-3
    inputs["q"][:, 6] *= 1e-4
    inputs["k"][:, 7], inputs["q"][:, 8] = 0, 0
    check(inputs, use_qk_l2norm_in_kernel=True)


def test_a_weak_gate_over_4096_tokens():
    """Case 13: beta = 0 and g = -8e-5 leave 0.7206 of a state; a bf16 gate leaves all of it."""
    inputs = drawn(4096, initial_states=1)
    inputs["g"] = torch.full_like(inputs["g"], -8e-5)
    inputs["beta"] = torch.zeros_like(inputs["beta"])
    left = forward(inputs)["final_state"].double() / inputs["initial_state"].double()
    exact = torch.tensor(-8e-5).double().mul(4096).exp().item()
    assert abs(exact - 0.7206) < 1e-4
    # Every chunk rounds its decay and the state, by 2^-24 each; 64 chunks in all.
    assert (left - exact).abs().max() < 2 * 64 * 2**-23


# 4, 5: sizes --------------------------------------------------------------------------------------

WIDTHS = [
    *((K, K) for K in (16, 24, 60, 64, 72, 96, 100, 128, 160, 192, 256)),
    *((16, 128), (128, 16), (24, 256), (256, 24), (60, 100), (192, 72), (1, 7), (32, 512)),
]


@DTYPES
@pytest.mark.parametrize(("K", "V"), WIDTHS)
def test_every_head_size(K, V, dtype):
    """Right, and the same bits where every input ends a buffer of NaN."""
    inputs = drawn(70, dtype=dtype, sizes={"HV": 2, "K": K, "V": V}, initial_states=1)
    got, _ = check(inputs)
    end = forward(surrounded(inputs, float("nan"), 0))
    assert_bitwise(end, {name: got[name] for name in end})


def test_more_key_channels_than_a_program_holds_are_refused():
    inputs = drawn(4, sizes={"K": 2 * configs.MOST_KEYS, "V": 16})
    with pytest.raises(NotImplementedError, match=f"K = {2 * configs.MOST_KEYS}"):
        forward(inputs)
    plain = {name: forward(inputs, impl=name) for name in ("auto", "torch")}
    assert_bitwise(plain["auto"], plain["torch"])


@pytest.mark.parametrize(("H", "HV"), [(1, 2), (2, 8), (3, 6)])
def test_grouped_heads_equal_repeated_keys(H, HV):
    inputs = drawn(90, sizes={"H": H, "HV": HV, "K": 64, "V": 64}, initial_states=1)
    got, _ = check(inputs, backward=True)
    group = HV // H
    repeated = {n: x.repeat_interleave(group, 2) if n in "qk" else x for n, x in inputs.items()}
    want = run(chunk_kda, repeated, upstream_of(inputs), impl="triton")
    assert_bitwise(*({n: x[n] for n in ("o", "final_state")} for x in (got, want)))
    for name in ("dq", "dk"):
        summed = want[name].view(1, 90, H, group, 64).sum(3)
        assert errors(name, got[name], summed).max() < 1e-5


def test_value_heads_have_to_be_a_multiple():
    inputs = drawn(4, sizes={"H": 1, "HV": 3, "K": 64, "V": 64})
    for name in "qk":
        inputs[name] = inputs[name].expand(1, 4, 2, 64)
    with pytest.raises(ValueError, match=r"v: expected .* multiple of the 2 heads.* got 3"):
        forward(inputs)


# 7, 8, 21: states ---------------------------------------------------------------------------------


def assert_cut_equals_whole(inputs, cut, bitwise):
    T = inputs["q"].shape[1]
    whole = forward(inputs)
    first = forward(take(inputs, slice(cut)))
    second = forward(
        {**take(inputs, slice(cut, T)), "initial_state": first["final_state"]},
    )
    parts = {"o": torch.cat([first["o"], second["o"]], 1), "final_state": second["final_state"]}
    if bitwise:
        assert_bitwise(parts, whole)
    else:
        assert_similar(parts, whole, FP32 if inputs["q"].dtype == torch.float32 else ROUNDED)


@DTYPES
@SIZES
@pytest.mark.parametrize("cut", [1, 63, 64, 65, 512, 960, 999])
def test_a_call_within_a_piece_cut_in_two(cut, sizes, dtype):
    inputs = drawn(1000, sizes=sizes, dtype=dtype, initial_states=1)
    assert piece_of(inputs) > 1000
    assert_cut_equals_whole(inputs, cut, bitwise=cut % 64 == 0)


@DTYPES
@SIZES
@pytest.mark.parametrize("start", [True, False], ids=["from a state", "from zero"])
@pytest.mark.parametrize("at", [(1, 0), (2, 0), (3, 0), (1, 1), (0, 999), (2, -64)], ids=str)
def test_a_call_of_several_pieces_cut_in_two(at, start, sizes, dtype):
    piece = piece_of(drawn(1, sizes=sizes))
    inputs = drawn(3 * piece + 70, sizes=sizes, dtype=dtype, initial_states=int(start))
    cut = at[0] * piece + at[1]
    assert_cut_equals_whole(inputs, cut, bitwise=cut % piece == 0)


@DTYPES
def test_a_prefix_ignores_what_follows(dtype):
    """To the bit, also where the prefix ends inside a piece or a chunk."""
    piece = piece_of(drawn(1))
    inputs = drawn(2 * piece + 100, dtype=dtype, initial_states=1)
    whole = forward(inputs)["o"]
    for stop in (1, 100, piece, piece + 33, 2 * piece):
        assert torch.equal(forward(take(inputs, slice(stop)))["o"], whole[:, :stop]), stop


def test_prefill_then_decode_equals_one_pass():
    inputs = drawn(130, initial_states=1)
    first = forward(take(inputs, slice(100)))
    second = {**take(inputs, slice(100, 130)), "initial_state": first["final_state"]}
    o, final_state = fused_recurrent_kda(**second, output_final_state=True)
    got = {"o": torch.cat([first["o"], o], 1), "final_state": final_state}
    assert_similar(got, run_reference(inputs, upstream_of(inputs), wanted=[]), FP32)


@pytest.mark.parametrize(
    "cu_seqlens", [[0, 0, 5, 5, 5, 70, 70], [0, 0, 0, 0], [0, 12, 12]], ids=str
)
def test_empty_sequences_pass_their_state_through(cu_seqlens):
    N = len(cu_seqlens) - 1
    inputs = drawn(cu_seqlens[-1], initial_states=N)
    got, _ = check(inputs, backward=True, cu_seqlens=cu_seqlens)
    empty = [n for n in range(N) if cu_seqlens[n] == cu_seqlens[n + 1]]
    assert torch.equal(got["final_state"][empty], inputs["initial_state"][empty])
    assert torch.equal(got["dinitial_state"][empty], upstream_of(inputs)["final_state"][empty])
    inputs.pop("initial_state")
    assert (forward(inputs, cu_seqlens=cu_seqlens)["final_state"][empty] == 0).all()


@pytest.mark.parametrize("shape", [(0, 2), (20, 0)], ids=["no tokens", "no rows"])
def test_nothing_to_do(shape):
    T, B = shape
    inputs = drawn(T, B=B)
    inputs["initial_state"] = torch.randn(B, *(EVEN[n] for n in ("HV", "K", "V")), device=DEVICE)
    got = run(chunk_kda, inputs, upstream_of(inputs, 0), impl="triton", output_final_state=True)
    assert got["o"].shape == (B, T, EVEN["HV"], EVEN["V"])
    assert torch.equal(got["final_state"], inputs["initial_state"])


@DTYPES
@SIZES
def test_no_state_is_a_state_of_zeros(sizes, dtype):
    T = piece_of(drawn(1, sizes=sizes)) + 70
    inputs = drawn(T, B=2, sizes=sizes, dtype=dtype)
    zeros = torch.zeros(2, 4, sizes["K"], sizes["V"], device=DEVICE)
    assert_bitwise(forward({**inputs, "initial_state": zeros}), forward(inputs))


@SIZES
@DTYPES
@pytest.mark.parametrize("packed", [False, True])
def test_intermediate_states(packed, sizes, dtype):
    """T = 130: the states at 0, 64, 128; the one at 128 with the last two tokens gives o[128:]."""
    cu_seqlens = [0, 0, 70, 71, 130] if packed else None
    B, N = (1, 4) if packed else (2, 2)
    inputs = drawn(130, B=B, sizes=sizes, dtype=dtype, initial_states=N)
    _, _, states = recurrent_kda_reference(
        **inputs, output_final_state=True, cu_seqlens=cu_seqlens, return_states=True
    )
    got = forward(inputs, cu_seqlens=cu_seqlens, return_intermediate_states=True)
    starts = [0, 70, 71] if packed else [0, 64, 128]
    starts = sorted({*starts, *([64] if packed else [])})
    bound = 1e-5 if dtype == torch.float32 else ROUNDED
    assert errors("h", got["h"], states[:, starts]).max() < bound
    plain = forward(inputs, cu_seqlens=cu_seqlens)
    assert_bitwise(plain, {name: got[name] for name in plain})
    if not packed:
        last = {**take(inputs, slice(128, 130)), "initial_state": got["h"][:, 2]}
        assert torch.equal(forward(last)["o"], got["o"][:, 128:])


def test_intermediate_states_of_several_pieces():
    """A restart from any of them, at a piece's edge or not, gives the rest of that piece's bits."""
    piece = piece_of(drawn(1))
    inputs = drawn(2 * piece + 70, initial_states=1)
    got = forward(inputs, return_intermediate_states=True)
    for start in (64, piece - 64, piece, piece + 64, 2 * piece + 64):
        stop = min((start // piece + 1) * piece, 2 * piece + 70)
        part = {**take(inputs, slice(start, stop)), "initial_state": got["h"][:, start // 64]}
        assert torch.equal(forward(part)["o"], got["o"][:, start:stop]), start


# 9, 10: many documents ----------------------------------------------------------------------------


@DTYPES
@SIZES
def test_packed_is_separate_to_the_bit(sizes, dtype):
    """Documents from one token to more than two pieces, with the gate and norm in the kernel."""
    piece = piece_of(drawn(1, sizes=sizes))
    lengths = [65, 1, 0, 2 * piece + 33, piece, 130]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    inputs = drawn(ends[-1], sizes=sizes, dtype=dtype, initial_states=6, **RAW)
    packed = forward(inputs, cu_seqlens=[0, *ends], **TRAINING_OPTIONS)
    for n, (start, stop) in enumerate(itertools.pairwise([0, *ends])):
        part = (slice(start, stop), slice(n, n + 1))
        alone = forward(take(inputs, *part), **TRAINING_OPTIONS)
        assert_bitwise(alone, take(packed, *part))


def test_no_gradient_between_documents():
    inputs = drawn(170, initial_states=3)
    upstream = upstream_of(inputs)
    upstream["final_state"][[0, 2]] = 0
    upstream["o"][:, :50], upstream["o"][:, 130:] = 0, 0
    got = run(chunk_kda, inputs, upstream, cu_seqlens=[0, 50, 130, 170], impl="triton")
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert (got[name][:, :50] == 0).all() and (got[name][:, 130:] == 0).all(), name
        assert (got[name][:, 50:130] != 0).any(), name
    assert (got["dinitial_state"][[0, 2]] == 0).all()


@pytest.mark.parametrize("poisoned", ["q", "k", "v", "g", "beta", "initial_state"])
@pytest.mark.parametrize("sick", [0, 1])
@pytest.mark.parametrize("long", [False, True], ids=["chunks", "pieces"])
def test_nan_stays_in_its_document(poisoned, sick, long):
    piece = piece_of(drawn(1))
    cu_seqlens = [0, 50, 130 + long * (piece + 30), 300 + 2 * long * piece]
    inputs = drawn(cu_seqlens[-1], initial_states=3)

    def documents(results):
        o = [results["o"][:, start:stop] for start, stop in itertools.pairwise(cu_seqlens)]
        return list(zip(o, results["final_state"], strict=True))

    clean = documents(forward(inputs, cu_seqlens=cu_seqlens))
    where = sick if poisoned == "initial_state" else (0, cu_seqlens[sick] + 7)
    inputs[poisoned][where] = float("nan")
    dirty = documents(forward(inputs, cu_seqlens=cu_seqlens))
    for n, pair in enumerate(zip(clean, dirty, strict=True)):
        same = all(torch.equal(a, b) for a, b in zip(*pair, strict=True))
        assert same == (n != sick), n


def test_a_long_document_between_single_tokens():
    inputs = drawn(5003, initial_states=4)
    check(inputs, backward=True, cu_seqlens=[0, 1, 2, 5002, 5003])


def test_127_documents_of_16_32_and_64_tokens():
    lengths = torch.tensor([16, 32, 64]).repeat(43)[:127]
    cu_seqlens = [0, *lengths.cumsum(0).tolist()]
    sizes = {"H": 6, "K": 16, "V": 16}
    check(drawn(cu_seqlens[-1], sizes=sizes, initial_states=127), cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_seventy_thousand_documents_of_one_token(chunk_size):
    """Held to the oracle on as many rows of one token."""
    N = 70_000
    inputs = drawn(N, sizes={"H": 1, "K": 16, "V": 16}, initial_states=N)
    got = forward(inputs, cu_seqlens=torch.arange(N + 1), chunk_size=chunk_size)
    rows = {name: x if "state" in name else x.transpose(0, 1) for name, x in inputs.items()}
    want = run_reference(rows, upstream_of(rows), wanted=[])
    got = {"o": got["o"].transpose(0, 1), "final_state": got["final_state"]}
    assert_similar(got, want, FP32)


@DTYPES
def test_eleven_hundred_documents_of_64_heads(dtype):
    """N * HV = 70,400, documents of 0 to 3 tokens."""
    cu_seqlens = [0, *(torch.arange(1100) % 4).cumsum(0).tolist()]
    sizes = {"H": 64, "K": 16, "V": 16}
    inputs = drawn(cu_seqlens[-1], sizes=sizes, dtype=dtype, initial_states=1100)
    got = forward(inputs, cu_seqlens=cu_seqlens)
    want = run_reference(inputs, upstream_of(inputs), wanted=[], cu_seqlens=cu_seqlens)
    if dtype == torch.float32:
        assert_similar(got, want, FP32, cu_seqlens=cu_seqlens)
    else:  # among 70,400 of so few tokens some cancel to nearly 0: score them together
        for name, ref in want.items():
            assert (got[name].double() - ref).norm() < ROUNDED * ref.norm(), name


# 15, 16: memory, repeats --------------------------------------------------------------------------


def fused_projection(inputs):
    """q, k, v, g as slices of one projection [B, T, D] and beta as its last columns."""
    B, T = inputs["q"].shape[:2]
    names = ("q", "k", "v", "g", "beta")
    parts = [inputs[name].reshape(B, T, -1) for name in names]
    slices = torch.cat(parts, -1).split([part.shape[-1] for part in parts], -1)
    return {**inputs, **{n: x.view(inputs[n].shape) for n, x in zip(names, slices, strict=True)}}


def heads_first(inputs):
    """Tensors that lie as [B, H, T, K] in memory."""
    return {
        name: x if "state" in name else x.transpose(1, 2).contiguous().transpose(1, 2)
        for name, x in inputs.items()
    }


def transposed_channels(inputs):
    """The last dimension is not the fastest."""
    return {name: x.mT.contiguous().mT for name, x in inputs.items()}


def every_second(inputs):
    """Every second row of a buffer whose other rows are NaN."""

    def spread(x):
        buffer = x.new_full((*x.shape[:1], 2 * x.shape[1], *x.shape[2:]), float("nan"))
        buffer[:, ::2] = x
        return buffer[:, ::2]

    return {name: spread(x) for name, x in inputs.items()}


@DTYPES
@pytest.mark.parametrize(
    "layout", [fused_projection, heads_first, transposed_channels, every_second]
)
def test_strides_change_no_bit(layout, dtype):
    for B, cu_seqlens in ((2, None), (1, [0, 30, 65])):
        inputs = drawn(70, B=B, sizes=ODD, dtype=dtype, initial_states=2)
        strided = layout(inputs)
        assert any(not x.is_contiguous() for x in strided.values())
        options = {"cu_seqlens": cu_seqlens}
        assert_bitwise(forward(strided, **options), forward(inputs, **options))


def test_inputs_of_stride_0():
    inputs = drawn(70)
    for name in ("beta", "g"):
        inputs[name] = inputs[name][:, :1].expand(inputs[name].shape)
    whole = {name: x.contiguous() for name, x in inputs.items()}
    assert_bitwise(forward(inputs), forward(whole))


def test_upstream_gradients_of_stride_0():
    inputs = drawn(70, initial_states=1)
    ones = {n: torch.ones_like(x) for n, x in upstream_of(inputs).items()}
    expanded = {n: torch.ones((), device=DEVICE).expand(x.shape) for n, x in ones.items()}
    whole = run(chunk_kda, inputs, ones, impl="triton")
    assert_bitwise(run(chunk_kda, inputs, expanded, impl="triton"), whole)


@DTYPES
def test_inputs_are_unchanged_and_repeats_are_the_same_bits(dtype):
    piece = piece_of(drawn(1, sizes=ODD))
    inputs = drawn(piece + 130, sizes=ODD, dtype=dtype, initial_states=2, **RAW)
    upstream = upstream_of(inputs)
    before = [{n: x.clone() for n, x in y.items()} for y in (inputs, upstream)]
    options = {"cu_seqlens": [0, 33, piece + 128], **TRAINING_OPTIONS}
    run(chunk_kda, inputs, upstream, impl="triton", **options)
    assert_bitwise(inputs, before[0])
    assert_bitwise(upstream, before[1])
    first = forward(inputs, **options)
    for _ in range(50):
        assert_bitwise(forward(inputs, **options), first)


GEOMETRIES = [
    (dict(T=1200, sizes=ODD), {}),
    (dict(T=33, B=2), dict(chunk_size=16)),
    (dict(T=70, sizes=ODD, dtype=torch.bfloat16), {}),
    (dict(T=70), dict(cu_seqlens=[0, 30, 70])),
    (dict(T=1, dtype=torch.bfloat16), {}),
]


def geometry(n):
    shape, options = GEOMETRIES[n]
    return forward(drawn(**shape), **options)


def test_geometries_in_any_order_and_in_a_fresh_process(tmp_path):
    forwards = [geometry(n) for n in range(len(GEOMETRIES))]
    for n in reversed(range(len(GEOMETRIES))):
        assert_bitwise(geometry(n), forwards[n])
    path = tmp_path / "results.pt"
    program = (
        "import runpy, torch\n"
        f"names = runpy.run_path({__file__!r})\n"
        f"torch.save([names['geometry'](n) for n in (4, 2, 0)], {str(path)!r})\n"
    )
    root = pathlib.Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200, cwd=root)
    for results, n in zip(torch.load(path), (4, 2, 0), strict=True):
        assert_bitwise(results, forwards[n])


# 17, 18, 19: dtypes, options, boundaries ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gate_dtype", [None, torch.float32], ids=["same", "fp32"])
@pytest.mark.parametrize("K", [64, 128])
def test_every_dtype(K, gate_dtype, dtype):
    """By the bounds of each; gradients come back in their input's dtype."""
    sizes = {"H": 2, "HV": 4, "K": K, "V": K}
    inputs = drawn(281, sizes=sizes, dtype=dtype, gate_dtype=gate_dtype, initial_states=4, **RAW)
    bound = bounds(dtype)
    options = {"cu_seqlens": [0, 65, 65, 200, 281], **TRAINING_OPTIONS}
    forward_names = ("o", "final_state")
    got = forward(inputs, **options)
    want = run_reference(inputs, upstream_of(inputs), wanted=[], **options)
    for name in forward_names:
        found = errors(name, got[name], want[name], cu_seqlens=options["cu_seqlens"]).max()
        print(f"{name} {found:.1e} of {bound[name]:.1e}", end="  ")
    got, _ = check(inputs, bound, backward=True, **options)
    assert got["o"].dtype == dtype and got["final_state"].dtype == torch.float32
    for name, x in inputs.items():
        assert got[f"d{name}"].dtype == x.dtype, name


def test_tf32_is_what_was_asked_for():
    """`precision="tf32"`: within tf32's bound, and not the bits of the exact products."""
    inputs = drawn(281, initial_states=1)
    got, _ = check(inputs, TF32, precision="tf32")
    exact = forward(inputs)
    assert not torch.equal(got["o"], exact["o"])


def test_autocast_and_tf32_settings_change_nothing():
    inputs = drawn(281, initial_states=1)
    upstream = upstream_of(inputs)
    plain = run(chunk_kda, inputs, upstream, impl="triton")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loud = run(chunk_kda, inputs, upstream, impl="triton")
    finally:
        torch.set_float32_matmul_precision(before)
    assert_bitwise(loud, plain)


def test_mixed_dtypes_are_refused():
    inputs = drawn(4)
    with pytest.raises(ValueError, match="k: expected"):
        forward({**inputs, "k": inputs["k"].half()})


def test_an_entry_of_65536_in_a_state_of_fp16_inputs():
    """More than fp16 holds: the state is fp32 throughout, also where it is an operand."""
    piece = piece_of(drawn(1))
    inputs = drawn(piece + 70, dtype=torch.float16, decay=1e-4, initial_states=1)
    inputs["initial_state"][0, :, 3, 5] = 65536.0
    inputs["beta"] *= 0.01
    inputs["q"] *= 0.01  # o itself has to fit
    check(inputs, bounds(torch.float16))


FLAGS = [False, True]
MATRIX = list(itertools.product(FLAGS, FLAGS, [None, -5, -1.0, -0.1, 0, -7], FLAGS, FLAGS))


@pytest.mark.parametrize(("use_gate", "safe_gate", "lower_bound", "A_log", "dt_bias"), MATRIX)
def test_every_combination_of_gate_options(use_gate, safe_gate, lower_bound, A_log, dt_bias):
    """Right, or a ValueError: exactly where the implementation in PyTorch raises the same."""
    inputs = drawn(70, initial_states=1, raw_gate=use_gate, A_log=A_log, dt_bias=dt_bias)
    options = dict(use_gate_in_kernel=use_gate, safe_gate=safe_gate, lower_bound=lower_bound)
    try:
        forward(inputs, impl="torch", **options)
    except ValueError as error:
        with pytest.raises(ValueError) as caught:
            forward(inputs, **options)
        assert str(caught.value) == str(error)
    else:
        if not use_gate and lower_bound is not None:
            inputs["g"].clamp_(min=float(lower_bound))  # as the argument promises
        check(inputs, backward=True, **options)


def test_what_is_misshapen_or_misspelt_is_refused():
    inputs = drawn(4, raw_gate=True, A_log=True)
    with pytest.raises(ValueError, match="dt_bias: expected"):
        forward({**inputs, "dt_bias": torch.zeros(4, device=DEVICE)}, use_gate_in_kernel=True)
    with pytest.raises(TypeError, match="use_gate_in_kernal"):
        forward(inputs, use_gate_in_kernal=True)


@pytest.mark.parametrize("device", ["cpu", DEVICE])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_boundaries_of_any_integer_type_anywhere(dtype, device):
    inputs = drawn(80, initial_states=2)
    plain = forward(inputs, cu_seqlens=[0, 30, 65])
    cu_seqlens = torch.tensor([0, 30, 65], dtype=dtype, device=device)
    assert_bitwise(forward(inputs, cu_seqlens=cu_seqlens), plain)
    copied = forward(inputs, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens.cpu())
    assert_bitwise(copied, plain)
    assert (plain["o"][:, 65:] == 0).all()


@pytest.mark.parametrize("cu_seqlens", [[0, 40, 30, 80], [1, 80], [0, 81]], ids=str)
def test_wrong_boundaries_are_refused(cu_seqlens):
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        forward(drawn(80), cu_seqlens=torch.tensor(cu_seqlens, device=DEVICE))
    with pytest.raises(ValueError, match="cu_seqlens: expected one packed row"):
        forward(drawn(80, B=2), cu_seqlens=torch.tensor([0, 80], device=DEVICE))


# 22: every configuration --------------------------------------------------------------------------


def pinned_choices():
    """Sizes that between them are launched in every way that configs.py can answer; then models."""
    seen, chosen = set(), []
    widths = (16, 32, 64, 128, 256)
    heads = (2, 6, 8, 16, 24, 32, 48, 64)
    # Few heads first: the first size that shows a configuration is the one that runs.
    for HV, K, V in itertools.product(heads, widths, widths):
        for dtype in (torch.bfloat16, torch.float32):
            launches = (
                ("scores", dtype, configs.intra_config(K, dtype)),
                *(("state", dtype, m, configs.state_config(K, V, dtype, maps=m)) for m in FLAGS),
                ("fold", configs.fold_config(K)),
                ("piece", configs.segment_chunks(HV, K, V, 64)),
            )
            if not seen.issuperset(launches):
                seen.update(launches)
                chosen.append((HV, K, V, dtype))
    models = [(8, 128, 128), (32, 64, 64), (64, 128, 128), (32, 256, 256)]
    return chosen + [(*x, dtype) for x in models for dtype in (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(("HV", "K", "V", "dtype"), pinned_choices(), ids=str)
def test_every_configuration_is_right(HV, K, V, dtype):
    """Over two pieces and a partial chunk, from a state."""
    sizes = {"H": 2, "HV": HV, "K": K, "V": V}
    T = 2 * piece_of(drawn(1, sizes=sizes)) + 70
    check(drawn(T, sizes=sizes, dtype=dtype, initial_states=1))


# Accuracy, gradients, one rank --------------------------------------------------------------------


def test_bf16_at_the_size_of_a_model():
    """T = 1024, H = 32, K = V = 128: where the figures of bf16 that are the bound were taken."""
    inputs = draw_inputs(1024, H=32, K=128, dtype=torch.bfloat16, **RAW)
    inputs["g"] -= 3
    inputs = {name: x.to(DEVICE) for name, x in inputs.items()}
    upstream = upstream_of(inputs)
    got = run(chunk_kda, inputs, upstream, impl="triton", **TRAINING_OPTIONS)
    want = run_reference(inputs, upstream, **TRAINING_OPTIONS)
    for name, ref in want.items():
        error = (got[name].double() - ref).norm() / ref.norm()
        print(f"{name} {error:.2e}", end="  ")
        assert error <= bounds(torch.bfloat16)[name], name


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@SIZES
def test_gradients_through_the_kernels(sizes, chunk_size):
    """Over two pieces, with the gate, norm and sigmoid in the kernel."""
    T = piece_of(drawn(1, sizes=sizes)) + 70
    inputs = drawn(T, sizes=sizes, initial_states=3, **RAW)
    cu_seqlens = [0, 40, 40, T]
    options = {"cu_seqlens": cu_seqlens, "chunk_size": chunk_size, **TRAINING_OPTIONS}
    check(inputs, backward=True, **options)


def test_auto_is_these_kernels():
    inputs = drawn(150, initial_states=1)
    assert_bitwise(forward(inputs, impl="auto"), forward(inputs))


@DTYPES
def test_a_context_of_one_rank(dtype):
    """`chunk_kda_cp` with a context of one rank is the plain call to the bit, backward included."""
    piece = piece_of(drawn(1))
    cu_seqlens = torch.tensor([0, 65, piece + 200], device=DEVICE)
    inputs = drawn(piece + 200, dtype=dtype, initial_states=2, **RAW)
    upstream = upstream_of(inputs)
    plain = run(
        chunk_kda, inputs, upstream, impl="triton", cu_seqlens=cu_seqlens, **TRAINING_OPTIONS
    )
    options = {"cp_context": build_cp_context(cu_seqlens, None), "impl": "triton"}
    assert_bitwise(run(chunk_kda_cp, inputs, upstream, **options, **TRAINING_OPTIONS), plain)


# The host -----------------------------------------------------------------------------------------


@contextmanager
def no_synchronisation():
    """Raise where the host waits for the device, as far as PyTorch notices."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@DTYPES
@pytest.mark.parametrize("training", [False, True])
def test_a_call_waits_for_no_device(training, dtype):
    """With boundaries and their copy, dense, and with a context; a first call and a later one."""
    T = piece_of(drawn(1)) + 200
    inputs = drawn(T, dtype=dtype, initial_states=2, **RAW)
    inputs = {name: x.requires_grad_(training) for name, x in inputs.items()}
    dense = drawn(T, B=2, dtype=dtype, initial_states=2, **RAW)
    cu_seqlens_cpu = torch.tensor([0, 65, T])
    cu_seqlens = cu_seqlens_cpu.to(DEVICE)
    context = build_cp_context(cu_seqlens, None)
    options = {**TRAINING_OPTIONS, "impl": "triton", "output_final_state": True}
    torch.cuda.synchronize()
    with no_synchronisation():
        for _ in range(2):
            chunk_kda(**inputs, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, **options)
            chunk_kda(**dense, return_intermediate_states=True, **options)
            chunk_kda_cp(**inputs, cp_context=context, **options)
        with pytest.raises(RuntimeError, match="synchroniz"):
            chunk_kda(**inputs, cu_seqlens=cu_seqlens, **options)


COLD = """
import time, torch
from kda_cp import chunk_kda
q, k, v, g = torch.randn(4, 1, 16384, 32, 128, device="cuda", dtype=torch.{dtype}).unbind(0)
beta = torch.rand_like(q[..., 0])
A_log, dt_bias = torch.zeros(32, device="cuda"), torch.zeros(32 * 128, device="cuda")
torch.cuda.synchronize()
began = time.perf_counter()
chunk_kda(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, use_qk_l2norm_in_kernel=True,
          use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, impl="triton", {gate})
torch.cuda.synchronize()
print(time.perf_counter() - began)
"""


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["safe_gate=True, lower_bound=-5.0", ""], ids=["safe", "softplus"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_first_call_without_any_compiled_kernel(dtype, gate, run_fresh, tmp_path, monkeypatch):
    """Ends within 30 s, compilation included: a promise, and the one time that a test looks at."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    seconds = float(run_fresh(COLD.format(dtype=dtype, gate=gate)))
    print(f"first call in {dtype}: {seconds:.1f} s")
    assert any(tmp_path.rglob("*.cubin")), "nothing was compiled"
    assert seconds < 30


# 11: large ----------------------------------------------------------------------------------------
# Last in the file: what has the card to itself waits until all others are done with it.


def large(T, B, heads):
    """Inputs of TRAINING_OPTIONS in bf16, K = V = 128, drawn on the card; heads all different."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=DEVICE)

    names = ("q", "k", "v", "g")
    inputs = {name: normal(B, T, heads, 128) for name in names} | {"beta": normal(B, T, heads)}
    inputs["A_log"] = torch.linspace(0.5, 2, heads, device=DEVICE).log()
    inputs["dt_bias"] = normal(heads * 128).float()
    return inputs


def call_large(inputs, **options):
    with torch.no_grad():
        return chunk_kda(
            **inputs, **TRAINING_OPTIONS, impl="triton", output_final_state=True, **options
        )


def assert_end_is_right(inputs, o, final_state):
    """The last 64 tokens, by the recurrence over the last 512: what was before is decayed."""
    tail = take(inputs, slice(inputs["q"].shape[1] - 512, None))
    ref, ref_final, *_ = recurrent_kda_reference(
        **tail, **TRAINING_OPTIONS, output_final_state=True
    )
    assert errors("o", o[:, -64:], ref[:, -64:]).max() < ROUNDED
    assert errors("final_state", final_state, ref_final).max() < ROUNDED


@pytest.mark.slow
def test_more_than_2_31_elements_in_chunk_states_and_terms():
    """Case 11, about 35 GB: the tail equals restarts from the states that came with it."""
    T, heads = 131_136, 64
    inputs = large(T, 1, heads)
    o, final_state, h = call_large(inputs, return_intermediate_states=True)
    assert h.numel() > 2**31
    piece = piece_of(inputs)
    for start in (T // piece * piece, (T // piece - 1) * piece):
        tail = take(inputs, slice(start, T))
        again, again_final = call_large(tail, initial_state=h[:, start // 64])
        assert torch.equal(again, o[:, start:]), start
        assert torch.equal(again_final, final_state), start
    head, _ = call_large(take(inputs, slice(piece + 64)))
    assert torch.equal(head, o[:, : piece + 64])
    assert_end_is_right(inputs, o, final_state)


@pytest.mark.slow
def test_more_than_2_31_elements_in_inputs():
    """Case 11, about 50 GB: the last of 17 rows is the call of that row, in one part or two."""
    T, B, heads = 16384, 17, 64
    inputs = large(T, B, heads)
    assert inputs["v"].numel() > 2**31
    o, final_state = call_large(inputs)
    row = {n: x if n in ("A_log", "dt_bias") else x[-1:] for n, x in inputs.items()}
    alone, alone_final = call_large(row)
    assert torch.equal(alone, o[-1:]) and torch.equal(alone_final, final_state[-1:])
    cut = T - piece_of(inputs)
    _, middle = call_large(take(row, slice(cut)))
    again, again_final = call_large(take(row, slice(cut, T)), initial_state=middle)
    assert torch.equal(again, o[-1:, cut:]) and torch.equal(again_final, final_state[-1:])
    assert_end_is_right(row, o[-1:], final_state[-1:])
