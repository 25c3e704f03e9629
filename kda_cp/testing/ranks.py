"""Gloo ranks on one machine for tests: processes started once, and reused by every test.

    pool = RankPool()
    pool.run(work, 3, ranks=4)                 # work(group, 3) on ranks 0..3 -> four results
    pool.run(work, 3, members=[0, 2])          # on a group of workers 0 and 2 -> two results
    pool.run_groups(work, [[0, 1], [2, 3]], 3) # on two groups at the same time

A function travels by value, so it may be defined in a test file that no worker could import. A
rank that raises, dies or hangs fails that one call by name (`RankError`); the pool repairs itself
before the next. What costs time, from the dearest: importing torch (once, in the server that
workers are forked from), forking a worker (once each), and making a process group (once for each
set of members).

Parent and workers exchange messages over pipes, one answer for each order; tensors are sent by
value.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import multiprocessing
import os
import pathlib
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from typing import Any, Final

__all__ = ["RankError", "RankPool"]

# A collective that waits this long for a partner fails by itself (seconds).
_GROUP_TIMEOUT: Final = 50.0
# Once a rank has failed, the others get this long to end by themselves before they are stopped (s).
_GRACE: Final = 3.0
# Starting workers and making process groups; both take a second or two (seconds).
_SETUP_TIMEOUT: Final = 60.0
# What cloudpickle calls the file of every function that it sends by value.
_DYNAMIC_CODE: Final = "<dynamic-code>"


class RankError(RuntimeError):
    """A rank of a `RankPool` call raised, died or did not answer.

    Attributes:
        ranks: the ranks to blame, numbered within their group: those that died, else the first that
            raised, else all that did not answer in time.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


# In a worker ------------------------------------------------------------------------------------


def _serve(index: int, pipe: connection.Connection, folder: str, search_path: list[str]) -> None:
    """Carry out the parent's orders until it goes away. Runs in worker `index`."""
    sys.path[:] = search_path
    # gloo looks up the machine's host name otherwise, which fails where it is not resolvable.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    # What the worker prints, gloo's greetings included, is kept for the report of its death.
    with open(_log_of(folder, index), "ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    stacks = open(_stacks_of(folder, index), "wb", buffering=0)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)

    import torch

    torch.set_num_threads(1)
    worker = _Worker(index)
    while True:
        try:
            order, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = ("result", getattr(worker, order)(*arguments))
        except BaseException as error:
            answer = ("raised", (f"{type(error).__name__}: {error}", traceback.format_exc()))
        pipe.send(answer)


class _Worker:
    """The orders a worker understands, and the process groups it holds."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.groups: dict[tuple[int, ...], Any] = {}

    def join_world(self, size: int, port: int, generation: int) -> None:
        """Leave the world of the last generation, if any, and enter one of `size` workers."""
        import torch.distributed as dist

        self.groups.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        timeout = timedelta(seconds=_GROUP_TIMEOUT)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"generation {generation}", store),
            rank=self.index,
            world_size=size,
            timeout=timeout,
        )

    def make_groups(self, member_lists: Sequence[tuple[int, ...]]) -> None:
        """Make these groups; every worker of the world does so, in this order."""
        import torch.distributed as dist

        for members in member_lists:
            # The timeout is no part of what a group inherits.
            self.groups[members] = dist.new_group(
                list(members), timeout=timedelta(seconds=_GROUP_TIMEOUT), backend="gloo"
            )

    def call(self, members: tuple[int, ...], work: bytes, source: str) -> bytes:
        """Run one pickled (function, arguments) on the group of `members`."""
        import cloudpickle

        # Code that was sent by value has lost its file; give its lines back to tracebacks.
        with contextlib.suppress(OSError):
            lines = pathlib.Path(source).read_text().splitlines(keepends=True)
            linecache.cache[_DYNAMIC_CODE] = (0, None, lines, source)
        function, arguments = pickle.loads(work)
        result: bytes = cloudpickle.dumps(function(self.groups[members], *arguments))
        return result


def _log_of(folder: str, index: int) -> str:
    return os.path.join(folder, f"worker{index}.log")


def _stacks_of(folder: str, index: int) -> str:
    return os.path.join(folder, f"worker{index}.stacks")


def _tail(path: str, characters: int = 3000) -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path(path).read_text(errors="replace")[-characters:].strip()
    return ""


# In the parent ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Answer:
    """What came from one worker: kind is "result", "raised", "died" or "silent"."""

    kind: str
    content: Any = None


class RankPool:
    """Worker processes that act as ranks; see the module's docstring.

    Nothing starts before the first call, and then only as many workers as the calls so far needed.
    Not for use by several threads. Close it with `close()`, or as a context manager.

    Args:
        size: the most workers the pool may start.
    """

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []
        self._folder: str | None = None
        self._store: Any = None
        self._generation = 0
        # Workers in the present world, 0 when there is none or it cannot be trusted any more.
        self._world = 0
        self._groups: set[tuple[int, ...]] = set()

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int | None = None,
        members: Sequence[int] | None = None,
        per_rank: Sequence[Sequence[Any]] | None = None,
        timeout: float = 60.0,
    ) -> list[Any]:
        """Run `function(group, *arguments)` on all ranks of one group at the same time.

        Args:
            function: called as `function(group, *arguments, *per_rank[rank])`; `group` is a
                ProcessGroup. It is pickled by value, with what it refers to in its own module.
            arguments: the same for all ranks.
            ranks: the group is workers 0 to ranks - 1. Give this or `members`.
            members: the workers that form the group, in the order of its ranks (ascending).
            per_rank: further arguments, one sequence for each rank.
            timeout: seconds the call may take, counted from when the workers are ready.

        Returns:
            The results, by rank in the group.

        Raises:
            RankError: a rank raised, died, or did not answer in time.
        """
        if (ranks is None) == (members is None):
            raise ValueError("give either ranks or members")
        chosen = tuple(range(ranks)) if ranks is not None else tuple(members or ())
        return self._run([chosen], function, arguments, [per_rank], timeout)[0]

    def run_groups(
        self,
        function: Callable[..., Any],
        groups: Sequence[Sequence[int]],
        *arguments: Any,
        timeout: float = 60.0,
    ) -> list[list[Any]]:
        """Run `function(group, *arguments)` on several disjoint groups at the same time.

        Args:
            function: as for `run`.
            groups: the workers of each group, ascending; no worker twice.
            arguments: the same for all groups and ranks.
            timeout: as for `run`.

        Returns:
            One list of results by rank for each group.

        Raises:
            RankError: as for `run`; the message names the worker as well as the rank in its group.
        """
        chosen = [tuple(group) for group in groups]
        return self._run(chosen, function, arguments, [None] * len(chosen), timeout)

    def close(self) -> None:
        """Stop all workers. The pool starts new ones if it is used again."""
        processes, pipes, folder = self._processes, self._pipes, self._folder
        # First of all forgotten, so that a second interrupt in here leaves no half of a pool.
        self._processes, self._pipes, self._folder, self._store = [], [], None, None
        self._world = 0
        _stop(processes, pipes)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(
        self,
        groups: list[tuple[int, ...]],
        function: Callable[..., Any],
        arguments: Sequence[Any],
        per_rank: Sequence[Sequence[Sequence[Any]] | None],
        timeout: float,
    ) -> list[list[Any]]:
        workers = [worker for group in groups for worker in group]
        if not workers or len(set(workers)) != len(workers) or not all(groups):
            raise ValueError(f"expected disjoint groups of at least one worker, got {groups}")
        if min(workers) < 0 or max(workers) >= self.size:
            raise ValueError(f"expected workers below the pool's size {self.size}, got {groups}")
        if any(list(group) != sorted(group) for group in groups):
            raise ValueError(
                f"torch sorts the members of a group: give them ascending, got {groups}"
            )
        source = getattr(getattr(function, "__code__", None), "co_filename", "")
        orders = {}
        for group, of_rank in zip(groups, per_rank, strict=True):
            if of_rank is not None and len(of_rank) != len(group):
                raise ValueError(f"expected per_rank of length {len(group)}, got {len(of_rank)}")
            for rank, worker in enumerate(group):
                own = () if of_rank is None else of_rank[rank]
                work = _pickle_by_value(function, (*arguments, *own))
                orders[worker] = (group, work, source)
        try:
            self._prepare(max(workers) + 1, groups)
            answers = self._ask("call", orders, timeout)
        except BaseException:
            # Also a KeyboardInterrupt or a test's own timeout: no answer may be left in a pipe.
            self.close()
            raise
        self._raise_failure(groups, answers, timeout, source)
        return [[pickle.loads(answers[worker].content) for worker in group] for group in groups]

    def _prepare(self, size: int, groups: Sequence[tuple[int, ...]]) -> None:
        """Have a sound world of at least `size` workers that holds `groups`."""
        size = max(size, len(self._processes))
        if self._world < size:
            self._start(size)
            if not self._join(size):
                # A worker that survived a failure may hold gloo threads that never end: start over.
                self.close()
                self._start(size)
                if not self._join(size):
                    raise RankError(f"the {size} ranks could not form a process group", range(size))
        missing = [group for group in groups if group not in self._groups]
        if missing:
            everyone = {worker: (missing,) for worker in range(size)}
            self._check_setup(self._ask("make_groups", everyone, _SETUP_TIMEOUT))
            self._groups.update(missing)

    def _start(self, size: int) -> None:
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="kda_cp_ranks_")
        # Workers are forked from a server that has imported torch once, before it had any threads.
        method = (
            "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        )
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["torch", "torch.distributed", "cloudpickle"])
        for index in range(size):
            if index < len(self._processes) and self._processes[index].is_alive():
                continue
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(index, theirs, self._folder, sys.path),
                name=f"kda_cp rank {index}",
                daemon=True,
            )
            with _main_module_hidden():
                process.start()
            theirs.close()
            if index < len(self._processes):
                self._pipes[index].close()
                self._processes[index], self._pipes[index] = process, ours
            else:
                self._processes.append(process)
                self._pipes.append(ours)

    def _join(self, size: int) -> bool:
        import torch.distributed as dist

        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._generation += 1
        self._groups = set()
        arguments = (size, self._store.port, self._generation)
        answers = self._ask("join_world", dict.fromkeys(range(size), arguments), _SETUP_TIMEOUT)
        good = all(answer.kind == "result" for answer in answers.values())
        self._world = size if good else 0
        return good

    def _check_setup(self, answers: dict[int, _Answer]) -> None:
        self._raise_failure([tuple(sorted(answers))], answers, _SETUP_TIMEOUT)

    def _ask(self, order: str, arguments: dict[int, Any], timeout: float) -> dict[int, _Answer]:
        """Send `order` to the workers named in `arguments`; return their answers as they came.

        Workers that answer neither in time nor soon after another's failure are stopped, their
        stacks noted.
        """
        for worker, of_worker in arguments.items():
            # A worker that has died is found below.
            with contextlib.suppress(OSError):
                self._pipes[worker].send((order, of_worker))
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(arguments):
            waiting = {self._pipes[worker]: worker for worker in arguments if worker not in answers}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for worker in [worker for pipe, worker in waiting.items() if pipe in ready]:
                try:
                    answers[worker] = _Answer(*self._pipes[worker].recv())
                except (EOFError, OSError):
                    self._processes[worker].join(5)
                    answers[worker] = _Answer("died", self._processes[worker].exitcode)
                if answers[worker].kind != "result":
                    deadline = min(deadline, time.monotonic() + _GRACE)
        silent = [worker for worker in arguments if worker not in answers]
        answers |= {worker: _Answer("silent", self._stack(worker)) for worker in silent}
        if silent or any(answer.kind != "result" for answer in answers.values()):
            self._world = 0
        _stop([self._processes[w] for w in silent], [self._pipes[w] for w in silent])
        return answers

    def _stack(self, worker: int) -> str:
        """Where a worker that does not answer is, in Python."""
        assert self._folder is not None
        with contextlib.suppress(OSError, TypeError):
            os.kill(self._processes[worker].pid, signal.SIGUSR1)
            time.sleep(0.2)
        return _tail(_stacks_of(self._folder, worker))

    def _raise_failure(
        self,
        groups: Sequence[tuple[int, ...]],
        answers: dict[int, _Answer],
        timeout: float,
        source: str = _DYNAMIC_CODE,
    ) -> None:
        place = {worker: (rank, g) for g in groups for rank, worker in enumerate(g)}
        # The first of a kind is to blame; what came after it is most often its consequence.
        for kind in ("died", "raised", "silent"):
            blamed = [worker for worker, answer in answers.items() if answer.kind == kind]
            if blamed:
                break
        else:
            return
        if kind == "raised":
            blamed = blamed[:1]

        def name(worker: int) -> str:
            rank, group = place[worker]
            plain = len(groups) == 1 and rank == worker
            return f"rank {rank}" if plain else f"rank {rank} (worker {worker}) of {list(group)}"

        def describe(worker: int) -> str:
            answer = answers[worker]
            if answer.kind == "raised":
                return f"{name(worker)} raised {answer.content[0]}\n{answer.content[1]}"
            if answer.kind == "died":
                assert self._folder is not None
                printed = "".join(
                    f"\n{_tail(path(self._folder, worker))}" for path in (_log_of, _stacks_of)
                )
                return f"{name(worker)} died (exit code {answer.content}){printed}"
            return (
                f"{name(worker)} did not answer within {timeout:g} s; it was at\n{answer.content}"
            )

        lines = [describe(worker) for worker in blamed]
        consequences = {"raised": "raised", "died": "died", "silent": "was stopped"}
        for worker, answer in answers.items():
            if answer.kind != "result" and worker not in blamed:
                detail = f" {answer.content[0]}" if answer.kind == "raised" else ""
                lines.append(f"then {name(worker)} {consequences[answer.kind]}{detail}")
        text = "\n".join(lines).replace(_DYNAMIC_CODE, source)
        raise RankError(text, [place[worker][0] for worker in blamed])


def _stop(processes: Sequence[Any], pipes: Sequence[connection.Connection]) -> None:
    for process, pipe in zip(processes, pipes, strict=True):
        process.kill()
        pipe.close()
    for process in processes:
        process.join(10)


def _pickle_by_value(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Pickle (function, arguments); the function's module by value unless workers can import it."""
    import cloudpickle

    module = sys.modules.get(getattr(function, "__module__", ""))
    by_value = (
        module is not None
        and module.__name__.partition(".")[0] not in ("kda_cp", "torch")
        and module.__name__ not in cloudpickle.list_registry_pickle_by_value()
    )
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        work: bytes = cloudpickle.dumps((function, arguments))
        return work
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep multiprocessing from running the parent's main module, pytest's here, in each worker."""
    main = vars(sys.modules["__main__"])
    hidden: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
    main.pop("__file__", None)
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(hidden)
