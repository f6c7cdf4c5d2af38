"""The progress of a run, as those who watch it see it, and the way in which it can fail."""

from __future__ import annotations

from dataclasses import dataclass

from sigsoftmax.records.schemas.training import EpochRecord

__all__ = ["Diverged", "Progress"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The position of a run, for whoever watches."""

    epoch: int
    epochs: int
    update: int
    """number of the update in the epoch"""
    row: int
    rows: int
    tokens_per_second: float
    """speed in the epoch so far"""
    seconds_left: float | None
    """time until the end of the epoch"""
    loss: float | None
    """mean of the last full part of the epoch"""
    record: EpochRecord | None = None
    """given when an epoch has ended"""
    note: str | None = None
    """said once, before a run begins"""


class Diverged(ArithmeticError):
    """The loss, or what the run would save, is no longer finite; other runs of the process can go on."""
