"""Rows of the embedding, dropped out and cast, and the gradient of the matrix without atomics.

The plain torch is ``model.embedding``. For the gradient, tokens are sorted by comparing each with every
other: a window has a few thousand of them, and one launch takes less time than those of a sort.

Shapes: T time steps, B columns, N = T B tokens, V vocabulary, D embedding.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["DroppedEmbedding"]

OWN, OTHERS = 16, 512
"""tokens that a program sorts, and those that it compares them with at once"""
TOKENS, COLUMNS = 32, 128
"""rows of one id that a program adds at once, and the columns of these"""


@triton.jit
def forward_kernel(tokens, weight, words, inputs, output, batch, width, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    token = tl.load(tokens + place)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    row = tl.load(weight + token * width + columns, mask=mask)
    if words is not None:
        row *= tl.load(words + token)
    if inputs is not None:
        row *= tl.load(inputs + (place % batch) * width + columns, mask=mask)
    tl.store(output + place.to(tl.int64) * width + columns, row, mask=mask)


@triton.jit
def sort_kernel(tokens, order, counts, count, OWN: tl.constexpr, OTHERS: tl.constexpr):
    """Writes the positions of all tokens in the order of their ids, and beside each how often its id occurs.

    A place in the order is the number of tokens with smaller ids, and of earlier tokens with the same id.
    """
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    token = tl.load(tokens + own, mask=own < count, other=-1)
    before = tl.zeros((OWN, OTHERS), tl.int32)
    alike = tl.zeros((OWN, OTHERS), tl.int32)
    for first in range(0, count, OTHERS):
        other = first + tl.arange(0, OTHERS)
        compared = tl.load(tokens + other, mask=other < count, other=-2)
        is_alike = compared[None, :] == token[:, None]
        is_less = (compared[None, :] < token[:, None]) & (other[None, :] < count)
        before += (is_less | (is_alike & (other[None, :] < own[:, None]))).to(tl.int32)
        alike += is_alike.to(tl.int32)
    place = tl.sum(before, axis=1)
    tl.store(order + place, own, mask=own < count)
    tl.store(counts + place, tl.sum(alike, axis=1), mask=own < count)


@triton.jit
def backward_kernel(
    tokens,
    order,
    counts,
    gradient,
    words,
    inputs,
    weight_gradient,
    batch,
    width,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The program of an id's first token adds up all tokens with that id, in their order; the others end."""
    place = tl.program_id(0)
    token = tl.load(tokens + tl.load(order + place))
    earlier = tl.load(tokens + tl.load(order + tl.maximum(place - 1, 0)))
    if (place == 0) | (earlier != token):
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        in_row = columns < width
        total = tl.zeros((TOKENS, COLUMNS), tl.float32)
        count = tl.load(counts + place)
        for first in range(0, count, TOKENS):
            index = first + tl.arange(0, TOKENS)
            own = tl.load(order + place + index, mask=index < count, other=0)
            mask = (index < count)[:, None] & in_row[None, :]
            rows = tl.load(gradient + own.to(tl.int64)[:, None] * width + columns[None, :], mask=mask, other=0.0)
            rows = rows.to(tl.float32)
            if inputs is not None:
                rows *= tl.load(inputs + (own % batch)[:, None] * width + columns[None, :], mask=mask, other=0.0)
            total += rows
        result = tl.sum(total, axis=0)
        if words is not None:
            result *= tl.load(words + token)
        tl.store(weight_gradient + token * width + columns, result, mask=in_row)


class DroppedEmbedding(torch.autograd.Function):
    """(T, B, D) in ``dtype``. The weight is contiguous; masks are float32."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens_TB: Tensor,
        weight_VD: Tensor,
        words_V: Tensor | None,
        input_1BD: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        tokens_TB = tokens_TB.contiguous()
        input_1BD = None if input_1BD is None else input_1BD.contiguous()
        width = weight_VD.shape[1]
        ctx.save_for_backward(tokens_TB, words_V, input_1BD)
        ctx.shape = weight_VD.shape
        output_TBD = torch.empty((*tokens_TB.shape, width), dtype=dtype, device=weight_VD.device)
        forward_kernel[(tokens_TB.numel(),)](
            tokens_TB,
            weight_VD,
            words_V,
            input_1BD,
            output_TBD,
            tokens_TB.shape[1],
            width,
            BLOCK=triton.next_power_of_2(width),
        )
        return output_TBD

    @staticmethod
    def backward(ctx: Any, gradient_TBD: Tensor) -> tuple[None, Tensor, None, None, None]:
        tokens_TB, words_V, input_1BD = ctx.saved_tensors
        count, width = tokens_TB.numel(), ctx.shape[1]
        weight_gradient = torch.zeros(ctx.shape, device=gradient_TBD.device)
        order_N, counts_N = torch.empty(2, count, dtype=torch.int32, device=gradient_TBD.device)
        sort_kernel[(triton.cdiv(count, OWN),)](tokens_TB, order_N, counts_N, count, OWN=OWN, OTHERS=OTHERS)
        backward_kernel[(count, triton.cdiv(width, COLUMNS))](
            tokens_TB,
            order_N,
            counts_N,
            gradient_TBD.contiguous(),
            words_V,
            input_1BD,
            weight_gradient,
            tokens_TB.shape[1],
            width,
            TOKENS=TOKENS,
            COLUMNS=COLUMNS,
        )
        return None, weight_gradient, None, None, None
