"""Loading of typed payloads from paths; everything that could not be read is kept for the page to show."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from sigsoftmax.records import Environment, Payload, Record, read

__all__ = ["Entry", "Loaded", "find_files", "load"]

P = TypeVar("P", bound=Payload)


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[P]):
    """A typed payload and where it comes from."""

    payload: P
    environment: Environment
    source: str


@dataclass(kw_only=True)
class Loaded:
    """All records of a report. Sections take what they show; what nobody takes is listed at the end of the page."""

    files: list[Path]
    records: list[Record]
    warnings: list[str]
    """lines that could not be read, records that could not be typed"""
    repeated: int
    """records that stood there more than once, and count once"""
    _taken: set[str] = field(default_factory=set)

    def take(self, payload_type: type[P]) -> list[Entry[P]]:
        """The payloads of a kind, in the order of the files; those that cannot be typed become warnings."""
        is_first = payload_type.KIND not in self._taken
        self._taken.add(payload_type.KIND)
        entries = []
        for record in self.records:
            try:
                if record.kind == payload_type.KIND:
                    payload = record.payload_as(payload_type)
                    entries.append(Entry(payload=payload, environment=record.environment, source=record.source))
            except (TypeError, ValueError) as error:
                self.warnings += [str(error)] * is_first
        return entries

    def left(self) -> list[Record]:
        """The records of kinds that no section has taken."""
        return [record for record in self.records if record.kind not in self._taken]

    def kinds(self) -> Counter[str]:
        return Counter(record.kind for record in self.records)


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Record files in the order given; folders are searched for ``*.jsonl``; a file counts once."""
    if not paths:
        raise ValueError("no records to report on; name files of records, or folders that hold them")
    found: dict[Path, Path] = {}
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*.jsonl") if file.is_file())
            if not inside:
                raise ValueError(f"no records under {path}: expected at least one file *.jsonl that a run has written")
        elif path.is_file():
            inside = [path]
        else:
            raise ValueError(f"no records at {path}: expected a file of records or a folder that holds some")
        for file in inside:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def load(paths: Sequence[Path]) -> Loaded:
    """Read every record; whatever cannot be read becomes a warning that names file and line."""
    files = find_files(paths)
    warnings: list[str] = []
    every: list[Record] = []
    for file in files:
        try:
            every += read(file, malformed=warnings.append)
        except OSError as error:
            warnings.append(f"{file}: cannot be read: {error.strerror or error}")
    unique: dict[str, Record] = {}
    for record in every:
        content = [record.kind, record.version, record.payload, vars(record.environment)]
        unique.setdefault(json.dumps(content, sort_keys=True), record)
    records = list(unique.values())
    if not records:
        detail = f"; the first problem: {warnings[0]}" if warnings else ""
        raise ValueError(f"no records in {', '.join(map(str, files[:3]))}{' ...' if len(files) > 3 else ''}{detail}")
    return Loaded(files=files, records=records, warnings=warnings, repeated=len(every) - len(records))
