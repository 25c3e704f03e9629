"""The public operator: `chunk_kda`, `chunk_kda_cp` and `fused_recurrent_kda`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kda_cp import eager
from kda_cp.autograd import ChunkKDA, recordable
from kda_cp.context import CPContext
from kda_cp.pipeline import Call
from kda_cp.recurrent import recurrent_kda
from kda_cp.resolve import choose_impl, choose_recurrent_impl, context_for, run_oracle
from kda_cp.segments import SegmentTable
from kda_cp.stages import Inputs
from kda_cp.validation import check_flags, check_initial_state, describe_call, make_settings


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: CPContext | None = None,
    chunk_size: int = 64,
    precision: str | None = None,
    impl: str = "auto",
) -> tuple[Any, ...]:
    """Apply Kimi Delta Attention to whole sequences, differentiable, over one rank or many.

    Per value head hv, with q and k of head hv // (HV // H) and S_0 the initial state or zero::

        S_t = diag(exp(g_t)) S_{t-1}
        S_t = S_t + beta_t k_t (v_t - k_t^T S_t)
        o_t = scale * q_t^T S_t

    Gate modes. *Pre-gated* (default): g is the log decay; A_log and dt_bias must be None.
    *Softplus* (`use_gate_in_kernel`): the log decay is -exp(A_log) softplus(g + dt_bias).
    *Bounded* (`use_gate_in_kernel` and `safe_gate`): it is
    lower_bound * sigmoid(exp(A_log) (g + dt_bias)), A_log optional. dt_bias is always optional.

    Args:
        q: [B, T, H, K], queries; bfloat16, float16, float32 or float64.
        k: [B, T, H, K], keys, of q's dtype.
        v: [B, T, HV, V], values, of q's dtype; HV is a multiple of H.
        g: [B, T, HV, K], log decay (natural log, <= 0) or raw gate; q's dtype or float32.
        beta: [B, T, HV], write strength, or its logits with `use_beta_sigmoid_in_kernel`; q's
            dtype or float32. Not clamped.
        scale: factor of o; None is K ** -0.5.
        initial_state: [N, HV, K, V] ([N, HV, V, K] with `state_v_first`), the state before each
            sequence; None is zero. float32, or float64 when q is.
        output_final_state: whether to return the state after each sequence.
        A_log: [HV], log of the gate's rate; q's dtype or float32.
        dt_bias: [HV * K], added to the raw gate; q's dtype or float32.
        use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6) over K.
        use_gate_in_kernel: g is raw and the gate is applied here.
        use_beta_sigmoid_in_kernel: replace beta by sigmoid(beta).
        allow_neg_eigval: double beta after its sigmoid, which it needs.
        safe_gate: the bounded gate instead of the softplus gate.
        lower_bound: bound of the bounded gate, -5 <= lower_bound < 0, natural log. For a
            pre-gated g it changes nothing and promises g >= lower_bound, which is checked under
            `torch.autograd.set_detect_anomaly(True)`, as is g <= 0.
        disable_recompute: keep the forward's intermediates for the backward: faster, and memory
            that grows by about (3 K + V + C) values a token and head. No effect with "triton",
            whose backward computes its own.
        return_intermediate_states: also return the entry state of every local chunk.
        state_v_first: states are given and returned as [.., V, K].
        cu_seqlens: [N + 1], boundaries of N sequences packed in one row (B = 1), int32 or int64
            on any device; starts with 0, non-decreasing, may end before T. None: each of the B
            rows is one sequence. Not beside a context.
        cu_seqlens_cpu: a copy of a cu_seqlens that lies on a GPU; saves a synchronisation.
        cp_context: the layout of the batch over ranks (`build_cp_context`); q, k, v, g, beta are
            this rank's shard, states are global.
        chunk_size: tokens a chunk, 16, 32 or 64.
        precision: products of float32 inputs, "ieee" or None (the same): exact to float32, on the
            Triton kernels as three tf32 products. "tf32" rounds their operands to tf32, on the
            Triton kernels alone; refused elsewhere.
        impl: "torch" (chunks on batched products in float32, any device), "triton" (kernels for
            the forward, NVIDIA GPUs from Ampere on, K up to 256, not float64; the backward is
            "torch"'s; bf16 inputs are multiplied in bf16), "reference" (token by token in
            float64, one rank), or "auto": "triton" where it serves on a GPU, else "torch".

    Returns:
        (o, final_state), or (o, final_state, h) with `return_intermediate_states`.
        o: [B, T, HV, V] in v's dtype, 0 for rows past the last sequence.
        final_state: like initial_state, None unless asked for; an empty sequence's is its initial
            state. Under a context zero in every row whose sequence ends on another rank, so that
            a SUM over the group replicates it.
        h: [B, NT, HV, K, V] ([.., V, K] with `state_v_first`) like a state, the entry state of
            each chunk, chunks counted from each local segment's first token; not differentiated.

    Raises:
        ValueError: an argument breaks this contract; the text names it.
        NotImplementedError: `impl` or `precision` asks for what no implementation here serves.

    Note:
        With a context of several ranks, forward and backward are collective over its group: every
        rank calls, with the same options, under the same grad mode, and runs a backward through
        its o (times 0 where it has no loss), even if it froze all its inputs. Unless the context
        was built with `check="off"`, ranks that differ all raise the same error, which names one.
        Deterministic. Row n of initial_state is read, and gets its gradient, on the rank that owns
        sequence n's first token.

    Source: Kimi Linear (arXiv 2510.26692); the sharded form is derived in docs/algorithm.md.

    Example:
        >>> import torch
        >>> q, k, v, g = (torch.randn(1, 100, 2, 16) for _ in range(4))
        >>> beta = torch.rand(1, 100, 2)
        >>> o, state = chunk_kda(
        ...     q, k, v, -g.exp(), beta, use_qk_l2norm_in_kernel=True, output_final_state=True,
        ...     cu_seqlens=torch.tensor([0, 37, 100]),
        ... )
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 16]), torch.Size([2, 2, 16, 16]))
    """
    inputs = Inputs(q, k, v, g, beta, A_log, dt_bias)
    error = None
    try:
        settings = make_settings(
            inputs,
            scale,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            safe_gate=safe_gate,
            lower_bound=lower_bound,
            chunk_size=chunk_size,
            precision=precision,
        )
        check_flags(
            output_final_state=output_final_state,
            disable_recompute=disable_recompute,
            return_intermediate_states=return_intermediate_states,
            state_v_first=state_v_first,
        )
        impl = choose_impl(impl, precision, inputs)
        context = context_for(q, cu_seqlens, cu_seqlens_cpu, cp_context)
        if impl == "reference" and context.size > 1:
            raise ValueError(
                f"impl: expected 'torch' or 'auto' for a context of {context.size} ranks, "
                "got 'reference', which serves one"
            )
        sequences = context.num_sequences * (q.shape[0] if context.dense else 1)
        check_initial_state(initial_state, inputs, sequences, state_v_first)
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    recorded = torch.is_grad_enabled() and any(
        getattr(x, "requires_grad", False) for x in (*inputs, initial_state)
    )
    training = recorded
    if isinstance(cp_context, CPContext):
        training = cp_context.agree(
            lambda: describe_call(
                inputs,
                settings,
                impl=impl,
                output_final_state=output_final_state,
                disable_recompute=disable_recompute,
                return_intermediate_states=return_intermediate_states,
                state_v_first=state_v_first,
            ),
            error,
            recorded,
        )
    elif error is not None:
        raise error
    if training:
        inputs = Inputs(*(recordable(x) for x in inputs))
        initial_state = recordable(initial_state)
        if not recorded:
            # Another rank goes backward, which all do together: this one's o must lead there too.
            inputs = inputs._replace(q=inputs.q.detach().requires_grad_())

    state = initial_state.mT if state_v_first and initial_state is not None else initial_state
    final_state: Tensor | None
    h: Tensor | None
    if impl == "reference":
        o, final_state, h = run_oracle(inputs, settings, state, context, chunk_size)
    else:
        call = Call(
            settings=settings,
            table=context.segment_table(batch=q.shape[0], chunk_size=chunk_size, device=q.device),
            exchange=context.exchange_for(
                heads=v.shape[2], key_dim=k.shape[3], value_dim=v.shape[3], batch=q.shape[0]
            ),
            # Imported late: Triton is not everywhere that PyTorch is.
            stages=importlib.import_module("kda_cp.compiled") if impl == "triton" else eager,
            stages_back=eager,
            output_final_state=output_final_state,
            output_intermediate_states=return_intermediate_states,
            training=training,
            keep_terms=disable_recompute and impl != "triton",
        )
        o, final_state, h = ChunkKDA.apply(call, state, *inputs)
    if state_v_first:
        final_state, h = (None if x is None else x.mT.contiguous() for x in (final_state, h))
    final_state = final_state if output_final_state else None
    return (o, final_state, h) if return_intermediate_states else (o, final_state)


def chunk_kda_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cp_context: CPContext,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """Apply `chunk_kda` to this rank's shard of one long, packed batch: a required context.

    Args:
        q: [B, T, H, K], queries of this rank's tokens, T = `cp_context.num_tokens`.
        k: [B, T, H, K], keys.
        v: [B, T, HV, V], values.
        g: [B, T, HV, K], log decay (natural log) or raw gate.
        beta: [B, T, HV], write strength or its logits.
        cp_context: from `build_cp_context`.
        scale: factor of o; None is K ** -0.5.
        initial_state: [N, HV, K, V], N the *global* number of sequences; None is zero.
        output_final_state: whether to return the state after each sequence.
        **options: the keyword arguments of `chunk_kda`, but for cu_seqlens.

    Returns:
        As `chunk_kda`: o of this rank's tokens; final_state [N, HV, K, V], zero in the rows that
        another rank owns.

    Raises:
        ValueError: as `chunk_kda`, and for a missing context.
        TypeError: an unknown keyword.

    Note:
        Collective over the context's group, forward and backward. Input gradients equal the
        unsharded ones for a loss that is the sum over ranks; those of A_log and dt_bias are
        partial sums (`reduce_gradients`).

    Source: Kimi Linear (arXiv 2510.26692); docs/algorithm.md.

    Example:
        >>> import torch
        >>> from kda_cp import build_cp_context, shard
        >>> context = build_cp_context(torch.tensor([0, 37, 100]), None)  # or a process group
        >>> q, k, v, g = (shard(torch.randn(1, 100, 2, 16), context) for _ in range(4))
        >>> beta = shard(torch.rand(1, 100, 2), context)
        >>> o, _ = chunk_kda_cp(q, k, v, -g.exp(), beta, context, use_qk_l2norm_in_kernel=True)
        >>> o.shape
        torch.Size([1, 100, 2, 16])
    """
    if not isinstance(cp_context, CPContext):
        raise ValueError(
            f"cp_context: expected a context from build_cp_context, got {type(cp_context).__name__}"
        )
    for name in options.keys() - _KEYWORDS:
        error = TypeError(f"chunk_kda_cp: expected a keyword of chunk_kda, got {name!r}")
        cp_context.agree(dict, error)  # raises: the other ranks must hear of it
    return chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        cp_context=cp_context,
        **options,
    )


_KEYWORDS = frozenset(inspect.signature(chunk_kda).parameters)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    inplace_state: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Apply Kimi Delta Attention token by token: decoding of one token or a few, differentiable.

    The recurrence, shapes, gate modes and errors are those of `chunk_kda`.

    Args:
        q: [B, T, H, K], queries.
        k: [B, T, H, K], keys.
        v: [B, T, HV, V], values.
        g: [B, T, HV, K], log decay (natural log) or raw gate.
        beta: [B, T, HV], write strength or its logits.
        scale: factor of o; None is K ** -0.5.
        initial_state: [N, HV, K, V] ([N, HV, V, K] with `state_v_first`); None is zero.
        output_final_state: whether to return the state after each sequence.
        A_log: [HV], log of the gate's rate.
        dt_bias: [HV * K], added to the raw gate.
        use_qk_l2norm_in_kernel: normalise q and k over K.
        use_gate_in_kernel: g is raw and the gate is applied here.
        use_beta_sigmoid_in_kernel: replace beta by sigmoid(beta).
        allow_neg_eigval: double beta after its sigmoid, which it needs.
        safe_gate: the bounded gate instead of the softplus gate.
        lower_bound: bound of the bounded gate, natural log.
        state_v_first: states are given and returned as [.., V, K].
        cu_seqlens: [N + 1], boundaries of N sequences packed in one row; None: N = B rows.
        inplace_state: write the final states into `initial_state`, which is then what is returned;
            for decoding without gradients.
        impl: "torch", "reference", "triton" (not available yet: raises) or "auto", which is
            "torch".

    Returns:
        o [B, T, HV, V] in v's dtype; final_state like initial_state, None unless asked for.

    Raises:
        ValueError: as `chunk_kda`; `inplace_state` without an initial state or where a gradient
            is being recorded.
        NotImplementedError: `impl` asks for what no implementation here serves.

    Note:
        No communication. The states may come from `chunk_kda`'s final_state.

    Source: Kimi Linear (arXiv 2510.26692).

    Example:
        >>> import torch
        >>> q, k, v, g = (torch.randn(4, 1, 2, 16) for _ in range(4))
        >>> beta = torch.rand(4, 1, 2)
        >>> o, state = fused_recurrent_kda(q, k, v, -g.exp(), beta, output_final_state=True)
        >>> state.shape
        torch.Size([4, 2, 16, 16])
    """
    inputs = Inputs(q, k, v, g, beta, A_log, dt_bias)
    settings = make_settings(
        inputs,
        scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
    )
    check_flags(
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        inplace_state=inplace_state,
    )
    impl = choose_recurrent_impl(impl)
    context = context_for(q, cu_seqlens, None, None)
    sequences = context.num_sequences * (q.shape[0] if context.dense else 1)
    check_initial_state(initial_state, inputs, sequences, state_v_first)
    if inplace_state:
        if initial_state is None:
            raise ValueError("inplace_state: expected an initial_state to write to, got None")
        recorded = any(x is not None and x.requires_grad for x in (*inputs, initial_state))
        if torch.is_grad_enabled() and recorded:
            raise ValueError(
                "inplace_state: expected no gradient to be recorded, got an input that requires one"
            )
    state = initial_state.mT if state_v_first and initial_state is not None else initial_state
    if impl == "reference":
        o, final_state, _ = run_oracle(inputs, settings, state, context, chunk_size=1)
    else:
        table = SegmentTable(
            context.plan,
            context.rank,
            batch=q.shape[0],
            tokens=q.shape[1],
            chunk_size=1,
            device=q.device,
        )
        o, final_state = recurrent_kda(inputs, table, settings, state)
    if state_v_first:
        final_state = final_state.mT.contiguous()
    if inplace_state:
        assert initial_state is not None
        final_state = initial_state.copy_(final_state)
    return o, final_state if output_final_state else None
