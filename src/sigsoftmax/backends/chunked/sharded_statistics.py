"""The statistics of whole rows: of one process, or put together from processes that each hold some of the classes.

Every process reduces the rows of its own classes relative to an offset of its own. To put them together, only the
differences of these offsets are needed, and they are formed from the peaks of the rows (``Form.offset_gap``), because
absolute values cancel here as they do within a row. A few numbers per row and process are gathered, however many
classes there are. All processes compute the same from the same numbers, so their results agree to the last bit. The
product of a backend's own probabilities f and this process's share of the row is the probability among all classes, so
backends do not know that there are other classes.

Shapes: N tokens, K components, R rows, V classes (of a process, or of all), P processes; n tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.logits import Block
from sigsoftmax.contract import normalizing
from sigsoftmax.contract.rows import MASK, RowCoefficients, RowRoutines, RowStats, RowTargets
from sigsoftmax.contract.shard import Shard
from sigsoftmax.contract.tokens import TokenArithmetic, scaled
from sigsoftmax.family.formulas import Form
from sigsoftmax.family.parameters import ParameterKind, kind_of


class Reduced(NamedTuple):
    """The statistics of rows of one process; vectors of length R."""

    stats: RowStats
    mass: Tensor | None
    """the sum of the weights behind ``stats.dense``"""
    best: Tensor | None = None
    """phi(z) - offset of the class ``stats.argmax``"""


class Combined(NamedTuple):
    """The statistics of whole rows; vectors of length R."""

    stats: RowStats
    """relative to the offset of the process that holds most of the row"""
    mass: Tensor | None
    share: Tensor | None = None
    """this process's part of the sum of g, if it has not all of it"""
    gap: Tensor | None = None
    """this process's offset less that of ``stats``"""


Vectors = TypeVar("Vectors", RowStats, Reduced)


def concatenated(pieces: Sequence[Vectors]) -> Vectors:
    """Named tuples of vectors joined field by field."""
    if len(pieces) == 1:
        return pieces[0]
    columns: list[Any] = []
    for column in zip(*pieces, strict=True):
        first = column[0]
        if isinstance(first, RowStats):
            columns.append(concatenated(column))
        else:
            columns.append(None if first is None else torch.cat(column))
    return type(pieces[0])(*columns)


def per_row(values_N: Tensor | None, span: slice, components: int) -> Tensor | None:
    """A number per token as one per row."""
    if values_N is None or components == 1:
        return None if values_N is None else values_N[span]
    return values_N[span].repeat_interleave(components)


class WholeRows:
    """Rows whose classes are all in this process."""

    is_sharded = False
    owned_N: Tensor | None = None
    """tokens whose target is a class of this process; None for all"""

    def __init__(self, tokens: TokenArithmetic) -> None:
        self.owned_weight_N = tokens.target_weight_N
        """the weights of targets in this process"""

    def reduce(self, routines: RowRoutines, logits_RV: Tensor, targets: RowTargets) -> Reduced:
        """The statistics of rows, as far as this process knows them."""
        dense = targets.dense
        mass = None if dense is None or dense.ndim == 1 else dense.sum(-1)
        return Reduced(routines.stats(logits_RV, targets), mass)

    def combine(self, own: Reduced, span: slice) -> Combined:
        """The statistics of whole rows of a span of tokens."""
        return Combined(own.stats, own.mass)

    def own_coefficients(self, whole: RowCoefficients, combined: Combined, span: slice) -> RowCoefficients:
        """The coefficients of rows for the gradient of this process's classes."""
        return whole

    def for_gradient(self, stats: RowStats) -> RowStats:
        """This process's statistics of rows as its gradient takes them."""
        return stats

    def normalizers(self, routines: RowRoutines, blocks: Sequence[Block]) -> Combined | None:
        """The log normalisers of whole rows, if other processes have a part in them."""
        return None

    def over_classes(
        self, parts: Tensor, best_n: Tensor | None, argmax_n: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Sums over all classes, and the likeliest class, from those over this process's classes."""
        return parts, argmax_n


class ShardedRows(WholeRows):
    """Rows whose classes are spread over processes; ``tokens`` then has those of this process alone."""

    is_sharded = True

    def __init__(
        self, shard: Shard, tokens: TokenArithmetic, form: Form, arguments: Sequence[Tensor], components: int
    ) -> None:
        super().__init__(tokens)
        self.unit = tokens.row_unit
        self.shard, self.form, self.components = shard, form, components
        self.arguments = normalizing.arguments_like(tokens.numbers, form, [a.detach() for a in arguments])
        self.centres: dict[int, Tensor] = {}
        if form.offset_gap is not None:
            # The offset depends on an argument per class by the mean over the classes of a process.
            self.centres = {
                i: shard.gather(a.mean()) for i, a in enumerate(self.arguments) if kind_of(a) is ParameterKind.PER_CLASS
            }
        self.owner_N: Tensor | None = None
        if tokens.index_N is not None and tokens.target_weight_N is not None:
            self.owner_N = shard.owner(tokens.index_N)
            self.owned_N = self.owner_N == shard.rank
            weight_N, zeros_N = tokens.target_weight_N, torch.zeros_like(tokens.index_N)
            self.owned_weight_N = torch.where(self.owned_N, weight_N, torch.zeros_like(weight_N))
            tokens.index_N = torch.where(self.owned_N, tokens.index_N - shard.classes.start, zeros_N)
        if tokens.class_weight_V is not None:
            tokens.class_weight_V = shard.own(tokens.class_weight_V)
        if tokens.smoothing_V is not None:
            tokens.smoothing_V = shard.own(tokens.smoothing_V)

    def reduce(self, routines: RowRoutines, logits_RV: Tensor, targets: RowTargets) -> Reduced:
        argmax = best = mass = None
        if targets.argmax:
            argmax = routines.stats(logits_RV, RowTargets(argmax=True)).argmax
            best = routines.stats(logits_RV, RowTargets(argmax)).target
        stats = routines.stats(logits_RV, targets._replace(argmax=False))._replace(argmax=argmax)
        if targets.dense is not None:
            mass = targets.dense.sum(-1).expand_as(stats.normalizer)
        return Reduced(stats, mass, best)

    def combine(self, own: Reduced, span: slice) -> Combined:
        """One exchange; the second is for argmax alone."""
        all_PR = self._gathered(own)
        peak_PR, offset_PR = all_PR["peak"], all_PR["offset"]
        leader_R = self._leader(peak_PR, offset_PR, all_PR["normalizer"])
        gap_PR = self._offset_gap(peak_PR, offset_PR, leader_R)
        normalizer_PR = all_PR["normalizer"] + gap_PR * self.unit
        normalizer_R = torch.logsumexp(normalizer_PR, 0)
        target_R = dense_R = mass_R = entropy_R = argmax_R = None
        owner_R = per_row(self.owner_N, span, self.components)
        if "target" in all_PR and owner_R is not None:
            target_R = _of_process(all_PR["target"] + gap_PR, owner_R)
        if "dense" in all_PR:
            mass_PR = all_PR["mass"]
            moved_PR = torch.where(mass_PR == 0, torch.zeros_like(gap_PR), gap_PR * mass_PR)
            dense_R, mass_R = (all_PR["dense"] + moved_PR).sum(0), mass_PR.sum(0)
        if "entropy" in all_PR:
            log_share_PR = normalizer_PR - normalizer_R
            share_PR = log_share_PR.exp()
            parts_PR = share_PR * (all_PR["entropy"] - log_share_PR)
            entropy_R = torch.where(share_PR == 0, torch.zeros_like(parts_PR), parts_PR).sum(0)
        if "best" in all_PR and own.stats.argmax is not None:
            argmax_R = self._likeliest(all_PR["best"] + gap_PR, own.stats.argmax)
        peak_R, offset_R = _of_process(peak_PR, leader_R), _of_process(offset_PR, leader_R)
        stats = RowStats(peak_R, offset_R, normalizer_R, target_R, dense_R, argmax_R, entropy_R)
        rank = self.shard.rank
        return Combined(stats, mass_R, torch.exp(normalizer_PR[rank] - normalizer_R), gap_PR[rank] * self.unit)

    def _gathered(self, own: Reduced) -> dict[str, Tensor]:
        """The statistics of rows of every process, (P, R) each; neutral for rows without classes there."""
        stats, dense, mass = own.stats, own.stats.dense, own.mass
        is_without = _without_classes(stats)
        zeros = torch.zeros_like(stats.normalizer)
        if dense is not None and self.shard.is_empty:
            dense = mass = zeros
        columns = {
            "peak": torch.where(is_without, zeros, stats.peak.to(zeros.dtype)),
            "offset": torch.where(is_without, zeros, stats.offset),
            "normalizer": torch.where(is_without, torch.full_like(zeros, MASK), stats.normalizer),
            "target": stats.target,
            "dense": dense,
            "mass": mass,
            "entropy": stats.entropy,
            "best": own.best,
        }
        present = {name: column for name, column in columns.items() if column is not None}
        gathered = self.shard.gather(torch.stack(list(present.values())))
        return dict(zip(present, gathered.unbind(1), strict=True))

    def _leader(self, peak_PR: Tensor, offset_PR: Tensor, normalizer_PR: Tensor) -> Tensor:
        """The process that holds most of each row. In float64: offsets of several processes may overflow in float32."""
        first_R = torch.zeros_like(peak_PR[0], dtype=torch.int64)
        gap_PR = self._offset_gap(peak_PR.double(), offset_PR.double(), first_R) * self.unit
        return (gap_PR + normalizer_PR).argmax(0)

    def _offset_gap(self, peak_PR: Tensor, offset_PR: Tensor, leader_R: Tensor) -> Tensor:
        """offset_PR less that of the leader of each row, in units and in the dtype of the peaks."""
        if self.form.offset_gap is None:
            return offset_PR - _of_process(offset_PR, leader_R)
        own, of_leader = [], []
        for i, argument in enumerate(self.arguments):
            values = self.centres.get(i, argument).to(peak_PR.dtype)
            own.append(values.unsqueeze(-1) if i in self.centres else values)
            of_leader.append(values[leader_R] if i in self.centres else values)
        return self.form.offset_gap(peak_PR, own, _of_process(peak_PR, leader_R), of_leader)

    def own_coefficients(self, whole: RowCoefficients, combined: Combined, span: slice) -> RowCoefficients:
        assert combined.share is not None
        by_target, owned_R = whole.target, per_row(self.owned_N, span, self.components)
        if by_target is not None and owned_R is not None:
            by_target = torch.where(owned_R, by_target, torch.zeros_like(by_target))
        return whole._replace(normalizer=scaled(combined.share, whole.normalizer), target=by_target)

    def for_gradient(self, stats: RowStats) -> RowStats:
        # Rows without classes here get a normaliser that makes their probabilities 0 and not NaN.
        normalizer = torch.where(_without_classes(stats), torch.zeros_like(stats.normalizer), stats.normalizer)
        return stats._replace(normalizer=normalizer)

    def normalizers(self, routines: RowRoutines, blocks: Sequence[Block]) -> Combined | None:
        own = concatenated([routines.stats(block.logits_RV, RowTargets()) for block in blocks])
        return self.combine(Reduced(own, None), slice(None))

    def over_classes(
        self, parts: Tensor, best_n: Tensor | None, argmax_n: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        sums = self.shard.sum(torch.zeros_like(parts) if self.shard.is_empty else parts)
        if best_n is None or argmax_n is None:
            return sums, None
        return sums, self._likeliest(self.shard.gather(best_n), argmax_n)

    def _likeliest(self, best_PR: Tensor, argmax_R: Tensor) -> Tensor:
        """The class with the largest of all; ``argmax_R`` is numbered within this process."""
        winner_R = best_PR.argmax(0)
        return self.shard.first_of(winner_R) + _of_process(self.shard.gather(argmax_R), winner_R)


def _without_classes(stats: RowStats) -> Tensor:
    """Rows all of whose classes are masked here."""
    return (stats.peak == MASK) | (stats.normalizer == MASK)


def _of_process(values_PR: Tensor, rank_R: Tensor) -> Tensor:
    return values_PR.gather(0, rank_R.unsqueeze(0)).squeeze(0)
