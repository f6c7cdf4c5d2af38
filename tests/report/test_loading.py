"""Loading: nothing that was written is lost, and nothing is counted twice."""

import json

import pytest
from tests.report import synthetic_runs

from sigsoftmax.records import Record, append
from sigsoftmax.records.schemas.speed import Measurement
from sigsoftmax.records.schemas.training import EpochRecord
from sigsoftmax.report.loading import find_files, load
from sigsoftmax.report.material import Material


def records(day: int = 1, count: int = 5) -> list[Record]:
    where = synthetic_runs.environment("a command", day=day)
    return [Record.of(payload, where) for payload in synthetic_runs.measurements()[:count]]


def test_files_and_folders_each_once(tmp_path):
    append(tmp_path / "b" / "deep" / "two.jsonl", records())
    append(tmp_path / "one.jsonl", records(day=2))
    (tmp_path / "not-records.txt").write_text("x")
    (tmp_path / "folder.jsonl").mkdir()
    found = find_files([tmp_path / "one.jsonl", tmp_path, tmp_path / "b" / ".." / "one.jsonl"])
    assert [path.name for path in found] == ["one.jsonl", "two.jsonl"]


def test_wrong_paths(tmp_path):
    with pytest.raises(ValueError, match=r"no records at .*missing: expected a file of records or a folder"):
        find_files([tmp_path / "missing"])
    with pytest.raises(ValueError, match=r"no records under .*expected at least one file \*\.jsonl"):
        find_files([tmp_path])
    with pytest.raises(ValueError, match="name files of records"):
        find_files([])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"no records in .*empty\.jsonl$"):
        load([tmp_path])
    (tmp_path / "empty.jsonl").write_text("hello\n")
    with pytest.raises(ValueError, match=r"the first problem: .*empty\.jsonl:1: not a record"):
        load([tmp_path])


def test_what_cannot_be_read_is_kept_as_a_warning(tmp_path):
    path = tmp_path / "a.jsonl"
    append(path, records())
    later = json.loads(records()[0].to_json()) | {"version": 99}
    lacking = json.loads(records()[1].to_json())
    del lacking["payload"]["ratio"]
    with path.open("ab") as file:
        file.write(b'{"schema": 1, "kind": "benchm\n\xff\xfe not utf-8\n' + b"[" * 100_000 + b"\n")
        file.write(json.dumps(later).encode() + b"\n" + json.dumps(lacking).encode() + b"\n")
    loaded = load([path])
    assert len(loaded.take(Measurement)) == 5
    assert len(loaded.take(Measurement)) == 5
    lines = [warning.partition("a.jsonl:")[2].partition(":")[0] for warning in loaded.warnings]
    assert lines == ["6", "7", "8", "9", "10"]
    assert "version 99" in loaded.warnings[3]
    assert "lacks the fields: ratio" in loaded.warnings[4]


def test_copies_count_once_and_other_runs_do_not(tmp_path):
    append(tmp_path / "a.jsonl", records())
    append(tmp_path / "copy.jsonl", records())
    append(tmp_path / "again.jsonl", records(day=2))
    loaded = load([tmp_path])
    assert (len(loaded.records), loaded.repeated) == (10, 5)


def test_kinds_that_nobody_takes_are_left(tmp_path):
    other = json.loads(records()[0].to_json()) | {"kind": "something-new"}
    append(tmp_path / "a.jsonl", records())
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(json.dumps(other) + "\n")
    loaded = load([tmp_path])
    Material.of(loaded)
    assert [record.kind for record in loaded.left()] == ["something-new"]
    assert loaded.kinds() == {"benchmark": 5, "something-new": 1}


def test_the_last_measurement_of_a_thing_counts(tmp_path):
    payloads = [p for p in synthetic_runs.training(epochs=3) if isinstance(p, EpochRecord)][:3]
    early, late = (synthetic_runs.environment("train", day=day) for day in (1, 2))
    # A resumed run repeats its last epoch; the file that comes first may hold the later record.
    append(tmp_path / "a.jsonl", Record.of(payloads[2], late))
    append(tmp_path / "b.jsonl", [Record.of(payload, early) for payload in payloads])
    material = Material.of(load([tmp_path]))
    assert material.replaced == 1
    assert sorted((e.payload.epoch, e.environment.time_utc[:10]) for e in material.epochs) == [
        (1, "2026-01-01"),
        (2, "2026-01-01"),
        (3, "2026-01-02"),
    ]
