"""Entry states of the segments of a chain, left to right: `S_{s+1} = A_s S_s + b_s`.

One program folds some columns of one value head over one chain. A is read in slices of its columns
against the rows of S that the same program stored before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kda_cp.kernels.configs import FoldConfig, fold_config, padded
from kda_cp.kernels.primitives import check_grid


@triton.jit
def fold_kernel(
    maps, states, chains,
    HV, V,
    K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(V, BV)
    i_hv = program // tiles % HV
    chains += program // (tiles * HV) * 4
    i_map = tl.load(chains)
    i_state = tl.load(chains + 1)
    steps = tl.load(chains + 2)
    starts_at_zero = tl.load(chains + 3) != 0
    o_v = program % tiles * BV + tl.arange(0, BV)
    o_i = tl.arange(0, KP).to(tl.int64)
    o_j = tl.arange(0, BK).to(tl.int64)
    m_iv = (o_i < K)[:, None] & (o_v < V)[None, :]
    W = V + K
    p_map = maps + (i_map * HV + i_hv) * K * W
    p_state = states + (i_state * HV + i_hv) * K * V
    for i_s in range(steps):
        b_S = tl.load(p_map + o_i[:, None] * W + o_v[None, :], mask=m_iv, other=0.0)
        if i_s > 0 or not starts_at_zero:
            for i_k in range(0, KP, BK):
                m_j = i_k + o_j < K
                p_A = p_map + V + o_i[:, None] * W + i_k + o_j[None, :]
                b_A = tl.load(p_A, mask=(o_i < K)[:, None] & m_j[None, :], other=0.0)
                p_S = p_state + (i_k + o_j)[:, None] * V + o_v[None, :]
                b_j = tl.load(p_S, mask=m_j[:, None] & (o_v < V)[None, :], other=0.0)
                b_S += tl.dot(b_A, b_j, input_precision=PRECISION)
        p_map += HV * K * W
        p_state += HV * K * V
        tl.store(p_state + o_i[:, None] * V + o_v[None, :], b_S, mask=m_iv)
        tl.debug_barrier()  # the next step reads what other threads stored


def fold(maps: Tensor, states: Tensor, chains: Tensor, config: FoldConfig | None = None) -> None:
    """Fold every chain, in place.

    Args:
        maps: [.., HV, K, V + K] fp32, `[b | A]` of every map.
        states: [.., HV, K, V] fp32; the first of a chain is given, the others are written.
        chains: [n, 4] int64: first map, first state, maps, and whether the first state is zero, in
            which case the first A is not read.
        config: the launch, for tuning; None is the pinned one.
    """
    HV, K, V = states.shape[1:]
    if not chains.shape[0]:
        return
    config = config or fold_config(K)
    columns = min(config.columns, padded(V))
    programs = chains.shape[0] * HV * triton.cdiv(V, columns)
    check_grid(programs)
    fold_kernel[(programs,)](
        maps, states, chains, HV, V,
        K=K, KP=padded(K), BK=min(config.slice, padded(K)), BV=columns,
        PRECISION="tf32x3", num_warps=config.warps,
    )  # fmt: skip
