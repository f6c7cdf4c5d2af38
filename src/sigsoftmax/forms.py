"""The formulas of the family: phi = log g, its slope, and its derivatives by its arguments, each written once.

``logistic`` alone covers five members, because softmax, sigsoftmax, its shifted version, sigmoid and gss are all
``alpha z + beta log sigmoid(z - c)``. Derivations are in docs/mathematics.md.

Shapes: N rows, V classes. Arguments of a form are tensors of shape () or (V,).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Pair = tuple[Tensor, Tensor]
ArgumentSlopes = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
OffsetGap = Callable[[Tensor, Sequence[Tensor], Tensor, Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Form:
    """A formula for phi. Masked classes (logit -inf) never reach these functions: see ``backends.reference``.

    ``relative(z, anchor, *arguments)`` returns ``(phi(z) - offset, offset)`` for an anchor that is the largest
    logit of the row. It exists because ``phi(z) - phi(anchor)`` cancels: near ``z = -1e4`` the difference of two
    float32 values of phi is off by 6e-4. The offset is constant in z and differentiable in the arguments.

    ``argument_slopes(z, anchor, *arguments)`` returns the derivatives of these two results by each argument.

    ``offset_gap(anchor, arguments, other_anchor, other_arguments)`` is the difference of two rows' offsets, which
    cancels as well if it is formed from the two. An argument per class is given by its mean. None means that nothing is
    known of the offset but its value.
    """

    name: str
    phi: Callable[..., Tensor]
    slope: Callable[..., Tensor]
    relative: Callable[..., Pair]
    argument_slopes: Callable[..., ArgumentSlopes]
    is_builtin: bool = True
    offset_gap: OffsetGap | None = None


# Logistic: phi(z) = alpha z + beta log sigmoid(z - c)


def _logistic_phi(z: Tensor, alpha: Tensor, beta: Tensor, c: Tensor) -> Tensor:
    return alpha * z + beta * F.logsigmoid(z - c)


def _logistic_slope(z: Tensor, alpha: Tensor, beta: Tensor, c: Tensor) -> Tensor:
    # alpha + beta sigmoid(c - z) cancels left of c for gss with k near 0; each side is written from its own limit.
    x = z - c
    left = x < 0
    beyond = beta * torch.sigmoid(torch.where(left, x, -x))
    return torch.where(left, (alpha + beta) - beyond, alpha + beyond)


def _logistic_less_offset(z: Tensor, anchor: Tensor, alpha: Tensor, beta: Tensor, c: Tensor) -> Tensor:
    """phi less its offset as a piecewise linear function plus a tail.

    ``log sigmoid(x)`` is ``min(x, 0)`` plus a tail that is even in x, so left of c phi has the slope alpha + beta and
    right of it alpha. Each piece is written so that nothing large is subtracted from something like it: not the logit
    of the row's largest, and not one slope from the other (they cancel for gss with k near 0).
    """
    centre = c.detach().mean()
    x = z - c
    left = x < 0
    tail = F.logsigmoid(torch.where(left, -x, x))
    # Halved, because the difference of the extreme floats overflows, and 0 * inf is NaN.
    half_gap = 0.5 * z - 0.5 * anchor
    along_right = (2.0 * alpha) * half_gap
    line = torch.where(
        anchor > centre,
        torch.where(left, (alpha + beta) * x - alpha * (anchor - c), along_right),
        torch.where(
            left, (2.0 * (alpha + beta)) * half_gap + beta * (centre - c), along_right - beta * (anchor - centre)
        ),
    )
    return line + beta * tail


def _logistic_relative(z: Tensor, anchor: Tensor, alpha: Tensor, beta: Tensor, c: Tensor) -> Pair:
    return _logistic_less_offset(z, anchor, alpha, beta, c), alpha * anchor + beta * (anchor - c.detach().mean()).clamp(
        max=0.0
    )


def _logistic_argument_slopes(z: Tensor, anchor: Tensor, alpha: Tensor, beta: Tensor, c: Tensor) -> ArgumentSlopes:
    # phi is linear in beta: its derivative is phi itself for alpha = 0, beta = 1.
    none, one = torch.zeros_like(alpha), torch.ones_like(beta)
    by_beta, offset_by_beta = _logistic_relative(z, anchor, none, one, c)
    # The difference of the extreme floats overflows; a class that far below has probability 0, and 0 * inf is NaN.
    by_alpha = (z - anchor).clamp(min=torch.finfo(z.dtype).min)
    return (by_alpha, by_beta, -beta * torch.sigmoid(c - z)), (anchor, offset_by_beta, torch.zeros_like(anchor))


def _logistic_offset_gap(
    anchor: Tensor, arguments: Sequence[Tensor], other_anchor: Tensor, other_arguments: Sequence[Tensor]
) -> Tensor:
    """The offset is a line of slope alpha + beta left of c and of slope alpha right of it."""
    (alpha, beta, c), other_c = arguments, other_arguments[2]
    gap_left = torch.minimum(anchor, c) - torch.minimum(other_anchor, other_c)
    gap_right = torch.maximum(anchor, c) - torch.maximum(other_anchor, other_c)
    return (alpha + beta) * (gap_left - (c - other_c)) + alpha * gap_right


# The form of relu: phi(z) is the logarithm of max(z, 0) + eps.


def _relu_phi(z: Tensor, eps: Tensor) -> Tensor:
    return torch.log(torch.relu(z) + eps)


def _relu_slope(z: Tensor, eps: Tensor) -> Tensor:
    return (z > 0) / (torch.relu(z) + eps)


def _relu_relative(z: Tensor, anchor: Tensor, eps: Tensor) -> Pair:
    offset = _relu_phi(anchor, eps)
    return _relu_phi(z, eps) - offset, offset


def _relu_argument_slopes(z: Tensor, anchor: Tensor, eps: Tensor) -> ArgumentSlopes:
    at_anchor = 1.0 / (torch.relu(anchor) + eps)
    return (1.0 / (torch.relu(z) + eps) - at_anchor,), (at_anchor,)


# Softcap: phi(z) = c tanh(z / c)


def _softcap_phi(z: Tensor, c: Tensor) -> Tensor:
    return c * torch.tanh(z / c)


def _softcap_slope(z: Tensor, c: Tensor) -> Tensor:
    # 1 - tanh^2 is 0 in float32 from z/c = 9 on; this form keeps its digits there.
    x = z / c
    return 4.0 * torch.sigmoid(2.0 * x) * torch.sigmoid(-2.0 * x)


def _softcap_relative(z: Tensor, anchor: Tensor, c: Tensor) -> Pair:
    # tanh a - tanh b = tanh(a - b) (1 - tanh a tanh b): no cancellation when a cap is wide.
    difference = torch.tanh((z - anchor) / c) * (1.0 - torch.tanh(z / c) * torch.tanh(anchor / c))
    return c * difference, _softcap_phi(anchor, c)


def _softcap_by_cap(z: Tensor, c: Tensor) -> Tensor:
    return torch.tanh(z / c) - (z / c) * _softcap_slope(z, c)


def _softcap_argument_slopes(z: Tensor, anchor: Tensor, c: Tensor) -> ArgumentSlopes:
    at_anchor = _softcap_by_cap(anchor, c)
    return (_softcap_by_cap(z, c) - at_anchor,), (at_anchor,)


def _gap_of_phi(relative: Callable[..., Pair]) -> OffsetGap:
    """For forms whose offset is phi of the anchor."""
    return lambda anchor, arguments, other_anchor, _: relative(anchor, other_anchor, *arguments)[0]


LOGISTIC = Form(
    "logistic",
    _logistic_phi,
    _logistic_slope,
    _logistic_relative,
    _logistic_argument_slopes,
    offset_gap=_logistic_offset_gap,
)
RELU = Form(
    "relu", _relu_phi, _relu_slope, _relu_relative, _relu_argument_slopes, offset_gap=_gap_of_phi(_relu_relative)
)
SOFTCAP = Form(
    "softcap",
    _softcap_phi,
    _softcap_slope,
    _softcap_relative,
    _softcap_argument_slopes,
    offset_gap=_gap_of_phi(_softcap_relative),
)
