"""Dynamic evaluation: a model that goes on learning from the text it is tested on, in the RMS form.

Statistics of the gradient are gathered once on the training text, in wide windows with fixed weights:

    MS = sqrt(mean over windows of g^2)    elementwise
    gbar = mean over parameter tensors of the mean of each tensor's MS
    D = MS / gbar

Every parameter tensor has the same weight in gbar, however small it is: the tied matrix is one tensor, each bias
vector is one, and so is what an output function learns (b of shifted sigsoftmax, even as a single number).

The text is then read at batch 1. The loss of a window is recorded, and only then every tensor moves:

    theta <- theta + min(decay D, 1) (theta0 - theta) - learning_rate g / (MS + epsilon)

There are no masks, no penalties, no clipping of gradients and no weight decay. The model that is given is never
changed: a copy of it adapts, whatever ends the run.

Shapes: L words of a text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from sigsoftmax.lm.config import DynamicEvaluationConfig
from sigsoftmax.lm.data import batchify
from sigsoftmax.lm.dynamic_rates import Rates
from sigsoftmax.lm.model import LanguageModel
from sigsoftmax.lm.training import Diverged
from sigsoftmax.lm.window_gradients import Look, WindowGradients, check_text, trainable_copy
from sigsoftmax.records.training import DynamicEvaluationRecord, RunIdentity, perplexity_of

__all__ = [
    "DynamicEvaluation",
    "DynamicEvaluator",
    "DynamicProgress",
    "GradientStatistics",
    "adapt",
]


@dataclass(frozen=True, kw_only=True)
class DynamicProgress:
    """Where a run stands, for whoever watches. The first comes after a few windows, and tells how long it will take."""

    split: str
    """``train`` while the statistics are gathered"""
    rates: Rates | None
    window: int
    """the last one done"""
    windows: int
    loss: float
    """so far"""
    seconds_per_window: float
    waiting: int = 0
    """windows of runs that have not begun"""
    at_once: int = 1
    """runs that share the device"""

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.loss)

    @property
    def seconds_left(self) -> float:
        """of this run"""
        return self.seconds_per_window * (self.windows - self.window)

    @property
    def seconds_left_in_all(self) -> float:
        """until the last of the runs that wait has ended"""
        return self.seconds_left + self.seconds_per_window * self.waiting / self.at_once


Watch = Callable[[DynamicProgress], None]
NOTHING_DONE = Look(0, math.nan, None, 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientStatistics:
    """MS of every parameter, from the training text."""

    rms: dict[str, Tensor]
    """MS by the parameter's name"""
    mean: float
    """gbar"""
    windows: int
    window: int

    @property
    def tensors(self) -> int:
        return len(self.rms)

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        train_ids_L: Tensor,
        config: DynamicEvaluationConfig,
        *,
        precision: str = "float32",
        progress: Watch | None = None,
        capture: bool = True,
    ) -> Self:
        """One pass over the training text in ``config.statistics_batch`` columns."""
        check_text(train_ids_L, model.words)
        fixed = trainable_copy(model)
        squares = [torch.zeros_like(parameter) for parameter in fixed.parameters()]

        def look(at: Look) -> None:
            if at.broken_at is not None:
                raise Diverged(
                    f"the loss is not finite at window {at.broken_at:,} of the training text, whose gradients are "
                    "asked for; the model is broken: take an earlier checkpoint"
                )
            if progress is not None:
                progress(
                    DynamicProgress(
                        split="train",
                        rates=None,
                        window=at.windows,
                        windows=gradients.windows,
                        loss=at.loss,
                        seconds_per_window=at.seconds_per_window,
                    )
                )

        gradients = WindowGradients(
            fixed,
            batchify(train_ids_L, config.statistics_batch),
            lambda of_window: torch._foreach_addcmul_(squares, of_window, of_window),
            window=config.window,
            precision=precision,
            capture=capture,
        )
        for _ in gradients.launch(look):
            pass
        with gradients.on_stream():
            torch._foreach_div_(squares, float(gradients.windows))
            torch._foreach_sqrt_(squares)
            mean = math.fsum(float(tensor.mean(dtype=torch.float64)) for tensor in squares) / len(squares)
        if not (math.isfinite(mean) and mean > 0.0):
            raise ValueError(
                f"the mean of the gradients' root mean squares must be a positive number, got {mean}; the model does "
                "not learn from this text, or is broken"
            )
        names = [name for name, _ in fixed.named_parameters()]
        return cls(
            rms=dict(zip(names, squares, strict=True)), mean=mean, windows=gradients.windows, window=config.window
        )

    def to(self, device: torch.device) -> Self:
        return replace(self, rms={name: tensor.to(device) for name, tensor in self.rms.items()})

    def check_fits(self, model: LanguageModel) -> None:
        theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        ours = {name: tuple(tensor.shape) for name, tensor in self.rms.items()}
        for name in theirs | ours:
            if theirs.get(name) != ours.get(name):
                raise ValueError(
                    f"the statistics are of another model: {name!r} has the shape {ours.get(name, 'of nothing')} in "
                    f"them and {theirs.get(name, 'of nothing')} in the model; gather them with this model"
                )

    @torch.no_grad()
    def pull(self, decay: float, out: Sequence[Tensor], *, clipped_for: float = 0.0) -> None:
        """Write min(decay D, 1) of each parameter to ``out``.

        ``clipped_for`` is a larger decay that D was clipped for before, and stays clipped for.
        """
        most = 1.0 if decay >= clipped_for else decay / clipped_for
        for tensor, share in zip(self.rms.values(), out, strict=True):
            torch.mul(tensor, decay / self.mean, out=share).clamp_(max=most)

    @torch.no_grad()
    def steps(self, rates: Rates, out: Sequence[Tensor]) -> None:
        """Write learning_rate / (MS + epsilon) of each parameter to ``out``."""
        for tensor, step in zip(self.rms.values(), out, strict=True):
            torch.add(tensor, rates.epsilon, out=step).reciprocal_().mul_(rates.learning_rate)


@dataclass(frozen=True, kw_only=True)
class DynamicEvaluation:
    """One run on one text."""

    split: str
    rates: Rates
    window: int
    loss: float
    """mean over the tokens scored, in nats; infinite if the run diverged"""
    tokens: int
    """scored: all but the first of the text, or those before a limit, or before the run diverged"""
    complete: bool
    """whether the whole text was scored"""
    chosen: bool = False
    """whether these rates won on validation, or are the only ones"""
    seconds: float

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.loss)

    def record(self, run: RunIdentity) -> DynamicEvaluationRecord:
        return DynamicEvaluationRecord(
            run=run,
            split=self.split,
            learning_rate=self.rates.learning_rate,
            decay=self.rates.decay,
            epsilon=self.rates.epsilon,
            window=self.window,
            loss=self.loss,
            tokens=self.tokens,
            complete=self.complete,
            chosen=self.chosen,
            seconds=self.seconds,
        )

    @classmethod
    def of_record(cls, record: DynamicEvaluationRecord) -> Self:
        return cls(
            split=record.split,
            rates=Rates(learning_rate=record.learning_rate, decay=record.decay, epsilon=record.epsilon),
            window=record.window,
            loss=record.loss,
            tokens=record.tokens,
            complete=record.complete,
            chosen=record.chosen,
            seconds=record.seconds,
        )


class DynamicEvaluator:
    """Evaluates one text at any rates, as often as asked; on a GPU by replaying a graph.

    It holds a copy of the weights that adapts; the start and the statistics are shared with other evaluators. Memory
    is about five times the weights.
    """

    def __init__(
        self,
        model: LanguageModel,
        statistics: GradientStatistics,
        ids_L: Tensor,
        *,
        split: str = "test",
        limit: int | None = None,
        precision: str = "float32",
        progress: Watch | None = None,
        capture: bool = True,
    ) -> None:
        check_text(ids_L, model.words)
        statistics.check_fits(model)
        self._start = [parameter.detach() for parameter in model.parameters()]
        in_order = {name: statistics.rms[name] for name, _ in model.named_parameters()}
        self._statistics = replace(statistics, rms=in_order).to(model.embedding.device)
        self._split, self._progress = split, progress
        adapted = trainable_copy(model)
        self._weights = [parameter.detach() for parameter in adapted.parameters()]
        self._pull = [torch.empty_like(weight) for weight in self._weights]
        self._steps = [torch.empty_like(weight) for weight in self._weights]
        self._pass = WindowGradients(
            adapted,
            ids_L.unsqueeze(1),
            self._update,
            window=statistics.window,
            limit=limit,
            precision=precision,
            capture=capture,
        )
        self._complete = self._pass.scored() == ids_L.numel() - 1
        self._rates: Rates | None = None
        self._began = self._seconds = 0.0
        self._last_look = NOTHING_DONE

    @property
    def windows(self) -> int:
        return self._pass.windows

    @property
    def scored(self) -> int:
        """Tokens of a run."""
        return self._pass.scored()

    def launch(self, rates: Rates, *, clipped_for: float = 0.0) -> Generator[None, None, None]:
        """One run from the start; gives its work to the device window by window. :meth:`result` waits for it.

        Raises :class:`Diverged` if a loss is not finite. ``clipped_for``: see :meth:`GradientStatistics.pull`.
        """
        self._began, self._rates, self._last_look = time.monotonic(), rates, NOTHING_DONE
        # On the stream of the caller, for which the pass waits.
        self._pass.synchronize()
        torch._foreach_copy_(self._weights, self._start)
        self._statistics.pull(rates.decay, self._pull, clipped_for=clipped_for)
        self._statistics.steps(rates, self._steps)
        yield from self._pass.launch(self._look)

    def result(self) -> DynamicEvaluation:
        """Of the last run, which has ended. If it diverged, the loss is infinite."""
        at = self._last_look
        if self._rates is None or (at.broken_at is None and at.windows < self.windows):
            raise ValueError("there is no result before a run has ended; go through launch() first")
        return DynamicEvaluation(
            split=self._split,
            rates=self._rates,
            window=self._pass.window,
            loss=at.loss if at.broken_at is None else math.inf,
            tokens=self._pass.scored(None if at.broken_at is None else at.broken_at - 1),
            complete=self._complete and at.broken_at is None,
            seconds=self._seconds,
        )

    def _update(self, gradients: list[Tensor]) -> None:
        torch._foreach_lerp_(self._weights, self._start, self._pull)
        torch._foreach_addcmul_(self._weights, self._steps, gradients, value=-1.0)

    def _look(self, at: Look) -> None:
        self._last_look, self._seconds = at, time.monotonic() - self._began
        if at.broken_at is not None:
            raise Diverged(
                f"the loss is not finite at window {at.broken_at:,} of {self.windows:,} of the {self._split} text with "
                f"{self._rates}; the model is as it was. Try a lower learning_rate"
            )
        if self._progress is not None:
            self._progress(
                DynamicProgress(
                    split=self._split,
                    rates=self._rates,
                    window=at.windows,
                    windows=self.windows,
                    loss=at.loss,
                    seconds_per_window=at.seconds_per_window,
                )
            )


def adapt(
    model: LanguageModel,
    statistics: GradientStatistics,
    ids_L: Tensor,
    rates: Rates,
    *,
    split: str = "test",
    limit: int | None = None,
    precision: str = "float32",
    progress: Watch | None = None,
    capture: bool = True,
) -> DynamicEvaluation:
    """The loss of a model on a text that it adapts to; ``limit`` ends it after so many windows."""
    evaluator = DynamicEvaluator(
        model,
        statistics,
        ids_L,
        split=split,
        limit=limit,
        precision=precision,
        progress=progress,
        capture=capture,
    )
    for _ in evaluator.launch(rates):
        pass
    return replace(evaluator.result(), chosen=True)
