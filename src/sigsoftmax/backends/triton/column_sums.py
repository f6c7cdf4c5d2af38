"""Sums over the rows of a matrix, the gradient of a bias, in a fixed order; torch's own take scratch memory besides.

Shapes: R rows, V columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sigsoftmax.backends.chunked import matmul
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
    """``total += matrix.sum(0)``, or ``total =`` that for the first one; by the kernel on a GPU, in float32."""
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
