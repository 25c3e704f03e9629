"""Draw inputs that tell heads and channels apart, run an operator on them, and score the results.

One measure for every test: err = |x - ref| / |ref|, Frobenius, for each sequence and each head on
its own, because a score over the whole tensor hides one wrong head or one wrong short sequence.
Two rules where a plain quotient says nothing:

- dg, dA_log and ddt_bias are differences of near-equal terms under strong decay. Where |g| > 5 the
  terms themselves, |q dq| + |k dk| (elementwise products), are added to the denominator.
- Where |ref| <= 1e-30 the difference is bounded absolutely, by a hundredth of the bound.

Results are dictionaries with the keys o, final_state, h, dq, dk, dv, dg, dbeta, dA_log, ddt_bias
and dinitial_state, as far as they exist.

Example:
    >>> import torch
    >>> from kda_cp import chunk_kda
    >>> inputs = draw_inputs(T=20, initial_states=1)
    >>> upstream = draw_upstream(inputs)
    >>> got = run(chunk_kda, inputs, upstream, impl="torch")
    >>> want = run_reference(inputs, upstream)
    >>> assert_similar(got, want, bounds(torch.float32), inputs=inputs)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kda_cp.reference import recurrent_kda_reference

__all__ = [
    "assert_bitwise",
    "assert_equals_reference",
    "assert_similar",
    "bounds",
    "draw_inputs",
    "draw_upstream",
    "errors",
    "run",
    "run_reference",
    "take",
]

HEAD_DECAY = (1e-3, 0.1, 3.0)
"""Typical |g| of the heads, in turn, so that a result computed with another head's gate shows."""

TOKEN_TENSORS = ("q", "k", "v", "g", "beta", "o", "dq", "dk", "dv", "dg", "dbeta")
STATE_TENSORS = ("initial_state", "final_state", "dinitial_state")
ONLY_OF_THE_OPERATOR = (
    "impl",
    "chunk_size",
    "disable_recompute",
    "precision",
    "cu_seqlens_cpu",
    "inplace_state",
)
"""Options that change no result, and that the reference does not have."""

STRONG_DECAY = 5.0
ZERO = 1e-30

BF16_BOUNDS = {
    "o": 5.2e-3,
    "dq": 4.7e-3,
    "dk": 5.5e-3,
    "dv": 4.7e-3,
    "dg": 7.3e-3,
    "dbeta": 5.2e-3,
    "dA_log": 5.6e-3,
    "ddt_bias": 6.7e-3,
    "final_state": 5.2e-3,
    "h": 5.2e-3,
    "dinitial_state": 5.2e-3,
}
"""FLA 0.6.0's measured errors in bf16; the states, of which none were measured, as o."""


def bounds(dtype: torch.dtype) -> dict[str, float]:
    """Bound of `errors` for each result of inputs of `dtype`.

    fp16 is the rounding of a result, 2**-11, on top of what fp32 arithmetic is allowed.
    """
    if dtype == torch.bfloat16:
        return dict(BF16_BOUNDS)
    bound = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2**-11 + 1e-4}[dtype]
    return dict.fromkeys(BF16_BOUNDS, bound)


def draw_inputs(
    T: int,
    *,
    B: int = 1,
    H: int = 2,
    HV: int | None = None,
    K: int = 32,
    V: int | None = None,
    decay: float | Sequence[float] | None = None,
    raw_gate: bool = False,
    A_log: bool = False,
    dt_bias: bool = False,
    initial_states: int = 0,
    dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Draw the tensors of one call under the names of the operator's arguments.

    Every head and channel has a scale or offset of its own. |k| = 1 and 0 < beta < 1, so that the
    recurrence does not grow.

    Args:
        T: tokens a row.
        B: rows.
        H: heads of q and k.
        HV: heads of v, g and beta; None means H.
        K: key channels.
        V: value channels; None means K.
        decay: typical |g| (natural log) of the heads in turn; None means 1e-3, 0.1, 3.
        raw_gate: draw g as the raw gate of `use_gate_in_kernel`, of both signs, instead.
        A_log: also draw A_log [HV].
        dt_bias: also draw dt_bias [HV * K].
        initial_states: number of initial states to draw; 0 draws none.
        dtype: of q, k and v.
        gate_dtype: of g, beta, A_log and dt_bias; None means `dtype`.
        seed: of the generator.
    """
    HV, V = HV or H, V or K
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    heads = torch.arange(1, HV + 1, dtype=torch.float64)
    k = normal(B, T, H, K) + 0.3 * normal(H, K)
    inputs = {
        "q": normal(B, T, H, K) + 0.5 * normal(H, K),
        "k": k / k.norm(dim=-1, keepdim=True),
        "v": normal(B, T, HV, V) * heads.sqrt()[:, None] + normal(HV, V),
    }
    if raw_gate:
        inputs["g"] = 2 * normal(B, T, HV, K) + normal(HV, K)
    else:
        typical = HEAD_DECAY if decay is None else (decay,) if isinstance(decay, float) else decay
        of_head = torch.tensor([typical[n % len(typical)] for n in range(HV)], dtype=torch.float64)
        channels = 0.25 + 1.5 * uniform(HV, K)
        inputs["g"] = -of_head[:, None] * channels * 2 * uniform(B, T, HV, K)
    inputs["beta"] = 0.05 + (0.9 - 0.4 * uniform(HV)) * uniform(B, T, HV)
    if A_log:
        inputs["A_log"] = 0.5 * normal(HV)
    if dt_bias:
        inputs["dt_bias"] = normal(HV * K)
    for name in inputs:
        inputs[name] = inputs[name].to(dtype if name in "qkv" else gate_dtype or dtype)
    if initial_states:
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        state = normal(initial_states, HV, K, V) * (1 + heads)[:, None, None] / 3
        inputs["initial_state"] = state.to(state_dtype)
    return inputs


def draw_upstream(
    inputs: Mapping[str, Tensor], final_states: int | None = None, *, seed: int = 1
) -> dict[str, Tensor]:
    """Draw the gradients of o and of the final states, one for each of `final_states` sequences.

    None draws as many as there are initial states, or none without initial states. Keys: o and
    final_state. States are [N, HV, K, V].
    """
    generator = torch.Generator().manual_seed(seed)
    q, v = inputs["q"], inputs["v"]
    upstream = {"o": torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v.dtype)}
    if final_states is None:
        final_states = inputs["initial_state"].shape[0] if "initial_state" in inputs else 0
    if final_states:
        shape = (final_states, v.shape[2], q.shape[3], v.shape[3])
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        state = torch.randn(shape, generator=generator, dtype=torch.float64)
        upstream["final_state"] = state.to(dtype)
    return upstream


def run(
    operator: Callable[..., Any],
    inputs: Mapping[str, Tensor],
    upstream: Mapping[str, Tensor],
    *,
    wanted: Sequence[str] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Call the operator on fresh leaves of the inputs, go backward, and return every result.

    Args:
        operator: `chunk_kda` or one that is called like it.
        inputs: tensors by argument name.
        upstream: gradients of o and final_state; a missing one means that no gradient comes that
            way. The final state is asked for where a gradient of it is given.
        wanted: the inputs that require a gradient; None means all. Where none does, the backward
            runs only if o requires one all the same, as over ranks of which another's inputs do.
        **options: further keywords of the operator.
    """
    names = list(inputs if wanted is None else wanted)
    leaves = {n: x.detach().requires_grad_(n in names) for n, x in inputs.items()}
    options = {"output_final_state": "final_state" in upstream, **options}
    outputs = operator(**leaves, **options)
    results = dict(zip(("o", "final_state", "h"), outputs, strict=False))
    results = {name: x for name, x in results.items() if x is not None}
    ends = [results[name] for name in upstream]
    dends = [dy.to(results[name].dtype) for name, dy in upstream.items()]
    if names:
        grads = torch.autograd.grad(
            ends,
            [leaves[name] for name in names],
            dends,
            materialize_grads=True,  # the final state does not depend on q
        )
        results |= {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}
    elif results["o"].requires_grad:
        torch.autograd.backward(ends, dends)
    return {name: x.detach() for name, x in results.items()}


def run_reference(
    inputs: Mapping[str, Tensor],
    upstream: Mapping[str, Tensor],
    *,
    wanted: Sequence[str] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """As `run`, by the token recurrence in fp64 on the same, already rounded, inputs."""
    upcast = {name: x.detach().double() for name, x in inputs.items()}
    return run(recurrent_kda_reference, upcast, upstream, wanted=wanted, **options)


def assert_equals_reference(
    operator: Callable[..., Any],
    inputs: Mapping[str, Tensor],
    upstream: Mapping[str, Tensor],
    bound: Mapping[str, float] | float | None = None,
    *,
    wanted: Sequence[str] | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Assert that an operator's results are the reference's; return both.

    Args:
        operator: `chunk_kda` or one that is called like it.
        inputs: tensors by argument name.
        upstream: see `run`.
        bound: see `assert_similar`; None means the bounds of q's dtype.
        wanted: see `run`.
        **options: further keywords of the operator.
    """
    got = run(operator, inputs, upstream, wanted=wanted, **options)
    shared = {name: x for name, x in options.items() if name not in ONLY_OF_THE_OPERATOR}
    want = run_reference(inputs, upstream, wanted=wanted, **shared)
    assert_similar(
        got,
        want,
        bounds(inputs["q"].dtype) if bound is None else bound,
        inputs=inputs,
        cu_seqlens=options.get("cu_seqlens"),
        use_gate_in_kernel=options.get("use_gate_in_kernel", False),
        lower_bound=options.get("lower_bound"),
    )
    return got, want


def take(
    tensors: Mapping[str, Tensor], tokens: slice, states: slice | None = None
) -> dict[str, Tensor]:
    """Take a range of tokens, and of states, from tensors under their names.

    Works on inputs, upstream gradients and results alike. Parameters stay as they are, and so do
    the states if `states` is None; gradients of parameters are left out.
    """
    taken = {}
    for name, x in tensors.items():
        if name in TOKEN_TENSORS:
            taken[name] = x[:, tokens]
        elif name in STATE_TENSORS:
            taken[name] = x if states is None else x[states]
        elif name not in ("dA_log", "ddt_bias"):
            taken[name] = x
    return taken


def errors(
    name: str,
    x: Tensor,
    ref: Tensor,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    extra: Tensor | None = None,
    zero_scale: float = 1e-2,
) -> Tensor:
    """Compute |x - ref| / (|ref| + |extra|) for each sequence and head, [N, heads].

    Args:
        name: the result's key; says which dimensions are tokens and heads. Heads are told apart
            in a ddt_bias given as [HV, K].
        x: the result.
        ref: what it should be.
        cu_seqlens: boundaries of the sequences of a packed row. None: each row is one sequence.
        extra: like ref, what is added to the denominator.
        zero_scale: where the denominator is at most 1e-30, what the difference is divided by.

    Returns:
        [N, heads]; [1, HV] for the gradients of parameters; an empty sequence scores 0.
    """
    assert x.shape == ref.shape, f"{name}: {list(x.shape)} for {list(ref.shape)}"
    x, ref = x.double(), ref.double()
    extra = torch.zeros_like(ref) if extra is None else extra.double()
    parts = _by_sequence_and_head(name, torch.stack([x - ref, ref, extra]), cu_seqlens)
    norms = torch.stack([part.norm(dim=-1) for part in parts], dim=1)  # [3, N, heads]
    size = norms[1] + norms[2]
    return norms[0] / torch.where(size > ZERO, size, zero_scale)


def assert_similar(
    got: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    bound: Mapping[str, float] | float,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    lower_bound: float | None = None,
    use_gate_in_kernel: bool = False,
) -> None:
    """Assert that every result of `want` is in `got`, finite, and within its bound.

    Args:
        got: results to judge.
        want: results of the reference.
        bound: bound of `errors` for each name, or one for all.
        inputs: what both were computed from; with them the rule for strong decay applies.
        cu_seqlens: boundaries of the sequences of a packed row.
        lower_bound: of the gate in the kernel.
        use_gate_in_kernel: whether g is raw.
    """
    assert set(got) == set(want), f"results {sorted(got)} instead of {sorted(want)}"
    extra: dict[str, Tensor] = {}
    if inputs is not None and {"dq", "dk", "dg"} <= set(want):
        extra = _terms_of_dg(inputs, want, use_gate_in_kernel, lower_bound)
    faults = []
    for name, ref in want.items():
        limit = bound if isinstance(bound, float) else bound[name]
        if not got[name].isfinite().all():
            faults.append(f"{name}: not finite")
            continue
        x = got[name]
        if name == "ddt_bias" and "dg" in want:
            x, ref = (y.view(want["dg"].shape[2:]) for y in (x, ref))
        found = errors(name, x, ref, cu_seqlens=cu_seqlens, extra=extra.get(name))
        if found.numel() and found.max() > limit:
            at = divmod(int(found.argmax()), found.shape[1])
            count = int((found > limit).sum())
            faults.append(
                f"{name}: error {found.max():.3e} > {limit:.1e} at (sequence, head) {at}, "
                f"{count} of {found.numel()} over"
            )
    assert not faults, "; ".join(faults)


def assert_bitwise(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Assert the same results to the bit, but for -0 = 0 and NaN = NaN."""
    assert set(got) == set(want), f"results {sorted(got)} instead of {sorted(want)}"
    faults = []
    for name, ref in want.items():
        x = got[name]
        assert x.shape == ref.shape, f"{name}: {list(x.shape)} for {list(ref.shape)}"
        assert x.dtype == ref.dtype, f"{name}: {x.dtype} for {ref.dtype}"
        differs = (x != ref) & ~(x.isnan() & ref.isnan())
        if differs.any():
            faults.append(
                f"{name}: {int(differs.sum())} of {x.numel()} elements differ, the first at "
                f"{differs.nonzero()[0].tolist()}, by {(x - ref).abs().nan_to_num().max():.1e}"
            )
    assert not faults, "; ".join(faults)


def _by_sequence_and_head(
    name: str, x: Tensor, cu_seqlens: Tensor | Sequence[int] | None
) -> list[Tensor]:
    """One [leading, heads, values] for each sequence; x has one leading dimension of its own."""
    lead = x.shape[0]
    if name == "dA_log":  # [lead, HV]
        return [x.unsqueeze(-1)]
    if name == "ddt_bias":  # [lead, HV, K], or [lead, HV * K] as one head
        return [x.reshape(lead, *([-1] if x.dim() == 3 else [1]), x.shape[-1])]
    if name in ("final_state", "dinitial_state"):  # [lead, N, HV, K, V]
        return list(x.flatten(3).unbind(1))
    if name == "h":  # [lead, B, NT, HV, K, V]: every chunk on its own
        return list(x.flatten(1, 2).flatten(3).unbind(1))
    x = x.flatten(4) if x.dim() > 4 else x.unsqueeze(-1)  # [lead, B, T, heads, values]
    rows = list(x.unbind(1))
    if cu_seqlens is not None:
        (row,) = rows
        rows = [row[:, int(start) : int(stop)] for start, stop in pairwise(cu_seqlens)]
        rows.append(x[:, 0, int(cu_seqlens[-1]) :])  # past the last sequence
    return [row.transpose(1, 2).reshape(lead, x.shape[3], -1) for row in rows]


def _terms_of_dg(
    inputs: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    use_gate_in_kernel: bool,
    lower_bound: float | None,
) -> dict[str, Tensor]:
    """|q dq| + |k dk| where |g| > 5, and what it becomes in the gradients of the gate's inputs."""
    g = inputs["g"].double()
    group = g.shape[2] // inputs["q"].shape[2]
    products = (inputs[n].double() * want[f"d{n}"].double() for n in "qk")
    terms = sum((x.abs() for x in products), torch.zeros(())).repeat_interleave(group, dim=2)
    if not use_gate_in_kernel:
        return {"dg": torch.where(g < -STRONG_DECAY, terms, 0)}
    A_log, dt_bias = inputs.get("A_log"), inputs.get("dt_bias")
    rate = 1.0 if A_log is None else A_log.double().exp()[:, None]
    z = (g if dt_bias is None else g + dt_bias.double().view(g.shape[2:])).requires_grad_()
    with torch.enable_grad():
        if lower_bound is None:
            y = -rate * torch.nn.functional.softplus(z)
        else:
            y = lower_bound * torch.sigmoid(rate * z)
        (slope,) = torch.autograd.grad(y.sum(), z)
    terms = torch.where(y < -STRONG_DECAY, terms, 0).detach()
    dz = terms * slope.abs()
    per_rate = terms * y.detach().abs() if lower_bound is None else dz * z.detach().abs()
    return {"dg": dz, "ddt_bias": dz.sum((0, 1)), "dA_log": per_rate.sum((0, 1, 3))}
