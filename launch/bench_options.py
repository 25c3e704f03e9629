"""The options of the benchmark, and the cases that they ask for."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kda_cp.launch.bench_cases import GATES, NAMED, SWEEPS, Case
from kda_cp.launch.judge import DTYPES
from kda_cp.launch.options import Parser, integer, positive, positive_number
from kda_cp.launch.peers import PEERS

SIZES = tuple(field.name for field in fields(Case) if field.name != "name")
"""The options that describe work of one's own."""


def make_parser(description: str | None) -> Parser:
    """The options of the command."""
    parser = Parser(
        prog="kda_cp.launch.bench",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, usual = parser.add_argument, Case()
    add("--case", action="append", choices=tuple(NAMED), help="one of the usual (default: all)")
    add("--sweep", choices=tuple(SWEEPS), help="vary one size instead; the rest as below")
    add("--values", type=_values, metavar="N,N,...", help="of the sweep, instead of its own")
    for name, meaning in (
        ("tokens", "T"),
        ("heads", "H, of q and k"),
        ("value-heads", "HV, of v, g and beta; as many as heads unless given"),
        ("key-dim", "K"),
        ("value-dim", "V"),
        ("documents", "packed, cut at random"),
    ):
        default = getattr(usual, name.replace("-", "_"))
        add(f"--{name}", type=positive, metavar="N", help=f"{meaning} (default: {default})")
    add("--dtype", choices=tuple(DTYPES), help=f"(default: {usual.dtype})")
    add("--gate", choices=tuple(GATES), help=f"(default: {usual.gate}, bounded by -5)")
    add("--peers", type=_peers, default=list(PEERS), help=f"{','.join(PEERS)} (default: all)")
    add("--impl", choices=("auto", "torch", "triton"), default="auto", help="of ours")
    add("--device", help="this machine's GPU (default), or cpu, to try the command out")
    add("--rounds", type=positive, default=2, help="of turns; what differs is noise (default: 2)")
    add("--warmup-ms", type=positive_number, default=50.0, help="before each time (default: 50)")
    add("--repeat-ms", type=positive_number, default=300.0, help="of each time (default: 300)")
    add("--breakdown", action="store_true", help="also print device time by kernel")
    add("--out", type=Path, default=Path("bench"), help="folder for json and png (default: bench)")
    return parser


def _peers(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(
                f"expected names among {','.join(PEERS)}, got {name!r}"
            )
    return [name for name in PEERS if name in names]


def choose_cases(options: argparse.Namespace) -> list[Case]:
    """The cases that the options ask for; ValueError where they contradict each other.

    Args:
        options: `case`, `sweep`, `values` and those of `SIZES`; None where not given.
    """
    given = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    own = "--" + next(iter(given), "").replace("_", "-")
    if options.values is not None and options.sweep is None:
        raise ValueError("--values: expected --sweep beside it")
    if options.case is not None:
        if given or options.sweep is not None:
            beside = own if given else "--sweep"
            raise ValueError(f"--case: expected no {beside} beside it, which is work of its own")
        return [NAMED[name] for name in options.case]
    if options.sweep is None and not given:
        return list(NAMED.values())
    base = replace(Case(), **{"value_heads": given.get("heads", Case.heads), **given})
    cases = [base] if options.sweep is None else _swept(base, options.sweep, options.values, given)
    for case in cases:
        if case.documents > case.tokens:
            raise ValueError(
                f"--documents: expected at most the {case.tokens} tokens, got {case.documents}"
            )
    return cases


def _swept(base: Case, name: str, values: list[int] | None, given: dict[str, Any]) -> list[Case]:
    changed = ("heads", "value_heads") if name == "heads" else (name,)
    for other in changed:
        if other in given:
            option = other.replace("_", "-")
            raise ValueError(f"--sweep {name}: expected no --{option} beside it, which it varies")
    cases = []
    for value in values or SWEEPS[name]:
        sizes: Any = dict.fromkeys(changed, value)
        cases.append(replace(base, name=f"{name} {value}", **sizes))
    return cases


def _values(text: str) -> list[int]:
    return [integer(part, 1) for part in text.split(",")]
