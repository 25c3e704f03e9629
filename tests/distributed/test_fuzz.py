"""Any sharded call equals the token recurrence in float64: calls drawn at random.

A longer run, of other calls with each seed:

    python -m pytest tests/distributed/test_fuzz.py --hypothesis-profile long \
        --hypothesis-seed 7 --timeout 0

A call that fails is printed as Python. Paste it into `FOUND` with a word on what was wrong: it is
then a test of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import softplus

from kda_cp import build_cp_context, eager
from kda_cp.comm.plan import make_plan
from kda_cp.comm.selection import EXCHANGES
from kda_cp.reference import recurrent_kda_reference
from kda_cp.testing.compare import ONLY_OF_THE_OPERATOR, assert_similar, bounds, run
from kda_cp.testing.ranks import RankError, RankPool
from kda_cp.testing.sharded import (
    TOKENS,
    RankResult,
    ShardedCall,
    assert_equals_oracle,
)

MOST_TOKENS = 200
"""Several chunks on each of several ranks; the recurrence in float64 takes most of the time."""

PATIENCE = 30.0
"""Seconds until ranks that wait for one another count as a failure."""

NOT_OF_THE_REFERENCE = (*ONLY_OF_THE_OPERATOR, "return_intermediate_states", "state_v_first")


@dataclass(frozen=True)
class Result(RankResult):
    """A rank's results; apart from them those that `assert_equals_oracle` does not judge here.

    `apart` holds the intermediate states, and the gradients of parameters: each rank's are held
    to the part of its own tokens, because the sum over ranks of rounded parts may cancel.
    """

    apart: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Case(ShardedCall):
    """A call with all that may differ between calls and between their ranks.

    Attributes:
        ranks: P.
        start: who gives an initial state: "nobody", "owners" of a sequence's first token,
            "everybody".
        end: what the final state is: "unasked", "asked", "differentiated".
        check: whether ranks compare their arguments.
        without_o: ranks whose loss leaves their o out, and reaches the final state alone.
        one_chunk_a_slab: whether chunk terms are computed one chunk at a time.
    """

    ranks: int = 1
    start: str = "nobody"
    end: str = "unasked"
    check: str = "always"
    without_o: Sequence[int] = ()
    one_chunk_a_slab: bool = False
    _oracle: dict[str, Tensor] = field(default_factory=dict, init=False, compare=False)

    def __repr__(self) -> str:
        """As Python, without what is as by default."""
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if f.init]
        default = Case(())
        shown = [f"{n}={x!r}" for n, x in given if n == "cu_seqlens" or x != getattr(default, n)]
        return f"Case({', '.join(shown)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print every field

    def draw_global(self, ranks: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """As a `ShardedCall` with states, less the states that this call is without."""
        inputs, upstream = super().draw_global(ranks)
        if self.start == "nobody":
            inputs.pop("initial_state", None)
        if self.end != "differentiated":
            upstream.pop("final_state", None)
        if self.options.get("use_qk_l2norm_in_kernel"):
            inputs["k"] = 2 * inputs["k"]  # else there is no norm to take away
        if self.options.get("use_beta_sigmoid_in_kernel"):
            inputs["beta"] = 4 * inputs["beta"] - 2
        return inputs, upstream

    def __call__(self, group: torch.distributed.ProcessGroup) -> Result:
        context = build_cp_context(
            self.cu_seqlens, group, exchange=self.exchange, check=self.check, **self.layout
        )
        inputs, upstream = self.draw_global(context.size)
        owners = [context.initial_state_owner(n) for n in range(context.num_sequences)]
        if self.start == "owners" and context.rank not in owners:
            inputs.pop("initial_state", None)
        if context.rank in self.without_o:
            del upstream["o"]
        if self.options.get("state_v_first"):
            _turn(inputs, upstream)
        slab = 1 if self.one_chunk_a_slab else eager.SLAB_ELEMENTS
        with mock.patch.object(eager, "SLAB_ELEMENTS", slab):
            answer = self.run_on(context, inputs, upstream)
        if self.options.get("state_v_first"):
            _turn(answer.results)
        apart = {name: answer.results.pop(name) for name in APART if name in answer.results}
        return Result(answer.results, answer.forward, answer.backward, apart)

    def run_oracle(self, ranks: int) -> dict[str, Tensor]:
        return self.oracle

    @property
    def oracle(self) -> dict[str, Tensor]:
        """The token recurrence in float64, run once."""
        if not self._oracle:
            self._oracle.update(self.run_recurrence(torch.float64))
        return self._oracle

    def run_recurrence(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The token recurrence, unsharded; its h is the state before every token."""
        inputs, upstream = self.draw_global(self.ranks)
        tokens, dense = self.boundaries[-1], isinstance(self.cu_seqlens, int)
        if dense:  # the recurrence knows no padding of dense rows
            inputs = {n: x[:, :tokens] if n in TOKENS else x for n, x in inputs.items()}
            upstream["o"] = upstream["o"][:, :tokens]
        if "initial_state" not in inputs:  # the final state of an empty document needs one
            sequences = inputs["q"].shape[0] if dense else len(self.cu_seqlens) - 1
            _, _, value_heads, key_dim = inputs["g"].shape
            shape = (sequences, value_heads, key_dim, inputs["v"].shape[3])
            inputs["initial_state"] = torch.zeros(shape)
        options = {n: x for n, x in self.options.items() if n not in NOT_OF_THE_REFERENCE}
        results = run(
            recurrent_kda_reference,
            {name: x.to(dtype) for name, x in inputs.items()},
            upstream,
            cu_seqlens=None if dense else self.cu_seqlens,
            return_states=self.options.get("return_intermediate_states", False),
            dtype=dtype,
            **options,
        )
        for name in {"o", "h", *(f"d{n}" for n in TOKENS)} & results.keys() if dense else ():
            x = results[name]
            past = x.new_zeros((x.shape[0], self.num_tokens - tokens, *x.shape[2:]))
            results[name] = torch.cat([x, past], 1)
        return results

    def share(self, rank: int, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a rank gives where `whole` is what the unsharded recurrence gives."""
        plan = self.plan(self.ranks)
        inputs, _ = self.draw_global(self.ranks)
        sequences = range(len(self.boundaries) - 1)
        owned = {
            "final_state": [plan.final_state_owner(n) == rank for n in sequences],
            "dinitial_state": [plan.initial_state_owner(n) == rank for n in sequences],
        }
        without = {f"d{name}" for name in self.frozen.get(rank, ())}
        if self.start == "nobody" or (self.start == "owners" and not any(owned["dinitial_state"])):
            without.add("dinitial_state")

        share = {}
        for name, x in whole.items():
            if name in owned:
                mine = torch.tensor(
                    owned[name] * (len(x) // max(len(sequences), 1)), dtype=torch.bool
                )
                share[name] = torch.where(mine.view(-1, 1, 1, 1), x, 0)
            elif name == "h":
                chunk = self.options.get("chunk_size", 64)
                segments = plan.segments(rank)
                firsts = [t for s in segments for t in range(s.start, s.stop, chunk)]
                share[name] = x[:, firsts]
            elif name == "o" or name[1:] in TOKENS:
                share[name] = _local(x, plan.ranges(rank))
        # From the gradient of z, the gate's argument: it is dg.
        g, dz = _local(inputs["g"], plan.ranges(rank)).double(), share["dg"].double()
        if "ddt_bias" in whole:
            share["ddt_bias"] = dz.sum((0, 1)).flatten()
            g = g + inputs["dt_bias"].double().view(g.shape[2:])
        if "dA_log" in whole:
            bounded = self.options.get("safe_gate", False)
            per_rate = g if bounded else softplus(g) / torch.sigmoid(g)
            share["dA_log"] = (per_rate * dz).sum((0, 1, 3))
        return {name: x for name, x in share.items() if name not in without}


APART = ("h", "dA_log", "ddt_bias")
STATES = ("final_state", "dinitial_state")


def _local(x: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([x[:, :0], *(x[:, start:stop] for start, stop in ranges)], 1)


def _turn(*tensors: dict[str, Tensor]) -> None:
    """States from [.., K, V] to [.., V, K], in place, or back."""
    for by_name in tensors:
        for name in {"initial_state", "h", *STATES} & by_name.keys():
            by_name[name] = by_name[name].mT.contiguous()


def assert_right(pool: RankPool, case: Case) -> None:
    """Every result of every rank is the oracle's, and no rank has more results or fewer."""
    answers = assert_equals_oracle(pool, case, case.ranks)
    plan = case.plan(case.ranks)
    inputs, _ = case.draw_global(case.ranks)
    gate = {n: case.options[n] for n in ("use_gate_in_kernel", "lower_bound") if n in case.options}
    for rank, answer in enumerate(answers):
        got = {**answer.results, **answer.apart}
        want = case.share(rank, case.oracle)
        assert set(got) == set(want), f"rank {rank}: {sorted(got)} instead of {sorted(want)}"
        assert all(got[name].shape == x.shape for name, x in want.items()), f"rank {rank}: shapes"
        chosen = {n: x for n, x in want.items() if n in (*APART, *STATES) and x.numel()}
        # The measure of the parameters' gradients reads these, which have been judged.
        terms = {n: _local(case.oracle[n], plan.ranges(rank)) for n in ("dq", "dk", "dg")}
        try:
            assert_similar(
                {**terms, **{name: got[name] for name in chosen}},
                {**terms, **chosen},
                bounds(inputs["q"].dtype),
                inputs={
                    n: _local(x, plan.ranges(rank)) if n in TOKENS else x for n, x in inputs.items()
                },
                **gate,
            )
        except AssertionError as fault:
            raise AssertionError(f"rank {rank}: {fault}") from None


def is_ill_conditioned(case: Case) -> bool:
    """Whether nothing can be asked: the recurrence itself, in float32, fails a tenth of the bounds.

    It does where a result cancels (of one token, dbeta is a sum of a few terms) or cannot be
    represented (a gradient of 1e-9 in float16).
    """
    double = next(iter(case.draw_global(case.ranks)[0].values())).dtype == torch.float64
    factor = 10 * 2.0**-29 if double else 10.0
    exact, rough = case.oracle, case.run_recurrence(torch.float32)
    coarse = {name: x + factor * (rough[name].double() - x) for name, x in exact.items()}
    inputs, _ = case.draw_global(case.ranks)
    types = {"o": inputs["v"].dtype, **{f"d{name}": x.dtype for name, x in inputs.items()}}

    def answer(rank: int) -> Result:
        share = case.share(rank, coarse)
        share = {name: x.to(types.get(name, x.dtype)) for name, x in share.items()}
        apart = {name: share.pop(name) for name in APART if name in share}
        return Result(share, [], [], apart)

    try:
        assert_right(SimpleNamespace(run=lambda call, ranks: [*map(answer, range(ranks))]), case)
    except AssertionError:
        return True
    return False


# Drawing ------------------------------------------------------------------------------------------

# Strategies shrink towards what they name first; what needs most luck is named twice.
RANKS = st.one_of(st.integers(1, 6), st.sampled_from([3, 2, 4, 5]))
TOKENS_IN_ALL = st.one_of(st.integers(0, MOST_TOKENS), st.integers(24, MOST_TOKENS))
HEADS = [(1, 1), (1, 2), (2, 2), (1, 3), (3, 3), (2, 4), (1, 5), (5, 5), (2, 6), (3, 6)]
CHANNELS = st.one_of(st.integers(2, 16), st.sampled_from([4, 8])).map(lambda n: 2 * n)
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def near(edges: Sequence[int], tokens: int) -> st.SearchStrategy[int]:
    """A place in a stream: close to one of the edges, or to the edge of a block, or anywhere."""
    blocks = range(0, tokens + 1, 16)
    close = st.tuples(st.sampled_from([*edges, *blocks]), st.integers(-1, 1)).map(sum)
    return st.one_of(close, st.integers(0, tokens)).map(lambda n: min(max(n, 0), tokens))


@st.composite
def layouts(draw: st.DrawFn, name: str, ranks: int, tokens: int) -> dict[str, Any]:
    """A layout by name, or "fragments": pieces of any size in any order on any rank."""
    if name != "fragments":
        return {} if name == "contiguous" else {"layout": name}
    in_turn = draw(st.booleans())  # then several states pass between the same two ranks
    cuts = draw(st.lists(near([], tokens), min_size=2 * ranks if in_turn else 0, max_size=16))
    pieces = list(pairwise(sorted([0, *cuts, tokens])))
    if in_turn:
        pieces = [(start, stop) for start, stop in pieces if start < stop]
    shards: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for n, piece in enumerate(pieces if in_turn else draw(st.permutations(pieces))):
        shards[n % ranks if in_turn else draw(st.integers(0, ranks - 1))].append(piece)
    return {"fragments": shards}


@st.composite
def documents(draw: st.DrawFn, edges: Sequence[int], tokens: int) -> list[int]:
    """Boundaries, often at or beside the ranks' edges; several empty documents may follow."""
    ends = draw(st.lists(near(edges, tokens), max_size=8))
    empty = draw(st.lists(st.sampled_from([0, *ends, tokens]), max_size=3))
    padded = ends and draw(st.booleans())
    return sorted([0, *ends, *empty] if padded else [0, *ends, *empty, tokens])


@st.composite
def gates(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of `draw_inputs` and options that go with them."""
    mode = draw(st.sampled_from(["pre-gated", "bounded", "softplus"]))
    if mode == "pre-gated":
        decay = st.sampled_from([1e-3, 0.1, 3.0, 0.0, 30.0])
        return {"decay": tuple(draw(st.lists(decay, min_size=1, max_size=3)))}, {}
    drawn = {"raw_gate": True, "dt_bias": draw(st.booleans()), "A_log": True}
    options = {"use_gate_in_kernel": True}
    if mode == "bounded":
        drawn["A_log"] = draw(st.booleans())
        options |= {"safe_gate": True, "lower_bound": draw(st.sampled_from([-5.0, -1.0, -0.1]))}
    return drawn, options


@st.composite
def inputs_without_gradient(draw: st.DrawFn, ranks: int) -> dict[int, tuple[str, ...]]:
    """For some ranks, some inputs or all of them."""
    if draw(st.booleans()):
        return {}
    some = st.one_of(st.lists(st.sampled_from(NAMES), unique=True).map(tuple), st.just(NAMES))
    by_rank = {rank: draw(some) for rank in draw(subsets(ranks))}
    return {rank: names for rank, names in by_rank.items() if names}


def subsets(ranks: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, ranks - 1), unique=True).map(sorted)


@st.composite
def cases(draw: st.DrawFn, exchange: str, layout_name: str) -> Case:
    """Any call that the operator serves."""
    if exchange == "all_gather" and draw(st.booleans()):
        exchange = "auto"  # which chooses it for sizes like these
    ranks = draw(RANKS)
    tokens = draw(TOKENS_IN_ALL)
    layout = draw(layouts(layout_name, ranks, tokens))
    edges = [f.stop for f in make_plan((0, tokens), ranks, **layout).fragments]
    cu_seqlens = draw(documents(edges, tokens))
    heads, value_heads = draw(st.sampled_from(HEADS))
    drawn: dict[str, Any] = {"H": heads, "HV": value_heads, "K": draw(CHANNELS)}
    if draw(st.booleans()):
        drawn["V"] = draw(CHANNELS)
    dense = draw(st.sampled_from([False, False, False, True]))
    if dense:
        drawn["B"] = draw(st.integers(1, 3))
    if cu_seqlens[-1] < tokens:
        layout["num_tokens"] = tokens

    gate, options = draw(gates())
    drawn |= gate
    for flag in (
        "use_qk_l2norm_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "disable_recompute",
        "state_v_first",
        "return_intermediate_states",
    ):
        if draw(st.booleans()):
            options[flag] = True
    if options.get("use_beta_sigmoid_in_kernel") and draw(st.booleans()):
        options["allow_neg_eigval"] = True
    scale = draw(st.sampled_from([None, 1.0, 0.37, -0.5]))
    if scale is not None:
        options["scale"] = scale
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    if dtype != torch.float32:
        drawn["dtype"] = dtype
    # float32 beside float64 is legal, but a dg of float32 cannot keep the bounds of float64.
    if dtype in (torch.bfloat16, torch.float16) and draw(st.booleans()):
        drawn["gate_dtype"] = torch.float32
    drawn["seed"] = draw(st.integers(0, 99))

    start = draw(st.sampled_from(["nobody", "everybody", "owners", "everybody"]))
    end = draw(st.sampled_from(["unasked", "differentiated", "asked", "differentiated"]))
    if end == "asked":
        options["output_final_state"] = True
    loss_ranks = draw(st.one_of(st.none(), subsets(ranks))) if drawn["K"] >= 8 else None
    without_o = ()
    if end == "differentiated" and loss_ranks is not None:
        without_o = [rank for rank in draw(subsets(ranks)) if rank not in loss_ranks]
    # A chunk of C tokens takes each of the K directions of a state C / K times by 1 - beta. What is
    # left of a gradient that came from later chunks alone is then a small difference, which float32
    # loses where C / K is large; the recurrence, token by token, does not.
    sizes = [size for size in (16, 64, 32) if loss_ranks is None or size <= 2 * drawn["K"]]
    chunk_size = draw(st.sampled_from(sizes))
    if chunk_size != 64:
        options["chunk_size"] = chunk_size
    return Case(
        cu_seqlens[-1] if dense else cu_seqlens,
        layout,
        drawn,
        options,
        loss_ranks=loss_ranks,
        exchange=exchange,
        frozen=draw(inputs_without_gradient(ranks)),
        ranks=ranks,
        start=start,
        end=end,
        check=draw(st.sampled_from(["always", "off"])),
        without_o=without_o,
        one_chunk_a_slab=draw(st.booleans()),
    )


# Tests --------------------------------------------------------------------------------------------

LONG = settings.default is settings.get_profile("long")
SETTINGS = settings(
    # The first ten of each test are independent of one another; later ones vary those before.
    settings.default if LONG else settings(max_examples=9, derandomize=True),
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    # How busy the machine is says nothing about the strategies.
    suppress_health_check=[HealthCheck.too_slow],
)

TINY = {"H": 1, "HV": 1, "K": 4, "decay": (0.001,), "seed": 0}
FOUND: dict[str, Case] = {
    # Of an operator broken on purpose, so far.
    "no fold in the ring's backward": Case([0, 3], draw=TINY, exchange="ring", ranks=3),
    "two states between the same ranks change places": Case(
        [0, 2, 16],
        {"fragments": [[(0, 1), (2, 15)], [(1, 2), (15, 16)]]},
        TINY,
        exchange="ring",
        ranks=2,
    ),
    "a rank of frozen inputs stays away from the backward": Case(
        [0, 4], draw=TINY, frozen={0: NAMES}, ranks=2
    ),
}
"""Calls that failed once, under a word on what was wrong."""

STUCK: dict[tuple[str, str], tuple[str, RankError]] = {}
"""By exchange and layout, the call on which ranks waited for one another, and what was said."""


@pytest.mark.parametrize("fault", FOUND)
def test_a_call_that_failed_once(ranks, fault):
    assert_right(ranks, FOUND[fault])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "fragments"])
@pytest.mark.parametrize("exchange", EXCHANGES)
@SETTINGS
@given(data=st.data())
def test_any_call_equals_the_recurrence(ranks, exchange, layout, data):
    case = data.draw(cases(exchange, layout), label="for FOUND")
    if (exchange, layout) in STUCK:  # no time for smaller calls; the same one is asked for again
        stuck, error = STUCK[exchange, layout]
        if repr(case) != stuck:
            reject()
        raise error
    try:
        assert_right(SimpleNamespace(run=partial(ranks.run, timeout=PATIENCE)), case)
    except AssertionError:
        if is_ill_conditioned(case):
            event("ill-conditioned")
            reject()
        raise
    except RankError as error:
        if "did not answer" in str(error):
            STUCK[exchange, layout] = repr(case), error
        raise
