"""The terms of the chunks are those of the formulas in fp64, row by row, for every argument.

Rows are scored one by one, the inverse on its strictly lower part as well: in a whole tensor the
first rows of a chunk, which have decayed least, hide the others.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from kda_cp import platform
from kda_cp.compiled import CAUSAL_BOUND, INTERPRETED
from kda_cp.kernels import intra
from kda_cp.kernels.configs import IntraConfig
from kda_cp.kernels.primitives import arithmetic
from kda_cp.testing.compare import draw_inputs, errors

DEVICE = "cuda" if platform.device == "cuda" else "cpu"

# A log decay that is scored relatively is more than -100 in base 2 and the sum of at most 64
# numbers, whose roundings of 2^-24 of it become relative ones of the decay.
EXACT = 5e-5
# Products whose operands are rounded by 2^-8 (bf16) or 2^-11 (tf32), as is Aqk in bf16 before it is
# multiplied again; rows of these drawings cancel to no less than an eighth or so.
ROUNDED = {torch.bfloat16: 2**-6, torch.float16: 2**-8, torch.float32: 2**-8}
RAW = {"raw_gate": True}
KEY = {"strictly lower T": "T"}
GATES = {"pre-gated": intra.PRE_GATED, "softplus": intra.SOFTPLUS, "bounded": intra.BOUNDED}


def bounds_of(dtype, precision=None, exact=EXACT):
    """Bounds of the error of a row; the interpreter multiplies in fp32, and truncates to bf16."""
    stored = exact + (2 ** (-7 if INTERPRETED else -8) if dtype == torch.bfloat16 else 0)
    precise = dtype != torch.bfloat16 and INTERPRETED
    precise = precise or (dtype == torch.float32 and precision is None)
    products = exact if precise else ROUNDED[dtype]
    bounds = {
        "kd": stored,
        "qg": stored,
        "kg": stored,
        "decay": exact,
        "T": products,
        "AT": products,
    }
    return bounds | ({"strictly lower T": exact} if precise else {})


def spans(chunk_size, cu_seqlens, rows=1):
    """[NC, 3]: row of the batch, first token, tokens of every chunk of the sequences."""
    return torch.tensor(
        [
            (b, t, min(chunk_size, stop - t))
            for b in range(rows)
            for start, stop in pairwise(cu_seqlens)
            for t in range(start, stop, chunk_size)
        ],
        dtype=torch.int64,
    )


def options(inputs, **given):
    """The keywords of `intra.chunk_terms`, but for the arithmetic, with defaults for a test."""
    return {
        "scale": inputs["q"].shape[-1] ** -0.5,
        "chunk_size": 64,
        "normalize_qk": False,
        "gate": intra.PRE_GATED,
        "lower_bound": 0.0,
        "bounded": False,
        "sigmoid_beta": False,
        "beta_factor": 1.0,
        **given,
    }


def compute(inputs, chunks, precision=None, config=None, **given):
    """The kernels' terms, by name."""
    inputs = {name: x.to(DEVICE) for name, x in inputs.items()}
    terms = intra.chunk_terms(
        *(inputs[name] for name in ("q", "k", "g", "beta")),
        inputs.get("A_log"),
        inputs.get("dt_bias"),
        chunks.to(DEVICE),
        arithmetic=arithmetic(inputs["q"].dtype, precision, INTERPRETED),
        config=config,
        **options(inputs, **given),
    )
    rows = terms.kg.shape[2]
    return {
        "kd": terms.kq[:, :, :rows],
        "qg": terms.kq[:, :, rows:],
        "kg": terms.kg,
        "T": terms.TA[:, :, :rows],
        "AT": terms.TA[:, :, rows:],
        "decay": terms.decay[:, :, None],
    }


def formulas(inputs, chunks, **given):
    """The same in fp64, as the docstring of `intra.py` writes them: zero past a chunk's tokens."""
    o = options(inputs, **given)
    C = o["chunk_size"]
    HV, K = inputs["g"].shape[2:]
    group = HV // inputs["q"].shape[2]
    KP = max(16, 1 << (K - 1).bit_length())
    x = {name: tensor.cpu().double() for name, tensor in inputs.items()}
    if o["normalize_qk"]:
        for name in "qk":
            x[name] = x[name] / ((x[name] ** 2).sum(-1, keepdim=True) + 1e-6).sqrt()
    z = x["g"]
    if "dt_bias" in x:
        z = z + x["dt_bias"].view(HV, K)
    rate = x["A_log"].exp()[:, None] if "A_log" in x else 1.0
    g = [x["g"], -rate * torch.nn.functional.softplus(z), o["lower_bound"] * (rate * z).sigmoid()]
    x["g"] = g[o["gate"]]
    if o["sigmoid_beta"]:
        x["beta"] = x["beta"].sigmoid()
    x["beta"] = x["beta"] * o["beta_factor"]
    terms = {
        name: torch.zeros(len(chunks), HV, rows, columns, dtype=torch.float64)
        for name, rows, columns in (
            *(("kd", C, KP), ("qg", C, KP), ("kg", C, KP), ("T", C, C), ("AT", C, C)),
            ("decay", 1, KP),
        )
    }
    terms["decay"][..., K:] = 1.0  # of padding channels, whose states are zero
    for n, (b, t, length) in enumerate(chunks.tolist()):
        of = slice(t, t + length)
        for hv in range(HV):
            q, k = (x[name][b, of, hv // group] for name in "qk")
            beta = x["beta"][b, of, hv]
            G = x["g"][b, of, hv].cumsum(0)
            ratio = (G[:, None] - G[None, :]).clamp(max=0).exp()  # [i, j, K], of i >= j
            A = torch.einsum("ik,jk,ijk->ij", q * o["scale"], k, ratio).tril()
            N = (beta[:, None] * torch.einsum("ik,jk,ijk->ij", k, k, ratio)).tril(-1)
            eye = torch.eye(length, dtype=torch.float64)
            T = torch.linalg.solve_triangular(eye + N, eye, upper=False) * beta
            for name, term in {
                "kd": k * G.exp(),
                "qg": o["scale"] * q * G.exp(),
                "kg": k * (G[-1] - G).exp(),
                "T": T,
                "AT": A @ T,
                "decay": G[-1:].exp(),
            }.items():
                terms[name][n, hv, : term.shape[0], : term.shape[1]] = term
    return terms


def row_errors(x, ref):
    """|x - ref| / |ref| of every row [.., n]; absolute, times 100, where |ref| <= 1e-30."""
    x, ref = (y.cpu().flatten(0, -2)[None, None, :, :, None] for y in (x, ref))
    return errors("h", x, ref)


def assert_terms(inputs, chunks, precision=None, config=None, exact=EXACT, **given):
    """Assert that the kernels' terms are those of the formulas; return both."""
    got = compute(inputs, chunks, precision, config, **given)
    want = formulas(inputs, chunks, **given)
    faults = []
    for name, bound in bounds_of(inputs["q"].dtype, precision, exact).items():
        x, ref = got[KEY.get(name, name)], want[KEY.get(name, name)]
        if name == "strictly lower T":
            x, ref = x.tril(-1), ref.tril(-1)
        error = row_errors(x, ref).view(ref.shape[:-1])
        if not x.isfinite().all():
            faults.append(f"{name}: not finite")
        elif error.max() > bound:
            at = (error == error.max()).nonzero()[0].tolist()
            faults.append(f"{name}: {error.max():.1e} > {bound:.1e} at (chunk, head, row) {at}")
    assert not faults, "; ".join(faults)
    return got, want


@pytest.mark.parametrize("dt_bias", [False, True], ids=["", "dt_bias"])
@pytest.mark.parametrize("A_log", [False, True], ids=["", "A_log"])
@pytest.mark.parametrize(
    ("gate", "bounded"), [("softplus", False), ("bounded", False), ("bounded", True)]
)
def test_every_gate(gate, bounded, A_log, dt_bias):
    """With and without its parameters, through the form for bounded decays and the one for any."""
    inputs = draw_inputs(T=50, H=1, HV=2, K=24, A_log=A_log, dt_bias=dt_bias, **RAW)
    given = {"gate": GATES[gate], "bounded": bounded, "lower_bound": -5.0 * (gate == "bounded")}
    assert_terms(inputs, spans(32, [0, 50]), chunk_size=32, **given)


@pytest.mark.parametrize("lower_bound", [-1.0, -0.1])
def test_every_lower_bound(lower_bound):
    """The bound is a factor of the gate, per call."""
    inputs = draw_inputs(T=20, H=1, K=16, A_log=True, **RAW)
    given = {"gate": intra.BOUNDED, "bounded": True, "lower_bound": lower_bound}
    assert_terms(inputs, spans(32, [0, 20]), chunk_size=32, **given)


@pytest.mark.parametrize("bounded", [False, True], ids=["unbounded", "bounded"])
@pytest.mark.parametrize("beta", ["logits", "factor 2", "both"])
@pytest.mark.parametrize("normalize_qk", [False, True], ids=["", "l2norm"])
def test_norms_and_betas(normalize_qk, beta, bounded):
    """The flags of q, k and beta; with norms, keys that are not unit."""
    inputs = draw_inputs(T=37, H=1, HV=2, K=24, decay=(1e-3, 0.1))
    if normalize_qk:
        inputs["k"] *= torch.linspace(0.1, 3, 37)[:, None, None]
    if beta != "factor 2":
        inputs["beta"] = inputs["beta"].logit()
    given = {"normalize_qk": normalize_qk, "sigmoid_beta": beta != "factor 2"}
    given["beta_factor"] = 1.0 if beta == "logits" else 2.0
    assert_terms(inputs, spans(32, [0, 37]), chunk_size=32, bounded=bounded, **given)


@pytest.mark.parametrize("bounded", [False, True], ids=["unbounded", "bounded"])
@pytest.mark.parametrize(
    ("K", "chunk_size"),
    [
        *((K, 16) for K in (16, 24, 60, 64, 72, 100, 128, 256)),
        *((K, 32) for K in (16, 60, 100)),
        *((K, 64) for K in (16, 24, 72, 128)),
    ],
)
def test_every_key_size_and_chunk_size(K, chunk_size, bounded):
    """One whole chunk, whose loads have no masks where K is a power of two, and one of 3 tokens."""
    T = chunk_size + 3
    inputs = draw_inputs(T=T, H=1, K=K, decay=0.1)
    assert_terms(inputs, spans(chunk_size, [0, T]), chunk_size=chunk_size, bounded=bounded)


@pytest.mark.parametrize("bounded", [False, True], ids=["unbounded", "bounded"])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 33, 48, 63])
def test_every_length_of_a_chunk(length, bounded):
    """Chunks that end in, before and after every block of 16."""
    inputs = draw_inputs(T=length, H=1, K=16, decay=0.1)
    assert_terms(inputs, spans(64, [0, length]), bounded=bounded)


@pytest.mark.parametrize(("H", "HV"), [(1, 2), (2, 4)])
def test_rows_heads_and_documents(H, HV):
    """Two dense rows, then packed documents with tokens around them that belong to none."""
    inputs = draw_inputs(T=9, B=2, H=H, HV=HV, K=16)
    assert_terms(inputs, spans(16, [0, 9], rows=2), chunk_size=16)
    inputs = draw_inputs(T=50, H=H, HV=HV, K=16)
    for x in inputs.values():
        x[:, :3] = x[:, 45:] = float("nan")
    chunks = spans(16, [3, 10, 10, 26, 45])
    inner = {name: x[:, 3:45] for name, x in inputs.items()}
    chunks_inner = spans(16, [0, 7, 7, 23, 42])
    want, _ = assert_terms(inner, chunks_inner, chunk_size=16)
    got = compute(inputs, chunks, chunk_size=16)
    for name, x in got.items():
        assert torch.equal(x, want[name]), name


@pytest.mark.parametrize("bounded", [False, True], ids=["unbounded", "bounded"])
@pytest.mark.parametrize("precision", [None, "tf32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_dtype(dtype, precision, bounded):
    """With g and beta of the same dtype, then in fp32; the terms are in the arithmetic's dtype."""
    for gate_dtype in (dtype, torch.float32):
        inputs = draw_inputs(
            T=37, H=1, HV=2, K=24, decay=(1e-3, 0.1), dtype=dtype, gate_dtype=gate_dtype
        )
        got, _ = assert_terms(inputs, spans(32, [0, 37]), precision, chunk_size=32, bounded=bounded)
        term = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        assert {x.dtype for name, x in got.items() if name != "decay"} == {term}
        assert got["decay"].dtype == torch.float32


DECAYS = [0.0, -0.1, -5.0, -5.5, -5.8, -5.95, -8.0, -11.2, -20.0, -50.0, -200.0, -1000.0]
MIXES = {
    "half the channels -1e-4, half -50": -50.0,
    "-5 and 0 alternating": -5.0,
    "one token of -1000": -10.0,
    "15 of 16 tokens -1000": -100.0,
}
"""The log decay of a block at most, divided by 16; the kernel takes one of a token as 2^-152."""


@pytest.mark.parametrize(
    ("decay", "bounded"),
    [
        *((decay, False) for decay in (*DECAYS, *MIXES)),
        *((decay, True) for decay in (0.0, -0.1, CAUSAL_BOUND, "-5 and 0 alternating")),
    ],
)
def test_every_decay(decay, bounded):
    """Every pair of rows, however far it has decayed, is finite and right.

    A decay inside a block of 16 is a difference of two sums from the block's start, which are
    rounded by 2^-24 of what the block decays, each of them.
    """
    inputs = draw_inputs(T=64, H=1, K=16)
    g = inputs["g"]
    if decay == "half the channels -1e-4, half -50":
        g[..., ::2], g[..., 1::2] = -1e-4, -50.0
    elif decay == "-5 and 0 alternating":
        g[:, ::2], g[:, 1::2] = -5.0, 0.0
    elif decay == "one token of -1000":
        g[:, 21] = -1000.0
    elif decay == "15 of 16 tokens -1000":
        g[:], g[:, 15::16] = -1000.0, -1e-4
    else:
        g[:] = decay
    block = 16 * min(-MIXES.get(decay, decay), 152 * math.log(2))
    assert_terms(inputs, spans(64, [0, 64]), bounded=bounded, exact=max(EXACT, 2 * 2**-24 * block))


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_saturated_gates(gate):
    """Raw gates of +-40: decays of 0, -40 and the bound itself, whole blocks of each."""
    inputs = draw_inputs(T=64, H=1, K=16, **RAW)
    inputs["g"][:] = -40.0
    inputs["g"][:, 5:40] = 40.0
    given = {"gate": GATES[gate], "bounded": gate == "bounded"}
    assert_terms(inputs, spans(64, [0, 64]), lower_bound=-5.0 * (gate == "bounded"), **given)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # the sigmoid of -inf is 0
@pytest.mark.parametrize("rate", [-20.0, 20.0])
def test_extreme_rates(rate):
    """A_log whose exponential is 2e-9 or 5e8: the log decay is 0 or the bound, and no NaN."""
    inputs = draw_inputs(T=20, H=1, K=16, **RAW)
    inputs["A_log"] = torch.full((1,), rate)
    given = {"gate": intra.BOUNDED, "bounded": True, "lower_bound": -5.0}
    assert_terms(inputs, spans(32, [0, 20]), chunk_size=32, **given)


@pytest.mark.parametrize("bounded", [False, True], ids=["unbounded", "bounded"])
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, 0.99])
def test_correlated_keys(rho, chunk_size, bounded):
    """Unit keys that point the same way, g = 0, beta = 1: the inverse keeps its digits.

    |inverse| <= 1 there, and substitution loses no more than its sums of up to 64 terms, 64 2^-24;
    a product of powers of N, whose terms grow as binomials do, has an error of 80.
    """
    generator = torch.Generator().manual_seed(0)
    shared, own = (torch.randn(1, n, 1, 32, generator=generator) for n in (1, 64))
    k = math.sqrt(rho) * shared / shared.norm() + math.sqrt(1 - rho) * own / own.norm(
        dim=-1, keepdim=True
    )
    k = k / k.norm(dim=-1, keepdim=True)
    inputs = {"q": k, "k": k, "g": torch.zeros_like(k), "beta": torch.ones(1, 64, 1)}
    chunks = spans(chunk_size, [0, 64])
    given = {"chunk_size": chunk_size, "bounded": bounded}
    got, want = compute(inputs, chunks, **given), formulas(inputs, chunks, **given)
    for name in ("T", "AT"):
        x, ref = (y[name].cpu().double().tril(-1) for y in (got, want))
        error = (x - ref).flatten(2).norm(dim=-1) / want["T"].tril(-1).flatten(2).norm(dim=-1)
        assert error.max() < 64 * 2**-24, f"{name}: {error.max():.1e}"


def in_a_projection(inputs):
    """Q, k and g as slices of one fused projection, beta as its last columns."""
    parts = [inputs[name].flatten(2) for name in ("q", "k", "g", "beta")]
    fused = torch.cat(parts, -1).split([x.shape[-1] for x in parts], -1)
    return {
        name: x.view(inputs[name].shape)
        for name, x in zip(("q", "k", "g", "beta"), fused, strict=True)
    }


def with_heads_first(inputs):
    """Every tensor as a transposed view of [B, H, T, ..]."""
    return {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}


@pytest.mark.parametrize("view", [in_a_projection, with_heads_first])
@pytest.mark.parametrize("normalize_qk", [False, True], ids=["", "l2norm"])
def test_strided_inputs(view, normalize_qk):
    """The bits are those of contiguous inputs, in whole chunks and in others."""
    inputs = draw_inputs(T=17, B=2, H=2, K=16)
    views = view(inputs)
    assert not any(x.is_contiguous() for x in views.values())
    given = {"chunk_size": 16, "normalize_qk": normalize_qk}
    want = compute(inputs, spans(16, [0, 17], rows=2), **given)
    got = compute_views(views, spans(16, [0, 17], rows=2), **given)
    for name, x in got.items():
        assert torch.equal(x, want[name]), name


def compute_views(views, chunks, **given):
    """`compute` of views, which a copy to the GPU keeps as they are."""
    return compute({name: on_device(x) for name, x in views.items()}, chunks, **given)


def on_device(x):
    size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    whole = x.as_strided((size,), (1,)).to(DEVICE)
    return whole.as_strided(x.shape, x.stride())


@pytest.mark.parametrize("bounded", [False, True], ids=["unbounded", "bounded"])
@pytest.mark.parametrize("K", [16, 24])
def test_memory_around_the_buffers_is_never_read(K, bounded):
    """NaN before and behind every input and in all fresh memory: the same bits."""
    inputs = draw_inputs(T=21, H=1, HV=2, K=K, A_log=True, dt_bias=True, **RAW)
    chunks = spans(16, [0, 21])
    given = {"gate": intra.BOUNDED, "lower_bound": -5.0, "bounded": bounded, "normalize_qk": True}
    given["chunk_size"] = 16
    want = compute(inputs, chunks, **given)

    def surround(x):
        buffer = torch.full((x.numel() + 8192,), float("nan"), device=DEVICE)
        return buffer[4096 : 4096 + x.numel()].view(x.shape).copy_(x)

    surrounded = {name: surround(x) for name, x in inputs.items()}
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # then fresh memory is filled with NaN
    try:
        assert torch.empty(3).isnan().all()
        got = compute(surrounded, chunks, **given)
    finally:
        torch.use_deterministic_algorithms(before)
    for name, x in got.items():
        assert torch.equal(x, want[name]), name


@pytest.mark.parametrize("bounded", [False, True], ids=["unbounded", "bounded"])
@pytest.mark.parametrize("columns", [16, 32, 64])
def test_every_launch(columns, bounded):
    """However many channels a slice has, of which there may be four, two or one."""
    inputs = draw_inputs(T=35, H=1, K=60, decay=0.1)
    config = IntraConfig(columns, 4, 1)
    given = {"chunk_size": 32, "bounded": bounded, "normalize_qk": True}
    assert_terms(inputs, spans(32, [0, 35]), config=config, **given)


def test_no_chunks():
    """A call without a token gives terms of no chunk."""
    got = compute(draw_inputs(T=1, H=1, K=16), torch.empty(0, 3, dtype=torch.int64))
    assert {x.shape[0] for x in got.values()} == {0}
