"""Further results of an operation, beside the one that is differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from sigsoftmax.contract.problem import Problem
from sigsoftmax.contract.spec import EXTRAS, LogProbsSpec, LossSpec


class Extras(NamedTuple):
    """Further results, detached, in the leading dimensions of the tokens; None where one was not asked for."""

    log_normalizer: Tensor | None = None
    """log sum_j g(z_j); for a mixture one per component, (..., K)"""
    argmax: Tensor | None = None
    entropy: Tensor | None = None


def named_extras(problem: Problem[LossSpec] | Problem[LogProbsSpec], values: Sequence[Tensor | None]) -> Extras:
    """The extras that a call asks for, from values in the order of ``EXTRAS``; those at the end may be missing."""
    wanted = problem.spec.extras or ()
    rows = (*problem.leading, problem.components) if problem.spec.prior else problem.leading
    found = {
        name: value.detach().view(rows if name == "log_normalizer" else problem.leading)
        for name, value in zip(EXTRAS, values, strict=False)
        if name in wanted and value is not None
    }
    return Extras(**found)
