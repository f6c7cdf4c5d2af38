"""Learning curves: perplexity after each epoch, run by run and as a mean over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sigsoftmax.records.grouping import grouped
from sigsoftmax.records.published.references import ReferenceCurve, reference_curves
from sigsoftmax.records.schemas.training import EpochRecord, RunIdentity
from sigsoftmax.records.statistics import Sample, perplexity
from sigsoftmax.report.figures import Axis, Figure, Switch, Trace, far_above, line, numbers, thinned
from sigsoftmax.report.loading import Entry
from sigsoftmax.report.markup import plot_text, tag
from sigsoftmax.report.material import Material, corpus_label, run_label, setting_label, setting_labels
from sigsoftmax.report.number_text import (
    DASH,
    count_text,
    counted,
    listed,
    number_text,
    range_text,
    seconds_text,
    sentence,
    signed_text,
)
from sigsoftmax.report.sections.section import Absent, Block, Section
from sigsoftmax.report.tables import Cell, Column, Fields, Row, Table, head_cell
from sigsoftmax.report.theme import Look, Looks, head_label, same_head, swatch

__all__ = ["section"]

POINTS = 400
"""drawn of a curve"""
TABLE_EPOCHS = 40
"""rows of the table under a figure"""
GATE = 0.04
"""The distance above the reference curve that a port may have from epoch GATE_FROM on; seeds differ by 1 to 2 %."""
GATE_FROM = 8
OTHER_DASHES = ("solid", "dash", "dashdot", "longdash")
PHASES = {"train": "training", "finetune": "finetuning"}
SPLITS = {"train": ("train_loss", "training"), "valid": ("valid_loss", "validation")}


@dataclass
class Group:
    """All seeds of one thing."""

    run: RunIdentity
    label: str
    look: Look
    seeds: dict[int, dict[int, EpochRecord]] = field(default_factory=dict)
    """seed -> epoch -> record"""

    @property
    def records(self) -> list[EpochRecord]:
        return [record for epochs in self.seeds.values() for record in epochs.values()]

    @property
    def common(self) -> list[int]:
        """Epochs that every seed has reached: a mean over fewer would jump where a run ends."""
        return sorted(set.intersection(*(set(epochs) for epochs in self.seeds.values())))

    def sample(self, epoch: int, quantity: str) -> Sample | None:
        """The perplexities of the seeds that have come to an epoch."""
        values = [perplexity(getattr(run[epoch], quantity)) for run in self.seeds.values() if epoch in run]
        return Sample.of(values) if values else None

    @cached_property
    def best(self) -> Sample:
        """The least validation perplexities of the seeds."""
        return Sample.of([min(perplexity(r.valid_loss) for r in epochs.values()) for epochs in self.seeds.values()])

    @property
    def extent(self) -> str:
        seeds = f"{len(self.seeds)} seeds" if len(self.seeds) > 1 else "one seed"
        return f"{seeds}, {counted(self.common[-1], 'epoch')}"


def _phase(run: RunIdentity) -> str:
    return PHASES.get(run.phase, run.phase)


def section(material: Material, looks: Looks) -> Section | Absent:
    figures = grouped(material.epochs, lambda entry: (entry.payload.run.corpus, entry.payload.run.phase))
    if not figures:
        return Absent("Learning curves", "sigsoftmax train ptb-sigsoftmax")
    corpora = list(dict.fromkeys(corpus for corpus, _ in figures))
    blocks: list[Block] = []
    findings: list[str] = []
    shown: list[Group] = []
    # Files of a folder may name finetuning first.
    in_order = sorted(figures.items(), key=lambda figure: (corpora.index(figure[0][0]), figure[0][1] != "train"))
    for number, (_, entries) in enumerate(in_order, start=1):
        groups = _groups(entries, looks)
        shown += groups
        blocks.append(_figure(f"learning-{number}", groups, looks, entries))
        findings += [text for group in groups if (text := _gate(group))]
    blocks.append(_settings_table(shown))
    blocks.append(tag("details", tag("summary", "Every run"), _runs_table(material.epochs, looks).to_html()))
    return Section(
        id="learning",
        title="Learning curves",
        short="Training",
        lead="Perplexity after each epoch. Validation is measured with dropout off; the training loss is taken under "
        "dropout, so the two are not to be compared with each other.",
        findings=findings,
        blocks=blocks,
        key_findings=len(findings),
    )


def _groups(entries: Sequence[Entry[EpochRecord]], looks: Looks) -> list[Group]:
    found: dict[tuple[object, ...], Group] = {}
    for entry in entries:
        run = entry.payload.run
        key = (same_head(run.head), run.recipe, run.overrides, run.precision, run.corpus_checksum)
        group = found.setdefault(key, Group(run, looks[run.head].label, looks[run.head]))
        group.seeds.setdefault(run.seed, {})[entry.payload.epoch] = entry.payload
    labels = setting_labels([group.run for group in found.values()])
    settings = grouped(zip(found.values(), labels, strict=True), lambda pair: same_head(pair[0].run.head))
    for same in settings.values():
        for place, (group, label) in enumerate(same if len(same) > 1 else ()):
            # Several settings of one head: the same colour, told apart by dash and words.
            group.label = ", ".join(filter(None, (group.look.label, label)))
            group.look = Look(group.label, group.look.slot, OTHER_DASHES[place % len(OTHER_DASHES)], group.look.width)
    return list(found.values())


def _figure(name: str, groups: Sequence[Group], looks: Looks, entries: Sequence[Entry[EpochRecord]]) -> Figure:
    run = groups[0].run
    heads = {same_head(group.run.head) for group in groups}
    references = [c for c in _references(run) if c.head in heads]
    far = far_above({number: group.best.mean for number, group in enumerate(groups)})
    far_text = f" Far above and not shown at first: {', '.join(groups[n].label for n in far)}." if far else ""
    is_thinned = any(len(epochs) > POINTS for group in groups for epochs in group.seeds.values())
    text, what = sentence(corpus_label(run.corpus)), _phase(run)
    switches = [Switch("valid", "Validation"), Switch("train", "Training", False)]
    switches += [Switch("mean", "Mean and band"), Switch("runs", "Single runs", False)]
    return Figure(
        id=name,
        title=f"{text}: {what}",
        summary=_summary(groups) + far_text,
        x=Axis(title="epoch", log=False),
        y=Axis(title="perplexity", log=True, settings={"tickformat": ",.4~g"}),
        traces=[*_traces(groups), *(_reference_trace(curve, looks[curve.head]) for curve in references)],
        legend=[Switch(f"group:{n}", g.label, n not in far, g.look) for n, g in enumerate(groups)],
        switches=switches + [Switch("reference", "Reference")] * bool(references),
        table=_epochs_table(f"{text}, {what}", groups),
        environments=[entry.environment for entry in entries],
        notes=[
            *[f"Each curve is drawn through about {POINTS} of its epochs."] * is_thinned,
            *(f"Reference for {head_label(c.head)}: {c.source} (seed {c.seed})." for c in references),
        ],
        height=460,
    )


def _traces(groups: Sequence[Group]) -> Iterator[Trace]:
    for number, group in enumerate(groups):
        for split in SPLITS:
            yield from _mean_traces(group, split, (f"group:{number}", split))
            yield from _run_traces(group, split, (f"group:{number}", split))


def _reference_trace(curve: ReferenceCurve, look: Look) -> Trace:
    return line(
        list(curve.perplexities),
        list(curve.perplexities.values()),
        Look(look.label, look.slot, "dot", 1.5),
        name=f"{look.label}, reference",
        hover="epoch %{x}: %{y:.4~g}<br>%{text}",
        keys=("reference", "valid"),
        markers=True,
        text=[plot_text(curve.source)] * len(curve.perplexities),
        marker={"color": look.color, "symbol": "x-thin-open", "size": 8, "line": {"width": 2}},
    )


def _mean_traces(group: Group, split: str, keys: tuple[str, ...]) -> list[Trace]:
    quantity, words = SPLITS[split]
    epochs = thinned(group.common, POINTS)
    if not epochs:
        return []
    samples = [sample for epoch in epochs if (sample := group.sample(epoch, quantity)) is not None]
    look = group.look if split == "valid" else Look(group.label, group.look.slot, "dot", 1.4)
    seeds = f"mean of {len(group.seeds)} seeds" if len(group.seeds) > 1 else "one seed"
    mean = line(
        epochs,
        [s.mean for s in samples],
        look,
        name=group.label,
        hover=f"epoch %{{x}}, {words}: %{{y:.4~g}}%{{text}}<br>{seeds}",
        keys=(*keys, "mean"),
        text=["" if s.deviation is None else f" ± {s.deviation:.3g}" for s in samples],
    )
    return [*(_band(group, epochs, samples, (*keys, "mean")) if len(group.seeds) > 1 else []), mean]


def _band(group: Group, epochs: Sequence[int], samples: Sequence[Sample], keys: tuple[str, ...]) -> list[Trace]:
    """One standard deviation either way: the upper edge, and the lower with what lies between filled."""
    edges = [(s.mean + (s.deviation or 0.0), s.mean - (s.deviation or 0.0)) for s in samples]
    fills: tuple[dict[str, str], ...] = ({}, {"fill": "tonexty", "fillcolor": f"@s{group.look.slot}/0.16"})
    common = {
        "type": "scatter",
        "mode": "lines",
        "x": epochs,
        "line": {"width": 0, "color": group.look.color},
        "hoverinfo": "skip",
    }
    return [
        Trace({**common, "y": numbers([edge[place] if edge[1] > 0.0 else None for edge in edges]), **fill}, keys)
        for place, fill in enumerate(fills)
    ]


def _run_traces(group: Group, split: str, keys: tuple[str, ...]) -> list[Trace]:
    quantity, words = SPLITS[split]
    look = Look(group.label, group.look.slot, group.look.dash if split == "valid" else "dot", 1.1)
    traces = []
    for seed, records in group.seeds.items():
        epochs = thinned(sorted(records), POINTS)
        traces.append(
            line(
                epochs,
                [perplexity(getattr(records[epoch], quantity)) for epoch in epochs],
                look,
                name=f"{group.label}, seed {seed}",
                hover=f"epoch %{{x}}, {words}: %{{y:.4~g}}<br>%{{text}}",
                keys=(*keys, "runs"),
                text=[plot_text(records[epoch].optimizer) for epoch in epochs],
                opacity=0.75,
            )
        )
    return traces


def _spread_text(sample: Sample | None) -> str:
    """Mean with four digits, and standard deviation."""
    if sample is None:
        return DASH
    return number_text(sample.mean) + ("" if sample.deviation is None else f" ± {sample.deviation:.2f}")


def _summary(groups: Sequence[Group]) -> str:
    """One entry for a head and setting; what holds for all of them is said once."""
    shown = sorted((group for group in groups if group.common), key=lambda group: group.best.mean)
    if not shown:
        return "No epoch is common to all seeds."
    is_common = len({group.extent for group in shown}) == 1
    parts = [f"{g.label} {_spread_text(g.best)}" + ("" if is_common else f" ({g.extent})") for g in shown]
    common = f" ({shown[0].extent})" if is_common else ""
    return f"Least validation perplexity{common}: {listed(parts)}."


def _references(run: RunIdentity) -> list[ReferenceCurve]:
    return [c for c in reference_curves() if c.corpus == run.corpus and run.phase == "train"]


def _gate(group: Group) -> str | None:
    """The distance of the mean from the reference implementation's own curve."""
    curve = next((c for c in _references(group.run) if c.head == same_head(group.run.head)), None)
    known = {} if curve is None else curve.perplexities
    # The reference divides by all rows, and so is compared with the value that does the same.
    off = {
        epoch: sample.mean / known[epoch] - 1.0
        for epoch in group.common
        if epoch >= GATE_FROM and epoch in known and (sample := group.sample(epoch, "valid_loss_over_rows"))
    }
    if not off:
        return None
    verdict = "within" if max(map(abs, off.values())) <= GATE else "beyond"
    low, high = signed_text(min(off.values()), ".1%"), signed_text(max(off.values()), ".1%")
    where = f"{sentence(corpus_label(group.run.corpus))}, {group.label}"
    return (
        f"{where}: validation perplexity lies {low} to {high} from the reference curve at epochs "
        f"{min(off)} to {max(off)}, {verdict} a tolerance of {GATE:.0%}."
    )


def _epochs_table(caption: str, groups: Sequence[Group]) -> Table:
    epochs = sorted({epoch for group in groups for records in group.seeds.values() for epoch in records})
    chosen = thinned(epochs, TABLE_EPOCHS)
    shown = [(group, *split) for group in groups for split in SPLITS.values()]
    return Table(
        caption=f"{caption}: perplexity by epoch",
        columns=[Column("Epoch"), *(Column(words, group=group.label) for group, _, words in shown)],
        rows=[
            Row([str(e), *(_spread_text(group.sample(e, quantity)) for group, quantity, _ in shown)]) for e in chosen
        ],
        notes=[f"{len(chosen)} of {len(epochs)} epochs; the records hold all of them."] * (len(chosen) < len(epochs)),
    )


def _averaging_began(records: Iterable[EpochRecord]) -> int | None:
    return min((r.epoch for r in records if r.optimizer == "asgd"), default=None)


def _epoch_time(records: Iterable[EpochRecord]) -> str:
    return seconds_text(Sample.of([r.seconds for r in records]).mean)


def _peak_text(records: Iterable[EpochRecord]) -> str:
    peaks = [r.peak_mib for r in records if r.peak_mib is not None]
    return f"{max(peaks):,.0f} MiB" if peaks else DASH


def _settings_table(groups: Sequence[Group]) -> Table:
    """One row for all seeds of a thing."""
    fields: Fields[Group] = {
        Column("Output function", "label"): lambda group: Cell(head_label(group.run.head), swatch(group.look)),
        Column("Run", "words"): lambda group: ", ".join(
            filter(None, (group.run.corpus, _phase(group.run), setting_label(group.run)))
        ),
        "Seeds": lambda group: str(len(group.seeds)),
        "Parameters": lambda group: f"{group.run.parameters:,}",
        "Epochs": lambda group: range_text(max(epochs) for epochs in group.seeds.values()),
        "Least validation perplexity": lambda group: _spread_text(group.best),
        "Averages from epoch": lambda group: range_text(_averaging_began(run.values()) for run in group.seeds.values()),
        "Time an epoch": lambda group: _epoch_time(group.records),
        "Runs at once": lambda group: range_text(r.concurrent_runs for r in group.records),
        "Peak memory": lambda group: _peak_text(group.records),
    }
    return Table.of(
        groups,
        fields,
        caption="Runs, with the time of an epoch",
        notes=["Time: training and validation together, in the company of as many runs on the device as are shown."],
        has_heading=True,
    )


def _runs_table(entries: Sequence[Entry[EpochRecord]], looks: Looks) -> Table:
    runs = [
        (sorted((entry.payload for entry in found), key=lambda r: r.epoch), found[-1].environment.device)
        for found in grouped(entries, lambda entry: entry.payload.run).values()
    ]
    best = {records[0].run: min(records, key=lambda r: r.valid_loss) for records, _ in runs}
    fields: Fields[tuple[list[EpochRecord], str]] = {
        Column("Output function", "label"): lambda one: head_cell(one[0][0].run.head, looks),
        Column("Run", "words"): lambda one: run_label(one[0][0].run),
        Column("Phase", "label"): lambda one: _phase(one[0][0].run),
        "Seed": lambda one: str(one[0][0].run.seed),
        "Epochs": lambda one: str(one[0][-1].epoch),
        "Best epoch": lambda one: str(best[one[0][0].run].epoch),
        "Its validation perplexity": lambda one: number_text(best[one[0][0].run].valid_perplexity),
        "Averages from epoch": lambda one: count_text(_averaging_began(one[0])),
        "Time an epoch": lambda one: _epoch_time(one[0]),
        Column("Device", "words"): lambda one: one[1],
    }
    return Table.of(runs, fields, caption="Every run")
