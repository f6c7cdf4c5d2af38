"""Learning curves: perplexity after each epoch, run by run and as a mean over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from sigsoftmax.records.published.references import reference_curves
from sigsoftmax.records.schemas.training import EpochRecord, RunIdentity
from sigsoftmax.records.statistics import Sample, perplexity
from sigsoftmax.report.figures import Axis, Figure, Switch, Trace, line, numbers, thinned
from sigsoftmax.report.loading import Entry
from sigsoftmax.report.markup import plot_text, tag
from sigsoftmax.report.material import Material, corpus_label, run_label, setting_label, setting_labels
from sigsoftmax.report.section import Absent, Block, Section
from sigsoftmax.report.tables import (
    DASH,
    Cell,
    Column,
    Row,
    Table,
    count_text,
    listed,
    number_text,
    range_text,
    seconds_text,
    sentence,
    signed_text,
)
from sigsoftmax.report.theme import Look, Looks, head_label, same_head, swatch

__all__ = ["section"]

POINTS = 400
"""drawn of a curve"""
TABLE_EPOCHS = 40
"""rows of the table under a figure"""
GATE = 0.04
"""What a port may lie above the reference curve from epoch GATE_FROM on; seeds differ by one to two percent."""
GATE_FROM = 8
FAR = 3.0
"""A head whose perplexity is this many times the median is not shown at first: the others would be one line."""
PHASES = {"train": "training", "finetune": "finetuning"}


@dataclass
class Group:
    """All seeds of one thing."""

    run: RunIdentity
    label: str
    look: Look
    seeds: dict[int, dict[int, EpochRecord]] = field(default_factory=dict)
    """seed -> epoch -> record"""

    @property
    def common(self) -> list[int]:
        """Epochs that every seed has reached: a mean over fewer would jump where a run ends."""
        return sorted(set.intersection(*(set(epochs) for epochs in self.seeds.values())))

    def sample(self, epoch: int, quantity: str) -> Sample:
        return Sample.of([perplexity(getattr(epochs[epoch], quantity)) for epochs in self.seeds.values()])


def section(material: Material, looks: Looks) -> Section | Absent:
    figures: dict[tuple[str, str], list[Entry[EpochRecord]]] = {}
    for entry in material.epochs:
        figures.setdefault((entry.payload.run.corpus, entry.payload.run.phase), []).append(entry)
    if not figures:
        return Absent("Learning curves", "sigsoftmax train ptb-sigsoftmax")
    corpora = list(dict.fromkeys(corpus for corpus, _ in figures))
    blocks: list[Block] = []
    findings: list[str] = []
    shown: list[tuple[str, Group]] = []
    # Files of a folder may name finetuning first.
    in_order = sorted(figures.items(), key=lambda figure: (corpora.index(figure[0][0]), figure[0][1] != "train"))
    for number, ((corpus, phase), entries) in enumerate(in_order, start=1):
        groups = _groups(entries, looks)
        shown += [(PHASES.get(phase, phase), group) for group in groups]
        blocks.append(_figure(f"learning-{number}", corpus, phase, groups, looks, entries))
        if phase == "train":
            findings += [text for group in groups if (text := _gate(corpus, group))]
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
    heads = [same_head(group.run.head) for group in found.values()]
    labels = setting_labels([group.run for group in found.values()])
    dashes = ("solid", "dash", "dashdot", "longdash")
    for place, group in enumerate(found.values()):
        head = same_head(group.run.head)
        if heads.count(head) > 1:
            # Several settings of one head: the same colour, told apart by dash and words.
            group.label = ", ".join(filter(None, (group.look.label, labels[place])))
            dash = dashes[heads[:place].count(head) % len(dashes)]
            group.look = Look(group.label, group.look.slot, dash, group.look.width)
    return list(found.values())


def _figure(
    name: str,
    corpus: str,
    phase: str,
    groups: Sequence[Group],
    looks: Looks,
    entries: Sequence[Entry[EpochRecord]],
) -> Figure:
    traces: list[Trace] = []
    for number, group in enumerate(groups):
        for quantity, split in (("train_loss", "train"), ("valid_loss", "valid")):
            keys = (f"group:{number}", split)
            traces += _mean_traces(group, quantity, split, keys)
            traces += _run_traces(group, quantity, split, keys)
    references = [c for c in reference_curves() if c.corpus == corpus and phase == "train"]
    references = [c for c in references if any(same_head(g.run.head) == c.head for g in groups)]
    for curve in references:
        look = looks[curve.head]
        traces.append(
            line(
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
        )
    switches = [
        Switch("valid", "Validation"),
        Switch("train", "Training", False),
        Switch("mean", "Mean and band"),
        Switch("runs", "Single runs", False),
    ]
    if references:
        switches.append(Switch("reference", "Reference"))
    best = [_best(g).mean for g in groups]
    far = [g for g, value in zip(groups, best, strict=True) if not value <= FAR * statistics.median(best)]
    thinned_note = any(len(epochs) > POINTS for g in groups for epochs in g.seeds.values())
    notes = [f"Each curve is drawn through about {POINTS} of its epochs."] if thinned_note else []
    notes += [f"Reference for {head_label(c.head)}: {c.source} (seed {c.seed})." for c in references]
    return Figure(
        id=name,
        title=f"{sentence(corpus_label(corpus))}: {PHASES.get(phase, phase)}",
        summary=_summary(groups)
        + (f" Far above and not shown at first: {', '.join(g.label for g in far)}." if far else ""),
        x=Axis(title="epoch", log=False),
        y=Axis(title="perplexity", log=True, settings={"tickformat": ",.4~g"}),
        traces=traces,
        legend=[Switch(f"group:{n}", g.label, g not in far, g.look) for n, g in enumerate(groups)],
        switches=switches,
        table=_epochs_table(f"{sentence(corpus_label(corpus))}, {PHASES.get(phase, phase)}", groups),
        environments=[entry.environment for entry in entries],
        notes=notes,
        height=460,
    )


def _mean_traces(group: Group, quantity: str, split: str, keys: tuple[str, ...]) -> list[Trace]:
    epochs = group.common
    if not epochs:
        return []
    epochs = [epochs[place] for place in thinned(len(epochs), POINTS)]
    samples = [group.sample(epoch, quantity) for epoch in epochs]
    count = len(group.seeds)
    look = group.look if split == "valid" else Look(group.label, group.look.slot, "dot", 1.4)
    words = "validation" if split == "valid" else "training"
    seeds = f"mean of {count} seeds" if count > 1 else "one seed"
    traces = []
    if count > 1:
        edges = [(s.mean + (s.deviation or 0.0), s.mean - (s.deviation or 0.0)) for s in samples]
        for place, more in enumerate(({}, {"fill": "tonexty", "fillcolor": f"@s{group.look.slot}/0.16"})):
            band = {
                "type": "scatter",
                "mode": "lines",
                "x": epochs,
                "y": numbers([edge[place] if edge[1] > 0.0 else None for edge in edges]),
                "line": {"width": 0, "color": look.color},
                "hoverinfo": "skip",
                **more,
            }
            traces.append(Trace(band, (*keys, "mean")))
    deviations = ["" if s.deviation is None else f" ± {s.deviation:.3g}" for s in samples]
    traces.append(
        line(
            epochs,
            [s.mean for s in samples],
            look,
            name=group.label,
            hover=f"epoch %{{x}}, {words}: %{{y:.4~g}}%{{text}}<br>{seeds}",
            keys=(*keys, "mean"),
            text=deviations,
        )
    )
    return traces


def _run_traces(group: Group, quantity: str, split: str, keys: tuple[str, ...]) -> list[Trace]:
    traces = []
    words = "validation" if split == "valid" else "training"
    for seed, records in group.seeds.items():
        epochs = sorted(records)
        epochs = [epochs[place] for place in thinned(len(epochs), POINTS)]
        look = Look(group.label, group.look.slot, group.look.dash if split == "valid" else "dot", 1.1)
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


def _best(group: Group) -> Sample:
    return Sample.of([min(perplexity(r.valid_loss) for r in epochs.values()) for epochs in group.seeds.values()])


def _summary(groups: Sequence[Group]) -> str:
    """One entry for a head and setting; what holds for all of them is said once."""
    shown = [group for group in groups if group.common]
    if not shown:
        return "No epoch is common to all seeds."
    extents = [_extent(group) for group in shown]
    is_common = len(set(extents)) == 1
    parts = []
    for group, extent in sorted(zip(shown, extents, strict=True), key=lambda pair: _best(pair[0]).mean):
        best = _best(group)
        spread = "" if best.deviation is None else f" ± {best.deviation:.2f}"
        parts.append(f"{group.label} {number_text(best.mean)}{spread}" + ("" if is_common else f" ({extent})"))
    common = f" ({extents[0]})" if is_common else ""
    return f"Least validation perplexity{common}: {listed(parts)}."


def _extent(group: Group) -> str:
    seeds = f"{len(group.seeds)} seeds" if len(group.seeds) > 1 else "one seed"
    return f"{seeds}, {group.common[-1]} epochs"


def _gate(corpus: str, group: Group) -> str | None:
    """How far the mean lies from the reference implementation's own curve."""
    curve = next((c for c in reference_curves() if c.corpus == corpus and c.head == same_head(group.run.head)), None)
    if curve is None:
        return None
    common = [epoch for epoch in group.common if epoch >= GATE_FROM and epoch in curve.perplexities]
    if not common:
        return None
    # The reference divides by all rows, and so is compared with the value that does the same.
    off = [group.sample(epoch, "valid_loss_over_rows").mean / curve.perplexities[epoch] - 1.0 for epoch in common]
    verdict = "within" if max(map(abs, off)) <= GATE else "beyond"
    low, high = signed_text(min(off), ".1%"), signed_text(max(off), ".1%")
    return (
        f"{sentence(corpus_label(corpus))}, {group.label}: validation perplexity lies {low} to {high} from the "
        f"reference curve at epochs {common[0]} to {common[-1]}, {verdict} a tolerance of {GATE:.0%}."
    )


def _epochs_table(caption: str, groups: Sequence[Group]) -> Table:
    epochs = sorted({epoch for group in groups for records in group.seeds.values() for epoch in records})
    chosen = [epochs[place] for place in thinned(len(epochs), TABLE_EPOCHS)]
    rows = []
    for epoch in chosen:
        cells: list[Cell | str] = [str(epoch)]
        for group in groups:
            for quantity in ("train_loss", "valid_loss"):
                values = [perplexity(getattr(r[epoch], quantity)) for r in group.seeds.values() if epoch in r]
                sample = Sample.of(values) if values else None
                spread = "" if sample is None or sample.deviation is None else f" ± {sample.deviation:.2f}"
                cells.append(DASH if sample is None else number_text(sample.mean) + spread)
        rows.append(Row(cells))
    columns = [Column("Epoch")]
    for group in groups:
        columns += [Column("training", group=group.label), Column("validation", group=group.label)]
    notes = (
        [] if len(chosen) == len(epochs) else [f"{len(chosen)} of {len(epochs)} epochs; the records hold all of them."]
    )
    return Table(caption=f"{caption}: perplexity by epoch", columns=columns, rows=rows, notes=notes)


def _settings_table(groups: Sequence[tuple[str, Group]]) -> Table:
    """One row for all seeds of a thing."""
    rows = []
    for phase, group in groups:
        runs = [list(epochs.values()) for epochs in group.seeds.values()]
        best = _best(group)
        every = [record for run in runs for record in run]
        peaks = [r.peak_mib for r in every if r.peak_mib is not None]
        rows.append(
            Row(
                (
                    Cell(head_label(group.run.head), swatch(group.look)),
                    ", ".join(filter(None, (group.run.corpus, phase, setting_label(group.run)))),
                    str(len(runs)),
                    f"{group.run.parameters:,}",
                    range_text(max(r.epoch for r in run) for run in runs),
                    number_text(best.mean) + ("" if best.deviation is None else f" ± {best.deviation:.2f}"),
                    range_text(min((r.epoch for r in run if r.optimizer == "asgd"), default=None) for run in runs),
                    seconds_text(Sample.of([r.seconds_training + r.seconds_validation for r in every]).mean),
                    range_text(r.concurrent_runs for r in every),
                    f"{max(peaks):,.0f} MiB" if peaks else DASH,
                )
            )
        )
    figures = ("Seeds", "Parameters", "Epochs", "Least validation perplexity", "Averages from epoch", "Time an epoch")
    columns = [Column("Output function", "label"), Column("Run", "words"), *(Column(title) for title in figures)]
    columns += [Column("Runs at once"), Column("Peak memory")]
    return Table(
        caption="Runs, with the time of an epoch",
        columns=columns,
        rows=rows,
        notes=["Time: training and validation together, in the company of as many runs on the device as are shown."],
        has_heading=True,
    )


def _runs_table(entries: Sequence[Entry[EpochRecord]], looks: Looks) -> Table:
    runs: dict[RunIdentity, list[Entry[EpochRecord]]] = {}
    for entry in entries:
        runs.setdefault(entry.payload.run, []).append(entry)
    rows = []
    for run, found in runs.items():
        records = sorted((entry.payload for entry in found), key=lambda r: r.epoch)
        best = min(records, key=lambda r: r.valid_loss)
        rows.append(
            Row(
                (
                    Cell(head_label(run.head), swatch(looks[run.head])),
                    run_label(run),
                    PHASES.get(run.phase, run.phase),
                    str(run.seed),
                    str(records[-1].epoch),
                    str(best.epoch),
                    number_text(perplexity(best.valid_loss)),
                    count_text(next((r.epoch for r in records if r.optimizer == "asgd"), None)),
                    seconds_text(Sample.of([r.seconds_training + r.seconds_validation for r in records]).mean),
                    found[-1].environment.device,
                )
            )
        )
    figures = ("Seed", "Epochs", "Best epoch", "Its validation perplexity", "Averages from epoch", "Time an epoch")
    columns = [Column("Output function", "label"), Column("Run", "words"), Column("Phase", "label")]
    columns += [*(Column(title) for title in figures), Column("Device", "words")]
    return Table(caption="Every run", columns=columns, rows=rows)
