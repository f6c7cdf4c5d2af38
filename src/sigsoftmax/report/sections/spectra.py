"""Singular values of log-output matrices, with thresholds and noise floor; the paper's table of ranks beside ours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from sigsoftmax.records import Environment
from sigsoftmax.records.published import paper
from sigsoftmax.records.schemas.model_spectra import ModelSpectrum
from sigsoftmax.records.schemas.spectra import RULES, RankBounds, Spectrum
from sigsoftmax.report.figures import Axis, Figure, Switch, Trace, line, threshold_line
from sigsoftmax.report.loading import Entry
from sigsoftmax.report.material import Material, corpus_label, differing, setting_label, setting_parts
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
    size_text,
)
from sigsoftmax.report.theme import DASHES, Look, Looks, head_label, same_head, swatch

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
    """what tells it from curves of the same head"""


def is_usable(spectrum: Spectrum) -> bool:
    """Whether there is something to draw and to count; a record may hold anything."""
    values, errors = spectrum.singular_values, (spectrum.squared_error, spectrum.value_error)
    return (
        bool(values)
        and math.isfinite(values[0])
        and values[0] > 0.0
        and all(math.isfinite(error) and error >= 0.0 for error in errors)
        and min(spectrum.words, spectrum.contexts) > 0
    )


def section(material: Material, looks: Looks) -> Section | Absent:
    if not (material.model_spectra or material.spectra or material.rank_bounds):
        return Absent("Singular values and ranks", "sigsoftmax reproduce table3")
    blocks: list[Block] = []
    findings: list[str] = []
    number = 0
    for (corpus, split, *_), entries in _by_matrix(material.model_spectra).items():
        number += 1
        curves = _model_curves(entries, looks)
        title = f"{sentence(corpus_label(corpus))}, {split}: singular values of the log-output matrix"
        environments = [entry.environment for entry in entries]
        blocks.append(spectrum_figure(f"spectrum-{number}", title, curves, environments))
        for setting in dict.fromkeys(curve.setting for curve in curves):
            # Of one setting the heads are told apart by their names alone.
            same = [
                dataclasses.replace(c, group=c.group.removesuffix(f" ({setting})"))
                for c in curves
                if c.setting == setting
            ]
            findings += _findings(same, ", ".join(filter(None, (corpus_label(corpus), setting))))
    blocks += [dataclasses.replace(table, has_heading=True) for table in tables(material, looks)]
    sizes: dict[tuple[int, int], list[Entry[Spectrum]]] = {}
    for entry in material.spectra:
        sizes.setdefault((entry.payload.words, entry.payload.contexts), []).append(entry)
    for (words, contexts), found in sizes.items():
        number += 1
        curves = _plain_curves([entry.payload for entry in found])
        title = f"Singular values of {'a matrix' if len(found) == 1 else 'matrices'} of {size_text(words, contexts)}"
        environments = [entry.environment for entry in found]
        blocks.append(spectrum_figure(f"spectrum-{number}", title, curves, environments))
        findings += _findings(curves, "")
    if material.rank_bounds:
        blocks.append(_bounds_table(material.rank_bounds, looks))
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


def _by_matrix(entries: Sequence[Entry[ModelSpectrum]]) -> dict[tuple[str, str, int, int], list[Entry[ModelSpectrum]]]:
    groups: dict[tuple[str, str, int, int], list[Entry[ModelSpectrum]]] = {}
    for entry in entries:
        p = entry.payload
        groups.setdefault((p.run.corpus, p.split, p.spectrum.words, p.spectrum.contexts), []).append(entry)
    return groups


def _model_curves(entries: Sequence[Entry[ModelSpectrum]], looks: Looks) -> list[Curve]:
    runs = [entry.payload.run for entry in entries]
    settings = differing([(*setting_parts(run), PHASES.get(run.phase, run.phase)) for run in runs])
    texts = [", ".join(setting) for setting in settings]
    groups = [looks[run.head].label + (f" ({text})" if text else "") for run, text in zip(runs, texts, strict=True)]
    curves = []
    for entry, group, text in zip(entries, groups, texts, strict=True):
        run, look = entry.payload.run, looks[entry.payload.run.head]
        name = f"{group}, seed {run.seed}" if groups.count(group) > 1 else group
        # Several settings of one head: the same colour, told apart by dash and words.
        own = list(
            dict.fromkeys(t for t, r in zip(texts, runs, strict=True) if same_head(r.head) == same_head(run.head))
        )
        dash = DASHES[(DASHES.index(look.dash) + own.index(text)) % len(DASHES)]
        curves.append(Curve(name, Look(name, look.slot, dash, look.width), entry.payload.spectrum, group, text))
    return curves


def _by_group(curves: Sequence[Curve]) -> dict[str, list[Spectrum]]:
    """All seeds of a head together."""
    groups: dict[str, list[Spectrum]] = {}
    for curve in curves:
        groups.setdefault(curve.group or curve.name, []).append(curve.spectrum)
    return groups


def _plain_curves(spectra: Sequence[Spectrum]) -> list[Curve]:
    curves = []
    for place, spectrum in enumerate(spectra):
        look = Look(spectrum.source, OTHER_SLOTS[place % len(OTHER_SLOTS)])
        curves.append(Curve(spectrum.source, look, spectrum))
    return curves


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
    traces: list[Trace] = []
    usable = [curve for curve in curves if is_usable(curve.spectrum)]
    longest = max((len(curve.spectrum.singular_values) for curve in usable), default=1)
    for number, curve in enumerate(curves):
        if curve in usable:
            traces += _curve_traces(curve, number, longest)
    rules = []
    if usable:
        some = usable[0].spectrum
        for rule in RULES.values():
            height = rule.relative(some.words, some.contexts)
            key = "press32" if rule.name == "press32" else "rules"
            rules.append(key)
            traces.append(threshold_line([1, longest], height, RULE_WORDS[rule.name], keys=(key,)))
    return Figure(
        id=name,
        title=title,
        summary=_summary(usable),
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
    spectrum, key = curve.spectrum, f"curve:{number}"
    values, largest, floor = spectrum.singular_values, spectrum.largest, spectrum.noise_floor
    places = drawn_places(values)
    hover = "singular value %{x}: %{y:.3e} of the largest"
    sure = [place for place in places if values[place] > floor]
    noise = [place for place in places if 0.0 < values[place] <= floor]
    traces = [
        line(
            [p + 1 for p in sure],
            [values[p] / largest for p in sure],
            curve.look,
            name=curve.name,
            hover=hover,
            keys=(key,),
        )
    ]
    if noise:
        # Joined to what lies above, and faint: nothing can be said of these.
        joined = [*sure[-1:], *noise]
        traces.append(
            line(
                [p + 1 for p in joined],
                [values[p] / largest for p in joined],
                Look(curve.name, curve.look.slot, "dot", 1.2),
                name=f"{curve.name}, below its noise floor",
                hover=hover,
                keys=(key, "noise"),
                opacity=0.55,
            )
        )
    if floor > 0.0 and math.isfinite(floor):
        traces.append(
            line(
                [1, longest],
                [floor / largest] * 2,
                Look(curve.name, curve.look.slot, "dashdot", 1.0),
                name=f"Noise floor of {curve.name}",
                hover="%{y:.2e} of the largest",
                keys=(key, "noise"),
                opacity=0.8,
            )
        )
    return traces


def rank_text(spectrum: Spectrum, rule: str) -> str:
    if not is_usable(spectrum):
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
    return f"{some.words:,} words, {some.contexts:,} contexts. {ranks}{noise}"


def _ranks_table(caption: str, curves: Sequence[Curve]) -> Table:
    rows = []
    for curve in curves:
        s = curve.spectrum
        ok = is_usable(s)
        cut = "" if s.contexts_expected is None else f" of {s.contexts_expected:,} expected"
        rows.append(
            Row(
                (
                    Cell(curve.name, swatch(curve.look)),
                    f"{size_text(s.words, s.contexts)}{cut}",
                    *(rank_text(s, rule) for rule in RULES),
                    rank_text(s, "noise"),
                    number_text(s.stable_rank, 3) if ok else DASH,
                    number_text(s.effective_rank, 3) if ok else DASH,
                    number_text(s.largest) if ok else DASH,
                    number_text(s.noise_floor / s.largest, 2) if ok else DASH,
                    f"{s.method}, {s.precision or s.dtype}",
                    seconds_text(s.seconds),
                )
            )
        )
    titles = [f"Rank, {RULE_WORDS[rule]}" for rule in (*RULES, "noise")]
    titles += ["Stable rank", "Effective rank", "Largest", "Noise floor / largest"]
    columns = [Column("Matrix", "label"), Column("Size"), *(Column(title) for title in titles)]
    columns += [Column("Method and precision", "words"), Column("Time")]
    formulas = "; ".join(f"{RULE_WORDS[rule.name]}: {rule.formula}" for rule in RULES.values())
    notes = [f"In brackets: between which ranks the estimated errors leave the count. Thresholds: {formulas}."]
    if any(curve.spectrum.contexts_expected is not None for curve in curves):
        notes.append("A matrix that broke off before its end has fewer columns than were expected.")
    return Table(caption=f"Ranks: {caption}", columns=columns, rows=rows, notes=notes)


def _findings(curves: Sequence[Curve], where: str) -> list[str]:
    """How far a rank is a matter of the threshold; said only if it is."""
    groups = _by_group([curve for curve in curves if is_usable(curve.spectrum)])
    counted = {
        rule: [(name, [spectrum.count(rule).rank for spectrum in found]) for name, found in groups.items()]
        for rule in RULES
    }
    known = {
        rule: [(name, range_text(ranks)) for name, ranks in found if any(rank is not None for rank in ranks)]
        for rule, found in counted.items()
    }
    if len({tuple(ranks) for ranks in known.values() if ranks}) < 2:
        return []
    parts = [
        f"{', '.join(f'{name} {ranks}' for name, ranks in found)} by {RULE_WORDS[rule]}"
        for rule, found in known.items()
        if found
    ]
    before = f"{where}: " if where else ""
    return [sentence(f"{before}ranks are a matter of the threshold: {'; '.join(parts)}.")]


# --- table 3, bounds ----------------------------------------------------------------------------------------------


def tables(material: Material, looks: Looks, missing: str = "") -> list[Table]:
    """The paper's table of ranks with ours under it; ``missing`` stands for ours of heads that have none."""
    measured = [e.payload for e in material.model_spectra if e.payload.run.corpus in paper.CORPORA]
    if not (measured or missing):
        return []
    rows: list[Row] = []
    heads = list(dict.fromkeys([*paper.HEADS, *(same_head(m.run.head) for m in measured)]))
    for head in heads:
        published = {rank.corpus: rank.rank for rank in paper.RANKS if rank.head == head}
        rows.append(Row((Cell(head_label(head), swatch(looks[head])),)))
        if published:
            cells = [count_text(published.get(corpus)) for corpus in paper.CORPORA]
            rows.append(Row(("paper", *cells), class_="published"))
        own = [m for m in measured if same_head(m.run.head) == head]
        for label, phase, split in dict.fromkeys((setting_label(m.run), m.run.phase, m.split) for m in own):
            cells = []
            for corpus in paper.CORPORA:
                same = (label, phase, split, corpus)
                chosen = [m.spectrum for m in own if (setting_label(m.run), m.run.phase, m.split, m.run.corpus) == same]
                cells.append(_ranks_text(chosen))
            state = PHASES.get(phase, phase)
            rows.append(Row((", ".join(filter(None, ("ours", label, state, split))), *cells), class_="ours"))
        if missing and not own:
            rows.append(Row((f"ours: {missing}", *[DASH] * len(paper.CORPORA)), class_="ours"))
    columns = [Column("Source", "label")]
    columns += [Column(label) for label in paper.CORPORA.values()]
    return [
        Table(
            caption="Table 3. Ranks of the log-output matrices",
            columns=columns,
            rows=rows,
            notes=[
                "By the threshold of Press et al. with eps of float32. Several seeds: least to most.",
                f"The paper's models are finetuned, its text is the test set. Source: {paper.PAPER}.",
            ],
        )
    ]


def _ranks_text(spectra: Sequence[Spectrum]) -> str:
    """Of all seeds of a head: least to most."""
    counts = [s.count("press32") for s in spectra if is_usable(s)]
    ranks = sorted(count.rank for count in counts if count.rank is not None)
    if not ranks:
        return "not counted: below the noise floor" if counts else DASH
    return range_text(ranks) + (f" ({len(ranks)} seeds)" if len(ranks) > 1 else "")


def _bounds_table(entries: Sequence[Entry[RankBounds]], looks: Looks) -> Table:
    rows = []
    for entry in entries:
        b = entry.payload
        head = Cell(head_label(b.head), swatch(looks[b.head])) if b.head else Cell(DASH)
        rows.append(
            Row(
                (
                    b.source,
                    head,
                    count_text(b.width),
                    size_text(b.words, b.contexts),
                    f"exactly {b.upper:,}" if b.lower == b.upper else f"{b.lower:,} to {b.upper:,}",
                    b.upper_reason,
                    RULE_WORDS.get(b.rule, b.rule),
                    size_text(b.block_words, b.block_contexts),
                    seconds_text(b.seconds),
                )
            )
        )
    columns = [Column("Matrix", "label"), Column("Head", "label"), Column("Width"), Column("Size"), Column("Rank")]
    columns += [Column("Upper bound from", "words"), Column("Threshold", "words"), Column("Block"), Column("Time")]
    return Table(
        caption="Bounds on a rank, from a block of the matrix and from theory",
        has_heading=True,
        columns=columns,
        rows=rows,
        notes=["Singular values of a block above the whole matrix's threshold bound its rank from below."],
    )
