"""The chunks of a call: the tokens that fit into one, their layout, and the way to sum the gradient of the weight.

Shapes: N tokens, V classes, d width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sigsoftmax.backends.chunked.matmul import rounded_up
from sigsoftmax.contract.problem import AnyProblem
from sigsoftmax.contract.spec import LossSpec


def row_alignment(device: torch.device) -> int:
    """The alignment, in elements, of the rows of a chunk.

    On a GPU products are several times slower where rows are not aligned, or where their length is odd.
    """
    return 16 if device.type == "cuda" else 1


def row_width(problem: AnyProblem, classes: int | None = None) -> int:
    """The elements of a row of a chunk, with those that align the next row."""
    return rounded_up(problem.num_classes if classes is None else classes, row_alignment(problem.device))


def automatic_weight_gradient(device: torch.device, classes: int, rows: int, features: int, chunk_bytes: int) -> str:
    """The way to sum the gradient of a weight of low precision for ``weight_gradient="auto"``.

    A float32 buffer is faster than blocks of the vocabulary, whose float32 buffer is for the gradient of the rows. A
    CPU has no kernels for these.
    """
    buffer_bytes, blocks_bytes = 4 * classes * features, 4 * rows * features
    is_small = buffer_bytes <= max(blocks_bytes, chunk_bytes // 2)
    return "buffered" if device.type == "cpu" or is_small else "exact"


class ChunkPlan(NamedTuple):
    """The chunks of a call, and the way to sum the gradient of its weight, known without its tensors."""

    chunks: int
    tokens: int
    """per chunk"""
    row_elements: int
    """per row of logits, with those that align the next row"""
    weight_gradient: str
    """``in place``, or as the option says"""


def plan_chunks(problem: AnyProblem) -> ChunkPlan:
    """Chunks of equal size, since a last one of a few rows would be a slow product."""
    weight, shard = problem.signature.operands.weight, problem.signature.operands.shard
    # All ranks of a group must decide alike.
    classes = problem.num_classes if shard is None else max(1, *shard[0])
    row_elements = row_width(problem, classes)
    token_bytes = row_elements * problem.product_dtype.itemsize * problem.components
    chunks = max(1, -(-problem.num_tokens // max(1, problem.chunk_bytes // token_bytes)))
    mode: str = getattr(problem.spec, "weight_gradient", "buffered")
    if mode != "fast" and not isinstance(problem.spec, LossSpec):
        # Only the gradient of a loss is written a block of the vocabulary at a time.
        mode = "buffered"
    if chunks == 1 or weight.dtype == torch.promote_types(weight.dtype, problem.compute_dtype):
        mode = "in place"
    elif mode == "auto":
        rows = problem.num_tokens * problem.components
        mode = automatic_weight_gradient(problem.device, classes, rows, weight.shape[1], problem.chunk_bytes)
    return ChunkPlan(chunks, max(1, -(-problem.num_tokens // chunks)), row_elements, mode)
