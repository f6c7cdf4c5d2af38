"""How row kernels are launched: the fastest of sweeps on an H200.

Rows in flight that are read twice are to fit the L2 cache, so that the second pass over a row reads it from there: one
long row for each multiprocessor, several shorter ones.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

Shape = tuple[int, int, int]
"""lanes of a tile, warps, and programs for each multiprocessor"""

LONG_ROW_BYTES = 2**17
"""Of longer rows, a multiprocessor has one in flight."""
FEWEST_STAGGERED_ROWS = 24

PER_CLASS_SHAPE = (32, 128, 8)
"""rows and classes of a tile, and warps, where a number per class is summed over rows"""


class FastShape(NamedTuple):
    lanes: int
    warps: int
    per_processor: int
    is_early: bool = True
    """coefficients are read before their row"""


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; a few for the interpreter, so that programs have rows to loop over."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def fast_shape(
    classes: int, element_bytes: int, is_sigsoftmax: bool, *, measures: bool = True, writes: bool = True
) -> FastShape:
    """For launches that measure rows, write their gradient, or both.

    What does one of the two reads a row once, so that rows in flight need not fit the cache.
    """
    row_bytes = classes * element_bytes
    if not writes and row_bytes > 2**15:
        return FastShape(1024, 4, 32)
    if not measures and row_bytes > 2**15 and is_sigsoftmax and element_bytes == 2:
        return FastShape(4096, 16, 4)
    if row_bytes > LONG_ROW_BYTES:
        return FastShape(8192, 32, 1)
    if row_bytes > 2**16:
        return FastShape(2048, 8, 2) if is_sigsoftmax else FastShape(4096, 16, 2, is_early=False)
    if row_bytes > 2**15:
        return FastShape(2048, 8, 4, is_early=is_sigsoftmax)
    most, warps, per_processor = (512, 2, 32) if is_sigsoftmax or not writes else (1024, 4, 16)
    return FastShape(min(most, max(128, _power_of_2(-(-classes // 4)))), warps, per_processor)


def stream_shape(classes: int, element_bytes: int, is_sigsoftmax: bool) -> FastShape | None:
    """For rows that are measured and written as a stream; None where that is slower."""
    row_bytes = classes * element_bytes
    if row_bytes > LONG_ROW_BYTES:
        return FastShape(8192, 32, 1)
    return FastShape(2048, 8, 2) if row_bytes > (2**15 if is_sigsoftmax else 2**16) else None


def stagger(rows: int, classes: int, element_bytes: int, programs: int) -> int:
    """Cycles over which the programs begin: about those of half a row, if it is long and they have many."""
    is_worth_it = classes * element_bytes > LONG_ROW_BYTES and rows >= FEWEST_STAGGERED_ROWS * programs
    # A multiple of 16, as 0 is: Triton compiles a kernel of its own for numbers that are not.
    return classes * element_bytes // 160 * 16 if is_worth_it else 0


def general_shape(classes: int, element_bytes: int, sums_much: bool) -> Shape:
    """What finds more than a normaliser over the classes has no registers for as many of them at a time."""
    row_bytes = classes * element_bytes
    if row_bytes > 2**17:
        return 4096 if sums_much else 8192, 32, 1
    if row_bytes > 2**15:
        return 2048, 8, 8
    return min(1024, max(128, _power_of_2(classes))), 4, 16


def _power_of_2(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
