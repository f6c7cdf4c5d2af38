"""Sweeps: results of trials, and differences between recipes over the same seeds. Losses are in nats per token."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from sigsoftmax.records.schemas.training import LatestCounts, RunIdentity
from sigsoftmax.records.statistics import perplexity

__all__ = ["PairedDifferenceRecord", "Quantity", "TrialRecord"]

Quantity = Literal["test_loss", "kl"]


@dataclass(frozen=True, kw_only=True)
class TrialRecord(LatestCounts):
    """A trial that has ended: one recipe with one seed at one point of the grid."""

    KIND: ClassVar[str] = "trial"
    VERSION: ClassVar[int] = 1

    run: RunIdentity
    """identity of the last phase"""
    point: tuple[str, ...]
    """the alternatives that it took, as ``training.learning_rate=20``; none where nothing but recipe and seed varies"""
    epochs: int
    """epochs of all phases"""
    updates: int
    valid_loss: float
    """in the columns that the recipe validates in"""
    test_loss: float
    """in one column"""
    kl: float | None
    """mean over test positions of the exact KL(truth || model), where the truth is known"""
    entropy_rate: float | None
    """entropy rate of the language, where it is known"""
    seconds: float
    """duration of training and validation"""

    @property
    def subject(self) -> Hashable:
        return self.run, self.point

    @property
    def valid_perplexity(self) -> float:
        return perplexity(self.valid_loss)

    @property
    def test_perplexity(self) -> float:
        return perplexity(self.test_loss)


@dataclass(frozen=True, kw_only=True)
class PairedDifferenceRecord:
    """By how much a recipe lies above its baseline, seed by seed, with Student's interval of the mean."""

    KIND: ClassVar[str] = "paired-difference"
    VERSION: ClassVar[int] = 2

    recipe: str
    point: tuple[str, ...]
    baseline_recipe: str
    baseline_point: tuple[str, ...]
    quantity: Quantity
    seeds: tuple[int, ...]
    """that both have"""
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
    def subject(self) -> Hashable:
        compared = (self.recipe, self.point), (self.baseline_recipe, self.baseline_point)
        return *compared, self.quantity, self.corpus_checksum, self.changes

    @property
    def extent(self) -> Mapping[Hashable, float]:
        return dict.fromkeys(self.seeds, 1.0)
