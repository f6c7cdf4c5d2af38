"""Audits: what was found in the output layer of a given model, and what it means for that model."""

from __future__ import annotations

import math

from sigsoftmax.records import Environment
from sigsoftmax.records.schemas.audits import Audit, TargetResult, Truncation
from sigsoftmax.report.figures import Axis, Figure, Switch, count_axis, line
from sigsoftmax.report.loading import Entry
from sigsoftmax.report.markup import tag
from sigsoftmax.report.material import Material
from sigsoftmax.report.provenance import made_by
from sigsoftmax.report.section import Absent, Block, Section
from sigsoftmax.report.sections.spectra import Curve, is_usable, rank_text, spectrum_figure
from sigsoftmax.report.tables import (
    DASH,
    Cell,
    Column,
    Row,
    Table,
    count_text,
    number_text,
    seconds_text,
    sentence,
    size_text,
)
from sigsoftmax.report.theme import Look, Looks, head_label, same_head, swatch

__all__ = ["section"]

COLLAPSED = 1e-3
"""nats to the nearest softmax below which an output function does what softmax would do"""
FOLLOWS = 1e-3
"""nats that hardly matter"""
ROUNDING = 1e-9
"""nats that are rounding"""
NEVER_SHOWN = 20
"""words that can never come first, by number, in the table"""


def section(material: Material, looks: Looks) -> Section | Absent:
    if not material.audits:
        return Absent("Audits", "sigsoftmax audit MODEL")
    blocks: list[Block] = []
    found: dict[str, list[str]] = {}
    for number, entry in enumerate(material.audits, start=1):
        blocks += _blocks(f"audit-{number}", entry, looks)
        for text in _findings(entry.payload):
            found.setdefault(text, []).append(entry.payload.source)
    is_one = len(material.audits) == 1
    findings = [text if is_one else f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in found.items()]
    return Section(
        id="audits",
        title="Audits of output layers",
        short="Audits",
        lead="What a model's own output layer tells about itself. Only a target (a teacher, given distributions or a "
        "language of known truth) can tell what it costs in nats.",
        findings=findings,
        blocks=blocks,
    )


def _blocks(name: str, entry: Entry[Audit], looks: Looks) -> list[Block]:
    audit, where = entry.payload, entry.environment
    blocks: list[Block] = [_facts(audit)]
    if audit.was_interrupted:
        blocks.append(tag("p", "The audit was interrupted: what is here was finished before.", class_="warning"))
    if audit.meaning:
        blocks.append(tag("h4", "What it means"))
        blocks.append(tag("ul", [tag("li", text) for text in audit.meaning], class_="meaning"))
    if audit.notes:
        blocks.append(tag("h4", "Notes"))
        blocks.append(tag("ul", [tag("li", note) for note in audit.notes], class_="note"))
    if made := made_by([where]):
        blocks.append(made)
    if audit.spectrum:
        look = _layer_look(audit, looks)
        name_of_curve = look.label or audit.source
        curve = Curve(name_of_curve, Look(name_of_curve, look.slot, look.dash), audit.spectrum)
        blocks.append(spectrum_figure(f"{name}-spectrum", "Singular values of the log-output matrix", [curve], [where]))
    if audit.truncation and audit.truncation.points:
        blocks.append(_truncation_figure(f"{name}-truncation", audit.truncation, where))
    if audit.target and audit.target.heads:
        blocks.append(_target_figure(f"{name}-target", audit.target, looks, where))
    return blocks


def _layer_look(audit: Audit, looks: Looks) -> Look:
    return looks[audit.layer.head] if audit.layer.head else Look("", 4)


def _facts(audit: Audit) -> Table:
    layer = audit.layer
    facts: list[tuple[str, str]] = [
        ("Output function", f"{head_label(layer.head)} ({layer.how_known})" if layer.head else layer.how_known),
        ("Words", f"{layer.words:,}")
        if layer.width is None
        else ("Words and width", size_text(layer.words, layer.width) + (", with bias" if layer.has_bias else "")),
        ("Numbers", layer.dtype + (f", logits scaled by {layer.scale:g}" if layer.scale != 1.0 else "")),
        ("Contexts", f"{audit.contexts:,} from {audit.contexts_from}"),
    ]
    if audit.bounds:
        lower, upper = audit.bounds.lower, audit.bounds.upper
        between = f"exactly {upper:,}" if lower == upper else f"{lower:,} to {upper:,}"
        where = "" if audit.bounds.source.endswith(" in the contexts") else f" ({audit.bounds.source})"
        facts.append(("Rank, by its bounds", f"{between}{where}; {audit.bounds.upper_reason}"))
    if audit.spectrum and is_usable(audit.spectrum):
        s = audit.spectrum
        facts += [
            ("Rank by the paper's threshold", rank_text(s, "press32")),
            ("Rank above the noise floor", rank_text(s, "noise")),
            ("Stable and effective rank", f"{number_text(s.stable_rank, 3)} and {number_text(s.effective_rank, 3)}"),
        ]
    if audit.bend and _has_bend(audit):
        b = audit.bend
        facts += [
            ("In the bend of phi", _shares(b.logits_in_bend, b.probability_in_bend)),
            (
                "Nearest softmax",
                f"softmax({b.nearest_slope:.3g} z), at a KL of {_nats(b.kl_to_nearest_softmax, 3)} nats",
            ),
        ]
        facts += [
            (f"On the {part.name} line", f"{_shares(part.logits, part.probability)}, slope {part.slope:.3g}")
            for part in b.lines
        ]
    if audit.gradient:
        g = audit.gradient
        share = f"{g.mean:.1%} on average, {g.low:.1%} to {g.high:.1%} over contexts; next words: {g.next_words}"
        facts += [
            ("Loss gradient that the head suppresses", share),
            ("The same of a random direction", f"{g.of_a_random_direction:.1%}"),
        ]
    if audit.argmax:
        a = audit.argmax
        never = ", ".join(map(str, a.never[:NEVER_SHOWN])) + (" ..." if len(a.never) > NEVER_SHOWN else "")
        facts += [
            (
                "Words that can come first",
                f"yes {a.yes:,}, no {a.no:,}, undecided {a.undecided:,} of {a.in_question:,} looked at"
                f" ({a.words:,} words in all)"
                + ("" if a.has_solver else "; no linear programs, since SciPy was absent"),
            ),
        ]
        if never:
            facts.append(("Words that never can, by number", never))
    if audit.target:
        t = audit.target
        facts.append(("Target", f"{t.target}: {t.contexts:,} contexts, {t.words:,} of {t.all_words:,} words"))
        if t.model_kl is not None:
            facts.append(("KL of the model to the target", f"{number_text(t.model_kl)} nats"))
    facts.append(("Time", seconds_text(audit.seconds)))
    columns = [Column("What", "label"), Column("Found", "words")]
    return Table(
        caption=f"Audit of {audit.source}", columns=columns, rows=[Row(fact) for fact in facts], has_heading=True
    )


def _shares(logits: float, probability: float) -> str:
    return f"{logits:.1%} of the logits, {probability:.1%} of the probability"


def _has_bend(audit: Audit) -> bool:
    """A softmax has none, and cannot collapse to itself."""
    return audit.bend is not None and bool(audit.bend.lines or audit.bend.logits_in_bend)


def _truncation_figure(name: str, truncation: Truncation, where: Environment) -> Figure:
    points = sorted(truncation.points, key=lambda p: p.width)
    table = Table(
        caption="KL of the truncation",
        columns=[Column("Rank"), Column("KL of the truncation (nats)"), Column("Bound (nats)")],
        rows=[Row((count_text(p.width), _nats(p.kl), _nats(p.bound))) for p in points],
    )
    # A logarithmic axis has no place for 0.
    drawn = [p for p in points if p.width > 0]
    follows = next((p.width for p in points if p.bound <= FOLLOWS), 0)
    # At full rank every context has directions of its own, and nothing follows from that.
    is_telling = 0 < follows < min(truncation.contexts, truncation.words) // 2
    enough = f", and below {FOLLOWS:g} from rank {follows:,} on" if is_telling else ""
    traces = [
        line(
            [p.width for p in drawn],
            [p.bound if p.bound >= ROUNDING else None for p in drawn],
            Look("least up to this rank", 4),
            hover="rank %{x}: %{y:.4g} nats",
            markers=True,
        )
    ]
    if any(p.kl > p.bound + ROUNDING for p in drawn):
        traces.append(
            line(
                [p.width for p in drawn],
                [p.kl if p.kl >= ROUNDING else None for p in drawn],
                Look("truncation to this rank", 10, "dot", 1.4),
                hover="rank %{x}: %{y:.4g} nats",
            )
        )
    return Figure(
        id=name,
        title="What is lost when log P is cut down to a rank",
        summary=f"KL(P || softmax of log P at rank k) over {truncation.contexts:,} contexts: "
        f"{_nats(points[0].bound, 3)} nats at rank {points[0].width:,}{enough}. A softmax of width k, fitted, loses no "
        "more than this; how much less is not known from it.",
        x=count_axis("rank k", (p.width for p in points)),
        y=Axis(title="KL (nats)", log=True, settings={"tickformat": "~g"}),
        traces=traces,
        table=table,
        environments=[where],
    )


def _nats(kl: float, digits: int = 4) -> str:
    return "0" if 0.0 <= kl < ROUNDING else number_text(kl, digits)


def _target_figure(name: str, target: TargetResult, looks: Looks, where: Environment) -> Figure:
    heads: dict[str, list[tuple[int, float]]] = {}
    for found in target.heads:
        heads.setdefault(same_head(found.head), []).append((found.width, found.kl))
    traces = []
    for head, points in heads.items():
        points.sort()
        traces.append(
            line(
                [width for width, _ in points],
                [kl for _, kl in points],
                looks[head],
                hover="width %{x}: %{y:.4g} nats",
                keys=(f"head:{head}",),
                markers=True,
            )
        )
    rows = [
        Row(
            (
                Cell(head_label(h.head), swatch(looks[h.head])),
                str(h.width),
                _nats(h.kl),
                _nats(h.spread, 2),
                _width_text(h.softmax_width),
            )
        )
        for h in target.heads
    ]
    columns = [Column("Head", "label"), Column("Width"), Column("Least KL (nats)"), Column("Spread over starts")]
    columns.append(Column("Softmax of equal KL"))
    bound = (
        f" Only {target.words:,} of {target.all_words:,} words were fitted, which hold {target.mass:.1%} of the "
        "probability: these are lower bounds."
        if target.is_lower_bound
        else ""
    )
    return Figure(
        id=name,
        title="The least KL to the target that each head can reach",
        summary=f"{sentence(target.target)}, {target.contexts:,} contexts. {_at_one_width(target)}{bound}",
        x=count_axis("width d", (h.width for h in target.heads)),
        y=Axis(title="least KL to the target (nats)", log=True, settings={"tickformat": "~g"}),
        traces=traces,
        legend=[Switch(f"head:{head}", looks[head].label, True, looks[head]) for head in heads],
        table=Table(caption=f"Least KL to {target.target}", columns=columns, rows=rows),
        environments=[where],
    )


def _at_one_width(target: TargetResult) -> str:
    """The heads at the largest width that most of them share."""
    widths = [h.width for h in target.heads]
    shared = max(set(widths), key=lambda width: (widths.count(width), width))
    found = sorted((h for h in target.heads if h.width == shared), key=lambda h: -h.kl)
    return f"At width {shared:,}: " + ", ".join(f"{head_label(h.head)} {_nats(h.kl, 3)}" for h in found) + " nats."


def _width_text(width: float) -> str:
    if math.isnan(width):
        return DASH
    return "below those fitted" if width == 0.0 else "beyond those fitted" if math.isinf(width) else f"{width:.1f}"


# --- the words ----------------------------------------------------------------------------------------------------


def _findings(audit: Audit) -> list[str]:
    lines = [_cost(audit)]
    if audit.bend and _has_bend(audit) and audit.bend.kl_to_nearest_softmax <= COLLAPSED:
        lines.append(
            f"The output function has collapsed to softmax({audit.bend.nearest_slope:.3g} z): they differ by "
            f"{_nats(audit.bend.kl_to_nearest_softmax, 2)} nats."
        )
    if audit.argmax and audit.argmax.no:
        asked = audit.argmax.in_question
        sample = "" if asked == audit.argmax.words else f" of {asked:,} asked about"
        lines.append(f"{audit.argmax.no:,} words{sample} can never be the first choice, whatever the context.")
    return [line for line in lines if line]


def _cost(audit: Audit) -> str:
    if audit.target is None:
        return (
            "What another output layer would buy in nats cannot be known without a target: a softmax model's own "
            "log-probabilities have a rank that its width already allows."
        )
    softmax = {h.width: h.kl for h in audit.target.heads if same_head(h.head) == "softmax"}
    gains = [
        (softmax[h.width] - h.kl, h)
        for h in audit.target.heads
        if same_head(h.head) != "softmax" and h.width in softmax
    ]
    if not gains:
        return f"Against {audit.target.target}: no width has both softmax and another head."
    gain, best = max(gains, key=lambda item: item[0])
    if gain <= best.spread:
        return f"Against {audit.target.target} no head reaches less KL than softmax beyond the spread of its starts."
    return (
        f"Against {audit.target.target}, {head_label(best.head)} at width {best.width} can reach "
        f"{number_text(gain, 3)} nats less than softmax of the same width. What training would keep of that is another "
        "question."
    )
