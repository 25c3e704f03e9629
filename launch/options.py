"""The options of the verification, and how every command here complains about a wrong one."""

from __future__ import annotations

import argparse
import math
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from kda_cp import platform
from kda_cp.comm.selection import EXCHANGES
from kda_cp.launch.judge import DTYPES, JUDGES
from kda_cp.launch.processes import this_rank

LAYOUTS = ("contiguous", "zigzag", "fragments")


class Parser(argparse.ArgumentParser):
    """A parser whose complaint is one line, printed by rank 0 alone."""

    def error(self, message: str) -> NoReturn:
        """Print the message and end with exit status 2."""
        if this_rank() != 0:
            time.sleep(20)  # torchrun ends all ranks after the first: let rank 0 speak
        self.exit(2, f"{self.prog.rpartition('.')[2]}: error: {message}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        if this_rank() == 0:
            super()._print_message(message, file)


def make_parser() -> Parser:
    """The options; none is the beginning of one of torchrun's."""
    parser = Parser(
        prog="kda_cp.launch.verify",
        description="Compare the sharded operator with the unsharded one on real documents.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--layout", choices=LAYOUTS, default="contiguous", help="fragments: a random table")
    add("--exchange", choices=("auto", *EXCHANGES), default="auto", help="how states travel")
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument(
        "--tokens", type=positive, default=16384, help="in all, documents of true lengths"
    )
    lengths.add_argument("--lengths", type=_lengths, help="documents cut to lengths: 700,324,...")
    add("--dtype", choices=tuple(DTYPES), default="fp32", help="of q, k, v, g and beta")
    add("--device", default=platform.device, help="cpu, or this machine's accelerator")
    add("--impl", choices=("auto", "torch", "triton"), default="auto", help="what is verified")
    add("--against", choices=tuple(JUDGES), default="operator", help="the judge, in float64")
    add("--bound", type=positive_number, help="of every error, instead of the dtype's")
    add("--heads", type=positive, default=2, help="of q and k")
    add("--value-heads", type=positive, default=4, help="of v, g and beta")
    add("--key-dim", type=positive, default=32, help="channels of q and k a head")
    add("--value-dim", type=positive, default=32, help="channels of v a head")
    add("--seed", type=_seed, default=0, help="of weights, upstream gradients, random table")
    add("--out", type=Path, default=Path("out/verify"), help="folder for json and png")
    return parser


def expect_packages() -> None:
    """ValueError unless what the reports are shown with is there."""
    for package in ("rich", "matplotlib"):
        if find_spec(package) is None:
            raise ValueError(f"{package} is not installed; expected kda-cp with its extra 'launch'")


def make_folder(out: Path) -> None:
    """Make the folder of `--out`; ValueError where that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out: expected a folder to write to, got {out}: {error}") from None


def integer(text: str, least: int) -> int:
    """An integer of at least `least`."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
    return value


def positive(text: str) -> int:
    """An integer of at least 1."""
    return integer(text, 1)


def _seed(text: str) -> int:
    return integer(text, 0)


def _lengths(text: str) -> list[int]:
    lengths = [integer(part, 0) for part in text.split(",")]
    if not sum(lengths):
        raise argparse.ArgumentTypeError(f"expected at least one token, got {text!r}")
    return lengths


def positive_number(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value
