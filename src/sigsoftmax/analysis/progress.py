"""The progress of a long job, for a bar or a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sigsoftmax.records.durations import duration_text

__all__ = ["OnProgress", "Progress", "Say", "nothing_said"]

BAR = 30


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Contexts that have been worked in. ``str()`` is a line with a bar."""

    phase: str
    contexts: int
    total_contexts: int | None
    seconds: float
    """since this run began"""
    seconds_left: float | None
    """until the last block, not counting what follows; None while that is unknown"""

    @classmethod
    def at(cls, phase: str, began: float, contexts: int, total: int | None, earlier: int = 0) -> Progress:
        """The progress now, of a run that began at ``began`` and found ``earlier`` contexts done by another."""
        seconds, new = time.perf_counter() - began, contexts - earlier
        left = None if total is None or not new else seconds / new * (total - contexts)
        return cls(phase=phase, contexts=contexts, total_contexts=total, seconds=seconds, seconds_left=left)

    def __str__(self) -> str:
        if self.total_contexts is None:
            return f"{self.phase}: {self.contexts:,} contexts in {duration_text(self.seconds)}"
        seen = f"{self.contexts:,} of {self.total_contexts:,} contexts"
        if self.seconds_left is None:
            return f"{self.phase}: {seen} after {duration_text(self.seconds)}"
        bar = "#" * round(BAR * self.contexts / self.total_contexts)
        return f"{self.phase} [{bar:<{BAR}}] {seen}, {duration_text(self.seconds_left)} left"


OnProgress = Callable[[Progress], None]
Say = Callable[[str], None]
"""Receives a line on what is being done."""


def nothing_said(line: str) -> None:
    """Ignore what is being done."""
