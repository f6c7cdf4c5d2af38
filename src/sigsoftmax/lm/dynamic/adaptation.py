"""The step of dynamic evaluation for several models at once, which share their start and their statistics:

    theta <- theta + min(decay D, 1) (theta0 - theta) - learning_rate g / (MS + epsilon)

It is bound by memory. A gradient may come as two thin factors, and what follows from MS is computed from it each time,
so that a step reads theta, theta0 and MS and writes theta; theta0 and MS are read once for all models.

Shapes: P models, T tokens, O rows and I columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sigsoftmax.lm import kernels

__all__ = ["Adapted", "Factors", "Gradient", "TokenSum", "adapt_", "pull_and_step"]


class Factors(NamedTuple):
    """The gradient of a matrix, the sum over tokens of the outer products of two vectors each."""

    left_PTO: Tensor
    right_PTI: Tensor

    def dense(self) -> Tensor:
        """The gradient itself, (P, O, I)."""
        return self.left_PTO.mT @ self.right_PTI


class TokenSum(NamedTuple):
    """The gradient of a vector, the sum over tokens of their gradients."""

    of_tokens_PTO: Tensor

    def dense(self) -> Tensor:
        """The gradient itself, (P, O)."""
        return self.of_tokens_PTO.sum(dim=1)


Gradient = Tensor | Factors | TokenSum
"""The gradient of one parameter of all models; a tensor is (P, ...)."""


class Adapted(NamedTuple):
    """One parameter of all models, (P, ...), beside the start and the statistics that they share."""

    weights: Tensor
    start: Tensor
    rms: Tensor
    """MS"""


def adapt_(parameters: Sequence[Adapted], gradients: Sequence[Gradient], rates_P4: Tensor) -> None:
    """One step of each parameter in place.

    The rates of a model are its learning rate, decay / gbar, the most that min(decay D, 1) may be, and epsilon.
    """
    if all(kernels.run_on(parameter.weights) for parameter in parameters):
        from sigsoftmax.lm.kernels import adaptation

        adaptation.adapt_(parameters, gradients, rates_P4)
        return
    for (weights, start, rms), gradient in zip(parameters, gradients, strict=True):
        pull, step = pull_and_step(rms, rates_P4)
        weights.lerp_(start.expand_as(weights), pull)
        weights.addcmul_(step, gradient if isinstance(gradient, Tensor) else gradient.dense(), value=-1.0)


def pull_and_step(rms: Tensor, rates_P4: Tensor) -> tuple[Tensor, Tensor]:
    """min(decay D, 1) and learning_rate / (MS + epsilon) of one parameter for each model, (P, ...)."""
    learning_rate, decay, most, epsilon = (rate.view(-1, *(1,) * rms.ndim).to(rms) for rate in rates_P4.unbind(1))
    return torch.minimum(rms * decay, most), (rms + epsilon).reciprocal_().mul_(learning_rate)
