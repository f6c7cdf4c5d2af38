"""Factors laid out for units that ask for it: the same sums, aligned, and only where those units run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.backends.problems import problem_of
from torch import Tensor

from sigsoftmax.backends.chunked import chunk_plan, matmul
from sigsoftmax.backends.chunked.logits import LinearLogits
from sigsoftmax.contract.operands import Operands

FEATURES, CLASSES = 3, 37


@pytest.fixture
def as_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts as for TensorFloat32, with the CPU's own arithmetic."""
    monkeypatch.setattr(matmul, "uses_tf32", lambda matrix: True)


@pytest.mark.parametrize("precision", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_where_such_units_run(device: str, dtype: torch.dtype, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=precision))
    matrix: Any = SimpleNamespace(dtype=dtype, device=torch.device(device))
    assert matmul.uses_tf32(matrix) == ((device, dtype, precision) == ("cuda", torch.float32, "tf32"))


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 11])
def test_columns_begin_at_aligned_addresses(rows: int) -> None:
    matrix = torch.randn(rows, 5)
    copy = matmul.by_columns(matrix)
    assert torch.equal(copy, matrix)
    assert copy.stride(0) == 1
    assert copy.stride(1) % matmul.TF32_ALIGNMENT == 0
    assert copy.data_ptr() != matrix.data_ptr()


@pytest.mark.usefixtures("as_tf32")
@pytest.mark.parametrize("rows", range(11))
def test_aligned_rows_are_summed_apart_from_the_rest(rows: int) -> None:
    by_logits, features = torch.randn(rows, 6, dtype=torch.float64), torch.randn(rows, 5, dtype=torch.float64)
    parts = list(matmul.summands(by_logits, features))
    counts = [b.shape[0] for _, b in parts]
    assert sum(counts) == rows
    fast = [b for _, b in parts if b.shape[0] >= matmul.TF32_ALIGNMENT]
    assert all(b.stride(0) == 1 and b.shape[0] % matmul.TF32_ALIGNMENT == 0 for b in fast)
    torch.testing.assert_close(matmul.sum_over_rows(by_logits, features), by_logits.t() @ features)


def gradients(rows: int, chunks: int) -> tuple[LinearLogits, list[Tensor]]:
    """The gradients of a sum of squares of logits, and the provider that summed them."""
    torch.manual_seed(0)
    shapes = ((rows, FEATURES), (CLASSES, FEATURES), (CLASSES,))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    operands = Operands(*leaves, target=torch.zeros(rows, dtype=torch.int64))
    problem = problem_of(operands, chunk_bytes=-(-rows // chunks) * matmul.rounded_up(CLASSES, 16) * 8)
    with torch.no_grad():
        provider = LinearLogits(problem, operands)
        for _, chunk_RV in provider.chunks():
            chunk_RV.mul_(2.0)
            provider.backpropagate()
    found = [gradient for gradient in provider.gradients() if gradient is not None]
    assert len(found) == 3
    return provider, found


@pytest.mark.parametrize(("rows", "chunks", "copies"), [(90, 4, True), (92, 3, True), (90, 2, False), (31, 3, False)])
@pytest.mark.parametrize("alignment", [1, 16])
def test_gradients_are_those_of_other_layouts(
    rows: int, chunks: int, copies: bool, alignment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_plan, "row_alignment", lambda device: alignment)
    _, expected = gradients(rows, chunks)
    with monkeypatch.context() as patch:
        patch.setattr(matmul, "uses_tf32", lambda matrix: True)
        provider, found = gradients(rows, chunks)
    assert provider.copies_weight == copies
    assert (provider.second_factor_Vd.stride(0) == 1) == copies
    torch.testing.assert_close(found, expected)
