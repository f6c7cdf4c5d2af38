"""Gaps between two heads, the paper's beside ours: ours are paired by seed, with Student's interval over the seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sigsoftmax.records.grouping import grouped
from sigsoftmax.records.published import paper
from sigsoftmax.records.published.paper import Split, Stage
from sigsoftmax.records.statistics import LEAST_SEEDS, POWER, SIGNIFICANCE, Gap, PairedDifference, Sample, perplexity
from sigsoftmax.report.material import changes
from sigsoftmax.report.number_text import DASH, MINUS, signed_text
from sigsoftmax.report.sections.perplexities import SPLIT_TITLES, STAGE_TITLES, Place, Variant
from sigsoftmax.report.tables import Column, Fields, Table
from sigsoftmax.report.theme import head_label, same_head

__all__ = ["PAIRS", "Judged", "gap_tables", "judged_gaps"]

SCALED = "softmax(alpha=1.5)"
"""softmax of logits with a larger scale: the control for sigsoftmax, whose slope lies between 1 and 2"""
PAIRS = (
    *(("softmax", "sigsoftmax"), ("mos(K=15)", "moss(K=15)")),
    *(("softmax", SCALED), (SCALED, "sigsoftmax"), ("softmax", "sigmoid"), ("sigsoftmax", "sigmoid")),
    *(("softmax", "gss(k=0)"), ("softmax", "relu"), ("softmax", "mos(K=15)")),
)
"""Pairs that are compared, the baseline first: what the paper claims, then what may explain it."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A gap between two heads at a stage, the paper's and ours: above zero where the second head is lower."""

    corpus: str
    first: str
    second: str
    stage: Stage
    split: Split
    published: Gap | None
    paired: PairedDifference
    """difference of perplexities over the seeds that both heads have"""
    relative: float
    """the second head's perplexity relative to the first's, less 1: the mean over the same seeds, of logarithms"""
    setting: str

    @property
    def size(self) -> float:
        return self.paired.mean

    def interval(self) -> str:
        ends = self.paired.interval
        if ends is None or not math.isfinite(self.size):
            return DASH
        return " to ".join(map(signed_text, ends))

    def verdict(self) -> str:
        """The difference that our seeds show, if they show one."""
        if not math.isfinite(self.size):
            return "not finite: nothing follows"
        if self.paired.is_resolved is None:
            needed = self.published.seeds_needed() if self.published else None
            more = f"; the paper's gap takes about {needed} of each at its spread" if needed else ""
            return f"fewer than {LEAST_SEEDS} seeds in common: nothing is resolved{more}"
        if self.paired.is_resolved:
            better, worse = (self.second, self.first) if self.size > 0.0 else (self.first, self.second)
            return f"{head_label(better)} is lower than {head_label(worse)}"
        return "too few seeds to tell: the interval includes zero"


def judged_gaps(corpus: str, variants: Sequence[Variant], stages: Sequence[Stage] = paper.STAGES) -> list[Judged]:
    """The comparisons of ``PAIRS`` wherever both heads were run with a common seed under the same setting."""
    found = []
    for heads in PAIRS:
        firsts, seconds = ([v for v in variants if same_head(v.run.head) == head] for head in heads)
        pairs = [(one, other) for one in firsts for other in seconds if one.setting == other.setting]
        gaps = (
            _judged(corpus, heads, (stage, split), pair) for pair in pairs for stage in stages for split in paper.SPLITS
        )
        found += [gap for gap in gaps if gap]
    return found


def _judged(
    corpus: str,
    heads: tuple[str, str],
    place: Place,
    variants: tuple[Variant, Variant],
) -> Judged | None:
    first, second = (variant.perplexities.get(place, {}) for variant in variants)
    paired = PairedDifference.of(first, second)
    if paired is None:
        return None
    logs = [math.log(second[seed]) - math.log(first[seed]) for seed in paired.seeds]
    return Judged(
        corpus=corpus,
        first=heads[0],
        second=heads[1],
        stage=place[0],
        split=place[1],
        published=paper.published_gap(corpus, *heads, *place),
        paired=paired,
        relative=perplexity(Sample.of(logs).mean) - 1.0,
        setting=", ".join(changes(variants[0].run)),
    )


def gap_tables(corpus: str, gaps: Sequence[Judged]) -> list[Table]:
    """One for every comparison."""
    fields: Fields[Judged] = {
        Column("Perplexity", "label"): lambda gap: f"{SPLIT_TITLES[gap.split]}, {STAGE_TITLES[gap.stage]}",
        "Paper": lambda gap: _published_text(gap.published),
        "Ours": lambda gap: signed_text(gap.size),
        "95 % interval": lambda gap: gap.interval(),
        "Relative": lambda gap: percent_text(gap.relative),
        "Seeds in common": lambda gap: str(len(gap.paired.seeds)),
        Column("What it shows", "words"): lambda gap: gap.verdict(),
    }
    found = []
    for (first, second, setting), here in grouped(gaps, lambda gap: (gap.first, gap.second, gap.setting)).items():
        title = f"{head_label(first)} {MINUS} {head_label(second)} on {corpus}"
        caption = ", ".join(filter(None, (title, setting))) + ": are the seeds enough?"
        found.append(Table.of(here, fields, caption=caption, notes=_notes(first, second), has_heading=True))
    return found


def _notes(first: str, second: str) -> list[str]:
    meaning = (
        f"Above zero where {head_label(second)} is lower. Relative: its perplexity against {head_label(first)}'s. "
        "The paper's gap has the standard error of the difference."
    )
    intervals = (
        f"Ours are differences over equal seeds with Student's interval; below {LEAST_SEEDS} seeds there is none. "
        f"Seeds that a gap takes: for a test at {SIGNIFICANCE:.0%} with {POWER:.0%} power."
    )
    return [meaning, intervals]


def percent_text(share: float) -> str:
    """A relative change, with its sign."""
    return f"{signed_text(100.0 * share)} %" if math.isfinite(share) else DASH


def _published_text(gap: Gap | None) -> str:
    if gap is None:
        return DASH
    error = gap.standard_error
    return signed_text(gap.size) + ("" if error is None else f" ± {error:.2f}")
