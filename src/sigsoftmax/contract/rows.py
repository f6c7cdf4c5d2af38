"""The interface between a loss and a backend: a few numbers per row.

A loss of a row of logits with target y needs s = phi(z_y) and n = log sum g. A backend measures both relative to an
offset o of the row (absolute values cancel), and, given the derivatives of the loss by n and s, writes the gradient
of the row. Everything else (weights, smoothing, reductions, mixtures) is arithmetic on these vectors.

Shapes: R rows of logits, V classes.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

MASK = float("-inf")
"""the logit of a class that is left out"""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of all arithmetic but the matrix products: float32, and float64 for float64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RowStats(NamedTuple):
    """Row statistics, each of shape (R,)."""

    peak: Tensor
    """the logit that the offset belongs to: where phi is largest, or so near it that sums do not overflow"""
    offset: Tensor
    normalizer: Tensor
    """log sum_j g(z_j) - offset"""
    target: Tensor | None
    """phi(z_y) - offset"""
    dense: Tensor | None
    """sum_j dense_j (phi(z_j) - offset), for weights over all classes (smoothing, probability targets)"""
    argmax: Tensor | None
    entropy: Tensor | None


class RowCoefficients(NamedTuple):
    """The derivatives of the loss by what ``RowStats`` holds, each of shape (R,)."""

    normalizer: Tensor
    target: Tensor | None
    dense: Tensor | None
    unused: Tensor | None
    """Rows that the loss does not depend on: their gradient is 0, even where their logits are NaN. None if none."""


class RowRoutines(Protocol):
    """The two routines of a backend, for one output function and one loss."""

    max_rows: int | None
    """The most rows a call should be given, where fewer stay in a cache; None for no limit."""

    def stats(
        self, logits_RV: Tensor, index_R: Tensor | None, dense: Tensor | None, argmax: bool, entropy: bool
    ) -> RowStats:
        """Measure rows. ``dense`` is (V,) or (R, V)."""
        ...

    def gradient(
        self,
        logits_RV: Tensor,
        stats: RowStats,
        coefficients: RowCoefficients,
        index_R: Tensor | None,
        dense: Tensor | None,
        out_RV: Tensor,
    ) -> None:
        """Write dL/dlogits of the rows that were measured last; ``out_RV`` may be ``logits_RV``."""
        ...

    def argument_gradients(self) -> list[Tensor]:
        """dL/dargument of the form, summed over all rows that were given to ``gradient``."""
        ...


@runtime_checkable
class FusedRowRoutines(RowRoutines, Protocol):
    """A backend that can do both at once, where the coefficients do not wait for the stats."""

    def stats_and_gradient(
        self,
        logits_RV: Tensor,
        coefficients: RowCoefficients,
        z_slope_R: Tensor | None,
        index_R: Tensor | None,
        dense: Tensor | None,
        out_RV: Tensor,
        argmax: bool,
        entropy: bool,
    ) -> RowStats:
        """Measure rows and write their gradient; ``z_slope * log sum g`` is added to the normaliser's coefficient."""
        ...

    def gradient_of_classes(
        self,
        logits_RV: Tensor,
        stats: RowStats,
        coefficients: RowCoefficients,
        index_R: Tensor | None,
        dense: Tensor | None,
        first_class: int,
        out_RV: Tensor,
    ) -> None:
        """Write the gradient of a range of classes of rows that were measured before; out may be the logits.

        ``index_R`` and ``dense`` are those of all classes.
        """
        ...
