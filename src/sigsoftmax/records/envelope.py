"""Records: what a run measured, typed and versioned, one JSON object a line.

A record has a kind and a payload. The payload of each kind is a frozen dataclass that states its ``KIND`` and its
``VERSION``; around it stands where and how it was measured. Whoever reads a file gets either the typed payload or an
error that names the file and the line.

    append(path, Record.of(payload))
    points = [record.payload_as(CapacityResult) for record in read(path) if record.kind == "capacity"]
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
import os
import platform
import shlex
import sys
import types
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch

from sigsoftmax._version import __version__
from sigsoftmax.records.parsing import parse_json
from sigsoftmax.records.provenance import code_revision, library_versions

__all__ = ["Environment", "Payload", "Record", "append", "from_plain", "read", "to_plain"]

SCHEMA = 2
"""Version of the envelope: the fields around the payload. Version 1 had no commit and no libraries."""


class Payload(Protocol):
    """A frozen dataclass of numbers, texts, tuples, mappings and further dataclasses."""

    KIND: ClassVar[str]
    VERSION: ClassVar[int]
    __dataclass_fields__: ClassVar[dict[str, Any]]


P = TypeVar("P", bound=Payload)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where and how something was measured."""

    package_version: str
    python_version: str
    torch_version: str
    system: str
    device: str
    """name of the processor, or of the accelerator that did the work"""
    threads: int
    """threads torch may use inside one operation"""
    command: str
    """command line of the process"""
    time_utc: str
    """ISO 8601, seconds"""
    commit: str = ""
    """commit of the checkout that the code came from; empty if it did not come from one, or was not recorded"""
    clean: bool | None = None
    """whether the code was as that commit has it; None without a commit"""
    libraries: tuple[str, ...] = ()
    """installed versions of the libraries that measurements may depend on, as in "triton 3.6.0\""""

    @property
    def revision_text(self) -> str:
        """The commit in words; says so if none was recorded."""
        if not self.commit:
            return "commit not recorded"
        return f"commit {self.commit[:7]}" + {True: "", False: ", modified", None: ""}[self.clean]

    @classmethod
    def here(cls, device: torch.device | str = "cpu") -> Environment:
        now = dt.datetime.now(dt.UTC).replace(microsecond=0)
        return cls(
            package_version=__version__,
            python_version=platform.python_version(),
            torch_version=str(torch.__version__),
            system=f"{platform.system()} {platform.machine()}",
            device=_device_name(torch.device(device).type),
            threads=torch.get_num_threads(),
            command=_command_line(),
            time_utc=now.isoformat().replace("+00:00", "Z"),
            commit=(revision := code_revision()).commit,
            clean=revision.clean,
            libraries=library_versions(),
        )


@dataclass(frozen=True, kw_only=True)
class Record:
    """A payload of some kind, in the form it has in a file, with its environment."""

    kind: str
    version: int
    """version of the kind's payload"""
    payload: Mapping[str, Any]
    environment: Environment
    source: str = ""
    """``file:line`` where the record was read; empty for a new one"""

    @classmethod
    def of(cls, payload: Payload, environment: Environment | None = None) -> Record:
        return cls(
            kind=payload.KIND,
            version=payload.VERSION,
            payload=to_plain(payload),
            environment=environment or Environment.here(),
        )

    def payload_as(self, payload_type: type[P]) -> P:
        """The typed payload; a record of another kind or of a later version is refused."""
        where = f"{self.source}: " if self.source else ""
        if self.kind != payload_type.KIND:
            raise ValueError(f"{where}expected a record of kind {payload_type.KIND!r}, got {self.kind!r}")
        if self.version > payload_type.VERSION:
            raise ValueError(
                f"{where}this {self.kind!r} record has version {self.version}, and version {payload_type.VERSION} is "
                f"the latest that sigsoftmax {__version__} reads; upgrade sigsoftmax"
            )
        try:
            typed = from_plain(payload_type, self.payload, "payload")
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None
        return typing.cast(P, typed)

    def to_json(self) -> str:
        envelope = {
            "schema": SCHEMA,
            "kind": self.kind,
            "version": self.version,
            "environment": to_plain(self.environment),
            "payload": self.payload,
        }
        return json.dumps(envelope, allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, *, source: str = "") -> Record:
        where = f"{source}: " if source else ""
        try:
            envelope = parse_json(text.strip())
        except json.JSONDecodeError as error:
            problem = error.msg.removesuffix(" at")
            raise ValueError(f"{where}not a record: {problem} at column {error.colno} of the line") from None
        except ValueError as error:
            raise ValueError(f"{where}not a record: {error}") from None
        if not isinstance(envelope, dict) or not isinstance(envelope.get("schema"), int):
            raise ValueError(f"{where}not a record: expected a JSON object with a number 'schema'")
        if envelope["schema"] > SCHEMA:
            raise ValueError(
                f"{where}the record has schema {envelope['schema']}, and {SCHEMA} is the latest that sigsoftmax "
                f"{__version__} reads; upgrade sigsoftmax"
            )
        try:
            return cls(
                kind=from_plain(str, envelope.get("kind"), "kind"),
                version=from_plain(int, envelope.get("version"), "version"),
                payload=from_plain(dict[str, Any], envelope.get("payload"), "payload"),
                environment=from_plain(Environment, envelope.get("environment"), "environment"),
                source=source,
            )
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None


def append(path: str | Path, records: Record | Iterable[Record]) -> None:
    """Add records to the end of a file, each by a single write, so that a kill leaves at most one torn line."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    with os.fdopen(descriptor, "rb+", buffering=0) as file:
        # A torn line of an earlier run must not swallow the next record.
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        for record in [records] if isinstance(records, Record) else records:
            file.write(record.to_json().encode() + b"\n")
        os.fsync(file.fileno())


def read(path: str | Path, *, malformed: Literal["raise", "skip"] = "raise") -> Iterator[Record]:
    """The records of a file, in order. A malformed line raises, or is skipped with a warning that names it."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no records at {path}; expected a file of JSON lines that a run has written")
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = Record.from_json(line, source=f"{path}:{number}")
            except ValueError as error:
                if malformed == "raise":
                    raise
                warnings.warn(f"skipped a line: {error}", stacklevel=2)
                continue
            yield record


# --- between dataclasses and JSON ---------------------------------------------------------------------------------


def to_plain(value: Any) -> Any:
    """A dataclass or a part of one as JSON can hold it; what JSON lacks becomes the texts 'nan', 'inf' and '-inf'."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, str | bool | int):
        return value
    raise TypeError(f"a record cannot hold a {type(value).__name__}; convert it to numbers or text")


def from_plain(expected: Any, value: Any, name: str) -> Any:
    """``value`` as read from JSON, turned into the annotated type ``expected``; an error says ``name`` and the field.

    The types are those a payload may have: numbers, texts, choices (``Literal``), tuples of one type, mappings from
    text, further dataclasses, and any of these or None.
    """
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if expected is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (inner,) = (a for a in arguments if a is not type(None))
        return from_plain(inner, value, name)
    if dataclasses.is_dataclass(expected) and isinstance(expected, type):
        return _typed_dataclass(expected, value, name)
    if origin is tuple and isinstance(value, list):
        return tuple(from_plain(arguments[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: from_plain(arguments[1], item, f"{name}[{key!r}]") for key, item in value.items()}
    if expected is float and (value in ("nan", "inf", "-inf") or _is_number(value)):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name} is an integer that no float can hold: {_shortened(value)}") from None
    if expected in (int, str, bool) and type(value) is expected:
        return value
    if origin is Literal:
        if value in arguments:
            return value
        raise ValueError(f"{name} must be {_listed(arguments)}, got {_shortened(value)}")
    wanted = getattr(expected, "__name__", str(expected))
    raise ValueError(f"{name} must be {wanted}, got {_shortened(value)}")


def _typed_dataclass(expected: type, value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object with the fields of {expected.__name__}, got {_shortened(value)}")
    hints = _hints(expected)
    fields = {f.name: f for f in dataclasses.fields(expected)}
    unknown = sorted(value.keys() - fields.keys())
    if unknown:
        raise ValueError(f"{name} has unknown fields: {', '.join(unknown)}")
    missing = [
        key
        for key, f in fields.items()
        if key not in value and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{name} lacks the fields: {', '.join(missing)}")
    return expected(**{key: from_plain(hints[key], item, f"{name}.{key}") for key, item in value.items()})


def _listed(choices: Sequence[Any]) -> str:
    *others, last = (repr(choice) for choice in choices)
    return f"{', '.join(others)} or {last}" if others else last


@lru_cache
def _hints(owner: type) -> dict[str, Any]:
    """Evaluating annotations takes longer than all else that reading a record does."""
    return typing.get_type_hints(owner)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- the environment ----------------------------------------------------------------------------------------------


def _command_line() -> str:
    program = Path(sys.argv[0] if sys.argv else "")
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
    return " ".join([name, shlex.join(sys.argv[1:])]).strip()


@lru_cache
def _device_name(kind: str) -> str:
    if kind == "cuda":
        return torch.cuda.get_device_name()
    if kind != "cpu":
        return kind
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
