"""Large pages for large results on Linux.

A gradient of N x V floats is fresh memory, and touching it 4 KiB at a time costs more than computing what goes into
it: page faults are most of the time of a cross-entropy on a CPU. Where the system leaves large pages to those who ask
(transparent_hugepage/enabled = madvise), asking makes the first write much faster. It is a hint: the
values, the size and the lifetime of the memory do not change.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

from torch import Tensor

SMALLEST = 4 * 2**20
"""Below it the gain is too small to ask."""


@functools.cache
def _madvise() -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        function.restype = ctypes.c_int
    return function


def advise(tensor: Tensor) -> Tensor:
    """Ask for large pages under a tensor whose memory has not been written yet; returns the tensor."""
    size = tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" or size < SMALLEST:
        return tensor
    madvise = _madvise()
    if madvise is not None:
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (tensor.data_ptr() + size) // mmap.PAGESIZE * mmap.PAGESIZE
        madvise(first, last - first, mmap.MADV_HUGEPAGE)
    return tensor
