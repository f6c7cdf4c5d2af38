"""Checks of the entries of a log-output matrix, and their precision.

Shapes: B contexts of a block, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["BadEntries", "EntryChecks", "check_matrix", "dtype_name", "sum_tolerance"]

NARROWER = {
    torch.float64: (torch.float32, torch.float16, torch.bfloat16),
    torch.float32: (torch.float16, torch.bfloat16),
}
"""dtypes that the numbers of another may have come from; the least precise last"""
SIXTEEN_BITS = (torch.float16, torch.bfloat16)
SAMPLED_ROWS, SAMPLED_COLUMNS = 64, 1024


class BadEntries(ValueError):
    """Entries that cannot be right; the rows of the block before ``row`` are."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row
        """index within the block"""


@dataclass
class EntryChecks:
    """Checks blocks of one matrix as they come, and remembers what is needed to judge the whole."""

    log_probs: bool
    """every row must hold log-probabilities; else any finite matrix will do"""
    tolerance: float | None = None
    """the distance from 0 that the log of a row's sum may have; None: that of :func:`sum_tolerance`"""
    row_sum_error: float = 0.0
    narrower: list[torch.dtype] | None = field(default=None, init=False)
    """dtypes that hold every number seen so far; None before the first nonzero one"""

    def check(self, block_BV: Tensor, first_row: int) -> None:
        """Raise BadEntries if the block is wrong; ``first_row`` is the index of its first row in the matrix."""
        values_BV = block_BV.float() if block_BV.dtype in SIXTEEN_BITS else block_BV
        low, high = (float(x) for x in torch.aminmax(values_BV))
        if not (low > -float("inf") and high < float("inf")):
            raise _not_finite(values_BV, first_row, self.log_probs)
        if self.log_probs:
            self._check_log_probs(values_BV, block_BV.dtype, high, first_row)
        self.look_for_narrower(block_BV)

    def look_for_narrower(self, block_BV: Tensor) -> None:
        """Remember which narrower dtypes could hold a sample of the block, without checking what it is."""
        if not self.log_probs or block_BV.dtype not in NARROWER:
            # Whole numbers fit in any dtype; a matrix of them is exact, and need not have been rounded.
            return
        rows, columns = -(-block_BV.shape[0] // SAMPLED_ROWS), -(-block_BV.shape[1] // SAMPLED_COLUMNS)
        sample = block_BV[::rows, ::columns]
        if bool(sample.any()):
            candidates = NARROWER[block_BV.dtype] if self.narrower is None else self.narrower
            self.narrower = [dtype for dtype in candidates if torch.equal(sample.to(dtype).to(sample.dtype), sample)]

    def precision(self, dtype: torch.dtype) -> torch.dtype:
        """The least precise dtype that all entries fit in: they probably came from it."""
        return self.narrower[-1] if self.narrower else dtype

    def state(self) -> dict[str, Any]:
        narrower = None if self.narrower is None else [dtype_name(dtype) for dtype in self.narrower]
        return {"row_sum_error": self.row_sum_error, "narrower": narrower}

    def restore(self, state: dict[str, Any]) -> None:
        self.row_sum_error, names = float(state["row_sum_error"]), state["narrower"]
        self.narrower = None if names is None else [getattr(torch, name) for name in names]

    def _check_log_probs(self, values_BV: Tensor, dtype: torch.dtype, high: float, first_row: int) -> None:
        tolerance = sum_tolerance(dtype) if self.tolerance is None else self.tolerance
        off_B = torch.logsumexp(values_BV, 1).abs()
        worst = float(off_B.max())
        if high > tolerance:
            raise _positive(values_BV, tolerance, first_row)
        if not worst <= tolerance:
            bad_B = off_B > tolerance
            row = int(bad_B.nonzero()[0])
            raise BadEntries(
                f"expected rows of log-probabilities that sum to one, but in row {first_row + row} the log of the sum "
                f"is off by {float(off_B[row]):.3g} (the largest of {int(bad_B.sum())} such rows among "
                f"{len(off_B)} is {worst:.3g}, in row {first_row + int(off_B.argmax())}; tolerance {tolerance:g}). "
                f"{_advice(values_BV[row])}",
                row,
            )
        self.row_sum_error = max(self.row_sum_error, worst)


def sum_tolerance(dtype: torch.dtype) -> float:
    """The distance from 0 that the log of a sum of probabilities may have.

    A floor under probabilities, as in the published mixtures, moves it by 1e-8 per token.
    """
    return 0.1 if dtype in SIXTEEN_BITS else 5e-3


def check_matrix(matrix: Tensor, name: str) -> None:
    """Raise a ValueError unless this is a matrix of floating-point numbers that is not empty."""
    if matrix.ndim != 2 or not matrix.is_floating_point() or not matrix.numel():
        raise ValueError(
            f"{name}: expected a floating-point matrix of contexts x tokens with at least one of each, got "
            f"{matrix.dtype} of shape {tuple(matrix.shape)}"
        )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _not_finite(values_BV: Tensor, first_row: int, log_probs: bool) -> BadEntries:
    wrong_BV = ~torch.isfinite(values_BV)
    row, column = (int(i) for i in wrong_BV.nonzero()[0])
    value = float(values_BV[row, column])
    advice = "check the model that made it, or leave that context out"
    if value == -float("inf"):
        always = int((values_BV == -float("inf")).all(0).sum())
        advice = "Leave masked tokens out of the matrix" + (
            f" ({always} tokens have probability 0 in every row of this block)" if always else ""
        )
        if log_probs:
            advice += ", or compute in a dtype in which the probability does not underflow"
    return BadEntries(
        f"a matrix with infinite or NaN entries has no singular values; the first is {value} at row "
        f"{first_row + row}, column {column}, one of {int(wrong_BV.sum())} among {len(values_BV)} rows. {advice}",
        row,
    )


def _positive(values_BV: Tensor, tolerance: float, first_row: int) -> BadEntries:
    rows_B = values_BV.amax(1)
    row = int((rows_B > tolerance).nonzero()[0])
    column = int(values_BV[row].argmax())
    return BadEntries(
        f"a log-probability cannot be positive, got {float(values_BV[row, column]):.6g} at row {first_row + row}, "
        f"column {column} (the largest among {len(rows_B)} rows is {float(rows_B.max()):.6g}). "
        f"{_advice(values_BV[row])}",
        row,
    )


def _advice(row_V: Tensor) -> str:
    if bool((row_V >= 0).all()) and abs(float(row_V.sum()) - 1.0) < 0.01:
        return "These are probabilities: pass their logarithm"
    return (
        "Pass log-probabilities, for instance log_softmax of logits over the whole vocabulary, one context per row; "
        "log_probs=False analyses a matrix of another kind"
    )
