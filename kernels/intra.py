"""Terms of every chunk from its tokens alone: gate, norms, scores and the delta rule's inverse.

With G the cumulative log decay inside the chunk (base 2) and lower(.) the lower triangle:

    kd = k 2^G      qg = scale q 2^G      kg = k 2^(G_C - G)      decay = 2^G_C
    Aqk = scale lower(q k^T 2^(G_i - G_j))
    T = (I + strict_lower(beta k k^T 2^(G_i - G_j)))^-1 diag(beta)

The state pass (`state.py`) then walks `v_new = T (v - kd S)`. How it stays exact and causal:

- A decay between rows of two blocks of 16 tokens is a product of factors that are at most 1,
  anchored at the start of the later row's block. Inside a block with gates of at least -5 a token,
  that anchor serves as well: what it puts above 1 stays within float32. With unbounded gates a
  block is split at its middle, at the middles of its halves, and so on. No anchor lies after a row.
- Cumulative sums start anew in every block, with log decays cut off at -152: after a block of
  them, a decay is still right to 1e-4, for any g <= 0.
- The inverse comes by substitution in blocks and by merging halves: that loses no digits to
  correlated keys, as repeated squaring does.

`scores_kernel` makes all but T, and `N = strict_lower(beta k k^T decay)`; `inverse_kernel` makes T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_cp.kernels.configs import IntraConfig, intra_config, padded
from kda_cp.kernels.primitives import LOG2E, Arithmetic, check_grid, dot, sigmoid, softplus

BLOCK = 16
"""Tokens of a block."""

ZERO_DECAY = tl.constexpr(-152.0)
"""2^x is 0 in float32 from here on down; lower log decays would only cost their sums digits."""

PRE_GATED, SOFTPLUS, BOUNDED = 0, 1, 2
"""Kinds of gate: none in the kernel; softplus; the sigmoid with a lower bound."""


class Terms(NamedTuple):
    """What the walk over the state reads, by chunk; in the dtype of `Arithmetic.term`."""

    kq: Tensor
    """[NC, HV, 2 C, KP] kd, then qg: k and scale q decayed from the chunk's start"""
    kg: Tensor
    """[NC, HV, C, KP] k decayed to the chunk's end"""
    TA: Tensor
    """[NC, HV, 2 C, C] T = (I + strict_lower(beta k k^T decay))^-1 diag(beta), then Aqk T"""
    decay: Tensor
    """[NC, HV, KP] fp32, the decay of the whole chunk"""


@triton.jit
def in_two_halves(i, j, HALF: tl.constexpr):
    """Whether row i is in the second half, and column j in the first half, of 2 HALF rows."""
    return (i // (2 * HALF) == j // (2 * HALF)) & (i // HALF > j // HALF)


@triton.jit
def decay_to_middle(b_G, HALF: tl.constexpr):
    """Decay between each row and the middle of its 2 HALF rows, of sums [BK, NB, BC] of g."""
    BK: tl.constexpr = b_G.shape[0]
    rows: tl.constexpr = b_G.shape[1] * b_G.shape[2]
    groups = tl.reshape(b_G, [BK, rows // (2 * HALF), 2 * HALF])
    i = tl.arange(0, 2 * HALF)[None, None, :]
    middle = tl.sum(tl.where(i == HALF - 1, groups, 0.0), 2)[:, :, None]
    return tl.reshape(tl.exp2(-tl.abs(groups - middle)), b_G.shape)


@triton.jit
def scores_kernel(
    q, k, g, beta, A_log, dt_bias, chunks,
    kq, kg, N, Aqk, decay,
    q_b, q_h, k_b, k_h, g_b, g_h, beta_b, beta_t, beta_h,
    scale, lower_bound, beta_factor, H, HV,
    q_t: tl.constexpr, k_t: tl.constexpr, g_t: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, BOUNDED: tl.constexpr, SIGMOID: tl.constexpr,
    INDEX: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Where am I: one program is one chunk of one value head.
    program = tl.program_id(0).to(tl.int64)
    i_chunk = program // HV
    i_hv = program % HV
    i_h = i_hv // (HV // H)
    i_b = tl.load(chunks + 3 * i_chunk)
    i_t = tl.load(chunks + 3 * i_chunk + 1)
    length = tl.load(chunks + 3 * i_chunk + 2)
    q += i_b * q_b + i_t * q_t + i_h * q_h
    k += i_b * k_b + i_t * k_t + i_h * k_h
    g += i_b * g_b + i_t * g_t + i_hv * g_h
    kq += program * 2 * C * KP
    kg += program * C * KP
    decay += program * KP
    N += program * C * C
    Aqk += program * C * C
    beta += i_b * beta_b + i_t * beta_t + i_hv * beta_h
    rate = 1.0
    if A_log is not None:
        rate = tl.exp2(tl.load(A_log + i_hv).to(tl.float32) * LOG2E)
    if dt_bias is not None:
        dt_bias += i_hv * K
    if length == C:
        chunk_scores(
            q, k, g, beta, rate, dt_bias, kq, kg, N, Aqk, decay,
            q_t, k_t, g_t, beta_t, scale, lower_bound, beta_factor, C,
            K, KP, BK, C, BC, NORM, GATE, BOUNDED, SIGMOID, INDEX, DOT, PRECISION, K == KP,
        )  # fmt: skip
    else:
        chunk_scores(
            q, k, g, beta, rate, dt_bias, kq, kg, N, Aqk, decay,
            q_t, k_t, g_t, beta_t, scale, lower_bound, beta_factor, length,
            K, KP, BK, C, BC, NORM, GATE, BOUNDED, SIGMOID, INDEX, DOT, PRECISION, False,
        )  # fmt: skip


@triton.jit
def chunk_scores(
    q, k, g, beta, rate, dt_bias, kq, kg, N, Aqk, decay,
    q_t: tl.constexpr, k_t: tl.constexpr, g_t: tl.constexpr,
    beta_t, scale, lower_bound, beta_factor, length,
    K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, BOUNDED: tl.constexpr, SIGMOID: tl.constexpr,
    INDEX: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Do the work of `scores_kernel`; WHOLE where no row and no channel needs a mask."""
    NB: tl.constexpr = C // BC
    if GATE == 2:
        rate *= -LOG2E  # the sigmoid is 1 / (1 + 2^x)
        lower_bound *= LOG2E

    o_c = tl.arange(0, C).to(INDEX)
    o_row = tl.reshape(o_c, [1, NB, BC])
    i_row = tl.arange(0, BC)[None, None, :].to(INDEX)
    o_first = tl.arange(0, NB)[None, :, None] * BC
    o_k1 = tl.max_contiguous(tl.arange(0, BK), 1)
    t_q = q + o_k1[:, None, None] + o_first.to(INDEX) * q_t
    t_k = k + o_k1[:, None, None] + o_first.to(INDEX) * k_t
    t_g = g + o_k1[:, None, None] + o_first.to(INDEX) * g_t
    rq = 1.0
    rk = 1.0
    if NORM:
        b_qq = tl.zeros([C], tl.float32)
        b_kk = tl.zeros([C], tl.float32)
        for i_s in tl.static_range(KP // BK):
            o_s = (i_s * BK + tl.arange(0, BK))[None, :]
            p_qs = q + o_c[:, None] * q_t + o_s
            p_ks = k + o_c[:, None] * k_t + o_s
            if WHOLE:
                b_qs = tl.load(p_qs).to(tl.float32)
                b_ks = tl.load(p_ks).to(tl.float32)
            else:
                m_s = (o_c < length)[:, None] & (o_s < K)
                b_qs = tl.load(p_qs, mask=m_s, other=0.0).to(tl.float32)
                b_ks = tl.load(p_ks, mask=m_s, other=0.0).to(tl.float32)
            b_qq += tl.sum(b_qs * b_qs, 1)
            b_kk += tl.sum(b_ks * b_ks, 1)
        rq = tl.reshape(tl.rsqrt(b_qq + 1e-6), [1, NB, BC])
        rk = tl.reshape(tl.rsqrt(b_kk + 1e-6), [1, NB, BC])

    in_i = tl.arange(0, BC)[None, :, None]
    in_j = tl.arange(0, BC)[None, None, :]
    block_i = tl.arange(0, NB)[:, None, None]
    i_3 = block_i
    j_3 = tl.arange(0, NB)[None, :, None]
    b_qk = tl.zeros([NB, BC, C], tl.float32)
    b_kk = tl.zeros([NB, BC, C], tl.float32)
    qk_in = tl.zeros([NB, BC, BC], tl.float32)
    kk_in = tl.zeros([NB, BC, BC], tl.float32)
    for i_k in range(KP // BK):
        # Tiles are [BK, NB, BC]. Told to count on no contiguity, the compiler gives every thread
        # the rows of one channel of a block, so that sums over rows stay in a thread.
        o_k1 = i_k * BK + tl.max_contiguous(tl.arange(0, BK), 1)
        o_k = o_k1[:, None, None]
        m = (o_row < length) & (o_k < K)
        if WHOLE:
            b_q = tl.load(t_q + i_row * q_t).to(tl.float32)
            b_k = tl.load(t_k + i_row * k_t).to(tl.float32)
            b_g = tl.load(t_g + i_row * g_t).to(tl.float32)
        else:
            b_q = tl.load(t_q + i_row * q_t, mask=m, other=0.0).to(tl.float32)
            b_k = tl.load(t_k + i_row * k_t, mask=m, other=0.0).to(tl.float32)
            b_g = tl.load(t_g + i_row * g_t, mask=m, other=0.0).to(tl.float32)
        t_q += BK
        t_k += BK
        t_g += BK
        b_q *= rq
        b_k *= rk
        b_bias = 0.0
        if dt_bias is not None:
            b_bias = tl.load(dt_bias + o_k1, mask=o_k1 < K, other=0.0)
            b_bias = b_bias.to(tl.float32)[:, None, None]
        if GATE == 0:
            b_g *= LOG2E
        elif GATE == 1:
            b_g = -(rate * LOG2E) * softplus(b_g + b_bias)
        else:
            b_g = tl.rsqrt(1.0 + tl.exp2(rate * (b_g + b_bias)))  # cheaper than a division
            b_g *= b_g * lower_bound
        if not WHOLE:
            b_g = tl.where(m, b_g, 0.0)
        if not BOUNDED:
            b_g = tl.maximum(b_g, ZERO_DECAY)

        # Rows decayed from their block's start, columns to their block's end.
        b_G = tl.cumsum(b_g, 2)  # [BK, NB, BC]
        total = tl.sum(b_g, 2)  # [BK, NB]
        if not BOUNDED:  # inside a block, between the halves of 16, 8, 4 and 2 rows
            b_kt = tl.permute(b_k, 1, 0, 2)
            b_x = dot(tl.permute(b_q, 1, 2, 0), b_kt, DOT, PRECISION)
            qk_in += tl.where(in_i == in_j, b_x, 0.0)
            for level in tl.static_range(4):
                x = decay_to_middle(b_G, BC >> (level + 1))
                pair = in_two_halves(in_i, in_j, BC >> (level + 1))
                b_kt = tl.permute(b_k * x, 1, 0, 2)
                b_x = dot(tl.permute(b_q * x, 1, 2, 0), b_kt, DOT, PRECISION)
                qk_in += tl.where(pair, b_x, 0.0)
                b_x = dot(tl.permute(b_k * x, 1, 2, 0), b_kt, DOT, PRECISION)
                kk_in += tl.where(pair, b_x, 0.0)
        start = tl.exp2(b_G)
        end = tl.exp2(tl.minimum(total[:, :, None] - b_G, 0.0))
        b_q *= start
        b_kb = b_k * start
        b_k *= end
        # Column block j as row block i sees it, [NB i, NB j, BK]: decayed on to the start of block
        # i, over blocks 1 and 2 where they lie between; its own block, where the gate is bounded,
        # back from the end to the start. The channels come last, as the compiler puts the last
        # dimension of a tile into the lanes: then nothing moves between threads.
        b_own = tl.trans(total)  # [NB, BK]
        b_total = tl.broadcast_to(b_own[:, None, :], [NB, NB, BK])
        decays = tl.exp2(b_total)
        decay_1 = tl.sum(tl.where(i_3 == 1, decays, 0.0), 0)[None, :, :]
        decay_2 = tl.sum(tl.where(i_3 == 2, decays, 0.0), 0)[None, :, :]
        b_gap = tl.where((i_3 >= 2) & (j_3 == 0), decay_1, 1.0)
        b_gap = tl.where((i_3 == 3) & (j_3 <= 1), b_gap * decay_2, b_gap)
        if BOUNDED:
            b_gap = tl.where(i_3 == j_3, tl.exp2(-b_own)[None, :, :], b_gap)
        b_kt = tl.permute(b_k, 2, 1, 0)[None, :, :, :] * b_gap[:, None, :, :]  # [NB, BC, NB, BK]
        b_kt = tl.reshape(tl.permute(b_kt, 0, 3, 2, 1), [NB, BK, C])
        b_qk += dot(tl.permute(b_q, 1, 2, 0), b_kt, DOT, PRECISION)
        b_kk += dot(tl.permute(b_kb, 1, 2, 0), b_kt, DOT, PRECISION)

        # Store what the state is multiplied with.
        before = tl.trans(tl.exp2(tl.sum(tl.where(i_3 < j_3, b_total, 0.0), 0)))[:, :, None]
        after = tl.trans(tl.exp2(tl.sum(tl.where(i_3 > j_3, b_total, 0.0), 0)))[:, :, None]
        p_kq = kq + (o_first * KP + o_k)
        tl.store(p_kq + i_row * KP, (b_kb * before).to(kq.dtype.element_ty))
        p_kq += C * KP
        tl.store(p_kq + i_row * KP, (b_q * (before * scale)).to(kq.dtype.element_ty))
        tl.store(kg + (o_first * KP + o_k) + i_row * KP, (b_k * after).to(kg.dtype.element_ty))
        tl.store(decay + o_k1, tl.exp2(tl.sum(total, 1)))

    # [NB, BC, C]: row block, row, column.
    i_c = block_i * BC + in_i
    j_c = tl.arange(0, C)[None, None, :]
    o_A = i_c * C
    p_beta = beta + i_c.to(tl.int64) * beta_t
    b_beta = tl.load(p_beta, mask=i_c < length, other=0.0).to(tl.float32)
    if SIGMOID:
        b_beta = tl.where(i_c < length, sigmoid(b_beta), 0.0)
    b_beta *= beta_factor
    if BOUNDED:
        causal = i_c >= j_c
        tl.store(N + o_A + j_c, b_kk * b_beta, mask=causal)
    else:
        causal = block_i > j_c // BC
        tl.store(N + o_A + j_c, b_kk * b_beta, mask=causal)
        o_in = o_A + block_i * BC + in_j
        tl.store(N + o_in, kk_in * b_beta)
        tl.store(Aqk + o_in, (qk_in * scale).to(Aqk.dtype.element_ty))
    b_qk = tl.where(causal, b_qk, 0.0) * scale
    m = (block_i != j_c // BC) | BOUNDED
    tl.store(Aqk + o_A + j_c, b_qk.to(Aqk.dtype.element_ty), mask=m)


@triton.jit
def inverse_kernel(
    N, Aqk, beta, chunks, TA,
    beta_b, beta_t, beta_h, beta_factor, HV,
    C: tl.constexpr, BC: tl.constexpr, SIGMOID: tl.constexpr,
    MERGE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Where am I: one program is one chunk of one value head.
    NB: tl.constexpr = C // BC
    program = tl.program_id(0).to(tl.int64)
    i_chunk = program // HV
    i_hv = program % HV
    i_b = tl.load(chunks + 3 * i_chunk)
    i_t = tl.load(chunks + 3 * i_chunk + 1)
    length = tl.load(chunks + 3 * i_chunk + 2)
    beta += i_b * beta_b + i_t * beta_t + i_hv * beta_h
    N += program * C * C
    Aqk += program * C * C
    TA += program * 2 * C * C

    # Inverses of the diagonal blocks, by substitution. b_X [C, BC] holds column c % BC of block
    # c // BC in one thread; row r is e_r - sum_m N_rm X_m.
    o_c = tl.max_contiguous(tl.arange(0, C), 1)
    o_m = tl.max_contiguous(tl.arange(0, BC), 1)
    o_block = o_c // BC * BC
    b_X = tl.where((o_c % BC)[:, None] == o_m[None, :], 1.0, 0.0)
    p_N = N + (o_block * C + o_block)[:, None] + o_m[None, :]
    for r in tl.static_range(1, BC):
        b_N = tl.load(p_N + r * C, mask=o_m[None, :] < r, other=0.0)
        b_x = tl.sum(b_N * b_X, 1)
        b_X = tl.where(o_m[None, :] == r, b_X - b_x[:, None], b_X)
    tl.debug_barrier()
    tl.store(N + ((o_block[:, None] + o_m[None, :]) * C + o_c[:, None]), b_X)
    tl.debug_barrier()

    # Then from two halves: the lower left of the inverse is -(lower right) N (upper left).
    for level in tl.static_range(2):
        if NB > (1 << level):
            merge_halves(N, C, BC << level, BC, MERGE)
            tl.debug_barrier()

    # T diag(beta), and Aqk times it, half the rows at a time.
    R: tl.constexpr = min(C, 32)
    i_c = tl.arange(0, C)
    b_beta = tl.load(beta + i_c.to(tl.int64) * beta_t, mask=i_c < length, other=0.0).to(tl.float32)
    if SIGMOID:
        b_beta = tl.where(i_c < length, sigmoid(b_beta), 0.0)
    b_beta *= beta_factor
    i_r = tl.arange(0, R)[:, None]
    for i in tl.static_range(C // R):
        o_rc = (i * R + i_r) * C + i_c[None, :]
        causal = (i * R + i_r) // BC >= i_c[None, :] // BC
        b_T = tl.load(N + o_rc, mask=causal, other=0.0) * b_beta[None, :]
        tl.store(TA + o_rc, b_T.to(TA.dtype.element_ty))
    tl.debug_barrier()
    for i in tl.static_range(C // R):
        o_rc = (i * R + i_r) * C
        i_m = tl.arange(0, (i + 1) * R)
        b_A = tl.load(Aqk + o_rc + i_m[None, :])
        b_T = tl.load(TA + i_m[:, None] * C + i_c[None, :])
        b_A = dot(b_A, b_T, DOT, PRECISION)
        tl.store(TA + C * C + o_rc + i_c[None, :], b_A.to(TA.dtype.element_ty))


@triton.jit
def merge_halves(N, C: tl.constexpr, HALF: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr):
    """Finish the inverses of all blocks of 2 HALF rows in `N` [C, C] from those of their halves."""
    i_g = tl.arange(0, C // (2 * HALF))[:, None, None] * (2 * HALF * (C + 1))
    o_h = tl.arange(0, HALF)
    o = i_g + o_h[None, :, None] * C + o_h[None, None, :]
    m = (o_h[:, None] // BC >= o_h[None, :] // BC)[None, :, :] & (i_g >= 0)
    b_low = tl.load(N + o + HALF * C + HALF, mask=m, other=0.0)
    b_x = tl.dot(b_low, tl.load(N + o + HALF * C), input_precision=PRECISION)
    b_x = tl.dot(b_x, tl.load(N + o, mask=m, other=0.0), input_precision=PRECISION)
    tl.store(N + o + HALF * C, -b_x)


def chunk_terms(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    chunks: Tensor,
    *,
    scale: float,
    chunk_size: int,
    normalize_qk: bool,
    gate: int,
    lower_bound: float,
    bounded: bool,
    sigmoid_beta: bool,
    beta_factor: float,
    arithmetic: Arithmetic,
    config: IntraConfig | None = None,
) -> Terms:
    """Compute the terms of every chunk.

    Args:
        q: [B, T, H, K], the last dimension contiguous; bf16, fp16 or fp32.
        k: [B, T, H, K], likewise.
        g: [B, T, HV, K], likewise: the natural log of the decay, or what `gate` makes one of.
        beta: [B, T, HV], or its logits.
        A_log: [HV] contiguous, log of the gate's rate, or None.
        dt_bias: [HV * K] contiguous, or None.
        chunks: [NC, 3] int64: row of the batch, first token, tokens.
        scale: factor of q.
        chunk_size: C; a chunk may hold fewer tokens.
        normalize_qk: whether q and k are divided by their norm.
        gate: PRE_GATED, SOFTPLUS or BOUNDED.
        lower_bound: of the BOUNDED gate, natural log.
        bounded: whether every log decay is at least -5, or a little lower.
        sigmoid_beta: whether beta are logits.
        beta_factor: factor on beta.
        arithmetic: of the products.
        config: the launch, for tuning; None is the pinned one.
    """
    NC, HV, K = chunks.shape[0], *g.shape[2:]
    KP, C = padded(K), chunk_size
    config = config or intra_config(KP, arithmetic.term)

    def new(*shape: int, dtype: torch.dtype = arithmetic.term) -> Tensor:
        return q.new_empty((NC, HV, *shape), dtype=dtype)

    terms = Terms(new(2 * C, KP), new(C, KP), new(2 * C, C), new(KP, dtype=torch.float32))
    Aqk = new(C, C)  # scale lower(q k^T decay)
    N = new(C, C, dtype=torch.float32)  # beta k k^T decay, then its inverse, in the lower triangle
    check_grid(NC * HV)
    # Offsets inside a chunk are 32-bit where that holds them, which saves registers.
    widest = max(q.stride(1), k.stride(1), g.stride(1)) * C + KP
    index = tl.int32 if widest < 2**31 else tl.int64
    if NC:
        scores_kernel[(NC * HV,)](
            q, k, g, beta, A_log, dt_bias, chunks,
            terms.kq, terms.kg, N, Aqk, terms.decay,
            *q.stride()[:3:2], *k.stride()[:3:2], *g.stride()[:3:2], *beta.stride(),
            scale, lower_bound, beta_factor, q.shape[2], HV,
            q_t=q.stride(1), k_t=k.stride(1), g_t=g.stride(1),
            K=K, KP=KP, BK=config.columns, C=C, BC=BLOCK,
            NORM=normalize_qk, GATE=gate, BOUNDED=bounded, SIGMOID=sigmoid_beta, INDEX=index,
            DOT=arithmetic.dot, PRECISION=arithmetic.precision,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        inverse_kernel[(NC * HV,)](
            N, Aqk, beta, chunks, terms.TA, *beta.stride(), beta_factor, HV,
            C=C, BC=BLOCK, SIGMOID=sigmoid_beta, MERGE=arithmetic.merge,
            DOT=arithmetic.dot, PRECISION=arithmetic.precision, num_warps=1,
        )  # fmt: skip
    return terms
