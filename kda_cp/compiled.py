"""The stages of the forward pass on the Triton kernels; the backward is eager's so far.

Serves K up to 256 in bf16, fp16 and fp32, on NVIDIA GPUs or, interpreted, on a CPU. Imported at the
first call that needs it, since Triton does not exist everywhere that PyTorch does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from kda_cp.comm import affine
from kda_cp.cuts import Cut, cut_walk
from kda_cp.kernels import configs, intra
from kda_cp.kernels.fold import fold as fold_chains
from kda_cp.kernels.primitives import Arithmetic, arithmetic
from kda_cp.kernels.state import walk_maps as launch_maps
from kda_cp.kernels.state import walk_segments
from kda_cp.segments import SegmentTable, Walk
from kda_cp.stages import Inputs, Settings

INTERPRETED = not isinstance(intra.scores_kernel, JITFunction)
"""Whether TRITON_INTERPRET=1 was set when this module was imported."""

MOST_KEYS = configs.MOST_KEYS
"""K up to which the kernels serve."""

CAUSAL_BOUND = -5.0
"""Log decay a token, natural log, down to which a block's 16 tokens are anchored at its start:
decays down to e^-80, and their inverses, are normal numbers of float32, with room for k."""

fold = affine.apply


class KernelTerms(NamedTuple):
    """The chunk terms of a call, or of some of its heads, with what the state pass needs beside."""

    chunks: intra.Terms
    v: Tensor
    """[B, T, HV, V]"""
    table: SegmentTable
    key_dim: int
    arithmetic: Arithmetic
    all_heads: int
    """HV of the whole call, which pins how it is cut"""

    def of_heads(self, heads: slice) -> KernelTerms:
        """The terms of some value heads, as views."""
        chunks = intra.Terms(*(x[:, heads] for x in self.chunks))
        return self._replace(chunks=chunks, v=self.v[:, :, heads])


def chunk_terms(inputs: Inputs, table: SegmentTable, settings: Settings) -> KernelTerms:
    """Compute the terms of every chunk. See `ForwardStages.chunk_terms`."""
    q, k, v, g = (x if x.stride(-1) == 1 else x.contiguous() for x in inputs[:4])
    gate = intra.PRE_GATED
    if settings.gate_in_kernel:
        gate = intra.SOFTPLUS if settings.lower_bound is None else intra.BOUNDED
    numbers = arithmetic(q.dtype, settings.precision, INTERPRETED)
    bound = settings.decay_bound
    chunks = intra.chunk_terms(
        q,
        k,
        g,
        inputs.beta,
        None if inputs.A_log is None else inputs.A_log.contiguous(),
        None if inputs.dt_bias is None else inputs.dt_bias.contiguous(),
        table.chunk_spans,
        scale=settings.scale,
        chunk_size=settings.chunk_size,
        normalize_qk=settings.normalize_qk,
        gate=gate,
        lower_bound=settings.lower_bound or 0.0,
        bounded=bound is not None and bound >= CAUSAL_BOUND,
        sigmoid_beta=settings.sigmoid_beta,
        beta_factor=settings.beta_factor,
        arithmetic=numbers,
    )
    return KernelTerms(chunks, v, table, k.shape[-1], numbers, v.shape[2])


def new_outputs(inputs: Inputs, table: SegmentTable) -> Tensor:
    """Make o, with zeros past the last sequence. See `ForwardStages.new_outputs`."""
    o = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    covered = int(table.lengths[: table.per_row].sum())
    o[:, covered:] = 0
    return o


def outputs_of_heads(outputs: Tensor, heads: slice) -> Tensor:
    """Slice o [B, T, HV, V]. See `ForwardStages.outputs_of_heads`."""
    return outputs[:, :, heads]


def finish_outputs(outputs: Tensor, inputs: Inputs, table: SegmentTable) -> Tensor:
    """Return o [B, T, HV, V], which it is. See `ForwardStages.finish_outputs`."""
    return outputs


def walk_state(
    walk: Walk,
    terms: KernelTerms,
    entry: Tensor | None,
    *,
    exits: Tensor | None = None,
    o: Tensor | None = None,
    h: Tensor | None = None,
) -> None:
    """Walk the segments, cut into pieces that run side by side. See `ForwardStages.walk_state`."""
    if not walk.size:
        return
    cut = _cut(walk, terms, from_zero=entry is None, exits=exits is not None)
    states = None
    if cut.num_maps:
        maps = _maps(terms, cut)
        states = maps.new_empty((cut.num_slots, *maps.shape[1:3], terms.v.shape[-1]))
        if entry is not None:
            instances, slots = cut.firsts
            states[slots] = entry[instances]
        fold_chains(maps, states, cut.chains)
    walk_segments(
        terms.v,
        terms.chunks,
        cut.runs,
        entry=entry,
        states=states,
        exits=exits,
        o=o,
        h=h,
        key_dim=terms.key_dim,
        arithmetic=terms.arithmetic,
    )
    instances, slots = cut.lasts
    if exits is not None and states is not None and instances.numel():
        exits[instances] = states[slots]


def walk_maps(walk: Walk, terms: KernelTerms) -> tuple[Tensor, Tensor]:
    """The maps of whole segments, from those of their pieces. See `ForwardStages.walk_maps`."""
    heads, value_dim = terms.v.shape[2:]
    key_dim = terms.key_dim
    total = terms.chunks.decay.new_zeros((walk.size, heads, key_dim, value_dim + key_dim))
    if not walk.size:
        return total[..., :value_dim], total[..., value_dim:]
    # As states with K more columns, from the identity: every piece is mapped, the last one too.
    cut = _cut(walk, terms, from_zero=False, exits=False, every=True)
    maps = _maps(terms, cut)
    total[..., value_dim:].diagonal(dim1=-2, dim2=-1).fill_(1.0)
    for rows, pieces in cut.steps:
        step = maps[pieces]
        total[rows] = step[..., value_dim:] @ total[rows]
        total[rows, ..., :value_dim] += step[..., :value_dim]
    return total[..., :value_dim].contiguous(), total[..., value_dim:].contiguous()


def _maps(terms: KernelTerms, cut: Cut) -> Tensor:
    heads, value_dim = terms.v.shape[2:]
    shape = (cut.num_maps, heads, terms.key_dim, value_dim + terms.key_dim)
    maps = terms.chunks.decay.new_empty(shape)
    launch_maps(
        terms.v,
        terms.chunks,
        cut.maps,
        maps,
        key_dim=terms.key_dim,
        arithmetic=terms.arithmetic,
    )
    return maps


def _cut(
    walk: Walk, terms: KernelTerms, *, from_zero: bool, exits: bool, every: bool = False
) -> Cut:
    key_dim, value_dim, table = terms.key_dim, terms.v.shape[-1], terms.table
    runs, maps = (
        configs.state_config(key_dim, value_dim, terms.arithmetic.term, maps=kind)
        for kind in (False, True)
    )
    chunks = configs.segment_chunks(terms.all_heads, key_dim, value_dim, table.chunk_size)
    columns = (runs.columns, maps.columns)
    key = (columns, key_dim, value_dim, chunks, from_zero, exits, every)
    if key not in walk.cuts:
        walk.cuts[key] = cut_walk(
            table,
            walk,
            chunks * table.chunk_size,
            value_tiles=-(-value_dim // runs.columns),
            map_tiles=(-(-value_dim // maps.columns), -(-key_dim // maps.columns)),
            from_zero=from_zero,
            exits=exits,
            every=every,
        )
    return walk.cuts[key]
