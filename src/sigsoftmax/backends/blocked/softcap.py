"""Hand-made passes over a block for phi = c tanh(z / c).

Shapes: R rows of a block, V classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax.backends.blocked.fast_rows import MOST_PHI, ProbabilityRows, exponentials
from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.family.formulas import SOFTCAP

NEAR_ROOT, FAR_ROOT = 14.0 - math.sqrt(133.0), 14.0 + math.sqrt(133.0)
NEAR_PART = 14.0 / 15.0 * (63.0 - 5.5 * NEAR_ROOT) / (FAR_ROOT - NEAR_ROOT)
FAR_PART = 14.0 / 15.0 * (5.5 * FAR_ROOT - 63.0) / (FAR_ROOT - NEAR_ROOT)


class SoftcapRows(ProbabilityRows):
    """phi of each element is kept for its slope, 1 - (phi / c)^2.

    Up to |z| = c tanh is taken from its continued fraction, which has all digits of float32 there and costs a third of
    torch.tanh: phi = z (1 - 14/15 y (y + 22.5) / (y^2 + 28 y + 63)) with y = (z / c)^2, here as a sum of partial
    fractions. Beyond c the slope would cancel, and is computed from two sigmoids.
    """

    def __init__(self, arguments: Sequence[Tensor], logits_like: Tensor) -> None:
        slower = FormRows(SOFTCAP, arguments, logits_like)
        super().__init__(logits_like, slower)
        (self.argument,) = slower.arguments
        self.c = float(arguments[0])
        # Powers of other caps leave the range of float32.
        self.has_fraction = self.dtype == torch.float32 and 1e-4 < self.c < 1e4

    def _probabilities(self, z: Tensor, peak: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
        farthest = max(float(peak.amax()), -float(z.amin())) if z.numel() else torch.inf
        # Also for NaN.
        if not min(farthest, self.c) <= MOST_PHI or not farthest < torch.inf:
            return None
        self._z, self._is_near = z, self.has_fraction and farthest <= self.c
        phi, f, c = self._buffer("phi", z), self._buffer("f", z), self.c
        if self._is_near:
            torch.mul(z, z, out=phi)
            torch.add(phi, FAR_ROOT * c**2, out=f).reciprocal_()
            phi.add_(NEAR_ROOT * c**2).reciprocal_().add_(f, alpha=FAR_PART / NEAR_PART)
            phi.add_(1.0 / (15.0 * NEAR_PART * c**2)).mul_(z).mul_(NEAR_PART * c**2)
        else:
            torch.div(z, c, out=phi).tanh_().mul_(c)
        offset = SOFTCAP.phi(peak, self.argument)
        self._phi, self._f = phi, exponentials(phi, out=f)
        self._total = f.sum(-1, keepdim=True)
        target = None if self._index is None else SOFTCAP.scaled(self._z_y, peak, self.argument).value
        return offset, (self._total * torch.exp(-offset)).log_(), target

    def _slopes(self) -> tuple[Tensor, float]:
        if self._is_near:
            return self._f.addcmul_(self._f, self._phi.mul_(self._phi), value=-(self.c**-2)), 1.0
        x = torch.div(self._z, 0.5 * self.c, out=self._buffer("work", self._z))
        self._f.mul_(torch.sigmoid(x, out=self._phi))
        return self._f.mul_(torch.sigmoid(x.neg_(), out=x)), 4.0

    def _target_slope(self) -> Tensor:
        return SOFTCAP.slope(self._z_y, self.argument)
