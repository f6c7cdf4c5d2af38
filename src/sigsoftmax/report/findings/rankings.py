"""Heads ranked over seeds: one table for terminal and page, in which sizes stand before intervals.

A ranking holds runs that may be compared: one text, one budget, one precision, one quantity. Differences between heads
are taken seed by seed. What follows from a ranking is said in :mod:`sigsoftmax.report.findings.verdicts`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sigsoftmax.records.schemas.sweeps import TrialRecord
from sigsoftmax.records.schemas.training import ComparisonRecord
from sigsoftmax.records.statistics import LEAST_SEEDS, SIGNIFICANCE, PairedDifference, Sample, perplexity
from sigsoftmax.report.number_text import (
    DASH,
    NO_BREAK,
    counted,
    interval_text,
    range_text,
    sample_text,
    seconds_text,
    sentence,
    signed_text,
    yes_or_no,
)
from sigsoftmax.report.tables import Column, Fields, Table, head_cell
from sigsoftmax.report.theme import Looks, head_label

__all__ = ["BASELINE", "CONFIDENCE", "KL", "RankedHead", "Ranking", "nats_text", "percent_text"]

BASELINE = "softmax"
CONFIDENCE = f"{100.0 * (1.0 - SIGNIFICANCE):g} %"
KL = "KL to the truth"
AGAINST = "against softmax"


@dataclass(frozen=True, kw_only=True)
class RankedHead:
    """A head with all its seeds."""

    head: str
    values: Mapping[int, float]
    """the numbers that heads are ranked by, in nats, by seed: less is better"""
    losses: Mapping[int, float]
    """whose exp is the perplexity that is shown, in nats, by seed"""
    seconds: Mapping[int, float] = field(default_factory=dict)
    """duration of training and validation, by seed, where they are on record"""
    epochs: Mapping[int, int] = field(default_factory=dict)
    """by seed, where they are on record"""
    parameters: frozenset[int] = frozenset()

    @property
    def label(self) -> str:
        return head_label(self.head)

    @property
    def is_scale_control(self) -> bool:
        """softmax of scaled logits: whatever it reaches too is no merit of another function."""
        return self.head.startswith(f"{BASELINE}(")

    @cached_property
    def level(self) -> Sample:
        return Sample.of(list(self.values.values()))

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.level.mean)

    @property
    def perplexities(self) -> Sample:
        return Sample.of([perplexity(loss) for loss in self.losses.values()])

    @property
    def mean_seconds(self) -> float | None:
        return sum(self.seconds.values()) / len(self.seconds) if self.seconds else None


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Heads on one text under one budget."""

    heads: Sequence[RankedHead]
    """the best first, as :meth:`of` puts them"""
    quantity: str
    """name of the quantity in ``values``: the KL to the truth wherever it is known, else a loss"""
    perplexity_of: str
    """the text that ``losses`` are of, as ``test``"""
    subject: tuple[str, ...]
    """text, recipe, changes, precision: what runs of another ranking may have otherwise"""
    updates: str = ""
    """number of updates of a run, where it is on record"""
    notes: tuple[str, ...] = ()
    """further notes under the table"""

    @classmethod
    def of(cls, heads: Sequence[RankedHead], **fields: object) -> Ranking:
        ordered = sorted(heads, key=lambda head: head.level.mean if head.is_finite else math.inf)
        return cls(heads=ordered, **fields)  # type: ignore[arg-type]

    @classmethod
    def of_tests(cls, heads: Mapping[str, Sequence[ComparisonRecord | TrialRecord]], **fields: object) -> Ranking:
        """Test results of heads, by the distance to the truth wherever it is known for all."""
        by_kl = all(record.kl is not None for records in heads.values() for record in records)
        ranked = []
        for head, records in heads.items():
            runs = {record.run.seed: record for record in records}
            losses = {seed: record.test_loss for seed, record in runs.items()}
            kls = {seed: math.nan if record.kl is None else record.kl for seed, record in runs.items()}
            ranked.append(
                RankedHead(
                    head=head,
                    values=kls if by_kl else losses,
                    losses=losses,
                    seconds={seed: record.seconds for seed, record in runs.items()},
                    epochs={seed: record.epochs for seed, record in runs.items()},
                    parameters=frozenset(record.run.parameters for record in records),
                )
            )
        return cls.of(ranked, quantity=KL if by_kl else "test loss", perplexity_of="test", **fields)

    @property
    def has_truth(self) -> bool:
        return self.quantity == KL

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for head in self.heads for seed in head.values})

    @property
    def baseline(self) -> RankedHead | None:
        return next((head for head in self.heads if head.head == BASELINE), None)

    @property
    def can_resolve(self) -> bool:
        """Some two heads have seeds enough in common for an interval."""
        return self.most_pairs >= LEAST_SEEDS

    @property
    def most_pairs(self) -> int:
        """The most seeds that any two heads have in common."""
        pairs = itertools.combinations(self.heads, 2)
        return max((len(one.values.keys() & other.values.keys()) for one, other in pairs), default=0)

    @property
    def comparisons_made(self) -> int:
        """The number of heads that one of them is compared with: intervals are widened so that they hold together."""
        return max(len(self.heads) - 1, 1)

    def difference(self, head: RankedHead, other: RankedHead) -> PairedDifference | None:
        """The distance of a head above another in nats, seed by seed; None without a seed that both have.

        Whoever compares seven heads and looks at the best has made six comparisons. By Bonferroni's inequality the
        intervals of all six hold together with 95 % if each has 1 - 0.05 / 6.
        """
        return PairedDifference.of(head.values, other.values, 1.0 - SIGNIFICANCE / self.comparisons_made)

    @cached_property
    def differences(self) -> dict[str, PairedDifference]:
        """The difference of each head from softmax; none where softmax was not trained."""
        if self.baseline is None:
            return {}
        others = [head for head in self.heads if head is not self.baseline]
        found = {head.head: self.difference(head, self.baseline) for head in others}
        return {head: difference for head, difference in found.items() if difference is not None}

    @property
    def longest(self) -> int:
        """Epochs of the longest run; 0 where they are not on record."""
        return max((epoch for head in self.heads for epoch in head.epochs.values()), default=0)

    @property
    def extent(self) -> str:
        """The length of the runs, and the number of seeds."""
        epochs = [epoch for head in self.heads for epoch in head.epochs.values()]
        length = f"{range_text(epochs)} {'epoch' if set(epochs) == {1} else 'epochs'}, " if epochs else ""
        return f"{length}{counted(len(self.seeds), 'seed')}"

    # --- the table ------------------------------------------------------------------------------------------------

    @property
    def caption(self) -> str:
        text, *recipe = self.subject
        extent = f"{self.extent}, {self.updates} updates" if self.updates else self.extent
        return "; ".join(filter(None, (sentence(text), ", ".join(recipe), extent)))

    def table(self, looks: Looks | None = None) -> Table:
        """The heads, the best first; with looks, each has its swatch on a page."""
        against = self.differences
        has_intervals = any(difference.interval for difference in against.values())
        is_level = len({len(head.values) for head in self.heads}) == 1
        title = f"{KL} (nats)" if self.has_truth else f"{sentence(self.perplexity_of)} perplexity"
        fields: Fields[RankedHead] = {
            Column("Output function", "label"): lambda head: head_cell(head.head, looks),
            # Where all have as many the caption says so, and the table is the narrower.
            **({} if is_level else {"Seeds": lambda head: str(len(head.values))}),
            Column(title, "interval"): lambda head: (
                _level_text(head.level, 4) if self.has_truth else _level_text(head.perplexities, 2)
            ),
        }
        if against:
            fields[Column("Nats", "interval", AGAINST)] = lambda head: nats_text(against.get(head.head))
            fields[Column("Perplexity", group=AGAINST)] = lambda head: percent_text(against.get(head.head))
        if has_intervals:
            fields[Column("Resolved", "label", AGAINST)] = lambda head: yes_or_no(
                against[head.head].is_resolved if head.head in against else None
            )
        fields[Column("Time")] = lambda head: seconds_text(head.mean_seconds)
        fields[Column("Parameters")] = lambda head: range_text(head.parameters)
        notes = [*self._notes(has_intervals), *self.notes]
        return Table.of(self.heads, fields, caption=self.caption, notes=notes)

    def _notes(self, has_intervals: bool) -> list[str]:
        together = f", widened so that all {self.comparisons_made} hold together" if len(self.heads) > 2 else ""
        intervals = (
            f"In brackets: Student's {CONFIDENCE} interval of the mean over seeds. Such intervals may overlap where "
            "differences, which are taken seed by seed, are resolved."
        )
        against = (
            f"Against softmax: mean over pairs of the same seed of the {self.quantity} less that of softmax, and what "
            "it is in percent of perplexity. Below zero is better than softmax."
        )
        width = f"The interval of a difference is Student's, {CONFIDENCE}{together}. Resolved: it leaves out zero."
        seeds = "The heads have different seeds; a difference is over those that both have."
        time = "Time: training and validation of a run, as measured beside whatever else the machine did."
        notes = (
            (intervals, any(head.level.interval() for head in self.heads)),
            (
                "±: standard deviation over seeds.",
                any(len(head.values) > 1 and not head.level.interval() for head in self.heads),
            ),
            (against, bool(self.differences)),
            (width, has_intervals),
            (seeds, any(len(head.values) < len(self.seeds) for head in self.heads)),
            (time, any(head.seconds for head in self.heads)),
        )
        return [note for note, holds in notes if holds]


# --- text -------------------------------------------------------------------------------------------------------------


def _level_text(sample: Sample, decimals: int) -> str:
    """Mean and interval; where there is none, mean and standard deviation."""
    interval = sample.interval()
    if interval is None:
        return sample_text(sample, decimals).replace(" ", NO_BREAK)
    return f"{sample_text(Sample(sample.mean, None, 1), decimals)} {interval_text(interval, f',.{decimals}f')}"


def nats_text(difference: PairedDifference | None) -> str:
    """The size, and its interval where there is one."""
    if difference is None:
        return DASH
    size = signed_text(difference.mean, ".4f")
    return size if difference.interval is None else f"{size} {interval_text(difference.interval, '+.4f')}"


def percent_text(difference: PairedDifference | None) -> str:
    if difference is None:
        return DASH
    change = 100.0 * difference.perplexity_change
    return f"{signed_text(change, '.2f' if abs(change) < 1.0 else '.1f')} %"
