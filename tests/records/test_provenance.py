"""Records say which code they were measured with."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.records import samples

from sigsoftmax.records import Environment, Record, provenance
from sigsoftmax.records.schemas.capacity import CapacityResult

GIT = ["git", "-c", "user.name=test", "-c", "user.email=test@example.org"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository laid out like this one."""
    for name in ("src/package.py", "benchmarks/time.py", "benchmarks/records/cpu.jsonl", "docs/page.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first\n")
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        try:
            subprocess.run([*GIT, *arguments], cwd=tmp_path, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("git is not installed")
    return tmp_path


def head(folder: Path) -> str:
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=folder, text=True).strip()


def test_a_clean_checkout_gives_its_commit(checkout: Path) -> None:
    assert provenance.revision_of(checkout / "src/package.py") == provenance.Revision(head(checkout), True)


@pytest.mark.parametrize(
    ("changed", "clean"),
    [
        ("src/package.py", False),
        ("src/new.py", False),
        ("benchmarks/time.py", False),
        ("benchmarks/records/cpu.jsonl", True),  # what a measurement writes
        ("docs/page.md", True),  # what it does not run
    ],
)
def test_changed_code_is_not_clean(checkout: Path, changed: str, clean: bool) -> None:
    (checkout / changed).write_text("second\n")
    assert provenance.revision_of(checkout / "src/package.py") == provenance.Revision(head(checkout), clean)


def test_a_file_that_a_repository_does_not_know_has_no_revision(checkout: Path) -> None:
    installed = checkout / ".venv" / "package.py"
    installed.parent.mkdir()
    installed.write_text("installed\n")
    assert provenance.revision_of(installed) == provenance.Revision()


def test_no_git_is_no_revision(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert provenance.revision_of(checkout / "src/package.py") == provenance.Revision()


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    provenance.code_revision.cache_clear()
    yield monkeypatch
    provenance.code_revision.cache_clear()


@pytest.mark.parametrize(("text", "clean"), [("0123abcd", True), ("0123abcd+modified", False)])
def test_a_copy_states_its_revision(stated: pytest.MonkeyPatch, text: str, clean: bool) -> None:
    stated.setenv(provenance.REVISION_VARIABLE, text)
    environment = Environment.here()
    assert (environment.commit, environment.clean) == ("0123abcd", clean)
    assert environment.revision_text == "commit 0123abc" + ("" if clean else ", modified")


def test_a_revision_that_is_none_is_refused(stated: pytest.MonkeyPatch) -> None:
    stated.setenv(provenance.REVISION_VARIABLE, "main")
    with pytest.raises(ValueError, match=r"must be a commit, 7 to 40 hexadecimal digits, .* got 'main'"):
        provenance.code_revision()


def test_libraries_are_named_with_their_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "LIBRARIES", ("numpy", "no-such-library"))
    provenance.library_versions.cache_clear()
    try:
        (found,) = provenance.library_versions()
    finally:
        provenance.library_versions.cache_clear()
    assert found.startswith("numpy ")


def test_records_before_revisions_are_still_read() -> None:
    plain = json.loads(Record.of(samples.capacity()).to_json())
    for name in ("commit", "clean", "libraries"):
        del plain["environment"][name]
    record = Record.from_json(json.dumps({**plain, "schema": 1}))
    assert (record.environment.commit, record.environment.clean, record.environment.libraries) == ("", None, ())
    assert record.environment.revision_text == "commit not recorded"
    assert record.payload_as(CapacityResult) == samples.capacity()
