"""The small network around the operator, and one forward and backward through both.

Bytes are embedded and projected to q, k, v, the raw gate and the logits of beta; norm, gate and
sigmoid are the operator's, as people train with them. Parameters are float32 (float64 for float64
inputs); what they project is rounded to the dtype that is verified.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kda_cp import CPContext, chunk_kda, reduce_gradients, shard

INPUTS = ("q", "k", "v", "g", "beta")

OPERATOR: dict[str, Any] = {
    "output_final_state": True,
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
}
"""The options of every call here, of the operator as of its judge."""


class Sizes(NamedTuple):
    """H, HV, K and V of the operator."""

    heads: int
    value_heads: int
    key_dim: int
    value_dim: int


class Model(torch.nn.Module):
    """Byte embedding and projections, drawn from a seed, alike on every rank.

    Gates and betas are spread so that some channels forget within a few tokens while others
    remember for thousands: only then does a state that crosses a whole rank matter.
    """

    def __init__(self, sizes: Sizes, dtype: torch.dtype, seed: int, width: int = 64) -> None:
        super().__init__()
        H, HV, K, V = self.sizes = sizes
        generator = torch.Generator().manual_seed(seed)
        wide = torch.promote_types(dtype, torch.float32)

        def normal(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape, generator=generator).to(wide))

        def uniform(low: float, high: float, count: int) -> torch.nn.Parameter:
            drawn = low + (high - low) * torch.rand(count, generator=generator)
            return torch.nn.Parameter(drawn.to(wide))

        self.dtype = dtype
        self.embedding = normal(256, width)
        self.w_q, self.w_k = normal(width, H * K), normal(width, H * K)
        self.w_v, self.w_g = normal(width, HV * V), normal(width, HV * K)
        self.w_beta = normal(width, HV)
        self.b_beta = torch.nn.Parameter(torch.linspace(0, -7, HV, dtype=wide))
        self.A_log = uniform(-0.7, 0.7, HV)
        self.dt_bias = uniform(-10, 0, HV * K)

    def forward(self, text: Tensor) -> dict[str, Tensor]:
        """Project the bytes `text` [T] to q, k [1, T, H, K], v, g [1, T, HV, .], beta."""
        H, HV, K, V = self.sizes
        x = self.embedding[text] * self.embedding.shape[1] ** -0.5
        projected = {
            "q": (x @ self.w_q).view(1, -1, H, K),
            "k": (x @ self.w_k).view(1, -1, H, K),
            "v": (x @ self.w_v).view(1, -1, HV, V),
            "g": (x @ self.w_g).view(1, -1, HV, K),
            "beta": (x @ self.w_beta + self.b_beta).view(1, -1, HV),
        }
        return {name: y.to(self.dtype) for name, y in projected.items()}

    def gradients(self) -> dict[str, Tensor]:
        """A copy of each parameter's gradient, by the names of the tables."""
        found = {}
        for name, parameter in self.named_parameters():
            assert parameter.grad is not None
            found[f"d{name}"] = parameter.grad.clone()
        return found

    def by_head(self, name: str, x: Tensor) -> Tensor:
        """Bring any tensor of a table to [heads, rows, values]; a row is a token or a sequence."""
        H, HV, K, _ = self.sizes
        if name == "final_state":
            return x.transpose(0, 1).flatten(2)
        if name == "ddt_bias":
            return x.view(HV, 1, K)
        if name in ("dembedding", "dA_log", "db_beta"):
            return x.reshape(1, 1, -1)
        if name.startswith("dw_"):
            heads = H if name in ("dw_q", "dw_k") else HV
            return x.view(x.shape[0], heads, -1).transpose(0, 1).flatten(1)[:, None]
        return (x[0] if x.dim() == 4 else x[0, ..., None]).transpose(0, 1)


class Upstream(NamedTuple):
    """The gradients that reach the operator.

    The loss is sum(do * o) + sum(dfinal * final_state).
    """

    do: Tensor
    """[1, T, HV, V]"""
    dfinal: Tensor
    """[N, HV, K, V]"""


class Batch(NamedTuple):
    """One packed row, all of it, alike on every rank."""

    text: Tensor
    """[T] int64, bytes"""
    cu_seqlens: list[int]
    upstream: Upstream


def make_batch(
    text: bytes, cu_seqlens: list[int], sizes: Sizes, device: torch.device, seed: int
) -> Batch:
    """Put the text on the device and draw its upstream gradients from a normal distribution."""
    _, HV, K, V = sizes
    generator = torch.Generator().manual_seed(seed)
    do = torch.randn(1, len(text), HV, V, generator=generator)
    dfinal = torch.randn(len(cu_seqlens) - 1, HV, K, V, generator=generator)
    upstream = Upstream(do.to(device), dfinal.to(device))
    return Batch(torch.tensor(list(text), dtype=torch.int64, device=device), cu_seqlens, upstream)


@dataclass(frozen=True)
class Pass:
    """What one forward and backward gave, and how long they took."""

    tensors: dict[str, Tensor]
    """o, final_state, and the gradients of the operator's inputs and of all parameters"""
    forward_seconds: float
    backward_seconds: float


def run(model: Model, batch: Batch, context: CPContext, impl: str) -> Pass:
    """Run the network and the operator forward and backward on the tokens of this rank.

    Collective over the context's group; with a context of one rank it is the unsharded pass.
    """
    model.zero_grad()
    text = shard(batch.text, context, dim=0)
    do = shard(batch.upstream.do, context).to(model.dtype)
    if context.group is not None:
        dist.barrier(context.group)
    started = _now(text.device)
    inputs: dict[str, Any] = model(text)
    for x in inputs.values():
        x.retain_grad()
    o, final_state = chunk_kda(
        **inputs,
        A_log=model.A_log,
        dt_bias=model.dt_bias,
        cp_context=context,
        impl=impl,
        **OPERATOR,
    )
    halfway = _now(text.device)
    dfinal = batch.upstream.dfinal.to(final_state.dtype)
    torch.autograd.backward((o, final_state), (do, dfinal))
    reduce_gradients(model.parameters(), context)
    ended = _now(text.device)
    tensors = {"o": o.detach(), "final_state": final_state.detach()}
    tensors |= {f"d{name}": x.grad for name, x in inputs.items() if x.grad is not None}
    return Pass(tensors | model.gradients(), halfway - started, ended - halfway)


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
