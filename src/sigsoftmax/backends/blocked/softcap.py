"""Hand-made passes over a block for phi = c tanh(z / c).

Shapes: R rows of a block, V classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax.backends.blocked.fast_rows import MOST_PHI, ProbabilityRows
from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.contract.rows import RowCoefficients
from sigsoftmax.family.formulas import SOFTCAP


class SoftcapRows(ProbabilityRows):
    """phi of each element is kept for its slope, 1 - (phi / c)^2.

    Up to |z| = c tanh is taken from its continued fraction, which has all digits of float32 there and costs a third of
    torch.tanh: phi = z (1 - 14/15 q) with y = z^2 and q = y (y + 22.5 c^2) / (y^2 + 28 c^2 y + 63 c^4). Beyond c the
    slope would cancel, and is computed from two sigmoids.
    """

    def __init__(self, arguments: Sequence[Tensor], logits_like: Tensor) -> None:
        slower = FormRows(SOFTCAP, arguments, logits_like)
        super().__init__(logits_like, slower)
        (self.argument,) = slower.arguments
        self.c = float(arguments[0])
        # Powers of other caps leave the range of float32.
        self.has_fraction = self.dtype == torch.float32 and 1e-4 < self.c < 1e4

    def _probabilities(self, z: Tensor, peak: Tensor, has_index: bool) -> tuple[Tensor, Tensor, Tensor | None] | None:
        farthest = max(float(peak.amax()), -float(z.amin())) if z.numel() else torch.inf
        # Also for NaN.
        if not min(farthest, self.c) <= MOST_PHI or not farthest < torch.inf:
            return None
        self._z, self._is_near = z, self.has_fraction and farthest <= self.c
        phi, f, c = self._buffer("phi", z), self._buffer("f", z), self.c
        if self._is_near:
            y = torch.mul(z, z, out=phi)
            below = torch.add(y, 28.0 * c**2, out=f).mul_(y).add_(63.0 * c**4)
            q = torch.add(y, 22.5 * c**2, out=self._buffer("work", z)).mul_(y).div_(below)
            torch.addcmul(z, z, q, value=-14.0 / 15.0, out=phi)
        else:
            torch.div(z, c, out=phi).tanh_().mul_(c)
        self._phi, self._f = phi, torch.softmax(phi, -1, out=f)
        # Over many classes torch.softmax divides by a sum that has lost digits, which the sum of its results tells.
        self._total = f.sum(-1, keepdim=True)
        target = SOFTCAP.relative(self._z_y, peak, self.argument)[0] if has_index else None
        return SOFTCAP.phi(peak, self.argument), (self._total / f.amax(-1, keepdim=True)).log_(), target

    def _by_normalizer(self, coefficients: RowCoefficients) -> tuple[Tensor, Tensor]:
        factor = coefficients.normalizer.unsqueeze(-1) / self._total
        if self._is_near:
            return self._f.addcmul_(self._f, self._phi.mul_(self._phi), value=-(self.c**-2)), factor
        x = torch.div(self._z, 0.5 * self.c, out=self._buffer("work", self._z))
        self._f.mul_(torch.sigmoid(x, out=self._phi))
        return self._f.mul_(torch.sigmoid(x.neg_(), out=x)), 4.0 * factor

    def _target_slope(self) -> Tensor:
        return SOFTCAP.slope(self._z_y, self.argument)
