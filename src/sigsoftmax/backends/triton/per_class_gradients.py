"""Gradients with an element per class, each a sum over rows in a fixed order: of a bias, and of a shift per class.

Shapes: R rows, P parts of them, V classes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sigsoftmax.backends.chunked import matmul
from sigsoftmax.backends.triton.kernels import formulas, intrinsics
from sigsoftmax.backends.triton.kernels.form_logits import argument
from sigsoftmax.backends.triton.launch import launch
from sigsoftmax.backends.triton.tuning import multiprocessors

ROWS, LANES = 32, 128
"""rows and columns of a tile"""
PROGRAMS = 8
"""programs for each multiprocessor that rows are divided for"""


@triton.jit
def column_sums_kernel(
    matrix,
    total,
    stride,
    R,
    V,
    rows_per_part,
    IS_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Sums of each part of the rows, added to ``total`` unless they are the first."""
    blocks = tl.cdiv(V, LANES)
    column = tl.program_id(0) % blocks * LANES + tl.arange(0, LANES)
    part = tl.program_id(0) // blocks
    last = tl.minimum(R, (part + 1) * rows_per_part)
    inside = column < V
    sums = tl.zeros([ROWS, LANES], tl.float32)
    for start in range(part * rows_per_part, last, ROWS):
        row = start + tl.arange(0, ROWS)
        position = row.to(tl.int64)[:, None] * stride + column[None, :]
        sums += tl.load(matrix + position, mask=(row < last)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    pointer = total + part.to(tl.int64) * V + column
    sum_of_rows = tl.sum(sums, 0)
    if not IS_FIRST:
        sum_of_rows += tl.load(pointer, mask=inside, other=0.0)
    tl.store(pointer, sum_of_rows, mask=inside)


def add_column_sums(total_V: Tensor, matrix_RV: Tensor, *, is_first: bool) -> None:
    """``total += matrix.sum(0)``, or ``total =`` that for the first one; by the kernel on a GPU, in float32.

    torch's own sums take scratch memory besides.
    """
    if total_V.dtype == torch.float32 and matrix_RV.device.type == "cuda":
        add_by_kernel(total_V, matrix_RV, is_first=is_first)
    else:
        matmul.add_column_sums(total_V, matrix_RV, is_first=is_first)


def add_by_kernel(total_V: Tensor, matrix_RV: Tensor, *, is_first: bool) -> None:
    """Add column sums by the kernel; the total is float32, and so are sums."""
    rows, columns = matrix_RV.shape
    if not rows:
        if is_first:
            total_V.zero_()
        return
    blocks = -(-columns // LANES)
    parts = max(1, min(-(-rows // ROWS), PROGRAMS * multiprocessors(matrix_RV.device) // blocks))
    rows_per_part = -(-rows // parts)
    parts = -(-rows // rows_per_part)

    def add(matrix: Tensor, total: Tensor, parts: int, rows_per_part: int, is_first: bool) -> None:
        launch(
            column_sums_kernel,
            parts * blocks,
            (matrix, total),
            (matrix.stride(0), matrix.shape[0], columns, rows_per_part),
            {"IS_FIRST": is_first, "ROWS": ROWS, "LANES": LANES},
            num_warps=8,
        )

    if parts == 1:
        add(matrix_RV, total_V, 1, rows, is_first)
        return
    parts_PV = torch.empty(parts, columns, dtype=torch.float32, device=matrix_RV.device)
    add(matrix_RV, parts_PV, parts, rows_per_part, True)
    add(parts_PV, total_V, 1, parts, is_first)


@triton.jit
def per_class_kernel(
    logits,
    index,
    dense,
    by_normalizer,
    by_target,
    by_dense,
    peak_R,
    normalizer_R,
    by_c_V,
    alpha_pointer,
    beta_pointer,
    c_pointer,
    centre_pointer,
    logits_stride,
    dense_stride,
    alpha_value,
    beta_value,
    R,
    V,
    rows_per_target,
    first_class,
    ALPHA_IS_POINTER: tl.constexpr,
    BETA_IS_POINTER: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_DENSE: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add dL/dc of each class, a sum over rows: one program for a block of classes, so that the order is fixed.

    It runs before the gradient overwrites the logits.
    """
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < V
    alpha = argument(alpha_pointer, alpha_value, ALPHA_IS_POINTER)
    beta = argument(beta_pointer, beta_value, BETA_IS_POINTER)
    centre = tl.load(centre_pointer).to(tl.float32)
    c = tl.load(c_pointer + position, mask=inside, other=0.0).to(tl.float32)[None, :]
    IS_ROUGH: tl.constexpr = logits.dtype.element_ty.primitive_bitwidth == 16
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, R, ROWS):
        row = start + tl.arange(0, ROWS)
        is_row = row < R
        row64 = row.to(tl.int64)[:, None]
        both = is_row[:, None] & inside[None, :]
        z = intrinsics.widened(
            tl.load(logits + row64 * logits_stride + position[None, :], mask=both, other=-float("inf"))
        )
        peak = tl.load(peak_R + row, mask=is_row, other=0.0)[:, None]
        normalizer = tl.load(normalizer_R + row, mask=is_row, other=0.0)[:, None]
        by_n = tl.load(by_normalizer + row, mask=is_row, other=0.0)[:, None]
        _, weight, _ = formulas.value_weight_and_slope(
            z, peak, normalizer, alpha, beta, c, centre, FORM, True, IS_ROUGH
        )
        by_phi = by_n * weight
        is_used = by_n != 0
        if HAS_DENSE:
            by_d = tl.load(by_dense + row, mask=is_row, other=0.0)[:, None]
            by_phi += by_d * tl.load(dense + row64 * dense_stride + position[None, :], mask=both, other=0.0)
            is_used |= by_d != 0
        if HAS_INDEX:
            y = (tl.load(index + row // rows_per_target, mask=is_row, other=-1) - first_class)[:, None]
            by_s = tl.load(by_target + row, mask=is_row, other=0.0)[:, None]
            by_phi += tl.where(position[None, :] == y, by_s, 0.0)
            is_used |= by_s != 0
        _, _, fall = formulas.logistic_argument_slopes(z, peak, c, centre, True, IS_ROUGH)
        # A NaN in a row that the loss does not depend on must not reach the gradient.
        total -= tl.where(is_used & (z != -float("inf")), by_phi * fall, 0.0)
    before = tl.load(by_c_V + position, mask=inside, other=0.0)
    tl.store(by_c_V + position, before + beta * tl.sum(total, 0), mask=inside)
