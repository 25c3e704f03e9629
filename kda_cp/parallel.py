"""Tokens between the global stream and the shards, and gradients of replicated parameters.

The convention everywhere: the total loss is the sum over ranks of their losses. So `shard`,
`unshard` and `reshard` have their true adjoints as backward, and the gradient of a parameter that
every rank holds is the sum of the ranks' gradients (`reduce_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kda_cp.autograd import recordable
from kda_cp.comm.collectives import all_reduce_sum, start_all_gather, start_all_to_all
from kda_cp.context import CPContext
from kda_cp.validation import describe_tensor


def shard(x: Tensor, cp_context: CPContext, dim: int = 1) -> Tensor:
    """Take this rank's tokens out of a global tensor.

    Args:
        x: any shape, with the global number of tokens along `dim`.
        cp_context: the layout.
        dim: the token dimension.

    Returns:
        The same shape with the local number of tokens along `dim`, in shard order.

    Raises:
        ValueError: `dim` has another length; x or the context is something else.

    Note:
        No communication. Its backward pads with zeros: the gradient of a global tensor on each
        rank holds the part of that rank's tokens.
    """
    _expect_context("cp_context", cp_context)
    _expect_tokens(x, cp_context.plan.num_tokens, dim, "global")
    return torch.cat(
        [x.narrow(dim, 0, 0)]
        + [x.narrow(dim, start, stop - start) for start, stop in cp_context.ranges],
        dim,
    )


def unshard(x: Tensor, cp_context: CPContext, dim: int = 1) -> Tensor:
    """Gather the shards of all ranks into the global tensor, on every rank.

    Args:
        x: any shape, with this rank's number of tokens along `dim`; alike on the ranks otherwise.
        cp_context: the layout.
        dim: the token dimension.

    Returns:
        The same shape with the global number of tokens along `dim`, in global order.

    Raises:
        ValueError: `dim` has another length, x or the context is something else, or ranks differ
            (on every rank the same error, unless the context was built with `check="off"`).

    Note:
        Collective over the group, forward and backward. The backward sums the gradients of all
        ranks and gives each its own tokens, so the same loss on every rank counts P times.
    """
    _expect_context("cp_context", cp_context)
    x = _agree_on_tokens("unshard", x, dim, cp_context)
    moved: Tensor = _Unshard.apply(x.movedim(dim, 0), cp_context)
    return moved.movedim(0, dim)


def reshard(x: Tensor, from_context: CPContext, to_context: CPContext, dim: int = 1) -> Tensor:
    """Move the tokens of one layout to the ranks and places of another.

    So that, say, a layer may be contiguous and the next one zigzag.

    Args:
        x: any shape, with the number of tokens of this rank's shard in `from_context` along `dim`;
            alike on the ranks otherwise.
        from_context: the layout that x has.
        to_context: the layout wanted: of the same number of global tokens, over the same group.
        dim: the token dimension.

    Returns:
        The same shape with the number of tokens of this rank's shard in `to_context` along `dim`.

    Raises:
        ValueError: `dim` has another length, x or a context is something else, the contexts do not
            go together, or ranks differ (on every rank the same error, unless `from_context` was
            built with `check="off"`).

    Note:
        Collective over the group, forward and backward: one all-to-all each. The backward is the
        same move the other way, which is its exact adjoint.

    Example:
        >>> import torch
        >>> from kda_cp import build_cp_context
        >>> contiguous = build_cp_context([0, 4, 10], None)  # or a process group
        >>> turned = build_cp_context([0, 4, 10], None, fragments=[[(5, 10), (0, 5)]])
        >>> reshard(torch.arange(10), contiguous, turned, dim=0)
        tensor([5, 6, 7, 8, 9, 0, 1, 2, 3, 4])
    """
    _expect_context("from_context", from_context)
    _expect_context("to_context", to_context)
    error = None
    for what, a, b in (
        ("global tokens", from_context.plan.num_tokens, to_context.plan.num_tokens),
        ("ranks", from_context.size, to_context.size),
    ):
        if a != b and error is None:
            error = ValueError(f"to_context: expected the {what} of from_context, {a}, got {b}")
    if error is None and from_context.group != to_context.group:
        error = ValueError("to_context: expected the group of from_context, got another")
    x = _agree_on_tokens("reshard", x, dim, from_context, to_context, error)
    moved: Tensor = _Reshard.apply(x.movedim(dim, 0), from_context, to_context)
    return moved.movedim(0, dim)


def reduce_gradients(parameters: Tensor | Iterable[Tensor], cp_context: CPContext) -> None:
    """Sum the gradients of replicated parameters over the context-parallel group, in place.

    Call it after the backward for parameters that no wrapper (DDP, FSDP2, DeepSpeed) reduces.

    Args:
        parameters: the same parameters in the same order on every rank; those that do not
            require a gradient are passed over. One without a gradient counts as zero.
        cp_context: the layout, for its group.

    Raises:
        ValueError: the parameters or the context are something else, or ranks differ (on every
            rank the same error, unless the context was built with `check="off"`).

    Note:
        Collective over the group: one all-reduce for each dtype and device.
    """
    _expect_context("cp_context", cp_context)
    error: Exception | None = None
    chosen: list[Tensor] = []
    try:
        chosen = [p for p in _expect_tensors(parameters) if p.requires_grad]
    except Exception as caught:
        error = caught

    def describe() -> dict[str, str]:
        shapes = [describe_tensor(p, None) for p in chosen]
        return {"call": "reduce_gradients", "parameters": "; ".join(shapes)}

    cp_context.agree(describe, error)
    if cp_context.group is None:
        return
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for p in chosen:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        buckets.setdefault((p.dtype, p.device), []).append(p.grad)
    for grads in buckets.values():
        flat = torch.cat([grad.flatten() for grad in grads])
        summed = all_reduce_sum(flat, cp_context.group).split([grad.numel() for grad in grads])
        for grad, total in zip(grads, summed, strict=True):
            grad.copy_(total.view_as(grad))


class _Unshard(torch.autograd.Function):
    """[local tokens, ...] to [global tokens, ...]; the backward is a reduce-scatter (SUM)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: CPContext) -> Tensor:
        ctx.context = context
        order = _global_order(context, x.device)
        if context.group is None:
            return x[order]
        longest = max(context.plan.shard_tokens(rank) for rank in range(context.size))
        padded = x.new_zeros((longest, *x.shape[1:]))
        padded[: x.shape[0]] = x
        gathered = start_all_gather(padded, context.group).wait()
        lengths = [context.plan.shard_tokens(rank) for rank in range(context.size)]
        shards = torch.cat([gathered[rank, :n] for rank, n in enumerate(lengths)])
        return shards[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        context: CPContext = ctx.context
        by_shard = torch.empty_like(grad, memory_format=torch.contiguous_format)
        by_shard[_global_order(context, grad.device)] = grad
        if context.group is None:
            return by_shard, None
        sends = [context.plan.shard_tokens(rank) for rank in range(context.size)]
        receives = [context.num_tokens] * context.size
        received = start_all_to_all(by_shard, sends, receives, context.group).wait()
        parts = received.view(context.size, context.num_tokens, *grad.shape[1:])
        # Rank order and float32 make the sum the same however the ranks are placed.
        wide = torch.promote_types(grad.dtype, torch.float32)
        return parts.sum(0, dtype=wide).to(grad.dtype), None


class _Reshard(torch.autograd.Function):
    """[tokens of one shard, ...] to [tokens of another, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, from_context: CPContext, to_context: CPContext) -> Tensor:
        ctx.contexts = from_context, to_context
        return _move(x, from_context, to_context)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        from_context, to_context = ctx.contexts
        return _move(grad, to_context, from_context), None, None


def _move(x: Tensor, source: CPContext, target: CPContext) -> Tensor:
    """Send each token to the rank that holds it in the target; two ranks list theirs alike."""
    leaving = source.plan.overlaps(source.rank, target.plan)
    arriving = target.plan.overlaps(target.rank, source.plan)
    sent = x[_positions(leaving, x.device)]
    if source.group is None:
        received = sent
    else:
        sends, receives = (
            [sum(b - a for a, b in rank) for rank in ranks] for ranks in (leaving, arriving)
        )
        received = start_all_to_all(sent, sends, receives, source.group).wait()
    moved = x.new_empty((target.num_tokens, *x.shape[1:]))
    moved[_positions(arriving, x.device)] = received
    return moved


def _positions(ranges: Sequence[Sequence[tuple[int, int]]], device: torch.device) -> Tensor:
    """[n] int64: the positions in all ranges of all ranks, one after the other."""
    pieces = [torch.arange(a, b, device="cpu") for rank in ranges for a, b in rank]
    return torch.cat([torch.arange(0, device="cpu"), *pieces]).to(device)


def _global_order(context: CPContext, device: torch.device) -> Tensor:
    """[T] int64: where each global token lies in the concatenation of all shards."""
    position = _positions([context.plan.ranges(rank) for rank in range(context.size)], device)
    return torch.argsort(position)


def _agree_on_tokens(
    call: str,
    x: Tensor,
    dim: int,
    context: CPContext,
    target: CPContext | None = None,
    error: Exception | None = None,
) -> Tensor:
    """Check x, compare the call with the other ranks' and return what the call computes with.

    That is x, but with a gradient of its own where another rank's x needs one: its backward is
    collective.
    """
    try:
        _expect_tokens(x, context.num_tokens, dim, "local")
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught

    def describe() -> dict[str, str]:
        return {
            "call": call,
            "grad mode": str(torch.is_grad_enabled()),
            "x": describe_tensor(x, dim % x.dim()),
            "to_context": "None" if target is None else target.claim,
        }

    recorded = torch.is_grad_enabled() and getattr(x, "requires_grad", False)
    joins = context.agree(describe, error, recorded) and not recorded
    if joins and (x.is_floating_point() or x.is_complex()):
        x = recordable(x).detach().requires_grad_()
    return x


def _expect_context(name: str, context: CPContext) -> None:
    if not isinstance(context, CPContext):
        came = type(context).__name__
        raise ValueError(f"{name}: expected a context from build_cp_context, got {came}")


def _expect_tensors(parameters: object) -> list[Tensor]:
    expected = "parameters: expected tensors, as model.parameters(), got"
    if isinstance(parameters, Tensor):
        return [parameters]
    if not isinstance(parameters, Iterable) or isinstance(parameters, Mapping):
        raise ValueError(f"{expected} {type(parameters).__name__}")
    tensors = list(parameters)
    for n, p in enumerate(tensors):
        if not isinstance(p, Tensor):
            raise ValueError(f"{expected} {type(p).__name__} at position {n}")
        if p.grad is not None and p.grad.layout != torch.strided:
            raise ValueError(f"parameters: expected dense gradients, got {p.grad.layout} at {n}")
    return tensors


def _expect_tokens(x: Tensor, expected: int, dim: int, which: str) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"x: expected a tensor, got {type(x).__name__}")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise ValueError(f"dim: expected an int, got {dim!r}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim: expected a dimension of a {x.dim()}-dimensional x, got {dim}")
    if x.shape[dim] != expected:
        raise ValueError(
            f"x: expected {expected} {which} tokens along dimension {dim}, got {x.shape[dim]}"
        )
