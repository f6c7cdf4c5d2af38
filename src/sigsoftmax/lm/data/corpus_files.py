"""Corpora on a disk: the folders they lie in, and the tokens in their files.

A corpus is a folder with three files of text, one per split. The published ones have names and are looked for in known
places; any other folder is one's own text.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torch import Tensor

from sigsoftmax.family.notation import did_you_mean
from sigsoftmax.lm.data.published_corpora import PUBLISHED, SPLITS, Split

__all__ = ["EOS", "cache_folder", "find", "read_split", "split_files", "tokenise"]

EOS = "<eos>"
"""The token that ends every line."""
DATA_VARIABLE = "SIGSOFTMAX_DATA"


def tokenise(lines: Iterable[str]) -> Iterator[str]:
    """The tokens of each line, split at white space, then ``<eos>``; a blank line gives a lone ``<eos>``."""
    for line in lines:
        yield from line.split()
        yield EOS


def cache_folder() -> Path:
    """The folder in which ``sigsoftmax data fetch`` puts corpora, one folder each."""
    home = Path.home()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "sigsoftmax"


def find(name: str, data: str | Path | None = None) -> tuple[Path, str | None]:
    """The folder to read, and the published corpus that it must then hold (None: whatever it holds)."""
    if name not in PUBLISHED:
        return _own_folder(name, data), None
    if data is not None:
        # What the user points at is read or refused: a copy found elsewhere may be another text.
        data = Path(data)
        if split_files(data) is not None:
            return data, None
        looked_in = [data, data / name]
    else:
        variable = os.environ.get(DATA_VARIABLE)
        looked_in = [Path(variable) / name, Path(variable)] if variable else []
        looked_in.append(cache_folder() / name)
    for folder in looked_in:
        if split_files(folder) is not None:
            return folder, name
    places = "".join(f"\n  {folder}" for folder in looked_in)
    raise ValueError(
        f"the corpus {name!r} was not found: looked for train.txt, valid.txt and test.txt in{places}\n"
        f"Get it with 'sigsoftmax data fetch {name}', or say where it is with --data FOLDER or {DATA_VARIABLE}"
    )


def _own_folder(name: str, data: str | Path | None) -> Path:
    # With `data`, a recipe for one folder is run on another.
    folder = Path(name) if data is None else Path(data)
    if split_files(folder) is not None:
        return folder
    if not folder.exists():
        raise ValueError(
            f"no corpus {str(folder)!r}{did_you_mean(name, PUBLISHED)}; expected {', '.join(PUBLISHED)}, language, or "
            "a folder with train.txt, valid.txt and test.txt"
        )
    missing = [f"{split}.txt" for split in SPLITS if not (folder / f"{split}.txt").is_file()]
    raise ValueError(f"expected train.txt, valid.txt and test.txt in {folder}; missing: {', '.join(missing)}")


def split_files(folder: Path) -> dict[Split, Path] | None:
    """The files of a corpus, under the names of ``data fetch`` or of upstream; None where they are not all there."""
    for pattern in ("{split}.txt", *(corpus.upstream_name for corpus in PUBLISHED.values())):
        paths = {split: folder / pattern.format(split=split) for split in SPLITS}
        if all(path.is_file() for path in paths.values()):
            return paths
    return None


def read_split(path: Path, encode: Callable[[Iterable[str]], Tensor]) -> Tensor:
    """The ids that ``encode`` gives the tokens of a file; whatever is wrong with the file is said with its name."""
    try:
        with path.open("rb") as file:
            if b"\0" in file.read(4096):
                raise ValueError("not text: it has NUL bytes, as UTF-16 has; convert it to UTF-8")
        # The mark that some editors put before UTF-8 is no part of the first word.
        with path.open(encoding="utf-8-sig") as file:
            ids = encode(tokenise(file))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error.reason} in line {_first_bad_line(path)}; convert it") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not ids.numel():
        raise ValueError(f"{path}: empty; expected text, one sentence or paragraph a line")
    return ids


def _first_bad_line(path: Path) -> int:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    raise AssertionError(f"{path} changed while it was read")
