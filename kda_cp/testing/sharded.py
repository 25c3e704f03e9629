"""Run the operator sharded over a pool's ranks and hold it to the unsharded oracle.

Every rank draws the same global inputs from a seed, takes its shard, and sends its results back;
the judging is done once, in the test's own process, for each rank, sequence and head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kda_cp import CPContext, build_cp_context, chunk_kda_cp, shard
from kda_cp.comm.plan import Plan, make_plan
from kda_cp.testing.collectives import CollectiveCall, count_collectives
from kda_cp.testing.compare import (
    ONLY_OF_THE_OPERATOR,
    assert_similar,
    bounds,
    draw_inputs,
    draw_upstream,
    run,
    run_reference,
)
from kda_cp.testing.ranks import RankPool

__all__ = ["PARAMETERS", "RankResult", "ShardedCall", "assert_equals_oracle"]

TOKENS = ("q", "k", "v", "g", "beta")
PARAMETERS = ("A_log", "dt_bias")
TRAINING_OPTIONS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
}
"""What people train with: gate, norm and sigmoid in the kernel, the bounded gate."""


@dataclass(frozen=True)
class RankResult:
    """What one rank's call gave: results by name as in `compare`, and its collectives."""

    results: dict[str, Tensor]
    forward: list[CollectiveCall]
    backward: list[CollectiveCall]


@dataclass(frozen=True)
class ShardedCall:
    """One call of the sharded operator, from the seed to the options.

    Attributes:
        cu_seqlens: global boundaries, or an int: dense rows of that length.
        layout: keywords of `build_cp_context`.
        draw: keywords of `draw_inputs`; T and initial_states follow from cu_seqlens.
        options: keywords of `chunk_kda_cp`.
        states: whether an initial state is given and a gradient of the final state comes back.
        loss_ranks: ranks whose o has a loss; None is all. The others' upstream gradient is 0.
        device: where every rank computes; results come back on the CPU.
        exchange: how states travel.
        frozen: by rank, the inputs that require no gradient there.
    """

    cu_seqlens: Sequence[int] | int
    layout: Mapping[str, Any] = field(default_factory=dict)
    draw: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    states: bool = True
    loss_ranks: Sequence[int] | None = None
    device: str = "cpu"
    exchange: str = "auto"
    frozen: Mapping[int, Sequence[str]] = field(default_factory=dict)

    @property
    def boundaries(self) -> Sequence[int]:
        """Boundaries of the sequences in one row."""
        return [0, self.cu_seqlens] if isinstance(self.cu_seqlens, int) else self.cu_seqlens

    @property
    def num_tokens(self) -> int:
        """Global tokens a row."""
        return self.layout.get("num_tokens") or self.boundaries[-1]

    def plan(self, ranks: int) -> Plan:
        """The plan that every rank makes."""
        return make_plan(self.boundaries, ranks, **self.layout)

    def draw_global(self, ranks: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The global inputs and upstream gradients."""
        rows = self.draw.get("B", 1)
        sequences = rows if isinstance(self.cu_seqlens, int) else len(self.cu_seqlens) - 1
        states = sequences if self.states else 0
        inputs = draw_inputs(self.num_tokens, initial_states=states, **self.draw)
        upstream = draw_upstream(inputs)
        if self.loss_ranks is not None:
            plan = self.plan(ranks)
            kept = torch.zeros_like(upstream["o"])
            for rank in self.loss_ranks:
                for start, stop in plan.ranges(rank):
                    kept[:, start:stop] = upstream["o"][:, start:stop]
            upstream["o"] = kept
        return inputs, upstream

    def __call__(self, group: dist.ProcessGroup | None) -> RankResult:
        """Run on one rank; collective over the group."""
        context = build_cp_context(self.cu_seqlens, group, exchange=self.exchange, **self.layout)
        inputs, upstream = self.draw_global(context.size)
        return self.run_on(context, inputs, upstream)

    def run_on(
        self, context: CPContext, inputs: Mapping[str, Tensor], upstream: Mapping[str, Tensor]
    ) -> RankResult:
        """Run on given global inputs."""
        local = {n: shard(x, context) if n in TOKENS else x for n, x in inputs.items()}
        local = {n: x.to(self.device) for n, x in local.items()}
        dlocal = {n: shard(x, context) if n == "o" else x for n, x in upstream.items()}
        dlocal = {n: x.to(self.device) for n, x in dlocal.items()}
        forward: list[CollectiveCall] = []

        def operator(**arguments: Any) -> Any:
            with count_collectives() as counts:
                outputs = chunk_kda_cp(**arguments, cp_context=context)
            forward.extend(counts.calls)
            return outputs

        wanted = [name for name in local if name not in self.frozen.get(context.rank, ())]
        with count_collectives() as counts:
            results = run(operator, local, dlocal, wanted=wanted, **self.options)
        results = {n: x.cpu() for n, x in results.items()}
        # The outer block counts the backward alone: the inner one's wrappers were innermost.
        backward = counts.calls[len(forward) :]
        return RankResult(results, forward, backward)

    def run_oracle(self, ranks: int) -> dict[str, Tensor]:
        """The unsharded token recurrence in float64."""
        inputs, upstream = self.draw_global(ranks)
        packed = None if isinstance(self.cu_seqlens, int) else self.cu_seqlens
        shared = {k: x for k, x in self.options.items() if k not in ONLY_OF_THE_OPERATOR}
        return run_reference(inputs, upstream, cu_seqlens=packed, **shared)


def assert_equals_oracle(pool: RankPool, call: ShardedCall, ranks: int) -> list[RankResult]:
    """Run the call on `ranks` ranks and hold every result on every rank to the oracle."""
    answers: list[RankResult] = pool.run(call, ranks=ranks)
    want = call.run_oracle(ranks)
    inputs, _ = call.draw_global(ranks)
    plan = call.plan(ranks)
    bound = bounds(inputs["q"].dtype)
    gate: dict[str, Any] = {
        key: call.options[key]
        for key in ("use_gate_in_kernel", "lower_bound")
        if key in call.options
    }

    everywhere = set.intersection(*(set(answer.results) for answer in answers))
    whole = {name: torch.zeros_like(want[name], dtype=torch.float64) for name in everywhere}
    for rank, answer in enumerate(answers):
        local_want = {}
        local_inputs = {n: _local(x, plan, rank) if n in TOKENS else x for n, x in inputs.items()}
        for name, x in answer.results.items():
            if name == "o" or name[1:] in TOKENS:
                local_want[name] = _local(want[name], plan, rank)
            if name not in whole:
                continue
            if name in local_want:
                offset = 0
                for start, stop in plan.ranges(rank):
                    whole[name][:, start:stop] = x[:, offset : offset + stop - start]
                    offset += stop - start
            else:
                whole[name] += x
        local_got = {name: answer.results[name] for name in local_want}
        # The measure of dg reads these as well; where they are frozen, the oracle's.
        for name in {"dq", "dk"} - local_got.keys():
            local_got[name] = local_want[name] = _local(want[name], plan, rank)
        edges = {edge for s in plan.segments(rank) for edge in (s.offset, s.offset + s.length)}
        cu_seqlens = None if isinstance(call.cu_seqlens, int) else sorted({0, *edges})
        try:
            assert_similar(
                local_got, local_want, bound, inputs=local_inputs, cu_seqlens=cu_seqlens, **gate
            )
        except AssertionError as fault:
            raise AssertionError(f"rank {rank}: {fault}") from None
        _assert_rows_of_others_are_zero(call, plan, rank, answer.results)
    packed = None if isinstance(call.cu_seqlens, int) else call.cu_seqlens
    whole |= {name: want[name] for name in ("dq", "dk", "dg") if name not in whole}
    want = {name: want[name] for name in whole}
    assert_similar(whole, want, bound, inputs=inputs, cu_seqlens=packed, **gate)
    return answers


def _local(x: Tensor, plan: Plan, rank: int) -> Tensor:
    return torch.cat([x[:, :0], *(x[:, start:stop] for start, stop in plan.ranges(rank))], 1)


def _assert_rows_of_others_are_zero(
    call: ShardedCall, plan: Plan, rank: int, results: Mapping[str, Tensor]
) -> None:
    owners = {
        "final_state": plan.final_state_owner,
        "dinitial_state": plan.initial_state_owner,
    }
    for name, owner in owners.items():
        for row, state in enumerate(results.get(name, ())):
            sequence = 0 if isinstance(call.cu_seqlens, int) else row
            if owner(sequence) != rank:
                assert not state.any(), f"{name}[{row}] is not 0 on rank {rank}"
