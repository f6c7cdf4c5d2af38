"""Properties of a phi that a user registered, from its slope at some logits.

The family knows the properties of its own members (``family.properties``) and none of a registered phi. An analysis
that needs one asks the family first, and probes only what the family does not know.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sigsoftmax.family import OutputFunction

__all__ = ["is_rising", "line_beyond", "settled_slope"]

FAR, FARTHER = 1e3, 1e4
"""Logits at which a phi that has asymptotes should have reached them."""


def settled_slope(function: OutputFunction, vocabulary: int, sign: float) -> Tensor | None:
    """The slope of phi far out, (V,): at +inf or -inf by the sign; None where phi does not become a line."""
    near, far = (function.slope(torch.full((vocabulary,), sign * z, dtype=torch.float64)) for z in (FAR, FARTHER))
    return far.detach() if torch.allclose(near, far, rtol=1e-6, atol=1e-9) else None


def is_rising(function: OutputFunction) -> bool:
    """True if the slope is positive at every logit of a fine grid."""
    z = torch.linspace(-60.0, 60.0, 2401, dtype=torch.float64)
    return bool((function.slope(z) > 0.0).all())


def line_beyond(function: OutputFunction, start: float) -> float | None:
    """The slope of phi from ``start`` on, away from 0, if it is one line there within the rounding of float64."""
    z = torch.linspace(start, 4.0 * start, 7, dtype=torch.float64)
    slopes = torch.stack([function.slope(value) for value in z])
    return float(slopes[0]) if torch.allclose(slopes, slopes[:1], rtol=1e-12, atol=0.0) else None
