"""Capacity curves: every head at every width, each fit started from those it contains, several at once.

Shapes: N contexts, V vocabulary.
"""

from __future__ import annotations

import itertools
import multiprocessing
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sigsoftmax.analysis.capacity.distributions import Distributions
from sigsoftmax.analysis.capacity.fits import Fitted, Stop, fit
from sigsoftmax.analysis.capacity.lbfgs import Budget
from sigsoftmax.analysis.capacity.problem import Problem
from sigsoftmax.analysis.capacity.starts import Solution, contains, strictly_contains
from sigsoftmax.contract.spec import check_positive
from sigsoftmax.family.heads import Head
from sigsoftmax.records.schemas.capacity import CapacityResult

__all__ = ["CapacityConfig", "capacity_curves", "contained_pairs", "planned_fits"]

SOFTMAX = Head.parse("softmax")


@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """The heads and widths to fit, and limits on the work of each fit."""

    heads: tuple[str, ...] = ("softmax", "sigsoftmax", "gss(k=0.2)", "gss(k=0)", "mos(K=4)", "moss(K=4)")
    """contained heads that are missing (softmax always) are fitted too, since others start from them"""
    widths: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    softmax_widths: tuple[int, ...] = ()
    """further widths for softmax alone: they make the softmax width of equal KL more exact"""
    random_starts: int = 1
    """besides the contained heads and the narrower solution"""
    least_starts: int = 0
    """further random starts fill up to so many, where contained heads and narrower solutions are fewer"""
    budget: Budget = field(default_factory=Budget)
    thorough_widths: tuple[int, ...] = ()
    """widths whose fits get ``thorough_random_starts`` and ``thorough_budget`` instead"""
    thorough_random_starts: int = 3
    thorough_budget: Budget = field(default_factory=lambda: Budget(iterations=1000))
    workers: int = 1
    """fits at once, each in its own process of one thread; the result does not depend on it.
    Processes are started anew, so a script that asks for several must have its ``if __name__ == "__main__":``"""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths + self.softmax_widths + self.thorough_widths) < 1:
            raise ValueError(f"widths must be at least one positive number, got {self.widths}")
        check_positive(workers=self.workers)
        if min(self.random_starts, self.least_starts, self.thorough_random_starts) < 0:
            raise ValueError("the number of random starts must not be negative")
        if not self.heads:
            raise ValueError("expected at least one head, got none; softmax is fitted beside any other")
        for head in self.heads:
            Head.parse(head)


Progress = Callable[[CapacityResult, int, int], None]
"""Called with a result, how many are ready and how many there will be."""


def capacity_curves(
    truth: Distributions, config: CapacityConfig, *, progress: Progress | None = None
) -> list[CapacityResult]:
    """Fit every head at every width; sorted by head, contained ones first, and width."""
    tasks = planned_fits(config)
    inputs = _Inputs(truth.log_p_NV.numpy(), truth.weights_N.numpy(), truth.description, config)
    # Another process does not know the functions that were registered in this one.
    can_travel = all(Head.parse(head).function.form.is_builtin for head in config.heads)
    run = _fits_in_processes if config.workers > 1 and can_travel else _fits_here
    results: dict[_Task, CapacityResult] = {}
    with closing(run(inputs, tasks)) as ended:
        for task, result in ended:
            results[task] = result
            if progress is not None:
                progress(result, len(results), len(tasks))
    return [results[task] for task in tasks]


def contained_pairs(results: Sequence[CapacityResult]) -> list[tuple[CapacityResult, CapacityResult]]:
    """All pairs (larger, smaller) in which the first cannot be worse; an error names one that is.

    A head contains others at its width, and itself at smaller widths. The fits carry contained solutions over exactly,
    so a pair that is out of order is a mistake of the program, not of the optimiser.
    """
    pairs = []
    for larger, smaller in itertools.permutations(results, 2):
        same_head = larger.head == smaller.head and larger.width > smaller.width
        at_width = larger.head != smaller.head and larger.width == smaller.width
        if same_head or (at_width and contains(Head.parse(larger.head), Head.parse(smaller.head))):
            if larger.kl > smaller.kl + 1e-9:
                raise RuntimeError(
                    f"{larger.head} of width {larger.width} contains {smaller.head} of width {smaller.width}, but its "
                    f"KL is {larger.kl:.9g} against {smaller.kl:.9g}"
                )
            pairs.append((larger, smaller))
    return pairs


# --- order of the fits ----------------------------------------------------------------------------------------------

_Task = tuple[str, int]
"""A head, as text, and a width."""
_Tasks = dict[_Task, list[_Task]]


def planned_fits(config: CapacityConfig) -> _Tasks:
    """Head and width of every fit, each with those it starts from: contained heads, and the next smaller width.

    Fits stand after those they start from, and contained heads that the configuration does not name are among them.
    """
    heads = _with_contained_heads([Head.parse(text) for text in config.heads])
    tasks: _Tasks = {}
    for place, head in enumerate(heads):
        # Two heads can contain each other, as gss(k=2) and sigsoftmax do: only the first is a start.
        contained = [str(other) for other in heads[:place] if contains(head, other)]
        widths = sorted({*config.widths, *(config.softmax_widths if head == SOFTMAX else ())})
        for narrower, width in zip([None, *widths], widths, strict=False):
            tasks[str(head), width] = [(other, width) for other in contained]
            if narrower is not None:
                tasks[str(head), width].append((str(head), narrower))
    return tasks


def _with_contained_heads(heads: Sequence[Head]) -> list[Head]:
    """The heads, softmax and those that mixtures start from; contained ones first."""
    wanted = [SOFTMAX]
    for head in heads:
        if head.components > 1:
            wanted += [Head(head.function), Head(SOFTMAX.function, head.components)]
        wanted.append(head)
    left = list(dict.fromkeys(wanted))
    ordered: list[Head] = []
    while left:
        # The first that contains no other strictly.
        ordered.append(next(head for head in left if not any(strictly_contains(head, other) for other in left)))
        left.remove(ordered[-1])
    return ordered


def _length(task: _Task) -> int:
    """A rough measure of how long a fit, and those that wait for it, will take."""
    head = Head.parse(task[0])
    return (2 if head.function.is_linear else 1) * head.components * 1000 - task[1]


# --- one fit, here or in another process ----------------------------------------------------------------------------

_Points = list[tuple[NDArray[np.float64], float]]
"""The solutions of a fitted head and their KL, as they travel between processes."""
_Outcome = tuple[CapacityResult, _Points]
_Ended = Generator[tuple[_Task, CapacityResult], None, None]


class _Inputs(NamedTuple):
    """The inputs that all fits share."""

    log_p_NV: NDArray[np.float64]
    weights_N: NDArray[np.float64]
    description: str
    config: CapacityConfig

    def fit(self, task: _Task, contained: dict[_Task, _Points], stop: Stop | None = None) -> _Outcome:
        log_p_NV, weights_N = torch.from_numpy(self.log_p_NV), torch.from_numpy(self.weights_N)
        truth = Distributions(log_p_NV=log_p_NV, weights_N=weights_N, description=self.description)
        warm = []
        for (head, width), points in contained.items():
            problem = Problem(truth, Head.parse(head), width)
            warm.append(Fitted(*(Solution(problem, torch.from_numpy(x), kl) for x, kl in points)))
        is_thorough = task[1] in self.config.thorough_widths
        result, fitted = fit(
            truth,
            Head.parse(task[0]),
            task[1],
            warm=warm,
            random_starts=self.config.thorough_random_starts if is_thorough else self.config.random_starts,
            least_starts=self.config.least_starts,
            budget=self.config.thorough_budget if is_thorough else self.config.budget,
            seed=self.config.seed,
            stop=stop,
        )
        return result, [(solution.x.numpy(), solution.kl) for solution in fitted]


def _fits_here(inputs: _Inputs, tasks: _Tasks) -> _Ended:
    """All fits one after another. Threads inside an operation gain nothing on arrays of this size."""
    points: dict[_Task, _Points] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for task, needed in tasks.items():
            result, points[task] = inputs.fit(task, {other: points[other] for other in needed})
            yield task, result
    finally:
        torch.set_num_threads(threads)


def _fits_in_processes(inputs: _Inputs, tasks: _Tasks) -> _Ended:
    """All fits as they end, several at once; Python's threads would gain little."""
    points: dict[_Task, _Points] = {}
    running: dict[Future[_Outcome], _Task] = {}
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with ProcessPoolExecutor(inputs.config.workers, context, _begin_worker, (inputs, stop)) as pool:
        try:
            while len(points) < len(tasks):
                started = {*running.values(), *points}
                for task in sorted(tasks.keys() - started, key=_length, reverse=True):
                    # Only as many as can run: a longer fit that becomes possible later goes first.
                    if len(running) < inputs.config.workers and points.keys() >= set(tasks[task]):
                        running[pool.submit(_work, task, {other: points[other] for other in tasks[task]})] = task
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    task = running.pop(future)
                    result, points[task] = future.result()
                    yield task, result
        except BaseException:
            # An interrupt must not wait for fits of many seconds.
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


_worker: tuple[_Inputs, Stop] | None = None


def _begin_worker(inputs: _Inputs, stop: Stop) -> None:
    global _worker
    # Ctrl-C reaches every process of a terminal; the first one decides, and tells the others by `stop`.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _worker = inputs, stop


def _work(task: _Task, contained: dict[_Task, _Points]) -> _Outcome:
    assert _worker is not None
    inputs, stop = _worker
    return inputs.fit(task, contained, stop)
