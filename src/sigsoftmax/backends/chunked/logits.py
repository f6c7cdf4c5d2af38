"""Providers of logits: they compute rows of logits a chunk at a time, and take their gradient.

A chunk of logits is the logits of as many tokens as ``chunk_bytes`` holds. All chunks of a product use the same memory,
which their gradient overwrites.

Shapes: N tokens, K components, V classes, d width; R = n K rows of the n tokens of a chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sigsoftmax.backends.chunked import chunk_plan, matmul
from sigsoftmax.backends.chunked.matmul import rounded_up
from sigsoftmax.contract import normalizing
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import AnyProblem
from sigsoftmax.contract.rows import MASK, compute_dtype

FEWEST_CHUNKS_OF_A_COPY = 3
FEWEST_ROWS_PER_FEATURE = 6
"""rows of a chunk per feature that make a copy of the weight small beside it"""


class Block(NamedTuple):
    """Rows of a chunk that are computed together; all rows of a token are in one block."""

    tokens: slice
    rows: slice
    """within the chunk"""
    logits_RV: Tensor


class LogitsProvider(ABC):
    """Provides ``num_tokens`` times ``components`` rows of logits, and takes their gradient."""

    num_tokens: int
    components: int
    num_classes: int
    logits_like: Tensor

    @abstractmethod
    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        """The first token of each chunk, and its logits (R, V), which may be overwritten by their gradient."""

    @abstractmethod
    def gradient_rows(self, rows: slice, logits_RV: Tensor) -> Tensor:
        """The memory for the gradient of these rows of the current chunk."""

    @abstractmethod
    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of input, weight and bias, in their dtypes; None where it was not asked for."""

    def whole_rows(self, logits_RV: Tensor) -> Tensor:
        """The same rows with masked classes up to an aligned length, if there is room: kernels load them faster."""
        return logits_RV

    def backpropagate(self) -> None:  # noqa: B027 - logits that are given lead nowhere
        """Called when the gradient of the current chunk is complete."""

    def blocks(self, max_rows: int | None) -> Iterator[list[Block]]:
        """The blocks of each chunk, of at most so many rows if a token has no more."""
        for first, chunk_RV in self.chunks():
            tokens = chunk_RV.shape[0] // self.components
            step = max(1, tokens if max_rows is None else max_rows // self.components)
            spans = [(begin, min(begin + step, tokens)) for begin in range(0, tokens, step)]
            rows = [slice(begin * self.components, end * self.components) for begin, end in spans]
            yield [
                Block(slice(first + begin, first + end), part, chunk_RV[part])
                for (begin, end), part in zip(spans, rows, strict=True)
            ]


class GivenLogits(LogitsProvider):
    """Logits that the caller holds; they are read, never overwritten."""

    components = 1

    def __init__(self, logits_NV: Tensor, gradient_NV: Tensor | None) -> None:
        # Kernels read memory, and a view may stand for the negative of what is there.
        self.logits_like = logits_NV.resolve_neg()
        self.gradient_NV = gradient_NV
        self.num_tokens, self.num_classes = logits_NV.shape

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, self.logits_like

    def gradient_rows(self, rows: slice, logits_RV: Tensor) -> Tensor:
        assert self.gradient_NV is not None
        return self.gradient_NV[rows]

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.gradient_NV, None, None


class LinearLogits(LogitsProvider):
    """Logits = hidden W^T + bias, a chunk of tokens at a time.

    A weight of float32 (float64) gets its gradient summed over chunks in place. A weight of lower precision has the
    choice, since adding chunk after chunk in its own dtype rounds each time:

    * ``fast``: do that; the error grows with the number of chunks;
    * ``buffered``: sum in a float32 buffer of the weight's size;
    * ``exact``: compute the statistics of all tokens first, then the gradient a block of the vocabulary at a time: that
      of each block is one product over all tokens. It costs a part of a fourth product and a float32 buffer for the
      gradient of ``hidden`` (``vocabulary_blocks``).

    The gradient of logits overwrites them, unless it needs a wider dtype than they have: then it has memory of its own,
    its products run in that dtype, and ``exact`` means ``buffered``.
    """

    add_column_sums = staticmethod(matmul.add_column_sums)

    def __init__(self, problem: AnyProblem, operands: Operands, *, wants_gradient: bool = True) -> None:
        weight_Vd, bias_V, dtype = operands.weight, operands.bias, problem.product_dtype
        self.hidden_NKd = problem.hidden(operands)
        self.num_tokens, self.components, self.features = self.hidden_NKd.shape
        self.num_classes = weight_Vd.shape[0]
        self.parameters = (weight_Vd, bias_V)
        self.weight_Vd = weight_Vd.to(dtype)
        self.bias_V = None if bias_V is None else bias_V.to(dtype)
        self.sum_dtype = compute_dtype(dtype)
        self.alignment = chunk_plan.row_alignment(self.weight_Vd.device)
        self.gradient_dtype = dtype
        if wants_gradient:
            arguments = problem.spec.member.arguments(operands.arguments)
            self.gradient_dtype = normalizing.gradient_dtype(problem.spec, arguments, dtype)
        self.is_wide = self.gradient_dtype != dtype
        wanted = problem.wanted
        self.needs_hidden, self.needs_weight, self.needs_bias = (
            wants_gradient and needs for needs in (wanted.input, wanted.weight, wanted.bias)
        )
        num_chunks, self.chunk_tokens, _, weight_gradient = chunk_plan.plan_chunks(problem)
        self.sums_in_place = weight_gradient in ("in place", "fast")
        self.tiles_vocabulary = weight_gradient == "exact" and self.needs_weight and not self.is_wide
        rows = min(self.chunk_tokens, self.num_tokens) * self.components
        size = rows * rounded_up(self.num_classes, self.alignment)
        if self.tiles_vocabulary:
            # A block of the vocabulary has all tokens of a few classes at least.
            size = max(size, self.num_tokens * self.components * self.alignment)
        self.memory = self.weight_Vd.new_empty(size)
        self.chunk_RV = self.logits_like = self.matrix(self.memory, rows, self.num_classes)
        # As the second factor of the gradient of ``hidden``.
        self.copies_weight = (
            self.needs_hidden
            and num_chunks >= FEWEST_CHUNKS_OF_A_COPY
            and rows >= FEWEST_ROWS_PER_FEATURE * self.features
            and matmul.uses_tf32(self.weight_Vd)
        )
        self.second_factor_Vd = self.weight_Vd
        self.padded_classes = (0, 0)
        self.padded_parameters = (self.weight_Vd, self.weight_Vd)
        self.gradient_memory: Tensor | None = None
        self.hidden_gradient: Tensor | None = None
        self.weight_gradient: Tensor | None = None
        self.bias_gradient: Tensor | None = None

    def begin_gradients(self) -> None:
        """Memory for the gradients, zero where there is nothing to sum."""
        weight_Vd, bias_V = self.parameters
        make = torch.zeros if self.num_tokens == 0 else torch.empty
        device = weight_Vd.device
        if self.is_wide:
            self.gradient_memory = torch.empty(self.memory.shape, dtype=self.gradient_dtype, device=device)
            self.second_factor_Vd = self.weight_Vd.to(self.gradient_dtype)
        if self.copies_weight:
            self.second_factor_Vd = matmul.by_columns(self.weight_Vd)
        if self.needs_hidden:
            self.hidden_gradient = torch.empty(self.hidden_NKd.shape, dtype=self.hidden_NKd.dtype, device=device)
        if self.needs_weight:
            dtype = weight_Vd.dtype if self.sums_in_place or self.tiles_vocabulary else self.sum_dtype
            self.weight_gradient = make(weight_Vd.shape, dtype=dtype, device=device)
        if self.needs_bias and bias_V is not None:
            dtype = torch.promote_types(bias_V.dtype, self.sum_dtype)
            self.bias_gradient = make(bias_V.shape, dtype=dtype, device=device)

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        weight_Vd, bias_V = self.parameters
        by_weight, by_bias = self.weight_gradient, self.bias_gradient
        return (
            self.hidden_gradient,
            None if by_weight is None else by_weight.to(weight_Vd.dtype),
            None if by_bias is None else by_bias.to(bias_V.dtype),
        )

    def matrix(self, memory: Tensor, rows: int, classes: int) -> Tensor:
        """The beginning of some memory as aligned rows."""
        return memory.as_strided((rows, classes), (rounded_up(classes, self.alignment), 1))

    def whole_rows(self, logits_RV: Tensor) -> Tensor:
        # A single row is contiguous, whatever comes after it.
        if logits_RV.stride(0) == logits_RV.shape[1]:
            return logits_RV
        wide_RV = self._with_room(logits_RV)
        wide_RV[:, logits_RV.shape[1] :] = MASK
        return wide_RV

    @staticmethod
    def _with_room(logits_RV: Tensor) -> Tensor:
        """Rows of :meth:`matrix` with what lies between them."""
        stride = logits_RV.stride(0)
        return logits_RV.as_strided((logits_RV.shape[0], stride), (stride, 1))

    def pieces(self, by_class: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Columns of a matrix and rows of others: an even number of classes, and before them the few that remain.

        Products of an odd number are slow.
        """
        classes = by_class.shape[1]
        even = classes // self.alignment * self.alignment
        if even in (0, classes):
            yield by_class, *others
            return
        for piece in (slice(even, classes), slice(0, even)):
            yield by_class[:, piece], *(other[piece] for other in others)

    def logits_of(self, rows_Rd: Tensor, first: int, last: int, out_RV: Tensor) -> Tensor:
        """Logits of a range of classes."""
        weight_Vd = self.weight_Vd[first:last]
        if self.bias_V is None:
            for piece_RV, weight in self.pieces(out_RV, weight_Vd):
                torch.mm(rows_Rd, weight.t(), out=piece_RV)
        elif out_RV.is_contiguous():
            torch.addmm(self.bias_V[first:last], rows_Rd, weight_Vd.t(), out=out_RV)
        else:
            # Sums of a product and a bias are rounded once where rows follow each other, and else twice.
            if self.padded_classes != (first, last):
                self.padded_classes, missing = (first, last), -(last - first) % self.alignment
                padded_V = F.pad(self.bias_V[first:last], (0, missing), value=MASK)
                self.padded_parameters = (F.pad(weight_Vd, (0, 0, 0, missing)), padded_V)
            padded_Vd, padded_V = self.padded_parameters
            torch.addmm(padded_V, rows_Rd, padded_Vd.t(), out=self._with_room(out_RV))
        return out_RV

    def add_to_hidden(self, by_rows_Rd: Tensor, by_logits_RV: Tensor, first: int, *, is_first: bool) -> None:
        """Add gradients of logits from a first class on, times their part of the weight."""
        weight_Vd = self.second_factor_Vd[first : first + by_logits_RV.shape[1]]
        for piece_RV, weight in self.pieces(by_logits_RV, weight_Vd):
            matmul.add_product(by_rows_Rd, piece_RV, weight, is_first=is_first)
            is_first = False

    def add_to_parameters(self, classes: slice, by_logits_RV: Tensor, rows_Rd: Tensor, *, is_first: bool) -> None:
        """Add the gradients of weight and bias of a range of classes."""
        if self.weight_gradient is not None:
            is_first_part = is_first
            for part_RV, part_Rd in matmul.summands(by_logits_RV, rows_Rd):
                for piece_RV, by_weight in self.pieces(part_RV, self.weight_gradient[classes]):
                    matmul.add_product(by_weight, piece_RV.t(), part_Rd, is_first=is_first_part)
                is_first_part = False
        if self.bias_gradient is not None:
            for piece_RV, by_bias in self.pieces(by_logits_RV, self.bias_gradient[classes]):
                self.add_column_sums(by_bias, piece_RV, is_first=is_first)

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        if not self.tiles_vocabulary:
            self.begin_gradients()
        for first in range(0, self.num_tokens, self.chunk_tokens):
            self.chunk = slice(first, min(first + self.chunk_tokens, self.num_tokens))
            self.chunk_Rd = self.hidden_NKd[self.chunk].flatten(0, 1).to(self.weight_Vd.dtype)
            self.chunk_RV = self.matrix(self.memory, self.chunk_Rd.shape[0], self.num_classes)
            yield first, self.logits_of(self.chunk_Rd, 0, self.num_classes, self.chunk_RV)

    def gradient_rows(self, rows: slice, logits_RV: Tensor) -> Tensor:
        if self.gradient_memory is None:
            return logits_RV
        stride = rounded_up(self.num_classes, self.alignment)
        return self.gradient_memory[rows.start * stride :].as_strided(logits_RV.shape, (stride, 1))

    def backpropagate(self) -> None:
        by_logits_RV = self.gradient_rows(slice(0, None), self.chunk_RV)
        if self.hidden_gradient is not None:
            self.add_to_hidden(self.hidden_gradient[self.chunk].flatten(0, 1), by_logits_RV, 0, is_first=True)
        rows_Rd = self.chunk_Rd.to(self.gradient_dtype)
        self.add_to_parameters(slice(None), by_logits_RV, rows_Rd, is_first=self.chunk.start == 0)
