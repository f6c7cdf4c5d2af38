"""Common to the hand-made passes: work buffers, exponentials, and the routines to turn to when a block does not suit.

All intermediate results live in buffers that are made once; a pass over fresh memory would cost more in page faults
than in arithmetic. A block that a fast pass cannot serve (masked classes, rows left of c, weights over all classes
where only probabilities were computed) goes to the next slower routines. phi increases here, so that the peak of a
row, the logit at which phi is largest, is the row maximum.

Shapes: R rows of a block, V classes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.form_rows import block_rows
from sigsoftmax.contract.rows import MASK, RowCoefficients, RowRoutines, RowStats, RowTargets, compute_dtype

BLOCK_BYTES = 2 * 2**20
"""A few work buffers of this size stay in the caches of today's cores."""

MOST_PHI = 32.0
"""Up to this size phi keeps the digits of float32 that a probability needs without an offset taken off it."""

LOG2_E = 1.0 / math.log(2.0)
PART = {dtype: torch.tensor(35.0 / 64.0, dtype=dtype) for dtype in (torch.float32, torch.float64)}


def exponentials(x_RV: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``exp(x)`` in the place of x, or in ``out``; no x may be much larger than 0.

    torch.exp2 takes a quarter of the time of torch.exp. The sum of a row is left to torch.sum, which keeps digits that
    torch.softmax loses: its sum over a million peaked logits is off by 7e-5.
    """
    # x log2(e) is x + x * part * (0.44 / part): in float32 log2(e) is off by 1.3e-8, which all x would share, and
    # gradients of parameters would show; 0.44 / part is off by 4e-10.
    part = PART[x_RV.dtype]
    return torch.addcmul(x_RV, x_RV, part, value=(LOG2_E - 1.0) / float(part), out=x_RV if out is None else out).exp2_()


class FastRows(ABC):
    """``RowRoutines`` with work buffers, and the routines to turn to when a block does not suit."""

    def __init__(self, logits_like: Tensor, slower: RowRoutines) -> None:
        self.dtype = compute_dtype(logits_like.dtype)
        self.max_rows = block_rows(logits_like.shape[-1], logits_like.device, BLOCK_BYTES)
        self.slower, self.unit = slower, slower.unit
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


class ProbabilityRows(FastRows):
    """Rows of which only probabilities are computed: no weights over all classes and no entropy.

    The likeliest class is that of the highest logit, so it is known here only where all classes have the same phi.
    """

    differs_by_class = False
    """True if an argument of phi has a value for each class."""

    _total: Tensor
    """(R, 1): the sum over a row of what is proportional to its probabilities"""
    _index: Tensor | None
    """(R, 1): the targets"""
    _z_y: Tensor
    """(R, 1): their logits"""

    def _fast_stats(self, z: Tensor, peak: Tensor, targets: RowTargets) -> RowStats | None:
        if targets.dense is not None or targets.entropy:
            return None
        if targets.argmax and self.differs_by_class:
            return None
        self._index = None
        if targets.index_R is not None:
            self._index = targets.index_R.unsqueeze(-1)
            self._z_y = z.gather(-1, self._index)
        found = self._probabilities(z, peak)
        if found is None:
            return None
        offset, normalizer, target = (None if t is None else t.squeeze(-1) for t in found)
        assert offset is not None and normalizer is not None
        best = z.argmax(-1) if targets.argmax else None
        return RowStats(peak.squeeze(-1), offset, normalizer, target, None, best, None)

    @abstractmethod
    def _probabilities(self, z: Tensor, peak: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Offset, normaliser and phi of the target in units, (R, 1) each; None if the block does not suit."""

    @abstractmethod
    def _slopes(self) -> tuple[Tensor, float]:
        """Two factors of f times the slope of phi times the total: (R, V) and a number."""

    @abstractmethod
    def _target_slope(self) -> Tensor:
        """The slope of phi at the target, (R, 1)."""

    def _fast_gradient(self, targets: RowTargets, coefficients: RowCoefficients, out_RV: Tensor) -> None:
        values_RV, factor = self._slopes()
        factor_R1 = (coefficients.normalizer.unsqueeze(-1) / self._total).mul_(factor)
        torch.mul(values_RV, factor_R1, out=out_RV)
        if self._index is None:
            return
        assert coefficients.target is not None
        at_target = values_RV.gather(-1, self._index).mul_(factor_R1)
        slope_R1 = self._target_slope().masked_fill_(self._z_y == MASK, 1.0)
        # Both parts are added before out's dtype rounds them.
        at_target.addcmul_(slope_R1, coefficients.target.unsqueeze(-1))
        out_RV.scatter_(-1, self._index, at_target.to(out_RV.dtype))
