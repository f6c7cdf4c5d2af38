"""Rows of the embedding, dropped out and cast, and the gradient of the matrix without atomics.

The truth is ``plain_embedding`` in ``embedding``.

Shapes: T time steps, B columns, N = T B tokens, V words, D embedding.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["dropped_embedding"]

SEARCHED = 1024
"""tokens before its own that a program of the backward pass looks through at once"""
TOKENS = 128
"""tokens whose rows it adds at once"""
COLUMNS = 64


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
def backward_kernel(
    tokens,
    gradient,
    words,
    inputs,
    weight_gradient,
    count,
    batch,
    width,
    SEARCHED: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The program of a word's first token adds up all tokens of that word, in their order; the others end."""
    place = tl.program_id(0)
    token = tl.load(tokens + place)
    earlier = tl.zeros((SEARCHED,), tl.int32)
    for first in range(0, place, SEARCHED):
        places = first + tl.arange(0, SEARCHED)
        earlier += (tl.load(tokens + places, mask=places < place, other=-1) == token).to(tl.int32)
    if tl.sum(earlier) == 0:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        in_row = columns < width
        total = tl.zeros((COLUMNS,), tl.float32)
        for first in range(place // TOKENS * TOKENS, count, TOKENS):
            places = first + tl.arange(0, TOKENS)
            same = tl.load(tokens + places, mask=places < count, other=-1) == token
            mask = same[:, None] & in_row[None, :]
            rows = tl.load(gradient + places.to(tl.int64)[:, None] * width + columns[None, :], mask=mask, other=0.0).to(
                tl.float32
            )
            if inputs is not None:
                rows *= tl.load(inputs + (places % batch)[:, None] * width + columns[None, :], mask=mask, other=0.0)
            total += tl.sum(rows, axis=0)
        if words is not None:
            total *= tl.load(words + token)
        tl.store(weight_gradient + token * width + columns, total, mask=in_row)


class _DroppedEmbedding(torch.autograd.Function):
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
        backward_kernel[(count, triton.cdiv(width, COLUMNS))](
            tokens_TB,
            gradient_TBD.contiguous(),
            words_V,
            input_1BD,
            weight_gradient,
            count,
            tokens_TB.shape[1],
            width,
            SEARCHED=SEARCHED,
            TOKENS=TOKENS,
            COLUMNS=COLUMNS,
        )
        return None, weight_gradient, None, None, None


def dropped_embedding(
    tokens_TB: Tensor, weight_VD: Tensor, words_V: Tensor | None, input_1BD: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(T, B, D) in ``dtype``. The weight is contiguous; masks are float32."""
    result: Tensor = _DroppedEmbedding.apply(tokens_TB, weight_VD, words_V, input_1BD, dtype)
    return result
