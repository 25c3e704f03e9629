"""From the arguments of a call to what serves it: the implementation, the context, the oracle."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch
from torch import Tensor

from kda_cp import platform
from kda_cp.context import CPContext, local_context, read_cu_seqlens
from kda_cp.reference import recurrent_kda_reference
from kda_cp.stages import Inputs, Settings
from kda_cp.validation import IMPLS, PRECISIONS, check_choice


def choose_impl(impl: str, precision: str | None, inputs: Inputs) -> str:
    """The implementation that serves a call: a function of the arguments' device, dtype and K."""
    check_choice("impl", impl, IMPLS)
    check_choice("precision", precision, PRECISIONS)
    if impl in ("auto", "triton"):
        reason = _reason_against_kernels(inputs, impl)
        if impl == "triton" and reason is not None:
            raise NotImplementedError(f"impl: expected what 'triton' can serve, got {reason}")
        if impl == "auto":
            impl = "torch" if reason is not None else "triton"
    if precision == "tf32" and impl != "triton":
        raise NotImplementedError(
            f"precision: expected 'ieee' or None for impl '{impl}', got 'tf32', which only the "
            "Triton kernels serve"
        )
    return impl


def _reason_against_kernels(inputs: Inputs, impl: str) -> str | None:
    q = inputs.q
    if q.device.type == "cpu" and impl == "auto":
        return "tensors on a CPU"  # where the kernels could only be interpreted
    if q.device.type not in ("cpu", "cuda") or (
        q.device.type == "cuda" and not platform.IS_NVIDIA_AMPERE_OR_LATER
    ):
        return f"tensors on {q.device}; the kernels have run on NVIDIA GPUs from Ampere on"
    try:
        compiled = importlib.import_module("kda_cp.compiled")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return "no package triton, in which the kernels are written"
    if q.device.type == "cpu" and not compiled.INTERPRETED:
        return "tensors on a CPU; TRITON_INTERPRET=1 interprets the kernels there"
    if q.dtype == torch.float64:
        return "float64 inputs, for which there are no kernels"
    if q.shape[-1] > compiled.MOST_KEYS:
        return f"K = {q.shape[-1]}; the kernels hold at most {compiled.MOST_KEYS} key channels"
    return None


def choose_recurrent_impl(impl: str) -> str:
    """The implementation that serves `fused_recurrent_kda`."""
    check_choice("impl", impl, IMPLS)
    if impl == "triton":
        raise NotImplementedError(
            "impl: expected 'torch', 'reference' or 'auto' for fused_recurrent_kda, got 'triton', "
            "which has no kernel for it in this version"
        )
    return "torch" if impl == "auto" else impl


def context_for(
    q: Tensor,
    cu_seqlens: Tensor | Sequence[int] | None,
    cu_seqlens_cpu: Tensor | None,
    cp_context: CPContext | None,
) -> CPContext:
    """The given context, checked against the local tensors, or one of a single rank."""
    batch, tokens = q.shape[:2]
    if cp_context is None:
        if cu_seqlens is None:
            if cu_seqlens_cpu is not None:
                raise ValueError("cu_seqlens_cpu: expected cu_seqlens beside it, got None")
            return local_context(tokens, tokens)
        if batch != 1:
            raise ValueError(f"cu_seqlens: expected one packed row, B = 1, got B = {batch}")
        if isinstance(cu_seqlens, int):
            raise ValueError(
                f"cu_seqlens: expected a tensor or a list of boundaries, got the int {cu_seqlens}; "
                "without cu_seqlens each row is one sequence"
            )
        boundaries = read_cu_seqlens(cu_seqlens, cu_seqlens_cpu)
        if boundaries and boundaries[-1] > tokens:
            raise ValueError(
                f"cu_seqlens: expected at most the {tokens} tokens of q last, "
                f"got {boundaries[-1]}; a shard takes a cp_context instead"
            )
        return local_context(tuple(boundaries), tokens)
    if not isinstance(cp_context, CPContext):
        raise ValueError(
            f"cp_context: expected a context from build_cp_context or None, "
            f"got {type(cp_context).__name__}"
        )
    for name, x in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
        if x is not None:
            raise ValueError(
                f"{name}: expected None beside a context, which holds the sequences, "
                f"got {type(x).__name__}"
            )
    if not cp_context.dense and batch != 1:
        raise ValueError(f"q: expected one packed row, B = 1, for this context, got B = {batch}")
    if tokens != cp_context.num_tokens:
        raise ValueError(
            f"q: expected the {cp_context.num_tokens} tokens of rank {cp_context.rank}'s shard, "
            f"got {tokens}"
        )
    return cp_context


def run_oracle(
    inputs: Inputs,
    settings: Settings,
    initial_state: Tensor | None,
    context: CPContext,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The oracle behind the public contract: o, final state and entry states of the chunks."""
    q, k, v, g, beta, A_log, dt_bias = inputs
    cu_seqlens = None if context.dense else list(context.plan.cu_seqlens)
    o, final_state, states = recurrent_kda_reference(
        q,
        k,
        v,
        g,
        beta,
        settings.scale,
        initial_state,
        True,
        A_log=A_log,
        dt_bias=dt_bias,
        use_qk_l2norm_in_kernel=settings.normalize_qk,
        use_gate_in_kernel=settings.gate_in_kernel,
        use_beta_sigmoid_in_kernel=settings.sigmoid_beta,
        allow_neg_eigval=settings.beta_factor == 2.0,
        safe_gate=settings.lower_bound is not None,
        lower_bound=settings.lower_bound,
        cu_seqlens=cu_seqlens,
        return_states=True,
    )
    first_tokens = [
        token
        for segment in context.plan.segments(context.rank)
        for token in range(segment.offset, segment.offset + segment.length, chunk_size)
    ]
    dtype = inputs.state_dtype
    return o.to(v.dtype), final_state.to(dtype), states[:, first_tokens].detach().to(dtype)
