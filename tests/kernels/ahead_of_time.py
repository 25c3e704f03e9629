"""Compile the kernels for a GPU that is not there, and say what each needs.

    python tests/kernels/ahead_of_time.py CAPABILITY < calls        JSON, a line for each kernel
    python tests/kernels/ahead_of_time.py > tests/kernels/budgets.txt       measure the table anew

CAPABILITY is 80, 90 or 100; a call is a line `dtype precision K V chunk`, precision "-" for None.
The host code of `kernels/` runs as it is, so what compiles is what a call with these arguments
would launch: Triton gets a driver that names the GPU, tensors that have no memory, and stops short
of the launch. For its own process: TRITON_INTERPRET must not be set, and what is replaced stays so.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kda_cp.kernels import fold, intra, state
from kda_cp.kernels.primitives import arithmetic

T, HEADS, SEGMENTS = 4096, 32, 4
CAPABILITIES = (80, 90, 100)
CALLS = (
    *(f"bfloat16 - {K} {V}" for K, V in ((64, 64), (128, 128), (256, 256), (64, 128))),
    *(f"float32 - {K} {K}" for K in (64, 128)),
    *(f"float32 tf32 {K} {K}" for K in (64, 128)),
    *(f"float16 - {K} {K}" for K in (64, 128)),
)
"""The calls of the table, without their chunk size."""


class AbsentGPU:
    """What Triton asks a driver before it launches."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(self.target.arch, 10)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


def compile_only() -> list[tuple[str, object]]:
    """From here on a launch compiles, and adds (kernel, compiled) to the returned list."""
    compiled: list[tuple[str, object]] = []
    run = JITFunction.run

    def record(self, *args, grid, warmup, **keywords):
        kernel = run(self, *args, grid=grid, warmup=True, **keywords)
        compiled.append((self.__name__, kernel))
        return kernel

    JITFunction.run = record
    return compiled


def resources(kernel) -> dict[str, int]:
    """Registers and stack of a thread, and the shared memory of a program, in bytes."""
    dump = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [dump, "--dump-resource-usage", file.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+).*LOCAL:(\d+)", found)
    assert numbers is not None, found
    registers, stack, local = map(int, numbers.groups())
    return {"registers": registers, "stack": stack + local, "shared": kernel.metadata.shared}


def launch(dtype: torch.dtype, precision: str | None, K: int, V: int, C: int) -> Iterator[str]:
    """Launch every kernel of a call; yields the name of each variant after its launch."""

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    numbers = arithmetic(dtype, precision, interpreted=False)
    q, v = new(1, T, HEADS, K, dtype=dtype), new(1, T, HEADS, V, dtype=dtype)
    for bounded in (True, False):
        terms = intra.chunk_terms(
            q,
            q,
            q,
            new(1, T, HEADS, dtype=dtype),
            new(HEADS),
            new(HEADS * K),
            new(T // C, 3, dtype=torch.int64),
            scale=K**-0.5,
            chunk_size=C,
            normalize_qk=True,
            gate=intra.BOUNDED if bounded else intra.SOFTPLUS,
            lower_bound=-5.0,
            bounded=bounded,
            sigmoid_beta=True,
            beta_factor=1.0,
            arithmetic=numbers,
        )
        yield "bounded" if bounded else "unbounded"
    work = new(SEGMENTS, 7, dtype=torch.int64)
    states = new(SEGMENTS, HEADS, K, V)
    common = {"key_dim": K, "arithmetic": numbers}
    for o, h in ((v, None), (v, new(T // C, HEADS, K, V)), (None, None)):
        entry = None if o is None else states
        state.walk_segments(
            v, terms, work, entry=entry, states=states, exits=states, o=o, h=h, **common
        )
        yield "no outputs" if o is None else "outputs" if h is None else "all outputs"
    maps = new(SEGMENTS, HEADS, K, V + K)
    state.walk_maps(v, terms, work, maps, **common)
    yield "maps"
    fold.fold(maps, states, new(1, 4, dtype=torch.int64))
    yield "fold"


def compile_calls(capability: int) -> None:
    """Print the resources of the kernels of every call on the standard input."""
    driver.set_active(AbsentGPU(capability))
    compiled = compile_only()
    for line in sys.stdin:
        dtype, precision, K, V, C = line.split()
        call = (getattr(torch, dtype), None if precision == "-" else precision)
        for variant in launch(*call, int(K), int(V), int(C)):
            for name, kernel in compiled:
                row = {"kernel": f"{name} {variant}", "call": line.strip()}
                print(json.dumps(row | resources(kernel)), flush=True)
            compiled.clear()


def measure() -> None:
    """Print the table of budgets: registers and stack in chunks of 64 on every capability."""
    calls = "".join(f"{call} 64\n" for call in CALLS)
    command = [sys.executable, __file__]
    cells: dict[tuple[str, str], list[str]] = {}
    for capability in CAPABILITIES:
        done = subprocess.run(
            [*command, str(capability)], input=calls, capture_output=True, text=True, check=True
        )
        for row in map(json.loads, done.stdout.splitlines()):
            key = row["call"].removesuffix(" 64"), row["kernel"]
            cells.setdefault(key, []).append(f"{row['registers']}/{row['stack']}")
    print(f"# registers/bytes of stack a thread, in chunks of 64; Triton {triton.__version__}")
    titles = [f"sm_{capability}" for capability in CAPABILITIES]
    for (call, kernel), measured in {("call", "kernel"): titles, **cells}.items():
        print(" | ".join([f"{call:22}", f"{kernel:26}", *(f"{x:>8}" for x in measured)]))


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "the interpreter compiles nothing"
    if len(sys.argv) > 1:
        compile_calls(int(sys.argv[1]))
    else:
        measure()
