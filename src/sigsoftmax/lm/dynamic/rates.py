"""The rates of dynamic evaluation, and their two scalings.

With statistics over so many windows of text and a model of so many parameter tensors, the same run is

    sum form:  MS = sqrt(sum over windows of g^2)    gbar = sum over tensors of the mean of MS
    RMS form:  MS = sqrt(mean over windows of g^2)   gbar = mean over tensors of the mean of MS

with learning_rate and epsilon divided by sqrt(windows), and decay by tensors. Everything here computes in the RMS form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

__all__ = ["Rates"]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates at which the weights follow the text and go back to their start, in the RMS form."""

    learning_rate: float
    decay: float
    epsilon: float = 2e-5

    def __post_init__(self) -> None:
        for name in ("learning_rate", "decay"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0.0):
                raise ValueError(f"{name} must be a number of at least 0, got {getattr(self, name)}")
        if not (math.isfinite(self.epsilon) and self.epsilon > 0.0):
            raise ValueError(f"epsilon must be a positive number, got {self.epsilon}")

    @classmethod
    def from_sum_form(cls, learning_rate: float, decay: float, epsilon: float, *, windows: int, tensors: int) -> Self:
        """Convert the rates of older scripts, given ``windows`` of the statistics and ``tensors`` of the model."""
        if windows < 1 or tensors < 1:
            raise ValueError(
                "the two scalings differ by the windows of the statistics and the parameter tensors of the model, "
                f"each at least 1, got {windows} and {tensors}"
            )
        root = math.sqrt(windows)
        return cls(learning_rate=learning_rate / root, decay=decay / tensors, epsilon=epsilon / root)

    def __str__(self) -> str:
        return f"learning_rate={self.learning_rate:g}, decay={self.decay:g}, epsilon={self.epsilon:g}"
