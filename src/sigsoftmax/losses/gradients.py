"""Backward passes: gradients that are computed again or were stored, and what happens if these are differentiated.

The autograd functions serve calls outside torch.compile, where calls through torch.library cost more than a small loss.

Under create_graph=True the gradients of given logits are computed once more from the logits, by plain autograd and with
a graph. Those of products are not, since plain autograd would hold the N x V logits that these calls avoid: they raise
when they are differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sigsoftmax import torch_internals
from sigsoftmax.contract.operands import Operands
from sigsoftmax.losses.lowering import Lowered, plain_result

Gradients = Sequence[Tensor | None]
"""in the order of ``Operands.differentiable``; None where a gradient is not wanted"""

NO_SECOND_DERIVATIVE = (
    "sigsoftmax: the fast backends have no second derivative; pass backend='reference' (plain torch, which holds "
    "the N x V logits) to differentiate twice, or call cross_entropy outside torch.compile with logits that you hold"
)


class RecomputingFunction(torch.autograd.Function):
    """Results that save their operands, and whose gradients are computed when they are asked for.

    ``gradients`` is given those of the differentiable outputs, which are the first ones; None for one that is not used.
    """

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[[Lowered, Operands], tuple[Tensor | None, ...]],
        gradients: Callable[..., Gradients],
        differentiable: int,
        lowered: Lowered,
        arguments: int,
        shard: Any,
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.lowered, ctx.arguments, ctx.shard = gradients, lowered, arguments, shard
        ctx.differentiable = differentiable
        ctx.save_for_backward(*tensors)
        outputs = compute(lowered, Operands.from_flat(tensors, arguments, shard))
        ctx.mark_non_differentiable(*(extra for extra in outputs[differentiable:] if extra is not None))
        return outputs

    @staticmethod
    def backward(ctx: Any, *by_outputs: Tensor | None) -> Gradients:
        saved, given = ctx.saved_tensors, by_outputs[: ctx.differentiable]
        if all(by is None for by in given):
            return (None,) * len(ctx.needs_input_grad)
        operands = Operands.from_flat(saved, ctx.arguments, ctx.shard)
        if _can_be_differentiated_again(ctx.lowered):
            (by_output,) = given
            assert by_output is not None
            return (*(None,) * 6, *_of_operands(_differentiable_gradients(ctx.lowered, operands, by_output)))
        with torch.no_grad():
            gradients = ctx.gradients(ctx.lowered, operands, *given)
        return (*(None,) * 6, *_of_operands(not_differentiable_again(gradients, (*given, *saved))))


class StoringFunction(torch.autograd.Function):
    """A loss of one number, whose gradients are computed with it and multiplied by the incoming one."""

    @staticmethod
    def forward(
        ctx: Any, lowered: Lowered, arguments: int, shard: Any, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        results = lowered.path.compute(Operands.from_flat(tensors, arguments, shard))
        ctx.set_materialize_grads(False)
        ctx.lowered, ctx.arguments = lowered, arguments
        ctx.mark_non_differentiable(*(extra for extra in results.extras if extra is not None))
        # Second derivatives start from given logits; else an output leads to the inputs, and raises. Not the loss,
        # which its owner may change.
        sources = (results.losses_N,) if lowered.problem.has_weight else tensors
        ctx.stored = len(results.gradients)
        ctx.save_for_backward(*results.gradients, *sources)
        return results.loss, results.losses_N, *results.extras

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor | None, *_: Tensor | None) -> Gradients:
        needs_sources = torch.is_grad_enabled() or (by_loss is not None and is_traced(by_loss))
        saved = ctx.saved_tensors if needs_sources else torch_internals.first_saved_tensors(ctx, ctx.stored)
        if by_loss is None:
            return (None,) * len(ctx.needs_input_grad)
        stored, sources = saved[: ctx.stored], saved[ctx.stored :]
        if _can_be_differentiated_again(ctx.lowered):
            operands = Operands.from_flat(sources, ctx.arguments)
            return (None, None, None, *_of_operands(_differentiable_gradients(ctx.lowered, operands, by_loss)))
        # Saved outputs come back as results; a gradient that wants a gradient is for create_graph alone.
        kept = [None if t is None else t.detach() if t.requires_grad else t for t in stored]
        gradients = _times(kept, by_loss, ctx.lowered.path.scale)
        return (None, None, None, *_of_operands(not_differentiable_again(gradients, (by_loss, *sources))))


def _can_be_differentiated_again(lowered: Lowered) -> bool:
    """True if a graph of the gradients is asked for, and the call saved the logits that it is made from."""
    return torch.is_grad_enabled() and not lowered.problem.has_weight and not torch.compiler.is_compiling()


def _differentiable_gradients(lowered: Lowered, operands: Operands, by_output: Tensor) -> Gradients:
    """The gradients by plain autograd, with a graph that leads to the operands and to the incoming gradient."""
    # Views, since an operand may be a function of another one, through which no gradient is to pass here.
    views = Operands.from_flat([None if t is None else t.view_as(t) for t in operands.flat], len(operands.arguments))
    result = plain_result(lowered, views).reshape(by_output.shape)
    wanted = lowered.problem.wanted.flat
    inputs = [view for view, want in zip(views.differentiable, wanted, strict=True) if want]
    found = iter(torch.autograd.grad(result, inputs, by_output, create_graph=True, materialize_grads=True))
    return [next(found) if want else None for want in wanted]


def _of_operands(gradients: Gradients) -> Gradients:
    """Gradients in the order of ``Operands.flat``: targets and class weights have none."""
    return (*gradients[:4], None, None, *gradients[4:])


def is_traced(tensor: Tensor) -> bool:
    """Tell whether torch.compile is looking. While it traces backward formulas only the type of a tensor tells."""
    return torch.compiler.is_compiling() or type(tensor) is not Tensor


def _times(gradients: Gradients, factor: Tensor, in_place: Callable[[Sequence[Tensor], Tensor], None]) -> Gradients:
    """Gradients times the incoming gradient, ``in_place`` where nobody will ask for them again."""
    if is_traced(factor) or torch_internals.keeps_graph() or torch.is_grad_enabled():
        return [None if gradient is None else gradient * factor.to(gradient.dtype) for gradient in gradients]
    in_place([gradient for gradient in gradients if gradient is not None], factor)
    return gradients


def not_differentiable_again(outputs: Gradients, through: Sequence[Tensor | None]) -> Gradients:
    """Under create_graph=True, gradients whose own derivative raises: never silently zero.

    ``through`` leads to what they depend on; without it a derivative by that would be found unused, not raise.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return tuple(outputs)
    present = [output.detach().requires_grad_() for output in outputs if output is not None]
    present += [tensor for tensor in through if tensor is not None and tensor.requires_grad]
    marked = iter(torch_internals.raising_when_differentiated(NO_SECOND_DERIVATIVE, present))
    return tuple(None if output is None else next(marked) for output in outputs)
