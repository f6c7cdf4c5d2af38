"""Interfaces of torch that are not public, each used in one place and with a fallback that is.

They were seen with torch 2.8 to 2.13. If a newer torch lacks one, the fallback is slower, or hands a call to the
reference, and never wrong. ``FORCED`` makes all of them be absent, for the tests of the fallbacks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

FORCED = os.environ.get("SIGSOFTMAX_PUBLIC_ONLY") == "1"


def _found(owner: Any, *names: str) -> Any:
    """An attribute of an attribute, or None."""
    for name in names:
        owner = None if FORCED else getattr(owner, name, None)
    return owner


_transforms_active = _found(torch, "_C", "_are_functorch_transforms_active")
_is_wrapped = _found(torch, "_C", "_functorch", "is_functorch_wrapped_tensor")
_keeps_graph = _found(torch, "_C", "_autograd", "_get_current_graph_task_keep_graph")
_delayed_error = _found(torch, "_C", "_functions", "DelayedError")
_unpack_saved = _found(torch, "_C", "_autograd", "SavedTensor", "unpack")
_assert_async = _found(torch, "_assert_async")
_fake_tensor = _found(torch, "_subclasses", "FakeTensor")
current_raw_stream: Callable[[int], int] | None = _found(torch, "_C", "_cuda_getCurrentRawStream")
"""the address of the current stream of a device; None where torch does not tell"""
_has_level = _found(forward_ad, "_current_level") is not None
_has_exporting_flag = _found(torch, "compiler", "_is_exporting_flag") is not None


class _WithoutContext(torch.autograd.Function):
    """The identity, in the form of an autograd function that transforms of torch.func refuse."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)


def _is_refused() -> bool:
    """True if torch refuses autograd functions that say nothing of transforms: it does inside torch.func alone.

    A graph of torch.jit.trace would hold the function, so that nothing is asked there.
    """
    if is_jit_tracing():
        return False
    try:
        _WithoutContext.apply(torch.empty(0))
    except RuntimeError:
        return True
    return False


def _has_no_memory(tensor: Tensor) -> bool:
    """True if a tensor that should have memory has none, as those of torch.func."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return True
    return False


transforms_active: Callable[[], bool] = _transforms_active or _is_refused
"""True if the call is inside a transform of torch.func."""
is_wrapped: Callable[[Tensor], bool] = _is_wrapped or _has_no_memory
"""True if a tensor belongs to a transform of torch.func."""


def in_forward_mode() -> bool:
    """True if a level of forward-mode differentiation is open, or torch does not tell."""
    return not _has_level or forward_ad._current_level >= 0


def has_tangent(tensor: Tensor) -> bool:
    """True if a tensor carries a forward-mode derivative."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def apply_eagerly(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """``function.apply`` for calls that are known to be under no transform of torch.func.

    What torch does first to make sure takes as long as a small loss. The fallback is ``apply`` itself.
    """
    base = _found(super(torch.autograd.Function, function), "apply")
    return function.apply(*inputs) if base is None else base(*inputs)


def keeps_graph() -> bool:
    """True if the backward pass that is running was asked to keep the graph (retain_graph=True), or it is unknown."""
    return _keeps_graph is None or bool(_keeps_graph())


def is_jit_tracing() -> bool:
    """True while torch.jit.trace records a graph. It is public, but not among the names that torch annotates."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined]


def is_exporting() -> bool:
    """True while torch.export records a graph.

    Dynamo of torch 2.11 answers the public question with yes in every graph of torch.compile; later versions answer it
    by this flag, as code that runs does. The fallback is the question itself.
    """
    return torch.compiler._is_exporting_flag if _has_exporting_flag else torch.compiler.is_exporting()


def is_fake(tensor: Tensor) -> bool:
    """True if torch.export has put a tensor without values in the place of an ordinary one.

    A quantised tensor stays of its own class there. The fallback goes by the name of the class, which is as private.
    """
    return isinstance(tensor, _fake_tensor) if _fake_tensor is not None else type(tensor).__name__ == "FakeTensor"


def first_saved_tensors(ctx: Any, count: int) -> tuple[Tensor | None, ...]:
    """The first tensors that an autograd function saved; nothing is asked of the others, which may have changed.

    The fallback is ``saved_tensors``, which refuses a change of any of them.
    """
    saved = None if _unpack_saved is None else getattr(ctx, "_raw_saved_tensors", None)
    return ctx.saved_tensors[:count] if saved is None else tuple(_unpack_saved(one) for one in saved[:count])


class _Raising(torch.autograd.Function):
    """The identity, whose derivative raises."""

    @staticmethod
    def forward(ctx: Any, message: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *by_outputs: Tensor) -> Any:
        raise RuntimeError(ctx.message)


def raising_when_differentiated(message: str, tensors: list[Tensor]) -> list[Tensor]:
    """The same tensors; whoever differentiates them gets this error."""
    if _delayed_error is None:
        return list(_Raising.apply(message, *tensors))
    raising = _delayed_error(message.encode(), len(tensors))(*tensors)
    return list(raising) if isinstance(raising, tuple | list) else [raising]


def assert_on_device(condition: Tensor) -> None:
    """Fail on the device if the condition is false, without waiting for it. The fallback waits."""
    if _assert_async is not None:
        _assert_async(condition)
    elif not bool(condition):
        raise RuntimeError("a check of values failed; set SIGSOFTMAX_CHECK=1 for the message")
