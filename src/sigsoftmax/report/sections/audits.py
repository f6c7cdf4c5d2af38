"""Audits: what was found in the output layer of a given model, and what it means for that model."""

from __future__ import annotations

from sigsoftmax.records import Environment
from sigsoftmax.records.grouping import grouped
from sigsoftmax.records.schemas.audits import Audit, TargetResult, Truncation
from sigsoftmax.report.figures import Axis, Figure, count_axis, head_switches, line
from sigsoftmax.report.findings.audit_meaning import FOLLOWS, ROUNDING, enough_directions, findings, kl_text
from sigsoftmax.report.findings.audits import facts_table, target_table, truncation_table
from sigsoftmax.report.loading import Entry
from sigsoftmax.report.markup import tag
from sigsoftmax.report.material import Material
from sigsoftmax.report.number_text import sentence
from sigsoftmax.report.provenance import made_by
from sigsoftmax.report.sections.section import Absent, Block, Section
from sigsoftmax.report.sections.spectra import Curve, spectrum_figure
from sigsoftmax.report.theme import Look, Looks, head_label, same_head

__all__ = ["section"]


def section(material: Material, looks: Looks) -> Section | Absent:
    if not material.audits:
        return Absent("Audits", "sigsoftmax audit MODEL")
    blocks: list[Block] = []
    found: dict[str, list[str]] = {}
    for number, entry in enumerate(material.audits, start=1):
        blocks += _blocks(f"audit-{number}", entry, looks)
        for text in findings(entry.payload):
            found.setdefault(text, []).append(entry.payload.source)
    is_one = len(material.audits) == 1
    return Section(
        id="audits",
        title="Audits of output layers",
        short="Audits",
        lead="What a model's own output layer tells about itself. Only a target (a teacher, given distributions or a "
        "language of known truth) can tell what it costs in nats.",
        findings=[text if is_one else f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in found.items()],
        blocks=blocks,
    )


def _blocks(name: str, entry: Entry[Audit], looks: Looks) -> list[Block]:
    audit, where = entry.payload, entry.environment
    blocks: list[Block] = [facts_table(audit)]
    if audit.was_interrupted:
        blocks.append(tag("p", "The audit was interrupted: what is here was finished before.", class_="warning"))
    for title, texts, class_ in (("What it means", audit.meaning, "meaning"), ("Notes", audit.notes, "note")):
        if texts:
            blocks += [tag("h4", title), tag("ul", [tag("li", text) for text in texts], class_=class_)]
    if made := made_by([where]):
        blocks.append(made)
    if audit.spectrum:
        look = looks[audit.layer.head] if audit.layer.head else Look(audit.source, 4)
        curve = Curve(look.label, Look(look.label, look.slot, look.dash), audit.spectrum)
        blocks.append(spectrum_figure(f"{name}-spectrum", "Singular values of the log-output matrix", [curve], [where]))
    if audit.truncation and audit.truncation.points:
        blocks.append(_truncation_figure(f"{name}-truncation", audit.truncation, where))
    if audit.target and audit.target.heads:
        blocks.append(_target_figure(f"{name}-target", audit.target, looks, where))
    return blocks


def _truncation_figure(name: str, truncation: Truncation, where: Environment) -> Figure:
    points = sorted(truncation.points, key=lambda p: p.width)
    # A logarithmic axis has no place for 0.
    drawn = [p for p in points if p.width > 0]
    curves = [([p.bound for p in drawn], Look("least up to this rank", 4), True)]
    if any(p.kl > p.bound + ROUNDING for p in drawn):
        curves.append(([p.kl for p in drawn], Look("truncation to this rank", 10, "dot", 1.4), False))
    enough = enough_directions(truncation)
    below = f", and below {FOLLOWS:g} from rank {enough:,} on" if enough else ""
    return Figure(
        id=name,
        title="What is lost when log P is cut down to a rank",
        summary=f"KL(P || softmax of log P at rank k) over {truncation.contexts:,} contexts: "
        f"{kl_text(points[0].bound, 3)} nats at rank {points[0].width:,}{below}. A softmax of width k, fitted, loses "
        "no more than this; how much less is not known from it.",
        x=count_axis("rank k", (p.width for p in points)),
        y=Axis(title="KL (nats)", log=True, settings={"tickformat": "~g"}),
        traces=[
            line(
                [p.width for p in drawn],
                [kl if kl >= ROUNDING else None for kl in kls],
                look,
                hover="rank %{x}: %{y:.4g} nats",
                markers=has_markers,
            )
            for kls, look, has_markers in curves
        ],
        table=truncation_table(truncation),
        environments=[where],
    )


def _target_figure(name: str, target: TargetResult, looks: Looks, where: Environment) -> Figure:
    heads = grouped(sorted(target.heads, key=lambda h: (h.width, h.kl)), lambda h: same_head(h.head))
    in_order = dict.fromkeys(same_head(h.head) for h in target.heads)
    bound = (
        f" Only {target.words:,} of {target.all_words:,} tokens were fitted, which hold {target.mass:.1%} of the "
        "probability: these are lower bounds."
    )
    return Figure(
        id=name,
        title="The least KL to the target that each head can reach",
        summary=f"{sentence(target.target)}, {target.contexts:,} contexts. {_at_one_width(target)}"
        + bound * target.is_lower_bound,
        x=count_axis("width d", (h.width for h in target.heads)),
        y=Axis(title="least KL to the target (nats)", log=True, settings={"tickformat": "~g"}),
        traces=[
            line(
                [h.width for h in heads[head]],
                [h.kl for h in heads[head]],
                looks[head],
                hover="width %{x}: %{y:.4g} nats",
                keys=(f"head:{head}",),
                markers=True,
            )
            for head in in_order
        ],
        legend=head_switches(in_order, looks),
        table=target_table(target, looks),
        environments=[where],
    )


def _at_one_width(target: TargetResult) -> str:
    """The heads at the largest width that most of them share."""
    widths = [h.width for h in target.heads]
    shared = max(set(widths), key=lambda width: (widths.count(width), width))
    found = sorted((h for h in target.heads if h.width == shared), key=lambda h: -h.kl)
    return f"At width {shared:,}: " + ", ".join(f"{head_label(h.head)} {kl_text(h.kl, 3)}" for h in found) + " nats."
