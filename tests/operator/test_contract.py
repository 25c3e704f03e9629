"""What is accepted and what is refused, and that a refusal says what was wrong."""

import itertools
import re

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

OPERATORS = pytest.mark.parametrize(
    "operator", [chunk_kda, fused_recurrent_kda], ids=["chunk", "recurrent"]
)


# The matrix of gate options -----------------------------------------------------------------------


def refused(use_gate, safe_gate, lower_bound, A_log, dt_bias):
    """Whether the contract (design.md, section 4) refuses the options, and for which argument.

    Written from the contract: a pre-gated g takes no A_log, dt_bias or safe_gate, and its
    lower_bound is a promise, that g >= it, so below 0; in the kernel the bounded gate needs
    -5 <= lower_bound < 0; the softplus gate needs A_log and takes no lower_bound.
    """
    if not use_gate:
        names = [n for n, given in (("A_log", A_log), ("dt_bias", dt_bias)) if given]
        names += ["safe_gate"] * safe_gate
        if lower_bound is not None and lower_bound >= 0:
            names.append("lower_bound")
        return names
    if safe_gate:
        in_range = lower_bound is not None and -5 <= lower_bound < 0
        return [] if in_range else ["lower_bound"]
    return ["lower_bound"] * (lower_bound is not None) + ["A_log"] * (not A_log)


FLAGS = [False, True]
MATRIX = list(itertools.product(FLAGS, FLAGS, [None, -5, -1.0, -0.1, 0, -7], FLAGS, FLAGS))


@pytest.mark.parametrize(("use_gate", "safe_gate", "lower_bound", "A_log", "dt_bias"), MATRIX)
def test_every_combination_of_gate_options(use_gate, safe_gate, lower_bound, A_log, dt_bias):
    """Right, forward and backward, or a ValueError that names the argument at fault."""
    inputs = draw_inputs(
        T=34, HV=4, K=16, initial_states=1, raw_gate=use_gate, A_log=A_log, dt_bias=dt_bias
    )
    options = dict(use_gate_in_kernel=use_gate, safe_gate=safe_gate, lower_bound=lower_bound)
    faults = refused(use_gate, safe_gate, lower_bound, A_log, dt_bias)
    for operator in (chunk_kda, fused_recurrent_kda):
        if faults:
            pattern = rf"^({'|'.join(faults)}): expected .*, got "
            with pytest.raises(ValueError, match=pattern):
                operator(**inputs, **options)
        else:
            assert_equals_reference(operator, inputs, draw_upstream(inputs), **options)


def test_the_matrix_has_both_verdicts():
    """The predicate accepts 19 of the 96 combinations, counted by hand."""
    # pre-gated, nothing else: None, -5, -1, -0.1, -7; softplus with A_log: dt_bias or not;
    # bounded: three bounds, A_log or not, dt_bias or not.
    accepted = [options for options in MATRIX if not refused(*options)]
    assert len(MATRIX) == 96 and len(accepted) == 5 + 2 + 3 * 2 * 2


def test_a_promised_bound_changes_no_bit_and_is_checked_when_debugging():
    """For a pre-gated g, lower_bound is a promise; set_detect_anomaly checks it."""
    inputs = draw_inputs(T=34, HV=4, K=16, decay=1.0)
    inputs["g"].clamp_(min=-3.0)
    upstream = draw_upstream(inputs)
    plain = run(chunk_kda, inputs, upstream)
    assert_bitwise(run(chunk_kda, inputs, upstream, lower_bound=-3.0), plain)
    inputs["g"][0, 3, 1, 2] = -3.5
    run(chunk_kda, inputs, upstream, lower_bound=-3.0)
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(ValueError, match=r"lower_bound: expected .* g >= -3.0, got -3.5"),
    ):
        chunk_kda(**inputs, lower_bound=-3.0)


@OPERATORS
def test_a_forgotten_minus_sign_is_found_when_debugging(operator):
    """A pre-gated g above 0 is refused under set_detect_anomaly; a raw one is not."""
    inputs = draw_inputs(T=34, HV=4, K=16, decay=1.0)
    inputs["g"][0, 3, 1, 2] = 0.5
    with torch.autograd.set_detect_anomaly(True):
        with pytest.raises(ValueError, match=r"g: expected log decays of at most 0, got 0.5"):
            operator(**inputs)
        operator(**inputs, use_gate_in_kernel=True, safe_gate=True, lower_bound=-5.0)


# Refusals -----------------------------------------------------------------------------------------


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


PACKED = [0, 10, 34]
REFUSALS = {
    # name of the argument: what to pass, and what the message says came
    "q missing": (dict(q=None), "q", "NoneType"),
    "beta missing": (dict(beta=None), "beta", "NoneType"),
    "a flag in words": (
        dict(use_qk_l2norm_in_kernel="False"),
        "use_qk_l2norm_in_kernel",
        "'False'",
    ),
    "a flag that is None": (dict(output_final_state=None), "output_final_state", "None"),
    "q three-dimensional": (dict(q=zeros(1, 34, 16)), "q", "[1, 34, 16]"),
    "k heads": (dict(k=zeros(1, 34, 4, 16)), "k", "[1, 34, 4, 16]"),
    "k channels": (dict(k=zeros(1, 34, 2, 8)), "k", "[1, 34, 2, 8]"),
    "k tokens": (dict(k=zeros(1, 33, 2, 16)), "k", "[1, 33, 2, 16]"),
    "v tokens": (dict(v=zeros(1, 33, 4, 16)), "v", "[1, 33, 4, 16]"),
    "v three-dimensional": (dict(v=zeros(1, 34, 64)), "v", "[1, 34, 64]"),
    "v heads": (dict(v=zeros(1, 34, 3, 16)), "v", "3"),
    "g of the key heads": (dict(g=zeros(1, 34, 2, 16)), "g", "[1, 34, 2, 16]"),
    "g without channels": (dict(g=zeros(1, 34, 4)), "g", "[1, 34, 4]"),
    "beta of the key heads": (dict(beta=zeros(1, 34, 2)), "beta", "[1, 34, 2]"),
    "beta per channel": (dict(beta=zeros(1, 34, 4, 16)), "beta", "[1, 34, 4, 16]"),
    "beta no tensor": (dict(beta=0.5), "beta", "float"),
    "k of another dtype": (dict(k=zeros(1, 34, 2, 16, dtype=torch.bfloat16)), "k", "bfloat16"),
    "v of another dtype": (dict(v=zeros(1, 34, 4, 16, dtype=torch.float16)), "v", "float16"),
    "g in half": (dict(g=zeros(1, 34, 4, 16, dtype=torch.float16)), "g", "float16"),
    "g in double": (dict(g=zeros(1, 34, 4, 16, dtype=torch.float64)), "g", "float64"),
    "beta of integers": (dict(beta=zeros(1, 34, 4, dtype=torch.int64)), "beta", "int64"),
    "q of integers": (dict(q=zeros(1, 34, 2, 16, dtype=torch.int32)), "q", "int32"),
    "q on meta": (dict(k=zeros(1, 34, 2, 16).to("meta")), "k", "meta"),
    "A_log per channel": (
        dict(use_gate_in_kernel=True, A_log=zeros(64)),
        "A_log",
        "[64]",
    ),
    "dt_bias per head": (
        dict(use_gate_in_kernel=True, A_log=zeros(4), dt_bias=zeros(4)),
        "dt_bias",
        "[4]",
    ),
    "dt_bias two-dimensional": (
        dict(use_gate_in_kernel=True, A_log=zeros(4), dt_bias=zeros(4, 16)),
        "dt_bias",
        "[4, 16]",
    ),
    "lower_bound a string": (dict(lower_bound="low"), "lower_bound", "'low'"),
    "lower_bound a flag": (dict(lower_bound=True), "lower_bound", "True"),
    "lower_bound nan": (dict(lower_bound=float("nan")), "lower_bound", "nan"),
    "scale nan": (dict(scale=float("nan")), "scale", "nan"),
    "scale inf": (dict(scale=float("inf")), "scale", "inf"),
    "scale a string": (dict(scale="1"), "scale", "'1'"),
    "scale a flag": (dict(scale=True), "scale", "True"),
    "beta factor without sigmoid": (dict(allow_neg_eigval=True), "allow_neg_eigval", "False"),
    "state of another count": (
        dict(initial_state=zeros(2, 4, 16, 24), v=zeros(1, 34, 4, 24)),
        "initial_state",
        "[2, 4, 16, 24]",
    ),
    "state transposed": (
        dict(initial_state=zeros(1, 4, 24, 16), v=zeros(1, 34, 4, 24)),
        "initial_state",
        "[1, 4, 24, 16]",
    ),
    "state not transposed": (
        dict(initial_state=zeros(1, 4, 16, 24), v=zeros(1, 34, 4, 24), state_v_first=True),
        "initial_state",
        "[1, 4, 16, 24]",
    ),
    "state of the key heads": (
        dict(initial_state=zeros(1, 2, 16, 16)),
        "initial_state",
        "[1, 2, 16, 16]",
    ),
    "state in bf16": (
        dict(initial_state=zeros(1, 4, 16, 16, dtype=torch.bfloat16)),
        "initial_state",
        "bfloat16",
    ),
    "state in double": (
        dict(initial_state=zeros(1, 4, 16, 16, dtype=torch.float64)),
        "initial_state",
        "float64",
    ),
    "state count of packed": (
        dict(initial_state=zeros(1, 4, 16, 16), cu_seqlens=PACKED),
        "initial_state",
        "[1, 4, 16, 16]",
    ),
    "cu_seqlens falling": (dict(cu_seqlens=[0, 20, 10, 34]), "cu_seqlens", "got 10"),
    "cu_seqlens not from 0": (dict(cu_seqlens=[1, 34]), "cu_seqlens", "got 1"),
    "cu_seqlens too long": (dict(cu_seqlens=[0, 35]), "cu_seqlens", "got 35"),
    "cu_seqlens an int": (dict(cu_seqlens=34), "cu_seqlens", "the int 34"),
    "cu_seqlens empty": (dict(cu_seqlens=[]), "cu_seqlens", "got "),
    "cu_seqlens of floats": (dict(cu_seqlens=torch.tensor([0.0, 34.0])), "cu_seqlens", "float32"),
    "cu_seqlens two-dimensional": (
        dict(cu_seqlens=torch.tensor([[0, 34]])),
        "cu_seqlens",
        "[1, 2]",
    ),
    "impl": (dict(impl="cuda"), "impl", "'cuda'"),
}
ONLY_CHUNKED = {
    "chunk_size": (dict(chunk_size=48), "chunk_size", "48"),
    "chunk_size a float": (dict(chunk_size=64.0), "chunk_size", "64.0"),
    "cu_seqlens_cpu of other values": (
        dict(cu_seqlens=torch.tensor(PACKED), cu_seqlens_cpu=torch.tensor([0, 11, 34])),
        "cu_seqlens_cpu",
        "[0, 11, 34]",
    ),
    "chunk_size a flag": (dict(chunk_size=True), "chunk_size", "True"),
    "precision": (dict(precision="bf16"), "precision", "'bf16'"),
    "context": (dict(cp_context="ring"), "cp_context", "str"),
    "cu_seqlens_cpu alone": (
        dict(cu_seqlens_cpu=torch.tensor([0, 34])),
        "cu_seqlens_cpu",
        "None",
    ),
    "cu_seqlens_cpu of another length": (
        dict(cu_seqlens=torch.tensor(PACKED), cu_seqlens_cpu=torch.tensor([0, 34])),
        "cu_seqlens_cpu",
        "[2]",
    ),
}


def check_refusal(operator, change, name, got):
    inputs = draw_inputs(T=34, H=2, HV=4, K=16, V=16)
    pattern = re.escape(got)
    with pytest.raises(ValueError, match=rf"^(q, )?{name}: expected .*{pattern}"):
        operator(**{**inputs, **change})


@OPERATORS
@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_names_the_argument_what_was_expected_and_what_came(operator, case):
    """One line for each way to break the contract."""
    check_refusal(operator, *REFUSALS[case])


@pytest.mark.parametrize("case", ONLY_CHUNKED)
def test_a_refusal_of_what_only_chunk_kda_takes(case):
    """The same for the options that fused_recurrent_kda does not have."""
    check_refusal(chunk_kda, *ONLY_CHUNKED[case])


@OPERATORS
def test_packed_rows_are_one_row(operator):
    """cu_seqlens with B > 1 is refused."""
    inputs = draw_inputs(T=34, B=2, K=16)
    with pytest.raises(ValueError, match=r"cu_seqlens: expected one packed row.* got B = 2"):
        operator(**inputs, cu_seqlens=[0, 34])


@OPERATORS
@pytest.mark.parametrize("keyword", ["use_qk_l2norm", "cu_seqlen", "A_logs", "head_first"])
def test_a_misspelt_keyword_is_a_type_error(operator, keyword):
    """Nothing is swallowed."""
    with pytest.raises(TypeError, match=keyword):
        operator(**draw_inputs(T=4, K=16), **{keyword: None})


@OPERATORS
def test_options_are_keywords(operator):
    """A ninth positional argument is a TypeError."""
    with pytest.raises(TypeError, match="positional"):
        operator(*draw_inputs(T=4, K=16).values(), None, None, False, None)


def test_what_no_implementation_serves_raises_with_the_reason():
    """No silent fallback."""
    inputs = draw_inputs(T=4, K=16)
    with pytest.raises(NotImplementedError, match=r"impl: expected 'torch'.*got 'triton'"):
        fused_recurrent_kda(**inputs, impl="triton")
    with pytest.raises(NotImplementedError, match=r"precision: expected 'ieee'.*got 'tf32'"):
        chunk_kda(**inputs, precision="tf32")


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_o_is_open_to_changes_in_place(impl):
    """The returned o is no view, which autograd would refuse to change."""
    inputs = {name: x.requires_grad_() for name, x in draw_inputs(T=20, K=16).items()}
    o, _ = chunk_kda(**inputs, impl=impl)
    o.mul_(2)
    o.sum().backward()
    once = inputs["v"].grad
    inputs["v"].grad = None
    (2 * chunk_kda(**inputs, impl=impl)[0]).sum().backward()
    assert torch.equal(once, inputs["v"].grad)


def test_ieee_and_auto_are_what_torch_does():
    """The defaults are spelled-out choices."""
    inputs = draw_inputs(T=70, initial_states=1)
    upstream = draw_upstream(inputs)
    plain = run(chunk_kda, inputs, upstream)
    assert_bitwise(run(chunk_kda, inputs, upstream, impl="torch", precision="ieee"), plain)


# Types --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate_dtype", ["same", torch.float32], ids=str)
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_types_of_inputs_and_results(dtype, gate_dtype, raw):
    """Gates in q's type or fp32; o in v's type, states fp32, gradients in their input's type."""
    gate_dtype = dtype if gate_dtype == "same" else gate_dtype
    drawn = dict(raw_gate=raw, A_log=raw, dt_bias=raw)
    inputs = draw_inputs(
        T=100, HV=4, K=24, V=40, initial_states=1, dtype=dtype, gate_dtype=gate_dtype, **drawn
    )
    limit = bounds(dtype)
    if dtype == torch.float64 and gate_dtype == torch.float32:
        # Gradients of fp32 inputs carry one rounding to fp32.
        gates = ("dg", "dbeta", "dA_log", "ddt_bias")
        limit |= dict.fromkeys(gates, 2**-24 + 1e-10)
    got, _ = assert_equals_reference(
        chunk_kda, inputs, draw_upstream(inputs), limit, use_gate_in_kernel=raw
    )
    assert got["o"].dtype == dtype
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert got["final_state"].dtype == state_dtype
    for name, x in inputs.items():
        assert got[f"d{name}"].dtype == x.dtype, name
        assert got[f"d{name}"].shape == x.shape, name


def test_an_fp16_call_with_a_large_state_entry():
    """A state entry of 65536, past the largest fp16 number: states stay fp32, all stays finite."""
    inputs = draw_inputs(T=70, K=24, V=40, initial_states=1, dtype=torch.float16)
    inputs["q"] /= 64  # o itself is fp16
    inputs["initial_state"][0, 0, 3, 5] = 65536.0
    upstream = draw_upstream(inputs)
    upstream["o"] /= 1024  # as are the gradients
    upstream["final_state"] /= 65536 * 16
    got = run(chunk_kda, inputs, upstream)
    want = run_reference(inputs, upstream)
    for name, x in want.items():
        if got[name].dtype == torch.float16:
            assert x.abs().max() < 65504, name
    assert all(x.isfinite().all() for x in got.values())
    for name in ("o", "final_state", "dinitial_state", "dq", "dbeta"):
        assert_similar({name: got[name]}, {name: want[name]}, bounds(torch.float16))


@OPERATORS
@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_no_bit(operator, autocast_dtype):
    """fp32 inputs under ambient autocast are computed in fp32, backward inside it or not."""
    inputs = draw_inputs(T=70, HV=4, K=24, V=40, initial_states=1)
    upstream = draw_upstream(inputs)
    plain = run(operator, inputs, upstream)
    with torch.autocast("cpu", dtype=autocast_dtype):
        under = run(operator, inputs, upstream)
    assert_bitwise(under, plain)


def test_matmul_precision_changes_no_bit():
    """`set_float32_matmul_precision` lowers nothing here, and reads as before afterwards."""
    inputs = draw_inputs(T=70, HV=4, K=24, V=40, initial_states=1)
    upstream = draw_upstream(inputs)
    plain = run(chunk_kda, inputs, upstream)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert_bitwise(run(chunk_kda, inputs, upstream), plain)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
