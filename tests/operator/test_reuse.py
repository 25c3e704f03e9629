"""A call leaves nothing behind and depends on nothing but its arguments' values."""

import subprocess
import sys

import pytest
import torch

from kda_cp import chunk_kda, fused_recurrent_kda
from kda_cp.testing.compare import assert_bitwise, draw_inputs, draw_upstream, run

OPERATORS = pytest.mark.parametrize(
    "operator", [chunk_kda, fused_recurrent_kda], ids=["chunk", "recurrent"]
)


def copied(tensors):
    return {name: x.clone() for name, x in tensors.items()}


@OPERATORS
@pytest.mark.parametrize("keep", [False, True])
def test_inputs_are_unchanged(operator, keep):
    """Neither inputs nor upstream gradients are written to, forward or backward."""
    inputs = draw_inputs(T=70, HV=4, initial_states=2, raw_gate=True, A_log=True, dt_bias=True)
    upstream = draw_upstream(inputs)
    before = copied(inputs), copied(upstream)
    options = {"disable_recompute": keep} if operator is chunk_kda else {}
    run(
        operator,
        inputs,
        upstream,
        cu_seqlens=[0, 33, 68],
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        **options,
    )
    assert_bitwise(inputs, before[0])
    assert_bitwise(upstream, before[1])


def test_results_share_no_memory_with_inputs():
    """Writing to what came out changes nothing that went in, an empty sequence's state included."""
    inputs = draw_inputs(T=70, initial_states=2)
    before = copied(inputs)
    o, final, h = chunk_kda(
        **inputs, cu_seqlens=[0, 70, 70], output_final_state=True, return_intermediate_states=True
    )
    for x in (o, final, h):
        x.fill_(7.0)
    assert_bitwise(inputs, before)


@OPERATORS
def test_the_output_may_be_changed_in_place(operator):
    """As that of any other layer: o.mul_(2) is recorded, not refused."""
    inputs = draw_inputs(T=70, HV=4, K=16)
    upstream = draw_upstream(inputs)

    def in_place(**arguments):
        o, final_state = operator(**arguments)
        return o.mul_(2), final_state

    doubled = {"o": 2 * upstream["o"]}
    got, want = run(in_place, inputs, upstream), run(operator, inputs, doubled)
    assert_bitwise({**got, "o": got["o"] / 2}, want)


@pytest.mark.parametrize(("threads", "repeats"), [(1, 50), (2, 4)])
def test_repeats_are_the_same_bits(threads, repeats):
    """Deterministic, on one thread or two (few repeats: threads spin where cores are shared)."""
    torch.set_num_threads(threads)
    inputs = draw_inputs(T=70, HV=4, K=16, initial_states=2)
    upstream = draw_upstream(inputs)
    first = run(chunk_kda, inputs, upstream, cu_seqlens=[0, 33, 70])
    for _ in range(repeats - 1):
        assert_bitwise(run(chunk_kda, inputs, upstream, cu_seqlens=[0, 33, 70]), first)


GEOMETRIES = [
    (dict(T=70, HV=4, K=24, V=40), {}),
    (dict(T=33, B=2, H=1, K=16), dict(chunk_size=16)),
    (dict(T=70, HV=4, K=24, V=40, dtype=torch.bfloat16), {}),
    (dict(T=70, HV=4, K=24, V=40), dict(cu_seqlens=[0, 30, 70])),
    (dict(T=70, HV=4, K=24, V=40, dtype=torch.float64), dict(cu_seqlens=[0, 30, 30, 60])),
    (dict(T=1, H=3, K=64), {}),
]


def geometry(n):
    drawn, options = GEOMETRIES[n]
    inputs = draw_inputs(**drawn)
    return run(chunk_kda, inputs, draw_upstream(inputs), **options)


def test_geometries_in_any_order_and_interleaved_with_backward():
    """Shapes and types in turn, twice, and backward long after other calls: the same bits."""
    forwards = [geometry(n) for n in range(len(GEOMETRIES))]
    for n in reversed(range(len(GEOMETRIES))):
        assert_bitwise(geometry(n), forwards[n])

    pending = []
    for drawn, options in GEOMETRIES:
        inputs = draw_inputs(**drawn)
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        o, _ = chunk_kda(**leaves, **options)
        pending.append((leaves, o, draw_upstream(inputs)["o"]))
    for (leaves, o, do), want in zip(pending, forwards, strict=True):
        grads = torch.autograd.grad(o, list(leaves.values()), do)
        found = {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}
        assert_bitwise({"o": o.detach(), **found}, want)


def test_a_fresh_process_gives_the_same_bits(tmp_path):
    """What was called before in this process leaves no trace in the results."""
    for n in range(len(GEOMETRIES)):
        geometry(n)
    path = tmp_path / "results.pt"
    program = (
        "import runpy, sys, torch\n"
        "torch.set_num_threads(1)\n"
        f"names = runpy.run_path({__file__!r})\n"
        f"torch.save([names['geometry'](n) for n in (4, 0)], {str(path)!r})\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
    for results, n in zip(torch.load(path), (4, 0), strict=True):
        assert_bitwise(geometry(n), results)


# Strides ------------------------------------------------------------------------------------------


def fused_projection(inputs):
    """q, k, v, g as slices of one projection [B, T, D] and beta as its last columns."""
    B, T = inputs["q"].shape[:2]
    parts = [inputs[name].reshape(B, T, -1) for name in ("q", "k", "v", "g", "beta")]
    slices = torch.cat(parts, -1).split([part.shape[-1] for part in parts], -1)
    names = ("q", "k", "v", "g", "beta")
    views = {n: x.view(inputs[n].shape) for n, x in zip(names, slices, strict=True)}
    return {**inputs, **views}


def heads_first(inputs):
    """Tensors that lie as [B, H, T, K] in memory."""
    return {
        name: x if "state" in name else x.transpose(1, 2).contiguous().transpose(1, 2)
        for name, x in inputs.items()
    }


def transposed_channels(inputs):
    """The last dimension is not the fastest."""
    return {name: x.mT.contiguous().mT for name, x in inputs.items()}


def every_second(inputs):
    """Every second row of a buffer whose other rows are NaN."""

    def spread(x):
        buffer = x.new_full((*x.shape[:1], 2 * x.shape[1], *x.shape[2:]), float("nan"))
        buffer[:, ::2] = x
        return buffer[:, ::2]

    return {name: spread(x) for name, x in inputs.items()}


@OPERATORS
@pytest.mark.parametrize(
    "layout", [fused_projection, heads_first, transposed_channels, every_second]
)
@pytest.mark.parametrize("packed", [False, True])
def test_strides_change_no_bit(layout, packed, operator):
    """Inputs, states and upstream gradients in any memory layout equal contiguous ones."""
    cu_seqlens = [0, 30, 65] if packed else None
    inputs = draw_inputs(T=70, B=1 if packed else 2, HV=4, K=24, V=40, initial_states=2)
    upstream = draw_upstream(inputs)
    plain = run(operator, inputs, upstream, cu_seqlens=cu_seqlens)
    strided = layout(inputs)
    assert any(not x.is_contiguous() for x in strided.values())
    assert_bitwise(strided, inputs)
    # A recurrent backward that starts from a transposed state sums in another order: right, but
    # not promised to the bit.
    plain_upstream = layout is fused_projection or (
        layout is transposed_channels and operator is fused_recurrent_kda
    )
    dy = upstream if plain_upstream else layout(upstream)
    assert_bitwise(run(operator, strided, dy, cu_seqlens=cu_seqlens), plain)


@OPERATORS
def test_upstream_gradients_of_stride_0(operator):
    """o.sum().backward() gives an expanded gradient: bitwise as one of ones."""
    inputs = draw_inputs(T=70, HV=4, K=24, V=40, initial_states=1)
    ones = {n: torch.ones_like(x) for n, x in draw_upstream(inputs).items()}
    expanded = {n: torch.ones(()).expand(x.shape) for n, x in ones.items()}
    assert_bitwise(run(operator, inputs, expanded), run(operator, inputs, ones))


def test_inputs_of_stride_0():
    """An expanded beta and g: one number for all tokens."""
    inputs = draw_inputs(T=70, HV=4, K=24, V=40)
    upstream = draw_upstream(inputs)
    for name in ("beta", "g"):
        inputs[name] = inputs[name][:, :1].expand(inputs[name].shape)
    whole = {name: x.contiguous() for name, x in inputs.items()}
    assert_bitwise(run(chunk_kda, inputs, upstream), run(chunk_kda, whole, upstream))


# Grad modes ---------------------------------------------------------------------------------------


@OPERATORS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(operator, mode):
    """The same bits, and nothing attached."""
    inputs = draw_inputs(T=70, initial_states=1)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    o, final = operator(**leaves, output_final_state=True)
    assert o.requires_grad and final.requires_grad
    with mode():
        free, free_final = operator(**leaves, output_final_state=True)
    assert not free.requires_grad and not free_final.requires_grad
    assert torch.equal(o, free) and torch.equal(final, free_final)


def test_inputs_that_require_nothing_give_results_that_require_nothing():
    """Under grad mode, too."""
    o, final = chunk_kda(**draw_inputs(T=20, initial_states=1), output_final_state=True)
    assert not o.requires_grad and not final.requires_grad


def test_second_derivatives_are_refused():
    """A double backward raises and says so, instead of returning zeros."""
    inputs = draw_inputs(T=20)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    o, _ = chunk_kda(**leaves)
    with pytest.raises(NotImplementedError, match="gradient of its gradient"):
        (dq,) = torch.autograd.grad(o.square().sum(), leaves["q"], create_graph=True)
        dq.square().sum().backward()


@pytest.mark.parametrize("keep", [False, True])
def test_backward_twice_through_a_retained_graph(keep):
    """The backward consumes nothing it saved."""
    inputs = draw_inputs(T=70, initial_states=1)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    o, _ = chunk_kda(**leaves, disable_recompute=keep)
    do = torch.randn_like(o)
    first = torch.autograd.grad(o, list(leaves.values()), do, retain_graph=True)
    second = torch.autograd.grad(o, list(leaves.values()), do)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant):
    """A recomputed forward gives the same gradients to the bit."""
    from torch.utils.checkpoint import checkpoint

    inputs = draw_inputs(T=70, initial_states=1)
    upstream = draw_upstream(inputs)

    def checkpointed(**leaves):
        names = [name for name in leaves if isinstance(leaves[name], torch.Tensor)]
        rest = {name: x for name, x in leaves.items() if name not in names}

        def call(*tensors):
            return chunk_kda(**dict(zip(names, tensors, strict=True)), **rest)

        return checkpoint(call, *(leaves[name] for name in names), use_reentrant=reentrant)

    if reentrant:  # which torch.autograd.grad does not go through
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        torch.autograd.backward(
            checkpointed(**leaves, output_final_state=True), list(upstream.values())
        )
        found = {f"d{name}": x.grad for name, x in leaves.items()}
    else:
        found = run(checkpointed, inputs, upstream)
    plain = run(chunk_kda, inputs, upstream)
    assert_bitwise(found, {name: plain[name] for name in found})


def test_writing_to_an_input_before_the_backward_is_noticed():
    """Saved inputs are versioned: autograd raises instead of giving a wrong gradient."""
    inputs = draw_inputs(T=20)
    leaves = {name: (x * 1).requires_grad_() for name, x in inputs.items()}
    o, _ = chunk_kda(**leaves)
    with torch.no_grad():
        leaves["v"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
