"""The bottleneck in three minutes: what each output head can express at a width, on a language of known truth.

A table at one width, two pictures, records, and a few sentences that are derived from the numbers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sigsoftmax._version import install_extra
from sigsoftmax.analysis.capacity.curves import CapacityConfig, capacity_curves
from sigsoftmax.analysis.capacity.distributions import Distributions
from sigsoftmax.analysis.capacity.fits import softmax_width_of_equal_kl
from sigsoftmax.analysis.capacity.lbfgs import Budget
from sigsoftmax.analysis.spectrum.singular_values import spectrum
from sigsoftmax.experiments.capacity import head_text, ruled, softmax_curve
from sigsoftmax.experiments.display import Say
from sigsoftmax.experiments.pictures import draw_bottleneck
from sigsoftmax.experiments.runs.run import check_out
from sigsoftmax.records import Record, store
from sigsoftmax.records.schemas.capacity import CapacityResult
from sigsoftmax.report.number_text import width_text
from sigsoftmax.report.sections.capacity import EQUAL, change_text
from sigsoftmax.synthetic import Language

__all__ = ["DemoConfig", "run"]

HEADS = ("softmax", "sigsoftmax", "shifted_sigsoftmax(b=per_class)", "gss(k=0.2)", "gss(k=0)", "mos(K=4)", "moss(K=4)")
FLOOR = 1e-4
"""nats below which a fit ends: far below what the picture shows"""


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
            budget=Budget(iterations=100 if self.quick else 300, floor=FLOOR),
            thorough_widths=(self.width,),
            thorough_random_starts=1,
            thorough_budget=Budget(iterations=200 if self.quick else 500, tolerance=3e-4, floor=FLOOR),
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
    say(table(results, config.width))
    say("\n".join(findings(results, config.width, language.log_rank)))

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


# --- the table ------------------------------------------------------------------------------------------------------


def table(results: Sequence[CapacityResult], width: int) -> str:
    """The heads at one width, in plain text."""
    header = ("head", "numbers per", "output", "rank", "rank", "KL of", "worst", "excess", "softmax of", "time")
    second = ("", "context", "parameters", "bound", "measured", "the fit", "start", "perplexity", "equal KL", "(s)")
    curve = softmax_curve(results)
    rows = [header, second, *(_row(result, curve) for result in at_width(results, width))]
    notes = (
        "KL, in nats, is that of the best fit of the head itself; the worst start shows the optimiser's share.",
        "Rank measured: singular values of log Q of that fit above 0.5 sqrt(M + N + 1) sigma_max eps32. Another",
        "threshold gives another rank; fits are made in float64, whose rounding lies below this one.",
    )
    return "\n".join([f"Width d = {width}", *ruled(rows, headings=2), *notes])


def _row(result: CapacityResult, curve: dict[int, float]) -> tuple[str, ...]:
    return (
        head_text(result.head),
        str(result.numbers_per_context),
        f"{result.output_parameters:,}",
        str(result.rank_bound),
        str(result.rank),
        f"{result.fitted_kl:.4f}",
        f"{result.worst_fitted_kl:.4f}",
        f"x {result.excess_perplexity:.3f}",
        width_text(softmax_width_of_equal_kl(result.fitted_kl, curve, floor=FLOOR), curve),
        f"{result.seconds:.1f}",
    )


def at_width(results: Sequence[CapacityResult], width: int) -> list[CapacityResult]:
    """The results at one width, worst first, softmax before its equals."""
    chosen = [result for result in results if result.width == width]
    return sorted(chosen, key=lambda result: -round(result.fitted_kl, 4))


# --- the text -------------------------------------------------------------------------------------------------------


def findings(results: Sequence[CapacityResult], width: int, log_rank: int) -> list[str]:
    """Sentences that follow from the numbers; nothing here is known beforehand."""
    here = {result.head: result for result in results if result.width == width}
    softmax = here["softmax"]
    curve = softmax_curve(results)
    lines = [_necessary(curve, log_rank)]
    if "sigsoftmax" in here:
        lines.append(_sigsoftmax(softmax, here["sigsoftmax"]))
    lines.append(_others(softmax, [r for r in here.values() if r.head not in ("softmax", "sigsoftmax")], curve))
    lines.append(_sufficient(list(here.values())))
    return lines


def _necessary(curve: dict[int, float], log_rank: int) -> str:
    reached = [width for width, kl in curve.items() if kl <= FLOOR]
    missed = [width for width in curve if width not in reached]
    if not reached:
        return f"- softmax reaches the truth at none of these widths; log P has rank {log_rank}."
    sentence = f"- softmax reaches the truth (KL <= {FLOOR:g}) at width {min(reached)}"
    if missed and max(missed) < min(reached):
        sentence += f" and not at {max(missed)}: its log-outputs have rank at most d + 2, and log P has rank {log_rank}"
    return sentence + "."


def _sigsoftmax(softmax: CapacityResult, sigsoftmax: CapacityResult) -> str:
    gain = 1.0 - sigsoftmax.fitted_kl / softmax.fitted_kl
    ranks = f"numerical rank {sigsoftmax.rank} where softmax has {softmax.rank}"
    limit = ""
    if sigsoftmax.limit_kl is not None:
        limit = f"\n  In the limit it reaches at most {sigsoftmax.limit_kl:.4f}, since it contains softmax there; the "
        limit += "fits did not go so far."
    if abs(gain) < EQUAL:
        return (
            f"- sigsoftmax has {ranks}, and the same KL within {abs(gain):.2%} "
            f"({sigsoftmax.fitted_kl:.4f} against {softmax.fitted_kl:.4f}): the higher rank did not lower it.{limit}"
        )
    return f"- sigsoftmax has {ranks}, and {change_text(-gain)} KL.{limit}"


def _others(softmax: CapacityResult, others: Sequence[CapacityResult], curve: dict[int, float]) -> str:
    parts = []
    for result in sorted(others, key=lambda r: -r.fitted_kl):
        gain = 1.0 - result.fitted_kl / softmax.fitted_kl
        worth = width_text(softmax_width_of_equal_kl(result.fitted_kl, curve, floor=FLOOR), curve)
        parts.append(f"\n    {head_text(result.head)}: {change_text(-gain)}, worth softmax of {worth}")
    caution = (
        "\n  A head that contains another goes on from its solution, and so is fitted longer: gaps of a few percent,"
        "\n  as between MoS and MoSS, may be the optimiser's."
    )
    return f"- KL at width {softmax.width} against softmax:" + "".join(parts) + caution


def _sufficient(here: Sequence[CapacityResult]) -> str:
    full = max(result.rank_bound for result in here)
    high = [result for result in here if result.rank >= 0.9 * full]
    if len(high) < 2:
        return "- Too few heads reach full rank to compare them."
    low_kl, high_kl = min(result.fitted_kl for result in high), max(result.fitted_kl for result in high)
    sentence = (
        f"- Among the {len(high)} heads of full or almost full measured rank KL runs from {low_kl:.4f} to {high_kl:.4f}"
    )
    if high_kl > (1.0 + 10.0 * EQUAL) * low_kl:
        return sentence + ":\n  rank is necessary, not sufficient: a higher rank does not by itself lower the loss."
    return sentence + "."
