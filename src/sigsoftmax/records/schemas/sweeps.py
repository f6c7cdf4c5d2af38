"""Sweeps: results of trials, and differences between recipes over the same seeds. Losses are in nats per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sigsoftmax.records.schemas.base import Extent, MeasuredPayload
from sigsoftmax.records.schemas.training import TrainingResult

__all__ = ["PairedDifferenceRecord", "Quantity", "TrialRecord"]

Quantity = Literal["test_loss", "kl"]


@dataclass(frozen=True, kw_only=True)
class TrialRecord(TrainingResult):
    """A trial that has ended: one recipe with one seed at one point of the grid."""

    KIND = "trial"
    VERSION = 1
    SUBJECT = ("run", "point")

    point: tuple[str, ...]
    """the alternatives that it took, as ``training.learning_rate=20``; none where nothing but recipe and seed varies"""


@dataclass(frozen=True, kw_only=True)
class PairedDifferenceRecord(MeasuredPayload):
    """The distance of a recipe above its baseline, seed by seed, with Student's interval of the mean."""

    KIND = "paired-difference"
    VERSION = 2
    SUBJECT = ("recipe", "point", "baseline_recipe", "baseline_point", "quantity", "corpus_checksum", "changes")

    recipe: str
    point: tuple[str, ...]
    baseline_recipe: str
    baseline_point: tuple[str, ...]
    quantity: Quantity
    seeds: tuple[int, ...]
    """seeds that both have"""
    mean: float
    deviation: float | None
    """standard deviation of the differences, with n - 1; None for a single pair"""
    low: float | None
    high: float | None
    """ends of the interval; None where there are too few pairs for one"""
    confidence: float
    corpus_checksum: str = ""
    """checksum of the text that both were trained on; empty in records of version 1"""
    changes: tuple[str, ...] = ()
    """made to all trials of the sweep, as ``training.epochs=4``; empty in records of version 1"""

    @property
    def extent(self) -> Extent:
        return dict.fromkeys(self.seeds, 1.0)
