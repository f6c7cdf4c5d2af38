"""Specifications: everything that a caller asked for, except the tensors.

A specification is made once for each combination of options and then found again (interned), so that a repeated call
costs a dictionary lookup, and two calls have the same specification exactly if they asked for the same thing. It holds
no tensors: an output function enters as its form, its fixed numbers and the kind of every other argument.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from sigsoftmax import family
from sigsoftmax.family import OutputFunction
from sigsoftmax.family.formulas import Form
from sigsoftmax.family.parameters import ParameterKind, kind_of, scalar

Function = str | OutputFunction
Reduction = Literal["none", "mean", "sum"]
WeightGradient = Literal["auto", "fast", "buffered", "exact"]
EXTRAS = ("log_normalizer", "argmax", "entropy")
MOST_SPECS = 4096


class MemberSpec(NamedTuple):
    """A member of the family without its tensors."""

    name: str
    form: Form
    values: tuple[float | ParameterKind, ...]
    """for each argument of the form its fixed number, or the kind of the tensor that holds it"""
    per_class: tuple[str, ...] = ()
    """names of the parameters that differ by class, for messages"""

    @property
    def is_fixed(self) -> bool:
        """Whether all arguments are fixed numbers."""
        return all(isinstance(value, float) for value in self.values)

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """The fixed numbers; None for arguments that are tensors."""
        return tuple(value if isinstance(value, float) else None for value in self.values)

    def arguments(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All arguments of the form as tensors: fixed numbers as float64 scalars on the CPU, and these tensors."""
        given = iter(tensors)
        return [scalar(value) if isinstance(value, float) else next(given) for value in self.values]


Member = tuple[MemberSpec, tuple[Tensor, ...]]
"""the specification of a member, and the tensors among the arguments of its form"""


def _specified(member: OutputFunction) -> Member:
    arguments = member.argument_values()
    values = tuple(_value_or_kind(argument) for argument in arguments)
    per_class = tuple(key for key, kind in member.kinds.items() if kind is ParameterKind.PER_CLASS)
    tensors = tuple(argument for argument in arguments if isinstance(argument, Tensor))
    return MemberSpec(member.name, member.form, values, per_class), tensors


def _value_or_kind(argument: float | Tensor) -> float | ParameterKind:
    # -0.0 is 0.0.
    return kind_of(argument) if isinstance(argument, Tensor) else float(argument) + 0.0


@functools.lru_cache(maxsize=MOST_SPECS)
def _parsed(text: str, _: int) -> OutputFunction:
    return OutputFunction.parse(text)


@functools.lru_cache(maxsize=MOST_SPECS)
def _specified_by_name(text: str, _: int) -> Member:
    return _specified(OutputFunction.parse(text))


@functools.lru_cache(maxsize=MOST_SPECS)
def _specified_numbers(member: OutputFunction) -> Member:
    return _specified(member)


def parsed(function: Function) -> OutputFunction:
    """The output function that a caller means. Names are read once, until one is registered again."""
    if isinstance(function, str) and not torch.compiler.is_compiling():
        return _parsed(function, family.registrations())
    return OutputFunction.parse(function)


def member_of(function: Function) -> Member:
    """An output function as the user gave it, taken apart into its specification and its tensors."""
    if torch.compiler.is_compiling():
        return _specified(OutputFunction.parse(function))
    if isinstance(function, str):
        return _specified_by_name(function, family.registrations())
    member = OutputFunction.parse(function)
    return _specified_numbers(member) if member.is_fixed else _specified(member)


def prior_of(function: Function, prior_function: Function | None) -> Function:
    """The output function of a mixture's prior; if it is not given, that of the components or softmax."""
    if prior_function is not None:
        return prior_function
    return "softmax" if parsed(function).definition.parameters else function


@dataclass(frozen=True, eq=False, kw_only=True)
class LossSpec:
    """A loss. Two that ask for the same thing are the same object (:func:`loss_spec`)."""

    member: MemberSpec
    prior: MemberSpec | None = None
    """of a mixture"""
    reduction: Reduction = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    floor: float = 0.0
    weight_gradient: WeightGradient = "auto"
    chunk_bytes: int | None = None
    extras: tuple[str, ...] | None = None
    backend: str | None = None

    def beside(self, known: Collection[str]) -> list[str]:
        """The options that were set and are not among the ``known``.

        A path that computes some options names them here, and refuses the rest: an option that it has never heard of
        is not ignored.
        """
        return [
            field.name
            for field in fields(self)
            if field.name not in known and getattr(self, field.name) != field.default
        ]


@dataclass(frozen=True, eq=False, kw_only=True)
class LogProbsSpec:
    """Log-probabilities of every class."""

    member: MemberSpec
    prior: MemberSpec | None = None
    floor: float = 0.0
    chunk_bytes: int | None = None
    backend: str | None = None


@functools.lru_cache(maxsize=MOST_SPECS, typed=True)
def _interned_loss(**options: Any) -> LossSpec:
    return _checked_loss(**options)


@functools.lru_cache(maxsize=MOST_SPECS, typed=True)
def _interned_log_probs(**options: Any) -> LogProbsSpec:
    return _checked_log_probs(**options)


def loss_spec(
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    floor: float = 0.0,
    extras: Sequence[str] | None = None,
    **options: Any,
) -> LossSpec:
    """The specification with these fields of :class:`LossSpec`, checked."""
    options["label_smoothing"] = number("label_smoothing", label_smoothing)
    options["z_loss"] = number("z_loss", z_loss)
    options["floor"] = number("floor", floor)
    options["extras"] = None if extras is None else _names(extras)
    if torch.compiler.is_compiling():
        return _checked_loss(**options)
    try:
        return _interned_loss(**options)
    except TypeError:
        # What cannot be looked up is no valid option, or raises by its own message.
        return _checked_loss(**options)


def log_probs_spec(*, floor: float = 0.0, **options: Any) -> LogProbsSpec:
    """The specification with these fields of :class:`LogProbsSpec`, checked."""
    options["floor"] = number("floor", floor)
    if torch.compiler.is_compiling():
        return _checked_log_probs(**options)
    try:
        return _interned_log_probs(**options)
    except TypeError:
        return _checked_log_probs(**options)


def _checked_loss(**options: Any) -> LossSpec:
    spec = LossSpec(**options)
    if spec.weight_gradient not in get_args(WeightGradient):
        choices = ", ".join(map(repr, get_args(WeightGradient)))
        raise ValueError(f"weight_gradient must be one of {choices}, got {spec.weight_gradient!r}")
    if spec.reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction must be 'none', 'mean' or 'sum', got {spec.reduction!r}")
    check_index("ignore_index", spec.ignore_index)
    if not 0.0 <= spec.label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {spec.label_smoothing}")
    check_nonnegative("z_loss", spec.z_loss)
    check_nonnegative("floor", spec.floor)
    check_chunk_bytes(spec.chunk_bytes)
    for name in spec.extras or ():
        if name not in EXTRAS:
            raise ValueError(f"unknown extra {name!r}; known: {', '.join(EXTRAS)}")
    return spec


def _checked_log_probs(**options: Any) -> LogProbsSpec:
    spec = LogProbsSpec(**options)
    check_nonnegative("floor", spec.floor)
    check_chunk_bytes(spec.chunk_bytes)
    return spec


def _names(extras: Sequence[str]) -> tuple[str, ...]:
    if isinstance(extras, str) or not isinstance(extras, Sequence):
        raise ValueError(f"extras must be a sequence of names, like ('argmax',), got {extras!r}")
    return tuple(extras)


def number(name: str, value: float) -> float:
    """The value of an option: a number, or a tensor that holds one."""
    if type(value) is float:
        # -0.0 is 0.0.
        return value + 0.0
    try:
        return float(value) + 0.0
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None


def check_nonnegative(name: str, value: float) -> None:
    """Check that an option is a finite number that is not negative."""
    if not 0.0 <= number(name, value) < float("inf"):
        raise ValueError(f"{name} must be a finite number >= 0, got {value}")


def check_index(name: str, value: int) -> None:
    """Check that an option is a whole number, and none that only counts as one: True is not 1."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise ValueError(f"{name} must be a whole number, got {value!r}")


def check_chunk_bytes(chunk_bytes: int | None) -> None:
    """Check a budget of memory for logits; None leaves the choice to the package."""
    if chunk_bytes is None:
        return
    if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes <= 0:
        raise ValueError(f"chunk_bytes must be a positive number of bytes, got {chunk_bytes!r}")
