"""The place in a text from which the next window is read.

Shapes: R rows, B columns, T rows of a window.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["TextCursor"]


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
