"""Times of the parts of a run on this machine, from a few updates, a few windows and one matrix product.

Shapes: L tokens of a text, R rows, B columns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from sigsoftmax.experiments.runs.dynamic import points_at_once
from sigsoftmax.experiments.runs.run import Resources
from sigsoftmax.lm.config import Recipe, TrainingConfig
from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.data.windows import WindowLengths, batchify
from sigsoftmax.lm.dynamic.evaluation import DynamicEvaluator, DynamicProgress, GradientStatistics
from sigsoftmax.lm.dynamic.rates import Rates
from sigsoftmax.lm.dynamic.search import grid
from sigsoftmax.lm.dynamic.windows import window_count
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.model.memory import check_model_fits
from sigsoftmax.lm.training.capture import new_stream, on_stream
from sigsoftmax.lm.training.evaluation import WINDOW, Evaluator
from sigsoftmax.lm.training.nt_asgd import AveragedSgd
from sigsoftmax.lm.training.precision import check_precision, resolve_evaluation_precision
from sigsoftmax.lm.training.trainer import Phase, resolve_device
from sigsoftmax.lm.training.updates import Updater

__all__ = ["EpochTimes", "RunTimes", "measure_epochs", "measure_times"]

WARM_UP = 3
"""updates that are slower than others: the first allocates, the second is captured"""
MOST = 20
SECONDS = 3.0
"""after which measuring ends, however few were measured"""
DYNAMIC_WINDOWS = 40


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """Seconds of one run, its share where several are made at once."""

    parameters: int
    """number of parameters of the model"""
    train_epoch: float
    """with the validation after it"""
    finetune_epoch: float
    evaluation: float
    """evaluation of a trained model on validation and test, in as many columns as are recorded"""
    dynamic_statistics: float
    """statistics of the gradients, over the training text"""
    dynamic_point: float
    """one point of the grid on validation, its share where several points are evaluated at once"""
    dynamic_points: int
    dynamic_test: float
    rank: float
    """spectrum of the log-output matrix"""


@dataclass(frozen=True, kw_only=True)
class EpochTimes:
    """Seconds of an epoch of one run, training and validation, while as many runs as planned share the device."""

    train: float
    finetune: float

    def of(self, phase: Phase) -> float:
        return self.train if phase == "train" else self.finetune


@dataclass(frozen=True, kw_only=True)
class _Training:
    """Shares of one run where several share the device, and a model to go on with."""

    model: LanguageModel
    update: float
    validation: float

    def epoch(self, recipe: Recipe, config: TrainingConfig, corpus: Corpus) -> float:
        seed = recipe.seed if config.window_seed is None else config.window_seed
        lengths = WindowLengths(seed, config.bptt, config.longest_window)
        updates = sum(1 for _ in lengths.epoch(corpus.train.numel() // config.batch))
        return updates * self.update + self.validation


def measure_epochs(recipe: Recipe, corpus: Corpus, resources: Resources) -> EpochTimes:
    """The seconds of an epoch, from a few updates: they take less than one, unless an update takes as long."""
    device = resolve_device(resources.device)
    with _threads_of_a_run(resources, device) as sharing:
        training = _measured_training(recipe, corpus, resources, device, sharing)
    together = sharing if device.type == "cpu" else resources.at_once
    return EpochTimes(
        train=together * training.epoch(recipe, recipe.training, corpus),
        finetune=together * training.epoch(recipe, recipe.finetuning, corpus),
    )


def measure_times(recipe: Recipe, corpus: Corpus, resources: Resources) -> RunTimes:
    """The seconds of the parts of a run. Measuring takes some seconds, more where an update does."""
    device = resolve_device(resources.device)
    with _threads_of_a_run(resources, device) as sharing:
        training = _measured_training(recipe, corpus, resources, device, sharing)
        model, validation = training.model, training.validation
        one_column = _evaluation_seconds(model, corpus.valid, 1, resources) / sharing
        dynamic = _dynamic_seconds(recipe, corpus, model, resources)

    settings = recipe.dynamic_evaluation
    valid, test = (window_count(text.numel(), settings.window) for text in (corpus.valid, corpus.test))
    training_windows = window_count(corpus.train.numel() // settings.statistics_batch, settings.window)
    return RunTimes(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        train_epoch=training.epoch(recipe, recipe.training, corpus),
        finetune_epoch=training.epoch(recipe, recipe.finetuning, corpus),
        evaluation=validation + one_column * (1.0 + corpus.test.numel() / corpus.valid.numel()),
        dynamic_statistics=dynamic.statistics * training_windows,
        dynamic_point=dynamic.in_grid * valid,
        dynamic_points=len(grid(settings)),
        dynamic_test=dynamic.alone * test,
        rank=_rank_seconds(len(corpus.vocabulary), corpus.test.numel(), device),
    )


@contextmanager
def _threads_of_a_run(resources: Resources, device: torch.device) -> Iterator[int]:
    """Several runs on a CPU have one thread each; yields how many then go on at the same time."""
    if device.type != "cpu" or resources.at_once == 1:
        yield 1
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield min(resources.at_once, os.cpu_count() or 1)
    finally:
        torch.set_num_threads(before)


def _measured_training(
    recipe: Recipe, corpus: Corpus, resources: Resources, device: torch.device, sharing: int
) -> _Training:
    """Seconds per update at the planned number of concurrent runs, and per validation."""
    lanes = resources.at_once if device.type == "cuda" else 1
    probes = [_Probe(recipe, corpus, resources, device) for _ in range(lanes)]
    model = probes[0].model

    def all_of_them() -> None:
        for probe in probes:
            probe.step()

    update = _timed(all_of_them, device) / lanes
    validation = _evaluation_seconds(model, corpus.valid, recipe.training.evaluation_batch, resources)
    return _Training(model=model, update=update / sharing, validation=validation / sharing)


def _timed(step: Callable[[], Any], device: torch.device, *, warm_up: int = WARM_UP, most: int = MOST) -> float:
    """Seconds of a step: the mean of some, after some others."""
    began = time.perf_counter()
    for _ in range(warm_up):
        step()
        _synchronize(device)
        if time.perf_counter() - began > SECONDS:
            break
    began, count = time.perf_counter(), 0
    while count < most and (not count or time.perf_counter() - began < SECONDS):
        step()
        count += 1
    _synchronize(device)
    return (time.perf_counter() - began) / count


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Probe:
    """A run that only makes updates, all of the usual length, on a stream of its own."""

    def __init__(self, recipe: Recipe, corpus: Corpus, resources: Resources, device: torch.device) -> None:
        config = recipe.training
        self._stream = new_stream(device)
        with on_stream(self._stream):
            check_model_fits(recipe.model, len(corpus.vocabulary), device, is_trained=True)
            self.model = LanguageModel(recipe.model, len(corpus.vocabulary), seed=recipe.seed).to(device)
            self.model.stack.recurrence.concurrent_runs = resources.at_once
            text_RB = batchify(corpus.train, config.batch)
            self._length = min(config.bptt, text_RB.shape[0] - 1)
            self._left = self._steps = (text_RB.shape[0] - 1) // self._length
            self._updater = Updater(
                self.model,
                AveragedSgd(list(self.model.parameters()), clip=config.clip, weight_decay=config.weight_decay),
                text_RB,
                config,
                generator=torch.Generator(device).manual_seed(recipe.seed),
                precision=check_precision(resources.precision, device),
            )
            self._updater.begin_epoch()

    def step(self) -> None:
        with on_stream(self._stream):
            if not self._left:
                self._updater.begin_epoch()
                self._left = self._steps
            self._updater.run(drawn=self._length, length=self._length)
            self._left -= 1


def _evaluation_seconds(model: LanguageModel, ids_L: Tensor, batch: int, resources: Resources) -> float:
    """Seconds of one static evaluation of a text in that many columns, from its first windows."""
    device = model.embedding.device
    text_RB = batchify(ids_L, batch)
    windows = -(-(text_RB.shape[0] - 1) // WINDOW)
    with on_stream(new_stream(device)):
        precision = resolve_evaluation_precision(resources.evaluation_precision, device)
        evaluator = Evaluator(model, text_RB, precision=precision)
        few = min(windows, 4)
        seconds = _timed(lambda: list(islice(evaluator.launch(), few)), device, warm_up=1, most=3)
    return seconds / few * windows


@dataclass(frozen=True, kw_only=True)
class _WindowSeconds:
    """Seconds per window of the parts of dynamic evaluation."""

    statistics: float
    in_grid: float
    """share of one point while as many are evaluated at once as the search evaluates"""
    alone: float


def _dynamic_seconds(recipe: Recipe, corpus: Corpus, model: LanguageModel, resources: Resources) -> _WindowSeconds:
    settings = recipe.dynamic_evaluation
    last: dict[bool, float] = {}

    def look(at: DynamicProgress) -> None:
        last[at.rates is not None] = at.seconds_per_window

    few = settings.statistics_batch * (DYNAMIC_WINDOWS * settings.window + 1)
    statistics = GradientStatistics.of(
        model, corpus.train[:few], settings, precision=resources.precision, progress=look
    )
    # A model that has not been trained may not survive the usual rates.
    rates = Rates(learning_rate=0.0, decay=min(settings.decays), epsilon=settings.epsilon)

    def window_seconds(at_once: int) -> float:
        evaluator = DynamicEvaluator(
            *(model, statistics, corpus.valid),
            at_once=at_once,
            limit=DYNAMIC_WINDOWS,
            precision=resources.precision,
            progress=look,
        )
        for _ in evaluator.launch(*[rates] * at_once):
            pass
        return last.get(True, 0.0) / at_once

    alone = window_seconds(1)
    at_once = min(points_at_once(resources, model.embedding.device), len(grid(settings)))
    in_grid = alone if at_once == 1 else window_seconds(at_once)
    return _WindowSeconds(statistics=last.get(False, 0.0), in_grid=in_grid, alone=alone)


def _rank_seconds(words: int, contexts: int, device: torch.device) -> float:
    """The Gram matrix, of which a little more than half is computed, and its eigenvalues."""
    size = 1024
    factor = torch.randn(size, size, dtype=torch.float64, device=device)
    rate = 2.0 * size**3 / _timed(lambda: factor @ factor, device)
    least = float(min(words, contexts))
    return (1.125 * least * words * contexts + 4.0 * least**3) / rate
