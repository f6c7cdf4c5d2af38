"""The paper's tables of perplexity beside ours: who was measured, how often and for how long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from sigsoftmax.records import Environment
from sigsoftmax.records.grouping import grouped
from sigsoftmax.records.published import paper
from sigsoftmax.records.published.paper import PublishedTable, Split, Stage
from sigsoftmax.records.schemas.training import DynamicEvaluationRecord, EpochRecord, EvaluationRecord, RunIdentity
from sigsoftmax.records.statistics import Sample, perplexity
from sigsoftmax.report.material import Material, run_label, setting_label
from sigsoftmax.report.number_text import DASH, range_text, sample_text
from sigsoftmax.report.tables import Column, Fields, Row, Table, head_cell
from sigsoftmax.report.theme import Looks, same_head

__all__ = ["Variant", "collect", "grid_edges", "grid_table", "perplexity_table"]

Place = tuple[Stage, Split]

# Evaluation batches of the published scripts; other batches are used where these are missing.
BATCHES = {"valid": 10, "test": 1}
PHASES: dict[str, Stage] = {"train": "trained", "finetune": "finetuned"}
STAGE_TITLES: dict[Stage, str] = {
    "trained": "without finetuning",
    "finetuned": "finetuned",
    "dynamic evaluation": "dynamic evaluation",
}
SPLIT_TITLES: dict[Split, str] = {"valid": "Validation", "test": "Test"}
SHORT_SOURCES = {
    paper.PAPER: "paper",
    paper.AWD: "Merity et al.",
    paper.MOS: "Yang et al.",
    paper.KRAUSE: "Krause et al.",
}
MARKS = {
    "†": "† The least validation perplexity of the epochs on record: no evaluation of some run is there.",
    "‡": "‡ Of models that were not finetuned; the paper's were.",
}


@dataclass(kw_only=True)
class Variant:
    """All seeds of one thing: a recipe with its changes, a head, a precision, on a corpus."""

    run: RunIdentity
    """the identity of one of its seeds"""
    perplexities: dict[Place, dict[int, float]] = field(default_factory=dict)
    """stage and split -> seed -> perplexity"""
    batches: dict[tuple[Place, int], int] = field(default_factory=dict)
    """the batches of evaluations"""
    provisional: set[tuple[Place, int]] = field(default_factory=set)
    """places and seeds of validation perplexities that are the least of the epochs so far, for want of an evaluation,
    and of dynamic evaluations of models that were not finetuned, as the paper's were"""
    environments: list[Environment] = field(default_factory=list)
    epochs: dict[int, list[EpochRecord]] = field(default_factory=dict)
    """the epochs of all phases, by seed"""

    def add_epoch(self, record: EpochRecord, environment: Environment) -> None:
        seed = record.run.seed
        place: Place = (PHASES[record.run.phase], "valid")
        least = min(self.perplexities.get(place, {}).get(seed, math.inf), perplexity(record.valid_loss))
        self._set(place, seed, least, environment)
        self.provisional.add((place, seed))
        self.epochs.setdefault(seed, []).append(record)

    def add_evaluation(self, record: EvaluationRecord, environment: Environment) -> None:
        seed, place = record.run.seed, (PHASES[record.run.phase], cast(Split, record.split))
        if self.batches.get((place, seed)) == BATCHES[record.split]:
            return
        self.batches[place, seed] = record.batch
        self._set(place, seed, perplexity(record.loss), environment)
        self.provisional.discard((place, seed))

    def add_dynamic(self, record: DynamicEvaluationRecord, environment: Environment) -> None:
        seed = record.run.seed
        place: Place = ("dynamic evaluation", cast(Split, record.split))
        is_finetuned = record.run.phase == "finetune"
        is_known = seed in self.perplexities.get(place, {}) and (place, seed) not in self.provisional
        if is_known and not is_finetuned:
            return
        self._set(place, seed, perplexity(record.loss), environment)
        (self.provisional.discard if is_finetuned else self.provisional.add)((place, seed))

    def _set(self, place: Place, seed: int, value: float, environment: Environment) -> None:
        self.perplexities.setdefault(place, {})[seed] = value
        self.environments.append(environment)

    def mark(self, place: Place) -> str:
        """A key of ``MARKS`` where some seed is provisional; else empty."""
        is_marked = any((place, seed) in self.provisional for seed in self.perplexities.get(place, ()))
        return ("‡" if place[0] == "dynamic evaluation" else "†") if is_marked else ""

    def sample(self, place: Place) -> Sample | None:
        found = self.perplexities.get(place)
        return Sample.of(list(found.values())) if found else None

    def epochs_text(self, seed: int | None = None) -> str:
        """Epochs of training, and of finetuning after a plus, of one seed; least to most of all seeds if it is None."""
        lengths = []
        runs = self.epochs.values() if seed is None else [self.epochs[seed]]
        for phase in PHASES:
            own = [[e.epoch for e in found if e.run.phase == phase] for found in runs]
            if any(own):
                lengths.append(range_text(max(found) for found in own if found))
        return " + ".join(lengths) or DASH

    @property
    def setting(self) -> tuple[object, ...]:
        """The changes, precision and text that two heads must share to be compared."""
        return (self.run.overrides, self.run.precision, self.run.corpus_checksum)


def collect(material: Material) -> dict[str, list[Variant]]:
    """Corpus -> variants."""
    found: dict[tuple[object, ...], Variant] = {}

    def variant(run: RunIdentity) -> Variant:
        key = (run.corpus, run.recipe, run.overrides, same_head(run.head), run.precision, run.corpus_checksum)
        return found.setdefault(key, Variant(run=run))

    # In order of trust: later ones replace earlier ones.
    for epoch in material.epochs:
        if epoch.payload.run.phase in PHASES:
            variant(epoch.payload.run).add_epoch(epoch.payload, epoch.environment)
    for evaluation in material.evaluations:
        if evaluation.payload.run.phase in PHASES and evaluation.payload.split in BATCHES:
            variant(evaluation.payload.run).add_evaluation(evaluation.payload, evaluation.environment)
    for dynamic in material.dynamic_evaluations:
        if dynamic.payload.chosen and dynamic.payload.complete and dynamic.payload.split in BATCHES:
            variant(dynamic.payload.run).add_dynamic(dynamic.payload, dynamic.environment)
    return grouped(found.values(), lambda one: one.run.corpus)


# --- tables -------------------------------------------------------------------------------------------------------


def published_text(value: paper.PublishedResult | None) -> str:
    """A published value with the digits it was published with."""
    if value is None:
        return DASH
    form = ",.0f" if value.perplexity >= 500.0 else ""
    spread = "" if value.deviation is None else f" ± {format(value.deviation, form or 'g')}"
    return format(value.perplexity, form) + spread


def ordered_heads(variants: Iterable[Variant]) -> list[str]:
    own = [same_head(variant.run.head) for variant in variants]
    return list(dict.fromkeys([*paper.HEADS, *own]))


def perplexity_table(
    table: PublishedTable | None,
    corpus: str,
    title: str,
    variants: Sequence[Variant],
    looks: Looks,
    *,
    missing: str = "",
) -> Table:
    """A table of the paper with ours under it, head by head; without one, ours alone.

    ``missing``, where it is given, stands in a row of ours for every head of which there is no run.
    """
    places = _places(table, variants)
    own = grouped(
        (v for v in variants if v.perplexities.keys() & set(places)), lambda variant: same_head(variant.run.head)
    )
    lost = [Row((f"ours: {missing}", *[DASH] * (2 + len(places))), class_="ours")] if missing else []
    rows: list[Row] = []
    sources: dict[str, None] = {}
    for head in ordered_heads(variants):
        published = _published_rows(corpus, head, places) if table else {}
        ours = [_own_row(variant, places) for variant in own.get(head, ())]
        if published or ours:
            rows += [Row((head_cell(head, looks),)), *published.values(), *(ours or lost)]
        sources |= dict.fromkeys(published)
    return Table(
        caption=title,
        columns=[Column("Source", "label"), Column("Seeds"), Column("Epochs"), *_columns(places)],
        rows=rows,
        notes=_notes(rows, sources),
    )


def _places(table: PublishedTable | None, variants: Sequence[Variant]) -> list[Place]:
    """The stages and splits of a table of the paper; without one, those of the variants."""
    stages = table.stages if table else paper.STAGES
    places: list[Place] = [(stage, split) for stage in stages for split in paper.SPLITS]
    return [place for place in places if table or any(place in variant.perplexities for variant in variants)]


def _columns(places: Sequence[Place]) -> list[Column]:
    has_groups = len({stage for stage, _ in places}) > 1
    return [Column(SPLIT_TITLES[split], group=STAGE_TITLES[stage] * has_groups) for stage, split in places]


def _published_rows(corpus: str, head: str, places: Sequence[Place]) -> dict[str, Row]:
    """A row for each source that has something at one of the places."""
    rows = {}
    for source, found in grouped(paper.results(corpus=corpus, head=head, source=None), lambda r: r.source).items():
        values = {(result.stage, result.split): result for result in found}
        cells = [published_text(values.get(place)) for place in places]
        if any(place in values for place in places):
            name, seeds = SHORT_SOURCES.get(source, source), str(found[0].seeds or DASH)
            rows[source] = Row((name, seeds, DASH, *cells), class_="published")
    return rows


def _own_row(variant: Variant, places: Sequence[Place]) -> Row:
    samples = {place: variant.sample(place) for place in places}
    counts = {sample.count for sample in samples.values() if sample}
    cells = []
    for place, sample in samples.items():
        count = f"(n = {sample.count})" if sample and len(counts) > 1 else ""
        cells.append(" ".join(filter(None, (sample_text(sample), count, variant.mark(place)))))
    source = ", ".join(filter(None, ("ours", setting_label(variant.run))))
    return Row((source, range_text(counts), variant.epochs_text(), *cells), class_="ours")


def _notes(rows: Sequence[Row], sources: Iterable[str]) -> list[str]:
    """Notes on what stands in the rows."""
    notes = ["Mean ± standard deviation over seeds. Epochs: of training, and of finetuning after the plus."]
    short = {source: SHORT_SOURCES.get(source, source) for source in sources}
    if named := [source if source.startswith(name) else f"{name}: {source}" for source, name in short.items()]:
        notes.append(f"Sources: {'; '.join(named)}.")
    written = " ".join(text for row in rows if row.class_ == "ours" for text in row.texts[3:])
    if "(n = " in written:
        notes.append("n: seeds of that cell, where the cells of a row differ.")
    return notes + [note for mark, note in MARKS.items() if mark in written]


# --- dynamic evaluation's grid ------------------------------------------------------------------------------------


def grid_edges(chosen: DynamicEvaluationRecord, tried: Sequence[DynamicEvaluationRecord]) -> list[str]:
    """The rates η and λ of the winner that are at an end of those that were tried."""
    values = {
        "η": (chosen.learning_rate, {p.learning_rate for p in tried}),
        "λ": (chosen.decay, {p.decay for p in tried}),
    }
    return [name for name, (own, every) in values.items() if len(every) > 1 and own in (min(every), max(every))]


def grid_table(title: str, records: Sequence[DynamicEvaluationRecord], looks: Looks) -> Table | None:
    """The points of the grid that won, and the edges of the grid that they lie on."""
    Found = tuple[DynamicEvaluationRecord, list[DynamicEvaluationRecord]]
    found: list[Found] = []
    for points in grouped(records, lambda record: record.run).values():
        # A part of the grid may have been searched before the whole.
        chosen = [point for point in points if point.chosen][-1:]
        found += [(point, [p for p in points if p.split == "valid"]) for point in chosen]
    fields: Fields[Found] = {
        Column("Output function", "label"): lambda one: head_cell(one[0].run.head, looks),
        Column("Run", "words"): lambda one: run_label(one[0].run),
        "Seed": lambda one: str(one[0].run.seed),
        "Learning rate η": lambda one: f"{one[0].learning_rate:.3g}",
        "Decay λ": lambda one: f"{one[0].decay:.3g}",
        "ε": lambda one: f"{one[0].epsilon:.3g}",
        "Points tried": lambda one: str(len(one[1]) or DASH),
        Column("On the edge", "words"): lambda one: (
            (" and ".join(grid_edges(*one)) or "no") if len(one[1]) > 1 else DASH
        ),
    }
    notes = ["A value on the edge of the grid may not be the best there is."]
    return Table.of(found, fields, caption=title, notes=notes, has_heading=True) if found else None
