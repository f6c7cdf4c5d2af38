"""An audit of an output layer in facts, tables and sentences, from its record alone, for terminal and page."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from sigsoftmax._version import install_extra
from sigsoftmax.records.schemas.audits import Audit, HeadAtWidth, TargetResult, Truncation, TruncationPoint
from sigsoftmax.report.tables import DASH, Column, Fields, Row, Table, count_text, head_cell, number_text, seconds_text
from sigsoftmax.report.theme import Looks, head_label, same_head

__all__ = ["audit_text", "facts_table", "findings", "kl_text", "meaning", "target_table", "truncation_table"]

COLUMNS = 110
COLLAPSED = 1e-3
"""nats to the nearest softmax below which a bent phi is called collapsed: a perplexity of 100.1 instead of 100"""
FOLLOWS = 1e-3
"""nats below which a truncation follows the output"""
ROUNDING = 1e-9
"""nats that are rounding"""
NEVER_SHOWN = 20
"""words that can never come first, by number"""


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


def kl_text(kl: float, digits: int = 4) -> str:
    """A KL in nats; what is rounding is 0."""
    return "0" if 0.0 <= kl < ROUNDING else number_text(kl, digits)


# --- the parts --------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A part of an audit: what was found in sentences, and numbers in a table."""

    title: str
    lines: list[str]
    table: Table | None = None

    def to_text(self) -> str:
        """The title, lines beneath it that are wrapped and keep their indentation, and the table."""
        told = [f"{self.title}:"]
        for line in self.lines:
            indent = " " * (2 + len(line) - len(line.lstrip()))
            wrapper = textwrap.TextWrapper(COLUMNS, indent, f"{indent}  ", break_long_words=False)
            wrapper.break_on_hyphens = False
            told.append(wrapper.fill(line.strip()))
        return "\n".join(told + ([textwrap.indent(self.table.to_text(), "  ")] if self.table else []))


def _parts(audit: Audit) -> list[Part]:
    """All that an audit measures; a part that was not measured has neither lines nor a table."""
    truncation = truncation_table(audit.truncation, audit.layer.width) if audit.truncation else None
    return [
        Part("Rank", _rank(audit)),
        Part("Directions that the output uses", [], truncation),
        Part("The nonlinearity of phi", _nonlinearity(audit)),
        Part("The gradient", _gradient(audit)),
        Part("Words that can come first", _argmax(audit)),
        Part("Nats", _target(audit), target_table(audit.target) if audit.target else None),
    ]


def _layer(audit: Audit) -> dict[str, str]:
    layer = audit.layer
    size = [f"{layer.words:,}", f"entries in {layer.dtype}"]
    if layer.width is not None:
        bias = "with a class bias" if layer.has_bias else "without a class bias"
        size[1:] = [f"width: {layer.width:,}", bias, f"weights in {layer.dtype}"]
    if layer.scale != 1.0:
        size.append(f"logits scaled by {layer.scale:g}")
    function = f"{head_label(layer.head)} ({layer.how_known})" if layer.head else layer.how_known
    facts = {"Words": "; ".join(size), "Output function": function}
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
                f"  At least: from a block of {bounds.block_words:,} words x {bounds.block_contexts:,} contexts, above "
                f"the threshold {bounds.rule} of the whole."
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


def is_nonlinear(audit: Audit) -> bool:
    """A softmax has no nonlinearity, and cannot collapse to itself."""
    return audit.bend is not None and bool(audit.bend.lines or audit.bend.logits_in_bend)


def _gradient(audit: Audit) -> list[str]:
    gradient = audit.gradient
    if gradient is None:
        return []
    if math.isnan(gradient.mean):
        return ["Every next word was certain, so that no gradient was left to look at."]
    return [
        (
            f"Of the squared gradient by the logits {gradient.mean:.2%} is orthogonal to the columns of W and is lost "
            f"on the way to h (5 % to 95 % of the contexts: {gradient.low:.2%} to {gradient.high:.2%}; next words "
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
    lines = [f"Of {asked} of the {counts.words:,} words, {settled}."]
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
    words = (
        f"{target.words:,} words"
        if target.words == target.all_words
        else f"{target.words:,} of {target.all_words:,} words"
    )
    lines = [f"Against {target.target}, in {target.contexts:,} contexts and {words}."]
    if target.is_lower_bound:
        lines.append(
            f"Only the likeliest words were fitted; they have {target.mass:.1%} of the probability. The KLs are of "
            "the distributions given these words, weighted by their mass: over all words the least KL is no smaller."
        )
    if target.model_kl is not None:
        lines.append(f"The model itself is {kl_text(target.model_kl)} nats from the target, over all words.")
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
    softmax = _softmax_curve(target)

    def against(head: HeadAtWidth) -> str:
        base = softmax.get(head.width)
        return "" if same_head(head.head) == "softmax" or not base else f"{head.kl / base - 1.0:+.1%}"

    fields: Fields[HeadAtWidth] = {
        Column("Head", "label"): lambda head: head_cell(head.head, looks),
        "Width": lambda head: count_text(head.width),
        "Least KL (nats)": lambda head: kl_text(head.kl),
        "Spread over starts": lambda head: kl_text(head.spread, 2),
        "Against softmax": against,
        "Softmax of equal KL": lambda head: _softmax_width(head.softmax_width, target),
    }
    shown = [head for head in target.heads if looks or head.width in _compared_widths(target)]
    in_order = sorted(shown, key=lambda head: (head.width, -head.kl))
    return Table.of(in_order, fields, caption=f"Least KL to {target.target}")


def _compared_widths(target: TargetResult) -> set[int]:
    """Widths at which more than softmax was fitted, if there are any."""
    others = {head.width for head in target.heads if same_head(head.head) != "softmax"}
    return others or {head.width for head in target.heads}


def _softmax_curve(target: TargetResult) -> dict[int, float]:
    return {head.width: head.kl for head in target.heads if same_head(head.head) == "softmax"}


def _softmax_width(width: float, target: TargetResult) -> str:
    """The softmax width of equal KL, which may lie outside those that were fitted."""
    fitted = _softmax_curve(target)
    if math.isnan(width) or not fitted:
        return DASH
    return f"d < {min(fitted)}" if width == 0.0 else f"d > {max(fitted)}" if math.isinf(width) else f"d = {width:.1f}"


# --- what it means ----------------------------------------------------------------------------------------------------


def meaning(audit: Audit) -> list[str]:
    """The consequences for this model, sentence by sentence."""
    told = (_no_bottleneck, _rank_in_use, _directions_in_use, _collapse, _lost_gradient, _never_first)
    return [*(sentence for tell in told if (sentence := tell(audit))), *_cost(audit)]


def findings(audit: Audit) -> list[str]:
    """The sentences of :func:`meaning` that a reader should see first: cost, collapse, words that never come first."""
    found = [_cost(audit)[-1]]
    if audit.bend and is_nonlinear(audit) and audit.bend.kl_to_nearest_softmax <= COLLAPSED:
        found.append(_collapse(audit))
    if audit.argmax and audit.argmax.no:
        found.append(_never_first(audit))
    return found


def _no_bottleneck(audit: Audit) -> str:
    words, width = audit.layer.words, audit.layer.width
    if width is None or words > width + 1:
        return ""
    return (
        f"There is no bottleneck: with {words:,} words and width {width:,} a softmax makes any distribution in every "
        "context."
    )


def _rank_in_use(audit: Audit) -> str:
    bounds = audit.bounds
    if bounds is None or not audit.layer.head:
        return ""
    where = "given Gaussian vectors " if "Gaussian vectors" in bounds.source else ""
    if bounds.width is None or bounds.upper > bounds.width + 2:
        return (
            f"Theory does not bound the rank of {head_label(bounds.head)}; {where}at least {bounds.lower:,} dimensions "
            "are in use. A high rank is no proof of quality: it is a count of singular values above a threshold."
        )
    in_use = "all of them" if bounds.lower == bounds.upper else f"at least {bounds.lower:,}"
    return (
        f"Whatever the text, log P lies in a space of {bounds.upper:,} dimensions out of {bounds.words:,}; {where}the "
        f"layer uses {in_use}. A higher rank does not by itself lower the loss: whether the truth needs more is "
        "another question."
    )


def enough_directions(truncation: Truncation) -> int | None:
    """The least rank at which a truncation follows the output; None where there are too few contexts to tell."""
    enough = min((point.width for point in truncation.points if point.bound <= FOLLOWS), default=None)
    # At full rank every context has directions of its own, and nothing follows from that.
    return None if enough is None or enough >= min(truncation.contexts, truncation.words) // 2 else enough


def _directions_in_use(audit: Audit) -> str:
    if audit.truncation is None:
        return ""
    width, enough = audit.layer.width, enough_directions(audit.truncation)
    if enough is None:
        return "The contexts are too few to tell how many directions the output needs: each adds some of its own."
    less = f", less than the layer's {width:,}. Other contexts may need more" if width and enough < width else ""
    return f"In these contexts a softmax of width {enough:,} could follow the output within {FOLLOWS:g} nats{less}."


def _collapse(audit: Audit) -> str:
    bend, layer = audit.bend, audit.layer
    if bend is None or not is_nonlinear(audit):
        return ""
    kl, head = kl_text(bend.kl_to_nearest_softmax), head_label(layer.head)
    other = f"softmax of {bend.nearest_slope:.3g} z" + (" in each component" if layer.components > 1 else "")
    if bend.kl_to_nearest_softmax <= COLLAPSED:
        return (
            f"{head} has collapsed to softmax: it is within {kl} nats of {other} with the same h and W, so here it "
            "does what softmax would do."
        )
    return (
        f"{head} is in use: with the same h and W the nearest one without a nonlinearity, {other}, would be {kl} nats "
        "away. (With h and W of its own it may come nearer.)"
    )


def _lost_gradient(audit: Audit) -> str:
    if audit.gradient is None or math.isnan(audit.gradient.mean):
        return ""
    return (
        f"{audit.gradient.mean:.1%} of what the loss asks of the logits cannot be passed to the rest of the model; W's "
        "own gradient is not concerned. Any layer with many more words than width loses most of it: how much is lost "
        "says nothing about nats by itself."
    )


def _never_first(audit: Audit) -> str:
    counts = audit.argmax
    if counts is None:
        return ""
    if counts.no:
        return (
            f"{counts.no:,} of the {counts.in_question:,} words asked about ({counts.no / counts.in_question:.1%}) can "
            "never be ranked first, in any context; greedy decoding will not produce them."
        )
    if counts.undecided:
        return "No word was found that can never be ranked first, but not all were settled."
    asked = "Every word" if counts.in_question == counts.words else "Every word asked about"
    return f"{asked} can be ranked first by some hidden vector (not necessarily one that the model makes)."


def _cost(audit: Audit) -> list[str]:
    """The loss that another output layer would save, as far as a target tells it; the last sentence is the answer."""
    target, width = audit.target, audit.layer.width
    if target is None:
        unknown = (
            "What this output layer costs in nats cannot be known from the model alone: its own log-probabilities are "
            "what the layer can make. That takes a truth to compare with: --teacher MODEL, or --target with known "
            "distributions or a language."
        )
        return [unknown]
    widths = _compared_widths(target)
    shown = width if width in widths else max(widths, default=0)
    here = {same_head(head.head): head for head in target.heads if head.width == shown}
    if "softmax" not in here:
        return ["The fits were cut short before softmax was done at the width in question."]
    at_least = "at least " * target.is_lower_bound
    sentences = [
        (
            f"At width {shown:,} a softmax with h and W of its own choice misses this target by "
            f"{at_least}{kl_text(here['softmax'].kl)} nats on these contexts (as far as the fits went; more contexts "
            "need more)."
        )
    ]
    own = same_head(audit.layer.head) or "softmax"
    if target.model_kl is not None and shown == width and own in here:
        floor = here[own].kl
        rest = "at most " * target.is_lower_bound + kl_text(max(target.model_kl - floor, 0.0))
        sentences.append(
            f"The model misses it by {kl_text(target.model_kl)} nats. The best that was found for {head_label(own)} at "
            f"this width loses {at_least}{kl_text(floor)} of these, so {rest} or so come from elsewhere than the "
            "output layer."
        )
    return [*sentences, *_best_function(target, here)]


def _best_function(target: TargetResult, here: Mapping[str, HeadAtWidth]) -> list[str]:
    """The gain of the best head over softmax at one width."""
    softmax, best = here["softmax"], min(here.values(), key=lambda head: head.kl)
    if best.kl < 0.99 * softmax.kl:
        is_small = softmax.kl - best.kl < max(softmax.spread, best.spread)
        doubt = " The gain is smaller than the spread over starts: more starts or iterations would tell more."
        gain = (
            f"Of the functions tried {head_label(best.head)} does best at width {best.width:,} against {target.target}"
            f": {kl_text(best.kl)} nats, worth a softmax of {_softmax_width(best.softmax_width, target)}. That is what "
            "could be gained at most by changing the function; training and generalisation are not in it."
        )
        return [gain + doubt * is_small]
    if softmax.kl <= FOLLOWS:
        return ["So the output function costs nothing here: another one has nothing to gain on these contexts."]
    return ["None of the functions tried does better than softmax by more than 1 %."] if len(here) > 1 else []
