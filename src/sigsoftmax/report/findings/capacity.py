"""Fits of heads to a language of known truth, in tables and sentences for terminal and page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from sigsoftmax.records.grouping import grouped
from sigsoftmax.records.schemas.capacity import CapacityResult, softmax_width_of_equal_kl
from sigsoftmax.records.schemas.spectra import RULES
from sigsoftmax.records.statistics import perplexity
from sigsoftmax.report.number_text import TIMES, count_text, counted, number_text, seconds_text, width_text
from sigsoftmax.report.tables import Column, Fields, Row, Table, head_cell
from sigsoftmax.report.theme import Looks, head_label, same_head

__all__ = ["EQUAL", "REACHED", "by_head", "findings", "fits_table", "kl_table", "softmax_curve"]

EQUAL = 0.01
"""KLs that differ by less than this fraction are called equal: two starts of one fit may differ as much"""
REACHED = 1e-4
"""nats that count as having reached the truth"""


def by_head(results: Sequence[CapacityResult]) -> dict[str, list[CapacityResult]]:
    return grouped(results, lambda result: same_head(result.head))


def softmax_curve(results: Sequence[CapacityResult]) -> dict[int, float]:
    """The KL of the best softmax by its width, where it is a number."""
    softmax = [result for result in results if same_head(result.head) == "softmax"]
    return {result.width: result.fitted_kl for result in softmax if 0.0 <= result.fitted_kl < math.inf}


# --- the tables -------------------------------------------------------------------------------------------------------


def kl_table(
    results: Sequence[CapacityResult], looks: Looks | None = None, *, caption: str, by_width: bool = True
) -> Table:
    """KL of every head's own fit, a column for each width, or for each number of free numbers per context."""
    heads = {
        head: {result.width if by_width else result.numbers_per_context: result for result in own}
        for head, own in by_head(results).items()
    }
    places = sorted({place for own in heads.values() for place in own})

    def part(title: str, text: Callable[[CapacityResult], str]) -> list[Row]:
        """A heading and a row for each head that has a text at some place; nothing where there are none."""
        found = {head: [text(own[place]) if place in own else "" for place in places] for head, own in heads.items()}
        rows = [Row((head_cell(head, looks), *texts)) for head, texts in found.items() if any(texts)]
        return [Row((title,)), *rows] if rows else []

    rows = part("KL (nats) of the best fit", lambda one: number_text(one.fitted_kl))
    if by_width:
        rows += part("Softmax of equal KL", _softmax_width(softmax_curve(results)))
        rows += part("KL from the worst start", lambda one: number_text(one.worst_fitted_kl))
        rows += part("At most, by containment", _limit_text)
    group = "width d" if by_width else "free numbers per context: K d + K - 1"
    columns = [Column("Head", "label"), *(Column(count_text(place), group=group) for place in places)]
    return Table(caption=caption, columns=columns, rows=rows)


def fits_table(
    results: Sequence[CapacityResult],
    looks: Looks | None = None,
    *,
    caption: str,
    curve: Mapping[int, float] | None = None,
) -> Table:
    """Every number of each fit. ``curve`` has the KL of softmax at further widths; in a terminal all have one width."""
    limits: Fields[CapacityResult] = {Column("at most", group="KL (nats)", page_only=True): _limit_text}
    fields: Fields[CapacityResult] = {
        Column("Head", "label"): lambda r: head_cell(r.head, looks),
        Column("Width", page_only=True): lambda r: count_text(r.width),
        Column("per context", group="Numbers"): lambda r: count_text(r.numbers_per_context),
        Column("of output", group="Numbers"): lambda r: count_text(r.output_parameters),
        Column("bound", group="Rank"): lambda r: count_text(r.rank_bound),
        Column("paper's", group="Rank"): lambda r: count_text(r.rank),
        Column("numpy's, float32", group="Rank", page_only=True): lambda r: count_text(_rank_by("numpy32", r)),
        Column("numpy's, float64", group="Rank", page_only=True): lambda r: count_text(_rank_by("numpy64", r)),
        Column("fit", group="KL (nats)"): lambda r: number_text(r.fitted_kl),
        Column("worst start", group="KL (nats)"): lambda r: number_text(r.worst_fitted_kl),
        **(limits if any(map(_limit_text, results)) else {}),
        Column("excess", group="Perplexity"): lambda r: f"{TIMES} {number_text(perplexity(r.fitted_kl))}",
        Column("of equal KL", group="Softmax"): _softmax_width(curve or softmax_curve(results)),
        Column("Time", page_only=True): lambda r: seconds_text(r.seconds),
    }
    # Softmax, which is first in the results, stays before its equals.
    in_order = sorted(results, key=lambda r: (r.width, -round(r.fitted_kl, 4)))
    notes = [
        "KL is that of the best fit of the head itself; the worst start shows the optimiser's share.",
        f"Rank, the paper's: singular values of log Q of that fit above {RULES['press32'].formula}.",
        "Another threshold gives another rank; fits are made in float64, whose rounding lies below these thresholds.",
    ]
    return Table.of(in_order, fields, caption=caption, notes=notes)


def _softmax_width(curve: Mapping[int, float]) -> Callable[[CapacityResult], str]:
    """Writes the width of the softmax of equal KL; nothing beside softmax itself."""

    def text(result: CapacityResult) -> str:
        if same_head(result.head) == "softmax":
            return ""
        is_known = curve and result.fitted_kl >= 0.0
        width = softmax_width_of_equal_kl(result.fitted_kl, curve, floor=REACHED) if is_known else math.nan
        return width_text(width, curve)

    return text


def _limit_text(result: CapacityResult) -> str:
    """The KL of a contained head, where no fit has reached it."""
    text = "" if result.limit_kl is None else number_text(result.limit_kl)
    return "" if text == number_text(result.fitted_kl) else text


def _rank_by(rule: str, result: CapacityResult) -> int:
    """Singular values above a threshold of ``RULES``."""
    relative = RULES[rule].relative(result.words, result.contexts)
    return sum(value > relative * result.singular_values[0] for value in result.singular_values)


# --- the sentences ----------------------------------------------------------------------------------------------------


def findings(results: Sequence[CapacityResult]) -> list[str]:
    """Sentences that follow from the numbers; nothing here is known beforehand."""
    heads = by_head(results)
    if "softmax" not in heads:
        return []
    lines = [_sigsoftmax(heads), _rank_beside_loss(results), _others(heads)]
    return [text for text in lines if text]


def _against_softmax(
    heads: Mapping[str, Sequence[CapacityResult]], head: str
) -> list[tuple[CapacityResult, CapacityResult]]:
    """Softmax and a head at common widths, unless both have reached the truth there."""
    other = {r.width: r for r in heads.get(head, ())}
    pairs = [(r, other[r.width]) for r in heads["softmax"] if r.width in other]
    return [(a, b) for a, b in pairs if max(a.fitted_kl, b.fitted_kl) > REACHED]


def _changes(pairs: Sequence[tuple[CapacityResult, CapacityResult]]) -> list[float]:
    """Relative differences of the KL, in order."""
    return sorted(b.fitted_kl / a.fitted_kl - 1.0 for a, b in pairs if a.fitted_kl > 0.0)


def _sigsoftmax(heads: Mapping[str, Sequence[CapacityResult]]) -> str | None:
    pairs = _against_softmax(heads, "sigsoftmax")
    changes = _changes(pairs)
    gains = [b.rank / a.rank for a, b in pairs if a.rank]
    if not changes or not gains:
        return None
    is_one = len(pairs) == 1
    widths = f"width {pairs[0][0].width}" if is_one else counted(len(pairs), "width")
    largest = max(map(abs, changes))
    ranks = f"its rank by the paper's threshold is {'' if is_one else 'up to '}{max(gains):.1f} times that of softmax"
    if largest < EQUAL:
        return (
            f"sigsoftmax reaches the same KL as softmax within {largest:.2%} at {widths}, although {ranks}: "
            "the higher rank did not lower it."
        )
    ends = dict.fromkeys(map(_change_text, (changes[0], changes[-1])))
    between = f"between {' and '.join(ends)}" if len(ends) > 1 else next(iter(ends))
    return f"sigsoftmax has {between} KL than softmax at {widths}; {ranks}."


def _rank_beside_loss(results: Sequence[CapacityResult]) -> str | None:
    """A sentence on heads of nearly full rank at one width; None unless they differ in KL."""
    full = [r for r in results if r.fitted_kl > REACHED and r.rank >= 0.9 * min(r.words, r.contexts)]
    by_width = [sorted(here, key=lambda r: r.fitted_kl) for here in grouped(full, lambda r: r.width).values()]
    high = max(by_width, key=lambda here: here[-1].fitted_kl / here[0].fitted_kl, default=[])
    if not high or high[-1].fitted_kl < (1.0 + 10.0 * EQUAL) * high[0].fitted_kl:
        return None
    low, most = high[0], high[-1]
    return (
        "A higher rank does not by itself lower the loss: "
        f"{len(high)} heads have full or almost full rank by the paper's threshold at width {low.width}, with KL from "
        f"{number_text(low.fitted_kl, 3)} ({head_label(low.head)}) to {number_text(most.fitted_kl, 3)} "
        f"({head_label(most.head)})."
    )


def _others(heads: Mapping[str, Sequence[CapacityResult]]) -> str | None:
    others = {head: _changes(_against_softmax(heads, head)) for head in heads if head not in ("softmax", "sigsoftmax")}
    parts = [f"{head_label(head)} {_change_text(found[len(found) // 2])}" for head, found in others.items() if found]
    if not parts:
        return None
    median = ", median over the widths" if max(map(len, others.values())) > 1 else ""
    return (
        f"KL against softmax at equal width{median}: " + "; ".join(parts) + ". A head that contains "
        "another goes on from its solution and so is fitted longer: gaps of a few percent may be the optimiser's."
    )


def _change_text(difference: float) -> str:
    """A relative difference as less or more."""
    return f"{abs(difference):.1%} {'less' if difference <= 0.0 else 'more'}"
