"""The paper's tables 1, 2, 4 and 5 beside ours, with the gaps they are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sigsoftmax.records.grouping import grouped
from sigsoftmax.records.published import paper
from sigsoftmax.records.published.paper import PublishedResult, PublishedTable
from sigsoftmax.records.statistics import Sample
from sigsoftmax.report.figures import HEADS_AXIS, Axis, Figure, Switch, Trace, dots, far_above, head_switches, numbers
from sigsoftmax.report.markup import plot_text, tag
from sigsoftmax.report.material import Material, corpus_label, run_label
from sigsoftmax.report.number_text import counted, names_text, sentence, signed_text
from sigsoftmax.report.sections.gaps import Judged, gap_tables, judged_gaps
from sigsoftmax.report.sections.perplexities import (
    SPLIT_TITLES,
    STAGE_TITLES,
    Place,
    Variant,
    collect,
    grid_table,
    ordered_heads,
    perplexity_table,
)
from sigsoftmax.report.sections.section import Absent, Block, Section
from sigsoftmax.report.tables import Table
from sigsoftmax.report.theme import Look, Looks, head_label, same_head

__all__ = ["section", "tables"]


def tables(material: Material, looks: Looks) -> list[Table]:
    """Tables 1, 2, 4 and 5 with ours, as far as there are records; then other corpora."""
    corpora = _corpora(material)
    found = [(number, made) for corpus in corpora for number, made in _tables(corpus, corpora[corpus], looks)]
    return [made for _, made in sorted(found, key=lambda pair: pair[0])]


def _tables(corpus: str, variants: Sequence[Variant], looks: Looks) -> list[tuple[int, Table]]:
    """The tables of a corpus after their numbers in the paper; ours come last."""
    if corpus not in paper.CORPORA:
        made = perplexity_table(None, corpus, f"Perplexity on {corpus_label(corpus)}", variants, looks)
        return [(len(paper.TABLES) + 1, made)]
    return [
        (t.number, perplexity_table(t, corpus, f"Table {t.number}. {t.title}", variants, looks))
        for t in paper.TABLES
        if t.corpus == corpus and _has_records(t, variants)
    ]


def _corpora(material: Material) -> dict[str, list[Variant]]:
    """All but those that were trained on to compare heads: these have a section of their own."""
    compared = {entry.payload.run.corpus for entry in material.comparisons}
    return {
        corpus: variants
        for corpus, variants in collect(material).items()
        if corpus in paper.CORPORA or corpus not in compared
    }


def _has_records(table: PublishedTable, variants: Sequence[Variant]) -> bool:
    return any(stage in table.stages for variant in variants for stage, _ in variant.perplexities)


def section(material: Material, looks: Looks) -> Section | Absent:
    corpora = _corpora(material)
    if not corpora:
        return Absent("The paper's tables beside ours", "sigsoftmax reproduce table1 --seeds 3")
    blocks: list[Block] = []
    gaps: list[Judged] = []
    for number, (corpus, variants) in enumerate(corpora.items(), start=1):
        reached = {stage for variant in variants for stage, _ in variant.perplexities}
        here = judged_gaps(corpus, variants, [stage for stage in reversed(paper.STAGES) if stage in reached])
        gaps += here
        blocks.append(_dots(f"perplexity-{number}", corpus, variants, looks))
        blocks += [replace(made, has_heading=True) for _, made in _tables(corpus, variants, looks)]
        blocks += gap_tables(corpus_label(corpus), here)
        blocks += _grid(corpus, material, looks)
    has_paper = any(corpus in paper.CORPORA for corpus in corpora)
    published = ": the published numbers, and what runs of ours measured, with their spread over seeds."
    return Section(
        id="reproduction",
        title="The paper's tables beside ours" if has_paper else "Perplexities",
        short="Perplexity",
        lead="Perplexity of language models with each output function" + (published if has_paper else "."),
        findings=_findings(gaps),
        blocks=blocks + (_missing(corpora) if has_paper else []),
        key_findings=2,
    )


def _grid(corpus: str, material: Material, looks: Looks) -> list[Table]:
    dynamic = [entry.payload for entry in material.dynamic_evaluations]
    points = [record for record in dynamic if record.run.corpus == corpus and record.complete]
    table = grid_table(f"Dynamic evaluation on {corpus_label(corpus)}: the points that won", points, looks)
    return [table] if table else []


def _missing(corpora: Mapping[str, Sequence[Variant]]) -> list[Block]:
    """The tables of the paper for which there are no records."""
    lost = [str(t.number) for t in paper.TABLES if t.stages and not _has_records(t, corpora.get(t.corpus, ()))]
    text = f"No records for table{'s' if len(lost) > 1 else ''} {names_text(lost)} of the paper."
    return [tag("p", text, class_="note")] if lost else []


def _findings(gaps: Sequence[Judged]) -> list[str]:
    """One sentence for each comparison: where there are seeds to judge by, at the last stage, on test if possible."""
    lines = []
    for found in grouped(gaps, lambda g: (g.corpus, g.first, g.second, g.setting)).values():
        gap = max(
            found,
            key=lambda g: (g.paired.is_resolved is not None, paper.STAGES.index(g.stage), paper.SPLITS.index(g.split)),
        )
        published = f" (paper: {signed_text(gap.published.size)})" if gap.published else ""
        setting = f" ({gap.setting})" if gap.setting else ""
        where = f"{corpus_label(gap.corpus)}, {SPLIT_TITLES[gap.split].lower()}, {STAGE_TITLES[gap.stage]}{setting}"
        interval = f" ({gap.interval()})" if gap.paired.interval else ""
        size = f"{head_label(gap.first)} minus {head_label(gap.second)} is {signed_text(gap.size)}{interval}{published}"
        lines.append(sentence(f"{where}: {size}; {gap.verdict()}."))
    return lines


def _dots(name: str, corpus: str, variants: Sequence[Variant], looks: Looks) -> Figure:
    """Paper and ours on one axis, with one standard deviation either way, at the last stage there is."""
    reached = {place for variant in variants for place in variant.perplexities}
    stage, split = place = max(reached, key=lambda p: (paper.STAGES.index(p[0]), paper.SPLITS.index(p[1])))
    has_paper = corpus in paper.CORPORA
    dots_of = {head: _dots_of(corpus, head, place, variants) for head in ordered_heads(variants)}
    most = {head: max(dot.value for dot in found) for head, found in dots_of.items() if found}
    far = far_above(most)
    far_text = f" Far to the right and not shown at first: {', '.join(map(head_label, far))}." if far else ""
    whose = "; diamonds are the paper's." if has_paper else "."
    of_paper = next((t for t in paper.TABLES if t.corpus == corpus and t.stages == paper.STAGES), None)
    return Figure(
        id=name,
        title=f"{sentence(corpus_label(corpus))}: {SPLIT_TITLES[split].lower()} perplexity, {STAGE_TITLES[stage]}",
        summary=f"Dots are ours, with one standard deviation either way{whose}{far_text}",
        x=Axis(title="perplexity", settings={"tickformat": ",.4~g"}),
        y=HEADS_AXIS,
        traces=[dot.trace(head, looks[head]) for head, found in dots_of.items() for dot in found],
        legend=head_switches(most, looks, far),
        switches=[Switch("paper", "Paper"), Switch("ours", "Ours")] * has_paper,
        height=110 + 44 * len(most),
        table=perplexity_table(of_paper, corpus, f"All stages on {corpus_label(corpus)}", variants, looks),
        environments=[e for v in variants for e in v.environments],
    )


def _dots_of(corpus: str, head: str, place: Place, variants: Sequence[Variant]) -> list[_Dot]:
    published = paper.results(corpus=corpus, head=head, stage=place[0], split=place[1])
    own = [(v, v.sample(place)) for v in variants if same_head(v.run.head) == head]
    return [*map(_Dot.published, published), *(_Dot.ours(variant, sample) for variant, sample in own if sample)]


class _Dot(NamedTuple):
    """A mean with its standard deviation."""

    whose: str
    value: float
    deviation: float | None
    words: str
    marker: Mapping[str, Any]

    @classmethod
    def published(cls, result: PublishedResult) -> _Dot:
        marker = {"symbol": "diamond-open", "size": 12, "line": {"width": 2}}
        words = f"± {result.deviation:g}, {result.seeds} seeds"
        return cls("paper", result.perplexity, result.deviation, words, marker)

    @classmethod
    def ours(cls, variant: Variant, sample: Sample) -> _Dot:
        spread = "no spread" if sample.deviation is None else f"± {sample.deviation:.3g}"
        words = f"{spread}, {counted(sample.count, 'seed')}<br>{plot_text(run_label(variant.run))}"
        return cls("ours", sample.mean, sample.deviation, words, {"symbol": "circle", "size": 12})

    def trace(self, head: str, look: Look) -> Trace:
        error = {"type": "data", "array": numbers([self.deviation]), "color": look.color, "thickness": 1.6}
        return dots(
            [self.value],
            look,
            self.marker,
            name=f"{look.label}, {self.whose}",
            keys=(f"head:{head}", self.whose),
            error_x={**error, "visible": self.deviation is not None},
            text=[self.words],
            hovertemplate="<b>%{fullData.name}</b><br>%{x:.4~g} %{text}<extra></extra>",
        )
