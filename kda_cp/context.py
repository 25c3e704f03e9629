"""The context-parallel context: one packed batch, a layout over the ranks, and their group."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kda_cp import platform
from kda_cp.comm.agreement import Agreement, agreement_of
from kda_cp.comm.exchange import Exchange
from kda_cp.comm.plan import Plan, make_plan
from kda_cp.comm.selection import EXCHANGES, choose_exchange
from kda_cp.segments import SegmentTable

CHECKS = ("always", "off")


@dataclass(frozen=True, eq=False, repr=False)
class CPContext:
    """How one batch lies over the ranks of a group; made by `build_cp_context`.

    Global tokens are positions in the whole packed stream (or in one dense row); local tokens are
    positions in this rank's shard. For three ranks, `contiguous`, cu_seqlens = [0, 4, 10]:

        global   0 1 2 3 4 5 6 7 8 9
        sequence 0 0 0 0 1 1 1 1 1 1
        rank     0 0 0 0 1 1 1 2 2 2     cu_seqlens on rank 0: [0, 4], on 1 and 2: [0, 3]

    Attributes:
        plan: who owns what, in integers; `print(context.plan)` draws it.
        group: the context-parallel group, None for a single rank.
        rank: this process's rank in the group.
        dense: whether the batch is rows of one length instead of one packed row.
        exchange: how states travel, as asked for: "auto", "all_gather", "ring" or "all_to_all".
        check: whether ranks compare their arguments before every call: "always" or "off".
        ranks_per_node: the most ranks of the group on one machine.
    """

    plan: Plan
    group: dist.ProcessGroup | None
    rank: int
    dense: bool
    exchange: str = "auto"
    check: str = "always"
    ranks_per_node: int = 1
    _agreement: Agreement | None = field(default=None, repr=False)
    _exchanges: dict[str, Exchange] = field(default_factory=dict, init=False, repr=False)
    _tables: dict[tuple[int, int, torch.device], SegmentTable] = field(
        default_factory=dict, init=False, repr=False
    )

    def __repr__(self) -> str:
        return (
            f"CPContext(rank {self.rank} of {self.size}, {self.num_tokens} of "
            f"{self.plan.num_tokens} tokens, {self.num_sequences} sequences, {self.plan.layout})"
        )

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.plan.ranks

    @property
    def num_tokens(self) -> int:
        """Local tokens: the length of this rank's tensors along the token dimension."""
        return self.plan.shard_tokens(self.rank)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Half-open global token ranges of this rank's shard, in the order of its tokens."""
        return self.plan.ranges(self.rank)

    @property
    def cu_seqlens(self) -> Tensor:
        """Boundaries of the local segments in the shard, int64 on the CPU, starting with 0."""
        boundaries = self.plan.local_cu_seqlens(self.rank)
        return torch.tensor(boundaries, dtype=torch.int64, device="cpu")

    @property
    def num_sequences(self) -> int:
        """Global number of sequences (of a dense batch: in each row)."""
        return len(self.plan.cu_seqlens) - 1

    def initial_state_owner(self, sequence: int) -> int:
        """Rank that reads row `sequence` of `initial_state`: it owns the first token."""
        return self.plan.initial_state_owner(sequence)

    def final_state_owner(self, sequence: int) -> int:
        """Rank that writes row `sequence` of `final_state`: it owns the last token."""
        return self.plan.final_state_owner(sequence)

    def algorithm(self, *, heads: int, key_dim: int, value_dim: int, batch: int = 1) -> str:
        """How states [batch, heads, key_dim, value_dim] travel: `exchange`, or what "auto" chooses.

        heads are those of v, and batch is the number of rows.
        """
        if self.exchange != "auto":
            return self.exchange
        return choose_exchange(
            ranks=self.size,
            ranks_per_node=self.ranks_per_node,
            heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            batch=batch,
        )

    def exchange_for(self, **sizes: int) -> Exchange:
        """The exchange of states over the group, for the sizes that `algorithm` takes."""
        name = self.algorithm(**sizes)
        if name not in self._exchanges:
            self._exchanges[name] = EXCHANGES[name](self.plan, self.rank, self.group)
        return self._exchanges[name]

    def agree(
        self,
        describe: Callable[[], Mapping[str, str]],
        error: Exception | None = None,
        wants_gradient: bool = False,
    ) -> bool:
        """Compare a call with the other ranks' before it communicates.

        Collective with `check="always"` and several ranks; otherwise this rank speaks for all.

        Args:
            describe: gives a description of each argument that must be alike on all ranks.
            error: what this rank has to object to its own call.
            wants_gradient: whether this rank's call will be differentiated.

        Returns:
            Whether any rank's call will be differentiated; without a comparison, whether it may.

        Raises:
            ValueError, TypeError, NotImplementedError: ranks disagree or one objects; on all ranks
                the same.
        """
        if self._agreement is None or self.check == "off":
            if error is not None:
                raise error
            return wants_gradient or (self._agreement is not None and torch.is_grad_enabled())
        claim = {} if error is not None else {**describe(), "cp_context": self.claim}
        return self._agreement.check(claim, error, wants_gradient)

    @cached_property
    def claim(self) -> str:
        """What must be alike in the contexts that the ranks of a call were given."""
        plan = self.plan
        digest = _digest((plan.cu_seqlens, plan.fragments, self.dense))
        return (
            f"{plan.num_tokens} tokens, {self.num_sequences} sequences, {plan.layout}, "
            f"exchange {self.exchange} ({digest})"
        )

    def segment_table(self, *, batch: int, chunk_size: int, device: torch.device) -> SegmentTable:
        """Index tables of the local segments; made once for each shape of call."""
        key = (batch, chunk_size, device)
        if key not in self._tables:
            self._tables[key] = SegmentTable(
                self.plan,
                self.rank,
                batch=batch,
                tokens=self.num_tokens,
                chunk_size=chunk_size,
                device=device,
            )
        return self._tables[key]


def build_cp_context(
    cu_seqlens: Tensor | Sequence[int] | int,
    group: dist.ProcessGroup | DeviceMesh | None,
    *,
    layout: str = "contiguous",
    fragments: Sequence[Sequence[tuple[int, int]]] | None = None,
    num_tokens: int | None = None,
    exchange: str = "auto",
    check: str = "always",
    cu_seqlens_cpu: Tensor | None = None,
) -> CPContext:
    """Lay one global batch out over the ranks of a group.

    Build it once for each batch, with the same arguments on every rank.

    Args:
        cu_seqlens: *global* sequence boundaries in the packed stream, int32 or int64 on any
            device (or a list): starts with 0, non-decreasing; empty sequences are legal. Or an
            int: every row of a dense batch is one sequence of that many tokens, cut alike.
        group: the context-parallel process group, or a one-dimensional DeviceMesh such as
            `mesh["cp"]`. None is a single rank, and the ordinary operator to the bit.
        layout: "contiguous", P pieces of the stream, the first longer by a token where P does
            not divide; or "zigzag", 2P such pieces of which rank r holds the r-th and the r-th
            from the end.
        fragments: an explicit table instead of a layout: for each rank a list of half-open
            global (start, stop) in the order of its shard. Together they cover every token once.
        num_tokens: tokens of the whole stream, where it goes on past cu_seqlens[-1] (padding).
        exchange: how states travel between ranks; the results are equal up to rounding.
            "all_gather" is quickest between few, closely connected ranks; "ring" receives and
            keeps least, and takes P - 1 steps; "all_to_all" receives the same for any number of
            ranks, in two steps. "auto" chooses for each call by the number of ranks, how many of
            them share a machine, and the size of a state (`kda_cp.comm.selection`).
        check: "always": before every call the ranks compare their arguments on the host, so that a
            mistake on one rank is the same error on all of them, and a rank whose inputs are all
            frozen takes part in the backward. "off" saves that time and leaves a disagreement to
            the group's timeout, or to wrong results.
        cu_seqlens_cpu: a copy of a cu_seqlens that lies on a GPU; saves a synchronisation.

    Returns:
        A frozen context for `chunk_kda_cp`, `shard` and the rest.

    Raises:
        ValueError: an argument is malformed, ranks were given different arguments, or this
            process is not in the group. Except for the last, the same error on every rank.

    Note:
        Collective over the group: every rank calls it. The result does not depend on the order
        of other calls and is never cached.

    Example:
        >>> context = build_cp_context([0, 4, 10], None)
        >>> context.num_tokens, context.ranges
        (10, ((0, 10),))
    """
    process_group, rank, ranks = _resolve_group(group)
    error = plan = None
    dense = isinstance(cu_seqlens, int)
    try:
        boundaries = read_cu_seqlens(cu_seqlens, cu_seqlens_cpu)
        for name, value, choices in (
            ("exchange", exchange, ("auto", *EXCHANGES)),
            ("check", check, CHECKS),
        ):
            if value not in choices:
                raise ValueError(f"{name}: expected one of {choices}, got {value!r}")
        plan = make_plan(
            boundaries, ranks, layout=layout, fragments=fragments, num_tokens=num_tokens
        )
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    agreement, ranks_per_node = None, 1
    if process_group is not None and ranks > 1:
        agreement = agreement_of(process_group)
        claim = {}
        if plan is not None:
            claim = {
                "call": "build_cp_context",
                "cu_seqlens": f"rows of {boundaries[-1]}" if dense else _brief(plan.cu_seqlens),
                "num_tokens": str(plan.num_tokens),
                "layout": plan.layout,
                "fragments": _brief(tuple((f.rank, f.start, f.stop) for f in plan.fragments)),
                "exchange": exchange,
                "check": check,
            }
        reports = agreement.compare(claim, error, platform.machine)
        ranks_per_node = max(Counter(report.node for report in reports).values())
    elif error is not None:
        raise error
    assert plan is not None
    return CPContext(plan, process_group, rank, dense, exchange, check, ranks_per_node, agreement)


@lru_cache(maxsize=64)
def local_context(cu_seqlens: int | tuple[int, ...], num_tokens: int) -> CPContext:
    """The context of a single rank: a function of its integers, so that calls share its tables."""
    return build_cp_context(
        cu_seqlens, None, num_tokens=None if isinstance(cu_seqlens, int) else num_tokens
    )


def read_cu_seqlens(cu_seqlens: object, cu_seqlens_cpu: Tensor | None = None) -> list[int]:
    """Read sequence boundaries as integers; an int is one sequence of that length.

    A tensor on a GPU is copied to the host, which waits for the device; `cu_seqlens_cpu` avoids
    that. Raises ValueError for any other type or shape.
    """
    if isinstance(cu_seqlens, bool) or cu_seqlens is None:
        raise ValueError(f"cu_seqlens: expected integers, got {cu_seqlens!r}")
    if isinstance(cu_seqlens, int):
        if cu_seqlens < 0:
            raise ValueError(f"cu_seqlens: expected a row length of at least 0, got {cu_seqlens}")
        return [0, cu_seqlens]
    name = "cu_seqlens"
    if cu_seqlens_cpu is not None:
        if not isinstance(cu_seqlens_cpu, Tensor) or cu_seqlens_cpu.device.type != "cpu":
            came = getattr(cu_seqlens_cpu, "device", type(cu_seqlens_cpu).__name__)
            raise ValueError(f"cu_seqlens_cpu: expected a CPU tensor, got {came}")
        if isinstance(cu_seqlens, Tensor) and cu_seqlens.shape != cu_seqlens_cpu.shape:
            raise ValueError(
                f"cu_seqlens_cpu: expected the shape of cu_seqlens, {list(cu_seqlens.shape)}, "
                f"got {list(cu_seqlens_cpu.shape)}"
            )
        if (
            isinstance(cu_seqlens, Tensor)
            and cu_seqlens.device.type == "cpu"  # on a GPU a look would wait for the device
            and not torch.equal(cu_seqlens.long(), cu_seqlens_cpu.long())
        ):
            expected, came = (_brief(x.tolist()) for x in (cu_seqlens, cu_seqlens_cpu))
            raise ValueError(
                f"cu_seqlens_cpu: expected the values of cu_seqlens, {expected}, got {came}"
            )
        name, cu_seqlens = "cu_seqlens_cpu", cu_seqlens_cpu
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
            raise ValueError(
                f"{name}: expected a one-dimensional int32 or int64 tensor, got "
                f"{cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
            )
        return [int(x) for x in cu_seqlens.tolist()]
    if isinstance(cu_seqlens, Sequence) and not isinstance(cu_seqlens, str):
        return list(cu_seqlens)
    came = type(cu_seqlens).__name__
    raise ValueError(f"{name}: expected a tensor or a list of ints, got {came}")


def _resolve_group(
    group: dist.ProcessGroup | DeviceMesh | None,
) -> tuple[dist.ProcessGroup | None, int, int]:
    if group is None:
        return None, 0, 1
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: expected a one-dimensional DeviceMesh such as mesh['cp'], got one of "
                f"{group.ndim} dimensions {group.mesh_dim_names}"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:  # what `new_group` gives the others
            raise ValueError("group: expected a group that this process is in, it is not")
        raise ValueError(
            f"group: expected a ProcessGroup that this process is in, a DeviceMesh or None, "
            f"got {group!r}"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: expected a group that this process is in, it is not")
    return group, rank, dist.get_world_size(group)


def _brief(values: Sequence[object]) -> str:
    """A sequence in words: all of it if it is short, else enough to tell it from others."""
    if len(values) <= 16:
        return str(list(values))
    return f"{values[:3]} ... {values[-1]}, {len(values)} in all ({_digest(values)})"


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]
