"""The work that is timed: named cases and sweeps, their inputs, and the bytes they must move."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kda_cp.launch.judge import DTYPES
from kda_cp.launch.model import OPERATOR

SEED = 0
"""Of the inputs and of where documents are cut."""

GATES: dict[str, dict[str, Any]] = {
    "safe": {},  # as in OPERATOR: lower_bound * sigmoid(..), bounded by -5
    "softplus": {"safe_gate": False, "lower_bound": None},  # no bound
}
"""The gates, by what each changes in the options of a call."""

SHORT = 1024
"""Tokens at which errors are measured: the recurrence in float64 goes token by token."""


@dataclass(frozen=True)
class Case:
    """One forward: B = 1, raw gate, norm of q and k and sigmoid of beta inside the operator."""

    name: str = "own"
    tokens: int = 16384
    heads: int = 32
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bf16"
    documents: int = 1
    gate: str = "safe"

    def __str__(self) -> str:
        documents = "1 document" if self.documents == 1 else f"{self.documents:,} documents"
        return (
            f"{self.name}: T {self.tokens:,}, H {self.heads}, HV {self.value_heads}, "
            f"K {self.key_dim}, V {self.value_dim}, {self.dtype}, {documents}, {self.gate} gate"
        )

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of the call, the same for kda_cp, FLA and the reference. o alone is wanted."""
        return {**OPERATOR, "output_final_state": False, **GATES[self.gate]}

    @property
    def boundaries(self) -> list[int]:
        """Where the documents begin and end: mixed lengths, cut at random, always alike."""
        cuts = random.Random(SEED).sample(range(1, self.tokens), self.documents - 1)
        return [0, *sorted(cuts), self.tokens]

    @property
    def floor_bytes(self) -> int:
        """Bytes that any forward must move: q, k, v, g and beta read once, o written once."""
        a_head = 2 * self.key_dim * self.heads  # q, k
        a_value_head = (2 * self.value_dim + self.key_dim + 1) * self.value_heads  # v, o, g, beta
        return self.tokens * (a_head + a_value_head) * DTYPES[self.dtype].itemsize

    def shortened(self) -> Case:
        """The same settings on at most `SHORT` tokens."""
        tokens = min(self.tokens, SHORT)
        return replace(self, tokens=tokens, documents=min(self.documents, tokens))


NAMED = {
    case.name: case
    for case in (
        Case("t16384-h32"),
        Case("t8192-h64", tokens=8192, heads=64, value_heads=64),
        Case("t32768-h8", tokens=32768, heads=8, value_heads=8),
        Case("documents", documents=16),
        Case("softplus", gate="softplus"),
    )
}

SWEEPS: dict[str, tuple[int, ...]] = {
    "tokens": (1024, 2048, 4096, 8192, 16384, 32768, 65536),
    "heads": (2, 4, 8, 16, 32, 64),
    "documents": (1, 4, 16, 64, 256, 1024),
}
"""What a sweep takes, one after the other, in place of the case's own."""


@dataclass(frozen=True)
class Problem:
    """The inputs of a case on a device, drawn and never zero, heads and channels all different.

    Attributes:
        case: whose inputs they are.
        tensors: q [1, T, H, K], k [1, T, H, K], v [1, T, HV, V], g [1, T, HV, K] (raw gate) and
            beta [1, T, HV] (logits), of the case's dtype.
        A_log: [HV] float32, log of rates from 1 to 8 (natural).
        dt_bias: [HV * K] float32, around -4: most channels remember for many tokens.
        cu_seqlens: [N + 1] int32 on the device; None for one document. (FLA tunes for int32 and
            int64 apart, and its context parallelism, which is tuned more often, has int32.)
        cu_seqlens_cpu: the same on the host, so that no call has to wait for the device.
    """

    case: Case
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    A_log: Tensor
    dt_bias: Tensor
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None


def draw(case: Case, device: torch.device) -> Problem:
    """Draw the inputs of a case on the device itself."""
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(*shape: int, dtype: torch.dtype = DTYPES[case.dtype]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    T, H, HV, K, V = case.tokens, case.heads, case.value_heads, case.key_dim, case.value_dim
    tensors = (
        normal(1, T, H, K),
        normal(1, T, H, K),
        normal(1, T, HV, V),
        normal(1, T, HV, K),
        normal(1, T, HV),
    )
    bounds = torch.tensor(case.boundaries, dtype=torch.int32) if case.documents > 1 else None
    return Problem(
        case=case,
        tensors=tensors,
        A_log=torch.linspace(1, 8, HV, device=device).log(),
        dt_bias=normal(HV * K, dtype=torch.float32) * 0.1 - 4,
        cu_seqlens=None if bounds is None else bounds.to(device),
        cu_seqlens_cpu=bounds,
    )
