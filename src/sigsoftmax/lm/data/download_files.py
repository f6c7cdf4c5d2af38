"""The files of an unfinished download: those of this package, and of nobody else.

A folder may be shared with others, who could put a link to some file of the user where a download is going to be
written. So a new file is created and never opened, and what is there already is only continued if it is a plain file
that has no other name; anything else is refused and left as it is.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["NotPlain", "check_plain", "make_folder", "open_again", "open_new"]


class NotPlain(ValueError):
    """Something stands where a file of the download was expected, and may belong to someone else."""


def make_folder(path: Path) -> None:
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise NotPlain(f"{path} is {_what(path)}, where a folder for the download was expected; remove it")
    path.mkdir(parents=True, exist_ok=True)


def check_plain(path: Path, found: os.stat_result | None = None) -> None:
    """Raise unless there is nothing, or a file that has no other name; ``found`` is the status of an open file."""
    try:
        found = found or path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise NotPlain(
            f"{path} is {_what(path)}, where a file of the download was expected: writing to it could change a file "
            "of something else. Nothing was written; remove it, or choose another folder with --data"
        )


def _what(path: Path) -> str:
    if path.is_symlink():
        return "a symbolic link"
    if path.is_dir():
        return "a folder"
    return "a file with several names (hard links)" if path.is_file() else "no file"


def open_new(path: Path) -> BinaryIO:
    """A new file in the place of an earlier one of ours; a link that someone puts there meanwhile is not followed."""
    check_plain(path)
    path.unlink(missing_ok=True)
    return path.open("xb")


def open_again(path: Path) -> BinaryIO:
    """A file of ours, to be written to at its end; a symbolic link is not followed."""
    flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
    check_plain(path)
    file = os.fdopen(os.open(path, flags), "ab")
    try:
        # Someone may have put another in its place since.
        check_plain(path, os.fstat(file.fileno()))
    except NotPlain:
        file.close()
        raise
    return file
