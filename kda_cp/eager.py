"""The stages on batched PyTorch products: any device, any head size, exact for every g <= 0.

Computes in float32 (float64 when q is float64) whatever the dtype of the inputs. Three choices
make it exact and causal to the bit:

- Every decay is the exponential of a plain sum of its own log decays, never a difference of two
  cumulative sums: a token with g = -1000 costs the tokens after it no digit.
- A decay between two 16-token blocks is the product of two factors anchored at a block edge
  between them, both at most 1; within a block it is formed directly. No anchor lies after a row.
- Every chunk is padded to C rows, so a product has the same shape, and the same bits, however
  many tokens, chunks or sequences there are.

The terms of the chunks are differentiated by autograd, a slab of chunks at a time, so that the
memory of a call does not grow with the intermediates; the walk over the state has its adjoint
written out (docs/algorithm.md).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kda_cp.comm import affine
from kda_cp.gates import activate_gate, l2norm, sigmoid
from kda_cp.segments import SegmentTable, Walk
from kda_cp.stages import ChunkTerms, Inputs, Settings

BLOCK = 16
"""Tokens a block whose decays are formed directly, one for each pair."""

SLAB_ELEMENTS = 2**21
"""Elements of the largest temporary of a slab: [n, HV, C, BLOCK, K]."""

fold = affine.apply
fold_adjoint = affine.apply_adjoint


def chunk_terms(inputs: Inputs, table: SegmentTable, settings: Settings) -> ChunkTerms:
    """Compute the terms of every chunk, a slab at a time. See `Stages.chunk_terms`."""
    value_heads, key_dim = inputs.g.shape[-2:]
    value_dim = inputs.v.shape[-1]
    lead = (table.chunks, value_heads)
    rows = (*lead, settings.chunk_size)
    new = inputs.v.new_empty
    dtype = inputs.state_dtype
    terms = ChunkTerms(
        w=new((*rows, key_dim), dtype=dtype),
        u=new((*rows, value_dim), dtype=dtype),
        kg=new((*rows, key_dim), dtype=dtype),
        qg=new((*rows, key_dim), dtype=dtype),
        Aqk=new((*rows, settings.chunk_size), dtype=dtype),
        decay=new((*lead, key_dim), dtype=dtype),
    )
    for slab in _slabs(table, value_heads, key_dim):
        valid = table.valid[slab]
        part = _slab_terms(_gather_inputs(inputs, table, slab), valid, settings)
        for whole, piece in zip(terms, part, strict=True):
            whole[slab] = piece
    return terms


def walk_state(
    walk: Walk,
    terms: ChunkTerms,
    entry: Tensor | None,
    *,
    exits: Tensor | None = None,
    o: Tensor | None = None,
    h: Tensor | None = None,
) -> None:
    """Walk the state through the chunks. See `ForwardStages.walk_state`."""
    if entry is None:
        heads, _, key_dim = terms.w.shape[1:]
        state = terms.w.new_zeros((walk.size, heads, key_dim, terms.u.shape[-1]))
    else:
        state = entry[walk.instances]
    for chunk in walk.steps:
        S = state[: chunk.numel()]  # [n, HV, K, V]
        if h is not None:
            h[chunk] = S
        v_new = terms.u[chunk] - terms.w[chunk] @ S
        if o is not None:
            o[chunk] = terms.qg[chunk] @ S + terms.Aqk[chunk] @ v_new
        state[: chunk.numel()] = _next_state(terms, chunk, S, v_new)
    if exits is not None:
        exits[walk.instances] = state


def walk_maps(walk: Walk, terms: ChunkTerms) -> tuple[Tensor, Tensor]:
    """Walk the affine maps `[b | A]`: K more columns with u = 0 that start as the identity."""
    value_heads, _, key_dim = terms.w.shape[1:]
    value_dim = terms.u.shape[-1]
    state = terms.u.new_zeros((walk.size, value_heads, key_dim, value_dim + key_dim))
    state[..., value_dim:].diagonal(dim1=-2, dim2=-1).fill_(1.0)
    for chunk in walk.steps:
        S = state[: chunk.numel()]
        v_new = -(terms.w[chunk] @ S)
        v_new[..., :value_dim] += terms.u[chunk]
        state[: chunk.numel()] = _next_state(terms, chunk, S, v_new)
    return state[..., :value_dim].contiguous(), state[..., value_dim:].contiguous()


def _next_state(terms: ChunkTerms, chunk: Tensor, S: Tensor, v_new: Tensor) -> Tensor:
    return terms.decay[chunk].unsqueeze(-1) * S + terms.kg[chunk].mT @ v_new


def gather_values(x: Tensor, table: SegmentTable, dtype: torch.dtype) -> Tensor:
    """Gather [B, T, HV, V] into chunks [NC, HV, C, V]. See `Stages.gather_values`."""
    return _gather(x, table, slice(None), dtype).transpose(1, 2).contiguous()


def new_outputs(inputs: Inputs, table: SegmentTable) -> Tensor:
    """Make zeros for the outputs of every chunk, [NC, HV, C, V]."""
    value_heads, dim = inputs.v.shape[2:]
    shape = (table.chunks, value_heads, table.chunk_size, dim)
    return inputs.v.new_zeros(shape, dtype=inputs.state_dtype)


def outputs_of_heads(outputs: Tensor, heads: slice) -> Tensor:
    """Slice [NC, HV, C, V]. See `ForwardStages.outputs_of_heads`."""
    return outputs[:, heads]


def finish_outputs(outputs: Tensor, inputs: Inputs, table: SegmentTable) -> Tensor:
    """Scatter chunks [NC, HV, C, V] to [B, T, HV, V]. See `ForwardStages.finish_outputs`."""
    o = torch.zeros_like(inputs.v, memory_format=torch.contiguous_format)
    _scatter(o.flatten(0, 1), outputs.transpose(1, 2), table, slice(None))
    return o


def walk_state_back(
    walk: Walk,
    terms: ChunkTerms,
    do: Tensor,
    dexit: Tensor,
    *,
    dv_new: Tensor | None = None,
    dh: Tensor | None = None,
) -> Tensor:
    """Walk the gradient of the state backwards. See `Stages.walk_state_back`."""
    dstate = dexit.clone()
    for chunk in reversed(walk.steps):
        dS = dstate[: chunk.numel()]  # gradient of the chunk's exit state
        if dh is not None:
            dh[chunk] = dS
        dv = terms.Aqk[chunk].mT @ do[chunk] + terms.kg[chunk] @ dS
        if dv_new is not None:
            dv_new[chunk] = dv
        dstate[: chunk.numel()] = (
            terms.decay[chunk].unsqueeze(-1) * dS
            + terms.qg[chunk].mT @ do[chunk]
            - terms.w[chunk].mT @ dv
        )
    return dstate


def chunk_terms_back(
    inputs: Inputs,
    table: SegmentTable,
    settings: Settings,
    terms: ChunkTerms,
    h: Tensor,
    do: Tensor,
    dv_new: Tensor,
    dh: Tensor,
) -> list[Tensor | None]:
    """Differentiate the terms, a slab at a time. See `Stages.chunk_terms_back`.

    With v_new = u - w h, o = qg h + Aqk v_new and the exit state diag(decay) h + kg^T v_new.
    """
    dtype = inputs.state_dtype
    # Gradients of token inputs keep their input's dtype; those of parameters sum over all tokens
    # and are rounded once.
    grads: list[Tensor | None] = [
        None if x is None else x.new_zeros(x.shape, dtype=x.dtype if n < 5 else dtype)
        for n, x in enumerate(inputs)
    ]
    value_heads, key_dim = inputs.g.shape[-2:]
    for slab in _slabs(table, value_heads, key_dim):
        hT = h[slab].mT
        dv = dv_new[slab]
        v_new = terms.u[slab] - terms.w[slab] @ h[slab]
        term_grads = ChunkTerms(
            w=-(dv @ hT),
            u=dv,
            kg=v_new @ dh[slab].mT,
            qg=do[slab] @ hT,
            Aqk=do[slab] @ v_new.mT,
            decay=(h[slab] * dh[slab]).sum(-1),
        )
        leaves = _gather_inputs(inputs, table, slab)
        wanted = [x.requires_grad_() for x in leaves if x is not None]
        with torch.enable_grad():
            part = _slab_terms(leaves, table.valid[slab], settings)
        slab_grads = iter(torch.autograd.grad(part, wanted, term_grads))
        for n, grad in enumerate(grads):
            if grad is None:
                continue
            piece = next(slab_grads)
            if n < 5:
                _scatter(grad.view(-1, *grad.shape[2:]), piece, table, slab)
            else:
                grad += piece
    return [
        None if grad is None or x is None else grad.to(x.dtype)
        for grad, x in zip(grads, inputs, strict=True)
    ]


def _slabs(table: SegmentTable, value_heads: int, key_dim: int) -> Iterator[slice]:
    """Cut the chunks so that the largest temporary stays near SLAB_ELEMENTS."""
    per_chunk = value_heads * table.chunk_size * BLOCK * key_dim
    step = max(1, SLAB_ELEMENTS // per_chunk)
    for start in range(0, table.chunks, step):
        yield slice(start, min(start + step, table.chunks))


def _gather(x: Tensor, table: SegmentTable, slab: slice, dtype: torch.dtype) -> Tensor:
    """[B, T, ...] to [n, C, ...], zero in padding rows whatever lies there."""
    token = table.token[slab]
    x = x.reshape(table.batch * table.tokens, *x.shape[2:])[token].to(dtype)
    valid = table.valid[slab].view(*token.shape, *[1] * (x.dim() - 2))
    return torch.where(valid, x, 0)


def _scatter(flat: Tensor, chunks: Tensor, table: SegmentTable, slab: slice) -> None:
    """Write [n, C, ...] to the rows of `flat` [B * T, ...]; every token lies in one chunk."""
    valid = table.valid[slab]
    flat[table.token[slab][valid]] = chunks[valid].to(flat.dtype)


def _gather_inputs(inputs: Inputs, table: SegmentTable, slab: slice) -> Inputs:
    """The slab's inputs as fresh tensors of the computing dtype, [n, C, heads, ...]."""
    dtype = inputs.state_dtype
    tokens = [_gather(x.detach(), table, slab, dtype) for x in inputs[:5]]
    parameters = [None if x is None else x.detach().to(dtype).clone() for x in inputs[5:]]
    return Inputs(*tokens, *parameters)


def _slab_terms(slab: Inputs, valid: Tensor, settings: Settings) -> ChunkTerms:
    """The terms of a slab of n chunks from its gathered inputs; differentiable."""
    q, k, g, beta = slab.q, slab.k, slab.g, slab.beta
    if settings.normalize_qk:
        q, k = l2norm(q), l2norm(k)
    if settings.gate_in_kernel:
        g = activate_gate(g, slab.A_log, slab.dt_bias, settings.lower_bound)
        g = torch.where(valid[..., None, None], g, 0)
    if settings.sigmoid_beta:
        beta = torch.where(valid[..., None], sigmoid(beta), 0)
    beta = beta * settings.beta_factor
    # Heads before rows; the key heads are repeated for the value heads they serve. Contiguous: the
    # layout of a product's operands, and so its bits, would else depend on the number of chunks.
    group = g.shape[-2] // q.shape[-2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    q, k, v, g = (x.transpose(1, 2).contiguous() for x in (q, k, slab.v, g))
    beta = beta.transpose(1, 2).unsqueeze(-1)

    scores, kk, from_start, kg, total = _decayed_scores(q * settings.scale, k, g)
    # (I + strict_lower(beta k k^T decay)) [w | u] = beta [exp(G) k | v], by substitution.
    system = beta * kk.tril(-1)
    right = torch.cat([beta * (k * from_start), beta * v], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    w, u = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
    qg = settings.scale * (q * from_start)
    return ChunkTerms(w, u, kg, qg, scores, total.exp())


def _decayed_scores(
    q: Tensor, k: Tensor, g: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scores of q and k against earlier k, with the decay between the two tokens.

    Args:
        q: [n, HV, C, K].
        k: [n, HV, C, K].
        g: [n, HV, C, K] natural log.

    Returns:
        qk [n, HV, C, C] and kk [n, HV, C, C], lower triangles with zeros above; the decay from the
        chunk's start through each row [n, HV, C, K]; k decayed to the chunk's end [n, HV, C, K];
        the summed log decay [n, HV, K].
    """
    n, heads, rows, key_dim = k.shape
    blocks = rows // BLOCK
    gb = g.reshape(n, heads, blocks, BLOCK, key_dim)
    qk_b = torch.stack([q, k], dim=3).view(n, heads, blocks, BLOCK, 2, key_dim)
    k_b = k.reshape(n, heads, blocks, BLOCK, key_dim)

    # Within a block, decay from j to i: the sum of g over j < m <= i, formed for each pair.
    strictly_later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=g.device).tril(-1)
    between = torch.where(strictly_later[:, :, None], gb.unsqueeze(-2), 0).cumsum(-3)
    decayed_k = between.exp() * k_b.unsqueeze(-3)  # [n, HV, blocks, i, j, K]
    inside = qk_b @ decayed_k.mT  # [n, HV, blocks, i, 2, j]
    lower = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=g.device).tril()
    inside = torch.where(lower[:, None, :], inside, 0)

    prefix = gb.cumsum(-2)  # from the block's start through each row
    block_total = prefix[..., -1, :]
    later = torch.nn.functional.pad(gb[..., 1:, :], (0, 0, 0, 1))
    suffix = later.flip(-2).cumsum(-2).flip(-2)  # from after each row to the block's end

    score_rows = []
    to_edge = g.new_zeros((n, heads, 0, key_dim))  # from after each earlier row to this block
    start = g.new_zeros((n, heads, 1, key_dim))
    from_start = []
    for i in range(blocks):
        row = inside[:, :, i].transpose(2, 3)  # [n, HV, 2, i, j]
        if i:
            queries = qk_b[:, :, i] * prefix[:, :, i].exp().unsqueeze(-2)  # anchored at the edge
            keys = k[:, :, : i * BLOCK] * to_edge.exp()
            queries = queries.transpose(2, 3).reshape(n, heads, 2 * BLOCK, key_dim)
            before = (queries @ keys.mT).view(n, heads, 2, BLOCK, i * BLOCK)
            row = torch.cat([before, row], dim=-1)
        score_rows.append(torch.nn.functional.pad(row, (0, rows - (i + 1) * BLOCK)))
        from_start.append(start + prefix[:, :, i])
        total = block_total[:, :, i : i + 1]
        to_edge = torch.cat([to_edge + total, suffix[:, :, i]], dim=2)
        start = start + total
    scores = torch.cat(score_rows, dim=3)  # [n, HV, 2, C, C]
    return (
        scores[:, :, 0],
        scores[:, :, 1],
        torch.cat(from_start, dim=2).exp(),
        k * to_edge.exp(),
        start.squeeze(2),
    )
