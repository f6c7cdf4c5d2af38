"""Capacity: the KL that fits of each head reach at a width, and the rank they have there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sigsoftmax.records import Environment
from sigsoftmax.records.grouping import grouped
from sigsoftmax.records.schemas.capacity import CapacityResult, softmax_width_of_equal_kl
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
from sigsoftmax.report.findings.capacity import EQUAL, REACHED, by_head, findings, fits_table, kl_table, softmax_curve
from sigsoftmax.report.loading import Entry
from sigsoftmax.report.material import Material
from sigsoftmax.report.number_text import number_text
from sigsoftmax.report.sections.section import Absent, Block, Section
from sigsoftmax.report.theme import Looks, head_label, same_head

__all__ = ["section"]

Key = tuple[str, int, int, int, str]
"""language, contexts, words, seed and checksum of the truth"""
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
    told: list[str] = []
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
        told += [f"{language}: {text}" if len(groups) > 1 else text for text in findings(results)]
    return Section(
        id="capacity",
        title="Capacity: what a head can express",
        short="Capacity",
        lead="The KL divergence to a language of known truth that the best fit of each head reaches, with a free "
        "hidden vector for every context and free output weights. This is neither training nor generalisation: it says "
        "where a better perplexity can and cannot come from.",
        findings=told,
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
        for head, curve in by_head(results).items()
    ]
    return Figure(
        id=name,
        title="KL against the width" if by_width else f"KL against the free {unit}",
        summary=f"{language}. {(_kl_summary if by_width else _numbers_summary)(results)}",
        x=count_axis("width d" if by_width else f"free {unit}", {getattr(r, field) for r in results}),
        y=Axis(title="KL of the fit to the truth (nats)", log=True, settings={"tickformat": "~g"}),
        traces=traces,
        legend=head_switches(by_head(results), looks),
        table=kl_table(results, looks, caption=f"KL of every fit: {language}", by_width=by_width),
        environments=environments,
    )


def _fit_text(result: CapacityResult) -> str:
    starts = f"worst start {number_text(result.worst_fitted_kl)}"
    limit = "" if result.limit_kl is None else f"; in the limit at most {number_text(result.limit_kl)}"
    return f"{starts}{limit}<br>rank {result.rank} of at most {result.rank_bound}"


def _kl_summary(results: Sequence[CapacityResult]) -> str:
    heads = by_head(results)
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
    curve = softmax_curve(results)
    mixtures = [r for r in results if r.numbers_per_context != r.width]
    if not curve or not mixtures:
        return "The same fits, against the numbers that each context may choose freely."
    mixed = "A mixture of K components chooses K vectors for each context."

    def worth(kl: float) -> float:
        return softmax_width_of_equal_kl(kl, curve, floor=REACHED)

    inside = [r for r in mixtures if min(curve) <= r.numbers_per_context <= max(curve) and r.fitted_kl >= 0.0]
    known = [r for r in inside if r.fitted_kl > REACHED or worth(REACHED) > r.numbers_per_context]
    if not known:
        return mixed
    better = sum(worth(r.fitted_kl / (1.0 - EQUAL)) > r.numbers_per_context for r in known)
    worse = sum(worth(r.fitted_kl / (1.0 + EQUAL)) < r.numbers_per_context for r in known)
    return (
        f"{mixed} At equal numbers per context a mixture has less KL than softmax in {better} of {len(known)} fits and "
        f"more in {worse}, with an output matrix that is about K times smaller."
    )


def _rank_figure(
    name: str, results: Sequence[CapacityResult], looks: Looks, environments: Sequence[Environment], language: str
) -> Figure:
    heads = by_head(results)
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
        summary=f"{language}. At width {selected} the ranks by the paper's threshold are: {ranks}; other "
        "widths and thresholds stand in the data of the figure. Lines end where rounding of float64 begins.",
        x=Axis(title="index of the singular value", log=False),
        y=Axis(title="relative to the largest", log=True, settings={"exponentformat": "power"}),
        traces=traces,
        legend=head_switches(heads, looks),
        choices=[Choice("Width", {f"width:{w}": str(w) for w in widths}, f"width:{selected}")],
        table=fits_table(results, looks, caption=f"Every fit: {language}"),
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
