"""Capacity curves: every head at every width, each fit started from those it contains, several at once.

Shapes: N contexts, M words.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sigsoftmax.analysis.capacity.distributions import Distributions
from sigsoftmax.analysis.capacity.fits import Fitted, Stop, fit
from sigsoftmax.analysis.capacity.lbfgs import Budget
from sigsoftmax.analysis.capacity.problem import Problem
from sigsoftmax.analysis.capacity.starts import Solution, contains
from sigsoftmax.family.heads import Head
from sigsoftmax.records.schemas.capacity import CapacityResult
from sigsoftmax.synthetic import Language, Weighting

__all__ = ["CapacityConfig", "capacity_curves", "contained_pairs", "planned_fits"]

SOFTMAX = Head.parse("softmax")


@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """Which heads at which widths, and how much work each fit may take."""

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
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        if min(self.random_starts, self.least_starts, self.thorough_random_starts) < 0:
            raise ValueError("the number of random starts must not be negative")
        if not self.heads:
            raise ValueError("expected at least one head, got none; softmax is fitted beside any other")
        for head in self.heads:
            Head.parse(head)

    def effort(self, width: int) -> tuple[int, Budget]:
        if width in self.thorough_widths:
            return self.thorough_random_starts, self.thorough_budget
        return self.random_starts, self.budget


Progress = Callable[[CapacityResult, int, int], None]
"""Called with a result, how many are ready and how many there will be."""


def capacity_curves(
    truth: Language | Distributions,
    config: CapacityConfig,
    *,
    weights: Weighting = "uniform",
    progress: Progress | None = None,
) -> list[CapacityResult]:
    """Fit every head at every width; sorted by head, contained ones first, and width.

    ``weights`` are those of a language's contexts; distributions bring their own.
    """
    if isinstance(truth, Language):
        truth = Distributions.of_language(truth, weights)
    tasks = _tasks(config)
    inputs = _Inputs(truth.log_p_NM.numpy(), truth.weights_N.numpy(), truth.description, config)
    points: dict[_Task, _Points] = {}
    results: dict[_Task, CapacityResult] = {}
    with _pool(inputs) as submit:
        running: dict[Future[_Outcome], _Task] = {}
        while len(results) < len(tasks):
            started = set(running.values()) | results.keys()
            for task in sorted(tasks.keys() - started, key=_length, reverse=True):
                # Only as many as can run: a longer fit that becomes possible later goes first.
                if len(running) < config.workers and all(other in results for other in tasks[task]):
                    running[submit(task, {other: points[other] for other in tasks[task]})] = task
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                task = running.pop(future)
                results[task], points[task] = future.result()
                if progress is not None:
                    progress(results[task], len(results), len(tasks))
    return [results[task] for task in tasks]


def contained_pairs(results: Sequence[CapacityResult]) -> list[tuple[CapacityResult, CapacityResult]]:
    """All pairs (larger, smaller) in which the first cannot be worse; an error names one that is.

    A head contains others at its width, and itself at smaller widths. The fits carry contained solutions over exactly,
    so a pair that is out of order is a mistake of the program, not of the optimiser.
    """
    pairs = []
    for larger in results:
        for smaller in results:
            same_head = larger.head == smaller.head and larger.width > smaller.width
            at_width = larger.head != smaller.head and larger.width == smaller.width
            if same_head or (at_width and contains(Head.parse(larger.head), Head.parse(smaller.head))):
                if larger.kl > smaller.kl + 1e-9:
                    raise RuntimeError(
                        f"{larger.head} of width {larger.width} contains {smaller.head} of width {smaller.width}, but "
                        f"its KL is {larger.kl:.9g} against {smaller.kl:.9g}"
                    )
                pairs.append((larger, smaller))
    return pairs


# --- order of the fits ----------------------------------------------------------------------------------------------

_Task = tuple[str, int]
"""A head, as text, and a width."""


def _tasks(config: CapacityConfig) -> dict[_Task, list[_Task]]:
    """Every fit with those it starts from, which stand before it: contained heads, and the next smaller width."""
    heads = _with_contained_heads([Head.parse(text) for text in config.heads])
    tasks: dict[_Task, list[_Task]] = {}
    for place, head in enumerate(heads):
        # Two heads can contain each other, as gss(k=2) and sigsoftmax do: only the first is a source.
        sources = [str(other) for other in heads[:place] if contains(head, other)]
        widths = sorted({*config.widths, *(config.softmax_widths if head == SOFTMAX else ())})
        for narrower, width in zip([None, *widths], widths, strict=False):
            tasks[str(head), width] = [(source, width) for source in sources]
            if narrower is not None:
                tasks[str(head), width].append((str(head), narrower))
    return tasks


def planned_fits(config: CapacityConfig) -> list[tuple[str, int]]:
    """Head and width of every fit of a configuration, contained heads included."""
    return list(_tasks(config))


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
        ordered.append(
            next(head for head in left if not any(contains(head, o) and not contains(o, head) for o in left))
        )
        left.remove(ordered[-1])
    return ordered


def _length(task: _Task) -> int:
    """Orders fits by how long they, and those that wait for them, will take: roughly."""
    head = Head.parse(task[0])
    return (2 if head.function.is_linear else 1) * head.components * 1000 - task[1]


# --- one fit, here or in another process ----------------------------------------------------------------------------


class _Inputs(NamedTuple):
    """What all fits share."""

    log_p_NM: NDArray[np.float64]
    weights_N: NDArray[np.float64]
    language: str
    config: CapacityConfig


class _Points(NamedTuple):
    """A fitted head as it travels between processes."""

    best: NDArray[np.float64]
    best_kl: float
    own: NDArray[np.float64]
    own_kl: float


_Sources = dict[_Task, _Points]
_Outcome = tuple[CapacityResult, _Points]


def _fit(inputs: _Inputs, task: _Task, sources: _Sources, stop: Stop | None) -> _Outcome:
    log_p_NM, weights_N = torch.from_numpy(inputs.log_p_NM), torch.from_numpy(inputs.weights_N)
    warm = []
    for (head, width), points in sources.items():
        problem = Problem(log_p_NM, Head.parse(head), width, weights_N)
        best, own = torch.from_numpy(points.best), torch.from_numpy(points.own)
        warm.append(Fitted(Solution(problem, best, points.best_kl), Solution(problem, own, points.own_kl)))
    random_starts, budget = inputs.config.effort(task[1])
    result, fitted = fit(
        log_p_NM,
        Head.parse(task[0]),
        task[1],
        weights_N=weights_N,
        warm=warm,
        random_starts=random_starts,
        least_starts=inputs.config.least_starts,
        budget=budget,
        seed=inputs.config.seed,
        language=inputs.language,
        stop=stop,
    )
    return result, _Points(fitted.best.x.numpy(), fitted.best.kl, fitted.own.x.numpy(), fitted.own.kl)


@contextmanager
def _pool(inputs: _Inputs) -> Iterator[Callable[[_Task, _Sources], Future[_Outcome]]]:
    """Where fits run: threads inside an operation gain nothing on arrays of this size, and Python's threads little."""
    if inputs.config.workers == 1 or not _can_travel(inputs.config):
        with _one_thread():
            yield lambda task, sources: _done(_fit(inputs, task, sources, None))
        return
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with ProcessPoolExecutor(inputs.config.workers, context, _begin_worker, (inputs, stop)) as pool:
        try:
            yield lambda task, sources: pool.submit(_work, task, sources)
        except BaseException:
            # An interrupt must not wait for fits of many seconds.
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _can_travel(config: CapacityConfig) -> bool:
    """Another process does not know the functions that were registered in this one."""
    return all(Head.parse(head).function.form.is_builtin for head in config.heads)


_worker: tuple[_Inputs, Stop] | None = None


def _begin_worker(inputs: _Inputs, stop: Stop) -> None:
    global _worker
    # Ctrl-C reaches every process of a terminal; the first one decides, and tells the others by `stop`.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _worker = inputs, stop


def _work(task: _Task, sources: _Sources) -> _Outcome:
    assert _worker is not None
    inputs, stop = _worker
    return _fit(inputs, task, sources, stop)


def _done(outcome: _Outcome) -> Future[_Outcome]:
    future: Future[_Outcome] = Future()
    future.set_result(outcome)
    return future


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
