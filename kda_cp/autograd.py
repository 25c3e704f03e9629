"""The operator as one autograd function around the pipeline."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor

from kda_cp import pipeline
from kda_cp.comm.exchange import Transitions
from kda_cp.pipeline import Call, Saved
from kda_cp.stages import ChunkTerms, Inputs


def recordable(x: Tensor | None) -> Any:
    """Return x, or a copy if x was made in `torch.inference_mode()`: autograd may save that."""
    return x.clone() if x is not None and x.is_inference() else x


class ChunkKDA(torch.autograd.Function):
    """Kimi Delta Attention in chunks: forward and backward are passes of `pipeline`.

    Forward and backward are both collective over the call's exchange. Saved for the backward are
    the inputs, the entry states of the local segments, the transitions folded with, and the chunk
    terms where the call keeps them.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, initial_state: Tensor | None, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return o, the final state and the intermediate states; None for those not asked for."""
        outputs = pipeline.forward(call, Inputs(*inputs), initial_state)  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        if outputs.h is not None:
            ctx.mark_non_differentiable(outputs.h)
        if call.training:
            saved = outputs.saved
            ctx.call = call
            ctx.transition_indices = [kept.indices for kept in saved.transitions]
            transitions = (kept.A for kept in saved.transitions)
            ctx.save_for_backward(*inputs, saved.entry, *transitions, *(saved.terms or ()))
        return outputs.o, outputs.final_state, outputs.h

    @staticmethod
    def backward(
        ctx: Any, do: Tensor | None, dfinal: Tensor | None, dh: None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the initial state and of the inputs."""
        if torch.is_grad_enabled():  # create_graph=True, on every rank alike
            raise NotImplementedError(
                "chunk_kda: a gradient of its gradient is not available; "
                "expected a backward without create_graph=True"
            )
        tensors = iter(ctx.saved_tensors)
        inputs = Inputs(*islice(tensors, len(Inputs._fields)))
        entry = next(tensors)
        transitions = tuple(
            Transitions(indices, next(tensors)) for indices in ctx.transition_indices
        )
        terms = tuple(tensors)
        saved = Saved(entry, transitions, ChunkTerms(*terms) if terms else None)
        grads, dinitial = pipeline.backward(ctx.call, inputs, saved, do, dfinal)
        wanted = ctx.needs_input_grad[1:]
        return (
            None,
            *(g if want else None for g, want in zip([dinitial, *grads], wanted, strict=True)),
        )
