"""Signatures: all that a decision about a call may depend on, besides its specification.

Whoever decides how a call is computed sees its signature and nothing else, so that calls with the same specification
and the same signature can be computed alike.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigsoftmax import torch_internals
from sigsoftmax.contract.operands import Operands, Wanted

BACKEND_VARIABLE = "SIGSOFTMAX_BACKEND"
CHECK_VARIABLE = "SIGSOFTMAX_CHECK"


class TensorSignature(NamedTuple):
    """A tensor without its numbers; what validation asks of a tensor can be asked of this."""

    kind: type
    shape: torch.Size
    strides: tuple[int, ...] | None
    """None for a tensor that is not dense"""
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    is_nested: bool
    is_negative: bool
    """the memory holds the negative of the values"""
    is_wrapped: bool
    """it belongs to a transform of torch.func"""
    has_tangent: bool
    """it carries a forward-mode derivative"""
    wants_gradient: bool

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        return self.dtype.is_complex

    @property
    def is_contiguous(self) -> bool:
        """True if the elements follow each other, as ``Tensor.is_contiguous`` tells."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides or ()), strict=True):
            if size != 1 and stride != expected:
                return self.numel() == 0
            expected *= size
        return True

    @property
    def is_plain(self) -> bool:
        """True if kernels may read its memory as it is."""
        return (
            self.kind in (Tensor, torch.nn.Parameter)
            and self.strides is not None
            and not self.is_negative
            and self.is_contiguous
        )


class NotATensor(NamedTuple):
    """The type of an operand that is no tensor."""

    kind: type
    wants_gradient: bool = False


def is_dtensor(operand: object) -> bool:
    """True if a tensor is spread over processes; whoever has one has imported the module that makes them."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = operand.kind if isinstance(operand, TensorSignature) else type(operand)
    return module is not None and issubclass(kind, module.DTensor)


class Signature(NamedTuple):
    """The operands described, and the modes of torch that a call is made in."""

    operands: Operands
    is_inference: bool
    in_transform: bool
    """inside torch.func"""
    autocast: torch.dtype | None
    """the dtype of autocast on the device of the input, where it is on"""
    backend_variable: str | None
    """the environment variable of the backend"""
    checks_values: bool
    """bad values are reported by their message, rather than by an assert on the device"""

    @property
    def wanted(self) -> Wanted:
        """The gradients that are wanted."""
        flags = [t is not None and t.wants_gradient for t in self.operands.differentiable]
        return Wanted.of(flags, len(self.operands.arguments))

    @property
    def wants_plain_autograd(self) -> bool:
        """True if a gradient is wanted that only plain autograd has: of the targets, or of the class weights."""
        return any(t is not None and t.wants_gradient for t in (self.operands.target, self.operands.class_weight))


def is_exporting() -> bool:
    """True if a graph is recorded that other programs run: torch.export, torch.onnx.export or torch.jit.trace."""
    return torch_internals.is_exporting() or torch_internals.is_jit_tracing()


def is_recording() -> bool:
    """True if a graph is recorded, for torch.compile or for export."""
    return torch.compiler.is_compiling() or torch_internals.is_jit_tracing()


def checks_values(device: torch.device) -> bool:
    """True if a bad value is reported by its message, rather than by an assert on the device."""
    return device.type == "cpu" or _asks_for_messages(os.environ.get(CHECK_VARIABLE, ""))


def _asks_for_messages(value: str) -> bool:
    if value not in ("", "0", "1"):
        raise ValueError(f"the environment variable {CHECK_VARIABLE} must be 1 or 0, got {value!r}")
    return value == "1"


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of products under autocast; None where it is off."""
    kind = device.type
    # Asked only there, since devices such as meta know no autocast and raise.
    if _has_autocast(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def _has_autocast(kind: str) -> bool:
    known = _HAS_AUTOCAST.get(kind)
    return torch.amp.is_autocast_available(kind) if known is None else known


_HAS_AUTOCAST = {kind: torch.amp.is_autocast_available(kind) for kind in ("cpu", "cuda", "meta", "mps", "xpu")}
"""For each usual kind of device whether torch knows autocast on it.

All are asked here, since Dynamo of torch 2.11 cannot trace the question. No entry is added later: compiled code depends
on this table, and would be compiled once more.
"""


def wants_gradient(tensor: Tensor | None) -> bool:
    """True if the gradient of a tensor is wanted now."""
    return isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled()


def _described(operand: Any, in_grad_mode: bool, in_forward_mode: bool) -> TensorSignature | NotATensor | None:
    if not isinstance(operand, Tensor):
        return None if operand is None else NotATensor(type(operand))
    is_nested, layout = operand.is_nested, operand.layout
    is_dense = layout is torch.strided and not is_nested
    # Made as a plain tuple is made: the constructor of a named one takes twice as long.
    return tuple.__new__(
        TensorSignature,
        (
            type(operand),
            torch.Size() if is_nested else operand.shape,
            operand.stride() if is_dense else None,
            operand.dtype,
            operand.device,
            layout,
            is_nested,
            is_dense and operand.is_neg(),
            torch_internals.is_wrapped(operand),
            in_forward_mode and torch_internals.has_tangent(operand),
            in_grad_mode and operand.requires_grad,
        ),
    )


def signature_of(operands: Operands) -> Signature:
    """The signature of a call that is made now."""
    modes = torch.is_grad_enabled(), torch_internals.in_forward_mode()
    tensors = [None if operand is None else _described(operand, *modes) for operand in operands[:7]]
    # Lists, since generators take longer.
    arguments = tuple([_described(argument, *modes) for argument in operands.arguments])
    prior_arguments = tuple([_described(argument, *modes) for argument in operands.prior_arguments])
    shard = None if operands.shard is None else operands.shard.facts
    device = operands.input.device if isinstance(operands.input, Tensor) else torch.device("cpu")
    return Signature(
        Operands._make((*tensors, arguments, prior_arguments, shard)),
        torch.is_inference_mode_enabled(),
        torch_internals.transforms_active(),
        autocast_dtype(device),
        os.environ.get(BACKEND_VARIABLE) or None,
        checks_values(device),
    )


def signature_inside_op(operands: Operands, wanted: Wanted, autocast: torch.dtype | None) -> Signature:
    """The signature of a call that was made before and is computed inside an op, where its tensors are detached."""
    made = signature_of(operands)
    flags = (*wanted[:4], False, False, wanted.token_weights, *wanted.arguments, *wanted.prior_arguments)
    described = [
        None if tensor is None else tensor._replace(wants_gradient=flag)
        for tensor, flag in zip(made.operands.flat, flags, strict=True)
    ]
    inside = Operands.from_flat(described, len(wanted.arguments))
    return made._replace(operands=inside, autocast=autocast, backend_variable=None)
