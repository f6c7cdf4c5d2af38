"""The output function of a patched model: the use it makes of hidden vectors and logits, and the record kept of it.

Everything else here knows an output function by :class:`HeadFunction` and :class:`LinearLogits` alone.

Shapes: (..., V) logits of V classes, (..., d) hidden vectors; N and n tokens.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigsoftmax import family
from sigsoftmax.contract.problem import default_chunk_bytes
from sigsoftmax.contract.rows import MASK, compute_dtype
from sigsoftmax.contract.spec import Function
from sigsoftmax.contract.statistics import TokenStatistics
from sigsoftmax.family import OutputFunction
from sigsoftmax.family.parameters import ParameterKind, check_number_of_values
from sigsoftmax.integrations.huggingface.examination.label_convention import LabelConvention
from sigsoftmax.integrations.huggingface.examination.output_layers import Examined, LogitAdjustment
from sigsoftmax.layers.output_layer import FunctionModule
from sigsoftmax.losses import functional
from sigsoftmax.losses.token_statistics import linear_token_statistics

CHUNK_NUMBERS = 8 * 2**20
"""Number of logits that are transformed at a time, in place, where they need no gradient (32 MiB in float32)."""

UNMARKED = 1
"""The entry ``requires_sigsoftmax`` of state dicts that were written before it held a mark of the function."""


def is_plain_softmax(function: OutputFunction) -> bool:
    """Tell whether phi is the identity and nothing of it is learned, so that logits mean what softmax makes of them."""
    return function.lasting_properties.affine_slope == 1.0


class LinearMap(Protocol):
    """The part of an output layer that a loss uses: its weight and its bias."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...


class HeadFunction(FunctionModule):
    """The output function that a patched model holds as ``model.output_function``.

    - Calling it, or :meth:`transformed`, turns the model's logits into those whose softmax is the output.
    - :meth:`cross_entropy` is the loss of logits; :meth:`linear` is what hidden vectors mean without storing logits.
    - :meth:`stored` is its record in the model's configuration, and :meth:`restored` reads that.

    Tensors among the parameters become parameters of the module, frozen unless they require a gradient, so that they
    are saved with the model; a scalar that callbacks move is one of these.
    """

    requires_sigsoftmax: Tensor
    """The load_state_dict of a softmax model stops at this name; plain softmax stores none."""
    takes_hidden = False
    """True if logits can be computed from hidden vectors alone, and not from the product of the output layer."""

    def __init__(self, function: Function, examined: Examined, *, frozen: tuple[str, ...] = ()) -> None:
        member = OutputFunction.parse(function)
        held = {
            key: value if isinstance(value, nn.Parameter) else nn.Parameter(value.detach().clone(), value.requires_grad)
            for key, value in member.given.items()
            if isinstance(value, Tensor)
        }
        for key, value in held.items():
            check_number_of_values(member.name, key, value, examined.num_classes)
        super().__init__(member.with_parameters(**held), examined.num_classes)
        self.examined = examined
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
        unmarked = torch.full((), UNMARKED, dtype=torch.int64)
        self.register_buffer("requires_sigsoftmax", unmarked, persistent=not self.is_plain_softmax)

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
            if key not in self.function_parameters:
                raise ValueError(
                    f"{key!r:.60} is to be frozen, and {self._function_text} has no parameter of that name; its "
                    f"parameters are: {', '.join(self.function_parameters) or 'none'}"
                )
            self.function_parameters[key].requires_grad_(False)

    @property
    def mark(self) -> int:
        """A number for the function as it is stored, exact in float32: values of parameters are not in it."""
        return zlib.crc32(self.stored()["function"].encode()) >> 8

    def write_mark(self) -> None:
        """Mark state dicts with the function of their weights: most functions have no parameters to tell them apart."""
        # Made anew: loading in half precision makes a float of it.
        self.requires_sigsoftmax = torch.full_like(self.requires_sigsoftmax, self.mark, dtype=torch.int64)

    def _has_own_mark(self, stored: Tensor) -> bool:
        # As its dtype holds the marks: all entries of a state dict may have been converted to another one.
        return bool((torch.tensor((UNMARKED, self.mark)).to(stored) == stored).any())

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *others: Any) -> None:
        stored = state_dict.get(f"{prefix}requires_sigsoftmax")
        if stored is not None and not stored.is_meta and not self._has_own_mark(stored):
            raise ValueError(
                f"these weights were trained with another output function than {self.described()}, and mean nothing "
                "to it; load them into a model that is patched as theirs was (the config.json beside them says how), "
                "and apply another function to it afterwards if that is what you want"
            )
        super()._load_from_state_dict(state_dict, prefix, *others)
        self.write_mark()  # those of older versions have none

    @property
    def is_plain_softmax(self) -> bool:
        # By its name as well: a member whose phi happens to be the identity, gss(k=1), is stored as what it is.
        return self._function_name == "softmax" and is_plain_softmax(self.function)

    def forward(self, logits: Tensor) -> Tensor:
        """phi(logits) in their dtype, in place where they are many; -inf masks a class under every member."""
        if self.is_plain_softmax:
            return logits
        is_small = logits.numel() <= CHUNK_NUMBERS or not logits.is_contiguous()
        if is_small or logits.requires_grad or torch.compiler.is_compiling():
            return self.transformed(logits)
        for chunk in logits.view(-1, logits.shape[-1]).split(max(1, CHUNK_NUMBERS // logits.shape[-1])):
            chunk.copy_(self.transformed(chunk))
        return logits

    def transformed(self, logits: Tensor) -> Tensor:
        """phi(logits) as a new tensor."""
        self.check_values(on_meta=logits.is_meta)
        return transformed(logits, self.function)

    def cross_entropy(self, logits: Tensor, targets: Tensor, *, are_transformed: bool = False, **options: Any) -> Any:
        """:func:`sigsoftmax.cross_entropy` of logits before this function or, if they are transformed, after it."""
        if not are_transformed:
            self.check_values(on_meta=logits.is_meta)
        function = "softmax" if are_transformed else self.function
        with float32_result(logits):
            return functional.cross_entropy(logits, targets, function=function, dim=-1, **options)

    def linear(self, hidden: Tensor, layer: LinearMap) -> LinearLogits:
        """The logits that the model makes of hidden vectors and its output layer; sharded parameters are gathered."""
        self.check_values(on_meta=hidden.is_meta)
        weight_Vd, bias_V = whole(layer.weight), whole(layer.bias)
        if weight_Vd.numel() == 0:
            raise ValueError(
                "the weight of the output layer is not there when the loss needs it (DeepSpeed ZeRO-3 may do that); "
                "use ZeRO-2 or FSDP, or pass logits_with_labels='always' to apply_output_function"
            )
        scale = self.examined.adjustment.scale
        if scale != 1.0:
            hidden, bias_V = hidden * scale, None if bias_V is None else bias_V * scale
        device = hidden.device.type
        is_cast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
        return LinearLogits(
            hidden=hidden,
            weight_Vd=weight_Vd,
            bias_V=bias_V,
            function=self.of_raw_logits(),
            product_dtype=torch.get_autocast_dtype(device) if is_cast else hidden.dtype,
        )

    def check_values(self, *, on_meta: bool = False) -> None:
        """Refuse parameters that were offloaded: a product with them is made of whatever lies in memory.

        accelerate brings them back while their module is called, and a loss of hidden vectors does not call it.
        ``on_meta`` is for calls whose inputs have no values either.
        """
        if not on_meta and any(value.is_meta for value in self.parameters()):
            raise ValueError(
                "the parameters of the output function are offloaded, and no logits can be computed without them; give "
                "the module output_function a device in device_map, as in device_map={..., 'output_function': 0}"
            )

    def of_raw_logits(self) -> OutputFunction:
        """The function of the output layer's logits times the model's scale: the model's cap and then this one."""
        cap = self.examined.adjustment.cap
        return self.function if cap is None else capped(self.function, cap)

    def stored(self) -> dict[str, Any]:
        """The function and the examined model as JSON; values of tensors travel in the checkpoint."""
        learned = {key: family.Learned(per_class=self.differs_by_class(key)) for key in self.function_parameters}
        examined = self.examined
        return {
            "function": str(OutputFunction(self._function_name, **self._function_numbers, **learned)),
            "frozen": list(self.frozen),
            "num_classes": examined.num_classes,
            "logit_scale": examined.adjustment.scale,
            "softcap": examined.adjustment.cap,
            "why_stored": examined.why_stored,
            "class_bias": examined.class_bias,
            "labels": dataclasses.asdict(examined.labels),
        }

    @classmethod
    def restored(cls, stored: Mapping[str, Any]) -> HeadFunction:
        """The counterpart of :meth:`stored`."""
        return cls(stored["function"], examined_in(stored), frozen=tuple(stored["frozen"]))

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
        self.examined = dataclasses.replace(self.examined, num_classes=num_classes)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HeadFunction:
        """Follow the model to its device, but not to its half precision: a shift of 12.3 would become 12.3125."""

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, recurse)


def examined_in(stored: Mapping[str, Any]) -> Examined:
    """The examined model in what :meth:`HeadFunction.stored` wrote."""
    return Examined(
        num_classes=stored["num_classes"],
        adjustment=LogitAdjustment(scale=stored["logit_scale"], cap=stored["softcap"]),
        why_stored=stored["why_stored"],
        class_bias=stored.get("class_bias"),
        labels=LabelConvention.restored(stored.get("labels") or {}),
    )


@dataclass(frozen=True, kw_only=True)
class LinearLogits:
    """The logits of hidden vectors, which are never stored as a whole, and the function of them."""

    hidden: Tensor
    weight_Vd: Tensor
    bias_V: Tensor | None
    function: OutputFunction
    product_dtype: torch.dtype

    def cross_entropy(self, targets: Tensor, **options: Any) -> Any:
        """:func:`sigsoftmax.linear_cross_entropy`; a pair with extras if ``options`` ask for these."""
        with float32_result(self.hidden):
            return functional.linear_cross_entropy(
                self.hidden, self.weight_Vd, targets, function=self.function, linear_bias=self.bias_V, **options
            )

    def token_statistics(self, targets: Tensor, **options: Any) -> TokenStatistics:
        """:func:`sigsoftmax.linear_token_statistics`, whose results are in float32 or better."""
        return linear_token_statistics(
            self.hidden, self.weight_Vd, targets, function=self.function, linear_bias=self.bias_V, **options
        )

    def tempered(self, temperature: float) -> tuple[Self, float]:
        """These logits at a temperature, and the temperature that is left for their statistics.

        A temperature divides phi, as it does when the model generates. That of a linear phi is in its scale then, and
        the statistics of a temperature of 1 cost less.
        """
        slope = self.function.lasting_properties.affine_slope
        if slope is None:
            return self, temperature
        return dataclasses.replace(self, function=OutputFunction("softmax", alpha=slope / temperature)), 1.0

    def logits(self) -> Tensor:
        """The logits (..., V) whose softmax is the output, in float32 or better."""
        dtype = self.product_dtype
        bias_V = None if self.bias_V is None else self.bias_V.to(dtype)
        logits = F.linear(self.hidden.to(dtype), self.weight_Vd.to(dtype), bias_V)
        return self.function.phi(logits.to(compute_dtype(dtype)))

    def rows(self, span: slice) -> Self:
        """The same of some of the hidden vectors (N, d)."""
        return dataclasses.replace(self, hidden=self.hidden[span])

    def logits_chunks(self, chunk_bytes: int | None) -> Iterator[tuple[slice, Tensor]]:
        """:meth:`logits` (n, V) of some hidden vectors (N, d) at a time."""
        row_bytes = self.weight_Vd.shape[0] * compute_dtype(self.product_dtype).itemsize
        rows = max(1, default_chunk_bytes(chunk_bytes, self.hidden.device) // row_bytes)
        # Once, rather than for each chunk.
        cast = dataclasses.replace(self, weight_Vd=self.weight_Vd.to(self.product_dtype))
        for start in range(0, self.hidden.shape[0], rows):
            span = slice(start, start + rows)
            yield span, cast.rows(span).logits()


def transformed(logits: Tensor, function: OutputFunction) -> Tensor:
    """phi(logits), computed in float32 or better, in the dtype of the logits."""
    z = logits.to(compute_dtype(logits.dtype))
    masked = z == MASK
    phi = function.phi(torch.where(masked, torch.zeros_like(z), z))
    return torch.where(masked, z, phi).to(logits.dtype)


def float32_result(tensor: Tensor) -> AbstractContextManager[Any]:
    """Under autocast a loss is returned in float32; a sum over a batch in half precision would be of little use."""
    kind = tensor.device.type
    if tensor.dtype not in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, dtype=tensor.dtype)


def whole(tensor: Any) -> Any:
    """A sharded parameter gathered; its gradient is scattered again."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


# --- functions composed of a member and one number, so that the linear loss can use them -----------------------------


def capped(member: OutputFunction, cap: float) -> OutputFunction:
    """The member of softcapped logits, as one function of raw logits."""
    if is_plain_softmax(member):
        return OutputFunction("softcap", c=cap)
    softcap = family.form_by_name("softcap")
    return _composed(
        member,
        f"{member.name}_of_softcap",
        lambda phi, z, cap: phi(softcap.phi(z, cap)),
        lambda slope, z, cap: slope(softcap.phi(z, cap)) * softcap.slope(z, cap),
        formula=f"{member.name} of cap tanh(z / cap)",
        cap=cap,
    )


_COMPOSED: dict[str, Any] = {}
"""The definitions of which composed functions were made: a user may register another one under the same name."""

Composition = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor]


def _composed(
    member: OutputFunction, name: str, phi: Composition, slope: Composition, *, formula: str, **number: float
) -> OutputFunction:
    """A function of a member's phi or slope, of z, and of one number, registered under a name."""
    definition = member.definition
    if name not in family.names() or _COMPOSED.get(name) is not definition:
        _COMPOSED[name] = definition

        def bound(compose: Composition, part: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def of_parameters(z: Tensor, number: Tensor, *values: Tensor) -> Tensor:
                made = definition.arguments(**dict(zip(definition.parameters, values, strict=True)))
                arguments = [torch.as_tensor(argument, dtype=z.dtype, device=z.device) for argument in made]
                return compose(lambda x: part(x, *arguments), z, number)

            return of_parameters

        family.register_function(
            name,
            bound(phi, definition.form.phi),
            bound(slope, definition.form.slope),
            parameters=number | {key: spec.default for key, spec in definition.parameters.items()},
            formula=formula,
        )
    return OutputFunction(name, **number, **member.parameters)
