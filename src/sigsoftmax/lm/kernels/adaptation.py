"""The step of dynamic evaluation in two launches: matrices whose gradients are thin factors, and everything else.

The plain torch is ``adapt_`` in ``dynamic.adaptation``. The programs of one tile of all models follow each other, so
that what the models share comes from memory once and from the cache for the others.

Shapes: P models, T tokens, O rows and I columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from sigsoftmax.lm.dynamic.adaptation import Adapted, Factors, Gradient, TokenSum
from sigsoftmax.lm.kernels.tensor_lists import block_count, chosen, find_block

__all__ = ["adapt_"]

ROWS, COLUMNS = 32, 64
"""shape of a tile of a matrix"""
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
    """Rows may have padding, which is zeros and stays so."""
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
    """The gradient is a sum over one or more tokens."""
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


def adapt_(parameters: Sequence[Adapted], gradients: Sequence[Gradient], rates_P4: Tensor) -> None:
    """Matrices with thin gradients in one launch, and all other parameters in another."""
    thin, dense = [], []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if isinstance(gradient, Factors):
            thin.append((*parameter, gradient.left_PTO.contiguous(), gradient.right_PTI))
        else:
            of_tokens = gradient.of_tokens_PTO if isinstance(gradient, TokenSum) else gradient.unsqueeze(1)
            dense.append((*parameter, of_tokens.contiguous()))
    models = len(rates_P4)
    if thin:
        for weights, start, rms, _, right in thin:
            assert start.stride() == rms.stride() == weights.stride()[1:]
            assert start.stride(1) == right.stride(2) == 1
        starts, lefts, rights = (tuple(one[index] for one in thin) for index in (1, 3, 4))
        tiles = tuple(triton.cdiv(len(start), ROWS) * triton.cdiv(start.shape[1], COLUMNS) for start in starts)
        thin_kernel[(sum(tiles) * models,)](
            *zip(*thin, strict=True),
            tuple(start.shape[0] for start in starts),
            tuple(start.shape[1] for start in starts),
            tuple(start.stride(0) for start in starts),
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
    if dense:
        assert all(tensor.is_contiguous() for one in dense for tensor in one)
        sizes = tuple(start.numel() for _, start, _, _ in dense)
        dense_kernel[(block_count(sizes, BLOCK) * models,)](
            *zip(*dense, strict=True),
            sizes,
            tuple(gradient.shape[1] for *_, gradient in dense),
            rates_P4,
            models,
            BLOCK=BLOCK,
            num_warps=4,
        )
