"""Capacity curves as a tool: the least KL of any heads at any widths, on a language or on given distributions.

KL is shown against the width and against the free numbers of a context, since a mixture of K components has K vectors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sigsoftmax.analysis.audit.effort import fit_seconds
from sigsoftmax.analysis.capacity.curves import CapacityConfig, capacity_curves, contained_pairs
from sigsoftmax.analysis.capacity.fits import softmax_width_of_equal_kl
from sigsoftmax.analysis.capacity.lbfgs import Budget
from sigsoftmax.analysis.spectrum.singular_values import spectrum
from sigsoftmax.experiments.distribution_sources import open_distributions
from sigsoftmax.family.heads import Head
from sigsoftmax.records import Record, store
from sigsoftmax.records.durations import duration_text
from sigsoftmax.records.schemas.capacity import CapacityResult
from sigsoftmax.synthetic import Weighting

__all__ = ["CapacityToolConfig", "run", "table"]

Say = Callable[[str], None]

LANGUAGE = "of_rank(contexts=400, words=200, rank=100)"
HEADS = (
    "softmax",
    "sigsoftmax",
    "shifted_sigsoftmax(b=per_class)",
    "sigmoid",
    "gss(k=0.5)",
    "gss(k=0.2)",
    "gss(k=0)",
    "gss(k=learned:0.5)",
    "mos(K=4)",
    "moss(K=4)",
)


@dataclass(frozen=True, kw_only=True)
class CapacityToolConfig:
    """Which truth, which heads and widths, and how much work each fit may take."""

    target: str = LANGUAGE
    """a language, or a file of probabilities or log-probabilities with a context a row"""
    heads: tuple[str, ...] = HEADS
    widths: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    softmax_widths: tuple[int, ...] = ()
    """further widths for softmax alone"""
    weights: Weighting = "uniform"
    """how much each context of a language counts: the same, or as often as it occurs in a text"""
    starts: int = 3
    """of each fit, at least; contained heads and the narrower solution count"""
    iterations: int = 500
    tolerance: float = 1e-3
    """a fit ends when it gains less than this fraction over some tens of steps"""
    floor: float = 1e-4
    """nats below which a fit ends"""
    workers: int = 2
    seed: int = 0
    """of the starts"""
    out: Path = Path("runs/capacity")

    def __post_init__(self) -> None:
        if self.starts < 1:
            raise ValueError(f"starts must be at least 1, got {self.starts}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.weights not in ("uniform", "stationary"):
            raise ValueError(f"weights must be 'uniform' or 'stationary', got {self.weights!r}")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"the output folder {self.out} is a file; choose another with --out")
        self.capacity()

    def capacity(self) -> CapacityConfig:
        return CapacityConfig(
            heads=self.heads,
            widths=self.widths,
            softmax_widths=self.softmax_widths,
            random_starts=0,
            least_starts=self.starts,
            budget=Budget(iterations=self.iterations, tolerance=self.tolerance, floor=self.floor),
            workers=self.workers,
            seed=self.seed,
        )

    @property
    def records(self) -> Path:
        return self.out / "capacity.jsonl"


def run(config: CapacityToolConfig, say: Say, progress: Say = lambda _: None) -> list[CapacityResult]:
    """Fit, check containment, print and record. Each fit is recorded when it is done: an interrupt loses none."""
    began = time.perf_counter()
    truth = open_distributions(config.target, weights=config.weights)
    contexts, words = truth.log_p_NV.shape
    has_zeros = bool((truth.log_p_NV == -math.inf).any())
    of_truth = None if has_zeros else spectrum(truth.log_p_NV, source=f"log P of {truth.description}")
    rank = (
        "some words have probability zero, so log P has no rank"
        if of_truth is None
        else (f"log P of numerical rank {of_truth.float64_rank}")
    )
    seconds = fit_seconds(truth, config.capacity())
    say(
        f"{truth.description}: {contexts:,} contexts, {words:,} words, {rank}.\n"
        "Each head is fitted with a free h for every context, free W and class bias, in float64, from "
        f"{config.starts} or "
        f"more starts: about {duration_text(seconds)} with {config.workers} at once."
    )
    if of_truth is not None:
        store(config.records, Record.of(of_truth))
    finished: list[CapacityResult] = []

    def fitted(result: CapacityResult, done: int, total: int) -> None:
        finished.append(result)
        store(config.records, Record.of(result))
        progress(f"fitted {done} of {total}: {result.head}, d = {result.width}")

    try:
        results = capacity_curves(truth, config.capacity(), progress=fitted)
    except KeyboardInterrupt:
        progress("")
        say(f"Interrupted. The {len(finished)} fits that were done are valid:\n  {config.records}")
        raise
    progress("")
    pairs = contained_pairs(results)
    say(table(results, "width"))
    say(table(results, "numbers"))
    say(
        f"Containment holds in all {len(pairs)} pairs: no head is worse than one that it contains, or than itself at a "
        "smaller width.\nKL of free h and W is neither training nor generalisation; differences of the size of those "
        "between starts may be the optimiser's."
    )
    say(f"Done in {duration_text(time.perf_counter() - began)}. Written:\n  {config.records}")
    return results


def table(results: Sequence[CapacityResult], against: str) -> str:
    """KL of every head's own fit, a column for each width, or for each number of free numbers a context has."""
    by_width = against == "width"

    def place(result: CapacityResult) -> int:
        return result.width if by_width else result.numbers_per_context

    columns = sorted({place(result) for result in results})
    heads = list(dict.fromkeys(result.head for result in results))
    kls = {(result.head, place(result)): result for result in results}
    title = (
        "KL (nats) of the best fit, by width d" if by_width else "the same, by free numbers per context: K d + K - 1"
    )
    rows = [["head", *map(str, columns)]]
    for head in heads:
        found = [kls.get((head, column)) for column in columns]
        rows.append([_shown(head), *("" if result is None else f"{result.fitted_kl:.4f}" for result in found)])
    if by_width:
        curve = {result.width: result.fitted_kl for result in results if result.head == "softmax"}
        rows += [[], *_worth(heads, columns, kls, curve), [], *_worst_starts(heads, columns, kls)]
        rows += _limits(heads, columns, kls)
    sizes = [max((len(row[i]) for row in rows if len(row) > i), default=0) for i in range(len(columns) + 1)]
    lines = [
        "  ".join(
            cell.ljust(size) if i == 0 else cell.rjust(size)
            for i, (cell, size) in enumerate(zip(row, sizes, strict=False))
        )
        for row in rows
    ]
    rule = "-" * len(lines[0])
    return "\n".join([title, rule, lines[0], rule, *lines[1:], rule])


_Found = dict[tuple[str, int], CapacityResult]


def _worth(heads: Sequence[str], columns: Sequence[int], kls: _Found, curve: dict[int, float]) -> list[list[str]]:
    """The softmax width of equal KL."""
    rows = [["softmax of equal KL"]]
    for head in heads:
        if Head.parse(head).is_softmax:
            continue
        cells = []
        for column in columns:
            result = kls.get((head, column))
            width = math.nan if result is None else softmax_width_of_equal_kl(result.fitted_kl, curve)
            outside = f"> {max(curve)}" if math.isinf(width) else f"< {min(curve)}"
            cells.append("" if math.isnan(width) else f"{width:.1f}" if 0.0 < width < math.inf else outside)
        rows.append([_shown(head), *cells])
    return rows


def _worst_starts(heads: Sequence[str], columns: Sequence[int], kls: _Found) -> list[list[str]]:
    rows = [["KL from the worst start"]]
    for head in heads:
        found = [kls.get((head, column)) for column in columns]
        rows.append([_shown(head), *("" if result is None else f"{result.worst_fitted_kl:.4f}" for result in found)])
    return rows


def _limits(heads: Sequence[str], columns: Sequence[int], kls: _Found) -> list[list[str]]:
    """KLs of contained heads that no fit has reached; no rows if there are none."""
    rows = []
    for head in heads:
        found = [kls.get((head, column)) for column in columns]
        cells = [_limit_text(result) for result in found]
        if any(cells):
            rows.append([_shown(head), *cells])
    return [[], ["at most, by containment"], *rows] if rows else []


def _limit_text(result: CapacityResult | None) -> str:
    if result is None or result.limit_kl is None:
        return ""
    text = f"{result.limit_kl:.4f}"
    return "" if text == f"{result.fitted_kl:.4f}" else text


def _shown(head: str) -> str:
    return head.replace("=0.0)", "=0)")
