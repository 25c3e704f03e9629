"""Time the forward of the operator on one GPU, beside what others offer, on the same inputs.

    python -m kda_cp.launch.bench
    python -m kda_cp.launch.bench --case t16384-h32 --peers ours,fla --breakdown
    python -m kda_cp.launch.bench --sweep tokens --heads 8
    python -m kda_cp.launch.bench --device cpu --tokens 100 --heads 2 --key-dim 16 --value-dim 16

For each case and implementation: the time of a call, taken in turns, and what of it is the device's
and the host's; the floor that the bytes of inputs and output set; peak memory; the error of o
against the recurrence in float64. Prints tables; writes bench.json and bench.png. What is missing
or fails is a row with the reason. Exit status 0: ours was timed in every case, or was not asked
for; 1: it was not; 2: an option is wrong.
"""

from __future__ import annotations

import argparse
import math
import platform as python_platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kda_cp import platform
from kda_cp.launch.bench_cases import Case, draw
from kda_cp.launch.bench_options import choose_cases, make_parser
from kda_cp.launch.judge import score
from kda_cp.launch.options import expect_packages, make_folder
from kda_cp.launch.peers import PEERS, Call, Peer, Unserved
from kda_cp.launch.processes import find_device
from kda_cp.launch.timing import call_ms, copy_bandwidth, host_ms, kernel_times, peak_bytes
from kda_cp.reference import recurrent_kda_reference

VERSIONS = (
    *("kda-cp", "torch", "triton", "fla-core", "flash-linear-attention", "flash-kda"),
    *("attn-gym", "nvidia-cutlass-dsl"),
)

PIECE = 1024
"""Tokens that are compared at a time, in float64."""

Report = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = make_parser(__doc__)
    options = parser.parse_args(arguments)
    try:
        expect_packages()
        device = _find_gpu(options.device)
        if options.breakdown and device.type == "cpu":
            raise ValueError("--breakdown: expected a GPU, whose kernels it lists, got cpu")
        cases = choose_cases(options)
        for case in cases:
            _try_operator(case)
        make_folder(options.out)
    except ValueError as error:
        parser.error(" ".join(str(error).split()))
    command = ["-m", parser.prog, *(sys.argv[1:] if arguments is None else arguments)]
    report = bench(options, cases, device, command)
    _publish(report, options.out)
    ours = [row for case in report["cases"] for row in case["rows"] if row["peer"] == "ours"]
    return 0 if all(row["ms"] is not None for row in ours) else 1


def bench(
    options: argparse.Namespace, cases: list[Case], device: torch.device, command: list[str]
) -> Report:
    """Measure every case and return the report: milliseconds, bytes, and shares of 1.

    bench.json is written after each case, so that a run that is cut short keeps what it has.
    """
    from kda_cp.launch.report import write_json

    budget = {"warmup_ms": options.warmup_ms, "repeat_ms": options.repeat_ms}
    with torch.inference_mode():
        bandwidth = copy_bandwidth(device, **budget)
        report: Report = {
            "command": command,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "device": device.type,
            "card": describe_card(device),
            "versions": {"python": python_platform.python_version(), **_versions()},
            "setting": {
                "impl": options.impl,
                "sweep": options.sweep,
                "rounds": options.rounds,
                "breakdown": options.breakdown,
                **budget,
            },
            "copy_bytes_per_second": bandwidth,
            "cases": [],
        }
        for case in cases:
            report["cases"].append(_measure(case, options, device, bandwidth))
            write_json(report, options.out / "bench.json")
            timed = [row for row in report["cases"][-1]["rows"] if row["ms"] is not None]
            found = ", ".join(f"{row['peer']} {row['ms']:.3f} ms" for row in timed)
            print(f"{case.name}: {found or 'nothing was timed'}", flush=True)
    return report


def _measure(
    case: Case, options: argparse.Namespace, device: torch.device, bandwidth: float
) -> Report:
    """Everything about one case. A step that fails leaves its reason in the row, and ends it."""
    peers = {name: PEERS[name] for name in options.peers}
    budget = {"warmup_ms": options.warmup_ms, "repeat_ms": options.repeat_ms}
    impl = "torch" if device.type == "cpu" and options.impl == "auto" else options.impl
    problem, floor_ms = draw(case, device), 1e3 * case.floor_bytes / bandwidth
    rows = {name: _new_row(name, peer) for name, peer in peers.items()}
    calls: dict[str, Call] = {}
    whole: list[Tensor] = []  # o of ours at full size, if it is there

    def first_call(name: str) -> None:
        peer = peers[name]
        call = peer.make(problem, impl)
        if peer.needs_gpu and device.type == "cpu":
            raise Unserved("it needs a GPU")
        slow = "; its tuning can take minutes at a new shape" if peer.tunes else ""
        print(f"{case.name}: {name}: first call{slow}", flush=True)
        began = time.perf_counter()
        o = call()
        _wait(device)
        rows[name]["first_call_s"] = time.perf_counter() - began
        print(f"{case.name}: {name}: {rows[name]['first_call_s']:.1f} s", flush=True)
        if o.shape != problem.tensors[2].shape or not bool(torch.isfinite(o).all()):
            raise ValueError("o has another shape than v, or values that are not finite")
        if name == "ours":
            whole.append(o)
        elif whole:  # at full size the recurrence would take too long
            rows[name]["from_ours"] = distance(o, whole[0])
        calls[name] = call

    def one_round(name: str) -> None:
        rows[name]["rounds_ms"].append(call_ms(calls[name], device, **budget))

    def look_closer(name: str) -> None:
        rows[name]["host_ms"] = host_ms(calls[name], device)
        rows[name]["peak_bytes"] = peak_bytes(calls[name], device)
        kernels = kernel_times(calls[name], device)
        if kernels is not None:
            rows[name]["kernels"] = [asdict(kernel) for kernel in kernels]
            rows[name]["device_ms"] = sum(kernel.ms for kernel in kernels)

    # In turns: what a card does over time (clocks, heat, neighbours) meets all of them alike.
    steps = [first_call, *[one_round] * options.rounds, look_closer]
    for step in steps:
        if step is look_closer:  # last, as a profiler that fails ends a row
            _add_errors(case.shortened(), peers, rows, impl, device)
        for name, peer in peers.items():
            _attempt(rows[name], peer, step, name)
        whole.clear()
    for row in rows.values():
        _derive(row, options.rounds, floor_ms)
    fla = rows["fla"]["ms"] if "fla" in rows else None
    for row in rows.values():
        row["fla_ratio"] = None if None in (fla, row["ms"]) else fla / row["ms"]
    return {
        "case": asdict(case),
        "describe": str(case),
        "boundaries": case.boundaries,
        "floor_bytes": case.floor_bytes,
        "floor_ms": floor_ms,
        "error_tokens": case.shortened().tokens,
        "rows": list(rows.values()),
    }


def _new_row(name: str, peer: Peer) -> Report:
    numbers = (
        *("ms", "spread", "device_ms", "host_ms", "floor_share", "fla_ratio", "peak_bytes"),
        *("error", "worst", "from_ours", "first_call_s", "kernels", "host_bound"),
    )
    empty: Report = dict.fromkeys(numbers)
    return {"peer": name, "reason": None, "note": peer.note, "rounds_ms": [], **empty}


def _attempt(row: Report, peer: Peer, step: Callable[[str], None], name: str) -> None:
    if row["reason"] is not None:
        return
    try:
        step(name)
    except Exception as error:  # whatever another project's code raises is a row, not our end
        row["reason"] = peer.explain(error)


def _add_errors(
    short: Case, peers: dict[str, Peer], rows: dict[str, Report], impl: str, device: torch.device
) -> None:
    """Relative error of o against the recurrence in float64, on the same rounded inputs."""
    if all(row["reason"] is not None for row in rows.values()):
        return
    print(f"{short.name}: errors at T {short.tokens:,}", flush=True)
    problem = draw(short, device)
    judge = recurrent_kda_reference(
        *problem.tensors,
        A_log=problem.A_log,
        dt_bias=problem.dt_bias,
        cu_seqlens=short.boundaries,
        **short.options,
    )[0]
    of_token = torch.repeat_interleave(torch.tensor(short.boundaries).diff())

    def compare(name: str) -> None:
        o = peers[name].make(problem, impl)()
        rows[name]["error"] = distance(o, judge)
        worst = score(o[0].transpose(0, 1), judge[0].transpose(0, 1), of_token)
        rows[name]["worst"] = asdict(worst)

    for name, peer in peers.items():
        _attempt(rows[name], peer, compare, name)


def distance(x: Tensor, y: Tensor) -> float:
    """|x - y| / |y|, the Frobenius norm in float64, of tensors [1, T, HV, V] of any dtype."""
    off = size = 0.0
    for a, b in zip(x.split(PIECE, 1), y.split(PIECE, 1), strict=True):
        a, b = a.double(), b.double()
        off += float((a - b).square().sum())
        size += float(b.square().sum())
    return math.sqrt(off / size)


def _derive(row: Report, rounds: int, floor_ms: float) -> None:
    """What follows from the times, as far as they were taken."""
    if len(row["rounds_ms"]) == rounds:
        row["ms"] = median(row["rounds_ms"])
        row["spread"] = (max(row["rounds_ms"]) - min(row["rounds_ms"])) / row["ms"]
        row["floor_share"] = floor_ms / row["ms"]
    if row["device_ms"] is not None:
        row["host_bound"] = row["host_ms"] > row["device_ms"]


# The machine -------------------------------------------------------------------------------------


def _find_gpu(name: str | None) -> torch.device:
    if name is None and platform.device == "cpu":
        raise ValueError(
            "--device: expected a GPU, got none on this machine; "
            "--device cpu tries the command out on small sizes"
        )
    return find_device(platform.device if name is None else name)


def _try_operator(case: Case) -> None:
    """Let the operator itself object to sizes and dtype, on one token, without a GPU."""
    one = draw(replace(case, tokens=1, documents=1), torch.device("cpu"))
    with torch.inference_mode():
        PEERS["ours"].make(one, "torch")()


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def describe_card(device: torch.device) -> str:
    """The cards' name and driver as nvidia-smi has them, or what is known without it."""
    if device.type == "cpu":
        return f"{python_platform.machine()}, {torch.get_num_threads()} threads"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{device.type}, of unknown name ({type(error).__name__})"
    return "; ".join(dict.fromkeys(line.strip() for line in found.stdout.splitlines()))


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found | {"torch": torch.__version__}


def _publish(report: Report, out: Path) -> None:
    from kda_cp.launch.bench_report import draw_picture, print_tables

    draw_picture(report, out / "bench.png")
    print_tables(report)
    print(f"written: {out / 'bench.json'}, {out / 'bench.png'}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
