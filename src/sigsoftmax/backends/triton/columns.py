"""Sums over the rows of a matrix, the gradient of a bias, in a fixed order; torch's own take scratch memory besides.

Shapes: R rows, V columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sigsoftmax.backends.triton.launches import launch
from sigsoftmax.backends.triton.shapes import multiprocessors

ROWS, LANES = 32, 128
"""of a tile"""
PROGRAMS = 8
"""for each multiprocessor, before columns are cut into parts no more"""


@triton.jit
def column_sums_kernel(
    matrix,
    total,
    stride,
    R,
    V,
    rows_of_part,
    IS_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Sums of each part of the rows; to what ``total`` has they are added, unless they are the first."""
    blocks = tl.cdiv(V, LANES)
    column = tl.program_id(0) % blocks * LANES + tl.arange(0, LANES)
    part = tl.program_id(0) // blocks
    last = tl.minimum(R, (part + 1) * rows_of_part)
    inside = column < V
    sums = tl.zeros([ROWS, LANES], tl.float32)
    for start in range(part * rows_of_part, last, ROWS):
        row = start + tl.arange(0, ROWS)
        position = row.to(tl.int64)[:, None] * stride + column[None, :]
        sums += tl.load(matrix + position, mask=(row < last)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    pointer = total + part.to(tl.int64) * V + column
    sum_of_rows = tl.sum(sums, 0)
    if not IS_FIRST:
        sum_of_rows += tl.load(pointer, mask=inside, other=0.0)
    tl.store(pointer, sum_of_rows, mask=inside)


def add_column_sums(total_V: Tensor, matrix_RV: Tensor, *, is_first: bool) -> None:
    """``total += matrix.sum(0)``, or ``total =`` that for the first one; the total is float32, and so are sums."""
    rows, columns = matrix_RV.shape
    if not rows:
        if is_first:
            total_V.zero_()
        return
    blocks = -(-columns // LANES)
    parts = max(1, min(-(-rows // ROWS), PROGRAMS * multiprocessors(matrix_RV.device) // blocks))
    rows_of_part = -(-rows // parts)
    parts = -(-rows // rows_of_part)

    def add(matrix: Tensor, total: Tensor, parts: int, rows_of_part: int, is_first: bool) -> None:
        launch(
            column_sums_kernel,
            parts * blocks,
            (matrix, total),
            (matrix.stride(0), matrix.shape[0], columns, rows_of_part),
            {"IS_FIRST": is_first, "ROWS": ROWS, "LANES": LANES},
            num_warps=8,
        )

    if parts == 1:
        add(matrix_RV, total_V, 1, rows, is_first)
        return
    parts_PV = torch.empty(parts, columns, dtype=torch.float32, device=matrix_RV.device)
    add(matrix_RV, parts_PV, parts, rows_of_part, True)
    add(parts_PV, total_V, 1, parts, is_first)
