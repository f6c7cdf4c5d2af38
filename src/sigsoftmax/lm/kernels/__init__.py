"""Triton kernels private to the language models: the work of a window beside its matrix products and its recurrence.

Each module launches the kernels of one operation and names the function of plain torch that hands over to it. Where
kernels do not run, that function computes the same, and tests compare the two. The modules need triton to be imported,
this one does not. No kernel adds floating-point numbers atomically: same inputs, same bits.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from sigsoftmax.contract.devices import has_kernels, has_triton

__all__ = ["run_on"]


def run_on(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    """Tell whether kernels compute with this tensor: on an NVIDIA GPU, or anywhere in Triton's interpreter.

    They take float32 alone unless other ``dtypes`` are given.
    """
    if tensor.dtype not in (dtypes or (torch.float32,)):
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return has_triton()
    return tensor.is_cuda and has_kernels()
