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
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kda_cp import CPContext, build_cp_context, chunk_kda, shard
from kda_cp.comm.traffic import received_bytes
from kda_cp.launch.documents import Document, boundaries, pack_lengths, pack_tokens
from kda_cp.launch.judge import BOUNDS, DTYPES, JUDGES, judge, score
from kda_cp.launch.model import INPUTS, OPERATOR, Batch, Model, Pass, Sizes, make_batch, run
from kda_cp.launch.options import expect_packages, make_folder, make_parser
from kda_cp.launch.processes import (
    find_device,
    gather,
    number_of_ranks,
    process_group,
    progress,
    this_rank,
)

FRAGMENTS_A_RANK = 3
"""Of the random table, on average."""

TOKENWISE = ("o", *(f"d{name}" for name in INPUTS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job as one rank of as many as torchrun started; return the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        expect_packages()
        device = find_device(options.device)
        _try_operator(options, device)
        documents = _pack(options)
        make_folder(options.out)
    except (ValueError, NotImplementedError) as error:
        parser.error(" ".join(str(error).split()))
    with process_group(device) as group:
        report = verify(options, documents, device, group)
        if this_rank() == 0:
            _publish(report, options.out)
        if group is not None:
            dist.barrier(group)  # torchrun ends all ranks at the first status that is not 0
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

    with progress() as show:
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
        everyone = gather(mine, group)
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
    return pack_tokens(options.tokens, math.ceil(options.tokens / number_of_ranks()))


def _lay_out(
    options: argparse.Namespace, cu_seqlens: list[int], group: dist.ProcessGroup | None
) -> CPContext:
    if options.layout != "fragments":
        return build_cp_context(cu_seqlens, group, layout=options.layout, exchange=options.exchange)
    table = random_fragments(cu_seqlens[-1], number_of_ranks(), options.seed)
    return build_cp_context(cu_seqlens, group, fragments=table, exchange=options.exchange)


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
    algorithm = context.algorithm(
        heads=sizes.value_heads, key_dim=sizes.key_dim, value_dim=sizes.value_dim
    )
    received = received_bytes(
        plan,
        algorithm,
        rank,
        heads=sizes.value_heads,
        key_dim=sizes.key_dim,
        value_dim=sizes.value_dim,
        itemsize=8 if dtype == torch.float64 else 4,
    )
    return {
        "rank": rank,
        "exchange": algorithm,
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
            "exchange": everyone[0]["exchange"],
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


def _sizes(options: argparse.Namespace) -> Sizes:
    return Sizes(options.heads, options.value_heads, options.key_dim, options.value_dim)


def _seconds(found: Pass) -> dict[str, float]:
    return {"forward": found.forward_seconds, "backward": found.backward_seconds}


if __name__ == "__main__":
    sys.exit(main())
