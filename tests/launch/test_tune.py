"""The search for launch configurations: its candidates, its rows, its text, and its refusals.

No test looks at how long anything took: times are made up.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from kda_cp.kernels import configs
from kda_cp.kernels.configs import FoldConfig, IntraConfig, StateConfig
from kda_cp.launch import tune
from kda_cp.launch.bench_cases import Case, draw
from kda_cp.launch.tune_work import KERNELS, Stages, Work, candidates

CASE = Case("tune", 150, 2, 2, 16, 24, "fp32")


def test_candidates_are_the_launches_that_sizes_admit() -> None:
    pinned = IntraConfig(32, 4, 1)
    found = candidates("scores", 32, 32, pinned)
    assert found[0] == pinned and len(set(found)) == len(found) == 2 * 3 * 3
    assert {c.columns for c in found} == {16, 32}
    found = candidates("state", 128, 100, StateConfig(128, 8, 2))
    assert len(set(found)) == len(found) == 3 * 2 * 3
    assert {c.columns for c in candidates("maps", 128, 64, StateConfig(64, 4, 2))} == {32, 64}
    found = candidates("fold", 32, 16, FoldConfig(16, 32, 4))
    assert {c.columns for c in found} == {16} and {c.slice for c in found} == {16, 32}
    assert candidates("piece", 64, 64, 4096) == (4096, 1024, 2048, 8192, 16384)


def test_a_pinned_launch_that_is_no_candidate_is_timed_too() -> None:
    assert candidates("state", 16, 16, StateConfig(16, 4, 1)) == (StateConfig(16, 4, 1),)
    assert candidates("piece", 64, 64, 3072)[0] == 3072


def planned(*arguments: str) -> list[tuple[int, int, int, tuple[str, ...]]]:
    options = tune.make_parser().parse_args(arguments)
    return [(c.value_heads, c.key_dim, c.tokens, kernels) for c, kernels in tune.plan(options)]


def test_only_the_length_of_a_piece_is_tuned_for_every_number_of_heads() -> None:
    assert planned("--key-dim", "128") == [
        (32, 128, 16384, KERNELS),
        (8, 128, 32768, ("piece",)),
        (64, 128, 8192, ("piece",)),
    ]
    assert {width for _, width, _, _ in planned()} == {64, 128, 256}
    assert planned(
        "--kernels", "fold", "--key-dim", "64", "--tokens", "9000", "--heads", "4,2"
    ) == [(4, 64, 9000, ("fold",))]


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_is_called_with_every_candidate(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted, over pieces of one chunk: two candidates each agree with the pinned one."""
    monkeypatch.setattr(configs, "segment_chunks", lambda HV, K, V, C: 1)
    (work,) = Stages(draw(CASE, torch.device("cpu"))).work([kernel])
    other = {
        "scores": IntraConfig(16, 2, 1),
        "state": StateConfig(32, 4, 1),
        "maps": StateConfig(32, 4, 1),
        "fold": FoldConfig(16, 16, 2),
        "piece": 128,
    }[kernel]
    work = Work(kernel, CASE, (work.pinned, other), work.pinned, work.make)
    calls = []
    rows = tune.time_all(work, lambda call: float(len(calls.append(call) or calls)))
    assert [(row.candidate, row.ms) for row in rows] == [(work.pinned, 1.0), (other, 2.0)]
    assert all(row.error is not None and row.error < 1e-4 for row in rows)


def test_a_call_of_one_piece_has_no_maps_to_tune() -> None:
    found = Stages(draw(CASE, torch.device("cpu"))).work(KERNELS)
    assert [work.kernel for work in found] == ["scores", "state", "piece"]


def made_up() -> tuple[Work, list[tune.Row]]:
    """Four launches: one that is faster than the pinned one, one wrong, one that fails."""
    pinned, fast, wrong, broken = (StateConfig(c, 4, 1) for c in (64, 32, 16, 128))
    results = {pinned: 1.0, fast: 1.00001, wrong: 1.5}
    times = {1.0: 0.3, 1.00001: 0.2, 1.5: 0.1}

    def make(candidate: Any) -> tune.Call:
        if candidate == broken:
            raise RuntimeError("out of resource: shared memory\nand more")
        return lambda: torch.tensor([results[candidate]], dtype=torch.float64)

    work = Work("state", CASE, (pinned, fast, wrong, broken), pinned, make)
    return work, tune.time_all(work, lambda call: times[float(call())])


def test_a_wrong_candidate_is_not_timed_and_a_broken_one_has_its_reason() -> None:
    _, rows = made_up()
    assert [row.candidate.columns for row in rows] == [32, 64, 16, 128]
    assert [row.ms for row in rows] == [0.2, 0.3, None, None]
    assert "off by more than" in rows[2].reason and rows[2].error == pytest.approx(0.5)
    assert rows[3].reason == "RuntimeError: out of resource: shared memory"


def test_the_table_and_the_lines_to_paste() -> None:
    work, rows = made_up()
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(tune.table_of(work, rows))
    lines = [line.split() for line in console.export_text().splitlines() if line.strip()]
    assert lines[0] == ["columns", "warps", "stages", "ms", "ratio", "from", "pinned", "remark"]
    assert lines[2] == ["32", "4", "1", "0.2000", "1.50", "1.0e-05"]
    assert lines[3] == ["64", "4", "1", "0.3000", "1.00", "0.0e+00", "pinned"]
    assert lines[5][3:] == "RuntimeError: out of resource: shared memory".split()
    comment, code = tune.paste_lines(work, rows)
    assert eval(code.removeprefix("return ")) == StateConfig(32, 4, 1)
    assert "runner-up StateConfig(columns=64, warps=4, stages=1) 0.3000 ms" in comment
    assert "K 16, V 24, fp32" in comment and "pinned StateConfig(columns=64" in comment
    untimed = tune.paste_lines(work, rows[2:])
    assert len(untimed) == 1 and untimed[0].startswith("# state: nothing could be timed")


@pytest.mark.skipif(tune.platform.device == "cuda", reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tune.main([])
    assert ended.value.code == 2
    complaint = "tune: error: expected an NVIDIA GPU from Ampere on, got none on this machine\n"
    assert capsys.readouterr() == ("", complaint)


@pytest.mark.parametrize(
    "arguments", [["--kernels", "scores,all"], ["--heads", "0"], ["--key-dim", "64,x"]]
)
def test_wrong_options_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        tune.main(arguments)
    assert ended.value.code == 2
    assert f"argument {arguments[0]}: expected " in capsys.readouterr().err
