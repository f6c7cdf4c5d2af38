"""Products of matrices, added to what is there already.

Shapes: V classes, d width, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TF32_ALIGNMENT = 4
"""Alignment, in elements, of the rows of factors and of the number of rows that are summed over: 16 bytes."""


def uses_tf32(matrix: Tensor) -> bool:
    """True if torch rounds the factors of a product with this matrix to TensorFloat32.

    Units for that are fast where both factors lie in memory along the dimension that is summed over, which is nothing
    that other dtypes ask for.
    """
    return (
        matrix.dtype == torch.float32
        and matrix.device.type == "cuda"
        and torch.backends.cuda.matmul.fp32_precision == "tf32"
    )


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def by_columns(matrix_Rd: Tensor) -> Tensor:
    """A copy that lies in memory column after column, each at an aligned address."""
    rows, columns = matrix_Rd.shape
    copy_dR = matrix_Rd.new_empty(columns, rounded_up(rows, TF32_ALIGNMENT))[:, :rows]
    return copy_dR.copy_(matrix_Rd.t()).t()


def summands(by_logits_RV: Tensor, rows_Rd: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Factors a and b; ``by_logits^T rows`` is the sum of ``a^T b``, each of which is a fast product."""
    count = rows_Rd.shape[0]
    aligned = count // TF32_ALIGNMENT * TF32_ALIGNMENT
    if aligned == 0 or not uses_tf32(rows_Rd):
        yield by_logits_RV, rows_Rd
    elif aligned == count:
        yield by_logits_RV, by_columns(rows_Rd)
    else:
        yield by_logits_RV[:aligned], by_columns(rows_Rd[:aligned])
        yield by_logits_RV[aligned:], rows_Rd[aligned:]


def sum_over_rows(by_logits_RV: Tensor, rows_Rd: Tensor) -> Tensor:
    """``by_logits^T rows``."""
    (a, b), *others = summands(by_logits_RV, rows_Rd)
    total_Vd = torch.mm(a.t(), b)
    for a, b in others:
        total_Vd.addmm_(a.t(), b)
    return total_Vd


def add_product(total: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    """``total += a @ b``, or ``total = a @ b`` for the first one; rounded once, to total's dtype, if that can be."""
    if total.dtype == a.dtype:
        if is_first:
            torch.mm(a, b, out=total)
        else:
            total.addmm_(a, b)
    elif a.device.type == "cuda" and total.dtype == torch.float32:
        if is_first:
            torch.mm(a, b, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    elif is_first:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)


def add_column_sums(total_V: Tensor, matrix_RV: Tensor, *, is_first: bool) -> None:
    """``total += matrix.sum(0)``, or ``total =`` that for the first one."""
    sums_V = matrix_RV.sum(0, dtype=total_V.dtype)
    if is_first:
        total_V.copy_(sums_V)
    else:
        total_V.add_(sums_V)
