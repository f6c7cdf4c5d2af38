"""The row routines of any form, masks and all, by the reference formulas.

Shapes: R rows of a block, V classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax.contract import normalizing, tokens
from sigsoftmax.contract.rows import Logarithms, RowCoefficients, RowStats, RowTargets, compute_dtype
from sigsoftmax.family.formulas import Form
from sigsoftmax.family.parameters import ParameterKind, kind_of

BLOCK_BYTES = 512 * 2**10
"""Intermediate results of this size are reused by the allocator; larger ones are mapped and faulted in each time."""


def block_rows(num_classes: int, device: torch.device, block_bytes: int) -> int | None:
    """The number of rows of which a buffer in float32 has so many bytes; None where no cache is to be stayed in."""
    return max(1, block_bytes // (4 * num_classes)) if device.type == "cpu" else None


class FormRows:
    """``RowRoutines`` of any form."""

    def __init__(
        self, form: Form, arguments: Sequence[Tensor], logits_like: Tensor, needs_arguments: bool = False
    ) -> None:
        self.form = form
        self.dtype = compute_dtype(logits_like.dtype)
        like = logits_like.new_empty(0, dtype=self.dtype)
        self.arguments = normalizing.arguments_like(like, form, [a.detach() for a in arguments])
        self.kinds = [kind_of(a) for a in arguments]
        values = [normalizing.constant(a) for a in arguments]
        known = tuple(value for value in values if value is not None)
        is_known = form.is_builtin and len(known) == len(values)
        self.unit = normalizing.fixed_unit(form, known, self.dtype) if is_known else form.unit(*self.arguments)
        self.properties = form.properties(values)
        self.is_increasing = self.properties.is_increasing is True
        self.needs_arguments = needs_arguments
        self.max_rows = block_rows(logits_like.shape[-1], logits_like.device, BLOCK_BYTES)
        self._argument_sums = [like.new_zeros(a.shape) for a in self.arguments]
        self._rows: normalizing.Rows | None = None

    def rows(self, logits_RV: Tensor) -> normalizing.Rows:
        return normalizing.rows(logits_RV, self.form, self.arguments, is_increasing=self.is_increasing, unit=self.unit)

    def stats(self, logits_RV: Tensor, targets: RowTargets) -> RowStats:
        rows = self._rows = self.rows(logits_RV)
        at_dense = None if targets.dense is None else rows.weighted(targets.dense)
        return row_stats(rows.peak, rows.offset, rows.normalizer, rows.in_units, targets, at_dense)

    def gradient(
        self, logits_RV: Tensor, targets: RowTargets, stats: RowStats, coefficients: RowCoefficients, out_RV: Tensor
    ) -> None:
        assert self._rows is not None, "stats comes before gradient"
        f_RV = (self._rows.relative - stats.normalizer.unsqueeze(-1)).exp_()
        self.backpropagate(logits_RV, phi_gradient(f_RV, targets, coefficients), out_RV)

    def backpropagate(self, logits_RV: Tensor, by_phi_RV: Tensor, out_RV: Tensor) -> None:
        """Write dL/dz given dL/dphi of every element, and sum dL/dargument; a mask has slope 1 and no parameters."""
        z, masked, peak = normalizing.with_peaks(
            logits_RV.to(self.dtype), self.form, self.arguments, is_increasing=self.is_increasing
        )
        slope = self.form.slope(z, *self.arguments)
        unused = by_phi_RV == 0
        if self.needs_arguments:
            by_phi_of_kept = by_phi_RV.masked_fill(masked, 0.0)
            row_sums = by_phi_of_kept.sum(-1, keepdim=True)
            relative, offset = self.form.argument_slopes(z, peak, *self.arguments)
            sums = zip(self._argument_sums, self.kinds, relative, offset, strict=True)
            for total, kind, by_relative, by_offset in sums:
                product = (by_phi_of_kept * by_relative).masked_fill_(unused, 0.0)
                if kind is ParameterKind.PER_CLASS:
                    # It is a shift, or the user's: the offset does not move with it.
                    total += product.sum(0)
                else:
                    total += product.sum() + torch.where(row_sums == 0, row_sums, row_sums * by_offset).sum()
        # What the loss does not depend on has gradient 0, even where the logit is NaN or its slope infinite.
        slope = torch.where(masked, torch.ones_like(slope), slope).masked_fill_(unused, 0.0)
        torch.mul(by_phi_RV, slope, out=by_phi_RV)
        out_RV.copy_(by_phi_RV)

    def argument_gradients(self) -> list[Tensor]:
        return self._argument_sums


def row_stats(
    peak_R1: Tensor,
    offset_R1: Tensor,
    normalizer_R1: Tensor,
    relative: Logarithms,
    targets: RowTargets,
    at_dense_R: Tensor | None,
) -> RowStats:
    """The statistics of rows of which phi less the offset is known for every class."""
    index_R, relative_RV = targets.index_R, relative.multiples
    return RowStats(
        peak_R1.squeeze(-1),
        offset_R1.squeeze(-1),
        normalizer_R1.squeeze(-1),
        None if index_R is None else relative_RV.gather(-1, index_R.unsqueeze(-1)).squeeze(-1),
        at_dense_R,
        relative_RV.argmax(-1) if targets.argmax else None,
        tokens.entropy(relative.values - normalizer_R1) if targets.entropy else None,
    )


def phi_gradient(
    f_RV: Tensor, targets: RowTargets, coefficients: RowCoefficients, scratch_RV: Tensor | None = None
) -> Tensor:
    """dL/dphi of every element, in the place of the probabilities of the rows."""
    f_RV.mul_(coefficients.normalizer.unsqueeze(-1))
    if targets.dense is not None and coefficients.dense is not None:
        f_RV.add_(torch.mul(targets.dense, coefficients.dense.unsqueeze(-1), out=scratch_RV))
    if targets.index_R is not None and coefficients.target is not None:
        f_RV.scatter_add_(-1, targets.index_R.unsqueeze(-1), coefficients.target.unsqueeze(-1))
    if coefficients.unused is not None:
        f_RV.masked_fill_(coefficients.unused.unsqueeze(-1), 0.0)
    return f_RV
