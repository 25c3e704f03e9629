"""Sharded over ranks with the forward on Triton kernels, interpreted where there is no GPU.

What the exchange needs of the kernels is the maps of whole fragments, also of some heads alone, and
entry states that are not zero. The backward is the PyTorch one, from the kernels' states.
"""

import pytest
import torch

from kda_cp.testing.sharded import TRAINING_OPTIONS, ShardedCall, assert_equals_oracle


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_sharded_with_kernels(ranks, exchange, layout):
    """A document over all ranks, one inside a rank, three value heads: the ring's parts differ."""
    call = ShardedCall(
        [0, 20, 150],
        {"layout": layout},
        {"H": 1, "HV": 3, "K": 16, "V": 24, "raw_gate": True, "A_log": True, "dt_bias": True},
        {**TRAINING_OPTIONS, "impl": "triton"},
        exchange=exchange,
    )
    assert_equals_oracle(ranks, call, 3)


def test_fragments_out_of_order_on_one_rank(ranks):
    """States go from fragment to fragment inside a rank, and none travels."""
    fragments = {"fragments": [[(40, 90), (0, 40)], []]}
    call = ShardedCall([0, 90], fragments, {"H": 1, "K": 16}, {"impl": "triton"})
    assert_equals_oracle(ranks, call, 2)


def test_dense_rows_with_kernels(ranks):
    """Rows of one length, each cut alike."""
    shape = {"B": 2, "H": 1, "HV": 2, "K": 16, "dtype": torch.float32}
    assert_equals_oracle(ranks, ShardedCall(100, {}, shape, {"impl": "triton"}), 3)
