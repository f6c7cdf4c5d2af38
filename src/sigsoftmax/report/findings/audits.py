"""An audit of an output layer in facts, tables and sentences, from its record alone, for terminal and page."""

from __future__ import annotations

import math
import textwrap
from typing import NamedTuple

from sigsoftmax._version import install_extra
from sigsoftmax.records.schemas.audits import Audit, HeadAtWidth, TargetResult, Truncation, TruncationPoint
from sigsoftmax.report.findings.audit_meaning import (
    compared_widths,
    is_nonlinear,
    kl_text,
    meaning,
    softmax_curve,
)
from sigsoftmax.report.number_text import count_text, seconds_text, width_text, wrapped
from sigsoftmax.report.tables import Column, Fields, Row, Table, head_cell
from sigsoftmax.report.theme import Looks, head_label, same_head

__all__ = ["audit_text", "facts_table", "target_table", "truncation_table"]

NEVER_SHOWN = 20
"""tokens that can never come first, by number"""


def audit_text(audit: Audit) -> str:
    """The whole audit for a terminal."""
    title = f"Audit of {audit.source}"
    told = [f"{title}\n{'=' * len(title)}", "\n".join(f"{name}: {text}." for name, text in _layer(audit).items())]
    parts = [
        *_parts(audit),
        Part("What it means", [f"- {sentence}" for sentence in meaning(audit)]),
        Part("Notes", [f"- {note}" for note in audit.notes]),
    ]
    return "\n\n".join(told + [part.to_text() for part in parts if part.lines or part.table])


def facts_table(audit: Audit) -> Table:
    """The same facts for the page, a row for each part; figures show the tables there."""
    told = {part.title: " ".join(map(str.strip, part.lines)) for part in _parts(audit)}
    facts = {**_layer(audit), **told, "Time": seconds_text(audit.seconds)}
    return Table(
        caption=f"Audit of {audit.source}",
        columns=[Column("What", "label"), Column("Found", "words")],
        rows=[Row(fact) for fact in facts.items() if fact[1]],
        has_heading=True,
    )


# --- the parts --------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A part of an audit: what was found in sentences, and numbers in a table."""

    title: str
    lines: list[str]
    table: Table | None = None

    def to_text(self) -> str:
        """The title, lines beneath it that are wrapped and keep their indentation, and the table."""
        told = [f"{self.title}:", *(wrapped(line, "  ") for line in self.lines)]
        return "\n".join(told + ([textwrap.indent(self.table.to_text(), "  ")] if self.table else []))


def _parts(audit: Audit) -> list[Part]:
    """All that an audit measures; a part that was not measured has neither lines nor a table."""
    truncation = truncation_table(audit.truncation, audit.layer.width) if audit.truncation else None
    return [
        Part("Rank", _rank(audit)),
        Part("Directions that the output uses", [], truncation),
        Part("The nonlinearity of phi", _nonlinearity(audit)),
        Part("The gradient", _gradient(audit)),
        Part("Tokens that can come first", _argmax(audit)),
        Part("Nats", _target(audit), target_table(audit.target) if audit.target else None),
    ]


def _layer(audit: Audit) -> dict[str, str]:
    layer = audit.layer
    size = [f"{layer.words:,} tokens", f"entries in {layer.dtype}"]
    if layer.width is not None:
        bias = "with a class bias" if layer.has_bias else "without a class bias"
        size[1:] = [f"width: {layer.width:,}", bias, f"weights in {layer.dtype}"]
    if layer.scale != 1.0:
        size.append(f"logits scaled by {layer.scale:g}")
    function = f"{head_label(layer.head)} ({layer.how_known})" if layer.head else layer.how_known
    facts = {"Vocabulary": "; ".join(size), "Output function": function}
    return facts | ({"Contexts": f"{audit.contexts:,}, from {audit.contexts_from}"} if audit.contexts else {})


def _rank(audit: Audit) -> list[str]:
    lines = []
    if bounds := audit.bounds:
        is_exact = bounds.lower == bounds.upper
        between = f"{bounds.lower:,}" if is_exact else f"between {bounds.lower:,} and {bounds.upper:,}"
        lines += [
            f"The {bounds.source} ({bounds.words:,} x {bounds.contexts:,}) have rank {between}.",
            f"  At most: {bounds.upper_reason}.",
            (
                f"  At least: from a block of {bounds.block_words:,} tokens x {bounds.block_contexts:,} contexts, "
                f"above the threshold {bounds.rule} of the whole."
            ),
        ]
    spectrum = audit.spectrum
    if spectrum and spectrum.is_usable:
        counts = ", ".join(f"{count.rule} {count.text}" for count in spectrum.ranks())
        lines += [
            f"Of log P in these contexts ({spectrum.words:,} x {spectrum.contexts:,}), by the threshold: {counts}.",
            (
                f"Effective rank {spectrum.effective_rank:.1f}, stable rank {spectrum.stable_rank:.2f}; largest "
                f"singular value {spectrum.largest:.4g}, noise floor {spectrum.noise_floor:.2g}."
            ),
        ]
    return lines


def _nonlinearity(audit: Audit) -> list[str]:
    bend = audit.bend
    if bend is None:
        return []
    logits = f"Logits lie between {bend.lowest_logit:.3g} and {bend.highest_logit:.3g}"
    if not is_nonlinear(audit):
        return [f"{head_label(audit.layer.head)} is a line: it has no nonlinearity. {logits}."]
    shares = {
        f"On the {line.name} line (slope {line.slope:.3g})": (line.logits, line.probability) for line in bend.lines
    }
    shares["Where phi is curved"] = bend.logits_in_bend, bend.probability_in_bend
    nearest = f"the slope {bend.nearest_slope:.4g} and is {kl_text(bend.kl_to_nearest_softmax)} nats away"
    return [
        f"{logits} ({bend.contexts:,} contexts).",
        *(f"{where}: {z:.1%} of the logits, {p:.1%} of the probability." for where, (z, p) in shares.items()),
        f"The nearest softmax has {nearest}.",
    ]


def _gradient(audit: Audit) -> list[str]:
    gradient = audit.gradient
    if gradient is None:
        return []
    if math.isnan(gradient.mean):
        return ["Every next token was certain, so that no gradient was left to look at."]
    return [
        (
            f"Of the squared gradient by the logits {gradient.mean:.2%} is orthogonal to the columns of W and is lost "
            f"on the way to h (5 % to 95 % of the contexts: {gradient.low:.2%} to {gradient.high:.2%}; next tokens "
            f"{gradient.next_words})."
        ),
        f"A gradient of random direction would lose {gradient.of_a_random_direction:.2%}.",
    ]


def _argmax(audit: Audit) -> list[str]:
    counts = audit.argmax
    if counts is None:
        return []
    asked = "all" if counts.in_question == counts.words else f"{counts.in_question:,} drawn at random"
    settled = f"{counts.yes:,} can (proved by a hidden vector), {counts.no:,} never can, {counts.undecided:,} undecided"
    lines = [f"Of {asked} of the {counts.words:,} tokens, {settled}."]
    if counts.never:
        shown = ", ".join(map(str, counts.never[:NEVER_SHOWN]))
        lines.append(f"Never: {shown}{', ...' if len(counts.never) > NEVER_SHOWN else ''}.")
    if counts.undecided:
        programs = f"Linear programs would settle more: {install_extra('audit')} brings SciPy."
        lines.append("More time (--argmax-seconds) settles more." if counts.has_solver else programs)
    return lines


def _target(audit: Audit) -> list[str]:
    target = audit.target
    if target is None:
        return []
    tokens = (
        f"{target.words:,} tokens"
        if target.words == target.all_words
        else f"{target.words:,} of {target.all_words:,} tokens"
    )
    lines = [f"Against {target.target}, in {target.contexts:,} contexts and {tokens}."]
    if target.is_lower_bound:
        lines.append(
            f"Only the likeliest tokens were fitted; they have {target.mass:.1%} of the probability. The KLs are of "
            "the distributions given these tokens, weighted by their mass: over all tokens the least KL is no smaller."
        )
    if target.model_kl is not None:
        lines.append(f"The model itself is {kl_text(target.model_kl)} nats from the target, over all tokens.")
    return lines


# --- the tables -------------------------------------------------------------------------------------------------------


def truncation_table(truncation: Truncation, width: int | None = None) -> Table:
    """The loss of the truncation at every rank; the layer's width is marked."""
    fields: Fields[TruncationPoint] = {
        "Rank": lambda point: count_text(point.width) + ("*" if point.width == width else ""),
        "KL of the truncation (nats)": lambda point: kl_text(point.kl),
        "Bound (nats)": lambda point: kl_text(point.bound),
    }
    points = sorted(truncation.points, key=lambda point: point.width)
    is_marked = any(point.width == width for point in points)
    caption = "KL(P || softmax of log P cut down to a rank): at most so much must a softmax of that width lose here"
    return Table.of(points, fields, caption=caption, notes=["* the layer's width"] * is_marked)


def target_table(target: TargetResult, looks: Looks | None = None) -> Table:
    """The least KL of every head at every width; a terminal has room for those that are compared."""
    softmax = softmax_curve(target)

    def against(head: HeadAtWidth) -> str:
        base = softmax.get(head.width)
        return "" if same_head(head.head) == "softmax" or not base else f"{head.kl / base - 1.0:+.1%}"

    fields: Fields[HeadAtWidth] = {
        Column("Head", "label"): lambda head: head_cell(head.head, looks),
        "Width": lambda head: count_text(head.width),
        "Least KL (nats)": lambda head: kl_text(head.kl),
        "Spread over starts": lambda head: kl_text(head.spread, 2),
        "Against softmax": against,
        "Softmax of equal KL": lambda head: width_text(head.softmax_width, softmax),
    }
    shown = [head for head in target.heads if looks or head.width in compared_widths(target)]
    in_order = sorted(shown, key=lambda head: (head.width, -head.kl))
    return Table.of(in_order, fields, caption=f"Least KL to {target.target}")
