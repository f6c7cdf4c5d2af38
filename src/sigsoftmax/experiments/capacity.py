"""Capacity curves as a tool: the least KL of any heads at any widths, on a language or on given distributions.

KL is shown against the width and against the free numbers of a context, since a mixture of K components has K vectors.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from sigsoftmax.analysis.audit.effort import fit_seconds
from sigsoftmax.analysis.capacity.curves import CapacityConfig, capacity_curves, contained_pairs
from sigsoftmax.analysis.capacity.lbfgs import Budget
from sigsoftmax.analysis.spectrum.singular_values import spectrum
from sigsoftmax.contract.spec import check_positive
from sigsoftmax.experiments.display import Say
from sigsoftmax.experiments.distribution_sources import open_distributions
from sigsoftmax.experiments.fitted_heads import fitted_heads
from sigsoftmax.experiments.runs.run import check_out
from sigsoftmax.family.notation import check_choice
from sigsoftmax.records import Record, store
from sigsoftmax.records.durations import duration_text
from sigsoftmax.records.schemas.capacity import CapacityResult
from sigsoftmax.report.findings.capacity import kl_table
from sigsoftmax.synthetic import Weighting

__all__ = ["CapacityToolConfig", "run"]

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
    """The truth, the heads and widths, and how much work each fit may take."""

    target: str = LANGUAGE
    """a language, or a file of probabilities or log-probabilities, one context per row"""
    heads: tuple[str, ...] = HEADS
    """heads that are fitted, as recipes name them: softmax,gss-0.2,mos"""
    widths: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    """widths of the fits"""
    softmax_widths: tuple[int, ...] = ()
    """further widths for softmax alone"""
    weights: Weighting = "uniform"
    """weights of a language's contexts: the same for each, or as often as it occurs in a text"""
    starts: int = 3
    """starts of each fit, at least; contained heads and the narrower solution count"""
    iterations: int = 500
    """iterations of each fit, at most"""
    tolerance: float = 1e-3
    """a fit ends when it gains less than this fraction over some tens of steps"""
    floor: float = 1e-4
    """KL in nats below which a fit ends"""
    workers: int = 2
    """number of processes"""
    seed: int = 0
    """seed of the starts"""
    out: Path = Path("runs/capacity")
    """folder for the records"""

    def __post_init__(self) -> None:
        check_positive(starts=self.starts)
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        check_choice("weights", self.weights, ("uniform", "stationary"))
        check_out(self.out)
        self.capacity()

    def capacity(self) -> CapacityConfig:
        return CapacityConfig(
            heads=fitted_heads(self.heads),
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
    rank = "some words have probability zero, so log P has no rank"
    if of_truth is not None:
        rank = f"log P of numerical rank {of_truth.float64_rank}"
        store(config.records, Record.of(of_truth))
    seconds = fit_seconds(truth, config.capacity())
    say(
        f"{truth.description}: {contexts:,} contexts, {words:,} words, {rank}.\n"
        f"Each head is fitted with a free h for every context, free W and class bias, in float64, from {config.starts} "
        f"or more starts: about {duration_text(seconds)} with {config.workers} at once."
    )
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
    say(kl_table(results, caption="The fits by width").to_text())
    say(kl_table(results, caption="The same fits by free numbers per context", by_width=False).to_text())
    say(
        f"Containment holds in all {len(pairs)} pairs: no head is worse than one that it contains, or than itself at a "
        "smaller width.\nKL of free h and W is neither training nor generalisation; differences of the size of those "
        "between starts may be the optimiser's."
    )
    say(f"Done in {duration_text(time.perf_counter() - began)}. Written:\n  {config.records}")
    return results
