"""What a sharded call reads: the same values in any memory layout, dtype and spelling, to the bit.

It writes to none of it, whatever came before; what it cannot read is one error on every rank.
"""

import dataclasses
from contextlib import nullcontext

import pytest
import torch

from kda_cp import build_cp_context, chunk_kda_cp, shard
from kda_cp.testing.compare import assert_bitwise, draw_inputs, run
from kda_cp.testing.sharded import TOKENS, TRAINING_OPTIONS, ShardedCall

OPTIONS = {**TRAINING_OPTIONS, "lower_bound": -0.05}  # so weak that states cross ranks
DRAW = {"H": 2, "HV": 4, "K": 16, "V": 24, "raw_gate": True, "A_log": True, "dt_bias": True}
CALL = ShardedCall([0, 37, 100], {"layout": "zigzag"}, DRAW, OPTIONS)


def context_of(call, group, exchange):
    return build_cp_context(call.cu_seqlens, group, exchange=exchange, **call.layout)


def draw_local(context):
    inputs, upstream = CALL.draw_global(context.size)
    upstream["o"] = shard(upstream["o"], context)
    return {n: shard(x, context) if n in TOKENS else x for n, x in inputs.items()}, upstream


# Memory -------------------------------------------------------------------------------------------


def together(tensors):
    """One projection [1, T, D]."""
    return torch.cat([x.flatten(2) for x in tensors.values()], -1)


def apart(projection, like):
    """Its slices, in the shapes of `like`."""
    parts = projection.split([x[0, 0].numel() for x in like.values()], -1)
    views = zip(like.items(), parts, strict=True)
    return {n: part.unflatten(-1, x.shape[2:]) for (n, x), part in views}


def fused(tensors):
    """Slices of one projection, beta its last columns."""
    tokens = {n: x for n, x in tensors.items() if n in (*TOKENS, "o")}
    return tensors | apart(together(tokens), tokens)


def heads_first(tensors):
    """As [B, H, T, K] and [B, H, T] in memory."""
    long = {n: x for n, x in tensors.items() if x.dim() > 2}
    return tensors | {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in long.items()}


def between_nans(tensors):
    """Every second number of a buffer."""
    return {n: torch.stack([x, x * torch.nan], -1)[..., 0] for n, x in tensors.items()}


def one_for_all(tensors):
    """A row, state or number expanded to all the others: strides of 0."""
    first = {n: x[:1] for n, x in tensors.items()}
    first |= {n: x[:, :1] for n, x in tensors.items() if n in ("g", "beta")}
    first |= {n: x.flatten()[0] for n, x in tensors.items() if n == "o"}
    return {n: first[n].expand(x.shape) for n, x in tensors.items()}


def in_memory(group, exchange, lay_out):
    """Results on laid out tensors and on contiguous copies; both, and whether one was written."""
    context = context_of(CALL, group, exchange)
    pair = [lay_out(tensors) for tensors in draw_local(context)]
    given = [x for tensors in pair for x in tensors.values()]
    assert sum(not x.is_contiguous() for x in given) >= 5
    versions = [x._version for x in given]
    copies = [{n: x.clone().contiguous() for n, x in tensors.items()} for tensors in pair]
    options = {"cp_context": context, **OPTIONS}
    results = [run(chunk_kda_cp, *tensors, **options) for tensors in (pair, copies)]
    return results, [pair, copies], [x._version for x in given] != versions


@pytest.mark.parametrize("lay_out", [fused, heads_first, between_nans, one_for_all])
def test_any_layout_in_memory_is_read_and_never_written_to(ranks, exchange, lay_out):
    for (got, want), (pair, copies), written in ranks.run(in_memory, exchange, lay_out, ranks=3):
        assert_bitwise(got, want)
        for given, copied in zip(pair, copies, strict=True):
            assert_bitwise(given, copied)
        assert not written


def through_one_projection(group, exchange):
    """A leaf that all inputs are slices of, k being q as well; and each a leaf of its own."""
    context = context_of(CALL, group, exchange)
    inputs, upstream = draw_local(context)
    tokens = {n: inputs[n] for n in TOKENS[1:]}
    rest = {n: x for n, x in inputs.items() if n not in TOKENS}

    def operator(x, **options):
        parts = apart(x, tokens)
        return chunk_kda_cp(q=parts["k"], **parts, **options)

    options = {"cp_context": context, **OPTIONS}
    got = run(operator, {"x": together(tokens), **rest}, upstream, **options)
    want = run(chunk_kda_cp, inputs | {"q": inputs["k"]}, upstream, **options)
    want["dk"] += want.pop("dq")
    want["dx"] = together({n: want.pop(f"d{n}") for n in tokens})
    return got, want


def test_gradients_add_up_in_the_projection_that_inputs_are_slices_of(ranks, exchange):
    for got, want in ranks.run(through_one_projection, exchange, ranks=3):
        assert_bitwise(got, want)


# Order --------------------------------------------------------------------------------------------

FEW = {"H": 1, "K": 24, "V": 16, "raw_gate": True, "A_log": True}
GEOMETRIES = [
    CALL,
    dataclasses.replace(CALL, draw={**FEW, "dtype": torch.bfloat16}),
    dataclasses.replace(CALL, draw=FEW, options={**OPTIONS, "chunk_size": 16}),
    dataclasses.replace(CALL, draw={**DRAW, "dtype": torch.float64}, states=False),
    ShardedCall(50, {}, {**DRAW, "B": 2}, OPTIONS),
]


def in_turn(group, exchange, order, fresh):
    """Every call on a context of its own, or packed calls on one and dense ones on another."""
    contexts, answers = {}, []
    for call in (GEOMETRIES[number] for number in order):
        key = len(answers) if fresh else type(call.cu_seqlens)
        context = contexts.setdefault(key, context_of(call, group, exchange))  # the first of them
        answers.append(call.run_on(context, *call.draw_global(context.size)).results)
    return answers


@pytest.mark.parametrize("order", [[0] * 20, [0, 1, 2, 3, 4, 4, 3, 0, 2, 1]], ids=len)
def test_repeats_and_other_geometries_and_dtypes_change_no_bit(ranks, exchange, order):
    alone = ranks.run(in_turn, exchange, range(max(order) + 1), True, ranks=3)
    answers = ranks.run(in_turn, exchange, order, False, ranks=3)
    for results, want in zip(answers, alone, strict=True):
        for number, got in zip(order, results, strict=True):
            assert_bitwise(got, want[number])


# Dtypes and settings ------------------------------------------------------------------------------

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
GATES = dict.fromkeys(["g", "beta", "A_log", "dt_bias"], FP32)
DTYPES = [(BF16, {}), (BF16, GATES), (BF16, {"beta": FP32}), (FP16, {}), (FP16, {"g": FP32})]


def in_dtypes(group, exchange, low, wide):
    """Results of a call in lower precision, and of the same values in fp32, rounded."""
    call = dataclasses.replace(CALL, options={**OPTIONS, "scale": 2**-8})
    context = context_of(call, group, exchange)
    inputs, upstream = call.draw_global(context.size)
    # Entries past the largest fp16 number cross ranks: states are fp32. What is fp16 stays small.
    inputs["initial_state"][0, 0, 3, 5], inputs["initial_state"][1, 1, 2, 4] = 65536.0, 1e6
    upstream = {"o": upstream["o"].to(low) / 2**14, "final_state": upstream["final_state"] / 2**24}
    dtypes = {n: low for n in inputs} | {"initial_state": FP32} | wide
    inputs = {n: x.to(dtypes[n]) for n, x in inputs.items()}
    got = call.run_on(context, inputs, upstream).results
    upcast = [{n: x.to(FP32) for n, x in tensors.items()} for tensors in (inputs, upstream)]
    want = call.run_on(context, *upcast).results
    of_result = {"o": low, "final_state": FP32} | {f"d{n}": dtype for n, dtype in dtypes.items()}
    return got, {n: x.to(of_result[n]) for n, x in want.items()}


@pytest.mark.parametrize(("low", "wide"), DTYPES, ids=str)
def test_low_precision_is_fp32_rounded_once_to_each_input_s_dtype(ranks, exchange, low, wide):
    for got, want in ranks.run(in_dtypes, exchange, low, wide, ranks=3):
        assert_bitwise(got, want)
        assert all(x.isfinite().all() for x in got.values())


def under_settings(group, exchange):
    """Results under none, under autocast of one pass alone, and under other default dtypes."""
    context = context_of(CALL, group, exchange)
    data = draw_local(context)
    loud, quiet = torch.autocast("cpu", dtype=BF16), torch.autocast("cpu", enabled=False)
    answers = []
    for around, operator, default in (
        (nullcontext(), chunk_kda_cp, FP32),
        (nullcontext(), loud(chunk_kda_cp), FP32),
        (loud, quiet(chunk_kda_cp), FP32),
        (nullcontext(), chunk_kda_cp, FP64),
        (nullcontext(), chunk_kda_cp, BF16),
    ):
        torch.set_default_dtype(default)
        try:
            with around:
                answers.append(run(operator, *data, cp_context=context, **OPTIONS))
        finally:
            torch.set_default_dtype(FP32)
    return answers


def test_autocast_of_one_pass_alone_and_the_default_dtype_change_no_bit(ranks, exchange):
    for plain, *others in ranks.run(under_settings, exchange, ranks=3):
        for other in others:
            assert_bitwise(other, plain)


# Boundaries and padding ---------------------------------------------------------------------------

PADDED = ShardedCall([0, 37, 37, 88], {"num_tokens": 130}, DRAW, OPTIONS)
PADDING_FIRST = {"fragments": [[(88, 130), (0, 30)], [(60, 88)], [(30, 60)]]}


def spelled(group, exchange):
    """Plans and results where each rank spells the boundaries in a way of its own."""
    data = PADDED.draw_global(group.size())
    cu_seqlens = torch.tensor(PADDED.cu_seqlens)
    spellings = [
        {"cu_seqlens": cu_seqlens.clone()},
        {"cu_seqlens": cu_seqlens.int()},
        {"cu_seqlens": torch.stack([cu_seqlens, -cu_seqlens], 1)[:, 0]},
        {"cu_seqlens": cu_seqlens.clone(), "cu_seqlens_cpu": cu_seqlens.int()},
    ]
    answers = []
    for n in range(len(spellings)):
        spelling = spellings[n - group.rank()]
        context = build_cp_context(group=group, exchange=exchange, num_tokens=130, **spelling)
        for x in spelling.values():
            x.zero_()  # the next batch comes into the same buffer
        answers.append((context.plan, PADDED.run_on(context, *data).results))
    return answers


def test_boundaries_mean_the_same_however_they_are_spelled(ranks, exchange):
    alone = ranks.run(dataclasses.replace(PADDED, exchange=exchange), ranks=3)
    for answers, want in zip(ranks.run(spelled, exchange, ranks=3), alone, strict=True):
        for plan, results in answers:
            assert plan == PADDED.plan(3)
            assert_bitwise(results, want.results)


def filled(group, exchange, layout):
    """Results with each filling in the padding."""
    call = dataclasses.replace(PADDED, layout={**PADDED.layout, **layout})
    context = context_of(call, group, exchange)
    answers = []
    for filling in (1.0, torch.nan, torch.inf):
        inputs, upstream = call.draw_global(context.size)
        for x in (*(inputs[name] for name in TOKENS), upstream["o"]):
            x[:, call.cu_seqlens[-1] :] = filling
        answers.append(call.run_on(context, inputs, upstream).results)
    return answers


@pytest.mark.parametrize("layout", [{"layout": "zigzag"}, PADDING_FIRST], ids=str)
def test_padding_may_hold_anything(ranks, exchange, layout):
    for plain, *others in ranks.run(filled, exchange, layout, ranks=3):
        for other in others:
            assert_bitwise(other, plain)


# What is refused ----------------------------------------------------------------------------------

WRONG_BOUNDARIES = {
    (0, 50, 40): "cu_seqlens: expected non-decreasing boundaries, got 40 after 50 at position 2",
    (1, 90): "cu_seqlens: expected 0 first, got 1",
    (0, 91): "num_tokens: expected at least cu_seqlens[-1] = 91, got 90",
}
WRONG_DTYPES = {
    "k": (BF16, "expected the dtype of q, torch.float32, got torch.bfloat16"),
    "v": (FP16, "expected the dtype of q, torch.float32, got torch.float16"),
    "g": (FP64, "expected torch.float32, got torch.float64"),
    "initial_state": (FP16, "expected torch.float32, got torch.float16"),
}


def mistakes(group, check):
    """What wrong boundaries and wrong dtypes on all ranks raise."""
    layout = {"group": group, "check": check, "num_tokens": 90}
    context = build_cp_context([0, 90], **layout)
    inputs = {n: shard(x, context) for n, x in draw_inputs(90, K=16).items()}
    inputs["initial_state"] = torch.zeros(1, 2, 16, 16)
    texts = []
    for make in (list, torch.tensor, lambda x: torch.tensor(x).int()):
        for boundaries in WRONG_BOUNDARIES:
            with pytest.raises(ValueError) as error:
                build_cp_context(make(boundaries), **layout)
            texts.append(str(error.value))
    for name, (dtype, _) in WRONG_DTYPES.items():
        with pytest.raises(ValueError) as error:
            chunk_kda_cp(**inputs | {name: inputs[name].to(dtype)}, cp_context=context)
        texts.append(str(error.value))
    return texts


@pytest.mark.parametrize(("check", "who"), [("always", "every rank: "), ("off", "")])
def test_what_does_not_go_together_is_one_error_on_every_rank(ranks, check, who):
    expected = 3 * [f"every rank: {text}" for text in WRONG_BOUNDARIES.values()]
    expected += [f"{who}{n}: {text}" for n, (_, text) in WRONG_DTYPES.items()]
    assert ranks.run(mistakes, check, ranks=3) == [expected] * 3
