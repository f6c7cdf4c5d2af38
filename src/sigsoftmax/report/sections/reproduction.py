"""The paper's tables 1, 2, 4 and 5 beside ours, with the gaps they are about."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sigsoftmax.records.published import paper
from sigsoftmax.records.published.paper import PublishedTable
from sigsoftmax.report.figures import Axis, Figure, Switch, Trace, numbers
from sigsoftmax.report.markup import plot_text, tag
from sigsoftmax.report.material import Material, corpus_label, run_label
from sigsoftmax.report.section import Absent, Block, Section
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
from sigsoftmax.report.tables import Table, sentence, signed_text
from sigsoftmax.report.theme import Look, Looks, head_label, same_head

__all__ = ["section", "tables"]

FAR = 3.0
"""A head whose perplexity is this many times the median is not shown at first: the others would be one dot."""


def tables(material: Material, looks: Looks) -> list[Table]:
    """Tables 1, 2, 4 and 5 with ours, as far as there are records; then other corpora."""
    corpora = _corpora(material)
    found = [
        perplexity_table(table, table.corpus, f"Table {table.number}. {table.title}", corpora[table.corpus], looks)
        for table in paper.TABLES
        if table.stages and _has_records(table, corpora)
    ]
    for corpus, variants in corpora.items():
        if corpus not in paper.CORPORA:
            found.append(perplexity_table(None, corpus, f"Perplexity on {corpus_label(corpus)}", variants, looks))
    return found


def _corpora(material: Material) -> dict[str, list[Variant]]:
    """All but those that were trained on to compare heads: these have a section of their own."""
    compared = {entry.payload.run.corpus for entry in material.comparisons}
    return {
        corpus: variants
        for corpus, variants in collect(material).items()
        if corpus in paper.CORPORA or corpus not in compared
    }


def _has_records(table: PublishedTable, corpora: dict[str, list[Variant]]) -> bool:
    variants = corpora.get(table.corpus, [])
    return any(stage in table.stages for variant in variants for stage, _ in variant.perplexities)


def section(material: Material, looks: Looks) -> Section | Absent:
    corpora = _corpora(material)
    if not corpora:
        return Absent("The paper's tables beside ours", "sigsoftmax reproduce table1 --seeds 3")
    blocks: list[Block] = []
    gaps: list[Judged] = []
    for number, (corpus, variants) in enumerate(corpora.items(), start=1):
        stages = [s for s in reversed(paper.STAGES) if any(s == stage for v in variants for stage, _ in v.perplexities)]
        here = judged_gaps(corpus, variants, stages)
        gaps += here
        blocks.append(_dots(f"perplexity-{number}", corpus, variants, looks))
        for table in paper.TABLES:
            if table.corpus == corpus and table.stages and _has_records(table, corpora):
                title = f"Table {table.number}. {table.title}"
                blocks.append(perplexity_table(table, corpus, title, variants, looks, has_heading=True))
        if corpus not in paper.CORPORA:
            title = f"Perplexity on {corpus_label(corpus)}"
            blocks.append(perplexity_table(None, corpus, title, variants, looks, has_heading=True))
        blocks += gap_tables(corpus_label(corpus), here)
        points = [
            e.payload for e in material.dynamic_evaluations if e.payload.run.corpus == corpus and e.payload.complete
        ]
        grid = grid_table(f"Dynamic evaluation on {corpus_label(corpus)}: the points that won", points, looks)
        if grid:
            blocks.append(grid)
    absent = [table.number for table in paper.TABLES if table.stages and not _has_records(table, corpora)]
    has_paper = any(corpus in paper.CORPORA for corpus in corpora)
    if absent and has_paper:
        numbers_text = " and ".join(filter(None, [", ".join(map(str, absent[:-1])), str(absent[-1])]))
        plural = len(absent) > 1
        blocks.append(
            tag("p", f"No records for table{'s' if plural else ''} {numbers_text} of the paper.", class_="note")
        )
    return Section(
        id="reproduction",
        title="The paper's tables beside ours" if has_paper else "Perplexities",
        short="Perplexity",
        lead="Perplexity of language models with each output function"
        + (
            ": the published numbers, and what runs of ours measured, with their spread over seeds."
            if has_paper
            else "."
        ),
        findings=_findings(gaps),
        blocks=blocks,
        key_findings=2,
    )


def _findings(gaps: Sequence[Judged]) -> list[str]:
    """One sentence for each comparison: where there are seeds to judge by, at the last stage, on test if possible."""
    comparisons: dict[tuple[str, str, str, str], list[Judged]] = {}
    for gap in gaps:
        comparisons.setdefault((gap.corpus, gap.first, gap.second, gap.setting), []).append(gap)
    lines = []
    for found in comparisons.values():
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
    places: list[Place] = [(stage, split) for stage in reversed(paper.STAGES) for split in reversed(paper.SPLITS)]
    place = next(p for p in places if any(p in v.perplexities for v in variants))
    stage, split = place
    has_paper = corpus in paper.CORPORA
    most: dict[str, float] = {}
    traces: list[Trace] = []
    for head in ordered_heads(variants):
        look = looks[head]
        published = paper.results(corpus=corpus, head=head, stage=stage, split=split)
        own = [(v, s) for v in variants if same_head(v.run.head) == head and (s := v.sample(place)) is not None]
        if not published and not own:
            continue
        most[head] = max([*(r.perplexity for r in published), *(s.mean for _, s in own)])
        for result in published:
            words = f"± {result.deviation:g}, {result.seeds} seeds"
            marker = {"symbol": "diamond-open", "size": 12, "color": look.color, "line": {"width": 2}}
            traces.append(_dot(look, "paper", head, result.perplexity, result.deviation, words, marker))
        for variant, sample in own:
            spread = "no spread" if sample.deviation is None else f"± {sample.deviation:.3g}"
            seeds = f"{sample.count} seed{'s' if sample.count > 1 else ''}"
            words = f"{spread}, {seeds}<br>{plot_text(run_label(variant.run))}"
            marker = {"symbol": "circle", "size": 12, "color": look.color}
            traces.append(_dot(look, "ours", head, sample.mean, sample.deviation, words, marker))
    far = [head for head, value in most.items() if not value <= FAR * statistics.median(most.values())]
    where = f"{SPLIT_TITLES[split].lower()} perplexity, {STAGE_TITLES[stage]}"
    summary = "Dots are ours, with one standard deviation either way"
    summary += "; diamonds are the paper's." if has_paper else "."
    if far:
        summary += f" Far to the right and not shown at first: {', '.join(map(head_label, far))}."
    return Figure(
        id=name,
        title=f"{sentence(corpus_label(corpus))}: {where}",
        summary=summary,
        x=Axis(title="perplexity", settings={"tickformat": ",.4~g"}),
        y=Axis(title="", can_switch=False, settings={"type": "category", "autorange": "reversed", "automargin": True}),
        traces=traces,
        legend=[Switch(f"head:{head}", looks[head].label, head not in far, looks[head]) for head in most],
        switches=[Switch("paper", "Paper"), Switch("ours", "Ours")] if has_paper else [],
        height=110 + 44 * len(most),
        table=perplexity_table(
            next((t for t in paper.TABLES if t.corpus == corpus and t.stages == paper.STAGES), None),
            corpus,
            f"All stages on {corpus_label(corpus)}",
            variants,
            looks,
        ),
        environments=[e for v in variants for e in v.environments],
    )


def _dot(
    look: Look, whose: str, head: str, value: float, deviation: float | None, words: str, marker: Mapping[str, Any]
) -> Trace:
    error = {"type": "data", "array": numbers([deviation]), "color": look.color, "thickness": 1.6}
    return Trace(
        {
            "type": "scatter",
            "mode": "markers",
            "name": plot_text(f"{look.label}, {whose}"),
            "x": numbers([value]),
            "y": [plot_text(look.label)],
            "marker": dict(marker),
            "error_x": {**error, "visible": deviation is not None},
            "text": [words],
            "hovertemplate": "<b>%{fullData.name}</b><br>%{x:.4~g} %{text}<extra></extra>",
        },
        (f"head:{head}", whose),
    )
