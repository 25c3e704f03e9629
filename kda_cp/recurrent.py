"""The recurrence token by token, all sequences together: decoding one token or a few.

Plain differentiable PyTorch on any device; a long sequence belongs to `chunk_kda`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_cp.gates import activate_gate, l2norm, sigmoid
from kda_cp.platform import exact_products
from kda_cp.segments import SegmentTable
from kda_cp.stages import Inputs, Settings


def recurrent_kda(
    inputs: Inputs, table: SegmentTable, settings: Settings, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Walk every sequence token by token.

    Args:
        inputs: q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K], beta [B, T, HV] and the gate's
            parameters.
        table: the sequences, cut into chunks of one token.
        settings: the options; the chunk size is not read.
        initial_state: [N, HV, K, V], or None for zero.

    Returns:
        o [B, T, HV, V] in v's dtype and the final states [N, HV, K, V].
    """
    with exact_products(inputs.q.device.type):
        q, k, v, decay, beta = _prepare(inputs, settings)
        if initial_state is None:
            initial_state = v.new_zeros((table.num_states, *decay.shape[1:], v.shape[-1]))
        walk = table.every
        rows = table.state_row[walk.instances]
        state = initial_state.contiguous()[rows]
        outputs, tokens = [v[:0]], [table.token[:0, 0]]
        for step in walk.steps:
            token = table.token[step, 0]
            S = decay[token].unsqueeze(-1) * state[: step.numel()]  # [n, HV, K, V]
            key = k[token].unsqueeze(-1)
            # Multiply and sum: autograd runs the backward of a matmul where neither ambient
            # autocast nor a matmul precision is under our control.
            error = v[token].unsqueeze(-2) - (key * S).sum(-2, keepdim=True)  # [n, HV, 1, V]
            S = S + key * (beta[token][..., None, None] * error)
            outputs.append((q[token].unsqueeze(-1) * S).sum(-2))
            tokens.append(token)
            state = torch.cat([S, state[step.numel() :]])
        o = torch.zeros_like(v).index_put((torch.cat(tokens),), torch.cat(outputs))
        final_state = initial_state.index_put((rows,), state)
    return o.view(inputs.v.shape).to(inputs.v.dtype), final_state


def _prepare(inputs: Inputs, settings: Settings) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Activated q (scaled), k, v, decay, beta, [B * T, HV, ...] in the state's dtype."""
    dtype = inputs.state_dtype
    q, k, v, g, beta = (x.flatten(0, 1).to(dtype).contiguous() for x in inputs[:5])
    A_log, dt_bias = (None if x is None else x.to(dtype) for x in inputs[5:])
    if settings.normalize_qk:
        q, k = l2norm(q), l2norm(k)
    if settings.gate_in_kernel:
        g = activate_gate(g, A_log, dt_bias, settings.lower_bound)
    if settings.sigmoid_beta:
        beta = sigmoid(beta)
    group = g.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    return q * settings.scale, k, v, g.exp(), beta * settings.beta_factor
