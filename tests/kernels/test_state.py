"""The walk over the state is its three lines in fp64, for every size, work item and launch.

The terms are drawn, so that this file shows the walk alone; `test_intra.py` shows the terms.
"""

import pytest
import torch

from kda_cp import platform
from kda_cp.compiled import INTERPRETED
from kda_cp.kernels.configs import StateConfig, padded, state_config
from kda_cp.kernels.intra import Terms
from kda_cp.kernels.primitives import arithmetic
from kda_cp.kernels.state import walk_maps, walk_segments
from kda_cp.testing.compare import errors

DEVICE = "cuda" if platform.device == "cuda" else "cpu"
NAN = float("nan")
SEGMENTS = [(0, 2, 37), (1, 0, 16), (1, 16, 9)]
"""(row of the batch, first token, tokens) of the segments of most tests; two rows of 40 tokens."""

# fp32: sums of up to 256 products. Others: operands are rounded by 2^-8 or 2^-11 and, in bf16,
# the outputs; the interpreter multiplies in fp32 and truncates outputs in bf16.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def draw(segments, HV, K, V, C, dtype=torch.float32, T=40, B=2, seed=0):
    """V and the terms of the segments' chunks; `kq`, `kg` are 0 in padding channels and rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    lengths = [min(C, n - c) for _, _, n in segments for c in range(0, n, C)]
    lead, KP = (len(lengths), HV), padded(K)
    rows = torch.arange(C) < torch.tensor(lengths)[:, None]  # [NC, C]
    kd, qg, kg = (normal(*lead, C, K) * K**-0.5 for _ in range(3))
    TA = [0.1 * normal(*lead, C, C).tril() + diagonal * torch.eye(C) for diagonal in (0.7, 0.4)]
    masks = rows[:, None, :, None], rows[:, None, None, :]
    kd, qg, kg = (
        torch.nn.functional.pad(torch.where(masks[0], x, 0.0), (0, KP - K)) for x in (kd, qg, kg)
    )
    TA = [torch.where(masks[0] & masks[1], x, 0.0) for x in TA]
    decay = 0.9 * torch.rand(*lead, K, generator=generator)
    decay = torch.nn.functional.pad(decay, (0, KP - K), value=1.0)
    term = arithmetic(dtype, None, INTERPRETED).term
    terms = Terms(torch.cat([kd, qg], 2).to(term), kg.to(term), torch.cat(TA, 2).to(term), decay)
    v = torch.full((B, T, HV, V), NAN)
    for b, t, n in segments:
        v[b, t : t + n] = normal(n, HV, V)
    return Terms(*(x.to(DEVICE) for x in terms)), v.to(dtype).to(DEVICE)


def walked(terms, v, segments, entries, K):
    """Exit states, outputs by segment and entry states of the chunks, as the formulas say."""
    kq, kg, TA, decay = (x.cpu().double() for x in terms)
    C = kg.shape[2]
    exits, o, h, chunk = [], [], [], 0
    for S, (b, t, n) in zip(entries, segments, strict=True):
        outputs = []
        S = S.double()
        for c in range(0, n, C):
            h.append(S)
            rows = v[b, t + c : t + min(c + C, n)].cpu().double().transpose(0, 1)
            rows = torch.nn.functional.pad(rows, (0, 0, 0, C - rows.shape[1]))
            kd, qg = kq[chunk, ..., :K].split(C, 1)
            T, AT = TA[chunk].split(C, 1)
            r = rows - kd @ S
            outputs.append(qg @ S + AT @ r)
            S = decay[chunk, :, :K, None] * S + kg[chunk, ..., :K].mT @ (T @ r)
            chunk += 1
        exits.append(S)
        o.append(torch.cat(outputs, 1)[:, :n].transpose(0, 1))  # [n, HV, V]
    return torch.stack(exits), o, torch.stack(h)


def work_items(segments, C, entries, exits, tiles):
    """The table `work` of `walk_segments`: every segment once for each of its column tiles."""
    rows, chunk = [], 0
    for (b, t, n), entry, exit_ in zip(segments, entries, exits, strict=True):
        rows += [[b, t, n, chunk, entry, exit_, tile] for tile in range(tiles)]
        chunk += -(-n // C)
    return torch.tensor(rows, dtype=torch.int64).view(-1, 7).to(DEVICE)


def numbers(dtype, precision=None):
    return arithmetic(dtype, precision, INTERPRETED)


def assert_close(name, got, want, bound):
    found = errors("h", got.cpu()[None], want[None])
    at = divmod(int(found.argmax()), found.shape[1])
    assert got.isfinite().all(), f"{name}: not finite"
    assert found.max() < bound, f"{name}: {found.max():.1e} > {bound:.1e} at (row, head) {at}"


def assert_walk(
    K=16, V=16, HV=2, C=16, dtype=torch.float32, precision=None, config=None, segments=SEGMENTS
):
    """Assert outputs, exit states and states of chunks, of entry states from all three places."""
    terms, v = draw(segments, HV, K, V, C, dtype)
    generator = torch.Generator().manual_seed(1)
    entry = torch.randn(4, HV, K, V, generator=generator)
    states = torch.randn(3, HV, K, V, generator=generator)
    used = config or state_config(K, V, numbers(dtype).term, maps=False)
    tiles = -(-V // used.columns)
    # Entries from row 2 of `entry`, row 1 of `states`, row 0; exits to rows 1, none, 0 of 3.
    work = work_items(segments, C, [2, -2, 0], [1, -1, 0], tiles)
    o = torch.full_like(v, NAN)
    exits = torch.full((3, HV, K, V), NAN, device=DEVICE)
    h = torch.full((terms.kg.shape[0], HV, K, V), NAN, device=DEVICE)
    walk_segments(
        v,
        terms,
        work,
        entry=entry.to(DEVICE),
        states=states.to(DEVICE),
        exits=exits,
        o=o,
        h=h,
        key_dim=K,
        arithmetic=numbers(dtype, precision),
        config=config,
    )
    begin = torch.stack([entry[2], states[1], entry[0]])
    want_exits, want_o, want_h = walked(terms, v, segments, begin, K)
    bound = BOUNDS[dtype] if precision is None or INTERPRETED else BOUNDS[torch.float16]
    assert_close("exits", exits[[1, 0]], want_exits[[0, 2]], bound)
    assert exits[2].isnan().all(), "wrote an exit state that was not wanted"
    assert_close("h", h, want_h, bound)
    for (b, t, n), want in zip(segments, want_o, strict=True):
        got = o[b, t : t + n]
        assert_close("o", got.transpose(0, 1)[:, :, None], want.transpose(0, 1)[:, :, None], bound)
        o[b, t : t + n] = NAN
    assert o.isnan().all(), "wrote an output of no segment"
    return terms, v


@pytest.mark.parametrize(
    ("K", "V"),
    [
        *((K, K) for K in (16, 24, 60, 64, 72, 100, 128)),
        *((16, 128), (128, 16), (60, 100), (100, 24), (256, 16), (16, 256), (5, 3)),
    ],
)
def test_every_size(K, V):
    """Channels past K, and columns past V in the last tile, are neither read nor written."""
    assert_walk(K, V)


@pytest.mark.parametrize("C", [32, 64])
def test_every_chunk_size(C):
    """Segments of more than a chunk, less than one, and one token past it."""
    segments = [(0, 0, C + 1), (1, 0, C), (1, C, C // 2 + 1)]
    terms, v = draw(segments, 1, 24, 20, C, T=2 * C)
    entry = torch.zeros(3, 1, 24, 20)
    o, exits = torch.full_like(v, NAN), torch.empty(3, 1, 24, 20, device=DEVICE)
    work = work_items(segments, C, [0, 1, 2], [0, 1, 2], 1)
    common = {"key_dim": 24, "arithmetic": numbers(torch.float32)}
    walk_segments(v, terms, work, entry=None, states=None, exits=exits, o=o, h=None, **common)
    want_exits, want_o, _ = walked(terms, v, segments, entry, 24)
    assert_close("exits", exits, want_exits, BOUNDS[torch.float32])
    for (b, t, n), want in zip(segments, want_o, strict=True):
        assert_close("o", o[b, t : t + n, None], want[:, None], BOUNDS[torch.float32])


@pytest.mark.parametrize("precision", [None, "tf32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_dtype(dtype, precision):
    """Outputs are in v's dtype; states are fp32 and keep their digits."""
    assert_walk(24, 20, dtype=dtype, precision=precision)


def test_a_state_beyond_fp16():
    """State entries, and a v_new, that fp16 cannot hold stay finite in fp32."""
    terms, v = draw([(0, 0, 20)], 1, 16, 16, 16, torch.float16)
    entry = torch.full((1, 1, 16, 16), 1e6, device=DEVICE)
    exits = torch.empty(1, 1, 16, 16, device=DEVICE)
    work = work_items([(0, 0, 20)], 16, [0], [0], 1)
    common = {"key_dim": 16, "arithmetic": numbers(torch.float16)}
    walk_segments(v, terms, work, entry=entry, states=None, exits=exits, o=None, h=None, **common)
    want, _, _ = walked(terms, v, [(0, 0, 20)], entry.cpu(), 16)
    assert_close("exits", exits, want, BOUNDS[torch.float16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "config", [StateConfig(16, 4, 1), StateConfig(32, 4, 2), StateConfig(128, 8, 2)], ids=str
)
def test_every_launch(config, dtype):
    """Whatever the tiles are, larger than the state as well."""
    assert_walk(24, 50, HV=1, dtype=dtype, config=config)


def test_one_token_and_one_chunk():
    """Segments of 1, 16 and 17 tokens."""
    assert_walk(segments=[(0, 0, 1), (0, 1, 16), (1, 3, 17)])


def test_results_that_are_not_wanted():
    """Outputs alone, exit states alone and states of chunks alone: the same bits as all at once."""
    segments, K, V, C = SEGMENTS, 24, 20, 16
    terms, v = draw(segments, 2, K, V, C)
    entry = torch.randn(3, 2, K, V, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    work = work_items(segments, C, [0, 1, 2], [0, 1, 2], 1)

    def walk(*wanted):
        results = {
            "exits": torch.full_like(entry, NAN),
            "o": torch.full_like(v, NAN),
            "h": torch.full((terms.kg.shape[0], 2, K, V), NAN, device=DEVICE),
        }
        given = {name: x if name in wanted else None for name, x in results.items()}
        common = {"key_dim": K, "arithmetic": numbers(torch.float32)}
        walk_segments(v, terms, work, entry=entry, states=None, **given, **common)
        return {name: results[name].nan_to_num(7.0) for name in wanted}

    everything = walk("exits", "o", "h")
    for wanted in (("o",), ("exits",), ("h",), ("o", "exits")):
        for name, x in walk(*wanted).items():
            if "o" in wanted or not INTERPRETED:
                assert torch.equal(x, everything[name]), (name, wanted)
            else:  # without outputs a product has half the rows, which numpy sums in another order
                torch.testing.assert_close(x, everything[name], rtol=1e-5, atol=1e-5)


def test_some_heads_of_the_terms():
    """A view of the terms of heads 1 and 2 of four walks them alone."""
    segments, K, V, C = SEGMENTS, 16, 16, 16
    terms, v = draw(segments, 4, K, V, C)
    work = work_items(segments, C, [-1, -2, -3], [0, 1, 2], 1)
    states = torch.randn(3, 4, K, V, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    common = {"entry": None, "h": None, "key_dim": K, "arithmetic": numbers(torch.float32)}
    o, exits = torch.full_like(v, NAN), torch.full_like(states, NAN)
    walk_segments(v, terms, work, states=states, exits=exits, o=o, **common)

    heads = slice(1, 3)
    some = Terms(*(x[:, heads] for x in terms))
    o_some, exits_some = torch.full_like(v, NAN), torch.full_like(states, NAN)
    walk_segments(
        v[:, :, heads],
        some,
        work,
        states=states[:, heads].contiguous(),
        exits=exits_some[:, heads],
        o=o_some[:, :, heads],
        **common,
    )
    for x, whole in (
        (o_some[:, :, heads], o[:, :, heads]),
        (exits_some[:, heads], exits[:, heads]),
    ):
        assert torch.equal(x.nan_to_num(7.0), whole.nan_to_num(7.0))
    assert o_some[:, :, [0, 3]].isnan().all()
    assert exits_some[:, [0, 3]].isnan().all()


def test_strided_values_and_outputs():
    """V as a slice of a fused projection, o with the heads first: bitwise as contiguous."""
    segments, K, V, C = SEGMENTS, 16, 20, 16
    terms, v = draw(segments, 2, K, V, C)
    work = work_items(segments, C, [-1, -1, -1], [-1, -1, -1], 1)
    common = {"entry": None, "states": None, "exits": None, "h": None}
    common |= {"key_dim": K, "arithmetic": numbers(torch.float32)}
    want = torch.full_like(v, NAN)
    walk_segments(v, terms, work, o=want, **common)
    fused = torch.full((*v.shape[:3], 3 * V), NAN, device=DEVICE)
    fused[..., V : 2 * V] = v
    o = torch.full_like(v.transpose(1, 2).contiguous(), NAN).transpose(1, 2)
    walk_segments(fused[..., V : 2 * V], terms, work, o=o, **common)
    assert torch.equal(o.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("filling", [NAN, 1e4])
def test_memory_around_the_buffers_is_never_read(filling):
    """The same bits, whatever lies around v, the terms and the states; and outputs stay inside."""
    segments, K, V, C = SEGMENTS, 24, 20, 16
    terms, v = draw(segments, 2, K, V, C)
    states = torch.randn(3, 2, K, V, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    work = work_items(segments, C, [0, -3, -1], [2, 1, 0], 1)

    def surround(x):
        buffer = torch.full((x.numel() + 8192,), filling, dtype=x.dtype, device=DEVICE)
        buffer[4096 : 4096 + x.numel()] = x.flatten()
        return buffer, buffer[4096 : 4096 + x.numel()].view(x.shape)

    def walk(v, terms, states, exits, o):
        common = {"h": None, "key_dim": K, "arithmetic": numbers(torch.float32)}
        walk_segments(v, terms, work, entry=states, states=states, exits=exits, o=o, **common)
        return exits.nan_to_num(7.0), o.nan_to_num(7.0)

    new = torch.full_like(states, NAN), torch.full_like(v, NAN)
    want = walk(v, terms, states, *(x.clone() for x in new))
    (exits_buffer, exits), (o_buffer, o) = (surround(x) for x in new)
    inside = (surround(x)[1] for x in (v, states))
    v, states = inside
    got = walk(v, Terms(*(surround(x)[1] for x in terms)), states, exits, o)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)
    for buffer in (exits_buffer, o_buffer):
        for around in (buffer[:4096], buffer[-4096:]):
            assert torch.equal(
                around.nan_to_num(7.0), torch.full_like(around, filling).nan_to_num(7.0)
            )


def assert_maps(K, V, HV=2, C=16, dtype=torch.float32, precision=None, config=None):
    """Assert that maps applied to a state give the walk's exit state, b and A one by one."""
    segments = SEGMENTS
    terms, v = draw(segments, HV, K, V, C, dtype)
    used = config or state_config(K, V, numbers(dtype).term, maps=True)
    tiles = -(-V // used.columns) + -(-K // used.columns)
    work = work_items(segments, C, [0, 0, 0], [3, 0, 1], tiles)
    maps = torch.full((5, HV, K, V + K), NAN, device=DEVICE)
    walk_maps(v, terms, work, maps, key_dim=K, arithmetic=numbers(dtype, precision), config=config)
    zero = torch.zeros(3, HV, K, V)
    b, _, _ = walked(terms, v, segments, zero, K)
    identity = torch.eye(K).expand(3, HV, K, K)
    A, _, _ = walked(terms, torch.zeros(*v.shape[:3], K), segments, identity, K)
    bound = BOUNDS[dtype] if precision is None or INTERPRETED else BOUNDS[torch.float16]
    assert_close("b", maps[[3, 0, 1], ..., :V], b, bound)
    assert_close("A", maps[[3, 0, 1], ..., V:], A, bound)
    assert maps[[2, 4]].isnan().all(), "wrote a map of no segment"


@pytest.mark.parametrize(
    ("K", "V"),
    [(16, 16), (24, 24), (60, 100), (72, 40), (128, 64), (16, 128), (128, 16), (5, 3)],
)
def test_maps_of_every_size(K, V):
    """Tiles of b, then tiles of A, whose columns are not in one tile."""
    assert_maps(K, V)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_maps_of_every_dtype(dtype):
    """The maps are fp32."""
    assert_maps(24, 20, dtype=dtype)


@pytest.mark.parametrize("config", [StateConfig(16, 4, 1), StateConfig(64, 4, 2)], ids=str)
def test_maps_of_every_launch(config):
    """Whatever the tiles are."""
    assert_maps(24, 50, HV=1, config=config)


def test_maps_without_a_transition():
    """Where only b's tiles are asked for, A is not written: the segment starts from zero."""
    terms, v = draw(SEGMENTS, 2, 24, 20, 16)
    work = work_items(SEGMENTS, 16, [0, 0, 0], [0, 1, 2], 1)
    maps = torch.full((3, 2, 24, 44), NAN, device=DEVICE)
    walk_maps(v, terms, work, maps, key_dim=24, arithmetic=numbers(torch.float32))
    b, _, _ = walked(terms, v, SEGMENTS, torch.zeros(3, 2, 24, 20), 24)
    assert_close("b", maps[..., :20], b, BOUNDS[torch.float32])
    assert maps[..., 20:].isnan().all()
