"""Launches with less work on the host: for a small loss, preparing the launch of a kernel takes longer than the kernel.

Triton binds and specialises all arguments in every launch and compares every global constant of the kernel with what
it was. Here a compiled kernel is found by what its code depends on, the rest being left to Triton's own launcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_HERE = nullcontext()
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, programs: int, arguments: Sequence[Tensor | float], constants: dict[str, Any], **options: Any
) -> None:
    """``kernel[(programs,)](*arguments, **constants, **options)``; constants come last in the signature."""
    first = arguments[0]
    assert isinstance(first, Tensor)
    key = (
        id(kernel),
        first.device,
        *map(_specialized, arguments),
        *constants.values(),
        *options.values(),
    )
    compiled = _compiled.get(key)
    with _on(first.device):
        if compiled is not None:
            compiled[programs, 1, 1](*arguments, *constants.values())
            return
        assert tuple(constants) == tuple(kernel.arg_names[len(arguments) :]), "constants are not in the kernel's order"
        compiled = kernel[(programs,)](*arguments, **constants, **options)
    # The interpreter compiles nothing.
    if compiled is not None:
        _compiled[key] = compiled


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    is_elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if is_elsewhere else _HERE


def _specialized(argument: Tensor | float) -> Any:
    """What Triton compiles a kernel anew for: type, alignment, and the number 1."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, float):
        return float
    return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31, argument < 2**63
