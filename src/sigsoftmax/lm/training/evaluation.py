"""Static evaluation: fixed windows, carried state, no dropout.

Shapes: R rows, B columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sigsoftmax.lm.config import Precision
from sigsoftmax.lm.data.windows import TextCursor, evaluation_windows
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.model.recurrent import carry_over
from sigsoftmax.lm.parallel.single_process import SingleProcessStrategy
from sigsoftmax.lm.training.capture import RepeatedCalls, new_stream, on_stream
from sigsoftmax.lm.training.precision import arithmetic, lstm_dtype

__all__ = ["WINDOW", "Evaluation", "Evaluator", "evaluate"]

WINDOW = 70
"""steps between two looks at the text; the state is carried, so that it changes nothing but rounding"""


@dataclass(frozen=True)
class Evaluation:
    """The sum of the negative log-likelihoods of a text, in nats."""

    total: float
    scored: int
    """tokens over which the sum runs"""
    rows: int
    batch: int

    @property
    def loss(self) -> float:
        return self.total / self.scored

    @property
    def loss_over_rows(self) -> float:
        """The loss as the published scripts report it: they divide by the rows, one more than are scored."""
        return self.total / (self.rows * self.batch)


class Evaluator:
    """Evaluates a model on one text, as often as asked; on a GPU by replaying a graph, without waiting for it."""

    def __init__(
        self,
        model: LanguageModel,
        text_RB: Tensor,
        *,
        precision: Precision = "float32",
        parallel: SingleProcessStrategy | None = None,
    ) -> None:
        if text_RB.shape[0] < 2:
            raise ValueError(f"a text must have at least 2 rows to be evaluated, got {text_RB.shape[0]}")
        self._model, self._precision = model, precision
        device = model.embedding.device
        self._parallel = SingleProcessStrategy(model) if parallel is None else parallel
        self._shape = text_RB.shape
        own = self._parallel.evaluated_columns(text_RB.shape[1])
        self._cursor, self._counts = TextCursor(text_RB[:, own.columns].to(device), WINDOW), own.counts
        self._states = model.zero_state(self._cursor.text_RB.shape[1], lstm_dtype(precision))
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        self._calls = RepeatedCalls(device, capture=self._parallel.can_capture)

    def launch(self) -> Iterator[None]:
        """Give the work to the device, window by window; :meth:`result` waits for it."""
        for tensor in (self._cursor.row, self._total, *(t for state in self._states for t in state)):
            tensor.zero_()
        for window in evaluation_windows(self._shape[0], WINDOW):
            self._calls(window.length, partial(self._window, window.length))
            yield

    def result(self) -> Evaluation:
        """The evaluation of all columns; each process has read its own."""
        rows, batch = self._shape
        total = self._parallel.sum(self._total if self._counts else torch.zeros_like(self._total))
        self._model.stack.recurrence.raise_if_failed()
        return Evaluation(float(total), (rows - 1) * batch, rows, batch)

    @torch.no_grad()
    def _window(self, length: int) -> None:
        tokens, targets = self._cursor.window(length)
        with arithmetic(self._precision, tokens.device):
            loss, features = self._model(tokens, targets, self._states, dtype=lstm_dtype(self._precision))
        self._total += loss.double() * tokens.numel()
        carry_over(self._states, features.states)
        self._cursor.advance(length)


def evaluate(model: LanguageModel, text_RB: Tensor, *, precision: Precision = "float32") -> Evaluation:
    """The loss of a model on a text laid out in columns."""
    # A graph cannot be captured on the default stream.
    stream = new_stream(model.embedding.device)
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(model.embedding.device))
    with on_stream(stream):
        evaluator = Evaluator(model, text_RB, precision=precision)
        for _ in evaluator.launch():
            pass
        return evaluator.result()
