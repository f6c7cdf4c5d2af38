"""The layers of ``dynamic.few_tokens`` by kernels: every matrix is read once per product, in float32.

What counts is that enough of a matrix is on its way from memory at any time: tiles are loaded ahead, 16 bytes at once
where rows begin at multiples of 16 elements. Products are made of TF32 products of three parts, which is as exact as
float32. How a sum is divided does not depend on how many models there are: same model, same bits.

Rows of a matrix may have padding, which must be zeros.

Shapes: P models, T tokens, I and O features, S parts of a sum, H hidden features, G = 4 H gates in the order i, f, g,
o.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["linear", "linear_input_gradient", "lstm", "lstm_gate_gradients"]

TOKENS = 16
"""the least that a product of tiles takes"""
STAGES = 4
"""tiles that are loaded ahead"""
ROWS, COLUMNS = 32, 64
"""shape of a tile of a matrix"""
ROWS_PER_PROGRAM = 256
"""rows whose share in the gradient of the input a program adds up"""
UNITS = 4
"""hidden units of a program, whose four gates it computes"""
STEP_COLUMNS = 256
STEP_STAGES = tl.constexpr(3)


@triton.jit
def _tile(matrices, first, row, rows, column, width):
    """Elements of the matrix whose row 0 is the row ``first`` of ``matrices``; zeros beyond its edges."""
    places = matrices + (first + row[:, None]) * width + column[None, :]
    return tl.load(places, mask=(row[:, None] < rows) & (column[None, :] < width), other=0.0)


@triton.jit
def linear_kernel(
    inputs,
    weight,
    first_bias,
    second_bias,
    output,
    tokens,
    rows,
    columns,
    row_stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    model = tl.program_id(1).to(tl.int64)
    token, row = tl.arange(0, TOKENS), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    result = tl.zeros((TOKENS, ROWS), tl.float32)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        tile = _tile(weight, model * rows, row, rows, column, row_stride)
        values = _tile(inputs, model * tokens, token, tokens, column, columns)
        result = tl.dot(values, tl.trans(tile), result, input_precision="tf32x3")
    if first_bias is not None:
        result += tl.load(first_bias + model * rows + row, mask=row < rows, other=0.0)[None, :]
    if second_bias is not None:
        result += tl.load(second_bias + model * rows + row, mask=row < rows, other=0.0)[None, :]
    tl.store(
        output + (model * tokens + token[:, None]) * rows + row[None, :],
        result,
        mask=(token[:, None] < tokens) & (row[None, :] < rows),
    )


@triton.jit
def input_gradient_kernel(
    gradient,
    weight,
    partials,
    tokens,
    rows,
    columns,
    row_stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
):
    part, model = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token, column = tl.arange(0, TOKENS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    result = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for first in range(0, ROWS_PER_PROGRAM, ROWS):
        row = part * ROWS_PER_PROGRAM + first + tl.arange(0, ROWS)
        tile = _tile(weight, model * rows, row, rows, column, row_stride)
        values = _tile(gradient, model * tokens, token, tokens, row, rows)
        result = tl.dot(values, tile, result, input_precision="tf32x3")
    place = (model * tl.num_programs(1) + part) * tokens + token[:, None]
    tl.store(
        partials + place * columns + column[None, :],
        result,
        mask=(token[:, None] < tokens) & (column[None, :] < columns),
    )


@triton.jit
def _tanh(x):
    small = tl.exp(-2.0 * tl.abs(x))
    bounded = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0.0, -bounded, bounded)


@triton.jit
def _step_of(states, step, model, models, width):
    """Addresses of a model's state before a step and of its state after it."""
    before = states + (step * models + model) * width
    return before, before + models * width


@triton.jit(do_not_specialize=["step"])
def lstm_step_kernel(
    inputs, weight, hidden, cell, gates, step, tokens, width, row_stride, UNITS: tl.constexpr, COLUMNS: tl.constexpr
):
    model, models = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    mask = unit < width
    weight += model * 4 * width * row_stride
    inputs += (model * tokens + step) * 4 * width
    gates += (model * tokens + step) * 4 * width
    hidden_before, hidden_after = _step_of(hidden, step, model, models, width)
    cell_before, cell_after = _step_of(cell, step, model, models, width)
    of_i = tl.zeros((UNITS, COLUMNS), tl.float32)
    of_f = tl.zeros((UNITS, COLUMNS), tl.float32)
    of_g = tl.zeros((UNITS, COLUMNS), tl.float32)
    of_o = tl.zeros((UNITS, COLUMNS), tl.float32)
    square = width * row_stride
    for first in tl.range(0, width, COLUMNS, num_stages=STEP_STAGES):
        column = first + tl.arange(0, COLUMNS)
        before = tl.load(hidden_before + column, mask=column < width, other=0.0)[None, :]
        places = weight + unit[:, None] * row_stride + column[None, :]
        inside = mask[:, None] & (column[None, :] < row_stride)
        of_i += before * tl.load(places, mask=inside, other=0.0)
        of_f += before * tl.load(places + square, mask=inside, other=0.0)
        of_g += before * tl.load(places + 2 * square, mask=inside, other=0.0)
        of_o += before * tl.load(places + 3 * square, mask=inside, other=0.0)
    i = tl.sigmoid(tl.load(inputs + unit, mask=mask, other=0.0) + tl.sum(of_i, axis=1))
    f = tl.sigmoid(tl.load(inputs + width + unit, mask=mask, other=0.0) + tl.sum(of_f, axis=1))
    g = _tanh(tl.load(inputs + 2 * width + unit, mask=mask, other=0.0) + tl.sum(of_g, axis=1))
    o = tl.sigmoid(tl.load(inputs + 3 * width + unit, mask=mask, other=0.0) + tl.sum(of_o, axis=1))
    new_cell = f * tl.load(cell_before + unit, mask=mask, other=0.0) + i * g
    tl.store(cell_after + unit, new_cell, mask=mask)
    tl.store(hidden_after + unit, o * _tanh(new_cell), mask=mask)
    tl.store(gates + unit, i, mask=mask)
    tl.store(gates + width + unit, f, mask=mask)
    tl.store(gates + 2 * width + unit, g, mask=mask)
    tl.store(gates + 3 * width + unit, o, mask=mask)


@triton.jit
def _sum_of_parts(values, parts, part_stride, unit, mask, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    loaded = tl.load(
        values + part[:, None] * part_stride + unit[None, :], mask=(part[:, None] < parts) & mask[None, :], other=0.0
    )
    return tl.sum(loaded, axis=0)


@triton.jit(do_not_specialize=["step"])
def lstm_step_back_kernel(
    gradient,
    weight,
    cell,
    gates,
    gate_gradients,
    cell_gradient,
    later,
    earlier,
    step,
    tokens,
    width,
    row_stride,
    given_parts,
    UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GIVEN_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``later`` holds each program's share in the gradient of this step's output.

    ``earlier`` gets the shares in that of the step before.
    """
    part, parts, model = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    unit = part * UNITS + tl.arange(0, UNITS)
    mask = unit < width
    weight += model * 4 * width * row_stride
    gates += (model * tokens + step) * 4 * width
    gate_gradients += (model * tokens + step) * 4 * width
    cell_before, cell_after = _step_of(cell, step, model, tl.num_programs(1), width)
    cell_gradient += model * width
    given = gradient + (model * given_parts * tokens + step) * width
    hidden_gradient = _sum_of_parts(given, given_parts, tokens * width, unit, mask, GIVEN_PARTS)
    of_cell = tl.zeros((UNITS,), tl.float32)
    if step + 1 < tokens:
        hidden_gradient += _sum_of_parts(later + model * parts * width, parts, width, unit, mask, PARTS)
        of_cell = tl.load(cell_gradient + unit, mask=mask, other=0.0)
    i = tl.load(gates + unit, mask=mask, other=0.0)
    f = tl.load(gates + width + unit, mask=mask, other=0.0)
    g = tl.load(gates + 2 * width + unit, mask=mask, other=0.0)
    o = tl.load(gates + 3 * width + unit, mask=mask, other=0.0)
    bounded = _tanh(tl.load(cell_after + unit, mask=mask, other=0.0))
    of_cell += hidden_gradient * o * (1.0 - bounded * bounded)
    of_i = of_cell * g * i * (1.0 - i)
    of_f = of_cell * tl.load(cell_before + unit, mask=mask, other=0.0) * f * (1.0 - f)
    of_g = of_cell * i * (1.0 - g * g)
    of_o = hidden_gradient * bounded * o * (1.0 - o)
    tl.store(cell_gradient + unit, of_cell * f, mask=mask)
    tl.store(gate_gradients + unit, of_i, mask=mask)
    tl.store(gate_gradients + width + unit, of_f, mask=mask)
    tl.store(gate_gradients + 2 * width + unit, of_g, mask=mask)
    tl.store(gate_gradients + 3 * width + unit, of_o, mask=mask)
    if step > 0:
        square = width * row_stride
        for first in tl.range(0, width, COLUMNS, num_stages=STEP_STAGES):
            column = first + tl.arange(0, COLUMNS)
            places = weight + unit[:, None] * row_stride + column[None, :]
            inside = mask[:, None] & (column[None, :] < row_stride)
            total = of_i[:, None] * tl.load(places, mask=inside, other=0.0)
            total += of_f[:, None] * tl.load(places + square, mask=inside, other=0.0)
            total += of_g[:, None] * tl.load(places + 2 * square, mask=inside, other=0.0)
            total += of_o[:, None] * tl.load(places + 3 * square, mask=inside, other=0.0)
            tl.store(earlier + (model * parts + part) * width + column, tl.sum(total, axis=0), mask=column < width)


def _row_stride(weight_POI: Tensor) -> int:
    models, rows, _ = weight_POI.shape
    stride = weight_POI.stride(1)
    assert weight_POI.stride(2) == 1
    assert models == 1 or weight_POI.stride(0) == rows * stride
    return stride


def linear(input_PTI: Tensor, weight_POI: Tensor, *biases_PO: Tensor) -> Tensor:
    models, tokens, columns = input_PTI.shape
    rows = weight_POI.shape[1]
    output_PTO = input_PTI.new_empty(models, tokens, rows)
    first, second = (*biases_PO, None, None)[:2]
    linear_kernel[(triton.cdiv(rows, ROWS), models)](
        input_PTI.contiguous(),
        weight_POI,
        first,
        second,
        output_PTO,
        tokens,
        rows,
        columns,
        _row_stride(weight_POI),
        TOKENS=TOKENS,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
        num_stages=STAGES,
    )
    return output_PTO


def linear_input_gradient(gradient_PTO: Tensor, weight_POI: Tensor) -> Tensor:
    models, tokens, rows = gradient_PTO.shape
    columns = weight_POI.shape[2]
    parts = triton.cdiv(rows, ROWS_PER_PROGRAM)
    partials_PSTI = gradient_PTO.new_empty(models, parts, tokens, columns)
    input_gradient_kernel[(triton.cdiv(columns, COLUMNS), parts, models)](
        gradient_PTO.contiguous(),
        weight_POI,
        partials_PSTI,
        tokens,
        rows,
        columns,
        _row_stride(weight_POI),
        TOKENS=TOKENS,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        ROWS_PER_PROGRAM=ROWS_PER_PROGRAM,
        num_warps=4,
        num_stages=STAGES,
    )
    return partials_PSTI


def lstm(inputs_PTG: Tensor, weight_PGH: Tensor, hidden_PH: Tensor, cell_PH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    models, tokens, _ = inputs_PTG.shape
    width = weight_PGH.shape[2]
    hidden, cell = (inputs_PTG.new_empty(tokens + 1, models, width) for _ in range(2))
    torch._foreach_copy_([hidden[0], cell[0]], [hidden_PH, cell_PH])
    gates_PTG = torch.empty_like(inputs_PTG)
    for step in range(tokens):
        lstm_step_kernel[(triton.cdiv(width, UNITS), models)](
            inputs_PTG,
            weight_PGH,
            hidden,
            cell,
            gates_PTG,
            step,
            tokens,
            width,
            _row_stride(weight_PGH),
            UNITS=UNITS,
            COLUMNS=STEP_COLUMNS,
            num_warps=4,
        )
    return hidden, cell, gates_PTG


def lstm_gate_gradients(gradient_PSTH: Tensor, weight_PGH: Tensor, cell: Tensor, gates_PTG: Tensor) -> Tensor:
    models, given_parts, tokens, width = gradient_PSTH.shape
    parts = triton.cdiv(width, UNITS)
    cell_gradient_PH = gradient_PSTH.new_empty(models, width)
    later, earlier = (gradient_PSTH.new_empty(models, parts, width) for _ in range(2))
    gate_gradients_PTG = torch.empty_like(gates_PTG)
    for step in reversed(range(tokens)):
        lstm_step_back_kernel[(parts, models)](
            gradient_PSTH.contiguous(),
            weight_PGH,
            cell,
            gates_PTG,
            gate_gradients_PTG,
            cell_gradient_PH,
            later,
            earlier,
            step,
            tokens,
            width,
            _row_stride(weight_PGH),
            given_parts,
            UNITS=UNITS,
            COLUMNS=STEP_COLUMNS,
            GIVEN_PARTS=triton.next_power_of_2(given_parts),
            PARTS=triton.next_power_of_2(parts),
            num_warps=4,
        )
        later, earlier = earlier, later
    return gate_gradients_PTG
