"""Readers of a log-output matrix: blocks of contexts, of any size, one after another.

A reader says what it knows of the size beforehand and gives blocks from a chosen context on, so that a run can be
resumed. Readers of files are in ``matrix_files``.

Shapes: N contexts, V vocabulary, B contexts of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sigsoftmax.analysis.head_weights import Contexts, HeadWeights

__all__ = [
    "Block",
    "MatrixReader",
    "concatenated",
    "from_array",
    "from_blocks",
    "from_function",
    "from_head",
    "regrouped",
    "tensors",
]

Block = Tensor | NDArray[Any]

PIECE_BYTES = 2**26
HEAD_BLOCK_BYTES = 2**27
"""bytes of the logits of a block that an output layer computes"""


@dataclass(frozen=True, kw_only=True)
class MatrixReader:
    """A matrix that streams in."""

    description: str
    """the matrix, in plain text"""
    blocks: Callable[[int], Iterator[Block]]
    """the blocks from a context on, contexts as rows; only 0 is asked for if the reader cannot seek"""
    contexts: int | None = None
    """the number of contexts; None if that shows at the end"""
    vocabulary: int | None = None
    can_seek: bool = True
    dtype: torch.dtype | None = None
    """dtype of the entries; None if the first block tells"""

    def check_end(self, contexts: int) -> None:
        """Raise a ValueError unless so many contexts are all that were promised."""
        if self.contexts not in (None, contexts):
            raise ValueError(f"{self.description} ended after {contexts} contexts, expected {self.contexts}")


def from_array(matrix: Block, *, contexts_axis: int = 0, description: str = "log-probabilities") -> MatrixReader:
    """Read a matrix in memory, or an array mapped from a file."""
    check_axis(contexts_axis)
    rows = _with_contexts_as_rows(matrix, contexts_axis)
    _check_block(rows, description)

    def blocks(start: int) -> Iterator[Block]:
        if start < len(rows):
            yield rows[start:]

    return MatrixReader(description=description, blocks=blocks, contexts=len(rows), vocabulary=rows.shape[1])


def from_blocks(
    blocks: Iterable[Block],
    *,
    contexts: int | None = None,
    vocabulary: int | None = None,
    contexts_axis: int = 0,
    description: str = "log-probabilities",
) -> MatrixReader:
    """Read any iterable of matrices: a list, a generator, a loader.

    To resume, give an iterable that begins at the beginning again: what was read before is skipped.
    """
    check_axis(contexts_axis)
    if isinstance(blocks, Tensor | np.ndarray):
        raise ValueError("expected an iterable of matrices, got one array; use from_array for a matrix")

    def oriented(start: int) -> Iterator[Block]:
        assert start == 0
        for block in blocks:
            yield _with_contexts_as_rows(block, contexts_axis)

    return MatrixReader(
        description=description, blocks=oriented, contexts=contexts, vocabulary=vocabulary, can_seek=False
    )


def from_function(
    make_block: Callable[[int, int], Block],
    contexts: int,
    *,
    vocabulary: int | None = None,
    block_contexts: int = 1024,
    description: str = "log-probabilities",
) -> MatrixReader:
    """Read what ``make_block(first, last)`` computes: the rows of contexts from ``first`` up to, not with, ``last``."""
    if contexts < 1 or block_contexts < 1:
        raise ValueError(f"contexts and block_contexts must be at least 1, got {contexts} and {block_contexts}")

    def blocks(start: int) -> Iterator[Block]:
        for first in range(start, contexts, block_contexts):
            last = min(first + block_contexts, contexts)
            block = make_block(first, last)
            if isinstance(block, Tensor | np.ndarray) and block.ndim == 2 and len(block) != last - first:
                raise ValueError(
                    f"the function was asked for the {last - first} contexts from {first} on, and returned "
                    f"{len(block)} rows; expected one row per context"
                )
            yield block

    return MatrixReader(description=description, blocks=blocks, contexts=contexts, vocabulary=vocabulary)


def from_head(
    layer: HeadWeights,
    contexts: Contexts,
    *,
    dtype: torch.dtype | None = None,
    quick: bool = False,
    description: str | None = None,
) -> MatrixReader:
    """Read the log-probabilities of an output layer, computed a block at a time where its weights are.

    ``dtype`` is that of the arithmetic; None means float64 if all tensors are, else float32. ``quick`` is explained at
    :meth:`HeadWeights.log_probs`.
    """
    layer.check(contexts)
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    if dtype is None:
        tensors_of_head = [t for t in (contexts.hidden_NKd, layer.weight_Vd, layer.bias_V) if t is not None]
        dtype = torch.float64 if all(t.dtype == torch.float64 for t in tensors_of_head) else torch.float32
    return from_function(
        lambda first, last: layer.log_probs(contexts[first:last], dtype, quick=quick),
        len(contexts),
        vocabulary=layer.vocabulary,
        block_contexts=max(1, HEAD_BLOCK_BYTES // (dtype.itemsize * layer.vocabulary * layer.components)),
        description=description or f"log-probabilities of a {layer.parsed_head} head, d = {layer.width}",
    )


def concatenated(readers: Sequence[MatrixReader], *, description: str | None = None) -> MatrixReader:
    """Read matrices one after another, for instance the files of a matrix that was written in parts."""
    if not readers:
        raise ValueError("expected at least one reader, got none")
    widths = {number: reader.vocabulary for number, reader in enumerate(readers) if reader.vocabulary is not None}
    first = min(widths, default=0)
    for number, vocabulary in widths.items():
        if vocabulary != widths[first]:
            raise ValueError(
                f"all parts must have the same vocabulary, but part {first} has {widths[first]} and part {number} has "
                f"{vocabulary}"
            )
    known = [reader.contexts for reader in readers if reader.contexts is not None]
    can_seek = all(reader.can_seek for reader in readers) and len(known) == len(readers)

    def blocks(start: int) -> Iterator[Block]:
        for reader in readers:
            skipped = min(start, reader.contexts) if can_seek and reader.contexts is not None else 0
            start -= skipped
            if skipped != reader.contexts:
                yield from reader.blocks(skipped)

    return MatrixReader(
        description=description or " and ".join(reader.description for reader in readers),
        blocks=blocks,
        contexts=sum(known) if len(known) == len(readers) else None,
        vocabulary=widths.get(first),
        can_seek=can_seek,
        dtype=readers[0].dtype,
    )


def tensors(reader: MatrixReader, start: int = 0) -> Iterator[Tensor]:
    """The blocks of a reader from a context on as tensors of one dtype and width; arrays come in pieces.

    A tensor is valid until the next one is asked for: readers may fill the same memory again. A matrix without contexts
    raises a ValueError.
    """
    dtype, vocabulary, done = reader.dtype, reader.vocabulary, start
    for number, block in enumerate(reader.blocks(start)):
        name = f"block {number} of {reader.description}" if not start else f"a block of {reader.description}"
        _check_block(block, name)
        if vocabulary is not None and block.shape[1] != vocabulary:
            raise ValueError(
                f"{name} has {block.shape[1]} columns, expected {vocabulary}: every row must hold the whole vocabulary"
            )
        vocabulary = int(block.shape[1])
        for piece in _pieces(block):
            if dtype is not None and piece.dtype != dtype:
                raise ValueError(
                    f"{name} has the dtype {piece.dtype}, those before have {dtype}; convert all blocks to one dtype, "
                    "and give the least precise one as precision"
                )
            dtype = piece.dtype
            done += len(piece)
            yield piece
    if not done:
        raise ValueError(f"expected at least one context, got none; {reader.description} is empty")


def regrouped(blocks: Iterable[Tensor], rows: int) -> Iterator[Tensor]:
    """The same rows in blocks of exactly ``rows``, the last one perhaps shorter; each valid until the next."""
    buffer: Tensor | None = None
    filled = 0
    for block in blocks:
        # What fills up the buffer, then whole blocks, then a rest.
        first = (rows - filled) % rows
        for piece in (block[:first], *block[first:].split(rows)):
            if len(piece) == rows:
                # The layout in memory decides in which order a product is summed, and so its last bits.
                yield piece.contiguous()
            elif len(piece):
                buffer = block.new_empty(rows, block.shape[1]) if buffer is None else buffer
                buffer[filled : filled + len(piece)] = piece
                filled += len(piece)
                if filled == rows:
                    yield buffer
                    filled = 0
    if filled and buffer is not None:
        yield buffer[:filled]


def check_axis(contexts_axis: int) -> None:
    """Raise a ValueError unless this is an axis of a matrix."""
    if contexts_axis not in (0, 1):
        raise ValueError(
            f"contexts_axis must be 0 (a context is a row) or 1 (a context is a column), got {contexts_axis!r}"
        )


def _with_contexts_as_rows(block: Block, contexts_axis: int) -> Block:
    """The block, transposed if its contexts are columns; what is no matrix is left to :func:`_check_block`."""
    return block.T if contexts_axis == 1 and getattr(block, "ndim", 0) == 2 else block


def _check_block(block: Any, name: str) -> None:
    if not isinstance(block, Tensor | np.ndarray):
        raise ValueError(f"{name} is a {type(block).__name__}; expected a tensor or a numpy array, a context per row")
    if block.ndim != 2 or not block.shape[1]:
        raise ValueError(f"{name} has the shape {tuple(block.shape)}; expected (contexts, vocabulary)")
    floating = block.is_floating_point() if isinstance(block, Tensor) else np.issubdtype(block.dtype, np.floating)
    if not floating or block.dtype == np.longdouble:
        raise ValueError(f"{name} has the dtype {block.dtype}; expected float64, float32, float16 or bfloat16")


def _pieces(block: Block) -> Iterator[Tensor]:
    if isinstance(block, Tensor):
        if len(block):
            yield block.detach()
        return
    # Copied in pieces: torch wants memory that can be written to, and the array may be a file of any size.
    step = max(1, PIECE_BYTES // (block.itemsize * block.shape[1]))
    for first in range(0, len(block), step):
        yield torch.from_numpy(np.array(block[first : first + step], dtype=block.dtype.newbyteorder("="), order="C"))
