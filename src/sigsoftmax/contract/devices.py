"""The kernels that a machine can run, found out once, outside what torch.compile traces."""

from __future__ import annotations

import importlib.util

import torch

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def has_triton() -> bool:
    """True if the package triton is installed."""
    return _HAS_TRITON


def has_kernels() -> bool:
    """True if Triton kernels run on CUDA devices: they are written for NVIDIA's."""
    return _HAS_TRITON and torch.version.hip is None
