"""The paper's tables of perplexity beside ours: who was measured, how often and for how long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sigsoftmax.records import Environment
from sigsoftmax.records.published import paper
from sigsoftmax.records.published.paper import PublishedTable, Split, Stage
from sigsoftmax.records.schemas.training import DynamicEvaluationRecord, EpochRecord, RunIdentity
from sigsoftmax.records.statistics import Sample, perplexity
from sigsoftmax.report.material import Material, run_label, setting_label
from sigsoftmax.report.tables import DASH, Cell, Column, Row, Table, range_text, sample_text
from sigsoftmax.report.theme import Looks, head_label, same_head, swatch

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


@dataclass(kw_only=True)
class Variant:
    """All seeds of one thing: a recipe with its changes, a head, a precision, on a corpus."""

    run: RunIdentity
    """of one of its seeds"""
    perplexities: dict[Place, dict[int, float]] = field(default_factory=dict)
    """stage and split -> seed -> perplexity"""
    unfinished: set[Place] = field(default_factory=set)
    """where a validation perplexity is the least of the epochs so far, for want of an evaluation"""
    not_finetuned: set[Place] = field(default_factory=set)
    """where some model was evaluated dynamically without having been finetuned, as the paper's were"""
    environments: list[Environment] = field(default_factory=list)
    epochs: dict[int, list[EpochRecord]] = field(default_factory=dict)
    """of all phases, by seed"""

    def sample(self, place: Place) -> Sample | None:
        found = self.perplexities.get(place)
        return Sample.of(list(found.values())) if found else None

    def epochs_text(self) -> str:
        """Epochs of training, and of finetuning after a plus; least to most where seeds differ."""
        lengths = []
        for phase in PHASES:
            own = [[e.epoch for e in found if e.run.phase == phase] for found in self.epochs.values()]
            if any(own):
                lengths.append(range_text(max(found) for found in own if found))
        return " + ".join(lengths) or DASH

    @property
    def setting(self) -> tuple[object, ...]:
        """What two heads must share to be compared."""
        return (self.run.overrides, self.run.precision, self.run.corpus_checksum)


def collect(material: Material) -> dict[str, list[Variant]]:
    """Corpus -> variants."""
    found: dict[tuple[object, ...], Variant] = {}

    def variant(run: RunIdentity) -> Variant:
        key = (run.corpus, run.recipe, run.overrides, same_head(run.head), run.precision, run.corpus_checksum)
        return found.setdefault(key, Variant(run=run))

    # In order of trust: later ones replace earlier ones.
    for epoch in material.epochs:
        run = epoch.payload.run
        stage = PHASES.get(run.phase)
        if stage is None:
            continue
        seeds = variant(run).perplexities.setdefault((stage, "valid"), {})
        seeds[run.seed] = min(seeds.get(run.seed, math.inf), perplexity(epoch.payload.valid_loss))
        variant(run).unfinished.add((stage, "valid"))
        variant(run).environments.append(epoch.environment)
        variant(run).epochs.setdefault(run.seed, []).append(epoch.payload)
    evaluated: dict[tuple[int, Place, int], int] = {}
    for evaluation in material.evaluations:
        payload = evaluation.payload
        stage = PHASES.get(payload.run.phase)
        if stage is None or payload.split not in BATCHES:
            continue
        split: Split = "valid" if payload.split == "valid" else "test"
        one, place = variant(payload.run), (stage, split)
        earlier = evaluated.get((id(one), place, payload.run.seed))
        if earlier == BATCHES[split]:
            continue
        evaluated[id(one), place, payload.run.seed] = payload.batch
        one.perplexities.setdefault(place, {})[payload.run.seed] = perplexity(payload.loss)
        one.environments.append(evaluation.environment)
    for one in found.values():
        one.unfinished = {
            place
            for place in one.unfinished
            if any((id(one), place, seed) not in evaluated for seed in one.perplexities[place])
        }
    for dynamic in material.dynamic_evaluations:
        record = dynamic.payload
        if not (record.chosen and record.complete) or record.split not in BATCHES:
            continue
        one = variant(record.run)
        place = ("dynamic evaluation", "valid" if record.split == "valid" else "test")
        finetuned = record.run.phase == "finetune"
        if not finetuned and (id(one), place, record.run.seed) in evaluated:
            continue
        if finetuned:
            evaluated[id(one), place, record.run.seed] = 1
        one.perplexities.setdefault(place, {})[record.run.seed] = perplexity(record.loss)
        one.environments.append(dynamic.environment)
        if any((id(one), place, seed) not in evaluated for seed in one.perplexities[place]):
            one.not_finetuned.add(place)
        else:
            one.not_finetuned.discard(place)
    corpora: dict[str, list[Variant]] = {}
    for one in found.values():
        corpora.setdefault(one.run.corpus, []).append(one)
    return corpora


# --- tables -------------------------------------------------------------------------------------------------------


def published_text(value: paper.PublishedResult | None) -> str:
    """With the digits it was published with."""
    if value is None:
        return DASH
    form = ",.0f" if value.perplexity >= 500.0 else ""
    spread = "" if value.deviation is None else f" ± {format(value.deviation, form or 'g')}"
    return format(value.perplexity, form) + spread


SHORT_SOURCES = {
    paper.PAPER: "paper",
    paper.AWD: "Merity et al.",
    paper.MOS: "Yang et al.",
    paper.KRAUSE: "Krause et al.",
}


def _source_text(source: str) -> str:
    """A short name for a source; the note under the table says it in full."""
    return SHORT_SOURCES.get(source, source)


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
    has_heading: bool = False,
    missing: str = "",
) -> Table:
    """A table of the paper with ours under it, head by head; without one, ours alone.

    ``missing``, where it is given, stands in a row of ours for every head of which there is no run.
    """
    stages = table.stages if table else paper.STAGES
    places: list[Place] = [(stage, split) for stage in stages for split in paper.SPLITS]
    if table is None:
        places = [place for place in places if any(place in variant.perplexities for variant in variants)]
    rows: list[Row] = []
    sources: list[str] = []
    counts_differ = unfinished = not_finetuned = False
    for head in ordered_heads(variants):
        group: list[Row] = []
        published = paper.results(corpus=corpus, head=head, source=None) if table else []
        for source in dict.fromkeys(result.source for result in published):
            values = {(r.stage, r.split): r for r in published if r.source == source}
            if not any(place in values for place in places):
                continue
            sources.append(source)
            seeds = next(iter(values.values())).seeds
            cells = [published_text(values.get(place)) for place in places]
            group.append(Row((_source_text(source), str(seeds or DASH), DASH, *cells), class_="published"))
        for variant in variants:
            if same_head(variant.run.head) != head or not any(place in variant.perplexities for place in places):
                continue
            samples = {place: variant.sample(place) for place in places}
            counts = {sample.count for sample in samples.values() if sample}
            cells = []
            for place, sample in samples.items():
                text = sample_text(sample)
                if sample and len(counts) > 1:
                    text += f" (n = {sample.count})"
                    counts_differ = True
                if sample and place in variant.unfinished:
                    text += " †"
                    unfinished = True
                if sample and place in variant.not_finetuned:
                    text += " ‡"
                    not_finetuned = True
                cells.append(text)
            source = ", ".join(filter(None, ("ours", setting_label(variant.run))))
            group.append(Row((source, range_text(counts), variant.epochs_text(), *cells), class_="ours"))
        if missing and group and not any(row.class_ == "ours" for row in group):
            group.append(Row((f"ours: {missing}", *[DASH] * (2 + len(places))), class_="ours"))
        if group:
            rows += [Row((Cell(head_label(head), swatch(looks[head])),)), *group]
    one_stage = len({stage for stage, _ in places}) == 1
    columns = [Column("Source", "label"), Column("Seeds"), Column("Epochs")]
    columns += [Column(SPLIT_TITLES[split], group="" if one_stage else STAGE_TITLES[stage]) for stage, split in places]
    notes = ["Mean ± standard deviation over seeds. Epochs: of training, and of finetuning after the plus."]
    if sources:
        named = [
            source if source.startswith(_source_text(source)) else f"{_source_text(source)}: {source}"
            for source in dict.fromkeys(sources)
        ]
        notes.append(f"Sources: {'; '.join(named)}.")
    if counts_differ:
        notes.append("n: seeds of that cell, where the cells of a row differ.")
    if unfinished:
        notes.append("† The least validation perplexity of the epochs on record: no evaluation of some run is there.")
    if not_finetuned:
        notes.append("‡ Of models that were not finetuned; the paper's were.")
    return Table(caption=title, columns=columns, rows=rows, notes=notes, has_heading=has_heading)


# --- dynamic evaluation's grid ------------------------------------------------------------------------------------


def grid_edges(chosen: DynamicEvaluationRecord, tried: Sequence[DynamicEvaluationRecord]) -> list[str]:
    """Which of the rates η and λ of the winner are at an end of those that were tried."""
    rates, decays = {p.learning_rate for p in tried}, {p.decay for p in tried}
    return [
        name
        for name, value, values in (("η", chosen.learning_rate, rates), ("λ", chosen.decay, decays))
        if len(values) > 1 and value in (min(values), max(values))
    ]


def grid_table(title: str, records: Sequence[DynamicEvaluationRecord], looks: Looks) -> Table | None:
    """Which points of the grid won, and whether they lie on its edge."""
    runs: dict[RunIdentity, list[DynamicEvaluationRecord]] = {}
    for record in records:
        runs.setdefault(record.run, []).append(record)
    rows = []
    for run, points in runs.items():
        # A part of the grid may have been searched before the whole.
        chosen = next((p for p in reversed(points) if p.chosen), None)
        tried = [p for p in points if p.split == "valid"]
        if chosen is None:
            continue
        rows.append(
            Row(
                (
                    Cell(head_label(run.head), swatch(looks[run.head])),
                    run_label(run),
                    str(run.seed),
                    f"{chosen.learning_rate:.3g}",
                    f"{chosen.decay:.3g}",
                    f"{chosen.epsilon:.3g}",
                    str(len(tried)) if tried else DASH,
                    (" and ".join(grid_edges(chosen, tried)) or "no") if len(tried) > 1 else DASH,
                )
            )
        )
    if not rows:
        return None
    columns = [Column("Output function", "label"), Column("Run", "words"), Column("Seed")]
    columns += [
        Column("Learning rate η"),
        Column("Decay λ"),
        Column("ε"),
        Column("Points tried"),
        Column("On the edge", "words"),
    ]
    return Table(
        caption=title,
        columns=columns,
        rows=rows,
        notes=["A value on the edge of the grid may not be the best there is."],
        has_heading=True,
    )
