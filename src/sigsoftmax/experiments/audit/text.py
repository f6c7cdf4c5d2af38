"""An audit in plain words, from its record alone."""

from __future__ import annotations

import math
import textwrap

from sigsoftmax._version import install_extra
from sigsoftmax.records.schemas.audits import ArgmaxCounts, Audit, Bend, GradientShare, TargetResult, Truncation
from sigsoftmax.records.schemas.spectra import RankBounds, Spectrum

__all__ = ["meaning", "report"]

COLUMNS = 110
COLLAPSED = 1e-3
"""nats to the nearest softmax below which a bent phi is called collapsed: a perplexity of 100.1 instead of 100"""
FOLLOWS = 1e-3
"""nats below which a truncation follows the output"""


def report(audit: Audit) -> str:
    """The whole report."""
    parts = [
        _heading(f"Audit of {audit.source}"),
        _layer(audit),
        _part("Rank", [*_bounds(audit.bounds), *_spectrum(audit.spectrum)]),
        _part("Directions that the output uses", _truncation(audit.truncation, audit.layer.width)),
        _part("The bend of phi", _bend(audit.bend, audit.layer.head)),
        _part("The gradient", _gradient(audit.gradient)),
        _part("Words that can come first", _argmax(audit.argmax)),
        _part("Nats", _target(audit.target)),
        _part("What it means", [f"- {sentence}" for sentence in meaning(audit)]),
        _part("Notes", [f"- {note}" for note in audit.notes]),
    ]
    return "\n\n".join(part for part in parts if part)


def _heading(text: str) -> str:
    return f"{text}\n{'=' * len(text)}"


def _part(title: str, lines: list[str]) -> str:
    """A title and lines beneath it. Sentences are wrapped; tables, which hold runs of spaces, are not."""
    if not lines:
        return ""
    wrapped = [
        f"  {line}"
        if "   " in line.strip()
        else textwrap.fill(
            line.strip(),
            COLUMNS,
            initial_indent=" " * (2 + len(line) - len(line.lstrip())),
            subsequent_indent=" " * (4 + len(line) - len(line.lstrip())),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines
    ]
    return "\n".join([f"{title}:", *wrapped])


def _layer(audit: Audit) -> str:
    layer = audit.layer
    lines = [f"Words: {layer.words:,}."]
    if layer.width is None:
        lines.append(f"Output function: {layer.how_known}.")
    else:
        bias = "with a class bias" if layer.has_bias else "without a class bias"
        lines[0] = f"Words: {layer.words:,}; width: {layer.width:,}; {bias}; weights in {layer.dtype}."
        lines.append(f"Output function: {layer.head} ({layer.how_known}).")
    if audit.contexts:
        lines.append(f"Contexts: {audit.contexts:,}, from {audit.contexts_from}.")
    return "\n".join(lines)


# --- the parts --------------------------------------------------------------------------------------------------------


def _bounds(bounds: RankBounds | None) -> list[str]:
    if bounds is None:
        return []
    between = f"{bounds.lower:,}" if bounds.lower == bounds.upper else f"between {bounds.lower:,} and {bounds.upper:,}"
    return [
        f"The {bounds.source} ({bounds.words:,} x {bounds.contexts:,}) have rank {between}.",
        f"  At most: {bounds.upper_reason}.",
        (
            f"  At least: from a block of {bounds.block_words:,} words x {bounds.block_contexts:,} contexts, above "
            f"the threshold {bounds.rule} of the whole."
        ),
    ]


def _spectrum(spectrum: Spectrum | None) -> list[str]:
    if spectrum is None:
        return []
    counts = ", ".join(f"{count.rule} {count.text}" for count in spectrum.ranks())
    return [
        f"Of log P in these contexts ({spectrum.words:,} x {spectrum.contexts:,}), by the threshold: {counts}.",
        (
            f"Effective rank {spectrum.effective_rank:.1f}, stable rank {spectrum.stable_rank:.2f}; largest singular "
            f"value {spectrum.largest:.4g}, noise floor {spectrum.noise_floor:.2g}."
        ),
    ]


def _truncation(truncation: Truncation | None, width: int | None) -> list[str]:
    if truncation is None:
        return []
    cells = [
        (str(point.width) + ("*" if point.width == width else ""), _kl(point.bound)) for point in truncation.points
    ]
    size = max(len(cell) for pair in cells for cell in pair)
    lines = [
        "KL(P || softmax of log P cut down to rank k), in nats: at most so much must a softmax of width k lose here."
    ]
    per_line = max(1, 100 // (size + 2))
    for first in range(0, len(cells), per_line):
        part = cells[first : first + per_line]
        lines.append("k   " + "".join(name.rjust(size + 2) for name, _ in part))
        lines.append("KL  " + "".join(value.rjust(size + 2) for _, value in part))
    if width is not None and any(point.width == width for point in truncation.points):
        lines.append("* the layer's width")
    return lines


def _bend(bend: Bend | None, head: str) -> list[str]:
    if bend is None:
        return []
    logits = f"Logits lie between {bend.lowest_logit:.3g} and {bend.highest_logit:.3g}"
    if not bend.lines and bend.kl_to_nearest_softmax == 0.0 and bend.logits_in_bend == 0.0:
        return [f"{head} is a line: there is no bend. {logits}."]
    lines = [
        f"on the {line.name} line (slope {line.slope:.3g}): {line.logits:.1%} of the logits, {line.probability:.1%} "
        "of the probability"
        for line in bend.lines
    ]
    return [
        f"{logits} ({bend.contexts:,} contexts).",
        *lines,
        f"in the bend: {bend.logits_in_bend:.1%} of the logits, {bend.probability_in_bend:.1%} of the probability",
        (
            f"The nearest softmax has the slope {bend.nearest_slope:.4g} and is {_kl(bend.kl_to_nearest_softmax)} "
            "nats away."
        ),
    ]


def _gradient(gradient: GradientShare | None) -> list[str]:
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


def _argmax(counts: ArgmaxCounts | None) -> list[str]:
    if counts is None:
        return []
    asked = "all" if counts.in_question == counts.words else f"{counts.in_question:,} drawn at random"
    lines = [
        (
            f"Of {asked} of the {counts.words:,} words, {counts.yes:,} can (proved by a hidden vector), {counts.no:,} "
            f"never can, {counts.undecided:,} undecided."
        ),
    ]
    if counts.never:
        shown = ", ".join(map(str, counts.never[:12]))
        lines.append(f"Never: {shown}{', ...' if len(counts.never) > 12 else ''}.")
    if counts.undecided and not counts.has_solver:
        lines.append(f"Linear programs would settle more: {install_extra('audit')} brings SciPy.")
    elif counts.undecided:
        lines.append("More time (--argmax-seconds) settles more.")
    return lines


def _target(target: TargetResult | None) -> list[str]:
    if target is None:
        return []
    lines = [f"Against {target.target}, in {target.contexts:,} contexts and {target.words:,} words:"]
    rows = [("head", "width", "least KL", "spread over starts", "against softmax", "softmax of equal KL")]
    softmax = {h.width: h.kl for h in target.heads if h.head == "softmax"}
    own = [h for h in target.heads if h.width in _fitted_widths(target)]
    fitted = list(softmax)
    for head in sorted(own, key=lambda h: (h.width, -h.kl)):
        base = softmax.get(head.width)
        change = "" if head.head == "softmax" or not base else f"{head.kl / base - 1.0:+.1%}"
        rows.append(
            (
                head.head.replace("=0.0)", "=0)"),
                str(head.width),
                _kl(head.kl),
                _kl(head.spread),
                change,
                _softmax_width(head.softmax_width, fitted),
            )
        )
    sizes = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = list(zip(row, sizes, strict=True))
        lines.append("  ".join(c.ljust(size) if i == 0 else c.rjust(size) for i, (c, size) in enumerate(cells)))
    if target.is_lower_bound:
        lines.append(
            f"Only the likeliest words were fitted; they have {target.mass:.1%} of the probability. The KLs are of "
            "the distributions given these words, weighted by their mass: over all words the least KL is no smaller."
        )
    if target.model_kl is not None:
        lines.append(f"The model itself is {_kl(target.model_kl)} nats from the target, over all words.")
    return lines


def _fitted_widths(target: TargetResult) -> set[int]:
    """Widths at which more than softmax was fitted."""
    others = {head.width for head in target.heads if head.head != "softmax"}
    return others or {head.width for head in target.heads}


# --- what it means ----------------------------------------------------------------------------------------------------


def meaning(audit: Audit) -> list[str]:
    """What follows for this model, sentence by sentence."""
    layer, sentences = audit.layer, []
    if layer.width is not None and layer.words <= layer.width + 1:
        sentences.append(
            f"There is no bottleneck: with {layer.words:,} words and width {layer.width:,} a softmax makes any "
            "distribution in every context."
        )
    if audit.bounds is not None and layer.head:
        sentences.append(_meaning_of_bounds(audit.bounds))
    if audit.truncation is not None:
        sentences.append(_meaning_of_truncation(audit.truncation, layer.width))
    if audit.bend is not None and (audit.bend.lines or audit.bend.logits_in_bend):
        sentences.append(_meaning_of_bend(audit.bend, layer.head, layer.components))
    if audit.gradient is not None and not math.isnan(audit.gradient.mean):
        sentences.append(
            f"{audit.gradient.mean:.1%} of what the loss asks of the logits cannot be passed to the rest of the "
            "model; W's own gradient is not concerned. Any layer with many more words than width loses most of it: "
            "how much is lost says nothing about nats by itself."
        )
    if audit.argmax is not None:
        sentences.append(_meaning_of_argmax(audit.argmax))
    if audit.target is None:
        sentences.append(
            "What this output layer costs in nats cannot be known from the model alone: its own log-probabilities "
            "are what the layer can make. That takes a truth to compare with: --teacher MODEL, or --target with "
            "known distributions or a language."
        )
    else:
        sentences += _meaning_of_target(audit.target, layer.width, layer.head)
    return sentences


def _meaning_of_bounds(bounds: RankBounds) -> str:
    where = "given Gaussian vectors " if "Gaussian vectors" in bounds.source else ""
    if bounds.width is not None and bounds.upper <= bounds.width + 2:
        return (
            f"Whatever the text, log P lies in a space of {bounds.upper:,} dimensions out of {bounds.words:,}; "
            f"{where}the layer uses {'all of them' if bounds.lower == bounds.upper else f'at least {bounds.lower:,}'}. "
            "Rank is not nats: whether the truth needs more is another question."
        )
    return (
        f"Theory does not bound the rank of {bounds.head}; {where}at least {bounds.lower:,} dimensions are in use. A "
        "high rank is no proof of quality: it is a count of singular values above a threshold."
    )


def _meaning_of_truncation(truncation: Truncation, width: int | None) -> str:
    enough = [point.width for point in truncation.points if point.bound <= FOLLOWS]
    if not enough or min(enough) >= min(truncation.contexts, truncation.words) // 2:
        return "The contexts are too few to tell how many directions the output needs: each adds some of its own."
    sentence = f"In these contexts a softmax of width {min(enough):,} could follow the output within {FOLLOWS:g} nats"
    if width is not None and min(enough) < width:
        return f"{sentence}, less than the layer's {width:,}. Other contexts may need more."
    return sentence + "."


def _meaning_of_bend(bend: Bend, head: str, components: int) -> str:
    kl = _kl(bend.kl_to_nearest_softmax)
    other = f"softmax of {bend.nearest_slope:.3g} z" + (" in each component" if components > 1 else "")
    if bend.kl_to_nearest_softmax <= COLLAPSED:
        return (
            f"{head} has collapsed to softmax: it is within {kl} nats of {other} with the same h and W, so here it "
            "does what softmax would do."
        )
    return (
        f"{head} is in use: with the same h and W the nearest one without a bend, {other}, would be {kl} nats away. "
        "(With h and W of its own it may come nearer.)"
    )


def _meaning_of_argmax(counts: ArgmaxCounts) -> str:
    if counts.no:
        return (
            f"{counts.no / counts.in_question:.1%} of the words asked about can never be ranked first, in any "
            "context; greedy decoding will not produce them."
        )
    if counts.undecided:
        return "No word was found that can never be ranked first, but not all were settled."
    asked = "Every word" if counts.in_question == counts.words else "Every word asked about"
    return f"{asked} can be ranked first by some hidden vector (not necessarily one that the model makes)."


def _meaning_of_target(target: TargetResult, width: int | None, own: str) -> list[str]:
    widths = _fitted_widths(target)
    shown = width if width in widths else max(widths)
    here = {head.head: head for head in target.heads if head.width == shown}
    if "softmax" not in here:
        return ["The fits were cut short before softmax was done at the width in question."]
    softmax = here["softmax"]
    at_least = "at least " if target.is_lower_bound else ""
    sentences = [
        (
            f"At width {shown:,} a softmax with h and W of its own choice misses this target by "
            f"{at_least}{_kl(softmax.kl)} nats on these contexts (as far as the fits went; more contexts need more)."
        )
    ]
    if target.model_kl is not None and shown == width and (not own or own in here):
        floor = here.get(own, softmax).kl
        rest = max(target.model_kl - floor, 0.0)
        sentences.append(
            f"The model misses it by {_kl(target.model_kl)} nats. The best that was found for {own or 'softmax'} at "
            f"this width loses {at_least}{_kl(floor)} of these, so {'at most ' * bool(at_least)}{_kl(rest)} or so come "
            "from elsewhere than the output layer."
        )
    better = [h for h in here.values() if h.head != "softmax" and h.kl < 0.99 * softmax.kl]
    fitted = [head.width for head in target.heads if head.head == "softmax"]
    if better:
        best = min(better, key=lambda head: head.kl)
        sentence = (
            f"Of the functions tried {best.head.replace('=0.0)', '=0)')} does best at this width: {_kl(best.kl)} "
            f"nats, worth a softmax of {_softmax_width(best.softmax_width, fitted)}. That is what could be gained at "
            "most by changing the function; training and generalisation are not in it."
        )
        if softmax.kl - best.kl < max(softmax.spread, best.spread):
            sentence += " The gain is smaller than the spread over starts: more starts or iterations would tell more."
        sentences.append(sentence)
    elif softmax.kl <= FOLLOWS:
        sentences.append(
            "So the output function costs nothing here: another one has nothing to gain on these contexts."
        )
    elif len(here) > 1:
        sentences.append("None of the functions tried does better than softmax by more than 1 %.")
    return sentences


def _softmax_width(width: float, fitted: list[int]) -> str:
    if width == 0.0:
        return f"d < {min(fitted)}"
    return f"d > {max(fitted)}" if math.isinf(width) else f"d = {width:.1f}"


def _kl(kl: float) -> str:
    if kl < 1e-9:
        return "0"
    return f"{kl:.4f}" if kl >= 1e-3 else f"{kl:.1e}"
