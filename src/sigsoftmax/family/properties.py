"""Properties of phi that are known: where it increases, whether it is a line, its asymptotes, and how steep it is.

Backends choose kernels by these answers and analyses their proofs. They are given once for each formula, and depend on
the values of the formula's arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


class Properties(NamedTuple):
    """The properties of a phi for given values of its arguments; None where nothing is known.

    The defaults are the answer for a phi that a user registered.
    """

    values: Values
    formula: str | None = None
    """The name of the built-in formula."""
    is_increasing: bool | None = None
    """True if phi never decreases; then the largest phi of a row is that of its highest logit."""
    is_strictly_increasing: bool | None = None
    """True if phi rises everywhere; then classes that share it are ordered as their logits are."""
    is_concave: bool | None = None
    """True if the slope of phi never grows; then phi is below its tangents and asymptotes."""
    affine_slope: float | None = None
    """The slope of a phi that is one line; None as well if it is none."""
    is_affine: bool | None = None
    """True if phi is one line, so that log f has rank at most d + 1 (d + 2 with a bias)."""
    is_sigsoftmax: bool | None = None
    """True if phi is ``z + log sigmoid(z - c)`` with one known c for all classes.

    It has passes of its own, with one exponential per element.
    """
    steepest: float = math.inf
    """A bound of the absolute slope, for which a value that is not known counts as 1; inf if there is none.

    Gradients of logits can be as many times larger than the loss, and float16 ends at 65504.
    """
    linear_pieces: tuple[LinearPiece, ...] | None = None
    """The lines that phi follows, from left to right. An asymptote that is not among them does not exist."""
    nonlinear_at: float | None = None
    """The logit around which phi leaves one line for the next."""

    @property
    def is_softmax(self) -> bool | None:
        """True if f is softmax at some positive temperature."""
        return None if self.is_affine is None else self.is_affine and self.is_strictly_increasing

    def is_same_phi(self, other: Properties) -> bool | None:
        """Tell whether both describe one phi, but for a constant, which f does not depend on."""
        if None in (self.formula, other.formula, *self.values, *other.values):
            return None
        if self.affine_slope is not None:
            return self.affine_slope == other.affine_slope
        return self.formula == other.formula and tuple(self.values) == tuple(other.values)


def logistic_properties(values: Values) -> Properties:
    """phi(z) = alpha z + beta log sigmoid(z - c); its slope lies between alpha, far right, and alpha + beta."""
    alpha, beta, c = values
    bound_alpha = 1.0 if alpha is None else alpha
    ends = None if alpha is None or beta is None else (alpha + beta, alpha)
    is_affine = None if beta is None else beta == 0.0
    intercept = 0.0 if is_affine else None if beta is None or c is None else -beta * c
    return Properties(
        values,
        "logistic",
        is_increasing=None if ends is None else min(ends) >= 0.0,
        # Between its ends the slope takes neither of their values unless they are equal.
        is_strictly_increasing=None if ends is None else min(ends) >= 0.0 and max(ends) > 0.0,
        is_concave=None if beta is None else beta >= 0.0,
        affine_slope=alpha if is_affine else None,
        is_affine=is_affine,
        is_sigsoftmax=None if None in values else alpha == beta == 1.0,
        steepest=max(abs(bound_alpha), abs(bound_alpha + (1.0 if beta is None else beta))),
        linear_pieces=ends and (LinearPiece("left", ends[0], intercept), LinearPiece("right", ends[1], 0.0)),
        nonlinear_at=c,
    )


def relu_properties(values: Values) -> Properties:
    """phi(z) = log(max(z, 0) + eps): flat left of 0, and a logarithm, which has no asymptote, right of it."""
    (eps,) = values
    return Properties(
        values,
        "relu",
        is_increasing=True,
        is_strictly_increasing=False,
        is_concave=False,
        is_affine=False,
        is_sigsoftmax=False,
        steepest=math.inf if eps is None else 1.0 / eps,
        linear_pieces=(LinearPiece("left", 0.0, None if eps is None else math.log(eps)),),
        nonlinear_at=0.0,
    )


def softcap_properties(values: Values) -> Properties:
    """phi(z) = c tanh(z / c), c > 0: flat at both ends, with the slope 1 between them."""
    (c,) = values
    ends = (None, None) if c is None else (-c, c)
    return Properties(
        values,
        "softcap",
        is_increasing=True,
        is_strictly_increasing=True,
        is_concave=False,
        is_affine=False,
        is_sigsoftmax=False,
        steepest=1.0,
        linear_pieces=(
            LinearPiece("left", 0.0, ends[0]),
            LinearPiece("centre", 1.0, 0.0),
            LinearPiece("right", 0.0, ends[1]),
        ),
        nonlinear_at=0.0,
    )
