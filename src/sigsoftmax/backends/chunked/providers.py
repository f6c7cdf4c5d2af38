"""Where rows of logits come from, and where their gradient goes.

Shapes: N tokens, K components, V classes, d features; R = n K rows of the n tokens of a chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sigsoftmax.backends.chunked import matmul
from sigsoftmax.backends.chunked.matmul import rounded_up
from sigsoftmax.contract.problem import Problem
from sigsoftmax.contract.rows import MASK, compute_dtype
from sigsoftmax.contract.spec import LogProbsSpec, LossSpec

FEWEST_SLABS_OF_A_COPY = 3
FEWEST_ROWS_A_FEATURE = 6
"""of a slab, so that a copy of the weight is small beside it"""


def row_alignment(device: torch.device) -> int:
    """Rows of a slab start at multiples of so many elements.

    On a GPU products are several times slower where rows are not aligned, or where their length is odd.
    """
    return 16 if device.type == "cuda" else 1


def careful_sum(device: torch.device, classes: int, rows: int, features: int, chunk_bytes: int) -> str:
    """How the gradient of a weight of low precision is summed if nobody says how.

    A float32 buffer is faster than a walk over the classes, whose float32 buffer is for the gradient of the rows. A CPU
    cannot walk.
    """
    buffer_bytes, walk_bytes = 4 * classes * features, 4 * rows * features
    is_small = buffer_bytes <= max(walk_bytes, chunk_bytes // 2)
    return "buffered" if device.type == "cpu" or is_small else "exact"


class Cut(NamedTuple):
    """How the tokens of a product are cut into chunks."""

    chunks: int
    tokens: int
    row_elements: int
    """of a row of logits, with what aligns the next one"""


def cut_tokens(
    tokens: int, components: int, classes: int, dtype: torch.dtype, chunk_bytes: int, device: torch.device
) -> Cut:
    """Chunks of equal size, since a last one of a few rows would be a slow product."""
    row_elements = rounded_up(classes, row_alignment(device))
    tokens_in_budget = max(1, chunk_bytes // (row_elements * dtype.itemsize * components))
    count = max(1, -(-tokens // tokens_in_budget))
    return Cut(count, max(1, -(-tokens // count)), row_elements)


class Plan(NamedTuple):
    """What :class:`LinearLogits` will do for a call, known without its tensors."""

    cut: Cut
    weight_gradient: str
    """how the gradient of the weight is summed: ``in place``, or as the option says"""


def plan_of(problem: Problem[LossSpec] | Problem[LogProbsSpec]) -> Plan:
    """The chunks of a call, and how the gradient of its weight is summed."""
    weight, shard = problem.signature.operands.weight, problem.signature.operands.shard
    # All ranks of a group must decide alike.
    classes = problem.num_classes if shard is None else max(1, *shard[0])
    cut = cut_tokens(
        problem.num_tokens, problem.components, classes, problem.product_dtype, problem.chunk_bytes, problem.device
    )
    mode: str = problem.spec.weight_gradient if isinstance(problem.spec, LossSpec) else "buffered"
    if cut.chunks == 1 or weight.dtype == torch.promote_types(weight.dtype, problem.compute_dtype):
        mode = "in place"
    elif mode == "auto":
        rows = problem.num_tokens * problem.components
        mode = careful_sum(problem.device, classes, rows, weight.shape[1], problem.chunk_bytes)
    return Plan(cut, mode)


class Source(ABC):
    """Where rows of logits come from and where their gradient goes. ``num_tokens`` times ``components`` rows."""

    num_tokens: int
    components: int
    num_classes: int
    logits_like: Tensor

    @abstractmethod
    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        """The first token of each chunk, and its logits (R, V), which may be overwritten by their gradient."""

    @abstractmethod
    def gradient_rows(self, first_row: int, logits_RV: Tensor) -> Tensor:
        """The memory for the gradient of these rows of the current chunk."""

    def whole_rows(self, logits_RV: Tensor) -> Tensor:
        """The same rows with masked classes up to an aligned length, if there is room: kernels load them faster."""
        return logits_RV

    def backpropagate(self) -> None:  # noqa: B027 - logits that are given lead nowhere
        """Called when the gradient of the current chunk is complete."""

    def blocks(self, max_rows: int | None, *, backpropagate: bool) -> Iterator[tuple[slice, int, Tensor]]:
        """(tokens, first row within the chunk, logits) of blocks that keep all rows of a token together."""
        for first_token, chunk_RV in self.chunks():
            tokens = chunk_RV.shape[0] // self.components
            step = max(1, tokens if max_rows is None else max_rows // self.components)
            for begin in range(0, tokens, step):
                end = min(begin + step, tokens)
                span = slice(first_token + begin, first_token + end)
                yield span, begin * self.components, chunk_RV[begin * self.components : end * self.components]
            if backpropagate:
                self.backpropagate()


class GivenLogits(Source):
    """Logits that the caller holds; they are read, never overwritten."""

    def __init__(self, logits_NV: Tensor, gradient_NV: Tensor | None) -> None:
        # Kernels read memory, and a view may stand for the negative of what is there.
        self.logits_like = logits_NV.resolve_neg()
        self.gradient_NV = gradient_NV
        self.num_tokens, self.num_classes = logits_NV.shape
        self.components = 1

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, self.logits_like

    def gradient_rows(self, first_row: int, logits_RV: Tensor) -> Tensor:
        assert self.gradient_NV is not None
        return self.gradient_NV[first_row : first_row + logits_RV.shape[0]]


class LinearLogits(Source):
    """Logits = hidden W^T + bias, a slab of tokens at a time.

    The products run in ``product_dtype``. A weight of float32 (float64) gets its gradient summed over slabs in place.
    A weight of lower precision has the choice, since adding slab after slab in its own dtype rounds each time:

    * ``fast``: do that; the error grows with the number of slabs;
    * ``buffered``: sum in a float32 buffer of the weight's size;
    * ``exact``: measure all tokens first, then walk the classes: the gradient of each range of classes is one product
      over all tokens. It costs a part of a fourth product and a float32 buffer for the gradient of ``hidden``
      (``class_walk``).

    The gradient of logits overwrites them, unless ``gradient_dtype`` says that it needs a wider dtype than they have:
    then it has memory of its own, its products run in that dtype, and ``exact`` means ``buffered``.

    ``budget_classes`` is the number of classes that slabs are cut for, if another than the weight's.
    """

    def __init__(
        self,
        hidden_NKd: Tensor,
        weight_Vd: Tensor,
        bias_V: Tensor | None,
        product_dtype: torch.dtype,
        chunk_bytes: int,
        *,
        needs_hidden: bool,
        needs_weight: bool,
        needs_bias: bool,
        weight_gradient: str = "buffered",
        budget_classes: int | None = None,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        self.num_tokens, self.components, self.features = hidden_NKd.shape
        self.num_classes = weight_Vd.shape[0]
        self.hidden_NKd = hidden_NKd
        self.weight_Vd = weight_Vd.to(product_dtype)
        self.bias_V = None if bias_V is None else bias_V.to(product_dtype)
        self.sum_dtype = compute_dtype(product_dtype)
        self.alignment = row_alignment(self.weight_Vd.device)
        # All ranks of a group must decide alike.
        classes = budget_classes or self.num_classes
        num_chunks, self.chunk_tokens, _ = cut_tokens(
            self.num_tokens, self.components, classes, product_dtype, chunk_bytes, self.weight_Vd.device
        )
        if weight_gradient == "auto":
            all_rows = self.num_tokens * self.components
            weight_gradient = careful_sum(hidden_NKd.device, classes, all_rows, self.features, chunk_bytes)
        rows = min(self.chunk_tokens, self.num_tokens) * self.components
        is_low = weight_Vd.dtype != torch.promote_types(weight_Vd.dtype, self.sum_dtype)
        self.gradient_dtype = gradient_dtype or product_dtype
        self.is_wide = self.gradient_dtype != product_dtype
        self.walks_classes = (
            weight_gradient == "exact" and is_low and needs_weight and num_chunks > 1 and not self.is_wide
        )
        slab_size = rows * rounded_up(self.num_classes, self.alignment)
        if self.walks_classes:
            # A walk over the classes takes all tokens of a few classes at least.
            slab_size = max(slab_size, self.num_tokens * self.components * self.alignment)
        self.slab = self.weight_Vd.new_empty(slab_size)
        self.chunk_RV = self.logits_like = self.matrix(self.slab, rows, self.num_classes)
        self.sums_in_place = not is_low or weight_gradient == "fast" or num_chunks == 1
        self.parameters = (weight_Vd, bias_V)
        self.needs_hidden, self.needs_weight, self.needs_bias = needs_hidden, needs_weight, needs_bias
        # As the second factor of the gradient of ``hidden``.
        self.copies_weight = (
            needs_hidden
            and num_chunks >= FEWEST_SLABS_OF_A_COPY
            and rows >= FEWEST_ROWS_A_FEATURE * self.features
            and matmul.uses_tf32(self.weight_Vd)
        )
        self.second_factor_Vd = self.weight_Vd
        self.padded_part = (0, 0)
        self.padded_parameters = (self.weight_Vd, self.weight_Vd)
        self.gradient_slab: Tensor | None = None
        self.hidden_gradient: Tensor | None = None
        self.weight_gradient: Tensor | None = None
        self.bias_gradient: Tensor | None = None

    def begin_gradients(self) -> None:
        """Memory for the gradients, zero where there is nothing to sum."""
        weight_Vd, bias_V = self.parameters
        make = torch.zeros if self.num_tokens == 0 else torch.empty
        device = weight_Vd.device
        if self.is_wide:
            self.gradient_slab = torch.empty(self.slab.shape, dtype=self.gradient_dtype, device=device)
            self.second_factor_Vd = self.weight_Vd.to(self.gradient_dtype)
        if self.copies_weight:
            self.second_factor_Vd = matmul.by_columns(self.weight_Vd)
        if self.needs_hidden:
            self.hidden_gradient = torch.empty(self.hidden_NKd.shape, dtype=self.hidden_NKd.dtype, device=device)
        if self.needs_weight:
            dtype = weight_Vd.dtype if self.sums_in_place or self.walks_classes else self.sum_dtype
            self.weight_gradient = make(weight_Vd.shape, dtype=dtype, device=device)
        if self.needs_bias and bias_V is not None:
            dtype = torch.promote_types(bias_V.dtype, self.sum_dtype)
            self.bias_gradient = make(bias_V.shape, dtype=dtype, device=device)

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of hidden vectors, weight and bias, in their dtypes; None where it was not asked for."""
        weight_Vd, bias_V = self.parameters
        by_weight, by_bias = self.weight_gradient, self.bias_gradient
        return (
            self.hidden_gradient,
            None if by_weight is None else by_weight.to(weight_Vd.dtype),
            None if by_bias is None or bias_V is None else by_bias.to(bias_V.dtype),
        )

    def matrix(self, memory: Tensor, rows: int, classes: int) -> Tensor:
        """The beginning of some memory as aligned rows."""
        stride = rounded_up(classes, self.alignment)
        return memory.as_strided((rows, classes), (stride, 1))

    def whole_rows(self, logits_RV: Tensor) -> Tensor:
        # A single row is contiguous, whatever comes after it.
        if logits_RV.stride(0) == logits_RV.shape[1]:
            return logits_RV
        wide_RV = self._with_room(logits_RV)
        wide_RV[:, logits_RV.shape[1] :] = MASK
        return wide_RV

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

    def weight_of(self, first: int, last: int) -> Tensor:
        return self._classes_of(self.weight_Vd, first, last)

    def _classes_of(self, weight_Vd: Tensor, first: int, last: int) -> Tensor:
        return weight_Vd if last - first == self.num_classes else weight_Vd[first:last]

    def logits_of(self, rows_Rd: Tensor, first: int, last: int, out_RV: Tensor) -> Tensor:
        """Logits of a range of classes."""
        if self.bias_V is None:
            for piece_RV, weight_Vd in self.pieces(out_RV, self.weight_of(first, last)):
                torch.mm(rows_Rd, weight_Vd.t(), out=piece_RV)
        elif out_RV.is_contiguous():
            torch.addmm(self.bias_V[first:last], rows_Rd, self.weight_of(first, last).t(), out=out_RV)
        else:
            # Sums of a product and a bias are rounded once where rows follow each other, and else twice.
            weight_Vd, bias_V = self._padded(first, last)
            torch.addmm(bias_V, rows_Rd, weight_Vd.t(), out=self._with_room(out_RV))
        return out_RV

    def _padded(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Weight and bias of a range of classes and of masked ones up to the alignment."""
        if self.padded_part != (first, last):
            assert self.bias_V is not None
            missing = -(last - first) % self.alignment
            self.padded_part = (first, last)
            self.padded_parameters = (
                F.pad(self.weight_Vd[first:last], (0, 0, 0, missing)),
                F.pad(self.bias_V[first:last], (0, missing), value=MASK),
            )
        return self.padded_parameters

    @staticmethod
    def _with_room(logits_RV: Tensor) -> Tensor:
        """Rows of :meth:`matrix` with what lies between them."""
        stride = logits_RV.stride(0)
        return logits_RV.as_strided((logits_RV.shape[0], stride), (stride, 1))

    def add_to_hidden(self, by_rows_Rd: Tensor, by_logits_RV: Tensor, first: int, *, is_first: bool) -> None:
        """Gradients of logits from a first class on, times their part of the weight."""
        weight_Vd = self._classes_of(self.second_factor_Vd, first, first + by_logits_RV.shape[1])
        for piece_RV, weight in self.pieces(by_logits_RV, weight_Vd):
            matmul.add_product(by_rows_Rd, piece_RV, weight, is_first=is_first)
            is_first = False

    def add_to_weight(self, by_weight_Vd: Tensor, by_logits_RV: Tensor, rows_Rd: Tensor, *, is_first: bool) -> None:
        for part_RV, part_Rd in matmul.summands(by_logits_RV, rows_Rd):
            for piece_RV, by_weight in self.pieces(part_RV, by_weight_Vd):
                matmul.add_product(by_weight, piece_RV.t(), part_Rd, is_first=is_first)
            is_first = False

    def add_to_bias(self, by_bias_V: Tensor, by_logits_RV: Tensor, *, is_first: bool) -> None:
        for piece_RV, by_bias in self.pieces(by_logits_RV, by_bias_V):
            matmul.add_column_sums(by_bias, piece_RV, is_first=is_first)

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        if not self.walks_classes:
            self.begin_gradients()
        is_as_it_is = self.hidden_NKd.dtype == self.weight_Vd.dtype
        for first in range(0, self.num_tokens, self.chunk_tokens):
            self.first, self.last = first, min(first + self.chunk_tokens, self.num_tokens)
            chunk_Rd = self.rows_of(self.hidden_NKd)
            self.chunk_Rd = chunk_Rd if is_as_it_is else chunk_Rd.to(self.weight_Vd.dtype)
            if self.chunk_Rd.shape[0] != self.chunk_RV.shape[0]:
                self.chunk_RV = self.matrix(self.slab, self.chunk_Rd.shape[0], self.num_classes)
            self.logits_of(self.chunk_Rd, 0, self.num_classes, self.chunk_RV)
            yield first, self.chunk_RV

    def rows_of(self, all_NKd: Tensor) -> Tensor:
        """Those of the current chunk."""
        is_all = self.last - self.first == self.num_tokens
        return (all_NKd if is_all else all_NKd[self.first : self.last]).flatten(0, 1)

    def gradient_rows(self, first_row: int, logits_RV: Tensor) -> Tensor:
        if self.gradient_slab is None:
            return logits_RV
        stride = rounded_up(self.num_classes, self.alignment)
        return self.gradient_slab[first_row * stride :].as_strided(logits_RV.shape, (stride, 1))

    def backpropagate(self) -> None:
        is_first = self.first == 0
        by_logits_RV, chunk_Rd = self.gradient_rows(0, self.chunk_RV), self.chunk_Rd
        if self.hidden_gradient is not None:
            self.add_to_hidden(self.rows_of(self.hidden_gradient), by_logits_RV, 0, is_first=True)
        if self.weight_gradient is not None:
            self.add_to_weight(self.weight_gradient, by_logits_RV, chunk_Rd.to(self.gradient_dtype), is_first=is_first)
        if self.bias_gradient is not None:
            self.add_to_bias(self.bias_gradient, by_logits_RV, is_first=is_first)
