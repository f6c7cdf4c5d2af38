"""Comparison: heads trained under equal budgets, where possible on text whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sigsoftmax.records.training import ComparisonRecord
from sigsoftmax.report.figures import Axis, Figure, Switch, Trace, numbers
from sigsoftmax.report.loading import Entry
from sigsoftmax.report.markup import plot_text
from sigsoftmax.report.material import Material, changes, corpus_label
from sigsoftmax.report.section import Absent, Block, Section
from sigsoftmax.report.sections.perplexities import sample_text
from sigsoftmax.report.statistics import Gap, Sample, perplexity
from sigsoftmax.report.tables import DASH, Cell, Column, Row, Table, number_text, range_text, seconds_text, sentence
from sigsoftmax.report.theme import Looks, head_label, same_head, swatch

__all__ = ["section"]

Key = tuple[object, ...]


@dataclass(frozen=True)
class Contender:
    """A head with all its seeds."""

    head: str
    records: tuple[ComparisonRecord, ...]

    @property
    def test(self) -> Sample:
        return Sample.of([perplexity(r.test_loss) for r in self.records])

    @property
    def kl(self) -> Sample | None:
        known = [r.kl for r in self.records if r.kl is not None]
        return Sample.of(known) if known else None

    @property
    def kl_error(self) -> float | None:
        """Standard error of the mean KL: over positions for one run, over seeds for several."""
        if self.kl is None:
            return None
        if len(self.records) == 1:
            return self.records[0].kl_standard_error
        return self.kl.standard_error


def section(material: Material, looks: Looks) -> Section | Absent:
    groups: dict[Key, list[Entry[ComparisonRecord]]] = {}
    for entry in material.comparisons:
        run, record = entry.payload.run, entry.payload
        key = (run.corpus, run.corpus_checksum, run.precision, record.epochs, record.updates)
        groups.setdefault(key, []).append(entry)
    if not groups:
        return Absent("Comparison under equal budgets", "sigsoftmax compare")
    blocks: list[Block] = []
    findings: list[str] = []
    for number, entries in enumerate(groups.values(), start=1):
        contenders = _contenders([entry.payload for entry in entries])
        caption = _caption([entry.payload for entry in entries])
        blocks.append(_figure(f"comparison-{number}", caption, contenders, looks, entries))
        findings += _findings(contenders, caption if len(groups) > 1 else "")
    return Section(
        id="comparison",
        title="Comparison under equal budgets",
        short="Comparison",
        lead="Heads trained on the same text with the same recipe, seeds and number of updates. Where the text is "
        "sampled from a language of known truth, the distance to that truth is exact at every position.",
        findings=findings,
        blocks=blocks,
        key_findings=2,
    )


def _contenders(records: Sequence[ComparisonRecord]) -> list[Contender]:
    heads: dict[str, list[ComparisonRecord]] = {}
    for record in records:
        heads.setdefault(same_head(record.run.head), []).append(record)
    contenders = [Contender(head, tuple(found)) for head, found in heads.items()]
    return sorted(contenders, key=lambda c: c.kl.mean if c.kl else c.test.mean)


def _caption(records: Sequence[ComparisonRecord]) -> str:
    some = records[0]
    seeds = len({r.run.seed for r in records})
    # The recipes of a comparison differ in their heads alone: language-softmax, language-mos.
    settings = sorted({r.run.recipe.partition("-")[0] for r in records})
    changed = sorted({change for r in records for change in changes(r.run)})
    recipe = ", ".join((f"{' and '.join(settings)} recipes", *changed))
    return (
        f"{sentence(corpus_label(some.run.corpus))}, {some.words:,} words; {recipe}; {some.epochs} epochs, "
        f"{some.updates:,} updates, {seeds} seed{'s' if seeds > 1 else ''}"
    )


def _figure(
    name: str, caption: str, contenders: Sequence[Contender], looks: Looks, entries: Sequence[Entry[ComparisonRecord]]
) -> Figure:
    has_truth = all(c.kl is not None for c in contenders)
    traces = []
    for contender in contenders:
        look = looks[contender.head]
        kl, test = contender.kl, contender.test
        value = kl.mean if has_truth and kl else test.mean
        error = contender.kl_error if has_truth else test.standard_error
        shown = "no standard error" if error is None else f"± {error:.2g} (standard error)"
        traces.append(
            Trace(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": plot_text(look.label),
                    "x": numbers([value]),
                    "y": [plot_text(look.label)],
                    "marker": {"symbol": "circle", "size": 12, "color": look.color},
                    "error_x": {
                        "type": "data",
                        "array": numbers([error]),
                        "color": look.color,
                        "thickness": 1.8,
                        "visible": error is not None,
                    },
                    "text": [f"{shown}<br>test perplexity {test.mean:.4g}"],
                    "hovertemplate": "<b>%{fullData.name}</b><br>%{x:.4~g} %{text}<extra></extra>",
                },
                (f"head:{contender.head}",),
            )
        )
    best = contenders[0]
    quantity = "mean KL to the truth (nats)" if has_truth else "test perplexity"
    return Figure(
        id=name,
        title=sentence(quantity) + ", by head",
        summary=f"{caption}. Least: {head_label(best.head)}; most: {head_label(contenders[-1].head)}. Lines are one "
        "standard error either way.",
        x=Axis(title=quantity, settings={"tickformat": ",.4~g"}),
        y=Axis(title="", can_switch=False, settings={"type": "category", "autorange": "reversed", "automargin": True}),
        traces=traces,
        legend=[Switch(f"head:{c.head}", looks[c.head].label, True, looks[c.head]) for c in contenders],
        table=_table(caption, contenders, looks),
        environments=[entry.environment for entry in entries],
        shows_table=True,
        height=110 + 40 * len(contenders),
    )


def _table(caption: str, contenders: Sequence[Contender], looks: Looks) -> Table:
    titles = ("Seeds", "Test perplexity", "Validation perplexity", "KL to the truth (nats)", "Rank", "Rank bound")
    columns = [Column("Output function", "label"), *(Column(title) for title in (*titles, "Parameters", "Time"))]
    rows = []
    rates = {r.entropy_rate for c in contenders for r in c.records if r.entropy_rate is not None}
    if len(rates) == 1:
        truth = perplexity(next(iter(rates)))
        cells = ("the truth", DASH, number_text(truth), DASH, "0", *[DASH] * 4)
        rows.append(Row(cells, class_="published"))
    for contender in contenders:
        records = contender.records
        rows.append(
            Row(
                (
                    Cell(looks[contender.head].label, swatch(looks[contender.head])),
                    str(len(records)),
                    sample_text(contender.test),
                    sample_text(Sample.of([perplexity(r.valid_loss) for r in records])),
                    _kl_text(contender),
                    range_text([r.rank for r in records]),
                    range_text([r.rank_bound for r in records]),
                    range_text([r.run.parameters for r in records]),
                    seconds_text(Sample.of([r.seconds for r in records]).mean),
                )
            )
        )
    several = any(len(c.records) > 1 for c in contenders)
    contexts = sorted({r.contexts for c in contenders for r in c.records if r.contexts is not None})
    notes = ["Perplexities: mean ± standard deviation over seeds." if several else "One seed of each head."]
    notes[0] += " KL: mean ± standard error, over positions for one seed, over seeds for several."
    if contexts:
        notes.append(f"Rank: of the log-output matrix with {range_text(contexts)} columns, by the paper's threshold.")
    return Table(caption=caption, columns=columns, rows=rows, notes=notes)


def _kl_text(contender: Contender) -> str:
    if contender.kl is None:
        return DASH
    error = contender.kl_error
    return number_text(contender.kl.mean) + ("" if error is None else f" ± {number_text(error, 2)}")


# --- the words ----------------------------------------------------------------------------------------------------


def _findings(contenders: Sequence[Contender], where: str) -> list[str]:
    softmax = next((c for c in contenders if c.head == "softmax"), None)
    found: list[str | None] = []
    if softmax:
        others = [c for c in contenders if c is not softmax]
        found.append(_against_softmax(softmax, [c for c in others if c.head == "sigsoftmax"]))
        found.append(_rank_is_not_nats(contenders))
        found.append(_against_softmax(softmax, [c for c in others if c.head != "sigsoftmax"]))
    return [f"{where}: {text}" if where else text for text in found if text]


def _against_softmax(softmax: Contender, others: Sequence[Contender]) -> str | None:
    parts = [f"{head_label(c.head)} {text}" for c in others if (text := _difference(softmax, c))]
    if not parts:
        return None
    quantity = "KL to the truth" if softmax.kl else "Test perplexity"
    caution = " With one seed, what another would change is not in these errors." if len(softmax.records) == 1 else ""
    return f"{quantity} against softmax: {'; '.join(parts)}.{caution}"


def _difference(softmax: Contender, other: Contender) -> str | None:
    """By how much, and whether that is more than the error explains."""
    if softmax.kl is None or other.kl is None:
        gap = Gap(softmax.test, other.test)
        certainty = {None: "one seed: nothing follows", True: "resolved", False: "too few seeds to tell"}
        return f"{abs(gap.size):.2f} {'lower' if gap.size > 0.0 else 'higher'} ({certainty[gap.is_resolved]})"
    difference = other.kl.mean - softmax.kl.mean
    if not math.isfinite(difference) or softmax.kl.mean <= 0.0:
        return None
    change = f"{abs(difference) / softmax.kl.mean:.1%} {'less' if difference < 0.0 else 'more'}"
    errors = softmax.kl_error, other.kl_error
    if errors[0] is None or errors[1] is None:
        return change
    times = abs(difference) / error if (error := math.hypot(errors[0], errors[1])) else math.inf
    return f"{change} ({times:.1f} standard errors of the difference)" if math.isfinite(times) else change


def _rank_is_not_nats(contenders: Sequence[Contender]) -> str | None:
    """Said only if more rank went with more KL somewhere."""
    known = [(c, c.records[0].rank, c.kl.mean, c.kl_error or 0.0) for c in contenders if c.kl and c.records[0].rank]
    for worse, high, kl, error in sorted(known, key=lambda item: -(item[1] or 0)):
        for better, low, less, other in known:
            if (high or 0) > 1.5 * (low or 0) and kl > less + 2.0 * math.hypot(error, other):
                return (
                    f"Rank is not nats: {head_label(worse.head)} has rank {high:,} and KL {number_text(kl, 3)}, "
                    f"{head_label(better.head)} rank {low:,} and KL {number_text(less, 3)}."
                )
    return None
