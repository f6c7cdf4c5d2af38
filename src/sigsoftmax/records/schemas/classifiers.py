"""Results of a classifier with a given head: likelihood, accuracy, calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sigsoftmax.records.schemas.base import Extent, MeasuredPayload

__all__ = ["Attempt", "Calibration", "ClassifierResult", "ConfidenceBin"]


@dataclass(frozen=True, kw_only=True)
class ConfidenceBin:
    """The predictions whose confidence, the probability of the likeliest class, lies in (low, high]."""

    low: float
    high: float
    count: int
    confidence: float | None
    """mean over the bin; None if it is empty"""
    accuracy: float | None
    """share of the bin that was right; None if it is empty"""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Calibration of the predicted probabilities."""

    expected_error: float
    """sum over bins of their share of the predictions times |accuracy - confidence|"""
    brier: float
    """mean over predictions of sum_i (p_i - 1[i is the class])^2: 0 is best, 2 worst"""
    bins: tuple[ConfidenceBin, ...]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One learning rate that was tried."""

    learning_rate: float
    valid_loss: float | None
    """nats, at the best epoch; None if no epoch had a finite one"""
    best_epoch: int
    """from 1; 0 if there was none"""


@dataclass(frozen=True, kw_only=True)
class ClassifierResult(MeasuredPayload):
    """One head at one width with one seed: the attempt that was best on validation data, on test data."""

    KIND = "classifier"
    VERSION = 1
    SUBJECT = ("dataset", "head", "width", "seed")

    dataset: str
    classes: int
    train: int
    """examples, as valid and test"""
    valid: int
    test: int
    head: str
    width: int
    """units of the layer that the head sees"""
    seed: int
    """seed of the split, the first weights and the order of the examples"""
    parameters: int
    """number of parameters of the whole classifier"""
    head_parameters: int
    """number of parameters behind the layer that the head sees"""
    epochs: int
    """epochs of every attempt"""
    attempts: tuple[Attempt, ...]
    learning_rate: float
    """learning rate of the best attempt"""
    valid_loss: float
    test_loss: float
    """mean -log p of the class, in nats"""
    accuracy: float
    calibration: Calibration
    learned: Mapping[str, float]
    """parameters of the output function after training, their mean where there is one per class"""
    seconds: float
    """duration of all attempts"""

    @property
    def extent(self) -> Extent:
        return {attempt.learning_rate: self.epochs for attempt in self.attempts}
