"""Layers, criteria and other modules around the functions, with their convention; thin.

What torch's modules have too is named and placed as there; ``function`` and whatever else torch does not have is given
by name.

Shapes: (..., d) hidden vectors, V classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigsoftmax._old_calls import function_was_positional
from sigsoftmax.contract.signature import is_dtensor
from sigsoftmax.contract.spec import Function, Reduction, check_positive, check_temperature
from sigsoftmax.family import Learned, OutputFunction
from sigsoftmax.losses import functional
from sigsoftmax.losses.extras import Extras

Device = torch.device | str | int | None


class FunctionModule(nn.Module):
    """A module with an output function, whose learned parameters it owns.

    A parameter given as :class:`Learned`, or left out where the member is made to be learned (b of shifted
    sigsoftmax), becomes an ``nn.Parameter`` of the module; a tensor is registered as it is; a number stays fixed. One
    number per class is learned where ``num_classes`` is known.
    """

    def __init__(
        self,
        function: Function,
        num_classes: int | None = None,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_classes is not None:
            check_positive(num_classes=num_classes)
        member = OutputFunction.parse(function)
        # The name and the numbers, not the member: modules are pickled, and definitions are made of plain functions.
        self._function_name, self._function_text = member.name, str(member)
        self._function_numbers: dict[str, float] = {}
        self.function_parameters = nn.ParameterDict()
        self._buffer_names: list[str] = []
        for key, spec in member.definition.parameters.items():
            value = member.given.get(key, Learned() if spec.learned_in_layers else spec.default)
            if isinstance(value, Learned):
                if value.per_class and num_classes is None:
                    raise ValueError(
                        f"parameter {key!r} of {member.name!r} is to be learned per class, and the number of classes "
                        "is not known here; pass num_classes"
                    )
                initial, shape = value.start(spec.default, num_classes or 0)
                fresh = torch.full(shape, float(initial), device=device, dtype=dtype)
                self.function_parameters[key] = nn.Parameter(fresh)
            elif isinstance(value, nn.Parameter):
                self.function_parameters[key] = value
            elif isinstance(value, Tensor):
                self.register_buffer(buffer_name(key), value)
                self._buffer_names.append(key)
            elif key in member.given:
                self._function_numbers[key] = value

    @property
    def function(self) -> OutputFunction:
        """The output function with the module's parameters as they are now."""
        held = {key: getattr(self, buffer_name(key)) for key in self._buffer_names}
        learned = dict(self.function_parameters.items())
        return OutputFunction(self._function_name, **self._function_numbers, **learned, **held)

    def extra_repr(self) -> str:
        return f"function={self._function_text!r}"


def buffer_name(key: str) -> str:
    """The name under which a :class:`FunctionModule` holds a tensor that is no ``nn.Parameter``."""
    return f"function_{key}"


def check_bias(bias: bool) -> None:
    """Check the argument that stands where the output function stood before."""
    if not isinstance(bias, bool):
        raise ValueError(
            f"bias must be True or False, got {type(bias).__name__}; an output function is given by its name, as in "
            "function='sigsoftmax'"
        )


class OutputModule(FunctionModule):
    """A module with an output function over the classes of an output matrix: what output layers have in common."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def _add_output_matrix(
        self,
        weight: Tensor | None,
        num_classes: int,
        features: int,
        bias: bool,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        """Share a weight (V, d), or make a new one with the initialisation of nn.Linear.

        The weight is annotated as a tensor because torch annotates the weights of its modules so.
        """
        if weight is None:
            fresh = torch.empty(num_classes, features, device=device, dtype=dtype)
            weight = nn.Parameter(nn.init.uniform_(fresh, -1.0 / math.sqrt(features), 1.0 / math.sqrt(features)))
        if not isinstance(weight, nn.Parameter):
            raise ValueError(
                f"a tied weight must be the nn.Parameter of another module, got {type(weight).__name__}; "
                "a plain tensor would neither move nor be saved with the layer"
            )
        if weight.shape != (num_classes, features):
            raise ValueError(
                f"a tied weight must have the shape (num_classes, features) = ({num_classes}, {features}), "
                f"got {tuple(weight.shape)}"
            )
        self.num_classes = num_classes
        self.weight = weight
        # Where the weight is and in its dtype: a tied weight may have been moved already.
        zeros_V = torch.zeros(num_classes, dtype=weight.dtype, device=weight.device)
        self.bias = nn.Parameter(zeros_V) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        return self.log_probs(hidden)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """(..., V)"""
        raise NotImplementedError

    @overload
    def loss(self, hidden: Tensor, target: Tensor, *, extras: None = ..., **options: Any) -> Tensor: ...

    @overload
    def loss(
        self, hidden: Tensor, target: Tensor, *, extras: Sequence[str], **options: Any
    ) -> tuple[Tensor, Extras]: ...

    def loss(
        self, hidden: Tensor, target: Tensor, *, extras: Sequence[str] | None = None, **options: Any
    ) -> Tensor | tuple[Tensor, Extras]:
        """The cross-entropy of this layer: :func:`linear_cross_entropy`, of a mixture :func:`mixture_cross_entropy`.

        It takes any of its options. If the weight is a DTensor, sharded by classes, it is the vocabulary-parallel one
        of ``sigsoftmax.distributed``.
        """
        losses: Any = functional
        if is_dtensor(self.weight):
            from sigsoftmax import distributed as losses
        return self._loss(losses, hidden, target, linear_bias=self.bias, extras=extras, **options)

    def _loss(self, losses: Any, hidden: Tensor, target: Tensor, **options: Any) -> Any:
        """The loss by the functions of a module."""
        raise NotImplementedError

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> torch.return_types.topk:
        """The log-probabilities and indices of the k likeliest classes, each (..., k)."""
        return self.log_probs(hidden).topk(k, dim=-1)


class OutputLayer(OutputModule):
    """The last layer of a classifier or language model: a linear map, as ``nn.Linear``, and an output function.

    ``weight`` ties the matrix to another one, say an embedding's. Training goes through :meth:`loss`, which never
    holds the N x V logits. ``device`` and ``dtype`` are those of the parameters that the layer makes.

    >>> layer = OutputLayer(16, 1000, function="sigsoftmax")
    >>> hidden, target = torch.randn(8, 16), torch.randint(1000, (8,))
    >>> layer.loss(hidden, target).backward()
    >>> layer.sample(hidden).shape
    torch.Size([8])
    """

    @function_was_positional("in_features", "num_classes", "function", "bias", "weight")
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = True,
        *,
        function: Function = "sigsoftmax",
        weight: Tensor | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(in_features=in_features, num_classes=num_classes)
        check_bias(bias)
        super().__init__(function, num_classes, device=device, dtype=dtype)
        self.in_features = in_features
        self._add_output_matrix(weight, num_classes, in_features, bias, device, dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """z, before the output function: (..., V)."""
        return F.linear(hidden, self.weight, self.bias)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """(..., V)"""
        return functional.log_probs(self.logits(hidden), function=self.function)

    def _loss(self, losses: Any, hidden: Tensor, target: Tensor, **options: Any) -> Any:
        return losses.linear_cross_entropy(hidden, self.weight, target, function=self.function, **options)

    @torch.no_grad()
    def sample(
        self,
        hidden: Tensor,
        num_samples: int | None = None,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Classes drawn from the distribution: (...), or (..., num_samples) if that is given.

        The temperature divides log g, as every sampler does with the logits of a softmax model.
        """
        return sample_from(log_probs_to_draw(self.logits(hidden), self.function), num_samples, temperature, generator)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.num_classes}, {super().extra_repr()}, bias={self.bias is not None}"


def log_probs_to_draw(logits: Tensor, function: OutputFunction) -> Tensor:
    """Log-probabilities in at least float32: those that are rounded to half precision skew what is drawn."""
    return functional.log_probs(logits.to(torch.promote_types(logits.dtype, torch.float32)), function=function)


def sample_from(
    log_probs: Tensor, num_samples: int | None, temperature: float, generator: torch.Generator | None
) -> Tensor:
    """Draw along the last dimension."""
    check_temperature(temperature)
    if num_samples is not None:
        check_positive(num_samples=num_samples)
    rows = log_probs.reshape(-1, log_probs.shape[-1]).float()
    # Relative to the largest before the division: a low temperature would make all of them -inf.
    probabilities = torch.softmax((rows - rows.amax(-1, keepdim=True)) / temperature, -1)
    drawn = torch.multinomial(probabilities, num_samples or 1, replacement=True, generator=generator)
    leading = log_probs.shape[:-1]
    return drawn.view(leading if num_samples is None else (*leading, num_samples))


class LogProbs(FunctionModule):
    """:func:`log_probs` as a module: ``nn.LogSoftmax`` with any output function.

    ``num_classes`` is needed where the function learns a number per class, and not otherwise.
    """

    @function_was_positional("function", "dim")
    def __init__(self, dim: int = -1, *, function: Function = "sigsoftmax", num_classes: int | None = None) -> None:
        super().__init__(function, num_classes)
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:
        return functional.log_probs(input, self.dim, function=self.function)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dim={self.dim}"


class Probs(LogProbs):
    """:func:`probs` as a module: ``nn.Softmax`` with any output function."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).exp()


class Sigsoftmax(Probs):
    """:func:`sigsoftmax` as a module, the counterpart of ``nn.Softmax``."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__(dim, function="sigsoftmax")


class LogSigsoftmax(LogProbs):
    """:func:`log_sigsoftmax` as a module, the counterpart of ``nn.LogSoftmax``."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__(dim, function="sigsoftmax")


class CrossEntropyLoss(FunctionModule):
    """:func:`cross_entropy` as a module; with ``function="softmax"`` it is ``nn.CrossEntropyLoss``.

    Parameters of the function that are learned belong to the criterion: they are in its ``parameters()``, which the
    optimiser must be given, and in its ``state_dict()``. One number per class needs ``num_classes``, or the class
    weights ``weight``, which tell it. ``criterion.function`` is the function as it was learned: pass it to whatever
    makes probabilities of the logits.

    >>> criterion = CrossEntropyLoss(function="shifted_sigsoftmax(b=per_class)", num_classes=5)
    >>> criterion(torch.zeros(2, 5), torch.tensor([1, 4])).backward()
    >>> criterion.function_parameters["b"].grad.shape
    torch.Size([5])
    >>> LogProbs(dim=1, function=criterion.function)(torch.zeros(2, 5)).shape
    torch.Size([2, 5])
    """

    weight: Tensor | None

    @function_was_positional("function", "weight")
    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        function: Function = "sigsoftmax",
        num_classes: int | None = None,
        dim: int | None = None,
        z_loss: float = 0.0,
        chunk_bytes: int | None = None,
        backend: str | None = None,
        extras: Sequence[str] | None = None,
    ) -> None:
        if weight is not None and (not isinstance(weight, Tensor) or weight.ndim != 1):
            got = f"the shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
            raise ValueError(
                f"weight must be a tensor with one weight per class, got {got}; an output function is given by its "
                "name, as in function='sigsoftmax'"
            )
        if weight is not None and num_classes not in (None, len(weight)):
            raise ValueError(f"weight has {len(weight)} numbers, but num_classes is {num_classes}; give one per class")
        super().__init__(function, num_classes if weight is None else len(weight))
        self.register_buffer("weight", weight)
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "dim": dim,
            "z_loss": z_loss,
            "chunk_bytes": chunk_bytes,
            "backend": backend,
            "extras": extras,
        }

    def forward(
        self, input: Tensor, target: Tensor, token_weights: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Extras]:
        return functional.cross_entropy(
            input, target, self.weight, function=self.function, token_weights=token_weights, **self.options
        )
