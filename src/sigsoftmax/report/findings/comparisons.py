"""Heads trained under equal budgets: records that belong together, their ranking, and the rank of their matrices.

The terminal and the page both show what is made here, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sigsoftmax.records.grouping import grouped
from sigsoftmax.records.schemas.training import Budget, ComparisonRecord
from sigsoftmax.records.statistics import Sample, perplexity
from sigsoftmax.report.findings.rankings import RankedHead, Ranking
from sigsoftmax.report.material import corpus_label
from sigsoftmax.report.number_text import DASH, number_text, range_text, sample_text
from sigsoftmax.report.tables import Column, Fields, Row, Table, head_cell
from sigsoftmax.report.theme import Looks, same_head

__all__ = ["Comparison", "comparisons"]

NEAR_FULL = 0.9
"""share of the most that a rank can be, from which a rank counts as full"""


@dataclass(frozen=True)
class Comparison:
    """Heads on one text under one budget."""

    heads: Mapping[str, Sequence[ComparisonRecord]]
    """the seeds of each, in the order of their first records"""
    budget: Budget

    @cached_property
    def records(self) -> list[ComparisonRecord]:
        return [record for records in self.heads.values() for record in records]

    @cached_property
    def ranking(self) -> Ranking:
        """The heads ranked by their distance to the truth where that is known for all, else by their loss."""
        run, words = self.records[0].run, self.records[0].words
        recipe = (f"{self.budget.setting} recipes", *self.budget.changes)
        precision = () if run.precision == "float32" else (run.precision,)
        return Ranking.of_tests(
            self.heads,
            subject=(corpus_label(run.corpus), f"{words:,} words", *recipe, *precision),
            updates=range_text(record.updates for record in self.records),
            notes=self._position_note(),
        )

    def _position_note(self) -> tuple[str, ...]:
        errors = [record.kl_standard_error for record in self.records if record.kl_standard_error is not None]
        seeds = {record.run.seed for record in self.records}
        if any(record.kl is None for record in self.records) or len(seeds) > 1 or not errors:
            return ()
        note = (
            f"Over test positions the KL has a standard error of at most {number_text(max(errors), 2)} nats; what "
            "another seed would change is not in it."
        )
        return (note,)

    def details(self, looks: Looks | None = None) -> Table:
        """Perplexities of the same heads in the same order, and the ranks of their log-output matrices."""

        def perplexities(head: RankedHead, loss: str) -> str:
            return sample_text(Sample.of([perplexity(getattr(record, loss)) for record in self.heads[head.head]]))

        fields: Fields[RankedHead] = {
            Column("Output function", "label"): lambda head: head_cell(head.head, looks),
            "Test perplexity": lambda head: perplexities(head, "test_loss"),
            "Validation perplexity": lambda head: perplexities(head, "valid_loss"),
            "Rank": lambda head: range_text(record.rank for record in self.heads[head.head]),
            "Rank bound": lambda head: range_text(record.rank_bound for record in self.heads[head.head]),
        }
        notes = ["Perplexity: mean over seeds ± standard deviation."] if len(self.ranking.seeds) > 1 else []
        if contexts := {record.contexts for record in self.records if record.contexts is not None}:
            notes.append(
                f"Rank: singular values of the log-probabilities at {range_text(contexts)} test positions above the "
                "paper's threshold, 0.5 sqrt(M + T + 1) sigma_max eps32. Another threshold gives another rank, and no "
                "rank tells the loss."
            )
        made = Table.of(self.ranking.heads, fields, caption="Perplexity and rank of the same heads", notes=notes)
        rates = {record.entropy_rate for record in self.records if record.entropy_rate is not None}
        truth = [Row(("the truth", number_text(perplexity(rate)), *[DASH] * 3), class_="published") for rate in rates]
        return replace(made, rows=[*truth, *made.rows]) if len(truth) == 1 else made

    def findings(self) -> list[str]:
        """Losses of the heads whose matrices have full rank."""
        full = [head.level.mean for head in self.ranking.heads if all(map(_has_full_rank, self.heads[head.head]))]
        if len(full) < 2:
            return []
        text = (
            f"The {len(full)} heads of full or almost full rank have a {self.ranking.quantity} from {min(full):.4f} to "
            f"{max(full):.4f} nats: a higher rank does not by itself lower it."
        )
        return [text]


def comparisons(records: Iterable[ComparisonRecord]) -> list[Comparison]:
    """Comparisons of heads on the same text under the same budget, in the order of their first records."""
    found = []
    for (*_, budget), same in grouped(records, _compared_under).items():
        heads = grouped(same, lambda record: same_head(record.run.head))
        seeds = {head: {record.run.seed: record for record in own} for head, own in heads.items()}
        found.append(Comparison({head: [own[seed] for seed in sorted(own)] for head, own in seeds.items()}, budget))
    return found


def _has_full_rank(record: ComparisonRecord) -> bool:
    """The rank is nearly all that the matrix allows."""
    return record.rank is not None and record.rank >= NEAR_FULL * min(record.words, record.contexts or 0)


def _compared_under(record: ComparisonRecord) -> tuple[str, str, str, str, Budget]:
    run = record.run
    return run.corpus, run.corpus_checksum, run.precision, run.phase, _budget(record)


def _budget(record: ComparisonRecord) -> Budget:
    """Records of version 1 tell it by what they were: nothing in it varies with the seed."""
    if record.budget is not None:
        return record.budget
    setting = record.run.recipe.partition("-")[0]
    return Budget(setting=setting, changes=tuple(sorted(record.run.overrides)), epochs=record.epochs)
