"""Time and memory of an implementation, beside others in the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sigsoftmax.records.schemas.base import Extent, MeasuredPayload

__all__ = ["Measurement"]


@dataclass(frozen=True, kw_only=True)
class Measurement(MeasuredPayload):
    """One implementation in one case."""

    KIND = "benchmark"
    VERSION = 1
    SUBJECT = ("suite", "case")
    """the case: its implementations are measured in one run, and their times do not compare with another's"""

    suite: str
    """as ``cpu`` or ``gpu``: the cases that one program measures"""
    case: str
    """the computation and its sizes, in words"""
    implementation: str
    """as ``ours sigsoftmax``"""
    baseline: str
    """the implementation that ratios are relative to; its own name if the case compares no times"""
    milliseconds: float
    """median over the rounds, as the ratio is"""
    milliseconds_quartiles: tuple[float, float]
    ratio: float
    """time over the baseline's in the same round"""
    ratio_quartiles: tuple[float, float]
    peak_mib: float | None
    """the most that torch's allocator had given out at once, beyond inputs and their gradients"""
    rounds: int
    target: str = ""
    """the bounds that were aimed for, in the words of targets.py"""
    gradient_error: float | None = None
    """error of the worst gradient against float64, relative to torch's with logits of the same dtype"""
    gradient_errors: Mapping[str, float] = field(default_factory=dict)
    """the same for each gradient and kind of logits, by names such as `weight, deviation 3`"""
    size: int | None = None
    """the size that grows from row to row of the case, to which time is expected to be proportional"""
    host_microseconds: float | None = None
    """time until the call of a step returns, the device being idle before; it may still be at work then"""
    compiled_variants: int | None = None
    """kernels that were compiled, where the time is that of compiling them"""
    most_registers: int | None = None
    """registers per thread, the most of any of these kernels"""
    spilled_bytes: int | None = None
    """bytes spilled per thread by the kernel that spills most"""
    exchanged_bytes: int | None = None
    """bytes that one process hands to torch.distributed in a step"""
    tokens_per_second: float | None = None
    """of a training step at the median time"""
    most_tokens: int | None = None
    """tokens of about the largest batch of which a training step fits into the memory of the device"""

    @property
    def extent(self) -> Extent:
        return {self.implementation: self.rounds}
