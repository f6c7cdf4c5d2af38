"""One launch over a list of tensors: each program finds the tensor that its block of elements lies in.

A kernel takes a tuple of pointers and a tuple of sizes. They are arguments of the launch, so that nothing is copied to
the device, and a captured CUDA graph keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

__all__ = ["block_count", "chosen", "find_block"]


def block_count(sizes: Sequence[int], block: int) -> int:
    """Programs that :func:`find_block` tells apart."""
    return sum(triton.cdiv(size, block) for size in sizes)


@triton.jit
def find_block(program, sizes, BLOCK: tl.constexpr):
    """The index of the tensor that a program works on, and which of the tensor's blocks is the program's."""
    index = 0
    first = 0
    end = 0
    for i in tl.static_range(len(sizes)):
        index = tl.where(program >= end, i, index)
        first = tl.where(program >= end, end, first)
        end += tl.cdiv(sizes[i], BLOCK)
    return index, program - first


@triton.jit
def chosen(items, index):
    """The item of a tuple at an index that is known on the device alone."""
    item = items[0]
    for i in tl.static_range(1, len(items)):
        item = tl.where(index == i, items[i], item)
    return item
