"""What is known of phi: whether it increases, bends or is a line, its asymptotes, and how steep it is.

Backends choose kernels by these answers and analyses their proofs. They are given once for each form, and nobody finds
them out a second time. An answer depends on the values of the form's arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Values = Sequence[float | None]
"""The values of a form's arguments; None for one that is not known: it differs by class, can change, or lies on a
device that would have to be waited for."""


class LinearPiece(NamedTuple):
    """A line that phi follows: ``slope * z + intercept``."""

    where: Literal["left", "centre", "right"]
    """The asymptote at -inf, the one at +inf, or the tangent halfway between two that are parallel."""
    slope: float
    intercept: float | None
    """None where it depends on a value that is not known."""


@dataclass(frozen=True)
class Properties:
    """What is known of a phi for given values of its arguments; None is the answer where nothing is known.

    This class itself is the answer for a phi that a user registered.
    """

    values: Values

    @property
    def is_increasing(self) -> bool | None:
        """Whether phi never decreases; then the largest phi of a row is that of its highest logit."""
        return None

    @property
    def is_strictly_increasing(self) -> bool | None:
        """Whether phi rises everywhere; then classes that share it are ordered as their logits are."""
        return None

    @property
    def is_concave(self) -> bool | None:
        """Whether the slope of phi never grows; then phi is below its tangents and asymptotes."""
        return None

    @property
    def is_affine(self) -> bool | None:
        """Whether phi is one line, so that log f has rank at most d + 1 (d + 2 with a bias)."""
        return None

    @property
    def affine_slope(self) -> float | None:
        """The slope of a phi that is one line; None as well if it is none."""
        return None

    @property
    def steepest(self) -> float:
        """A bound of the absolute slope, for which a value that is not known counts as 1; inf if there is none.

        Gradients of logits can be as many times larger than the loss, and float16 ends at 65504.
        """
        return math.inf

    @property
    def linear_pieces(self) -> tuple[LinearPiece, ...] | None:
        """The lines that phi follows, from left to right. An asymptote that is not among them does not exist."""
        return None

    @property
    def bend(self) -> float | None:
        """The logit around which phi leaves one line for the next."""
        return None

    @property
    def is_softmax(self) -> bool | None:
        """Whether f is softmax at some positive temperature."""
        return None if self.is_affine is None else self.is_affine and self.is_strictly_increasing

    @property
    def is_sigsoftmax(self) -> bool | None:
        """Whether phi is ``z + log sigmoid(z - c)`` with one known c for all classes.

        It has passes of its own, with one exponential per element.
        """
        return None

    def is_same_phi(self, other: Properties) -> bool | None:
        """Whether both describe one phi, but for a constant, which f does not depend on."""
        if Properties in (type(self), type(other)) or None in (*self.values, *other.values):
            return None
        if self.affine_slope is not None:
            return self.affine_slope == other.affine_slope
        return type(self) is type(other) and tuple(self.values) == tuple(other.values)


class LogisticProperties(Properties):
    """phi(z) = alpha z + beta log sigmoid(z - c); its slope lies between alpha, far right, and alpha + beta."""

    @property
    def _end_slopes(self) -> tuple[float, float] | None:
        """Those at -inf and at +inf."""
        alpha, beta, _ = self.values
        return None if alpha is None or beta is None else (alpha + beta, alpha)

    @property
    def is_increasing(self) -> bool | None:
        ends = self._end_slopes
        return None if ends is None else ends[0] >= 0.0 and ends[1] >= 0.0

    @property
    def is_strictly_increasing(self) -> bool | None:
        # Between its ends the slope takes neither of their values unless they are equal.
        ends = self._end_slopes
        return None if ends is None else min(ends) >= 0.0 and max(ends) > 0.0

    @property
    def is_concave(self) -> bool | None:
        beta = self.values[1]
        return None if beta is None else beta >= 0.0

    @property
    def is_affine(self) -> bool | None:
        beta = self.values[1]
        return None if beta is None else beta == 0.0

    @property
    def affine_slope(self) -> float | None:
        return self.values[0] if self.is_affine else None

    @property
    def steepest(self) -> float:
        alpha, beta = (1.0 if value is None else value for value in self.values[:2])
        return max(abs(alpha), abs(alpha + beta))

    @property
    def linear_pieces(self) -> tuple[LinearPiece, ...] | None:
        ends = self._end_slopes
        if ends is None:
            return None
        beta, c = self.values[1:]
        at_zero = None if beta is None or c is None else -beta * c
        return LinearPiece("left", ends[0], 0.0 if beta == 0.0 else at_zero), LinearPiece("right", ends[1], 0.0)

    @property
    def bend(self) -> float | None:
        return self.values[2]

    @property
    def is_sigsoftmax(self) -> bool | None:
        alpha, beta, c = self.values
        return None if alpha is None or beta is None or c is None else alpha == beta == 1.0


class ReluProperties(Properties):
    """phi(z) = log(max(z, 0) + eps): flat left of 0, and a logarithm, which has no asymptote, right of it."""

    @property
    def is_increasing(self) -> bool:
        return True

    @property
    def is_strictly_increasing(self) -> bool:
        return False

    @property
    def is_concave(self) -> bool:
        return False

    @property
    def is_affine(self) -> bool:
        return False

    @property
    def steepest(self) -> float:
        eps = self.values[0]
        return math.inf if eps is None else 1.0 / eps

    @property
    def linear_pieces(self) -> tuple[LinearPiece, ...]:
        eps = self.values[0]
        return (LinearPiece("left", 0.0, None if eps is None else math.log(eps)),)

    @property
    def bend(self) -> float:
        return 0.0

    @property
    def is_sigsoftmax(self) -> bool:
        return False


class SoftcapProperties(Properties):
    """phi(z) = c tanh(z / c), c > 0: flat at both ends, with the slope 1 between them."""

    @property
    def is_increasing(self) -> bool:
        return True

    @property
    def is_strictly_increasing(self) -> bool:
        return True

    @property
    def is_concave(self) -> bool:
        return False

    @property
    def is_affine(self) -> bool:
        return False

    @property
    def steepest(self) -> float:
        return 1.0

    @property
    def linear_pieces(self) -> tuple[LinearPiece, ...]:
        c = self.values[0]
        lowest, highest = (None, None) if c is None else (-c, c)
        return LinearPiece("left", 0.0, lowest), LinearPiece("centre", 1.0, 0.0), LinearPiece("right", 0.0, highest)

    @property
    def bend(self) -> float:
        return 0.0

    @property
    def is_sigsoftmax(self) -> bool:
        return False
