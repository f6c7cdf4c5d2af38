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


class Logarithms(NamedTuple):
    """Logarithms as multiples of a unit, which are finite where the logarithms themselves may overflow."""

    multiples: Tensor
    unit: Tensor | float = 1.0
    """a power of two, a number or a tensor ()"""

    @property
    def values(self) -> Tensor:
        """The logarithms."""
        if isinstance(self.unit, float) and self.unit == 1.0:
            return self.multiples
        return self.multiples * self.unit

    def over(self, unit: Tensor | float) -> Tensor:
        """The multiples of another unit."""
        return self.multiples * (self.unit / unit)


class RowStats(NamedTuple):
    """Row statistics, each of shape (R,); those of the targets in units of phi, in which no finite logit overflows."""

    peak: Tensor
    """the logit that the offset belongs to: where phi is largest, or so near it that sums do not overflow"""
    offset: Tensor
    normalizer: Tensor
    """log sum_j g(z_j) - offset"""
    target: Tensor | None
    """(phi(z_y) - offset) / unit"""
    dense: Tensor | None
    """sum_j dense_j (phi(z_j) - offset) / unit, for weights over all classes (smoothing, probability targets)"""
    argmax: Tensor | None
    entropy: Tensor | None


class RowCoefficients(NamedTuple):
    """The derivatives of the loss by what ``RowStats`` holds, each of shape (R,)."""

    normalizer: Tensor
    target: Tensor | None
    dense: Tensor | None
    unused: Tensor | None
    """Rows that the loss does not depend on: their gradient is 0, even where their logits are NaN. None if none."""


class RowTargets(NamedTuple):
    """The targets of rows, and the extras that are asked for; those of all classes, also where logits are a block."""

    index_R: Tensor | None = None
    """the target class of each row"""
    dense: Tensor | None = None
    """(V,) or (R, V): weights over all classes"""
    argmax: bool = False
    entropy: bool = False
    first_class: int = 0
    """the class of the first column of the logits, other than 0 for a block of the vocabulary"""


class RowRoutines(Protocol):
    """The two routines of a backend, for one output function and one loss."""

    max_rows: int | None
    """The most rows a call should be given, where fewer stay in a cache; None for no limit."""

    @property
    def unit(self) -> Tensor | float:
        """The unit of phi, in which statistics of targets are given."""
        ...

    def stats(self, logits_RV: Tensor, targets: RowTargets) -> RowStats:
        """The forward pass: the statistics of rows."""
        ...

    def gradient(
        self, logits_RV: Tensor, targets: RowTargets, stats: RowStats, coefficients: RowCoefficients, out_RV: Tensor
    ) -> None:
        """Write dL/dlogits of the rows whose statistics were computed last; ``out_RV`` may be ``logits_RV``."""
        ...

    def argument_gradients(self) -> list[Tensor]:
        """dL/dargument of the form, summed over all rows that were given to ``gradient``."""
        ...


@runtime_checkable
class FusedRowRoutines(RowRoutines, Protocol):
    """A backend that can do both at once, where the coefficients do not wait for the statistics.

    Its ``gradient`` also takes a block of the vocabulary, and any rows whose statistics are known.
    """

    def stats_and_gradient(
        self,
        logits_RV: Tensor,
        targets: RowTargets,
        coefficients: RowCoefficients,
        z_slope_R: Tensor | None,
        out_RV: Tensor,
    ) -> RowStats:
        """Both routines; ``z_slope * log sum g`` is added to the normaliser's coefficient."""
        ...
