"""Records: what a run measured, typed and versioned, one JSON object a line.

A record has a kind and a payload. The payload of each kind is a frozen dataclass that states its ``KIND`` and its
``VERSION``; around it stands where and how it was measured. Whoever reads a file gets either the typed payload or an
error that names the file and the line.

    append(path, Record.of(payload))
    points = list(read_payloads(path, CapacityResult))
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import errno
import json
import math
import os
import platform
import shlex
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch

from sigsoftmax._version import __version__
from sigsoftmax.records.parsing import parse_json
from sigsoftmax.records.provenance import code_revision, library_versions

__all__ = ["Environment", "Payload", "Record", "append", "from_plain", "read", "read_payloads", "to_plain"]

SCHEMA = 2
"""Version of the envelope: the fields around the payload. Version 1 had no commit and no libraries."""


LARGEST_INTEGER = 2**64 - 1
"""No count and no seed is larger, and many times as large a number is no float."""


class Payload(Protocol):
    """A frozen dataclass of numbers, texts, tuples, mappings and further dataclasses."""

    KIND: ClassVar[str]
    VERSION: ClassVar[int]
    __dataclass_fields__: ClassVar[dict[str, Any]]


P = TypeVar("P", bound=Payload)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The machine, the code and the command that something was measured with."""

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
    """True if the code was as that commit has it; None without a commit"""
    libraries: tuple[str, ...] = ()
    """installed versions of the libraries that measurements may depend on, as in "triton 3.6.0\""""

    @property
    def revision_text(self) -> str:
        """The commit in words; says so if none was recorded."""
        if not self.commit:
            return "commit not recorded"
        return f"commit {self.commit[:7]}" + (", modified" if self.clean is False else "")

    @classmethod
    def here(cls, device: torch.device | str = "cpu") -> Environment:
        revision = code_revision()
        return cls(
            package_version=__version__,
            python_version=platform.python_version(),
            torch_version=str(torch.__version__),
            system=f"{platform.system()} {platform.machine()}",
            device=_device_name(torch.device(device).type),
            threads=torch.get_num_threads(),
            command=_command_line(),
            time_utc=f"{dt.datetime.now(dt.UTC):%Y-%m-%dT%H:%M:%SZ}",
            commit=revision.commit,
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
        with _naming(self.source):
            if self.kind != payload_type.KIND:
                raise ValueError(f"expected a record of kind {payload_type.KIND!r}, got {self.kind!r}")
            if self.version > payload_type.VERSION:
                raise ValueError(
                    f"this {self.kind!r} record has version {self.version}, and version {payload_type.VERSION} is the "
                    f"latest that sigsoftmax {__version__} reads; upgrade sigsoftmax"
                )
            return typing.cast(P, from_plain(payload_type, self.payload, "payload"))

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
        with _naming(source):
            envelope = _parsed(text)
            return cls(
                kind=from_plain(str, envelope.get("kind"), "kind"),
                version=from_plain(int, envelope.get("version"), "version"),
                payload=from_plain(dict[str, Any], envelope.get("payload"), "payload"),
                environment=from_plain(Environment, envelope.get("environment"), "environment"),
                source=source,
            )


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Errors say where the record was read."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source}: {error}" if source else str(error)) from None


def _parsed(text: str) -> dict[str, Any]:
    try:
        envelope = parse_json(text.strip())
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")
        raise ValueError(f"not a record: {problem} at column {error.colno} of the line") from None
    except ValueError as error:
        raise ValueError(f"not a record: {error}") from None
    if not isinstance(envelope, dict) or not isinstance(envelope.get("schema"), int):
        raise ValueError("not a record: expected a JSON object with a number 'schema'")
    if envelope["schema"] > SCHEMA:
        raise ValueError(
            f"the record has schema {envelope['schema']}, and {SCHEMA} is the latest that sigsoftmax {__version__} "
            "reads; upgrade sigsoftmax"
        )
    return envelope


def append(path: str | Path, records: Record | Iterable[Record]) -> None:
    """Add records to the end of a file, each by a single write, so that a kill leaves at most one torn line."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        with os.fdopen(descriptor, "rb+", buffering=0) as file:
            if size := file.seek(0, os.SEEK_END):
                file.seek(size - 1)
                # A torn line of an earlier run must not swallow the next record.
                file.write(b"" if file.read(1) == b"\n" else b"\n")
            for record in [records] if isinstance(records, Record) else records:
                line = record.to_json().encode() + b"\n"
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(
            error.errno,
            f"could not write a record to {path}: {error.strerror or error}. Free space or choose another folder, and "
            "give the same command again",
        ) from error


def read(
    path: str | Path, *, malformed: Literal["raise", "skip"] | Callable[[str], object] = "raise"
) -> Iterator[Record]:
    """The records of a file, in order.

    A malformed line raises, is skipped with a warning that names it, or is told to the function that is given.
    """
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
                if malformed == "skip":
                    warnings.warn(f"skipped a line: {error}", stacklevel=2)
                else:
                    malformed(str(error))
                continue
            yield record


def read_payloads(
    path: str | Path, payload_type: type[P], *, malformed: Literal["raise", "skip"] | Callable[[str], object] = "raise"
) -> Iterator[P]:
    """The typed payloads of one kind in a file, in order; malformed lines are treated as by :func:`read`."""
    records = read(path, malformed=malformed)
    return (record.payload_as(payload_type) for record in records if record.kind == payload_type.KIND)


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
    if origin in (typing.Union, types.UnionType):
        (inner,) = set(arguments) - {types.NoneType}
        return None if value is None else from_plain(inner, value, name)
    if expected is int and type(value) is int and abs(value) > LARGEST_INTEGER:
        raise ValueError(f"{name} is an integer of more than 64 bits: {_shortened(value)}")
    if expected is Any or type(value) is expected or (origin is Literal and value in arguments):
        return value
    if dataclasses.is_dataclass(expected):
        return _typed_dataclass(expected, value, name)
    if origin is tuple and isinstance(value, list):
        return tuple(from_plain(arguments[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: from_plain(arguments[1], item, f"{name}[{key!r}]") for key, item in value.items()}
    if expected is float:
        return _float(value, name)
    *others, last = map(repr, arguments) if origin is Literal else [getattr(expected, "__name__", str(expected))]
    raise ValueError(f"{name} must be {', '.join(others)}{' or ' * bool(others)}{last}, got {_shortened(value)}")


def _float(value: Any, name: str) -> float:
    if type(value) is not int and value not in ("nan", "inf", "-inf"):
        raise ValueError(f"{name} must be float, got {_shortened(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is an integer that no float can hold: {_shortened(value)}") from None


def _typed_dataclass(expected: Any, value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object with the fields of {expected.__name__}, got {_shortened(value)}")
    fields, hints = dataclasses.fields(expected), _hints(expected)
    if unknown := sorted(value.keys() - {field.name for field in fields}):
        raise ValueError(f"{name} has unknown fields: {', '.join(unknown)}")
    required = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [key for key in required if key not in value]:
        raise ValueError(f"{name} lacks the fields: {', '.join(missing)}")
    return expected(**{key: from_plain(hints[key], item, f"{name}.{key}") for key, item in value.items()})


@lru_cache
def _hints(owner: type) -> dict[str, Any]:
    """Evaluating annotations takes longer than all else that reading a record does."""
    return typing.get_type_hints(owner)


def _shortened(value: Any) -> str:
    # Python refuses to print an integer of thousands of digits.
    text = (
        f"a number of {value.bit_length():,} bits" if type(value) is int and value.bit_length() > 200 else repr(value)
    )
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
