"""Heads trained under equal budgets: one grouping, one set of statistics, one table and one set of sentences.

The terminal and the page both show what is made here, so that they cannot disagree. Differences between heads are taken
seed by seed. Their sizes stand first, in nats and in percent of perplexity; an interval stands beside them where there
are seeds enough for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sigsoftmax.records.training import Budget, ComparisonRecord
from sigsoftmax.report.material import corpus_label
from sigsoftmax.report.statistics import LEAST_SEEDS, SIGNIFICANCE, PairedDifference, Sample, perplexity
from sigsoftmax.report.tables import (
    DASH,
    Cell,
    Column,
    Row,
    Table,
    number_text,
    range_text,
    sample_text,
    seconds_text,
    sentence,
    signed_text,
)
from sigsoftmax.report.theme import Looks, head_label, same_head, swatch

__all__ = ["Comparison", "Contender", "comparisons"]

BASELINE = "softmax"
CONFIDENCE = f"{100.0 * (1.0 - SIGNIFICANCE):g} %"
NEAR_FULL = 0.9
"""of the most that a rank can be"""


@dataclass(frozen=True)
class Contender:
    """A head with all its seeds."""

    head: str
    records: Mapping[int, ComparisonRecord]
    """by seed"""

    def values(self, quantity: str) -> dict[int, float]:
        """The KL to the truth (``kl``) or the test loss (``loss``) by seed, in nats."""
        return {seed: _value(record, quantity) for seed, record in self.records.items()}

    def sample(self, value: Callable[[ComparisonRecord], float]) -> Sample:
        return Sample.of([value(record) for record in self.records.values()])

    @property
    def ranks(self) -> list[int | None]:
        return [record.rank for record in self.records.values()]

    @property
    def has_full_rank(self) -> bool:
        """Whether the rank of every seed is nearly all that the matrix allows."""
        return all(
            record.rank is not None and record.rank >= NEAR_FULL * min(record.words, record.contexts or 0)
            for record in self.records.values()
        )


def _value(record: ComparisonRecord, quantity: str) -> float:
    if quantity == "loss":
        return record.test_loss
    return math.nan if record.kl is None else record.kl


@dataclass(frozen=True)
class Comparison:
    """Heads on one text under one budget."""

    contenders: Sequence[Contender]
    """the best first"""
    budget: Budget

    @cached_property
    def records(self) -> list[ComparisonRecord]:
        return [record for contender in self.contenders for record in contender.records.values()]

    @property
    def quantity(self) -> str:
        """What heads are compared by: the distance to the truth wherever it is known."""
        return _quantity(self.records)

    @property
    def quantity_name(self) -> str:
        return {"kl": "KL to the truth", "loss": "test loss"}[self.quantity]

    @property
    def seeds(self) -> list[int]:
        return sorted({record.run.seed for record in self.records})

    @property
    def baseline(self) -> Contender | None:
        return self.named(BASELINE)

    def named(self, head: str) -> Contender | None:
        return next((contender for contender in self.contenders if contender.head == head), None)

    def level(self, contender: Contender) -> Sample:
        return Sample.of(list(contender.values(self.quantity).values()))

    def difference(self, contender: Contender, other: Contender) -> PairedDifference | None:
        """By how many nats a head lies above another, seed by seed; None without a seed that both have."""
        return PairedDifference.of(contender.values(self.quantity), other.values(self.quantity))

    @property
    def differences(self) -> list[tuple[Contender, PairedDifference]]:
        """Of each head from softmax; none where softmax was not trained."""
        found = []
        for contender in self.contenders:
            if self.baseline is not None and contender is not self.baseline:
                difference = self.difference(contender, self.baseline)
                if difference is not None:
                    found.append((contender, difference))
        return found

    # --- tables ---------------------------------------------------------------------------------------------------

    @property
    def caption(self) -> str:
        some = self.records[0]
        recipe = ", ".join((f"{self.budget.setting} recipes", *self.budget.changes))
        precision = () if some.run.precision == "float32" else (some.run.precision,)
        seeds = f"{len(self.seeds)} seed{'s' if len(self.seeds) > 1 else ''}"
        epochs = f"{range_text(record.epochs for record in self.records)} epochs"
        updates = f"{range_text(record.updates for record in self.records)} updates"
        text = f"{sentence(corpus_label(some.run.corpus))}, {some.words:,} words"
        return "; ".join((text, recipe, ", ".join((epochs, updates, seeds, *precision))))

    def table(self, looks: Looks | None = None) -> Table:
        """Levels, and sizes of the differences from softmax; with looks, each head has its swatch on a page."""
        differences = {contender.head: difference for contender, difference in self.differences}
        has_intervals = any(difference.interval for difference in differences.values())
        columns = [Column("Output function", "label"), Column("Seeds"), Column("Test perplexity")]
        if self.quantity == "kl":
            columns.append(Column("KL to the truth (nats)"))
        if differences:
            columns += [Column(title, group="against softmax") for title in ("Nats", "Perplexity")]
        if has_intervals:
            columns += [Column(f"{CONFIDENCE} interval (nats)", "label"), Column("Resolved", "label")]
        rows = []
        rates = {record.entropy_rate for record in self.records if record.entropy_rate is not None}
        if len(rates) == 1:
            truth = ["the truth", DASH, number_text(perplexity(rates.pop())), *(["0"] if self.quantity == "kl" else [])]
            rows.append(Row([*truth, *[DASH] * (len(columns) - len(truth))], class_="published"))
        for contender in self.contenders:
            cells: list[Cell | str] = [
                _named(contender.head, looks),
                str(len(contender.records)),
                sample_text(contender.sample(lambda record: perplexity(record.test_loss))),
            ]
            if self.quantity == "kl":
                cells.append(sample_text(self.level(contender), decimals=4))
            difference = differences.get(contender.head)
            if differences:
                cells += [_nats(difference), _percent(difference)]
            if has_intervals:
                cells += [_interval(difference), _resolved(difference)]
            rows.append(Row(cells))
        return Table(caption=self.caption, columns=columns, rows=rows, notes=self._notes(has_intervals))

    def _notes(self, has_intervals: bool) -> list[str]:
        notes = []
        if len(self.seeds) > 1:
            notes.append("±: standard deviation over seeds.")
        if self.differences:
            notes.append(
                f"Against softmax: mean over pairs of the same seed of the {self.quantity_name} less that of softmax, "
                "and what it is in percent of perplexity. Below zero is better than softmax."
            )
        if any(len(contender.records) < len(self.seeds) for contender in self.contenders):
            notes.append("The heads have different seeds; a difference is over those that both have.")
        if has_intervals:
            notes.append(
                "Interval: Student's, of the mean over pairs. Each stands for itself: of twenty differences that are "
                "none, one is called resolved on average."
            )
        if self.quantity == "kl" and len(self.seeds) == 1:
            errors = [r.kl_standard_error for r in self.records if r.kl_standard_error is not None]
            if errors:
                notes.append(
                    f"Over test positions the KL has a standard error of at most {number_text(max(errors), 2)} nats; "
                    "what another seed would change is not in it."
                )
        return notes

    def details(self, looks: Looks | None = None) -> Table:
        """Ranks, sizes and times of the same heads."""
        titles = ("Validation perplexity", "Rank", "Rank bound", "Parameters", "Time of a run")
        rows = []
        for contender in self.contenders:
            records = contender.records.values()
            rows.append(
                Row(
                    (
                        _named(contender.head, looks),
                        sample_text(contender.sample(lambda record: perplexity(record.valid_loss))),
                        range_text(contender.ranks),
                        range_text(record.rank_bound for record in records),
                        range_text(record.run.parameters for record in records),
                        seconds_text(contender.sample(lambda record: record.seconds).mean),
                    )
                )
            )
        contexts = {record.contexts for record in self.records if record.contexts is not None}
        note = (
            f"Rank: singular values of the log-probabilities at {range_text(contexts)} test positions above the "
            "paper's threshold, 0.5 sqrt(M + T + 1) sigma_max eps32."
        )
        columns = [Column("Output function", "label"), *map(Column, titles)]
        return Table(
            caption="Rank, size and time of the same heads",
            columns=columns,
            rows=rows,
            notes=[note] if contexts else (),
        )

    # --- sentences ------------------------------------------------------------------------------------------------

    def findings(self) -> list[str]:
        """What the numbers say, the best head first; nothing here is known beforehand."""
        found = [self._best(), self._seeds(), self._against_softmax(), self._control(), self._full_ranks()]
        return [text for text in found if text]

    def _best(self) -> str | None:
        if len(self.contenders) < 2:
            return None
        best = self.contenders[0]
        text = f"{head_label(best.head)} has the lowest {self.quantity_name}, {_level_text(self.level(best))} nats"
        other = self.baseline if self.baseline not in (None, best) else self.contenders[1]
        assert other is not None
        difference = self.difference(best, other)
        if difference is None:
            return f"{text}; no seed is common to it and {head_label(other.head)}."
        return f"{text}: {self._effect_text(difference, other)}."

    def _seeds(self) -> str | None:
        """What the seeds can tell, before anything is read into the sizes."""
        if len(self.contenders) < 2:
            return None
        most = max((len(difference.seeds) for _, difference in self.differences), default=len(self.seeds))
        if most < LEAST_SEEDS:
            have = "one seed" if most == 1 else f"{most} seeds"
            return (
                f"With {have} nothing can be resolved: how far another seed would move a head is not known. Three are "
                "the least that say anything (--seeds 1,2,3), and a small difference needs more."
            )
        resolved = [head_label(contender.head) for contender, d in self.differences if d.is_resolved]
        open_ = [head_label(contender.head) for contender, d in self.differences if d.is_resolved is False]
        unjudged = [head_label(contender.head) for contender, d in self.differences if d.is_resolved is None]
        parts = [f"resolved for {', '.join(resolved)}"] if resolved else []
        parts += [f"not resolved for {', '.join(open_)}"] if open_ else []
        parts += [f"cannot be resolved for {', '.join(unjudged)}, for want of seeds"] if unjudged else []
        return f"The difference from softmax is {'; '.join(parts)}." if parts else None

    def _against_softmax(self) -> str | None:
        if self.baseline is None:
            return None
        parts = [
            f"{head_label(contender.head)} {_nats(difference)} ({_percent(difference)})"
            for contender, difference in self.differences
        ]
        level = _level_text(self.level(self.baseline))
        quantity = sentence(self.quantity_name)
        return (
            f"{quantity} against softmax's {level}, in nats and in perplexity: {'; '.join(parts)}." if parts else None
        )

    def _control(self) -> str | None:
        """sigsoftmax beside a softmax of scaled logits: its slope is between 1 and 2, so scale is a confound."""
        control = next((c for c in self.contenders if c.head.startswith("softmax(")), None)
        head = self.named("sigsoftmax")
        difference = None if control is None or head is None else self.difference(head, control)
        if difference is None or control is None:
            return None
        return f"Against the control for scale, sigsoftmax is {self._effect_text(difference, control)}."

    def _effect_text(self, difference: PairedDifference, other: Contender) -> str:
        direction = "below" if difference.mean < 0.0 else "above"
        level = self.level(other).mean
        of_kl = ""
        if self.quantity == "kl" and level > 0.0 and math.isfinite(difference.mean):
            of_kl = f", {100.0 * abs(difference.mean) / level:.1f} % of its KL"
        size = f"{abs(difference.mean):.4f} nats {direction} {head_label(other.head)} ({_percent(difference)} in "
        return f"{size}perplexity{of_kl}){_verdict(difference)}"

    def _full_ranks(self) -> str | None:
        full = [self.level(contender).mean for contender in self.contenders if contender.has_full_rank]
        if len(full) < 2:
            return None
        return (
            f"The {len(full)} heads of full or almost full rank have a {self.quantity_name} from {min(full):.4f} to "
            f"{max(full):.4f} nats: a higher rank does not by itself lower it."
        )


# --- grouping ---------------------------------------------------------------------------------------------------------


def comparisons(records: Iterable[ComparisonRecord]) -> list[Comparison]:
    """Comparisons of heads on the same text under the same budget, in the order of their first records."""
    groups: dict[Hashable, tuple[Budget, dict[str, dict[int, ComparisonRecord]]]] = {}
    for record in records:
        run, budget = record.run, _budget(record)
        key = (run.corpus, run.corpus_checksum, run.precision, run.phase, budget)
        _, heads = groups.setdefault(key, (budget, {}))
        heads.setdefault(same_head(run.head), {})[run.seed] = record
    return [_comparison(budget, heads) for budget, heads in groups.values()]


def _budget(record: ComparisonRecord) -> Budget:
    """Records of version 1 tell it by what they were: nothing in it varies with the seed."""
    if record.budget is not None:
        return record.budget
    setting = record.run.recipe.partition("-")[0]
    return Budget(setting=setting, changes=tuple(sorted(record.run.overrides)), epochs=record.epochs)


def _comparison(budget: Budget, heads: Mapping[str, Mapping[int, ComparisonRecord]]) -> Comparison:
    contenders = [Contender(head, dict(sorted(records.items()))) for head, records in heads.items()]
    quantity = _quantity([record for contender in contenders for record in contender.records.values()])

    def level(contender: Contender) -> float:
        mean = Sample.of(list(contender.values(quantity).values())).mean
        return math.inf if math.isnan(mean) else mean

    return Comparison(sorted(contenders, key=level), budget)


def _quantity(records: Sequence[ComparisonRecord]) -> str:
    return "kl" if all(record.kl is not None for record in records) else "loss"


# --- text -------------------------------------------------------------------------------------------------------------


def _named(head: str, looks: Looks | None) -> Cell | str:
    return head_label(head) if looks is None else Cell(looks[head].label, swatch(looks[head]))


def _level_text(sample: Sample) -> str:
    return number_text(sample.mean) if not math.isfinite(sample.mean) else f"{sample.mean:.4f}"


def _nats(difference: PairedDifference | None) -> str:
    return DASH if difference is None else signed_text(difference.mean, ".4f")


def _percent(difference: PairedDifference | None) -> str:
    if difference is None:
        return DASH
    change = 100.0 * difference.perplexity_change
    return f"{signed_text(change, '.2f' if abs(change) < 1.0 else '.1f')} %"


def _interval(difference: PairedDifference | None) -> str:
    interval = None if difference is None else difference.interval
    return DASH if interval is None else " to ".join(signed_text(end, ".4f") for end in interval)


def _resolved(difference: PairedDifference | None) -> str:
    return DASH if difference is None else {True: "yes", False: "no", None: DASH}[difference.is_resolved]


def _verdict(difference: PairedDifference) -> str:
    """What follows a size: its interval, or nothing where there is none."""
    if difference.is_resolved is None:
        return ""
    resolved = "resolved" if difference.is_resolved else "not resolved"
    return f", {CONFIDENCE} interval {_interval(difference)}: {resolved} by {len(difference.seeds)} seeds"
