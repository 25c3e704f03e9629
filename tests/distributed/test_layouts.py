"""The sharded operator equals the unsharded recurrence, every result and gradient on every rank.

Over lengths, layouts, numbers of ranks and shapes; the judge is the token recurrence in float64.
"""

import random

import pytest
import torch

from kda_cp.testing.sharded import TRAINING_OPTIONS, ShardedCall, assert_equals_oracle

SMALL = {"H": 1, "HV": 2, "K": 16, "V": 24}
RAW = {"raw_gate": True, "A_log": True, "dt_bias": True}
PREGATED = {"use_qk_l2norm_in_kernel": True, "scale": 0.37}


def boundaries(lengths):
    cu_seqlens = [0]
    for length in lengths:
        cu_seqlens.append(cu_seqlens[-1] + length)
    return cu_seqlens


def random_fragments(tokens, ranks, seed):
    """Pieces of any size in any order on any rank; a rank may stay empty."""
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, tokens), min(tokens - 1, 2 * ranks)))
    pieces = list(zip([0, *cuts], [*cuts, tokens], strict=True))
    rng.shuffle(pieces)
    shards = [[] for _ in range(ranks)]
    for piece in pieces:
        shards[rng.randrange(ranks)].append(piece)
    return shards


@pytest.mark.parametrize("ranks_", [1, 2, 3, 4, 8], ids="P={}".format)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "fragments"])
def test_documents_over_any_number_of_ranks(ranks, exchange, layout, ranks_):
    cu_seqlens = boundaries([37, 51, 0, 40, 150, 3])
    option = {"layout": layout}
    if layout == "fragments":
        option = {"fragments": random_fragments(cu_seqlens[-1], ranks_, seed=ranks_)}
    call = ShardedCall(cu_seqlens, option, {**SMALL, **RAW}, TRAINING_OPTIONS, exchange=exchange)
    assert_equals_oracle(ranks, call, ranks_)


LENGTHS = {
    "one document": [200],
    "two documents, each over several ranks": [256, 768],
    "short ones and one long": [1, 1, 2, 1, 11],
    "two documents": [700, 324],
    "edges on the ranks' edges": [32, 32, 64],
    "edges one token before": [31, 32, 65],
    "edges one token after": [33, 32, 63],
    "empty documents at an edge": [0, 32, 0, 0, 96, 0],
    "fewer tokens than ranks": [1, 2],
    "a document over all ranks, then a short one": [119, 9],
}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_lengths_over_four_ranks(ranks, exchange, lengths, layout):
    call = ShardedCall(boundaries(lengths), {"layout": layout}, SMALL, PREGATED, exchange=exchange)
    assert_equals_oracle(ranks, call, 4)


SHARDS = {
    "3/3/2/2": ([10], None),
    "4/4/2/0": ([7, 3], [[(0, 4)], [(4, 8)], [(8, 10)], []]),
    "an empty rank in the middle": ([60, 40], [[(0, 50)], [], [(50, 51)], [(51, 100)]]),
    "everything on the last rank": ([60, 40], [[], [], [], [(0, 100)]]),
    "everything on one rank, shuffled": ([100], [[], [(70, 100), (0, 30), (30, 70)], [], []]),
    "reversed ranks": ([90, 10], [[(75, 100)], [(50, 75)], [(25, 50)], [(0, 25)]]),
    "no token at all": ([0], None),
    "interleaved": ([64], [[(i, i + 4) for i in range(4 * r, 64, 16)] for r in range(4)]),
}


@pytest.mark.parametrize("name", SHARDS)
def test_uneven_and_empty_shards(ranks, exchange, name):
    lengths, fragments = SHARDS[name]
    layout = {} if fragments is None else {"fragments": fragments}
    assert_equals_oracle(
        ranks, ShardedCall(boundaries(lengths), layout, SMALL, PREGATED, exchange=exchange), 4
    )


def test_two_documents_over_two_ranks(ranks, exchange):
    assert_equals_oracle(ranks, ShardedCall([0, 7, 10], {}, SMALL, PREGATED, exchange=exchange), 2)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_tokens_past_the_last_document_are_padding(ranks, exchange, layout):
    call = ShardedCall(
        [0, 37, 88],
        {"layout": layout, "num_tokens": 130},
        {**SMALL, **RAW},
        TRAINING_OPTIONS,
        exchange=exchange,
    )
    answers = assert_equals_oracle(ranks, call, 4)
    if layout == "contiguous":  # the last rank holds padding alone and contributes exactly nothing
        last = answers[3].results
        assert all(not x.any() for name, x in last.items() if name != "final_state")


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_dense_rows_are_cut_alike(ranks, exchange, layout):
    draw = {**SMALL, **RAW, "B": 3}
    assert_equals_oracle(
        ranks, ShardedCall(90, {"layout": layout}, draw, TRAINING_OPTIONS, exchange=exchange), 4
    )


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("ranks_", [4, 8])
def test_few_heads_over_many_ranks(ranks, exchange, heads, ranks_):
    draw = {"H": heads, "HV": heads, "K": 16, "V": 16}
    assert_equals_oracle(
        ranks, ShardedCall([0, 90, 200], {}, draw, PREGATED, exchange=exchange), ranks_
    )


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_heads_with_gates_of_their_own_are_not_mixed(ranks, exchange, layout):
    draw = {"H": 3, "HV": 6, "K": 16, "V": 16, "decay": (1e-3, 0.1, 3.0)}
    assert_equals_oracle(
        ranks, ShardedCall([0, 200], {"layout": layout}, draw, PREGATED, exchange=exchange), 4
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_other_dtypes(ranks, exchange, dtype, layout):
    draw = {**SMALL, **RAW, "dtype": dtype}
    call = ShardedCall([0, 37, 160], {"layout": layout}, draw, TRAINING_OPTIONS, exchange=exchange)
    assert_equals_oracle(ranks, call, 4)


@pytest.mark.parametrize("chunk_size", [16, 32])
def test_other_chunk_sizes_and_kept_intermediates(ranks, exchange, chunk_size):
    options = {**TRAINING_OPTIONS, "chunk_size": chunk_size, "disable_recompute": True}
    # The oracle knows no chunks.
    call = ShardedCall([0, 37, 160], {}, {**SMALL, **RAW}, TRAINING_OPTIONS, exchange=exchange)
    judged = assert_equals_oracle(ranks, call, 3)
    chunked = ShardedCall([0, 37, 160], {}, {**SMALL, **RAW}, options, exchange=exchange)
    for reference, answer in zip(judged, ranks.run(chunked, ranks=3), strict=True):
        for name, x in answer.results.items():
            torch.testing.assert_close(x, reference.results[name], rtol=1e-4, atol=1e-5)
