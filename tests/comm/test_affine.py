"""The algebra of maps: composition and adjoint mean what they say. Single process, milliseconds."""

import torch

from kda_cp.comm import affine
from kda_cp.comm.affine import Map


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def draw_map(K: int = 5, V: int = 7) -> Map:
    return Map(draw(2, 3, K, K), draw(2, 3, K, V))


def test_compose_is_one_map_after_the_other():
    torch.manual_seed(0)
    earlier, later, S = draw_map(), draw_map(), draw(2, 3, 5, 7)
    both = affine.compose(later, earlier)
    one_by_one = affine.apply(later.A, later.b, affine.apply(earlier.A, earlier.b, S))
    torch.testing.assert_close(affine.apply(both.A, both.b, S), one_by_one)


def test_compose_is_associative_and_not_commutative():
    torch.manual_seed(1)
    a, b, c = draw_map(), draw_map(), draw_map()
    left = affine.compose(affine.compose(c, b), a)
    right = affine.compose(c, affine.compose(b, a))
    torch.testing.assert_close(left.A, right.A)
    torch.testing.assert_close(left.b, right.b)
    assert not torch.allclose(affine.compose(a, b).A, affine.compose(b, a).A)


def test_adjoint_is_the_gradient_of_the_map():
    torch.manual_seed(2)
    A, b = draw_map()
    S = draw(2, 3, 5, 7).requires_grad_()
    dS_out, c = draw(2, 3, 5, 7), draw(2, 3, 5, 7)
    # A loss that sees the exit state through dS_out and the entry state directly through c.
    (affine.apply(A, b, S) * dS_out).sum().add((S * c).sum()).backward()
    torch.testing.assert_close(affine.apply_adjoint(A, c, dS_out), S.grad)
