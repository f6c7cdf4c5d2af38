"""Columns and windows of a text: their lengths, and the place from which the next window is read.

Shapes: L tokens of a split, R rows (positions of a column), B columns, T rows of a window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

__all__ = ["TextCursor", "Window", "WindowLengths", "batchify", "evaluation_windows"]


def batchify(ids_L: Tensor, batch: int) -> Tensor:
    """Columns of text in order, (R, B): R = L // B, and the last L - R B tokens are left out."""
    if batch < 1:
        raise ValueError(f"the batch must have at least one column, got {batch}")
    rows = ids_L.numel() // batch
    if rows < 2:
        raise ValueError(
            f"{batch:,} columns need at least {2 * batch:,} words, one to read and one to predict in each, and there "
            f"are {ids_L.numel():,}; take a smaller batch or more text"
        )
    return ids_L[: rows * batch].reshape(batch, rows).t().contiguous()


class Window(NamedTuple):
    """Rows ``start`` to ``start + length - 1`` are read; the targets are one row later."""

    start: int
    length: int
    drawn: int
    """the length before the end of the text cut it; the learning rate scales with this one"""


class WindowLengths:
    """The random lengths of training windows, drawn as the published scripts draw them.

    A length is about ``bptt``, or in one of twenty about half of it, with a standard deviation of 5, no less than 5
    and no more than ``longest``. All epochs draw from one stream, which :meth:`state` can hold.
    """

    def __init__(self, seed: int, bptt: int = 70, longest: int | None = None) -> None:
        if not 0 <= seed < 2**32:
            raise ValueError(f"the seed of window lengths must be between 0 and 2**32 - 1, got {seed}")
        self.bptt = bptt
        self.longest = longest
        # numpy's legacy generator, kept unchanged for good: the published lengths come from it.
        self._generator = np.random.RandomState(seed)

    def draw(self) -> int:
        base = self.bptt if self._generator.random_sample() < 0.95 else self.bptt / 2.0
        length = max(5, int(self._generator.normal(base, 5)))
        return length if self.longest is None else min(length, self.longest)

    def epoch(self, rows: int, start: int = 0) -> Iterator[Window]:
        """The windows of a text of so many rows, drawn one by one; ``start`` goes on in the middle."""
        if rows < 3:
            raise ValueError(f"training needs at least 3 rows of text, got {rows}; take a smaller batch or more text")
        while start < rows - 2:
            drawn = self.draw()
            yield Window(start, min(drawn, rows - 1 - start), drawn)
            start += drawn

    def state(self) -> dict[str, Any]:
        """All that the next draws depend on, as JSON can hold it."""
        _, key, position, has_gauss, gauss = cast(tuple[Any, ...], self._generator.get_state(legacy=True))
        return {"key": key.tolist(), "position": int(position), "has_gauss": int(has_gauss), "gauss": float(gauss)}

    def restore(self, state: Mapping[str, Any]) -> None:
        key = np.array(state["key"], dtype=np.uint32)
        self._generator.set_state(("MT19937", key, state["position"], state["has_gauss"], state["gauss"]))


def evaluation_windows(rows: int, length: int = 70) -> Iterator[Window]:
    """Windows of one length that cover every target; the last may be shorter."""
    for start in range(0, rows - 1, length):
        yield Window(start, min(length, rows - 1 - start), length)


class TextCursor:
    """A text in columns, and the row that is read next.

    The row lives on the device of the text in a tensor that stays where it is, so that a call that reads a window of a
    given length and moves on can be captured once and replayed.
    """

    def __init__(self, text_RB: Tensor, longest: int) -> None:
        self.text_RB = text_RB
        self.row = torch.zeros((), dtype=torch.int64, device=text_RB.device)
        self._steps = torch.arange(longest + 1, device=text_RB.device)

    def window(self, length: int) -> tuple[Tensor, Tensor]:
        """The tokens of the next ``length`` rows and their targets, the tokens one row below; both (T, B)."""
        rows = self.text_RB.index_select(0, self.row + self._steps[: length + 1])
        return rows[:-1], rows[1:]

    def advance(self, rows: int) -> None:
        self.row += rows
