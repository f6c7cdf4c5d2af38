"""Checkpoints: one safetensors file each, with a JSON text in its header, written whole or not at all.

The tensors hold weights, averages and random states; the JSON text holds the rest: position, configuration, history.
A checkpoint is written under another name, made durable, and then renamed, so a process killed at any moment leaves
the last good one in place. A checksum over everything tells a damaged file from a good one. Nothing is unpickled.

    save(path, {"model.embedding": weight}, {"epoch": 3})
    checkpoint = load(path)
    checkpoint.tensors["model.embedding"], checkpoint.meta["epoch"]

Tensors are read by the package safetensors. They are not written by it: its writer puts the metadata into an order that
changes from process to process, so that the same run would not end in the same file; it holds a second copy of all
tensors; and it hides the number of a disk's error. The format is a length, a JSON header, and bytes.
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
"""Stands in the header until the tensors are written."""
HEADER_LIMIT = 100_000_000
"""The longest header that readers of safetensors accept, in bytes."""
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x04", b"\x80\x05")
"""The first bytes of files that torch.save and pickle write."""

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


def save(path: str | Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write a checkpoint, replacing the one at ``path`` only when the new one is complete and durable.

    ``meta`` is what JSON can hold; tuples come back as lists. Tensors may be on any device. An error of the disk is
    raised as OSError and leaves the checkpoint at ``path`` as it was.
    """
    path = Path(path)
    # Wide types first: then each tensor lies at a multiple of its type's size, as readers that map the file need.
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    header = _header(tensors, meta)
    try:
        with atomic_write(path) as file:
            file.write(len(header).to_bytes(8, "little") + header)
            checksum = zlib.crc32(header)
            for tensor in tensors.values():
                data = _bytes_of(tensor)
                checksum = zlib.crc32(data, checksum)
                file.write(data)
            # Known last, and its place is in the header.
            file.seek(8 + header.index(_checksum_entry(NO_CHECKSUM)))
            file.write(_checksum_entry(f"{checksum:08x}"))
    except OSError as error:
        size = sum(tensor.nbytes for tensor in tensors.values()) + len(header)
        kept = f"; {path} is as it was" if path.exists() else ""
        raise OSError(
            error.errno,
            f"could not write the checkpoint {path} of {size / 2**20:.1f} MiB: {error.strerror or error}{kept}. "
            "Free space or choose another folder, and resume",
        ) from error


def _header(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {}}
    size = 0
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise ValueError(f"a tensor of a checkpoint cannot be called {name!r}, which the format uses itself")
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise ValueError(f"a checkpoint cannot hold {name!r}, a tensor of {tensor.dtype}, {tensor.layout}")
        offsets = [size, size := size + tensor.nbytes]
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    try:
        text = json.dumps(meta, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"the meta of a checkpoint must be what JSON can hold: {error}; convert it") from None
    entries["__metadata__"] = {VERSION_KEY: str(VERSION), "checksum": NO_CHECKSUM, "bytes": str(size), "meta": text}
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > HEADER_LIMIT:
        raise ValueError(
            f"the names and the JSON text of a checkpoint may take {HEADER_LIMIT:,} bytes, got {len(header):,}; keep "
            "long lists in tensors"
        )
    return header


def _checksum_entry(checksum: str) -> bytes:
    return f'"checksum":"{checksum}"'.encode()


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


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
            data, entries = _read(file)
        return Checkpoint(_parsed_tensors(data, entries), _parsed_meta(entries["__metadata__"]["meta"]))
    except ModuleNotFoundError:
        raise ValueError(f"checkpoints are read with safetensors; install it with {install_extra('lm')}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except _ForeignFile as error:
        raise ValueError(f"{path} is {error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is {error}; choose an earlier checkpoint") from None


class _ForeignFile(Exception):
    """The file is something else than a checkpoint of this version; an earlier one would be no better."""


def _read(file: BinaryIO) -> tuple[bytes, dict[str, Any]]:
    """All bytes of a file that are as they were written, and the entries of its header."""
    start = file.read(8)
    if start.startswith(PICKLES):
        raise _ForeignFile(
            "a pickle, as torch.save writes it, and no checkpoint of sigsoftmax; pickles can run code and are not read"
        )
    length = int.from_bytes(start, "little")
    size = os.fstat(file.fileno()).st_size - 8 - length
    if len(start) < 8 or length > HEADER_LIMIT or size < 0:
        raise ValueError("no safetensors file, or was cut short")
    header = file.read(length)
    try:
        entries = parse_json(header)
    except ValueError:
        raise ValueError("no safetensors file, or is damaged") from None
    metadata = entries.get("__metadata__") if isinstance(entries, dict) else None
    if not isinstance(metadata, dict) or not {VERSION_KEY, "checksum", "bytes", "meta"} <= metadata.keys():
        raise _ForeignFile(
            f"a safetensors file of something else, without the {VERSION_KEY!r} that a checkpoint of sigsoftmax has"
        )
    if metadata[VERSION_KEY] != str(VERSION):
        raise _ForeignFile(
            f"a checkpoint of version {metadata[VERSION_KEY]}, and sigsoftmax {__version__} reads version {VERSION}; "
            "upgrade sigsoftmax"
        )
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("damaged: the metadata of its header must be texts")
    # By the size alone first: a file that was damaged or crafted may be longer than memory.
    data = file.read() if str(size) == metadata["bytes"] else b""
    if str(size) != metadata["bytes"] or len(data) != size:
        raise ValueError(f"damaged: {size} bytes of tensors, and {metadata['bytes']} were written")
    written = metadata["checksum"]
    found = zlib.crc32(data, zlib.crc32(header.replace(_checksum_entry(written), _checksum_entry(NO_CHECKSUM), 1)))
    if f"{found:08x}" != written:
        raise ValueError(f"damaged: its checksum is {found:08x}, and {written} was written")
    return b"".join((start, header, data)), entries


def _parsed_tensors(data: bytes, entries: Mapping[str, Any]) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load as tensors_of

    # In the order of the file, which is the same for all who read it: processes exchange tensors one after the other.
    names = [name for name in entries if name != "__metadata__"]
    for name in names:
        kind = entries[name].get("dtype") if isinstance(entries[name], dict) else None
        if kind not in DTYPES.values():
            raise ValueError(
                f"no checkpoint that can be used: its tensor {name!r} has the type {kind!r}, and a checkpoint has "
                f"{', '.join(DTYPES.values())}"
            )
    try:
        tensors = tensors_of(data)
    except SafetensorError as error:
        raise ValueError(f"no checkpoint that can be used: its header is malformed ({error})") from None
    return {name: tensors[name] for name in names}


def _parsed_meta(text: str) -> dict[str, Any]:
    try:
        meta = parse_json(text)
        if not isinstance(meta, dict):
            raise ValueError("it is no JSON object")
    except ValueError as error:
        raise ValueError(f"no checkpoint that can be used: its meta cannot be read ({error})") from None
    return meta
