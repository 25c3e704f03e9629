"""The fold of a chain of maps is `S <- A S + b` in fp64, for every size and number of chains."""

import pytest
import torch

from kda_cp import platform
from kda_cp.kernels.configs import FoldConfig
from kda_cp.kernels.fold import fold
from kda_cp.testing.compare import errors

DEVICE = "cuda" if platform.device == "cuda" else "cpu"
BOUND = 1e-5
"""Sums of at most 256 products in fp32, with roundings of 2^-24, over a few steps."""


def draw(chains, HV, K, V, seed=0):
    """Maps `[b | A]` with |A| about 1, and states, with a NaN wherever nothing may be read."""
    generator = torch.Generator().manual_seed(seed)
    counts = [steps for _, steps in chains]
    maps = torch.randn(sum(counts) + 2, HV, K, V + K, generator=generator)
    maps[..., V:] *= K**-0.5
    states = torch.full((sum(counts) + len(chains) + 2, HV, K, V), float("nan"))
    rows, i_map, i_state = [], 1, 1  # the first and last rows belong to no chain
    for from_zero, steps in chains:
        rows.append([i_map, i_state, steps, int(from_zero)])
        if from_zero:
            maps[i_map, ..., V:] = float("nan")
        else:
            states[i_state] = torch.randn(HV, K, V, generator=generator)
        i_map, i_state = i_map + steps, i_state + steps + 1
    maps[0] = maps[-1] = float("nan")
    return maps, states, torch.tensor(rows, dtype=torch.int64).view(-1, 4)


def folded(maps, states, chains):
    """The states after the fold in fp64."""
    maps, states = maps.double(), states.double()
    V = states.shape[-1]
    for i_map, i_state, steps, from_zero in chains.tolist():
        S = torch.zeros_like(states[0]) if from_zero else states[i_state]
        for n in range(steps):
            b, A = maps[i_map + n].split([V, maps.shape[-1] - V], -1)
            S = b if n == 0 and from_zero else A @ S + b
            states[i_state + n + 1] = S
    return states


def run_fold(maps, states, chains, config=None):
    states = states.to(DEVICE, copy=True)
    fold(maps.to(DEVICE), states, chains.to(DEVICE), config)
    return states.cpu()


def assert_folded(chains, HV, K, V, config=None):
    """Assert the fold's states, head by head, and that it wrote no other."""
    maps, states, rows = draw(chains, HV, K, V)
    got, want = run_fold(maps, states, rows, config), folded(maps, states, rows)
    written = ~want[:, 0, 0, 0].isnan()
    assert got[~written].isnan().all(), "wrote a state that it was not given"
    found = errors("h", got[written][None], want[written][None])
    assert found.max() < BOUND, f"{found.max():.1e} > {BOUND} at (state, head) {found.argmax()}"


@pytest.mark.parametrize(
    ("K", "V"),
    [
        *((K, K) for K in (16, 24, 60, 64, 72, 100, 128)),
        *((16, 128), (128, 16), (60, 100), (100, 24), (256, 16), (16, 256), (5, 3)),
    ],
)
def test_every_size(K, V):
    """Two steps from a state and two from zero, of which the first A is not read."""
    assert_folded([(False, 2), (True, 2)], HV=2, K=K, V=V)


@pytest.mark.parametrize("HV", [1, 3])
def test_chains_of_different_lengths(HV):
    """Each has its own maps and states, among rows that belong to none; some have no map."""
    assert_folded([(False, 1), (True, 5), (False, 0), (True, 1), (False, 7)], HV=HV, K=24, V=20)


def test_no_chain():
    """Nothing is launched, and nothing changes."""
    maps, states, _ = draw([], HV=2, K=16, V=16)
    assert run_fold(maps, states, torch.empty(0, 4, dtype=torch.int64)).isnan().all()


@pytest.mark.parametrize(
    "config", [FoldConfig(16, 16, 4), FoldConfig(32, 32, 4), FoldConfig(64, 64, 8)]
)
def test_every_launch(config):
    """Whatever the tiles are, larger than the state as well."""
    assert_folded([(False, 2), (True, 2)], HV=1, K=60, V=50, config=config)


def test_more_steps_change_no_earlier_state():
    """The states up to a step are bitwise those of a chain that ends there."""
    maps, states, rows = draw([(False, 4)], HV=2, K=24, V=20)
    whole = run_fold(maps, states, rows)
    rows[0, 2] = 2
    part = run_fold(maps, states, rows)
    assert torch.equal(part[1:4], whole[1:4])
    assert part[4:].isnan().all()


@pytest.mark.parametrize("filling", [float("nan"), 1e4])
def test_memory_around_the_buffers_is_never_read(filling):
    """The same bits, whatever lies around the maps and the states; and it stays there."""
    maps, states, rows = draw([(False, 2), (True, 1)], HV=2, K=24, V=20)
    want = run_fold(maps, states, rows)

    def surround(x):
        buffer = torch.full((x.numel() + 4096,), filling, device=DEVICE)
        buffer[2048 : 2048 + x.numel()] = x.flatten().to(DEVICE)
        return buffer, buffer[2048 : 2048 + x.numel()].view(x.shape)

    (_, maps), (buffer, states) = surround(maps), surround(states)
    fold(maps, states, rows.to(DEVICE))
    assert torch.equal(states.cpu().nan_to_num(7.0), want.nan_to_num(7.0))
    for around in (buffer[:2048], buffer[-2048:]):
        assert torch.equal(around.nan_to_num(7.0), torch.full_like(around, filling).nan_to_num(7.0))
