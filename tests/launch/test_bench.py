"""The benchmark: what it counts as the floor, what its rows say, and whole runs of it on a CPU.

No test looks at how long anything took.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType

from kda_cp import chunk_kda
from kda_cp.launch import bench, bench_report, timing
from kda_cp.launch.bench_cases import NAMED, SWEEPS, Case, Problem, draw
from kda_cp.launch.bench_options import choose_cases, make_parser
from kda_cp.launch.peers import PEERS, Peer

CPU = torch.device("cpu")
SMALL = ["--device", "cpu", "--heads", "2", "--key-dim", "16", "--value-dim", "8"]
QUICK = ["--warmup-ms", "0.01", "--repeat-ms", "0.01"]
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Run:
    """`run(*arguments, status=0)`: a small run, which must end so; returns what its JSON holds."""

    def run(*arguments: str, status: int = 0) -> dict[str, Any]:
        tokens = () if "--sweep" in arguments else ("--tokens", "70")
        assert bench.main([*SMALL, *QUICK, *tokens, *arguments, "--out", str(tmp_path)]) == status
        assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
        return json.loads((tmp_path / "bench.json").read_text())

    return run


def rows_of(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (case,) = report["cases"]
    return {row["peer"]: row for row in case["rows"]}


def on_a_cpu(name: str) -> Peer:
    return dataclasses.replace(PEERS[name], needs_gpu=False)


# The work


def test_the_floor_of_a_case_is_that_counted_by_hand() -> None:
    case = Case(tokens=10, heads=2, value_heads=4, key_dim=8, value_dim=16, dtype="bf16")
    # q and k 2 * 10 * 2 * 8 values, v and o 2 * 10 * 4 * 16, g 10 * 4 * 8, beta 10 * 4; 2 bytes.
    assert case.floor_bytes == 2 * (320 + 1280 + 320 + 40)
    assert dataclasses.replace(case, dtype="fp32").floor_bytes == 2 * case.floor_bytes
    assert NAMED["t16384-h32"].floor_bytes == 16384 * 32 * 1282


@pytest.mark.parametrize("documents", [1, 5])
def test_inputs_are_what_the_floor_counts_and_never_zero(documents: int) -> None:
    case = Case("x", 40, 2, 4, 8, 16, "fp32", documents)
    problem = draw(case, CPU)
    v = problem.tensors[2]
    assert sum(x.nbytes for x in problem.tensors) + v.nbytes == case.floor_bytes
    for x in (*problem.tensors, problem.dt_bias):
        assert x.count_nonzero() == x.numel()
        assert x.unique().numel() > 0.9 * x.numel()
    assert problem.A_log.unique().numel() == 4
    if documents == 1:
        assert problem.cu_seqlens is None
    else:
        # Beside its copy on the host: no call may have to wait for the device.
        assert problem.cu_seqlens is not None and problem.cu_seqlens_cpu is not None
        assert problem.cu_seqlens.tolist() == problem.cu_seqlens_cpu.tolist() == case.boundaries
        assert len(case.boundaries) == 6 and sorted(set(case.boundaries)) == case.boundaries


def cases_of(*arguments: str) -> list[Case]:
    return choose_cases(make_parser(None).parse_args(arguments))


def test_the_usual_cases() -> None:
    usual = [(c.tokens, c.heads, c.value_heads, c.documents, c.gate) for c in cases_of()]
    assert usual == [
        (16384, 32, 32, 1, "safe"),
        (8192, 64, 64, 1, "safe"),
        (32768, 8, 8, 1, "safe"),
        (16384, 32, 32, 16, "safe"),
        (16384, 32, 32, 1, "softplus"),
    ]
    assert {(c.key_dim, c.value_dim, c.dtype) for c in cases_of()} == {(128, 128, "bf16")}
    safe, softplus = (NAMED[name].options for name in ("documents", "softplus"))
    assert (safe["safe_gate"], safe["lower_bound"]) == (True, -5.0)
    assert (softplus["safe_gate"], softplus["lower_bound"]) == (False, None)
    assert softplus["use_gate_in_kernel"] and not softplus["output_final_state"]
    # Mixed lengths, and the same in every run.
    lengths = torch.tensor(NAMED["documents"].boundaries).diff()
    assert len(lengths) == 16 and lengths.max() > 10 * lengths.min()
    assert NAMED["documents"].boundaries == dataclasses.replace(Case(), documents=16).boundaries


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_varies_one_size(name: str) -> None:
    cases = cases_of("--sweep", name, "--dtype", "fp16")
    assert tuple(getattr(case, name) for case in cases) == SWEEPS[name]
    assert len({case.name for case in cases}) == len(cases)
    back = {name: getattr(Case(), name), "name": "own"}
    if name == "heads":
        assert all(case.value_heads == case.heads for case in cases)
        back["value_heads"] = Case().value_heads
    same = Case(dtype="fp16")
    assert all(dataclasses.replace(case, **back) == same for case in cases)
    assert list(SWEEPS[name]) == sorted(SWEEPS[name])


def test_work_of_ones_own() -> None:
    assert cases_of("--heads", "4") == [Case(heads=4, value_heads=4)]
    assert cases_of("--value-heads", "64") == [Case(value_heads=64)]
    assert cases_of("--case", "documents", "--case", "softplus") == [
        NAMED["documents"],
        NAMED["softplus"],
    ]
    swept = cases_of("--sweep", "documents", "--values", "2,9", "--tokens", "9")
    assert [(case.tokens, case.documents) for case in swept] == [(9, 2), (9, 9)]


# Options


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tokens", "0"], "--tokens"),
        (["--case", "t1"], "--case"),
        (["--case", "softplus", "--heads", "4"], "--case: expected no --heads"),
        (["--case", "softplus", "--sweep", "tokens"], "--case: expected no --sweep"),
        (["--sweep", "ranks"], "--sweep"),
        (["--sweep", "tokens", "--tokens", "5"], "--sweep tokens: expected no --tokens"),
        (["--sweep", "heads", "--value-heads", "5"], "--sweep heads: expected no --value-heads"),
        (["--sweep", "documents", "--tokens", "500"], "--documents"),
        (["--sweep", "tokens", "--values", "5,,6"], "--values"),
        (["--values", "5"], "--values: expected --sweep"),
        (["--documents", "11", "--tokens", "10"], "--documents: expected at most the 10 tokens"),
        (["--heads", "4", "--value-heads", "6"], "value heads"),
        (["--dtype", "int8"], "--dtype"),
        (["--gate", "open"], "--gate"),
        (["--peers", "ours,theirs"], "--peers"),
        (["--repeat-ms", "0"], "--repeat-ms"),
        (["--rounds", "0"], "--rounds"),
        (["--breakdown"], "--breakdown: expected a GPU"),
        (["--device", "abacus"], "--device"),
        (["--unknown"], "--unknown"),
        (["--out", __file__], "--out: expected a folder"),
    ],
)
def test_wrong_option_is_one_line_and_status_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["--device", "cpu", *arguments])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("bench: error: ")
    assert named in printed.err


def test_no_gpu_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.platform, "device", "cpu", raising=False)
    with pytest.raises(SystemExit) as ended:
        bench.main([])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert "--device: expected a GPU, got none" in printed.err and "--device cpu" in printed.err


# Runs


def cells(printed: str, name: str) -> list[str]:
    """The words of the one row of the table that begins with a name."""
    (line,) = (line for line in printed.splitlines() if re.match(rf"  {name}  ", line))
    return line.split()


def test_json_table_and_picture_agree(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    report = run("--documents", "3", "--dtype", "fp32", "--peers", "ours", "--rounds", "3")
    (case,) = report["cases"]
    (row,) = case["rows"]
    assert report["command"][:2] == ["-m", "kda_cp.launch.bench"] and report["date"]
    assert report["versions"]["torch"] == torch.__version__
    assert case["case"]["documents"] == 3 and len(case["boundaries"]) == 4

    assert len(row["rounds_ms"]) == 3 and min(row["rounds_ms"]) > 0
    assert row["ms"] == sorted(row["rounds_ms"])[1]
    assert row["spread"] == (max(row["rounds_ms"]) - min(row["rounds_ms"])) / row["ms"]
    moved = 70 * (2 * 2 * 16 + 2 * (2 * 8 + 16 + 1)) * 4
    assert case["floor_bytes"] == moved
    assert case["floor_ms"] == pytest.approx(1e3 * moved / report["copy_bytes_per_second"])
    assert row["floor_share"] == case["floor_ms"] / row["ms"]
    # fp32 against the recurrence in float64; the worst head and document are no better than all.
    assert 0 < row["error"] < 1e-4 and 0 < row["error"] <= row["worst"]["error"] < 1e-4

    printed = capsys.readouterr().out
    assert case["describe"] in printed and f"floor {case['floor_ms']:.3f} ms" in printed
    assert cells(printed, "ours") == [
        "ours",
        f"{row['ms']:.3f}",
        f"{100 * row['spread']:.1f}%",
        f"{100 * row['floor_share']:.1f}%",
        f"{row['error']:.1e}",
    ]
    figure = bench_report.make_picture(report)
    (bar,) = figure.axes[0].patches
    assert bar.get_height() == row["ms"]
    (floor,) = figure.axes[0].collections
    assert floor.get_segments()[0][:, 1].tolist() == [case["floor_ms"]] * 2
    bench_report.pyplot.close(figure)


def test_a_sweep_is_drawn_over_what_it_varies(run: Run) -> None:
    report = run("--sweep", "tokens", "--values", "3,70", "--peers", "ours")
    figure = bench_report.make_picture(report)
    ours, floor = figure.axes[0].lines
    assert list(ours.get_xdata()) == list(floor.get_xdata()) == [3, 70]
    assert list(ours.get_ydata()) == [case["rows"][0]["ms"] for case in report["cases"]]
    assert list(floor.get_ydata()) == [case["floor_ms"] for case in report["cases"]]
    bench_report.pyplot.close(figure)


def hide(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Make packages missing, whether or not they are installed here."""

    class Hider:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name in packages:
                raise ModuleNotFoundError(f"no {name}", name=name)

    for name in list(sys.modules):
        if name.partition(".")[0] in packages:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hider(), *sys.meta_path])


def test_a_missing_peer_is_named(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "fla", "flash_kda", "attn_gym")
    rows = rows_of(run())
    assert list(rows) == list(PEERS) and rows["ours"]["ms"] > 0
    printed = capsys.readouterr().out
    for name in ("fla", "flashkda", "attn-gym"):
        assert rows[name]["ms"] is rows[name]["fla_ratio"] is None
        assert rows[name]["reason"] == f"not installed (no {PEERS[name].package})"
        assert "not installed" in " ".join(cells(printed, name))


def raising(error: Exception) -> Callable[[Problem, str], Any]:
    def make(problem: Problem, impl: str) -> Callable[[], Tensor]:
        def call() -> Tensor:
            raise error

        return call

    return make


def wrong(change: Callable[[Tensor], Tensor]) -> Callable[[Problem, str], Any]:
    return lambda problem, impl: lambda: change(PEERS["ours"].make(problem, impl)())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (raising(RuntimeError("out of luck\nat line 7")), "RuntimeError: out of luck"),
        (raising(RuntimeError()), "RuntimeError: "),
        (
            # What it needs itself is missing: another thing than that it is not installed.
            raising(ModuleNotFoundError("No module named 'needed'", name="needed")),
            "cannot be imported: No module named 'needed'",
        ),
        (wrong(lambda o: o / 0), "ValueError: o has another shape than v, or values that are not"),
        (wrong(lambda o: o[:, 1:]), "ValueError: o has another shape than v"),
    ],
)
def test_a_peer_that_fails_is_a_row_with_its_reason(
    make: Callable[[Problem, str], Any],
    reason: str,
    run: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PEERS, "fake", Peer(make, "fake", note="a note", needs_gpu=False))
    rows = rows_of(run("--peers", "ours,fake"))
    assert rows["fake"]["reason"].startswith(reason) and "line 7" not in rows["fake"]["reason"]
    assert rows["fake"]["ms"] is None and rows["ours"]["ms"] > 0
    assert reason.split()[0] in cells(capsys.readouterr().out, "fake")


def test_a_peer_that_fails_late_keeps_no_half_figure(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, times = bench.call_ms, []

    def second_round_fails(*arguments: Any, **budget: float) -> float:
        times.append(honest(*arguments, **budget))
        if len(times) == 3:  # the copy, the first round, this one
            raise RuntimeError("lost")
        return times[-1]

    monkeypatch.setattr(bench, "call_ms", second_round_fails)
    monkeypatch.setattr(timing, "call_ms", second_round_fails)
    (row,) = rows_of(run("--peers", "ours", status=1)).values()
    assert row["reason"] == "RuntimeError: lost"
    assert len(row["rounds_ms"]) == 1 and row["ms"] is row["floor_share"] is None


def test_a_run_that_is_cut_short_keeps_what_it_has(
    run: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = bench._measure

    def measure(case: Case, *arguments: Any) -> dict[str, Any]:
        if case.tokens == 70:
            raise KeyboardInterrupt
        return honest(case, *arguments)

    monkeypatch.setattr(bench, "_measure", measure)
    with pytest.raises(KeyboardInterrupt):
        run("--sweep", "tokens", "--values", "3,70", "--peers", "ours")
    (case,) = json.loads((tmp_path / "bench.json").read_text())["cases"]
    assert case["case"]["tokens"] == 3 and case["rows"][0]["ms"] > 0


def test_wrong_values_show_as_errors_and_distance(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = Peer(wrong(lambda o: 2 * o), "fake", needs_gpu=False)
    monkeypatch.setitem(PEERS, "fake", twice)
    row = rows_of(run("--peers", "ours,fake", "--dtype", "fp64"))["fake"]
    assert row["from_ours"] == pytest.approx(1)
    assert row["error"] == pytest.approx(1) == row["worst"]["error"]


def test_ours_not_timed_is_status_1_and_still_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = PEERS["ours"].make

    def make(problem: Problem, impl: str) -> Callable[[], Tensor]:
        return honest(problem, impl) if problem.case.tokens == 1 else raising(ValueError("no"))()

    monkeypatch.setitem(PEERS, "ours", dataclasses.replace(PEERS["ours"], make=make))
    report = run("--peers", "ours", status=1)
    assert rows_of(report)["ours"]["ms"] is None


# How peers are called: stand-ins under their names, made of our own operator.


def module(name: str, **contents: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update(contents)
    return made


def fake_flash_kda(q, k, v, g, beta, scale, o, *, A_log, dt_bias, lower_bound, cu_seqlens) -> None:
    assert o.shape == v.shape and dt_bias.shape == g.shape[2:]
    assert cu_seqlens is None or cu_seqlens.dtype == torch.int64
    o.copy_(
        chunk_kda(
            *(q, k, v, g, beta, scale),
            A_log=A_log,
            dt_bias=dt_bias.flatten(),
            cu_seqlens=cu_seqlens,
            lower_bound=lower_bound,
            safe_gate=True,
            use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            impl="torch",
        )[0]
    )


def fake_gym(q, k, v, gate, beta, *, cu_seqlens) -> tuple[Tensor, None]:
    # By its documentation: log decays and betas in float32, int32 boundaries, no norm inside.
    assert gate.dtype == beta.dtype == torch.float32 and k.dtype == v.dtype
    assert cu_seqlens is None or cu_seqlens.dtype == torch.int32
    return chunk_kda(q, k, v, gate, beta, cu_seqlens=cu_seqlens, impl="torch")[0], None


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    def fla_chunk_kda(*tensors: Tensor, **keywords: Any) -> Any:
        return chunk_kda(*tensors, impl="torch", **keywords)

    for name, contents in {
        "fla": {},
        "fla.ops": {},
        "fla.ops.kda": {"chunk_kda": fla_chunk_kda},
        "flash_kda": {"fwd": fake_flash_kda},
        "attn_gym": {},
        "attn_gym.linear": {},
        "attn_gym.linear.kda": {"chunk_kda": fake_gym},
    }.items():
        monkeypatch.setitem(sys.modules, name, module(name, **contents))
    for name in PEERS:
        monkeypatch.setitem(PEERS, name, on_a_cpu(name))


@pytest.mark.parametrize("documents", ["1", "4"])
def test_peers_get_the_same_problem(
    documents: str, run: Run, stand_ins: None, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run("--documents", documents)
    rows = rows_of(report)
    assert [row["reason"] for row in rows.values()] == [None] * 4
    assert rows["fla"]["from_ours"] == rows["flashkda"]["from_ours"] == 0.0
    # Its q and k are rounded to bf16 after the norm.
    assert 0 < rows["attn-gym"]["from_ours"] < 1e-2 and rows["attn-gym"]["error"] < 1e-2
    assert rows["fla"]["fla_ratio"] == 1.0
    assert rows["ours"]["fla_ratio"] == rows["fla"]["ms"] / rows["ours"]["ms"]
    printed = capsys.readouterr().out
    assert "fla: first call; its tuning can take minutes" in printed
    assert re.search(r"own: fla: \d+\.\d s\n", printed)
    assert "made outside" in printed  # the gate of attention-gym


def test_what_a_peer_does_not_serve_is_skipped(run: Run, stand_ins: None) -> None:
    rows = rows_of(run("--gate", "softplus"))
    assert rows["ours"]["error"] < 1e-2 and rows["fla"]["from_ours"] == 0.0
    assert rows["flashkda"]["reason"].startswith("skipped: it has the bounded gate alone")
    assert rows["attn-gym"]["reason"].startswith("skipped: it takes log decays above -5.9 only")
    rows = rows_of(run("--value-heads", "4"))
    assert rows["fla"]["from_ours"] == 0.0
    assert rows["flashkda"]["reason"].startswith("skipped: it has as many value heads as heads")


def test_an_installed_peer_is_skipped_where_there_is_no_gpu(
    run: Run, stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PEERS, "fla", dataclasses.replace(PEERS["fla"], needs_gpu=True))
    assert rows_of(run("--peers", "ours,fla"))["fla"]["reason"] == "skipped: it needs a GPU"


# What a GPU adds


def event(name: str, device: DeviceType, us: float, count: int, marked: bool = False) -> Any:
    return types.SimpleNamespace(
        key=name,
        device_type=device,
        self_device_time_total=us,
        count=count,
        is_user_annotation=marked,
    )


def test_kernels_are_summed_for_one_call() -> None:
    events = [
        event("small", DeviceType.CUDA, 100.0, 20),
        event("cudaLaunchKernel", DeviceType.CPU, 0.0, 30),
        event("ProfilerStep#1", DeviceType.CUDA, 9000.0, 10, marked=True),
        event("large", DeviceType.CUDA, 5000.0, 10),
    ]
    large, small = timing.sum_kernels(events, 10)
    assert (large.name, large.ms, large.launches) == ("large", 0.5, 1.0)
    assert (small.name, small.ms, small.launches) == ("small", 0.01, 2.0)
    with pytest.raises(RuntimeError, match="no kernel"):
        timing.sum_kernels(events[1:3], 10)


@pytest.mark.parametrize(("host", "late"), [(0.4, False), (0.6, True)])
def test_figures_of_a_gpu_and_its_kernels_are_shown(
    host: float,
    late: bool,
    run: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = [timing.Kernel("walk[half]", 0.5, 1.0)]
    kernels += [timing.Kernel(f"piece {n}", 0.002, 2.0) for n in range(15)]
    monkeypatch.setattr(bench, "host_ms", lambda call, device: host)
    monkeypatch.setattr(bench, "peak_bytes", lambda call, device: 3 * 2**20)
    monkeypatch.setattr(bench, "kernel_times", lambda call, device: kernels)
    report = run("--peers", "ours")
    row = rows_of(report)["ours"]
    assert row["device_ms"] == pytest.approx(0.53) and row["host_bound"] is late
    report["setting"]["breakdown"] = True
    capsys.readouterr()
    bench_report.print_tables(report)
    printed = capsys.readouterr().out
    (line,) = (cells(printed, "ours"),)
    assert line[3:5] == ["0.530", f"{host:.3f}"] and "3" in line
    assert ("host-bound" in line) is late
    assert re.search(r"0\.5000 +94\.3% +1 +walk\[half\]", printed)
    assert re.search(r"0\.0080 +1\.5% +8 +4 more names", printed)
