"""The oracle: Kimi Delta Attention token by token, for plain autograd to differentiate.

Every other implementation is judged by this file, so it shares code with none of them: it imports
torch only, has its own softplus, sigmoid and norm, and is written for reading. Time is a Python
loop; heads and dense rows are vectorised. Products are multiply-and-sum, never matmul, so no tf32
setting and no autocast changes a result.

Shapes: B rows, T tokens, H query heads, HV value heads (HV % H == 0), K key and V value channels,
N sequences.
"""

from itertools import pairwise
from typing import Any

import torch

__all__ = ["recurrent_kda_reference"]


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    # The derivative keeps its relative precision when saturated, which that of s (1 - s) does not.
    return torch.exp(-_softplus(-x))


def _l2norm(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _log_decay(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
) -> torch.Tensor:
    """Turn the raw gate g [B, T, HV, K] into the log decay (natural log, <= 0)."""
    if dt_bias is not None:
        g = g + dt_bias.reshape(g.shape[-2:])
    rate = g.new_ones(1, 1) if A_log is None else torch.exp(A_log).reshape(-1, 1)
    return -rate * _softplus(g) if lower_bound is None else lower_bound * _sigmoid(rate * g)


def _walk(
    entries: list[torch.Tensor] | None,
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk one sequence of every row from `state` [B, HV, K, V].

    Takes q, k, g [B, L, HV, K], v [B, L, HV, V], beta [B, L, HV]; appends the state before each
    token to `entries`. Returns o [B, L, HV, V] before `scale` and the state after the last token.
    """
    if q.shape[1] == 0:  # an o of no tokens that still depends on every input
        return v * (q * k * g).sum(-1, keepdim=True) * beta.unsqueeze(-1), state
    outputs = []
    tokens = zip(*(x.unbind(1) for x in (q, k, v, torch.exp(g), beta)), strict=True)
    for q_t, k_t, v_t, a_t, beta_t in tokens:
        if entries is not None:
            entries.append(state)
        state = a_t.unsqueeze(-1) * state
        error = v_t - (k_t.unsqueeze(-1) * state).sum(-2)
        state = state + k_t.unsqueeze(-1) * (beta_t.unsqueeze(-1) * error).unsqueeze(-2)
        outputs.append((q_t.unsqueeze(-1) * state).sum(-2))
    return torch.stack(outputs, 1), state


def recurrent_kda_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | list[int] | None = None,
    return_states: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Any, ...]:
    """Compute Kimi Delta Attention one token at a time, in `dtype`, differentiable by autograd.

    Per value head hv, with q and k of head hv // (HV // H), from S_0 = the sequence's initial
    state or zero::

        S_t = diag(exp(g_t)) S_{t-1}
        S_t = S_t + beta_t k_t (v_t - k_t^T S_t)
        o_t = scale * q_t^T S_t

    Inputs of any floating dtype are upcast to `dtype` first; gradients come back in the inputs' own
    dtypes. A NaN in one sequence reaches the o and state of no other. The public call checks its
    arguments; here only what would be silently ignored is refused.

    Args:
        q: [B, T, H, K], queries.
        k: [B, T, H, K], keys.
        v: [B, T, HV, V], values.
        g: [B, T, HV, K], log decay (natural log, <= 0), or the raw gate of `use_gate_in_kernel`.
        beta: [B, T, HV], write strength, or its logits with `use_beta_sigmoid_in_kernel`.
        scale: factor of o; None means K ** -0.5.
        initial_state: [N, HV, K, V] ([N, HV, V, K] with `state_v_first`), the state before each
            sequence; None means zero.
        output_final_state: return the state after each sequence.
        A_log: [HV], natural log of the gate's rate; None (rate 1) only with `safe_gate`.
        dt_bias: [HV * K], added to the raw gate; None means no bias.
        use_qk_l2norm_in_kernel: replace q and k by x / sqrt(sum x^2 + 1e-6), the sum over K.
        use_gate_in_kernel: g is raw; the log decay is -exp(A_log) * softplus(g + dt_bias).
        use_beta_sigmoid_in_kernel: replace beta by sigmoid(beta).
        allow_neg_eigval: double beta after its sigmoid.
        safe_gate: the log decay is lower_bound * sigmoid(exp(A_log) * (g + dt_bias)) instead.
        lower_bound: the bound of `safe_gate` (natural log); beside a pre-gated g it is a promise
            about g and changes nothing.
        state_v_first: states are given and returned as [.., V, K].
        cu_seqlens: [N + 1] integers, the boundaries of N sequences packed in one row (B = 1); a
            sequence may be empty and the last may end before T. None means that each of the B rows
            is one sequence (N = B).
        return_states: also return the state before every token.
        dtype: torch.float64 or torch.float32, of the computation and of the results.

    Returns:
        (o, final_state), or (o, final_state, states) with `return_states`, all in `dtype`.
        o: [B, T, HV, V], zero in rows past cu_seqlens[-1].
        final_state: [N, HV, K, V] ([N, HV, V, K] with `state_v_first`), None unless
            `output_final_state`; an empty sequence's is its initial state.
        states: [B, T, HV, K, V] ([.., V, K] with `state_v_first`). states[:, t] is the state before
            token t of the row, so a chunk whose first token is t is entered with states[:, t]; zero
            in rows past cu_seqlens[-1].

    Raises:
        ValueError: cu_seqlens with B != 1; HV not divisible by H; a gate, bound or beta option that
            has no effect beside the others, or lacks one that it needs.

    Source: Kimi Linear (arXiv 2510.26692), the delta rule with a decay per channel.

    Example:
        >>> one = torch.ones(1, 2, 1, 1, dtype=torch.float64)
        >>> g = torch.tensor([0.5, 0.25], dtype=torch.float64).log().reshape(1, 2, 1, 1)
        >>> o, state = recurrent_kda_reference(
        ...     one, one, 0 * one, g, 0.5 * one[..., 0],
        ...     initial_state=one[:, :1], output_final_state=True)
        >>> o.flatten().tolist(), state.item()
        ([0.25, 0.03125], 0.03125)
    """
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(f"cu_seqlens: expected B = 1 beside it, got B = {q.shape[0]}")
    if not use_gate_in_kernel:
        for name, given in (("safe_gate", safe_gate), ("A_log", A_log), ("dt_bias", dt_bias)):
            if given is not None and given is not False:
                raise ValueError(f"{name}: expected use_gate_in_kernel=True beside it, got False")
    elif safe_gate != (lower_bound is not None):
        raise ValueError(
            f"lower_bound: expected a bound if and only if safe_gate, got {lower_bound} with "
            f"safe_gate={safe_gate}"
        )
    elif A_log is None and not safe_gate:
        raise ValueError("A_log: expected [HV] for the softplus gate, got None")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True beside it, got False"
        )

    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if HV % H:
        raise ValueError(f"v: expected HV divisible by H = {H}, got HV = {HV}")
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = _l2norm(q), _l2norm(k)
    if use_gate_in_kernel:
        A_log, dt_bias = (None if x is None else x.to(dtype) for x in (A_log, dt_bias))
        g = _log_decay(g, A_log, dt_bias, lower_bound)
    if use_beta_sigmoid_in_kernel:
        beta = _sigmoid(beta) * (2 if allow_neg_eigval else 1)
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))

    # One walk takes one packed sequence, or all dense rows at once.
    bounds = [0, T] if cu_seqlens is None else [int(x) for x in cu_seqlens]
    lengths = [stop - start for start, stop in pairwise(bounds)]
    past = T - bounds[-1]
    if initial_state is None:
        initial_state = q.new_zeros(B * len(lengths), HV, K, V)
    elif state_v_first:
        initial_state = initial_state.transpose(-1, -2).contiguous()
    initial_state = initial_state.to(dtype)
    states = initial_state.split([B] * len(lengths))
    inputs = zip(*(x.split([*lengths, past], dim=1) for x in (q, k, v, g, beta)), strict=True)

    outputs, finals = [], []
    entries: list[torch.Tensor] | None = [] if return_states else None
    for state, pieces in zip(states, inputs, strict=False):  # the last piece is past all sequences
        o, state = _walk(entries, state, *pieces)
        outputs.append(o)
        finals.append(state)
    outputs.append(v.new_zeros(B, past, HV, V))

    def laid_out(state: torch.Tensor) -> torch.Tensor:
        return state.transpose(-1, -2).contiguous() if state_v_first else state

    o = (K**-0.5 if scale is None else scale) * torch.cat(outputs, 1)
    final_state = None
    if output_final_state:  # that of no sequences is the empty initial state
        final_state = laid_out(torch.cat(finals) if finals else initial_state)
    if entries is None:
        return o, final_state
    entered = [x.unsqueeze(1) for x in entries] + [v.new_zeros(B, past, HV, K, V)]
    return o, final_state, laid_out(torch.cat(entered, 1))
