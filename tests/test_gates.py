"""The gate formulas against torch's own in fp64, their gradients, and their bitwise promise.

fp32 tolerances: exp and log1p are good to 1 or 2 ulp (2.4e-7) and the chains here take at most five
steps, so 1e-6 relative; fp64 likewise 1e-14.
"""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from kda_cp import gates

F32, F64 = torch.float32, torch.float64
EXTREMES = [-1e4, -800.0, -104.0, -88.0, -20.0, -1.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, 20.0, 88.0,
            104.0, 800.0, 1e4]  # fmt: skip
RTOL = {F32: 1e-6, F64: 1e-14}
HV, K = 3, 4


def draw(*shape, seed=0, dtype=F64, spread=3.0):
    r = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(*shape, generator=r, dtype=F64)).to(dtype)


def parameters(dtype=F64):
    return draw(HV, seed=1, dtype=dtype, spread=0.5), draw(HV * K, seed=2, dtype=dtype, spread=0.5)


def plain_gate(g, A_log, dt_bias, lower_bound):
    """The two formulas in torch's own functions, for autograd; use fp64 and |z| < 20."""
    z = g if dt_bias is None else g + dt_bias.view(g.shape[-2:])
    rate = 1.0 if A_log is None else A_log.exp().view(-1, 1)
    return -rate * F.softplus(z) if lower_bound is None else lower_bound * torch.sigmoid(rate * z)


MODES = [  # A_log given, dt_bias given, lower_bound
    (True, False, None),
    (True, True, None),
    (False, False, -5.0),
    (True, False, -1.0),
    (False, True, -0.1),
    (True, True, -5.0),
]


def arguments(mode, dtype=F64):
    with_rate, with_bias, lower_bound = mode
    A_log, dt_bias = parameters(dtype)
    return A_log if with_rate else None, dt_bias if with_bias else None, lower_bound


# Helpers


@pytest.mark.parametrize("dtype", [F32, F64])
def test_softplus_and_sigmoid_equal_torch_in_fp64(dtype):
    x = torch.cat([draw(1000), torch.linspace(-80, 15, 997, dtype=F64)]).to(dtype)
    exact = x.double()
    # log1p(exp(x)) with no threshold: F.softplus turns linear where exp(-x) still matters
    for mine, right in (
        (gates.softplus(x), torch.logaddexp(exact, torch.zeros_like(exact))),
        (gates.sigmoid(x), torch.exp(exact) / (1 + torch.exp(exact))),
    ):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), right, rtol=RTOL[dtype], atol=0)
    torch.testing.assert_close(gates.softplus(x), F.softplus(x), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(gates.sigmoid(x), torch.sigmoid(x), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_extreme_arguments_give_the_limits_and_exact_slopes(dtype):
    x = torch.tensor(EXTREMES, dtype=dtype, requires_grad=True)
    exact = x.detach().double()
    e = torch.exp(-exact.abs())
    s = torch.where(exact < 0, e, torch.ones_like(e)) / (1 + e)
    tiny = torch.finfo(dtype).tiny  # below it a flushed subnormal is as good
    for function, value, slope in (
        (gates.softplus, exact.clamp(min=0) + torch.log1p(e), s),
        (gates.sigmoid, s, e / (1 + e) ** 2),
    ):
        y = function(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(y.double(), value, rtol=RTOL[dtype], atol=tiny)
        torch.testing.assert_close(dx.double(), slope, rtol=RTOL[dtype], atol=tiny)


def test_slopes_at_exactly_zero():
    for zero in (0.0, -0.0):
        x = torch.full((3,), zero, requires_grad=True)
        assert torch.autograd.grad(gates.softplus(x).sum(), x)[0].tolist() == [0.5] * 3
        assert torch.autograd.grad(gates.sigmoid(x).sum(), x)[0].tolist() == [0.25] * 3


def test_infinities_and_nan_behave():
    x = torch.tensor([-torch.inf, torch.inf, torch.nan])
    assert gates.softplus(x)[:2].tolist() == [0.0, torch.inf]
    assert gates.sigmoid(x)[:2].tolist() == [0.0, 1.0]
    assert gates.softplus(x)[2].isnan() and gates.sigmoid(x)[2].isnan()


def test_l2norm_is_the_stated_formula_also_at_zero():
    x = draw(5, 2, 7)
    x[0] = 0
    torch.testing.assert_close(
        gates.l2norm(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), rtol=1e-14, atol=0
    )
    x.requires_grad_()
    (dx,) = torch.autograd.grad(gates.l2norm(x).sum(), x)
    torch.testing.assert_close(dx[0], torch.full_like(dx[0], 1e3))


@pytest.mark.parametrize("function", [gates.softplus, gates.sigmoid, gates.l2norm])
def test_helpers_pass_gradcheck_and_widen_half_precision(function):
    x = draw(4, 5).requires_grad_()
    assert torch.autograd.gradcheck(function, x)
    half = x.detach().bfloat16().requires_grad_()
    y = function(half)
    assert y.dtype == F32 and torch.equal(y, function(half.detach().float()))
    assert torch.autograd.grad(y.sum(), half)[0].dtype == torch.bfloat16


# Gate


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_gate_equals_torchs_formula_in_fp64(mode, dtype):
    g = draw(2, 5, HV, K, dtype=dtype)
    args = arguments(mode, dtype)
    A_log, dt_bias = (None if x is None else x.double() for x in args[:2])
    right = plain_gate(g.double(), A_log, dt_bias, args[2])
    y = gates.activate_gate(g, *args)
    assert y.dtype == dtype
    # The relative error of exp(x) is the absolute one of x: allow it ulps of |z| up to 16.
    rtol = {F32: 16e-6, F64: 1e-13}[dtype]
    torch.testing.assert_close(y.double(), right, rtol=rtol, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_public_names_are_one_formula(mode):
    g = draw(5, HV, K, dtype=F32)
    A_log, dt_bias, lower_bound = arguments(mode, F32)
    y = gates.activate_gate(g, A_log, dt_bias, lower_bound)
    assert torch.equal(gates.fused_kda_gate(g, A_log, dt_bias, lower_bound), y)
    assert torch.equal(gates.kda_gate_fwd(g, A_log, dt_bias, lower_bound), y)
    if lower_bound is None:
        assert torch.equal(gates.naive_kda_gate(g, A_log, dt_bias), y)
    else:
        assert torch.equal(gates.naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound), y)


def test_output_dtype_is_obeyed_and_lower_bound_defaults_to_minus_five():
    g = draw(5, HV, K)
    for dtype in (torch.bfloat16, F32, F64):
        assert gates.naive_kda_gate(g, parameters()[0], output_dtype=dtype).dtype == dtype
        y = gates.naive_kda_lowerbound_gate(g, output_dtype=dtype)
        assert torch.equal(y, gates.activate_gate(g, None, None, -5.0).to(dtype))
    assert gates.fused_kda_gate(g, lower_bound=-1.0).dtype == F32


@pytest.mark.parametrize("mode", MODES)
def test_gate_gradients_equal_autograd_of_torchs_formula(mode):
    g = draw(2, 5, HV, K).requires_grad_()
    A_log, dt_bias, lower_bound = arguments(mode)
    leaves = [x for x in (g, A_log, dt_bias) if x is not None]
    for x in leaves[1:]:
        x.requires_grad_()
    dy = draw(2, 5, HV, K, seed=3)
    right = torch.autograd.grad(plain_gate(g, A_log, dt_bias, lower_bound), leaves, dy)
    through = torch.autograd.grad(
        gates.fused_kda_gate(g, A_log, dt_bias, lower_bound, F64), leaves, dy
    )
    explicit = gates.kda_gate_bwd(g, A_log, dt_bias, dy, lower_bound)
    assert [x is None for x in explicit] == [False, A_log is None, dt_bias is None]
    for mine in (through, [x for x in explicit if x is not None]):
        for x, expected in zip(mine, right, strict=True):
            torch.testing.assert_close(x, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_gate_passes_gradcheck(mode):
    A_log, dt_bias, lower_bound = arguments(mode)
    inputs = [draw(2, HV, K), A_log, dt_bias]
    for x in inputs:
        if x is not None:
            x.requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: gates.activate_gate(*x, lower_bound), inputs)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_come_in_the_dtype_of_their_arguments(mode):
    A_log, dt_bias, lower_bound = arguments(mode, F32)
    g, dy = draw(5, HV, K, dtype=torch.bfloat16), draw(5, HV, K, seed=3, dtype=F32)
    if dt_bias is not None:
        dt_bias = dt_bias.bfloat16()
    dg, dA_log, ddt_bias = gates.kda_gate_bwd(g, A_log, dt_bias, dy, lower_bound)
    assert dg.dtype == torch.bfloat16
    assert dA_log is None or (dA_log.dtype == F32 and dA_log.shape == (HV,))
    assert ddt_bias is None or (ddt_bias.dtype == torch.bfloat16 and ddt_bias.shape == (HV * K,))


def test_gate_gradient_at_an_argument_of_exactly_zero():
    g, A_log = torch.zeros(3, HV, K, requires_grad=True), torch.zeros(HV)
    (dg,) = torch.autograd.grad(gates.activate_gate(g, A_log, None, None).sum(), g)
    assert torch.equal(dg, torch.full_like(g, -0.5))
    (dg,) = torch.autograd.grad(gates.activate_gate(g, A_log, None, -4.0).sum(), g)
    assert torch.equal(dg, torch.full_like(g, -1.0))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_extreme_gates_stay_finite_and_inside_the_bound(lower_bound):
    g = torch.tensor(EXTREMES).view(-1, 1, 1).requires_grad_()
    A_log, dt_bias = torch.tensor([2.0]).requires_grad_(), torch.zeros(1).requires_grad_()
    y = gates.activate_gate(g, A_log, dt_bias, lower_bound)
    assert y.isfinite().all() and (y <= 0).all()
    if lower_bound is not None:
        assert (y >= lower_bound).all()
    grads = torch.autograd.grad(y.sum(), (g, A_log, dt_bias))
    assert all(x.isfinite().all() for x in grads)


def test_ambient_autocast_changes_no_bit():
    g, (A_log, dt_bias) = draw(5, HV, K, dtype=F32), parameters(F32)
    outside = [
        gates.activate_gate(g, A_log, dt_bias, None),
        *gates.kda_gate_bwd(g, A_log, dt_bias, g, -5.0),
        gates.kda_gate_chunk_cumsum(g[None], A_log, 2, 0.5, dt_bias),
        gates.l2norm(g),
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = [
            gates.activate_gate(g, A_log, dt_bias, None),
            *gates.kda_gate_bwd(g, A_log, dt_bias, g, -5.0),
            gates.kda_gate_chunk_cumsum(g[None], A_log, 2, 0.5, dt_bias),
            gates.l2norm(g),
        ]
    assert all(torch.equal(x, y) for x, y in zip(outside, inside, strict=True))


# The bitwise promise


def layouts(x, start, stop):
    """The rows of a slice as a view, a fresh buffer, transposed, and spread over a larger one."""
    yield x[start:stop]
    yield x[start:stop].clone()
    yield x[start:stop].mT.contiguous().mT
    spread = x.new_full((stop - start, *x.shape[1:], 3), torch.nan)
    spread[..., 1] = x[start:stop]
    yield spread[..., 1]


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(
    ("name", "channels"),
    [("softplus", 1), ("sigmoid", 1), ("l2norm", 7), ("l2norm", 24), ("l2norm", 128)],
)
def test_helpers_give_a_row_the_same_bits_in_every_slice(name, channels, dtype):
    function = getattr(gates, name)
    whole = draw(70, channels, dtype=dtype).requires_grad_()
    y = function(whole)
    up = draw(70, channels, seed=3, dtype=dtype)
    (dx,) = torch.autograd.grad(y, whole, up)
    for start in range(0, 9):
        for length in range(1, 60, 2 if channels == 1 else 7):
            rows = slice(start, start + length)
            parts = layouts(whole.detach(), rows.start, rows.stop)
            for part, up_part in zip(parts, layouts(up, rows.start, rows.stop), strict=True):
                part = part.requires_grad_()
                y_part = function(part)
                assert torch.equal(y_part, y[rows])
                assert torch.equal(torch.autograd.grad(y_part, part, up_part)[0], dx[rows])


@pytest.mark.parametrize("mode", MODES)
def test_gate_gives_a_token_the_same_bits_in_every_slice(mode):
    args = arguments(mode, F32)
    g, dy = draw(70, HV, K, dtype=F32), draw(70, HV, K, seed=3, dtype=F32)
    y, (dg, *_) = gates.activate_gate(g, *args), gates.kda_gate_bwd(g, *args[:2], dy, args[2])
    for start in range(0, 9):
        for length in range(1, 60, 5):
            rows = slice(start, start + length)
            for part in layouts(g, rows.start, rows.stop):
                assert torch.equal(gates.activate_gate(part, *args), y[rows])
                assert torch.equal(
                    gates.kda_gate_bwd(part, *args[:2], dy[rows], args[2])[0], dg[rows]
                )


# Cumulative sum inside chunks


def looped_cumsum(y, bounds, chunk_size):
    """Sum y [T, HV, K] token by token, restarting at each chunk of each sequence."""
    out = torch.zeros_like(y)
    for start, stop in pairwise(bounds):
        for t in range(start, stop):
            first = (t - start) % chunk_size == 0
            out[t] = y[t] if first else out[t - 1] + y[t]
    return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk_size", [1, 2, 16, 64])
def test_packed_cumsum_restarts_at_every_chunk_of_every_sequence(mode, chunk_size):
    A_log, dt_bias, lower_bound = arguments(mode)
    bounds = [0, 0, 5, 6, 6, 41, 75, 75]
    g = draw(1, 80, HV, K)
    g[:, 75:] = torch.nan  # past the end: read by nobody
    out = gates.kda_gate_chunk_cumsum(
        g, A_log, chunk_size, 0.7, dt_bias, torch.tensor(bounds), F64, lower_bound=lower_bound
    )
    y = gates.activate_gate(g[0], A_log, dt_bias, lower_bound)
    expected = 0.7 * looped_cumsum(y, bounds, chunk_size)
    torch.testing.assert_close(out[0], expected, rtol=1e-14, atol=0)
    assert torch.equal(out[:, 75:], torch.zeros(1, 5, HV, K, dtype=F64))


def test_dense_rows_equal_packed_ones_bitwise():
    g, (A_log, dt_bias) = draw(3, 21, HV, K, dtype=F32), parameters(F32)
    dense = gates.kda_gate_chunk_cumsum(g, A_log, 16, dt_bias=dt_bias)
    packed = gates.kda_gate_chunk_cumsum(
        g.reshape(1, 63, HV, K), A_log, 16, dt_bias=dt_bias,
        cu_seqlens=torch.tensor([0, 21, 42, 63], dtype=torch.int32),
    )  # fmt: skip
    assert torch.equal(dense.view_as(packed), packed)
    for length in (1, 15, 16, 17, 20):  # and a prefix ignores what follows
        prefix = gates.kda_gate_chunk_cumsum(g[:, :length], A_log, 16, dt_bias=dt_bias)
        assert torch.equal(prefix, dense[:, :length])


def test_cumsum_scale_dtype_and_no_tokens():
    g, A_log = draw(1, 9, HV, K, dtype=F32), parameters(F32)[0]
    natural = gates.kda_gate_chunk_cumsum(g, A_log, 4)
    log2 = gates.kda_gate_chunk_cumsum(g, A_log, 4, 1 / torch.log(torch.tensor(2.0)).item())
    torch.testing.assert_close(torch.exp2(log2), torch.exp(natural), rtol=1e-4, atol=1e-30)
    assert natural.dtype == F32
    assert gates.kda_gate_chunk_cumsum(g, A_log, 4, output_dtype=F64).dtype == F64
    assert gates.kda_gate_chunk_cumsum(g[:, :0], A_log, 4).shape == (1, 0, HV, K)
    empty = gates.kda_gate_chunk_cumsum(g, A_log, 4, cu_seqlens=torch.tensor([0, 0, 0]))
    assert torch.equal(empty, torch.zeros_like(g))


def test_nan_in_one_sequence_stays_there():
    g, A_log = draw(1, 12, HV, K, dtype=F32), parameters(F32)[0]
    cu_seqlens = torch.tensor([0, 5, 8, 12])
    clean = gates.kda_gate_chunk_cumsum(g, A_log, 4, cu_seqlens=cu_seqlens)
    g[:, 5:8] = torch.nan
    out = gates.kda_gate_chunk_cumsum(g, A_log, 4, cu_seqlens=cu_seqlens)
    assert torch.equal(out[:, :5], clean[:, :5]) and torch.equal(out[:, 8:], clean[:, 8:])
    assert out[:, 5:8].isnan().all()


def test_cumsum_is_differentiable():
    A_log, dt_bias = parameters()
    inputs = [x.requires_grad_() for x in (draw(1, 7, HV, K), A_log, dt_bias)]
    cu_seqlens = torch.tensor([0, 3, 3, 6])

    def run(g, A_log, dt_bias):
        return gates.kda_gate_chunk_cumsum(g, A_log, 2, 0.7, dt_bias, cu_seqlens, F64)

    assert torch.autograd.gradcheck(run, inputs)


def test_chunk_indices_are_the_sequence_and_chunk_of_every_chunk():
    g = draw(1, 12, HV, K, dtype=F32)
    cu_seqlens = torch.tensor([0, 5, 5, 12])
    right = torch.tensor([[0, 0], [0, 1], [2, 0], [2, 1]])

    def run(**options):
        return gates.kda_gate_chunk_cumsum(g, None, 4, lower_bound=-5.0, **options)

    without = run(cu_seqlens=cu_seqlens)
    assert torch.equal(run(cu_seqlens=cu_seqlens, chunk_indices=right.int()), without)
    for wrong in (right[:-1], right.flip(0), right.flatten()):
        with pytest.raises(ValueError, match=r"^chunk_indices: expected the 4 \(sequence, chunk\)"):
            run(cu_seqlens=cu_seqlens, chunk_indices=wrong)
    with pytest.raises(ValueError, match=r"^chunk_indices: expected"):
        run(chunk_indices=right)


# Refusals


@pytest.mark.parametrize("lower_bound", [0, 0.0, -5.1, -7, 1.0, float("nan"), float("-inf")])
def test_a_bound_outside_minus_five_to_zero_is_refused(lower_bound):
    g = draw(5, HV, K)
    match = "^lower_bound: expected -5 <= lower_bound < 0, got"
    for call in (
        lambda: gates.activate_gate(g, None, None, lower_bound),
        lambda: gates.naive_kda_lowerbound_gate(g, lower_bound=lower_bound),
        lambda: gates.kda_gate_bwd(g, None, None, g, lower_bound),
        lambda: gates.kda_gate_chunk_cumsum(g[None], None, 4, lower_bound=lower_bound),
    ):
        with pytest.raises(ValueError, match=match):
            call()


def test_shapes_are_refused_by_name():
    g, (A_log, dt_bias) = draw(5, HV, K), parameters()
    for args, name in (
        ((g, None, None, None), "A_log"),
        ((g, A_log[:2], None, None), "A_log"),
        ((g, A_log.view(1, HV), None, None), "A_log"),
        ((g, A_log, dt_bias[:HV], None), "dt_bias"),
        ((g, A_log, dt_bias.view(HV, K), None), "dt_bias"),
        ((g[0, 0], A_log, None, None), "g"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected .*got"):
            gates.activate_gate(*args)
    gates.activate_gate(g[..., :1], A_log, dt_bias[:HV], None)  # [HV] is [HV * K] when K = 1


@pytest.mark.parametrize(
    "cu_seqlens",
    [
        torch.tensor([1, 5]),
        torch.tensor([0, 3, 2]),
        torch.tensor([0, 6]),
        torch.tensor([0.0, 5.0]),
        torch.tensor([[0, 5]]),
        torch.tensor([], dtype=torch.int64),
    ],
)
def test_wrong_sequence_bounds_are_refused(cu_seqlens):
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected .*got"):
        gates.kda_gate_chunk_cumsum(
            draw(1, 5, HV, K), None, 4, cu_seqlens=cu_seqlens, lower_bound=-5.0
        )


def test_cumsum_refuses_rows_beside_packing_chunks_of_nothing_and_other_ranks():
    g, cu_seqlens = draw(2, 5, HV, K), torch.tensor([0, 5])
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected B = 1 beside it, got B = 2"):
        gates.kda_gate_chunk_cumsum(g, None, 4, cu_seqlens=cu_seqlens, lower_bound=-5.0)
    with pytest.raises(ValueError, match=r"^chunk_size: expected at least 1, got 0"):
        gates.kda_gate_chunk_cumsum(g, None, 0, lower_bound=-5.0)
    with pytest.raises(ValueError, match=r"^g: expected \[B, T, HV, K\], got"):
        gates.kda_gate_chunk_cumsum(g[0], None, 4, lower_bound=-5.0)
