"""Count the collectives that a block of code issues in this process, and what they carry."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["CollectiveCall", "CollectiveCounts", "count_collectives"]

# Which parameters of each function this rank hands in, and which it gets filled.
_SENT_AND_RECEIVED: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "all_gather_into_tensor": (("input_tensor",), ("output_tensor",)),
    "all_gather_single": (("input_tensor",), ("output_tensor",)),  # the name torch 2.13 gave it
    "all_gather": (("tensor",), ("tensor_list",)),
    "all_to_all_single": (("input",), ("output",)),
    "all_to_all": (("input_tensor_list",), ("output_tensor_list",)),
    "all_reduce": (("tensor",), ("tensor",)),
    "reduce_scatter_tensor": (("input",), ("output",)),
    "broadcast": (("tensor",), ("tensor",)),
    "send": (("tensor",), ()),
    "isend": (("tensor",), ()),
    "recv": ((), ("tensor",)),
    "irecv": ((), ("tensor",)),
    "batch_isend_irecv": ((), ()),  # counted from its list of operations
    "all_gather_object": ((), ()),  # objects have no size before they are pickled
    "barrier": ((), ()),
}


@dataclass(frozen=True)
class CollectiveCall:
    """One call: the function's name, and the elements and bytes this rank handed in and got.

    An all_gather counts this rank's own block among what it got, as its output tensor holds it.
    Objects and barriers count 0.
    """

    name: str
    numel_sent: int = 0
    bytes_sent: int = 0
    numel_received: int = 0
    bytes_received: int = 0


@dataclass
class CollectiveCounts:
    """The calls of a block, in the order they were made."""

    calls: list[CollectiveCall] = field(default_factory=list)

    @property
    def by_name(self) -> Counter[str]:
        """How often each function was called."""
        return Counter(call.name for call in self.calls)

    @property
    def bytes_sent(self) -> int:
        """Bytes handed in by this rank over all calls."""
        return sum(call.bytes_sent for call in self.calls)

    @property
    def bytes_received(self) -> int:
        """Bytes got by this rank over all calls."""
        return sum(call.bytes_received for call in self.calls)


def _size(tensors: Any) -> tuple[int, int]:
    """(numel, bytes) of a tensor or of a list of tensors."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel(), tensors.numel() * tensors.element_size()
    sizes = [_size(tensor) for tensor in tensors or ()]
    return sum(size[0] for size in sizes), sum(size[1] for size in sizes)


def _describe(name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> CollectiveCall:
    names = original.__code__.co_varnames[: original.__code__.co_argcount]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if name == "batch_isend_irecv":
        sent = [op.tensor for op in given["p2p_op_list"] if op.op.__name__ == "isend"]
        received = [op.tensor for op in given["p2p_op_list"] if op.op.__name__ == "irecv"]
    else:
        sent_names, received_names = _SENT_AND_RECEIVED[name]
        sent = [given[parameter] for parameter in sent_names]
        received = [given[parameter] for parameter in received_names]
    return CollectiveCall(name, *_size(sent), *_size(received))


@contextmanager
def count_collectives() -> Iterator[CollectiveCounts]:
    """Count calls of torch.distributed's collectives and point-to-point functions in the block.

    Only the outermost call counts (`all_gather_object` gathers tensors inside), and only calls made
    through the module, `dist.all_reduce(...)`: a name taken by `from torch.distributed import ...`
    before the block is not seen, nor are functional collectives. All threads are counted, as
    autograd runs a backward on threads of its own. Make `P2POp`s inside the block that sends them.

    Yields:
        `CollectiveCounts`, which fills as calls are made and stays readable after the block.
    """
    counts = CollectiveCounts()
    inside = threading.local()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        unwrapped = original
        while hasattr(unwrapped, "__wrapped__"):  # torch's own logging decorators
            unwrapped = unwrapped.__wrapped__

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "a_collective", False):
                return original(*args, **kwargs)
            counts.calls.append(_describe(name, unwrapped, args, kwargs))
            inside.a_collective = True
            try:
                return original(*args, **kwargs)
            finally:
                inside.a_collective = False

        return call

    known = (name for name in _SENT_AND_RECEIVED if hasattr(distributed_c10d, name))
    originals = {name: getattr(distributed_c10d, name) for name in known}
    # Both modules get the same wrapper: torch recognises `P2POp.op` by identity.
    wrappers = {name: counted(name, original) for name, original in originals.items()}
    modules = (dist, distributed_c10d)
    try:
        for module in modules:
            for name, wrapper in wrappers.items():
                setattr(module, name, wrapper)
        yield counts
    finally:
        for module in modules:
            for name, original in originals.items():
                setattr(module, name, original)
