"""What backward passes share: scaling stored gradients, and refusing to be differentiated twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax.backends import dispatch

NO_SECOND_DERIVATIVE = (
    b"sigsoftmax: the fast backends have no second derivative; pass backend='reference' (plain torch, which holds "
    b"the N x V logits) to differentiate twice"
)


def empty_like_dtype(like: Tensor) -> Tensor:
    return torch.empty(0, dtype=like.dtype, device=like.device)


def is_traced(tensor: Tensor) -> bool:
    """Whether torch.compile is looking. While it traces backward formulas only the type of a tensor tells."""
    return torch.compiler.is_compiling() or type(tensor) is not Tensor


def times(gradients: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    """Gradients times the incoming gradient, in place where nobody will ask for them again."""
    if is_traced(factor) or keeps_graph():
        return [gradient * factor.to(gradient.dtype) for gradient in gradients]
    if factor.device.type == "cpu" and bool(factor == 1):
        return list(gradients)
    if factor.device.type == "cuda" and dispatch.has_kernels():
        from sigsoftmax.backends.triton.scaling import scale_in_place

        scale_in_place(gradients, factor)
        return list(gradients)
    return [gradient.mul_(factor.to(gradient.dtype)) for gradient in gradients]


def keeps_graph() -> bool:
    """Whether the backward pass that is running was asked to keep the graph (retain_graph=True)."""
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return query is None or bool(query())


def split_arguments(by_argument: Tensor | None, arguments: Sequence[Tensor]) -> list[Tensor | None]:
    if by_argument is None:
        return [None] * len(arguments)
    pieces = torch.split(by_argument, [a.numel() for a in arguments])
    return [
        None if _is_fixed_elsewhere(a, piece) else piece.view(a.shape).to(a.device, a.dtype)
        for piece, a in zip(pieces, arguments, strict=True)
    ]


def _is_fixed_elsewhere(argument: Tensor, gradient: Tensor) -> bool:
    """A fixed number on the CPU wants no gradient, and a copy from the GPU would have to be waited for."""
    return argument.device != gradient.device and not argument.requires_grad and not is_traced(gradient)


def not_differentiable_again(
    outputs: tuple[Tensor | None, ...], through: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Under create_graph=True, gradients whose own derivative raises: never silently zero.

    ``through`` leads to what they depend on; without it a derivative by that would be found unused, not raise.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return outputs
    present = [output.detach().requires_grad_() for output in outputs if output is not None]
    present += [tensor for tensor in through if tensor is not None and tensor.requires_grad]
    raising = torch._C._functions.DelayedError(NO_SECOND_DERIVATIVE, len(present))(*present)
    marked = iter(raising if isinstance(raising, tuple | list) else (raising,))
    return tuple(None if output is None else next(marked) for output in outputs)
