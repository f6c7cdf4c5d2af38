"""Where rows of logits come from, and where their gradient goes.

Shapes: N tokens, K components, V classes, d features; R = n K rows of the n tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sigsoftmax.backends import reference

ALIGNMENT = 64
"""elements; 128 bytes of bfloat16"""


class Source:
    """Where rows of logits come from and where their gradient goes. ``num_tokens`` times ``components`` rows."""

    num_tokens: int
    components: int
    num_classes: int
    logits_like: Tensor

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        """The first token of each chunk, and its logits (R, V), which may be overwritten by their gradient."""
        raise NotImplementedError

    def gradient_rows(self, first_row: int, logits_RV: Tensor) -> Tensor:
        """The memory for the gradient of these rows of the current chunk."""
        raise NotImplementedError

    def backpropagate(self) -> None:
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
        self.logits_like = logits_NV
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
      over all tokens. It costs a fourth product and a float32 buffer for the gradient of ``hidden``.

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
    ) -> None:
        self.num_tokens, self.components, self.features = hidden_NKd.shape
        self.num_classes = weight_Vd.shape[0]
        self.hidden_NKd = hidden_NKd
        self.weight_Vd = weight_Vd.to(product_dtype)
        self.bias_V = None if bias_V is None else bias_V.to(product_dtype)
        self.sum_dtype = reference.compute_dtype(product_dtype)
        row_bytes = (budget_classes or self.num_classes) * self.weight_Vd.element_size()
        tokens_in_budget = max(1, chunk_bytes // (row_bytes * self.components))
        # Chunks of equal size: a last one of a few rows would be a slow product.
        num_chunks = max(1, -(-self.num_tokens // tokens_in_budget))
        self.chunk_tokens = max(1, -(-self.num_tokens // num_chunks))
        rows = min(self.chunk_tokens, self.num_tokens) * self.components
        is_low = weight_Vd.dtype != torch.promote_types(weight_Vd.dtype, self.sum_dtype)
        self.walks_classes = weight_gradient == "exact" and is_low and needs_weight and num_chunks > 1
        slab_size = rows * self.num_classes
        # A walk over the classes takes all tokens of one class at least.
        least = self.num_tokens * self.components if self.walks_classes else 0
        self.slab = self.weight_Vd.new_empty(max(slab_size, least))
        self.logits_like = self.slab[:slab_size].view(rows, self.num_classes)
        self.sums_in_place = not is_low or weight_gradient == "fast" or num_chunks == 1
        self.parameters = (weight_Vd, bias_V)
        self.needs_hidden, self.needs_weight, self.needs_bias = needs_hidden, needs_weight, needs_bias
        self.hidden_gradient: Tensor | None = None
        self.weight_gradient: Tensor | None = None
        self.bias_gradient: Tensor | None = None

    def _begin_gradients(self) -> None:
        """Memory for the gradients, zero where there is nothing to sum."""
        weight_Vd, bias_V = self.parameters
        make = torch.zeros if self.num_tokens == 0 else torch.empty
        device = weight_Vd.device
        if self.needs_hidden:
            self.hidden_gradient = torch.empty(self.hidden_NKd.shape, dtype=self.hidden_NKd.dtype, device=device)
        if self.needs_weight:
            dtype = weight_Vd.dtype if self.sums_in_place or self.walks_classes else self.sum_dtype
            self.weight_gradient = make(weight_Vd.shape, dtype=dtype, device=device)
        if self.needs_bias and bias_V is not None:
            dtype = torch.promote_types(bias_V.dtype, self.sum_dtype)
            self.bias_gradient = make(bias_V.shape, dtype=dtype, device=device)

    def _product(self, rows_Rd: Tensor, first: int, last: int) -> Tensor:
        """Logits of a range of classes, in the slab."""
        classes = last - first
        logits = self.slab[: rows_Rd.shape[0] * classes].view(-1, classes)
        weight_dV = self.weight_Vd[first:last].t()
        if self.bias_V is None:
            return torch.mm(rows_Rd, weight_dV, out=logits)
        return torch.addmm(self.bias_V[first:last], rows_Rd, weight_dV, out=logits)

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        if not self.walks_classes:
            self._begin_gradients()
        for first in range(0, self.num_tokens, self.chunk_tokens):
            self.first, self.last = first, min(first + self.chunk_tokens, self.num_tokens)
            self.chunk_Rd = self.hidden_NKd[first : self.last].flatten(0, 1).to(self.weight_Vd.dtype)
            self.chunk_RV = self._product(self.chunk_Rd, 0, self.num_classes)
            yield first, self.chunk_RV

    def gradient_rows(self, first_row: int, logits_RV: Tensor) -> Tensor:
        return logits_RV

    def backpropagate(self) -> None:
        is_first = self.first == 0
        if self.hidden_gradient is not None:
            rows = self.hidden_gradient[self.first : self.last].view(-1, self.features)
            add_product(rows, self.chunk_RV, self.weight_Vd, is_first=True)
        if self.weight_gradient is not None:
            add_product(self.weight_gradient, self.chunk_RV.t(), self.chunk_Rd, is_first=is_first)
        if self.bias_gradient is not None:
            column_sums = self.chunk_RV.sum(0, dtype=self.bias_gradient.dtype)
            self.bias_gradient = column_sums if is_first else self.bias_gradient.add_(column_sums)

    def class_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """The first class of each range and the logits of all tokens there, to be overwritten by their gradient."""
        self._begin_gradients()
        hidden_Rd = self.hidden_NKd.flatten(0, 1).to(self.weight_Vd.dtype)
        by_hidden = torch.empty(hidden_Rd.shape, dtype=self.sum_dtype, device=hidden_Rd.device)
        classes_in_slab = max(1, self.slab.numel() // hidden_Rd.shape[0])
        # Rows of a range start at aligned addresses: products and kernels are far slower where they do not.
        step = classes_in_slab // ALIGNMENT * ALIGNMENT or classes_in_slab
        for first in range(0, self.num_classes, step):
            last = min(first + step, self.num_classes)
            logits_RV = self._product(hidden_Rd, first, last)
            yield first, logits_RV
            if self.needs_hidden:
                add_product(by_hidden, logits_RV, self.weight_Vd[first:last], is_first=first == 0)
            if self.weight_gradient is not None:
                add_product(self.weight_gradient[first:last], logits_RV.t(), hidden_Rd, is_first=True)
            if self.bias_gradient is not None:
                self.bias_gradient[first:last] = logits_RV.sum(0, dtype=self.bias_gradient.dtype)
        if self.hidden_gradient is not None:
            self.hidden_gradient.view(-1, self.features).copy_(by_hidden)


def add_product(total: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    """``total += a @ b``, or ``total = a @ b`` for the first one; rounded once, to total's dtype, if that can be."""
    if total.dtype == a.dtype:
        if is_first:
            torch.mm(a, b, out=total)
        else:
            total.addmm_(a, b)
    elif a.device.type == "cuda" and total.dtype == torch.float32:
        if is_first:
            torch.mm(a, b, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    elif is_first:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)
