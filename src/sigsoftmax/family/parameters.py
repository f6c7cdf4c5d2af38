"""The parameters of members: what they may be, how a user's value is checked, read and written, and of what kind it is.

A parameter is a fixed number or has a :class:`ParameterKind`. The kind is decided once, where the value is checked, and
asked of the output function from then on.

Shapes: V classes.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sigsoftmax import torch_internals


class ParameterKind(enum.Enum):
    """The kind of a parameter that is no fixed number."""

    SCALAR = "scalar"
    """one number for all classes, a tensor of shape ()"""
    PER_CLASS = "per_class"
    """one number for each class, a tensor of shape (V,)"""


@dataclass(frozen=True)
class Learned:
    """A parameter that a layer creates and trains: its first value, and whether each class has its own."""

    initial: float | None = None
    per_class: bool = False

    @property
    def kind(self) -> ParameterKind:
        return ParameterKind.PER_CLASS if self.per_class else ParameterKind.SCALAR

    def start(self, default: float, num_classes: int) -> tuple[float, tuple[int, ...]]:
        """The first value and the shape of the parameter."""
        return (default if self.initial is None else self.initial), (num_classes,) if self.per_class else ()


Value = float | Tensor | Learned
Number = float | Tensor


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """The default of a member's parameter, and the values that it may have."""

    default: float
    lower_bound: float = -math.inf
    """Values at or below it are refused (when they are plain numbers; a learned value moves as it likes)."""
    can_be_learned: bool = True
    can_differ_by_class: bool = False
    """Only for what leaves the offset of a row alone: a shift of z."""
    learned_in_layers: bool = False
    """A layer that is given the bare name of the member trains this parameter."""


def kind_of(tensor: Tensor) -> ParameterKind:
    """The kind of a tensor that was accepted as a parameter, or of an argument of a form that was made of one.

    Its shape is read here and nowhere else. Who has the output function asks its ``kinds`` and ``argument_kinds``; a
    backend that is handed the arguments of a form as bare tensors asks here.
    """
    return ParameterKind.PER_CLASS if tensor.ndim == 1 else ParameterKind.SCALAR


def checked_value(name: str, key: str, spec: Parameter, value: Value | int) -> tuple[Value, ParameterKind | None]:
    """A value that a user gave to a parameter of the member ``name``, and its kind: None for a fixed number."""
    where = f"parameter {key!r} of output function {name!r}"
    if isinstance(value, Learned):
        if not spec.can_be_learned:
            raise ValueError(f"{where} cannot be learned; give a number")
        if value.per_class and not spec.can_differ_by_class:
            raise ValueError(f"{where} cannot differ by class; learn one number")
        if value.initial is not None:
            _check_number(f"the first value of {where}", float(value.initial), spec)
        return value, value.kind
    if isinstance(value, Tensor):
        if not value.is_floating_point() or value.ndim > 1:
            raise ValueError(
                f"{where} must be a floating-point tensor of shape () or (num_classes,), "
                f"got {value.dtype} of shape {tuple(value.shape)}"
            )
        if not spec.can_be_learned:
            raise ValueError(f"{where} must be a plain number, got a tensor; use .item()")
        kind = kind_of(value)
        if kind is ParameterKind.PER_CLASS and not spec.can_differ_by_class:
            raise ValueError(f"{where} cannot differ by class; give one number, got {value.shape[0]}")
        return value, kind
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where} must be a number or a tensor, got {type(value).__name__}")
    return _check_number(where, float(value), spec), None


def check_number_of_values(name: str, key: str, values: Any, num_classes: int) -> None:
    """Check that a parameter, or the description of its tensor, holds one number, or one for each class."""
    if kind_of(values) is ParameterKind.PER_CLASS and values.shape[0] != num_classes:
        raise ValueError(
            f"parameter {key!r} of {name!r} has {values.shape[0]} values, but there are {num_classes} "
            "classes; give one number, or one per class"
        )


def _check_number(where: str, number: float, spec: Parameter) -> float:
    if not math.isfinite(number):
        raise ValueError(f"{where} must be finite, got {number}")
    if number <= spec.lower_bound:
        raise ValueError(f"{where} must be greater than {spec.lower_bound:g}, got {number:g}")
    return number


def parsed_value(text: str, value: str) -> Value:
    """The value of a parameter as it is written in ``text``, the text of a member, which messages quote."""
    kind, _, initial = value.partition(":")
    is_learned = kind in ("learned", "per_class")
    try:
        if not is_learned:
            return float(value)
        return Learned(initial=float(initial) if initial else None, per_class=kind == "per_class")
    except ValueError:
        raise ValueError(
            f"cannot read the value {(initial if is_learned else value)!r} in {text!r}; write a number, 'learned', "
            "'learned:0.5', 'per_class' or 'per_class:0.5'"
        ) from None


def printed_value(value: Value) -> str:
    """The value as :func:`parsed_value` reads it; of a tensor its shape alone."""
    if isinstance(value, Learned):
        kind = "per_class" if value.per_class else "learned"
        return kind if value.initial is None else f"{kind}:{value.initial!r}"
    if isinstance(value, Tensor):
        return f"tensor{tuple(value.shape)}"
    return repr(value)


_SCALARS: dict[float, Tensor] = {}


def scalar(value: float) -> Tensor:
    """A fixed number as a tensor on the CPU, made once: for a small loss on a GPU, making it takes its share."""
    is_traced = torch.compiler.is_compiling() or torch_internals.is_jit_tracing()
    known = None if is_traced else _SCALARS.get(value)
    if known is not None:
        return known
    made = torch.full((), value, dtype=torch.float64, device="cpu")
    # What a mode or a transform makes (fake, functional, inference, vmap) is of no use outside it.
    is_plain = type(made) is Tensor and not torch_internals.transforms_active()
    if is_plain and not is_traced and not made.is_inference():
        _SCALARS[value] = made
    return made
