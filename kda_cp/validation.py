"""The tensor contract of the operator, checked once at the door.

Every message names the argument, what was expected and what came. Reads shapes, dtypes, devices
and flags, never values; the one exception is a pre-gated g, whose sign and promised `lower_bound`
are checked under `torch.autograd.set_detect_anomaly`.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from kda_cp.stages import Inputs, Settings

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CHUNK_SIZES = (16, 32, 64)
IMPLS = ("auto", "reference", "torch", "triton")
PRECISIONS = (None, "ieee", "tf32")
_OF_TOKENS = ("q", "k", "v", "g", "beta")
GATE_BOUND = -5.0
"""The lowest bound of the sigmoid gate, natural log."""


def check_inputs(inputs: Inputs) -> None:
    """Check shapes, dtypes and devices of the token inputs."""
    for name, x in zip(Inputs._fields, inputs, strict=True):
        if x is None and name in ("A_log", "dt_bias"):
            continue
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.device != inputs.q.device:
            raise ValueError(f"{name}: expected a tensor on {inputs.q.device}, got {x.device}")
    q, k, v, g, beta, A_log, dt_bias = inputs
    if q.dim() != 4:
        raise ValueError(f"q: expected [B, T, H, K], got {list(q.shape)}")
    batch, tokens, heads, key_dim = q.shape
    if v.dim() != 4:
        raise ValueError(f"v: expected [B, T, HV, V], got {list(v.shape)}")
    value_heads = v.shape[2]
    if heads == 0 or value_heads == 0 or key_dim == 0 or v.shape[3] == 0:
        raise ValueError(
            f"q, v: expected at least one head and channel, got {list(q.shape)}, {list(v.shape)}"
        )
    if value_heads % heads:
        raise ValueError(
            f"v: expected a number of value heads that is a multiple of the {heads} heads of q, "
            f"got {value_heads}"
        )
    _expect_shape("k", k, (batch, tokens, heads, key_dim))
    _expect_shape("v", v, (batch, tokens, value_heads, v.shape[3]))
    _expect_shape("g", g, (batch, tokens, value_heads, key_dim))
    _expect_shape("beta", beta, (batch, tokens, value_heads))
    if A_log is not None:
        _expect_shape("A_log", A_log, (value_heads,))
    if dt_bias is not None:
        _expect_shape("dt_bias", dt_bias, (value_heads * key_dim,))

    if q.dtype not in FLOATS:
        raise ValueError(f"q: expected one of {_names(*FLOATS)}, got {q.dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name}: expected the dtype of q, {q.dtype}, got {x.dtype}")
    for name, y in (("g", g), ("beta", beta), ("A_log", A_log), ("dt_bias", dt_bias)):
        if y is not None and y.dtype not in (q.dtype, torch.float32):
            raise ValueError(f"{name}: expected {_names(q.dtype, torch.float32)}, got {y.dtype}")


def check_gate(
    inputs: Inputs, use_gate_in_kernel: bool, safe_gate: bool, lower_bound: float | None
) -> None:
    """Check that the gate options say one thing; see `chunk_kda` for the three modes."""
    if lower_bound is not None and (
        isinstance(lower_bound, bool) or not isinstance(lower_bound, Real)
    ):
        raise ValueError(f"lower_bound: expected a number or None, got {lower_bound!r}")
    if not use_gate_in_kernel:
        for name, x in (("A_log", inputs.A_log), ("dt_bias", inputs.dt_bias)):
            if x is not None:
                raise ValueError(
                    f"{name}: expected None for a pre-gated g, got a tensor; "
                    "use_gate_in_kernel=True applies the gate to a raw g"
                )
        if safe_gate:
            raise ValueError(
                "safe_gate: expected False for a pre-gated g, got True; it chooses the activation "
                "that use_gate_in_kernel=True applies"
            )
        if lower_bound is not None and not lower_bound < 0:
            raise ValueError(f"lower_bound: expected a number below 0, got {lower_bound}")
        if torch.is_anomaly_enabled():
            _check_log_decay(inputs.g, lower_bound)
    elif safe_gate:
        if lower_bound is None or not GATE_BOUND <= lower_bound < 0:
            raise ValueError(
                f"lower_bound: expected {GATE_BOUND:g} <= lower_bound < 0 with safe_gate, "
                f"got {lower_bound}"
            )
    else:
        if lower_bound is not None:
            raise ValueError(
                f"lower_bound: expected None for the softplus gate, got {lower_bound}; "
                "safe_gate=True chooses the gate that has a bound"
            )
        if inputs.A_log is None:
            raise ValueError("A_log: expected [HV] for the softplus gate, got None")


def check_beta(use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> None:
    """Check that doubled beta comes with its sigmoid."""
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True beside it, got False"
        )


def check_initial_state(
    state: Tensor | None, inputs: Inputs, sequences: int, v_first: bool
) -> None:
    """Check shape, dtype and device of the initial state."""
    if state is None:
        return
    if not isinstance(state, Tensor):
        raise ValueError(f"initial_state: expected a tensor, got {type(state).__name__}")
    key_dim, value_dim = inputs.q.shape[3], inputs.v.shape[3]
    tail = (value_dim, key_dim) if v_first else (key_dim, value_dim)
    _expect_shape("initial_state", state, (sequences, inputs.v.shape[2], *tail))
    if state.dtype != inputs.state_dtype:
        raise ValueError(f"initial_state: expected {inputs.state_dtype}, got {state.dtype}")
    if state.device != inputs.q.device:
        raise ValueError(
            f"initial_state: expected a tensor on {inputs.q.device}, got {state.device}"
        )


def check_scale(scale: float | None, key_dim: int) -> float:
    """Return the scale of o: K ** -0.5 for None."""
    if scale is None:
        return key_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, Real) or not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number or None, got {scale!r}")
    return float(scale)


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Check that an option is one of its choices, and of their type: True and 16.0 are no ints."""
    if value not in choices or type(value) not in map(type, choices):
        raise ValueError(f"{name}: expected one of {choices}, got {value!r}")


def check_flags(**flags: bool) -> None:
    """Check that flags are bools: the string "False" would pass as true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}: expected True or False, got {value!r}")


def make_settings(
    inputs: Inputs,
    scale: float | None,
    *,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    safe_gate: bool,
    lower_bound: float | None,
    chunk_size: int = 64,
    precision: str | None = None,
) -> Settings:
    """Check the options that say what is computed and freeze them."""
    check_inputs(inputs)
    check_flags(
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
    )
    check_gate(inputs, use_gate_in_kernel, safe_gate, lower_bound)
    check_beta(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    check_choice("chunk_size", chunk_size, CHUNK_SIZES)
    return Settings(
        scale=check_scale(scale, inputs.q.shape[-1]),
        chunk_size=chunk_size,
        normalize_qk=use_qk_l2norm_in_kernel,
        gate_in_kernel=use_gate_in_kernel,
        lower_bound=float(lower_bound) if use_gate_in_kernel and lower_bound is not None else None,
        sigmoid_beta=use_beta_sigmoid_in_kernel,
        beta_factor=2.0 if allow_neg_eigval else 1.0,
        decay_bound=None if lower_bound is None else float(lower_bound),
        precision="tf32" if precision == "tf32" else None,
    )


def describe_tensor(x: Tensor | None, token_dim: int | None) -> str:
    """Type, shape and kind of device of a tensor, whatever its number of tokens."""
    if x is None:
        return "None"
    shape = ("T" if n == token_dim else str(size) for n, size in enumerate(x.shape))
    return f"{x.dtype} [{', '.join(shape)}] on {x.device.type}"


def describe_call(inputs: Inputs, settings: Settings, **options: object) -> dict[str, str]:
    """What ranks that call the operator together must have in common, by argument, in words.

    Not `initial_state`, which only ranks that read a row of it need to give.
    """
    tensors = zip(Inputs._fields, inputs, strict=True)
    return {
        "call": "chunk_kda",
        "grad mode": str(torch.is_grad_enabled()),
        **{name: describe_tensor(x, 1 if name in _OF_TOKENS else None) for name, x in tensors},
        "scale": str(settings.scale),
        "chunk_size": str(settings.chunk_size),
        "precision": str(settings.precision),
        "use_qk_l2norm_in_kernel": str(settings.normalize_qk),
        "use_gate_in_kernel": str(settings.gate_in_kernel),
        "lower_bound": str(settings.decay_bound),
        "use_beta_sigmoid_in_kernel": str(settings.sigmoid_beta),
        "allow_neg_eigval": str(settings.beta_factor != 1),
        **{name: str(value) for name, value in options.items()},
    }


def _check_log_decay(g: Tensor, lower_bound: float | None) -> None:
    if bool((g > 0).any()):
        raise ValueError(
            f"g: expected log decays of at most 0, got {g.max().item():g}; "
            "use_gate_in_kernel=True applies the gate to a raw g"
        )
    if lower_bound is not None and bool((g < lower_bound).any()):
        raise ValueError(
            f"lower_bound: expected a g that keeps its promise, g >= {lower_bound}, "
            f"got {g.min().item():g}"
        )


def _expect_shape(name: str, x: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(x.shape) != expected:
        raise ValueError(f"{name}: expected shape {list(expected)}, got {list(x.shape)}")


def _names(*dtypes: torch.dtype) -> str:
    return " or ".join(dict.fromkeys(str(dtype) for dtype in dtypes))
