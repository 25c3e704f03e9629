"""Index tables: where the local segments and their chunks lie in the rows of this rank.

A plan (`comm/plan.py`) says in integers which part of which sequence this rank holds. The
stages need the same as index tensors: which tokens a chunk gathers, which chunks follow one
another in a walk over the state, which state row a segment starts from.

Vocabulary: sequence > segment (the part of one sequence that is walked serially) > chunk.
A dense batch of B rows is cut alike in every row, so each segment stands for B *instances*;
instance `row * S + segment`, S segments a row. Chunks are numbered in the order of instances,
which is the order of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from kda_cp.comm.plan import Fragment, Plan

T = TypeVar("T")


@contextmanager
def lasting() -> Iterator[None]:
    """Make tensors that outlive the call they are made in, whatever modes that call is under.

    Made in `torch.inference_mode()` they could take no part in training later; made under a default
    device they would lie there.
    """
    with torch.inference_mode(False), torch.device("cpu"):
        yield


def _cached(compute: Callable[[SegmentTable], T]) -> cached_property[T]:
    return cached_property(lasting()(compute))


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without waiting for it."""
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


class Walk:
    """Segment instances whose chunks are visited one after the other, all instances together.

    Instances are sorted by falling number of chunks, so that those still running at any step
    are a prefix, and every step is one batched product.

    Attributes:
        chosen: [n] int64 on the CPU, the instances in walk order.
        instances: the same on the table's device.
        size: n.
        cuts: how an implementation cut the walk, by whatever that depends on.
    """

    def __init__(self, chosen: Tensor, counts: Tensor, first: Tensor, device: torch.device) -> None:
        order = torch.argsort(counts, descending=True, stable=True)
        self.chosen = chosen[order]
        self.instances = to_device(self.chosen, device)
        self.size = chosen.numel()
        self.cuts: dict[tuple[object, ...], Any] = {}
        self._counts = counts[order]
        self._first = first[order]
        self._device = device

    @cached_property
    @lasting()
    def steps(self) -> tuple[Tensor, ...]:
        """The t-th entry holds the chunk index of chunk t of every instance that has one."""
        counts = self._counts
        longest = int(counts[0]) if counts.numel() else 0
        # counts fall, so how many are longer than t is a search from the back.
        running = torch.searchsorted(counts.flip(0), torch.arange(longest), right=True)
        return tuple(
            to_device(self._first[: counts.numel() - int(done)] + t, self._device)
            for t, done in enumerate(running)
        )


class SegmentTable:
    """The segments of one rank, over `batch` rows, as index tensors on `device`.

    Args:
        plan: who owns what.
        rank: whose part, within the plan.
        batch: rows; more than one only where every row is one sequence.
        tokens: tokens a row of the tensors, at least what the plan gives this rank; the rows past
            the last sequence belong to no chunk.
        chunk_size: tokens a chunk; the last chunk of a segment may hold fewer.
        device: where the index tensors live.
    """

    @lasting()
    def __init__(
        self,
        plan: Plan,
        rank: int,
        *,
        batch: int,
        tokens: int,
        chunk_size: int,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.batch = batch
        self.tokens = tokens
        self.chunk_size = chunk_size
        self.device = device
        segments = plan.segments(rank)
        self.per_row = len(segments)
        self.num_states = (len(plan.cu_seqlens) - 1) * batch

        offset = torch.tensor([s.offset for s in segments], dtype=torch.int64)
        length = torch.tensor([s.length for s in segments], dtype=torch.int64)
        sequence = torch.tensor([s.sequence for s in segments], dtype=torch.int64)
        starts = torch.tensor([s.starts for s in segments], dtype=torch.bool)
        ends = torch.tensor([s.ends for s in segments], dtype=torch.bool)
        rows = torch.arange(batch)[:, None]
        # One instance a (row, segment), rows outermost.
        self.offsets = offset.repeat(batch)
        self.lengths = length.repeat(batch)
        self._state_row = (sequence * batch + rows).flatten()
        self._starts = starts.repeat(batch)
        self._ends = ends.repeat(batch)

        num_chunks = (length + chunk_size - 1) // chunk_size
        self.chunks_per_row = int(num_chunks.sum())
        self.num_chunks = num_chunks.repeat(batch)
        self.first_chunk = self.num_chunks.cumsum(0) - self.num_chunks
        self.chunks = int(self.num_chunks.sum())
        self._segment_of_fragment_entry = {
            s.fragment: i for i, s in enumerate(segments) if not s.starts
        }
        self._segment_of_fragment_exit = {
            s.fragment: i for i, s in enumerate(segments) if not s.ends
        }

    @property
    def instances(self) -> int:
        """Number of segments over all rows."""
        return self.per_row * self.batch

    @_cached
    def state_row(self) -> Tensor:
        """[instances]: the row of `initial_state` and `final_state` of the instance's sequence."""
        return to_device(self._state_row, self.device)

    @_cached
    def _chunk_list(self) -> tuple[Tensor, Tensor, Tensor]:
        # [chunks] each, on the CPU: row of the batch, first token in it, tokens.
        owner = torch.repeat_interleave(self.num_chunks)
        start = (torch.arange(self.chunks) - self.first_chunk[owner]) * self.chunk_size
        length = (self.lengths[owner] - start).clamp(max=self.chunk_size)
        return owner // max(1, self.per_row), self.offsets[owner] + start, length

    @_cached
    def chunk_spans(self) -> Tensor:
        """[chunks, 3] int64: row of the batch, first token in it, tokens."""
        return to_device(torch.stack(self._chunk_list, 1), self.device)

    @_cached
    def token(self) -> Tensor:
        """[chunks, C]: the token each chunk row reads, in the flattened [batch * tokens] order.

        Padding rows read token 0 and are masked with `where`.
        """
        row, start, length = self._chunk_list
        position = torch.arange(self.chunk_size)
        first = row * self.tokens + start
        token = torch.where(position < length[:, None], first[:, None] + position, 0)
        return to_device(token, self.device)

    @_cached
    def valid(self) -> Tensor:
        """[chunks, C]: whether a chunk row is a token."""
        length = self._chunk_list[2]
        return to_device(torch.arange(self.chunk_size) < length[:, None], self.device)

    def _walk(self, chosen: Tensor) -> Walk:
        return Walk(chosen, self.num_chunks[chosen], self.first_chunk[chosen], self.device)

    def _slots(self, fragments: Sequence[Fragment], segment_of: dict[int, int]) -> Tensor:
        # [slots * batch] instances, slots outermost.
        segment = torch.tensor([segment_of[f.index] for f in fragments], dtype=torch.int64)
        return (segment[:, None] + torch.arange(self.batch) * self.per_row).flatten()

    @_cached
    def every(self) -> Walk:
        """All segments."""
        return self._walk(torch.arange(self.instances))

    @_cached
    def fresh(self) -> Walk:
        """Segments whose entry state is known at once: they hold their sequence's first token."""
        return self._walk(torch.nonzero(self._starts).flatten())

    @_cached
    def entered(self) -> Walk:
        """Segments whose entry state comes from another fragment."""
        return self._walk(torch.nonzero(~self._starts).flatten())

    @_cached
    def closed(self) -> Walk:
        """Segments whose exit state no other fragment needs: they hold the last token."""
        return self._walk(torch.nonzero(self._ends).flatten())

    @_cached
    def exiting(self) -> Walk:
        """Segments whose exit state is another fragment's entry state."""
        return self._walk(torch.nonzero(~self._ends).flatten())

    @_cached
    def reset_maps(self) -> Walk:
        """Segments that start their sequence and hand its state on: a map with A = 0."""
        return self._walk(torch.nonzero(self._starts & ~self._ends).flatten())

    @_cached
    def full_maps(self) -> Walk:
        """Segments with tokens of their sequence on both sides: a map with a transition."""
        return self._walk(torch.nonzero(~self._starts & ~self._ends).flatten())

    @_cached
    def entered_slots(self) -> Tensor:
        """[slots * batch] instances of `plan.entered(rank)`, slots outermost."""
        fragments = self.plan.entered(self.rank)
        return to_device(self._slots(fragments, self._segment_of_fragment_entry), self.device)

    @_cached
    def exited_slots(self) -> Tensor:
        """[slots * batch] instances of `plan.exited(rank)`, slots outermost."""
        fragments = self.plan.exited(self.rank)
        return to_device(self._slots(fragments, self._segment_of_fragment_exit), self.device)

    @_cached
    def full_slots(self) -> Tensor:
        """[slots * batch] instances of `plan.full(rank)`, slots outermost."""
        fragments = self.plan.full(self.rank)
        return to_device(self._slots(fragments, self._segment_of_fragment_exit), self.device)

    def _with_state_rows(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        instances = torch.nonzero(chosen).flatten()
        rows = self._state_row[instances]
        return to_device(instances, self.device), to_device(rows, self.device)

    @_cached
    def starting(self) -> tuple[Tensor, Tensor]:
        """(instances, state rows) of the segments that read `initial_state`."""
        return self._with_state_rows(self._starts)

    @_cached
    def ending(self) -> tuple[Tensor, Tensor]:
        """(instances, state rows) of the segments that write `final_state`."""
        return self._with_state_rows(self._ends)

    @_cached
    def passing(self) -> Tensor:
        """State rows of the empty sequences that this rank owns: final state = initial state."""
        cu = self.plan.cu_seqlens
        empty = [
            n
            for n in range(len(cu) - 1)
            if cu[n] == cu[n + 1] and self.plan.final_state_owner(n) == self.rank
        ]
        rows = torch.tensor(empty, dtype=torch.int64)[:, None] * self.batch
        return to_device((rows + torch.arange(self.batch)).flatten(), self.device)
