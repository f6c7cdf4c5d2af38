"""Pictures of the whole runs: learning curves with the lead over softmax, and spectra. Needs matplotlib.

Colours and dashes of heads are those of the report. A picture holds the digest of its numbers, so that a check compares
numbers and not pixels, which differ between versions of matplotlib.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bars import DIGEST, INK, drawn_from
from whole_run_findings import averaging_text, lead_at
from whole_runs import HEADS, WholeRuns, last_epoch, spectra_of

from sigsoftmax.experiments.pictures import STYLE
from sigsoftmax.records.published import paper
from sigsoftmax.records.published.paper import Stage
from sigsoftmax.records.schemas.spectra import RULES
from sigsoftmax.records.statistics import Sample, perplexity
from sigsoftmax.report.material import corpus_label
from sigsoftmax.report.sections.perplexities import Variant
from sigsoftmax.report.sections.spectra import drawn_places
from sigsoftmax.report.theme import LIGHT, Look, same_head

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES, SPECTRA = "whole-runs.png", "whole-runs-spectra.png"
LINES = {"solid": "-", "dash": (0, (5, 2)), "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3))}
FIRST_EPOCH = 10
"""from which curves are drawn: before, they fall too steeply to be compared"""
STAGE_LABELS: dict[Stage, str] = {"trained": "trained", "finetuned": "finetuned", "dynamic evaluation": "dynamic"}
SHOWN_RULES = ("press32", "numpy32")
FAR = 3.0
"""A head whose perplexity is this many times the least is left out: the others would be one line."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line of points (x, y), with the look of a head."""

    label: str
    look: Look
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class CurvesPicture:
    """The content of the first picture, of one corpus."""

    title: str
    training: tuple[Curve, ...]
    """validation perplexity by epoch, the mean over seeds; finetuning goes on where training ended"""
    finetuning_from: int | None
    """the last epoch of training, where all runs have the same"""
    leads: tuple[Curve, ...]
    """validation perplexity relative to softmax by epoch of training, in percent"""
    stages: tuple[Curve, ...]
    """test perplexity relative to softmax at each stage, in percent: ours"""
    published: tuple[Curve, ...]
    """the paper's"""


@dataclass(frozen=True, kw_only=True)
class SpectraPicture:
    """Singular values over the largest, of the models of one corpus."""

    title: str
    curves: tuple[Curve, ...]
    lines: tuple[tuple[str, float], ...]
    """thresholds and noise floors: name and height"""


# --- what is drawn --------------------------------------------------------------------------------------------------


def curves_picture(runs: WholeRuns, corpus: str = "ptb") -> CurvesPicture | None:
    """None without a run."""
    variants = [variant for head in HEADS for variant in runs.variants(corpus, head)[:1]]
    drawn = {id(v): points for v in variants if (points := _validation(runs, v))}
    if not drawn:
        return None
    least = min(y for points in drawn.values() for _, y in points)
    variants = [v for v in variants if id(v) in drawn and min(y for _, y in drawn[id(v)]) <= FAR * least]
    looks = {id(v): runs.looks[v.run.head] for v in variants}
    ends = {last_epoch(variant) for variant in variants}
    softmax = next((v for v in variants if same_head(v.run.head) == "softmax"), None)
    others = [v for v in variants if softmax is not None and v is not softmax and v.setting == softmax.setting]
    return CurvesPicture(
        title=corpus_label(corpus),
        training=tuple(
            Curve(
                label=f"{looks[id(v)].label}: {averaging_text(v)}",
                look=looks[id(v)],
                points=drawn[id(v)],
            )
            for v in variants
        ),
        finetuning_from=ends.pop() if len(ends) == 1 else None,
        leads=tuple(
            Curve(label=looks[id(v)].label, look=looks[id(v)], points=_leads(runs, softmax, v))
            for v in others
            if softmax is not None
        ),
        stages=tuple(
            Curve(label=looks[id(v)].label, look=looks[id(v)], points=_stages(runs, corpus, v)) for v in others
        ),
        published=tuple(
            Curve(label=looks[id(v)].label, look=looks[id(v)], points=_published(corpus, v.run.head)) for v in others
        ),
    )


def _validation(runs: WholeRuns, variant: Variant) -> tuple[tuple[float, float], ...]:
    """Epochs that every seed has."""
    points, offset = [], 0
    for phase in ("train", "finetune"):
        curves = [curve for seed in variant.epochs if (curve := runs.curve(variant, phase, seed))]
        if not curves:
            continue
        common = sorted(set.intersection(*map(set, curves)))
        for epoch in common:
            mean = Sample.of([perplexity(curve[epoch].valid_loss) for curve in curves]).mean
            points.append((float(offset + epoch), mean))
        offset = max(common, default=0)
    return tuple(point for point in points if point[0] >= FIRST_EPOCH)


def _leads(runs: WholeRuns, softmax: Variant, other: Variant) -> tuple[tuple[float, float], ...]:
    seeds = sorted(softmax.epochs.keys() & other.epochs.keys())
    epochs = range(1, min(last_epoch(softmax), last_epoch(other)) + 1)
    found = [(epoch, lead_at(runs, softmax, other, seeds, epoch)) for epoch in epochs]
    return tuple((float(epoch), 100.0 * lead.perplexity_change) for epoch, lead in found if lead is not None)


def _stages(runs: WholeRuns, corpus: str, variant: Variant) -> tuple[tuple[float, float], ...]:
    head = same_head(variant.run.head)
    gaps = {g.stage: g for g in runs.gaps(corpus) if (g.first, g.second, g.split) == ("softmax", head, "test")}
    return tuple((float(place), 100.0 * gaps[s].relative) for place, s in enumerate(paper.STAGES) if s in gaps)


def _published(corpus: str, head: str) -> tuple[tuple[float, float], ...]:
    gaps = [paper.published_gap(corpus, "softmax", same_head(head), stage, "test") for stage in paper.STAGES]
    return tuple(
        (float(place), 100.0 * (gap.second.mean / gap.first.mean - 1.0))
        for place, gap in enumerate(gaps)
        if gap is not None
    )


def spectra_pictures(runs: WholeRuns) -> list[SpectraPicture]:
    """One for each corpus that has spectra; the first seed of every head."""
    found = []
    for corpus in runs.corpora:
        curves, heights, floors = [], {}, []
        for head in HEADS:
            for variant in runs.variants(corpus, head)[:1]:
                models = [m for seed in sorted(variant.epochs) for m in spectra_of(runs, variant.run, seed)]
                for m in models[:1]:
                    s = m.spectrum
                    count = s.count("press32").rank
                    points = [(p + 1.0, s.singular_values[p] / s.largest) for p in drawn_places(s.singular_values)]
                    look = runs.looks[m.run.head]
                    rank = "below noise" if count is None else f"{count:,}"
                    label = f"{look.label}: rank {rank} by the paper's threshold"
                    curves.append(Curve(label=label, look=look, points=tuple(p for p in points if p[1] > 0.0)))
                    heights |= {RULES[rule].name: RULES[rule].relative(s.words, s.contexts) for rule in SHOWN_RULES}
                    floors.append(s.noise_floor / s.largest)
        if curves:
            names = {"press32": "the paper's threshold", "numpy32": "numpy's threshold, float32"}
            lines = [*((names[rule], height) for rule, height in heights.items()), ("noise floor", max(floors))]
            found.append(SpectraPicture(title=corpus_label(corpus), curves=tuple(curves), lines=tuple(lines)))
    return found


# --- drawing --------------------------------------------------------------------------------------------------------


def draw_curves(picture: CurvesPicture, path: Path) -> None:
    def left(axes: Axes) -> None:
        for curve in picture.training:
            _line(axes, curve)
        if picture.finetuning_from is not None:
            _mark(axes, picture.finetuning_from, "finetuning")
        values = [y for curve in picture.training for _, y in curve.points]
        axes.set_yscale("log")
        axes.set_ylim(0.98 * min(values), min(max(values), 1.6 * min(values)))
        ticks = [t for t in (*range(20, 100, 5), *range(100, 300, 20)) if min(values) <= t <= 1.6 * min(values)]
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("epoch")
        axes.set_title(f"Validation perplexity, {picture.title}")
        axes.legend(frameon=False, fontsize=9, title="averages from epoch", title_fontsize=9)

    def middle(axes: Axes) -> None:
        for curve in picture.leads:
            _line(axes, curve)
        _baseline(axes)
        axes.set_xlabel("epoch of training")
        axes.set_title("Relative to softmax, validation (%)")
        axes.legend(frameon=False, fontsize=9)

    def right(axes: Axes) -> None:
        for curve in picture.stages:
            x, y = zip(*curve.points, strict=True) if curve.points else ((), ())
            axes.plot(x, y, "o-", color=_color(curve.look), markersize=7, label=f"{curve.label}, ours")
        for curve in picture.published:
            x, y = zip(*curve.points, strict=True) if curve.points else ((), ())
            if x:
                style = {"markerfacecolor": "white", "linestyle": ":", "marker": "D", "markersize": 7}
                axes.plot(x, y, color=_color(curve.look), label=f"{curve.label}, paper", **style)
        _baseline(axes)
        axes.set_xlim(-0.4, 2.4)
        axes.set_xticks(range(3), [STAGE_LABELS[stage] for stage in paper.STAGES])
        axes.set_title("Relative to softmax, test (%)")
        axes.legend(frameon=False, fontsize=9)

    panels: list[Callable[[Axes], None]] = [left]
    if picture.leads:
        panels += [middle, right]
    _figure(panels, path, digest(picture), [1.35, 1.15, 1.0][: len(panels)])


def draw_spectra(pictures: Sequence[SpectraPicture], path: Path) -> None:
    def panel(picture: SpectraPicture) -> Callable[[Axes], None]:
        def drawn(axes: Axes) -> None:
            for curve in picture.curves:
                _line(axes, curve)
            for name, height in picture.lines:
                axes.axhline(height, color=INK, linewidth=0.9, linestyle=(0, (1, 2)))
                # High lines are crossed by the curves on the left, low ones on the right.
                x, side = (1.0, "right") if height > 1e-3 else (0.0, "left")
                place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": side}
                axes.annotate(name, (x, height), xytext=(-4 if x else 4, 3), fontsize=8.5, color=INK, **place)
            axes.set_xscale("log")
            axes.set_yscale("log")
            lowest = min(height for _, height in picture.lines)
            axes.set_ylim(lowest / 30.0, 3.0)
            axes.set_xlabel("index of the singular value")
            axes.set_ylabel("singular value / largest")
            axes.set_title(f"Log-output matrices on the test text of {picture.title}")
            axes.legend(frameon=False, fontsize=9, loc="upper right")

        return drawn

    _figure([panel(picture) for picture in pictures], path, digest(pictures), [1.0] * len(pictures), width=7.5)


def _figure(
    panels: Sequence[Callable[[Axes], None]], path: Path, digest: str, ratios: Sequence[float], width: float = 3.7
) -> None:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({**STYLE, "axes.titlesize": 10}):  # type: ignore[arg-type]
        figure = Figure(figsize=(width * len(panels), 3.7), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(1, len(panels), squeeze=False, width_ratios=list(ratios))
        for axes, panel in zip(grid[0], panels, strict=True):
            panel(axes)
        figure.savefig(path, dpi=150, metadata={"Software": None, DIGEST: digest})


def _color(look: Look) -> str:
    return LIGHT[f"s{look.slot}"]


def _line(axes: Axes, curve: Curve) -> None:
    x, y = zip(*curve.points, strict=True)
    style = {"color": _color(curve.look), "linestyle": LINES[curve.look.dash], "linewidth": 0.8 * curve.look.width}
    axes.plot(x, y, label=curve.label, **style)


def _mark(axes: Axes, x: float, text: str) -> None:
    axes.axvline(x, color=INK, linewidth=0.9, linestyle=(0, (1, 2)))
    place = {"xycoords": ("data", "axes fraction"), "xytext": (-4, 0), "textcoords": "offset points"}
    axes.annotate(text, (x, 0.4), rotation=90, ha="right", va="center", fontsize=8.5, color=INK, **place)


def _baseline(axes: Axes) -> None:
    axes.axhline(0.0, color=INK, linewidth=0.9)


# --- bringing them up to date ---------------------------------------------------------------------------------------


def digest(drawn: CurvesPicture | Sequence[SpectraPicture]) -> str:
    parts = [drawn] if isinstance(drawn, CurvesPicture) else drawn
    return hashlib.sha256(json.dumps([dataclasses.asdict(part) for part in parts]).encode()).hexdigest()


def pictures(runs: WholeRuns, folder: Path, *, check: bool) -> list[str]:
    """Draw what is not what the records give, or only look; returns the names of those pictures."""
    stale = []
    curves, spectra = curves_picture(runs), spectra_pictures(runs)
    if curves is not None and drawn_from(folder / CURVES) != digest(curves):
        stale.append(CURVES)
        if not check:
            draw_curves(curves, folder / CURVES)
    if spectra and drawn_from(folder / SPECTRA) != digest(spectra):
        stale.append(SPECTRA)
        if not check:
            draw_spectra(spectra, folder / SPECTRA)
    return stale


def picture_text(runs: WholeRuns) -> str:
    """The first picture in Markdown, with what it shows in words."""
    curves = curves_picture(runs)
    if curves is None:
        return ""
    ends = ", ".join(f"{curve.look.label} {curve.points[-1][1]:.2f}" for curve in curves.training)
    words = f"Learning curves on {curves.title} (last validation perplexity: {ends}), and the difference from softmax"
    return f"![{words}](images/{CURVES})\n"


def spectra_text(runs: WholeRuns) -> str:
    found = spectra_pictures(runs)
    if not found:
        return ""
    words = "; ".join(f"{picture.title}: {', '.join(curve.label for curve in picture.curves)}" for picture in found)
    return f"![Singular values of log-output matrices. {words}](images/{SPECTRA})\n"
