"""The formulas of the family: phi = log g, its slope, and its derivatives by its arguments, each written once.

``logistic`` alone covers five members, because softmax, sigsoftmax, its shifted version, sigmoid and gss are all
``alpha z + beta log sigmoid(z - c)``. What is known of each, such as where it increases, stands in ``properties``.
Derivations are in docs/mathematics.md.

Shapes: N rows, V classes. Arguments of a form are tensors of shape () or (V,).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sigsoftmax.family.properties import Properties, Values, logistic_properties, relu_properties, softcap_properties

ArgumentSlopes = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
OffsetGap = Callable[[Tensor, Sequence[Tensor], Tensor, Sequence[Tensor]], Tensor]


class Scaled(NamedTuple):
    """phi relative to an offset, in units of :attr:`Form.unit`: phi(z) = unit * value + offset."""

    value: Tensor
    """finite for every finite z, also where its product with the unit is none"""
    offset: Tensor


def _one(*arguments: Tensor) -> float:
    return 1.0


@dataclass(frozen=True, eq=False)
class Form:
    """A formula for phi; each is made once, and is equal to itself alone.

    Masked classes (logit -inf) never reach these functions: see ``backends.reference``.

    The peak of a row is its logit at which phi is largest: the row maximum for an increasing phi, the minimum for a
    decreasing one.

    ``scaled(z, peak, *arguments)`` is phi relative to an offset that belongs to the peak. It exists because
    ``phi(z) - phi(peak)`` cancels: near ``z = -1e4`` the difference of two float32 values of phi is off by 6e-4. The
    offset is constant in z and differentiable in the arguments.

    ``unit(*arguments)`` is a power of two, a number or a tensor (). phi less its offset is a multiple of it that is
    finite for every finite logit, so that sums over classes and losses can be formed which, weighted, are numbers that
    the dtype holds while phi is not.

    ``argument_slopes(z, peak, *arguments)`` returns the derivatives by each argument of phi less its offset, and of
    the offset.

    ``properties(values)`` are the known properties of phi for these values of the arguments; none of a user's phi.

    ``peak(lowest, highest, *arguments)`` is the peak for any values of the arguments: whichever end of the row has the
    larger phi, since a phi that is monotone or convex is largest at an end. None means that the row maximum serves: phi
    never decreases, or ``scaled`` looks for the largest phi itself.

    ``offset_gap(peak, arguments, other_peak, other_arguments)`` is the difference of two rows' offsets, which
    cancels as well if it is formed from the two, in units. An argument per class is given by its mean. None means that
    nothing is known of the offset but its value.
    """

    name: str
    phi: Callable[..., Tensor]
    slope: Callable[..., Tensor]
    scaled: Callable[..., Scaled]
    argument_slopes: Callable[..., ArgumentSlopes]
    properties: Callable[[Values], Properties] = Properties
    peak: Callable[..., Tensor] | None = None
    unit: Callable[..., Tensor | float] = _one
    is_builtin: bool = True
    offset_gap: OffsetGap | None = None

    def relative(self, z: Tensor, peak: Tensor, *arguments: Tensor) -> tuple[Tensor, Tensor]:
        """``(phi(z) - offset, offset)``"""
        value, offset = self.scaled(z, peak, *arguments)
        return self.unit(*arguments) * value, offset

    def is_increasing(self, values: Values) -> bool:
        """True if phi is known not to decrease for these values; then the peak is the row maximum."""
        return self.properties(values).is_increasing is True


# Logistic: phi(z) = alpha z + beta log sigmoid(z - c)


def _logistic_phi(z: Tensor, alpha: Tensor, beta: Tensor, c: Tensor) -> Tensor:
    # alpha z and beta (z - c) cancel left of c for gss with k near 0, and overflow where their sum does not.
    x = z - c
    left = x < 0
    tail = F.logsigmoid(torch.where(left, -x, x))
    return torch.where(left, (alpha + beta) * x + alpha * c, alpha * z) + beta * tail


def _logistic_slope(z: Tensor, alpha: Tensor, beta: Tensor, c: Tensor) -> Tensor:
    # alpha + beta sigmoid(c - z) cancels left of c for gss with k near 0; each side is written from its own limit.
    x = z - c
    left = x < 0
    beyond = beta * torch.sigmoid(torch.where(left, x, -x))
    return torch.where(left, (alpha + beta) - beyond, alpha + beyond)


def _power_of_two(alpha: Tensor, beta: Tensor) -> Tensor:
    """The least power of two that is at least both slopes and 1; slopes are divided by it without rounding."""
    steepest = torch.maximum(alpha.abs(), (alpha + beta).abs()).detach().clamp(min=1.0)
    power = torch.exp2(torch.log2(steepest).ceil())
    # A rounded logarithm next to a whole number may have told the next power: kernels find it without one.
    power = torch.where(power < steepest, 2.0 * power, power)
    return torch.where(0.5 * power < steepest, power, 0.5 * power)


def _logistic_unit(alpha: Tensor, beta: Tensor, c: Tensor) -> Tensor:
    return 2.0 * _power_of_two(alpha, beta)


def _logistic_scaled(z: Tensor, peak: Tensor, alpha: Tensor, beta: Tensor, c: Tensor) -> Scaled:
    """phi less its offset as a piecewise linear function plus a tail.

    ``log sigmoid(x)`` is ``min(x, 0)`` plus a tail that is even in x, so left of c phi has the slope alpha + beta and
    right of it alpha. Each piece is written so that nothing large is subtracted from something like it: not the logit
    of the row's peak, and not one slope from the other (they cancel for gss with k near 0). The unit is twice a bound
    of the slopes: logits are halved and slopes scaled, because the difference of the extreme floats overflows, as do
    the two terms of a difference across c where phi falls on one side of it (gss with k < 0).
    """
    centre = c.detach().mean()
    x = z - c
    left = x < 0
    tail = F.logsigmoid(torch.where(left, -x, x))
    scale = _power_of_two(alpha, beta)
    left_slope, right_slope = (alpha + beta) / scale, alpha / scale
    half_z, half_peak, half_c, half_centre = 0.5 * z, 0.5 * peak, 0.5 * c, 0.5 * centre
    half_gap = half_z - half_peak
    line = torch.where(
        peak > centre,
        torch.where(left, left_slope * (half_z - half_c) - right_slope * (half_peak - half_c), right_slope * half_gap),
        torch.where(
            left,
            left_slope * half_gap + (beta / scale) * (half_centre - half_c),
            right_slope * (half_z - half_centre) - left_slope * (half_peak - half_centre),
        ),
    )
    unit = 2.0 * scale
    offset = torch.where(peak > centre, alpha * peak, (alpha + beta) * peak - beta * centre)
    return Scaled(line + (beta / unit) * tail, offset)


def _logistic_peak(lowest: Tensor, highest: Tensor, alpha: Tensor, beta: Tensor, c: Tensor) -> Tensor:
    """No member has alpha < 0 < alpha + beta, for which phi would be largest in between.

    With one c per class the phi of their mean decides; the largest phi is then at most beta times the spread away.
    """
    centre = c.mean()
    at_lowest, at_highest = (_logistic_scaled(z, highest, alpha, beta, centre).value for z in (lowest, highest))
    return torch.where(at_lowest > at_highest, lowest, highest)


def _logistic_argument_slopes(z: Tensor, peak: Tensor, alpha: Tensor, beta: Tensor, c: Tensor) -> ArgumentSlopes:
    # phi is linear in beta: its derivative is phi itself for alpha = 0, beta = 1.
    none, one = torch.zeros_like(alpha), torch.ones_like(beta)
    value, offset_by_beta = _logistic_scaled(z, peak, none, one, c)
    unit = _logistic_unit(none, one, c)
    # The difference of the extreme floats overflows; a class that far away has probability 0, and 0 * inf is NaN.
    largest = torch.finfo(z.dtype).max
    by_alpha, by_beta = ((z - peak).clamp(-largest, largest), (unit * value).clamp(-largest, largest))
    return (by_alpha, by_beta, -beta * torch.sigmoid(c - z)), (peak, offset_by_beta, torch.zeros_like(peak))


def _logistic_offset_gap(
    peak: Tensor, arguments: Sequence[Tensor], other_peak: Tensor, other_arguments: Sequence[Tensor]
) -> Tensor:
    """The offset is a line of slope alpha + beta left of c and of slope alpha right of it."""
    (alpha, beta, c), other_c = arguments, other_arguments[2]
    gap_left = torch.minimum(peak, c) - torch.minimum(other_peak, other_c)
    gap_right = torch.maximum(peak, c) - torch.maximum(other_peak, other_c)
    # Scaled as in ``_logistic_scaled``: each term may overflow where their sum does not.
    scale = _power_of_two(alpha, beta)
    from_left = ((alpha + beta) / scale) * (0.5 * (gap_left - (c - other_c)))
    return from_left + (alpha / scale) * (0.5 * gap_right)


# The form of relu: phi(z) is the logarithm of max(z, 0) + eps.


def _relu_phi(z: Tensor, eps: Tensor) -> Tensor:
    return torch.log(torch.relu(z) + eps)


def _relu_slope(z: Tensor, eps: Tensor) -> Tensor:
    return (z > 0) / (torch.relu(z) + eps)


def _relu_scaled(z: Tensor, peak: Tensor, eps: Tensor) -> Scaled:
    offset = _relu_phi(peak, eps)
    return Scaled(_relu_phi(z, eps) - offset, offset)


def _relu_argument_slopes(z: Tensor, peak: Tensor, eps: Tensor) -> ArgumentSlopes:
    at_peak = 1.0 / (torch.relu(peak) + eps)
    return (1.0 / (torch.relu(z) + eps) - at_peak,), (at_peak,)


# Softcap: phi(z) = c tanh(z / c)


def _softcap_phi(z: Tensor, c: Tensor) -> Tensor:
    return c * torch.tanh(z / c)


def _softcap_slope(z: Tensor, c: Tensor) -> Tensor:
    # 1 - tanh^2 is 0 in float32 from z/c = 9 on; this form keeps its digits there.
    x = z / c
    return 4.0 * torch.sigmoid(2.0 * x) * torch.sigmoid(-2.0 * x)


def _softcap_scaled(z: Tensor, peak: Tensor, c: Tensor) -> Scaled:
    # tanh a - tanh b = tanh(a - b) (1 - tanh a tanh b): no cancellation when a cap is wide.
    difference = torch.tanh((z - peak) / c) * (1.0 - torch.tanh(z / c) * torch.tanh(peak / c))
    return Scaled(c * difference, _softcap_phi(peak, c))


def _softcap_by_cap(z: Tensor, c: Tensor) -> Tensor:
    return torch.tanh(z / c) - (z / c) * _softcap_slope(z, c)


def _softcap_argument_slopes(z: Tensor, peak: Tensor, c: Tensor) -> ArgumentSlopes:
    at_peak = _softcap_by_cap(peak, c)
    return (_softcap_by_cap(z, c) - at_peak,), (at_peak,)


def _gap_of_phi(scaled: Callable[..., Scaled]) -> OffsetGap:
    """The gap of offsets for forms whose offset is phi of the peak, in units of 1."""
    return lambda peak, arguments, other_peak, _: scaled(peak, other_peak, *arguments).value


LOGISTIC = Form(
    "logistic",
    _logistic_phi,
    _logistic_slope,
    _logistic_scaled,
    _logistic_argument_slopes,
    logistic_properties,
    _logistic_peak,
    _logistic_unit,
    offset_gap=_logistic_offset_gap,
)
RELU = Form(
    "relu",
    _relu_phi,
    _relu_slope,
    _relu_scaled,
    _relu_argument_slopes,
    relu_properties,
    offset_gap=_gap_of_phi(_relu_scaled),
)
SOFTCAP = Form(
    "softcap",
    _softcap_phi,
    _softcap_slope,
    _softcap_scaled,
    _softcap_argument_slopes,
    softcap_properties,
    offset_gap=_gap_of_phi(_softcap_scaled),
)
