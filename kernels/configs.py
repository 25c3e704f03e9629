"""Pinned launch configurations, never searched at run time.

Ranks that chose different kernels would get different bits, and a search costs minutes; so a
configuration is a function of sizes and dtypes only. Found by trials on one H200, 2026-12-01, torch
2.11, Triton 3.6, for bf16, K = V = 128, H 32 (docs/measurements.md); other sizes follow from what
spills least when compiled. `launch/tune.py` looks for better ones and prints what to put here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class IntraConfig(NamedTuple):
    """Launch of `intra.scores_kernel`."""

    columns: int
    """key channels of a slice (BK)"""
    warps: int
    stages: int


class StateConfig(NamedTuple):
    """Launch of `state.state_kernel`."""

    columns: int
    """state columns of a program (BV)"""
    warps: int
    stages: int


class FoldConfig(NamedTuple):
    """Launch of `fold.fold_kernel`."""

    columns: int
    """state columns of a program (BV)"""
    slice: int
    """columns of A read at a time (BK)"""
    warps: int


def padded(size: int) -> int:
    """The power of two, at least 16, that holds a number of channels."""
    return max(16, 1 << (size - 1).bit_length())


MOST_KEYS = 256
"""K up to which a program holds its columns of the state in registers."""


def intra_config(KP: int, term: torch.dtype) -> IntraConfig:
    """Launch of the scores; four warps and 32 channels a slice give a thread one channel."""
    return IntraConfig(min(KP, 32), 4, 1)


def state_config(K: int, V: int, term: torch.dtype, *, maps: bool) -> StateConfig:
    """Launch of the state pass, for outputs or for maps."""
    KP = padded(K)
    if term == torch.bfloat16:
        if KP <= 128 and V > 64 and not maps:
            return StateConfig(128, 8, 2)
        if KP <= 128:
            return StateConfig(min(padded(V), 64), 4, 2)
        return StateConfig(min(padded(V), 64), 8, 1)
    return StateConfig(min(padded(V), 32 if KP <= 128 else 16), 8, 1)


def fold_config(K: int) -> FoldConfig:
    """Launch of the fold."""
    return FoldConfig(16, 32, 4)


def segment_chunks(HV: int, K: int, V: int, chunk_size: int) -> int:
    """Chunks a segment: the pinned length at which a sequence is cut, in chunks.

    Never a function of the sequences: then packed equals separate, and a prefix ignores what
    follows, to the bit.
    """
    tokens = 4096 if HV >= 24 else 2048 if HV >= 6 else 1024
    return tokens // chunk_size
