"""Starting points of fits: random ones, the truth's leading singular vectors, and every contained head.

A head contains another when its parameters can be chosen so that it makes the same distributions, exactly or as a
limit. A contained solution is carried over in two ways: exactly, as a point that only has to be evaluated and by
which containment holds whatever the optimiser does, and disturbed, as a start that can leave it.

Shapes: N contexts, V vocabulary, K components, R = N K rows, d width, e = d + 1 with the class bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from sigsoftmax.analysis.capacity.problem import Problem
from sigsoftmax.analysis.probing import line_beyond
from sigsoftmax.family import OutputFunction
from sigsoftmax.family.heads import Head
from sigsoftmax.family.parameters import ParameterKind

__all__ = ["Solution", "contains", "disturbed", "embedded", "random_start", "spectral_start", "strictly_contains"]

FAR = 40.0
"""Distance from the nonlinearity of phi at which it is a line within float64: exp(-40) is 4e-18."""
LEAST_SLOPE = 1e-3
"""The least slope of a line that is to carry the logits of a softmax, which are divided by it."""
NEW_LOGITS = 0.3
"""Standard deviation of what new columns add to the logits of a start."""


@dataclass(frozen=True)
class Solution:
    """A fitted head."""

    problem: Problem
    x: Tensor
    kl: float


class LinearEnd(NamedTuple):
    """phi is a line of this slope for all z at least ``FAR`` from ``nonlinear_at``, on the side of ``sign``."""

    sign: float
    slope: float
    nonlinear_at: float


def linear_end(function: OutputFunction) -> LinearEnd | None:
    """The side on which phi becomes a rising line, if any: there the member is softmax of scaled logits.

    sigsoftmax and gss do so at +inf, sigmoid at -inf. A user's own phi is probed, and taken to be nonlinear at 0.
    """
    known = function.properties
    slopes: dict[str, float | None]
    if known.linear_pieces is None:
        slopes, centre = {"right": line_beyond(function, FAR), "left": line_beyond(function, -FAR)}, 0.0
    else:
        slopes = {piece.where: piece.slope for piece in known.linear_pieces}
        assert known.nonlinear_at is not None, "numbers per class are asked here while they are equal"
        centre = known.nonlinear_at
    for where, sign in (("right", 1.0), ("left", -1.0)):
        slope = slopes.get(where)
        if slope is not None and slope > LEAST_SLOPE:
            return LinearEnd(sign, slope, centre)
    return None


def _learned_values(head: Head, smaller: Head) -> dict[str, float]:
    """Values of what ``head`` learns: those that make the member of ``smaller``, if any do, else the first ones."""
    first = {key: value for key, (value, _) in head.learned(1).items()}
    if smaller.function.name != head.function.name:
        return first
    made = dict(first)
    for key, value in smaller.function.parameters.items():
        if not isinstance(value, float) or (key not in first and head.function.parameters[key] != value):
            return first
        if key in first:
            made[key] = value
    return made


def _function_at(head: Head, values: dict[str, float]) -> OutputFunction:
    """The member with numbers for what it learns (scalars: per-class ones are equal)."""
    return head.with_learned({key: torch.tensor(value, dtype=torch.float64) for key, value in values.items()})


def _same_phi(one: OutputFunction, other: OutputFunction) -> bool:
    known = one.properties.is_same_phi(other.properties)
    if known is not None:
        return known
    z = torch.linspace(-30.0, 30.0, 61, dtype=torch.float64)
    return torch.allclose(one.phi(z), other.phi(z), rtol=1e-12, atol=1e-12)


def contains(head: Head, smaller: Head) -> bool:
    """True if every output of ``smaller`` is an output, or a limit of outputs, of ``head`` at the same width."""
    if smaller.components not in (1, head.components):
        return False
    if smaller.learned(1):
        return str(smaller.function) == str(head.function)
    function = _function_at(head, _learned_values(head, smaller))
    return _same_phi(function, smaller.function) or (smaller.function.is_linear and linear_end(function) is not None)


def strictly_contains(head: Head, smaller: Head) -> bool:
    """Two heads can contain each other, as gss(k=2) and sigsoftmax do; then neither does so strictly."""
    return contains(head, smaller) and not contains(smaller, head)


def random_start(problem: Problem, generator: Generator) -> Tensor:
    """Logits of standard deviation about 1."""
    x = torch.randn(problem.size, dtype=torch.float64, generator=generator)
    parts = problem.views(x)
    parts.h_Rd.mul_(problem.width**-0.25)
    parts.output_Ve.mul_(problem.width**-0.25)
    parts.output_Ve[:, -1].mul_(0.1)
    if parts.prior_NK is not None:
        parts.prior_NK.mul_(0.1)
    for key, value in parts.learned.items():
        value.fill_(problem.learned[key][0])
    return x


def spectral_start(problem: Problem) -> Tensor:
    """The best approximation of log P in the sense of squares, for a linear phi of one component."""
    assert problem.linear_slope is not None and problem.head.components == 1
    # Probabilities that are zero or nearly so would rule the squares without mattering to KL.
    clipped_NV = problem.truth.log_p_NV.clamp_min(math.log(1e-6 / problem.vocabulary))
    centred_NV = clipped_NV - clipped_NV.mean(1, keepdim=True)
    bias_V = centred_NV.mean(0)
    u, s, v = torch.linalg.svd((centred_NV - bias_V) / problem.linear_slope, full_matrices=False)
    used = min(problem.width, s.shape[0])
    x = torch.zeros(problem.size, dtype=torch.float64)
    parts = problem.views(x)
    root = s[:used].sqrt()
    parts.h_Rd[:, :used] = u[:, :used] * root
    parts.output_Ve[:, :used] = v[:used].T * root
    parts.output_Ve[:, -1] = bias_V / problem.linear_slope
    return x


def disturbed(source: Solution, problem: Problem, generator: Generator) -> Tensor:
    """A start near :func:`embedded` that can leave it.

    The logits of a softmax are put around the nonlinearity of phi, since far out the fit does not feel it. Copied
    components are moved apart, new columns are small instead of zero, numbers per class differ: all these are saddle
    points.
    """
    x = embedded(source, problem, around_nonlinearity=True)
    parts, old = problem.views(x), source.problem

    def noise(like: Tensor, scale: float) -> Tensor:
        return scale * torch.randn(like.shape, dtype=like.dtype, generator=generator)

    old_h, new_h = parts.h_Rd[:, : old.width], parts.h_Rd[:, old.width :]
    new_output = parts.output_Ve[:, old.width : -1]
    h_scale = float(old_h.std())
    if problem.head.components > old.head.components:
        assert parts.prior_NK is not None
        old_h.add_(noise(old_h, h_scale))
        parts.prior_NK.add_(noise(parts.prior_NK, 0.1))
    if new_h.numel():
        # Measured in logits: where the old ones are huge, a part of their size would undo the solution.
        new_h.add_(noise(new_h, h_scale))
        new_output.add_(noise(new_output, NEW_LOGITS / (h_scale * math.sqrt(new_h.shape[1]))))
    if not source.problem.learned:
        kinds = problem.head.function.kinds
        for key, value in parts.learned.items():
            value.add_(noise(value, 1.0 if kinds[key] is ParameterKind.PER_CLASS else 0.0))
    return x


def embedded(source: Solution, problem: Problem, *, around_nonlinearity: bool = False) -> Tensor:
    """The point of ``problem`` that makes what ``source`` makes; ``contains`` must hold and the width suffice.

    ``around_nonlinearity`` leaves the logits of a softmax where phi is not a line, so that the output is only similar.
    """
    old, given = source.problem, source.problem.views(source.x)
    x = torch.zeros(problem.size, dtype=torch.float64)
    parts = problem.views(x)
    values, old_values = _learned_values(problem.head, old.head), _learned_values(old.head, old.head)
    for key, value in parts.learned.items():
        value.copy_(given.learned[key] if key in given.learned else torch.full_like(value, values[key]))

    output_Ve = given.output_Ve
    function, old_function = _function_at(problem.head, values), _function_at(old.head, old_values)
    if not _same_phi(function, old_function):
        end = linear_end(function)
        assert end is not None and old.linear_slope is not None, f"{problem.head} does not contain {old.head}"
        # Less their mean over tokens: the same distributions under a linear phi, and logits around zero.
        output_Ve = (output_Ve - output_Ve.mean(0)) * (old.linear_slope / end.slope)
        shift = end.nonlinear_at
        if not around_nonlinearity:
            largest = (given.h_Rd @ output_Ve[:, :-1].T + output_Ve[:, -1]).abs().max()
            shift += end.sign * (FAR + float(largest))
        output_Ve[:, -1] += shift

    copies = problem.head.components // old.head.components
    h_NKd = given.h_Rd.view(problem.contexts, old.head.components, old.width).repeat(1, copies, 1)
    parts.h_Rd[:, : old.width] = h_NKd.view(-1, old.width)
    parts.output_Ve[:, : old.width] = output_Ve[:, :-1]
    parts.output_Ve[:, -1] = output_Ve[:, -1]
    if parts.prior_NK is not None and given.prior_NK is not None:
        parts.prior_NK.copy_(given.prior_NK)
    return x
