"""Find the launch configurations that kernels/configs.py pins, on the GPU of this machine.

    python -m kda_cp.launch.tune --key-dim 128
    python -m kda_cp.launch.tune --kernels scores,piece --heads 32 --key-dim 128 --tokens 16384

Times every candidate of the scores kernel (with the inverse after it), of the state pass for
outputs and for maps, and of the fold, at each K = V and the first head count; then the length of a
piece, at each head count, by the time of the whole forward. Prints a table each (`ratio` is the
pinned one's time / its time) and, last, lines to paste into kernels/configs.py. A candidate that
does not compile, or whose result is not the pinned one's, is a row with the reason. Exit status 0:
every pinned configuration was timed; 1: some were not; 2: an option is wrong, or there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import Any

import torch
from rich import box
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from kda_cp import platform
from kda_cp.launch.bench import describe_card
from kda_cp.launch.bench_cases import Case, draw
from kda_cp.launch.judge import BOUNDS
from kda_cp.launch.options import Parser, expect_packages, integer, positive, positive_number
from kda_cp.launch.report import make_console
from kda_cp.launch.timing import call_ms
from kda_cp.launch.tune_work import KERNELS, Call, Stages, Work, replaced

HEADS, WIDTHS = (32, 8, 64), (64, 128, 256)
TOKEN_HEADS, MOST_TOKENS = 2**19, 32768
"""Of the default T: what one layer of a model holds, the same work for every number of heads."""


@dataclass(frozen=True)
class Row:
    """A candidate with its milliseconds, or with the reason why there are none."""

    candidate: Any
    ms: float | None = None
    error: float | None = None
    reason: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        expect_packages()
        if not platform.IS_NVIDIA_AMPERE_OR_LATER:
            raise ValueError("expected an NVIDIA GPU from Ampere on, got none on this machine")
    except ValueError as error:
        parser.error(" ".join(str(error).split()))
    device = torch.device(platform.device)
    budget = {"warmup_ms": options.warmup_ms, "repeat_ms": options.repeat_ms}
    console, lines, complete = make_console(), [], True
    with torch.inference_mode():
        for case, kernels in plan(options):
            works = Stages(draw(case, device)).work(kernels)
            compile_all(works)
            for work in works:
                rows = time_all(work, partial(call_ms, device=device, **budget))
                console.print(escape(f"{work.kernel}, {describe(work)}"), soft_wrap=True)
                console.print(table_of(work, rows))
                lines += paste_lines(work, rows)
                complete &= any(r.ms is not None for r in rows if r.candidate == work.pinned)
    stamp = f"{datetime.now(timezone.utc):%Y-%m-%d}, {describe_card(device)}, "
    stamp += f"torch {torch.__version__}, triton {version('triton')}"
    console.print(escape("\n".join([f"# {stamp}", *lines])), soft_wrap=True)
    return 0 if complete else 1


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        prog="kda_cp.launch.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--heads", type=_numbers, default=HEADS, metavar="N,N,...", help=f"H = HV, {HEADS}")
    add("--key-dim", type=_numbers, default=WIDTHS, metavar="N,N,...", help=f"K = V, {WIDTHS}")
    add("--tokens", type=positive, metavar="N", help="T (default: 2^19 / HV, 32768 at most)")
    add("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="(default: bf16)")
    add("--kernels", type=_kernels, default=KERNELS, help=f"{','.join(KERNELS)} (default: all)")
    add("--warmup-ms", type=positive_number, default=10.0, help="before each time (default: 10)")
    add("--repeat-ms", type=positive_number, default=50.0, help="of each time (default: 50)")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(integer(part, 1) for part in text.split(","))


def _kernels(text: str) -> tuple[str, ...]:
    for name in text.split(","):
        if name not in KERNELS:
            raise argparse.ArgumentTypeError(f"expected names among {','.join(KERNELS)}")
    return tuple(text.split(","))


def plan(options: argparse.Namespace) -> Iterator[tuple[Case, tuple[str, ...]]]:
    """The cases, each with what is tuned at it: only the length of a piece is a matter of heads."""
    for width, heads in product(options.key_dim, options.heads):
        tokens = options.tokens or min(TOKEN_HEADS // heads, MOST_TOKENS)
        here = KERNELS if heads == options.heads[0] else ("piece",)
        kernels = tuple(name for name in options.kernels if name in here)
        if kernels:
            yield Case("tune", tokens, heads, heads, width, width, options.dtype), kernels


# Times --------------------------------------------------------------------------------------------


def time_all(work: Work, time: Callable[[Call], float]) -> list[Row]:
    """Time every candidate whose result is the pinned one's, the fastest first."""
    bound = BOUNDS[work.case.dtype][0]
    want: Tensor | None = None
    rows = []
    for candidate in work.candidates:
        try:
            call = work.make(candidate)
            got = call().double()
            want = got if want is None else want
            error = float((got - want).norm() / want.norm())
            if not error <= bound:
                rows.append(Row(candidate, None, error, f"wrong: off by more than {bound:g}"))
                continue
            del got
            rows.append(Row(candidate, time(call), error))
        except Exception as error:  # whatever the compiler raises is a row, not our end
            text = (str(error).strip().splitlines() or [""])[0]
            rows.append(Row(candidate, reason=f"{type(error).__name__}: {text}"[:100]))
    return sorted(rows, key=lambda row: (row.ms is None, row.ms or 0.0))


def compile_all(works: Sequence[Work]) -> None:
    """Compile what the candidates launch, side by side; errors come again when they are timed."""
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **keywords: Any) -> Any:
        return run(self, *args, warmup=True, **keywords)

    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        AsyncCompileMode(pool, ignore_errors=True),
        replaced(JITFunction, "run", compile_only),
    ):
        for work, candidate in ((w, c) for w in works for c in w.candidates):
            with suppress(Exception):
                work.make(candidate)()


# Tables -------------------------------------------------------------------------------------------


def describe(work: Work) -> str:
    """The sizes at which it is timed."""
    return str(work.case).removeprefix(f"{work.case.name}: ")


def table_of(work: Work, rows: Sequence[Row]) -> Table:
    """The candidates, the fastest first, beside the pinned one."""
    table = Table(box=box.SIMPLE_HEAD)
    fields = getattr(work.pinned, "_fields", ("tokens",))
    for heading in (*fields, "ms", "ratio", "from pinned"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("remark")
    base = _ms(rows, work.pinned)
    for row in rows:
        is_pinned = row.candidate == work.pinned
        candidate = row.candidate if isinstance(row.candidate, tuple) else (row.candidate,)
        table.add_row(
            *map(str, candidate),
            "" if row.ms is None else f"{row.ms:.4f}",
            "" if row.ms is None or base is None else f"{base / row.ms:.2f}",
            "" if row.error is None else f"{row.error:.1e}",
            escape("; ".join(["pinned"] * is_pinned + [row.reason] * bool(row.reason))),
        )
    return table


def paste_lines(work: Work, rows: Sequence[Row]) -> list[str]:
    """The fastest, the runner-up and the pinned one as lines for kernels/configs.py."""
    timed = [row for row in rows if row.ms is not None]
    where = describe(work)
    if not timed:
        return [f"# {work.kernel}: nothing could be timed at {where}"]
    shown = [f"{row.candidate} {row.ms:.4f} ms" for row in timed[:2]]
    pinned = _ms(rows, work.pinned)
    was = "could not be timed" if pinned is None else f"{pinned:.4f} ms"
    runner_up = f"runner-up {shown[1]}; " if len(shown) > 1 else ""
    verb = "tokens =" if work.kernel == "piece" else "return"
    return [
        f"# {work.kernel}, {where}: {shown[0]}; {runner_up}pinned {work.pinned} {was}",
        f"{verb} {timed[0].candidate}",
    ]


def _ms(rows: Sequence[Row], candidate: Any) -> float | None:
    return next((row.ms for row in rows if row.candidate == candidate), None)


if __name__ == "__main__":
    sys.exit(main())
