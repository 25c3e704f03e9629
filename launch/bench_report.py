"""The report of a benchmark: its tables and its picture, from the dictionary that bench.json holds.

`bench.py` makes the dictionary; nothing here computes but units.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.markup import escape
from rich.table import Table

from kda_cp.launch.report import Report, make_console

COLOURS = {"ours": "#b3261e", "fla": "#86b6e8", "flashkda": "#5a9e55", "attn-gym": "#caa042"}

KERNELS_SHOWN = 12

# Heading, key of the row, factor and format of each number of the table.
COLUMNS = (
    ("ms", "ms", 1, "{:.3f}"),
    ("spread", "spread", 100, "{:.1f}%"),
    ("device ms", "device_ms", 1, "{:.3f}"),
    ("host ms", "host_ms", 1, "{:.3f}"),
    ("of floor", "floor_share", 100, "{:.1f}%"),
    ("FLA / it", "fla_ratio", 1, "{:.2f}"),
    ("peak MiB", "peak_bytes", 2**-20, "{:,.0f}"),
    ("error", "error", 1, "{:.1e}"),
    ("from ours", "from_ours", 1, "{:.1e}"),
)

NOTES = (
    "ms: median time of a call, of the rounds' medians; spread: between the rounds",
    "device ms: what its kernels take; host ms: until the call returns; host-bound: the latter is "
    "longer, so that ms is rather the host's",
    "of floor: the floor's time / ms; FLA / it: FLA's ms / its ms, above 1 is faster than FLA",
    "peak: above the inputs, o included; from ours: |o - ours| / |ours| at full size",
)


def print_tables(report: Report) -> None:
    """Print the machine, a table for each case, and the kernels if they were asked for."""
    console = make_console()
    console.print(escape(_title(report)), soft_wrap=True)
    for case in report["cases"]:
        console.print(escape(case["describe"]), soft_wrap=True)
        console.print(
            f"floor {case['floor_ms']:.3f} ms, {case['floor_bytes']:,} B moved once; "
            f"error of o at T {case['error_tokens']:,} against the recurrence in float64",
            soft_wrap=True,
        )
        console.print(_table(case))
        if report["setting"]["breakdown"]:
            for row in case["rows"]:
                if row["kernels"] is not None:
                    console.print(_kernels(row))
    for line in NOTES:
        console.print(line, soft_wrap=True)


def _title(report: Report) -> str:
    known = ", ".join(f"{name} {found}" for name, found in report["versions"].items() if found)
    return (
        f"forward on {report['device']}: {report['card']}; "
        f"a copy moves {report['copy_bytes_per_second'] / 1e12:.3f} TB/s; "
        f"impl {report['setting']['impl']}; {known}"
    )


def _table(case: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for heading, *_ in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("remark")
    for row in case["rows"]:
        numbers = [
            "" if row[key] is None else form.format(row[key] * factor)
            for _, key, factor, form in COLUMNS
        ]
        late = "host-bound" if row["host_bound"] else None
        note = None if row["ms"] is None else row["note"]
        remark = "; ".join(text for text in (row["reason"], late, note) if text)
        table.add_row(row["peer"], *numbers, escape(remark))
    return table


def _kernels(row: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"{row['peer']}: device time of one call by kernel")
    for heading in ("ms", "share", "launches"):
        table.add_column(heading, justify="right")
    table.add_column("kernel", no_wrap=True, overflow="ellipsis")
    rest = row["kernels"][KERNELS_SHOWN:]
    for kernel in row["kernels"][:KERNELS_SHOWN]:
        share = kernel["ms"] / row["device_ms"]
        launches = f"{kernel['launches']:g}"
        table.add_row(f"{kernel['ms']:.4f}", f"{share:.1%}", launches, escape(kernel["name"]))
    if rest:
        ms, launches = (sum(kernel[key] for kernel in rest) for key in ("ms", "launches"))
        share = ms / row["device_ms"]
        table.add_row(f"{ms:.4f}", f"{share:.1%}", f"{launches:g}", f"{len(rest)} more names")
    return table


# Picture -----------------------------------------------------------------------------------------


def draw_picture(report: Report, path: Path) -> None:
    """Write the picture of `make_picture` to a file."""
    figure = make_picture(report)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def make_picture(report: Report) -> Figure:
    """Draw milliseconds by case, bars beside the floor; over what a sweep varies, lines."""
    width = max(8.0, 2.2 * len(report["cases"]))
    figure, axes = pyplot.subplots(figsize=(width, 5), layout="constrained")
    if report["setting"]["sweep"] is None:
        _draw_bars(axes, report)
    else:
        _draw_lines(axes, report)
    axes.set_ylabel("ms of a forward")
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    axes.set_title(f"forward on {report['card']}", loc="left", fontsize=10)
    return figure


def _timed(report: Report) -> dict[str, list[tuple[int, float]]]:
    """(number of the case, ms) by peer, of what was timed."""
    found: dict[str, list[tuple[int, float]]] = {}
    for number, case in enumerate(report["cases"]):
        for row in case["rows"]:
            if row["ms"] is not None:
                found.setdefault(row["peer"], []).append((number, row["ms"]))
    return found


def _draw_bars(axes: Axes, report: Report) -> None:
    timed, cases = _timed(report), report["cases"]
    thick = 0.8 / max(len(timed), 1)
    for place, (peer, points) in enumerate(timed.items()):
        x = [number + (place - (len(timed) - 1) / 2) * thick for number, _ in points]
        heights = [ms for _, ms in points]
        bars = axes.bar(x, heights, 0.9 * thick, color=COLOURS.get(peer, "0.6"), label=peer)
        axes.bar_label(bars, [f"{ms:.3f}" for ms in heights], fontsize=7)
    floors = [case["floor_ms"] for case in cases]
    axes.hlines(
        floors,
        [number - 0.42 for number in range(len(cases))],
        [number + 0.42 for number in range(len(cases))],
        color="black",
        label="floor: bytes / copy bandwidth",
    )
    axes.set_xticks(range(len(cases)), [_name(case) for case in cases], fontsize=8)


def _name(case: dict[str, Any]) -> str:
    what = case["case"]
    return f"{what['name']}\nT {what['tokens']:,}, HV {what['value_heads']}, {what['gate']}"


def _draw_lines(axes: Axes, report: Report) -> None:
    swept, cases = report["setting"]["sweep"], report["cases"]
    values = [case["case"][swept] for case in cases]
    for peer, points in _timed(report).items():
        x = [values[number] for number, _ in points]
        axes.plot(x, [ms for _, ms in points], "o-", color=COLOURS.get(peer, "0.6"), label=peer)
    floors = [case["floor_ms"] for case in cases]
    axes.plot(values, floors, "--", color="black", label="floor: bytes / copy bandwidth")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.set_xlabel(swept)
