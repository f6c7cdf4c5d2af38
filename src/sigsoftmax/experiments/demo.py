"""The bottleneck in three minutes: what each output head can express at a width, on a language of known truth.

A table at one width, two pictures, records, and a few sentences that are derived from the numbers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sigsoftmax._version import install_extra
from sigsoftmax.analysis.capacity.curves import CapacityConfig, capacity_curves
from sigsoftmax.analysis.capacity.distributions import Distributions
from sigsoftmax.analysis.capacity.lbfgs import Budget
from sigsoftmax.analysis.spectrum.singular_values import spectrum
from sigsoftmax.experiments.display import Say
from sigsoftmax.experiments.pictures import draw_bottleneck
from sigsoftmax.experiments.runs.run import check_out
from sigsoftmax.records import Record, store
from sigsoftmax.records.schemas.capacity import CapacityResult
from sigsoftmax.report.findings.capacity import REACHED, findings, fits_table, softmax_curve
from sigsoftmax.report.number_text import wrapped
from sigsoftmax.synthetic import Language

__all__ = ["DemoConfig", "run"]

HEADS = ("softmax", "sigsoftmax", "shifted_sigsoftmax(b=per_class)", "gss(k=0.2)", "gss(k=0)", "mos(K=4)", "moss(K=4)")


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Nothing but the seed changes the language: it is not chosen for the picture."""

    seed: int = 0
    """seed of the language and of the starts"""
    out: Path = Path("runs/demo")
    """folder for pictures and records"""
    quick: bool = False
    """a smaller language and no training, for a first look in some seconds"""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        check_out(self.out)

    @property
    def width(self) -> int:
        """the width of the table"""
        return 4 if self.quick else 8

    def language(self) -> Language:
        if self.quick:
            return Language.of_rank(contexts=80, words=50, rank=25, scale=2.0, seed=self.seed)
        return Language.of_rank(contexts=400, words=200, rank=100, scale=2.0, seed=self.seed)

    def capacity(self) -> CapacityConfig:
        return CapacityConfig(
            heads=HEADS,
            widths=(2, 4, 8, 16, 25) if self.quick else (2, 4, 8, 16, 32, 64, 100, 128),
            softmax_widths=(6, 12, 23, 24) if self.quick else (6, 12, 24, 48, 98, 99),
            random_starts=0,
            budget=Budget(iterations=100 if self.quick else 300, floor=REACHED),
            thorough_widths=(self.width,),
            thorough_random_starts=1,
            thorough_budget=Budget(iterations=200 if self.quick else 500, tolerance=3e-4, floor=REACHED),
            workers=2,
            seed=self.seed,
        )


def run(config: DemoConfig, say: Say, progress: Say = lambda _: None) -> list[CapacityResult]:
    """Fit, print, draw and record. ``say`` prints a paragraph, ``progress`` replaces a line that may be lost."""
    began = time.perf_counter()
    language = config.language()
    truth = spectrum(language.log_p_NV, source=f"log P of the language ({language.description})")
    say(
        f"A language of known truth: {language.num_contexts} contexts, {language.vocabulary} words, "
        f"log P of rank {language.log_rank} (seed {config.seed}).\n"
        "Each head is fitted with a free h for every context, free W and class bias, in float64, from several starts."
    )
    results = capacity_curves(
        Distributions.of_language(language),
        config.capacity(),
        progress=lambda result, done, total: progress(f"fitted {done} of {total}: {result.head}, d = {result.width}"),
    )
    progress("")
    curve = softmax_curve(results)
    here = [result for result in results if result.width == config.width]
    say(fits_table(here, caption=f"Width d = {config.width}", curve=curve).to_text())
    say("\n".join(wrapped(f"- {sentence}") for sentence in (reached(curve, language.log_rank), *findings(here))))

    records = config.out / "bottleneck.jsonl"
    store(records, [Record.of(truth), *map(Record.of, results)])
    try:
        drawn = draw_bottleneck(results, truth, config.width, config.out)
    except ImportError:
        say(f"No pictures, since matplotlib is not installed: {install_extra('plot')} brings it.")
        drawn = []
    written = "".join(f"\n  {path}" for path in (*drawn, records))
    say(f"Done in {time.perf_counter() - began:.0f} s. Written:{written}")
    return results


def reached(curve: Mapping[int, float], log_rank: int) -> str:
    """The width at which softmax reaches the truth, beside the rank that theory asks for."""
    far_enough = [width for width, kl in curve.items() if kl <= REACHED]
    missed = [width for width in curve if width not in far_enough]
    if not far_enough:
        return f"softmax reaches the truth at none of these widths; log P has rank {log_rank}."
    sentence = f"softmax reaches the truth (KL <= {REACHED:g}) at width {min(far_enough)}"
    if missed and max(missed) < min(far_enough):
        sentence += f" and not at {max(missed)}: its log-outputs have rank at most d + 2, and log P has rank {log_rank}"
    return sentence + "."
