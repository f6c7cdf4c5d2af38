"""Losses that one kernel computes, or two: everything is decided once, and the launches are prepared.

Softmax and sigsoftmax, class indices, a mean or a sum, all logits at once: one kernel makes of the logits the loss and
their gradient, or two if rows are long. For few tokens preparing launches would take the host longer than the kernels
take the GPU. Given logits may be of many.

Shapes: N tokens, V classes, d width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from sigsoftmax.backends.chunked import matmul
from sigsoftmax.backends.chunked.chunk_plan import row_width
from sigsoftmax.backends.triton.chunk_loop import TritonLinearLogits
from sigsoftmax.backends.triton.kernels import fused_loss
from sigsoftmax.backends.triton.launch import Launch
from sigsoftmax.backends.triton.per_class_gradients import add_column_sums
from sigsoftmax.backends.triton.scaling import Scaling
from sigsoftmax.backends.triton.tuning import (
    ALIGNMENT,
    LaunchShape,
    multiprocessors,
    pipelined_shape,
    softmax_shape,
    stagger,
)
from sigsoftmax.contract import normalizing
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import LossResults, Problem, Refusal, first_reason
from sigsoftmax.contract.spec import LossSpec

MOST_TOKENS = 2048
"""Every program counts the targets of all tokens."""
MANY_TOKENS = 2**17
"""given logits of which take longer than that, if their rows are long"""
BLOCK = 512
"""targets that a program counts at a time"""
MANY_BLOCK = 4096
FINISHED_ROWS = 128
"""pipelined rows that a program finishes"""
CHECKED = {"debug": True, "sanitize_overflow": False}
"""Options of kernels that check targets: asserts, but not of every sum of integers."""

OPTIONS = (
    *("member", "reduction", "ignore_index", "label_smoothing", "z_loss", "weight_gradient", "chunk_bytes", "backend"),
)
"""the options of a loss that the kernels compute"""


def too_many(tokens: int, most: int) -> dict[str, bool]:
    """Reasons to refuse more tokens than a path computes, or none."""
    return {"no tokens": not tokens, f"{tokens:,} tokens exceed its {most:,}": tokens > most}


def why_refused(problem: Problem[LossSpec], options: Sequence[str]) -> str | None:
    """The reason why no fused path computes a loss, whatever the number of its tokens; None if one may."""
    spec, operands = problem.spec, problem.signature.operands
    member = spec.member
    others = spec.beside(options)
    others += [name for name in ("class_weight", "token_weights") if getattr(operands, name) is not None]
    properties = member.form.properties(member.numbers)
    is_known = member.is_fixed and bool(properties.is_softmax or properties.is_sigsoftmax)
    dtype = problem.product_dtype
    reasons = {
        f"it does not compute {', '.join(others)}": bool(others),
        "losses are not reduced": spec.reduction == "none",
        "no gradient is wanted": not problem.wanted.any,
        "classes are spread over processes": problem.is_sharded,
        "values are checked with their messages": problem.signature.checks_values,
        f"its kernels are those of softmax and sigsoftmax with fixed numbers, not of {member.name}": not is_known,
        "the gradient of the logits needs a wider dtype than they have": is_known
        and normalizing.gradient_dtype(spec, member.arguments(()), dtype) != dtype,
        f"targets are {operands.target.dtype}, not class indices of int64": operands.target.dtype != torch.int64,
        "a tensor is not contiguous, or of a class of its own": not all(
            tensor.is_plain for tensor in operands[:5] if tensor is not None
        ),
    }
    return first_reason(reasons)


def lower(problem: Problem[LossSpec]) -> FusedLoss | Refusal:
    """The loss by a kernel or two, or why not."""
    tokens, size = problem.num_tokens, problem.product_dtype.itemsize
    width = row_width(problem) if problem.has_weight else problem.num_classes
    is_sig = problem.spec.member.form.properties(problem.spec.member.numbers).is_sigsoftmax is True
    shape = softmax_shape(width, size, is_sig)
    # The 8 bytes of each program and token are to be little beside a row.
    is_long = 64 * shape.per_processor * multiprocessors(problem.device) <= width * size
    most = MANY_TOKENS if is_long and not problem.has_weight else MOST_TOKENS
    exceeds = problem.has_weight and tokens * width * size > problem.chunk_bytes
    reasons = {"the logits of all tokens exceed chunk_bytes": exceeds, **too_many(tokens, most)}
    reason = why_refused(problem, OPTIONS) or first_reason(reasons)
    return FusedLoss(problem, width, shape, is_sig=is_sig) if reason is None else Refusal(reason)


class FusedLoss:
    """A loss of logits that are given, or the product of an input and a weight."""

    def __init__(self, problem: Problem[LossSpec], width: int, shape: LaunchShape, *, is_sig: bool) -> None:
        self.problem = problem
        self.tokens, self.dtype, self.device = problem.num_tokens, problem.dtype, problem.device
        self.scale = Scaling.of(problem)
        present = [t for t in problem.signature.operands[:3] if t is not None]
        self.is_direct = width == problem.num_classes and all(t.dtype == problem.product_dtype for t in present)
        """True if products take and give tensors as they are"""
        self._prepare(width, shape, is_sig=is_sig)
        rows, launches = ("rows", "one") if self.pipelined is None else ("rows software-pipelined", "two launches")
        where = "linear loss, all logits at once" if problem.has_weight else "loss of given logits"
        self.description = f"{where}, {rows}, loss and gradient fused in {launches}"

    def _prepare(self, width: int, shape: LaunchShape, *, is_sig: bool) -> None:
        """Prepare the launches for rows of so many logits."""
        spec, tokens, size = self.problem.spec, self.tokens, self.problem.product_dtype.itemsize
        alpha, _, c = cast("tuple[float, float, float]", spec.member.numbers)
        processors = multiprocessors(self.device)
        programs = shape.per_processor * processors
        block = BLOCK if tokens <= MOST_TOKENS else MANY_BLOCK
        first_numbers = (tokens, width, self.problem.num_classes, alpha, c, spec.ignore_index, spec.z_loss)
        constants = {"IS_SIG": is_sig, "IS_MEAN": spec.reduction == "mean", "HAS_Z_LOSS": spec.z_loss != 0}
        self.whole = Launch(
            fused_loss.loss_kernel,
            min(tokens, programs),
            (*first_numbers, spec.label_smoothing, stagger(tokens, width, size, programs)),
            {**constants, "IS_SMOOTH": spec.label_smoothing != 0, "LANES": shape.lanes, "BLOCK": block},
            num_warps=shape.warps,
            **CHECKED,
        )
        """from the logits of all tokens to the loss and their gradient"""
        self.pipelined: tuple[Launch, Launch] | None = None
        """two others, for given logits of long rows that lie at an aligned address"""
        pipelined = pipelined_shape(width, width, size, is_sig)
        if pipelined is None or self.problem.has_weight or spec.label_smoothing != 0:
            return
        programs = min(tokens, pipelined.per_processor * processors)
        rows = Launch(
            fused_loss.pipelined_kernel,
            programs,
            (tokens, width, alpha, c, spec.ignore_index, spec.z_loss, stagger(tokens, width, size, programs)),
            {**constants, "LANES": pipelined.lanes, "BLOCK": block},
            num_warps=pipelined.warps,
        )
        finish = Launch(
            fused_loss.finish_kernel,
            -(-tokens // FINISHED_ROWS),
            first_numbers,
            {"IS_SIG": is_sig, "HAS_Z_LOSS": spec.z_loss != 0, "ROWS": FINISHED_ROWS, "BLOCK": block},
            **CHECKED,
        )
        self.pipelined = (rows, finish)

    def compute(self, operands: Operands, by_losses: Tensor | None = None) -> LossResults:
        assert by_losses is None, "a fused loss is a mean or a sum"
        shares = torch.zeros(self.tokens + 1, dtype=torch.float32, device=self.device)
        total = torch.empty((), dtype=self.dtype, device=self.device)
        if operands.weight is None:
            by_product: Sequence[Tensor | None] = (self._of_logits(operands, shares, total), None, None)
        elif self.is_direct:
            by_product = self._of_products(operands, shares, total)
        else:
            by_product = self._of_converted_products(operands, shares, total)
        return LossResults(total, shares, None, None, None, (*by_product, None, None))

    def _of_logits(self, operands: Operands, shares: Tensor, total: Tensor) -> Tensor:
        logits, target = operands.input, operands.target
        by_logits = torch.empty_like(logits)
        if self.pipelined is not None and logits.data_ptr() % ALIGNMENT == 0:
            rows, finish = self.pipelined
            statistics = torch.empty(2 * self.tokens + 1, dtype=torch.float32, device=self.device)
            rows(logits, by_logits, target, statistics)
            finish(logits, by_logits, target, shares, statistics, total)
        else:
            self.whole(logits, by_logits, target, shares, total)
        return by_logits

    def _of_products(self, operands: Operands, shares: Tensor, total: Tensor) -> tuple[Tensor | None, ...]:
        input, weight_Vd, bias_V, wanted = operands.input, operands.weight, operands.bias, self.problem.wanted
        rows_Nd = input if input.ndim == 2 else input.view(self.tokens, input.shape[-1])
        weight_dV = weight_Vd.t()
        logits_NV = torch.mm(rows_Nd, weight_dV) if bias_V is None else torch.addmm(bias_V, rows_Nd, weight_dV)
        self.whole(logits_NV, logits_NV, operands.target, shares, total)
        by_bias = None
        if wanted.bias:
            by_bias = torch.empty(bias_V.shape, dtype=torch.float32, device=self.device)
            add_column_sums(by_bias, logits_NV, is_first=True)
            by_bias = by_bias.to(bias_V.dtype)
        return (
            torch.mm(logits_NV, weight_Vd).view(input.shape) if wanted.input else None,
            matmul.sum_over_rows(logits_NV, rows_Nd) if wanted.weight else None,
            by_bias,
        )

    def _of_converted_products(self, operands: Operands, shares: Tensor, total: Tensor) -> tuple[Tensor | None, ...]:
        """Products in another dtype than that of the tensors, or of rows that need to be aligned."""
        provider = TritonLinearLogits(self.problem, operands)
        for _, chunk_NV in provider.chunks():
            logits_NV = provider.whole_rows(chunk_NV)
            self.whole(logits_NV, logits_NV, operands.target, shares, total)
            provider.backpropagate()
        by_hidden, by_weight, by_bias = provider.gradients()
        return None if by_hidden is None else by_hidden.view(operands.input.shape), by_weight, by_bias
