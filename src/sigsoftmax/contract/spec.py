"""Specifications: everything that a caller asked for, except the tensors.

A specification is made once for each combination of options and then found again (interned), so that a repeated call
costs a dictionary lookup, and two calls have the same specification exactly if they asked for the same thing. It holds
no tensors: an output function enters as its form, its fixed numbers and the kind of every other argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from sigsoftmax import family
from sigsoftmax.family import OutputFunction
from sigsoftmax.family.formulas import Form
from sigsoftmax.family.notation import check_choice
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
        """True if all arguments are fixed numbers."""
        return all(isinstance(value, float) for value in self.values)

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """The fixed numbers; None for arguments that are tensors."""
        return tuple(value if isinstance(value, float) else None for value in self.values)

    def arguments(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All arguments of the form as tensors: fixed numbers as float64 scalars on the CPU, and these tensors."""
        given = iter(tensors)
        return [scalar(value) if isinstance(value, float) else next(given) for value in self.values]

    def flags(self, of_tensors: Sequence[bool]) -> list[bool]:
        """A flag for each argument of the form, from those of the tensors: False for a fixed number."""
        given = iter(of_tensors)
        return [not isinstance(value, float) and next(given) for value in self.values]


Member = tuple[MemberSpec, tuple[Tensor, ...]]
"""the specification of a member, and the tensors among the arguments of its form"""


def _specified(function: Function) -> Member:
    member = OutputFunction.parse(function)
    arguments = member.argument_values()
    # -0.0 is 0.0.
    values = tuple(kind_of(a) if isinstance(a, Tensor) else float(a) + 0.0 for a in arguments)
    per_class = tuple(key for key, kind in member.kinds.items() if kind is ParameterKind.PER_CLASS)
    tensors = tuple(argument for argument in arguments if isinstance(argument, Tensor))
    return MemberSpec(member.name, member.form, values, per_class), tensors


@functools.lru_cache(maxsize=MOST_SPECS)
def _specified_once(function: Function, _: int) -> Member:
    return _specified(function)


def member_of(function: Function) -> Member:
    """An output function as the user gave it, taken apart into its specification and its tensors.

    Names are read once, until one is registered again.
    """
    is_fixed = isinstance(function, str) or (isinstance(function, OutputFunction) and function.is_fixed)
    if is_fixed and not torch.compiler.is_compiling():
        return _specified_once(function, family.registrations())
    return _specified(function)


def prior_of(function: Function, prior_function: Function | None) -> Function:
    """The output function of a mixture's prior; if it is not given, that of the components or softmax."""
    if prior_function is not None:
        return prior_function
    return "softmax" if OutputFunction.parse(function).definition.parameters else function


@dataclass(frozen=True, eq=False, kw_only=True)
class CallSpec:
    """The options that losses and log-probabilities share; they are checked when a specification is made."""

    member: MemberSpec
    prior: MemberSpec | None = None
    """the member of a mixture's prior"""
    floor: float = 0.0
    chunk_bytes: int | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        check_nonnegative("floor", self.floor)
        check_chunk_bytes(self.chunk_bytes)

    def largest_gradient(self, steepest: float, largest_logit: float) -> float:
        """A bound of the gradient of a token's logits, given bounds of the slope of phi and of the logits."""
        return steepest


@dataclass(frozen=True, eq=False, kw_only=True)
class LogProbsSpec(CallSpec):
    """Log-probabilities of every class (:func:`log_probs_spec`)."""

    operation: ClassVar[str] = "log-probabilities"
    extras: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # The others are a reduction of the log-probabilities themselves.
        check_extras(self.extras, EXTRAS[:1])


@dataclass(frozen=True, eq=False, kw_only=True)
class StatisticsSpec(CallSpec):
    """Statistics of each token's distribution (:func:`statistics_spec`)."""

    operation: ClassVar[str] = "token statistics"
    ignore_index: int = -100
    temperature: float = 1.0
    entropy: bool = False
    argmax: bool = False
    topk: int = 0
    weight_gradient: WeightGradient = "auto"

    def __post_init__(self) -> None:
        check_choice("weight_gradient", self.weight_gradient, get_args(WeightGradient))
        check_index("ignore_index", self.ignore_index)
        check_index("topk", self.topk)
        if self.topk < 0:
            raise ValueError(f"topk must be a number of classes, or 0 for none, got {self.topk}")
        for name in ("entropy", "argmax"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        check_temperature(self.temperature)
        super().__post_init__()

    def largest_gradient(self, steepest: float, largest_logit: float) -> float:
        return steepest / self.temperature

    def losses(self, extras: tuple[str, ...] | None) -> LossSpec:
        """The loss of each token at a temperature of 1, minus the log-probability of its target, with extras."""
        names = (*(field.name for field in fields(CallSpec)), "ignore_index", "weight_gradient")
        shared = {name: getattr(self, name) for name in names}
        return loss_spec(**shared, reduction="none", extras=extras)


@dataclass(frozen=True, eq=False, kw_only=True)
class LossSpec(CallSpec):
    """A loss (:func:`loss_spec`)."""

    operation: ClassVar[str] = "loss"
    reduction: Reduction = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    weight_gradient: WeightGradient = "auto"
    extras: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_choice("weight_gradient", self.weight_gradient, get_args(WeightGradient))
        check_choice("reduction", self.reduction, ("none", "mean", "sum"))
        check_index("ignore_index", self.ignore_index)
        check_label_smoothing(self.label_smoothing)
        check_nonnegative("z_loss", self.z_loss)
        super().__post_init__()
        check_extras(self.extras, EXTRAS)

    def largest_gradient(self, steepest: float, largest_logit: float) -> float:
        if not self.z_loss:
            return steepest
        largest_normalizer = steepest * largest_logit
        return steepest * (1.0 + 2.0 * self.z_loss * largest_normalizer)

    def beside(self, known: Collection[str]) -> list[str]:
        """The options that were set and are not among the ``known``.

        A path that computes some options names them here, and refuses the rest: an option that it has never heard of
        is not ignored.
        """
        return [f.name for f in fields(self) if f.name not in known and getattr(self, f.name) != f.default]


Spec = TypeVar("Spec", bound=CallSpec)


def loss_spec(**options: Any) -> LossSpec:
    """The loss with these fields. Two that ask for the same thing are the same object."""
    for name in ("label_smoothing", "z_loss"):
        if name in options:
            options[name] = number(name, options[name])
    return _interned(LossSpec, options)


def log_probs_spec(**options: Any) -> LogProbsSpec:
    """The log-probabilities with these fields. Two that ask for the same thing are the same object."""
    return _interned(LogProbsSpec, options)


def statistics_spec(**options: Any) -> StatisticsSpec:
    """The token statistics with these fields. Two that ask for the same thing are the same object."""
    if "temperature" in options:
        options["temperature"] = number("temperature", options["temperature"])
    return _interned(StatisticsSpec, options)


def _interned(kind: Callable[..., Spec], options: dict[str, Any]) -> Spec:
    if "floor" in options:
        options["floor"] = number("floor", options["floor"])
    extras = options.get("extras")
    if extras is not None:
        if isinstance(extras, str) or not isinstance(extras, Sequence):
            raise ValueError(f"extras must be a sequence of names, like ('log_normalizer',), got {extras!r}")
        options["extras"] = tuple(extras)
    if torch.compiler.is_compiling():
        return kind(**options)
    try:
        return _made_once(kind, **_DEFAULTS[kind] | options)
    except TypeError:
        # An option that cannot be looked up is not valid, or raises by its own message.
        return kind(**options)


@functools.lru_cache(maxsize=MOST_SPECS, typed=True)
def _made_once(kind: Callable[..., Spec], **options: Any) -> Spec:
    return kind(**options)


_DEFAULTS: dict[Callable[..., CallSpec], dict[str, Any]] = {
    kind: {field.name: field.default for field in fields(kind)} for kind in (LossSpec, LogProbsSpec, StatisticsSpec)
}
"""Options in one order, so that calls which name more of them or in another order find the same specification."""


def number(name: str, value: float) -> float:
    """The value of an option: a number, or a tensor that holds one."""
    if type(value) is float:
        # -0.0 is 0.0.
        return value + 0.0
    if isinstance(value, bool | str | bytes):
        # float() would read them.
        raise ValueError(f"{name} must be a number, got {value!r}")
    if isinstance(value, Tensor) and value.requires_grad:
        raise ValueError(
            f"{name} must be a number, and no gradient by it is computed, but it is a tensor that requires one; pass "
            f"{name}.item() or detach it"
        )
    try:
        return float(value) + 0.0
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None


def check_nonnegative(name: str, value: float) -> None:
    """Check that an option is a finite number that is not negative."""
    if not 0.0 <= number(name, value) < float("inf"):
        raise ValueError(f"{name} must be a finite number >= 0, got {value}")


def check_label_smoothing(value: float) -> None:
    """Check that it is a share of a token's weight."""
    if not 0.0 <= number("label_smoothing", value) <= 1.0:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {value}")


def check_chunk_bytes(size: int | None) -> None:
    """Check that it is a number of bytes, or None for the default."""
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size <= 0):
        raise ValueError(f"chunk_bytes must be a positive number of bytes, got {size!r}")


def check_extras(names: Sequence[str] | None, known: Sequence[str]) -> None:
    """Check that all further results that are asked for are known."""
    for name in names or ():
        if name not in known:
            raise ValueError(f"unknown extra {name!r}; known: {', '.join(known)}")


def check_temperature(temperature: float) -> None:
    """Check that logits can be divided by a temperature."""
    if not 0.0 < temperature < float("inf"):
        raise ValueError(
            f"temperature must be a finite number greater than 0, got {temperature}; for the likeliest class use topk"
        )


def check_positive(**sizes: Any) -> None:
    """Check that sizes are positive whole numbers, and none that only counts as one: True is not 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a positive integer, got {size!r}")


def check_index(name: str, value: int) -> None:
    """Check that an option is a whole number, and none that only counts as one: True is not 1."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must be a whole number of 64 bits, got {value}")
