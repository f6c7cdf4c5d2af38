"""The family of output functions: its members, their parameters, and how to add one.

An output function is ``f(z)_i = g(z_i) / sum_m g(z_m)``. With ``phi = log g`` it is softmax of a transformed
logit, so a member is given by ``phi``, its slope ``phi'`` and the derivatives of ``phi`` by its parameters. The
formulas stand in ``formulas`` and their known properties in ``properties``; a :class:`Definition` here names a member,
its parameters (see ``parameters``), and how they become the arguments of a form. Losses, modules, kernels, the command
line and the tests are derived from these files.

Users meet :class:`OutputFunction`: a definition with values for its parameters.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sigsoftmax.family.formulas import LOGISTIC, RELU, SOFTCAP, ArgumentSlopes, Form, Scaled
from sigsoftmax.family.notation import MIXTURES, did_you_mean, key_and_value, parse_call
from sigsoftmax.family.parameters import (
    Learned,
    Number,
    Parameter,
    ParameterKind,
    Value,
    check_number_of_values,
    checked_value,
    parsed_value,
    printed_value,
    scalar,
)
from sigsoftmax.family.properties import Properties


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A named member: which form it is, and how its parameters become the form's arguments."""

    name: str
    formula: str
    summary: str
    form: Form
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    arguments: Callable[..., tuple[Number, ...]]
    """Arithmetic on the parameters alone: a parameter that is NaN makes NaN of every argument that depends on it."""


_DEFINITIONS: dict[str, Definition] = {
    definition.name: definition
    for definition in (
        Definition(
            name="softmax",
            formula="alpha z",
            summary="the usual one; alpha is the control for 'it is only the scale'",
            form=LOGISTIC,
            parameters={"alpha": Parameter(default=1.0, lower_bound=0.0)},
            arguments=lambda alpha: (alpha, 0.0, 0.0),
        ),
        Definition(
            name="sigsoftmax",
            formula="z + log sigmoid(z)",
            summary="Kanai et al. 2018; raises the rank without a parameter",
            form=LOGISTIC,
            arguments=lambda: (1.0, 1.0, 0.0),
        ),
        Definition(
            name="shifted_sigsoftmax",
            formula="z + log sigmoid(z + b)",
            summary="tends to softmax as b grows; b is a scalar or one number per class",
            form=LOGISTIC,
            parameters={"b": Parameter(default=0.0, can_differ_by_class=True, learned_in_layers=True)},
            arguments=lambda b: (1.0, 1.0, -b),
        ),
        Definition(
            name="sigmoid",
            formula="log sigmoid(z)",
            summary="a baseline of the paper",
            form=LOGISTIC,
            arguments=lambda: (0.0, 1.0, 0.0),
        ),
        Definition(
            name="relu",
            formula="log(max(z, 0) + eps)",
            summary="a baseline of the paper; a target with z <= 0 gets no gradient",
            form=RELU,
            parameters={"eps": Parameter(default=1e-8, lower_bound=0.0, can_be_learned=False)},
            arguments=lambda eps: (eps,),
        ),
        Definition(
            name="gss",
            formula="k (z - c) + c - (k - 1) softplus(z - c)",
            summary="Parthiban et al. 2021; k = 2, c = 0 is sigsoftmax, k = 1 softmax, k = 0 log(1 + e^z)",
            form=LOGISTIC,
            parameters={"k": Parameter(default=2.0), "c": Parameter(default=0.0, can_differ_by_class=True)},
            arguments=lambda k, c: (1.0, k - 1.0, c),
        ),
        Definition(
            name="softcap",
            formula="c tanh(z / c)",
            summary="logits kept within +-c, as in Gemma 2",
            form=SOFTCAP,
            parameters={"c": Parameter(default=30.0, lower_bound=0.0, can_be_learned=False)},
            arguments=lambda c: (c,),
        ),
    )
}
_registrations = 0
_FORMS: dict[str, Form] = {form.name: form for form in (LOGISTIC, RELU, SOFTCAP)}


def registrations() -> int:
    """The number of registrations by users so far: a name may mean another function after each."""
    return _registrations


def names() -> tuple[str, ...]:
    """The names of all members, those registered by the user included."""
    return tuple(_DEFINITIONS)


def form_by_name(name: str) -> Form:
    return _FORMS[name]


def definition_by_name(name: str) -> Definition:
    if name not in _DEFINITIONS:
        hint = did_you_mean(name, _DEFINITIONS)
        raise ValueError(f"unknown output function {name!r}{hint}; the known ones are {', '.join(_DEFINITIONS)}")
    return _DEFINITIONS[name]


# Members of the user's own


def register_function(
    name: str,
    phi: Callable[..., Tensor],
    slope: Callable[..., Tensor] | None = None,
    *,
    parameters: Mapping[str, float] | None = None,
    formula: str = "registered by the user",
) -> OutputFunction:
    """Add a member to the family, and return it with its default parameters.

    ``phi(z, *parameters)`` is an elementwise torch function, log g. ``slope``, its derivative by z, is optional:
    without it autograd finds it. ``parameters`` maps parameter names to default values; each may later be a number,
    a tensor () or (V,) that gets gradients, or :class:`Learned`. The member runs on every device, and every loss,
    module and mixture accepts it.

    >>> import torch, sigsoftmax
    >>> cube = sigsoftmax.register_function("cube", lambda z: z + z**3 / 3, lambda z: 1 + z**2)
    >>> sigsoftmax.probs(torch.zeros(4), function="cube")
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ValueError(f"the name of an output function must be an identifier, got {name!r}")
    # Names of forms are taken too: backends look forms up by them, and `logistic` is one of no member.
    taken = _DEFINITIONS[name].form if name in _DEFINITIONS else _FORMS.get(name)
    if taken is not None and taken.is_builtin:
        raise ValueError(f"{name!r} is a member of the family already; choose another name")

    def slope_by_autograd(z: Tensor, *arguments: Tensor) -> Tensor:
        return torch.func.grad(lambda x: phi(x, *arguments).sum())(z)

    def scaled(z: Tensor, peak: Tensor, *arguments: Tensor) -> Scaled:
        # Nothing is known of phi: the offset is its own largest value, since that of z may lie elsewhere.
        value = phi(z, *arguments)
        offset = value.detach().amax(-1, keepdim=True)
        return Scaled(value - offset, offset)

    def argument_slopes(z: Tensor, peak: Tensor, *arguments: Tensor) -> ArgumentSlopes:
        wide = [argument.expand_as(z) for argument in arguments]
        slopes = torch.func.grad(lambda *a: phi(z, *a).sum(), argnums=tuple(range(len(wide))))(*wide)
        return tuple(slopes), tuple(torch.zeros_like(peak) for _ in wide)

    global _registrations
    _registrations += 1
    _FORMS[name] = Form(name, phi, slope or slope_by_autograd, scaled, argument_slopes, is_builtin=False)
    _DEFINITIONS[name] = Definition(
        name=name,
        formula=formula,
        summary="registered by the user",
        form=_FORMS[name],
        parameters={k: Parameter(default=float(v), can_differ_by_class=True) for k, v in (parameters or {}).items()},
        arguments=lambda **values: tuple(values.values()),
    )
    return OutputFunction(name)


# What users hold


class OutputFunction:
    """A member of the family with values for its parameters; immutable.

    ``OutputFunction("gss", k=0.2)`` fixes k, ``OutputFunction("shifted_sigsoftmax", b=tensor)`` lets gradients flow
    to a tensor of shape () or (V,), and ``b=Learned(per_class=True)`` asks a layer to create and train it.
    A parameter left out takes its default. ``str()`` of a member without tensors is read back by :meth:`parse`.
    """

    def __init__(self, name: str, **parameters: Value | int) -> None:
        self.definition = definition_by_name(name)
        known = self.definition.parameters
        for key in parameters:
            if key not in known:
                allowed = f"its parameters are {', '.join(known)}" if known else "it has no parameters"
                raise ValueError(f"output function {name!r} has no parameter {key!r}; {allowed}")
        self.given: dict[str, Value] = {}
        self.kinds: dict[str, ParameterKind] = {}
        """The kind of each parameter that is no fixed number: of a tensor, or of one that a layer is to create."""
        for key, value in parameters.items():
            self.given[key], kind = checked_value(name, key, known[key], value)
            if kind is not None:
                self.kinds[key] = kind

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def parameters(self) -> dict[str, Value]:
        """Every parameter with its value, defaults filled in."""
        return {key: self.given.get(key, spec.default) for key, spec in self.definition.parameters.items()}

    @property
    def is_fixed(self) -> bool:
        """True if no parameter is a tensor, whose values can change."""
        return not any(isinstance(value, Tensor) for value in self.given.values())

    @property
    def has_shared_phi(self) -> bool:
        """True if one phi serves all classes: no parameter differs by class."""
        return ParameterKind.PER_CLASS not in self.kinds.values()

    @property
    def properties(self) -> Properties:
        """The known properties of phi for the values that its parameters have now.

        The values of tensors are read, for which a device has to be waited for.
        """
        pairs = zip(self.arguments(), self.argument_kinds(), strict=True)
        return self.form.properties([None if k is ParameterKind.PER_CLASS else float(a.detach()) for a, k in pairs])

    @property
    def lasting_properties(self) -> Properties:
        """The properties that phi has whatever values its tensors, and what a layer learns, take; nothing is read."""
        return self.form.properties([None if math.isnan(n) else n for n in self._numbers(unknown=self.kinds)])

    @property
    def is_linear(self) -> bool:
        """True if phi is known to be one line, whatever is learned, so that log f has the rank bound of softmax."""
        return self.lasting_properties.is_affine is True

    @property
    def is_increasing(self) -> bool:
        """True if one phi that is known not to decrease serves all classes: f orders them as the logits.

        The values of tensors are read as they are now, for which a device has to be waited for.
        """
        return self.has_shared_phi and self.properties.is_increasing is True

    @property
    def form(self) -> Form:
        return self.definition.form

    def arguments(self, num_classes: int | None = None) -> list[Tensor]:
        """The arguments of the form as tensors; fixed numbers become float64 scalars on the CPU."""
        return [a if isinstance(a, Tensor) else scalar(a) for a in self.argument_values(num_classes)]

    def argument_values(self, num_classes: int | None = None) -> tuple[Number, ...]:
        """The arguments of the form: fixed numbers, and tensors that are computed from those of the parameters."""
        values: dict[str, Number] = {}
        for key, value in self.parameters.items():
            if isinstance(value, Learned):
                raise ValueError(
                    f"parameter {key!r} of {self.name!r} is to be learned, and only a layer or a criterion can create "
                    f"it; pass a tensor: OutputFunction({self.name!r}, {key}=tensor)"
                )
            if isinstance(value, Tensor) and num_classes is not None:
                check_number_of_values(self.name, key, value, num_classes)
            values[key] = value
        return self.definition.arguments(**values)

    def argument_kinds(self) -> tuple[ParameterKind | None, ...]:
        """The kind of each of :meth:`arguments`: that of the parameters it depends on, None for a fixed number."""
        found: list[ParameterKind | None] = [None for _ in self._numbers(unknown=())]
        # What depends on a scalar and on a parameter per class is per class, so that comes last.
        for kind in (ParameterKind.SCALAR, ParameterKind.PER_CLASS):
            of_kind = [key for key, known in self.kinds.items() if known is kind]
            for i, number in enumerate(self._numbers(unknown=of_kind)):
                found[i] = kind if math.isnan(number) else found[i]
        return tuple(found)

    def _numbers(self, *, unknown: Collection[str]) -> list[float]:
        """The arguments of the form as numbers, NaN for those that depend on an ``unknown`` parameter.

        Other parameters that are no fixed numbers are taken at their defaults.
        """
        defaults = self.definition.parameters
        numbers = {k: v if isinstance(v, float) else defaults[k].default for k, v in self.parameters.items()}
        arguments = self.definition.arguments(**numbers | dict.fromkeys(unknown, math.nan))
        return [float(argument) for argument in arguments]

    def __eq__(self, other: object) -> bool:
        """Compare members and their parameters: numbers by value, tensors by identity."""
        return isinstance(other, OutputFunction) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        return id(self.definition), *(id(v) if isinstance(v, Tensor) else v for v in self.parameters.values())

    def phi(self, z: Tensor) -> Tensor:
        """log g(z), elementwise; for a parameter per class the classes are the last dimension."""
        return self.form.phi(z, *self._arguments_like(z))

    def slope(self, z: Tensor) -> Tensor:
        """The derivative of :meth:`phi` by z."""
        return self.form.slope(z, *self._arguments_like(z))

    def _arguments_like(self, z: Tensor) -> list[Tensor]:
        return [a.to(z.device, z.dtype) for a in self.arguments(z.shape[-1] if z.ndim else None)]

    def with_parameters(self, **parameters: Value) -> OutputFunction:
        """The same member with some parameters replaced."""
        return OutputFunction(self.name, **{**self.given, **parameters})

    @staticmethod
    def parse(text: str | OutputFunction) -> OutputFunction:
        """Read ``"gss"``, ``"gss(k=0.2)"``, ``"gss(k=learned:0.5)"`` or ``"shifted_sigsoftmax(b=per_class:4)"``."""
        if isinstance(text, OutputFunction):
            return text
        if not isinstance(text, str):
            raise ValueError(f"function must be a name or an OutputFunction, got {type(text).__name__}")
        if torch.compiler.is_compiling():
            return _parsed(text)
        return _parsed_once(text, _registrations)

    def __str__(self) -> str:
        inside = ", ".join(f"{key}={printed_value(value)}" for key, value in self.given.items())
        return f"{self.name}({inside})" if inside else self.name

    def __repr__(self) -> str:
        return f"OutputFunction({str(self)!r})"

    def __reduce__(self) -> tuple[Callable[..., OutputFunction], tuple[str, dict[str, Value]]]:
        # By name: a definition holds functions, and the reader has its own.
        return _with_values, (self.name, self.given)


def _parsed(text: str) -> OutputFunction:
    call = parse_call(text)
    if call is None:
        raise ValueError(f"cannot read the output function {text!r}; write it like 'gss(k=0.2)'")
    if call.name in (*MIXTURES, "mixture") and call.name not in _DEFINITIONS:
        raise ValueError(
            f"expected a single output function, got the mixture {text!r}, which is computed from hidden vectors; use "
            "MixtureOutputLayer, mixture_cross_entropy or, on a model of transformers, apply_output_function"
        )
    parameters: dict[str, Value] = {}
    for item in filter(None, call.items or ()):
        pair = key_and_value(item)
        if pair is None:
            raise ValueError(f"cannot read {item!r} in {text!r}; write parameters like 'k=0.2'")
        key, value = pair
        if key in parameters:
            raise ValueError(f"parameter {key!r} twice in {text!r}; give it once")
        parameters[key] = parsed_value(text, value)
    return OutputFunction(call.name, **parameters)


@functools.lru_cache(maxsize=4096)
def _parsed_once(text: str, _: int) -> OutputFunction:
    """Names are read once, until one is registered again."""
    return _parsed(text)


def _with_values(name: str, given: dict[str, Value]) -> OutputFunction:
    return OutputFunction(name, **given)


def table() -> Sequence[Definition]:
    """All definitions, for the documentation and the command line."""
    return tuple(_DEFINITIONS.values())
