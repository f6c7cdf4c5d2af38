"""Which parts of a reproduction fit into a given wall time, and what gives way in which order.

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
"""of the time, for checkpoints, records and what takes longer than was measured"""


def usable_seconds(minutes: float) -> float:
    """Seconds that stages may be planned for."""
    return 60.0 * minutes * (1.0 - SHARE_KEPT_FREE)


@dataclass(frozen=True, kw_only=True)
class TimePlan:
    """What fits, for all runs alike."""

    seconds: float
    """that were to be filled"""
    train_epochs: int
    train_epochs_left: int
    train_seconds: float
    """of the epochs that fit"""
    finetune_seconds: float
    """at most; 0 where finetuning gives way, or is done"""
    finetune_epochs: int
    """that these seconds are enough for"""
    points: int
    """of the grid, for every run; 0 where dynamic evaluation gives way, or is done"""
    points_left: int
    ranks: bool
    ranks_left: bool
    later_seconds: float
    """of dynamic evaluation and ranks as planned"""
    dropped: tuple[str, ...]
    """stages that do not fit, or fit in part"""

    @property
    def total_seconds(self) -> float:
        return self.train_seconds + self.finetune_seconds + self.later_seconds

    @classmethod
    def of(cls, left: Sequence[Left], seconds: float) -> TimePlan:
        """The fullest plan for these runs that takes no longer than ``seconds``."""
        train = sum(one.train for one in left)
        evaluation = sum(one.evaluation for one in left)
        points_left = max((one.points for one in left), default=0)
        ranks_left = any(one.rank for one in left)
        rest = seconds - train - evaluation
        if rest < 0.0:
            epochs, spent = _epochs_that_fit(left, seconds)
            return cls._without_later_stages(left, seconds, epochs, spent)
        least, most = sum(one.finetune_least for one in left), sum(one.finetune_most for one in left)
        for points, ranks, finetunes in _from_fullest(points_left, ranks_left, most > 0.0):
            later = _later(left, points, ranks=ranks)
            if later + (least if finetunes else 0.0) <= rest:
                finetuning = min(most, rest - later) if finetunes else 0.0
                per_epoch = sum(one.finetune_epoch for one in left if one.finetune_most) or math.inf
                dropped = [
                    *(["finetuning"] if most and not finetunes else []),
                    *(["epochs of finetuning"] if finetunes and finetuning < most else []),
                    *(["dynamic evaluation"] if points_left and not points else []),
                    *(["points of the grid"] if 0 < points < points_left else []),
                    *(["ranks"] if ranks_left and not ranks else []),
                ]
                return cls(
                    seconds=seconds,
                    train_epochs=sum(one.train_epochs for one in left),
                    train_epochs_left=sum(one.train_epochs for one in left),
                    train_seconds=train + evaluation,
                    finetune_seconds=finetuning,
                    finetune_epochs=int(finetuning / per_epoch + 1e-9),
                    points=points,
                    points_left=points_left,
                    ranks=ranks,
                    ranks_left=ranks_left,
                    later_seconds=later,
                    dropped=tuple(dropped),
                )
        raise AssertionError("a plan without any later stage always fits")

    @classmethod
    def _without_later_stages(cls, left: Sequence[Left], seconds: float, epochs: int, spent: float) -> TimePlan:
        epochs_left = sum(one.train_epochs for one in left)
        return cls(
            seconds=seconds,
            train_epochs=epochs,
            train_epochs_left=epochs_left,
            train_seconds=spent,
            finetune_seconds=0.0,
            finetune_epochs=0,
            points=0,
            points_left=max((one.points for one in left), default=0),
            ranks=False,
            ranks_left=any(one.rank for one in left),
            later_seconds=0.0,
            dropped=("training", "finetuning", "dynamic evaluation", "ranks"),
        )

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


def _from_fullest(points_left: int, ranks_left: bool, finetunes: bool) -> list[tuple[int, bool, bool]]:
    """Points, ranks and finetuning of every plan that may be made, the fullest first."""
    plans = [(points, ranks_left, finetunes) for points in range(points_left, 0, -1)] or [(0, ranks_left, finetunes)]
    plans.append((min(points_left, 1), False, finetunes))
    plans.append((0, False, finetunes))
    plans.append((0, False, False))
    return plans


def _later(left: Sequence[Left], points: int, *, ranks: bool) -> float:
    """Seconds of dynamic evaluation with at most so many points for each run, and of ranks."""
    total = 0.0
    for one in left:
        if points and one.points:
            total += one.dynamic_besides + min(points, one.points) * one.dynamic_point
        if ranks:
            total += one.rank
    return total


def _epochs_that_fit(left: Sequence[Left], seconds: float) -> tuple[int, float]:
    """Epochs of training in the order of the runs, and what they take."""
    epochs, spent = 0, 0.0
    for one in left:
        fit = min(one.train_epochs, int((seconds - spent) / one.train_epoch)) if one.train_epochs else 0
        epochs, spent = epochs + fit, spent + fit * one.train_epoch
    return epochs, spent


def check_long_enough(left: Mapping[Run, Left], seconds: float) -> None:
    """Refuse a time in which not even the first epoch of the first run that has one left would end."""
    for run, one in left.items():
        if not one.train_epochs and not one.finetune_most:
            continue
        epoch = one.train_epoch if one.train_epochs else one.finetune_epoch
        if epoch > seconds:
            raise ValueError(
                f"--minutes must be enough for one epoch: the next of {run.name} takes about {duration_text(epoch)} "
                f"here, and {duration_text(max(seconds, 0.0))} are left for it; give more minutes"
            )
        return


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
