"""The model of an exchange on many ranks by hand, its bytes against the plan, and the command."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.run import get_args_parser

from kda_cp.comm.plan import Plan, make_plan
from kda_cp.comm.traffic import ALGORITHMS, received_bytes
from kda_cp.launch import machine as machines
from kda_cp.launch import options, simulate
from kda_cp.launch.machine import Link, Machine, measure, read_machine
from kda_cp.launch.predict import Prediction, fold_needs, kept_bytes, predict_seconds
from kda_cp.launch.predict import transition_needs as needs_of
from kda_cp.launch.verify import random_fragments
from kda_cp.testing.ranks import RankPool

REPOSITORY = pathlib.Path(__file__).parents[2]
FAST = float("inf")
FREE = Link(latency_s=0, step_s=0, bandwidth=FAST)
IDEAL = Machine(
    ranks_per_node=8,
    nvlink=FREE,
    network=FREE,
    launch_s=0,
    message_s=0,
    fold_launch_s=0,
    fold_s=0,
    fold_flops=FAST,
)
"""Everything is free; each test sets a price on what it is about."""


def contiguous(ranks: int) -> Plan:
    return make_plan((0, ranks), ranks)


def predict(
    plan: Plan, algorithm: str, machine: Machine, heads: int = 1, **more: Any
) -> Prediction:
    """Of one channel each, so that every matrix of a head has 4 bytes."""
    return predict_seconds(plan, algorithm, machine, heads=heads, key_dim=1, value_dim=1, **more)


def priced(**prices: Any) -> Machine:
    return replace(IDEAL, **prices)


# By hand: one sequence over four contiguous ranks; fragments 1 and 2 are full.


def test_all_gather_by_hand() -> None:
    link = Link(latency_s=10, step_s=1, bandwidth=FAST)
    machine = priced(nvlink=link, message_s=100, fold_s=1000)
    # Three steps round the ring; A1 and A2 come to rank 0 from two peers; two steps of a fold.
    assert predict(contiguous(4), "all_gather", machine) == Prediction(3 + 110 + 2000, 3 + 2000)
    # Without a backward rank 0 needs no A; rank 3 needs the same two as before.
    forward = predict(contiguous(4), "all_gather", machine, training=False)
    assert forward == Prediction(3 + 110 + 2000, 0)
    # With two ranks there is no A, and nothing to fold.
    assert predict(contiguous(2), "all_gather", machine) == Prediction(1, 1)


def test_all_gather_s_bandwidth_by_hand() -> None:
    machine = priced(nvlink=replace(FREE, bandwidth=4))  # a matrix a second
    assert predict(contiguous(4), "all_gather", machine, heads=5) == Prediction(5 * (3 + 2), 5 * 3)


def test_all_gather_over_nodes_by_hand() -> None:
    # Two nodes of two: two steps inside and one outside; a node takes in all three blocks by two
    # NICs. Rank 0 receives both A from outside or from rank 1, by its own NIC: A2 from outside.
    network = Link(latency_s=10, step_s=100, bandwidth=4)
    machine = priced(ranks_per_node=2, nvlink=replace(FREE, step_s=1), network=network)
    assert predict(contiguous(4), "all_gather", machine) == Prediction(102 + 1.5 + 11, 102 + 1.5)


def test_ring_by_hand() -> None:
    machine = priced(nvlink=replace(FREE, latency_s=1), fold_s=10)
    # Three hops; the states that arrive at ranks 1 and 2 are folded on, that at rank 3 is used.
    assert predict(contiguous(4), "ring", machine) == Prediction(11 + 11 + 1, 11 + 11 + 1)
    # Four groups of heads: three more times the slowest hop.
    assert predict(contiguous(4), "ring", machine, heads=4).forward == 23 + 3 * 11
    # Nine heads in four groups: the largest has three, and three matrices take three seconds.
    machine = priced(nvlink=Link(latency_s=1, step_s=0, bandwidth=4))
    assert predict(contiguous(4), "ring", machine, heads=9).forward == (3 + 3) * (1 + 3)


def test_ring_over_nodes_by_hand() -> None:
    machine = priced(ranks_per_node=2, network=replace(FREE, latency_s=100))
    machine = replace(machine, nvlink=replace(FREE, latency_s=1))
    assert predict(contiguous(4), "ring", machine).forward == 1 + 100 + 1
    # Zigzag returns the same way: pieces 0 to 7 on ranks 0 1 2 3 3 2 1 0, 3 and 4 being one.
    zigzag = make_plan((0, 8), 4, layout="zigzag")
    assert predict(zigzag, "ring", machine).forward == 2 * (1 + 100 + 1)


def test_all_to_all_by_hand() -> None:
    machine = priced(nvlink=replace(FREE, latency_s=1), message_s=100, fold_s=1000)
    # Four heads, one a rank. Three peers in each collective; one fold over the two full fragments.
    expected = 201 + 2000 + 201
    assert predict(contiguous(4), "all_to_all", machine, heads=4) == Prediction(expected, expected)


def test_all_to_all_s_bandwidth_by_hand() -> None:
    machine = priced(nvlink=replace(FREE, bandwidth=4))
    # Forward rank 1 sends its b and A to three folders, 6, where no rank receives more than 5; the
    # states come back, 3 to a rank. Backward c and states: 3 and 3.
    assert predict(contiguous(4), "all_to_all", machine, heads=4) == Prediction(6 + 3, 3 + 3)
    # One head: rank 0 folds for all, receives b1, A1, b2 and A2 and returns 3 states; backward it
    # receives c1, c2 and c3 and returns 2 gradients, as one of the three is its own.
    assert predict(contiguous(4), "all_to_all", machine) == Prediction(4 + 3, 3 + 2)


def test_all_to_all_over_nodes_by_hand() -> None:
    # One head: rank 0 receives b1 and A1 from its node, b2 and A2 from outside, and sends one state
    # inside and two outside.
    network = Link(latency_s=100, step_s=0, bandwidth=4)
    nvlink = Link(latency_s=1, step_s=0, bandwidth=8)  # busy for a second, beside the NIC
    machine = priced(ranks_per_node=2, nvlink=nvlink, network=network)
    assert predict(contiguous(4), "all_to_all", machine).forward == (100 + 2) + (100 + 2)


def test_products_of_a_fold_by_hand() -> None:
    machine = priced(fold_flops=2)  # a head a second
    # Nine heads and two full fragments: all heads, the three of rank 0, a group of three.
    times = [predict(contiguous(4), name, machine, heads=9).forward for name in ALGORITHMS]
    assert times == [2 * 9, 2 * 3 + 3 * 3, 2 * 3]


def test_a_host_that_issues_slowly_is_waited_for() -> None:
    machine = priced(launch_s=5, fold_launch_s=100, fold_s=10, nvlink=replace(FREE, step_s=1))
    # Backward of an all-gather: issued at 5, there at 8; folds issued at 105 and 205, 10 each.
    assert predict(contiguous(4), "all_gather", machine).backward == 215
    # A quick host is ahead: from 8 on two folds of 10.
    assert predict(contiguous(4), "all_gather", replace(machine, fold_launch_s=1)).backward == 28
    # The states go back only after the folds are issued.
    assert predict(contiguous(4), "all_to_all", machine).backward == 5 + 200 + 10
    # A ring of 4 groups: rank 1 issues a receive, a send and a fold for each.
    assert predict(contiguous(4), "ring", machine, heads=4).forward == 4 * (5 + 5 + 100)


def test_where_nothing_crosses_ranks_nothing_takes_time() -> None:
    for algorithm in ALGORITHMS:
        assert predict(make_plan((0, 2, 4), 2), algorithm, Machine()) == Prediction(0, 0)


def test_an_unknown_algorithm_is_named() -> None:
    with pytest.raises(ValueError, match=r"algorithm: expected one of .*, got 'tree'"):
        predict(contiguous(2), "tree", IDEAL)


# Against the plan


def random_plan(generator: random.Random) -> Plan:
    ranks, tokens = generator.randint(1, 9), generator.randint(1, 60)
    inner = sorted(generator.choices(range(tokens + 1), k=generator.randint(0, 5)))
    layout = generator.choice(["contiguous", "zigzag", "fragments"])
    if layout != "fragments":
        return make_plan([0, *inner, tokens], ranks, layout=layout)
    table = random_fragments(tokens, ranks, generator.randint(0, 99))
    return make_plan([0, *inner], ranks, fragments=table, num_tokens=tokens)


def test_what_ranks_need_is_what_the_plan_sends() -> None:
    generator = random.Random(0)
    for _ in range(300):
        plan = random_plan(generator)
        machine = priced(ranks_per_node=generator.randint(1, 4))
        for training in (False, True):
            for target, (own, inside, outside) in enumerate(needs_of(plan, machine, training)):
                sent = {True: 0, False: 0}
                for source in range(plan.ranks):
                    near = machine.node(source) == machine.node(target)
                    sent[near] += len(plan.transition_sends(source, target, training))
                assert (own, inside, outside) == (len(plan.full(target)), sent[True], sent[False])
        for rank, (entry, exits) in enumerate(fold_needs(plan)):
            before = {f.index for e in plan.entered(rank) for f in plan.entry_chain(e.index)}
            after = {f.index for e in plan.exited(rank) for f in plan.exit_chain(e.index)}
            full = {f.index for f in plan.fragments if f.full}
            assert sorted(i for r in entry for i in r) == sorted(before & full)
            assert sorted(i for r in exits for i in r) == sorted(after & full)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_bytes_of_the_table_are_those_of_the_worst_rank(
    layout: str, tmp_path: pathlib.Path
) -> None:
    sizes = {"heads": 6, "key_dim": 8, "value_dim": 4, "batch": 3}
    arguments = [f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()]
    simulate.main([*arguments, "--doublings=5", f"--layout={layout}", f"--out={tmp_path}"])
    for row in json.loads((tmp_path / "simulate.json").read_text())["rows"]:
        ranks = row["ranks"]
        plan = make_plan((0, 100 * ranks), ranks, layout=layout)
        for algorithm in ALGORITHMS:
            every = [received_bytes(plan, algorithm, r, **sizes) for r in range(ranks)]
            found = row["algorithms"][algorithm]
            assert found["forward_received_bytes"] == max(t.forward for t in every)
            assert found["backward_received_bytes"] == max(t.backward for t in every)


def test_kept_transitions_by_hand() -> None:
    row = 4 * 2 * 2
    # Of eight contiguous ranks six are full. A ring keeps its own, an all-gather all six.
    kept = [kept_bytes(contiguous(8), name, heads=4, key_dim=2) for name in ALGORITHMS]
    assert kept == [6 * 4 * row, 4 * row, 6 * 1 * row]


# What must hold on any machine


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_more_ranks_take_longer(algorithm: str, layout: str) -> None:
    times = []
    for ranks in (2**n for n in range(1, 11)):
        plan = make_plan((0, 2 * ranks), ranks, layout=layout)
        found = predict_seconds(plan, algorithm, Machine(), heads=32, key_dim=128, value_dim=128)
        times.append((found.forward, found.backward))
    assert times == sorted(times)
    assert [backward for _, backward in times] == sorted(backward for _, backward in times)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_node_knows_no_network_and_leaving_it_costs(algorithm: str) -> None:
    sizes = {"heads": 16, "key_dim": 64, "value_dim": 64}
    slow = Link(latency_s=9, step_s=9, bandwidth=9)
    machine = replace(Machine(), fold_launch_s=0)  # or the host would hide what links take
    other = replace(machine, network=slow)

    def total(ranks: int, on: Machine) -> float:
        return predict_seconds(contiguous(ranks), algorithm, on, **sizes).total

    assert total(8, machine) == total(8, other)
    assert total(16, machine) < total(16, other)
    assert total(16, replace(machine, ranks_per_node=16)) < total(16, machine)


# Files of machines


def test_a_machine_survives_its_file(tmp_path: pathlib.Path) -> None:
    machine = replace(Machine(), ranks_per_node=4, fold_flops=FAST, network=Link(1.5, 0, 3e9))
    machine.write(tmp_path / "machine.json")
    assert read_machine(tmp_path / "machine.json") == machine


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "Expecting"),
        ("[]", "expected an object, got"),
        ('{"speed": 1}', "expected names among .*, got 'speed'"),
        ('{"launch_s": -1}', "launch_s: expected a number of at least 0, got -1"),
        ('{"launch_s": NaN}', "launch_s: expected a number of at least 0, got nan"),
        ('{"launch_s": true}', "launch_s: expected a number"),
        ('{"nvlink": {"bandwidth": 0}}', "bandwidth: expected a number above 0, got 0"),
        ('{"nvlink": 3}', "expected an object, got 3"),
        ('{"ranks_per_node": 0}', "ranks_per_node: expected an integer above 0, got 0"),
        ('{"ranks_per_node": 1.5}', "ranks_per_node: expected an integer above 0, got 1.5"),
    ],
)
def test_a_wrong_file_is_refused_by_name(text: str, complaint: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "machine.json").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        read_machine(tmp_path / "machine.json")


# The command


def test_the_command_writes_tables_picture_and_json(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main(["--layout", "zigzag", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "simulate.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "simulate.json").read_text())
    assert [row["ranks"] for row in report["rows"]] == [2**n for n in range(1, 11)]
    assert [row["nodes"] for row in report["rows"]] == [1, 1, 1, 2, 4, 8, 16, 32, 64, 128]
    printed = capsys.readouterr().out
    assert "predicted, not measured: one document, zigzag, HV 32" in printed
    last = report["rows"][-1]
    least = min(last["algorithms"].values(), key=lambda found: found["seconds"])
    assert f"{1e3 * least['forward_seconds']:.2f}" in printed
    assert last["algorithms"][last["best"]] == least


def test_options_and_a_file_set_the_machine(tmp_path: pathlib.Path) -> None:
    replace(Machine(), launch_s=7.0, message_s=3.0).write(tmp_path / "machine.json")
    file = ["--machine", str(tmp_path / "machine.json")]
    changed = ["--network-gbytes", "5", "--launch-us", "2", "--ranks-per-node", "4"]
    simulate.main([*file, *changed, "--doublings", "1", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "simulate.json").read_text())["machine"]
    assert found["network"]["bandwidth"] == 5e9
    assert (found["launch_s"], found["message_s"]) == (pytest.approx(2e-6), 3.0)
    assert found["ranks_per_node"] == 4
    assert found["nvlink"]["bandwidth"] == Machine().nvlink.bandwidth


def test_help_tells_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulate.main(["--help"])
    printed = capsys.readouterr().out
    for word in ("Two clocks", "gather  ", "all-to-all  ", "hop  ", "Limits", "How far off"):
        assert word in printed


def test_no_option_is_the_beginning_of_one_of_torchruns() -> None:
    theirs = get_args_parser()._option_string_actions
    for mine in simulate._make_parser()._option_string_actions:
        if mine not in ("-h", "--help"):
            assert not [option for option in theirs if option.startswith(mine)], mine


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--heads", "0"], "--heads"),
        (["--key-dim", "many"], "--key-dim"),
        (["--doublings", "-1"], "--doublings"),
        (["--layout", "ring"], "--layout"),
        (["--ranks-per-node", "0"], "--ranks-per-node"),
        (["--network-gbytes", "0"], "--network-gbytes"),
        (["--fold-us", "-1"], "--fold-us"),
        (["--launch-us", "nan"], "--launch-us"),
        (["--machine", "/nowhere.json"], "--machine: expected the file of a machine"),
        (["--machine", __file__], "--machine: expected the file of a machine"),
        (["--device", "abacus"], "--device"),
        (["--out", __file__], "--out: expected a folder"),
        (["--measure", "--device", "cpu"], "--measure: expected ranks that torchrun started"),
        (["--unknown", "1"], "--unknown"),
    ],
)
def test_wrong_option_is_one_line_and_status_2(
    arguments: list[str],
    named: str,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        simulate.main(arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("simulate: error: ")
    assert named in printed.err

    if "--measure" not in arguments:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setattr(options.time, "sleep", lambda seconds: None)
        with pytest.raises(SystemExit) as ended:
            simulate.main(arguments)
        assert ended.value.code == 2
        assert capsys.readouterr().err == ""


# Measuring


def measure_quickly(group: dist.ProcessGroup, ranks_per_node: int) -> Machine:
    """As `measure` on a cluster that torchrun started with so many ranks a node."""
    few = mock.patch.multiple(machines, REPEATS=1, LARGE=2**16, FOLDS=2)
    there = mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks_per_node))
    with few, there:
        return measure(group, torch.device("cpu"), 2, 8, 8)


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(2, 2), (2, 1), (4, 2)])
def test_every_link_that_is_there_is_measured(
    ranks: int, ranks_per_node: int, own_ranks: RankPool
) -> None:
    found = own_ranks.run(measure_quickly, ranks_per_node, ranks=ranks)
    assert all(machine == found[0] for machine in found)  # the same on every rank
    default = Machine()
    assert found[0].ranks_per_node == ranks_per_node
    assert (found[0].nvlink == default.nvlink) == (ranks_per_node == 1)
    assert (found[0].network == default.network) == (ranks_per_node == ranks)
    assert (found[0].message_s == default.message_s) == (ranks == 2)
    assert found[0].launch_s > 0
    assert found[0].nvlink.bandwidth > 0
    assert found[0].fold_launch_s == 0  # a CPU folds as it is told


def test_measured_numbers_can_be_simulated(tmp_path: pathlib.Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = ["-m", "kda_cp.launch.simulate", "--measure", "--device=cpu", "--heads=2"]
    ran = subprocess.run(
        [sys.executable, *launcher, *command, "--key-dim=16", f"--out={tmp_path}"],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count(": predicted ") == 2
    file = tmp_path / "machine.json"
    assert read_machine(file).ranks_per_node == 2
    assert simulate.main(["--doublings=2", f"--machine={file}", f"--out={tmp_path}"]) == 0
