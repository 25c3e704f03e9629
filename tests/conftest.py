"""What all tests share: one pool of ranks, and few threads."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from kda_cp import platform
from kda_cp.testing.ranks import RankPool

# Without a GPU the kernels of impl="triton" are interpreted, on tensors of the CPU. Triton reads
# this where a kernel is defined, so it stands here, before any test imports one; ranks and fresh
# processes inherit it.
if platform.device != "cuda":
    os.environ["TRITON_INTERPRET"] = "1"

# Several processes compute at once in a run; more threads than this only wait for each other.
torch.set_num_threads(2)

# `--hypothesis-profile long` is for tests/distributed/test_fuzz.py: 9 times as many sharded calls.
settings.register_profile("long", max_examples=220, deadline=None, derandomize=False)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of gloo ranks of this run: `ranks.run(function, *arguments, ranks=P)`."""
    with RankPool(size=8) as pool:
        yield pool


@pytest.fixture(scope="session")
def run_fresh() -> Callable[..., str]:
    """`run_fresh(*parts)`: run pieces of code in a new interpreter; returns what they printed."""

    def run(*parts: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", "\n".join(textwrap.dedent(part) for part in parts)],
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=pathlib.Path(__file__).parents[1],
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def own_ranks() -> Iterator[RankPool]:
    """A pool for one test that makes groups or meshes, which every worker of a world must join."""
    with RankPool(size=4) as pool:
        yield pool
