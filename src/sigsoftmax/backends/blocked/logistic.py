"""Hand-made passes over a block for the logistic form, phi = alpha z + beta log sigmoid(z - c).

All intermediate results live in buffers that are made once; a pass over fresh memory would cost more in page faults
than in arithmetic. A block that a fast pass cannot serve (masked classes, rows left of the bend, weights over all
classes where only probabilities were computed) goes to the next slower routines.

Shapes: R rows of a block, V classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.form_rows import FormRows, block_rows
from sigsoftmax.contract import tokens
from sigsoftmax.contract.rows import MASK, RowCoefficients, RowRoutines, RowStats, compute_dtype
from sigsoftmax.family.formulas import LOGISTIC
from sigsoftmax.family.parameters import ParameterKind

BLOCK_BYTES = 2 * 2**20
"""A few work buffers of this size stay in the caches of today's cores."""

SMALLEST_BEND = 1e-30
"""Below it the bend of sigsoftmax only touches classes whose probability is smaller still."""


class _FastRows(ABC):
    """Work buffers, the target's logit, and the routines to turn to when a block does not suit."""

    def __init__(self, arguments: Sequence[Tensor], logits_like: Tensor, slower: RowRoutines) -> None:
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

    def _in_compute_dtype(self, logits_RV: Tensor) -> Tensor:
        if logits_RV.dtype == self.dtype:
            return logits_RV
        return self._buffer("converted", logits_RV).copy_(logits_RV)

    def stats(
        self, logits_RV: Tensor, index_R: Tensor | None, dense: Tensor | None, argmax: bool, entropy: bool
    ) -> RowStats:
        stats = self._fast_stats(logits_RV, index_R, dense, argmax, entropy)
        self._turned_to_slower = stats is None
        return stats or self.slower.stats(logits_RV, index_R, dense, argmax, entropy)

    def gradient(
        self,
        logits_RV: Tensor,
        stats: RowStats,
        coefficients: RowCoefficients,
        index_R: Tensor | None,
        dense: Tensor | None,
        out_RV: Tensor,
    ) -> None:
        if self._turned_to_slower:
            self.slower.gradient(logits_RV, stats, coefficients, index_R, dense, out_RV)
            return
        self._fast_gradient(coefficients, index_R, dense, out_RV)
        if coefficients.unused is not None:
            out_RV.masked_fill_(coefficients.unused.unsqueeze(-1), 0.0)

    @abstractmethod
    def _fast_stats(
        self, logits_RV: Tensor, index_R: Tensor | None, dense: Tensor | None, argmax: bool, entropy: bool
    ) -> RowStats | None:
        """None if this block does not suit."""

    @abstractmethod
    def _fast_gradient(
        self, coefficients: RowCoefficients, index_R: Tensor | None, dense: Tensor | None, out_RV: Tensor
    ) -> None:
        """Of the block that was measured last."""

    def argument_gradients(self) -> list[Tensor]:
        return self.slower.argument_gradients()


def _add_at_target(
    values_RV: Tensor, index_R1: Tensor, slope_R1: Tensor, coefficients: RowCoefficients, z_y_R1: Tensor, out_RV: Tensor
) -> None:
    """out at the target = its probability's part + slope * dL/ds, added before out's dtype rounds it."""
    assert coefficients.target is not None
    masked = z_y_R1 == MASK
    slope_R1 = slope_R1.masked_fill_(masked, 1.0)
    out_RV.scatter_(-1, index_R1, (values_RV + slope_R1 * coefficients.target.unsqueeze(-1)).to(out_RV.dtype))


class SoftmaxRows(_FastRows):
    """phi = alpha z."""

    def __init__(self, arguments: Sequence[Tensor], logits_like: Tensor) -> None:
        super().__init__(arguments, logits_like, FormRows(LOGISTIC, arguments, logits_like))
        self.alpha = float(arguments[0])

    def _fast_stats(
        self, logits_RV: Tensor, index_R: Tensor | None, dense: Tensor | None, argmax: bool, entropy: bool
    ) -> RowStats | None:
        if dense is not None or entropy:
            return None
        z = self._in_compute_dtype(logits_RV)
        anchor = z.amax(-1, keepdim=True)
        if anchor.numel() and bool(anchor.amin() == MASK):
            # softmax would be NaN in a row without classes, which other processes may have.
            return None
        p = self._p = self._buffer("p", z)
        if self.alpha == 1.0:
            torch.softmax(z, -1, out=p)
        else:
            # Scaled before the largest is taken off, far logits would lose digits and the largest floats overflow.
            torch.softmax(torch.sub(z, anchor, out=p).mul_(self.alpha), -1, out=p)
        target = None
        if index_R is not None:
            self._z_y = z.gather(-1, index_R.unsqueeze(-1))
            # Halved, because a gap may overflow that is a float if multiplied by a small alpha.
            target = ((0.5 * self._z_y - 0.5 * anchor) * (2.0 * self.alpha)).squeeze(-1)
        largest = anchor.squeeze(-1)
        best = z.argmax(-1) if argmax else None
        return RowStats(largest, largest * self.alpha, p.amax(-1).log_().neg_(), target, None, best, None)

    def _fast_gradient(
        self, coefficients: RowCoefficients, index_R: Tensor | None, dense: Tensor | None, out_RV: Tensor
    ) -> None:
        by_normalizer = (coefficients.normalizer * self.alpha).unsqueeze(-1)
        torch.mul(self._p, by_normalizer, out=out_RV)
        if index_R is not None:
            index_R1 = index_R.unsqueeze(-1)
            at_target = self._p.gather(-1, index_R1).mul_(by_normalizer)
            slope = torch.full_like(at_target, self.alpha)
            _add_at_target(at_target, index_R1, slope, coefficients, self._z_y, out_RV)


class SigsoftmaxRows(_FastRows):
    """phi = z + log sigmoid(z - c) for a fixed scalar c, with one exponential an element (docs/mathematics.md).

    With p = softmax(z), m the largest logit and p_m its probability, the sigmoid is p / (p + p_m e^(c - m)).
    """

    def __init__(self, arguments: Sequence[Tensor], logits_like: Tensor) -> None:
        super().__init__(arguments, logits_like, LogisticRows(arguments, logits_like))
        self.c = float(arguments[2])

    def _fast_stats(
        self, logits_RV: Tensor, index_R: Tensor | None, dense: Tensor | None, argmax: bool, entropy: bool
    ) -> RowStats | None:
        if dense is not None or entropy:
            return None
        z = self._in_compute_dtype(logits_RV)
        anchor = z.amax(-1, keepdim=True)
        height = anchor - self.c
        if height.numel() and not bool(height.amin() >= 0):
            return self._stats_left_of_bend(z, anchor, height, index_R, argmax)
        p = torch.softmax(z, -1, out=self._buffer("p", z))
        largest = p.amax(-1, keepdim=True)
        ratio = torch.add(p, torch.exp(-height).mul_(largest).clamp_(min=SMALLEST_BEND), out=self._buffer("ratio", z))
        self._scale: Tensor | None = None
        target = None
        if index_R is not None:
            self._z_y = z.gather(-1, index_R.unsqueeze(-1))
            target = (self._z_y - anchor).add_(torch.nn.functional.logsigmoid(self._z_y - self.c)).squeeze(-1)
        return self._finish(z, p, ratio, largest, anchor, target, argmax)

    def _stats_left_of_bend(
        self, z: Tensor, anchor: Tensor, height: Tensor, index_R: Tensor | None, argmax: bool
    ) -> RowStats | None:
        """Some row lies left of the bend: there the sigmoid is a p / (a p + p_m), a = e^(m - c)."""
        if bool((anchor == MASK).any()):
            return None
        p = torch.softmax(z, -1, out=self._buffer("p", z))
        largest = p.amax(-1, keepdim=True)
        decay = torch.exp(-height.abs())
        below = height < 0
        self._scale = torch.where(below, decay, torch.ones_like(decay))
        bend = torch.where(below, largest, (decay * largest).clamp_(min=SMALLEST_BEND))
        ratio = torch.mul(p, self._scale, out=self._buffer("ratio", z)).add_(bend)
        target = None
        if index_R is not None:
            z_y = self._z_y = z.gather(-1, index_R.unsqueeze(-1))
            arguments = [a.new_tensor(v, dtype=self.dtype) for a, v in zip((z,) * 3, (1.0, 1.0, self.c), strict=True)]
            masked = z_y == MASK
            relative, _ = LOGISTIC.relative(torch.where(masked, anchor, z_y), anchor, *arguments)
            target = torch.where(masked, z_y, relative).squeeze(-1)
        return self._finish(z, p, ratio, largest, anchor, target, argmax)

    def _finish(
        self,
        z: Tensor,
        p: Tensor,
        denominator: Tensor,
        largest: Tensor,
        anchor: Tensor,
        target: Tensor | None,
        argmax: bool,
    ) -> RowStats:
        self._ratio = torch.div(p, denominator, out=denominator)
        self._weights = p.mul_(self._ratio)
        self._total = p.sum(-1, keepdim=True)
        offset = anchor if self._scale is None else anchor + (anchor - self.c).clamp_(max=0.0)
        normalizer = (self._total / largest).log_()
        best = z.argmax(-1) if argmax else None
        return RowStats(anchor.squeeze(-1), offset.squeeze(-1), normalizer.squeeze(-1), target, None, best, None)

    def _fast_gradient(
        self, coefficients: RowCoefficients, index_R: Tensor | None, dense: Tensor | None, out_RV: Tensor
    ) -> None:
        sigmoid = self._ratio if self._scale is None else self._ratio.mul_(self._scale)
        weighted = self._weights.mul_(sigmoid.neg_().add_(2.0))
        by_normalizer = coefficients.normalizer.unsqueeze(-1) / self._total
        torch.mul(weighted, by_normalizer, out=out_RV)
        if index_R is not None:
            index_R1 = index_R.unsqueeze(-1)
            at_target = weighted.gather(-1, index_R1).mul_(by_normalizer)
            slope = torch.sigmoid(self._z_y - self.c).neg_().add_(2.0)
            _add_at_target(at_target, index_R1, slope, coefficients, self._z_y, out_RV)


class LogisticRows(_FastRows):
    """The whole form: alpha, beta and c fixed or learned, c scalar or per class, weights over all classes."""

    def __init__(self, arguments: Sequence[Tensor], logits_like: Tensor, needs_arguments: bool = False) -> None:
        slower = FormRows(LOGISTIC, arguments, logits_like, needs_arguments)
        super().__init__(arguments, logits_like, slower)
        self.needs_arguments = needs_arguments
        self.alpha, self.beta, self.c = slower.arguments
        self.has_shared_c = slower.kinds[2] is ParameterKind.SCALAR
        self.centre = self.c.mean()
        self.is_concave = slower.properties.is_concave is True
        # Beyond it a gap times a slope could overflow, and 0 * inf is NaN.
        self.limit = torch.finfo(self.dtype).max / (8.0 * max(1.0, slower.properties.steepest))

    def _fast_stats(
        self, logits_RV: Tensor, index_R: Tensor | None, dense: Tensor | None, argmax: bool, entropy: bool
    ) -> RowStats | None:
        z = self._in_compute_dtype(logits_RV)
        anchor = z.amax(-1, keepdim=True)
        if z.numel() == 0 or not bool(((anchor > self.centre) & (anchor < self.limit)).all()):
            return None
        if not bool(z.amin() > -self.limit):
            return None
        x = self._x = torch.sub(z, self.c, out=self._buffer("x", z))
        # log sigmoid(x) = min(x, 0) - log(1 + e^-|x|); the lines are those of the form's ``relative``.
        tail = self._buffer("tail", z)
        torch.log1p(torch.abs(x, out=tail).neg_().exp_(), out=tail).neg_()
        relative = torch.sub(z, anchor, out=self._buffer("relative", z))
        if self.needs_arguments:
            self._gap = self._buffer("gap", z).copy_(relative).clamp_(min=torch.finfo(self.dtype).min)
            self._log_sigmoid = torch.clamp(x, max=0.0, out=self._buffer("log_sigmoid", z)).add_(tail)
            self._anchor = anchor
        # phi follows the lower one of its two lines where it is concave, and else the upper one.
        left = torch.mul(x, self.alpha + self.beta, out=self._buffer("f", z))
        if self.has_shared_c:
            left.sub_(self.alpha * (anchor - self.c))
        else:
            left.add_(self.alpha * self.c).sub_(self.alpha * anchor)
        choose = torch.minimum if self.is_concave else torch.maximum
        choose(left, relative.mul_(self.alpha), out=relative).add_(tail.mul_(self.beta))
        top = relative.amax(-1, keepdim=True)
        f = self._f = torch.softmax(relative, -1, out=self._buffer("f", z))
        normalizer = top - f.amax(-1, keepdim=True).log_()
        return RowStats(
            anchor.squeeze(-1),
            (self.alpha * anchor).squeeze(-1),
            normalizer.squeeze(-1),
            None if index_R is None else relative.gather(-1, index_R.unsqueeze(-1)).squeeze(-1),
            None if dense is None else self._dense_sum(relative, dense),
            relative.argmax(-1) if argmax else None,
            tokens.entropy(relative - normalizer) if entropy else None,
        )

    def _dense_sum(self, relative: Tensor, dense: Tensor) -> Tensor:
        return torch.mv(relative, dense) if dense.ndim == 1 else torch.linalg.vecdot(relative, dense)

    def _fast_gradient(
        self, coefficients: RowCoefficients, index_R: Tensor | None, dense: Tensor | None, out_RV: Tensor
    ) -> None:
        by_phi = self._f.mul_(coefficients.normalizer.unsqueeze(-1))
        if dense is not None and coefficients.dense is not None:
            by_dense = torch.mul(dense, coefficients.dense.unsqueeze(-1), out=self._buffer("relative", by_phi))
            by_phi.add_(by_dense)
        if index_R is not None and coefficients.target is not None:
            by_phi.scatter_add_(-1, index_R.unsqueeze(-1), coefficients.target.unsqueeze(-1))
        if coefficients.unused is not None:
            by_phi.masked_fill_(coefficients.unused.unsqueeze(-1), 0.0)
        complement = torch.sigmoid(self._x.neg_(), out=self._x)
        if self.needs_arguments:
            self._add_argument_gradients(by_phi, complement)
        torch.mul(by_phi, complement.mul_(self.beta).add_(self.alpha), out=out_RV)

    def _add_argument_gradients(self, by_phi: Tensor, complement: Tensor) -> None:
        """The offset of these rows is alpha times the anchor, so alpha has a part in it."""
        by_alpha, by_beta, by_c = self.slower.argument_gradients()
        by_alpha += _inner(by_phi, self._gap) + (by_phi.sum(-1, keepdim=True) * self._anchor).sum()
        by_beta += _inner(by_phi, self._log_sigmoid)
        if self.has_shared_c:
            by_c -= self.beta * _inner(by_phi, complement)
        else:
            product = torch.mul(by_phi, complement, out=self._buffer("relative", by_phi))
            by_c -= self.beta * product.sum(0)


def _inner(a_RV: Tensor, b_RV: Tensor) -> Tensor:
    return torch.linalg.vecdot(a_RV, b_RV).sum()
