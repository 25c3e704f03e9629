"""What the sharded operator is judged by, and how far each of its tensors is off.

An error is |x - judge| / |judge|, the Frobenius norm over one document in one head of one tensor on
one rank, and the error of the tensor on that rank is the worst of these, so that one wrong head or
document cannot hide among right ones. A document whose judge is smaller than that of as many
average rows of the head is measured by the latter, and the error is absolute where both are 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kda_cp import chunk_kda
from kda_cp.launch.model import OPERATOR, Batch, Model, Upstream
from kda_cp.reference import recurrent_kda_reference

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
BOUNDS = {
    "fp64": (1e-10, "rounding in float64, with room"),
    "fp32": (1e-4, "rounding in float32, with room for sums that cancel"),
    "bf16": (1e-2, "8 bits of o and of the gradients, and of the operands of products"),
    "fp16": (2e-3, "11 bits of o and of the gradients, and of the operands of products"),
}
"""The bound of every error and its reason, by dtype."""

JUDGES = {
    "operator": "the unsharded operator in float64",
    "reference": "the token recurrence in float64",
}
PIECE = 256
"""Tokens of the recurrence that are kept in memory at a time for its backward."""

NOTHING = 1e-12
"""A norm up to this counts as 0."""


def judge(
    model: Model, batch: Batch, against: str, advance: Callable[[int], None]
) -> dict[str, Tensor]:
    """Compute every tensor of the tables in float64, unsharded, on the inputs as they were rounded.

    Args:
        model: the network; its gradients are left alone.
        batch: all tokens.
        against: which of `JUDGES`.
        advance: called with each number of tokens that are done.
    """
    exact = copy.deepcopy(model).double()
    exact.dtype = torch.float64
    exact.zero_grad()
    with torch.no_grad():
        inputs = {name: x.double() for name, x in model(batch.text).items()}
    for x in inputs.values():
        x.requires_grad_()
    upstream = Upstream(batch.upstream.do.to(model.dtype).double(), batch.upstream.dfinal.double())
    walk = _operator if against == "operator" else _recurrence
    tensors = walk(exact, inputs, upstream, batch.cu_seqlens, advance)
    tensors |= {f"d{name}": x.grad for name, x in inputs.items() if x.grad is not None}
    # The projections are linear: their gradients need the rounded inputs' gradients alone.
    projected = exact(batch.text)
    torch.autograd.backward(list(projected.values()), [tensors[f"d{name}"] for name in projected])
    return tensors | exact.gradients()


def _operator(
    exact: Model,
    inputs: dict[str, Any],
    upstream: Upstream,
    cu_seqlens: list[int],
    advance: Callable[[int], None],
) -> dict[str, Tensor]:
    o, final_state = chunk_kda(
        **inputs,
        A_log=exact.A_log,
        dt_bias=exact.dt_bias,
        cu_seqlens=cu_seqlens,
        impl="torch",
        **OPERATOR,
    )
    torch.autograd.backward((o, final_state), upstream)
    advance(o.shape[1])
    return {"o": o.detach(), "final_state": final_state.detach()}


def _recurrence(
    exact: Model,
    inputs: dict[str, Tensor],
    upstream: Upstream,
    cu_seqlens: list[int],
    advance: Callable[[int], None],
) -> dict[str, Tensor]:
    """Walk document after document, forward and backward, a piece at a time."""

    def walk(
        state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, ...]:
        return recurrent_kda_reference(
            q,
            k,
            v,
            g,
            beta,
            initial_state=state,
            A_log=exact.A_log,
            dt_bias=exact.dt_bias,
            **OPERATOR,
        )

    o, final_state = torch.zeros_like(upstream.do), torch.zeros_like(upstream.dfinal)
    for n, (start, stop) in enumerate(pairwise(cu_seqlens)):
        if start == stop:
            continue
        outputs = []
        state = final_state[n : n + 1]
        for first in range(start, stop, PIECE):
            piece = [x[:, first : min(first + PIECE, stop)] for x in inputs.values()]
            output, state = checkpoint(walk, state, *piece, use_reentrant=False)
            outputs.append(output)
        document = torch.cat(outputs, 1)
        torch.autograd.backward(
            (document, state), (upstream.do[:, start:stop], upstream.dfinal[n : n + 1])
        )
        o[:, start:stop] = document.detach()
        final_state[n] = state.detach()[0]
        advance(stop - start)
    return {"o": o, "final_state": final_state}


@dataclass(frozen=True)
class Score:
    """The error of one tensor on one rank, and where it is worst."""

    error: float
    head: int | None
    document: int | None


def score(x: Tensor, judged_by: Tensor, documents: Tensor | None) -> Score:
    """Score a tensor against its judge, both [heads, rows, values].

    Args:
        x: what is judged.
        judged_by: in float64.
        documents: [rows] int64, the document of each row; None where rows are none's.

    Returns:
        The error of the worst head and document, and which these are; NaN if there is any. A
        tensor without rows has error 0.
    """
    if x.numel() == 0:
        return Score(0.0, None, None)
    heads, rows = x.shape[:2]
    index = torch.zeros(rows, dtype=torch.int64) if documents is None else documents
    index = index.to(x.device)

    def by_document(values: Tensor) -> Tensor:
        return values.new_zeros(heads, int(index.max()) + 1).index_add(1, index, values)

    off = by_document((x.double() - judged_by).square().sum(-1))
    size = by_document(judged_by.square().sum(-1))
    share = by_document(torch.ones_like(judged_by[..., 0])) / rows
    size = torch.maximum(size, size.sum(1, keepdim=True) * share).sqrt()
    errors = off.sqrt() / torch.where(size > NOTHING, size, 1.0)
    worst = int(errors.argmax())  # a NaN is the largest
    head, document = divmod(worst, errors.shape[1])
    return Score(
        float(errors.flatten()[worst]),
        head if heads > 1 else None,
        None if documents is None else document,
    )
