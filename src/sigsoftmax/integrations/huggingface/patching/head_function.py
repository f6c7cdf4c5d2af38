"""The output function of a patched model: what it does to logits, and what is remembered of it.

Shapes: (..., V) logits of V classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sigsoftmax import family
from sigsoftmax.contract.rows import MASK, compute_dtype
from sigsoftmax.contract.spec import Function
from sigsoftmax.family import OutputFunction
from sigsoftmax.family.parameters import ParameterKind
from sigsoftmax.layers.output_layer import FunctionModule

SLAB_NUMBERS = 8 * 2**20
"""Logits that need no gradient are transformed in place, so many at a time (32 MiB in float32)."""


@dataclass(frozen=True, kw_only=True)
class LogitAdjustment:
    """What a model does to the logits of its output layer before it uses them: ``cap tanh(scale z / cap)``."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        scaled = logits * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)

    def __str__(self) -> str:
        parts = [f"multiplied by {self.scale:g}"] if self.scale != 1.0 else []
        parts += [f"capped at {self.cap:g}"] if self.cap is not None else []
        return " and ".join(parts) or "left as they are"


def is_plain_softmax(function: OutputFunction) -> bool:
    """Whether logits mean what every softmax model means by them: phi is the identity, and nothing of it is learned."""
    return function.lasting_properties.affine_slope == 1.0


class HeadFunction(FunctionModule):
    """The output function that a patched model holds as ``model.output_function``.

    Calling it gives phi of the model's logits. Tensors among the parameters become parameters of the module, frozen
    unless they require a gradient, so that they are saved with the model; a scalar that callbacks move is one of these.
    """

    def __init__(self, function: Function, num_classes: int, *, frozen: tuple[str, ...] = ()) -> None:
        member = OutputFunction.parse(function)
        tensors = {key: value for key, value in member.given.items() if isinstance(value, Tensor)}
        held = {
            key: value if isinstance(value, nn.Parameter) else nn.Parameter(value.detach().clone(), value.requires_grad)
            for key, value in tensors.items()
        }
        for key, value in held.items():
            if member.kinds[key] is ParameterKind.PER_CLASS and value.shape[0] != num_classes:
                raise ValueError(
                    f"parameter {key!r} of {member.name!r} has {value.shape[0]} values, but the model has "
                    f"{num_classes} classes; give one number, or one per class"
                )
        super().__init__(member.with_parameters(**held), num_classes)
        self.num_classes = num_classes
        self.scalars: tuple[str, ...] = ()
        # Kept, because shapes change from here on: scalars are held as vectors, and what is sharded is in parts.
        self.kinds = self.function.kinds
        for key, value in list(self.function_parameters.items()):
            # One number as a vector, since FSDP refuses scalars. A parameter of the caller's stays what it is.
            if not self.differs_by_class(key) and not isinstance(member.given.get(key), nn.Parameter):
                self.scalars += (key,)
                self.function_parameters[key] = nn.Parameter(value.detach().reshape(1), value.requires_grad)
        self.frozen = tuple(sorted({*frozen, *(key for key, value in held.items() if not value.requires_grad)}))
        self.freeze()
        # A plain load_state_dict of a softmax model stops at this name. Plain softmax loads anywhere.
        self.register_buffer("requires_sigsoftmax", torch.ones(()), persistent=not self.is_plain_softmax)

    @property
    def function(self) -> OutputFunction:
        """The output function with the module's parameters as they are now."""
        values = {
            key: value.reshape(()) if key in self.scalars else value for key, value in self.function_parameters.items()
        }
        return OutputFunction(self._function_name, **self._function_numbers, **values)

    def differs_by_class(self, key: str) -> bool:
        return self.kinds[key] is ParameterKind.PER_CLASS

    def freeze(self) -> None:
        """Keep what is to stay as it is from being trained; loading makes new parameters, which are not."""
        for key in self.frozen:
            self.function_parameters[key].requires_grad_(False)

    @property
    def is_plain_softmax(self) -> bool:
        # By its name as well: a member whose phi happens to be the identity, gss(k=1), is stored as what it is.
        return self._function_name == "softmax" and is_plain_softmax(self.function)

    def forward(self, logits: Tensor) -> Tensor:
        """phi(logits) in their dtype; a class that is masked with -inf stays so under every member."""
        if self.is_plain_softmax:
            return logits
        function = self.function
        is_small = logits.numel() <= SLAB_NUMBERS or not logits.is_contiguous()
        if is_small or logits.requires_grad or torch.compiler.is_compiling():
            return transformed(logits, function)
        for slab in logits.view(-1, logits.shape[-1]).split(max(1, SLAB_NUMBERS // logits.shape[-1])):
            slab.copy_(transformed(slab, function))
        return logits

    def of_raw_logits(self, adjustment: LogitAdjustment) -> OutputFunction:
        """The function of ``scale z``: the adjustment's cap and then this one."""
        return self.function if adjustment.cap is None else capped(self.function, adjustment.cap)

    def remembered(self) -> dict[str, Any]:
        """The function as JSON; values of tensors travel in the checkpoint."""
        learned = {key: family.Learned(per_class=self.differs_by_class(key)) for key in self.function_parameters}
        text = str(OutputFunction(self._function_name, **self._function_numbers, **learned))
        return {"function": text, "frozen": list(self.frozen)}

    def described(self) -> str:
        """The function with the values that it has now, as :meth:`OutputFunction.parse` reads it where it can."""
        values = {
            key: family.Learned(per_class=True)
            if self.differs_by_class(key)
            else family.Learned(initial=float(value.detach()))
            for key, value in self.function_parameters.items()
        }
        return str(OutputFunction(self._function_name, **self._function_numbers, **values))

    def resize(self, num_classes: int) -> None:
        """Follow a vocabulary that was resized: new classes take the mean of the others, as transformers does."""
        for key, value in self.function_parameters.items():
            if self.differs_by_class(key) and value.shape[0] != num_classes:
                fresh = value.detach().mean().repeat(num_classes)
                kept = min(num_classes, value.shape[0])
                fresh[:kept] = value.detach()[:kept]
                self.function_parameters[key] = nn.Parameter(fresh, value.requires_grad)
        self.num_classes = num_classes

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HeadFunction:
        """Follow the model to its device, but not to its half precision: a shift of 12.3 would become 12.3125."""

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, recurse)


def transformed(logits: Tensor, function: OutputFunction) -> Tensor:
    """phi(logits), computed in float32 or better, in the dtype of the logits."""
    z = logits.to(compute_dtype(logits.dtype))
    masked = z == MASK
    phi = function.phi(torch.where(masked, torch.zeros_like(z), z))
    return torch.where(masked, z, phi).to(logits.dtype)


def capped(member: OutputFunction, cap: float) -> OutputFunction:
    """The member of softcapped logits, as one function of raw logits, so that the linear loss can use it."""
    if is_plain_softmax(member):
        return OutputFunction("softcap", c=cap)
    name = f"{member.name}_of_softcap"
    if _is_new(name, member):
        _register_capped(name, member)
    return OutputFunction(name, cap=cap, **member.parameters)


def tempered(member: OutputFunction, temperature: float) -> OutputFunction:
    """The member whose phi is divided by a temperature, as one function, so that the linear loss can use it."""
    if temperature <= 0.0:
        raise ValueError(f"temperature must be greater than 0, got {temperature}")
    if temperature == 1.0:
        return member
    slope = member.lasting_properties.affine_slope
    if slope is not None:
        return OutputFunction("softmax", alpha=slope / temperature)
    name = f"{member.name}_at_temperature"
    if _is_new(name, member):
        definition = member.definition
        family.register_function(
            name,
            lambda z, t, *values: definition.form.phi(z, *_arguments(definition, z, values)) / t,
            lambda z, t, *values: definition.form.slope(z, *_arguments(definition, z, values)) / t,
            parameters={"temperature": 1.0, **{key: spec.default for key, spec in definition.parameters.items()}},
            formula=f"{member.name} divided by a temperature",
        )
    return OutputFunction(name, temperature=temperature, **member.parameters)


_COMPOSED: dict[str, Any] = {}
"""The definitions of which composed functions were made: a user may register another one under the same name."""


def _is_new(name: str, member: OutputFunction) -> bool:
    is_known = name in family.names() and _COMPOSED.get(name) is member.definition
    _COMPOSED[name] = member.definition
    return not is_known


def _arguments(definition: Any, z: Tensor, values: tuple[Tensor, ...]) -> list[Tensor]:
    """The arguments of a member's form, of the values of its parameters."""
    made = definition.arguments(**dict(zip(definition.parameters, values, strict=True)))
    return [torch.as_tensor(argument, dtype=z.dtype, device=z.device) for argument in made]


def _register_capped(name: str, member: OutputFunction) -> None:
    definition, softcap = member.definition, family.form_by_name("softcap")

    def phi(z: Tensor, cap: Tensor, *values: Tensor) -> Tensor:
        return definition.form.phi(softcap.phi(z, cap), *_arguments(definition, z, values))

    def slope(z: Tensor, cap: Tensor, *values: Tensor) -> Tensor:
        return definition.form.slope(softcap.phi(z, cap), *_arguments(definition, z, values)) * softcap.slope(z, cap)

    defaults = {key: spec.default for key, spec in definition.parameters.items()}
    family.register_function(
        name, phi, slope, parameters={"cap": 30.0, **defaults}, formula=f"{member.name} of cap tanh(z / cap)"
    )
