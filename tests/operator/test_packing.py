"""Documents packed in one row are strangers: bitwise as if each were called alone."""

from itertools import pairwise

import pytest
import torch

from kda_cp import chunk_kda, fused_recurrent_kda
from kda_cp.testing.compare import (
    assert_bitwise,
    assert_equals_reference,
    assert_similar,
    bounds,
    draw_inputs,
    draw_upstream,
    errors,
    run,
    run_reference,
    take,
)

GATE = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("H", "HV", "K", "V"), [(1, 1, 16, 16), (2, 4, 24, 60), (1, 1, 64, 128), (1, 2, 100, 72)]
)
@pytest.mark.parametrize(
    "cu_seqlens", [[0, 65, 131, 202, 281], [0, 1, 2, 66, 66, 194, 200]], ids=str
)
def test_packed_is_separate_to_the_bit(cu_seqlens, H, HV, K, V, dtype):
    """Compare o, the final state and every gradient of each document; lengths around the chunk."""
    packed_is_separate(cu_seqlens, dict(H=H, HV=HV, K=K, V=V, dtype=dtype))


@pytest.mark.parametrize("chunk_size", [16, 32])
def test_packed_is_separate_with_the_gate_and_norm_in_the_kernel(chunk_size):
    """Activations too have to give an element the same bits wherever it lies."""
    options = {**GATE, "use_beta_sigmoid_in_kernel": True, "chunk_size": chunk_size}
    shape = dict(H=2, HV=4, K=24, V=40, raw_gate=True, A_log=True, dt_bias=True)
    packed_is_separate([0, 3, 68, 68, 131, 202], shape, **options)


def test_packed_is_separate_beside_a_document_of_many_slabs():
    """A long neighbour, cut into slabs of chunks, does not move the bits of a short one."""
    packed_is_separate([0, 70, 70 + 64 * 60, 70 + 64 * 60 + 33], dict(H=2, HV=4, K=64, V=16))


@pytest.mark.parametrize("B", [2, 5])
def test_dense_rows_are_separate_to_the_bit(B):
    """A row of a batch is the call of that row alone."""
    inputs = draw_inputs(T=100, B=B, HV=4, K=24, V=40, initial_states=B)
    upstream = draw_upstream(inputs)
    whole = run(chunk_kda, inputs, upstream, impl="torch")
    for row in range(B):
        one = slice(row, row + 1)
        alone = run(
            chunk_kda,
            {name: x[one] for name, x in inputs.items()},
            {name: x[one] for name, x in upstream.items()},
            impl="torch",
        )
        assert_bitwise(alone, {name: x[one] for name, x in whole.items()})


def packed_is_separate(cu_seqlens, shape, **options):
    """Compare each document's part of a packed call with the call of that document alone."""
    inputs = draw_inputs(T=cu_seqlens[-1], initial_states=len(cu_seqlens) - 1, **shape)
    upstream = draw_upstream(inputs)
    packed = run(chunk_kda, inputs, upstream, cu_seqlens=cu_seqlens, impl="torch", **options)
    for n, (start, stop) in enumerate(pairwise(cu_seqlens)):
        part = (slice(start, stop), slice(n, n + 1))
        alone = run(chunk_kda, take(inputs, *part), take(upstream, *part), impl="torch", **options)
        for name in ("dA_log", "ddt_bias"):
            alone.pop(name, None)
        assert_bitwise(alone, take(packed, *part))


def test_no_gradient_between_documents():
    """A loss on document 1 gives exactly 0 to every input of the others."""
    cu_seqlens = [0, 50, 130, 170]
    inputs = draw_inputs(T=170, HV=4, K=24, initial_states=3)
    upstream = draw_upstream(inputs)
    upstream["final_state"][[0, 2]] = 0
    upstream["o"][:, :50] = 0
    upstream["o"][:, 130:] = 0
    got = run(chunk_kda, inputs, upstream, cu_seqlens=cu_seqlens, impl="torch")
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert (got[name][:, :50] == 0).all() and (got[name][:, 130:] == 0).all(), name
        assert (got[name][:, 50:130] != 0).any(), name
    assert (got["dinitial_state"][[0, 2]] == 0).all()


@pytest.mark.parametrize("layout", ["packed", "dense"])
@pytest.mark.parametrize(
    "poisoned", ["q", "k", "v", "g", "beta", "initial_state", "do", "dfinal_state"]
)
@pytest.mark.parametrize("sick", [0, 1])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_stays_in_its_document(poisoned, poison, sick, layout):
    """NaN or inf in any tensor of one document leaves the others bitwise as they were.

    Token 0 among them, which the padding rows of every chunk read.
    """
    lengths = [50, 80, 40] if layout == "packed" else [60] * 3
    ends = torch.tensor(lengths).cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    cu_seqlens = [0, *ends] if layout == "packed" else None
    shape = dict(T=ends[-1]) if cu_seqlens else dict(T=60, B=3)
    inputs = draw_inputs(**shape, HV=4, K=24, initial_states=3)
    upstream = draw_upstream(inputs)

    def results():
        return run(chunk_kda, inputs, upstream, cu_seqlens=cu_seqlens, impl="torch")

    def documents(x, numbers):
        if cu_seqlens is None or x.shape[0] == 3:
            return [x[n] for n in numbers]
        return [x[0, starts[n] : ends[n]] for n in numbers]

    clean = results()
    target = upstream[poisoned[1:]] if poisoned.startswith("d") else inputs[poisoned]
    (document,) = documents(target, [sick])
    document[7 * sick if "state" not in poisoned else 0, 1] = poison
    dirty = results()
    for name, x in dirty.items():
        well = [n for n in range(3) if n != sick]
        for a, b in zip(documents(x, well), documents(clean[name], well), strict=True):
            assert torch.equal(a, b), name
    reached = [name for name, x in dirty.items() if not torch.equal(x, clean[name])]
    assert reached, "the poison was not read at all"


@pytest.mark.parametrize(
    "cu_seqlens",
    [[0, 0, 5, 5, 5, 70, 70], [0, 0, 0, 0], [0, 0, 0, 12], [0, 12, 12]],
    ids=str,
)
def test_empty_sequences_pass_their_state_through(cu_seqlens):
    """The final state is the initial state to the bit, and so is its gradient."""
    N = len(cu_seqlens) - 1
    inputs = draw_inputs(T=cu_seqlens[-1], HV=4, K=24, V=40, initial_states=N)
    upstream = draw_upstream(inputs)
    got, _ = assert_equals_reference(
        chunk_kda, inputs, upstream, impl="torch", cu_seqlens=cu_seqlens
    )
    empty = [n for n in range(N) if cu_seqlens[n] == cu_seqlens[n + 1]]
    assert torch.equal(got["final_state"][empty], inputs["initial_state"][empty])
    assert torch.equal(got["dinitial_state"][empty], upstream["final_state"][empty])
    inputs.pop("initial_state")
    _, final_state = chunk_kda(
        **inputs, cu_seqlens=cu_seqlens, output_final_state=True, impl="torch"
    )
    assert (final_state[empty] == 0).all()


@pytest.mark.parametrize("cu_seqlens", [None, [0], [0, 0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("B", [1, 2])
def test_no_tokens_at_all(cu_seqlens, B):
    """T = 0: an empty o that is attached to the graph, states passed through."""
    if cu_seqlens is not None and B != 1:
        pytest.skip("a packed row is one row")
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    inputs = draw_inputs(T=0, B=B, HV=4, K=24, V=40)
    inputs["initial_state"] = torch.randn(N, 4, 24, 40)
    upstream = draw_upstream(inputs, final_states=0)
    upstream["final_state"] = torch.randn(N, 4, 24, 40)
    got = run(
        chunk_kda,
        inputs,
        upstream,
        impl="torch",
        cu_seqlens=cu_seqlens,
        return_intermediate_states=True,
    )
    assert got["o"].shape == (B, 0, 4, 40)
    assert got["h"].shape == (B, 0, 4, 24, 40)
    assert torch.equal(got["final_state"], inputs["initial_state"])
    assert torch.equal(got["dinitial_state"], upstream["final_state"])
    assert got["dq"].shape == inputs["q"].shape
    q = inputs["q"].requires_grad_()
    assert chunk_kda(**{**inputs, "q": q}, cu_seqlens=cu_seqlens)[0].requires_grad


@pytest.mark.parametrize("operator", [chunk_kda, fused_recurrent_kda])
def test_a_batch_of_no_rows(operator):
    """B = 0, as a data-parallel rank may get: empty results, attached to the graph."""
    inputs = draw_inputs(T=20, B=0, HV=4, K=24, V=40)
    inputs["initial_state"] = torch.zeros(0, 4, 24, 40)
    upstream = {"o": torch.zeros(0, 20, 4, 40), "final_state": torch.zeros(0, 4, 24, 40)}
    got = run(operator, inputs, upstream, impl="torch")
    assert got["o"].shape == (0, 20, 4, 40)
    assert got["final_state"].shape == (0, 4, 24, 40)
    assert got["dq"].shape == inputs["q"].shape


def test_a_long_document_between_single_tokens():
    """Documents of 1, 1, 5000 and 1 tokens."""
    inputs = draw_inputs(T=5003, H=1, K=16, initial_states=4)
    upstream = draw_upstream(inputs)
    assert_equals_reference(
        chunk_kda, inputs, upstream, impl="torch", cu_seqlens=[0, 1, 2, 5002, 5003]
    )


def assert_similar_short_documents(got, want, inputs, cu_seqlens=None):
    """As `assert_similar`, but for dbeta.

    Of a document of one token dbeta is a single dot product, among 70,000 of which some cancel to
    nearly 0: it is scored for all documents of a head together, and absolutely each.
    """
    if "dbeta" in want:
        dbeta, ref = (x.pop("dbeta").flatten(0, 1).unsqueeze(0) for x in (got, want))
        assert errors("dbeta", dbeta, ref).max() < 1e-5
        assert (dbeta - ref).abs().max() < 1e-4
    assert_similar(got, want, bounds(torch.float32), inputs=inputs, cu_seqlens=cu_seqlens)


def as_rows(tensors):
    """Documents of one token as the rows of a dense batch, which is how the oracle takes many."""
    return {name: x if "state" in name else x.transpose(0, 1) for name, x in tensors.items()}


@pytest.mark.parametrize(
    ("chunk_size", "wanted"),
    [
        (16, []),
        pytest.param(
            16, None, marks=[pytest.mark.slow, pytest.mark.timeout(600)]
        ),  # 25 s: a token costs a padded chunk
        pytest.param(64, None, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),  # 100 s
    ],
)
def test_seventy_thousand_documents_of_one_token(chunk_size, wanted):
    """More documents than a launch grid's second dimension, held to the dense oracle, T = 1."""
    N = 70_000
    inputs = draw_inputs(T=N, H=1, K=16, initial_states=N)
    upstream = draw_upstream(inputs)
    packed = run(
        chunk_kda,
        inputs,
        upstream,
        wanted=wanted,
        cu_seqlens=torch.arange(N + 1),
        impl="torch",
        chunk_size=chunk_size,
    )
    want = run_reference(as_rows(inputs), as_rows(upstream), wanted=wanted)
    assert_similar_short_documents(as_rows(packed), want, as_rows(inputs))


@pytest.mark.parametrize(
    "wanted",
    [[], pytest.param(None, marks=pytest.mark.slow)],  # 15 s: a token costs a padded chunk
)
def test_eleven_hundred_documents_of_64_heads(wanted):
    """N * HV = 70,400, documents of 0 to 3 tokens."""
    lengths = torch.arange(1100) % 4
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).tolist()
    inputs = draw_inputs(T=cu_seqlens[-1], H=64, K=16, initial_states=1100)
    upstream = draw_upstream(inputs)
    options = dict(wanted=wanted, cu_seqlens=cu_seqlens)
    packed = run(chunk_kda, inputs, upstream, impl="torch", chunk_size=16, **options)
    want = run_reference(inputs, upstream, **options)
    assert_similar_short_documents(packed, want, inputs, cu_seqlens)


def test_127_documents_of_16_32_and_64_tokens():
    """Six heads, documents of one, two and four blocks in turn."""
    lengths = torch.tensor([16, 32, 64]).repeat(43)[:127]
    cu_seqlens = [0, *lengths.cumsum(0).tolist()]
    inputs = draw_inputs(T=cu_seqlens[-1], H=6, K=16, initial_states=127)
    upstream = draw_upstream(inputs)
    assert_equals_reference(chunk_kda, inputs, upstream, impl="torch", cu_seqlens=cu_seqlens)


def test_order_of_documents_is_their_own():
    """The same documents in another order give the same bits, each at its place."""
    lengths = [5, 64, 130, 0, 17]
    order = [2, 4, 0, 3, 1]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    inputs = draw_inputs(T=ends[-1], HV=4, K=24, initial_states=5)
    upstream = draw_upstream(inputs)

    def permuted(tensors):
        result = {}
        for name, x in tensors.items():
            if "state" in name:
                result[name] = x[order]
            else:
                pieces = x[:, : ends[-1]].split(lengths, dim=1)
                result[name] = torch.cat([pieces[n] for n in order], 1)
        return result

    cu_seqlens = [0, *ends]
    moved = [0, *torch.tensor([lengths[n] for n in order]).cumsum(0).tolist()]
    here = run(chunk_kda, inputs, upstream, cu_seqlens=cu_seqlens, impl="torch")
    there = run(chunk_kda, permuted(inputs), permuted(upstream), cu_seqlens=moved, impl="torch")
    assert_bitwise(there, permuted(here))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seqlens_of_any_integer_type_with_padding_behind(dtype):
    """A tensor of int32 or int64, a list, and a copy on the CPU say the same."""
    cu_seqlens = [0, 30, 65]
    inputs = draw_inputs(T=80, HV=4, K=24, initial_states=2)
    upstream = draw_upstream(inputs)
    plain = run(chunk_kda, inputs, upstream, cu_seqlens=cu_seqlens, impl="torch")
    tensor = torch.tensor(cu_seqlens, dtype=dtype)
    assert_bitwise(run(chunk_kda, inputs, upstream, cu_seqlens=tensor, impl="torch"), plain)
    copied = {"cu_seqlens": tensor, "cu_seqlens_cpu": tensor, "impl": "torch"}
    assert_bitwise(run(chunk_kda, inputs, upstream, **copied), plain)
    assert (plain["o"][:, 65:] == 0).all()
