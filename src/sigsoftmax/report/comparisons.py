"""Heads trained under equal budgets: which records belong together, their ranking, and the rank of their matrices.

The terminal and the page both show what is made here, so that they cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sigsoftmax.records.schemas.training import Budget, ComparisonRecord
from sigsoftmax.records.statistics import Sample, perplexity
from sigsoftmax.report.material import corpus_label
from sigsoftmax.report.rankings import KL, RankedHead, Ranking, named_cell
from sigsoftmax.report.tables import DASH, Column, Row, Table, number_text, range_text, sample_text
from sigsoftmax.report.theme import Looks, same_head

__all__ = ["Comparison", "Contender", "comparisons"]

NEAR_FULL = 0.9
"""of the most that a rank can be"""


@dataclass(frozen=True)
class Contender:
    """A head with all its seeds."""

    head: str
    records: Mapping[int, ComparisonRecord]
    """by seed"""

    def by_seed(self, value: Callable[[ComparisonRecord], float]) -> dict[int, float]:
        return {seed: value(record) for seed, record in self.records.items()}

    def sample(self, value: Callable[[ComparisonRecord], float]) -> Sample:
        return Sample.of(list(self.by_seed(value).values()))

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

    def ranked(self, *, by_kl: bool) -> RankedHead:
        losses = self.by_seed(lambda record: record.test_loss)
        return RankedHead(
            head=self.head,
            values=self.by_seed(lambda record: math.nan if record.kl is None else record.kl) if by_kl else losses,
            losses=losses,
            seconds=self.by_seed(lambda record: record.seconds),
            epochs={seed: record.epochs for seed, record in self.records.items()},
            parameters=frozenset(record.run.parameters for record in self.records.values()),
        )


@dataclass(frozen=True)
class Comparison:
    """Heads on one text under one budget."""

    unordered: Sequence[Contender]
    """in the order of their first records"""
    budget: Budget

    @cached_property
    def records(self) -> list[ComparisonRecord]:
        return [record for contender in self.unordered for record in contender.records.values()]

    @property
    def seeds(self) -> list[int]:
        return self.ranking.seeds

    @cached_property
    def ranking(self) -> Ranking:
        """By the distance to the truth wherever it is known for all."""
        by_kl = all(record.kl is not None for record in self.records)
        run, words = self.records[0].run, self.records[0].words
        seeds = len({record.run.seed for record in self.records})
        recipe = (f"{self.budget.setting} recipes", *self.budget.changes)
        precision = () if run.precision == "float32" else (run.precision,)
        return Ranking.of(
            [contender.ranked(by_kl=by_kl) for contender in self.unordered],
            quantity=KL if by_kl else "test loss",
            perplexity_of="test",
            subject=(corpus_label(run.corpus), f"{words:,} words", *recipe, *precision),
            updates=range_text(record.updates for record in self.records),
            notes=self._position_note(by_kl=by_kl, seeds=seeds),
        )

    def _position_note(self, *, by_kl: bool, seeds: int) -> tuple[str, ...]:
        errors = [record.kl_standard_error for record in self.records if record.kl_standard_error is not None]
        if not by_kl or seeds > 1 or not errors:
            return ()
        note = (
            f"Over test positions the KL has a standard error of at most {number_text(max(errors), 2)} nats; what "
            "another seed would change is not in it."
        )
        return (note,)

    @cached_property
    def contenders(self) -> list[Contender]:
        """The best first."""
        by_head = {contender.head: contender for contender in self.unordered}
        return [by_head[head.head] for head in self.ranking.heads]

    def details(self, looks: Looks | None = None) -> Table:
        """Perplexities of the same heads in the same order, and the ranks of their log-output matrices."""
        rows = []
        rates = {record.entropy_rate for record in self.records if record.entropy_rate is not None}
        if len(rates) == 1:
            rows.append(Row(("the truth", number_text(perplexity(rates.pop())), *[DASH] * 3), class_="published"))
        for contender in self.contenders:
            test = sample_text(contender.sample(lambda record: perplexity(record.test_loss)))
            validation = sample_text(contender.sample(lambda record: perplexity(record.valid_loss)))
            bounds = range_text(record.rank_bound for record in contender.records.values())
            rows.append(Row((named_cell(contender.head, looks), test, validation, range_text(contender.ranks), bounds)))
        contexts = {record.contexts for record in self.records if record.contexts is not None}
        note = (
            f"Rank: singular values of the log-probabilities at {range_text(contexts)} test positions above the "
            "paper's threshold, 0.5 sqrt(M + T + 1) sigma_max eps32."
        )
        notes = ["Perplexity: mean over seeds ± standard deviation."] if len(self.seeds) > 1 else []
        titles = ("Test perplexity", "Validation perplexity", "Rank", "Rank bound")
        return Table(
            caption="Perplexity and rank of the same heads",
            columns=[Column("Output function", "label"), *map(Column, titles)],
            rows=rows,
            notes=[*notes, note] if contexts else notes,
        )

    def findings(self) -> list[str]:
        """What the ranks have to do with the losses."""
        full = [head.level.mean for head in self._of_full_rank()]
        if len(full) < 2:
            return []
        text = (
            f"The {len(full)} heads of full or almost full rank have a {self.ranking.quantity} from {min(full):.4f} to "
            f"{max(full):.4f} nats: a higher rank does not by itself lower it."
        )
        return [text]

    def _of_full_rank(self) -> list[RankedHead]:
        pairs = zip(self.contenders, self.ranking.heads, strict=True)
        return [head for contender, head in pairs if contender.has_full_rank]


def comparisons(records: Iterable[ComparisonRecord]) -> list[Comparison]:
    """Comparisons of heads on the same text under the same budget, in the order of their first records."""
    groups: dict[Hashable, tuple[Budget, dict[str, dict[int, ComparisonRecord]]]] = {}
    for record in records:
        run, budget = record.run, _budget(record)
        key = (run.corpus, run.corpus_checksum, run.precision, run.phase, budget)
        _, heads = groups.setdefault(key, (budget, {}))
        heads.setdefault(same_head(run.head), {})[run.seed] = record
    return [
        Comparison([Contender(head, dict(sorted(found.items()))) for head, found in heads.items()], budget)
        for budget, heads in groups.values()
    ]


def _budget(record: ComparisonRecord) -> Budget:
    """Records of version 1 tell it by what they were: nothing in it varies with the seed."""
    if record.budget is not None:
        return record.budget
    setting = record.run.recipe.partition("-")[0]
    return Budget(setting=setting, changes=tuple(sorted(record.run.overrides)), epochs=record.epochs)
