"""Simulate the exchange of states on 2 to 1024 ranks: time, bytes and kept memory by algorithm.

    python -m kda_cp.launch.simulate --layout zigzag --heads 32
    torchrun --nproc-per-node 8 -m kda_cp.launch.simulate --measure
    python -m kda_cp.launch.simulate --machine out/simulate/machine.json

Nothing is run unless asked to measure; the times are of the model below. Prints tables, and writes
simulate.json and simulate.png. With --measure it writes machine.json instead: the numbers of the
machine that it runs on, and how far the model is off there. Exit status 2: an option is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kda_cp import platform
from kda_cp.comm import affine
from kda_cp.comm.collectives import start_all_gather
from kda_cp.comm.layout import LAYOUTS
from kda_cp.comm.plan import Plan, make_plan
from kda_cp.comm.ring import RingExchange
from kda_cp.comm.traffic import ALGORITHMS, received_bytes
from kda_cp.launch import predict
from kda_cp.launch.machine import Machine, measure, pass_on, read_machine, seconds
from kda_cp.launch.options import Parser, expect_packages, make_folder, positive, positive_number
from kda_cp.launch.predict import gather_seconds, kept_bytes, predict_seconds
from kda_cp.launch.processes import find_device, process_group, this_rank

SIZES = ("heads", "key_dim", "value_dim", "batch")
RECEIVED = ("forward_received_bytes", "backward_received_bytes")

MACHINE_OPTIONS = {
    "nvlink-latency-us": ("nvlink", "latency_s", 1e-6),
    "nvlink-step-us": ("nvlink", "step_s", 1e-6),
    "nvlink-gbytes": ("nvlink", "bandwidth", 1e9),
    "network-latency-us": ("network", "latency_s", 1e-6),
    "network-step-us": ("network", "step_s", 1e-6),
    "network-gbytes": ("network", "bandwidth", 1e9),
    "launch-us": ("", "launch_s", 1e-6),
    "message-us": ("", "message_s", 1e-6),
    "fold-launch-us": ("", "fold_launch_s", 1e-6),
    "fold-us": ("", "fold_s", 1e-6),
    "fold-tflops": ("", "fold_flops", 1e12),
}
"""Link, field and unit of each option that replaces a number of the machine."""

Report = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    try:
        expect_packages()
        machine = _machine(options)
        device = find_device(options.device)
        make_folder(options.out)
    except ValueError as error:
        parser.error(" ".join(str(error).split()))
    if not options.measure:
        report = simulate(options, machine)
        if this_rank() == 0:
            _publish(report, options.out)
        return 0
    with process_group(device) as group:
        if group is None:
            parser.error("--measure: expected ranks that torchrun started, got one process")
        sizes = (options.heads, options.key_dim, options.value_dim)
        found = measure(group, device, *sizes)
        lines = compare(found, group, device, sizes)
        if this_rank() == 0:
            path = options.out / "machine.json"
            found.write(path)
            print(path.read_text() + "\n".join([*lines, f"written: {path}"]), flush=True)
    return 0


def simulate(options: argparse.Namespace, machine: Machine) -> Report:
    """Return times and bytes for every number of ranks and algorithm."""
    rows = []
    for ranks in (2**n for n in range(1, options.doublings + 1)):
        plan = make_plan((0, 2 * ranks), ranks, layout=options.layout)
        found = {name: _row(plan, name, machine, options) for name in ALGORITHMS}
        best = min(found, key=lambda name: found[name]["seconds"])
        nodes = math.ceil(ranks / machine.ranks_per_node)
        rows.append({"ranks": ranks, "nodes": nodes, "best": best, "algorithms": found})
    setting = {name: getattr(options, name) for name in ("layout", *SIZES)}
    return {"setting": setting, "machine": asdict(machine), "rows": rows}


def _row(plan: Plan, name: str, machine: Machine, options: argparse.Namespace) -> Report:
    sizes = {size: getattr(options, size) for size in SIZES}
    predicted = predict_seconds(plan, name, machine, **sizes)
    # Of one document, one of these ranks receives the most.
    candidates = {0, 1, plan.ranks // 2, plan.ranks - 1}
    received = [received_bytes(plan, name, rank, **sizes) for rank in candidates]
    kept = {size: sizes[size] for size in ("heads", "key_dim", "batch")}
    return {
        "forward_seconds": predicted.forward,
        "backward_seconds": predicted.backward,
        "seconds": predicted.total,
        "forward_received_bytes": max(r.forward for r in received),
        "backward_received_bytes": max(r.backward for r in received),
        "kept_bytes": kept_bytes(plan, name, **kept),
    }


def compare(
    machine: Machine, group: dist.ProcessGroup, device: torch.device, sizes: tuple[int, int, int]
) -> list[str]:
    """Predict an all-gather of b and the hops of a ring, time both, and say how they compare."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if ranks == 1:
        return []
    b, A = torch.zeros(1, *sizes, device=device), torch.eye(sizes[1], device=device)
    parts = [part.contiguous() for part in b.chunk(min(sizes[0], RingExchange.parts), dim=1)]

    def pass_states() -> None:
        for part in parts:
            S = part.clone()
            if rank > 0:
                pass_on(S, rank - 1, rank, group)
            if rank < ranks - 1:
                pass_on(affine.apply(A, part, S) if rank > 0 else S, rank, rank + 1, group)

    gather = machine.launch_s + gather_seconds(machine, ranks, b.numel() * b.element_size())
    named: Any = dict(zip(SIZES, sizes, strict=False))
    ring = predict_seconds(make_plan((0, ranks), ranks), "ring", machine, **named).forward
    lines = []
    for what, predicted, measured in (
        ("all-gather of b", gather, seconds(group, device, lambda: start_all_gather(b, group))),
        ("states by a ring", ring, seconds(group, device, pass_states)),
    ):
        ms = f"predicted {1e3 * predicted:.3f} ms, measured {1e3 * measured:.3f} ms"
        lines.append(f"{what}, HV, K, V {sizes}: {ms} ({predicted / measured:.2f} of it)")
    return lines


# Options -----------------------------------------------------------------------------------------


def _make_parser() -> Parser:
    """The options; none is the beginning of one of torchrun's."""
    parser = Parser(
        prog="kda_cp.launch.simulate",
        description=__doc__,
        epilog=predict.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, default = parser.add_argument, Machine()
    add("--layout", choices=LAYOUTS, default="contiguous", help="of one document over the ranks")
    for option, number, meaning in (
        ("--heads", 32, "HV, value heads"),
        ("--key-dim", 128, "K"),
        ("--value-dim", 128, "V"),
        ("--batch", 1, "rows"),
    ):
        add(option, type=positive, default=number, help=f"{meaning} (default: {number})")
    add("--doublings", type=positive, default=10, help="of one rank: 10 is 2 to 1024 ranks")
    add("--out", type=Path, default=Path("out/simulate"), help="folder for what is written")
    add("--measure", action="store_true", help="measure this machine instead, under torchrun")
    add("--device", default=platform.device, help="measured: cpu, or this machine's accelerator")
    add("--machine", type=_file, default=default, help="json of a machine, instead of the defaults")
    add("--ranks-per-node", type=positive, help=f"(default: {default.ranks_per_node})")
    for option, (link, name, unit) in MACHINE_OPTIONS.items():
        usual = getattr(getattr(default, link) if link else default, name) / unit
        kind = positive_number if name in ("bandwidth", "fold_flops") else _number
        add(f"--{option}", type=kind, metavar="X", help=f"(default: {usual:g})")
    return parser


def _machine(options: argparse.Namespace) -> Machine:
    machine: Machine = options.machine
    if options.ranks_per_node is not None:
        machine = replace(machine, ranks_per_node=options.ranks_per_node)
    for option, (link, name, unit) in MACHINE_OPTIONS.items():
        value = getattr(options, option.replace("-", "_"))
        if value is not None:
            change: Any = {name: value * unit}
            if link:
                change = {link: replace(getattr(machine, link), **change)}
            machine = replace(machine, **change)
    return machine


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return value


def _file(text: str) -> Machine:
    try:
        return read_machine(Path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# Report ------------------------------------------------------------------------------------------


def _publish(report: Report, out: Path) -> None:
    (out / "simulate.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(report, out / "simulate.png")
    print_report(report)
    print(f"written: {out / 'simulate.json'}, {out / 'simulate.png'}", flush=True)


def print_report(report: Report) -> None:
    """Print the tables to standard output, as wide as they need when it is no terminal."""
    from rich import box
    from rich.table import Table

    from kda_cp.launch.report import make_console

    console = make_console()
    console.print(_title(report), soft_wrap=True)
    tables = (
        ("forward, backward", "ms", ("forward_seconds", "backward_seconds"), 1e3),
        ("received forward, backward", "MiB", RECEIVED, 2**-20),
        ("kept A", "MiB", ("kept_bytes",), 2**-20),
    )
    for what, unit, names, factor in tables:
        table = Table(box=box.SIMPLE_HEAD)
        for heading in ("ranks", "nodes", *(f"{name}: {what}, {unit}" for name in ALGORITHMS)):
            table.add_column(heading, justify="right")
        if unit == "ms":
            table.add_column("sum is least with")
        for row in report["rows"]:
            cells = [
                "  ".join(f"{row['algorithms'][name][key] * factor:9.2f}" for key in names)
                for name in ALGORITHMS
            ]
            best = [row["best"]] if unit == "ms" else []
            table.add_row(str(row["ranks"]), str(row["nodes"]), *cells, *best)
        console.print(table)


def _title(report: Report) -> str:
    setting, node = report["setting"], report["machine"]["ranks_per_node"]
    return (
        f"predicted, not measured: one document, {setting['layout']}, HV {setting['heads']}, "
        f"K {setting['key_dim']}, V {setting['value_dim']}, B {setting['batch']}, nodes of {node}"
    )


def draw(report: Report, path: Path) -> None:
    """Draw time over ranks, forward and backward, and the bytes that a rank receives."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    ranks = [row["ranks"] for row in report["rows"]]
    for panel, title, key, factor in (
        (panels[0], "forward, ms", "forward_seconds", 1e3),
        (panels[1], "backward, ms", "backward_seconds", 1e3),
        (panels[2], "received by a rank, MiB", RECEIVED[0], 2**-20),
    ):
        for colour, name in zip(("#86b6e8", "#b3261e", "#5a9e55"), ALGORITHMS, strict=True):
            values = [row["algorithms"][name] for row in report["rows"]]
            panel.plot(ranks, [v[key] * factor for v in values], "o-", color=colour, label=name)
            if key == RECEIVED[0]:
                backward = [v[RECEIVED[1]] * factor for v in values]
                panel.plot(ranks, backward, "--", color=colour, label="  backward")
        for node in {report["machine"]["ranks_per_node"]} & set(ranks[:-1]):
            panel.axvline(node * 1.4, color="0.6", linestyle=":", label="left of it: one node")
        panel.set_xscale("log", base=2)
        panel.set(yscale="log", xlabel="ranks")
        panel.set_xticks(ranks, [str(rank) for rank in ranks], rotation=45)
        panel.set_title(title, loc="left", fontsize=10)
        panel.grid(color="0.92")
        panel.legend(frameon=False, fontsize=8)
    figure.suptitle(_title(report), x=0.01, ha="left", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
