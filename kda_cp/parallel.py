"""Tokens between the global stream and the shards, and gradients of replicated parameters.

The convention everywhere: the total loss is the sum over ranks of their losses. So `shard` and
`unshard` have their true adjoints as backward, and the gradient of a parameter that every rank
holds is the sum of the ranks' gradients (`reduce_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kda_cp.comm.collectives import all_reduce_sum, start_all_gather, start_all_to_all
from kda_cp.context import CPContext


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
    _expect_context(cp_context)
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
        ValueError: `dim` has another length; x or the context is something else.

    Note:
        Collective over the group, forward and backward. The backward sums the gradients of all
        ranks and gives each its own tokens, so the same loss on every rank counts P times.
    """
    _expect_context(cp_context)
    _expect_tokens(x, cp_context.num_tokens, dim, "local")
    moved: Tensor = _Unshard.apply(x.movedim(dim, 0), cp_context)
    return moved.movedim(0, dim)


def reduce_gradients(parameters: Tensor | Iterable[Tensor], cp_context: CPContext) -> None:
    """Sum the gradients of replicated parameters over the context-parallel group, in place.

    Call it after the backward for parameters that no wrapper (DDP, FSDP2, DeepSpeed) reduces.

    Args:
        parameters: the same parameters in the same order on every rank; those that do not
            require a gradient are passed over. One without a gradient counts as zero.
        cp_context: the layout, for its group.

    Raises:
        ValueError: the parameters or the context are something else.

    Note:
        Collective over the group: one all-reduce for each dtype and device.
    """
    _expect_context(cp_context)
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    if not isinstance(parameters, Iterable) or isinstance(parameters, Mapping):
        came = type(parameters).__name__
        raise ValueError(f"parameters: expected tensors, as model.parameters(), got {came}")
    chosen = [p for p in parameters if p.requires_grad]
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


def _global_order(context: CPContext, device: torch.device) -> Tensor:
    """[T] int64: where each global token lies in the concatenation of all shards."""
    tokens = [
        torch.arange(start, stop, device="cpu")
        for rank in range(context.size)
        for start, stop in context.plan.ranges(rank)
    ]
    position = torch.cat([torch.arange(0, device="cpu"), *tokens])
    return torch.argsort(position).to(device)


def _expect_context(cp_context: CPContext) -> None:
    if not isinstance(cp_context, CPContext):
        raise ValueError(
            f"cp_context: expected a context from build_cp_context, got {type(cp_context).__name__}"
        )


def _expect_tokens(x: Tensor, expected: int, dim: int, which: str) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"x: expected a tensor, got {type(x).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim: expected a dimension of a {x.dim()}-dimensional x, got {dim}")
    if x.shape[dim] != expected:
        raise ValueError(
            f"x: expected {expected} {which} tokens along dimension {dim}, got {x.shape[dim]}"
        )
