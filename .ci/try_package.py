"""Look into the archives of dist/, install the wheel in an environment of its own, and try it there: make package.

The environment sees torch, numpy and what these need, by links to the packages of the interpreter that runs this
script, and nothing else: a core that needs more fails here. `python -m build` makes the wheel from the source archive,
so that what is tried is what the source archive holds.

    .venv/bin/python .ci/try_package.py [--tag v0.1.0]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
CORE = ("torch", "numpy")
FOLDERS = ("benchmarks", "docs", "examples", "results", "src", "tests", ".ci", ".github")
"""what a source archive holds of the repository, besides files at its top"""
LEFTOVERS = re.compile(
    r"(^|/)(__pycache__|\.(venv|git|hypothesis|\w+_cache)|site|dist|build)(/|$)|^(sigsoftmax-[^/]*/)?runs/|\.py[cod]$"
)


class PackageError(Exception):
    """Something about the archives is not as it should be."""


def version_in(text: str) -> str:
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.M)
    if found is None:
        raise PackageError('src/sigsoftmax/_version.py has no line __version__ = "..."')
    return found[1]


def check_wheel(names: Iterable[str], sources: Iterable[str], version: str) -> None:
    """The modules of src and the metadata, and nothing else."""
    found = set(names)
    information = f"sigsoftmax-{version}.dist-info"
    expected = set(sources) | {
        f"{information}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    }
    if missing := sorted(expected - found):
        raise PackageError(f"the wheel lacks {', '.join(missing)}")
    if more := sorted(found - expected):
        raise PackageError(f"the wheel holds what does not belong there: {', '.join(more)}")


def check_source_archive(names: Iterable[str], tracked: Iterable[str], version: str) -> None:
    """All that tests need, which is all that is tracked, and no leftovers of runs and tools."""
    top = f"sigsoftmax-{version}/"
    found = {name.removeprefix(top) for name in names}
    if left := sorted(name for name in found if LEFTOVERS.search(name)):
        raise PackageError(f"the source archive holds leftovers: {', '.join(left[:5])}, {len(left)} in all")
    if missing := sorted(set(tracked) - found):
        raise PackageError(f"the source archive lacks {', '.join(missing[:5])}, {len(missing)} in all")


def check_tag(tag: str, version: str, changelog: str) -> None:
    """A release has the tag of its version, and a changelog that gives its date."""
    if tag != f"v{version}":
        raise PackageError(
            f"the tag is {tag}, but src/sigsoftmax/_version.py says {version}: expected the tag v{version}"
        )
    heading = re.search(r"^## (.*)$", changelog, re.M)
    if heading is None or not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading[1]):
        raise PackageError(
            f"the first heading of CHANGELOG.md is {heading[1] if heading else 'absent'!r}, expected "
            f"'{version} (YYYY-MM-DD)' with the day of the release"
        )


def tracked_files(root: Path) -> list[str]:
    """Of the repository; outside of one, none."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False)
    return [name for name in listing.stdout.split("\0") if name and (root / name).is_file()]


def modules(root: Path) -> list[str]:
    package = root / "src" / "sigsoftmax"
    return [
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and not LEFTOVERS.search(path.relative_to(package.parent).as_posix())
    ]


def needed(names: Iterable[str]) -> Iterator[Distribution]:
    """The distributions of that name and all they need here, without extras."""
    waiting, seen = list(names), set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue  # not needed on this system
        yield found
        requirements = map(Requirement, found.requires or ())
        waiting += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]


def link_packages(names: Iterable[str], folder: Path) -> None:
    for found in needed(names):
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            target = Path(str(found.locate_file(top)))
            if target.exists() and not (folder / top).exists():
                (folder / top).symlink_to(target)


def try_wheel(wheel: Path, version: str) -> None:
    """Install it in an empty environment, away from the repository, and use it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        environment = folder / "environment"
        venv.create(environment, with_pip=False)
        paths = {"base": str(environment), "platbase": str(environment)}
        site_packages = Path(sysconfig.get_path("purelib", "venv", paths))
        scripts = Path(sysconfig.get_path("scripts", "venv", paths))
        python = scripts / Path(sys.executable).name
        install = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
        subprocess.run([sys.executable, *install], check=True)
        link_packages(CORE, site_packages)
        where = (
            "import sigsoftmax, pathlib, sys\n"
            f"assert sigsoftmax.__version__ == {version!r}, sigsoftmax.__version__\n"
            f"assert pathlib.Path(sigsoftmax.__file__).is_relative_to({str(site_packages)!r}), sigsoftmax.__file__\n"
        )
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        first_block = re.findall(r"```python\n(.*?)```", readme, re.S)[0]
        without = (
            "import importlib.util as u\nassert u.find_spec('scipy') is None and u.find_spec('matplotlib') is None\n"
        )
        for words in (
            [python, "-I", "-c", where + without],
            [python, "-I", "-c", first_block],
            [python, "-I", "-m", "sigsoftmax", "functions"],
            [scripts / "sigsoftmax", "functions"],
            [scripts / "sigsoftmax", "demo", "--help"],
        ):
            done = subprocess.run(list(map(str, words)), cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                raise PackageError(f"in a clean environment {' '.join(map(str, words))} fails:\n{done.stderr}")


def run(tag: str | None) -> str:
    version = version_in((ROOT / "src/sigsoftmax/_version.py").read_text(encoding="utf-8"))
    if tag is not None:
        check_tag(tag, version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    wheel, source = ROOT / f"dist/sigsoftmax-{version}-py3-none-any.whl", ROOT / f"dist/sigsoftmax-{version}.tar.gz"
    others = [path.name for path in (ROOT / "dist").glob("*") if path not in (wheel, source)]
    if others or not (wheel.is_file() and source.is_file()):
        raise PackageError(
            f"expected {wheel.name} and {source.name} alone in dist, run: make build; also there: {others}"
        )
    with zipfile.ZipFile(wheel) as archive:
        check_wheel(archive.namelist(), modules(ROOT), version)
    with tarfile.open(source) as archive:
        tracked = [name for name in tracked_files(ROOT) if "/" not in name or name.split("/")[0] in FOLDERS]
        check_source_archive(archive.getnames(), tracked, version)
    try_wheel(wheel, version)
    return f"{wheel.name} and {source.name}: whole, installed and tried in an environment with torch and numpy alone"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", help="of a release: must be that of the version, and the changelog must have its date")
    options = parser.parse_args()
    try:
        print(run(options.tag))
    except PackageError as error:
        print(f"try_package.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
