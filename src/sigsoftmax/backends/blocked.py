"""Rows in cache-sized blocks: the speed of a fused kernel on a CPU, without a compiler.

A block of rows stays in the cache while a dozen torch operations pass over it, so the logits come from memory once
and the gradient goes there once. For softmax and sigsoftmax the passes need one exponential an element; every other
member runs the reference formulas on the block. The same code runs on any device.

Shapes: R rows of a block, V classes, K components.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax.backends import reference
from sigsoftmax.backends.interface import RowCoefficients, RowStats
from sigsoftmax.family import LOGISTIC, Form

BLOCK_BYTES = 2 * 2**20
"""A work buffer of this size, three times over, stays in the caches of today's cores."""

SMALLEST_BEND = 1e-30
"""Below it the bend of sigsoftmax only touches classes whose probability is smaller still."""


def _constant(argument: Tensor) -> float | None:
    """The value of a fixed scalar argument; None for one that is learned per class or lives on a GPU."""
    return float(argument) if argument.ndim == 0 and argument.device.type == "cpu" else None


def block_rows(num_classes: int, device: torch.device) -> int | None:
    return max(1, BLOCK_BYTES // (4 * num_classes)) if device.type == "cpu" else None


def routines(
    form: Form, arguments: Sequence[Tensor], logits_like: Tensor, needs_arguments: bool
) -> SoftmaxRows | SigsoftmaxRows | FormRows:
    """The fastest routines for a form. ``logits_like`` tells dtype, device and number of classes."""
    if form is LOGISTIC and not needs_arguments:
        alpha, beta, c = (_constant(a) for a in arguments)
        if beta == 0.0 and alpha is not None:
            return SoftmaxRows(alpha, form, arguments, logits_like)
        if alpha == beta == 1.0 and c is not None:
            return SigsoftmaxRows(c, form, arguments, logits_like)
    return FormRows(form, arguments, logits_like, needs_arguments)


class FormRows:
    """Any form, by the reference formulas."""

    def __init__(
        self, form: Form, arguments: Sequence[Tensor], logits_like: Tensor, needs_arguments: bool = False
    ) -> None:
        self.form = form
        self.dtype = reference.compute_dtype(logits_like.dtype)
        self.arguments = [a.detach().to(logits_like.device, self.dtype) for a in arguments]
        self.needs_arguments = needs_arguments
        self.max_rows = block_rows(logits_like.shape[-1], logits_like.device)
        self._argument_sums = [torch.zeros_like(a) for a in self.arguments]
        self._rows: reference.Rows | None = None

    def stats(
        self, logits_RV: Tensor, index_R: Tensor | None, dense: Tensor | None, argmax: bool, entropy: bool
    ) -> RowStats:
        rows = self._rows = reference.rows(logits_RV, self.form, self.arguments)
        relative = rows.relative
        return RowStats(
            rows.offset.squeeze(-1),
            rows.normalizer.squeeze(-1),
            None if index_R is None else relative.gather(-1, index_R.unsqueeze(-1)).squeeze(-1),
            None if dense is None else (relative * dense).sum(-1),
            relative.argmax(-1) if argmax else None,
            reference.entropy(rows.log_probs) if entropy else None,
        )

    def gradient(
        self,
        logits_RV: Tensor,
        stats: RowStats,
        coefficients: RowCoefficients,
        index_R: Tensor | None,
        dense: Tensor | None,
        out_RV: Tensor,
    ) -> None:
        assert self._rows is not None, "stats comes before gradient"
        by_phi_RV = self._rows.log_probs.exp_().mul_(coefficients.normalizer.unsqueeze(-1))
        if dense is not None and coefficients.dense is not None:
            by_phi_RV.add_(coefficients.dense.unsqueeze(-1) * dense)
        if index_R is not None and coefficients.target is not None:
            by_phi_RV.scatter_add_(-1, index_R.unsqueeze(-1), coefficients.target.unsqueeze(-1))
        self.backpropagate(logits_RV, by_phi_RV, out_RV)
        clear_unused_rows(coefficients, out_RV)

    def backpropagate(self, logits_RV: Tensor, by_phi_RV: Tensor, out_RV: Tensor) -> None:
        """From dL/dphi of every element to dL/dz and the arguments; a mask has slope 1 and no parameters."""
        z = logits_RV.to(self.dtype)
        masked = z == reference.MASK
        anchor = z.amax(-1, keepdim=True)
        anchor = torch.where(anchor == reference.MASK, torch.zeros_like(anchor), anchor)
        z = torch.where(masked, anchor, z)
        slope = self.form.slope(z, *self.arguments)
        if self.needs_arguments:
            by_phi_of_kept = by_phi_RV.masked_fill(masked, 0.0)
            row_sums = by_phi_of_kept.sum(-1, keepdim=True)
            relative, offset = self.form.argument_slopes(z, anchor, *self.arguments)
            for total, by_relative, by_offset in zip(self._argument_sums, relative, offset, strict=True):
                if total.ndim == 0:
                    total += (by_phi_of_kept * by_relative).sum() + (row_sums * by_offset).sum()
                else:
                    # An argument per class is a shift, or the user's: the offset does not move with it.
                    total += (by_phi_of_kept * by_relative).sum(0)
        torch.mul(by_phi_RV, torch.where(masked, torch.ones_like(slope), slope), out=by_phi_RV)
        out_RV.copy_(by_phi_RV)

    def argument_gradients(self) -> list[Tensor]:
        return self._argument_sums


class _FastRows:
    """What softmax and sigsoftmax share: work buffers, and the reference for whatever needs phi of every class."""

    def __init__(self, form: Form, arguments: Sequence[Tensor], logits_like: Tensor) -> None:
        self.dense_rows = FormRows(form, arguments, logits_like)
        self.form = form
        self.arguments = self.dense_rows.arguments
        self.dtype = self.dense_rows.dtype
        self.max_rows = self.dense_rows.max_rows
        self._buffers: dict[str, Tensor] = {}
        self._ran_dense = False

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

    def _at_target(self, z_RV: Tensor, anchor_R1: Tensor, index_R: Tensor | None) -> Tensor | None:
        """phi at the target relative to the offset, from the logit itself; a masked target is -inf."""
        if index_R is None:
            return None
        self._z_y = z_y = z_RV.gather(-1, index_R.unsqueeze(-1))
        relative, _ = self.form.relative(torch.where(z_y == reference.MASK, anchor_R1, z_y), anchor_R1, *self.arguments)
        return torch.where(z_y == reference.MASK, z_y, relative).squeeze(-1)

    def _add_target(self, coefficients: RowCoefficients, index_R: Tensor | None, out_RV: Tensor) -> None:
        if index_R is not None and coefficients.target is not None:
            masked = self._z_y == reference.MASK
            slope = self.form.slope(torch.where(masked, torch.zeros_like(self._z_y), self._z_y), *self.arguments)
            slope = torch.where(masked, torch.ones_like(slope), slope)
            update = slope * coefficients.target.unsqueeze(-1)
            # Added in the arithmetic's dtype: out may be bfloat16, and f - 1 must be rounded once.
            index_R1 = index_R.unsqueeze(-1)
            out_RV.scatter_(-1, index_R1, (self._f_y + update).to(out_RV.dtype))
        clear_unused_rows(coefficients, out_RV)

    def argument_gradients(self) -> list[Tensor]:
        return []


class SoftmaxRows(_FastRows):
    """phi = alpha z."""

    def __init__(self, alpha: float, form: Form, arguments: Sequence[Tensor], logits_like: Tensor) -> None:
        super().__init__(form, arguments, logits_like)
        self.alpha = alpha

    def stats(
        self, logits_RV: Tensor, index_R: Tensor | None, dense: Tensor | None, argmax: bool, entropy: bool
    ) -> RowStats:
        self._ran_dense = dense is not None or entropy
        if self._ran_dense:
            return self.dense_rows.stats(logits_RV, index_R, dense, argmax, entropy)
        z = self._in_compute_dtype(logits_RV)
        anchor = z.amax(-1, keepdim=True)
        p = self._p = self._buffer("p", z)
        torch.softmax(z if self.alpha == 1.0 else torch.mul(z, self.alpha, out=p), -1, out=p)
        largest = p.amax(-1)
        target = self._at_target(z, anchor, index_R)
        return RowStats(
            self.alpha * anchor.squeeze(-1), -largest.log(), target, None, z.argmax(-1) if argmax else None, None
        )

    def gradient(
        self,
        logits_RV: Tensor,
        stats: RowStats,
        coefficients: RowCoefficients,
        index_R: Tensor | None,
        dense: Tensor | None,
        out_RV: Tensor,
    ) -> None:
        if self._ran_dense:
            return self.dense_rows.gradient(logits_RV, stats, coefficients, index_R, dense, out_RV)
        by_normalizer = (self.alpha * coefficients.normalizer).unsqueeze(-1)
        if index_R is not None:
            self._f_y = self._p.gather(-1, index_R.unsqueeze(-1)) * by_normalizer
        torch.mul(self._p, by_normalizer, out=out_RV)
        self._add_target(coefficients, index_R, out_RV)


class SigsoftmaxRows(_FastRows):
    """phi = z + log sigmoid(z - c) for a fixed scalar c, with one exponential an element (docs/mathematics.md).

    With p = softmax(z), m the largest logit and p_m its probability, the sigmoid is p / (p + p_m e^(c - m)).
    """

    def __init__(self, c: float, form: Form, arguments: Sequence[Tensor], logits_like: Tensor) -> None:
        super().__init__(form, arguments, logits_like)
        self.c = c

    def stats(
        self, logits_RV: Tensor, index_R: Tensor | None, dense: Tensor | None, argmax: bool, entropy: bool
    ) -> RowStats:
        self._ran_dense = dense is not None or entropy
        if self._ran_dense:
            return self.dense_rows.stats(logits_RV, index_R, dense, argmax, entropy)
        z = self._in_compute_dtype(logits_RV)
        anchor = z.amax(-1, keepdim=True)
        p = torch.softmax(z, -1, out=self._buffer("p", z))
        largest = p.amax(-1, keepdim=True)
        height = anchor - self.c
        decay = torch.exp(-height.abs())
        below = height < 0
        ratio = self._buffer("ratio", z)
        if bool(below.any()):
            # Where the whole row lies left of the bend the sigmoid is a p / (a p + p_m), a = e^(m - c).
            self._scale: Tensor | None = torch.where(below, decay, torch.ones_like(decay))
            torch.mul(p, self._scale, out=ratio).add_(
                torch.where(below, largest, (decay * largest).clamp(min=SMALLEST_BEND))
            )
        else:
            self._scale = None
            torch.add(p, (decay * largest).clamp_(min=SMALLEST_BEND), out=ratio)
        torch.div(p, ratio, out=ratio)
        p.mul_(ratio)
        total = self._total = p.sum(-1, keepdim=True)
        self._p, self._ratio = p, ratio
        target = self._at_target(z, anchor, index_R)
        offset = anchor + height.clamp(max=0.0)
        return RowStats(
            offset.squeeze(-1),
            (total / largest).log().squeeze(-1),
            target,
            None,
            z.argmax(-1) if argmax else None,
            None,
        )

    def gradient(
        self,
        logits_RV: Tensor,
        stats: RowStats,
        coefficients: RowCoefficients,
        index_R: Tensor | None,
        dense: Tensor | None,
        out_RV: Tensor,
    ) -> None:
        if self._ran_dense:
            return self.dense_rows.gradient(logits_RV, stats, coefficients, index_R, dense, out_RV)
        sigmoid = self._ratio if self._scale is None else self._ratio.mul_(self._scale)
        slope = torch.sub(2.0, sigmoid, out=self._ratio)  # type: ignore[call-overload]
        weighted = self._p.mul_(slope)
        by_normalizer = coefficients.normalizer.unsqueeze(-1) / self._total
        if index_R is not None:
            self._f_y = weighted.gather(-1, index_R.unsqueeze(-1)) * by_normalizer
        torch.mul(weighted, by_normalizer, out=out_RV)
        self._add_target(coefficients, index_R, out_RV)


def clear_unused_rows(coefficients: RowCoefficients, out_RV: Tensor) -> None:
    """A row that the loss does not depend on has gradient 0, even where its logits are NaN or infinite."""
    used = torch.zeros_like(coefficients.normalizer, dtype=torch.bool)
    for coefficient in coefficients:
        if coefficient is not None:
            used |= coefficient != 0
    if out_RV.device.type != "cpu" or not bool(used.all()):
        out_RV.masked_fill_(~used.unsqueeze(-1), 0.0)
