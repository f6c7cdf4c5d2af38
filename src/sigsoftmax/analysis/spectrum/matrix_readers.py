"""Where a log-output matrix comes from: blocks of contexts, of any size, one after another.

A source says what it knows of its size beforehand and gives blocks from a chosen context on, so that a run can be
resumed. Files are in ``matrix_files``, output layers in ``head_sources``.

Shapes: M words, T contexts, B contexts of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "Block",
    "MatrixSource",
    "concatenated",
    "from_array",
    "from_blocks",
    "from_function",
    "regrouped",
    "tensors",
]

Block = Tensor | NDArray[Any]

PIECE_BYTES = 2**26


@dataclass(frozen=True, kw_only=True)
class MatrixSource:
    """A matrix that streams in."""

    description: str
    """what it is, in words"""
    blocks: Callable[[int], Iterator[Block]]
    """the blocks from a context on, contexts as rows; only 0 is asked for if the source cannot seek"""
    contexts: int | None = None
    """how many there are; None if that shows at the end"""
    words: int | None = None
    can_seek: bool = True
    dtype: torch.dtype | None = None
    """of the entries; None if the first block tells"""


def from_array(matrix: Block, *, contexts_axis: int = 0, description: str = "log-probabilities") -> MatrixSource:
    """A matrix in memory, or an array mapped from a file."""
    _check_axis(contexts_axis)
    if not isinstance(matrix, Tensor | np.ndarray) or matrix.ndim != 2:
        shape = f"shape {tuple(matrix.shape)}" if isinstance(matrix, Tensor | np.ndarray) else type(matrix).__name__
        raise ValueError(f"expected a matrix of contexts and words, got {shape}")
    contexts, words = matrix.shape if contexts_axis == 0 else reversed(matrix.shape)

    def blocks(start: int) -> Iterator[Block]:
        if start < contexts:
            yield matrix[start:] if contexts_axis == 0 else matrix[:, start:].T

    return MatrixSource(description=description, blocks=blocks, contexts=int(contexts), words=int(words))


def from_blocks(
    blocks: Iterable[Block],
    *,
    contexts: int | None = None,
    words: int | None = None,
    contexts_axis: int = 0,
    description: str = "log-probabilities",
) -> MatrixSource:
    """Any iterable of matrices: a list, a generator, a loader.

    To resume, give an iterable that begins at the beginning again: what was read before is skipped.
    """
    _check_axis(contexts_axis)
    if isinstance(blocks, Tensor | np.ndarray):
        raise ValueError("expected an iterable of matrices, got one array; use from_array for a matrix")

    def oriented(start: int) -> Iterator[Block]:
        assert start == 0
        for block in blocks:
            yield block.T if contexts_axis == 1 and getattr(block, "ndim", 0) == 2 else block

    return MatrixSource(description=description, blocks=oriented, contexts=contexts, words=words, can_seek=False)


def from_function(
    make_block: Callable[[int, int], Block],
    contexts: int,
    *,
    words: int | None = None,
    block_contexts: int = 1024,
    description: str = "log-probabilities",
) -> MatrixSource:
    """``make_block(first, last)`` computes the rows of the contexts from ``first`` up to, not including, ``last``."""
    if contexts < 1 or block_contexts < 1:
        raise ValueError(f"contexts and block_contexts must be at least 1, got {contexts} and {block_contexts}")

    def blocks(start: int) -> Iterator[Block]:
        for first in range(start, contexts, block_contexts):
            last = min(first + block_contexts, contexts)
            block = make_block(first, last)
            if isinstance(block, Tensor | np.ndarray) and block.ndim == 2 and len(block) != last - first:
                raise ValueError(
                    f"the function was asked for the {last - first} contexts from {first} on, and returned "
                    f"{len(block)} rows; expected one row a context"
                )
            yield block

    return MatrixSource(description=description, blocks=blocks, contexts=contexts, words=words)


def concatenated(sources: Sequence[MatrixSource], *, description: str | None = None) -> MatrixSource:
    """Sources one after another, for instance the files of a matrix that was written in parts."""
    if not sources:
        raise ValueError("expected at least one source, got none")
    widths = {number: source.words for number, source in enumerate(sources) if source.words is not None}
    first = min(widths, default=0)
    for number, words in widths.items():
        if words != widths[first]:
            raise ValueError(
                f"all parts must have the same words, but part {first} has {widths[first]} and part {number} has "
                f"{words}"
            )
    known = [source.contexts for source in sources if source.contexts is not None]
    can_seek = all(source.can_seek for source in sources) and len(known) == len(sources)

    def blocks(start: int) -> Iterator[Block]:
        for source in sources:
            skipped = min(start, source.contexts) if can_seek and source.contexts is not None else 0
            start -= skipped
            if skipped != source.contexts:
                yield from source.blocks(skipped)

    return MatrixSource(
        description=description or " and ".join(source.description for source in sources),
        blocks=blocks,
        contexts=sum(known) if len(known) == len(sources) else None,
        words=widths.get(first),
        can_seek=can_seek,
        dtype=sources[0].dtype,
    )


def tensors(source: MatrixSource, start: int) -> Iterator[Tensor]:
    """The blocks of a source from a context on as tensors of one dtype and width; arrays come in pieces.

    A tensor is valid until the next one is asked for: sources may fill the same memory again.
    """
    dtype, words = source.dtype, source.words
    for number, block in enumerate(source.blocks(start)):
        name = f"block {number} of {source.description}" if not start else f"a block of {source.description}"
        _check_block(block, name)
        if words is not None and block.shape[1] != words:
            raise ValueError(f"{name} has {block.shape[1]} words, expected {words}: every row must hold all words")
        words = int(block.shape[1])
        for piece in _pieces(block):
            if dtype is not None and piece.dtype != dtype:
                raise ValueError(
                    f"{name} has the dtype {piece.dtype}, those before have {dtype}; convert all blocks to one dtype, "
                    "and give the least precise one as precision"
                )
            dtype = piece.dtype
            yield piece


def regrouped(blocks: Iterable[Tensor], rows: int) -> Iterator[Tensor]:
    """The same rows in blocks of exactly ``rows``, the last one perhaps shorter; each valid until the next."""
    buffer: Tensor | None = None
    filled = 0
    for block in blocks:
        taken = 0
        while taken < len(block):
            if not filled and len(block) - taken >= rows:
                # The layout in memory decides in which order a product is summed, and so its last bits.
                yield block[taken : taken + rows].contiguous()
                taken += rows
                continue
            if buffer is None:
                buffer = block.new_empty(rows, block.shape[1])
            count = min(rows - filled, len(block) - taken)
            buffer[filled : filled + count] = block[taken : taken + count]
            taken, filled = taken + count, filled + count
            if filled == rows:
                yield buffer
                filled = 0
    if filled and buffer is not None:
        yield buffer[:filled]


def _check_block(block: Any, name: str) -> None:
    if not isinstance(block, Tensor | np.ndarray):
        raise ValueError(f"{name} is a {type(block).__name__}; expected a tensor or a numpy array, a context a row")
    if block.ndim != 2 or not block.shape[1]:
        raise ValueError(f"{name} has the shape {tuple(block.shape)}; expected (contexts, words), a context a row")
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


def _check_axis(contexts_axis: int) -> None:
    if contexts_axis not in (0, 1):
        raise ValueError(
            f"contexts_axis must be 0 (a context is a row) or 1 (a context is a column), got {contexts_axis!r}"
        )
