"""One run of every kernel, small, for a tool that watches each of its accesses.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        python3 tests/kernels/sanitize.py

Without the cache every tensor is an allocation of its own, so that a read or write past its end is
seen. bf16 and fp32; whole and partial chunks; channels that fill their tiles and that do not; gates
bounded and not; sequences cut into pieces of two chunks, so that maps and the fold run as well.
Ends with the number of calls; a fault is what the tool reports, and a wrong result a crash here.

A test line, without a GPU: TRITON_INTERPRET=1 python tests/kernels/sanitize.py
"""

from __future__ import annotations

import itertools

import torch

from kda_cp import chunk_kda, platform
from kda_cp.kernels import configs
from kda_cp.testing.compare import draw_inputs
from kda_cp.testing.sharded import TRAINING_OPTIONS

DEVICE = "cuda" if platform.device == "cuda" else "cpu"
SOFTPLUS = {**TRAINING_OPTIONS, "safe_gate": False, "lower_bound": None}
CU_SEQLENS = [0, 128, 128, 129, 300]
"""Two whole chunks, none, one token, and two pieces of which the last is partial."""


def calls():
    """Yield the inputs and options of each call."""
    sizes = ({"K": 64, "V": 64}, {"K": 60, "V": 72})
    for size, dtype in itertools.product(sizes, (torch.bfloat16, torch.float32)):
        raw = {"raw_gate": True, "A_log": True, "dt_bias": True}
        shape = {"H": 1, "HV": 2, "dtype": dtype, **size}
        inputs = draw_inputs(CU_SEQLENS[-1], initial_states=4, **shape, **raw)
        for gate in (TRAINING_OPTIONS, SOFTPLUS):
            yield inputs, {"cu_seqlens": CU_SEQLENS, "return_intermediate_states": True, **gate}
        yield draw_inputs(192, B=2, **shape), {}  # pre-gated, from zero, whole chunks only


def main() -> None:
    """Run them all, each result looked at."""
    configs.segment_chunks = lambda HV, K, V, chunk_size: 2
    count = 0
    for inputs, options in calls():
        inputs = {name: x.to(DEVICE) for name, x in inputs.items()}
        results = chunk_kda(**inputs, **options, output_final_state=True, impl="triton")
        plain = chunk_kda(**inputs, **options, output_final_state=True, impl="torch")
        for x, y in zip(results, plain, strict=True):
            # Far above any rounding: a tool for memory may not hide that the numbers are wrong.
            error = (x.double() - y.double()).norm() / y.double().norm()
            assert error < 0.05, f"{count}: {error:.1e}"
        count += 1
    print(f"{count} calls on {DEVICE}, pieces of 2 chunks")


if __name__ == "__main__":
    main()
