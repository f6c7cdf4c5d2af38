"""Comparison: heads trained under equal budgets, where possible on text whose truth is known."""

from __future__ import annotations

from collections.abc import Sequence

from sigsoftmax.records import Environment
from sigsoftmax.report.comparisons import Comparison, comparisons
from sigsoftmax.report.figures import Axis, Figure, Switch, Trace, numbers
from sigsoftmax.report.markup import plot_text
from sigsoftmax.report.material import Material
from sigsoftmax.report.section import Absent, Block, Section
from sigsoftmax.report.statistics import Sample, perplexity
from sigsoftmax.report.tables import sentence
from sigsoftmax.report.theme import Looks, head_label

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
        findings += [f"{comparison.caption}: {text}" for text in sentences] if len(found) > 1 else sentences
    return Section(
        id="comparison",
        title="Comparison under equal budgets",
        short="Comparison",
        lead="Heads trained on the same text with the same recipe and seeds. Where the text is sampled from a language "
        "of known truth, the distance to that truth is exact at every position. Differences are taken seed by seed.",
        findings=findings,
        blocks=blocks,
        key_findings=2,
    )


def _figure(name: str, comparison: Comparison, looks: Looks, environments: Sequence[Environment]) -> Figure:
    has_truth = comparison.quantity == "kl"
    contenders = comparison.contenders
    traces = []
    for contender in contenders:
        look = looks[contender.head]
        values = contender.values(comparison.quantity)
        shown = list(values.values()) if has_truth else [perplexity(value) for value in values.values()]
        places = [Sample.of(shown).mean, *shown]
        test = contender.sample(lambda record: perplexity(record.test_loss)).mean
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
                (f"head:{contender.head}",),
            )
        )
    quantity = "mean KL to the truth (nats)" if has_truth else "test perplexity"
    return Figure(
        id=name,
        title=sentence(quantity) + ", by head",
        summary=f"{comparison.caption}. Least: {head_label(contenders[0].head)}; most: "
        f"{head_label(contenders[-1].head)}. Large dots are means, small ones the seeds.",
        x=Axis(title=quantity, settings={"tickformat": ",.4~g"}),
        y=Axis(title="", can_switch=False, settings={"type": "category", "autorange": "reversed", "automargin": True}),
        traces=traces,
        legend=[Switch(f"head:{c.head}", looks[c.head].label, True, looks[c.head]) for c in contenders],
        table=comparison.table(looks),
        environments=list(environments),
        shows_table=True,
        height=110 + 40 * len(contenders),
    )
