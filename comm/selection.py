"""Which algorithm exchanges the states: by name, and what "auto" means."""

from __future__ import annotations

from collections.abc import Mapping

from kda_cp.comm.all_gather import AllGatherExchange
from kda_cp.comm.all_to_all import AllToAllExchange
from kda_cp.comm.exchange import Exchange
from kda_cp.comm.ring import RingExchange

EXCHANGES: Mapping[str, type[Exchange]] = {
    "all_gather": AllGatherExchange,
    "ring": RingExchange,
    "all_to_all": AllToAllExchange,
}

MOST_KEPT = 16 * 2**20
"""Bytes of transitions a layer may keep, and gather, for an all-gather to be chosen."""


def choose_exchange(
    *, ranks: int, ranks_per_node: int, heads: int, key_dim: int, value_dim: int, batch: int = 1
) -> str:
    """What `exchange="auto"` means: the all-gather where it is small, else the all-to-all.

    The all-gather between two ranks, which need no A, and on one machine as long as what a rank
    keeps, (P - 2) A of [batch, heads, key_dim, key_dim] in float32, is at most 16 MiB. The ring,
    which receives and keeps least, is for those who ask for it (docs/adr/0003-auto-exchange.md).

    A pure function of numbers that all ranks share, so they choose alike. `ranks_per_node` is the
    most ranks of the group on one machine.
    """
    kept = (ranks - 2) * batch * heads * key_dim * key_dim * 4
    if ranks <= 2 or (ranks <= ranks_per_node and kept <= MOST_KEPT):
        return "all_gather"
    return "all_to_all"
