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
from sigsoftmax.lm.data.corpus import batchify
from sigsoftmax.lm.dynamic.adapting_models import AdaptingModels, can_adapt
from sigsoftmax.lm.dynamic.rates import Rates
from sigsoftmax.lm.dynamic.window_gradients import Look, WindowGradients, WindowPass, check_text, trainable_copy
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.training.precision import check_precision
from sigsoftmax.lm.training.trainer import Diverged
from sigsoftmax.records.schemas.training import DynamicEvaluationRecord, RunIdentity
from sigsoftmax.records.statistics import perplexity

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
        return perplexity(self.loss)

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

        def look(looks: list[Look]) -> None:
            [at] = looks
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
        most = _most(decay, clipped_for)
        for tensor, share in zip(self.rms.values(), out, strict=True):
            torch.mul(tensor, decay / self.mean, out=share).clamp_(max=most)

    @torch.no_grad()
    def steps(self, rates: Rates, out: Sequence[Tensor]) -> None:
        """Write learning_rate / (MS + epsilon) of each parameter to ``out``."""
        for tensor, step in zip(self.rms.values(), out, strict=True):
            torch.add(tensor, rates.epsilon, out=step).reciprocal_().mul_(rates.learning_rate)

    def numbers(self, rates: Sequence[Rates], *, clipped_for: float = 0.0) -> Tensor:
        """(P, 4): what pull and steps are computed from, for models that do it in every step (see ``adapt_``)."""
        return torch.tensor(
            [(one.learning_rate, one.decay / self.mean, _most(one.decay, clipped_for), one.epsilon) for one in rates],
            dtype=torch.float64,
        )


def _most(decay: float, clipped_for: float) -> float:
    """The bound of min(decay D, 1), if D was clipped for another decay before."""
    return 1.0 if decay >= clipped_for else decay / clipped_for


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
    precision: str = "float32"
    """of the windows"""
    seconds: float

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

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
            precision=self.precision,
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
            precision=record.precision,
            seconds=record.seconds,
        )


class DynamicEvaluator:
    """Evaluates one text at any rates, as often as asked; on a GPU by replaying a graph.

    On a GPU ``at_once`` copies of the model adapt side by side, which is faster than one after the other; elsewhere,
    and with wide windows, it must be 1. Memory is the weights once for each copy and, on a GPU, little more; elsewhere
    about five times the weights. The start and the statistics are shared with other evaluators.
    """

    def __init__(
        self,
        model: LanguageModel,
        statistics: GradientStatistics,
        ids_L: Tensor,
        *,
        split: str = "test",
        at_once: int = 1,
        limit: int | None = None,
        precision: str = "float32",
        progress: Watch | None = None,
        capture: bool = True,
    ) -> None:
        check_text(ids_L, model.words)
        statistics.check_fits(model)
        in_order = {name: statistics.rms[name] for name, _ in model.named_parameters()}
        statistics = replace(statistics, rms=in_order).to(model.embedding.device)
        self._split, self._progress, self._at_once = split, progress, at_once
        self._precision: str = check_precision(precision, model.embedding.device)
        self._pass: WindowPass
        if can_adapt(model, statistics.window):
            # In float32 whatever is asked for, since nothing else could save time.
            self._precision = "float32"
            adapting = AdaptingModels(
                model, in_order, ids_L, models=at_once, window=statistics.window, limit=limit, capture=capture
            )
            self._pass = adapting

            def restart(rates: Sequence[Rates], clipped_for: float) -> None:
                adapting.restart(statistics.numbers(rates, clipped_for=clipped_for))

        else:
            if at_once != 1:
                raise ValueError(
                    f"at_once must be 1 on {model.embedding.device} with windows of {statistics.window}, got {at_once}"
                )
            one = _OneModel(model, statistics, ids_L, limit=limit, precision=precision, capture=capture)
            self._pass, restart = one.windows, one.restart
        self._restart = restart
        self._complete = self._pass.scored() == ids_L.numel() - 1
        self._rates: tuple[Rates, ...] = ()
        self._began = self._seconds = 0.0
        self._last_looks = [NOTHING_DONE]

    @property
    def windows(self) -> int:
        return self._pass.windows

    @property
    def scored(self) -> int:
        """Tokens of a run."""
        return self._pass.scored()

    def launch(self, *rates: Rates, clipped_for: float = 0.0) -> Generator[None, None, None]:
        """One run from the start at each of the rates; gives its work to the device window by window.

        :meth:`results` waits for it. Raises :class:`Diverged` once every run has a loss that is not finite.
        ``clipped_for``: see :meth:`GradientStatistics.pull`.
        """
        if len(rates) != self._at_once:
            raise ValueError(f"give as many rates as runs are made at once, {self._at_once}, got {len(rates)}")
        self._began, self._rates, self._last_looks = time.monotonic(), rates, [NOTHING_DONE] * len(rates)
        # On the stream of the caller, for which the pass waits.
        self._pass.synchronize()
        self._restart(rates, clipped_for)
        yield from self._pass.launch(self._look)

    def results(self) -> list[DynamicEvaluation]:
        """The last runs, which have ended, in the order of their rates. If one diverged, its loss is infinite."""
        if not self._rates or any(at.broken_at is None and at.windows < self.windows for at in self._last_looks):
            raise ValueError("there is no result before a run has ended; go through launch() first")
        return [
            DynamicEvaluation(
                split=self._split,
                rates=rates,
                window=self._pass.window,
                loss=at.loss if at.broken_at is None else math.inf,
                tokens=self._pass.scored(None if at.broken_at is None else at.broken_at - 1),
                complete=self._complete and at.broken_at is None,
                precision=self._precision,
                seconds=self._seconds,
            )
            for rates, at in zip(self._rates, self._last_looks, strict=True)
        ]

    def _look(self, looks: list[Look]) -> None:
        self._last_looks, self._seconds = looks, time.monotonic() - self._began
        if all(at.broken_at is not None for at in looks):
            where = " and ".join(
                f"window {at.broken_at:,} of {self.windows:,} of the {self._split} text with {rates}"
                for at, rates in zip(looks, self._rates, strict=True)
            )
            raise Diverged(f"the loss is not finite at {where}; the model is as it was. Try a lower learning_rate")
        for at, rates in zip(looks, self._rates, strict=True):
            if self._progress is not None and at.broken_at is None:
                self._progress(
                    DynamicProgress(
                        split=self._split,
                        rates=rates,
                        window=at.windows,
                        windows=self.windows,
                        loss=at.loss,
                        seconds_per_window=at.seconds_per_window,
                    )
                )


class _OneModel:
    """A copy of the weights that adapts, with autograd and plain torch."""

    def __init__(
        self,
        model: LanguageModel,
        statistics: GradientStatistics,
        ids_L: Tensor,
        *,
        limit: int | None,
        precision: str,
        capture: bool,
    ) -> None:
        adapted = trainable_copy(model)
        self._statistics = statistics
        self._start = [parameter.detach() for parameter in model.parameters()]
        self._weights = [parameter.detach() for parameter in adapted.parameters()]
        self._pull = [torch.empty_like(weight) for weight in self._weights]
        self._steps = [torch.empty_like(weight) for weight in self._weights]
        self.windows = WindowGradients(
            adapted,
            ids_L.unsqueeze(1),
            self._update,
            window=statistics.window,
            limit=limit,
            precision=precision,
            capture=capture,
        )

    def restart(self, rates: Sequence[Rates], clipped_for: float) -> None:
        [own] = rates
        torch._foreach_copy_(self._weights, self._start)
        self._statistics.pull(own.decay, self._pull, clipped_for=clipped_for)
        self._statistics.steps(own, self._steps)

    def _update(self, gradients: list[Tensor]) -> None:
        torch._foreach_lerp_(self._weights, self._start, self._pull)
        torch._foreach_addcmul_(self._weights, self._steps, gradients, value=-1.0)


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
    [result] = evaluator.results()
    return replace(result, chosen=True)
