"""Hand-made passes over a block for phi = log(max(z, 0) + eps), without an exponential or a logarithm per element.

Shapes: R rows of a block, V classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax.backends.blocked.fast_rows import ProbabilityRows
from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.contract.rows import MASK
from sigsoftmax.family.formulas import RELU

SMALLEST_EPS = 1e-30


class ReluRows(ProbabilityRows):
    """f = (max(z, 0) + eps) / total, and f times the slope of phi is 1 / total right of 0."""

    def __init__(self, arguments: Sequence[Tensor], logits_like: Tensor) -> None:
        slower = FormRows(RELU, arguments, logits_like)
        super().__init__(logits_like, slower)
        (self.eps,) = slower.arguments
        # Beyond it the sum over a row could overflow; where there is none, its inverse could.
        self.limit = torch.finfo(self.dtype).max / (2.0 * max(1, logits_like.shape[-1]))
        if not self.eps >= SMALLEST_EPS:
            self.limit = MASK

    def _probabilities(self, z: Tensor, peak: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
        if z.numel() == 0 or not bool((peak < self.limit).all()) or not bool(z.amin() > MASK):
            return None
        self._positive = torch.clamp(z, min=0.0, out=self._buffer("positive", z))
        self._total = self._positive.sum(-1, keepdim=True) + z.shape[-1] * self.eps
        highest = torch.relu(peak) + self.eps
        target = RELU.scaled(self._z_y, peak, self.eps).value if self._index is not None else None
        return highest.log(), (self._total / highest).log_(), target

    def _slopes(self) -> tuple[Tensor, float]:
        return self._positive.sign_(), 1.0

    def _target_slope(self) -> Tensor:
        return RELU.slope(self._z_y, self.eps)
