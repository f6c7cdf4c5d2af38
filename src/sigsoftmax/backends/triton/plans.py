"""Losses for which all there is to decide is decided once, for all calls alike.

Softmax and sigsoftmax, class indices, a mean or a sum, all logits at once: one kernel makes of the logits the loss and
their gradient, or two if rows are long. For few tokens preparing launches would take the host longer than the kernels
take the GPU. Given logits may be of many.

Shapes: N tokens, V classes, d features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sigsoftmax.backends import products, reference, sources
from sigsoftmax.backends.gradients import is_traced, keeps_graph, not_differentiable_again, times
from sigsoftmax.backends.sources import LinearLogits
from sigsoftmax.backends.triton import plan_kernels, stream
from sigsoftmax.backends.triton.fixed import fixed_values, is_sigsoftmax, is_softmax
from sigsoftmax.backends.triton.launches import Launch
from sigsoftmax.backends.triton.scaling import Scaling
from sigsoftmax.backends.triton.shapes import fast_shape, multiprocessors, stagger
from sigsoftmax.forms import Form

MOST_TOKENS = 2048
"""Every program counts the targets of all tokens."""
MANY_TOKENS = 2**17
"""given logits of which take longer than that, if their rows are long"""
BLOCK = 512
"""targets that it counts at a time"""
MANY_BLOCK = 4096
FINISHED_ROWS = 128
"""of a stream, by a program"""
ALL_BYTES = 2**62
"""a budget for all logits at once"""
CHECKED = {"debug": True, "sanitize_overflow": False}
"""Options of kernels that check targets: asserts, but not of every sum of integers."""


class Plan(Protocol):
    """A loss of which everything is decided but the values of its tensors."""

    @property
    def scale(self) -> Scaling:
        """Multiplies the gradients."""

    def compute(self, *tensors: Any) -> tuple[Any, ...]:
        """The loss, what each token has in it, and the gradients of all tensors but the last, which are the targets."""


def loss_by(plan: Plan, *tensors: Tensor | None) -> Tensor:
    # A known call is under no transform of torch.func; what torch does first to make sure takes its time.
    total, _ = super(torch.autograd.Function, _PlannedLoss).apply(plan, *tensors)
    return total


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TokenPlan:
    """A plan for logits that are given, or the product of an input and a weight."""

    tokens: int
    needs: tuple[bool, ...]
    """whether input, weight and bias want a gradient"""
    dtype: torch.dtype
    """of the loss"""
    product_dtype: torch.dtype
    is_direct: bool
    """whether products take and give tensors as they are"""
    scale: Scaling
    launch: Launch
    stream: tuple[Launch, Launch] | None = None
    """two others, for given logits of long rows that lie at an aligned address"""

    def compute(
        self, input: Tensor, weight_Vd: Tensor | None, bias_V: Tensor | None, target: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """``input`` is (..., d), or the logits (..., V) if there is no weight."""
        shares = torch.zeros(self.tokens + 1, dtype=torch.float32, device=input.device)
        total = torch.empty((), dtype=self.dtype, device=input.device)
        needs_input, needs_weight, needs_bias = self.needs
        if weight_Vd is None:
            by_input = torch.empty_like(input)
            if self.stream is not None and input.data_ptr() % stream.ALIGNMENT == 0:
                rows, finish = self.stream
                measures = torch.empty(2 * self.tokens + 1, dtype=torch.float32, device=input.device)
                rows(input, by_input, target, measures)
                finish(input, by_input, target, shares, measures, total)
            else:
                self.launch(input, by_input, target, shares, total)
            return total, shares, by_input, None, None
        if not self.is_direct:
            source = LinearLogits(
                input.view(self.tokens, 1, input.shape[-1]),
                weight_Vd,
                bias_V,
                self.product_dtype,
                ALL_BYTES,
                needs_hidden=needs_input,
                needs_weight=needs_weight,
                needs_bias=needs_bias,
            )
            for _, chunk_NV in source.chunks():
                logits_NV = source.whole_rows(chunk_NV)
                self.launch(logits_NV, logits_NV, target, shares, total)
                source.backpropagate()
            by_hidden, by_weight, by_bias = source.gradients()
            return total, shares, None if by_hidden is None else by_hidden.view(input.shape), by_weight, by_bias
        rows_Nd = input if input.ndim == 2 else input.view(self.tokens, input.shape[-1])
        weight_dV = weight_Vd.t()
        logits_NV = torch.mm(rows_Nd, weight_dV) if bias_V is None else torch.addmm(bias_V, rows_Nd, weight_dV)
        self.launch(logits_NV, logits_NV, target, shares, total)
        by_bias = None
        if needs_bias and bias_V is not None:
            by_bias = torch.empty(bias_V.shape, dtype=torch.float32, device=bias_V.device)
            products.add_column_sums(by_bias, logits_NV, is_first=True)
            by_bias = by_bias.to(bias_V.dtype)
        return (
            total,
            shares,
            torch.mm(logits_NV, weight_Vd).view(input.shape) if needs_input else None,
            products.sum_over_rows(logits_NV, rows_Nd) if needs_weight else None,
            by_bias,
        )


class _PlannedLoss(torch.autograd.Function):
    """By a plan, of tensors of which the last, the targets, has no gradient."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        total, shares, *gradients = plan.compute(*tensors)
        # An output leads a second derivative to the inputs; not the loss, which its owner may change.
        ctx.save_for_backward(shares, *gradients)
        ctx.set_materialize_grads(False)
        ctx.scale = plan.scale
        return total, shares

    @staticmethod
    def backward(ctx: Any, *by_outputs: Tensor) -> tuple[Tensor | None, ...]:
        by_total = by_outputs[0]
        shares, *stored = ctx.saved_tensors
        if by_total.is_cuda and not torch.is_grad_enabled() and not keeps_graph() and not is_traced(by_total):
            ctx.scale([t for t in stored if t is not None], by_total)
            return None, *stored, None
        scaled = iter(times([t for t in stored if t is not None], by_total))
        gradients = tuple(None if t is None else next(scaled) for t in stored)
        return None, *not_differentiable_again(gradients, (by_total, shares)), None


def needed(tensors: Sequence[Tensor | None]) -> tuple[bool, ...]:
    """Which of them want a gradient."""
    return tuple(tensor is not None and tensor.requires_grad for tensor in tensors)


def scaling_of(tensors: Sequence[Tensor | None]) -> Scaling:
    """For the gradients of those that want one."""
    wanted = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    return Scaling([tensor.numel() for tensor in wanted], wanted[0].device)


def has_kernels(form: Form, arguments: Sequence[Tensor], product_dtype: torch.dtype) -> bool:
    """For this output function, and gradients in place of logits of this dtype."""
    values = fixed_values(arguments)
    is_known = values is not None and (is_softmax(form, values) or is_sigsoftmax(form, values))
    return is_known and reference.gradient_dtype(form, arguments, product_dtype) == product_dtype


def _most_tokens(row_bytes: int, programs: int) -> int:
    """Of given logits: 8 bytes for each program and token are to be little beside a row."""
    return MANY_TOKENS if 64 * programs <= row_bytes else MOST_TOKENS


def is_simple(tensors: Sequence[Tensor]) -> bool:
    """Whether kernels can take them as they are."""
    return all(t.is_contiguous() and type(t) in (Tensor, torch.nn.Parameter) for t in tensors)


def plan_of(
    form: Form,
    arguments: Sequence[Tensor],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    target: Tensor,
    *,
    is_mean: bool,
    ignore_index: int,
    z_loss: float,
    dtype: torch.dtype,
    product_dtype: torch.dtype,
    chunk_bytes: int,
    label_smoothing: float = 0.0,
) -> TokenPlan | None:
    """How to compute the loss by a kernel or two; None where that is not the way."""
    tokens, classes = target.numel(), input.shape[-1] if weight is None else weight.shape[0]
    present = [t for t in (input, weight, bias) if t is not None]
    alignment = 1 if weight is None else sources.row_alignment(input.device)
    width = products.rounded_up(classes, alignment)
    if (
        not has_kernels(form, arguments, product_dtype)
        or not is_simple([*present, target])
        or not any(needed(present))
        or target.dtype != torch.int64
        or (weight is not None and tokens * width * product_dtype.itemsize > chunk_bytes)
    ):
        return None
    values = fixed_values(arguments)
    assert values is not None
    alpha, _, c = values
    is_sig = is_sigsoftmax(form, values)
    size = product_dtype.itemsize
    shape = fast_shape(width, size, is_sig)
    programs = shape.per_processor * multiprocessors(input.device)
    if not 0 < tokens <= (_most_tokens(width * size, programs) if weight is None else MOST_TOKENS):
        return None
    block = BLOCK if tokens <= MOST_TOKENS else MANY_BLOCK
    first_numbers = (tokens, width, classes, alpha, c, ignore_index, z_loss)
    rows_apart = stagger(tokens, width, size, programs)
    first_constants = {"IS_SIG": is_sig, "IS_MEAN": is_mean, "HAS_Z_LOSS": z_loss != 0}
    launch = Launch(
        plan_kernels.loss_kernel,
        min(tokens, programs),
        (*first_numbers, label_smoothing, rows_apart),
        {**first_constants, "IS_SMOOTH": label_smoothing != 0, "LANES": shape.lanes, "BLOCK": block},
        num_warps=shape.warps,
        **CHECKED,
    )
    as_stream = None
    streamed = stream.shape_of(width, width, size, is_sig)
    if streamed is not None and weight is None and label_smoothing == 0:
        stream_programs = min(tokens, streamed.per_processor * multiprocessors(input.device))
        as_stream = (
            Launch(
                plan_kernels.stream_kernel,
                stream_programs,
                (tokens, width, alpha, c, ignore_index, z_loss, stagger(tokens, width, size, stream_programs)),
                {**first_constants, "LANES": streamed.lanes, "BLOCK": block},
                num_warps=streamed.warps,
            ),
            Launch(
                plan_kernels.finish_kernel,
                -(-tokens // FINISHED_ROWS),
                first_numbers,
                {"IS_SIG": is_sig, "HAS_Z_LOSS": z_loss != 0, "ROWS": FINISHED_ROWS, "BLOCK": block},
                **CHECKED,
            ),
        )
    return TokenPlan(
        tokens=tokens,
        needs=needed((input, weight, bias)),
        dtype=dtype,
        product_dtype=product_dtype,
        is_direct=width == classes and all(t.dtype == product_dtype for t in present),
        scale=scaling_of((input, weight, bias)),
        launch=launch,
        stream=as_stream,
    )
