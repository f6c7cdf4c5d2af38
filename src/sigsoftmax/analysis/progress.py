"""How far a long job has come, for a bar or a log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
            return f"{self.phase}: {self.contexts:,} contexts in {_duration(self.seconds)}"
        if self.seconds_left is None:
            return (
                f"{self.phase}: {self.contexts:,} of {self.total_contexts:,} contexts after {_duration(self.seconds)}"
            )
        done = self.contexts / self.total_contexts
        bar = "#" * round(BAR * done)
        left = _duration(self.seconds_left)
        return f"{self.phase} [{bar:<{BAR}}] {self.contexts:,} of {self.total_contexts:,} contexts, {left} left"


OnProgress = Callable[[Progress], None]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
