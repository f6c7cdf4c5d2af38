"""The logits of all tokens, a range of classes at a time: first to be measured, then for their gradient.

So the gradient of each range of the weight is one product over all tokens, rounded once. Logits that are gone by the
time of their gradient are computed again, which would be a fourth product if it were all of them. But the gradient of
the weight has memory of its own, which nobody writes before the second round: there as many logits are kept as fit,
and the last range stays in the slab.

The ranges in the order of their classes: those kept in the gradient's memory, those computed twice, the one kept in
the slab. In the second round the last comes first, since the slab is needed for the gradients of the others. Class i
of the gradient begins at i d, and the logits of class i are kept at i max(d, R): the gradient of a range overwrites
logits of that range and of earlier ones only.

Shapes: V classes, d features, R rows of all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.matmul import rounded_up
from sigsoftmax.backends.chunked.providers import LinearLogits

STEP = 64
"""Ranges begin at multiples of so many classes (128 bytes of bfloat16)."""


def cut(first: int, last: int, most: int, unit: int) -> list[tuple[int, int]]:
    """The classes from first to last in as few ranges of at most ``most`` as there can be, of nearly equal size."""
    count = -(-(last - first) // most)
    step = rounded_up(-(-(last - first) // max(1, count)), unit)
    return [(begin, min(begin + step, last)) for begin in range(first, last, max(1, step))]


class ClassWalk:
    """One walk: :meth:`measured` where its logits are to be kept, then :meth:`gradients`."""

    def __init__(self, source: LinearLogits) -> None:
        source.begin_gradients()
        self.source = source
        self.rows_Rd = source.hidden_NKd.flatten(0, 1).to(source.weight_Vd.dtype)
        rows = self.rows_Rd.shape[0]
        classes, features = source.weight_Vd.shape
        most = source.slab.numel() // rows
        unit = STEP if most >= STEP else source.alignment
        most = most // unit * unit
        last = rounded_up(max(0, classes - most), unit)
        spacing = max(features, rows)
        memory = source.weight_gradient
        is_usable = memory is not None and memory.element_size() == source.slab.element_size()
        num_kept = last * features // spacing // unit * unit if is_usable else 0
        kept = cut(0, num_kept, most, unit)
        self.ranges = [*kept, *cut(num_kept, last, most, unit), (last, classes)]
        self.kept_RV: list[Tensor] = []
        if memory is not None and kept:
            flat = memory.view(-1).view(source.slab.dtype)
            self.kept_RV = [
                flat[begin * spacing :][: rows * (end - begin)].view(rows, end - begin) for begin, end in kept
            ]
        self.is_measured = False

    def measured(self) -> Iterator[tuple[int, Tensor]]:
        """The first class of each range, and its logits; as many as can be are kept for :meth:`gradients`."""
        for i in range(len(self.ranges)):
            yield self.ranges[i][0], self._computed(i, self.kept_RV[i] if i < len(self.kept_RV) else self._slab(i))
        self.is_measured = True

    def gradients(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The first class of each range, its logits, and memory for their gradient, which may be that of the logits."""
        source, count = self.source, len(self.ranges)
        num_kept = len(self.kept_RV) if self.is_measured else 0
        by_rows_Rd = None
        if source.needs_hidden:
            by_rows_Rd = torch.empty(self.rows_Rd.shape, dtype=source.sum_dtype, device=self.rows_Rd.device)
        for turn, i in enumerate([count - 1, *range(count - 1)]):
            first, last = self.ranges[i]
            out_RV = self._slab(i)
            if i < num_kept:
                logits_RV = self.kept_RV[i]
            else:
                is_there = self.is_measured and turn == 0
                logits_RV = out_RV if is_there else self._computed(i, out_RV)
            yield first, logits_RV, out_RV
            if by_rows_Rd is not None:
                source.add_to_hidden(by_rows_Rd, out_RV, first, is_first=turn == 0)
            if source.weight_gradient is not None:
                source.add_to_weight(source.weight_gradient[first:last], out_RV, self.rows_Rd, is_first=True)
            if source.bias_gradient is not None:
                source.add_to_bias(source.bias_gradient[first:last], out_RV, is_first=True)
        if source.hidden_gradient is not None and by_rows_Rd is not None:
            source.hidden_gradient.view(-1, source.features).copy_(by_rows_Rd)

    def _slab(self, i: int) -> Tensor:
        first, last = self.ranges[i]
        return self.source.matrix(self.source.slab, self.rows_Rd.shape[0], last - first)

    def _computed(self, i: int, memory_RV: Tensor) -> Tensor:
        return self.source.logits_of(self.rows_Rd, *self.ranges[i], memory_RV)
