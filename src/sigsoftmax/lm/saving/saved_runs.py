"""Runs in checkpoints: the meta of a run that can go on, and the check of the tensors that it goes on with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from sigsoftmax.lm.recurrence.plans import LayerPlan
from sigsoftmax.lm.saving.saved_models import SavedModel, check_tensors

__all__ = ["SavedRun", "check_run_tensors", "prefixed", "unprefixed"]

KEY_WORDS = 624
"""words of 32 bits in the state of the generator that draws window lengths"""


@dataclass(frozen=True, kw_only=True)
class SavedWindowLengths:
    """The state of :class:`sigsoftmax.lm.data.windows.WindowLengths`."""

    key: tuple[int, ...]
    position: int
    has_gauss: int
    gauss: float

    def __post_init__(self) -> None:
        if len(self.key) != KEY_WORDS or min(self.key) < 0 or max(self.key) >= 2**32:
            raise ValueError(f"window_lengths.key must be {KEY_WORDS} numbers of 32 bits")
        if not 0 <= self.position <= KEY_WORDS:
            raise ValueError(f"window_lengths.position must be between 0 and {KEY_WORDS}, got {self.position}")
        if self.has_gauss not in (0, 1) or not math.isfinite(self.gauss):
            raise ValueError(
                f"window_lengths.has_gauss must be 0 or 1 and gauss finite, got {self.has_gauss} and {self.gauss}"
            )


@dataclass(frozen=True, kw_only=True)
class SavedRun(SavedModel):
    """The meta of ``last.safetensors``: a run's best model, and its position."""

    WHAT: ClassVar[str] = "checkpoint of a run that can go on here"
    REMEDY: ClassVar[str] = (
        "best.safetensors beside it is a model of its own and may still be good; choose another folder, or remove this "
        "file to begin the run anew"
    )

    epoch: int
    """the epoch to go on with, from 1"""
    row: int
    update: int
    """row and update in that epoch, from 0"""
    seconds: float
    """time spent on that epoch"""
    stale: bool
    losses: tuple[float, ...]
    """validation losses, one for each epoch that has ended"""
    window_lengths: SavedWindowLengths
    records_bytes: int
    """length of the records when this was saved"""
    recurrence: tuple[LayerPlan, ...] = ()
    """plans of the persistent recurrence that were in use; none where torch's own LSTM was"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epoch < 1 or self.row < 0 or self.update < 0 or (self.row == 0) != (self.update == 0):
            raise ValueError(
                f"epoch, row and update must be a place in a run, got {self.epoch}, {self.row} and {self.update}"
            )
        if self.best_epoch >= self.epoch:
            raise ValueError(f"best_epoch must be below epoch, {self.epoch}, got {self.best_epoch}")
        if not (math.isfinite(self.seconds) and self.seconds >= 0.0) or self.records_bytes < 0:
            raise ValueError(
                f"seconds and records_bytes must be at least 0, got {self.seconds} and {self.records_bytes}"
            )
        if len(self.losses) != self.epoch - 1 or not all(map(math.isfinite, self.losses)):
            raise ValueError(
                f"losses must be the finite validation losses of {self.epoch - 1} epochs, got {len(self.losses)}: "
                f"{', '.join(f'{loss:g}' for loss in self.losses[-5:])}"
            )


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def unprefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def check_run_tensors(saved: SavedRun, found: Mapping[str, Tensor], fresh: Mapping[str, Tensor], path: Path) -> None:
    """Refuse tensors that are not those of a run like ``fresh``, the tensors that it would save at its first update.

    Two groups, each like the parameters, may have come since: the best weights, and the averages.
    """
    parameters = unprefixed("model", fresh)
    expected = dict(fresh)
    if saved.valid_loss is not None:
        expected |= prefixed("best", parameters)
    if unprefixed("optimizer.average", found):
        expected |= prefixed("optimizer.average", {str(i): t for i, t in enumerate(parameters.values())})
    check_tensors(SavedRun, found, expected, path)
    place = (int(found["updater.row"]), int(found["updater.count"]))
    # At the end of an epoch the tensors are still those of its last update.
    if saved.update and (place != (saved.row, saved.update) or saved.update > found["updater.losses"].numel()):
        raise SavedRun.refusal(
            path,
            f"its meta is at row {saved.row}, update {saved.update}, and its tensors are at row {place[0]}, update "
            f"{place[1]}",
        )
    if found["optimizer.updates"] < 0:
        raise SavedRun.refusal(path, f"it counts {float(found['optimizer.updates']):g} averaged updates")
