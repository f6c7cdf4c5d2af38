"""Dynamic evaluation (Krause et al. 2018): a model goes on learning from the text it is tested on, in the RMS form.

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

Shapes: L tokens of a text, P runs at once.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self, Unpack

import torch
from torch import Tensor

from sigsoftmax.contract.spec import check_positive
from sigsoftmax.lm.config import DynamicEvaluationConfig
from sigsoftmax.lm.data.windows import batchify
from sigsoftmax.lm.dynamic.adapting_models import AdaptingModels, OneAdaptingModel, kernels_serve
from sigsoftmax.lm.dynamic.rates import Rates
from sigsoftmax.lm.dynamic.windows import (
    DynamicProgress,
    PassOptions,
    Watch,
    WindowGradients,
    check_text,
    in_turn,
    trainable_copy,
)
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.training.progress import Diverged
from sigsoftmax.records.schemas.training import DynamicEvaluationRecord, RunIdentity
from sigsoftmax.records.statistics import perplexity

__all__ = [
    "DynamicEvaluation",
    "DynamicEvaluator",
    "DynamicProgress",
    "GradientStatistics",
    "adapt",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientStatistics:
    """MS of every parameter, from the training text."""

    rms: dict[str, Tensor]
    """MS by the parameter's name"""
    mean: float
    """gbar"""
    windows: int
    window: int

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        train_ids_L: Tensor,
        config: DynamicEvaluationConfig,
        *,
        precision: str = "float32",
        progress: Watch = lambda _: None,
        capture: bool = True,
    ) -> Self:
        """Gather the statistics in one pass over the training text in ``config.statistics_batch`` columns."""
        check_text(train_ids_L, model.vocabulary_size)
        fixed = trainable_copy(model)
        rms = {name: torch.zeros_like(parameter) for name, parameter in fixed.named_parameters()}
        squares = list(rms.values())
        gradients = WindowGradients(
            fixed,
            batchify(train_ids_L, config.statistics_batch),
            lambda of_window: torch._foreach_addcmul_(squares, of_window, of_window),
            window=config.window,
            precision=precision,
            capture=capture,
        )
        for _ in gradients.launch(progress):
            pass
        [last] = gradients.reports
        if last.broken_at is not None:
            raise Diverged(
                f"the loss is not finite at window {last.broken_at:,} of the training text, whose gradients are asked "
                "for; the model is broken: take an earlier checkpoint"
            )
        with gradients.on_stream():
            torch._foreach_div_(squares, float(gradients.windows))
            torch._foreach_sqrt_(squares)
            mean = math.fsum(float(tensor.mean(dtype=torch.float64)) for tensor in squares) / len(squares)
        if not (math.isfinite(mean) and mean > 0.0):
            raise ValueError(
                f"the mean of the gradients' root mean squares must be a positive number, got {mean}; the model does "
                "not learn from this text, or is broken"
            )
        return cls(rms=rms, mean=mean, windows=gradients.windows, window=config.window)

    def to(self, device: torch.device) -> Self:
        return replace(self, rms={name: tensor.to(device) for name, tensor in self.rms.items()})

    def check_fits(self, model: LanguageModel) -> None:
        """Refuse a model whose parameters have other names or shapes."""
        theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        ours = {name: tuple(tensor.shape) for name, tensor in self.rms.items()}
        for name in theirs | ours:
            if theirs.get(name) != ours.get(name):
                raise ValueError(
                    f"the statistics are of another model: {name!r} has the shape {ours.get(name, 'of nothing')} in "
                    f"them and {theirs.get(name, 'of nothing')} in the model; gather them with this model"
                )

    def rates_of_steps(self, rates: Sequence[Rates], *, clipped_for: float = 0.0) -> Tensor:
        """The numbers that the steps of each run are computed from, (P, 4); see ``adapt_``.

        ``clipped_for`` is a larger decay that D was clipped for before, and stays clipped for.
        """
        numbers = []
        for one in rates:
            most = 1.0 if one.decay >= clipped_for else one.decay / clipped_for
            numbers.append((one.learning_rate, one.decay / self.mean, most, one.epsilon))
        return torch.tensor(numbers, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class DynamicEvaluation:
    """The result of one run on one text."""

    split: str
    rates: Rates
    window: int
    loss: float
    """mean over the tokens scored, in nats; infinite if the run diverged"""
    tokens: int
    """number of tokens scored: all but the first of the text, or those before a limit, or before the run diverged"""
    complete: bool
    """True if the whole text was scored"""
    chosen: bool = False
    """True if these rates won on validation, or are the only ones"""
    precision: str = "float32"
    """arithmetic of the windows"""
    clip_in_place: bool = False
    """True if D stayed clipped for a larger decay, as in the published script"""
    seconds: float

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    def record(self, run: RunIdentity, *, epoch: int | None = None) -> DynamicEvaluationRecord:
        flat = vars(self) | vars(self.rates)
        del flat["rates"]
        return DynamicEvaluationRecord(run=run, epoch=epoch, **flat)

    @classmethod
    def of_record(cls, record: DynamicEvaluationRecord) -> Self:
        rates = Rates(learning_rate=record.learning_rate, decay=record.decay, epsilon=record.epsilon)
        return cls(rates=rates, **{own.name: getattr(record, own.name) for own in fields(cls) if own.name != "rates"})


class DynamicEvaluator:
    """Evaluates one text at any rates, as often as asked; on a GPU by replaying a graph.

    ``at_once`` copies of the model adapt at once: side by side in one pass on a GPU, which is faster than one after the
    other; elsewhere, and with wide windows, in as many passes that take turns. Memory is the weights once for each copy
    and, on a GPU, little more; elsewhere about five times the weights. The start and the statistics are shared with
    other evaluators.
    """

    def __init__(
        self,
        model: LanguageModel,
        statistics: GradientStatistics,
        ids_L: Tensor,
        *,
        split: str = "test",
        at_once: int = 1,
        progress: Watch = lambda _: None,
        **options: Unpack[PassOptions],
    ) -> None:
        check_text(ids_L, model.vocabulary_size)
        statistics.check_fits(model)
        check_positive(at_once=at_once)
        self._statistics = statistics.to(model.embedding.device)
        self._split, self._progress, self.at_once = split, progress, at_once
        self._clipped_for = 0.0
        rms, window = self._statistics.rms, statistics.window
        self._passes: Sequence[OneAdaptingModel | AdaptingModels]
        if kernels_serve(model, window):
            self._passes = [AdaptingModels(model, rms, ids_L, models=at_once, window=window, **options)]
        else:
            self._passes = [OneAdaptingModel(model, rms, ids_L, window=window, **options) for _ in range(at_once)]
        self._complete = self._passes[0].scored() == ids_L.numel() - 1

    def launch(self, *rates: Rates, clipped_for: float = 0.0) -> Generator[None, None, None]:
        """Make one run from the start at each of the rates; gives its work to the device window by window.

        :meth:`results` waits for it. Raises :class:`Diverged` once every run has a loss that is not finite.
        ``clipped_for``: see :meth:`GradientStatistics.rates_of_steps`.
        """
        if len(rates) != self.at_once:
            raise ValueError(f"give as many rates as runs are made at once, {self.at_once}, got {len(rates)}")
        models = self.at_once // len(self._passes)
        self._clipped_for = clipped_for
        runs = []
        for index, one in enumerate(self._passes):
            own = rates[index * models : (index + 1) * models]
            # On the stream of the caller, for which the pass waits.
            one.synchronize()
            one.restart(self._statistics.rates_of_steps(own, clipped_for=clipped_for))
            runs.append(one.launch(self._progress, split=self._split, rates=own))
        yield from in_turn(runs)
        reports = [at for one in self._passes for at in one.reports]
        if all(at.broken_at is not None for at in reports):
            where = " and ".join(
                f"window {at.broken_at:,} of {at.windows:,} of the {at.split} text with {at.rates}" for at in reports
            )
            raise Diverged(f"the loss is not finite at {where}; the model is as it was. Try a lower learning_rate")

    def results(self) -> list[DynamicEvaluation]:
        """Results of the last runs, once all have ended, in the order of their rates; inf where a loss diverged."""
        found = []
        for one in self._passes:
            if not one.reports or any(at.broken_at is None and at.window < at.windows for at in one.reports):
                raise ValueError("there is no result before a run has ended; go through launch() first")
            for at in one.reports:
                assert at.rates is not None
                found.append(
                    DynamicEvaluation(
                        split=self._split,
                        rates=at.rates,
                        window=one.window,
                        loss=at.loss if at.broken_at is None else math.inf,
                        tokens=one.scored(None if at.broken_at is None else at.broken_at - 1),
                        complete=self._complete and at.broken_at is None,
                        precision=one.precision,
                        clip_in_place=at.rates.decay < self._clipped_for,
                        seconds=one.seconds,
                    )
                )
        return found


def adapt(
    model: LanguageModel,
    statistics: GradientStatistics,
    ids_L: Tensor,
    rates: Rates,
    *,
    split: str = "test",
    progress: Watch = lambda _: None,
    **options: Unpack[PassOptions],
) -> DynamicEvaluation:
    """Evaluate a model on a text that it adapts to; ``limit`` ends the run after so many windows."""
    evaluator = DynamicEvaluator(model, statistics, ids_L, split=split, progress=progress, **options)
    for _ in evaluator.launch(rates):
        pass
    [result] = evaluator.results()
    return replace(result, chosen=True)
