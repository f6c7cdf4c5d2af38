"""Fetching the published corpora: byte for byte, or not at all.

Each file is known by its sha256, and several addresses are tried in turn. What has arrived waits in a folder of its
own until it is complete and right; a download that was cut, by the network or by its user, goes on where it stopped.

pooch retrieves and compares files. Its own downloader and its ``Unzip`` are not used: they begin anew after a cut, and
write as many bytes as a server or an archive sends.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sigsoftmax._version import __version__, install_extra
from sigsoftmax.family.notation import did_you_mean
from sigsoftmax.lm.data.corpus_files import cache_folder
from sigsoftmax.lm.data.download_files import NotPlain, check_plain, make_folder, open_again, open_new
from sigsoftmax.lm.data.published_corpora import PUBLISHED, PublishedFile, Split
from sigsoftmax.terminal import above_bars, console

__all__ = ["Watch", "fetch", "terminal_progress"]

Watch = Callable[[str, int, int], None]
"""Told the name of a file, the bytes that have arrived and those expected (0: unknown)."""

ATTEMPTS = 3
"""at an address whose connection breaks"""
PAUSE = 1.0
"""seconds before the next attempt"""
TIMEOUT = (10.0, 60.0)
"""seconds to connect, and without a byte"""
BLOCK = 1 << 13
"""bytes; what a broken connection leaves of one is lost"""


def fetch(name: str, folder: str | Path | None = None, *, watch: Watch = lambda *_: None) -> Path:
    """Put a published corpus into ``folder / name``, and return that folder. What is there already is kept.

    Without a folder it goes where :meth:`Corpus.load` looks for it. Broken off, it goes on when called again.
    """
    if name not in PUBLISHED:
        raise ValueError(
            f"no published corpus {name!r}{did_you_mean(name, PUBLISHED)}; there are {', '.join(PUBLISHED)}"
        )
    target = (cache_folder() if folder is None else Path(folder)) / name
    waiting = target / ".download"
    try:
        make_folder(waiting)
        for split, published in PUBLISHED[name].files.items():
            path = target / f"{split}.txt"
            if path.exists() and _is(path, published):
                watch(path.name, published.size, published.size)
                continue
            if path.exists() and (folder is not None or not path.is_file()):
                raise ValueError(
                    f"{path} is there already and is not that of {name!r}; remove it, or choose another folder"
                )
            arrived = _arrived(name, split, waiting, watch)
            with arrived.open("rb+") as file:
                os.fsync(file.fileno())
            arrived.replace(path)
        shutil.rmtree(waiting)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.ENOTDIR):
            raise
        raise OSError(
            error.errno,
            f"could not write to {target}: {error.strerror}; {name} needs {2 * PUBLISHED[name].size / 2**20:.0f} MiB "
            "there while it is fetched. Choose another folder, or make room: what has arrived is kept",
        ) from error
    finally:
        # Folders in which nothing has arrived.
        with suppress(OSError):
            waiting.rmdir()
            target.rmdir()
    return target


def _is(path: Path, published: PublishedFile) -> bool:
    if path.stat().st_size != published.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == published.sha256


class _Failed(Exception):
    """An address did not deliver; the message says why."""


def _arrived(name: str, split: Split, waiting: Path, watch: Watch) -> Path:
    """A file of a corpus from the first address that delivers it, complete and right, still in the waiting folder."""
    corpus, path, failures = PUBLISHED[name], waiting / f"{split}.txt", []
    published = corpus.files[split]
    for address in corpus.addresses:
        address = address.format(split=split)
        url, is_in_archive, member = address.partition("#")
        try:
            if not is_in_archive:
                return _retrieved(url, path, published, published.size, watch)
            # No archive of compressed text that is right is as large as twice the text, whatever lies beside it there.
            archive = _retrieved(url, waiting / url.rpartition("/")[2], None, 2 * corpus.size, watch)
            return _unpacked(archive, member, published, path)
        except _Failed as failure:
            failures.append(f"\n  {address}: {failure}")
    raise OSError(
        f"could not fetch {split}.txt of {name}; tried{''.join(failures)}\n"
        f"Try again later: what has arrived is kept. Or put train.txt, valid.txt and test.txt into a folder by "
        "other means and name it with --data FOLDER"
    )


def _unpacked(archive: Path, member: str, published: PublishedFile, path: Path) -> Path:
    """The member of an archive as a file of ours: neither its name nor its size decides what is written where."""
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(member) as packed:
            # An archive may say that a member is small, and unpack it without end.
            text = packed.read(published.size + 1)
    # A damaged archive makes zipfile raise any of a dozen exceptions, as ValueError, EOFError and zlib.error.
    except Exception as error:  # noqa: BLE001
        problem = f"no archive with {member}: {str(error) or type(error).__name__}"
    else:
        if hashlib.sha256(text).hexdigest() == published.sha256:
            with open_new(path) as file:
                file.write(text)
            return path
        problem = f"{member} is not the published file: " + (
            f"it is longer than {published.size:,} bytes" if len(text) > published.size else "its checksum is another"
        )
    archive.unlink()
    raise _Failed(problem)


def _retrieved(url: str, path: Path, published: PublishedFile | None, most: int, watch: Watch) -> Path:
    """The file of an address at ``path``, of at most so many bytes; an archive that is there already is taken."""
    pooch, requests = _packages()
    check_plain(path)
    size, known_hash = (None, None) if published is None else (published.size, f"sha256:{published.sha256}")
    downloader = _ResumingDownloader(path.with_name(f"{path.name}.part"), size, most, watch)
    for attempts_left in reversed(range(ATTEMPTS)):
        try:
            return Path(pooch.retrieve(url, known_hash, path.name, path.parent, downloader=downloader))
        except requests.HTTPError as error:
            raise _Failed(f"the server answered {error.response.status_code} {error.response.reason}") from None
        except requests.RequestException as error:
            if not attempts_left:
                raise _Failed(_reason(error)) from None
            time.sleep(PAUSE)
        except NotPlain:
            raise
        except ValueError as error:
            # The part that was there may have been of another file: from the start it may be right.
            if not downloader.went_on or not attempts_left:
                raise _Failed(f"not the published file: {error}") from None
    raise AssertionError("the last attempt returns or raises")


@dataclass
class _ResumingDownloader:
    """A downloader for pooch that keeps what has arrived in ``part``, and goes on from there."""

    part: Path
    size: int | None
    """bytes of the published file, where they are known"""
    most: int
    """bytes that are taken"""
    watch: Watch
    went_on: bool = False
    """True if the last call began in the middle"""

    def __call__(self, url: str, output_file: str, pooch: object) -> None:
        check_plain(self.part)
        have = self.part.stat().st_size if self.part.exists() else 0
        # All of it may have arrived before a kill; the checksum will tell.
        self.went_on = have == self.size
        if not self.went_on:
            self._download(url, have if have <= self.most else 0)
        self.part.replace(output_file)

    def _download(self, url: str, have: int) -> None:
        _, requests = _packages()
        # Compressed in transfer, a part could not be continued.
        headers = {"Accept-Encoding": "identity", "User-Agent": f"sigsoftmax/{__version__}"}
        if have:
            headers["Range"] = f"bytes={have}-"
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
            if have and response.status_code == requests.codes.requested_range_not_satisfiable:
                self.part.unlink()
                return self._download(url, 0)
            response.raise_for_status()
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding.strip().lower() not in ("", "identity"):
                raise ValueError(f"the server sent it in the encoding {encoding!r}, which was not asked for")
            self.went_on = have > 0 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            # A server without ranges sends it all again.
            arrived = have if self.went_on else 0
            total = arrived + int(response.headers.get("Content-Length", 0))
            too_long = ValueError(f"the server sends more than the {self.most:,} bytes that were expected")
            if total > self.most:
                raise too_long
            with open_again(self.part) if self.went_on else open_new(self.part) as file:
                for block in response.iter_content(BLOCK):
                    arrived += len(block)
                    if arrived > self.most:
                        break
                    file.write(block)
                    self.watch(self.part.stem, arrived, self.size or total)
        if arrived > self.most:
            # What arrived before is the beginning of something else.
            self.part.unlink()
            raise too_long
        if self.size is not None and arrived < self.size:
            raise requests.ConnectionError(f"the connection ended after {arrived:,} of {self.size:,} bytes")


def _packages() -> tuple[Any, Any]:
    try:
        pooch, requests = import_module("pooch"), import_module("requests")
    except ModuleNotFoundError as error:
        raise ValueError(f"corpora are fetched with {error.name}; {install_extra('lm')} brings it") from None
    pooch.get_logger().setLevel("WARNING")
    return pooch, requests


def _reason(error: Exception) -> str:
    """The innermost error, without the layers of packages that it came through."""
    while True:
        inner = error.__cause__ or error.__context__ or getattr(error, "reason", None)
        if not isinstance(inner, Exception):
            return str(error) or type(error).__name__
        error = inner


@contextmanager
def terminal_progress() -> Iterator[Watch]:
    """Bars on a terminal that has rich; elsewhere a line per file."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        done: set[str] = set()

        def say(name: str, arrived: int, total: int) -> None:
            if arrived >= total > 0 and name not in done:
                done.add(name)
                sys.stderr.write(f"{name}: {total:,} bytes\n")

        yield say
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    screen = console()
    with (
        Progress(*columns, console=screen, redirect_stdout=False, redirect_stderr=False) as bars,
        above_bars(screen),
    ):
        tasks: dict[str, Any] = {}

        def draw(name: str, arrived: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name)
            bars.update(tasks[name], completed=arrived, total=total or None)

        yield draw
