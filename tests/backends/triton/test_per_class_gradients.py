"""Gradients of a bias, sums over the rows of a matrix, against float64."""

from __future__ import annotations

import pytest
import torch
from tests.backends.triton.device import DEVICE, IS_INTERPRETED
from tests.tables import frobenius_error

from sigsoftmax.backends.triton.per_class_gradients import LANES, ROWS, add_by_kernel

pytestmark = pytest.mark.usefixtures("_fresh_memory_is_nan")
DTYPES = [torch.float32, torch.float16, *([] if IS_INTERPRETED else [torch.bfloat16])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, LANES, 2 * LANES + 3])
@pytest.mark.parametrize("rows", [1, ROWS + 1, 10 * ROWS])
def test_sums_are_as_good_as_torchs(rows: int, columns: int, dtype: torch.dtype) -> None:
    # Rows with room between them.
    matrix = (3.0 + torch.randn(rows, columns + 5)).to(DEVICE, dtype)[:, :columns]
    exact = matrix.double().sum(0).cpu()
    bound = 2.0 * frobenius_error(matrix.float().sum(0).cpu(), exact) + 1e-6 * float(exact.norm())
    total = torch.full((columns,), torch.nan, device=DEVICE)
    add_by_kernel(total, matrix, is_first=True)
    assert frobenius_error(total.cpu(), exact) <= bound
    add_by_kernel(total, matrix, is_first=False)
    assert frobenius_error(total.cpu(), 2.0 * exact) <= 2.0 * bound


def test_sums_have_the_same_bits_twice() -> None:
    matrix = torch.randn(500, 300, device=DEVICE)
    first, second = torch.empty(2, 300, device=DEVICE)
    for total in (first, second):
        add_by_kernel(total, matrix, is_first=True)
    assert torch.equal(first, second)
