"""Passes over a text window by window: fixed windows, carried state, no dropout; and the gradient of each window.

What changes from window to window (the row, the carried state, the losses) lives on the device in tensors that stay
where they are, so that a window of a given length can be captured once and replayed. A pass has a stream of its own,
so that several can share one GPU.

Shapes: L tokens, R rows, B columns, W windows, T tokens of a window, P models that go over the text side by side.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from sigsoftmax.contract.spec import check_positive
from sigsoftmax.lm.config import Precision
from sigsoftmax.lm.data.corpus import check_ids
from sigsoftmax.lm.data.windows import TextCursor, evaluation_windows
from sigsoftmax.lm.dynamic.rates import Rates
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.model.recurrent import LayerState, carry_over
from sigsoftmax.lm.training.capture import RepeatedCalls, new_stream, on_stream
from sigsoftmax.lm.training.precision import arithmetic, check_precision

__all__ = [
    "DynamicProgress",
    "PassOptions",
    "Watch",
    "WindowGradients",
    "WindowPass",
    "check_text",
    "in_turn",
    "trainable_copy",
    "window_count",
]

WARM_UP = 3
"""windows that are slower than others: the first allocates and compiles, the second is captured"""
FIRST_REPORT = 10
"""windows after which the time of a run can be told"""
SECONDS_BETWEEN_REPORTS = 1.0
IN_FLIGHT = 64
"""windows given to a GPU before the host waits for it: enough to hide the host, few enough to stop soon"""


class PassOptions(TypedDict, total=False):
    """Options that every pass over a text takes."""

    limit: int | None
    """number of windows after which the pass ends"""
    precision: str
    capture: bool
    """allows CUDA graphs"""


@dataclass(frozen=True, kw_only=True)
class DynamicProgress:
    """The state of one model's run after some windows. The first comes after a few, and tells how long it will take."""

    split: str = "train"
    """``train`` while the statistics are gathered"""
    rates: Rates | None = None
    window: int
    """the last one done"""
    windows: int
    loss: float
    """mean over the tokens so far"""
    broken_at: int | None = None
    """the first window, counted from 1, whose loss is not a finite number"""
    seconds_per_window: float
    waiting: int = 0
    """windows of runs that have not begun"""
    at_once: int = 1
    """runs that share the device"""

    @property
    def seconds_left(self) -> float:
        """Seconds until this run ends."""
        return self.seconds_per_window * (self.windows - self.window)

    @property
    def seconds_left_in_all(self) -> float:
        """Seconds until the last of the runs that wait has ended."""
        return self.seconds_left + self.seconds_per_window * self.waiting / self.at_once


Watch = Callable[[DynamicProgress], None]


def window_count(tokens: int, window: int, limit: int | None = None) -> int:
    """Windows of a text in one column: its first token is not scored, and the last window may be shorter.

    >>> window_count(82_430, 5)
    16486
    """
    if tokens < 2 or window < 1:
        raise ValueError(f"a text needs at least 2 tokens and a window at least 1, got {tokens} and {window}")
    windows = -(-(tokens - 1) // window)
    if limit is None:
        return windows
    check_positive(limit=limit)
    return min(windows, limit)


def check_text(ids_L: Tensor, vocabulary_size: int) -> None:
    """Refuse anything but a text of at least 2 tokens from a vocabulary of this size."""
    if ids_L.ndim != 1:
        raise ValueError(f"a text must be one stream of ids, got the shape {tuple(ids_L.shape)}")
    if ids_L.numel() < 2:
        raise ValueError(f"a text must have at least 2 tokens, since the first is not scored, got {ids_L.numel()}")
    check_ids(ids_L, vocabulary_size, "the ids of a text")


def trainable_copy(model: LanguageModel) -> LanguageModel:
    """A copy with the same tie between its matrices, and gradients for every parameter."""
    duplicate = copy.deepcopy(model)
    duplicate.zero_grad(set_to_none=True)
    return duplicate.requires_grad_()


def in_turn(runs: Iterable[Generator[None, None, None]]) -> Generator[None, None, None]:
    """Advance runs one step each, over and over, until all have ended; an error of one closes the others."""
    running = list(runs)
    try:
        while running:
            for run in tuple(running):
                try:
                    next(run)
                except StopIteration:
                    running.remove(run)
            if running:
                yield
    finally:
        for run in running:
            run.close()


class WindowPass(ABC):
    """Goes over a text with one or several models and keeps the mean loss of each window."""

    _states: Sequence[LayerState]
    """the state before the next window"""

    def __init__(
        self,
        model: LanguageModel,
        text_RB: Tensor,
        *,
        window: int,
        models: int = 1,
        limit: int | None = None,
        precision: str = "float32",
        capture: bool = True,
    ) -> None:
        device = model.embedding.device
        self._rows, self._batch = text_RB.shape
        self._model, self.device, self.window = model, device, window
        self.precision: Precision = check_precision(precision, device)
        self.windows = window_count(self._rows, window, limit)
        self._stream = new_stream(device)
        self._cursor = TextCursor(text_RB.to(device), window)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._losses_WP = torch.zeros(self.windows, models, dtype=torch.float64, device=device)
        self._calls = RepeatedCalls(device, capture=capture)
        self.reports: list[DynamicProgress] = []
        """the latest progress of each model"""
        self.seconds = 0.0
        """time from the beginning to the latest progress"""

    @abstractmethod
    def _compute(self, tokens_TB: Tensor, targets_TB: Tensor) -> Tensor:
        """Compute a window, and return its mean loss by each model, (P,). The call is captured."""

    def scored(self, windows: int | None = None) -> int:
        """Tokens of the first windows, or of all that the pass goes over."""
        return min((self.windows if windows is None else windows) * self.window, self._rows - 1) * self._batch

    def launch(
        self, progress: Watch, *, split: str = "train", rates: Sequence[Rates | None] = (None,)
    ) -> Generator[None, None, None]:
        """Give the work to the device, window by window, and end early once no model has a finite loss.

        ``progress`` is told now and then, and after the last window, of each model whose loss is finite;
        :attr:`reports` holds the latest progress of all. A report waits for the device, nothing else does for long.
        """
        self.reports = []
        self._begin()
        began = reported = warm = time.monotonic()
        in_flight: deque[torch.cuda.Event] = deque()
        try:
            windows = islice(evaluation_windows(self._rows, self.window), self.windows)
            for done, window in enumerate(windows, start=1):
                with self.on_stream():
                    self._calls(window.length, partial(self._window, window.length))
                if self._stream is not None:
                    in_flight.append(self._stream.record_event())
                    if len(in_flight) > IN_FLIGHT:
                        in_flight.popleft().synchronize()
                if done == WARM_UP:
                    self.synchronize()
                    warm = time.monotonic()
                due = done > WARM_UP and time.monotonic() - reported >= SECONDS_BETWEEN_REPORTS
                if due or done in (FIRST_REPORT, self.windows):
                    with self.on_stream():
                        self._model.stack.recurrence.raise_if_failed()
                        losses_WP = self._losses_WP[:done].cpu()
                    reported = time.monotonic()
                    self.seconds = reported - began
                    seconds_per_window = (reported - warm) / (done - WARM_UP if done > WARM_UP else done)
                    self.reports = [
                        self._report(losses_W, split=split, rates=own, seconds_per_window=seconds_per_window)
                        for losses_W, own in zip(losses_WP.unbind(1), rates, strict=True)
                    ]
                    finite = [at for at in self.reports if at.broken_at is None]
                    if not finite:
                        return
                    for at in finite:
                        progress(at)
                yield
        except BaseException:
            # What the device still works on must not be freed.
            self.synchronize()
            raise

    def _report(self, losses_W: Tensor, **facts: Any) -> DynamicProgress:
        done = len(losses_W)
        lengths_W = torch.full_like(losses_W, self.window)
        lengths_W[-1] = self.scored(done) // self._batch - self.window * (done - 1)
        broken = (~losses_W.isfinite()).nonzero()
        return DynamicProgress(
            window=done,
            windows=self.windows,
            loss=float(losses_W @ lengths_W / lengths_W.sum()),
            broken_at=int(broken[0]) + 1 if len(broken) else None,
            **facts,
        )

    def on_stream(self) -> AbstractContextManager[Any]:
        return on_stream(self._stream)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _begin(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.on_stream():
            states = (tensor for state in self._states for tensor in state)
            for tensor in (self._cursor.row, self._count, self._losses_WP, *states):
                tensor.zero_()

    def _window(self, length: int) -> None:
        loss_P = self._compute(*self._cursor.window(length))
        with torch.no_grad():
            self._losses_WP.index_copy_(0, self._count, loss_P.detach().double().reshape(1, -1))
            self._count += 1
            self._cursor.advance(length)


class WindowGradients(WindowPass):
    """Gives the gradients of each window's mean loss to ``use``, one for each parameter.

    ``use`` runs inside the captured call: it may change the parameters in place.
    """

    def __init__(
        self,
        model: LanguageModel,
        text_RB: Tensor,
        use: Callable[[list[Tensor]], None],
        *,
        window: int,
        **options: Unpack[PassOptions],
    ) -> None:
        super().__init__(model, text_RB, window=window, **options)
        self._use = use
        # A float64 model stays one: its passes are what others are compared with.
        self._dtype = torch.bfloat16 if self.precision == "bf16" else model.embedding.dtype
        self._states = model.zero_state(self._batch, self._dtype)

    @contextmanager
    def _plain_lstm(self) -> Iterator[None]:
        """Switch oneDNN off, which packs the weights anew for each call: for a few tokens that is most of the work."""
        library: Any = torch.backends.mkldnn
        before = library.enabled
        try:
            library.enabled = before and (self.device.type != "cpu" or self._batch > 1)
            yield
        finally:
            library.enabled = before

    def _compute(self, tokens_TB: Tensor, targets_TB: Tensor) -> Tensor:
        with torch.enable_grad(), arithmetic(self.precision, self.device), self._plain_lstm():
            loss, features = self._model(tokens_TB, targets_TB, self._states, dtype=self._dtype)
            gradients = torch.autograd.grad(loss, list(self._model.parameters()))
        with torch.no_grad():
            self._use(list(gradients))
        carry_over(self._states, features.states)
        return loss
