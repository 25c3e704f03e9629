"""What one call computes: its inputs, its frozen settings, and the stages every implementation has.

`pipeline.py` orders the stages; `eager.py` is their implementation on batched PyTorch products,
`compiled.py` that of the forward ones on Triton kernels.
Shapes: q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K]; beta [B, T, HV]; a chunk has C tokens,
NC chunks in all; states [.., HV, K, V] in float32 (float64 when q is float64).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from kda_cp.segments import SegmentTable, Walk

T = TypeVar("T")


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
    decay_bound: float | None = None
    """What every log decay is at least, by its gate or by the caller's promise; None: no bound."""
    precision: str | None = None
    """How products of float32 operands are rounded: "tf32", or None for exact ones."""


class HeadTerms(Protocol):
    """Chunk terms of whatever kind: all that the pipeline needs to know of them."""

    def of_heads(self: T, heads: slice) -> T:
        """The terms of some value heads, as views."""
        ...


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


Terms = TypeVar("Terms", bound=HeadTerms)


class ForwardStages(Protocol[Terms]):
    """One implementation of the stages of a forward pass, with chunk terms of its own."""

    def chunk_terms(self, inputs: Inputs, table: SegmentTable, settings: Settings) -> Terms:
        """Compute the terms of every chunk; needs no state."""
        ...

    def new_outputs(self, inputs: Inputs, table: SegmentTable) -> Tensor:
        """Make what `walk_state` writes outputs to."""
        ...

    def outputs_of_heads(self, outputs: Tensor, heads: slice) -> Tensor:
        """The outputs of some value heads, as a view."""
        ...

    def finish_outputs(self, outputs: Tensor, inputs: Inputs, table: SegmentTable) -> Tensor:
        """Turn `outputs` into o [B, T, HV, V] in v's dtype, zero past the last sequence.

        Not a view: what autograd returns must be open to changes in place.
        """
        ...

    def walk_state(
        self,
        walk: Walk,
        terms: Terms,
        entry: Tensor | None,
        *,
        exits: Tensor | None = None,
        o: Tensor | None = None,
        h: Tensor | None = None,
    ) -> None:
        """Walk the segments of `walk` from their entry states.

        entry [instances, HV, K, V] is read, and exits likewise written, in the rows of the walk's
        instances; None is zero, or not wanted. o of `new_outputs`, if given, receives the chunks'
        outputs; h [NC, HV, K, V] their entry states.
        """
        ...

    def walk_maps(self, walk: Walk, terms: Terms) -> tuple[Tensor, Tensor]:
        """The maps (b [n, HV, K, V], A [n, HV, K, K]) with exit = A entry + b."""
        ...

    def fold(self, A: Tensor, b: Tensor, S: Tensor) -> Tensor:
        """Apply one map in the exchange's fold of states, `A S + b`."""
        ...


class Stages(ForwardStages[ChunkTerms], Protocol):
    """One implementation of all stages, forward and backward."""

    def fold_adjoint(self, A: Tensor, c: Tensor, dS: Tensor) -> Tensor:
        """Apply one adjoint map in the exchange's fold of gradients, `A^T dS + c`."""
        ...

    def gather_values(self, x: Tensor, table: SegmentTable, dtype: torch.dtype) -> Tensor:
        """[B, T, HV, V] to chunks [NC, HV, C, V], zero in padding rows."""
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
