"""Losses that one kernel computes, or two: everything is decided once, and the launches are prepared.

Softmax and sigsoftmax, class indices, a mean or a sum, all logits at once: one kernel makes of the logits the loss and
their gradient, or two if rows are long. For few tokens preparing launches would take the host longer than the kernels
take the GPU. Given logits may be of many.

Shapes: N tokens, V classes, d features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sigsoftmax.backends.chunked import matmul, providers
from sigsoftmax.backends.triton import columns
from sigsoftmax.backends.triton.kernels import fused_kernels, stream
from sigsoftmax.backends.triton.launches import Launch
from sigsoftmax.backends.triton.paths import Scaler, TritonLinearLogits
from sigsoftmax.backends.triton.shapes import FastShape, fast_shape, multiprocessors, stagger
from sigsoftmax.contract import normalizing
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import LossResults, Problem, Refusal
from sigsoftmax.contract.spec import LossSpec

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


OPTIONS = (
    "member",
    "reduction",
    "ignore_index",
    "label_smoothing",
    "z_loss",
    "weight_gradient",
    "chunk_bytes",
    "backend",
)
"""the options of a loss that the kernels compute"""


def why_refused(problem: Problem[LossSpec], options: Sequence[str]) -> str | None:
    """Why no fused path computes a loss, whatever the number of its tokens; None if one may."""
    spec, operands = problem.spec, problem.signature.operands
    others = spec.beside(options)
    others += [name for name in ("class_weight", "token_weights") if getattr(operands, name) is not None]
    if others:
        return f"it does not compute {', '.join(others)}"
    if spec.reduction == "none":
        return "losses are not reduced"
    if not problem.wanted.any:
        return "no gradient is wanted"
    if problem.is_sharded:
        return "classes are spread over processes"
    if problem.signature.checks_values:
        return "values are checked with their messages"
    properties = spec.member.form.properties(spec.member.numbers)
    if not spec.member.is_fixed or not (properties.is_softmax or properties.is_sigsoftmax):
        return f"its kernels are those of softmax and sigsoftmax with fixed numbers, not of {spec.member.name}"
    if (
        normalizing.gradient_dtype(spec.member, spec.member.arguments(()), problem.product_dtype)
        != problem.product_dtype
    ):
        return "the gradient of the logits needs a wider dtype than they have"
    if operands.target.dtype != torch.int64:
        return f"targets are {operands.target.dtype}, not class indices of int64"
    present = [t for t in operands[:5] if t is not None]
    if not all(tensor.is_plain for tensor in present):
        return "a tensor is not contiguous, or of a class of its own"
    return None


def _most_tokens(row_bytes: int, programs: int) -> int:
    """The most tokens of given logits: the 8 bytes of each program and token are to be little beside a row."""
    return MANY_TOKENS if 64 * programs <= row_bytes else MOST_TOKENS


class Kernels(NamedTuple):
    """The prepared launches of a loss."""

    whole: Launch
    """from the logits of all tokens to the loss and their gradient"""
    stream: tuple[Launch, Launch] | None
    """two others, for given logits of long rows that lie at an aligned address"""


def lower(problem: Problem[LossSpec]) -> FusedLoss | Refusal:
    """The loss by a kernel or two, or why not."""
    reason = why_refused(problem, OPTIONS)
    if reason is not None:
        return Refusal(reason)
    tokens, size = problem.num_tokens, problem.product_dtype.itemsize
    width = matmul.rounded_up(problem.num_classes, providers.row_alignment(problem.device) if problem.has_weight else 1)
    if problem.has_weight and tokens * width * size > problem.chunk_bytes:
        return Refusal("the logits of all tokens exceed chunk_bytes")
    spec = problem.spec
    is_sig = spec.member.form.properties(spec.member.numbers).is_sigsoftmax is True
    shape = fast_shape(width, size, is_sig)
    programs = shape.per_processor * multiprocessors(problem.device)
    most = MOST_TOKENS if problem.has_weight else _most_tokens(width * size, programs)
    if not 0 < tokens <= most:
        return Refusal(f"{tokens:,} tokens exceed its {most:,}" if tokens else "no tokens")
    return FusedLoss(problem, width, _kernels(problem, width, shape, is_sig=is_sig))


def _kernels(problem: Problem[LossSpec], width: int, shape: FastShape, *, is_sig: bool) -> Kernels:
    spec, tokens, size = problem.spec, problem.num_tokens, problem.product_dtype.itemsize
    alpha, _, c = cast("tuple[float, float, float]", spec.member.numbers)
    processors = multiprocessors(problem.device)
    programs = shape.per_processor * processors
    block = BLOCK if tokens <= MOST_TOKENS else MANY_BLOCK
    first_numbers = (tokens, width, problem.num_classes, alpha, c, spec.ignore_index, spec.z_loss)
    constants = {"IS_SIG": is_sig, "IS_MEAN": spec.reduction == "mean", "HAS_Z_LOSS": spec.z_loss != 0}
    whole = Launch(
        fused_kernels.loss_kernel,
        min(tokens, programs),
        (*first_numbers, spec.label_smoothing, stagger(tokens, width, size, programs)),
        {**constants, "IS_SMOOTH": spec.label_smoothing != 0, "LANES": shape.lanes, "BLOCK": block},
        num_warps=shape.warps,
        **CHECKED,
    )
    streamed = stream.shape_of(width, width, size, is_sig)
    if streamed is None or problem.has_weight or spec.label_smoothing != 0:
        return Kernels(whole, None)
    programs = min(tokens, streamed.per_processor * processors)
    rows = Launch(
        fused_kernels.stream_kernel,
        programs,
        (tokens, width, alpha, c, spec.ignore_index, spec.z_loss, stagger(tokens, width, size, programs)),
        {**constants, "LANES": streamed.lanes, "BLOCK": block},
        num_warps=streamed.warps,
    )
    finish = Launch(
        fused_kernels.finish_kernel,
        -(-tokens // FINISHED_ROWS),
        first_numbers,
        {"IS_SIG": is_sig, "HAS_Z_LOSS": spec.z_loss != 0, "ROWS": FINISHED_ROWS, "BLOCK": block},
        **CHECKED,
    )
    return Kernels(whole, (rows, finish))


class FusedLoss:
    """A loss of logits that are given, or the product of an input and a weight."""

    def __init__(self, problem: Problem[LossSpec], width: int, kernels: Kernels) -> None:
        self.problem, self.kernels = problem, kernels
        self.tokens, self.dtype, self.device = problem.num_tokens, problem.dtype, problem.device
        self.scale = Scaler(problem)
        operands = problem.signature.operands
        present = [t for t in operands[:3] if t is not None]
        self.is_direct = width == problem.num_classes and all(t.dtype == problem.product_dtype for t in present)
        """whether products take and give tensors as they are"""
        rows = "rows software-pipelined" if kernels.stream is not None else "rows"
        where = "linear loss, all logits at once" if problem.has_weight else "loss of given logits"
        self.description = f"{where}, {rows}, loss and gradient fused in {'two launches' if kernels.stream else 'one'}"

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
        if self.kernels.stream is not None and logits.data_ptr() % stream.ALIGNMENT == 0:
            rows, finish = self.kernels.stream
            measures = torch.empty(2 * self.tokens + 1, dtype=torch.float32, device=self.device)
            rows(logits, by_logits, target, measures)
            finish(logits, by_logits, target, shares, measures, total)
        else:
            self.kernels.whole(logits, by_logits, target, shares, total)
        return by_logits

    def _of_products(self, operands: Operands, shares: Tensor, total: Tensor) -> tuple[Tensor | None, ...]:
        input, weight_Vd, bias_V, wanted = operands.input, operands.weight, operands.bias, self.problem.wanted
        rows_Nd = input if input.ndim == 2 else input.view(self.tokens, input.shape[-1])
        weight_dV = weight_Vd.t()
        logits_NV = torch.mm(rows_Nd, weight_dV) if bias_V is None else torch.addmm(bias_V, rows_Nd, weight_dV)
        self.kernels.whole(logits_NV, logits_NV, operands.target, shares, total)
        by_bias = None
        if wanted.bias:
            by_bias = torch.empty(bias_V.shape, dtype=torch.float32, device=self.device)
            add: Any = columns.add_column_sums if logits_NV.is_cuda else matmul.add_column_sums
            add(by_bias, logits_NV, is_first=True)
            by_bias = by_bias.to(bias_V.dtype)
        return (
            torch.mm(logits_NV, weight_Vd).view(input.shape) if wanted.input else None,
            matmul.sum_over_rows(logits_NV, rows_Nd) if wanted.weight else None,
            by_bias,
        )

    def _of_converted_products(self, operands: Operands, shares: Tensor, total: Tensor) -> tuple[Tensor | None, ...]:
        """Products in another dtype than that of the tensors, or of rows that need to be aligned."""
        input, wanted = operands.input, self.problem.wanted
        source = TritonLinearLogits(
            input.view(self.tokens, 1, input.shape[-1]),
            operands.weight,
            operands.bias,
            self.problem.product_dtype,
            ALL_BYTES,
            needs_hidden=wanted.input,
            needs_weight=wanted.weight,
            needs_bias=wanted.bias,
        )
        for _, chunk_NV in source.chunks():
            logits_NV = source.whole_rows(chunk_NV)
            self.kernels.whole(logits_NV, logits_NV, operands.target, shares, total)
            source.backpropagate()
        by_hidden, by_weight, by_bias = source.gradients()
        return None if by_hidden is None else by_hidden.view(input.shape), by_weight, by_bias
