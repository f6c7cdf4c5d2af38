"""How benchmarks measure: implementations take turns in one process, so that ratios survive a machine that is shared.

Each round runs every implementation once; a ratio is taken within a round, and the median over rounds is reported
with its quartiles. Peak memory is measured apart from time.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

MIB = 2**20
RECORDS = Path(__file__).parent / "records"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One implementation in one case."""

    KIND: ClassVar[str] = "benchmark"
    VERSION: ClassVar[int] = 1

    suite: str
    case: str
    implementation: str
    baseline: str
    """the implementation that ratios are relative to"""
    milliseconds: float
    milliseconds_quartiles: tuple[float, float]
    ratio: float
    ratio_quartiles: tuple[float, float]
    peak_mib: float | None
    """peak memory beyond inputs and their gradients"""
    rounds: int
    target: str = ""
    """what was aimed for"""


def median_and_quartiles(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    if len(values) < 2:
        return values[0], (values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, (low, high)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Implementations of the same thing; each entry computes forward and backward and drops its results."""

    suite: str
    name: str
    baseline: str
    implementations: Mapping[str, Callable[[], object]]
    targets: Mapping[str, str]


def take_turns(
    case: Case,
    *,
    rounds: int,
    milliseconds_of: Callable[[Callable[[], object]], float],
    peak_mib: Mapping[str, float | None],
) -> list[Measurement]:
    """Time all implementations of a case, round by round."""
    for run in case.implementations.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in case.implementations}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in case.implementations.items():
                times[name].append(milliseconds_of(run))
    finally:
        gc.enable()
    results = []
    for name, measured in times.items():
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
            )
        )
    return results


def cpu_milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def cpu_peak_mib(run: Callable[[], object], leaves: Sequence[torch.Tensor]) -> float | None:
    """Peak resident memory of a run beyond its inputs and the gradients of the leaves; None off Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    run()
    for leaf in leaves:
        leaf.grad = None
    gc.collect()

    def kib(field: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field))

    before = kib("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")
    run()
    return (kib("VmHWM:") - before) / 1024 - gradient_bytes(leaves) / MIB


def table(measurements: Sequence[Measurement]) -> str:
    """Measurements as text, aligned."""
    rows = [("implementation", "median ms", "ratio", "quartiles", "memory MiB", "target")]
    for m in measurements:
        low, high = m.ratio_quartiles
        rows.append(
            (
                m.implementation + (" (baseline)" if m.implementation == m.baseline else ""),
                f"{m.milliseconds:.3g}" if m.milliseconds < 1 else f"{m.milliseconds:.1f}",
                f"{m.ratio:.2f}",
                f"{low:.2f}-{high:.2f}",
                "" if m.peak_mib is None else f"{m.peak_mib:.0f}",
                m.target,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def gradient_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t.requires_grad)
