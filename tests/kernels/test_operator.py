"""`chunk_kda(impl="triton")` is the recurrence, however its sequences are cut into pieces.

The pinned length of a piece is thousands of tokens; here it is one to three chunks, so that short
sequences have several: maps, fold and pieces side by side.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kda_cp import chunk_kda, fused_recurrent_kda, platform
from kda_cp.compiled import INTERPRETED
from kda_cp.kernels import configs
from kda_cp.testing.compare import (
    assert_bitwise,
    assert_equals_reference,
    assert_similar,
    bounds,
    draw_inputs,
    draw_upstream,
    run,
    take,
)

DEVICE = "cuda" if platform.device == "cuda" else "cpu"
TOKENS = ("q", "k", "v", "g", "beta")
RAW = {"raw_gate": True, "A_log": True, "dt_bias": True}
FUSED = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


@pytest.fixture(params=[2])
def pieces(request, monkeypatch):
    """Chunks a piece, in place of the pinned number."""
    monkeypatch.setattr(configs, "segment_chunks", lambda *_, **__: request.param)
    return request.param


def of(*chunks):
    """Run a test with each of these lengths of a piece."""
    return pytest.mark.parametrize("pieces", chunks, indirect=True, ids="{} a piece".format)


def draw(T, **shape):
    """Inputs on the device, small: interpreted, a chunk of a head takes 0.1 s."""
    shape = {"H": 1, "HV": 2, "K": 16, **shape}
    return {name: x.to(DEVICE) for name, x in draw_inputs(T, **shape).items()}


def upstream_of(inputs, **keywords):
    return {n: x.to(DEVICE) for n, x in draw_upstream(inputs, **keywords).items()}


def assert_right(inputs, final_states=None, **options):
    """Assert results and gradients are the reference's; return them."""
    upstream = upstream_of(inputs, final_states=final_states)
    options = {"chunk_size": 16, "impl": "triton", **options}
    return assert_equals_reference(chunk_kda, inputs, upstream, **options)[0]


def forward(inputs, **options):
    """The results of a call without a backward, by name, h among them."""
    options = {
        "chunk_size": 16,
        "impl": "triton",
        "output_final_state": True,
        "return_intermediate_states": True,
        **options,
    }
    with torch.no_grad():
        return dict(zip(("o", "final_state", "h"), chunk_kda(**inputs, **options), strict=True))


@pytest.mark.parametrize("T", [1, 15, 17, 31, 32, 33, 48, 63, 64, 65, 97])
def test_every_length(pieces, T):
    """At and around multiples of the chunk and of the piece, from a state, with gradients."""
    assert_right(draw(T, initial_states=1))


@of(1, 3)
@pytest.mark.parametrize("T", [16, 33, 48, 49, 96])
def test_every_length_of_a_piece(pieces, T):
    """The same where a piece is one chunk and where it is three."""
    assert_right(draw(T, HV=1, initial_states=1))


@pytest.mark.parametrize("T", [32, 40, 64])
@pytest.mark.parametrize("final", [False, True], ids=["", "final"])
@pytest.mark.parametrize("initial", [False, True], ids=["", "initial"])
def test_states_given_or_not(pieces, initial, final, T):
    """The first piece starts from zero or not, and the last one's state is wanted or not."""
    assert_right(draw(T, initial_states=int(initial)), final_states=int(final))


@pytest.mark.parametrize("T", [40, 64])
def test_no_initial_state_is_zero(pieces, T):
    """To the bit, although the maps of first pieces have no transition then."""
    inputs = draw(T)
    zeros = torch.zeros(1, 2, 16, 16, device=DEVICE)
    assert_bitwise(forward(inputs), forward(inputs | {"initial_state": zeros}))


@pytest.mark.parametrize("chunk_size", [32, 64])
def test_every_chunk_size(pieces, chunk_size):
    """Two pieces and a chunk that is not whole; 16 is the other tests'."""
    assert_right(draw(4 * chunk_size + 5, HV=1, initial_states=1), chunk_size=chunk_size)


@of(1, 2, 3)
@pytest.mark.parametrize("initial", [False, True], ids=["", "initial"])
def test_packed(pieces, initial):
    """Documents of one piece, of several, of whole ones and of none, and tokens behind them all."""
    cu_seqlens = [0, 0, 5, 53, 53, 85, 117, 117]
    inputs = draw(120, HV=1, initial_states=7 * initial)
    got = assert_right(inputs, final_states=7, cu_seqlens=cu_seqlens)
    assert (got["o"][:, 117:] == 0).all()


@pytest.mark.parametrize("T", [32, 50, 64])
def test_dense_rows(pieces, T):
    """B = 2, each row cut alike."""
    assert_right(draw(T, B=2, HV=1, initial_states=2))


@pytest.mark.parametrize(("H", "HV"), [(1, 3), (2, 4)])
def test_grouped_heads(pieces, H, HV):
    """Value heads that share a key head."""
    assert_right(draw(37, H=H, HV=HV, initial_states=1))


@pytest.mark.parametrize(
    ("K", "V"),
    [(24, 60), (60, 24), (64, 64), (72, 100), (100, 16), (128, 128), (16, 128), (256, 8)],
)
def test_every_head_size(pieces, K, V):
    """Sizes that are no power of two or more than one tile, two pieces long."""
    assert_right(draw(37, HV=1, K=K, V=V, initial_states=1))


@pytest.mark.parametrize("gate_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_dtype(pieces, dtype, gate_dtype):
    """Results within the bounds of their dtype; fp32 is the other tests'."""
    inputs = draw(50, dtype=dtype, gate_dtype=gate_dtype, initial_states=1)
    upstream, bound = upstream_of(inputs), bounds(dtype)
    if INTERPRETED and dtype == torch.bfloat16:  # by truncation: twice the error of rounding
        bound = {name: 2 * x for name, x in bound.items()}
    options = {"chunk_size": 16, "impl": "triton"}
    got, _ = assert_equals_reference(chunk_kda, inputs, upstream, bound, **options)
    assert got["o"].dtype == dtype
    assert got["final_state"].dtype == torch.float32


@pytest.mark.parametrize("safe", [False, True], ids=["softplus", "bounded"])
@pytest.mark.parametrize("allow_neg_eigval", [False, True], ids=["", "factor 2"])
def test_all_in_the_kernel(pieces, safe, allow_neg_eigval):
    """Norms, gate with both of its parameters, sigmoid of beta, a scale."""
    options = {"safe_gate": True, "lower_bound": -5.0} if safe else {}
    inputs = draw(50, initial_states=1, **RAW)
    assert_right(inputs, **FUSED, **options, allow_neg_eigval=allow_neg_eigval, scale=0.37)


@pytest.mark.parametrize("bound", [-1e-3, -5.0, -5.5, -5.8, -5.95, -50.0])
def test_a_promised_bound(pieces, bound):
    """Of a pre-gated g, whose decays all are at the bound in half of the channels."""
    inputs = draw(40, initial_states=1, decay=1e-4)
    inputs["g"].clamp_(min=bound)
    inputs["g"][..., ::2] = bound
    assert_right(inputs, lower_bound=bound)


@pytest.mark.parametrize("decay", [0.0, -0.1, -8.0, -20.0, -200.0, -1000.0, "half", "some"])
def test_every_decay(pieces, decay):
    """No bound is promised; maps whose transition is 0, and whose is the identity."""
    inputs = draw(40, HV=1, initial_states=1)
    if decay == "half":
        inputs["g"][..., ::2], inputs["g"][..., 1::2] = -1e-4, -50.0
    elif decay == "some":
        inputs["g"][:, 3:40:9] = -1000.0
    else:
        inputs["g"][:] = decay
    assert_right(inputs)


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_intermediate_states(pieces, layout):
    """The entry state of every chunk of every piece, alike with the value channels first."""
    options = {"cu_seqlens": [0, 37, 37, 60]} if layout == "packed" else {}
    count = 3 if layout == "packed" else 1
    inputs = draw(60, V=24, initial_states=count)
    plain = forward(inputs, **options)
    assert_similar(plain, forward(inputs, impl="reference", **options), bounds(torch.float32))
    transposed = inputs | {"initial_state": inputs["initial_state"].mT.contiguous()}
    v_first = forward(transposed, state_v_first=True, **options)
    for name in ("final_state", "h"):
        v_first[name] = v_first[name].mT
    assert_bitwise(v_first, plain)


@pytest.mark.parametrize("cu_seqlens", [[0, 0, 0], [0], None], ids=str)
def test_no_tokens(pieces, cu_seqlens):
    """Empty sequences and no sequence: the state passes through, as does its gradient."""
    count = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    inputs = draw(0, initial_states=count)
    inputs.setdefault("initial_state", torch.empty(0, 2, 16, 16, device=DEVICE))
    upstream = upstream_of(inputs, final_states=count)
    upstream.setdefault("final_state", torch.empty(0, 2, 16, 16, device=DEVICE))
    got = run(chunk_kda, inputs, upstream, impl="triton", cu_seqlens=cu_seqlens)
    assert torch.equal(got["final_state"], inputs["initial_state"])
    assert torch.equal(got["dinitial_state"], upstream["final_state"])
    assert got["o"].shape == (1, 0, 2, 16)


@of(1, 2)
@pytest.mark.parametrize("initial", [False, True], ids=["", "initial"])
def test_packed_is_separate_to_the_bit(pieces, initial):
    """The neighbours of a document change neither its pieces nor their bits."""
    cu_seqlens = [0, 37, 69, 70, 118]
    inputs = draw(118, HV=1, initial_states=4 * initial)
    packed = forward(inputs, cu_seqlens=cu_seqlens)
    chunk = 0
    for n, (start, stop) in enumerate(pairwise(cu_seqlens)):
        alone = forward(take(inputs, slice(start, stop), slice(n, n + 1)))
        part = take(packed, slice(start, stop), slice(n, n + 1))
        chunks = -(-(stop - start) // 16)
        part["h"] = packed["h"][:, chunk : chunk + chunks]
        chunk += chunks
        assert_bitwise(part, alone)


def test_dense_rows_are_separate_to_the_bit(pieces):
    """Each row is bitwise the call of its own."""
    inputs = draw(40, B=3, HV=1, initial_states=3)
    together = forward(inputs)
    for b in range(3):
        row = slice(b, b + 1)
        assert_bitwise({n: x[row] for n, x in together.items()}, forward(one_row(inputs, row)))


def one_row(inputs, row):
    return {name: x[row] for name, x in inputs.items()}


@of(1, 2)
@pytest.mark.parametrize("known", [21, 32, 33, 64])
@pytest.mark.parametrize("initial", [False, True], ids=["", "initial"])
def test_more_tokens_reach_no_earlier_output(pieces, known, initial):
    """Extending a call from `known` tokens moves no bit of what it gave before."""
    inputs = draw(70, HV=1, initial_states=int(initial))
    want, longer = forward(take(inputs, slice(0, known))), forward(inputs)
    del want["final_state"]
    assert_bitwise({"o": longer["o"][:, :known], "h": longer["h"][:, : -(-known // 16)]}, want)


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("at", [21, 32])
def test_no_later_token_reaches_an_earlier_output(pieces, name, at):
    """One input of every later token changed, in the middle of a piece and at its edge."""
    inputs = draw(50, HV=1, initial_states=1)
    changed = inputs | {name: inputs[name].clone()}
    changed[name][:, at:] *= 0.5 if name in ("k", "beta") else 50
    before, after = forward(inputs)["o"], forward(changed)["o"]
    assert torch.equal(after[:, :at], before[:, :at])
    assert not torch.equal(after, before)


@pytest.mark.parametrize("last", [0.0, -5.0, -1000.0])
def test_the_last_gate_reaches_no_earlier_output(pieces, last):
    """T = 22, only the last gate changed: o[:21] is bitwise the same."""
    inputs = draw(22, HV=1, initial_states=1)
    changed = inputs | {"g": inputs["g"].clone()}
    changed["g"][:, 21:] = last
    assert torch.equal(forward(changed)["o"][:, :21], forward(inputs)["o"][:, :21])


@of(1, 2, 3)
@pytest.mark.parametrize(("T", "initial"), [(64, True), (71, False), (71, True)])
def test_a_call_in_two_parts(pieces, T, initial):
    """Cut at a multiple of the piece and carried on from the state: one call, to the bit."""
    inputs = draw(T, HV=1, initial_states=int(initial))
    whole = forward(inputs)
    for at in range(16 * pieces, T, 16 * pieces):
        first = forward(take(inputs, slice(0, at)))
        rest = take(inputs, slice(at, None)) | {"initial_state": first["final_state"]}
        second = forward(rest)
        joined = {n: torch.cat([first[n], second[n]], 1) for n in ("o", "h")}
        assert_bitwise(joined | {"final_state": second["final_state"]}, whole)


@pytest.mark.parametrize("poisoned", ["v", "k", "g", "beta", "initial_state"])
def test_nan_stays_in_its_document(pieces, poisoned):
    """NaN in the second document leaves the others bitwise as they were."""
    cu_seqlens = [0, 37, 72, 110]
    inputs = draw(110, HV=1, initial_states=3)
    sick = inputs | {poisoned: inputs[poisoned].clone()}
    at = (1,) if poisoned == "initial_state" else (slice(None), slice(40, 60))
    sick[poisoned][at] = float("nan")
    before = forward(inputs, cu_seqlens=cu_seqlens)
    after = forward(sick, cu_seqlens=cu_seqlens)
    assert after["o"][:, 60:72].isnan().any()
    for tokens, n, chunks in ((slice(0, 37), 0, slice(0, 3)), (slice(72, 110), 2, slice(6, 9))):
        for results in (before, after):
            results[n] = take(results, tokens, slice(n, n + 1))
            results[n] = {m: results[n][m] for m in ("o", "final_state")}
            results[n]["h"] = results["h"][:, chunks]
        assert_bitwise(after[n], before[n])


def test_repeats_are_bitwise_equal_and_leave_the_inputs(pieces):
    """The same call twice, another one between them; inputs and state are as they were."""
    inputs = draw(50, initial_states=1, **RAW)
    kept = {name: x.clone() for name, x in inputs.items()}
    first = forward(inputs, **FUSED)
    forward(draw(40, K=24))
    assert_bitwise(forward(inputs, **FUSED), first)
    assert_bitwise(inputs, kept)


@pytest.mark.parametrize("mode", ["fused", "heads first"])
def test_strided_inputs(pieces, mode):
    """Slices of one projection and transposed tensors give the bits of contiguous ones."""
    inputs = draw(40, H=2, initial_states=1)
    if mode == "fused":
        parts = [inputs[name].flatten(2) for name in TOKENS]
        fused = torch.cat(parts, -1).split([x.shape[-1] for x in parts], -1)
        views = {n: x.view(inputs[n].shape) for n, x in zip(TOKENS, fused, strict=True)}
    else:
        views = {n: inputs[n].transpose(1, 2).contiguous().transpose(1, 2) for n in TOKENS}
    assert not any(x.is_contiguous() for x in views.values())
    assert_bitwise(forward(inputs | views), forward(inputs))


@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
def test_channels_that_are_not_contiguous(pieces, name):
    """Every second channel of a wider tensor."""
    inputs = draw(20, HV=1)
    wide = torch.full((*inputs[name].shape[:-1], 32), float("nan"), device=DEVICE)
    wide[..., ::2] = inputs[name]
    assert_bitwise(forward(inputs | {name: wide[..., ::2]}), forward(inputs))


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_memory_around_the_buffers_is_never_read(pieces, layout):
    """NaN around every input, and in all fresh memory: the same bits."""
    options = {"cu_seqlens": [0, 37, 37, 60]} if layout == "packed" else {}
    inputs = draw(66, HV=1, K=24, initial_states=3 if options else 1)
    want = forward(inputs, **options)
    for name in TOKENS if options else ():
        inputs[name][:, 60:] = float("nan")  # past the last sequence

    def surround(x):
        buffer = torch.full((x.numel() + 8192,), float("nan"), dtype=x.dtype, device=DEVICE)
        return buffer[4096 : 4096 + x.numel()].view(x.shape).copy_(x)

    inputs = {name: surround(x) for name, x in inputs.items()}
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # then fresh memory is filled with NaN
    try:
        assert torch.empty(3).isnan().all()
        got = forward(inputs, **options)
    finally:
        torch.use_deterministic_algorithms(before)
    assert_bitwise(got, want)


def test_a_long_sequence_in_pinned_pieces():
    """Without a patch: one piece, of which the state is the walk's own."""
    assert_right(draw(70, HV=1, initial_states=1), chunk_size=64)


def test_float64_is_refused():
    inputs = draw(4, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"impl: expected .*'triton'.* got float64"):
        chunk_kda(**inputs, impl="triton")


def test_too_many_key_channels_are_refused():
    with pytest.raises(NotImplementedError, match=r"impl: expected .*'triton'.* got K = 300"):
        chunk_kda(**draw(4, K=300, V=16), impl="triton")


def test_tensors_on_a_cpu_are_refused_where_nothing_interprets(run_fresh):
    """And nothing else is: the same call by `auto` is served."""
    run_fresh(
        """
        import os
        os.environ.pop("TRITON_INTERPRET", None)
        import torch
        from kda_cp import chunk_kda

        q, k, v, g = (torch.randn(1, 5, 1, 16) for _ in range(4))
        beta = torch.rand(1, 5, 1)
        try:
            chunk_kda(q, k, v, -g.exp(), beta, impl="triton")
        except NotImplementedError as error:
            assert str(error).startswith("impl: expected what 'triton' can serve, got"), error
            assert "on a CPU" in str(error) and "TRITON_INTERPRET" in str(error), error
        else:
            raise SystemExit("was served")
        chunk_kda(q, k, v, -g.exp(), beta)
        """
    )


def test_auto_on_a_cpu_is_torch():
    """Even where the kernels could be interpreted, `auto` gives the bits of `torch`."""
    inputs = {name: x.cpu() for name, x in draw(40).items()}
    auto = forward(inputs, impl="auto")
    assert_bitwise(auto, forward(inputs, impl="torch"))
    if DEVICE == "cpu":
        assert not torch.equal(auto["o"], forward(inputs)["o"]), "the kernels' bits are their own"


def test_tf32_is_for_the_kernels(pieces):
    """Accepted with `triton`, whose products it makes less exact, refused by the others."""
    inputs = draw(40, initial_states=1)
    upstream = upstream_of(inputs)
    bound = 1e-4 if DEVICE == "cpu" else 2**-9  # operands are rounded by 2^-11 on a GPU
    options = {"impl": "triton", "precision": "tf32", "chunk_size": 16}
    assert_equals_reference(chunk_kda, inputs, upstream, bound, **options)
    cpu = {name: x.cpu() for name, x in inputs.items()}
    for impl in ("torch", "reference", "auto"):
        with pytest.raises(NotImplementedError, match=r"precision: .* got 'tf32'"):
            chunk_kda(**cpu, impl=impl, precision="tf32")


def test_the_recurrent_operator_has_no_kernel():
    with pytest.raises(NotImplementedError, match=r"impl: .* got 'triton'"):
        fused_recurrent_kda(**draw(1), impl="triton")
