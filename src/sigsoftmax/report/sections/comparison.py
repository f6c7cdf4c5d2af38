"""Comparison: heads trained under equal budgets, where possible on text whose truth is known."""

from __future__ import annotations

from collections.abc import Sequence

from sigsoftmax.records import Environment
from sigsoftmax.records.statistics import Sample, perplexity
from sigsoftmax.report.figures import HEADS_AXIS, Axis, Figure, Trace, dots, head_switches
from sigsoftmax.report.findings.comparisons import Comparison, comparisons
from sigsoftmax.report.findings.rankings import RankedHead
from sigsoftmax.report.material import Material
from sigsoftmax.report.number_text import counted, sentence
from sigsoftmax.report.sections.section import Absent, Block, Section
from sigsoftmax.report.theme import Look, Looks

__all__ = ["section"]


def section(material: Material, looks: Looks) -> Section | Absent:
    found = comparisons(entry.payload for entry in material.comparisons)
    if not found:
        return Absent("Comparison under equal budgets", "sigsoftmax compare")
    blocks: list[Block] = []
    findings: list[str] = []
    for number, comparison in enumerate(found, start=1):
        environments = [e.environment for e in material.comparisons if e.payload in comparison.records]
        blocks += [_figure(f"comparison-{number}", comparison, looks, environments), comparison.details(looks)]
        sentences = comparison.findings()
        findings += [f"{comparison.ranking.caption}: {text}" for text in sentences] if len(found) > 1 else sentences
    return Section(
        id="comparison",
        title="Comparison under equal budgets",
        short="Comparison",
        lead="Heads trained on the same text with the same recipe and seeds, seed by seed; their ranking stands at the "
        "top of the page. Where the text is sampled from a language of known truth, the distance to that truth is "
        "exact at every position.",
        findings=findings,
        blocks=blocks,
    )


def _figure(name: str, comparison: Comparison, looks: Looks, environments: Sequence[Environment]) -> Figure:
    ranking = comparison.ranking
    heads = ranking.heads
    quantity = "mean KL to the truth (nats)" if ranking.has_truth else "test perplexity"
    return Figure(
        id=name,
        title=sentence(quantity) + ", by head",
        summary=f"{ranking.caption}. Least: {heads[0].label}; most: {heads[-1].label}. Large dots are means, small "
        "ones the seeds.",
        x=Axis(title=quantity, settings={"tickformat": ",.4~g"}),
        y=HEADS_AXIS,
        traces=[_dots(head, looks[head.head], has_truth=ranking.has_truth) for head in heads],
        legend=head_switches([head.head for head in heads], looks),
        table=ranking.table(looks),
        environments=list(environments),
        height=110 + 40 * len(heads),
    )


def _dots(head: RankedHead, look: Look, *, has_truth: bool) -> Trace:
    """The mean of a head and its seeds."""
    values = list(head.values.values()) if has_truth else [perplexity(value) for value in head.values.values()]
    count = len(values)
    words = [f"mean of {counted(count, 'seed')}", *(f"seed {seed}" for seed in head.values)]
    return dots(
        [Sample.of(values).mean, *values],
        look,
        {"symbol": ["circle", *["circle-open"] * count], "size": [13, *[7] * count]},
        name=look.label,
        keys=(f"head:{head.head}",),
        text=[f"{text}<br>test perplexity {head.perplexities.mean:.4g}" for text in words],
        hovertemplate="<b>%{fullData.name}</b><br>%{x:.4~g}, %{text}<extra></extra>",
    )
