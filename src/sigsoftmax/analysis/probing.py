"""What is taken to hold of a phi that a user registered, from its slope at some logits.

The family knows the properties of its own members (``family.properties``) and none of a registered phi. An analysis
that needs one asks the family first, and probes only what the family does not know.

Shapes: V words.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sigsoftmax.family import OutputFunction

__all__ = ["ProbedEnds", "is_rising", "line_beyond", "slopes_of_ends"]

FAR, FARTHER = 1e3, 1e4
"""Logits at which a phi that has asymptotes should have reached them."""


class ProbedEnds(NamedTuple):
    """The slopes of phi at -inf, at +inf and at 0, each (V,); None where phi does not become a line."""

    left: Tensor | None
    right: Tensor | None
    centre: Tensor


def slopes_of_ends(function: OutputFunction, words: int) -> ProbedEnds:
    """Slopes far out that have stopped to change."""

    def slope_at(z: float) -> Tensor:
        return function.slope(torch.full((words,), z, dtype=torch.float64)).detach()

    def end(sign: float) -> Tensor | None:
        near, far = slope_at(sign * FAR), slope_at(sign * FARTHER)
        return far if torch.allclose(near, far, rtol=1e-6, atol=1e-9) else None

    return ProbedEnds(end(-1.0), end(1.0), slope_at(0.0))


def is_rising(function: OutputFunction) -> bool:
    """Whether the slope is positive at every logit of a fine grid."""
    z = torch.linspace(-60.0, 60.0, 2401, dtype=torch.float64)
    return bool((function.slope(z) > 0.0).all())


def line_beyond(function: OutputFunction, start: float) -> float | None:
    """The slope of phi from ``start`` on, away from 0, if it is one line there within the rounding of float64."""
    z = torch.linspace(start, 4.0 * start, 7, dtype=torch.float64)
    slopes = torch.stack([function.slope(value) for value in z])
    return float(slopes[0]) if torch.allclose(slopes, slopes[:1], rtol=1e-12, atol=0.0) else None
