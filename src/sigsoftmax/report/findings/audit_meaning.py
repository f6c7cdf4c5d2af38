"""The consequences of an audit for its model, sentence by sentence, and what its numbers are read as."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sigsoftmax.records.schemas.audits import Audit, HeadAtWidth, TargetResult, Truncation
from sigsoftmax.report.number_text import number_text, width_text
from sigsoftmax.report.theme import head_label, same_head

__all__ = [
    "FOLLOWS",
    "ROUNDING",
    "compared_widths",
    "enough_directions",
    "findings",
    "is_nonlinear",
    "kl_text",
    "meaning",
    "softmax_curve",
]

COLLAPSED = 1e-3
"""nats to the nearest softmax below which a nonlinear phi is called collapsed: a perplexity of 100.1 instead of 100"""
FOLLOWS = 1e-3
"""nats below which a truncation follows the output"""
ROUNDING = 1e-9
"""nats that are rounding"""


def meaning(audit: Audit) -> list[str]:
    """The consequences for this model, sentence by sentence."""
    told = (_no_bottleneck, _rank_in_use, _directions_in_use, _collapse, _lost_gradient, _never_first)
    return [*(sentence for tell in told if (sentence := tell(audit))), *_cost(audit)]


def findings(audit: Audit) -> list[str]:
    """The sentences of :func:`meaning` that a reader should see first: cost, collapse, tokens that never come first."""
    found = [_cost(audit)[-1]]
    if audit.bend and is_nonlinear(audit) and audit.bend.kl_to_nearest_softmax <= COLLAPSED:
        found.append(_collapse(audit))
    if audit.argmax and audit.argmax.no:
        found.append(_never_first(audit))
    return found


def _no_bottleneck(audit: Audit) -> str:
    vocabulary, width = audit.layer.words, audit.layer.width
    if width is None or vocabulary > width + 1:
        return ""
    return (
        f"There is no bottleneck: with {vocabulary:,} tokens and width {width:,} a softmax makes any distribution in "
        "every context."
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
    if layer.components > 1 and bend.kl_to_nearest_softmax <= COLLAPSED:
        # A mixture of softmaxes is no softmax: phi tells nothing of what mixing does.
        return (
            f"The components of {head} are softmaxes: they are within {kl} nats of {other} with the same h and W, so "
            "what it can do beyond softmax it does by mixing."
        )
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
        "own gradient is not concerned. Any layer with many more tokens than width loses most of it: how much is lost "
        "says nothing about nats by itself."
    )


def _never_first(audit: Audit) -> str:
    counts = audit.argmax
    if counts is None:
        return ""
    if counts.no:
        return (
            f"{counts.no:,} of the {counts.in_question:,} tokens asked about ({counts.no / counts.in_question:.1%}) "
            "can never be ranked first, in any context; greedy decoding will not produce them."
        )
    if counts.undecided:
        return "No token was found that can never be ranked first, but not all were settled."
    asked = "Every token" if counts.in_question == counts.words else "Every token asked about"
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
    widths = compared_widths(target)
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
        width = width_text(best.softmax_width, softmax_curve(target))
        gain = (
            f"Of the functions tried {head_label(best.head)} does best at width {best.width:,} against {target.target}"
            f": {kl_text(best.kl)} nats, worth a softmax of {width}. That is "
            "what could be gained at most by changing the function; training and generalisation are not in it."
        )
        return [gain + doubt * is_small]
    if softmax.kl <= FOLLOWS:
        return ["So the output function costs nothing here: another one has nothing to gain on these contexts."]
    return ["None of the functions tried does better than softmax by more than 1 %."] if len(here) > 1 else []


# --- what the numbers are read as -------------------------------------------------------------------------------------


def kl_text(kl: float, digits: int = 4) -> str:
    """A KL in nats; what is rounding is 0."""
    return "0" if 0.0 <= kl < ROUNDING else number_text(kl, digits)


def is_nonlinear(audit: Audit) -> bool:
    """A softmax has no nonlinearity, and cannot collapse to itself."""
    return audit.bend is not None and bool(audit.bend.lines or audit.bend.logits_in_bend)


def enough_directions(truncation: Truncation) -> int | None:
    """The least rank at which a truncation follows the output; None where there are too few contexts to tell."""
    enough = min((point.width for point in truncation.points if point.bound <= FOLLOWS), default=None)
    # At full rank every context has directions of its own, and nothing follows from that.
    return None if enough is None or enough >= min(truncation.contexts, truncation.words) // 2 else enough


def compared_widths(target: TargetResult) -> set[int]:
    """Widths at which more than softmax was fitted, if there are any."""
    others = {head.width for head in target.heads if same_head(head.head) != "softmax"}
    return others or {head.width for head in target.heads}


def softmax_curve(target: TargetResult) -> dict[int, float]:
    return {head.width: head.kl for head in target.heads if same_head(head.head) == "softmax"}
