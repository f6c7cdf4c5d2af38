"""Singular values of log-output matrices, with thresholds and noise floor; the paper's table of ranks beside ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sigsoftmax.records import Environment
from sigsoftmax.records.grouping import grouped
from sigsoftmax.records.published import paper
from sigsoftmax.records.schemas.model_spectra import ModelSpectrum
from sigsoftmax.records.schemas.spectra import RULES, RankBounds, Spectrum
from sigsoftmax.records.schemas.training import RunIdentity
from sigsoftmax.report.figures import Axis, Figure, Switch, Trace, line, threshold_line
from sigsoftmax.report.loading import Entry
from sigsoftmax.report.material import Material, corpus_label, differing, setting_label, setting_parts
from sigsoftmax.report.number_text import (
    DASH,
    count_text,
    listed,
    number_text,
    range_text,
    seconds_text,
    sentence,
    size_text,
)
from sigsoftmax.report.sections.section import Absent, Block, Section
from sigsoftmax.report.tables import Cell, Column, Fields, Row, Table, head_cell
from sigsoftmax.report.theme import DASHES, Look, Looks, same_head, swatch

__all__ = ["Curve", "section", "spectrum_figure", "tables"]

POINTS = 350
"""drawn of a spectrum, besides the edges of cliffs"""
CLIFF = 1.5
"""A value that is this many times the next stands at a cliff, and is drawn."""
RULE_WORDS = {
    "press32": "the paper's (Press, float32)",
    "numpy32": "numpy's, float32",
    "numpy64": "numpy's, float64",
    "press64": "Press, float64",
    "noise": "noise floor",
}
PHASES = {"train": "not finetuned", "finetune": "finetuned"}
OTHER_SLOTS = (4, 1, 5, 6, 2, 3, 7, 8, 9, 11, 0)
"""colours of matrices that belong to no head"""


@dataclass(frozen=True)
class Curve:
    """A spectrum with its name and look."""

    name: str
    look: Look
    spectrum: Spectrum
    group: str = ""
    """the name without the seed, for what is said of all seeds of a head; empty: the name"""
    setting: str = ""
    """the difference from other curves of the same head"""
    loss: float | None = None
    """loss of the same model on the same text, in nats, where it is on record"""


def section(material: Material, looks: Looks) -> Section | Absent:
    if not (material.model_spectra or material.spectra or material.rank_bounds):
        return Absent("Singular values and ranks", "sigsoftmax reproduce table3")
    figures: list[tuple[str, list[Curve], list[Environment]]] = []
    findings: list[str] = []
    losses = {_evaluated(e.payload.run, e.payload.split): e.payload.loss for e in material.evaluations}
    for (corpus, split, *_), entries in grouped(material.model_spectra, lambda entry: _matrix(entry.payload)).items():
        curves = _model_curves(entries, looks, losses)
        title = f"{sentence(corpus_label(corpus))}, {split}: singular values of the log-output matrix"
        figures.append((title, curves, [entry.environment for entry in entries]))
        for setting, same in grouped(curves, lambda curve: curve.setting).items():
            # Of one setting the heads are told apart by their names alone.
            plain = [replace(curve, group=curve.group.removesuffix(f" ({setting})")) for curve in same]
            findings += _findings(plain, ", ".join(filter(None, (corpus_label(corpus), setting))))
    of_models = len(figures)
    sizes = grouped(material.spectra, lambda entry: size_text(entry.payload.words, entry.payload.contexts))
    for size, found in sizes.items():
        curves = [
            Curve(
                entry.payload.source, Look(entry.payload.source, OTHER_SLOTS[place % len(OTHER_SLOTS)]), entry.payload
            )
            for place, entry in enumerate(found)
        ]
        title = f"Singular values of {'a matrix' if len(found) == 1 else 'matrices'} of {size}"
        figures.append((title, curves, [entry.environment for entry in found]))
        findings += _findings(curves, "")
    blocks: list[Block] = [spectrum_figure(f"spectrum-{n}", *figure) for n, figure in enumerate(figures, start=1)]
    blocks[of_models:of_models] = [replace(table, has_heading=True) for table in tables(material, looks)]
    if material.rank_bounds:
        blocks.append(_bounds_table([entry.payload for entry in material.rank_bounds], looks))
    return Section(
        id="spectra",
        title="Singular values and ranks",
        short="Ranks",
        lead="A numerical rank is the number of singular values above a threshold: it depends on the threshold and on "
        "the precision of the entries. So here is the whole spectrum, with the thresholds and the noise floor, below "
        "which values are rounding.",
        findings=findings,
        blocks=blocks,
    )


def _evaluated(run: RunIdentity, split: str) -> Hashable:
    """A model and a text: the same for its spectrum and its loss."""
    return run.recipe, run.overrides, same_head(run.head), run.phase, run.precision, run.seed, run.corpus, split


def _matrix(record: ModelSpectrum) -> tuple[str, str, int, int]:
    return record.run.corpus, record.split, record.spectrum.words, record.spectrum.contexts


def _model_curves(
    entries: Sequence[Entry[ModelSpectrum]], looks: Looks, losses: Mapping[Hashable, float]
) -> list[Curve]:
    runs = [entry.payload.run for entry in entries]
    settings = differing([(*setting_parts(run), PHASES.get(run.phase, run.phase)) for run in runs])
    texts = [", ".join(setting) for setting in settings]
    groups = [looks[run.head].label + (f" ({text})" if text else "") for run, text in zip(runs, texts, strict=True)]
    # Several settings of one head: the same colour, told apart by dash and words.
    own = grouped(zip(runs, texts, strict=True), lambda pair: same_head(pair[0].head))
    curves = []
    for entry, group, text in zip(entries, groups, texts, strict=True):
        run, look = entry.payload.run, looks[entry.payload.run.head]
        name = f"{group}, seed {run.seed}" if groups.count(group) > 1 else group
        place = list(dict.fromkeys(setting for _, setting in own[same_head(run.head)])).index(text)
        dash = DASHES[(DASHES.index(look.dash) + place) % len(DASHES)]
        loss = losses.get(_evaluated(run, entry.payload.split))
        curves.append(Curve(name, Look(name, look.slot, dash, look.width), entry.payload.spectrum, group, text, loss))
    return curves


def _by_group(curves: Sequence[Curve]) -> dict[str, list[Spectrum]]:
    """All seeds of a head together."""
    groups = grouped(curves, lambda curve: curve.group or curve.name)
    return {name: [curve.spectrum for curve in found] for name, found in groups.items()}


# --- the figure ---------------------------------------------------------------------------------------------------


def drawn_places(values: Sequence[float]) -> list[int]:
    """Places to draw: few per power of ten, and both sides of every cliff."""
    count = len(values)
    if count <= POINTS:
        return list(range(count))
    top = math.log(count)
    places = {min(count - 1, round(math.exp(top * step / (POINTS - 1))) - 1) for step in range(POINTS)}
    for place in range(count - 1):
        if values[place] > CLIFF * values[place + 1] > 0.0:
            places |= {place, place + 1}
    return sorted(places)


def spectrum_figure(name: str, title: str, curves: Sequence[Curve], environments: Sequence[Environment]) -> Figure:
    """Spectra of matrices of one size, each relative to its largest value, so that thresholds are common."""
    usable = {number: curve for number, curve in enumerate(curves) if curve.spectrum.is_usable}
    longest = max((len(curve.spectrum.singular_values) for curve in usable.values()), default=1)
    traces = [trace for number, curve in usable.items() for trace in _curve_traces(curve, number, longest)]
    for some in [curve.spectrum for curve in usable.values()][:1]:
        for rule in RULES.values():
            height, key = rule.relative(some.words, some.contexts), "press32" if rule.name == "press32" else "rules"
            traces.append(threshold_line([1, longest], height, RULE_WORDS[rule.name], keys=(key,)))
    return Figure(
        id=name,
        title=title,
        summary=_summary(list(usable.values())),
        x=Axis(title="index", log=True, settings={"tickformat": ",d"}),
        y=Axis(title="singular value / largest", log=True, settings={"exponentformat": "power"}),
        traces=traces,
        legend=[Switch(f"curve:{n}", curve.name, True, curve.look) for n, curve in enumerate(curves)],
        switches=[
            Switch("press32", "Paper's threshold"),
            Switch("rules", "Other thresholds", False),
            Switch("noise", "Noise floor"),
        ],
        table=_ranks_table(title, curves),
        environments=environments,
        height=480,
    )


def _curve_traces(curve: Curve, number: int, longest: int) -> list[Trace]:
    spectrum, keys = curve.spectrum, (f"curve:{number}", "noise")
    values, largest, floor = spectrum.singular_values, spectrum.largest, spectrum.noise_floor
    places = drawn_places(values)
    sure = [place for place in places if values[place] > floor]
    noise = [place for place in places if 0.0 < values[place] <= floor]

    def drawn(places: Sequence[int], look: Look, **more: Any) -> Trace:
        x, y = [p + 1 for p in places], [values[p] / largest for p in places]
        return line(x, y, look, hover="singular value %{x}: %{y:.3e} of the largest", **more)

    traces = [drawn(sure, curve.look, name=curve.name, keys=keys[:1])]
    if noise:
        # Joined to what lies above, and faint: nothing can be said of these.
        look = Look(curve.name, curve.look.slot, "dot", 1.2)
        name = f"{curve.name}, below its noise floor"
        traces.append(drawn([*sure[-1:], *noise], look, name=name, keys=keys, opacity=0.55))
    if 0.0 < floor < math.inf:
        traces.append(
            line(
                [1, longest],
                [floor / largest] * 2,
                Look(curve.name, curve.look.slot, "dashdot", 1.0),
                name=f"Noise floor of {curve.name}",
                hover="%{y:.2e} of the largest",
                keys=keys,
                opacity=0.8,
            )
        )
    return traces


def rank_text(spectrum: Spectrum, rule: str) -> str:
    if not spectrum.is_usable:
        return DASH
    count = spectrum.count(rule)
    if count.rank is None:
        return count.text
    between = "" if count.at_least == count.at_most else f" ({count.at_least:,} to {count.at_most:,})"
    return f"{count.rank:,}{between}"


def _summary(curves: Sequence[Curve]) -> str:
    if not curves:
        return "None of these spectra has a singular value above zero."
    some = curves[0].spectrum
    if len(curves) == 1:
        ranks = f"Rank by the paper's threshold: {rank_text(some, 'press32')}."
    else:
        groups = _by_group(curves).items()
        each = [f"{name} {_ranks_text(s) if len(s) > 1 else rank_text(s[0], 'press32')}" for name, s in groups]
        ranks = f"Ranks by the paper's threshold: {listed(each)}."
    faint = any(value <= curve.spectrum.noise_floor for curve in curves for value in curve.spectrum.singular_values)
    noise = " Faint dots lie below the noise floor of their spectrum." if faint else ""
    return f"{some.words:,} tokens, {some.contexts:,} contexts. {ranks}{noise}"


def _ranks_table(caption: str, curves: Sequence[Curve]) -> Table:
    def size(s: Spectrum) -> str:
        return size_text(s.words, s.contexts) + (f" of {s.contexts_expected:,} expected" if s.contexts_expected else "")

    def number(value: Callable[[Spectrum], float], digits: int) -> Callable[[Curve], str]:
        return lambda curve: number_text(value(curve.spectrum), digits) if curve.spectrum.is_usable else DASH

    def rank(rule: str) -> Callable[[Curve], str]:
        return lambda curve: rank_text(curve.spectrum, rule)

    fields: Fields[Curve] = {
        Column("Matrix", "label"): lambda curve: Cell(curve.name, swatch(curve.look)),
        "Size": lambda curve: size(curve.spectrum),
        **({"Loss (nats)": lambda curve: number_text(curve.loss)} if any(c.loss is not None for c in curves) else {}),
        **{f"Rank, {RULE_WORDS[rule]}": rank(rule) for rule in (*RULES, "noise")},
        "Stable rank": number(lambda s: s.stable_rank, 3),
        "Effective rank": number(lambda s: s.effective_rank, 3),
        "Largest": number(lambda s: s.largest, 4),
        "Noise floor / largest": number(lambda s: s.noise_floor / s.largest, 2),
        Column("Method and precision", "words"): lambda curve: (
            f"{curve.spectrum.method}, {curve.spectrum.precision or curve.spectrum.dtype}"
        ),
        "Time": lambda curve: seconds_text(curve.spectrum.seconds),
    }
    formulas = "; ".join(f"{RULE_WORDS[rule.name]}: {rule.formula}" for rule in RULES.values())
    notes = [f"In brackets: between which ranks the estimated errors leave the count. Thresholds: {formulas}."]
    if any(curve.spectrum.contexts_expected is not None for curve in curves):
        notes.append("A matrix that broke off before its end has fewer columns than were expected.")
    return Table.of(curves, fields, caption=f"Ranks: {caption}", notes=notes)


def _findings(curves: Sequence[Curve], where: str) -> list[str]:
    """The ranks by every threshold, where they depend on the threshold, with the losses of the models beside them."""
    usable = [curve for curve in curves if curve.spectrum.is_usable]
    groups = _by_group(usable)
    counted = {
        rule: {name: range_text(s.count(rule).rank for s in found) for name, found in groups.items()}
        for rule in (*RULES, "noise")
    }
    known = {
        rule: ", ".join(f"{name} {ranks}" for name, ranks in found.items() if ranks != DASH)
        for rule, found in counted.items()
    }
    if len(set(filter(None, known.values()))) < 2:
        return []
    parts = [
        f"{ranks} {'above the' if rule == 'noise' else 'by'} {RULE_WORDS[rule]}"
        for rule, ranks in known.items()
        if ranks
    ]
    before = f"{where}: " if where else ""
    losses = grouped([curve for curve in usable if curve.loss is not None], lambda curve: curve.group or curve.name)
    told = ", ".join(f"{name} {_losses_text([curve.loss or 0.0 for curve in own])}" for name, own in losses.items())
    beside = f" Losses in nats: {told}." if told else ""
    return [sentence(f"{before}ranks are a matter of the threshold: {'; '.join(parts)}.{beside}")]


def _losses_text(losses: Sequence[float]) -> str:
    low, high = number_text(min(losses)), number_text(max(losses))
    return low if low == high else f"{low} to {high}"


# --- table 3, bounds ----------------------------------------------------------------------------------------------


def tables(material: Material, looks: Looks, missing: str = "") -> list[Table]:
    """The paper's table of ranks with ours under it; ``missing`` stands for ours of heads that have none."""
    measured = [e.payload for e in material.model_spectra if e.payload.run.corpus in paper.CORPORA]
    if not (measured or missing):
        return []
    rows: list[Row] = []
    own = grouped(measured, lambda m: same_head(m.run.head))
    for head in dict.fromkeys([*paper.HEADS, *own]):
        published = {rank.corpus: rank.rank for rank in paper.RANKS if rank.head == head}
        rows.append(Row((head_cell(head, looks),)))
        if published:
            cells = [count_text(published.get(corpus)) for corpus in paper.CORPORA]
            rows.append(Row(("paper", *cells), class_="published"))
        for label, same in grouped(own.get(head, ()), _described).items():
            spectra = grouped(same, lambda m: m.run.corpus)
            cells = [_ranks_text([m.spectrum for m in spectra.get(corpus, ())]) for corpus in paper.CORPORA]
            rows.append(Row((label, *cells), class_="ours"))
        if missing and head not in own:
            rows.append(Row((f"ours: {missing}", *[DASH] * len(paper.CORPORA)), class_="ours"))
    table = Table(
        caption="Table 3. Ranks of the log-output matrices",
        columns=[Column("Source", "label"), *map(Column, paper.CORPORA.values())],
        rows=rows,
        notes=[
            "By the threshold of Press et al. with eps of float32. Several seeds: least to most.",
            "A rank says little alone: other thresholds, the noise floor and the losses stand beside the spectra.",
            f"The paper's models are finetuned, its text is the test set. Source: {paper.PAPER}.",
        ],
    )
    return [table]


def _described(record: ModelSpectrum) -> str:
    run = record.run
    return ", ".join(filter(None, ("ours", setting_label(run), PHASES.get(run.phase, run.phase), record.split)))


def _ranks_text(spectra: Sequence[Spectrum]) -> str:
    """The ranks of all seeds of a head: least to most."""
    counts = [s.count("press32") for s in spectra if s.is_usable]
    ranks = sorted(count.rank for count in counts if count.rank is not None)
    if not ranks:
        return "not counted: below the noise floor" if counts else DASH
    return range_text(ranks) + (f" ({len(ranks)} seeds)" if len(ranks) > 1 else "")


def _bounds_table(bounds: Sequence[RankBounds], looks: Looks) -> Table:
    fields: Fields[RankBounds] = {
        Column("Matrix", "label"): lambda b: b.source,
        Column("Head", "label"): lambda b: head_cell(b.head, looks) if b.head else DASH,
        "Width": lambda b: count_text(b.width),
        "Size": lambda b: size_text(b.words, b.contexts),
        "Rank": lambda b: f"exactly {b.upper:,}" if b.lower == b.upper else f"{b.lower:,} to {b.upper:,}",
        Column("Upper bound from", "words"): lambda b: b.upper_reason,
        Column("Threshold", "words"): lambda b: RULE_WORDS.get(b.rule, b.rule),
        "Block": lambda b: size_text(b.block_words, b.block_contexts),
        "Time": lambda b: seconds_text(b.seconds),
    }
    return Table.of(
        bounds,
        fields,
        caption="Bounds on a rank, from a block of the matrix and from theory",
        notes=["Singular values of a block above the whole matrix's threshold bound its rank from below."],
        has_heading=True,
    )
