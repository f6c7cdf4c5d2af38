"""Records: they come back as they went, and whatever does not is named by file and line."""

import dataclasses
import io
import json
import math
import os
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest

from sigsoftmax.records import Environment, Record, append, read, read_payloads
from sigsoftmax.records.envelope import from_plain, to_plain


@dataclass(frozen=True)
class Inner:
    name: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    KIND: ClassVar[str] = "measured"
    VERSION: ClassVar[int] = 2

    seconds: float
    count: int
    flag: bool
    label: str | None
    parts: tuple[Inner, ...]
    by_name: dict[str, float]
    extra: int = 7


PAYLOAD = Measured(
    seconds=0.1,
    count=3,
    flag=True,
    label=None,
    parts=(Inner("a", 1.0), Inner("ü", -math.inf)),
    by_name={"x": math.inf},
)


def test_round_trip(tmp_path):
    path = tmp_path / "folder" / "records.jsonl"
    append(path, Record.of(PAYLOAD))
    append(path, [Record.of(PAYLOAD), Record.of(PAYLOAD)])
    records = list(read(path))
    assert [record.payload_as(Measured) for record in records] == [PAYLOAD] * 3
    assert [record.source for record in records] == [f"{path}:{line}" for line in (1, 2, 3)]
    assert records[0].environment.package_version


def test_lines_are_strict_json(tmp_path):
    nan = Measured(seconds=math.nan, count=0, flag=False, label="", parts=(), by_name={})
    text = Record.of(nan).to_json()
    json.loads(text, parse_constant=pytest.fail)
    assert math.isnan(Record.from_json(text).payload_as(Measured).seconds)


def test_environment_says_where_and_how(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/sigsoftmax/__main__.py", "demo", "--out", "a folder"])
    here = Environment.here()
    assert here.command == "python -m sigsoftmax demo --out 'a folder'"
    assert here.time_utc.endswith("Z")
    assert here.device
    assert here.threads >= 1


def test_a_torn_line_costs_that_line_alone(tmp_path):
    path = tmp_path / "records.jsonl"
    append(path, Record.of(PAYLOAD))
    with path.open("a") as file:
        file.write('{"schema": 1, "kind": "meas')
    append(path, Record.of(PAYLOAD))
    with pytest.raises(ValueError, match=r"records\.jsonl:2: not a record: Unterminated string"):
        list(read(path))
    with pytest.warns(UserWarning, match=r"skipped a line: .*records\.jsonl:2"):
        kept = list(read(path, malformed="skip"))
    assert [record.payload_as(Measured) for record in kept] == [PAYLOAD, PAYLOAD]
    told: list[str] = []
    assert list(read_payloads(path, Measured, malformed=told.append)) == [PAYLOAD, PAYLOAD]
    assert len(told) == 1
    assert told[0].startswith(f"{path}:2: not a record")


def test_payloads_of_one_kind_are_read(tmp_path):
    path = tmp_path / "records.jsonl"
    append(path, [Record.of(PAYLOAD), dataclasses.replace(Record.of(PAYLOAD), kind="other"), Record.of(PAYLOAD)])
    assert list(read_payloads(path, Measured)) == [PAYLOAD, PAYLOAD]
    with pytest.raises(ValueError, match="no records at"):
        list(read_payloads(tmp_path / "absent.jsonl", Measured))


def changed(**changes):
    envelope = json.loads(Record.of(PAYLOAD).to_json())
    for key, value in changes.items():
        target, _, inner = key.partition("__")
        if inner:
            envelope[target][inner] = value
        else:
            envelope[target] = value
    return json.dumps(envelope)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", r"f:9: not a record: expected a JSON object with a number 'schema'"),
        ("{}", r"f:9: not a record: expected a JSON object"),
        (changed(schema=99), r"f:9: the record has schema 99, and 2 is the latest .* upgrade sigsoftmax"),
        (changed(kind=3), r"f:9: kind must be str, got 3"),
        (changed(payload=[]), r"f:9: payload must be dict, got \[\]"),
        (changed(environment__threads="two"), r"f:9: environment\.threads must be int, got 'two'"),
        (changed(environment__color="red"), r"f:9: environment has unknown fields: color"),
    ],
)
def test_bad_envelopes(line, message):
    with pytest.raises(ValueError, match=message):
        Record.from_json(line, source="f:9")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (changed(kind="other"), r"f:9: expected a record of kind 'measured', got 'other'"),
        (changed(version=3), r"f:9: this 'measured' record has version 3, and version 2 is the latest"),
        (changed(payload__seconds="fast"), r"f:9: payload\.seconds must be float, got 'fast'"),
        (changed(payload__count=True), r"f:9: payload\.count must be int, got True"),
        (changed(payload__parts=[{"name": "a"}]), r"f:9: payload\.parts\[0\] lacks the fields: value"),
        (changed(payload={"count": 1}), r"f:9: payload lacks the fields: seconds, flag, label, parts, by_name"),
    ],
)
def test_bad_payloads(line, message):
    record = Record.from_json(line, source="f:9")
    with pytest.raises(ValueError, match=message):
        record.payload_as(Measured)


def test_a_missing_file_and_a_foreign_value(tmp_path):
    with pytest.raises(ValueError, match=r"no records at .*absent\.jsonl; expected a file of JSON lines"):
        list(read(tmp_path / "absent.jsonl"))
    with pytest.raises(TypeError, match=r"a record cannot hold a set"):
        Record.of(Measured(seconds=1.0, count=1, flag=True, label="", parts=(), by_name={"x": {1}}))


@dataclass(frozen=True, kw_only=True)
class Chosen:
    mode: Literal["fast", "slow"] = "slow"
    level: Literal[1] | None = None


def test_a_choice_is_one_of_those_named():
    for chosen in (Chosen(), Chosen(mode="fast", level=1)):
        assert from_plain(Chosen, to_plain(chosen), "settings") == chosen
    with pytest.raises(ValueError, match=r"settings\.mode must be 'fast' or 'slow', got 'quick'"):
        from_plain(Chosen, {"mode": "quick"}, "settings")
    with pytest.raises(ValueError, match=r"settings\.level must be 1, got \[1\]"):
        from_plain(Chosen, {"level": [1]}, "settings")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 5000 + "]" * 5000, "nested deeper than 64 levels"),
        ('{"a": ' * 65 + "1" + "}" * 65, "nested deeper than 64 levels"),
        ("[" * 100_000, "nested deeper than 64 levels"),
        ("9" * 5000, "Exceeds the limit"),
    ],
)
def test_lines_that_python_does_not_read_are_named_too(text, message, tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text("\n" + text + "\n")
    with pytest.raises(ValueError, match=rf"records\.jsonl:2: not a record: .*{message}"):
        list(read(path))
    append(path, Record.of(PAYLOAD))
    with pytest.warns(UserWarning, match=message):
        assert len(list(read(path, malformed="skip"))) == 1


def test_an_integer_that_no_float_can_hold_is_refused():
    with pytest.raises(ValueError, match="seconds is an integer that no float can hold: a number of 1,329 bits"):
        from_plain(float, 10**400, "seconds")
    with pytest.raises(ValueError, match=r"count is an integer of more than 64 bits: 18446744073709551616"):
        from_plain(int, 2**64, "count")
    with pytest.raises(ValueError, match=r"count is an integer of more than 64 bits: a number of 16,610 bits"):
        from_plain(int, 10**5000, "count")
    assert from_plain(int, 2**64 - 1, "count") == 2**64 - 1


def test_a_record_that_does_not_fit_on_the_disk_is_told(tmp_path, monkeypatch):
    """A write may end in the middle of a line without an error."""
    path = tmp_path / "records.jsonl"
    record = Record.of(PAYLOAD)
    append(path, record)
    kept = path.read_bytes()

    class FullDisk(io.FileIO):
        def write(self, data):
            return super().write(data[:10])

    opened = os.fdopen
    monkeypatch.setattr(os, "fdopen", lambda descriptor, mode, buffering: FullDisk(descriptor, mode))
    with pytest.raises(OSError, match=r"could not write a record to .*records\.jsonl: No space left.* Free space"):
        append(path, record)
    monkeypatch.setattr(os, "fdopen", opened)
    append(path, record)
    assert path.read_bytes().startswith(kept)
    problems = []
    assert len(list(read(path, malformed=problems.append))) == 2
    assert len(problems) == 1
