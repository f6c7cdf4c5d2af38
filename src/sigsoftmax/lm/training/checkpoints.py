"""Checkpoints: one safetensors file each, with a JSON text in its header, written whole or not at all.

The tensors hold weights, averages and random states; the JSON text holds the rest: position, configuration, history.
A checkpoint is written under another name, made durable, and then renamed, so a process killed at any moment leaves
the last good one in place. A checksum over everything tells a damaged file from a good one. Nothing is unpickled.

    save(path, {"model.embedding": weight}, {"epoch": 3})
    checkpoint = load(path)
    checkpoint.tensors["model.embedding"], checkpoint.meta["epoch"]
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sigsoftmax._version import __version__, install_extra
from sigsoftmax.records.atomic_write import atomic_write
from sigsoftmax.records.parsing import parse_json

__all__ = ["Checkpoint", "load", "save"]

VERSION = 1
VERSION_KEY = "sigsoftmax_checkpoint"
"""The key of the header that tells a checkpoint from any other safetensors file; its value is the version."""
NO_CHECKSUM = "00000000"
"""What stands in the header until the tensors are written."""
HEADER_LIMIT = 100_000_000
"""What readers of safetensors accept, in bytes."""

# The names that the safetensors format gives to types.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Checkpoint:
    tensors: dict[str, Tensor]
    """on the CPU"""
    meta: dict[str, Any]


# --- writing --------------------------------------------------------------------------------------------------------


def save(path: str | Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write a checkpoint, replacing the one at ``path`` only when the new one is complete and durable.

    ``meta`` is what JSON can hold; tuples come back as lists. Tensors may be on any device. An error of the disk is
    raised as OSError and leaves the checkpoint at ``path`` as it was.
    """
    # The package's own writer makes a temporary file under a name nobody can sweep, does not wait for the disk, and
    # hides the number of an error; the format is a length, a JSON header, and bytes.
    path = Path(path)
    header = _header(tensors, meta)
    try:
        with atomic_write(path) as file:
            _write(file, header, tensors)
    except OSError as error:
        size = sum(tensor.nbytes for tensor in tensors.values()) + len(header)
        kept = f"; {path} is as it was" if path.exists() else ""
        raise OSError(
            error.errno,
            f"could not write the checkpoint {path} of {size / 2**20:.1f} MiB: {error.strerror or error}{kept}. "
            "Free space or choose another folder, and resume",
        ) from error


def _header(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> bytes:
    entries: dict[str, Any] = {}
    size = 0
    for name, tensor in _in_order(tensors):
        if name == "__metadata__":
            raise ValueError(f"a tensor of a checkpoint cannot be called {name!r}, which the format uses itself")
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise ValueError(f"a checkpoint cannot hold {name!r}, a tensor of {tensor.dtype}, {tensor.layout}")
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [size, size + tensor.nbytes],
        }
        size += tensor.nbytes
    metadata = {VERSION_KEY: str(VERSION), "checksum": NO_CHECKSUM, "bytes": str(size), "meta": _meta_text(meta)}
    entries = {"__metadata__": metadata, **entries}
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > HEADER_LIMIT:
        raise ValueError(
            f"the names and the JSON text of a checkpoint may take {HEADER_LIMIT:,} bytes, got {len(header):,}; keep "
            "long lists in tensors"
        )
    return header


def _meta_text(meta: Mapping[str, Any]) -> str:
    try:
        return json.dumps(meta, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"the meta of a checkpoint must be what JSON can hold: {error}; convert it") from None


def _write(file: BinaryIO, header: bytes, tensors: Mapping[str, Tensor]) -> None:
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    checksum = zlib.crc32(header)
    for _, tensor in _in_order(tensors):
        data = _bytes_of(tensor)
        checksum = zlib.crc32(data, checksum)
        file.write(data)
    # Known last, and its place is in the header.
    file.seek(8 + header.index(_checksum_entry(NO_CHECKSUM)))
    file.write(_checksum_entry(f"{checksum:08x}"))


def _in_order(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Wide types first: then each tensor lies at a multiple of its type's size, as readers that map the file need."""
    return sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))


def _checksum_entry(checksum: str) -> bytes:
    return f'"checksum":"{checksum}"'.encode()


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


# --- reading --------------------------------------------------------------------------------------------------------


def load(path: str | Path) -> Checkpoint:
    """Read a checkpoint. A file that is missing, foreign, damaged or of a later version raises ValueError.

    The file is opened once: checksum, JSON text and tensors are those of the same bytes, whoever replaces the file
    meanwhile.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no checkpoint at {path}")
    try:
        with path.open("rb") as file:
            start, header, entries = _read_header(file, path)
            metadata = _checked_metadata(entries, path)
            data = b"".join((start, header, _read_data(file, header, metadata, path)))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return Checkpoint(_parsed_tensors(data, entries, path), _parsed_meta(metadata["meta"], path))


def _read_header(file: BinaryIO, path: Path) -> tuple[bytes, bytes, dict[str, Any]]:
    """The length of the header, the header, and what it says."""
    start = file.read(8)
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04", b"\x80\x05")):
        raise ValueError(
            f"{path} is a pickle, as torch.save writes it, and no checkpoint of sigsoftmax; pickles can run code and "
            "are not read"
        )
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(HEADER_LIMIT, os.fstat(file.fileno()).st_size - 8):
        raise ValueError(f"{path} is no safetensors file, or was cut short; choose an earlier checkpoint")
    header = file.read(length)
    try:
        entries = parse_json(header)
    except ValueError:
        raise ValueError(f"{path} is no safetensors file, or is damaged; choose an earlier checkpoint") from None
    return start, header, entries if isinstance(entries, dict) else {}


def _checked_metadata(entries: Mapping[str, Any], path: Path) -> dict[str, str]:
    metadata = entries.get("__metadata__")
    if not isinstance(metadata, dict) or not {VERSION_KEY, "checksum", "bytes", "meta"} <= metadata.keys():
        raise ValueError(
            f"{path} is a safetensors file of something else, without the {VERSION_KEY!r} that a checkpoint of "
            "sigsoftmax has"
        )
    if metadata[VERSION_KEY] != str(VERSION):
        raise ValueError(
            f"{path} is a checkpoint of version {metadata[VERSION_KEY]}, and sigsoftmax {__version__} reads version "
            f"{VERSION}; upgrade sigsoftmax"
        )
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{path} is damaged: the metadata of its header must be texts; choose an earlier checkpoint")
    return metadata


def _read_data(file: BinaryIO, header: bytes, metadata: Mapping[str, str], path: Path) -> bytes:
    """Read what follows the header, and compare it and the header with the checksum."""
    written = metadata["checksum"]
    # By the size alone first: a file that was damaged or crafted may be longer than memory.
    size = os.fstat(file.fileno()).st_size - file.tell()
    data = file.read() if str(size) == metadata["bytes"] else b""
    if str(size) != metadata["bytes"] or len(data) != size:
        raise ValueError(
            f"{path} is damaged: {size} bytes of tensors, and {metadata['bytes']} were written; choose an earlier "
            "checkpoint"
        )
    found = zlib.crc32(data, zlib.crc32(header.replace(_checksum_entry(written), _checksum_entry(NO_CHECKSUM), 1)))
    if f"{found:08x}" != written:
        raise ValueError(
            f"{path} is damaged: its checksum is {found:08x}, and {written} was written; choose an earlier checkpoint"
        )
    return data


def _parsed_tensors(data: bytes, entries: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load as tensors_of
    except ModuleNotFoundError:
        raise ValueError(f"checkpoints are read with safetensors; install it with {install_extra('lm')}") from None
    for name, entry in entries.items():
        kind = entry.get("dtype") if isinstance(entry, dict) else None
        if name != "__metadata__" and kind not in DTYPES.values():
            raise ValueError(
                f"{path} is no checkpoint that can be used: its tensor {name!r} has the type {kind!r}, and a "
                f"checkpoint has {', '.join(DTYPES.values())}; choose an earlier checkpoint"
            )
    try:
        tensors = tensors_of(data)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no checkpoint that can be used: its header is malformed ({error}); choose an earlier checkpoint"
        ) from None
    # In the order of the file, which is the same for all who read it: processes exchange tensors one after the other.
    return {name: tensors[name] for name in entries if name != "__metadata__"}


def _parsed_meta(text: str, path: Path) -> dict[str, Any]:
    try:
        meta = parse_json(text)
        if not isinstance(meta, dict):
            raise ValueError("it is no JSON object")
    except ValueError as error:
        raise ValueError(
            f"{path} is no checkpoint that can be used: its meta cannot be read ({error}); choose an earlier checkpoint"
        ) from None
    return meta
