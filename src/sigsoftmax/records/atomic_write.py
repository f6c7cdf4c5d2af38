"""Files that are written whole or not at all, whatever happens to the process that writes them."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ModuleNotFoundError:  # Windows, which does not delete a file that is open, and so needs no lock
    fcntl = None  # type: ignore[assignment]

__all__ = ["atomic_write"]


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` when the block ends without an error, and is durable then.

    Readers, and whoever comes after a kill, find the old content or the new one. The folder is created where it is
    missing, and what killed writers of the same file left behind is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("xb") as file:
            if fcntl is not None:
                # The kernel releases it when the writer dies, however it dies. Some network disks have no locks.
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:
                # Renamed while it is locked: nobody who removes leftovers ever sees it unlocked.
                temporary.replace(path)
        if fcntl is None:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _remove_leftovers(path: Path) -> None:
    for leftover in path.parent.glob(f".{escape(path.name)}.*.tmp"):
        # In use by another writer, or gone already.
        with suppress(OSError), leftover.open("rb") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()


def _sync_folder(folder: Path) -> None:
    """Make the rename durable, where folders can be opened."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
