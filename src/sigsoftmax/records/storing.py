"""Keeping the records of a folder up to date, so that nothing that was measured is ever replaced by less.

A command that is given again, perhaps with other options, meets the records of the time before. One rule holds for all
of them: a record goes only if new ones measured the same thing, and measured no less of it. Whatever else the file
holds stays where it is: records of other models, heads and seeds, a whole audit beside one that was interrupted, the
bounds of a rank beside a spectrum, lines that this version cannot read.

What a record measured is its ``subject``. How much of it was measured is its ``extent``: for each part a number, such
as the contexts that a spectrum was computed from. A record is a measurement by itself, whenever it was written. Only
the implementations of a benchmark, whose times compare within one run alone, are one measurement together.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from sigsoftmax.records.atomic_write import atomic_write
from sigsoftmax.records.envelope import Environment, Record
from sigsoftmax.records.grouping import grouped
from sigsoftmax.records.kinds import IN_SERIES, PAYLOADS
from sigsoftmax.records.schemas.base import MeasuredPayload

__all__ = ["not_covered_later", "store"]

LOCK = ".records.lock"
PATIENCE = 60.0
"""seconds to wait for another process that stores records in the same folder; that takes milliseconds"""


def store(path: Path, records: Record | Iterable[Record]) -> None:
    """Write records into a file, in the place of those that they replace; all or nothing.

    An earlier measurement is replaced if the new records cover it: the same subject, and at least as much of each part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = [_Line.of(record) for record in ([records] if isinstance(records, Record) else records)]
    try:
        # Two processes that each read, add and write would lose what the other added.
        with FileLock(path.parent / LOCK, timeout=PATIENCE):
            content = b"".join(line.content for line in _merged(_lines(path), new))
            with atomic_write(path) as file:
                file.write(content)
    except Timeout:
        raise OSError(
            f"another process has been storing records in {path.parent} for {PATIENCE:.0f} s; if there is none, remove "
            f"{path.parent / LOCK}"
        ) from None


def _merged(old: Sequence[_Line], new: Sequence[_Line]) -> list[_Line]:
    subjects = grouped(new, lambda line: line.subject)
    replaced = _covered(old, subjects)
    merged: list[_Line] = []
    for line in old:
        # The new ones take the place of the first of those that they replace.
        merged += subjects.pop(line.subject, []) if line in replaced else [line]
    return [*merged, *(line for lines in subjects.values() for line in lines)]


@dataclass(frozen=True, eq=False)
class _Line:
    """A line of a file of records."""

    content: bytes
    measurement: tuple[MeasuredPayload, Environment] | None = None
    """None where the line cannot be read or is of a kind that this version does not know"""

    @classmethod
    def of(cls, record: Record, content: bytes | None = None) -> _Line:
        content = content or record.to_json().encode() + b"\n"
        if record.kind not in PAYLOADS:
            return cls(content)
        return cls(content, (record.payload_as(PAYLOADS[record.kind]), record.environment))

    @property
    def subject(self) -> Hashable:
        return self.content if self.measurement is None else _subject(self.measurement[0])


def _subject(payload: MeasuredPayload) -> Hashable:
    return payload.KIND, payload.subject


def _lines(path: Path) -> list[_Line]:
    lines = []
    for content in path.read_bytes().splitlines() if path.exists() else ():
        line = _Line(content + b"\n")
        # A line that cannot be read is nobody's to remove.
        with contextlib.suppress(ValueError, TypeError):
            line = _Line.of(Record.from_json(content.decode()), line.content)
        lines.append(line)
    return lines


def _covered(old: Sequence[_Line], new: Mapping[Hashable, Sequence[_Line]]) -> set[_Line]:
    """The lines of the measurements that new ones cover; a line of an unknown kind is covered by its equal."""
    again = [line for line in old if line.subject in new]
    known = [(line, line.measurement) for line in again if line.measurement is not None]
    found = {line for line in again if line.measurement is None}
    for places in _measurements([measurement for _, measurement in known]):
        payloads = [known[place][1][0] for place in places]
        later = [line.measurement[0] for line in new[_subject(payloads[0])] if line.measurement is not None]
        if _covers(later, payloads):
            found.update(known[place][0] for place in places)
    return found


def _measurements(entries: Sequence[tuple[MeasuredPayload, Environment]]) -> list[list[int]]:
    """The places of the entries of each measurement.

    A series is of one subject, each record with other parts, and its records share their environment. Other records are
    told apart by what they measured and not by their time, which is known to a second.
    """
    series: dict[Hashable, tuple[list[int], set[Hashable]]] = {}
    found: list[list[int]] = []
    for place, (payload, environment) in enumerate(entries):
        key, parts = (_subject(payload), environment), set(payload.extent)
        places, measured = series.get(key, ([], set()))
        if payload.KIND not in IN_SERIES or not places or not parts or parts & measured:
            series[key] = places, measured = [], set()
            found.append(places)
        places.append(place)
        measured |= parts
    return found


def _covers(later: Iterable[MeasuredPayload], earlier: Iterable[MeasuredPayload]) -> bool:
    """One measurement has at least as much of each part of their common subject as another."""
    measured = _extent(later)
    return all(measured.get(part, -math.inf) >= amount for part, amount in _extent(earlier).items())


def _extent(payloads: Iterable[MeasuredPayload]) -> dict[Hashable, float]:
    extent: dict[Hashable, float] = {}
    for payload in payloads:
        for part, amount in payload.extent.items():
            extent[part] = max(amount, extent.get(part, amount))
    return extent


def not_covered_later(entries: Sequence[tuple[MeasuredPayload, Environment]]) -> list[int]:
    """The places of the entries that count: those of measurements that no later one of the same subject covers.

    This is the rule of :func:`store` for those who read several files. Equal times count in the order given.
    """
    left_out: set[int] = set()
    for measurements in grouped(_measurements(entries), lambda places: _subject(entries[places[0]][0])).values():
        in_time = sorted(measurements, key=lambda places: entries[places[0]][1].time_utc)
        payloads = [[entries[place][0] for place in places] for places in in_time]
        for number, places in enumerate(in_time):
            if any(_covers(later, payloads[number]) for later in payloads[number + 1 :]):
                left_out.update(places)
    return [place for place in range(len(entries)) if place not in left_out]
