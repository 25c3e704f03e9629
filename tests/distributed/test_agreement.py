"""Ranks that differ all raise the same error, which names one of them; none of them waits."""

import pytest
import torch

from kda_cp import build_cp_context, chunk_kda_cp, reduce_gradients, reshard, shard, unshard
from kda_cp.comm.collectives import SideGroup
from kda_cp.testing.compare import draw_inputs
from kda_cp.testing.sharded import TRAINING_OPTIONS, ShardedCall, assert_equals_oracle

DRAW = {"H": 1, "HV": 2, "K": 16, "V": 24, "raw_gate": True, "A_log": True, "dt_bias": True}
SECONDS = 10  # every rank has raised by then


def error_of(step):
    try:
        step()
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


def call_with(group, exchange, odd_rank, draw, options):
    """The error of a call in which one rank draws other inputs or passes other options."""
    odd = group.rank() == odd_rank
    context = build_cp_context([0, 30, 90], group, exchange=exchange)
    inputs = draw_inputs(90, **(DRAW | draw if odd else DRAW))
    local = {n: x if n in ("A_log", "dt_bias") else shard(x, context) for n, x in inputs.items()}
    arguments = {**TRAINING_OPTIONS, **(options if odd else {})}
    return error_of(lambda: chunk_kda_cp(**local, cp_context=context, **arguments))


DIFFERENCES = {
    "dtype": (
        {"dtype": torch.bfloat16},
        {},
        "q: expected torch.float32 [1, T, 1, 16] on cpu, as on {others}, got torch.bfloat16 [1, T,",
    ),
    "more value heads": ({"HV": 3}, {}, "v: expected torch.float32 [1, T, 2, 24] on cpu, as on"),
    "another K and V of the same product": ({"K": 24, "V": 16}, {}, "q: expected torch.float32 [1"),
    "chunk size": ({}, {"chunk_size": 16}, "chunk_size: expected 64, as on {others}, got 16"),
    "scale": ({}, {"scale": 0.5}, "scale: expected 0.25, as on {others}, got 0.5"),
    "a flag": ({}, {"output_final_state": True}, "output_final_state: expected False, as on"),
    "a bound": ({}, {"lower_bound": -4.0}, "lower_bound: expected -5.0, as on {others}, got -4.0"),
    "no A_log": ({"A_log": False}, {}, "A_log: expected torch.float32 [2] on cpu, as on {others}"),
    "an error of its own": ({}, {"chunk_size": 48}, "chunk_size: expected one of"),
    "an error in shapes": ({"B": 2}, {}, "q: expected one packed row, B = 1, for this context"),
    "an unknown option": ({}, {"use_gate": True}, "chunk_kda_cp: expected a keyword of chunk_kda"),
    "what nothing serves": ({}, {"precision": "tf32"}, "precision: expected 'ieee' or None for"),
}


@pytest.mark.parametrize("odd_rank", [0, 2])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_rank_that_calls_otherwise_is_named_on_every_rank(ranks, name, odd_rank):
    draw, options, text = DIFFERENCES[name]
    others = {0: "ranks 1, 2", 2: "ranks 0, 1"}[odd_rank]
    errors = ranks.run(call_with, "all_gather", odd_rank, draw, options, ranks=3, timeout=SECONDS)
    kinds = {"precision": "NotImplementedError", "use_gate": "TypeError"}
    kind = next((kinds[name] for name in options if name in kinds), "ValueError")
    assert errors[0].startswith(f"{kind}: rank {odd_rank}: " + text.format(others=others))
    assert errors == [errors[0]] * 3


def test_a_disagreement_is_raised_under_every_exchange(ranks, exchange):
    errors = ranks.run(call_with, exchange, 1, {"HV": 3}, {}, ranks=3, timeout=SECONDS)
    assert errors[0].startswith("ValueError: rank 1: v: expected")
    assert errors == [errors[0]] * 3


def after_an_error(group, exchange):
    """A call that fails on one rank, then the same call made rightly."""
    context = build_cp_context([0, 90], group, exchange=exchange)
    inputs = draw_inputs(90, H=2, K=16)
    local = {name: shard(x, context) for name, x in inputs.items()}
    wrong = dict(local, scale="large") if context.rank == 1 else local
    error = error_of(lambda: chunk_kda_cp(**wrong, cp_context=context))
    o, _ = chunk_kda_cp(**local, cp_context=context)
    return error, unshard(o, context)


def test_the_ranks_go_on_after_an_error(ranks, exchange):
    answers = ranks.run(after_an_error, exchange, ranks=3, timeout=SECONDS)
    for error, o in answers:
        assert error.startswith("ValueError: rank 1: scale: expected")
        assert torch.equal(o, answers[0][1]) and o.isfinite().all()


def other_calls(group):
    """Ranks that call different things, or with contexts that differ."""
    rank = group.rank()
    one, other = (build_cp_context([0, 90], group, layout=x) for x in ("contiguous", "zigzag"))
    x = torch.zeros(1, 30, 4)
    inputs = draw_inputs(30, H=2, K=16)
    mine = other if rank == 1 else one
    steps = [
        lambda: chunk_kda_cp(**inputs, cp_context=mine),
        lambda: unshard(x, one) if rank == 1 else chunk_kda_cp(**inputs, cp_context=one),
        lambda: unshard(x if rank == 1 else x.double(), one),
        lambda: unshard(x[:, :29] if rank == 1 else x, one),
        lambda: unshard(x, one, dim=1 if rank == 1 else -2),  # the same dimension
        lambda: unshard(x, mine),
        lambda: reshard(x, one, one if rank == 1 else other),
        lambda: reshard(x[:, 1:] if rank == 1 else x, one, other),
        lambda: reshard(x, one, build_cp_context([0, 90], None) if rank == 1 else other),
        lambda: reduce_gradients([torch.zeros(2 + rank, requires_grad=True)], one),
        lambda: reduce_gradients(None if rank == 1 else [], one),
    ]
    with torch.no_grad():
        return [error_of(step) for step in steps]


def test_ranks_that_make_different_calls_hear_of_it(ranks):
    expected = [
        "rank 1: cp_context: expected 90 tokens, 1 sequences, contiguous, exchange auto (",
        "rank 1: call: expected chunk_kda, as on ranks 0, 2, got unshard",
        "rank 1: x: expected torch.float64 [1, T, 4] on cpu, as on ranks 0, 2, got torch.float32",
        "rank 1: x: expected 30 local tokens along dimension 1, got 29",
        None,
        "rank 1: cp_context: expected 90 tokens, 1 sequences, contiguous, exchange auto (",
        "rank 1: to_context: expected 90 tokens, 1 sequences, zigzag, exchange auto (",
        "rank 1: x: expected 30 local tokens along dimension 1, got 29",
        "rank 1: to_context: expected the ranks of from_context, 3, got 1",
        "rank 1: parameters: expected torch.float32 [2] on cpu, as on rank 0, got torch.float32",
        "rank 1: parameters: expected tensors, as model.parameters(), got NoneType",
    ]
    for texts in ranks.run(other_calls, ranks=3, timeout=SECONDS):
        for text, want in zip(texts, expected, strict=True):
            assert text is None if want is None else text.startswith("ValueError: " + want), text


def another_grad_mode(group):
    context = build_cp_context([0, 30], group)
    inputs = {n: shard(x, context).requires_grad_() for n, x in draw_inputs(30, K=16).items()}
    with torch.set_grad_enabled(group.rank() != 1):
        return [
            error_of(lambda: chunk_kda_cp(**inputs, cp_context=context)),
            error_of(lambda: unshard(inputs["q"], context)),
        ]


def test_a_rank_under_no_grad_alone_is_named(ranks):
    """It would take no part in the others' backward."""
    expected = "ValueError: rank 1: grad mode: expected True, as on ranks 0, 2, got False"
    for errors in ranks.run(another_grad_mode, ranks=3, timeout=SECONDS):
        assert errors == [expected] * 2


TABLES = ([[(0, 9)], [(9, 18)], [(18, 90)]], [[(0, 30)], [(30, 60)], [(60, 90)]])


def another_context(group, other):
    """Rank 1 calls with, and builds, another context than the rest."""
    rank = group.rank()
    usual = {"cu_seqlens": [0, 90], "fragments": TABLES[1]}
    contexts = [build_cp_context(group=group, **arguments) for arguments in (usual, usual | other)]
    context = contexts[rank == 1]
    inputs = draw_inputs(context.num_tokens, H=2, K=16)
    return [
        error_of(lambda: chunk_kda_cp(**inputs, cp_context=context)),
        error_of(lambda: build_cp_context(group=group, **(usual | other if rank == 1 else usual))),
    ]


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"exchange": "ring"}, "exchange"),
        ({"fragments": TABLES[0]}, "fragments"),
        ({"fragments": TABLES[1][::-1]}, "fragments"),  # as many tokens on each rank
        ({"cu_seqlens": 90}, "cu_seqlens"),
        ({"cu_seqlens": [0, 40, 90]}, "cu_seqlens"),
    ],
    ids=str,
)
def test_contexts_that_differ_in_anything_are_told_apart(ranks, other, name):
    for call, build in ranks.run(another_context, other, ranks=3, timeout=SECONDS):
        assert call.startswith("ValueError: rank 1: cp_context: expected 90 tokens, 1 sequences,")
        assert build.startswith(f"ValueError: rank 1: {name}: expected")


def spelled_otherwise(group):
    """Rank 1 means the same as the others in other words; only some ranks give the state."""
    context = build_cp_context([0, 90], group)
    inputs = {n: shard(x, context) for n, x in draw_inputs(90, K=16, raw_gate=True).items()}
    state = torch.ones(1, 2, 16, 16)
    one = {"scale": 0.25, "impl": "torch", "precision": "ieee", "lower_bound": -5}
    words = one if context.rank == 1 else {"lower_bound": -5.0}
    if context.rank == context.initial_state_owner(0):
        words["initial_state"] = state
    inputs = {n: torch.nn.Parameter(x) if context.rank == 2 else x for n, x in inputs.items()}
    return error_of(
        lambda: chunk_kda_cp(
            **inputs, cp_context=context, use_gate_in_kernel=True, safe_gate=True, **words
        )
    )


def test_the_same_call_in_other_words_is_no_disagreement(ranks):
    assert ranks.run(spelled_otherwise, ranks=3, timeout=SECONDS) == [None] * 3


def tensors_elsewhere(group):
    context = build_cp_context([0, 90], group)
    inputs = {n: shard(x, context) for n, x in draw_inputs(90, K=16).items()}
    if context.rank == 1:
        inputs = {n: x.to("meta") for n, x in inputs.items()}
    return error_of(lambda: chunk_kda_cp(**inputs, cp_context=context))


def test_a_rank_with_tensors_on_another_device_is_named(ranks):
    for error in ranks.run(tensors_elsewhere, ranks=3, timeout=SECONDS):
        assert error.startswith(
            "ValueError: rank 1: q: expected torch.float32 [1, T, 2, 16] on cpu"
        )
        assert error.endswith("on meta")


class Unprintable(float):
    def __str__(self):
        raise LookupError("no words for it")

    __repr__ = __str__


def mistakes_of_one_rank(group):
    """Mistakes that other code than the checks of the operator would trip over."""
    one = group.rank() == 1
    context = build_cp_context([0, 90], group)
    inputs = draw_inputs(30, H=2, K=16)
    x = torch.ones(30)
    model = torch.nn.Linear(2, 2)
    embedding = torch.nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    return [
        error_of(lambda: unshard(x, context, dim=None if one else 0)),
        error_of(lambda: unshard(x, context, dim=0.0 if one else 0)),
        error_of(
            lambda: reduce_gradients(
                model.named_parameters() if one else model.parameters(), context
            )
        ),
        error_of(lambda: reduce_gradients([embedding.weight] if one else [], context)),
        error_of(
            lambda: chunk_kda_cp(**inputs, cp_context=context, scale=Unprintable(1) if one else 1)
        ),
    ]


def test_any_mistake_of_one_rank_is_heard_by_all(ranks):
    expected = [
        "rank 1: dim: expected an int, got None",
        "rank 1: dim: expected an int, got 0.0",
        "rank 1: parameters: expected tensors, as model.parameters(), got tuple at position 0",
        "rank 1: parameters: expected dense gradients, got torch.sparse_coo at 0",
        None,
    ]
    for texts in ranks.run(mistakes_of_one_rank, ranks=3, timeout=SECONDS):
        for text, want in zip(texts, expected, strict=True):
            assert text is None if want is None else text == "ValueError: " + want


def rows_without_end(group, exchange):
    context = build_cp_context(90, group, exchange=exchange)
    inputs = {n: shard(x, context)[:0] for n, x in draw_inputs(90, K=16).items()}
    inputs = {n: x.requires_grad_() for n, x in inputs.items()}
    o, _ = chunk_kda_cp(**inputs, cp_context=context)
    o.sum().backward()
    return o.shape, inputs["q"].grad.shape


def test_a_batch_of_no_rows_is_legal(ranks, exchange):
    shapes = ranks.run(rows_without_end, exchange, ranks=3)
    assert shapes == [((0, 30, 2, 16), (0, 30, 2, 16))] * 3


def from_inference_mode(group, trains):
    """Rank 1's inputs come from inference mode: all of them, or v alone beside trained ones."""
    context = build_cp_context([0, 90], group)
    inputs = {n: shard(x, context) for n, x in draw_inputs(90, K=16).items()}
    with torch.inference_mode():
        made = {n: x * 1 for n, x in inputs.items()}
        tokens = made["v"]
    if context.rank != 1:
        inputs = {n: x.requires_grad_() for n, x in inputs.items()}
    else:
        inputs = {n: x.requires_grad_() for n, x in inputs.items()} | {"v": made["v"]}
        inputs = inputs if trains else made
    o, _ = chunk_kda_cp(**inputs, cp_context=context)
    whole = unshard(tokens if context.rank == 1 else inputs["v"], context)
    (o.sum() + whole.sum()).backward()
    return {n: x.grad for n, x in inputs.items()}


@pytest.mark.parametrize("trains", [False, True])
def test_tensors_from_inference_mode_take_part_as_frozen_ones(ranks, trains):
    answers = ranks.run(from_inference_mode, trains, ranks=3, timeout=SECONDS)
    assert all(grad is not None for rank in (0, 2) for grad in answers[rank].values())
    assert (answers[1]["q"] is not None) is trains
    assert answers[1]["v"] is None


def only_a_state_trains(group):
    context = build_cp_context([0, 90], group)
    inputs = {n: shard(x, context) for n, x in draw_inputs(90, K=16).items()}
    state = torch.zeros(1, 2, 16, 16, requires_grad=context.rank == 0)
    o, _ = chunk_kda_cp(**inputs, cp_context=context, initial_state=state)
    o.sum().backward()
    return state.grad


def test_a_state_that_alone_needs_a_gradient_gets_it(ranks):
    first, *others = ranks.run(only_a_state_trains, ranks=3, timeout=SECONDS)
    assert first.any() and others == [None, None]


EVERYTHING = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


@pytest.mark.parametrize(
    "frozen",
    [{0: EVERYTHING}, {1: EVERYTHING}, {0: EVERYTHING, 2: EVERYTHING}, {1: ("v", "A_log"), 2: "q"}],
    ids=["first", "middle", "both ends", "some inputs"],
)
def test_a_rank_of_frozen_inputs_takes_part_in_the_backward(ranks, exchange, frozen):
    call = ShardedCall([0, 30, 90], {}, DRAW, TRAINING_OPTIONS, exchange=exchange, frozen=frozen)
    answers = assert_equals_oracle(ranks, call, 3)
    for rank, names in frozen.items():
        assert not {f"d{name}" for name in names} & set(answers[rank].results)


def frozen_tokens(group, call):
    """Tokens gathered and moved with x frozen on rank 0 alone; gradients of the others."""
    one, other = (build_cp_context([0, 9], group, layout=x) for x in ("contiguous", "zigzag"))
    x = torch.ones(3, requires_grad=group.rank() != 0)
    y = unshard(x, one, dim=0) if call == "unshard" else reshard(x, one, other, dim=0)
    y.sum().backward()
    return x.grad


@pytest.mark.parametrize(("call", "gradient"), [("unshard", 3.0), ("reshard", 1.0)])
def test_frozen_tokens_of_one_rank_take_part_in_the_backward(ranks, call, gradient):
    first, *others = ranks.run(frozen_tokens, call, ranks=3, timeout=SECONDS)
    assert first is None
    assert all(x.tolist() == [gradient] * 3 for x in others)


def side_messages(group, check):
    """How often a call, its backward and two gathers of tokens speak over the side group."""
    context = build_cp_context([0, 90], group, check=check)
    inputs = {n: shard(x, context).requires_grad_() for n, x in draw_inputs(90, K=16).items()}
    count = [0]
    maximum = SideGroup.maximum

    def counted(self, x):
        count[0] += 1
        return maximum(self, x)

    SideGroup.maximum = counted
    try:
        o, _ = chunk_kda_cp(**inputs, cp_context=context)
        unshard(o, context).sum().backward()
        unshard(inputs["beta"].detach(), context)
    finally:
        SideGroup.maximum = maximum
    return count[0]


@pytest.mark.parametrize(("check", "count"), [("always", 3), ("off", 0)])
def test_each_call_is_checked_once_or_never(ranks, check, count):
    assert ranks.run(side_messages, check, ranks=2) == [count] * 2


def frozen_without_a_check(group):
    """With check="off" a rank that froze its inputs still joins, as it cannot know that others."""
    context = build_cp_context([0, 90], group, check="off")
    local = {n: shard(x, context) for n, x in draw_inputs(90, K=16).items()}
    if context.rank != 1:
        local = {n: x.requires_grad_() for n, x in local.items()}
    o, _ = chunk_kda_cp(**local, cp_context=context)
    (o.sum() + unshard(local["v"], context).sum()).backward()
    unshard(torch.arange(30), context, dim=0)  # integers have no gradient to expect
    return local["v"].grad


def test_without_the_check_every_rank_expects_a_backward(ranks):
    checked = ranks.run(frozen_without_a_check, ranks=3)
    assert checked[1] is None and checked[0].any() and checked[2].any()


def one_context_after_another(group):
    """Contexts of one group share what the check needs; of other groups they do not."""
    first = build_cp_context([0, 9], group)
    return first._agreement is build_cp_context([0, 12], group)._agreement


def test_contexts_of_a_group_share_its_agreement(ranks):
    assert all(ranks.run(one_context_after_another, ranks=2))


def test_one_rank_needs_no_agreement(ranks):
    assert ranks.run(alone, ranks=1) == [
        "ValueError: scale: expected a finite number or None, got 'big'"
    ]


def alone(group):
    context = build_cp_context([0, 9], group, check="off")
    assert context._agreement is None
    o, _ = chunk_kda_cp(**draw_inputs(9), cp_context=context)
    assert not o.requires_grad
    return error_of(lambda: chunk_kda_cp(**draw_inputs(9), cp_context=context, scale="big"))
