"""Launches with less work on the host: for a small loss, preparing the launch of a kernel takes longer than the kernel.

Triton binds and specialises all arguments in every launch, compares every global constant of the kernel with what it
was, and asks the driver what each pointer points to. Here a compiled kernel is found by what its code depends on, and
gets addresses.

That a compiled kernel can be run so is not public in Triton. It is done with the versions it was seen to work with
(:data:`SEEN`); with any other, launches are Triton's own, which take the host longer and compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from sigsoftmax import torch_internals

SEEN = ("3.6",)
"""versions of Triton whose compiled kernels were run by their addresses on a GPU"""
LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""dtypes of logits that the kernels take"""
ALIGNMENT = 16
"""bytes; Triton compiles a kernel anew where a pointer is not a multiple"""
_compiled: dict[tuple[Any, ...], Any] = {}


class Launch:
    """``kernel[(programs,)](*tensors, *numbers, **constants, **options)``, for tensors of one kind.

    They always have the same dtypes and the same device, and so can be told apart from those of another kind by where
    they lie alone.
    """

    __slots__ = ("_aligned", "_arguments", "_device", "constants", "kernel", "numbers", "options", "programs")

    def __init__(
        self, kernel: Any, programs: int, numbers: Sequence[float], constants: dict[str, Any], **options: Any
    ) -> None:
        """``numbers`` and ``constants`` in the order of the kernel's signature."""
        self.kernel, self.programs, self.numbers = kernel, programs, numbers
        self.constants, self.options = constants, options
        self._arguments = (*numbers, *constants.values())
        self._aligned: Any = None
        """the compiled kernel for aligned tensors"""
        self._device = -1

    def __call__(self, *tensors: Tensor) -> None:
        pointers = [tensor.data_ptr() for tensor in tensors]
        misaligned = 0
        for pointer in pointers:
            misaligned |= pointer
        is_aligned = misaligned % ALIGNMENT == 0
        compiled, device = self._aligned, self._device
        if compiled is None or not is_aligned:
            device = tensors[0].get_device()
            compiled = _compiled.get(self._key(tensors, pointers))
        if compiled is not None and device == torch.cuda.current_device() and not _has_hooks():
            assert torch_internals.current_raw_stream is not None
            stream = torch_internals.current_raw_stream(device)
            metadata = (stream, compiled.function, compiled.packed_metadata, None, None, None)
            compiled.run(self.programs, 1, 1, *metadata, *pointers, *self._arguments)
        else:
            compiled = self._by_triton(tensors)
            # The interpreter compiles nothing.
            if compiled is None or not runs_by_address():
                return
            _compiled[self._key(tensors, pointers)] = compiled
        if is_aligned:
            self._aligned, self._device = compiled, device

    def _key(self, tensors: Sequence[Tensor], pointers: Sequence[int]) -> tuple[Any, ...]:
        """All that the code of a compiled kernel depends on."""
        return (
            id(self.kernel),
            tensors[0].get_device(),
            *[tensor.dtype for tensor in tensors],
            *[pointer % ALIGNMENT == 0 for pointer in pointers],
            *[_specialized(number) for number in self.numbers],
            *self.constants.values(),
            *self.options.values(),
        )

    def _by_triton(self, tensors: Sequence[Tensor]) -> Any:
        names = tuple(self.kernel.arg_names[len(tensors) + len(self.numbers) :])
        assert tuple(self.constants) == names, f"constants are {tuple(self.constants)}, those of the kernel are {names}"
        # Triton launches on the current device, which need not be that of the tensors.
        with torch.cuda.device(tensors[0].get_device()):
            return self.kernel[(self.programs,)](*tensors, *self.numbers, **self.constants, **self.options)


def launch(
    kernel: Any,
    programs: int,
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    constants: dict[str, Any],
    **options: Any,
) -> None:
    """A :class:`Launch` that is made but once."""
    Launch(kernel, programs, numbers, constants, **options)(*tensors)


def runs_by_address() -> bool:
    """True if compiled kernels are run by their addresses, which is not public in Triton and torch."""
    is_seen = triton.__version__.startswith(tuple(f"{version}." for version in SEEN))
    return is_seen and torch_internals.current_raw_stream is not None


def _has_hooks() -> bool:
    """True if a profiler wants to know of launches; Triton tells it. A hook is a function, None, or a chain."""
    hooks = (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook)
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


def _specialized(number: float) -> int:
    """A code of what Triton compiles a kernel anew for: the number 1, multiples of 16, and how wide an integer is."""
    if isinstance(number, float):
        return -1
    is_wide = not -(2**31) <= number < 2**31
    return (number == 1) + 2 * (number % 16 == 0) + 4 * is_wide + 8 * (number >= 2**63)
