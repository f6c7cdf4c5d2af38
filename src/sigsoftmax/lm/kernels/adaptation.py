"""The step of dynamic evaluation in two launches: matrices whose gradients are thin factors, and everything else.

The truth is ``plain_adapt_`` in ``adaptation``. The programs of one tile of all models follow each other, so that what
the models share comes from memory once and from the cache for the others.

Shapes: P models, T tokens, O rows and I columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from sigsoftmax.lm.kernels.tensor_lists import block_count, chosen, find_block

if TYPE_CHECKING:
    from sigsoftmax.lm.dynamic.adaptation import Adapted, Factors

__all__ = ["adapt_dense_", "adapt_thin_"]

ROWS, COLUMNS = 32, 64
"""of a tile of a matrix"""
TOKENS = 16
"""the least that a product of tiles takes"""
BLOCK = 512


@triton.jit
def _stepped(weight, start, rms, gradient, rates):
    learning_rate, decay = tl.load(rates), tl.load(rates + 1)
    most, epsilon = tl.load(rates + 2), tl.load(rates + 3)
    pull = tl.minimum(rms * decay, most)
    # Two forms, as in torch's lerp: with a pull of 1 the weight is back at its start exactly.
    weight = tl.where(pull < 0.5, weight + pull * (start - weight), start - (start - weight) * (1.0 - pull))
    return weight - learning_rate / (rms + epsilon) * gradient


@triton.jit
def thin_kernel(
    weights,
    starts,
    rms,
    lefts,
    rights,
    rows,
    columns,
    row_strides,
    tokens,
    right_model_strides,
    right_token_strides,
    tiles,
    rates,
    models,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rows may be longer than they count: what follows is zeros, and stays so."""
    model = (tl.program_id(0) % models).to(tl.int64)
    index, tile = find_block(tl.program_id(0) // models, tiles, 1)
    height, width, row_stride = chosen(rows, index), chosen(columns, index), chosen(row_strides, index)
    across = tl.cdiv(width, COLUMNS)
    row = tile // across * ROWS + tl.arange(0, ROWS)
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row[:, None] < height) & (column[None, :] < row_stride)
    places = row[:, None] * row_stride + column[None, :]
    own = chosen(weights, index) + model * height * row_stride + places
    weight = tl.load(own, mask=mask, other=0.0)
    start = tl.load(chosen(starts, index) + places, mask=mask, other=0.0)
    own_rms = tl.load(chosen(rms, index) + places, mask=mask, other=0.0)
    count, token = chosen(tokens, index), tl.arange(0, TOKENS)
    left = chosen(lefts, index) + (model * count + token[:, None]) * height + row[None, :]
    right = chosen(rights, index) + model * chosen(right_model_strides, index) + column[None, :]
    right += token[:, None] * chosen(right_token_strides, index)
    of_rows = tl.load(left, mask=(token[:, None] < count) & (row[None, :] < height), other=0.0)
    of_columns = tl.load(right, mask=(token[:, None] < count) & (column[None, :] < width), other=0.0)
    gradient = tl.dot(tl.trans(of_rows), of_columns, input_precision="tf32x3")
    tl.store(own, _stepped(weight, start, own_rms, gradient, rates + 4 * model), mask=mask)


@triton.jit
def dense_kernel(weights, starts, rms, gradients, sizes, tokens, rates, models, BLOCK: tl.constexpr):
    """The gradient is a sum over some tokens, or one."""
    model = (tl.program_id(0) % models).to(tl.int64)
    index, block = find_block(tl.program_id(0) // models, sizes, BLOCK)
    size, places = chosen(sizes, index), block * BLOCK + tl.arange(0, BLOCK)
    mask, count = places < size, chosen(tokens, index)
    own = chosen(weights, index) + model * size + places
    weight = tl.load(own, mask=mask, other=0.0)
    start = tl.load(chosen(starts, index) + places, mask=mask, other=0.0)
    own_rms = tl.load(chosen(rms, index) + places, mask=mask, other=0.0)
    of_tokens = chosen(gradients, index) + model * count * size + places
    gradient = tl.zeros((BLOCK,), tl.float32)
    for token in range(count):
        gradient += tl.load(of_tokens + token * size, mask=mask, other=0.0)
    tl.store(own, _stepped(weight, start, own_rms, gradient, rates + 4 * model), mask=mask)


def adapt_thin_(parameters: Sequence[tuple[Adapted, Factors]], rates_P4: Tensor) -> None:
    """Matrices, all in one launch."""
    if not parameters:
        return
    models = rates_P4.shape[0]
    adapted = [parameter for parameter, _ in parameters]
    shapes = [(rows, columns) for rows, columns in (one.start.shape for one in adapted)]
    for weights, start, rms in adapted:
        assert start.stride() == rms.stride() == weights.stride()[1:]
        assert start.stride(1) == 1
    tiles = tuple(triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS) for rows, columns in shapes)
    lefts = tuple(factors.left_PTO.contiguous() for _, factors in parameters)
    rights = tuple(factors.right_PTI for _, factors in parameters)
    assert all(right.stride(2) == 1 for right in rights)
    thin_kernel[(sum(tiles) * models,)](
        tuple(one.weights for one in adapted),
        tuple(one.start for one in adapted),
        tuple(one.rms for one in adapted),
        lefts,
        rights,
        tuple(rows for rows, _ in shapes),
        tuple(columns for _, columns in shapes),
        tuple(one.start.stride(0) for one in adapted),
        tuple(left.shape[1] for left in lefts),
        tuple(right.stride(0) for right in rights),
        tuple(right.stride(1) for right in rights),
        tiles,
        rates_P4,
        models,
        TOKENS=max(TOKENS, *(triton.next_power_of_2(left.shape[1]) for left in lefts)),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )


def adapt_dense_(parameters: Sequence[tuple[Adapted, Tensor]], rates_P4: Tensor) -> None:
    """Parameters of any shape with gradients (P, T, ...) that are summed over T, all in one launch."""
    if not parameters:
        return
    models = rates_P4.shape[0]
    adapted = [parameter for parameter, _ in parameters]
    assert all(tensor.is_contiguous() for one in adapted for tensor in one)
    sizes = tuple(one.start.numel() for one in adapted)
    dense_kernel[(block_count(sizes, BLOCK) * models,)](
        tuple(one.weights for one in adapted),
        tuple(one.start for one in adapted),
        tuple(one.rms for one in adapted),
        tuple(gradient.contiguous() for _, gradient in parameters),
        sizes,
        tuple(gradient.shape[1] for _, gradient in parameters),
        rates_P4,
        models,
        BLOCK=BLOCK,
        num_warps=4,
    )
