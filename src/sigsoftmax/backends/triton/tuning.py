"""Tuning of the logits kernels: launch shapes that were the fastest of sweeps on an H200.

Rows in flight that are read twice are to fit the L2 cache, so that the second pass over a row reads it from there: one
long row for each multiprocessor, several shorter ones.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

LONG_ROW_BYTES = 2**17
"""A multiprocessor has one row in flight that is longer than this."""
FEWEST_STAGGERED_ROWS = 24

PER_CLASS_SHAPE = (32, 128, 8)
"""rows and classes of a tile, and warps, where a number per class is summed over rows"""

PIPELINED_TILES = 4
PIPELINED_BYTES = 2
"""bytes per element of pipelined rows"""
ALIGNMENT = 16
"""alignment of pipelined rows in bytes; a thread loads as many at a time"""


class LaunchShape(NamedTuple):
    """The shape of a launch: lanes of a tile, warps, and programs for each multiprocessor."""

    lanes: int
    warps: int
    per_processor: int
    is_early: bool = True
    """True if coefficients are read before their row"""


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """The multiprocessors of a GPU; a few for the interpreter, so that programs have rows to loop over."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def softmax_shape(
    classes: int, element_bytes: int, is_sigsoftmax: bool, *, reduces: bool = True, writes: bool = True
) -> LaunchShape:
    """The shape for launches that compute the statistics of rows, write their gradient, or both.

    A launch that does one of the two reads a row once, so that rows in flight need not fit the cache.
    """
    row_bytes = classes * element_bytes
    if not writes and row_bytes > 2**15:
        return LaunchShape(1024, 4, 32)
    if not reduces and row_bytes > 2**15 and is_sigsoftmax and element_bytes == 2:
        return LaunchShape(4096, 16, 4)
    if row_bytes > LONG_ROW_BYTES:
        return LaunchShape(8192, 32, 1)
    if row_bytes > 2**16:
        return LaunchShape(2048, 8, 2) if is_sigsoftmax else LaunchShape(4096, 16, 2, is_early=False)
    if row_bytes > 2**15:
        return LaunchShape(2048, 8, 4, is_early=is_sigsoftmax)
    most, warps, per_processor = (512, 2, 32) if is_sigsoftmax or not writes else (1024, 4, 16)
    return LaunchShape(min(most, max(128, _power_of_2(-(-classes // 4)))), warps, per_processor)


def pipelined_shape(classes: int, stride: int, element_bytes: int, is_sigsoftmax: bool) -> LaunchShape | None:
    """The shape for pipelined rows, whose first address is aligned; None if rows cannot be pipelined or should not."""
    is_aligned = classes * element_bytes % ALIGNMENT == 0 and stride * element_bytes % ALIGNMENT == 0
    shape = tuned_pipelined_shape(classes * element_bytes, is_sigsoftmax)
    if element_bytes != PIPELINED_BYTES or not is_aligned or shape is None or classes < PIPELINED_TILES * shape.lanes:
        return None
    return shape


def tuned_pipelined_shape(row_bytes: int, is_sigsoftmax: bool) -> LaunchShape | None:
    """The shape for rows whose statistics and gradient are pipelined; None where that is slower."""
    if row_bytes > LONG_ROW_BYTES:
        return LaunchShape(8192, 32, 1)
    return LaunchShape(2048, 8, 2) if row_bytes > (2**15 if is_sigsoftmax else 2**16) else None


MOST_PARTS = 16
PROGRAMS_OF_PARTS = 8
"""programs for each multiprocessor that reduce parts of rows; not from a sweep"""
FEWEST_CLASSES_OF_A_PART = 4096


def row_parts(rows: int, classes: int, device: torch.device) -> int:
    """The number of equal parts of rows that are reduced by programs of their own, where a GPU has few rows.

    Parts begin at multiples of 16 elements, or Triton would not load them by aligned vectors.
    """
    parts = 1
    while (
        2 * parts <= MOST_PARTS
        and rows * parts < PROGRAMS_OF_PARTS * multiprocessors(device)
        and classes % (32 * parts) == 0
        and classes // (2 * parts) >= FEWEST_CLASSES_OF_A_PART
    ):
        parts *= 2
    return parts


def mixture_shape(lanes: int) -> tuple[int, int]:
    """Classes of a block, each with so many lanes for its components, and warps; not from a sweep."""
    block = max(32, min(1024, 4096 // lanes))
    return block, 4 if block * lanes <= 4096 else 8


def stagger(rows: int, classes: int, element_bytes: int, programs: int) -> int:
    """Cycles over which the programs begin: about those of half a row, if it is long and they have many."""
    is_worth_it = classes * element_bytes > LONG_ROW_BYTES and rows >= FEWEST_STAGGERED_ROWS * programs
    # A multiple of 16, as 0 is: Triton compiles a kernel of its own for numbers that are not.
    return classes * element_bytes // 160 * 16 if is_worth_it else 0


def form_shape(classes: int, element_bytes: int, sums_much: bool) -> LaunchShape:
    """The shape for any form; more sums over the classes leave registers for fewer classes at a time."""
    row_bytes = classes * element_bytes
    if row_bytes > LONG_ROW_BYTES:
        return LaunchShape(4096 if sums_much else 8192, 32, 1)
    if row_bytes > 2**15:
        return LaunchShape(2048, 8, 8)
    return LaunchShape(min(1024, max(128, _power_of_2(classes))), 4, 16)


def _power_of_2(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
