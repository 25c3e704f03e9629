"""The algebra of affine maps of the state: `S_out = A S_in + b`, and its adjoint.

Any token range maps its entry state to its exit state so (docs/algorithm.md); the gradient of the
state goes back by `dS_in = A^T dS_out + c`. A reset has A = 0: its sequence starts inside.

Shapes: A [..., K, K]; S, b, c [..., K, V]; float32 or float64. Products must be IEEE: the caller
(`pipeline.py`) holds `platform.exact_products` around every fold.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Map(NamedTuple):
    """`S -> A S + b`."""

    A: Tensor
    b: Tensor


def apply(A: Tensor, b: Tensor, S: Tensor) -> Tensor:
    """Map an entry state to the exit state, `A S + b`."""
    return A @ S + b


def apply_adjoint(A: Tensor, c: Tensor, dS: Tensor) -> Tensor:
    """Map the gradient of an exit state to that of the entry state, `A^T dS + c`."""
    return A.mT @ dS + c


def compose(later: Map, earlier: Map) -> Map:
    """Compose two maps: first `earlier`, then `later`."""
    return Map(later.A @ earlier.A, apply(later.A, later.b, earlier.b))
