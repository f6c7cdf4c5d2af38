"""The least KL that each output head can reach at a width, on distributions that are known.

Every context has its own free h, and the output matrix and class bias are free too, so what remains is what the head
cannot express. That is neither training nor generalisation: it says where a gain can and cannot come from.

The problem is not convex. Each fit begins at several starts (the head's narrower solution, every contained head,
random points) and the best and the spread are reported. Contained solutions are also carried over exactly, so that
``sigsoftmax <= softmax`` or ``moss <= mos`` hold as they must, whatever the optimiser does.

Shapes: N contexts, V vocabulary.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sigsoftmax.analysis.capacity.distributions import Distributions
from sigsoftmax.analysis.capacity.lbfgs import Budget, minimise
from sigsoftmax.analysis.capacity.problem import Problem
from sigsoftmax.analysis.capacity.starts import (
    Solution,
    disturbed,
    embedded,
    random_start,
    spectral_start,
    strictly_contains,
)
from sigsoftmax.analysis.spectrum.singular_values import spectrum
from sigsoftmax.family.heads import Head
from sigsoftmax.records.schemas.capacity import CapacityResult, StartResult

__all__ = ["Fitted", "Stop", "fit"]


class Stop(Protocol):
    """An event of ``threading`` or ``multiprocessing``; a fit that sees it set raises InterruptedError."""

    def is_set(self) -> bool: ...


class Fitted(NamedTuple):
    """Parameters of a fitted head, for others to start from."""

    best: Solution
    """may be a contained solution, carried over exactly"""
    own: Solution
    """the best fit of the head itself: from a limit such as softmax as sigsoftmax, nothing leads away"""


def fit(
    truth: Distributions,
    head: Head,
    width: int,
    *,
    warm: Sequence[Fitted] = (),
    random_starts: int = 1,
    least_starts: int = 0,
    budget: Budget | None = None,
    seed: int = 0,
    stop: Stop | None = None,
) -> tuple[CapacityResult, Fitted]:
    """Fit one head at one width. ``warm`` are solutions of the same head at smaller widths, or of contained heads.

    Random starts are ``random_starts``, and as many more as are needed for ``least_starts`` starts in all.
    """
    began = time.perf_counter()
    budget = budget or Budget()
    problem = Problem(truth, head, width)
    starts: list[StartResult] = []

    def solution(name: str, x: Tensor, iterations: int) -> Solution:
        found = Solution(problem, x, problem.kl(problem.log_output(x)))
        starts.append(StartResult(name=name, kl=found.kl, iterations=iterations))
        return found

    def evaluate(x: Tensor) -> tuple[float, Tensor]:
        if stop is not None and stop.is_set():
            raise InterruptedError("the fit was stopped")
        return problem.evaluate(x)

    exact = [
        solution(f"{_warm_name(problem, source.best)}, exactly", embedded(source.best, problem), 0) for source in warm
    ]
    own = [found for found in exact if found.kl <= budget.floor]
    if not own:
        for name, point in _start_points(problem, warm, random_starts, least_starts, seed):
            minimum = minimise(evaluate, point, problem.preconditioner_at, budget)
            own.append(solution(name, minimum.x, max(minimum.iterations, 1)))
            if own[-1].kl <= budget.floor:
                break
    fitted = min(own, key=lambda found: found.kl)
    best = min([fitted, *exact], key=lambda found: found.kl)
    singular = spectrum(problem.log_output(fitted.x))
    result = CapacityResult(
        language=truth.description,
        contexts=problem.contexts,
        words=problem.vocabulary,
        head=str(head),
        width=width,
        # KL is not negative; rounding may be.
        kl=max(best.kl, 0.0),
        fitted_kl=max(fitted.kl, 0.0),
        starts=tuple(starts),
        numbers_per_context=head.numbers_per_context(width),
        output_parameters=head.output_parameters(problem.vocabulary, width),
        rank_bound=head.rank_bound(problem.vocabulary, problem.contexts, width),
        rank=singular.press32_rank,
        rank_threshold=singular.press32_threshold,
        singular_values=singular.singular_values,
        seed=seed,
        seconds=time.perf_counter() - began,
        truth=truth.checksum,
    )
    return result, Fitted(best, fitted)


# --- starts of a fit ------------------------------------------------------------------------------------------------


def _generator(seed: int, problem: Problem, name: str) -> torch.Generator:
    # By name, so that a start is the same whatever else is fitted, and in whatever order.
    key = f"{seed}/{problem.head}/{problem.width}/{name}"
    return torch.Generator().manual_seed(zlib.crc32(key.encode()))


def _warm_name(problem: Problem, source: Solution) -> str:
    return f"width {source.problem.width}" if source.problem.head == problem.head else str(source.problem.head)


def _start_points(
    problem: Problem, warm: Sequence[Fitted], random_starts: int, least_starts: int, seed: int
) -> Iterator[tuple[str, Tensor]]:
    sources = _worth_leaving(problem.head, [fitted.own for fitted in warm])
    for source in sources:
        name = f"from {_warm_name(problem, source)}"
        yield name, disturbed(source, problem, _generator(seed, problem, name))
    has_spectral = problem.linear_slope is not None and problem.head.components == 1
    if has_spectral:
        yield "spectral", spectral_start(problem)
    needed = max(least_starts, 0 if warm or problem.head.is_softmax else 1)
    for number in range(max(random_starts, needed - len(sources) - has_spectral)):
        name = f"random {number}"
        yield name, random_start(problem, _generator(seed, problem, name))


def _worth_leaving(head: Head, sources: Sequence[Solution]) -> list[Solution]:
    """Sources that are not contained in another source.

    A mixture does not start from its narrower self if it has another source: the components have settled, and such
    fits end far above those that start from copies of one component.
    """
    others = [source for source in sources if source.problem.head != head]
    heads = [source.problem.head for source in others]
    direct = [source for source in others if not any(strictly_contains(other, source.problem.head) for other in heads)]
    narrower = [source for source in sources if source.problem.head == head]
    return direct + (narrower if head.components == 1 or not direct else [])
