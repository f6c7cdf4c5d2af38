"""Comparison: heads trained under equal budgets, where possible on text whose truth is known."""

from __future__ import annotations

from collections.abc import Sequence

from sigsoftmax.records import Environment
from sigsoftmax.records.statistics import Sample, perplexity
from sigsoftmax.report.comparisons import Comparison, comparisons
from sigsoftmax.report.figures import Axis, Figure, Switch, Trace, numbers
from sigsoftmax.report.markup import plot_text
from sigsoftmax.report.material import Material
from sigsoftmax.report.section import Absent, Block, Section
from sigsoftmax.report.tables import sentence
from sigsoftmax.report.theme import Looks

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
    has_truth, heads = ranking.has_truth, ranking.heads
    traces = []
    for head in heads:
        look, values = looks[head.head], head.values
        shown = list(values.values()) if has_truth else [perplexity(value) for value in values.values()]
        places = [Sample.of(shown).mean, *shown]
        test = head.perplexities.mean
        words = [f"mean of {len(values)} seed{'s' if len(values) > 1 else ''}", *(f"seed {seed}" for seed in values)]
        traces.append(
            Trace(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": plot_text(look.label),
                    "x": numbers(places),
                    "y": [plot_text(look.label)] * len(places),
                    "marker": {
                        "symbol": ["circle", *["circle-open"] * len(shown)],
                        "size": [13, *[7] * len(shown)],
                        "color": look.color,
                    },
                    "text": [f"{text}<br>test perplexity {test:.4g}" for text in words],
                    "hovertemplate": "<b>%{fullData.name}</b><br>%{x:.4~g}, %{text}<extra></extra>",
                },
                (f"head:{head.head}",),
            )
        )
    quantity = "mean KL to the truth (nats)" if has_truth else "test perplexity"
    return Figure(
        id=name,
        title=sentence(quantity) + ", by head",
        summary=f"{ranking.caption}. Least: {heads[0].label}; most: {heads[-1].label}. Large dots are means, small "
        "ones the seeds.",
        x=Axis(title=quantity, settings={"tickformat": ",.4~g"}),
        y=Axis(title="", can_switch=False, settings={"type": "category", "autorange": "reversed", "automargin": True}),
        traces=traces,
        legend=[Switch(f"head:{h.head}", looks[h.head].label, True, looks[h.head]) for h in heads],
        table=ranking.table(looks),
        environments=list(environments),
        height=110 + 40 * len(heads),
    )
