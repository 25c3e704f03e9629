"""What the tests of the sharded operator share: every algorithm of the exchange."""

import pytest

from kda_cp.comm.selection import EXCHANGES


@pytest.fixture(params=EXCHANGES)
def exchange(request) -> str:
    """Each algorithm in turn: all of them must give the same."""
    return request.param
