"""Estimates of how long the parts of an audit take on this machine, from a short calibration and the operations needed.

Shapes: N contexts, V vocabulary, d width.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
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
    """The parts of an audit with the time of each; ``bounds_contexts``, where the bounds have more contexts.

    Without contexts only the output layer is looked at: its bounds and, if ``argmax_tokens`` asks for it, the tokens
    that can come first.
    """
    n, v, d, m = float(contexts), float(vocabulary), float(width or 0), float(min(sampled, contexts))
    has_layer, row = width is not None, v * components
    bounded = max(n, float(bounds_contexts), 1.5 * (d + 2.0))
    block, least = min(3.0 * (d + 2.0), bounded), min(n, v)
    # Half of the work on the eigenvalues of a block is done by one core, at the speed of the memory.
    of_block = 12.0 * block**2 * (d + 2.0) + 8.0 * block**3
    slopes = 1.0 if is_softmax else 9.0
    argmax = "tokens that can come first"
    # Name, condition, products in float32 and in float64, exponentials.
    table = (
        ("the model", operations_per_context > 0.0, n * operations_per_context, 0.0, 0.0),
        ("log-probabilities", has_layer, 0.0, 2.0 * n * d * row, 4.0 * n * row),
        ("rank bounds", has_layer, 2.0 * bounded * d * row, of_block, 2.0 * bounded * row),
        ("spectrum", contexts, 0.0, 2.0 * least * n * v + 4.0 * least**3, 0.0),
        ("truncation", contexts and truncated, 0.0, 6.0 * n * n * v + 9.0 * n**3, 3.0 * truncated * n * v),
        ("nonlinearity of phi", contexts and has_layer, 0.0, slopes * 2.0 * m * d * row, slopes * 5.0 * m * row),
        ("gradients", contexts and has_layer, 0.0, 2.0 * v * d * d + 4.0 * m * d * row, 10.0 * m * row),
        (argmax, has_layer and argmax_tokens, 6.0 * min(argmax_tokens, v) * v * d, 2.0 * v * d * d, 0.0),
    )
    seconds = {
        name: single / machine.products32 + double / machine.products64 + elements / machine.elements
        for name, is_done, single, double, elements in table
        if is_done
    }
    if argmax in seconds:
        seconds[argmax] = min(seconds[argmax], argmax_seconds)
    return [Step(name, value) for name, value in seconds.items()]


def fit_seconds(target: Distributions, config: CapacityConfig) -> float:
    """The time that the fits of a configuration may take, from one evaluation of a small and of a large one."""
    fits = planned_fits(config)
    ends = [extreme(width for _, width in fits) for extreme in (min, max)]
    costs = []
    for width in ends:
        problem = Problem(target, Head.parse("softmax"), width)
        point = random_start(problem, torch.Generator().manual_seed(0))
        costs.append(_seconds(functools.partial(problem.evaluate, point)))
    total = 0.0
    for text, width in fits:
        head = Head.parse(text)
        evaluation = float(np.interp(width, ends, costs))
        slowed = 1.0 if head.function.is_linear else 1.6
        steps = STEP * min(config.budget.iterations, _usual_steps(head))
        total += evaluation * head.components * slowed * steps * max(config.least_starts, config.random_starts + 1)
    return total / config.workers


def _usual_steps(head: Head) -> int:
    """The number of steps after which a fit gains too little to go on, with the usual tolerance."""
    if head.components > 1:
        return 900
    return 200 if head.function.is_linear else 350


def listed(steps: Sequence[Step]) -> str:
    """The total, and the parts that matter to it."""
    total = sum(step.seconds for step in steps)
    long = [f"{step.name} {duration_text(step.seconds)}" for step in steps if step.seconds >= max(1.0, 0.05 * total)]
    about = f"about {duration_text(total)}" if total >= 0.1 else "less than 0.1 s"
    return about + (f" ({', '.join(long)})" if long else "")
