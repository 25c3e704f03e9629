"""The report of a verification: its tables, its picture and its JSON, all from one dictionary.

`verify.py` makes the dictionary and writes it as it is; nothing here computes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from rich import box
from rich.console import Console
from rich.table import Table

RANKS_A_TABLE = 8

Report = dict[str, Any]


def write_json(report: Report, path: Path) -> None:
    """Write the report; a number that is not finite becomes its name, which JSON can hold."""
    path.write_text(json.dumps(_finite(report), indent=1, allow_nan=False) + "\n")


def make_console() -> Console:
    """Standard output, as wide as tables need when it is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    return console


def print_report(report: Report) -> None:
    """Print the tables to standard output, as wide as they need when it is no terminal."""
    console = make_console()
    console.print(_title(report), soft_wrap=True)
    ranks = range(len(report["ranks"]))
    for first in ranks[::RANKS_A_TABLE]:
        console.print(_errors(report, ranks[first : first + RANKS_A_TABLE]))
    console.print(_ranks(report))
    for line in _notes(report):
        console.print(line, soft_wrap=True)


def _errors(report: Report, ranks: range) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("error of")
    for rank in ranks:
        table.add_column(f"rank {rank}", justify="right")
    table.add_column("unsharded", justify="right")
    table.add_column("worst in")
    for name, entry in report["errors"].items():
        scores = [entry["ranks"][rank] for rank in ranks]
        cells = [_error(score["error"], report["bound"]) for score in scores]
        worst = max(scores, key=lambda score: _order(score["error"]))
        unsharded = _error(entry["unsharded"]["error"], math.inf)
        table.add_row(name, *cells, unsharded, _place(report, worst))
    return table


def _ranks(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", "tokens", "documents", "fragments"):
        table.add_column(name, justify="right" if name else "left")
    for name in ("received forward", "backward", "time forward", "backward"):
        table.add_column(name, justify="right")
    for rank in report["ranks"]:
        table.add_row(
            f"rank {rank['rank']}",
            f"{rank['tokens']:,}",
            str(len({document for document, _, _ in rank["segments"]})),
            str(rank["fragments"]),
            *(f"{count:,} B" for count in rank["received_bytes"].values()),
            *(f"{seconds:.3f} s" for seconds in rank["seconds"].values()),
        )
    alone = report["unsharded"]
    documents = str(len(report["documents"]))
    times = (f"{seconds:.3f} s" for seconds in alone["seconds"].values())
    table.add_row("unsharded", f"{alone['tokens']:,}", documents, "1", "0 B", "0 B", *times)
    return table


def _title(report: Report) -> str:
    setting = report["setting"]
    return (
        f"{len(report['documents'])} documents, {report['unsharded']['tokens']:,} tokens, "
        f"{len(report['ranks'])} ranks, {setting['layout']}, {setting['exchange']}, "
        f"{setting['dtype']}, "
        f"{setting['device']}, impl {setting['impl']}; H {setting['heads']}, "
        f"HV {setting['value_heads']}, K {setting['key_dim']}, V {setting['value_dim']}"
    )


def _notes(report: Report) -> list[str]:
    longest = max(document["tokens"] for document in report["documents"])
    shard = max(rank["tokens"] for rank in report["ranks"])
    cut = [d for d in report["documents"] if d["tokens"] < d["file_bytes"]]
    worst = report["worst"]
    return [
        f"judge: {report['judge']['description']} ({report['judge']['seconds']:.1f} s)",
        "error: |x - judge| / |judge|, of the worst head and document on each rank; "
        "parameters' gradients are summed over the ranks",
        f"documents: the longest has {longest:,} tokens, the largest shard {shard:,}; "
        + (f"{len(cut)} cut, {report['cut_because']}: " if cut else "none cut")
        + ", ".join(f"{d['name']} ({d['tokens']} of {d['file_bytes']})" for d in cut[:3])
        + (", ..." if len(cut) > 3 else ""),
        f"bound: {report['bound']:.1e}, {report['bound_because']}",
        f"{'ok' if report['ok'] else 'NOT OK'}: worst error {_number(worst['error'])}, "
        f"{worst['tensor']} on rank {worst['rank']}",
    ]


def _place(report: Report, score: dict[str, Any]) -> str:
    parts = []
    if score["head"] is not None:
        parts.append(f"head {score['head']}")
    if score["document"] is not None:
        parts.append(report["documents"][score["document"]]["name"].rsplit("/", 1)[-1])
    return ", ".join(parts)


def _error(error: float, bound: float) -> str:
    return _number(error) if error <= bound else f"[bold red]{_number(error)} ![/]"


def _number(error: float) -> str:
    return "0" if error == 0 else f"{error:.1e}"


def _order(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# Picture -----------------------------------------------------------------------------------------


def draw(report: Report, path: Path) -> None:
    """Draw the documents over the ranks, and below the error of every tensor on every rank."""
    ranks = len(report["ranks"])
    height = 1.6 + 0.32 * ranks
    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(12, height + 5), height_ratios=(height, 4), layout="constrained"
    )
    _draw_documents(upper, report)
    _draw_errors(lower, report)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_documents(axes: Axes, report: Report) -> None:
    colours = pyplot.get_cmap("tab20").colors
    tokens = report["unsharded"]["tokens"]
    for rank in report["ranks"]:
        for document, start, stop in rank["segments"]:
            axes.barh(
                rank["rank"],
                stop - start,
                left=start,
                height=0.8,
                color=colours[document % len(colours)],
                edgecolor="white",
                linewidth=0.4,
            )
            if stop - start > tokens / 10:
                name = report["documents"][document]["name"].rsplit("/", 1)[-1]
                axes.text(
                    (start + stop) / 2, rank["rank"], name, ha="center", va="center", fontsize=8
                )
    axes.set_xlim(0, tokens)
    axes.set_ylim(len(report["ranks"]) - 0.5, -0.5)
    axes.set_yticks(
        range(len(report["ranks"])),
        [f"rank {rank['rank']}\n{rank['tokens']:,} tokens" for rank in report["ranks"]],
        fontsize=8,
    )
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("token of the packed batch (a colour is a document, colours repeat)")
    axes.set_title(_title(report), loc="left", fontsize=10)


def _draw_errors(axes: Axes, report: Report) -> None:
    names, ranks = list(report["errors"]), len(report["ranks"])
    shown = [
        [score["error"] for score in (*entry["ranks"], entry["unsharded"])]
        for entry in report["errors"].values()
    ]
    finite = [e for row in shown for e in row if 0 < e < math.inf]
    floor = min([*finite, report["bound"]]) / 10
    ceiling = max([*finite, report["bound"]]) * 10
    colours = pyplot.get_cmap("viridis")
    for rank in range(ranks + 1):
        place = [i + 0.7 * ((rank + 0.5) / (ranks + 1) - 0.5) for i in range(len(names))]
        heights = [min(max(_order(row[rank]), floor), ceiling) for row in shown]
        style: dict[str, Any] = (
            {"color": colours(rank / max(ranks, 2)), "label": f"rank {rank}"}
            if rank < ranks
            else {"color": "black", "markerfacecolor": "none", "label": "unsharded"}
        )
        axes.plot(place, heights, "o", markersize=5, **style)
    axes.axhline(report["bound"], color="tab:red", zorder=3, label=f"bound {report['bound']:.0e}")
    axes.set_yscale("log")
    axes.set_ylim(floor / 2, ceiling * 2)
    if any(e == 0 for row in shown for e in row):
        axes.axhline(floor, color="grey", linewidth=0.6, linestyle=":", label="0 (exact)")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_xlim(-0.6, len(names) - 0.4)
    for edge in range(1, len(names)):
        axes.axvline(edge - 0.5, color="0.9", linewidth=0.8)
    axes.set_ylabel("error, worst head and document")
    axes.set_title(f"judge: {report['judge']['description']}", loc="left", fontsize=10)
    axes.legend(
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        fontsize=8,
        ncols=1 + ranks // 16,
    )
