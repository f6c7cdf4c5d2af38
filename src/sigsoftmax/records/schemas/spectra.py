"""Singular values of log-output matrices, the ranks that follow from them, and bounds on a rank.

A numerical rank is a number of singular values above a threshold, so a rank without its threshold means nothing; and a
threshold below the noise of the entries or of the arithmetic counts noise. So a spectrum knows how wrong it may be, and
counts nothing below its noise floor.

Symbols: M tokens of the vocabulary, T contexts, eps32 = 2^-23, eps64 = 2^-52.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from sigsoftmax.records.schemas.base import Extent, MeasuredPayload

__all__ = ["RULES", "BelowNoiseFloor", "RankBounds", "RankCount", "Rule", "Spectrum"]

EPS32 = 2.0**-23
EPS64 = 2.0**-52


class BelowNoiseFloor(ValueError):
    """A rank was asked for at a threshold below which a spectrum holds noise."""


class Rule(NamedTuple):
    """A threshold that people use, relative to the largest singular value."""

    name: str
    formula: str
    relative: Callable[[int, int], float]
    """threshold as a function of M and T"""


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("press32", "0.5 sqrt(M + T + 1) sigma_max eps32", lambda m, t: 0.5 * math.sqrt(m + t + 1) * EPS32),
        Rule("numpy32", "max(M, T) sigma_max eps32", lambda m, t: max(m, t) * EPS32),
        Rule("numpy64", "max(M, T) sigma_max eps64", lambda m, t: max(m, t) * EPS64),
        Rule("press64", "0.5 sqrt(M + T + 1) sigma_max eps64", lambda m, t: 0.5 * math.sqrt(m + t + 1) * EPS64),
    )
}
"""The rule of Press et al. with eps32 is behind the ranks in the paper's tables; numpy's is that of ``matrix_rank``."""


class RankCount(NamedTuple):
    """A rank at a threshold; its fields are None where the spectrum refuses to count."""

    rule: str
    """a name in ``RULES``, or ``noise`` for the noise floor itself"""
    threshold: float
    rank: int | None
    at_least: int | None
    """singular values that exceed the threshold by more than their error"""
    at_most: int | None
    """singular values that would exceed the threshold if each were larger by its error"""

    @property
    def text(self) -> str:
        if self.rank is None:
            return "not counted: below the noise floor"
        return str(self.rank) if self.at_least == self.at_most else f"{self.rank} ({self.at_least} to {self.at_most})"


@dataclass(frozen=True, kw_only=True)
class Spectrum(MeasuredPayload):
    """The singular values of an M x T matrix, how wrong they may be, and the ranks that follow."""

    KIND = "spectrum"
    VERSION = 2
    SUBJECT = ("source", "words", "precision")

    source: str
    """description of the matrix, in words"""
    words: int
    contexts: int
    singular_values: tuple[float, ...]
    """the largest first; below the noise floor they are noise, and 0 where an eigenvalue of a Gram matrix was < 0"""
    method: str = "svd"
    """``svd`` of the matrix, ``qr`` in blocks and then svd, or eigenvalues of a ``gram`` matrix; all in float64"""
    dtype: str = "float64"
    """dtype of the entries as they came"""
    precision: str = ""
    """the least precise dtype that the entries went through, as far as known; empty if not recorded"""
    squared_error: float = 0.0
    """estimated error of the squared singular values: rounding in a Gram matrix and its eigenvalues"""
    value_error: float = 0.0
    """estimated error of the singular values: rounding in the SVD, and in the entries as they came"""
    row_sum_error: float | None = None
    """the largest abs(log of the sum of a row's probabilities); None if the entries are not log-probabilities"""
    contexts_expected: int | None = None
    """number of contexts there should have been, if the matrix broke off before its end"""
    seconds: float | None = None

    @property
    def extent(self) -> Extent:
        return {"contexts": self.contexts, "singular values": len(self.singular_values)}

    @property
    def is_usable(self) -> bool:
        """Something can be drawn and counted: a record may hold anything."""
        errors = (self.squared_error, self.value_error)
        return (
            bool(self.singular_values)
            and 0.0 < self.largest < math.inf
            and all(0.0 <= value <= self.largest for value in self.singular_values)
            and math.isfinite(sum(self.singular_values))
            and all(0.0 <= error < math.inf for error in errors)
            and min(self.words, self.contexts) > 0
        )

    @property
    def largest(self) -> float:
        return self.singular_values[0]

    @property
    def noise_floor(self) -> float:
        """Twice what noise alone can make of a zero. 0 in records of version 1, which do not know theirs."""
        return 2.0 * (math.sqrt(self.squared_error) + self.value_error)

    def threshold(self, rule: str) -> float:
        """The absolute threshold of a rule in ``RULES``, or the noise floor for ``noise``."""
        if rule == "noise":
            return self.noise_floor
        if rule not in RULES:
            raise ValueError(f"unknown rule {rule!r} for a rank; the known ones are {', '.join(RULES)}, noise")
        return RULES[rule].relative(self.words, self.contexts) * self.largest

    @property
    def press32_threshold(self) -> float:
        """0.5 sqrt(M + T + 1) sigma_max eps of float32: the rule behind the ranks in the paper's tables."""
        return self.threshold("press32")

    @property
    def float64_threshold(self) -> float:
        """max(M, T) sigma_max eps of float64: numpy's rule."""
        return self.threshold("numpy64")

    def can_count(self, threshold: float) -> bool:
        return threshold >= self.noise_floor

    def rank(self, threshold: float) -> int:
        """The number of singular values above an absolute threshold; refused below the noise floor."""
        if not self.can_count(threshold):
            remedy = "choose a higher threshold, or compute the entries with more precision"
            if self.method == "gram" and not (self.squared_error and 2.0 * self.value_error > threshold):
                remedy = "compute the spectrum with method='exact', or choose a higher threshold"
            raise BelowNoiseFloor(
                f"a rank at the threshold {threshold:.3g} would count noise: the noise floor of this spectrum is "
                f"{self.noise_floor:.3g} (largest singular value {self.largest:.3g}, method {self.method}, entries of "
                f"{self.precision or self.dtype}); {remedy}"
            )
        return sum(value > threshold for value in self.singular_values)

    def count(self, rule: str) -> RankCount:
        """The rank under a rule with its uncertainty, or a refusal."""
        threshold = self.threshold(rule)
        if not self.can_count(threshold):
            return RankCount(rule, threshold, None, None, None)
        lowered = (math.sqrt(max(v * v - self.squared_error, 0.0)) - self.value_error for v in self.singular_values)
        raised = (math.sqrt(v * v + self.squared_error) + self.value_error for v in self.singular_values)
        at_least, at_most = (sum(value > threshold for value in values) for values in (lowered, raised))
        return RankCount(rule, threshold, self.rank(threshold), at_least, at_most)

    def ranks(self) -> tuple[RankCount, ...]:
        """The ranks under every rule, and above the noise floor."""
        return tuple(self.count(rule) for rule in (*RULES, "noise"))

    @property
    def press32_rank(self) -> int:
        return self.rank(self.press32_threshold)

    @property
    def float64_rank(self) -> int:
        return self.rank(self.float64_threshold)

    @property
    def stable_rank(self) -> float:
        """sum sigma^2 / sigma_max^2, which noise does not move; 0 for a matrix of zeros."""
        return sum((value / self.largest) ** 2 for value in self.singular_values) if self.largest else 0.0

    @property
    def effective_rank(self) -> float:
        """exp(-sum p log p) with p = sigma / sum sigma, over the values above the noise floor; 0 if there are none."""
        values = [value for value in self.singular_values if value > self.noise_floor]
        total = sum(values)
        # One that is too small beside the sum adds nothing.
        shares = [share for share in (value / total for value in values) if share]
        return math.exp(-sum(share * math.log(share) for share in shares)) if shares else 0.0


@dataclass(frozen=True, kw_only=True)
class RankBounds(MeasuredPayload):
    """Bounds between which the numerical rank of an M x T log-output matrix lies, without its spectrum."""

    KIND = "rank_bounds"
    VERSION = 1
    SUBJECT = ("source", "head", "width", "words", "rule")

    source: str
    """description of the matrix, in words"""
    head: str
    """the output head, as ``Head.parse`` reads it; empty if not known"""
    width: int | None
    """width of the hidden vectors; None if not known"""
    words: int
    contexts: int
    lower: int
    """singular values of the block above ``counting_threshold``: the whole matrix has at least as many above it"""
    upper: int
    upper_reason: str
    """in words"""
    rule: str
    """whose rank is bounded: a name in ``RULES``"""
    norm_bound: float
    """no smaller than the largest singular value of the whole matrix"""
    norm_contexts: int
    """contexts whose rows were computed in full for ``norm_bound``; the others are bounded by the norms of h and W"""
    threshold_bound: float
    """the rule's absolute threshold with ``norm_bound`` for sigma_max: no smaller than the true threshold"""
    counting_threshold: float
    """``threshold_bound`` and a bound on the rounding of the block"""
    block_contexts: int
    block_words: int
    block_singular_values: tuple[float, ...]
    seed: int
    seconds: float

    @property
    def extent(self) -> Extent:
        return {"contexts": self.contexts, "block": self.block_contexts * self.block_words}
