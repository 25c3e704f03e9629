"""What all tests share: one pool of ranks, and few threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kda_cp.testing.ranks import RankPool

# Several processes compute at once in a run; more threads than this only wait for each other.
torch.set_num_threads(2)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of gloo ranks of this run: `ranks.run(function, *arguments, ranks=P)`."""
    with RankPool(size=8) as pool:
        yield pool


@pytest.fixture
def own_ranks() -> Iterator[RankPool]:
    """A pool for one test that makes groups or meshes, which every worker of a world must join."""
    with RankPool(size=4) as pool:
        yield pool
