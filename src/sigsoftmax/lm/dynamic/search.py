"""The grid of dynamic evaluation: every pair of rates on the validation text, the best pair on the test text.

A run that ends is handed over at once, so that a grid that is interrupted goes on with those that are missing.

Shapes: L tokens of a text.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Unpack

from torch import Tensor

from sigsoftmax.lm.config import DynamicEvaluationConfig
from sigsoftmax.lm.dynamic.evaluation import DynamicEvaluation, DynamicEvaluator, GradientStatistics
from sigsoftmax.lm.dynamic.rates import Rates
from sigsoftmax.lm.dynamic.windows import DynamicProgress, PassOptions, Watch, check_text, window_count
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.training.progress import Diverged

__all__ = ["GridSearch", "grid", "search"]

GRID_WINDOW = 5
"""the window for which the rates of a configuration are meant"""

Keep = Callable[[DynamicEvaluation], None]


@dataclass(frozen=True, kw_only=True)
class GridSearch:
    """The runs of a grid, and those at the rates that won."""

    points: tuple[DynamicEvaluation, ...]
    """runs on validation, in the order of the grid"""
    valid: DynamicEvaluation
    """the validation run at the rates that won"""
    test: DynamicEvaluation | None
    """the test run at the same rates, if a test text was given"""

    @property
    def edges(self) -> tuple[str, ...]:
        """Names of the best rates that lie at an end of the grid, beyond which there may be better ones."""
        found = []
        for name in ("learning_rate", "decay"):
            values = {getattr(point.rates, name) for point in self.points}
            if len(values) > 1 and getattr(self.valid.rates, name) in (min(values), max(values)):
                found.append(name)
        return tuple(found)


def grid(config: DynamicEvaluationConfig) -> list[Rates]:
    """All pairs of rates, ordered by decay. The rates of a configuration are for windows of 5, and scale."""
    scale = config.window / GRID_WINDOW
    return [
        Rates(learning_rate=learning_rate * scale, decay=decay * scale, epsilon=config.epsilon)
        for decay in sorted(set(config.decays))
        for learning_rate in dict.fromkeys(config.learning_rates)
    ]


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
    clip_in_place: bool = False,
    progress: Watch = lambda _: None,
    **options: Unpack[PassOptions],
) -> GridSearch:
    """Try the grid on the validation text, and run the test text at the rates that won.

    ``keep`` is given each run as it ends, and the winner once more as chosen (of a grid of one point, only so); what it
    was given can be handed back as ``finished`` and is not run again. Rates whose run diverges have an infinite loss.
    ``at_once`` runs share the device. ``limit`` ends each run after so many windows.

    ``clip_in_place`` repeats a defect of the published script, for audits: D, clipped for the largest decay of the
    grid, stays so in the final runs. Where that differs, these are made again whatever is ``finished``, and say so.
    """
    if config.window != statistics.window:
        raise ValueError(
            f"the statistics are of windows of {statistics.window}, and the configuration has windows of "
            f"{config.window}; gather them again"
        )
    texts = {"valid": valid_ids_L} | ({} if test_ids_L is None else {"test": test_ids_L})
    for ids_L in texts.values():
        # Before hours are spent on the other.
        check_text(ids_L, model.vocabulary_size)
    runner = _Runner(
        model=model,
        statistics=statistics.to(model.embedding.device),
        texts=texts,
        finished=sorted(finished, key=lambda run: not run.chosen),
        keep=keep,
        at_once=at_once,
        progress=progress,
        options=options,
    )
    points = grid(config)
    tried = runner.run("valid", points, chosen=len(points) == 1)
    valid = min(tried, key=lambda point: point.loss)
    if not math.isfinite(valid.loss):
        raise Diverged(
            f"the loss did not stay finite at any of the {len(points)} points of the grid; the model is as it was. Try "
            "lower learning_rates"
        )
    clipped_for = max(config.decays) * config.window / GRID_WINDOW if clip_in_place else 0.0
    if clipped_for > valid.rates.decay:
        [valid] = runner.run("valid", [valid.rates], chosen=True, clipped_for=clipped_for)
    elif not valid.chosen:
        valid = replace(valid, chosen=True)
        keep(valid)
    test = None
    if test_ids_L is not None:
        [test] = runner.run("test", [valid.rates], chosen=True, clipped_for=clipped_for)
    marked = tuple(replace(point, chosen=point.rates == valid.rates) for point in tried)
    return GridSearch(points=marked, valid=valid, test=test)


@dataclass(frozen=True, kw_only=True)
class _Runner:
    """Makes the runs that are missing, several at once."""

    model: LanguageModel
    statistics: GradientStatistics
    texts: dict[str, Tensor]
    finished: Sequence[DynamicEvaluation]
    """the chosen ones first"""
    keep: Keep
    at_once: int
    progress: Watch
    options: PassOptions

    def run(
        self, split: str, points: Sequence[Rates], *, chosen: bool, clipped_for: float = 0.0
    ) -> list[DynamicEvaluation]:
        """The runs at these points, in their order."""
        found: dict[Rates, DynamicEvaluation] = {}
        for run in self.finished:
            is_free = not run.clip_in_place and clipped_for <= run.rates.decay
            if is_free and run.rates in points and self._is_whole(run, split):
                found.setdefault(run.rates, run)
        waiting = deque(rates for rates in points if rates not in found)
        at_once = min(self.at_once, len(waiting))
        windows_later = self._windows("test") if split == "valid" and "test" in self.texts else 0

        def watch(at: DynamicProgress) -> None:
            self.progress(replace(at, waiting=len(waiting) * at.windows + windows_later, at_once=at_once))

        evaluator = None
        while waiting:
            own = [waiting.popleft() for _ in range(min(at_once, len(waiting)))]
            if evaluator is None or evaluator.at_once != len(own):
                text = self.texts[split]
                evaluator = DynamicEvaluator(
                    self.model, self.statistics, text, split=split, at_once=len(own), progress=watch, **self.options
                )
            # The results tell which runs diverged.
            with suppress(Diverged):
                for _ in evaluator.launch(*own, clipped_for=clipped_for):
                    pass
            for result in evaluator.results():
                found[result.rates] = replace(result, chosen=chosen)
                self.keep(found[result.rates])
        return [found[rates] for rates in points]

    def _windows(self, split: str) -> int:
        return window_count(self.texts[split].numel(), self.statistics.window, self.options.get("limit"))

    def _is_whole(self, run: DynamicEvaluation, split: str) -> bool:
        """Tell whether a run went over this text; the length of a run that diverged says nothing."""
        window = self.statistics.window
        scored = min(self._windows(split) * window, self.texts[split].numel() - 1)
        return (run.split, run.window) == (split, window) and (run.tokens == scored or math.isinf(run.loss))
