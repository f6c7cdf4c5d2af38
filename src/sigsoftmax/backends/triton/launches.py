"""Launches with less work on the host: for a small loss, preparing the launch of a kernel takes longer than the kernel.

Triton binds and specialises all arguments in every launch, compares every global constant of the kernel with what it
was, and asks the driver what each pointer points to. Here a compiled kernel is found by what its code depends on, and
gets addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    programs: int,
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    constants: dict[str, Any],
    **options: Any,
) -> None:
    """``kernel[(programs,)](*tensors, *numbers, **constants, **options)``, in the order of the signature."""
    device = tensors[0].get_device()
    pointers = [tensor.data_ptr() for tensor in tensors]
    key = (
        id(kernel),
        device,
        *[tensor.dtype for tensor in tensors],
        *[pointer % 16 == 0 for pointer in pointers],
        *[_specialized(number) for number in numbers],
        *constants.values(),
        *options.values(),
    )
    compiled = _compiled.get(key)
    if compiled is not None and device == torch.cuda.current_device() and not _has_hooks():
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled.run(
            programs,
            1,
            1,
            stream,
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *pointers,
            *numbers,
            *constants.values(),
        )
        return
    names = tuple(kernel.arg_names[len(tensors) + len(numbers) :])
    assert tuple(constants) == names, f"constants are {tuple(constants)}, those of the kernel are {names}"
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device(device):
        compiled = kernel[(programs,)](*tensors, *numbers, **constants, **options)
    # The interpreter compiles nothing.
    if compiled is not None:
        _compiled[key] = compiled


def _has_hooks() -> bool:
    """Whether a profiler wants to know of launches; Triton tells it."""
    runtime = triton.knobs.runtime
    return _is_set(runtime.launch_enter_hook) or _is_set(runtime.launch_exit_hook)


def _is_set(hook: Any) -> bool:
    """A hook is a function or None, or a chain of functions."""
    return hook is not None and bool(getattr(hook, "calls", True))


def _specialized(number: float) -> int:
    """What Triton compiles a kernel anew for: the number 1, multiples of 16, and how wide an integer is."""
    if isinstance(number, float):
        return -1
    is_wide = not -(2**31) <= number < 2**31
    return (number == 1) + 2 * (number % 16 == 0) + 4 * is_wide + 8 * (number >= 2**63)
