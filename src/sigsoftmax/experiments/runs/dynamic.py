"""Dynamic evaluation of checkpoints: the grid on validation, then test at the rates that won; every run on record."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from sigsoftmax.contract.spec import check_positive
from sigsoftmax.experiments.display import Pace, Say, perplexity_text
from sigsoftmax.experiments.runs.folder_locks import FolderLock
from sigsoftmax.experiments.runs.run import Resources, checkpoint_file, measured_on, run_folder, text_of
from sigsoftmax.lm.config import DynamicEvaluationConfig
from sigsoftmax.lm.data.corpus import Corpus, Split
from sigsoftmax.lm.dynamic.evaluation import DynamicEvaluation, DynamicProgress, GradientStatistics, adapt
from sigsoftmax.lm.dynamic.rates import Rates
from sigsoftmax.lm.dynamic.search import GridSearch, grid, search
from sigsoftmax.lm.saving.saved_models import check_same_corpus, load_model
from sigsoftmax.lm.training.trainer import resolve_device
from sigsoftmax.records import Environment, Record, append
from sigsoftmax.records.durations import duration_text
from sigsoftmax.records.schemas.training import DynamicEvaluationRecord
from sigsoftmax.report.number_text import counted

__all__ = ["DynamicConfig", "known_runs", "points_at_once", "run", "search_grid"]

FILE = "dynamic.jsonl"

POINTS_ON_GPU = 8
"""points of a grid that adapt side by side on a GPU: a window is a few tokens, most of its time is latency, and a
second point added half of the time of the first on an H200. Memory is the weights once for each point."""


@dataclass(frozen=True, kw_only=True)
class DynamicConfig:
    checkpoint: Path
    """``best.safetensors``, or the folder of a run"""
    learning_rate: float | None = None
    """with a decay: one pair of rates in the RMS form; None: the grid of the recipe, searched on validation"""
    decay: float | None = None
    """rate of decay towards the weights of the checkpoint"""
    splits: tuple[Split, ...] = ("valid", "test")
    """texts that are evaluated without a grid"""
    limit: int | None = None
    """number of windows after which each run ends"""
    resources: Resources = field(default_factory=Resources)

    def __post_init__(self) -> None:
        if (self.learning_rate is None) != (self.decay is None):
            raise ValueError("give both --learning-rate and --decay, or neither for the recipe's grid")
        if self.limit is not None:
            check_positive(limit=self.limit)


def points_at_once(resources: Resources, device: torch.device) -> int:
    """Points of the grid that share the device: on a CPU each of them would only take the time of the others."""
    return max(resources.at_once, POINTS_ON_GPU) if device.type == "cuda" else 1


def run(config: DynamicConfig, say: Say, progress: Say = lambda _: None) -> list[DynamicEvaluation]:
    """Evaluate, print and record."""
    path = checkpoint_file(config.checkpoint)
    if config.learning_rate is None or config.decay is None:
        result = search_grid(path, None, config.resources, limit=config.limit, say=say, progress=progress)
        return [*result.points, *([] if result.test is None else [result.test])]
    with FolderLock(run_folder(path)):
        subject = _Subject(path, None, config.resources, None, say, progress)
        rates = Rates(learning_rate=config.learning_rate, decay=config.decay, epsilon=subject.settings.epsilon)
        statistics = subject.statistics()
        results = []
        for split in config.splits:
            one = adapt(
                subject.loaded.model,
                statistics,
                subject.corpus.split(split),
                rates,
                split=split,
                limit=config.limit,
                precision=config.resources.precision,
                progress=subject.watch,
            )
            subject.keep(one)
            say(result_line(one))
            results.append(one)
        return results


def search_grid(
    checkpoint: Path,
    corpus: Corpus | None,
    resources: Resources,
    *,
    settings: DynamicEvaluationConfig | None = None,
    limit: int | None = None,
    say: Say = lambda _: None,
    progress: Say = lambda _: None,
) -> GridSearch:
    """The grid of the model's recipe on validation, then test; runs that are on record are not made again.

    ``settings`` replaces those of the recipe, as a part of its grid.
    """
    with FolderLock(run_folder(checkpoint)):
        subject = _Subject(checkpoint, corpus, resources, settings, say, progress)
        known = [one for one in known_runs(checkpoint) if one.precision == resources.precision]
        points = len(grid(subject.settings))
        model_run = subject.loaded.run
        say(
            f"Dynamic evaluation of {model_run.recipe}, seed {model_run.seed}: {counted(points, 'point')} on "
            "validation, then test" + (f"; {len(known)} runs are on record in {subject.records}." if known else ".")
        )

        def keep(result: DynamicEvaluation) -> None:
            subject.keep(result)
            if not result.chosen or result.split != "valid" or points == 1:
                # The winner comes a second time, and is said at the end.
                say(result_line(result))

        result = search(
            subject.loaded.model,
            subject.statistics(),
            subject.settings,
            subject.corpus.valid,
            subject.corpus.test,
            finished=known,
            keep=keep,
            at_once=points_at_once(resources, subject.device),
            limit=limit,
            precision=resources.precision,
            progress=subject.watch,
        )
    progress("")
    chosen = [result_line(one) for one in (result.valid, result.test) if one is not None]
    say("\n".join(["Chosen on validation:", *(f"  {line}" for line in chosen)]))
    if result.edges:
        say(f"The best {' and '.join(result.edges)} lies at an end of the grid: beyond it there may be better ones.")
    return result


def known_runs(checkpoint: Path) -> list[DynamicEvaluation]:
    """The runs on record for the weights as they are."""
    found = measured_on(checkpoint, FILE, DynamicEvaluationRecord)
    return [DynamicEvaluation.of_record(record) for record in found]


class _Subject:
    """A model and its text, the file of its records, and a line about what it is doing."""

    def __init__(
        self,
        checkpoint: Path,
        corpus: Corpus | None,
        resources: Resources,
        settings: DynamicEvaluationConfig | None,
        say: Say,
        progress: Say,
    ) -> None:
        self.device = resolve_device(resources.device)
        self.loaded = load_model(checkpoint, device=self.device)
        self.corpus = corpus or text_of(self.loaded, resources)
        check_same_corpus(self.loaded.meta, self.corpus, checkpoint)
        self.settings = settings or self.loaded.recipe.dynamic_evaluation
        self.records = checkpoint.parent / FILE
        self._precision = resources.precision
        self._say, self._progress = say, progress
        self._pace, self._foretold = Pace(), False

    def statistics(self) -> GradientStatistics:
        statistics = GradientStatistics.of(
            self.loaded.model, self.corpus.train, self.settings, precision=self._precision, progress=self.watch
        )
        self._progress("")
        return statistics

    def keep(self, result: DynamicEvaluation) -> None:
        """Record what a run came to."""
        self._progress("")
        record = result.record(self.loaded.run, epoch=self.loaded.epoch)
        append(self.records, Record.of(record, Environment.here(self.device)))

    def watch(self, at: DynamicProgress) -> None:
        """Show a line that changes, once a second, and first one that stays, about how long it all takes."""
        if at.rates is not None and not self._foretold:
            self._foretold = True
            self._say(f"It will take about {duration_text(at.seconds_left_in_all)}.")
        if self._pace.is_due() or at.window == at.windows:
            what = "gradient statistics on the training text" if at.rates is None else f"{at.split}, {at.rates}"
            self._progress(
                f"{what}: window {at.window:,} of {at.windows:,}, perplexity {perplexity_text(at.loss)}, "
                f"{duration_text(at.seconds_left)} left, {duration_text(at.seconds_left_in_all)} in all"
            )


def result_line(result: DynamicEvaluation) -> str:
    part = "" if result.complete else f", the first {result.tokens:,} tokens"
    return (
        f"{result.split:5}  perplexity {perplexity_text(result.loss):>9}  loss {result.loss:.4f}  ({result.rates}"
        f"{part}; {duration_text(result.seconds)})"
    )
