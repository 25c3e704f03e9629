"""The walk over the state, with the outputs, or of the affine maps of whole segments.

For every chunk, with S its entry state [K, V] and the terms of `intra.py`:

    r = v - kd S      v_new = T r      o = qg S + (Aqk T) r      S <- diag(decay) S + kg^T v_new

Below kd lies qg, and below T lies Aqk T, so that one product makes both and a step is a chain of
three. A map `S -> A S + b` is the same walk over more columns: b starts from zero, A from the
identity with v = 0. The state is held transposed, [BV, K], so that it and v_new are operands in
registers. One program walks one work item: some columns of one value head over one piece.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kda_cp.kernels.configs import StateConfig, state_config
from kda_cp.kernels.intra import Terms
from kda_cp.kernels.primitives import Arithmetic, check_grid, dot

WORK_COLUMNS = tl.constexpr(7)
"""Numbers that describe a work item; see `walk_segments`."""


@triton.jit
def halves(b_x):
    """The left and the right half of the columns of a tile."""
    rows: tl.constexpr = b_x.shape[0]
    columns: tl.constexpr = b_x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(b_x, [rows, 2, columns]), 0, 2, 1))


@triton.jit
def state_kernel(
    v, kq, kg, TA, decay, work,
    entry, states, exits, o, h,
    v_b, v_t, v_h, o_b, o_t, o_h, entry_n, exits_n, h_n,
    HV, chunk_tiles, V,
    K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
    MAPS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Where am I.
    program = tl.program_id(0).to(tl.int64)
    work += program // HV * WORK_COLUMNS
    i_hv = program % HV
    i_b = tl.load(work)
    i_t = tl.load(work + 1)
    length = tl.load(work + 2)
    i_chunk = tl.load(work + 3)
    i_entry = tl.load(work + 4)
    i_exit = tl.load(work + 5)
    # Columns of the state, or of [b | A]: tiles of b, then tiles of A.
    i_column = tl.load(work + 6).to(tl.int32)
    of_A = i_column >= tl.cdiv(V, BV)
    o_v = (i_column - tl.where(of_A, tl.cdiv(V, BV), 0)) * BV + tl.arange(0, BV)
    m_v = (o_v < V) & (i_column < tl.cdiv(V, BV))
    o_k = tl.arange(0, KP)
    o_c = tl.arange(0, C).to(tl.int64)

    tile = i_chunk * chunk_tiles + i_hv
    v += i_b * v_b + i_t * v_t + i_hv * v_h
    o_cv = o_c[:, None] * v_t + o_v[None, :]
    # With outputs, the rows of q come along with those of k in every product.
    R: tl.constexpr = C if o is None else 2 * C
    o_rk = tl.arange(0, R)[:, None] * KP + o_k[None, :]
    o_rc = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    o_ck = tl.arange(0, C)[:, None] * KP + o_k[None, :]
    o_state = o_k.to(tl.int64)[:, None] * V + o_v[None, :]  # [KP, BV]
    m_state = (o_k < K)[:, None] & m_v[None, :]

    if MAPS:
        b_S = tl.where((o_v[:, None] == o_k[None, :]) & of_A, 1.0, 0.0)
    else:
        b_S = tl.zeros([BV, KP], tl.float32)
        if entry is not None:
            p_entry = entry + i_entry * entry_n + i_hv * K * V + o_state
            b_S += tl.trans(tl.load(p_entry, mask=m_state & (i_entry >= 0), other=0.0))
        if states is not None:
            p_entry = states + ((-1 - i_entry) * HV + i_hv) * K * V + o_state
            b_S += tl.trans(tl.load(p_entry, mask=m_state & (i_entry < 0), other=0.0))
    if o is not None:
        o += i_b * o_b + i_t * o_t + i_hv * o_h
    if h is not None:
        h += i_chunk * h_n + i_hv * K * V

    for i_c in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        m_cv = (o_c < length - i_c * C)[:, None] & m_v[None, :]
        if h is not None:
            tl.store(h + o_state, tl.trans(b_S), mask=m_state)
            h += h_n
        b_kq = tl.load(kq + tile * 2 * C * KP + o_rk)
        b_v = tl.load(v + o_cv, mask=m_cv, other=0.0)
        b_TA = tl.load(TA + tile * 2 * C * C + o_rc)
        b_kg = tl.load(kg + tile * C * KP + o_ck)
        b_decay = tl.load(decay + tile * KP + o_k)
        b_r = tl.trans(b_v.to(tl.float32))  # [BV, C]
        b_kS = dot(b_S, tl.trans(b_kq), DOT, PRECISION)  # [BV, R]
        if o is None:
            b_vn = dot(b_r - b_kS, tl.trans(b_TA), DOT, PRECISION)  # v_new [BV, C]
        else:
            b_kS, b_qS = halves(b_kS)
            b_vn, b_o = halves(dot(b_r - b_kS, tl.trans(b_TA), DOT, PRECISION))
            b_o += b_qS
            o_co = o_c[:, None] * o_t + o_v[None, :]
            tl.store(o + o_co, tl.trans(b_o).to(o.dtype.element_ty), mask=m_cv)
            o += C * o_t
        b_S = b_S * b_decay[None, :] + dot(b_vn, b_kg, DOT, PRECISION)
        v += C * v_t
        tile += chunk_tiles

    if MAPS:
        p_exit = exits + i_exit * exits_n + i_hv * K * (V + K) + tl.where(of_A, V, 0)
        p_exit += o_k.to(tl.int64)[:, None] * (V + K) + o_v[None, :]
        m_exit = (o_k < K)[:, None] & (o_v < tl.where(of_A, K, V))[None, :]
        tl.store(p_exit, tl.trans(b_S), mask=m_exit)
    elif exits is not None:
        p_exit = exits + i_exit * exits_n + i_hv * K * V + o_state
        tl.store(p_exit, tl.trans(b_S), mask=m_state & (i_exit >= 0))


def walk_segments(
    v: Tensor,
    terms: Terms,
    work: Tensor,
    *,
    entry: Tensor | None,
    states: Tensor | None,
    exits: Tensor | None,
    o: Tensor | None,
    h: Tensor | None,
    key_dim: int,
    arithmetic: Arithmetic,
    config: StateConfig | None = None,
) -> None:
    """Walk the state through segments.

    States are fp32 with contiguous [K, V].

    Args:
        v: [B, T, HV, V], the last dimension contiguous.
        terms: of all chunks.
        work: [n, WORK_COLUMNS] int64: row of the batch; first token; tokens; first chunk; row of
            `entry`, or -1 - row of `states`; row of `exits`, or -1 for none; tile of columns.
        entry: [.., HV, K, V], entry states; None for zero.
        states: [.., HV, K, V] contiguous, more entry states; None for none.
        exits: [.., HV, K, V], receives the states after the walk; None for none.
        o: [B, T, HV, V], receives the outputs; None for none.
        h: [NC, HV, K, V], receives the entry state of every chunk; None for none.
        key_dim: K, of which KP is the padding.
        arithmetic: of the products.
        config: the launch, for tuning; None is the pinned one.
    """
    _launch(
        v,
        terms,
        work,
        key_dim,
        arithmetic,
        config or state_config(key_dim, v.shape[-1], arithmetic.term, maps=False),
        entry=entry,
        states=states,
        exits=exits,
        o=o,
        h=h,
    )


def walk_maps(
    v: Tensor,
    terms: Terms,
    work: Tensor,
    maps: Tensor,
    *,
    key_dim: int,
    arithmetic: Arithmetic,
    config: StateConfig | None = None,
) -> None:
    """Walk the affine maps `[b | A]` of segments into maps [.., HV, K, V + K]; see `walk_segments`.

    The row of `exits` in `work` is that of `maps`; the tiles of A come after those of b.
    """
    config = config or state_config(key_dim, v.shape[-1], arithmetic.term, maps=True)
    _launch(v, terms, work, key_dim, arithmetic, config, exits=maps, maps=True)


def _launch(
    v: Tensor,
    terms: Terms,
    work: Tensor,
    key_dim: int,
    arithmetic: Arithmetic,
    config: StateConfig,
    *,
    exits: Tensor | None,
    entry: Tensor | None = None,
    states: Tensor | None = None,
    o: Tensor | None = None,
    h: Tensor | None = None,
    maps: bool = False,
) -> None:
    HV, V = v.shape[2:]
    C, KP = terms.kg.shape[2:]
    programs = work.shape[0] * HV
    if not programs:
        return
    check_grid(programs)
    o_strides = (0, 0, 0) if o is None else o.stride()[:3]
    rows = (0 if x is None else x.stride(0) for x in (entry, exits, h))
    state_kernel[(programs,)](
        v, *terms, work, entry, states, exits, o, h,
        *v.stride()[:3], *o_strides, *rows,
        HV, terms.kg.stride(0) // (C * KP), V,
        K=key_dim, KP=KP, C=C, BV=config.columns, STAGES=config.stages,
        MAPS=maps, DOT=arithmetic.dot, PRECISION=arithmetic.precision, num_warps=config.warps,
    )  # fmt: skip
