"""The context: what it tells, and that bad arguments end in the same error on every rank."""

import dataclasses

import pytest
import torch

from kda_cp import build_cp_context, chunk_kda, chunk_kda_cp
from kda_cp.testing.compare import draw_inputs


def describe(group, layout):
    context = build_cp_context(torch.tensor([0, 4, 4, 10]), group, layout=layout)
    return (
        context.num_tokens,
        context.ranges,
        context.cu_seqlens.tolist(),
        [context.initial_state_owner(n) for n in range(3)],
        [context.final_state_owner(n) for n in range(3)],
    )


def test_a_context_tells_what_lies_here(ranks):
    owners = [0, 0, 1], [0, 0, 2]
    assert ranks.run(describe, "contiguous", ranks=3) == [
        (4, ((0, 4),), [0, 4], *owners),
        (3, ((4, 7),), [0, 3], *owners),
        (3, ((7, 10),), [0, 3], *owners),
    ]
    # Six pieces of 2, 2, 2, 2, 1, 1 tokens; the third and fourth touch on the last rank.
    assert ranks.run(describe, "zigzag", ranks=3) == [
        (3, ((0, 2), (9, 10)), [0, 2, 3], [0, 0, 2], [1, 0, 0]),
        (3, ((2, 4), (8, 9)), [0, 2, 3], [0, 0, 2], [1, 0, 0]),
        (4, ((4, 8),), [0, 4], [0, 0, 2], [1, 0, 0]),
    ]


def test_a_context_is_frozen_and_prints_its_plan():
    context = build_cp_context([0, 4, 10], None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.rank = 1
    assert "10 tokens, 2 sequences, 1 ranks" in str(context.plan)
    assert repr(context) == "CPContext(rank 0 of 1, 10 of 10 tokens, 2 sequences, contiguous)"


def build_error(group, arguments, on_rank, other):
    rank = group.rank()
    try:
        build_cp_context(group=group, **(other if rank == on_rank else arguments))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"cu_seqlens": [0, 5, 4]}, "rank 1: cu_seqlens"),
        ({"cu_seqlens": [1, 10]}, "rank 1: cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0.0, 10.0])}, "rank 1: cu_seqlens: expected a one-dim"),
        ({"cu_seqlens": [0, 10], "layout": "diagonal"}, "rank 1: layout"),
        ({"cu_seqlens": [0, 10], "exchange": "pigeon"}, "rank 1: exchange: expected one of"),
        ({"cu_seqlens": [0, 10], "num_tokens": 9}, "rank 1: num_tokens|rank 1: cu_seqlens"),
        ({"cu_seqlens": [0, 10], "fragments": [[(0, 10)]]}, "rank 1: fragments"),
        ({"cu_seqlens": "0 10"}, "rank 1: cu_seqlens: expected a tensor or a list"),
        ({"cu_seqlens": True}, "rank 1: cu_seqlens: expected integers, got True"),
        ({"cu_seqlens": None}, "rank 1: cu_seqlens: expected integers, got None"),
        (
            {"cu_seqlens": [0, 4, 10]},
            "rank 1: cu_seqlens: expected .0, 10., as on ranks 0, 2, got .0, 4, 10.",
        ),
        (
            {"cu_seqlens": [0, 10, 10]},
            "rank 1: cu_seqlens: expected .0, 10., as on",
        ),  # the same fragments
        ({"cu_seqlens": [0, 10], "layout": "zigzag"}, "rank 1: layout: expected contiguous, as on"),
        ({"cu_seqlens": [0, 10], "num_tokens": 11}, "rank 1: num_tokens: expected 10, as on"),
        ({"cu_seqlens": [0, 10], "exchange": "ring"}, "rank 1: exchange: expected auto, as on"),
        ({"cu_seqlens": [0, 10], "check": "off"}, "rank 1: check: expected always, as on"),
        ({"cu_seqlens": [0, 10], "check": "maybe"}, "rank 1: check: expected one of"),
        ({"cu_seqlens": 10}, "rank 1: cu_seqlens: expected .0, 10., as on ranks 0, 2, got rows"),
    ],
    ids=str,
)
def test_one_rank_s_bad_arguments_raise_the_same_on_all(ranks, other, text):
    import re

    errors = ranks.run(build_error, {"cu_seqlens": [0, 10]}, 1, other, ranks=3)
    assert errors[0] is not None and re.search(text, errors[0])
    assert errors == [errors[0]] * 3


def build_for_a_group_of_others(group):
    import torch.distributed as dist

    others = dist.new_group([0])
    if group.rank() == 0:
        return None
    with pytest.raises(ValueError, match="group: expected a"):
        build_cp_context([0, 4], others)


def test_a_group_that_this_process_is_not_in_is_refused(own_ranks):
    own_ranks.run(build_for_a_group_of_others, ranks=2)


def test_something_else_than_a_group_is_refused():
    with pytest.raises(ValueError, match="group: expected a ProcessGroup"):
        build_cp_context([0, 4], "world")


def wrong_calls(group):
    """Every rank makes the same mistake; each must say so before it communicates."""
    context = build_cp_context([0, 40], group)
    inputs = draw_inputs(20)
    texts = []
    for mistake in (
        lambda: chunk_kda_cp(**draw_inputs(19), cp_context=context),
        lambda: chunk_kda_cp(**draw_inputs(20, B=2), cp_context=context),
        lambda: chunk_kda(**inputs, cp_context=context, cu_seqlens=[0, 20]),
        lambda: chunk_kda(**inputs, cp_context=group),
        lambda: chunk_kda_cp(**inputs, cp_context=None),
        lambda: chunk_kda_cp(**inputs, cp_context=context, impl="reference"),
        lambda: chunk_kda_cp(**inputs, cp_context=context, initial_state=torch.zeros(2, 2, 32, 32)),
    ):
        with pytest.raises(ValueError) as error:
            mistake()
        texts.append(str(error.value))
    return texts


def test_wrong_local_tensors_name_what_was_expected(ranks):
    expected = [
        "rank 0: q: expected the 20 tokens of rank 0's shard, got 19",
        "every rank: q: expected one packed row, B = 1, for this context, got B = 2",
        "every rank: cu_seqlens: expected None beside a context, which holds the sequences, got",
        "cp_context: expected a context from build_cp_context or None, got ProcessGroup",
        "cp_context: expected a context from build_cp_context, got NoneType",
        "every rank: impl: expected 'torch' or 'auto' for a context of 2 ranks, got 'reference'",
        "every rank: initial_state: expected shape [1, 2, 32, 32], got [2, 2, 32, 32]",
    ]
    for texts in ranks.run(wrong_calls, ranks=2):
        for text, want in zip(texts, expected, strict=True):
            assert text.startswith(want), text
