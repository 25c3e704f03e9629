"""On a GPU: the PyTorch implementation, alone and sharded over gloo ranks that share the card.

The Triton kernels alone are tests/kernels/test_cases_gpu.py's; here they are sharded, in float32.

Skipped without CUDA; run by hand there with `pytest tests/distributed/test_gpu.py -m ''`, and the
results are in docs/measurements.md. Ranks on several GPUs, over NCCL, are `kda_cp.launch.verify`'s.
"""

import pytest
import torch

from kda_cp import build_cp_context, chunk_kda, fused_recurrent_kda, platform, reshard, shard
from kda_cp.testing.compare import (
    assert_bitwise,
    assert_similar,
    bounds,
    draw_inputs,
    draw_upstream,
    run,
    run_reference,
)
from kda_cp.testing.sharded import TRAINING_OPTIONS, ShardedCall, assert_equals_oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(platform.device != "cuda", reason="needs a CUDA GPU"),
]

CU_SEQLENS = [0, 65, 65, 200, 281]
TORCH_OPTIONS = {**TRAINING_OPTIONS, "impl": "torch"}
RAW = {"raw_gate": True, "A_log": True, "dt_bias": True}


def on_gpu(tensors):
    return {name: x.cuda() for name, x in tensors.items()}


def on_cpu(tensors):
    return {name: x.cpu() for name, x in tensors.items()}


def draw(dtype, **shape):
    inputs = draw_inputs(281, initial_states=4, dtype=dtype, **RAW, **shape)
    return inputs, draw_upstream(inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(16, 24), (60, 72), (128, 128), (192, 256)], ids=str)
def test_the_operator_equals_the_recurrence(dtype, sizes):
    K, V = sizes
    inputs, upstream = draw(dtype, H=2, HV=4, K=K, V=V)
    want = run_reference(inputs, upstream, cu_seqlens=CU_SEQLENS, **TRAINING_OPTIONS)
    cu_seqlens = torch.tensor(CU_SEQLENS, dtype=torch.int32, device="cuda")
    for operator in (chunk_kda, fused_recurrent_kda):
        got = run(
            operator, on_gpu(inputs), on_gpu(upstream), cu_seqlens=cu_seqlens, **TORCH_OPTIONS
        )
        assert_similar(
            on_cpu(got),
            want,
            bounds(dtype),
            inputs=inputs,
            cu_seqlens=CU_SEQLENS,
            use_gate_in_kernel=True,
            lower_bound=-5.0,
        )


def test_bf16_at_the_size_of_a_model():
    """T = 1024, H = 32, K = V = 128: where the figures of bf16 that are the bound were taken."""
    inputs = draw_inputs(1024, H=32, K=128, dtype=torch.bfloat16, **RAW)
    inputs["g"] -= 3
    upstream = draw_upstream(inputs)
    got = run(chunk_kda, on_gpu(inputs), on_gpu(upstream), **TORCH_OPTIONS)
    want = run_reference(on_gpu(inputs), on_gpu(upstream), **TRAINING_OPTIONS)
    for name, ref in want.items():
        error = (got[name].double() - ref).norm() / ref.norm()
        print(f"{name} {error:.1e}", end="  ")
        assert error < bounds(torch.bfloat16)[name]


def test_tf32_settings_and_autocast_change_nothing():
    inputs, upstream = draw(torch.float32, K=64)
    options = {"cu_seqlens": CU_SEQLENS, **TORCH_OPTIONS}
    plain = run(chunk_kda, on_gpu(inputs), on_gpu(upstream), **options)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        a, b = (torch.randn(256, 256, device="cuda") for _ in range(2))
        exact = (a.double() @ b.double()).float()
        assert (a @ b - exact).norm() > 1e-5 * exact.norm()  # the setting does reach products
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loud = run(chunk_kda, on_gpu(inputs), on_gpu(upstream), **options)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert_bitwise(loud, plain)


def test_repeats_are_bitwise():
    inputs, upstream = draw(torch.bfloat16, K=64)
    options = {"cu_seqlens": CU_SEQLENS, **TORCH_OPTIONS}
    first = run(chunk_kda, on_gpu(inputs), on_gpu(upstream), **options)
    for _ in range(5):
        assert_bitwise(run(chunk_kda, on_gpu(inputs), on_gpu(upstream), **options), first)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    ("dtype", "impl"),
    [(torch.float32, "torch"), (torch.bfloat16, "torch"), (torch.float32, "triton")],
    ids=str,
)
def test_sharded_over_ranks_of_one_card(ranks, exchange, layout, dtype, impl):
    call = ShardedCall(
        [0, 37, 200],
        {"layout": layout},
        {"H": 1, "HV": 2, "K": 32, "V": 64, "dtype": dtype, **RAW},
        {**TRAINING_OPTIONS, "impl": impl},
        device="cuda",
        exchange=exchange,
    )
    assert_equals_oracle(ranks, call, 3)


def move_on_the_card(group):
    one, other = (build_cp_context(100, group, layout=x) for x in ("contiguous", "zigzag"))
    x = torch.randn(2, 100, 3, generator=torch.Generator().manual_seed(0)).cuda()
    local = shard(x, one).requires_grad_()
    there = reshard(local, one, other)
    there.backward(torch.ones_like(there))
    return torch.equal(there, shard(x, other)), bool((local.grad == 1).all())


def test_tokens_move_between_layouts_on_the_card(ranks):
    assert ranks.run(move_on_the_card, ranks=3) == [(True, True)] * 3


def test_tokens_stay_on_their_device():
    context = build_cp_context(torch.tensor([0, 5, 10], device="cuda"), None)
    x = torch.arange(10.0, device="cuda")
    assert torch.equal(shard(x, context, dim=0), x)
