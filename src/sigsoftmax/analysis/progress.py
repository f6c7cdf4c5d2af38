"""How far a long job has come, for a bar or a log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sigsoftmax.records.durations import duration_text

__all__ = ["OnProgress", "Progress"]

BAR = 30


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Blocks of contexts that have been worked in. ``str()`` is a line with a bar."""

    phase: str
    blocks: int
    total_blocks: int | None
    contexts: int
    total_contexts: int | None
    seconds: float
    """since this run began"""
    seconds_left: float | None
    """until the last block, not counting what follows; None while that is unknown"""

    def __str__(self) -> str:
        if self.total_contexts is None:
            return f"{self.phase}: {self.contexts:,} contexts in {duration_text(self.seconds)}"
        if self.seconds_left is None:
            seen = f"{self.contexts:,} of {self.total_contexts:,} contexts"
            return f"{self.phase}: {seen} after {duration_text(self.seconds)}"
        done = self.contexts / self.total_contexts
        bar = "#" * round(BAR * done)
        left = duration_text(self.seconds_left)
        return f"{self.phase} [{bar:<{BAR}}] {self.contexts:,} of {self.total_contexts:,} contexts, {left} left"


OnProgress = Callable[[Progress], None]
