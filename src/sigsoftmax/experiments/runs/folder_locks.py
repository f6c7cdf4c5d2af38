"""Locks on folders: one process at a time, and none left behind by a process that dies, however it dies.

The lock of a folder is its file ``.lock``, which filelock holds: the kernel gives it back when its holder ends. Beside
it, ``.lock.json`` tells who holds it since when, for the message to whoever comes next. Folders of runs have both, and
so have those in which a sweep or a comparison keeps its runs: all that commands write to.
"""

from __future__ import annotations

import datetime as dt
import errno
import json
import os
import platform
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import filelock

from sigsoftmax.records.envelope import from_plain, to_plain
from sigsoftmax.records.parsing import parse_json
from sigsoftmax.terminal import escaped

__all__ = ["Busy", "FolderLock", "Holder"]

LOCK_FILE = ".lock"
HOLDER_FILE = ".lock.json"
SOFT_LOCK_FILE = ".lock.soft"
"""in place of the first, on a file system without locks: it exists as long as it is held"""
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
"""answers of file systems without locks. A further answer, ENOSYS, filelock knows: the first file is then like this"""
LOOK_SECONDS = 0.2
PATIENCE = 5.0
"""seconds that the processes of a command that was killed may need to notice that they are alone, and end"""


class Busy(OSError):
    """Another process has the folder."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that has a folder."""

    process: int
    """its number on that host"""
    host: str
    since: str
    """ISO 8601, UTC"""
    leftovers: str = ""
    """a folder that its successor has to remove if it is killed"""

    @classmethod
    def here(cls) -> Holder:
        now = f"{dt.datetime.now(dt.UTC):%Y-%m-%dT%H:%M:%SZ}"
        return cls(process=os.getpid(), host=platform.node(), since=now)

    def __str__(self) -> str:
        # From a file: nothing in it may steer a terminal.
        return escaped(f"process {self.process} on {self.host}, since {self.since}")


class FolderLock:
    """While it is entered, no other process has the folder, which is made if it is missing.

    ``patience`` is how many seconds to wait for a holder before :class:`Busy` is raised; None: some.
    """

    def __init__(self, folder: Path, *, patience: float | None = None) -> None:
        self._folder, self._patience = folder, PATIENCE if patience is None else patience
        self._lock: filelock.BaseFileLock | None = None
        self._holder: Holder | None = None
        self.before: Holder | None = None
        """a holder that ended without giving the folder back"""

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                self._acquire(filelock.FileLock, LOCK_FILE)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                self._acquire(filelock.SoftFileLock, SOFT_LOCK_FILE)
        except filelock.Timeout as refusal:
            holder = self._read()
            who = f": {holder}" if holder is not None else ""
            is_soft = isinstance(self._lock, filelock.SoftFileLock)
            dead = f", or remove {refusal.lock_file} if it is dead" if is_soft else ""
            raise Busy(
                f"another process is at work in {self._folder}{who}; wait until it has ended or stop it{dead}, or "
                "choose another folder"
            ) from None
        except OSError as error:
            problem = f"the folder {self._folder} cannot be locked: {error.strerror or error}"
            raise OSError(error.errno, problem) from error
        self.before = self._read()
        self._write(Holder.here())
        return self

    def _acquire(self, kind: type[filelock.BaseFileLock], name: str) -> None:
        # Not bound to a thread: whoever closes a generator that holds it may be in another one.
        self._lock = kind(self._folder / name, thread_local=False)
        self._lock.acquire(timeout=self._patience, poll_interval=LOOK_SECONDS)

    def note(self, leftovers: str) -> None:
        """Leave word of what is to be removed if this process is killed."""
        assert self._holder is not None
        self._write(replace(self._holder, leftovers=leftovers))

    def _write(self, holder: Holder) -> None:
        self._holder = holder
        # The lock holds without it, and a full disk is told by whoever has something to save.
        with suppress(OSError):
            (self._folder / HOLDER_FILE).write_text(json.dumps(to_plain(holder)), encoding="utf-8")

    def _read(self) -> Holder | None:
        try:
            found: Any = from_plain(Holder, parse_json((self._folder / HOLDER_FILE).read_bytes()), "holder")
        except (OSError, ValueError):
            return None
        return found if isinstance(found, Holder) else None

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            with suppress(OSError):
                (self._folder / HOLDER_FILE).unlink(missing_ok=True)
            self._lock.release()
