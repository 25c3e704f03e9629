"""Kimi Delta Attention (KDA) as a context-parallel operator for PyTorch.

Start with `build_cp_context` and `chunk_kda_cp`; see README.md.
"""

from kda_cp.api import chunk_kda, chunk_kda_cp, fused_recurrent_kda
from kda_cp.context import CPContext, build_cp_context
from kda_cp.gates import (
    fused_kda_gate,
    kda_gate_bwd,
    kda_gate_chunk_cumsum,
    kda_gate_fwd,
    naive_kda_gate,
    naive_kda_lowerbound_gate,
)
from kda_cp.parallel import reduce_gradients, reshard, shard, unshard

__all__ = [
    "CPContext",
    "build_cp_context",
    "chunk_kda",
    "chunk_kda_cp",
    "fused_kda_gate",
    "fused_recurrent_kda",
    "kda_gate_bwd",
    "kda_gate_chunk_cumsum",
    "kda_gate_fwd",
    "naive_kda_gate",
    "naive_kda_lowerbound_gate",
    "reduce_gradients",
    "reshard",
    "shard",
    "unshard",
]
