"""Classes that are spread over processes: how what each process measured of a row becomes one row.

Every process measures the rows of its own classes relative to an offset of its own. To put them together, only the
differences of these offsets are needed, and they are formed from the anchors (``Form.offset_gap``), because absolute
values cancel here as they do within a row. What is gathered is a few numbers a row of each process, however many
classes there are. All processes compute the same from the same numbers, so their results agree to the last bit.

Shapes: R rows, V classes (of a process, or of all), P processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sigsoftmax.contract import normalizing
from sigsoftmax.contract.rows import MASK, RowStats
from sigsoftmax.contract.shard import Shard
from sigsoftmax.family.formulas import Form
from sigsoftmax.family.parameters import ParameterKind, kind_of


class Measured(NamedTuple):
    """What one process measured of rows; vectors of length R."""

    stats: RowStats
    mass: Tensor | None
    """the sum of the weights behind ``stats.dense``"""
    best: Tensor | None
    """phi(z) - offset of the class ``stats.argmax``"""


class Combined(NamedTuple):
    """What all processes measured of rows; vectors of length R."""

    stats: RowStats
    """relative to the offset of the process that holds most of the row"""
    mass: Tensor | None
    share: Tensor
    """this process's part of the sum of g"""
    gap: Tensor
    """this process's offset less that of ``stats``"""


def without_classes(stats: RowStats) -> Tensor:
    """Rows all of whose classes are masked here."""
    return (stats.peak == MASK) | (stats.normalizer == MASK)


def for_gradient(stats: RowStats) -> RowStats:
    """The same rows; those without classes here get a normaliser that makes their probabilities 0 and not NaN."""
    normalizer = torch.where(without_classes(stats), torch.zeros_like(stats.normalizer), stats.normalizer)
    return stats._replace(normalizer=normalizer)


class Combiner:
    """Puts together what the processes measured, for one output function."""

    def __init__(self, shard: Shard, form: Form, arguments: Sequence[Tensor], like: Tensor) -> None:
        self.shard = shard
        self.form = form
        self.arguments = normalizing.arguments_like(like, form, [a.detach() for a in arguments])
        self.centres: dict[int, Tensor] = {}
        if form.offset_gap is not None:
            # The offset depends on an argument per class by the mean over the classes of a process.
            self.centres = {
                i: shard.gather(a.mean()) for i, a in enumerate(self.arguments) if kind_of(a) is ParameterKind.PER_CLASS
            }

    def combine(self, own: Measured, owner_R: Tensor | None) -> Combined:
        """One exchange; the second is for argmax alone."""
        stats = own.stats
        is_without = without_classes(stats)
        zeros = torch.zeros_like(stats.normalizer)
        anchor = torch.where(is_without, zeros, stats.peak.to(zeros.dtype))
        offset = torch.where(is_without, zeros, stats.offset)
        normalizer = torch.where(is_without, torch.full_like(zeros, MASK), stats.normalizer)
        dense, mass = stats.dense, own.mass
        if dense is not None and self.shard.is_empty:
            dense = mass = zeros
        columns = (anchor, offset, normalizer, stats.target, dense, mass, stats.entropy, own.best)
        gathered = iter(self.shard.gather(torch.stack([c for c in columns if c is not None])).unbind(1))
        anchor_PR, offset_PR, normalizer_PR, target_PR, dense_PR, mass_PR, entropy_PR, best_PR = (
            None if c is None else next(gathered) for c in columns
        )
        assert anchor_PR is not None and offset_PR is not None and normalizer_PR is not None

        leader_R = self._leader(anchor_PR, offset_PR, normalizer_PR)
        gap_PR = self._offset_gap(anchor_PR, offset_PR, leader_R)
        normalizer_PR = normalizer_PR + gap_PR
        normalizer_R = torch.logsumexp(normalizer_PR, 0)
        target_R = dense_R = mass_R = entropy_R = argmax_R = None
        if target_PR is not None and owner_R is not None:
            target_R = _of_process(target_PR + gap_PR, owner_R)
        if dense_PR is not None and mass_PR is not None:
            moved_PR = torch.where(mass_PR == 0, torch.zeros_like(gap_PR), gap_PR * mass_PR)
            dense_R, mass_R = (dense_PR + moved_PR).sum(0), mass_PR.sum(0)
        if entropy_PR is not None:
            log_share_PR = normalizer_PR - normalizer_R
            share_PR = log_share_PR.exp()
            parts_PR = share_PR * (entropy_PR - log_share_PR)
            entropy_R = torch.where(share_PR == 0, torch.zeros_like(parts_PR), parts_PR).sum(0)
        if best_PR is not None and stats.argmax is not None:
            argmax_R = self.likeliest(best_PR + gap_PR, stats.argmax)
        combined = RowStats(
            _of_process(anchor_PR, leader_R),
            _of_process(offset_PR, leader_R),
            normalizer_R,
            target_R,
            dense_R,
            argmax_R,
            entropy_R,
        )
        rank = self.shard.rank
        return Combined(combined, mass_R, torch.exp(normalizer_PR[rank] - normalizer_R), gap_PR[rank])

    def _leader(self, anchor_PR: Tensor, offset_PR: Tensor, normalizer_PR: Tensor) -> Tensor:
        """The process that holds most of each row. In float64: offsets of several processes may overflow in float32."""
        gap_PR = self._offset_gap(
            anchor_PR.double(), offset_PR.double(), torch.zeros_like(anchor_PR[0], dtype=torch.int64)
        )
        return (gap_PR + normalizer_PR).argmax(0)

    def _offset_gap(self, anchor_PR: Tensor, offset_PR: Tensor, leader_R: Tensor) -> Tensor:
        """offset_PR less that of the leader of each row, in the dtype of the anchors."""
        if self.form.offset_gap is None:
            return offset_PR - _of_process(offset_PR, leader_R)
        own, of_leader = [], []
        for i, argument in enumerate(self.arguments):
            values = self.centres.get(i, argument).to(anchor_PR.dtype)
            own.append(values.unsqueeze(-1) if i in self.centres else values)
            of_leader.append(values[leader_R] if i in self.centres else values)
        return self.form.offset_gap(anchor_PR, own, _of_process(anchor_PR, leader_R), of_leader)

    def likeliest(self, best_PR: Tensor, argmax_R: Tensor) -> Tensor:
        """The class with the largest of all; ``argmax_R`` is numbered within this process."""
        winner_R = best_PR.argmax(0)
        return self.shard.first_of(winner_R) + _of_process(self.shard.gather(argmax_R), winner_R)


def _of_process(values_PR: Tensor, rank_R: Tensor) -> Tensor:
    return values_PR.gather(0, rank_R.unsqueeze(0)).squeeze(0)
