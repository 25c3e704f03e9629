"""Communication: the only place in the package that moves tensors or messages between ranks.

Tensors travel over the group that the user gave. Each `start_*` returns a `Work` at once; its
`wait()` gives what was received. All of them are collective over `group`: every rank calls, in the
same order, with shapes that the plan gave to all of them alike. The one exception is `start_hop`:
point to point, so only the ranks named in it take part.

Host-side messages, a few bytes that no device waits for, travel over a `SideGroup` of the same
ranks.

A rank that died, raised alone or stalled shows here, as a RuntimeError that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Work(Generic[T]):
    """Started communication: the buffers it reads and writes, kept alive until it is waited for."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        handles: Sequence[dist.Work | None],
        received: Callable[[], T],
        sent: Sequence[Tensor],
    ) -> None:
        self._place = _place(group)
        self._handles = handles
        self._received = received
        self._sent = sent

    def wait(self) -> T:
        """Wait until what was received may be read (on CUDA, by the current stream)."""
        with _explained(self._place):
            for handle in self._handles:
                if handle is not None:
                    handle.wait()
        return self._received()


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> Work[Tensor]:
    """Start gathering `x`, of one shape on every rank, into [P, *x.shape]."""
    received = x.new_empty((dist.get_world_size(group), *x.shape))
    x = x.contiguous()
    # torch 2.13 gave the collective this name and deprecated the older one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with _explained(_place(group)):
        handle = gather(received.flatten(0, 1), x, group=group, async_op=True)
    return Work(group, [handle], lambda: received, [x])


def start_all_to_all(
    x: Tensor, sends: Sequence[int], receives: Sequence[int], group: dist.ProcessGroup
) -> Work[Tensor]:
    """Start sending `sends[r]` rows of x [sum(sends), ...] to rank r, receiving `receives[r]`."""
    received = x.new_empty((sum(receives), *x.shape[1:]))
    x = x.contiguous()
    with _explained(_place(group)):
        handle = dist.all_to_all_single(
            received, x, list(receives), list(sends), group=group, async_op=True
        )
    return Work(group, [handle], lambda: received, [x])


def start_hop(
    sends: Sequence[tuple[Tensor, int]],
    sources: Sequence[int],
    slots: Tensor,
    group: dist.ProcessGroup,
) -> Work[list[Tensor]]:
    """Start sending tensors to ranks and receiving one from each source: rows of `slots` in shape.

    Ranks are those of the group. Several messages between two ranks arrive in the order in which
    both name them. Nothing to send or receive: no communication.
    """
    # gloo moves point-to-point messages in host memory only.
    staged = slots.device.type != "cpu" and dist.get_backend(group) == "gloo"
    device = torch.device("cpu") if staged else slots.device
    sent = [x.to(device).contiguous() for x, _ in sends]
    received = [slots.new_empty(slots.shape[1:], device=device) for _ in sources]

    def peer(rank: int) -> int:
        return dist.get_global_rank(group, rank)

    messages = [
        dist.P2POp(dist.isend, x, peer(target), group)
        for x, (_, target) in zip(sent, sends, strict=True)
    ] + [
        dist.P2POp(dist.irecv, x, peer(source), group)
        for x, source in zip(received, sources, strict=True)
    ]
    with _explained(_place(group)):
        handles = dist.batch_isend_irecv(messages) if messages else []
    return Work(group, handles, lambda: [x.to(slots.device) for x in received], sent)


def all_reduce_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum `x` over the ranks, in place."""
    with _explained(_place(group)):
        dist.all_reduce(x, op=dist.ReduceOp.SUM, group=group)
    return x


def connect(group: dist.ProcessGroup) -> None:
    """Make the connections that point-to-point messages need; collective, once for each group.

    NCCL makes them in the first operation of a group, in which then every rank must take part; the
    ranks of a hop alone could wait for the others for ever.
    """
    if "nccl" in dist.get_backend(group):
        all_reduce_sum(torch.zeros(1, device=torch.device("cuda")), group)


class SideGroup:
    """A gloo group of the same ranks, for small messages between hosts.

    Made over the group's own store, so that only its members take part, and with its timeout.
    Collective.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = _place(group)
        # Not the group: what a group's agreement holds on to must not keep the group alive.
        with _explained(_place(group)):
            self._channel = open_side_channel(group)

    def maximum(self, x: Tensor) -> Tensor:
        """Take the elementwise maximum of x [n] over the ranks, in ceil(log2 P) rounds.

        A maximum may count a rank twice, so after round k each rank has it over the 2^(k + 1) ranks
        up to itself. A reduction of gloo takes P - 1 steps twice.
        """
        x, other = x.clone(), torch.empty_like(x)
        reach = 1
        with _explained((self.rank, self.size)):
            while reach < self.size:
                sent = self._channel.send([x.clone()], (self.rank + reach) % self.size, reach)
                self._channel.recv([other], (self.rank - reach) % self.size, reach).wait()
                sent.wait()
                torch.maximum(x, other, out=x)
                reach *= 2
        return x

    def gather(self, text: str) -> list[str]:
        """Gather one text from every rank, in rank order."""
        data = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)
        own = torch.tensor([len(text.encode())], device="cpu")
        lengths = [int(n) for n in self._all_gather(own)]
        padded = torch.zeros(max([*lengths, 1]), dtype=torch.uint8, device="cpu")
        padded[: len(data)] = data
        texts = self._all_gather(padded)
        return [
            bytes(x[:length].tolist()).decode() for x, length in zip(texts, lengths, strict=True)
        ]

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(x) for _ in range(self.size)]
        with _explained((self.rank, self.size)):
            self._channel.allgather([gathered], [x]).wait()
        return gathered


def open_side_channel(group: dist.ProcessGroup) -> Any:
    """Open a gloo group over the ranks of `group`, which torch's list of groups does not know."""
    if not dist.is_gloo_available():
        raise RuntimeError("this build of torch has no gloo, which ranks compare arguments over")
    rank, size = _place(group)
    store = dist.PrefixStore("kda_cp side group", group.get_group_store())
    # A store may outlive a group, and gloo must not find the addresses of one that has gone.
    number = store.add(f"opened by {rank}", 1)
    return dist.ProcessGroupGloo(
        dist.PrefixStore(str(number), store), rank, size, _timeout_of(group)
    )


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    # torch tells a group's timeout only through its backends.
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    return dist.default_pg_timeout


def _place(group: dist.ProcessGroup) -> tuple[int, int]:
    return dist.get_rank(group), dist.get_world_size(group)


@contextmanager
def _explained(place: tuple[int, int]) -> Iterator[None]:
    """Say what a failure of the transport means to a caller; place: rank, size of the group."""
    try:
        yield
    except RuntimeError as error:  # torch's DistError and its kinds are RuntimeErrors
        rank, size = place
        raise RuntimeError(
            f"communication failed on rank {rank} of a context-parallel group of {size}: another "
            "rank died, raised an error alone, or did not make the same call within the group's "
            f"timeout; torch reports: {error}"
        ) from error
