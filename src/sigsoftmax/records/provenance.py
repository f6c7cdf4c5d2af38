"""The code that a measurement was made with: the commit of the checkout, and the versions of libraries."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = ["LIBRARIES", "REVISION_VARIABLE", "Revision", "code_revision", "library_versions"]

LIBRARIES = ("triton", "liger-kernel", "cut-cross-entropy", "transformers")
"""distributions besides torch whose versions a measurement may depend on"""
REVISION_VARIABLE = "SIGSOFTMAX_REVISION"
"""environment variable that states the commit where the code was copied without its repository; +modified after the
commit says that the code was not as the commit has it"""

CODE = ("src", "benchmarks", "pyproject.toml", "constraints.txt", ":(exclude)benchmarks/records")
"""files that have to be as the commit has them: not the records, which a measurement itself changes"""


@dataclass(frozen=True)
class Revision:
    """A commit, and whether the code was as the commit has it."""

    commit: str = ""
    clean: bool | None = None


@lru_cache
def code_revision() -> Revision:
    """The revision of the running code; empty if the package does not run from a checkout of its own repository."""
    if stated := os.environ.get(REVISION_VARIABLE):
        return _stated(stated)
    return revision_of(Path(__file__).parents[1] / "__init__.py")


def revision_of(file: Path) -> Revision:
    """The revision of the repository that has ``file`` under version control; empty if there is none, or no git."""
    # A package that is installed somewhere inside another project's repository is not part of that project.
    is_tracked = _git(file.parent, "ls-files", "--error-unmatch", file.name) is not None
    root = _git(file.parent, "rev-parse", "--show-toplevel")
    commit = _git(file.parent, "rev-parse", "HEAD")
    if not is_tracked or root is None or commit is None:
        return Revision()
    changes = _git(Path(root), "status", "--porcelain", "--", *CODE)
    return Revision(commit, None if changes is None else not changes)


def _stated(text: str) -> Revision:
    found = re.fullmatch(r"([0-9a-f]{7,40})(\+modified)?", text)
    if found is None:
        raise ValueError(
            f"{REVISION_VARIABLE} must be a commit, 7 to 40 hexadecimal digits, with +modified after it if the code "
            f"was changed since; got {text!r}"
        )
    return Revision(found[1], found[2] is None)


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of a git command; None if it fails or there is no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30.0, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@lru_cache
def library_versions() -> tuple[str, ...]:
    """Name and version of each of ``LIBRARIES`` that is installed."""
    found = []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)
