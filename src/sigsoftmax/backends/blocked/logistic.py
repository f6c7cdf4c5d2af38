"""Hand-made passes over a block for the logistic form, phi = alpha z + beta log sigmoid(z - c).

Shapes: R rows of a block, V classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from sigsoftmax.backends.blocked.fast_rows import MOST_PHI, FastRows, ProbabilityRows, exponentials
from sigsoftmax.backends.chunked.form_rows import FormRows, phi_gradient, row_stats
from sigsoftmax.contract.rows import MASK, Logarithms, RowCoefficients, RowStats, RowTargets
from sigsoftmax.contract.tokens import scaled
from sigsoftmax.family.formulas import LOGISTIC
from sigsoftmax.family.parameters import ParameterKind

SMALLEST_SIGMOID_TERM = 1e-30
"""Below it the nonlinearity of phi only touches classes whose probability is smaller still."""

LOWEST_SIGMOID = -32.0
"""Left of it, as seen from c, sigmoids and their sums come near the smallest normal float32."""

FARTHEST_SHIFT = 20.0
"""Up to this distance of a class's c from their mean, sigmoids relative to the mean stay within float32."""

FARTHEST_LOGARITHM = 64.0
"""Up to this distance from c the exponential within a sigmoid is a float32."""

LARGEST_POWER = 4.0
"""The logarithm of a sigmoid near 1 is off by its rounding, times the power."""

NONE_WANTED = (False, False, False)
"""for alpha, beta and c: no gradient is wanted"""


def logistic_target(z_y: Tensor, peak: Tensor, values: Sequence[float]) -> Tensor:
    """phi of the targets less the offset of the peak, in units, (R, 1), without cancellation; a mask keeps its -inf."""
    masked = z_y == MASK
    arguments = [z_y.new_tensor(value) for value in values]
    return torch.where(masked, z_y, LOGISTIC.scaled(torch.where(masked, peak, z_y), peak, *arguments).value)


def target_right_of_c(z_y: Tensor, peak: Tensor, beta: float, c: Tensor) -> Tensor:
    """phi = z + beta log sigmoid(z - c) of targets that are no masks, less a peak right of c, in fewer operations."""
    x = z_y - c
    lines = (torch.maximum(z_y, c) - peak).add_(x.clamp(max=0.0), alpha=1.0 + beta)
    return lines.add_(F.logsigmoid(x.abs_()), alpha=beta)


class LogisticProbabilities(ProbabilityRows):
    """Probabilities of the logistic form; ``wanted`` says of which arguments gradients are wanted.

    Such a gradient is the mean over f of phi's derivative, less that of the target, summed over rows. The two nearly
    cancel in every row, so they are collected for all rows, and then added in float64.
    """

    def __init__(self, arguments: Sequence[Tensor], logits_like: Tensor, wanted: Sequence[bool] = NONE_WANTED) -> None:
        slower = LogisticRows(arguments, logits_like, wanted)
        super().__init__(logits_like, slower)
        self.wanted = wanted
        self.alpha, self.beta = (float(a.detach()) for a in arguments[:2])
        self.c, self.has_shared_c, self.centre = slower.c, slower.has_shared_c, float(slower.centre)
        self.differs_by_class = not self.has_shared_c
        self.is_narrow = self.has_shared_c or bool(((self.c - self.centre).abs() <= FARTHEST_SHIFT).all())
        self.spread_V = None if self.has_shared_c else torch.exp(self.c - self.centre)
        self._means: dict[int, Tensor] = {}
        """the means over f of phi's derivatives by scalar arguments, of one block, (R, 1)"""
        self._collected: list[tuple[Tensor, ...]] = []

    def _c_of(self, index: Tensor) -> Tensor:
        """c of these classes."""
        return self.c if self.has_shared_c else self.c[index]

    def _complements(self) -> tuple[Tensor, Tensor]:
        """Factors of f times 1 - sigmoid(z - c), (R, V) and (R, 1)."""
        raise NotImplementedError

    def _fast_stats(self, z: Tensor, peak: Tensor, targets: RowTargets) -> RowStats | None:
        stats = super()._fast_stats(z, peak, targets)
        if stats is not None and any(self.wanted) and not math.isfinite(float(self._total.sum())):
            # No NaN could be taken out of a sum over all rows.
            return None
        return stats

    def _fast_gradient(self, targets: RowTargets, coefficients: RowCoefficients, out_RV: Tensor) -> None:
        super()._fast_gradient(targets, coefficients, out_RV)
        if not any(self.wanted):
            return
        by_normalizer, by_target = coefficients.normalizer, coefficients.target
        assert self._index is not None and by_target is not None
        if self.wanted[2]:
            complements_RV, factor_R1 = self._complements()
            if self.has_shared_c:
                self._means[2] = complements_RV.sum(-1, keepdim=True).mul_(factor_R1)
            else:
                by_c = torch.mv(complements_RV.t(), scaled(factor_R1.squeeze(-1), by_normalizer))
                self.slower.argument_gradients()[2].sub_(by_c, alpha=self.beta)
        coefficients_R1 = by_normalizer.unsqueeze(-1), by_target.unsqueeze(-1)
        self._collected.append((self._index, *coefficients_R1, self._z_y, *self._means.values()))

    def argument_gradients(self) -> list[Tensor]:
        gradients = super().argument_gradients()
        if self._collected:
            index, *columns = map(torch.cat, zip(*self._collected, strict=True))
            self._collected.clear()
            by_normalizer, by_target, z_y, *means = (column.double() for column in columns)
            x_y, masked = z_y - self._c_of(index), z_y == MASK
            at_target = (z_y, F.logsigmoid(x_y), torch.sigmoid(-x_y))
            by_targets = [scaled(value.masked_fill(masked, 0.0), by_target) for value in at_target]
            for position, mean in zip(self._means, means, strict=True):
                total = (scaled(mean, by_normalizer) + by_targets[position]).sum()
                gradients[position].add_(total, alpha=-self.beta if position == 2 else 1.0)
            if self.wanted[2] and not self.has_shared_c:
                by_c = by_targets[2].squeeze(-1).to(self.dtype)
                gradients[2].index_add_(0, index.squeeze(-1), by_c, alpha=-self.beta)
        return gradients


class SoftmaxRows(LogisticProbabilities):
    """phi = alpha z."""

    def _probabilities(self, z: Tensor, peak: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
        if peak.numel() and bool(peak.amin() == MASK):
            # The difference would be NaN in a row without classes, which other processes may have.
            return None
        # Scaled before the largest is taken off, far logits would lose digits and the largest floats overflow.
        gap = torch.sub(z, peak, out=self._buffer("gap", z))
        p = self._buffer("p", z) if self.wanted[0] else gap
        self._p = exponentials(gap if self.alpha == 1.0 else torch.mul(gap, self.alpha, out=p), out=p)
        self._total = self._p.sum(-1, keepdim=True)
        if self.wanted[0]:
            mean_gap = gap.mul_(self._p).sum(-1, keepdim=True).div_(self._total)
            if not math.isfinite(float(mean_gap.sum())):
                # The gap of a mask is infinite.
                return None
            self._means[0] = mean_gap.double().add_(peak)
        # Halved, because the gap of extreme floats overflows.
        target = None if self._index is None else (0.5 * self._z_y - 0.5 * peak) * (2.0 * self.alpha / self.unit)
        return peak * self.alpha, self._total.log(), target

    def _slopes(self) -> tuple[Tensor, float]:
        return self._p, self.alpha

    def _target_slope(self) -> Tensor:
        return torch.full_like(self._z_y, self.alpha)


class SigsoftmaxRows(LogisticProbabilities):
    """phi = z + log sigmoid(z - c), c shared or per class, with one exponential per element (docs/mathematics.md).

    With m the peak of the row and u = e^(z - m), the sigmoid is u / (u + e^(c - m)), and for a row left of c, where
    m < c, it is a u / (a u + 1) with a = e^(m - c). Where c differs by class, m is compared with the mean of c, and the
    term beside u is multiplied by e^(c - mean).
    """

    def __init__(self, arguments: Sequence[Tensor], logits_like: Tensor, wanted: Sequence[bool] = NONE_WANTED) -> None:
        super().__init__(arguments, logits_like, wanted)
        self.smallest = SMALLEST_SIGMOID_TERM * (1.0 if self.has_shared_c else math.exp(FARTHEST_SHIFT))

    def _probabilities(self, z: Tensor, peak: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
        # In float64, since the rounding of such a difference can be the same for every row.
        height = peak.double() - self.centre
        is_left = bool(height.numel()) and not float(height.amin()) >= 0.0
        if not self.is_narrow or (is_left and bool((peak == MASK).any())):
            return None
        u = exponentials(torch.sub(z, peak, out=self._buffer("u", z)))
        ratio, offset, scaled_u = self._buffer("ratio", z), peak, u
        self._term, height = torch.exp(-height.abs()).to(self.dtype), height.to(self.dtype)
        self._scale: Tensor | None = None
        if is_left:
            left, one = height < 0, torch.ones_like(height)
            self._scale, self._term = torch.where(left, self._term, one), torch.where(left, one, self._term)
            offset, scaled_u = peak + height.clamp(max=0.0), torch.mul(u, self._scale, out=ratio)
        term = self._term.clamp(min=self.smallest)
        if self.spread_V is None:
            torch.add(scaled_u, term, out=ratio)
        else:
            torch.addcmul(scaled_u, term, self.spread_V, out=ratio)
        self._ratio = torch.div(u, ratio, out=ratio)
        self._weights = u.mul_(ratio)
        self._total = u.sum(-1, keepdim=True)
        if self.wanted[2]:
            self._squares = torch.mul(ratio, ratio, out=self._buffer("squares", z))
        target = None
        if self._index is not None:
            c_y = self._c_of(self._index)
            # A quarter, the unit being 4: the gap of extreme floats overflows.
            target, x = 0.25 * self._z_y - 0.25 * peak, self._z_y - c_y
            if is_left:
                # The lines of phi less the offset; log sigmoid(x) is min(x, 0) plus a function of |x|.
                line = torch.where(x < 0, target - 0.25 * (c_y - self.centre), -0.25 * height)
                target, x = target + torch.where(height < 0, line, 0.25 * x.clamp(max=0.0)), x.abs_()
            target.add_(F.logsigmoid(x), alpha=0.25)
        return offset, self._total.log(), target

    def _slopes(self) -> tuple[Tensor, float]:
        sigmoid = self._ratio if self._scale is None else self._ratio.mul_(self._scale)
        return self._weights.addcmul_(self._weights, sigmoid, value=-0.5), 2.0

    def _target_slope(self) -> Tensor:
        assert self._index is not None
        return torch.sigmoid(self._z_y - self._c_of(self._index)).neg_().add_(2.0)

    def _complements(self) -> tuple[Tensor, Tensor]:
        # The weights are u times the ratio, and the complement is the term times the ratio over u.
        squares = self._squares if self.spread_V is None else self._squares.mul_(self.spread_V)
        return squares, self._term / self._total


class SigmoidRows(LogisticProbabilities):
    """phi = log sigmoid(z - c) for a fixed scalar c: f is a sigmoid over the sum of them."""

    def _probabilities(self, z: Tensor, peak: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
        height = peak - self.c
        lowest = float(height.amin()) if height.numel() else -torch.inf
        if not lowest >= LOWEST_SIGMOID:
            return None
        self._x = z if float(self.c) == 0.0 else torch.sub(z, self.c, out=self._buffer("x", z))
        self._sigmoid = torch.sigmoid(self._x, out=self._buffer("sigmoid", z))
        self._total = self._sigmoid.sum(-1, keepdim=True)
        # The slope is 1 left of c, where the offset is the peak's distance from it.
        offset = height.clamp_(max=0.0)
        target = None
        if self._index is not None and lowest < 0.0:
            target = logistic_target(self._z_y, peak, (self.alpha, self.beta, float(self.c)))
        elif self._index is not None:
            target = F.logsigmoid(self._z_y - self.c) / self.unit
        return offset, (self._total * torch.exp(-offset)).log_(), target

    def _slopes(self) -> tuple[Tensor, float]:
        # 1 - sigmoid would have no digits far right of c.
        complement = self._buffer("complement", self._x)
        torch.sigmoid(torch.neg(self._x, out=complement), out=complement)
        return self._sigmoid.mul_(complement), 1.0

    def _target_slope(self) -> Tensor:
        return torch.sigmoid(self.c - self._z_y)


class ShiftedExpRows(LogisticProbabilities):
    """phi = z - log sigmoid(z - c) = log(e^z + e^c) for a fixed scalar c, which is gss with k = 0.

    f times the slope of phi is e^z over the sum. It costs no more than softmax.
    """

    def _probabilities(self, z: Tensor, peak: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
        # A mask has no part in the sum that V counts.
        if z.numel() == 0 or not bool((peak >= self.c).all()) or not bool(z.amin() > MASK):
            return None
        self._p = exponentials(torch.sub(z, peak, out=self._buffer("p", z)))
        self._total = self._p.sum(-1, keepdim=True).add_(torch.exp(self.c - peak), alpha=z.shape[-1])
        target = None if self._index is None else target_right_of_c(self._z_y, peak, self.beta, self.c) / self.unit
        return peak, self._total.log(), target

    def _slopes(self) -> tuple[Tensor, float]:
        return self._p, 1.0

    def _target_slope(self) -> Tensor:
        return torch.sigmoid(self._z_y - self.c)


class PowerRows(LogisticProbabilities):
    """g = e^z s^beta with s = sigmoid(z - c), c shared or per class, with two exponentials and a logarithm per element.

    With v = e^(c - z), e^(z - c) is 1 / v, s is 1 / (1 + v), its logarithm is -log(1 + v), and its complement is s v.
    Where c differs by class, g is relative to the mean of c. Left of c the logarithms of both factors of g have
    different signs where beta < 0, and digits only while both are small.
    """

    def __init__(self, arguments: Sequence[Tensor], logits_like: Tensor, wanted: Sequence[bool] = NONE_WANTED) -> None:
        super().__init__(arguments, logits_like, wanted)
        farthest = MOST_PHI if self.beta < 0.0 else FARTHEST_LOGARITHM
        self.lowest = float(self.c.amax()) - farthest if self.c.numel() else 0.0

    def _probabilities(self, z: Tensor, peak: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
        if z.numel() == 0 or not self.is_narrow or not float(z.amin()) >= self.lowest:
            return None
        height = peak - self.centre
        if not 0.0 <= float(height.amin()) <= float(height.amax()) <= MOST_PHI:
            return None
        v = self._v = exponentials(torch.sub(self.c, z, out=self._buffer("v", z)))
        minus_log = torch.log1p(v, out=self._buffer("minus_log", z))
        self._weights = exponentials(torch.mul(minus_log, -self.beta, out=self._buffer("weights", z))).div_(v)
        if self.spread_V is not None:
            self._weights.mul_(self.spread_V)
        self._total = self._weights.sum(-1, keepdim=True)
        if self.wanted[1]:
            self._means[1] = minus_log.mul_(self._weights).sum(-1, keepdim=True).div_(self._total).neg_()
        target = None
        if self._index is not None:
            target = target_right_of_c(self._z_y, peak, self.beta, self._c_of(self._index)) / self.unit
        return peak, (self._total * torch.exp(-height)).log_(), target

    def _slopes(self) -> tuple[Tensor, float]:
        w, v, learns_c = self._weights, self._v, self.wanted[2]
        by_sigmoid = torch.add(v, 1.0, out=self._buffer("by_sigmoid", v) if learns_c else v)
        torch.div(w, by_sigmoid, out=by_sigmoid)
        if learns_c:
            v.mul_(by_sigmoid)
        # w (1 + beta (1 - s)) without cancellation: between w s, its limit for beta = -1, and w.
        return torch.lerp(w, by_sigmoid, -self.beta, out=w), 1.0

    def _target_slope(self) -> Tensor:
        assert self._index is not None
        sigmoid = torch.sigmoid(self._z_y - self._c_of(self._index))
        return sigmoid.mul_(-self.beta).add_(1.0 + self.beta)

    def _complements(self) -> tuple[Tensor, Tensor]:
        return self._v, self._total.reciprocal()


class LogisticRows(FastRows):
    """The whole form: alpha, beta and c fixed or learned, c scalar or per class, weights over all classes."""

    def __init__(self, arguments: Sequence[Tensor], logits_like: Tensor, wanted: Sequence[bool] = NONE_WANTED) -> None:
        slower = FormRows(LOGISTIC, arguments, logits_like, any(wanted))
        super().__init__(logits_like, slower)
        self.wanted = wanted
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
        torch.log1p(exponentials(torch.abs(x, out=tail).neg_()), out=tail).neg_()
        relative = torch.sub(z, peak, out=self._buffer("relative", z))
        if self.wanted[0]:
            self._gap = torch.clamp(relative, min=torch.finfo(self.dtype).min, out=self._buffer("gap", z))
            self._peak = peak
        if self.wanted[1]:
            self._log_sigmoid = torch.clamp(x, max=0.0, out=self._buffer("log_sigmoid", z)).add_(tail)
        # phi follows the lower one of its two lines where it is concave, and else the upper one.
        left = torch.mul(x, self.alpha + self.beta, out=self._buffer("f", z))
        if self.has_shared_c:
            left.sub_(self.alpha * (peak - self.c))
        else:
            left.add_(self.alpha * self.c).sub_(self.alpha * peak)
        choose = torch.minimum if self.is_concave else torch.maximum
        choose(left, relative.mul_(self.alpha), out=relative).add_(tail.mul_(self.beta))
        top = relative.amax(-1, keepdim=True)
        self._f = exponentials(torch.sub(relative, top, out=self._buffer("f", z)))
        self._total = self._f.sum(-1, keepdim=True)
        at_dense = None
        if targets.dense is not None:
            product = torch.mv if targets.dense.ndim == 1 else torch.linalg.vecdot
            at_dense = product(relative, targets.dense)
        normalizer = top + self._total.log()
        stats = row_stats(peak, self.alpha * peak, normalizer, Logarithms(relative), targets, at_dense)
        target, dense = (None if value is None else value / self.unit for value in (stats.target, stats.dense))
        return stats._replace(target=target, dense=dense)

    def _fast_gradient(self, targets: RowTargets, coefficients: RowCoefficients, out_RV: Tensor) -> None:
        coefficients = coefficients._replace(normalizer=coefficients.normalizer / self._total.squeeze(-1))
        by_phi = phi_gradient(self._f, targets, coefficients, self._buffer("relative", self._f))
        complement = torch.sigmoid(self._x.neg_(), out=self._x)
        self._add_argument_gradients(by_phi, complement)
        torch.mul(by_phi, complement.mul_(self.beta).add_(self.alpha), out=out_RV)

    def _add_argument_gradients(self, by_phi: Tensor, complement: Tensor) -> None:
        """The offset of these rows is alpha times the peak, so alpha has a part in it."""
        by_alpha, by_beta, by_c = self.slower.argument_gradients()
        if self.wanted[0]:
            by_alpha += _inner(by_phi, self._gap) + (by_phi.sum(-1, keepdim=True) * self._peak).sum()
        if self.wanted[1]:
            by_beta += _inner(by_phi, self._log_sigmoid)
        if not self.wanted[2]:
            return
        if self.has_shared_c:
            by_c -= self.beta * _inner(by_phi, complement)
        else:
            product = torch.mul(by_phi, complement, out=self._buffer("relative", by_phi))
            by_c -= self.beta * product.sum(0)


def _inner(a_RV: Tensor, b_RV: Tensor) -> Tensor:
    return torch.linalg.vecdot(a_RV, b_RV).sum()
