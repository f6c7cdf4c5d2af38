"""Estimates of how long the parts of an audit take on this machine, from a short calibration and the operations needed.

Shapes: N contexts, V vocabulary, d width.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sigsoftmax.analysis.capacity.curves import CapacityConfig, planned_fits
from sigsoftmax.analysis.capacity.distributions import Distributions
from sigsoftmax.analysis.capacity.problem import Problem
from sigsoftmax.analysis.capacity.starts import random_start
from sigsoftmax.family.heads import Head
from sigsoftmax.records.durations import duration_text

__all__ = ["Machine", "Step", "audit_steps", "fit_seconds", "listed", "measure_machine"]


STEP = 2.0
"""cost of a step of a fit, in evaluations: it searches along a line, and updates vectors and preconditioner"""


@dataclass(frozen=True)
class Machine:
    """Operations a second, measured on small problems: a large one is seldom slower than half of it."""

    products32: float
    products64: float
    elements: float
    """exponentials of float64"""


class Step(NamedTuple):
    """A part of an audit and the time it may take."""

    name: str
    seconds: float


def measure_machine(device: str = "cpu") -> Machine:
    """Measure the machine, which takes about half a second."""

    def product(dtype: torch.dtype) -> float:
        size = 768
        factor = torch.randn(size, size, dtype=dtype, device=device)
        return 2.0 * size**3 / _seconds(lambda: factor @ factor)

    values = torch.randn(1 << 20, dtype=torch.float64, device=device)
    return Machine(product(torch.float32), product(torch.float64), values.numel() / _seconds(values.exp))


def _seconds(work: Callable[[], object]) -> float:
    """The least of several: the first one warms up, and others share the machine."""
    times: list[float] = []
    until = time.perf_counter() + 0.15
    while len(times) < 3 or time.perf_counter() < until:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def audit_steps(
    machine: Machine,
    *,
    contexts: int,
    vocabulary: int,
    width: int | None,
    components: int = 1,
    is_softmax: bool = True,
    sampled: int = 0,
    operations_per_context: float = 0.0,
    truncated: int = 0,
    argmax_tokens: int = 0,
    argmax_seconds: float = 0.0,
    bounds_contexts: int = 0,
) -> list[Step]:
    """The parts of an audit with the time of each; ``bounds_contexts``, where the bounds have more contexts."""
    n, v, d = float(contexts), float(vocabulary), float(width or 0)

    def seconds(*, products32: float = 0.0, products64: float = 0.0, elements: float = 0.0) -> float:
        return products32 / machine.products32 + products64 / machine.products64 + elements / machine.elements

    steps = []
    if operations_per_context:
        steps.append(Step("the model", seconds(products32=n * operations_per_context)))
    rows = v * components
    if width is not None:
        steps.append(Step("log-probabilities", seconds(products64=2.0 * n * d * rows, elements=4.0 * n * rows)))
        # Rows over the whole vocabulary, and the singular values of a block; see spectrum.bounds.
        bounded = max(n, float(bounds_contexts), 1.5 * (d + 2.0))
        block = min(3.0 * (d + 2.0), bounded)
        bounds = seconds(
            products32=2.0 * bounded * d * rows,
            elements=2.0 * bounded * rows,
            # Half of the work on the eigenvalues is done by one core, at the speed of the memory.
            products64=12.0 * block**2 * (d + 2.0) + 8.0 * block**3,
        )
        steps.append(Step("rank bounds", bounds))
    if not contexts:
        return steps
    least = min(n, v)
    steps.append(Step("spectrum", seconds(products64=2.0 * least * n * v + 4.0 * least**3)))
    if truncated:
        passes = 6.0 * n * n * v + 9.0 * n**3
        steps.append(Step("truncation", seconds(products64=passes, elements=3.0 * truncated * n * v)))
    if width is not None:
        m = min(float(sampled), n)
        one_pass = seconds(products64=2.0 * m * d * rows, elements=5.0 * m * rows)
        steps.append(Step("nonlinearity of phi", one_pass * (1.0 if is_softmax else 9.0)))
        steps.append(Step("gradients", seconds(products64=2.0 * v * d * d) + 2.0 * one_pass))
        if argmax_tokens:
            search = seconds(products64=2.0 * v * d * d, products32=6.0 * min(argmax_tokens, v) * v * d)
            steps.append(Step("words that can come first", min(search, argmax_seconds)))
    return steps


def fit_seconds(target: Distributions, config: CapacityConfig) -> float:
    """The time that the fits of a configuration may take, from one evaluation of a small and of a large one."""
    fits = planned_fits(config)
    widths = sorted({width for _, width in fits})
    cost: dict[int, float] = {}
    for width in {widths[0], widths[-1]}:
        problem = Problem(target.log_p_NV, Head.parse("softmax"), width, target.weights_N)
        point = random_start(problem, torch.Generator().manual_seed(0))
        cost[width] = _seconds(functools.partial(problem.evaluate, point))
    total = 0.0
    for text, width in fits:
        head = Head.parse(text)
        share = (width - widths[0]) / max(widths[-1] - widths[0], 1)
        evaluation = cost[widths[0]] + share * (cost[widths[-1]] - cost[widths[0]])
        slowed = 1.0 if head.function.is_linear else 1.6
        steps = STEP * min(config.budget.iterations, _usual_steps(head))
        total += evaluation * head.components * slowed * steps * max(config.least_starts, config.random_starts + 1)
    return total / config.workers


def _usual_steps(head: Head) -> int:
    """The number of steps after which a fit gains too little to go on, with the usual tolerance."""
    if head.components > 1:
        return 900
    return 200 if head.function.is_linear else 350


def listed(steps: Sequence[Step], *, least: float = 1.0) -> str:
    """The total, and the parts that matter to it."""
    total = sum(step.seconds for step in steps)
    long = [f"{step.name} {duration_text(step.seconds)}" for step in steps if step.seconds >= max(least, 0.05 * total)]
    return f"about {duration_text(total)}" + (f" ({', '.join(long)})" if long else "")
