"""What several kernels share: the tensor-core product, and the arithmetic of a dtype.

Legend of all kernel files. B rows, T tokens a row, H heads of q and k, HV heads of v, g and beta,
K key and V value channels; C tokens a chunk, NC chunks; KP is K padded to a power of two. `i_` is
an index, `o_` offsets, `m_` a mask, `b_` a tile. Log decays are in base 2 inside the kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


class Arithmetic(NamedTuple):
    """How products are computed for inputs of one dtype; see `arithmetic`."""

    term: torch.dtype
    """dtype in which the terms of the chunks are stored"""
    dot: tl.dtype
    """dtype of the operands of products"""
    precision: str
    """Triton's name for how fp32 operands are multiplied"""
    merge: str
    """the same, for merging the inverses of blocks"""


def arithmetic(dtype: torch.dtype, precision: str | None, interpreted: bool) -> Arithmetic:
    """Choose the arithmetic for inputs of `dtype`; states and sums are float32 in all of them.

    bf16 inputs are multiplied in bf16. fp16 inputs are multiplied as float32 ones: their exponents
    do not reach as far as a decay. float32 is multiplied in three tf32 products, as exact as
    float32 sums are, unless `precision` is "tf32". The interpreter multiplies bf16 wrongly, so
    there all operands are float32.
    """
    if dtype == torch.bfloat16:
        operands = tl.float32 if interpreted else tl.bfloat16
        return Arithmetic(torch.bfloat16, operands, "tf32", "tf32")
    name = "tf32" if precision == "tf32" else "tf32x3"
    return Arithmetic(torch.float32, tl.float32, name, name)


def check_grid(programs: int) -> None:
    """Raise ValueError where a launch has more programs than the first axis of a grid holds."""
    if programs >= 2**31:
        raise ValueError(
            f"q, v: expected fewer than 2^31 chunks times value heads in one call, got {programs}"
        )


@triton.jit
def dot(a, b, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """`a @ b` with operands of dtype DOT, summed in float32."""
    return tl.dot(a.to(DOT), b.to(DOT), input_precision=PRECISION)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def softplus(x):
    """`log(1 + exp(x))`, with all digits also where it is small.

    log(1 + e) = 2 atanh(z) with z = e / (2 + e), at most 1/3: the series ends below fp32's digits.
    """
    e = tl.exp2(-tl.abs(x) * LOG2E)
    r = tl.rsqrt(2.0 + e)
    z = e * r * r
    s = z * z
    series = 1 / 9 + s * (1 / 11 + s * (1 / 13 + s * (1 / 15)))
    series = 1.0 + s * (1 / 3 + s * (1 / 5 + s * (1 / 7 + s * series)))
    return tl.maximum(x, 0.0) + 2.0 * z * series
