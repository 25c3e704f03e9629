"""What `tune.py` times: the stages of the forward, each as a call for a candidate launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kda_cp import chunk_kda, compiled
from kda_cp.context import local_context
from kda_cp.cuts import Cut, cut_walk
from kda_cp.kernels import configs, fold, intra, state
from kda_cp.kernels.configs import FoldConfig, IntraConfig, StateConfig, padded
from kda_cp.launch.bench_cases import Case, Problem
from kda_cp.stages import Inputs
from kda_cp.validation import make_settings

KERNELS = ("scores", "state", "maps", "fold", "piece")

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Work:
    """What is tuned: `make(candidate)` prepares a call that returns what the candidate computes."""

    kernel: str
    case: Case
    candidates: tuple[Any, ...]
    pinned: Any
    make: Callable[[Any], Call]


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a module or class inside the block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def candidates(kernel: str, K: int, V: int, pinned: Any) -> tuple[Any, ...]:
    """The launches of a kernel that sizes admit, the pinned one first."""
    KP, VP = padded(K), padded(V)
    found: list[Any] = []
    if kernel == "scores":
        found = [IntraConfig(*x) for x in product((16, 32, 64), (2, 4, 8), (1, 2, 3)) if x[0] <= KP]
    elif kernel in ("state", "maps"):
        found = [StateConfig(*x) for x in product((32, 64, 128), (4, 8), (1, 2, 3)) if x[0] <= VP]
    elif kernel == "fold":
        sizes = product((16, 32, 64), (16, 32, 64), (2, 4, 8))
        found = [FoldConfig(*x) for x in sizes if x[0] <= VP and x[1] <= KP]
    else:
        found = [1024, 2048, 4096, 8192, 16384]
    return (pinned, *(x for x in found if x != pinned))


class Stages:
    """The stages of the forward on the inputs of a problem, each as a call for a candidate."""

    def __init__(self, problem: Problem) -> None:
        self.problem, case = problem, problem.case
        flags = {n: x for n, x in case.options.items() if n != "output_final_state"}
        self.inputs = Inputs(*problem.tensors, problem.A_log, problem.dt_bias)
        self.settings = make_settings(self.inputs, None, allow_neg_eigval=False, **flags)
        C, HV, K, V = 64, case.value_heads, case.key_dim, case.value_dim
        v = self.inputs.v
        self.table = local_context(case.tokens, case.tokens).segment_table(
            batch=1, chunk_size=C, device=v.device
        )
        self.terms = compiled.chunk_terms(self.inputs, self.table, self.settings)
        self.common: Any = {"key_dim": K, "arithmetic": self.terms.arithmetic}
        self.piece = configs.segment_chunks(HV, K, V, C) * C
        self.o = torch.empty_like(v)
        self.whole = self._cut(max(K, V))
        self.entry = torch.zeros(1, HV, K, V, device=v.device)
        self.between = torch.zeros(max(1, self.whole.num_slots), HV, K, V, device=v.device)
        self.between.normal_(std=1 / K)
        self.totals = torch.zeros(max(1, self.whole.num_maps), HV, K, V + K, device=v.device)

    def _cut(self, columns: int) -> Cut:
        """Into pieces of the pinned length, from a given state to an exit that counts."""
        b, A = (-(-n // columns) for n in (self.inputs.v.shape[-1], self.inputs.k.shape[-1]))
        tiles: Any = {"value_tiles": b, "map_tiles": (b, A)}
        walk = self.table.every
        return cut_walk(self.table, walk, self.piece, from_zero=False, exits=True, **tiles)

    def scores(self, config: Any) -> Tensor:
        """The terms of all chunks: scores, then their inverse."""
        with replaced(intra, "intra_config", lambda *_: config):
            return compiled.chunk_terms(self.inputs, self.table, self.settings).chunks.TA

    def state(self, config: Any, cut: Cut) -> Tensor:
        """All pieces side by side, with outputs."""
        given: Any = {"entry": self.entry, "states": self.between, "exits": None, "h": None}
        given |= {"config": config, **self.common}
        state.walk_segments(self.inputs.v, self.terms.chunks, cut.runs, o=self.o, **given)
        return self.o

    def maps(self, config: Any, cut: Cut) -> Tensor:
        """The maps of all whole pieces."""
        state.walk_maps(
            self.inputs.v, self.terms.chunks, cut.maps, self.totals, config=config, **self.common
        )
        return self.totals

    def fold(self, config: Any) -> Tensor:
        """The states between pieces."""
        fold.fold(self.totals, self.between, self.whole.chains, config)
        return self.between

    def forward(self, piece: int) -> Tensor:
        """The whole operator, cut into pieces of another length."""
        problem = self.problem
        options: Any = {"A_log": problem.A_log, "dt_bias": problem.dt_bias, "impl": "triton"}
        options |= problem.case.options
        with replaced(configs, "segment_chunks", lambda HV, K, V, C: piece // C):
            return chunk_kda(*problem.tensors, **options)[0]

    def work(self, kernels: Sequence[str]) -> list[Work]:
        """What there is to time; a call of one piece has no maps and nothing to fold."""
        case, term = self.problem.case, self.terms.arithmetic.term
        K, V = case.key_dim, case.value_dim
        pinned = {
            "scores": configs.intra_config(configs.padded(K), term),
            "state": configs.state_config(K, V, term, maps=False),
            "maps": configs.state_config(K, V, term, maps=True),
            "fold": configs.fold_config(K),
            "piece": self.piece,
        }
        make: dict[str, Callable[[Any], Call]] = {
            "scores": lambda c: partial(self.scores, c),
            "state": lambda c: partial(self.state, c, self._cut(c.columns)),
            "maps": lambda c: partial(self.maps, c, self._cut(c.columns)),
            "fold": lambda c: partial(self.fold, c),
            "piece": lambda c: partial(self.forward, c),
        }
        if self.whole.num_maps:
            make["maps"](pinned["maps"])()  # what the fold folds
        else:
            kernels = [name for name in kernels if name not in ("maps", "fold")]
        return [
            Work(name, case, candidates(name, K, V, pinned[name]), pinned[name], make[name])
            for name in kernels
        ]
