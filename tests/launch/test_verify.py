"""The verification job: what it packs, how it judges, and whole runs of it on two ranks.

Four runs under torchrun take most of the time of this file, about ten seconds each.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import sysconfig
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser

from kda_cp.comm.plan import make_plan
from kda_cp.launch import documents, options, verify
from kda_cp.launch.documents import boundaries, pack_lengths, pack_tokens
from kda_cp.launch.judge import score
from kda_cp.launch.model import Model, Pass, Sizes

REPOSITORY = pathlib.Path(__file__).parents[2]
STDLIB = pathlib.Path(sysconfig.get_paths()["stdlib"])
TENSORS = ["o", "final_state", "dq", "dk", "dv", "dg", "dbeta"]
PARAMETERS = [
    f"d{name}" for name, _ in Model(Sizes(1, 1, 1, 1), torch.float32, 0).named_parameters()
]
SMALL = ["--key-dim", "8", "--value-dim", "8", "--device", "cpu"]


# Documents


# Sizes of the shortest files of a Python 3.13 that was installed without its tests.
FEW_SHORT_FILES = (
    *(38, 38, 58, 70, 72, 76, 82, 87, 88, 97, 97, 124, 129, 141, 148, 154, 159, 167, 227, 229),
    *(231, 232, 248, 254, 257, 263, 268, 268, 296, 308, 314, 327, 354, 379, 396, 433, 454, 481),
    *(500, 506, 557, 600, 657, 689, 703),
    *range(720, 12000, 20),
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_thirty_documents_are_found_where_few_files_are_short(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tuple((size, f"{number}.py") for number, size in enumerate(FEW_SHORT_FILES))
    monkeypatch.setattr(documents, "_files", lambda: files)
    monkeypatch.setattr(
        documents, "_read", lambda name, size: documents.Document(name, b"a" * size, size)
    )
    shard = -(-16384 // ranks)
    batch = documents.pack_tokens(16384, shard)
    assert len(batch) >= 30
    assert max(len(document.text) for document in batch) > (shard if ranks > 1 else 0)
    assert boundaries(batch)[-1] == 16384


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_default_batch_is_real_documents_of_many_lengths(ranks: int) -> None:
    shard = -(-16384 // ranks)
    documents = pack_tokens(16384, shard)
    lengths = [len(document.text) for document in documents]
    assert len(documents) >= 30
    assert sum(lengths) == 16384
    assert min(lengths) < 64 < 500 < max(lengths)
    assert max(lengths) > (shard if ranks > 1 else 0)
    # Three ranks leave no room for two shards in one document beside 30 others.
    assert ranks < 4 or max(lengths) > 2 * shard
    assert not any(document.cut for document in documents[:-1])
    assert len({document.name for document in documents}) == len(documents)
    for document in documents:
        content = (STDLIB / document.name).read_bytes()
        assert content.startswith(document.text)
        assert document.file_bytes == len(content)
    assert pack_tokens(16384, shard) == documents


@pytest.mark.parametrize("tokens", [1, 7, 100, 601, 5000, 400_000])
def test_any_total_is_filled_exactly(tokens: int) -> None:
    documents = pack_tokens(tokens, -(-tokens // 4))
    assert boundaries(documents)[-1] == tokens
    assert all(document.text for document in documents)


def test_lengths_are_cut_as_asked_for() -> None:
    documents = pack_lengths([700, 0, 324, 1])
    assert boundaries(documents) == [0, 700, 700, 1024, 1025]
    with pytest.raises(ValueError, match="--lengths: none of Python's text files"):
        pack_lengths([10**9])


@pytest.mark.parametrize(("tokens", "ranks"), [(1, 1), (1, 3), (5, 4), (1000, 1), (1000, 4)])
def test_random_fragments_cover_every_token_once(tokens: int, ranks: int) -> None:
    for seed in range(5):
        table = verify.random_fragments(tokens, ranks, seed)
        make_plan([0, tokens], ranks, fragments=table)  # raises unless it is an exact cover


# Judging


@pytest.fixture
def judged() -> torch.Tensor:
    """[heads, rows, values] with documents of 9 and 1 rows."""
    return torch.randn(3, 10, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


DOCUMENTS = torch.tensor([0] * 9 + [1])


def test_score_names_the_head_and_document_that_are_off(judged: torch.Tensor) -> None:
    x = judged.clone()
    x[2, 9] *= 1.01
    found = score(x, judged, DOCUMENTS)
    assert (found.head, found.document) == (2, 1)
    # Its own norm, or the head's average if that is larger: not diluted by the other document.
    average = judged[2].square().sum() / 10
    own = judged[2, 9].square().sum()
    expected = 0.01 * own.sqrt() / torch.maximum(own, average).sqrt()
    assert found.error == pytest.approx(float(expected))


def test_score_of_a_right_tensor_is_zero(judged: torch.Tensor) -> None:
    assert score(judged, judged, DOCUMENTS).error == 0
    assert score(judged[:, :0], judged[:, :0], DOCUMENTS[:0]).error == 0


def test_score_is_absolute_where_the_judge_is_zero(judged: torch.Tensor) -> None:
    zeros = torch.zeros_like(judged)
    x = zeros.clone()
    x[1, 3, 2] = 1e-5
    assert score(x, zeros, None).error == pytest.approx(1e-5)


def test_score_lets_no_nan_pass(judged: torch.Tensor) -> None:
    x = judged.clone()
    x[0, 4, 1] = float("nan")
    found = score(x, judged, DOCUMENTS)
    assert not found.error <= 1e9
    assert (found.head, found.document) == (0, 0)


# Options


def test_no_option_is_the_beginning_of_one_of_torchruns() -> None:
    # torchrun looks at the whole command line and takes unique beginnings for its own options.
    theirs = get_args_parser()._option_string_actions
    for mine in options.make_parser()._option_string_actions:
        if mine not in ("-h", "--help"):
            assert not [option for option in theirs if option.startswith(mine)], mine


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tokens", "0"], "--tokens"),
        (["--tokens", "many"], "--tokens"),
        (["--tokens", "10", "--lengths", "10"], "--lengths"),
        (["--lengths", "5,,6"], "--lengths"),
        (["--lengths", "0"], "--lengths"),
        (["--layout", "ring"], "--layout"),
        (["--dtype", "int8"], "--dtype"),
        (["--device", "abacus"], "--device"),
        (["--heads", "3"], "value heads"),
        (["--bound", "nan"], "--bound"),
        (["--unknown", "1"], "--unknown"),
        (["--tokens", "9" * 12], "--tokens"),
        (["--out", __file__], "--out: expected a folder"),
    ],
)
def test_wrong_option_is_one_line_and_status_2(
    arguments: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SystemExit) as ended:
        verify.main(arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("verify: error: ")
    assert named in printed.err

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(options.time, "sleep", lambda seconds: None)
    with pytest.raises(SystemExit) as ended:
        verify.main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err == ""


def test_importing_the_package_needs_no_table_and_no_picture() -> None:
    code = "import kda_cp, sys; sys.exit('rich' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


# Runs


def read(out: pathlib.Path) -> dict[str, Any]:
    assert (out / "verify.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((out / "verify.json").read_text())


def expect_complete(report: dict[str, Any], ranks: int) -> None:
    """Every tensor is scored on every rank, within the bound, and the tokens add up."""
    assert report["ok"] is True
    assert sorted(report["errors"]) == sorted(TENSORS + PARAMETERS)
    for entry in report["errors"].values():
        assert len(entry["ranks"]) == ranks
        assert all(found["error"] <= report["bound"] for found in entry["ranks"])
    total = sum(document["tokens"] for document in report["documents"])
    assert [rank["rank"] for rank in report["ranks"]] == list(range(ranks))
    assert sum(rank["tokens"] for rank in report["ranks"]) == total
    for rank in report["ranks"]:
        assert sum(stop - start for _, start, stop in rank["segments"]) == rank["tokens"]
        assert min(rank["seconds"].values()) > 0


def launch(ranks: int, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [sys.executable, *launcher, "-m", "kda_cp.launch.verify", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )


ORACLE = ("--against", "reference")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--layout", "contiguous", "--exchange", "all_to_all", "--tokens", "601", *ORACLE],
        ["--layout", "zigzag", "--exchange", "ring", "--lengths", "150,0,7,300", "--dtype", "bf16"],
        ["--layout", "fragments", "--lengths", "150,0,7,300", "--dtype", "fp64"],
    ],
    ids=lambda arguments: arguments[1],
)
def test_two_ranks_agree_with_the_judge(arguments: list[str], tmp_path: pathlib.Path) -> None:
    ran = launch(2, [*arguments, *SMALL, "--out", str(tmp_path)])
    assert ran.returncode == 0, ran.stderr
    report = read(tmp_path)
    expect_complete(report, ranks=2)
    assert report["setting"]["layout"] == arguments[1]
    if "--exchange" in arguments:
        assert report["setting"]["exchange"] == arguments[3]
    # A state crosses ranks, so the errors say something about the exchange.
    assert any(rank["received_bytes"]["forward"] > 0 for rank in report["ranks"])
    for name in report["errors"]:
        assert f" {name} " in ran.stdout
    assert "ok: worst error" in ran.stdout


def test_error_past_the_bound_is_status_1_and_still_reported(tmp_path: pathlib.Path) -> None:
    # torchrun ends the other ranks at the first status 1: not before rank 0 has written.
    # One token also leaves rank 1 without any.
    arguments = ["--lengths", "1", *SMALL, "--out", str(tmp_path), "--bound", "1e-12"]
    ran = launch(2, arguments)
    assert ran.returncode == 1
    report = read(tmp_path)
    assert report["ok"] is False
    assert report["worst"]["error"] > 1e-12
    assert [rank["tokens"] for rank in report["ranks"]] == [1, 0]
    assert "NOT OK: worst error" in ran.stdout


def test_one_process_without_torchrun(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify.main(["--lengths", "40,0,33", *SMALL, "--out", str(tmp_path)]) == 0
    expect_complete(read(tmp_path), ranks=1)
    printed = capsys.readouterr()
    assert printed.err == ""  # no progress bar where there is no terminal


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_one_wrong_head_of_one_document_is_status_1(
    factor: float, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = verify.run

    def wrong(*arguments: Any) -> Pass:
        found = honest(*arguments)
        found.tensors["dk"][:, 40:, 1] *= factor
        return found

    monkeypatch.setattr(verify, "run", wrong)
    assert verify.main(["--lengths", "40,33", *SMALL, "--out", str(tmp_path)]) == 1
    worst = read(tmp_path)["worst"]
    assert (worst["tensor"], worst["rank"], worst["head"], worst["document"]) == ("dk", 0, 1, 1)
