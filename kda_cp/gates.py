"""Gates, norm and beta: the elementwise formulas in front of the recurrence, and their gradients.

Two activations turn a raw gate g [.., HV, K] into a log decay (natural log, <= 0)::

    softplus gate      y = -exp(A_log) softplus(z)                  z = g + dt_bias
    lower-bound gate   y = lower_bound sigmoid(exp(A_log) z)        y in (lower_bound, 0)

Backward, with dy the gradient of y and a = exp(A_log)::

    softplus gate      dz = -a sigmoid(z) dy                        dA_log = sum y dy
    lower-bound gate   dz = lower_bound sigmoid'(a z) a dy          dA_log = sum z dz
    both               dg = dz                                      ddt_bias = sum dz over tokens

Every result is fp32, or fp64 if the input is fp64. torch.sigmoid and softplus give an element other
bits in the tail of a tensor than in its vectorised body; exp, log1p and the four operations do not.
So everything here is built from those, and an element's value is bitwise the same wherever it lies:
in a slice, in a packed stream, on another rank. The same holds for gradients, except for the sums
over tokens that make dA_log and ddt_bias.

The eager operator calls `activate_gate`, `sigmoid` and `l2norm`; the rest is the public surface.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

__all__ = [
    "softplus",
    "sigmoid",
    "l2norm",
    "activate_gate",
    "naive_kda_gate",
    "naive_kda_lowerbound_gate",
    "kda_gate_fwd",
    "fused_kda_gate",
    "kda_gate_bwd",
    "kda_gate_chunk_cumsum",
]


def _widen(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _sigmoid_slope(x: torch.Tensor) -> torch.Tensor:
    """Derivative of sigmoid, e / (1 + e)^2 with e = exp(-|x|), to full relative precision."""
    e = torch.exp(-x.abs())
    return e / ((1 + e) * (1 + e))


# Left to autograd, `abs` and `where` would give a wrong slope at exactly 0: hence the Functions.
class _Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return sigmoid(x) * dy


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        e = torch.exp(-x.abs())
        return torch.where(x >= 0, torch.ones_like(e), e) / (1 + e)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return _sigmoid_slope(x) * dy


class _L2Norm(torch.autograd.Function):
    # A sum along a strided dimension would add in another order: hence `contiguous`, which the
    # product x * dy inherits from its first factor.
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        r = torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, r)
        return x * r

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        x, r = ctx.saved_tensors
        return r * (dy - x * (r * r * (x * dy).sum(-1, keepdim=True)))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Compute max(x, 0) + log1p(exp(-|x|)) in fp32 (fp64 for fp64 x), with slope sigmoid(x)."""
    return _Softplus.apply(_widen(x))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Compute 1 / (1 + exp(-x)) in fp32 (fp64 for fp64 x) without overflow for any finite x."""
    return _Sigmoid.apply(_widen(x))


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """Compute x * rsqrt(sum x^2 + 1e-6) over the last dimension in fp32 (fp64 for fp64 x)."""
    return _L2Norm.apply(_widen(x))


def _check_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
) -> None:
    if g.dim() < 2:
        raise ValueError(f"g: expected [..., HV, K], got {list(g.shape)}")
    HV, K = g.shape[-2:]
    for name, x, size, law in (("A_log", A_log, HV, "HV"), ("dt_bias", dt_bias, HV * K, "HV * K")):
        if x is not None and x.shape != (size,):
            raise ValueError(f"{name}: expected [{law}] = [{size}], got {list(x.shape)}")
    if lower_bound is None and A_log is None:
        raise ValueError("A_log: expected [HV] for the softplus gate, got None")
    if lower_bound is not None and not -5 <= lower_bound < 0:
        raise ValueError(f"lower_bound: expected -5 <= lower_bound < 0, got {lower_bound}")


def _rate_and_argument(
    g: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(A_log) [HV, 1] (1 for None) and g + dt_bias [..., HV, K], in the dtype of the result."""
    z = _widen(g)
    rate = z.new_ones(1, 1) if A_log is None else torch.exp(A_log.to(z.dtype)).unsqueeze(-1)
    if dt_bias is not None:
        z = z + dt_bias.to(z.dtype).view(g.shape[-2:])
    return rate, z


class _Gate(torch.autograd.Function):
    """One node for the whole activation: it keeps only the raw gate for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        g: torch.Tensor,
        A_log: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        lower_bound: float | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(g, A_log, dt_bias)
        ctx.lower_bound = lower_bound
        rate, z = _rate_and_argument(g, A_log, dt_bias)
        return -rate * softplus(z) if lower_bound is None else lower_bound * sigmoid(rate * z)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        g, A_log, dt_bias = ctx.saved_tensors
        return *kda_gate_bwd(g, A_log, dt_bias, dy, ctx.lower_bound), None


def activate_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
) -> torch.Tensor:
    """Turn a raw gate into a log decay, differentiably.

    The log decay is -exp(A_log) * softplus(g + dt_bias) if `lower_bound` is None, else
    lower_bound * sigmoid(exp(A_log) * (g + dt_bias)).

    Args:
        g: [..., HV, K], raw gate, any floating dtype.
        A_log: [HV], natural log of the rate; None means rate 1, with a `lower_bound` only.
        dt_bias: [HV * K]; None means no bias.
        lower_bound: least log decay (natural log), -5 <= lower_bound < 0; None picks the softplus
            gate.

    Returns:
        [..., HV, K], log decay (natural log, <= 0), fp32, or fp64 if g is fp64.

    Raises:
        ValueError: a shape or a lower_bound other than these, or A_log missing.

    Source: Kimi Linear (arXiv 2510.26692), the channel-wise forget gate.

    Example:
        >>> g = torch.zeros(1, 3, 2, 4)
        >>> activate_gate(g, torch.zeros(2), None, None)[0, 0, 0, 0].item()  # -ln 2
        -0.6931471824645996
        >>> activate_gate(g, None, None, -5.0)[0, 0, 0, 0].item()
        -2.5
    """
    _check_gate(g, A_log, dt_bias, lower_bound)
    return _Gate.apply(g, A_log, dt_bias, lower_bound)


def fused_kda_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Turn a raw gate into a log decay of `output_dtype`, differentiably.

    The log decay is -exp(A_log) * softplus(g + dt_bias) if `lower_bound` is None, else
    lower_bound * sigmoid(exp(A_log) * (g + dt_bias)). `kda_gate_fwd` is the same function.

    Args:
        g: [..., HV, K], raw gate, any floating dtype.
        A_log: [HV], natural log of the rate; None means rate 1, with a `lower_bound` only.
        dt_bias: [HV * K]; None means no bias.
        lower_bound: least log decay (natural log), -5 <= lower_bound < 0; None picks the softplus
            gate.
        output_dtype: dtype of the result; the computation is fp32, or fp64 if g is fp64.

    Returns:
        [..., HV, K], log decay (natural log, <= 0).

    Raises:
        ValueError: a shape or a lower_bound other than these, or A_log missing.

    Source: Kimi Linear (arXiv 2510.26692), the channel-wise forget gate.

    Example:
        >>> g = torch.zeros(1, 3, 2, 4, requires_grad=True)
        >>> y = fused_kda_gate(g, torch.zeros(2), lower_bound=-4.0)
        >>> y[0, 0, 0, 0].item()
        -2.0
        >>> y.sum().backward()
        >>> g.grad[0, 0, 0, 0].item()  # lower_bound / 4
        -1.0
    """
    return activate_gate(g, A_log, dt_bias, lower_bound).to(output_dtype)


kda_gate_fwd = fused_kda_gate


def naive_kda_gate(
    g: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Compute the softplus gate -exp(A_log) * softplus(g + dt_bias): see `fused_kda_gate`.

    Example:
        >>> naive_kda_gate(torch.zeros(1, 1, 1), torch.zeros(1)).item()  # -ln 2
        -0.6931471824645996
    """
    return fused_kda_gate(g, A_log, dt_bias, None, output_dtype)


def naive_kda_lowerbound_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float = -5.0,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Compute lower_bound * sigmoid(exp(A_log) * (g + dt_bias)): see `fused_kda_gate`.

    Example:
        >>> naive_kda_lowerbound_gate(torch.zeros(1, 1, 1)).item()
        -2.5
    """
    return fused_kda_gate(g, A_log, dt_bias, lower_bound, output_dtype)


def kda_gate_bwd(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dyg: torch.Tensor,
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Compute the gradients of the gate from the raw gate and the gradient of the log decay.

    With z = g + dt_bias and a = exp(A_log), dg = -a sigmoid(z) dyg for the softplus gate and
    lower_bound * sigmoid'(a z) * a * dyg for the lower-bound gate; ddt_bias sums dg over tokens;
    dA_log sums y dyg, respectively z dg, over tokens and channels.

    Args:
        g: [..., HV, K], raw gate, as given to the forward.
        A_log: [HV] or None, as given to the forward.
        dt_bias: [HV * K] or None, as given to the forward.
        dyg: [..., HV, K], gradient of the log decay (natural log).
        lower_bound: as given to the forward.

    Returns:
        (dg [..., HV, K], dA_log [HV], ddt_bias [HV * K]), each in the dtype of its argument, None
        where that is None. Sums are taken in fp32, or fp64 if g is fp64.

    Raises:
        ValueError: a shape or a lower_bound that the forward would refuse.

    Source: Kimi Linear (arXiv 2510.26692), the channel-wise forget gate.

    Example:
        >>> g, dyg = torch.zeros(3, 1, 2), torch.ones(3, 1, 2)
        >>> dg, dA_log, ddt_bias = kda_gate_bwd(g, torch.zeros(1), torch.zeros(2), dyg, None)
        >>> dg[0, 0].tolist(), dA_log.item(), ddt_bias.tolist()
        ([-0.5, -0.5], -4.158883094787598, [-1.5, -1.5])
    """
    _check_gate(g, A_log, dt_bias, lower_bound)
    rate, z = _rate_and_argument(g, A_log, dt_bias)
    dy = dyg.to(z.dtype)
    if lower_bound is None:
        dz = -rate * sigmoid(z) * dy
        per_rate = -rate * softplus(z) * dy
    else:
        dz = lower_bound * _sigmoid_slope(rate * z) * rate * dy
        per_rate = z * dz
    HV, K = g.shape[-2:]
    dA_log = None if A_log is None else per_rate.reshape(-1, HV, K).sum((0, 2)).to(A_log.dtype)
    ddt_bias = None if dt_bias is None else dz.reshape(-1, HV * K).sum(0).to(dt_bias.dtype)
    return dz.to(g.dtype), dA_log, ddt_bias


def _sequence_bounds(cu_seqlens: torch.Tensor | None, B: int, T: int) -> torch.Tensor:
    """Boundaries [N + 1] of the sequences in the stream of all B * T tokens; int64, on the CPU."""
    if cu_seqlens is None:
        return torch.arange(B + 1) * T
    if B != 1:
        raise ValueError(f"cu_seqlens: expected B = 1 beside it, got B = {B}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"cu_seqlens: expected shape [N + 1], got {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens: expected int32 or int64, got {cu_seqlens.dtype}")
    bounds = cu_seqlens.to("cpu", torch.int64)
    if bounds[0] != 0 or bounds[-1] > T or (bounds.diff() < 0).any():
        raise ValueError(
            f"cu_seqlens: expected 0 first, non-decreasing, at most T = {T} last, got "
            f"{cu_seqlens.tolist()}"
        )
    return bounds


def kda_gate_chunk_cumsum(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    chunk_size: int,
    scale: float | None = None,
    dt_bias: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
    chunk_indices: torch.Tensor | None = None,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """Activate a raw gate and sum it from the first token of each chunk, differentiably.

    With y = activate_gate(g, A_log, dt_bias, lower_bound) and c(t) the first token of t's chunk,
    result_t = scale * (y_{c(t)} + ... + y_t). Chunks are counted from each sequence's first token,
    so the last chunk of a sequence may be short. Reads cu_seqlens on the host.

    Args:
        g: [B, T, HV, K], raw gate, any floating dtype.
        A_log: [HV], natural log of the rate; None means rate 1, with a `lower_bound` only.
        chunk_size: tokens per chunk, at least 1.
        scale: factor of the result, 1 / ln 2 for a sum in log2; None means 1.
        dt_bias: [HV * K]; None means no bias.
        cu_seqlens: [N + 1], int32 or int64, the boundaries of N sequences packed in one row
            (B = 1); a sequence may be empty and the last may end before T. None means that each row
            is one sequence.
        output_dtype: dtype of the result; the computation is fp32, or fp64 if g is fp64.
        chunk_indices: [NT, 2], for packed sequences: the (sequence, chunk within it) pair of every
            chunk in order, which flash-linear-attention's callers may compute once and pass to each
            kernel. Nothing here needs it; if given, it is compared with the one cu_seqlens implies.
        lower_bound: least log decay (natural log), -5 <= lower_bound < 0; None picks the softplus
            gate.

    Returns:
        [B, T, HV, K], cumulative log decay (natural log times `scale`), 0 in rows past
        cu_seqlens[-1].

    Raises:
        ValueError: a shape, bound, chunk_size, cu_seqlens or chunk_indices other than these.

    Source: Kimi Linear (arXiv 2510.26692), the cumulative decay of the chunkwise form.

    Example:
        >>> g = torch.zeros(1, 5, 1, 1)
        >>> cu_seqlens = torch.tensor([0, 3, 5])
        >>> kda_gate_chunk_cumsum(g, None, 2, cu_seqlens=cu_seqlens, lower_bound=-4.0).flatten()
        tensor([-2., -4., -2., -2., -4.])
    """
    if g.dim() != 4:
        raise ValueError(f"g: expected [B, T, HV, K], got {list(g.shape)}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size: expected at least 1, got {chunk_size}")
    B, T, HV, K = g.shape
    bounds = _sequence_bounds(cu_seqlens, B, T)
    lengths = bounds.diff()
    chunks = (lengths + chunk_size - 1) // chunk_size  # per sequence
    first_chunk = chunks.cumsum(0) - chunks
    if chunk_indices is not None:
        sequence = torch.arange(len(chunks)).repeat_interleave(chunks)
        within = torch.arange(len(sequence)) - first_chunk[sequence]
        expected = torch.stack([sequence, within], 1)
        if cu_seqlens is None or not torch.equal(chunk_indices.to(expected), expected):
            got = f"{list(chunk_indices.shape)} with cu_seqlens {cu_seqlens}"
            raise ValueError(
                f"chunk_indices: expected the {len(expected)} (sequence, chunk) pairs of "
                f"cu_seqlens, got {got}"
            )

    # Every sequence moves to the start of a chunk of its own: one cumsum then serves all of them.
    tokens = int(bounds[-1])
    shift = first_chunk * chunk_size - bounds[:-1]
    slot = (torch.arange(tokens) + shift.repeat_interleave(lengths)).to(g.device)
    y = activate_gate(g.reshape(B * T, HV, K)[:tokens], A_log, dt_bias, lower_bound)
    padded = y.new_zeros(int(chunks.sum()) * chunk_size, HV, K).index_copy(0, slot, y)
    summed = padded.view(-1, chunk_size, HV, K).cumsum(1).view_as(padded)[slot]
    if scale is not None:
        summed = summed * scale
    past = summed.new_zeros(B * T - tokens, HV, K)
    return torch.cat([summed, past]).view(B, T, HV, K).to(output_dtype)
