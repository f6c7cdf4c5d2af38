"""The grid of dynamic evaluation: every pair of rates on the validation text, the best pair on the test text.

A run that ends is handed over at once, so that a grid that is interrupted goes on with those that are missing.

Shapes: L words of a text.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor

from sigsoftmax.lm.config import DynamicEvaluationConfig
from sigsoftmax.lm.dynamic.adapting_models import can_adapt
from sigsoftmax.lm.dynamic.evaluation import (
    DynamicEvaluation,
    DynamicEvaluator,
    DynamicProgress,
    GradientStatistics,
    Watch,
)
from sigsoftmax.lm.dynamic.rates import Rates
from sigsoftmax.lm.dynamic.window_gradients import check_text, window_count
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.training.trainer import Diverged

__all__ = ["GridSearch", "grid", "in_turn", "search"]

GRID_WINDOW = 5
"""the window for which the rates of a configuration are meant"""

Keep = Callable[[DynamicEvaluation], None]


@dataclass(frozen=True, kw_only=True)
class GridSearch:
    points: tuple[DynamicEvaluation, ...]
    """on validation, in the order of the grid"""
    valid: DynamicEvaluation
    """at the rates that won"""
    test: DynamicEvaluation | None
    """at the same rates, if a test text was given"""

    @property
    def edges(self) -> tuple[str, ...]:
        """Which of the best rates lie at an end of the grid, beyond which there may be better ones."""
        found = []
        for name in ("learning_rate", "decay"):
            values = {getattr(point.rates, name) for point in self.points}
            if len(values) > 1 and getattr(self.valid.rates, name) in (min(values), max(values)):
                found.append(name)
        return tuple(found)


def grid(config: DynamicEvaluationConfig) -> list[Rates]:
    """All pairs, the decay ascending and slowest. The rates of a configuration are for windows of 5, and scale."""
    scale = config.window / GRID_WINDOW
    return [
        Rates(learning_rate=learning_rate * scale, decay=decay * scale, epsilon=config.epsilon)
        for decay in sorted(set(config.decays))
        for learning_rate in dict.fromkeys(config.learning_rates)
    ]


def in_turn(runs: Iterable[Generator[None, None, None]]) -> None:
    """Advance runs one step each, over and over, until all have ended; an error of one closes the others."""
    running = list(runs)
    try:
        while running:
            for run in tuple(running):
                try:
                    next(run)
                except StopIteration:
                    running.remove(run)
    finally:
        for run in running:
            run.close()


def search(
    model: LanguageModel,
    statistics: GradientStatistics,
    config: DynamicEvaluationConfig,
    valid_ids_L: Tensor,
    test_ids_L: Tensor | None = None,
    *,
    finished: Iterable[DynamicEvaluation] = (),
    keep: Keep = lambda _: None,
    at_once: int = 1,
    limit: int | None = None,
    clip_in_place: bool = False,
    precision: str = "float32",
    progress: Watch = lambda _: None,
    capture: bool = True,
) -> GridSearch:
    """Try the grid on the validation text, and run the test text at the rates that won.

    ``keep`` is given each run as it ends, and the winner once more as chosen (of a grid of one point, only so); what it
    was given can be handed back as ``finished`` and is not run again. Rates whose run diverges have an infinite loss.
    ``at_once`` runs share the device. ``limit`` ends each run after so many windows.

    ``clip_in_place`` repeats a defect of the published script, for audits: D, clipped for the largest decay of the
    grid, stays so in the final runs. Where that differs, these are made again whatever is ``finished``.
    """
    if at_once < 1:
        raise ValueError(f"at_once must be at least 1 run, got {at_once}")
    if config.window != statistics.window:
        raise ValueError(
            f"the statistics are of windows of {statistics.window}, and the configuration has windows of "
            f"{config.window}; gather them again"
        )
    for ids_L in (valid_ids_L, test_ids_L):
        if ids_L is not None:
            # Before hours are spent on the other.
            check_text(ids_L, model.words)
    runner = _Runner(
        model=model,
        statistics=statistics.to(model.embedding.device),
        finished=tuple(finished),
        keep=keep,
        at_once=at_once,
        limit=limit,
        precision=precision,
        progress=progress,
        capture=capture,
    )
    points = grid(config)
    later = 0
    if test_ids_L is not None:
        later = window_count(test_ids_L.numel(), config.window)
        later = later if limit is None else min(later, limit)
    tried = runner.run("valid", valid_ids_L, points, chosen=len(points) == 1, windows_later=later)
    valid = min(tried, key=lambda point: point.loss)
    if not math.isfinite(valid.loss):
        raise Diverged(
            f"the loss did not stay finite at any of the {len(points)} points of the grid; the model is as it was. Try "
            "lower learning_rates"
        )
    clipped_for = max(config.decays) * config.window / GRID_WINDOW if clip_in_place else 0.0
    if clipped_for > valid.rates.decay:
        [valid] = runner.run("valid", valid_ids_L, [valid.rates], chosen=True, clipped_for=clipped_for)
    elif not valid.chosen:
        valid = replace(valid, chosen=True)
        keep(valid)
    test = None
    if test_ids_L is not None:
        [test] = runner.run("test", test_ids_L, [valid.rates], chosen=True, clipped_for=clipped_for)
    marked = tuple(replace(point, chosen=point.rates == valid.rates) for point in tried)
    return GridSearch(points=marked, valid=valid, test=test)


@dataclass(frozen=True, kw_only=True)
class _Runner:
    """Makes the runs that are missing, several at once."""

    model: LanguageModel
    statistics: GradientStatistics
    finished: tuple[DynamicEvaluation, ...]
    keep: Keep
    at_once: int
    limit: int | None
    precision: str
    progress: Watch
    capture: bool

    def run(
        self,
        split: str,
        ids_L: Tensor,
        points: Sequence[Rates],
        *,
        chosen: bool,
        clipped_for: float = 0.0,
        windows_later: int = 0,
    ) -> list[DynamicEvaluation]:
        """The runs at these points, in their order."""
        found = {
            rates: known
            for rates in points
            if clipped_for <= rates.decay and (known := self._known(split, ids_L, rates)) is not None
        }
        waiting = deque(rates for rates in points if rates not in found)
        at_once = min(self.at_once, len(waiting))
        # Side by side in one pass where that is faster, else in as many passes that take turns.
        beside = can_adapt(self.model, self.statistics.window)

        def watch(at: DynamicProgress) -> None:
            self.progress(replace(at, waiting=len(waiting) * at.windows + windows_later, at_once=at_once))

        def evaluator_of(models: int) -> DynamicEvaluator:
            return DynamicEvaluator(
                self.model,
                self.statistics,
                ids_L,
                split=split,
                at_once=models,
                limit=self.limit,
                precision=self.precision,
                progress=watch,
                capture=self.capture,
            )

        def lane() -> Generator[None, None, None]:
            evaluator, models = None, 0
            while waiting:
                own = [waiting.popleft() for _ in range(min(at_once, len(waiting)) if beside else 1)]
                if evaluator is None or len(own) != models:
                    evaluator, models = evaluator_of(len(own)), len(own)
                # Its results tell.
                with suppress(Diverged):
                    yield from evaluator.launch(*own, clipped_for=clipped_for)
                for result in evaluator.results():
                    found[result.rates] = replace(result, chosen=chosen)
                    self.keep(found[result.rates])

        in_turn(lane() for _ in range(min(at_once, 1) if beside else at_once))
        return [found[rates] for rates in points]

    def _known(self, split: str, ids_L: Tensor, rates: Rates) -> DynamicEvaluation | None:
        """The last finished run that is this one; of those that diverged the length does not tell."""
        scored = ids_L.numel() - 1
        if self.limit is not None:
            scored = min(scored, self.limit * self.statistics.window)
        same = [
            run
            for run in self.finished
            if (run.split, run.rates, run.window) == (split, rates, self.statistics.window)
            and (run.tokens == scored or math.isinf(run.loss))
        ]
        return max(same, key=lambda run: run.chosen, default=None)
