"""The vocabulary-tiled backward pass: the logits of all tokens, a block of the vocabulary at a time.

So the gradient of each block of the weight is one product over all tokens, rounded once. Logits that are gone by the
time of their gradient are computed again, which would be a fourth product if it were all of them. But the gradient of
the weight has memory of its own, which is not written before the backward pass: as many logits are kept there as fit,
and those of the last block stay in the memory of a chunk.

The blocks in the order of their classes: those kept in the gradient's memory, those computed twice, the one kept in
the memory of a chunk. In the backward pass the last comes first, since the memory of a chunk is needed for the
gradients of the others. Class i of the gradient begins at i d, and the logits of class i are kept at i max(d, R): the
gradient of a block overwrites logits of that block and of earlier ones only.

Shapes: V classes, d width, R rows of all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.logits import LinearLogits
from sigsoftmax.backends.chunked.matmul import rounded_up

STEP = 64
"""Blocks begin at multiples of so many classes (128 bytes of bfloat16)."""


def even_blocks(first: int, last: int, most: int, unit: int) -> list[tuple[int, int]]:
    """The classes from first to last in as few blocks of at most ``most`` as there can be, of nearly equal size."""
    count = -(-(last - first) // most)
    step = rounded_up(-(-(last - first) // max(1, count)), unit)
    return [(begin, min(begin + step, last)) for begin in range(first, last, max(1, step))]


class VocabularyBlocks:
    """The blocks of a product: :meth:`forward` where their logits are to be kept, then :meth:`backward`."""

    def __init__(self, provider: LinearLogits) -> None:
        provider.begin_gradients()
        self.provider = provider
        self.rows_Rd = provider.hidden_NKd.flatten(0, 1).to(provider.weight_Vd.dtype)
        rows = self.rows_Rd.shape[0]
        classes, features = provider.weight_Vd.shape
        most = provider.memory.numel() // rows
        unit = STEP if most >= STEP else provider.alignment
        most = most // unit * unit
        last = rounded_up(max(0, classes - most), unit)
        spacing = max(features, rows)
        memory = provider.weight_gradient
        is_usable = memory is not None and memory.element_size() == provider.memory.element_size()
        num_kept = last * features // spacing // unit * unit if is_usable else 0
        kept = even_blocks(0, num_kept, most, unit)
        self.blocks = [*kept, *even_blocks(num_kept, last, most, unit), (last, classes)]
        self.kept_RV: list[Tensor] = []
        if memory is not None and kept:
            flat = memory.view(-1).view(provider.memory.dtype)
            self.kept_RV = [
                flat[begin * spacing :][: rows * (end - begin)].view(rows, end - begin) for begin, end in kept
            ]
        self.is_forward_done = False

    def forward(self) -> Iterator[tuple[int, Tensor]]:
        """The first class of each block, and its logits; as many as can be are kept for :meth:`backward`."""
        for i, (first, _) in enumerate(self.blocks):
            yield first, self._computed(i, self.kept_RV[i] if i < len(self.kept_RV) else self._memory(i))
        self.is_forward_done = True

    def backward(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The first class of each block, its logits, and memory for their gradient, which may be that of the logits."""
        provider, last = self.provider, len(self.blocks) - 1
        by_rows_Rd = None
        if provider.needs_hidden:
            by_rows_Rd = torch.empty(self.rows_Rd.shape, dtype=provider.sum_dtype, device=self.rows_Rd.device)
        for i in (last, *range(last)):
            out_RV = self._memory(i)
            if self.is_forward_done and i < len(self.kept_RV):
                logits_RV = self.kept_RV[i]
            else:
                logits_RV = out_RV if self.is_forward_done and i == last else self._computed(i, out_RV)
            yield self.blocks[i][0], logits_RV, out_RV
            if by_rows_Rd is not None:
                provider.add_to_hidden(by_rows_Rd, out_RV, self.blocks[i][0], is_first=i == last)
            provider.add_to_parameters(slice(*self.blocks[i]), out_RV, self.rows_Rd, is_first=True)
        if provider.hidden_gradient is not None and by_rows_Rd is not None:
            provider.hidden_gradient.view(-1, provider.features).copy_(by_rows_Rd)

    def _memory(self, i: int) -> Tensor:
        first, last = self.blocks[i]
        return self.provider.matrix(self.provider.memory, self.rows_Rd.shape[0], last - first)

    def _computed(self, i: int, memory_RV: Tensor) -> Tensor:
        return self.provider.logits_of(self.rows_Rd, *self.blocks[i], memory_RV)
