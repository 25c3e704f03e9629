"""Every pinned launch compiles for every GPU, fits its memory, and spills no more than it did.

No GPU is needed: see `ahead_of_time.py`, which also measures `budgets.txt` anew. A spill is no
fault by itself; one that grows unseen is.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Most bytes of shared memory of a program, by compute capability."""

# Compilers of other patch versions differ by a little: this much more than was measured is allowed.
REGISTERS, STACK, STACK_FACTOR = 8, 32, 1.25


def read_budgets():
    """{(call, kernel, capability): (registers, bytes of stack)}."""
    lines = (HERE / "budgets.txt").read_text().splitlines()
    _, _, *titles = (x.strip() for x in lines[1].split("|"))
    budgets = {}
    for line in lines[2:]:
        call, kernel, *cells = (x.strip() for x in line.split("|"))
        for title, cell in zip(titles, cells, strict=True):
            registers, stack = map(int, cell.split("/"))
            budgets[call, kernel, int(title.removeprefix("sm_"))] = registers, stack
    return budgets


BUDGETS = read_budgets()
CALLS = sorted({call for call, _, _ in BUDGETS})
FAST = {"bfloat16 - 128 128": (64,), "bfloat16 - 64 128": (64,)}
"""Chunk sizes of the calls that every run compiles; the others are slow."""


@pytest.fixture
def compile_for(tmp_path):
    """`compile_for(capability, calls)`: what each kernel of the calls needs, compiled afresh."""

    def compile_calls(capability, calls):
        kept = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, HERE / "ahead_of_time.py", str(capability)],
            input="\n".join(calls),
            capture_output=True,
            text=True,
            cwd=HERE.parents[1],
            env={
                **kept,
                "TRITON_CACHE_DIR": str(tmp_path),
                "PYTHONPATH": ".",
                "OMP_NUM_THREADS": "1",
            },
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return compile_calls


def assert_within_budgets(capability, found, calls):
    """Assert that all kernels of the calls were compiled, and that none needs more than it may."""
    expected = {
        (f"{call} {chunk}", kernel)
        for call, chunks in calls.items()
        for chunk in chunks
        for of, kernel, _ in BUDGETS
        if of == call
    }
    assert {(row["call"], row["kernel"]) for row in found} == expected
    faults = []
    for row in found:
        call, chunk = row["call"].rsplit(" ", 1)
        registers, stack = BUDGETS[call, row["kernel"], capability]
        limits = {
            "registers": registers + REGISTERS,
            "stack": stack * STACK_FACTOR + STACK,
            "shared": SHARED[capability],
        }
        if chunk != "64":  # measured at 64; a smaller chunk may spill less and fill more registers
            del limits["registers"]
        faults += [
            f"{row['call']}, {row['kernel']}: {row[what]} {what} > {limit:g}"
            for what, limit in limits.items()
            if row[what] > limit
        ]
    assert not faults, f"sm_{capability}: " + "; ".join(faults)


def lines(calls):
    return [f"{call} {chunk}" for call, chunks in calls.items() for chunk in chunks]


@pytest.mark.timeout(400)  # 25 s of work, which other processes may hold up
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.parametrize("capability", SHARED)
def test_what_most_calls_launch(capability, compile_for):
    """bf16 in chunks of 64, with K = V and with K != V."""
    assert_within_budgets(capability, compile_for(capability, lines(FAST)), FAST)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("capability", SHARED)
def test_every_launch(capability, call, compile_for):
    """All sizes and dtypes of the table, in chunks of 16, 32 and 64."""
    calls = {call: (16, 32, 64)}
    assert_within_budgets(capability, compile_for(capability, lines(calls)), calls)
