"""How each implementation is called: ours, and those of other projects that are installed.

They get the same inputs. What one cannot do inside its operator is done before; its note says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kda_cp import chunk_kda
from kda_cp.gates import fused_kda_gate, l2norm, sigmoid
from kda_cp.launch.bench_cases import Problem

Call = Callable[[], Tensor]
"""One forward; returns o [1, T, HV, V] of the inputs' dtype."""


class Unserved(Exception):
    """A peer cannot do a case, as far as its documentation says."""


@dataclass(frozen=True)
class Peer:
    """One implementation.

    Attributes:
        make: imports it and returns its call on a problem's inputs; the text is `--impl`, for ours.
            Raises what the import or the preparation raises.
        package: what is imported; "not installed" means that this is missing.
        note: what a reader must know to compare it; "" if nothing.
        tunes: whether its first call at a new shape searches for launch configurations.
        needs_gpu: whether it cannot run on a CPU.
    """

    make: Callable[[Problem, str], Call]
    package: str
    note: str = ""
    tunes: bool = False
    needs_gpu: bool = True

    def explain(self, error: Exception) -> str:
        """The first line of why it gave no figure."""
        text = (str(error).strip().splitlines() or [""])[0]
        if isinstance(error, ModuleNotFoundError) and error.name == self.package:
            return f"not installed ({text})"
        if isinstance(error, ImportError):
            return f"cannot be imported: {text}"
        if isinstance(error, Unserved):
            return f"skipped: {text}"
        return f"{type(error).__name__}: {text}"


def _ours(problem: Problem, impl: str) -> Call:
    return lambda: chunk_kda(
        *problem.tensors,
        A_log=problem.A_log,
        dt_bias=problem.dt_bias,
        cu_seqlens=problem.cu_seqlens,
        cu_seqlens_cpu=problem.cu_seqlens_cpu,
        impl=impl,
        **problem.case.options,
    )[0]


def _fla(problem: Problem, impl: str) -> Call:
    from fla.ops.kda import chunk_kda as fla_chunk_kda

    # Its Triton kernels: FLA hands over to FlashKDA only where states are asked for with V first.
    return lambda: fla_chunk_kda(
        *problem.tensors,
        A_log=problem.A_log,
        dt_bias=problem.dt_bias,
        cu_seqlens=problem.cu_seqlens,
        cu_seqlens_cpu=problem.cu_seqlens_cpu,
        **problem.case.options,
    )[0]


def _flash_kda(problem: Problem, impl: str) -> Call:
    import flash_kda

    q, k, v, g, beta = problem.tensors
    if problem.case.gate != "safe":
        raise Unserved("it has the bounded gate alone")
    if q.shape[2] != v.shape[2]:
        raise Unserved("it has as many value heads as heads")
    dt_bias = problem.dt_bias.view(v.shape[2], -1)
    cu_seqlens = None if problem.cu_seqlens is None else problem.cu_seqlens.long()

    def call() -> Tensor:
        o = torch.empty_like(v)  # inside: the others allocate theirs as well
        flash_kda.fwd(
            q,
            k,
            v,
            g,
            beta,
            q.shape[-1] ** -0.5,
            o,
            A_log=problem.A_log,
            dt_bias=dt_bias,
            lower_bound=problem.case.options["lower_bound"],
            cu_seqlens=cu_seqlens,
        )
        return o

    return call


def _attention_gym(problem: Problem, impl: str) -> Call:
    from attn_gym.linear.kda import chunk_kda as gym_chunk_kda

    if problem.case.gate != "safe":
        # Its contract: log decays of about -5.914 at least, and it does not check them.
        raise Unserved("it takes log decays above -5.9 only, and this gate has no bound")
    q, k, v, g, beta = problem.tensors
    lower_bound = problem.case.options["lower_bound"]
    q, k = (l2norm(x).to(x.dtype) for x in (q, k))
    g = fused_kda_gate(g, problem.A_log, problem.dt_bias, lower_bound)
    beta = sigmoid(beta)
    return lambda: gym_chunk_kda(q, k, v, g, beta, cu_seqlens=problem.cu_seqlens)[0]


PEERS = {
    "ours": Peer(_ours, "kda_cp", needs_gpu=False),
    "fla": Peer(_fla, "fla", tunes=True),
    "flashkda": Peer(_flash_kda, "flash_kda"),
    "attn-gym": Peer(
        _attention_gym,
        "attn_gym",
        note="gate, norms and sigmoid made outside, not counted; reads g and beta as fp32",
        tunes=True,
    ),
}
"""By name, in the order in which they run and are shown. "ours" is this project's."""
