"""Matrices in files: .npy, .npz, .safetensors, .pt and raw numbers, read in blocks and never as a whole.

A file that is shorter than it says is refused, with the bytes that were expected and found; ``truncated="keep"`` takes
the contexts that are there. A file is opened once, so that header and numbers belong together even if another process
replaces it meanwhile.

Shapes: N contexts, V vocabulary.
"""

from __future__ import annotations

import math
import os
import struct
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sigsoftmax.analysis.spectrum.matrix_readers import Block, MatrixReader, check_axis, from_array, from_blocks
from sigsoftmax.records.envelope import from_plain
from sigsoftmax.records.parsing import parse_json

__all__ = ["as_reader", "from_file", "read_npy_header"]

Truncated = Literal["raise", "keep"]

STORED_AS: dict[torch.dtype, Any] = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    # numpy has no bfloat16: its bits are read as integers, and torch gives them back their meaning.
    torch.bfloat16: np.int16,
}
SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
READ_BYTES = 2**26


@dataclass(frozen=True)
class StoredMatrix:
    """Numbers that lie in a file as one piece."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    big_endian: bool = False
    fortran_order: bool = False

    @property
    def expected_bytes(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    @property
    def kind(self) -> np.dtype[Any]:
        return np.dtype(STORED_AS[self.dtype]).newbyteorder(">" if self.big_endian else "<")


def from_file(
    path: str | Path,
    *,
    name: str | None = None,
    dtype: torch.dtype | None = None,
    shape: tuple[int | None, int] | None = None,
    contexts_axis: int = 0,
    truncated: Truncated = "raise",
    description: str | None = None,
) -> MatrixReader:
    """Read a matrix on disk. ``name`` picks one of several in a .npz, .safetensors or .pt file.

    Any other file is raw numbers, for which ``dtype`` and ``shape`` must be given; None as the first size means as many
    rows as the file holds. ``contexts_axis=1`` says that a context is a column.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no file at {path}; expected a matrix of log-probabilities")
    check_axis(contexts_axis)
    text = description or path.name
    suffix = path.suffix.lower()
    if suffix in (".npy", ".npz", ".safetensors", ".pt", ".pth") and (dtype is not None or shape is not None):
        raise ValueError(f"{path} says its own dtype and shape; leave out dtype and shape, which are for raw files")
    if suffix == ".npz":
        return _npz_reader(path, name, contexts_axis, text)
    if suffix in (".pt", ".pth"):
        return from_array(_torch_tensor(path, name), contexts_axis=contexts_axis, description=text)
    with path.open("rb") as file:
        if suffix == ".npy":
            stored = _npy_header(path, file)
        elif suffix == ".safetensors":
            stored = _safetensors_header(path, file, name)
        else:
            stored = _raw(path, file, dtype, shape)
        matrix = _mapped(file, stored, contexts_axis, truncated)
    return from_array(matrix, contexts_axis=contexts_axis, description=text)


def as_reader(matrix: Any) -> MatrixReader:
    """A reader of a matrix, of the file at a path or of an iterable of matrices; a reader stays as it is."""
    if isinstance(matrix, MatrixReader):
        return matrix
    if isinstance(matrix, str | Path):
        return from_file(matrix)
    if isinstance(matrix, Tensor | np.ndarray):
        return from_array(matrix)
    if isinstance(matrix, Iterable):
        return from_blocks(matrix)
    raise ValueError(
        f"expected a matrix, the path of a file, an iterable of matrices or a MatrixReader, got {type(matrix).__name__}"
    )


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


def _mapped(file: BinaryIO, stored: StoredMatrix, contexts_axis: int, truncated: Truncated) -> Tensor:
    """The matrix, mapped: nothing is read before it is used, and the file cannot be changed through it."""
    _check_matrix(stored.path, stored.shape)
    if stored.big_endian:
        raise ValueError(
            f"{stored.path} holds big-endian numbers, which torch cannot map; convert it with "
            "numpy.save(new, numpy.load(old).astype('<f8'))"
        )
    shape, found = list(stored.shape), _size(file)
    # A cut shortens the axis that varies slowest.
    outer = 1 if stored.fortran_order else 0
    if found < stored.expected_bytes:
        whole = max(0, found - stored.offset) // (stored.dtype.itemsize * shape[1 - outer])
        problem = (
            f"{stored.path} is truncated: expected {stored.expected_bytes} bytes for {shape[0]} x {shape[1]} numbers "
            f"of {stored.dtype}, found {found}"
        )
        if truncated == "raise" or outer != contexts_axis or not whole:
            cure = f"truncated='keep' takes the {whole} whole contexts that are there" if whole else "copy it again"
            raise ValueError(f"{problem}; {cure if outer == contexts_axis else 'copy it again'}")
        warnings.warn(f"{problem}; {whole} whole contexts are kept", stacklevel=4)
        shape[outer] = whole
    order: Literal["C", "F"] = "F" if stored.fortran_order else "C"
    # Copy on write: torch wants memory that could be written to.
    tensor = torch.from_numpy(np.memmap(file, stored.kind, "c", stored.offset, tuple(shape), order))
    return tensor.view(torch.bfloat16) if stored.dtype == torch.bfloat16 else tensor


def _check_matrix(path: Path, shape: tuple[int, ...]) -> None:
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"{path} holds an array of shape {shape}; expected a matrix with at least one row and column")


# --- numpy ----------------------------------------------------------------------------------------------------------


def read_npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """The shape of an array, its order (True: columns first) and its dtype; ValueError where there is no header."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(file)


def _npy_header(path: Path, file: IO[bytes]) -> StoredMatrix:
    try:
        shape, fortran_order, kind = read_npy_header(file)
    except ValueError as error:
        raise ValueError(f"{path} is not a .npy file, or is cut off in its header: {error!s:.200}") from None
    for dtype in (torch.float64, torch.float32, torch.float16):
        if kind.newbyteorder("=") == np.dtype(STORED_AS[dtype]):
            return StoredMatrix(path, file.tell(), shape, dtype, kind.newbyteorder("<") != kind, fortran_order)
    raise ValueError(f"{path} holds {kind}; expected float64, float32 or float16")


def _npz_reader(path: Path, name: str | None, contexts_axis: int, text: str) -> MatrixReader:
    """Read a member of an archive forward, compressed or not."""
    try:
        # Stays open as long as the reader is used; each pass over the blocks has a position of its own.
        archive = zipfile.ZipFile(path)
        member = _chosen(path, name, [entry.removesuffix(".npy") for entry in archive.namelist()])
        with archive.open(f"{member}.npy") as file:
            stored = _npy_header(path, file)
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{path} cannot be read as .npz: {error}. It has {path.stat().st_size} bytes, and is probably truncated: "
            "an archive ends with its list of contents"
        ) from None
    _check_matrix(path, stored.shape)
    if stored.fortran_order != (contexts_axis == 1):
        stored_by = "column by column" if stored.fortran_order else "row by row"
        raise ValueError(
            f"{member} in {path} is stored {stored_by}, so that contexts cannot be read one after another from an "
            "archive; save it as .npy"
        )
    contexts, vocabulary = stored.shape if contexts_axis == 0 else reversed(stored.shape)

    def blocks(start: int) -> Iterator[Block]:
        row_bytes = vocabulary * stored.dtype.itemsize
        step = max(1, READ_BYTES // row_bytes)
        with archive.open(f"{member}.npy") as file:
            file.seek(stored.offset + start * row_bytes)
            for first in range(start, contexts, step):
                wanted = min(step, contexts - first) * row_bytes
                try:
                    data = file.read(wanted)
                except (zipfile.BadZipFile, EOFError) as error:
                    raise ValueError(f"{member} in {path} is damaged after context {first}: {error}") from None
                if len(data) < wanted:
                    raise ValueError(
                        f"{member} in {path} is truncated: expected {wanted} bytes from context {first} on, found "
                        f"{len(data)}"
                    )
                rows: NDArray[Any] = np.frombuffer(data, stored.kind).reshape(-1, vocabulary)
                yield rows.astype(stored.kind.newbyteorder("="))

    return MatrixReader(description=text, blocks=blocks, contexts=contexts, vocabulary=vocabulary, dtype=stored.dtype)


# --- torch ----------------------------------------------------------------------------------------------------------


def _safetensors_header(path: Path, file: BinaryIO, name: str | None) -> StoredMatrix:
    found, start = _size(file), file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if len(start) < 8 or 8 + length > found:
        raise ValueError(
            f"{path} is truncated, or not a .safetensors file: expected {8 + length} bytes of header, found {found}"
        )
    try:
        header = parse_json(file.read(length))
    except ValueError as error:
        raise ValueError(f"{path} is not a .safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a .safetensors file: its header is no JSON object")
    tensors = {key: value for key, value in header.items() if key != "__metadata__"}
    chosen = tensors[_chosen(path, name, list(tensors))]
    try:
        kind = from_plain(str, chosen["dtype"], "dtype")
        shape = from_plain(tuple[int, ...], chosen["shape"], "shape")
        first, end = from_plain(tuple[int, ...], chosen["data_offsets"], "data_offsets")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a .safetensors file: {error!r}") from None
    if kind not in SAFETENSORS_DTYPES:
        raise ValueError(f"{path} holds {kind}; expected one of {', '.join(SAFETENSORS_DTYPES)}")
    dtype = SAFETENSORS_DTYPES[kind]
    if min(first, *shape, 0) < 0 or end - first != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{path} is not a .safetensors file: numbers of {kind} and shape {shape} do not lie from byte {first} to "
            f"{end}"
        )
    return StoredMatrix(path, 8 + length + first, shape, dtype)


def _torch_tensor(path: Path, name: str | None) -> Tensor:
    before = path.stat()
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, EOFError) as error:
        raise ValueError(
            f"{path} cannot be read by torch ({before.st_size} bytes; is it truncated?): {error}"
        ) from None
    after = path.stat()
    # torch opens the file twice, for its contents and to map it.
    if (before.st_ino, before.st_size, before.st_mtime_ns) != (after.st_ino, after.st_size, after.st_mtime_ns):
        raise ValueError(f"{path} was replaced while it was read; read it again")
    if isinstance(loaded, dict):
        tensors = {str(key): value for key, value in loaded.items() if isinstance(value, Tensor)}
        loaded = tensors[_chosen(path, name, list(tensors))]
    if not isinstance(loaded, Tensor):
        raise ValueError(f"{path} holds a {type(loaded).__name__}; expected a tensor or a dictionary of tensors")
    _check_matrix(path, tuple(loaded.shape))
    return loaded.detach()


# --- raw ------------------------------------------------------------------------------------------------------------


def _raw(path: Path, file: BinaryIO, dtype: torch.dtype | None, shape: tuple[int | None, int] | None) -> StoredMatrix:
    if dtype is None or shape is None:
        raise ValueError(
            f"{path} is read as raw numbers, for which dtype and shape must be given, for instance "
            "dtype=torch.float32, shape=(None, 10000); files that say these themselves end in .npy, .npz, .safetensors "
            "or .pt"
        )
    if dtype not in STORED_AS:
        raise ValueError(f"dtype must be one of {', '.join(map(str, STORED_AS))}, got {dtype}")
    if len(shape) != 2 or shape[1] is None or shape[1] < 1 or (shape[0] is not None and shape[0] < 1):
        raise ValueError(f"shape must be (rows or None, columns), got {shape}")
    found, row_bytes = _size(file), shape[1] * dtype.itemsize
    rows = shape[0]
    if rows is None:
        rows, rest = divmod(found, row_bytes)
        if rest or not rows:
            raise ValueError(
                f"{path} has {found} bytes, which is not a whole number of rows of {row_bytes} bytes ({shape[1]} "
                f"numbers of {dtype}): {rows} rows and {rest} bytes. It is truncated, or shape or dtype is wrong"
            )
    elif found > rows * row_bytes:
        raise ValueError(
            f"{path} has {found} bytes, more than the {rows * row_bytes} that {rows} x {shape[1]} numbers of {dtype} "
            "take; shape or dtype is wrong"
        )
    return StoredMatrix(path, 0, (rows, shape[1]), dtype)


def _chosen(path: Path, name: str | None, names: list[str]) -> str:
    if name is None and len(names) == 1:
        return names[0]
    if name is None or name not in names:
        asked = "several arrays" if name is None and names else f"no array {name!r}" if name else "no arrays"
        raise ValueError(f"{path} holds {asked}; choose one with name=: {', '.join(names) or 'it is empty'}")
    return name
