"""Capacity: the KL that fits of each head reach at a width, and the rank they have there."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from sigsoftmax.records import Environment
from sigsoftmax.records.schemas.capacity import CapacityResult
from sigsoftmax.report.figures import Axis, Choice, Figure, Switch, Trace, count_axis, line, thinned, threshold_line
from sigsoftmax.report.material import Material
from sigsoftmax.report.section import Absent, Block, Section
from sigsoftmax.report.tables import Cell, Column, Row, Table, count_text, number_text, seconds_text
from sigsoftmax.report.theme import Looks, head_label, same_head, swatch

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
    groups: dict[Key, list[CapacityResult]] = {}
    environments: dict[Key, list[Environment]] = {}
    for entry in material.capacities:
        result = entry.payload
        key = (result.language, result.contexts, result.words, result.seed, result.truth)
        groups.setdefault(key, []).append(result)
        environments.setdefault(key, []).append(entry.environment)
    if not groups:
        return Absent("Capacity", "sigsoftmax demo")
    blocks: list[Block] = []
    findings: list[str] = []
    for number, (key, results) in enumerate(groups.items(), start=1):
        name = f"capacity-{number}"
        language = _language(key, groups.keys())
        results = sorted(results, key=lambda r: r.width)
        blocks += [
            _kl_figure(f"{name}-width", language, results, looks, environments[key], against="width"),
            _kl_figure(f"{name}-numbers", language, results, looks, environments[key], against="numbers"),
            _rank_figure(f"{name}-spectra", language, results, looks, environments[key]),
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
    heads: dict[str, list[CapacityResult]] = {}
    for result in results:
        heads.setdefault(same_head(result.head), []).append(result)
    return heads


def _legend(results: Sequence[CapacityResult], looks: Looks) -> list[Switch]:
    return [Switch(f"head:{head}", looks[head].label, True, looks[head]) for head in _by_head(results)]


def _kl_figure(
    name: str,
    language: str,
    results: Sequence[CapacityResult],
    looks: Looks,
    environments: Sequence[Environment],
    *,
    against: str,
) -> Figure:
    by_width = against == "width"
    traces = []
    for head, curve in _by_head(results).items():
        traces.append(
            line(
                [r.width if by_width else r.numbers_per_context for r in curve],
                [r.fitted_kl for r in curve],
                looks[head],
                keys=(f"head:{head}",),
                markers=True,
                hover=("width" if by_width else "numbers per context") + " %{x}<br>KL %{y:.4g} nats<br>%{text}",
                text=[_fit_text(r) for r in curve],
            )
        )
    ticks = {r.width if by_width else r.numbers_per_context for r in results}
    return Figure(
        id=name,
        title="KL against the width" if by_width else "KL against the free numbers per context",
        summary=_kl_summary(results, language) if by_width else _numbers_summary(results, language),
        x=count_axis("width d" if by_width else "free numbers per context", ticks),
        y=Axis(title="KL of the fit to the truth (nats)", log=True, settings={"tickformat": "~g"}),
        traces=traces,
        legend=_legend(results, looks),
        table=_table(results, looks, language),
        environments=environments,
    )


def _fit_text(result: CapacityResult) -> str:
    starts = f"worst start {number_text(result.worst_fitted_kl)}"
    limit = "" if result.limit_kl is None else f"; in the limit at most {number_text(result.limit_kl)}"
    return f"{starts}{limit}<br>rank {result.rank} of at most {result.rank_bound}"


def _kl_summary(results: Sequence[CapacityResult], language: str) -> str:
    heads = _by_head(results)
    shared = sorted(set.intersection(*({r.width for r in curve} for curve in heads.values())))
    if not shared:
        return f"{language}. {len(heads)} heads; no width is common to all of them."
    width = shared[(len(shared) - 1) // 2]
    here = sorted((r for r in results if r.width == width), key=lambda r: -r.fitted_kl)
    order = ", ".join(f"{head_label(r.head)} {number_text(r.fitted_kl, 3)}" for r in here)
    return f"{language}. At width {width}, from most to least KL in nats: {order}."


def _numbers_summary(results: Sequence[CapacityResult], language: str) -> str:
    """Who wins when a mixture's further vectors per context are counted as well."""
    single = [r for r in results if same_head(r.head) == "softmax"]
    mixtures = [r for r in results if r.numbers_per_context != r.width]
    if not single or not mixtures:
        return f"{language}. The same fits, against the numbers that each context may choose freely."
    curve = {r.width: r.fitted_kl for r in single}
    compared = [(r, _interpolated(curve, r.numbers_per_context)) for r in mixtures]
    known = [(r, kl) for r, kl in compared if kl is not None and max(kl, r.fitted_kl) > REACHED]
    if not known:
        return f"{language}. A mixture of K components chooses K vectors for each context."
    better = sum(r.fitted_kl < kl * (1.0 - EQUAL) for r, kl in known)
    worse = sum(r.fitted_kl > kl * (1.0 + EQUAL) for r, kl in known)
    return (
        f"{language}. A mixture of K components chooses K vectors for each context. At equal numbers per context a "
        f"mixture has less KL than softmax in {better} of {len(known)} fits and more in {worse}, with an output matrix "
        "that is about K times smaller."
    )


def _interpolated(curve: dict[int, float], place: float) -> float | None:
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
    name: str, language: str, results: Sequence[CapacityResult], looks: Looks, environments: Sequence[Environment]
) -> Figure:
    heads = _by_head(results)
    widths = sorted({r.width for r in results})
    complete = [w for w in widths if all(any(r.width == w for r in curve) for curve in heads.values())] or widths
    selected = complete[(len(complete) - 1) // 2]
    traces: list[Trace] = []
    for result in results:
        values = result.singular_values
        if not values or not values[0] > 0.0:
            continue
        places = thinned(len(values), SINGULAR_VALUES)
        keys = (f"head:{same_head(result.head)}", f"width:{result.width}")
        # Below it the values of a matrix of low rank are rounding errors of float64.
        floor = max(result.words, result.contexts) * 2.0**-52
        traces.append(
            line(
                [i + 1 for i in places],
                [values[i] / values[0] if values[i] / values[0] > floor else None for i in places],
                looks[result.head],
                keys=keys,
                hover="singular value %{x}: %{y:.2e} of the largest<br>"
                f"rank {result.rank}, KL {result.fitted_kl:.4g}",
            )
        )
    longest = max((len(r.singular_values) for r in results), default=1)
    some = results[0]
    largest = some.singular_values[0] if some.singular_values else 0.0
    relative = some.rank_threshold / largest if largest > 0.0 else 0.0
    if relative > 0.0:
        traces.append(threshold_line([1, longest], relative, "rank threshold (float32)"))
    here = sorted((r for r in results if r.width == selected), key=lambda r: r.rank)
    ranks = ", ".join(f"{head_label(r.head)} {r.rank}" for r in here)
    return Figure(
        id=name,
        title="Singular values of log Q at a width",
        summary=f"{language}. At width {selected} the measured ranks are: {ranks}. Lines end where rounding of float64 "
        "begins.",
        x=Axis(title="index of the singular value", log=False),
        y=Axis(title="relative to the largest", log=True, settings={"exponentformat": "power"}),
        traces=traces,
        legend=_legend(results, looks),
        choices=[Choice("Width", {f"width:{w}": str(w) for w in widths}, f"width:{selected}")],
        table=_table([r for r in results if r.width == selected], looks, f"{language}, width {selected}"),
        environments=environments,
    )


def _table(results: Sequence[CapacityResult], looks: Looks, language: str) -> Table:
    titles = ("Width", "Numbers per context", "Output parameters", "Rank bound", "Rank", "KL of the fit (nats)")
    rows = []
    for r in sorted(results, key=lambda r: (r.width, -r.fitted_kl)):
        mark = swatch(looks[r.head])
        rows.append(
            Row(
                (
                    Cell(looks[r.head].label, mark),
                    str(r.width),
                    count_text(r.numbers_per_context),
                    count_text(r.output_parameters),
                    count_text(r.rank_bound),
                    count_text(r.rank),
                    number_text(r.fitted_kl),
                    number_text(r.worst_fitted_kl),
                    "" if r.limit_kl is None else number_text(r.limit_kl),
                    seconds_text(r.seconds),
                )
            )
        )
    columns = [Column("Head", "label"), *(Column(t) for t in (*titles, "Worst start", "At most, in the limit", "Time"))]
    return Table(caption=f"Capacity: {language}", columns=columns, rows=rows)


# --- the words ----------------------------------------------------------------------------------------------------


def _findings(results: Sequence[CapacityResult]) -> list[str]:
    heads = _by_head(results)
    if "softmax" not in heads:
        return []
    lines = [_sigsoftmax(heads), _rank_beside_loss(results), _others(heads)]
    return [text for text in lines if text]


def _common(
    first: Sequence[CapacityResult], second: Sequence[CapacityResult]
) -> list[tuple[CapacityResult, CapacityResult]]:
    """Pairs at common widths that have not both reached the truth."""
    other = {r.width: r for r in second}
    pairs = [(r, other[r.width]) for r in first if r.width in other]
    return [(a, b) for a, b in pairs if max(a.fitted_kl, b.fitted_kl) > REACHED]


def _sigsoftmax(heads: dict[str, list[CapacityResult]]) -> str | None:
    pairs = _common(heads["softmax"], heads.get("sigsoftmax", []))
    if not pairs:
        return None
    differences = [b.fitted_kl / a.fitted_kl - 1.0 for a, b in pairs if a.fitted_kl > 0.0]
    gains = [b.rank / a.rank for a, b in pairs if a.rank]
    if not differences or not gains:
        return None
    widths = f"{len(pairs)} width{'s' if len(pairs) > 1 else ''}"
    largest = max(map(abs, differences))
    ranks = f"its numerical rank is up to {max(gains):.1f} times that of softmax"
    if largest < EQUAL:
        return (
            f"sigsoftmax reaches the same KL as softmax within {largest:.2%} at {widths}, although {ranks}: "
            "the higher rank did not lower it."
        )
    return (
        f"sigsoftmax has between {_change(min(differences))} and {_change(max(differences))} KL than softmax at "
        f"{widths}; {ranks}."
    )


def _rank_beside_loss(results: Sequence[CapacityResult]) -> str | None:
    """Said only if heads of nearly full rank at one width differ in KL."""
    widest: tuple[float, list[CapacityResult]] | None = None
    for width in {r.width for r in results}:
        here = [r for r in results if r.width == width and r.fitted_kl > REACHED]
        high = [r for r in here if r.rank >= 0.9 * min(r.words, r.contexts)]
        if len(high) > 1:
            ratio = max(r.fitted_kl for r in high) / min(r.fitted_kl for r in high)
            if widest is None or ratio > widest[0]:
                widest = (ratio, high)
    if widest is None or widest[0] < 1.0 + 10.0 * EQUAL:
        return None
    high = widest[1]
    low, most = min(high, key=lambda r: r.fitted_kl), max(high, key=lambda r: r.fitted_kl)
    return (
        "A higher rank does not by itself lower the loss: "
        f"{len(high)} heads have full or almost full rank at width {low.width}, with KL from "
        f"{number_text(low.fitted_kl, 3)} ({head_label(low.head)}) to {number_text(most.fitted_kl, 3)} "
        f"({head_label(most.head)})."
    )


def _others(heads: dict[str, list[CapacityResult]]) -> str | None:
    parts = []
    for head, curve in heads.items():
        pairs = _common(heads["softmax"], curve)
        if head in ("softmax", "sigsoftmax") or not pairs:
            continue
        changes = sorted(b.fitted_kl / a.fitted_kl - 1.0 for a, b in pairs if a.fitted_kl > 0.0)
        if changes:
            parts.append(f"{head_label(head)} {_change(changes[len(changes) // 2])}")
    if not parts:
        return None
    return (
        "KL against softmax at equal width, median over the widths: " + "; ".join(parts) + ". A head that contains "
        "another goes on from its solution and so is fitted longer: gaps of a few percent may be the optimiser's."
    )


def _change(difference: float) -> str:
    return f"{abs(difference):.1%} {'less' if difference < 0.0 else 'more'}"
