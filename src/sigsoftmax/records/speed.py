"""Time and memory of an implementation, beside others in the same run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["Measurement"]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One implementation in one case."""

    KIND: ClassVar[str] = "benchmark"
    VERSION: ClassVar[int] = 1

    suite: str
    case: str
    implementation: str
    baseline: str
    """the implementation that ratios are relative to; its own name if the case compares no times"""
    milliseconds: float
    milliseconds_quartiles: tuple[float, float]
    ratio: float
    ratio_quartiles: tuple[float, float]
    peak_mib: float | None
    """the most that torch's allocator had given out at once, beyond inputs and their gradients"""
    rounds: int
    target: str = ""
    """what was aimed for, in the words of targets.py"""
    gradient_error: float | None = None
    """error of the worst gradient against float64, relative to torch's with logits of the same dtype"""
