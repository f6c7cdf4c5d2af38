"""Measurement in turns: implementations alternate in one process, so that ratios survive a machine that is shared.

Each round runs every implementation once, in an order of its own; a ratio is taken within a round, and the median over
rounds is reported with its quartiles. Peak memory is measured apart from time.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from sigsoftmax import records
from sigsoftmax.records import Environment, targets
from sigsoftmax.records.schemas.speed import Measurement

# The profiler reports each start and stop on stderr otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

MIB = 2**20
MEMBERS = (
    "softmax",
    "sigsoftmax",
    "softmax(alpha=1.5)",
    "shifted_sigsoftmax(b=1)",
    "gss(k=0.2)",
    "sigmoid",
    "relu",
    "softcap",
)
"""members of the family, for cases that go through all"""
RECORDS = Path(__file__).parent / "records"


@dataclass(frozen=True)
class Step:
    """Forward and backward of a loss; the gradients are dropped at once, so that each step pays for freeing its own."""

    loss: Callable[[], torch.Tensor]
    leaves: Sequence[torch.Tensor]
    """all tensors that receive a gradient"""

    def __call__(self) -> None:
        self.loss().backward()
        for leaf in self.leaves:
            leaf.grad = None


class Products(Step):
    """The matrix products that an implementation cannot do without, and nothing else: a floor for its time."""

    def __call__(self) -> None:
        self.loss()


@dataclass(frozen=True, kw_only=True)
class Case:
    """Implementations of the same thing."""

    suite: str
    name: str
    baseline: str
    implementations: Mapping[str, Step]
    targets: Mapping[str, str]

    def __post_init__(self) -> None:
        # Found now, a mistake costs nothing; found when the page is written, it costs the run.
        for name, target in self.targets.items():
            named = [name, *(clause.other for clause in targets.clauses(target) if clause.other)]
            if absent := [other for other in named if other not in self.implementations]:
                raise ValueError(f"{self.name}: a target names {absent}, expected some of {[*self.implementations]}")


def median_and_quartiles(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    if len(values) < 2:
        return values[0], (values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, (low, high)


def worst(errors: Iterable[float]) -> float | None:
    """The largest, and NaN if there is one; None if there are none."""
    known = list(errors)
    return max(known, key=lambda error: (math.isnan(error), error)) if known else None


def take_turns(
    case: Case,
    *,
    rounds: int,
    milliseconds_of: Callable[[Callable[[], object]], float],
    peak_mib: Mapping[str, float | None],
    gradient_errors: Mapping[str, Mapping[str, float]] | None = None,
    host_microseconds: Mapping[str, float] | None = None,
) -> list[Measurement]:
    """Time all implementations of a case, round by round.

    ``gradient_errors`` names those of each implementation by gradient and kind of logits; the worst of them is judged.
    """
    for run in case.implementations.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in case.implementations}
    # What ran before leaves caches and the allocator in a state; nobody should always run after the same one.
    shuffle = random.Random(0).shuffle
    order = list(case.implementations)
    with _no_garbage_collection():
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                times[name].append(milliseconds_of(case.implementations[name]))
    results = []
    for name, measured in times.items():
        errors = (gradient_errors or {}).get(name, {})
        milliseconds, quartiles = median_and_quartiles(measured)
        ratio, ratio_quartiles = median_and_quartiles(
            [own / base for own, base in zip(measured, times[case.baseline], strict=True)]
        )
        results.append(
            Measurement(
                suite=case.suite,
                case=case.name,
                implementation=name,
                baseline=case.baseline,
                milliseconds=milliseconds,
                milliseconds_quartiles=quartiles,
                ratio=ratio,
                ratio_quartiles=ratio_quartiles,
                peak_mib=peak_mib.get(name),
                rounds=rounds,
                target=case.targets.get(name, ""),
                gradient_error=worst(errors.values()),
                gradient_errors=errors,
                host_microseconds=(host_microseconds or {}).get(name),
            )
        )
    return results


def measured_once(suite: str, case: str, name: str, milliseconds: float, **fields: Any) -> Measurement:
    """A measurement without rounds, its ratio that to itself unless ``fields`` name another baseline."""
    alone = {"baseline": name, "ratio": 1.0, "ratio_quartiles": (1.0, 1.0), "peak_mib": None}
    return Measurement(
        suite=suite,
        case=case,
        implementation=name,
        milliseconds=milliseconds,
        milliseconds_quartiles=(milliseconds, milliseconds),
        rounds=1,
        **{**alone, **fields},
    )


def cpu_milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def cpu_peak_mib(step: Step) -> float:
    """The most that torch's CPU allocator had given out at once in a step, beyond the gradients of the leaves.

    Counting at the allocator is exact and repeatable. The resident set of a process that has run other things is
    neither: what malloc kept of them is in it before and is reused after, so that the difference can be negative.
    """
    step()  # compilation, and what is allocated once and kept
    # acc_events: torch 2.11 warns without it.
    watching = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with _no_garbage_collection(), watching as profiled:
        step()
    assert profiled.profiler is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    peak = max(accumulate(changes, initial=0)) - gradient_bytes(step.leaves)
    # All gradients are held at the end of the backward pass.
    assert peak >= 0, "the profiler missed allocations, or a leaf received no gradient"
    return peak / MIB


def gpu_milliseconds(run: Callable[[], object], at_least: float = 20.0) -> float:
    """Mean time of as many runs in a row as take ``at_least`` milliseconds: a training step does not wait either."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    runs = 1
    while True:
        torch.cuda.synchronize()
        start.record()
        for _ in range(runs):
            run()
        end.record()
        torch.cuda.synchronize()
        total = start.elapsed_time(end)
        if total >= at_least:
            return total / runs
        runs = max(runs + 1, int(1.2 * runs * at_least / total))


def gpu_peak_mib(step: Step) -> float:
    """The most that torch's CUDA allocator had given out at once in a step, beyond the gradients of the leaves."""
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before - gradient_bytes(step.leaves)) / MIB


def gradient_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t.requires_grad)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def environment(device: torch.device | str = "cpu") -> Environment:
    """The environment of this process, with the command as one types it in the root of the repository."""
    script = Path(sys.argv[0]).name
    command = f"python benchmarks/{script} {shlex.join(sys.argv[1:])}".strip()
    return dataclasses.replace(Environment.here(device), command=command)


def store(out: Path, measurements: Iterable[Measurement], device: torch.device | str = "cpu") -> None:
    """Write what was measured here; earlier records of a case stay if they have implementations that these lack."""
    where = environment(device)
    records.store(out, [records.Record.of(m, where) for m in measurements])


def show_and_store(cases: Iterable[list[Measurement]], out: Path | None) -> None:
    """Print the table of each case as soon as it is measured; write the records of all where ``out`` is a file."""
    found: list[Measurement] = []
    for measured in cases:
        print(f"\n{measured[0].case}\n{table(measured)}", flush=True)
        found += measured
    if out is not None:
        store(out, found)
        print(f"\n{len(found)} records in {out}")


FURTHER = (
    "gradient_error",
    "size",
    "host_microseconds",
    "compiled_variants",
    "most_registers",
    "spilled_bytes",
    "exchanged_bytes",
    "tokens_per_second",
    "most_tokens",
)
"""Fields of a measurement that some cases have; tables show them under their names."""


def table(measurements: Sequence[Measurement]) -> str:
    """Measurements as text, aligned."""
    case = {m.implementation: m for m in measurements}
    rows = [["implementation", "median ms", "ratio", "quartiles", "memory MiB"]]
    further = [field for field in FURTHER if any(getattr(m, field) is not None for m in measurements)]
    rows[0] += [*(field.replace("_", " ") for field in further), "target", "met"]
    for m in measurements:
        low, high = m.ratio_quartiles
        rows.append(
            [
                m.implementation + (" (baseline)" if m.implementation == m.baseline else ""),
                milliseconds_text(m.milliseconds),
                f"{m.ratio:.2f}",
                f"{low:.2f}-{high:.2f}",
                mib_text(m.peak_mib),
                *(number_text(getattr(m, field)) for field in further),
                m.target,
                targets.verdict(m, case),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def number_text(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3g}"


def milliseconds_text(milliseconds: float) -> str:
    return f"{milliseconds:.3g}" if milliseconds < 1 else f"{milliseconds:,.{2 if milliseconds < 10 else 1}f}"


def mib_text(mib: float | None) -> str:
    if mib is None:
        return ""
    return f"{mib:.1f}" if mib < 10 else f"{mib:,.0f}"
