"""Many ranks as threads of one process: a call of the public API over 64 ranks in a second or two.

    run_threads(work, 3, ranks=64)  # work(group, 3) on ranks 0..63 -> 64 results

Each thread has a world of its own, whose default group is `group`: collectives, point-to-point
messages and autograd work in it as in a process. Under it is the group that torch tests itself
with (`torch.testing._internal.distributed.multi_threaded_pg`), to which messages are added here.

Where threads differ from the processes of `RankPool`:

- Arguments and results are the same objects for all ranks, never copies. The default generator of
  random numbers is shared as well: draw from a `torch.Generator` of the rank.
- A collective ends where it is started, so `async_op=True` overlaps nothing.
- Collectives compare no shapes between ranks, and a copy may broadcast. Messages are compared.
- Nobody can stop a thread. A rank that hangs, but not in communication, stays behind.
"""

from __future__ import annotations

import functools
import queue
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final

from kda_cp.testing.ranks import RankError

__all__ = ["run_threads"]

# When a call ends, its ranks get this long to leave the communication they wait in (seconds).
_GRACE: Final = 3.0


class _Call:
    """One call of `run_threads`: the messages between its ranks, and whether it is over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = False
        self._posted: Counter[Any] = Counter()
        # Messages that only one side has posted so far, by (channel, number).
        self._unmatched: dict[Any, Future[Any]] = {}

    def post(self, side: str, channel: tuple[Any, ...]) -> Future[Any]:
        """The next message of a channel: the n-th sent is the n-th received, as they are posted."""
        with self._lock:
            self.check()  # in here, so that `finish` sees every message that is waited for
            place = (channel, self._posted[side, channel])
            self._posted[side, channel] += 1
            message = self._unmatched.pop(place, None)
            if message is None:
                message = self._unmatched[place] = Future()
            return message

    def check(self) -> None:
        """End this thread if the call is over. torch ends the waiting ones in the same way."""
        if self._over:
            sys.exit("the call of run_threads is over")

    def finish(self) -> None:
        """End every rank that waits for a message, or communicates from now on."""
        with self._lock:
            self._over = True
            for message in self._unmatched.values():
                if not message.done():
                    message.set_exception(SystemExit("the call of run_threads is over"))

    def unmatched(self) -> list[tuple[int, str]]:
        """(rank to blame, what it did) for the messages that one side alone has posted."""
        faults = []
        for ((_, source, target, _), _), message in self._unmatched.items():
            if message.done():
                faults.append((source, f"rank {source} sent what rank {target} did not receive"))
            else:
                faults.append((target, f"rank {target} awaits what rank {source} did not send"))
        return sorted(faults)


# The call that this thread is a rank of.
_here = threading.local()


@functools.cache
def _backend() -> str:
    """Register the group of the threads with torch, once in a process; returns its name there."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import multi_threaded_pg

    class Receive(dist.Work):
        def __init__(self, message: Future[Any], tensor: torch.Tensor) -> None:
            super().__init__()
            self._pending: tuple[Future[Any], torch.Tensor] | None = (message, tensor)

        def wait(self, timeout: object = None) -> bool:
            if self._pending is not None:
                message, tensor = self._pending[0].result(), self._pending[1]
                if (message.numel(), message.dtype) != (tensor.numel(), tensor.dtype):
                    raise ValueError(
                        f"expected a message of {tensor.numel()} elements of {tensor.dtype}, "
                        f"got {message.numel()} of {message.dtype}"
                    )
                tensor.detach().copy_(message.view(tensor.shape))
                self._pending = None  # a second wait must not fill a tensor that is used again
            return True

    class ThreadGroup(multi_threaded_pg.ProcessLocalGroup):
        def __init__(self, store: dist.Store, rank: int, size: int) -> None:
            super().__init__(rank, size)
            self._call: _Call = _here.call
            self._store = store

        def get_group_store(self) -> dist.Store:
            return self._store

        @property
        def pg_name(self) -> str:
            # torch reads the name at the start of each collective, and tells groups apart by it. A
            # thread that an earlier call left behind would take part in the collectives of this.
            self._call.check()
            return super().pg_name

        def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> dist.Work:
            copy = tensors[0].detach().clone(memory_format=torch.contiguous_format)
            self._call.post("send", (self.pg_name, self.rank(), target, tag)).set_result(copy)
            return multi_threaded_pg.ret_work(None)

        def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
            message = self._call.post("receive", (self.pg_name, source, self.rank(), tag))
            return Receive(message, tensors[0])

    def create(store: dist.Store, rank: int, size: int, timeout: object) -> ThreadGroup:
        return ThreadGroup(store, rank, size)

    name = "kda_cp_threads"
    dist.Backend.register_backend(name, create, devices=["cpu"])
    return name


@contextmanager
def _world_of_threads(call: _Call, threads: Sequence[threading.Thread]) -> Iterator[Any]:
    """Give every thread a world of its own, until `call` ends; yields torch's object for them."""
    import torch
    from torch.distributed import distributed_c10d
    from torch.testing._internal.distributed import multi_threaded_pg

    bindings: Any = torch._C._distributed_c10d
    group = multi_threaded_pg.ProcessLocalGroup
    # What torch's `_install_threaded_pg` does too; its changes of autograd stay, in torch 2.11.
    before = distributed_c10d._world, sys.excepthook, torch.get_num_threads()
    world: Any = multi_threaded_pg.ThreadLocalWorld()
    if not hasattr(world, "comms"):
        world.comms = []  # torch 2.11 forgot it, and reads it when a group is destroyed
    distributed_c10d._world = world
    bindings._set_thread_isolation_mode(True)
    torch.set_num_threads(1)  # of each rank; the ranks fill the cores by themselves
    try:
        yield world
    finally:
        call.finish()
        with group._coll_lock:  # torch reads the collectives under way without it
            group.exception_handle(None)
        deadline = time.monotonic() + _GRACE
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        group.reset()
        distributed_c10d._world, sys.excepthook = before[:2]
        bindings._set_thread_isolation_mode(False)
        torch.set_num_threads(before[2])


def run_threads(
    function: Callable[..., Any], *arguments: Any, ranks: int = 64, timeout: float = 100.0
) -> list[Any]:
    """Run `function(group, *arguments)` on `ranks` threads at the same time.

    Not for use by several threads. Leaves torch.distributed as it was: not initialised.

    Args:
        function: `group` is a ProcessGroup, and the default group of its thread.
        arguments: the same objects for all ranks.
        ranks: how many.
        timeout: seconds the call may take.

    Returns:
        The results, by rank.

    Raises:
        RankError: a rank raised, did not answer in time, or posted half of a message.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if ranks < 1:
        raise ValueError(f"expected ranks of at least 1, got {ranks}")
    if dist.is_initialized():
        raise ValueError("run_threads: torch.distributed is initialised in this process already")
    deadline = time.monotonic() + timeout
    call, store, backend = _Call(), dist.HashStore(), _backend()
    answers: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
    threads: list[threading.Thread] = []
    results: dict[int, Any] = {}

    def be(rank: int) -> None:
        _here.call = call
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
            try:
                result = function(dist.group.WORLD, *arguments)
            finally:
                # A thread that ends too late must not destroy the world of the process.
                if distributed_c10d._world is world:
                    dist.destroy_process_group()
            answers.put((rank, "result", result))
        except BaseException as error:
            text = f"rank {rank} raised {type(error).__name__}: {error}\n{traceback.format_exc()}"
            answers.put((rank, "raised", text))

    with _world_of_threads(call, threads) as world:
        for rank in range(ranks):
            thread = threading.Thread(target=be, args=(rank,), name=f"rank {rank}", daemon=True)
            thread.start()
            threads.append(thread)
        while len(results) < ranks:
            try:
                rank, kind, content = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                silent = [rank for rank in range(ranks) if rank not in results]
                raise RankError(_places(silent, threads, timeout), silent) from None
            if kind == "raised":
                raise RankError(content, [rank])
            results[rank] = content
        if faults := call.unmatched():
            ranks_to_blame = sorted({rank for rank, _ in faults})
            raise RankError("\n".join(text for _, text in faults), ranks_to_blame)
    return [results[rank] for rank in range(ranks)]


def _places(silent: Sequence[int], threads: Sequence[threading.Thread], timeout: float) -> str:
    """Where the ranks are that did not answer; ranks at one place together, the fewest first."""
    frames = sys._current_frames()
    ranks_at: dict[str, list[int]] = {}
    for rank in silent:
        frame = frames.get(threads[rank].ident or 0)
        # Without the four frames from the thread's start to `function`.
        place = "".join(traceback.format_stack(frame)[4:]) if frame else "its end"
        ranks_at.setdefault(place, []).append(rank)
    return "\n".join(
        f"ranks {ranks} did not answer within {timeout:g} s; they were at\n{place}"
        for place, ranks in sorted(ranks_at.items(), key=lambda item: len(item[1]))
    )
