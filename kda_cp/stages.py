"""What one call computes: its inputs, its frozen settings, and the stages every implementation has.

`pipeline.py` orders the stages; `eager.py` is their implementation on batched PyTorch products.
Shapes: q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K]; beta [B, T, HV]; a chunk has C tokens,
NC chunks in all; states [.., HV, K, V] in float32 (float64 when q is float64).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kda_cp.segments import SegmentTable, Walk


class Inputs(NamedTuple):
    """The differentiable token inputs and gate parameters of one call, as the user gave them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None

    @property
    def state_dtype(self) -> torch.dtype:
        """The type of states, gates and every accumulation."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Settings:
    """The numbers and flags of one call, validated. Units: g and lower_bound in natural log."""

    scale: float
    chunk_size: int
    normalize_qk: bool
    gate_in_kernel: bool
    lower_bound: float | None
    """Lower bound of the sigmoid gate; None is the softplus gate (or a pre-gated g)."""
    sigmoid_beta: bool
    beta_factor: float
    """Factor on beta: 2 where negative eigenvalues are allowed, else 1."""


class ChunkTerms(NamedTuple):
    """All that the walk over the state needs from the tokens (docs/algorithm.md).

    v_new = u - w S;  o = qg S + Aqk v_new;  S <- diag(decay) S + kg^T v_new
    """

    w: Tensor
    """[NC, HV, C, K] T (exp(G) k), T the inverse of the delta rule's triangular system"""
    u: Tensor
    """[NC, HV, C, V] T v"""
    kg: Tensor
    """[NC, HV, C, K] k decayed to the end of its chunk"""
    qg: Tensor
    """[NC, HV, C, K] scale * q decayed from the start of its chunk"""
    Aqk: Tensor
    """[NC, HV, C, C] scale * lower triangle of q k^T with its decay"""
    decay: Tensor
    """[NC, HV, K] exp of the chunk's summed log decay"""

    def of_heads(self, heads: slice) -> ChunkTerms:
        """The terms of some value heads, as views."""
        return ChunkTerms(*(x[:, heads] for x in self))


class Stages(Protocol):
    """One implementation of the stages, forward then backward."""

    def chunk_terms(self, inputs: Inputs, table: SegmentTable, settings: Settings) -> ChunkTerms:
        """Compute the terms of every chunk; needs no state."""
        ...

    def walk_state(
        self,
        walk: Walk,
        terms: ChunkTerms,
        entry: Tensor,
        *,
        o: Tensor | None = None,
        h: Tensor | None = None,
    ) -> Tensor:
        """Walk `walk` from `entry` [n, HV, K, V] and return the exit states, in walk order.

        o [NC, HV, C, V], if given, receives the chunks' outputs; h [NC, HV, K, V] their entry
        states.
        """
        ...

    def walk_maps(self, walk: Walk, terms: ChunkTerms) -> tuple[Tensor, Tensor]:
        """The maps (b [n, HV, K, V], A [n, HV, K, K]) with exit = A entry + b."""
        ...

    def fold(self, A: Tensor, b: Tensor, S: Tensor) -> Tensor:
        """Apply one map in the exchange's fold of states, `A S + b`."""
        ...

    def fold_adjoint(self, A: Tensor, c: Tensor, dS: Tensor) -> Tensor:
        """Apply one adjoint map in the exchange's fold of gradients, `A^T dS + c`."""
        ...

    def gather_values(self, x: Tensor, table: SegmentTable, dtype: torch.dtype) -> Tensor:
        """[B, T, HV, V] to chunks [NC, HV, C, V], zero in padding rows."""
        ...

    def scatter_values(self, chunks: Tensor, table: SegmentTable, dtype: torch.dtype) -> Tensor:
        """Chunks [NC, HV, C, V] to [B, T, HV, V], zero past the last sequence."""
        ...

    def walk_state_back(
        self,
        walk: Walk,
        terms: ChunkTerms,
        do: Tensor,
        dexit: Tensor,
        *,
        dv_new: Tensor | None = None,
        dh: Tensor | None = None,
    ) -> Tensor:
        """Walk `walk` backwards from the gradient of its exit states to that of its entry states.

        dv_new [NC, HV, C, V] and dh [NC, HV, K, V], if given, receive the gradients of each
        chunk's v_new and exit state.
        """
        ...

    def chunk_terms_back(
        self,
        inputs: Inputs,
        table: SegmentTable,
        settings: Settings,
        terms: ChunkTerms,
        h: Tensor,
        do: Tensor,
        dv_new: Tensor,
        dh: Tensor,
    ) -> list[Tensor | None]:
        """Gradients of `inputs`, in their order and dtypes."""
        ...
