"""What backward passes share: scaling stored gradients, and refusing to be differentiated twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sigsoftmax import torch_internals

NO_SECOND_DERIVATIVE = (
    "sigsoftmax: the fast backends have no second derivative; pass backend='reference' (plain torch, which holds "
    "the N x V logits) to differentiate twice"
)


def is_traced(tensor: Tensor) -> bool:
    """Whether torch.compile is looking. While it traces backward formulas only the type of a tensor tells."""
    return torch.compiler.is_compiling() or type(tensor) is not Tensor


def times(
    gradients: Sequence[Tensor | None], factor: Tensor, in_place: Callable[[Sequence[Tensor], Tensor], None]
) -> list[Tensor | None]:
    """Gradients times the incoming gradient, ``in_place`` where nobody will ask for them again."""
    if is_traced(factor) or torch_internals.keeps_graph() or torch.is_grad_enabled():
        return [None if gradient is None else gradient * factor.to(gradient.dtype) for gradient in gradients]
    in_place([gradient for gradient in gradients if gradient is not None], factor)
    return list(gradients)


def joined(gradients: Sequence[Tensor | None], arguments: Sequence[Tensor], numbers: Tensor) -> Tensor:
    """Gradients of all arguments in one vector like ``numbers``, 0 where one is not wanted; empty where none is."""
    if all(gradient is None for gradient in gradients):
        return torch.empty_like(numbers)
    return torch.cat(
        [
            numbers.new_zeros(t.numel()) if g is None else g.flatten().to(numbers.device, numbers.dtype)
            for g, t in zip(gradients, arguments, strict=True)
        ]
    )


def split(
    dense: Sequence[Tensor | None], joined_arguments: Tensor, arguments: Sequence[Tensor], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """From the results of an op to one gradient for each operand that may want one; the last of them were joined."""
    pieces: Sequence[Tensor | None] = [None] * len(arguments)
    if any(wanted[len(dense) :]):
        pieces = [
            piece.view(a.shape).to(a.device, a.dtype)
            for piece, a in zip(torch.split(joined_arguments, [a.numel() for a in arguments]), arguments, strict=True)
        ]
    return [g if want else None for g, want in zip((*dense, *pieces), wanted, strict=True)]


def nothing_for(options: Sequence[object]) -> list[list[Tensor] | None]:
    """What an op's backward returns for arguments without a gradient; torch takes an empty list for one of tensors."""
    return [[] if isinstance(option, list) and not option else None for option in options]


def not_differentiable_again(
    outputs: Sequence[Tensor | None], through: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Under create_graph=True, gradients whose own derivative raises: never silently zero.

    ``through`` leads to what they depend on; without it a derivative by that would be found unused, not raise.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return tuple(outputs)
    present = [output.detach().requires_grad_() for output in outputs if output is not None]
    present += [tensor for tensor in through if tensor is not None and tensor.requires_grad]
    marked = iter(torch_internals.raising_when_differentiated(NO_SECOND_DERIVATIVE, present))
    return tuple(None if output is None else next(marked) for output in outputs)
