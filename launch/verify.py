"""Verify the sharded operator on real documents: the main job of this repository.

    torchrun --nproc-per-node 4 -m kda_cp.launch.verify

Packs text files that Python itself installs, embeds and projects their bytes with a small seeded
network, runs the operator forward and backward sharded over all ranks and unsharded on rank 0, and
compares o, final_state and every gradient with a judge in float64. Prints the errors per tensor
and rank, and writes verify.json and verify.png. Exit status 0: all errors are within the bound;
1: some are not; 2: an option is wrong. Without torchrun it runs as one rank.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from kda_cp import CPContext, build_cp_context, chunk_kda, platform, shard
from kda_cp.launch.documents import Document, boundaries, pack_lengths, pack_tokens
from kda_cp.launch.judge import BOUNDS, DTYPES, JUDGES, judge, score
from kda_cp.launch.model import INPUTS, OPERATOR, Batch, Model, Pass, Sizes, make_batch, run

LAYOUTS = ("contiguous", "zigzag", "fragments")
FRAGMENTS_A_RANK = 3
"""Of the random table, on average."""

TIMEOUT = timedelta(minutes=10)
"""After which a rank gives up waiting for one that is dead or stalled."""

TOKENWISE = ("o", *(f"d{name}" for name in INPUTS))

Show = Callable[[str, float], None]
"""`show(what, done)`: what is under way, and the part of the job that is done."""


class Parser(argparse.ArgumentParser):
    """A parser whose complaint is one line, printed by rank 0 alone."""

    def error(self, message: str) -> NoReturn:
        """Print the message and end with exit status 2."""
        if _rank() != 0:
            time.sleep(20)  # torchrun ends all ranks after the first: let rank 0 speak
        self.exit(2, f"verify: error: {message}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        if _rank() == 0:
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
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument(
        "--tokens", type=_positive, default=16384, help="in all, documents of true lengths"
    )
    lengths.add_argument("--lengths", type=_lengths, help="documents cut to lengths: 700,324,...")
    add("--dtype", choices=tuple(DTYPES), default="fp32", help="of q, k, v, g and beta")
    add("--device", default=platform.device, help="cpu, or this machine's accelerator")
    add("--impl", choices=("auto", "torch", "triton"), default="auto", help="what is verified")
    add("--against", choices=tuple(JUDGES), default="operator", help="the judge, in float64")
    add("--bound", type=_bound, help="of every error, instead of the dtype's")
    add("--heads", type=_positive, default=2, help="of q and k")
    add("--value-heads", type=_positive, default=4, help="of v, g and beta")
    add("--key-dim", type=_positive, default=32, help="channels of q and k a head")
    add("--value-dim", type=_positive, default=32, help="channels of v a head")
    add("--seed", type=_seed, default=0, help="of weights, upstream gradients, random table")
    add("--out", type=Path, default=Path("out/verify"), help="folder for json and png")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job as one rank of as many as torchrun started; return the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        device = _find_device(options)
        _try_operator(options, device)
        documents = _pack(options)
        options.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, NotImplementedError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    with _process_group(device) as group:
        report = verify(options, documents, device, group)
        if _rank() == 0:
            _publish(report, options.out)
    return 0 if report["ok"] else 1


def verify(
    options: argparse.Namespace,
    documents: list[Document],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Run sharded and unsharded, judge both, and return the report, alike on every rank."""
    dtype, sizes, cu_seqlens = DTYPES[options.dtype], _sizes(options), boundaries(documents)
    text = b"".join(document.text for document in documents)
    model = Model(sizes, dtype, options.seed).to(device)
    batch = make_batch(text, cu_seqlens, sizes, device, options.seed + 1)
    context = _lay_out(options, cu_seqlens, group)
    alone = build_cp_context(cu_seqlens, None)
    unsharded, judged, seconds = None, {}, 0.0

    with _progress() as show:
        show("sharded, forward and backward", 0.0)
        sharded = _run(model, batch, context, options.impl)
        if context.rank == 0:
            show("unsharded, forward and backward", 0.2)
            unsharded = _run(model, batch, alone, options.impl)
            started, done = time.perf_counter(), 0

            def advance(tokens: int) -> None:
                nonlocal done
                done += tokens
                show(JUDGES[options.against], 0.4 + 0.5 * done / max(len(text), 1))

            advance(0)
            judged = judge(model, batch, options.against, advance)
            seconds = time.perf_counter() - started
        show("errors", 0.9)
        mine = _describe_rank(context, sizes, dtype, sharded)
        mine["scores"] = _scores(model, context, sharded, judged)
        if unsharded is not None:
            mine["unsharded"] = {
                "tokens": len(text),
                "seconds": _seconds(unsharded),
                "scores": _scores(model, alone, unsharded, judged),
            }
        everyone = _gather(mine, group)
    report = _assemble(options, documents, everyone)
    report["judge"] = {"description": JUDGES[options.against], "seconds": seconds}
    return report


# Steps


def _try_operator(options: argparse.Namespace, device: torch.device) -> None:
    """Let the operator itself object to sizes, dtype and implementation, on one token."""
    model = Model(_sizes(options), DTYPES[options.dtype], options.seed).to(device)
    with torch.no_grad():
        inputs: dict[str, Any] = model(torch.zeros(1, dtype=torch.int64, device=device))
        chunk_kda(**inputs, A_log=model.A_log, dt_bias=model.dt_bias, impl=options.impl, **OPERATOR)


def _pack(options: argparse.Namespace) -> list[Document]:
    if options.lengths is not None:
        return pack_lengths(options.lengths)
    return pack_tokens(options.tokens, math.ceil(options.tokens / _ranks()))


def _lay_out(
    options: argparse.Namespace, cu_seqlens: list[int], group: dist.ProcessGroup | None
) -> CPContext:
    if options.layout != "fragments":
        return build_cp_context(cu_seqlens, group, layout=options.layout)
    table = random_fragments(cu_seqlens[-1], _ranks(), options.seed)
    return build_cp_context(cu_seqlens, group, fragments=table)


def random_fragments(tokens: int, ranks: int, seed: int) -> list[list[tuple[int, int]]]:
    """Cut the tokens at random and deal the pieces out in random order."""
    generator = random.Random(seed)
    pieces = max(1, min(FRAGMENTS_A_RANK * ranks, tokens))
    cuts = sorted(generator.sample(range(1, max(tokens, 1)), pieces - 1))
    table = list(pairwise([0, *cuts, tokens]))
    generator.shuffle(table)
    return [table[rank::ranks] for rank in range(ranks)]


def _run(model: Model, batch: Batch, context: CPContext, impl: str) -> Pass:
    if batch.text.device.type != "cpu":
        run(model, batch, context, impl)  # the first call there compiles and allocates
    return run(model, batch, context, impl)


def _scores(
    model: Model, context: CPContext, found: Pass, judged: dict[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """Score every tensor of this rank. Collective: rank 0 alone holds what they are judged by."""
    bounds, scores = torch.tensor(context.plan.cu_seqlens), {}
    of_token = torch.repeat_interleave(bounds.diff())
    owned = torch.tensor(
        [context.final_state_owner(n) == context.rank for n in range(context.num_sequences)]
    )
    for name, x in found.tensors.items():
        shape = (1, len(of_token), *x.shape[2:]) if name in TOKENWISE else x.shape
        whole = judged[name] if judged else x.new_empty(shape, dtype=torch.float64)
        if context.group is not None:
            whole = whole.contiguous()
            dist.broadcast(whole, 0, context.group)  # one at a time: no rank holds all but rank 0
        rows = None
        if name in TOKENWISE:
            whole, rows = shard(whole, context), shard(of_token, context, dim=0)
        elif name == "final_state":  # the rows of other ranks' documents are zeros here
            whole = whole * owned.to(whole.device)[:, None, None, None]
            rows = torch.arange(context.num_sequences)
        scores[name] = asdict(score(model.by_head(name, x), model.by_head(name, whole), rows))
    return scores


def _describe_rank(
    context: CPContext, sizes: Sizes, dtype: torch.dtype, found: Pass
) -> dict[str, Any]:
    plan, rank = context.plan, context.rank
    received = plan.received_bytes(
        "all_gather",
        rank,
        heads=sizes.value_heads,
        key_dim=sizes.key_dim,
        value_dim=sizes.value_dim,
        itemsize=8 if dtype == torch.float64 else 4,
    )
    return {
        "rank": rank,
        "tokens": context.num_tokens,
        "fragments": len(context.ranges),
        "segments": [[s.sequence, s.start, s.stop] for s in plan.segments(rank)],
        "received_bytes": {"forward": received.forward, "backward": received.backward},
        "seconds": _seconds(found),
    }


def _assemble(
    options: argparse.Namespace, documents: list[Document], everyone: list[dict[str, Any]]
) -> dict[str, Any]:
    bound, because = BOUNDS[options.dtype]
    if options.bound is not None:
        bound, because = options.bound, "as asked for"
    unsharded = everyone[0].pop("unsharded")
    alone, by_rank = unsharded.pop("scores"), [rank.pop("scores") for rank in everyone]
    errors = {
        name: {"ranks": [scores[name] for scores in by_rank], "unsharded": alone[name]}
        for name in alone
    }
    every = [
        {"tensor": name, "rank": rank, **entry}
        for name, entries in errors.items()
        for rank, entry in enumerate(entries["ranks"])
    ]
    return {
        "ok": all(entry["error"] <= bound for entry in every),  # False for a NaN
        "worst": max(every, key=lambda entry: (math.isnan(entry["error"]), entry["error"])),
        "bound": bound,
        "bound_because": because,
        "setting": {
            "layout": options.layout,
            "dtype": options.dtype,
            "device": options.device,
            "impl": options.impl,
            "heads": options.heads,
            "value_heads": options.value_heads,
            "key_dim": options.key_dim,
            "value_dim": options.value_dim,
            "seed": options.seed,
            "torch": torch.__version__,
        },
        "errors": errors,
        "ranks": everyone,
        "unsharded": unsharded,
        "documents": [
            {"name": d.name, "tokens": len(d.text), "file_bytes": d.file_bytes} for d in documents
        ],
        "cut_because": "to fill the total" if options.lengths is None else "as asked for",
    }


def _publish(report: dict[str, Any], out: Path) -> None:
    from kda_cp.launch.report import draw, print_report, write_json

    write_json(report, out / "verify.json")
    draw(report, out / "verify.png")
    print_report(report)
    print(f"written: {out / 'verify.json'}, {out / 'verify.png'}", flush=True)


# Processes


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def _find_device(options: argparse.Namespace) -> torch.device:
    for package in ("rich", "matplotlib"):
        if find_spec(package) is None:
            raise ValueError(f"{package} is not installed; expected kda-cp with its extra 'launch'")
    here = dict.fromkeys(("cpu", platform.device))
    if options.device not in here:
        expected = " or ".join(here)
        raise ValueError(f"--device: expected {expected} on this machine, got {options.device!r}")
    if options.device == "cpu":
        return torch.device("cpu")
    there, asked = torch.accelerator.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if asked > there:
        raise ValueError(f"--device: expected a device for each of {asked} ranks, got {there}")
    index = int(os.environ.get("LOCAL_RANK", 0))
    torch.accelerator.set_device_index(index)
    return torch.device(options.device, index)


@contextmanager
def _process_group(device: torch.device) -> Iterator[dist.ProcessGroup | None]:
    """The group of all ranks that torchrun started; None without torchrun."""
    if "RANK" not in os.environ:
        yield None
        return
    dist.init_process_group(dist.get_default_backend_for_device(device), timeout=TIMEOUT)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _gather(value: dict[str, Any], group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    if group is None:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


@contextmanager
def _progress() -> Iterator[Show]:
    """A bar on a terminal's standard error, from rank 0, gone at the end; elsewhere nothing."""
    if _rank() != 0 or not sys.stderr.isatty():
        yield lambda what, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda what, done: progress.update(task, description=what, completed=done)


# Options


def _sizes(options: argparse.Namespace) -> Sizes:
    return Sizes(options.heads, options.value_heads, options.key_dim, options.value_dim)


def _seconds(found: Pass) -> dict[str, float]:
    return {"forward": found.forward_seconds, "backward": found.backward_seconds}


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
    return value


def _positive(text: str) -> int:
    return _integer(text, 1)


def _seed(text: str) -> int:
    return _integer(text, 0)


def _lengths(text: str) -> list[int]:
    lengths = [_integer(part, 0) for part in text.split(",")]
    if not sum(lengths):
        raise argparse.ArgumentTypeError(f"expected at least one token, got {text!r}")
    return lengths


def _bound(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
