"""Hand-made passes over a block for the logistic form, phi = alpha z + beta log sigmoid(z - c).

All intermediate results live in buffers that are made once; a pass over fresh memory would cost more in page faults
than in arithmetic. A block that a fast pass cannot serve (masked classes, rows left of c, weights over all classes
where only probabilities were computed) goes to the next slower routines. phi increases here, so that the peak of a
row, the logit at which phi is largest, is the row maximum.

Shapes: R rows of a block, V classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from sigsoftmax.backends.chunked.form_rows import FormRows, block_rows, phi_gradient, row_stats
from sigsoftmax.contract.rows import MASK, RowCoefficients, RowRoutines, RowStats, RowTargets, compute_dtype
from sigsoftmax.family.formulas import LOGISTIC
from sigsoftmax.family.parameters import ParameterKind

BLOCK_BYTES = 2 * 2**20
"""A few work buffers of this size stay in the caches of today's cores."""

SMALLEST_SIGMOID_TERM = 1e-30
"""Below it the nonlinearity of phi only touches classes whose probability is smaller still."""


class _FastRows(ABC):
    """``RowRoutines`` with work buffers, and the routines to turn to when a block does not suit."""

    def __init__(self, logits_like: Tensor, slower: RowRoutines) -> None:
        self.dtype = compute_dtype(logits_like.dtype)
        self.max_rows = block_rows(logits_like.shape[-1], logits_like.device, BLOCK_BYTES)
        self.slower = slower
        self._turned_to_slower = False
        self._buffers: dict[str, Tensor] = {}

    def _buffer(self, name: str, like_RV: Tensor) -> Tensor:
        rows, classes = like_RV.shape
        held = self._buffers.get(name)
        if held is None or held.shape[0] < rows:
            held = self._buffers[name] = torch.empty(rows, classes, dtype=self.dtype, device=like_RV.device)
        return held[:rows]

    def stats(self, logits_RV: Tensor, targets: RowTargets) -> RowStats:
        is_wide = logits_RV.dtype == self.dtype
        z = logits_RV if is_wide else self._buffer("converted", logits_RV).copy_(logits_RV)
        stats = self._fast_stats(z, z.amax(-1, keepdim=True), targets)
        self._turned_to_slower = stats is None
        return stats or self.slower.stats(logits_RV, targets)

    def gradient(
        self, logits_RV: Tensor, targets: RowTargets, stats: RowStats, coefficients: RowCoefficients, out_RV: Tensor
    ) -> None:
        if self._turned_to_slower:
            self.slower.gradient(logits_RV, targets, stats, coefficients, out_RV)
            return
        self._fast_gradient(targets, coefficients, out_RV)
        if coefficients.unused is not None:
            out_RV.masked_fill_(coefficients.unused.unsqueeze(-1), 0.0)

    @abstractmethod
    def _fast_stats(self, z: Tensor, peak: Tensor, targets: RowTargets) -> RowStats | None:
        """The statistics of a block; None if it does not suit."""

    @abstractmethod
    def _fast_gradient(self, targets: RowTargets, coefficients: RowCoefficients, out_RV: Tensor) -> None:
        """Write the gradient of the block whose statistics were computed last."""

    def argument_gradients(self) -> list[Tensor]:
        return self.slower.argument_gradients()


class _ProbabilityRows(_FastRows):
    """Rows of which only probabilities are computed: no weights over all classes and no entropy."""

    _z_y: Tensor
    """(R, 1): the logits of the targets"""

    def _fast_stats(self, z: Tensor, peak: Tensor, targets: RowTargets) -> RowStats | None:
        if targets.dense is not None or targets.entropy:
            return None
        if targets.index_R is not None:
            self._z_y = z.gather(-1, targets.index_R.unsqueeze(-1))
        found = self._probabilities(z, peak, targets.index_R is not None)
        if found is None:
            return None
        offset, normalizer, target = (None if t is None else t.squeeze(-1) for t in found)
        assert offset is not None and normalizer is not None
        best = z.argmax(-1) if targets.argmax else None
        return RowStats(peak.squeeze(-1), offset, normalizer, target, None, best, None)

    @abstractmethod
    def _probabilities(self, z: Tensor, peak: Tensor, has_index: bool) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Offset, normaliser and phi of the target, (R, 1) each; None if the block does not suit."""

    @abstractmethod
    def _by_normalizer(self, coefficients: RowCoefficients) -> tuple[Tensor, Tensor]:
        """Two factors of the normaliser's part of the gradient, (R, V) and (R, 1)."""

    @abstractmethod
    def _target_slope(self) -> Tensor:
        """The slope of phi at the target, (R, 1)."""

    def _fast_gradient(self, targets: RowTargets, coefficients: RowCoefficients, out_RV: Tensor) -> None:
        values_RV, factor_R1 = self._by_normalizer(coefficients)
        torch.mul(values_RV, factor_R1, out=out_RV)
        if targets.index_R is None:
            return
        assert coefficients.target is not None
        index_R1 = targets.index_R.unsqueeze(-1)
        at_target = values_RV.gather(-1, index_R1).mul_(factor_R1)
        slope_R1 = self._target_slope().masked_fill_(self._z_y == MASK, 1.0)
        # Both parts are added before out's dtype rounds them.
        at_target += slope_R1 * coefficients.target.unsqueeze(-1)
        out_RV.scatter_(-1, index_R1, at_target.to(out_RV.dtype))


class SoftmaxRows(_ProbabilityRows):
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


class SigsoftmaxRows(_ProbabilityRows):
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
            masked = self._z_y == MASK
            arguments = [z.new_tensor(value) for value in (1.0, 1.0, self.c)]
            relative, _ = LOGISTIC.relative(torch.where(masked, peak, self._z_y), peak, *arguments)
            target = torch.where(masked, self._z_y, relative)
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


class LogisticRows(_FastRows):
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
