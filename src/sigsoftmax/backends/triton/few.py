"""The loss of few tokens, where preparing launches takes the host longer than the kernels take the GPU.

Softmax and sigsoftmax, class indices, a mean or a sum, all logits at once: one kernel makes of the logits the loss and
their gradient. What there is to decide is decided once for all calls alike. Given logits may be of many tokens.

Shapes: N tokens, V classes, d features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from sigsoftmax.backends import products, sources
from sigsoftmax.backends.gradients import is_traced, keeps_graph, not_differentiable_again, times
from sigsoftmax.backends.sources import LinearLogits
from sigsoftmax.backends.triton import fast, fast_rows, smoothing
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
ALL_BYTES = 2**62
"""a budget for all logits at once"""
CHECKED = {"debug": True, "sanitize_overflow": False}
"""Options of kernels that check targets: asserts, but not of every sum of integers."""


@triton.jit
def token_scale(target, N, ignore_index, IS_MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """What a token that is not ignored counts in the sum or the mean; inf where there is none."""
    if IS_MEAN:
        kept = tl.zeros([BLOCK], tl.int32)
        for start in range(0, N, BLOCK):
            position = start + tl.arange(0, BLOCK)
            kept += (tl.load(target + position, mask=position < N, other=ignore_index) != ignore_index).to(tl.int32)
        return 1.0 / tl.sum(kept, 0).to(tl.float32)
    else:
        return tl.full((), 1.0, tl.float32)


@triton.jit
def add_up(shares, total, N, programs, BLOCK: tl.constexpr):
    """The program that comes last of so many adds what all tokens have, always in the same order.

    ``shares`` has a number more than tokens, which counts the programs that are done; it begins at 0.
    """
    # All threads have stored what they share before one of them says so.
    tl.debug_barrier()
    done = (shares + N).to(tl.pointer_type(tl.int32))
    if tl.atomic_add(done, 1) == programs - 1:
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            position = start + tl.arange(0, BLOCK)
            # Not from a cache of this multiprocessor: others have stored them.
            sums += tl.load(shares + position, mask=position < N, other=0.0, cache_modifier=".cg")
        tl.store(total, tl.sum(sums, 0).to(total.dtype.element_ty))


@triton.jit
def loss_kernel(
    logits,
    out,
    target,
    shares,
    total,
    N,
    V,
    classes,
    alpha,
    c,
    ignore_index,
    z_loss,
    label_smoothing,
    stagger,
    IS_SIG: tl.constexpr,
    IS_MEAN: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    IS_SMOOTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum or the mean of all losses, and its gradient.

    Every program counts the targets of all tokens. The mean of no token is NaN. Rows of V logits may have masked ones
    beyond the ``classes``.
    """
    scale = token_scale(target, N, ignore_index, IS_MEAN, BLOCK)
    fast_rows.begin_late(stagger)
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        pointer = fast.row_at(logits, row, V)
        y = tl.load(target + row)
        first = fast.first_tile(pointer, V, LANES)
        is_kept = y != ignore_index
        tl.device_assert((not is_kept) | ((y >= 0) & (y < classes)), "target out of range; see SIGSOFTMAX_CHECK=1")
        y = tl.where(is_kept, y, 0)
        z_y = tl.load(pointer + y).to(tl.float32)
        gaps = tl.full((), 0.0, tl.float32)
        if IS_SMOOTH:
            row_sum, anchor, gaps = smoothing.measured(pointer, first, alpha, c, V, classes, IS_SIG, LANES)
        else:
            row_sum, anchor = fast.measured(pointer, first, alpha, c, V, IS_SIG, LANES)
        normalizer = tl.log(row_sum)
        gap = fast.gap_of(z_y, anchor, alpha, c, IS_SIG)
        if IS_SMOOTH:
            gap = (1.0 - label_smoothing) * gap + label_smoothing / classes * gaps
        loss = normalizer - gap
        by_n = scale
        if HAS_Z_LOSS:
            log_sum = fast.row_offset(anchor, alpha, c, IS_SIG) + normalizer
            loss += z_loss * log_sum * log_sum
            by_n += 2.0 * z_loss * scale * log_sum
        share = tl.where(is_kept, scale * loss, 0.0)
        tl.store(shares + row, tl.where(scale == float("inf"), float("nan"), share))
        out_pointer = fast.row_at(out, row, V)
        if IS_SMOOTH:
            by_s = -scale * (1.0 - label_smoothing)
            by_class = -scale * label_smoothing / classes
            smoothing.write_gradient(
                pointer,
                out_pointer,
                row_sum,
                anchor,
                gaps,
                by_n,
                by_s,
                by_class,
                y,
                z_y,
                is_kept,
                alpha,
                c,
                V,
                classes,
                IS_SIG,
                LANES,
            )
        else:
            by_n = tl.where(is_kept, by_n, 0.0)
            by_s = tl.where(is_kept, -scale, 0.0)
            fast.write_gradient(
                pointer, out_pointer, row_sum, anchor, by_n, by_s, y, z_y, is_kept, alpha, c, V, IS_SIG, True, LANES
            )
    add_up(shares, total, N, tl.num_programs(0), BLOCK)


class Plan(Protocol):
    """A loss of which everything is decided but the values of its tensors."""

    @property
    def scale(self) -> Scaling:
        """Multiplies the gradients."""

    def compute(self, *tensors: Any) -> tuple[Any, ...]:
        """The loss, what each token has in it, and the gradients of all tensors but the last, which are the targets."""


def loss_by(plan: Plan, *tensors: Tensor | None) -> Tensor:
    # A known call is under no transform of torch.func; what torch does first to make sure takes its time.
    total, _ = super(torch.autograd.Function, _FewTokensLoss).apply(plan, *tensors)
    return total


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class FewTokens:
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

    def compute(
        self, input: Tensor, weight_Vd: Tensor | None, bias_V: Tensor | None, target: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """``input`` is (..., d), or the logits (..., V) if there is no weight."""
        shares = torch.zeros(self.tokens + 1, dtype=torch.float32, device=input.device)
        total = torch.empty((), dtype=self.dtype, device=input.device)
        needs_input, needs_weight, needs_bias = self.needs
        if weight_Vd is None:
            by_input = torch.empty_like(input)
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


class _FewTokensLoss(torch.autograd.Function):
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


def has_kernels(form: Form, arguments: Sequence[Tensor]) -> bool:
    """For this output function."""
    values = fixed_values(arguments)
    return values is not None and (is_softmax(form, values) or is_sigsoftmax(form, values))


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
) -> FewTokens | None:
    """How to compute the loss by one kernel; None where that is not the way."""
    tokens, classes = target.numel(), input.shape[-1] if weight is None else weight.shape[0]
    present = [t for t in (input, weight, bias) if t is not None]
    alignment = 1 if weight is None else sources.row_alignment(input.device)
    width = products.rounded_up(classes, alignment)
    if (
        not has_kernels(form, arguments)
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
    return FewTokens(
        tokens=tokens,
        needs=needed((input, weight, bias)),
        dtype=dtype,
        product_dtype=product_dtype,
        is_direct=width == classes and all(t.dtype == product_dtype for t in present),
        scale=scaling_of((input, weight, bias)),
        launch=Launch(
            loss_kernel,
            min(tokens, programs),
            (
                tokens,
                width,
                classes,
                alpha,
                c,
                ignore_index,
                z_loss,
                label_smoothing,
                stagger(tokens, width, size, programs),
            ),
            {
                "IS_SIG": is_sig,
                "IS_MEAN": is_mean,
                "HAS_Z_LOSS": z_loss != 0,
                "IS_SMOOTH": label_smoothing != 0,
                "LANES": shape.lanes,
                "BLOCK": BLOCK if tokens <= MOST_TOKENS else MANY_BLOCK,
            },
            num_warps=shape.warps,
            **CHECKED,
        ),
    )
