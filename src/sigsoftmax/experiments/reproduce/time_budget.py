"""The parts of a reproduction that fit into a given wall time, and what gives way in which order.

Training comes first, since every later stage needs its weights. Of the later stages these give way, from the first to
the last: epochs of finetuning beyond those that its stopping rule needs, points of the grid of dynamic evaluation down
to the one in its middle, ranks, dynamic evaluation, finetuning. If training itself does not fit, it takes all the time,
stops at a checkpoint and goes on with the next command.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sigsoftmax.experiments.reproduce.plan import Left
from sigsoftmax.experiments.runs.run import Run
from sigsoftmax.lm.config import DynamicEvaluationConfig
from sigsoftmax.records.durations import duration_text

__all__ = ["TimePlan", "check_long_enough", "narrowed", "usable_seconds"]

GIVES_WAY = (
    "finetuning beyond the epochs that its stopping rule needs",
    "points of the grid",
    "ranks",
    "dynamic evaluation",
    "finetuning",
    "training",
)
"""the first of these gives way first"""
SHARE_KEPT_FREE = 0.03
"""share of the time for checkpoints, records and what takes longer than was measured"""


def usable_seconds(minutes: float) -> float:
    """Seconds that stages may be planned for."""
    return 60.0 * minutes * (1.0 - SHARE_KEPT_FREE)


@dataclass(frozen=True, kw_only=True)
class TimePlan:
    """The work that fits, for all runs alike."""

    left: Sequence[Left]
    seconds: float
    """time that was to be filled"""
    train_epochs: int
    """epochs of training that fit, of all runs"""
    train_seconds: float
    """time of these epochs, and of evaluations"""
    finetunes: bool = False
    finetune_seconds: float = 0.0
    """time of finetuning, at most"""
    points: int = 0
    """points of the grid, for every run; 0 where dynamic evaluation gives way, or is done"""
    ranks: bool = False

    @classmethod
    def of(cls, left: Sequence[Left], seconds: float) -> TimePlan:
        """The fullest plan for these runs that takes no longer than ``seconds``."""
        needed = _needed(left)
        rest = seconds - needed
        if rest < 0.0:
            epochs, spent = _epochs_that_fit(left, seconds)
            return cls(left=left, seconds=seconds, train_epochs=epochs, train_seconds=spent)
        least, most = sum(one.finetune_least for one in left), sum(one.finetune_most for one in left)
        # The last of them takes no time.
        points, ranks, finetunes = next(
            (points, ranks, finetunes)
            for points, ranks, finetunes in _from_fullest(left, most > 0.0)
            if _later(left, points, ranks=ranks) + least * finetunes <= rest
        )
        return cls(
            left=left,
            seconds=seconds,
            train_epochs=sum(one.train_epochs for one in left),
            train_seconds=needed,
            finetunes=finetunes,
            finetune_seconds=min(most, rest - _later(left, points, ranks=ranks)) * finetunes,
            points=points,
            ranks=ranks,
        )

    @property
    def train_epochs_left(self) -> int:
        return sum(one.train_epochs for one in self.left)

    @property
    def finetune_epochs(self) -> int:
        """Epochs of each run that the time of finetuning is enough for."""
        per_epoch = sum(one.finetune_epoch for one in self.left if one.finetune_most) or math.inf
        return int(self.finetune_seconds / per_epoch + 1e-9)

    @property
    def points_left(self) -> int:
        return _points(self.left)

    @property
    def ranks_left(self) -> bool:
        return any(one.rank for one in self.left)

    @property
    def dropped(self) -> tuple[str, ...]:
        """The stages that do not fit, or fit in part."""
        finetuning = sum(one.finetune_most for one in self.left)
        stages = {
            "training": self.seconds < _needed(self.left),
            "finetuning": finetuning > 0.0 and not self.finetunes,
            "epochs of finetuning": self.finetunes and self.finetune_seconds < finetuning,
            "dynamic evaluation": self.points_left > 0 and not self.points,
            "points of the grid": 0 < self.points < self.points_left,
            "ranks": self.ranks_left and not self.ranks,
        }
        return tuple(stage for stage, is_dropped in stages.items() if is_dropped)

    def lines(self) -> list[str]:
        """The plan as text, one line for each stage that is left."""
        lines = [f"In {duration_text(self.seconds)} there is time for:"]
        if self.train_epochs_left:
            which = "all" if self.train_epochs == self.train_epochs_left else f"{self.train_epochs:,} of the"
            lines.append(
                f"  training: {which} {self.train_epochs_left:,} epochs left of all runs "
                f"({duration_text(self.train_seconds)})"
            )
        if self.finetune_seconds:
            seconds = duration_text(self.finetune_seconds)
            lines.append(f"  finetuning: up to {self.finetune_epochs:,} epochs of each run ({seconds})")
        if self.points:
            which = f"all {self.points}" if self.points == self.points_left else f"{self.points} of {self.points_left}"
            lines.append(f"  dynamic evaluation: {which} points of the grid for each run, then test")
        if self.ranks:
            lines.append("  ranks of the log-output matrices")
        if self.dropped:
            lines.append(f"There is no time for all of: {', '.join(self.dropped)}. The same command goes on with them.")
        lines.append(f"If time runs short, these give way, the first first: {', '.join(GIVES_WAY)}.")
        return lines


def _needed(left: Sequence[Left]) -> float:
    """Seconds of training and of evaluations, which never give way."""
    return sum(one.train + one.evaluation for one in left)


def _points(left: Sequence[Left]) -> int:
    return max((one.points for one in left), default=0)


def _from_fullest(left: Sequence[Left], finetunes: bool) -> list[tuple[int, bool, bool]]:
    """Points, ranks and finetuning of every plan that may be made, the fullest first."""
    most, ranks = _points(left), any(one.rank for one in left)
    plans = [(points, ranks, finetunes) for points in range(most, 0, -1)] or [(0, ranks, finetunes)]
    return [*plans, (min(most, 1), False, finetunes), (0, False, finetunes), (0, False, False)]


def _later(left: Sequence[Left], points: int, *, ranks: bool) -> float:
    """Seconds of dynamic evaluation with at most so many points for each run, and of ranks."""
    dynamic = sum(one.dynamic_besides + min(points, one.points) * one.dynamic_point for one in left if one.points)
    return (dynamic if points else 0.0) + (sum(one.rank for one in left) if ranks else 0.0)


def _epochs_that_fit(left: Sequence[Left], seconds: float) -> tuple[int, float]:
    """Epochs of training in the order of the runs, and what they take."""
    epochs, spent = 0, 0.0
    for one in left:
        fit = min(one.train_epochs, int((seconds - spent) / one.train_epoch)) if one.train_epochs else 0
        epochs, spent = epochs + fit, spent + fit * one.train_epoch
    return epochs, spent


def check_long_enough(left: Mapping[Run, Left], seconds: float) -> None:
    """Refuse a time in which not even the first epoch of the first run that has one left would end."""
    going_on = [run for run, one in left.items() if one.train_epochs or one.finetune_most]
    if not going_on:
        return
    first = left[going_on[0]]
    epoch = first.train_epoch if first.train_epochs else first.finetune_epoch
    if epoch > seconds:
        raise ValueError(
            f"--minutes must be enough for one epoch: the next of {going_on[0].name} takes about "
            f"{duration_text(epoch)} here, and {duration_text(max(seconds, 0.0))} are left for it; give more minutes"
        )


def narrowed(config: DynamicEvaluationConfig, points: int) -> DynamicEvaluationConfig:
    """The middle of a grid, of at most so many points: the outermost rates are left out, of the longer side first.

    >>> narrowed(DynamicEvaluationConfig(), 1).learning_rates
    (5e-05,)
    """
    if points < 1:
        raise ValueError(f"a grid has at least 1 point, got {points}")
    rates, decays = sorted(set(config.learning_rates)), sorted(set(config.decays))
    wide, high = len(rates), len(decays)
    while wide * high > points:
        wide, high = (wide - 1, high) if wide >= high else (wide, high - 1)
    return replace(config, learning_rates=_middle(rates, wide), decays=_middle(decays, high))


def _middle(values: Sequence[float], count: int) -> tuple[float, ...]:
    first = (len(values) - count) // 2
    return tuple(values[first : first + count])
