"""Every head size and head count is right."""

import pytest
import torch

from kda_cp import chunk_kda
from kda_cp.testing.compare import (
    assert_bitwise,
    assert_equals_reference,
    draw_inputs,
    draw_upstream,
    errors,
    run,
)

SIZES = [
    *((K, K) for K in (16, 24, 60, 64, 72, 96, 100, 128, 160, 192, 256)),
    *((16, 128), (128, 16), (64, 128), (128, 64), (60, 100), (192, 72), (24, 256), (256, 24)),
    *((32, 512), (1, 1), (1, 7), (7, 1), (5, 3)),
]


@pytest.mark.parametrize(("K", "V"), SIZES)
def test_every_head_size(K, V):
    """Sizes with and without a power of two, equal or not, from 1 to 512."""
    inputs = draw_inputs(T=70, HV=2, K=K, V=V, initial_states=1)
    assert_equals_reference(chunk_kda, inputs, draw_upstream(inputs), impl="torch")


@pytest.mark.parametrize(("H", "HV"), [(1, 2), (2, 8), (3, 6), (1, 5)])
def test_grouped_heads_equal_repeated_keys(H, HV):
    """All is bitwise as with repeated q and k, but for dq and dk, the sums over the group."""
    inputs = draw_inputs(T=90, H=H, HV=HV, K=24, V=16, initial_states=1)
    upstream = draw_upstream(inputs)
    got, _ = assert_equals_reference(chunk_kda, inputs, upstream, impl="torch")

    group = HV // H
    repeated = {n: x.repeat_interleave(group, 2) if n in "qk" else x for n, x in inputs.items()}
    want = run(chunk_kda, repeated, upstream, impl="torch")
    for name in ("dq", "dk"):
        summed = want.pop(name).view(1, 90, H, group, 24).sum(3)
        assert errors(name, got.pop(name), summed).max() < 1e-6
    assert_bitwise(got, want)


@pytest.mark.parametrize(("H", "HV"), [(2, 3), (4, 2), (3, 1)])
def test_value_heads_have_to_be_a_multiple(H, HV):
    """HV % H != 0 is refused."""
    inputs = draw_inputs(T=4, H=1, HV=HV, K=16)
    for name in "qk":
        inputs[name] = inputs[name].expand(1, 4, H, 16)
    with pytest.raises(ValueError, match=rf"v: expected .* multiple of the {H} heads.* got {HV}"):
        chunk_kda(**inputs, impl="torch")


def test_a_head_sees_no_other_head():
    """A change of one value head leaves all others bitwise as they were, forward and backward."""
    inputs = draw_inputs(T=70, H=3, HV=6, K=16, initial_states=1)
    upstream = draw_upstream(inputs)
    before = run(chunk_kda, inputs, upstream, impl="torch")
    changed = {name: x.clone() for name, x in inputs.items()}
    for name in ("v", "g", "beta"):
        changed[name][:, :, 4] *= 0.5
    changed["initial_state"][:, 4] += 1
    after = run(chunk_kda, changed, upstream, impl="torch")
    others = torch.tensor([0, 1, 2, 3, 5])
    for name, x in after.items():
        assert not torch.equal(x, before[name]), name
        dim = 1 if "state" in name else 2
        kept = torch.tensor([0, 1]) if name in ("dq", "dk") else others
        assert torch.equal(x.index_select(dim, kept), before[name].index_select(dim, kept)), name
