"""Hand-made passes over a block for the logistic form, phi = alpha z + beta log sigmoid(z - c).

Shapes: R rows of a block, V classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from sigsoftmax.backends.blocked.fast_rows import MOST_PHI, FastRows, ProbabilityRows
from sigsoftmax.backends.chunked.form_rows import FormRows, phi_gradient, row_stats
from sigsoftmax.contract.rows import MASK, RowCoefficients, RowStats, RowTargets
from sigsoftmax.family.formulas import LOGISTIC
from sigsoftmax.family.parameters import ParameterKind

SMALLEST_SIGMOID_TERM = 1e-30
"""Below it the nonlinearity of phi only touches classes whose probability is smaller still."""

LOWEST_SIGMOID = -32.0
"""Left of it, as seen from c, sigmoids and their sums come near the smallest normal float32."""

FARTHEST_LOGARITHM = 64.0
"""Up to this distance from c a sigmoid in float32 has a logarithm with all digits."""
LARGEST_POWER = 4.0
"""The logarithm of a sigmoid near 1 is off by its rounding, times the power."""


def logistic_target(z_y: Tensor, peak: Tensor, values: Sequence[float]) -> Tensor:
    """phi of the targets relative to the offset of the peak, (R, 1), without cancellation; a mask keeps its -inf."""
    masked = z_y == MASK
    arguments = [z_y.new_tensor(value) for value in values]
    relative, _ = LOGISTIC.relative(torch.where(masked, peak, z_y), peak, *arguments)
    return torch.where(masked, z_y, relative)


def target_right_of_c(z_y: Tensor, peak: Tensor, beta: float, c: float) -> Tensor:
    """phi = z + beta log sigmoid(z - c) of targets that are no masks, less a peak right of c, in fewer operations."""
    x = z_y - c
    lines = (z_y.clamp(min=c) - peak).add_(x.clamp(max=0.0), alpha=1.0 + beta)
    return lines.add_(F.logsigmoid(x.abs_()), alpha=beta)


class SoftmaxRows(ProbabilityRows):
    """phi = alpha z."""

    def __init__(self, arguments: Sequence[Tensor], logits_like: Tensor) -> None:
        super().__init__(logits_like, FormRows(LOGISTIC, arguments, logits_like))
        self.alpha = float(arguments[0])

    def _probabilities(self, z: Tensor, peak: Tensor, has_index: bool) -> tuple[Tensor, Tensor, Tensor | None] | None:
        if peak.numel() and bool(peak.amin() == MASK):
            # softmax would be NaN in a row without classes, which other processes may have.
            return None
        p = self._p = self._buffer("p", z)
        if self.alpha == 1.0:
            torch.softmax(z, -1, out=p)
        else:
            # Scaled before the largest is taken off, far logits would lose digits and the largest floats overflow.
            torch.softmax(torch.sub(z, peak, out=p).mul_(self.alpha), -1, out=p)
        # Halved, because a gap may overflow that is a float if multiplied by a small alpha.
        target = (0.5 * self._z_y - 0.5 * peak) * (2.0 * self.alpha) if has_index else None
        return peak * self.alpha, p.amax(-1, keepdim=True).log_().neg_(), target

    def _by_normalizer(self, coefficients: RowCoefficients) -> tuple[Tensor, Tensor]:
        return self._p, (coefficients.normalizer * self.alpha).unsqueeze(-1)

    def _target_slope(self) -> Tensor:
        return torch.full_like(self._z_y, self.alpha)


class SigsoftmaxRows(ProbabilityRows):
    """phi = z + log sigmoid(z - c) for a fixed scalar c, with one exponential per element (docs/mathematics.md).

    With p = softmax(z), m the peak of the row and p_m its probability, the sigmoid is p / (p + p_m e^(c - m)), and for
    a row left of c, where m < c, it is a p / (a p + p_m) with a = e^(m - c).
    """

    def __init__(self, arguments: Sequence[Tensor], logits_like: Tensor) -> None:
        super().__init__(logits_like, LogisticRows(arguments, logits_like))
        self.c = float(arguments[2])

    def _probabilities(self, z: Tensor, peak: Tensor, has_index: bool) -> tuple[Tensor, Tensor, Tensor | None] | None:
        height = peak - self.c
        is_left = bool(height.numel()) and not bool(height.amin() >= 0)
        if is_left and bool((peak == MASK).any()):
            return None
        p = torch.softmax(z, -1, out=self._buffer("p", z))
        largest = p.amax(-1, keepdim=True)
        decay = torch.exp(-height.abs())
        term = (decay * largest).clamp_(min=SMALLEST_SIGMOID_TERM)
        ratio, offset, target = self._buffer("ratio", z), peak, None
        self._scale: Tensor | None = None
        if is_left:
            self._scale = torch.where(height < 0, decay, torch.ones_like(decay))
            torch.mul(p, self._scale, out=ratio).add_(torch.where(height < 0, largest, term))
            offset = peak + height.clamp(max=0.0)
        else:
            torch.add(p, term, out=ratio)
        if has_index and is_left:
            target = logistic_target(self._z_y, peak, (1.0, 1.0, self.c))
        elif has_index:
            target = (self._z_y - peak).add_(F.logsigmoid(self._z_y - self.c))
        self._ratio = torch.div(p, ratio, out=ratio)
        self._weights = p.mul_(self._ratio)
        self._total = p.sum(-1, keepdim=True)
        return offset, (self._total / largest).log_(), target

    def _by_normalizer(self, coefficients: RowCoefficients) -> tuple[Tensor, Tensor]:
        sigmoid = self._ratio if self._scale is None else self._ratio.mul_(self._scale)
        return self._weights.mul_(sigmoid.neg_().add_(2.0)), coefficients.normalizer.unsqueeze(-1) / self._total

    def _target_slope(self) -> Tensor:
        return torch.sigmoid(self._z_y - self.c).neg_().add_(2.0)


class SigmoidRows(ProbabilityRows):
    """phi = log sigmoid(z - c) for a fixed scalar c: f is a sigmoid over the sum of them."""

    def __init__(self, arguments: Sequence[Tensor], logits_like: Tensor) -> None:
        super().__init__(logits_like, LogisticRows(arguments, logits_like))
        self.c = float(arguments[2])

    def _probabilities(self, z: Tensor, peak: Tensor, has_index: bool) -> tuple[Tensor, Tensor, Tensor | None] | None:
        height = peak - self.c
        lowest = float(height.amin()) if height.numel() else -torch.inf
        if not lowest >= LOWEST_SIGMOID:
            return None
        self._x = z if self.c == 0.0 else torch.sub(z, self.c, out=self._buffer("x", z))
        self._sigmoid = torch.sigmoid(self._x, out=self._buffer("sigmoid", z))
        self._total = self._sigmoid.sum(-1, keepdim=True)
        # The slope is 1 left of c, where the offset is the peak's distance from it.
        offset = height.clamp_(max=0.0)
        target = None
        if has_index and lowest < 0.0:
            target = logistic_target(self._z_y, peak, (0.0, 1.0, self.c))
        elif has_index:
            target = F.logsigmoid(self._z_y - self.c)
        return offset, (self._total * torch.exp(-offset)).log_(), target

    def _by_normalizer(self, coefficients: RowCoefficients) -> tuple[Tensor, Tensor]:
        # 1 - sigmoid would have no digits far right of c.
        complement = self._buffer("complement", self._x)
        torch.sigmoid(torch.neg(self._x, out=complement), out=complement)
        return self._sigmoid.mul_(complement), coefficients.normalizer.unsqueeze(-1) / self._total

    def _target_slope(self) -> Tensor:
        return torch.sigmoid(self.c - self._z_y)


class ShiftedExpRows(ProbabilityRows):
    """phi = z - log sigmoid(z - c) = log(e^z + e^c) for a fixed scalar c, which is gss with k = 0.

    f times the slope of phi is e^z over the sum: with p = softmax(z), m the peak of the row and p_m its probability, p
    over 1 + V p_m e^(c - m). It costs no more than softmax.
    """

    def __init__(self, arguments: Sequence[Tensor], logits_like: Tensor) -> None:
        super().__init__(logits_like, LogisticRows(arguments, logits_like))
        self.c = float(arguments[2])

    def _probabilities(self, z: Tensor, peak: Tensor, has_index: bool) -> tuple[Tensor, Tensor, Tensor | None] | None:
        # A mask has no part in the sum that V counts.
        if z.numel() == 0 or not bool((peak >= self.c).all()) or not bool(z.amin() > MASK):
            return None
        p = self._p = torch.softmax(z, -1, out=self._buffer("p", z))
        largest = p.amax(-1, keepdim=True)
        self._total = 1.0 + z.shape[-1] * largest * torch.exp(self.c - peak)
        target = target_right_of_c(self._z_y, peak, -1.0, self.c) if has_index else None
        return peak, (self._total / largest).log_(), target

    def _by_normalizer(self, coefficients: RowCoefficients) -> tuple[Tensor, Tensor]:
        return self._p, coefficients.normalizer.unsqueeze(-1) / self._total

    def _target_slope(self) -> Tensor:
        return torch.sigmoid(self._z_y - self.c)


class PowerRows(ProbabilityRows):
    """g = e^z s^beta with s = sigmoid(z - c) for fixed scalars, with one sigmoid and one logarithm per element.

    Its slope 1 + beta - beta s is a sum of positive terms where beta < 0, and else at least 1. Left of c the terms of
    phi = z + beta log s have different signs where beta < 0, and digits only while both are small.
    """

    def __init__(self, arguments: Sequence[Tensor], logits_like: Tensor) -> None:
        super().__init__(logits_like, LogisticRows(arguments, logits_like))
        _, self.beta, self.c = (float(a) for a in arguments)
        self.left_slope = 1.0 + self.beta
        self.most_left = MOST_PHI if self.beta < 0.0 else FARTHEST_LOGARITHM

    def _probabilities(self, z: Tensor, peak: Tensor, has_index: bool) -> tuple[Tensor, Tensor, Tensor | None] | None:
        if z.numel() == 0 or not self.c <= float(peak.amin()) <= float(peak.amax()) <= MOST_PHI:
            return None
        if not self.c - float(z.amin()) <= self.most_left:
            return None
        f, sigmoid = self._buffer("f", z), self._buffer("sigmoid", z)
        x = z if self.c == 0.0 else torch.sub(z, self.c, out=sigmoid)
        self._sigmoid = torch.sigmoid(x, out=sigmoid)
        torch.add(z, torch.log(sigmoid, out=f), alpha=self.beta, out=f)
        self._f = torch.softmax(f, -1, out=f)
        normalizer = F.logsigmoid(peak - self.c).mul_(self.beta) - f.amax(-1, keepdim=True).log_()
        return peak, normalizer, target_right_of_c(self._z_y, peak, self.beta, self.c) if has_index else None

    def _by_normalizer(self, coefficients: RowCoefficients) -> tuple[Tensor, Tensor]:
        values = self._f.addcmul_(self._f, self._sigmoid, value=-self.beta / self.left_slope)
        return values, (coefficients.normalizer * self.left_slope).unsqueeze(-1)

    def _target_slope(self) -> Tensor:
        return torch.sigmoid(self._z_y - self.c).mul_(-self.beta).add_(self.left_slope)


class LogisticRows(FastRows):
    """The whole form: alpha, beta and c fixed or learned, c scalar or per class, weights over all classes."""

    def __init__(self, arguments: Sequence[Tensor], logits_like: Tensor, needs_arguments: bool = False) -> None:
        slower = FormRows(LOGISTIC, arguments, logits_like, needs_arguments)
        super().__init__(logits_like, slower)
        self.needs_arguments = needs_arguments
        self.alpha, self.beta, self.c = slower.arguments
        self.has_shared_c = slower.kinds[2] is ParameterKind.SCALAR
        self.centre = self.c.mean()
        self.is_concave = slower.properties.is_concave is True
        # Beyond it a gap times a slope could overflow, and 0 * inf is NaN.
        self.limit = torch.finfo(self.dtype).max / (8.0 * max(1.0, slower.properties.steepest))

    def _fast_stats(self, z: Tensor, peak: Tensor, targets: RowTargets) -> RowStats | None:
        if z.numel() == 0 or not bool(((peak > self.centre) & (peak < self.limit)).all()):
            return None
        if not bool(z.amin() > -self.limit):
            return None
        x = self._x = torch.sub(z, self.c, out=self._buffer("x", z))
        # log sigmoid(x) = min(x, 0) - log(1 + e^-|x|); the lines are those of the form's ``relative``.
        tail = self._buffer("tail", z)
        torch.log1p(torch.abs(x, out=tail).neg_().exp_(), out=tail).neg_()
        relative = torch.sub(z, peak, out=self._buffer("relative", z))
        if self.needs_arguments:
            self._gap = self._buffer("gap", z).copy_(relative).clamp_(min=torch.finfo(self.dtype).min)
            self._log_sigmoid = torch.clamp(x, max=0.0, out=self._buffer("log_sigmoid", z)).add_(tail)
            self._peak = peak
        # phi follows the lower one of its two lines where it is concave, and else the upper one.
        left = torch.mul(x, self.alpha + self.beta, out=self._buffer("f", z))
        if self.has_shared_c:
            left.sub_(self.alpha * (peak - self.c))
        else:
            left.add_(self.alpha * self.c).sub_(self.alpha * peak)
        choose = torch.minimum if self.is_concave else torch.maximum
        choose(left, relative.mul_(self.alpha), out=relative).add_(tail.mul_(self.beta))
        top = relative.amax(-1, keepdim=True)
        f = self._f = torch.softmax(relative, -1, out=self._buffer("f", z))
        normalizer = top - f.amax(-1, keepdim=True).log_()
        at_dense = None
        if targets.dense is not None:
            product = torch.mv if targets.dense.ndim == 1 else torch.linalg.vecdot
            at_dense = product(relative, targets.dense)
        return row_stats(peak, self.alpha * peak, normalizer, relative, targets, at_dense)

    def _fast_gradient(self, targets: RowTargets, coefficients: RowCoefficients, out_RV: Tensor) -> None:
        by_phi = phi_gradient(self._f, targets, coefficients, self._buffer("relative", self._f))
        complement = torch.sigmoid(self._x.neg_(), out=self._x)
        if self.needs_arguments:
            self._add_argument_gradients(by_phi, complement)
        torch.mul(by_phi, complement.mul_(self.beta).add_(self.alpha), out=out_RV)

    def _add_argument_gradients(self, by_phi: Tensor, complement: Tensor) -> None:
        """The offset of these rows is alpha times the peak, so alpha has a part in it."""
        by_alpha, by_beta, by_c = self.slower.argument_gradients()
        by_alpha += _inner(by_phi, self._gap) + (by_phi.sum(-1, keepdim=True) * self._peak).sum()
        by_beta += _inner(by_phi, self._log_sigmoid)
        if self.has_shared_c:
            by_c -= self.beta * _inner(by_phi, complement)
        else:
            product = torch.mul(by_phi, complement, out=self._buffer("relative", by_phi))
            by_c -= self.beta * product.sum(0)


def _inner(a_RV: Tensor, b_RV: Tensor) -> Tensor:
    return torch.linalg.vecdot(a_RV, b_RV).sum()
