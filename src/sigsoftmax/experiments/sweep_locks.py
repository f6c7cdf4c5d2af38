"""Locks on folders: one process at a time, and none left behind by a process that dies, however it dies."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Busy", "FolderLock"]

LOOK_SECONDS = 0.2


class Busy(OSError):
    """Another process has the folder."""


class FolderLock:
    """While it is entered, no other process has the lock of this file.

    ``patience`` is how many seconds to wait for a holder. On a disk without locks nothing is held, as nothing can be.
    """

    def __init__(self, path: Path, *, patience: float = 0.0) -> None:
        self._path, self._patience = path, patience
        self._file: BinaryIO | None = None
        self.before = ""
        """what the last holder had noted"""

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab+")
        until = time.monotonic() + self._patience
        while not self._is_taken():
            if time.monotonic() >= until:
                note = self._read().partition("\n")[0]
                self._file.close()
                raise Busy(f"another process is at work in {self._path.parent}{f' ({note})' if note else ''}")
            time.sleep(LOOK_SECONDS)
        self.before = self._read()
        return self

    def _is_taken(self) -> bool:
        assert self._file is not None
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:
                pass  # some network disks have no locks
        return True

    def _read(self) -> str:
        assert self._file is not None
        self._file.seek(0)
        return self._file.read(4096).decode(errors="replace")

    def note(self, text: str) -> None:
        """For whoever finds the lock taken, or takes it next."""
        assert self._file is not None
        self._file.truncate(0)
        self._file.write(text.encode())
        self._file.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The file stays: removing it would let two processes lock two files of one name.
        with suppress(OSError):
            if self._file is not None:
                self._file.close()
