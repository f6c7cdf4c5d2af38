"""The border: shapes, dtypes and devices of what users pass in, checked once for every function.

Each check says what was expected, what came, and what to do. Shapes: N tokens (the product of all leading dimensions),
K components, V classes, d features.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sigsoftmax.backends import dispatch, reference
from sigsoftmax.family import OutputFunction

Function = str | OutputFunction
MIB = 2**20
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""dtypes that losses and log-probabilities are computed of; those of 8 bits are for storage"""


class Product(NamedTuple):
    """The shapes and the dtype of hidden vectors times an output matrix."""

    leading: torch.Size
    num_classes: int
    dtype: torch.dtype
    components: bool

    @classmethod
    def of(cls, input: Tensor, weight: Tensor, bias: Tensor | None, *, components: bool) -> Product:
        check_floating("input", input)
        check_floating("linear_weight", weight)
        for name, tensor in (("input", input), ("linear_weight", weight), ("linear_bias", bias)):
            check_in_one_process(name, tensor)
        least = 2 if components else 1
        wanted = "(..., components, features)" if components else "(..., features)"
        if input.ndim < least:
            raise ValueError(f"input must have the shape {wanted}, got {tuple(input.shape)}")
        if weight.ndim != 2:
            raise ValueError(f"linear_weight must have the shape (classes, features), got {tuple(weight.shape)}")
        if input.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"input has {input.shape[-1]} features but linear_weight has {weight.shape[1]}: expected {wanted} and "
                f"(classes, features), got {tuple(input.shape)} and {tuple(weight.shape)}"
            )
        check_classes("linear_weight", weight.shape[0])
        if bias is not None:
            check_floating("linear_bias", bias)
            if bias.shape != weight.shape[:1]:
                raise ValueError(
                    f"linear_bias must hold one number per class, shape ({weight.shape[0]},), got {tuple(bias.shape)}"
                )
        for name, tensor in (("linear_weight", weight), ("linear_bias", bias)):
            if tensor is not None and tensor.device != input.device:
                raise ValueError(f"{name} is on {tensor.device}, but the input is on {input.device}; move it there")
        dtype = input.dtype
        if autocasts(input) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(input.device.type)
        return cls(input.shape[:-least], weight.shape[0], dtype, components)

    def hidden(self, input: Tensor) -> Tensor:
        """(N, K, d)"""
        components = input.shape[-2] if self.components else 1
        return input.reshape(self.leading.numel(), components, input.shape[-1])

    def flat(self, log_prior: Tensor) -> Tensor:
        """(N, K)"""
        return log_prior.reshape(self.leading.numel(), log_prior.shape[-1]).contiguous()

    def logits(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, member: OutputFunction, arguments: Sequence[Tensor]
    ) -> Tensor:
        gradient_dtype = reference.gradient_dtype(member.form, arguments, self.dtype)
        return linear(self.hidden(input), weight, bias, self.dtype, gradient_dtype)


def linear(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, gradient_dtype: torch.dtype
) -> Tensor:
    """Products of this dtype, in one that their gradient needs."""
    hidden, weight = (t.to(dtype).to(gradient_dtype) for t in (hidden, weight))
    product = F.linear(hidden, weight, None if bias is None else bias.to(dtype).to(gradient_dtype))
    if dtype == gradient_dtype:
        return product
    # Rounded for itself alone: autograd would round the gradient as well.
    exact = product.detach()
    return product + (exact.to(dtype).to(gradient_dtype) - exact)


def prior_of(member: OutputFunction, prior_function: Function | None) -> OutputFunction:
    """The output function of the prior; if it is not given, that of the components or softmax."""
    if prior_function is None:
        prior_function = "softmax" if member.definition.parameters else member
    return OutputFunction.parse(prior_function)


def log_prior(
    prior_logits: Tensor, member: OutputFunction, prior_function: Function | None, backend: str | None = None
) -> Tensor:
    """Log-probabilities of the components, in the arithmetic's dtype; K is small, so plain torch does on a CPU."""
    prior = prior_of(member, prior_function)
    arguments = prior.arguments(prior_logits.shape[-1])
    try:
        chosen = dispatch.choose(backend, prior.form, prior_logits.dtype, (prior_logits, *arguments))
    except ValueError:
        # A backend that was asked for by name serves the components, and need not serve the prior.
        chosen = "reference"
    if chosen == "triton" and not torch.compiler.is_compiling():
        from sigsoftmax.backends.triton import fixed, priors

        values = fixed.fixed_values(arguments)
        if values is not None and prior_logits.shape[-1] <= priors.MOST_COMPONENTS:
            return priors.log_prior(prior_logits, prior.form, values)
    return reference.log_probs(prior_logits, prior.form, arguments)


def needs_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def autocasts(tensor: Tensor) -> bool:
    kind = tensor.device.type
    # Asked first, since devices such as meta know no autocast and raise.
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def default_chunk_bytes(chunk_bytes: int | None, device: torch.device, mixture_classes: int | None = None) -> int:
    """On a GPU, what its products need to run at full speed: for a mixture 4,608 rows, which a token has K of."""
    if chunk_bytes is None:
        if device.type == "cpu":
            return 32 * MIB
        largest = 576 * MIB
        return largest if mixture_classes is None else min(largest, max(64 * MIB, 4608 * 2 * mixture_classes))
    if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes <= 0:
        raise ValueError(f"chunk_bytes must be a positive number of bytes, got {chunk_bytes!r}")
    return chunk_bytes


def check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.is_nested:
        raise ValueError(
            f"{name} must be a dense tensor, got a nested one; pass its values() with one target for each of their "
            "rows, or torch.nested.to_padded_tensor(...) with ignore_index"
        )
    if tensor.layout != torch.strided:
        raise ValueError(
            f"{name} must be a dense tensor, got one of layout {tensor.layout}; convert it with .to_dense()"
        )


def check_floating(name: str, tensor: Tensor) -> None:
    check_tensor(name, tensor)
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {tensor.dtype}; convert it with .float()")
    if tensor.dtype not in FLOATING:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATING)
        raise ValueError(f"{name} must be one of {known}, got {tensor.dtype}; convert it with .to(torch.bfloat16)")


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is spread over processes; whoever has one has imported the module that makes them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_in_one_process(name: str, tensor: Tensor | None) -> None:
    if is_dtensor(tensor):
        raise ValueError(
            f"{name} is a DTensor, which is spread over processes; use the function of the same name in "
            "sigsoftmax.distributed, or pass the whole tensor: full_tensor()"
        )


def check_dim(tensor: Tensor, dim: int) -> None:
    check_index("dim", dim)
    rank = max(1, tensor.ndim)
    if not -rank <= dim < rank:
        raise ValueError(
            f"dim must lie in [{-rank}, {rank - 1}] for a tensor of shape {tuple(tensor.shape)}, got {dim}"
        )


def check_classes(name: str, classes: int) -> None:
    if classes == 0:
        raise ValueError(f"{name} has no classes; the dimension of classes must not be empty")


def check_prior(input: Tensor, prior_logits: Tensor) -> None:
    check_floating("prior_logits", prior_logits)
    if prior_logits.shape != input.shape[:-1]:
        raise ValueError(
            f"prior_logits must hold one number per token and component, shape {tuple(input.shape[:-1])} for an input "
            f"of shape {tuple(input.shape)} (..., components, features), got {tuple(prior_logits.shape)}"
        )
    if prior_logits.shape[-1] == 0:
        raise ValueError("a mixture needs at least one component, got an input with none")
    if prior_logits.device != input.device:
        raise ValueError(f"prior_logits is on {prior_logits.device}, but the input is on {input.device}; move it there")


def check_index(name: str, value: int) -> None:
    """That it is a whole number, and none that only counts as one: True is not 1."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise ValueError(f"{name} must be a whole number, got {value!r}")


def number(name: str, value: float) -> float:
    """The value of an option: a number, or a tensor that holds one."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None


def check_nonnegative(name: str, value: float) -> None:
    if not 0.0 <= number(name, value) < float("inf"):
        raise ValueError(f"{name} must be a finite number >= 0, got {value}")
