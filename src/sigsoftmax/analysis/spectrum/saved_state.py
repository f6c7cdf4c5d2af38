"""The state of a long sum in a file: written as a whole or not at all, and read only for the matrix it is of.

The file is an uncompressed .npz: the arrays, and a member ``about`` with JSON. Nothing in it is executed when read.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sigsoftmax.records.atomic_write import atomic_write
from sigsoftmax.records.parsing import parse_json

__all__ = ["StreamState", "check_same_matrix", "check_writable", "deferred_interrupt", "load_state", "save_state"]

FORMAT = "sigsoftmax spectrum state 1"


class StreamState(NamedTuple):
    about: dict[str, Any]
    arrays: dict[str, NDArray[np.generic]]


def save_state(path: Path, state: StreamState) -> None:
    """Replace the file by one with this state; a kill in between leaves the old one."""
    about = np.frombuffer(json.dumps({"format": FORMAT, **state.about}).encode(), np.uint8)
    members: dict[str, Any] = {"about": about, **state.arrays}
    with atomic_write(path) as file:
        np.savez(file, **members)


def check_writable(path: Path) -> None:
    """Find out now, and not after hours, that nothing can be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writable = path.parent.is_dir() and os.access(path.parent, os.W_OK) and not path.is_dir()
    except OSError:
        writable = False
    if not writable:
        raise ValueError(f"the state cannot be written to {path}; name a file in a folder that can be written to")


def load_state(path: Path) -> StreamState:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        about = parse_json(arrays.pop("about").tobytes())
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} is not a saved state, or is damaged ({error}); delete it to begin anew, or name another file"
        ) from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"{path} is no state of a spectrum that this version reads; delete it or name another file")
    return StreamState(about, arrays)


def check_same_matrix(path: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse a state of another matrix, or of another way to sum it up."""
    for key, value in here.items():
        if saved.get(key) != value:
            raise ValueError(
                f"the state in {path} belongs to another run: its {key} is {saved.get(key)!r}, here it is {value!r}. "
                "Delete it to begin anew, or name another file"
            )


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Let Ctrl-C wait until the block is done, so that a sum is never half updated. A second Ctrl-C does not wait."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        if pending:
            usual(number, frame)
        pending.append((number, frame))

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if pending:
        usual(*pending[0])
