"""The capacity of an output head at a width."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from sigsoftmax.records.schemas.base import Extent, MeasuredPayload

__all__ = ["CapacityResult", "StartResult", "softmax_width_of_equal_kl"]


@dataclass(frozen=True, kw_only=True)
class StartResult:
    """The start of one fit, and where it ended."""

    name: str
    """as ``svd`` or ``random 0``"""
    kl: float
    """KL at the end of the fit, in nats"""
    iterations: int
    """0 for a contained solution that was carried over exactly and not changed"""


@dataclass(frozen=True, kw_only=True)
class CapacityResult(MeasuredPayload):
    """The KL that a head can reach at a width on a language."""

    KIND = "capacity"
    VERSION = 2
    SUBJECT = ("language", "contexts", "words", "truth", "seed", "head", "width")

    language: str
    """in words"""
    contexts: int
    words: int
    head: str
    width: int
    """width of a hidden vector; a mixture has one for each component"""
    kl: float
    """the least KL found, in nats; may belong to a contained head (then it is a limit of this one)"""
    fitted_kl: float
    """the least KL of a fit of this head itself; rank and singular values are those of that fit"""
    starts: tuple[StartResult, ...]
    numbers_per_context: int
    """numbers that a fit chooses for each context: its hidden vectors and logits of priors"""
    output_parameters: int
    """numbers that a fit chooses for all contexts: the output matrix, the class bias and parameters of the function"""
    rank_bound: int
    """rank of log Q that theory allows"""
    rank: int
    """singular values of log Q above ``rank_threshold``"""
    rank_threshold: float
    """0.5 sqrt(M + N + 1) sigma_max eps of float32, as in the paper"""
    singular_values: tuple[float, ...]
    seed: int
    seconds: float
    truth: str = ""
    """checksum of the distributions that were fitted and of their weights, since files of one name may hold others;
    empty in records of version 1"""

    @property
    def extent(self) -> Extent:
        """A fit shows that a KL can be reached: the lower, the more is known."""
        return {"fit": -self.fitted_kl}

    @property
    def spread(self) -> float:
        """The worst minus the best end of the fits from different starts."""
        ends = self._ends or [0.0]
        return max(ends) - min(ends)

    @property
    def worst_fitted_kl(self) -> float:
        """The KL at which the worst of the fits from different starts ended."""
        return max(self._ends, default=self.fitted_kl)

    @property
    def _ends(self) -> list[float]:
        return [start.kl for start in self.starts if start.iterations]

    @property
    def limit_kl(self) -> float | None:
        """The KL of a contained head where it is below that of every fit of this head; else None.

        This head comes as near to it as one likes, or reaches it, but no fit from any start has found it.
        """
        return self.kl if self.kl < self.fitted_kl else None


def softmax_width_of_equal_kl(kl: float, curve: Mapping[int, float], *, floor: float = 1e-6) -> float:
    """The width at which softmax reaches ``kl``, given KL by width; log KL is interpolated linearly in the width.

    Outside the curve the answer is 0 (softmax is better at every width) or inf (worse at every width).
    """
    if not curve or min(curve.values()) < 0.0 or not kl >= 0.0:
        raise ValueError("expected a KL and a curve of KLs that are not negative, with at least one width")
    points = [(width, max(curve[width], floor)) for width in sorted(curve)]
    kl = max(kl, floor)
    if kl > points[0][1]:
        return 0.0
    for (left, left_kl), (right, right_kl) in itertools.pairwise(points):
        if left_kl >= kl >= right_kl:
            fall = math.log(left_kl / right_kl)
            return float(left) if fall == 0.0 else left + (right - left) * math.log(left_kl / kl) / fall
    return float(points[-1][0]) if kl == points[-1][1] else math.inf
