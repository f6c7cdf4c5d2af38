"""Capacity: the KL that fits of each head reach at a width, and the rank they have there."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from sigsoftmax.records import Environment
from sigsoftmax.records.grouping import grouped
from sigsoftmax.records.schemas.capacity import CapacityResult
from sigsoftmax.records.schemas.spectra import RULES
from sigsoftmax.report.figures import (
    Axis,
    Choice,
    Figure,
    Trace,
    count_axis,
    head_switches,
    line,
    thinned,
    threshold_line,
)
from sigsoftmax.report.loading import Entry
from sigsoftmax.report.material import Material
from sigsoftmax.report.number_text import count_text, counted, number_text, seconds_text
from sigsoftmax.report.sections.section import Absent, Block, Section
from sigsoftmax.report.tables import Column, Fields, Table, head_cell
from sigsoftmax.report.theme import Looks, head_label, same_head

__all__ = ["section"]

Key = tuple[str, int, int, int, str]
"""language, contexts, words, seed and checksum of the truth"""
EQUAL = 0.01
"""KLs that differ by less than this fraction are called equal: two starts of one fit may differ as much"""
REACHED = 1e-4
"""nats that count as having reached the truth"""
SINGULAR_VALUES = 250
"""points of a drawn spectrum"""


def section(material: Material, looks: Looks) -> Section | Absent:
    groups: dict[Key, list[Entry[CapacityResult]]] = grouped(
        material.capacities,
        lambda e: (e.payload.language, e.payload.contexts, e.payload.words, e.payload.seed, e.payload.truth),
    )
    if not groups:
        return Absent("Capacity", "sigsoftmax demo")
    blocks: list[Block] = []
    findings: list[str] = []
    for number, (key, entries) in enumerate(groups.items(), start=1):
        language = _language(key, groups.keys())
        results = sorted((entry.payload for entry in entries), key=lambda r: r.width)
        environments = [entry.environment for entry in entries]
        given = (results, looks, environments, language)
        blocks += [
            _kl_figure(f"capacity-{number}-width", *given, by_width=True),
            _kl_figure(f"capacity-{number}-numbers", *given, by_width=False),
            _rank_figure(f"capacity-{number}-spectra", *given),
        ]
        findings += [f"{language}: {words}" if len(groups) > 1 else words for words in _findings(results)]
    return Section(
        id="capacity",
        title="Capacity: what a head can express",
        short="Capacity",
        lead="The KL divergence to a language of known truth that the best fit of each head reaches, with a free "
        "hidden vector for every context and free output weights. This is neither training nor generalisation: it says "
        "where a better perplexity can and cannot come from.",
        findings=findings,
        blocks=blocks,
        key_findings=2,
    )


def _language(key: Key, keys: Collection[Key]) -> str:
    language, contexts, words, seed, truth = key
    shown = f"{contexts:,} contexts, {words:,} words"
    if len(keys) > 1:
        shown += f", {language}, seed {seed}"
    # Files of one name may hold other distributions.
    if sum(other[:-1] == key[:-1] for other in keys) > 1:
        shown += f", checksum {truth or 'not known'}"
    return shown


def _by_head(results: Sequence[CapacityResult]) -> dict[str, list[CapacityResult]]:
    return grouped(results, lambda result: same_head(result.head))


def _kl_figure(
    name: str,
    results: Sequence[CapacityResult],
    looks: Looks,
    environments: Sequence[Environment],
    language: str,
    *,
    by_width: bool,
) -> Figure:
    field, unit = ("width", "width") if by_width else ("numbers_per_context", "numbers per context")
    traces = [
        line(
            [getattr(r, field) for r in curve],
            [r.fitted_kl for r in curve],
            looks[head],
            keys=(f"head:{head}",),
            markers=True,
            hover=unit + " %{x}<br>KL %{y:.4g} nats<br>%{text}",
            text=[_fit_text(r) for r in curve],
        )
        for head, curve in _by_head(results).items()
    ]
    return Figure(
        id=name,
        title="KL against the width" if by_width else f"KL against the free {unit}",
        summary=f"{language}. {(_kl_summary if by_width else _numbers_summary)(results)}",
        x=count_axis("width d" if by_width else f"free {unit}", {getattr(r, field) for r in results}),
        y=Axis(title="KL of the fit to the truth (nats)", log=True, settings={"tickformat": "~g"}),
        traces=traces,
        legend=head_switches(_by_head(results), looks),
        table=_table(results, looks, language),
        environments=environments,
    )


def _fit_text(result: CapacityResult) -> str:
    starts = f"worst start {number_text(result.worst_fitted_kl)}"
    limit = "" if result.limit_kl is None else f"; in the limit at most {number_text(result.limit_kl)}"
    return f"{starts}{limit}<br>rank {result.rank} of at most {result.rank_bound}"


def _kl_summary(results: Sequence[CapacityResult]) -> str:
    heads = _by_head(results)
    shared = _shared_widths(heads)
    if not shared:
        return f"{len(heads)} heads; no width is common to all of them."
    width = shared[(len(shared) - 1) // 2]
    here = sorted((r for r in results if r.width == width), key=lambda r: -r.fitted_kl)
    order = ", ".join(f"{head_label(r.head)} {number_text(r.fitted_kl, 3)}" for r in here)
    return f"At width {width}, from most to least KL in nats: {order}."


def _shared_widths(heads: Mapping[str, Sequence[CapacityResult]]) -> list[int]:
    return sorted(set.intersection(*({r.width for r in curve} for curve in heads.values())))


def _numbers_summary(results: Sequence[CapacityResult]) -> str:
    """Mixtures against softmax where their further vectors per context are counted as well."""
    curve = {r.width: r.fitted_kl for r in results if same_head(r.head) == "softmax"}
    mixtures = [r for r in results if r.numbers_per_context != r.width]
    if not curve or not mixtures:
        return "The same fits, against the numbers that each context may choose freely."
    mixed = "A mixture of K components chooses K vectors for each context."
    compared = [(r.fitted_kl, _interpolated(curve, r.numbers_per_context)) for r in mixtures]
    known = [(own, kl) for own, kl in compared if kl is not None and max(kl, own) > REACHED]
    if not known:
        return mixed
    better = sum(own < kl * (1.0 - EQUAL) for own, kl in known)
    worse = sum(own > kl * (1.0 + EQUAL) for own, kl in known)
    return (
        f"{mixed} At equal numbers per context a mixture has less KL than softmax in {better} of {len(known)} fits and "
        f"more in {worse}, with an output matrix that is about K times smaller."
    )


def _interpolated(curve: Mapping[int, float], place: float) -> float | None:
    """KL of softmax at a width between measured ones, straight on logarithmic axes."""
    below, above = [w for w in curve if w <= place], [w for w in curve if w >= place]
    if not below or not above:
        return None
    left, right = max(below), min(above)
    if left == right or curve[left] <= 0.0 or curve[right] <= 0.0:
        return curve[left] if left == right else None
    share = (math.log(place) - math.log(left)) / (math.log(right) - math.log(left))
    return math.exp((1.0 - share) * math.log(curve[left]) + share * math.log(curve[right]))


def _rank_figure(
    name: str, results: Sequence[CapacityResult], looks: Looks, environments: Sequence[Environment], language: str
) -> Figure:
    heads = _by_head(results)
    widths = sorted({r.width for r in results})
    complete = _shared_widths(heads) or widths
    selected = complete[(len(complete) - 1) // 2]
    traces = [_spectrum(r, looks) for r in results if r.singular_values and r.singular_values[0] > 0.0]
    some = results[0]
    if some.rank_threshold > 0.0 and some.singular_values and some.singular_values[0] > 0.0:
        longest = max(len(r.singular_values) for r in results)
        relative = some.rank_threshold / some.singular_values[0]
        traces.append(threshold_line([1, longest], relative, "rank threshold (float32)"))
    here = sorted((r for r in results if r.width == selected), key=lambda r: r.rank)
    ranks = ", ".join(f"{head_label(r.head)} {r.rank}" for r in here)
    return Figure(
        id=name,
        title="Singular values of log Q at a width",
        summary=f"{language}. At width {selected} the ranks by the paper's threshold are: {ranks}; other thresholds "
        "and the KL stand in the data of the figure. Lines end where rounding of float64 begins.",
        x=Axis(title="index of the singular value", log=False),
        y=Axis(title="relative to the largest", log=True, settings={"exponentformat": "power"}),
        traces=traces,
        legend=head_switches(heads, looks),
        choices=[Choice("Width", {f"width:{w}": str(w) for w in widths}, f"width:{selected}")],
        table=_table(here, looks, f"{language}, width {selected}"),
        environments=environments,
    )


def _spectrum(result: CapacityResult, looks: Looks) -> Trace:
    values = result.singular_values
    # Below it the values of a matrix of low rank are rounding errors of float64.
    floor = max(result.words, result.contexts) * 2.0**-52
    drawn = thinned([(i, value / values[0]) for i, value in enumerate(values, start=1)], SINGULAR_VALUES)
    return line(
        [i for i, _ in drawn],
        [value if value > floor else None for _, value in drawn],
        looks[result.head],
        keys=(f"head:{same_head(result.head)}", f"width:{result.width}"),
        hover=f"singular value %{{x}}: %{{y:.2e}} of the largest<br>rank {result.rank}, KL {result.fitted_kl:.4g}",
    )


def _table(results: Sequence[CapacityResult], looks: Looks, language: str) -> Table:
    fields: Fields[CapacityResult] = {
        Column("Head", "label"): lambda r: head_cell(r.head, looks),
        "Width": lambda r: str(r.width),
        "Numbers per context": lambda r: count_text(r.numbers_per_context),
        "Output parameters": lambda r: count_text(r.output_parameters),
        "Rank bound": lambda r: count_text(r.rank_bound),
        "Rank, the paper's (Press, float32)": lambda r: count_text(r.rank),
        "Rank, numpy's, float32": lambda r: count_text(_rank_by(r, "numpy32")),
        "Rank, numpy's, float64": lambda r: count_text(_rank_by(r, "numpy64")),
        "KL of the fit (nats)": lambda r: number_text(r.fitted_kl),
        "Worst start": lambda r: number_text(r.worst_fitted_kl),
        "At most, in the limit": lambda r: "" if r.limit_kl is None else number_text(r.limit_kl),
        "Time": lambda r: seconds_text(r.seconds),
    }
    in_order = sorted(results, key=lambda r: (r.width, -r.fitted_kl))
    note = (
        "Ranks: singular values of the log-probabilities of the fit above a threshold. Fits are made in float64, whose "
        "rounding lies below these thresholds."
    )
    return Table.of(in_order, fields, caption=f"Capacity: {language}", notes=[note])


def _rank_by(result: CapacityResult, rule: str) -> int:
    """Singular values above a threshold of ``RULES``."""
    relative = RULES[rule].relative(result.words, result.contexts)
    return sum(value > relative * result.singular_values[0] for value in result.singular_values)


# --- the words ----------------------------------------------------------------------------------------------------


def _findings(results: Sequence[CapacityResult]) -> list[str]:
    heads = _by_head(results)
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
    widths = counted(len(pairs), "width")
    largest = max(map(abs, changes))
    ranks = f"its rank by the paper's threshold is up to {max(gains):.1f} times that of softmax"
    if largest < EQUAL:
        return (
            f"sigsoftmax reaches the same KL as softmax within {largest:.2%} at {widths}, although {ranks}: "
            "the higher rank did not lower it."
        )
    between = f"{change_text(changes[0])} and {change_text(changes[-1])}"
    return f"sigsoftmax has between {between} KL than softmax at {widths}; {ranks}."


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
    parts = [f"{head_label(head)} {change_text(found[len(found) // 2])}" for head, found in others.items() if found]
    if not parts:
        return None
    return (
        "KL against softmax at equal width, median over the widths: " + "; ".join(parts) + ". A head that contains "
        "another goes on from its solution and so is fitted longer: gaps of a few percent may be the optimiser's."
    )


def change_text(difference: float) -> str:
    """A relative difference as less or more."""
    return f"{abs(difference):.1%} {'less' if difference <= 0.0 else 'more'}"
