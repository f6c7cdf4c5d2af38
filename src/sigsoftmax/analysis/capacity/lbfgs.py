"""L-BFGS with a preconditioner that is renewed on the way.

A capacity fit is a factorisation h W^T seen through a log-loss: badly conditioned, since a direction of h is steep or
flat by the size of W there. Two small Gram matrices describe most of that (see ``problem``), and with them as the first
approximation of the inverse Hessian the fit needs a fraction of the steps. ``torch.optim.LBFGS`` has no place for one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = ["Budget", "Minimum", "minimise"]

Evaluate = Callable[[Tensor], tuple[float, Tensor]]
Apply = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The conditions under which a fit ends."""

    iterations: int = 300
    """at most so many steps"""
    tolerance: float = 1e-3
    """ends when the loss has fallen by less than this fraction of itself over ``patience`` steps"""
    patience: int = 40
    floor: float = 1e-8
    """ends when the loss is below: nothing is left to gain"""

    def __post_init__(self) -> None:
        if self.iterations < 0 or self.patience < 1 or self.tolerance < 0 or self.floor < 0:
            raise ValueError(f"a budget needs iterations >= 0, patience >= 1 and no negative tolerance, got {self}")


class Minimum(NamedTuple):
    """The lowest point that was found."""

    x: Tensor
    value: float
    iterations: int


_History = deque[tuple[Tensor, Tensor, float]]
"""Steps, the change of the gradient over each, and the product of the two: the curvature."""
HISTORY = 10
RENEW = 25
"""Steps between two preconditioners."""
ARMIJO, WOLFE = 1e-4, 0.9


def minimise(
    evaluate: Evaluate, start: Tensor, preconditioner_at: Callable[[Tensor], Apply], budget: Budget
) -> Minimum:
    """Minimise ``evaluate``, which returns a value that is bounded below by 0, and its gradient.

    ``preconditioner_at(x)`` returns a linear map that approximates the inverse Hessian near x, up to its scale.
    Every accepted step lowers the value, so the last point is the best one.
    """
    x = start
    value, gradient = evaluate(x)
    iteration = 0
    history: _History = deque(maxlen=HISTORY)
    recent = deque([value], maxlen=budget.patience + 1)
    precondition = preconditioner_at(x)
    while iteration < budget.iterations and value > budget.floor:
        if iteration and iteration % RENEW == 0:
            precondition = preconditioner_at(x)
        direction = _descent(gradient, history, precondition)
        slope = float(gradient.dot(direction))
        if slope >= 0.0:
            history.clear()
            direction = -precondition(gradient)
            slope = float(gradient.dot(direction))
        first = 1.0 if history else min(1.0, value / max(-slope, 1e-300))
        found = _line_search(evaluate, x, value, slope, direction, first)
        if found is None:
            if not history:
                break
            history.clear()
            continue
        length, value, new_gradient = found
        step, change = length * direction, new_gradient - gradient
        curvature = float(step.dot(change))
        if curvature > 0.0:
            history.append((step, change, curvature))
        x, gradient = x + step, new_gradient
        iteration += 1
        recent.append(value)
        if len(recent) > budget.patience and recent[0] - value <= budget.tolerance * value:
            break
    return Minimum(x, value, iteration)


def _descent(gradient: Tensor, history: _History, precondition: Apply) -> Tensor:
    """Minus the approximate inverse Hessian times the gradient, by the two-loop recursion."""
    direction = gradient.clone()
    weights = []
    for step, change, curvature in reversed(history):
        weight = float(step.dot(direction)) / curvature
        weights.append(weight)
        direction.sub_(change, alpha=weight)
    direction = precondition(direction)
    if history:
        _, change, curvature = history[-1]
        direction.mul_(curvature / float(change.dot(precondition(change))))
    for (step, change, curvature), weight in zip(history, reversed(weights), strict=True):
        direction.add_(step, alpha=weight - float(change.dot(direction)) / curvature)
    return direction.neg_()


def _line_search(
    evaluate: Evaluate, x: Tensor, value: float, slope: float, direction: Tensor, length: float
) -> tuple[float, float, Tensor] | None:
    """Length, value and gradient of a step that satisfies the weak Wolfe conditions, by bisection.

    Else of the last step that lowered the value; None when no point of the line is lower.
    """
    low, high = 0.0, math.inf
    best = None
    for _ in range(20):
        new_value, new_gradient = evaluate(x + length * direction)
        # A wild step may overflow; `not <=` counts NaN as too far.
        if not new_value <= value + ARMIJO * length * slope:
            high = length
        else:
            best = length, new_value, new_gradient
            if float(new_gradient.dot(direction)) >= WOLFE * slope:
                return best
            low = length
        length = 0.5 * (low + high) if high < math.inf else 2.0 * length
    return best
