"""Means over seeds, and differences of means with their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

__all__ = ["LEAST_SEEDS", "Gap", "PairedDifference", "Sample", "perplexity", "seeds_to_resolve", "student_quantile"]

LEAST_SEEDS = 3
"""Below this many, no interval is given and nothing is called resolved: with two, t has one degree of freedom, and
whether an interval leaves out zero says little more than how near to each other the two happened to fall."""
SIGNIFICANCE = 0.05
POWER = 0.8
MOST_SEEDS = 10_000


def perplexity(loss: float) -> float:
    """exp(loss); inf where that is beyond a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Sample:
    """A mean, its standard deviation and how many runs it is over."""

    mean: float
    deviation: float | None
    """with n - 1; None for a single run"""
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        if not values:
            raise ValueError("a sample needs at least one value, got none")
        mean = sum(values) / len(values)
        if len(values) == 1:
            return cls(mean, None, 1)
        if not math.isfinite(mean):
            return cls(mean, math.nan, len(values))
        # Not by squares, which overflow where perplexities of runs that went wrong do not.
        return cls(mean, math.hypot(*(v - mean for v in values)) / math.sqrt(len(values) - 1), len(values))

    @property
    def standard_error(self) -> float | None:
        return None if self.deviation is None else self.deviation / math.sqrt(self.count)

    def interval(self, confidence: float = 1.0 - SIGNIFICANCE) -> tuple[float, float] | None:
        """Student's interval of the mean; None with fewer runs than one is given for, and where a run is not finite."""
        error = self.standard_error
        if error is None or not math.isfinite(error) or self.count < LEAST_SEEDS:
            return None
        half = student_quantile(0.5 + 0.5 * confidence, self.count - 1) * error
        return self.mean - half, self.mean + half


@dataclass(frozen=True)
class Gap:
    """The distance of the second sample's mean below the first's."""

    first: Sample
    second: Sample

    @property
    def size(self) -> float:
        return self.first.mean - self.second.mean

    @property
    def standard_error(self) -> float | None:
        """The standard error of the difference of two unpaired means; None where either has a single run."""
        first, second = self.first.standard_error, self.second.standard_error
        return None if first is None or second is None else math.hypot(first, second)

    def seeds_needed(self) -> int | None:
        """Seeds of each that would find a gap of this size at this spread; None if not known or beyond all reason."""
        if self.first.deviation is None or self.second.deviation is None:
            return None
        return seeds_to_resolve(self.size, self.first.deviation, self.second.deviation)


@dataclass(frozen=True)
class PairedDifference:
    """The distance of one thing above another on the same seeds, with Student's interval of the mean."""

    seeds: tuple[int, ...]
    sample: Sample
    confidence: float = 1.0 - SIGNIFICANCE

    @classmethod
    def of(
        cls, values: Mapping[int, float], baseline: Mapping[int, float], confidence: float = 1.0 - SIGNIFICANCE
    ) -> PairedDifference | None:
        """Both by seed; None without a seed that both have."""
        seeds = tuple(seed for seed in values if seed in baseline)
        if not seeds:
            return None
        return cls(seeds, Sample.of([values[seed] - baseline[seed] for seed in seeds]), confidence)

    @property
    def mean(self) -> float:
        return self.sample.mean

    @property
    def perplexity_change(self) -> float:
        """The difference in nats as a relative change of perplexity: -0.1 where it is a tenth lower."""
        return perplexity(self.mean) - 1.0

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of the mean difference; None with fewer pairs than an interval is given for."""
        return self.sample.interval(self.confidence)

    @property
    def is_resolved(self) -> bool | None:
        """The interval leaves out zero; None where there is no interval."""
        interval = self.interval
        return None if interval is None else not interval[0] <= 0.0 <= interval[1]


def seeds_to_resolve(gap: float, first_deviation: float, second_deviation: float) -> int | None:
    """Seeds of each of two heads, so that a two-sided test at 5 % finds a gap of that size in four cases of five.

    None where more than ten thousand would be needed.
    """
    if not gap or not math.isfinite(gap):
        return None
    spread = math.hypot(first_deviation, second_deviation) / abs(gap)
    if not spread < MOST_SEEDS:
        return None
    # Student's t asks for more than the normal distribution does, so that the search may begin there.
    normal = sum(NormalDist().inv_cdf(p) for p in (1.0 - SIGNIFICANCE / 2.0, POWER))
    fewest = max(float(LEAST_SEEDS), (normal * spread) ** 2)
    if fewest > MOST_SEEDS:
        return None
    for seeds in range(math.floor(fewest), MOST_SEEDS + 1):
        degrees = 2 * seeds - 2
        needed = student_quantile(1.0 - SIGNIFICANCE / 2.0, degrees) + student_quantile(POWER, degrees)
        if (needed * spread) ** 2 <= seeds:
            return seeds
    return None


def student_quantile(probability: float, degrees: float) -> float:
    """A quantile of Student's t, by bisection of its distribution function; degrees of freedom need not be whole.

    It is written here because every report needs it: torch and numpy do not have it, and SciPy, which a test compares
    it with, belongs to the extra ``audit`` alone.
    """
    if not (0.0 < probability < 1.0 and degrees > 0.0):
        raise ValueError(f"expected a probability between 0 and 1 and degrees above 0, got {probability}, {degrees}")
    if probability < 0.5:
        return -student_quantile(1.0 - probability, degrees)
    low, high = 0.0, NormalDist().inv_cdf(probability) + 1.0
    while _student_below(high, degrees) < probability:
        high *= 2.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _student_below(middle, degrees) < probability else (low, middle)
    return 0.5 * (low + high)


def _student_below(t: float, degrees: float) -> float:
    """The distribution function at t >= 0: 1 - I_x(degrees / 2, 1/2) / 2 with x = degrees / (degrees + t^2)."""
    x = degrees / (degrees + t * t)
    return 1.0 - 0.5 * _regularised_beta(x, 0.5 * degrees, 0.5)


def _regularised_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) by its continued fraction, evaluated by Lentz's method."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - _regularised_beta(1.0 - x, b, a)
    front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1.0))
    fraction = d
    for m in range(1, 1000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / (1.0 + term * d)
            c = 1.0 + term / c
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-14:
            break
    return math.exp(front) * fraction / a
