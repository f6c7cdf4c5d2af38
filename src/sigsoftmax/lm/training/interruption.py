"""Reasons to stop a run where its state is whole: Ctrl-C and SIGTERM, or the end of the time it was given.

A second Ctrl-C stops it at once.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["OutOfTime", "SoftStop"]


class OutOfTime(Exception):
    """The time that was given is over; all that was measured so far is on disk."""


class SoftStop:
    """While it is entered, the first signal sets ``asked`` and nothing else.

    Outside the main thread, where signals cannot be handled, it does nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
