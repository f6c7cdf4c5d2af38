"""Audits: what was found in the output layer of a given model, and what it means for that model."""

from __future__ import annotations

import math

from sigsoftmax.records import Environment
from sigsoftmax.records.audits import Audit, TargetResult, Truncation
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

NEVER_SHOWN = 20
"""words that can never come first, by number, in the table"""


def section(material: Material, looks: Looks) -> Section | Absent:
    if not material.audits:
        return Absent("Audits", "sigsoftmax audit MODEL")
    blocks: list[Block] = []
    findings: list[str] = []
    for number, entry in enumerate(material.audits, start=1):
        blocks += _blocks(f"audit-{number}", entry, looks)
        words = _findings(entry.payload)
        findings += [f"{entry.payload.source}: {text}" for text in words] if len(material.audits) > 1 else words
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
    if made := made_by([where]):
        blocks.append(made)
    if audit.was_interrupted:
        blocks.append(tag("p", "The audit was interrupted: what is here was finished before.", class_="warning"))
    if audit.notes:
        blocks.append(tag("ul", [tag("li", note) for note in audit.notes], class_="note"))
    if audit.spectrum:
        look = _layer_look(audit, looks)
        curve = Curve(audit.spectrum.source, Look(audit.spectrum.source, look.slot, look.dash), audit.spectrum)
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
        ("Output function", f"{head_label(layer.head) if layer.head else 'not known'} ({layer.how_known})"),
        ("Words and width", size_text(layer.words, layer.width) + (", with bias" if layer.has_bias else "")),
        ("Numbers", layer.dtype + (f", logits scaled by {layer.scale:g}" if layer.scale != 1.0 else "")),
        ("Contexts", f"{audit.contexts:,} from {audit.contexts_from}"),
    ]
    if audit.bounds:
        lower, upper = audit.bounds.lower, audit.bounds.upper
        between = f"exactly {upper:,}" if lower == upper else f"{lower:,} to {upper:,}"
        facts.append(("Rank, by its bounds", f"{between}; {audit.bounds.upper_reason}"))
    if audit.spectrum and is_usable(audit.spectrum):
        s = audit.spectrum
        facts += [
            ("Rank by the paper's threshold", rank_text(s, "press32")),
            ("Rank above the noise floor", rank_text(s, "noise")),
            ("Stable and effective rank", f"{number_text(s.stable_rank, 3)} and {number_text(s.effective_rank, 3)}"),
        ]
    if audit.bend:
        b = audit.bend
        facts += [
            ("In the bend of phi", _shares(b.logits_in_bend, b.probability_in_bend)),
            (
                "Nearest softmax",
                f"softmax({b.nearest_slope:.3g} z), at a KL of {number_text(b.kl_to_nearest_softmax, 3)} nats",
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


def _truncation_figure(name: str, truncation: Truncation, where: Environment) -> Figure:
    points = sorted(truncation.points, key=lambda p: p.width)
    table = Table(
        caption="KL of the truncation",
        columns=[Column("Rank"), Column("KL of the truncation (nats)"), Column("Bound (nats)")],
        rows=[Row((count_text(p.width), number_text(p.kl), number_text(p.bound))) for p in points],
    )
    return Figure(
        id=name,
        title="What is lost when log P is cut down to a rank",
        summary=f"KL(P || softmax of log P at rank k) over {truncation.contexts:,} contexts: at most "
        f"{number_text(points[0].bound, 3)} nats at rank {points[0].width:,} and {number_text(points[-1].bound, 3)} at "
        f"{points[-1].width:,}. A softmax of that width, fitted, loses no more; how much less is not known from this.",
        x=count_axis("rank k", (p.width for p in points)),
        y=Axis(title="KL (nats)", log=True, settings={"tickformat": "~g"}),
        traces=[
            line(
                [p.width for p in points],
                [p.bound for p in points],
                Look("least up to this rank", 4),
                hover="rank %{x}: %{y:.4g} nats",
                markers=True,
            ),
            line(
                [p.width for p in points],
                [p.kl for p in points],
                Look("truncation to this rank", 10, "dot", 1.4),
                hover="rank %{x}: %{y:.4g} nats",
            ),
        ],
        table=table,
        environments=[where],
    )


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
                number_text(h.kl),
                number_text(h.spread, 2),
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
    least = min(target.heads, key=lambda h: h.kl)
    return Figure(
        id=name,
        title="The least KL to the target that each head can reach",
        summary=f"{sentence(target.target)}, {target.contexts:,} contexts. Least: {number_text(least.kl, 3)} nats, by "
        f"{head_label(least.head)} at width {least.width}.{bound}",
        x=count_axis("width d", (h.width for h in target.heads)),
        y=Axis(title="least KL to the target (nats)", log=True, settings={"tickformat": "~g"}),
        traces=traces,
        legend=[Switch(f"head:{head}", looks[head].label, True, looks[head]) for head in heads],
        table=Table(caption=f"Least KL to {target.target}", columns=columns, rows=rows),
        environments=[where],
    )


def _width_text(width: float) -> str:
    if math.isnan(width):
        return DASH
    return "below those fitted" if width == 0.0 else "beyond those fitted" if math.isinf(width) else f"{width:.1f}"


# --- the words ----------------------------------------------------------------------------------------------------


def _findings(audit: Audit) -> list[str]:
    lines = [_cost(audit)]
    if audit.bend and audit.bend.kl_to_nearest_softmax < 1e-4:
        lines.append(
            f"The output function has collapsed to softmax({audit.bend.nearest_slope:.3g} z): they differ by "
            f"{number_text(audit.bend.kl_to_nearest_softmax, 2)} nats."
        )
    if audit.argmax and audit.argmax.no:
        lines.append(f"{audit.argmax.no:,} words can never be the first choice, whatever the context.")
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
