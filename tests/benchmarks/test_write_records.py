"""The list of records: every file has a place and says whether its commit was recorded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import write_records
from tests.records import samples

from sigsoftmax.records import Record, append

KNOWN = "results/ptb-float32.jsonl"
SHOWN = "ptb-float32.jsonl"


def written(root: Path, name: str, **environment) -> None:
    where = replace(samples.environment("python benchmarks/some.py", device="a GPU"), **environment)
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    append(path, [Record.of(samples.measurement(suite="gpu", case="a case", implementation="one"), where)])


def row_of(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_file_says_which_commits_it_holds(tmp_path: Path) -> None:
    written(tmp_path, KNOWN, commit="", clean=None)
    written(tmp_path, "results/paper/a.jsonl", commit="0123456789", clean=True, libraries=("triton 3.6.0",))
    written(tmp_path, "results/paper/b.jsonl", commit="abcdef0123", clean=False)
    text = write_records.provenance(tmp_path)
    assert row_of(text, SHOWN)[3:5] == ["not recorded"] * 2
    assert row_of(text, "paper/a.jsonl")[3:5] == ["0123456", "triton 3.6.0"]
    assert row_of(text, "paper/b.jsonl")[3] == "abcdef0, modified"
    assert write_records.without_commit(tmp_path).startswith(
        "Of 3 files 1 has records without a commit, and 1 has records of code that had been changed"
    )
    assert "python benchmarks/some.py" in write_records.commands(tmp_path)


def test_files_that_are_alike_share_a_row(tmp_path: Path) -> None:
    for seed in ("topics", "topics-seed-1"):
        written(tmp_path, f"results/capacity/{seed}/capacity.jsonl", commit="0123456789", clean=True)
    rows = [line for line in write_records.provenance(tmp_path).splitlines() if line.startswith("| capacity")]
    assert len(rows) == 1
    assert rows[0].startswith("| capacity/topics<br>capacity/topics-seed-1 |")


def test_a_file_of_two_commits_lists_both(tmp_path: Path) -> None:
    written(tmp_path, KNOWN, commit="0123456789", clean=True)
    written(tmp_path, KNOWN, commit="abcdef0123", clean=True)
    assert row_of(write_records.provenance(tmp_path), SHOWN)[3] == "0123456; abcdef0"


def test_a_file_without_a_place_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "results/unheard-of.jsonl")
    with pytest.raises(ValueError, match=r"unheard-of\.jsonl: no entry in PLACES"):
        write_records.provenance(tmp_path)


def test_commands_run_from_the_folder_of_the_project(tmp_path: Path) -> None:
    written(tmp_path, KNOWN)
    for name, command in (("a", "language_models.py float32"), ("b", "python -m sigsoftmax train x"), ("c", "")):
        path = tmp_path / "results" / "paper" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        where = samples.environment(command, device="a GPU")
        append(path, [Record.of(samples.measurement(suite="gpu", case="a case", implementation="one"), where)])
    lines = write_records.commands(tmp_path).splitlines()
    assert "python benchmarks/language_models.py float32" in lines
    assert "sigsoftmax train x" in lines
    assert "# not recorded" in lines


def test_every_record_of_the_repository_has_an_environment() -> None:
    """The list reads them; a line that is no record would not be counted."""
    for name, environments in write_records.files(write_records.ROOT):
        lines = (write_records.ROOT / name).read_text(encoding="utf-8").splitlines()
        assert environments
        assert all("environment" in json.loads(line) for line in lines[:1])
