"""The head that a ranking speaks for, in sentences that go as far as its records and no further.

The first sentence is the answer. Each sentence after it says one thing that bounds it: too few seeds, heads that the
seeds do not tell apart, the control for scale or the want of one, runs of different lengths, a head that came to no
finite number, the price. No sentence is by the rank of a matrix: a higher rank does not by itself lower the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

from sigsoftmax.records.grouping import grouped
from sigsoftmax.records.statistics import PairedDifference
from sigsoftmax.report.findings.rankings import BASELINE, RankedHead, Ranking, percent_text
from sigsoftmax.report.number_text import NO_BREAK, interval_text, names_text, range_text, seconds_text

__all__ = ["QUESTION", "longer_runs", "verdict"]

QUESTION = "Which head should I use?"
CONTROL = "softmax(alpha=1.5)"
"""a control for scale to name where there is none on record"""


def verdict(ranking: Ranking) -> list[str]:
    """The answer, then what bounds it."""
    if len(ranking.heads) < 2:
        return [f"Only {_names(ranking.heads)} was trained under this budget, so there is nothing to choose between."]
    found = [_answer(ranking), _seeds(ranking), _not_told_apart(ranking), _scale(ranking), _lengths(ranking)]
    found += [_not_finite(ranking), _price(ranking)]
    return [text for text in found if text]


def longer_runs(ranking: Ranking, others: Sequence[Ranking]) -> str | None:
    """A sentence on the best head and softmax in longer runs of the same text, taken from the longest of them."""
    best, baseline = ranking.heads[0], ranking.baseline
    if baseline is None or best is baseline:
        return None
    longer = [r for r in others if r.subject[0] == ranking.subject[0] and r.longest > ranking.longest > 0]
    for other in sorted(longer, key=lambda r: -r.longest):
        heads = {head.head: head for head in other.heads if head.is_finite}
        if not {best.head, BASELINE} <= heads.keys():
            continue
        found = other.difference(heads[best.head], heads[BASELINE])
        if found is None:
            continue
        few = len(found.seeds)
        unresolved = f"; {few} seed{'s resolve' if few > 1 else ' resolves'} nothing" if found.interval is None else ""
        return (
            f"Longer runs are on record ({', '.join(other.subject[1:])}; {other.extent}): there {best.label} is "
            f"{_effect(found, heads[BASELINE])}{unresolved}."
        )
    return None


# --- what the seeds resolve -------------------------------------------------------------------------------------------


def _is_lower(ranking: Ranking, head: RankedHead, other: RankedHead) -> bool:
    """The seeds resolve that a head lies below another."""
    difference = ranking.difference(head, other)
    return difference is not None and bool(difference.is_resolved) and difference.mean < 0.0


def _leaders(ranking: Ranking) -> list[RankedHead]:
    """The best by its mean, and all that the seeds do not tell apart from it."""
    best, *others = ranking.heads
    return [best, *(head for head in others if head.is_finite and not _is_lower(ranking, best, head))]


def _recommended(ranking: Ranking) -> list[RankedHead]:
    """Heads that these records speak for: softmax, unless a head is resolved to be better than it."""
    if not (ranking.can_resolve and ranking.heads[0].is_finite):
        return []
    leaders, baseline = _leaders(ranking), ranking.baseline
    if baseline is None:
        return leaders
    better = [head for head in ranking.heads if _is_lower(ranking, head, baseline)]
    return [head for head in leaders if head in better] or better or [baseline]


# --- sentences --------------------------------------------------------------------------------------------------------


def _answer(ranking: Ranking) -> str:
    best = ranking.heads[0]
    if not best.is_finite:
        return f"These records speak for no head: none has a finite {ranking.quantity}."
    level = f"has the lowest {ranking.quantity}, {best.level.mean:.4f} nats: {_ahead(ranking)}."
    lowest = f"{best.label} {level}"
    chosen = _recommended(ranking)
    if not chosen:
        return lowest
    # What was measured bounds the answer: another text or a longer training may give another.
    scope = f"as far as these records go ({ranking.subject[0]}, {ranking.extent})"
    # Without the control for scale softmax alone is beaten, and not a softmax of scaled logits.
    has_control = any(head.is_scale_control for head in ranking.heads)
    rather = "" if has_control or ranking.baseline is None else " rather than softmax"
    if [head.head for head in chosen] == [BASELINE]:
        return f"Keep softmax, {scope}: no head is resolved to be better than it. {lowest}"
    if chosen == [best]:
        missing = " softmax was not trained." if ranking.baseline is None else ""
        return f"Use {best.label}{rather}, {scope}: it {level}{missing}"
    if ranking.baseline is None:
        names = _names(chosen, "or")
        return f"Use {names}, {scope}: the seeds do not tell them apart; softmax was not trained. {lowest}"
    resolved = "is resolved" if len(chosen) == 1 else "are resolved"
    use = f"Use {_names(chosen, 'or')}{rather}, {scope}"
    return f"{use}: {_names(chosen)} {resolved} to be better than softmax. {lowest}"


def _ahead(ranking: Ranking) -> str:
    """The distance of the best from softmax, or from the next where it is softmax."""
    best, baseline = ranking.heads[0], ranking.baseline
    other = ranking.heads[1] if baseline is None or baseline is best else baseline
    difference = ranking.difference(best, other)
    if not other.is_finite:
        return f"{other.label} came to no finite number"
    if difference is None:
        return f"no seed is common to it and {other.label}"
    has_share = ranking.has_truth and other.level.mean > 0.0
    share = f", {100.0 * abs(difference.mean) / other.level.mean:.1f} % of its KL" if has_share else ""
    return _effect(difference, other, share)


def _seeds(ranking: Ranking) -> str | None:
    if ranking.can_resolve:
        return None
    pairs = ranking.most_pairs
    have = {0: "Without a seed that two heads share", 1: "With one seed"}.get(pairs, f"With {pairs} seeds")
    return (
        f"{have} nothing can be resolved, so no head is recommended: how far another seed would move one is not known. "
        "Three are the least that say anything (--seeds 1,2,3), and a small difference needs more."
    )


def _not_told_apart(ranking: Ranking) -> str | None:
    """Heads whose difference from the best has an interval with zero in it."""
    if not (ranking.can_resolve and ranking.heads[0].is_finite):
        return None
    best, *others = _leaders(ranking)
    if not others:
        return f"{best.label} is resolved from each of the other heads." if len(ranking.heads) > 2 else None
    judged = {head.head: ranking.difference(head, best) for head in others}
    unjudged = [head for head in others if (found := judged[head.head]) is None or found.interval is None]
    overlapping = [head for head in others if head not in unjudged]
    parts = [f"the seeds do not tell it apart from {_names(overlapping)}"] if overlapping else []
    parts += [f"for {_names(unjudged)} there are too few seeds in common"] if unjudged else []
    return f"{best.label} is the best by its mean, but {'; '.join(parts)}."


def _scale(ranking: Ranking) -> str | None:
    """sigsoftmax has a slope between 1 and 2: what a softmax of scaled logits reaches too is no merit of its shape."""
    kinds = grouped(ranking.heads, lambda head: head.is_finite and (head.head == BASELINE, head.is_scale_control))
    softmax, controls, others = (kinds.get(kind, []) for kind in ((True, False), (False, True), (False, False)))
    if not others:
        return None
    if not controls:
        return (
            f"No control for scale is on record, as {CONTROL}: whether softmax of scaled logits would do as well is "
            "not known."
        )
    control = controls[0]
    # The control beside softmax; beside it the best of the others, and sigsoftmax, for which it was thought of.
    pairs = [(control, head) for head in softmax]
    pairs += [(head, control) for head in others if head is others[0] or head.head == "sigsoftmax"]
    judged = [(head, other, ranking.difference(head, other)) for head, other in pairs]
    parts = [f"{head.label} is {_effect(found, other)}" for head, other, found in judged if found is not None]
    if not parts:
        return f"The control for scale is {control.label}; it has no seed in common with the other heads."
    return f"The control for scale: {'; '.join(parts)}."


def _lengths(ranking: Ranking) -> str | None:
    lengths = {frozenset(head.epochs.values()) for head in ranking.heads}
    if frozenset() in lengths:
        return "How long some of these runs were is not on record, so a difference may be one of length."
    if len(lengths) == 1:
        return None
    epochs = range_text(epoch for found in lengths for epoch in found)
    return f"The runs are of different lengths, {epochs} epochs: part of a difference may be the length."


def _not_finite(ranking: Ranking) -> str | None:
    found = [head for head in ranking.heads if not head.is_finite]
    if not found or not ranking.heads[0].is_finite:
        return None
    return f"{_names(found)} came to no finite number in some run and {'stand' if len(found) > 1 else 'stands'} last."


def _price(ranking: Ranking) -> str | None:
    """Parameters and time beside softmax's, of the heads that the answer names."""
    baseline = ranking.baseline
    named = [head for head in (_recommended(ranking) or ranking.heads[:1]) if head is not baseline]
    if baseline is None or not named:
        return None
    facts = {head.label: " and ".join(_price_of(head, " parameters", " a run")) for head in named}
    parts = [f"{label} {price}" for label, price in facts.items() if price]
    own = _price_of(baseline)
    return f"The price: {'; '.join(parts)}, against softmax's {' and '.join(own)}." if parts and own else None


def _price_of(head: RankedHead, numbers: str = "", time: str = "") -> list[str]:
    """Parameters and time of a head, with their units, as far as they are on record."""
    price = [f"{range_text(head.parameters)}{numbers}"] if head.parameters else []
    return price + ([f"{seconds_text(head.mean_seconds)}{time}"] if head.mean_seconds is not None else [])


# --- text -------------------------------------------------------------------------------------------------------------


def _names(heads: Sequence[RankedHead], last: str = "and") -> str:
    return names_text([head.label for head in heads], last)


def _effect(difference: PairedDifference, other: RankedHead, share: str = "") -> str:
    """The size first, then its interval and whether it is resolved."""
    direction = "below" if difference.mean < 0.0 else "above"
    size = f"{abs(difference.mean):.4f} nats {direction} {other.label}"
    size += f" ({percent_text(difference)} in perplexity{share})"
    if difference.interval is None:
        return size
    resolved = "resolved" if difference.is_resolved else "not resolved"
    interval = interval_text(difference.interval, "+.4f").strip("()").replace(NO_BREAK, " ")
    return f"{size}, interval {interval}, {resolved} by {len(difference.seeds)} seeds"
