"""The demo's pictures: singular values at one width, and KL against the width. Needs matplotlib."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sigsoftmax.records.schemas.capacity import CapacityResult
from sigsoftmax.records.schemas.spectra import Spectrum
from sigsoftmax.report.findings.capacity import EQUAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_bottleneck"]


class Look(NamedTuple):
    label: str
    color: str
    line: str = "-"
    size: float = 1.8
    level: float = 3.0
    """curves of a higher level are drawn over others"""


# Okabe and Ito's colours, which people with any colour vision can tell apart. softmax is broad, so that what lies on
# it can be seen.
LOOKS = {
    "softmax": Look("softmax", "#000000", size=4.5, level=1.0),
    "sigsoftmax": Look("sigsoftmax", "#E69F00", (0, (3, 1.5)), 2.2, 4.0),  # type: ignore[arg-type]
    "shifted_sigsoftmax(b=per_class)": Look("shift per class", "#CC79A7", level=2.0),
    "gss(k=0.2)": Look("gss k = 0.2", "#56B4E9"),
    "gss(k=0.0)": Look("gss k = 0", "#0072B2"),
    "mos(K=4)": Look("MoS, K = 4", "#009E73"),
    "moss(K=4)": Look("MoSS, K = 4", "#D55E00", (0, (3, 1.5))),  # type: ignore[arg-type]
}
TRUTH = Look("the truth", "#8A8A8A", ":", 2.2)
STYLE = {
    "font.size": 10.5,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "figure.facecolor": "white",
    "svg.hashsalt": "sigsoftmax",
}
KL_SHOWN = 1e-3
"""Below it a curve leaves the picture: nothing there would be seen in a perplexity."""


def draw_bottleneck(results: Sequence[CapacityResult], truth: Spectrum, width: int, folder: Path) -> list[Path]:
    """Write both panels as one figure and each alone, as PNG and SVG; ImportError without matplotlib."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def left(axes: Axes) -> None:
        _singular_values(axes, results, truth, width)

    def right(axes: Axes) -> None:
        _kl_curves(axes, results, width)

    figures: dict[str, tuple[Callable[[Axes], None], ...]] = {
        "bottleneck": (left, right),
        "singular_values": (left,),
        "kl_against_width": (right,),
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        for name, panels in figures.items():
            figure = Figure(figsize=(7.0 * len(panels), 5.0), layout="constrained")
            FigureCanvasAgg(figure)
            for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
                panel(axes)
            for suffix in ("png", "svg"):
                path = folder / f"{name}.{suffix}"
                figure.savefig(path, dpi=160, metadata={"Date": None} if suffix == "svg" else None)
                written.append(path)
    return written


def _look(head: str) -> Look:
    return LOOKS.get(head, Look(head, "#555555", "-."))


def _plot(axes: Axes, x: Sequence[float], y: Sequence[float], look: Look, **more: Any) -> None:
    more = {"color": look.color, "linestyle": look.line, "linewidth": look.size, "zorder": look.level, **more}
    axes.plot(x, y, solid_capstyle="round", **more)


def _singular_values(axes: Axes, results: Sequence[CapacityResult], truth: Spectrum, width: int) -> None:
    here = [result for result in results if result.width == width]
    top = max(truth.largest, *(result.singular_values[0] for result in here))
    lowest = top * 1e-11
    axes.set_yscale("log")
    axes.set_ylim(lowest, top * 3.0)
    axes.set_xlim(0, len(truth.singular_values))
    threshold = max(result.rank_threshold for result in here)
    axes.axhline(threshold, color="#444444", linewidth=0.9, linestyle=(0, (1, 2)))
    axes.annotate(
        "rank threshold (float32)",
        (0.14, threshold),
        xycoords=("axes fraction", "data"),
        xytext=(0, -11),
        textcoords="offset points",
        fontsize=8.5,
        color="#444444",
    )
    curves = [(_look(result.head), result.singular_values, result.rank) for result in here]
    curves.append((TRUTH, truth.singular_values, truth.press32_rank))
    ends: list[tuple[float, str, str]] = []
    for look, values, rank in curves:
        # Below float64's noise the values of a matrix of low rank are rounding errors: the line leaves the picture.
        _plot(axes, range(1, len(values) + 1), [value if value > lowest else lowest / 30.0 for value in values], look)
        text = f"{look.label}: {rank}"
        if values[-1] > lowest:
            ends.append((values[-1], text, look.color))
        else:
            axes.annotate(text, (rank + 2.5, lowest * 30.0), color=look.color, fontsize=9.5, fontweight="bold")
    _label_ends(axes, ends)
    axes.set_xlabel("index of the singular value")
    axes.set_ylabel("singular value of log Q")
    ranks = {result.head: result.rank for result in here}
    breaks = ranks.get("sigsoftmax", 0) > ranks.get("softmax", 0)
    claim = "sigsoftmax breaks the cliff of softmax" if breaks else "singular values of log Q"
    axes.set_title(f"Rank: {claim} (d = {width})")


def _label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Labels beside the right ends of curves, pushed down where they would lie on each other."""
    low, high = (math.log10(limit) for limit in axes.get_ylim())
    gap, place = 0.052, 1.0

    def beside(text: str, height: float, color: str, weight: str) -> None:
        axes.annotate(
            text, (1.02, height), xycoords="axes fraction", va="center", color=color, fontsize=9.5, fontweight=weight
        )

    for number, (value, text, color) in enumerate(sorted(ends, reverse=True)):
        place = min((math.log10(value) - low) / (high - low), place - gap)
        if number == 0:
            beside("measured rank:", place + gap, "#444444", "normal")
        beside(text, place, color, "bold")


def _kl_curves(axes: Axes, results: Sequence[CapacityResult], width: int) -> None:
    looks = {result.head: _look(result.head) for result in results}
    # Between few widths a straight line lies below a bent curve, so all are drawn through the same widths.
    shared = set.intersection(*({r.width for r in results if r.head == head} for head in looks))
    shown = [result for result in results if result.width in shared]
    highest = max(result.worst_fitted_kl for result in shown)
    for head, look in looks.items():
        curve = sorted((one.width, one.fitted_kl, one.worst_fitted_kl) for one in shown if one.head == head)
        # A KL below the picture is drawn far enough below it for its line to leave it.
        x, best, worst = np.maximum(np.array(curve), KL_SHOWN / 30.0).T
        axes.fill_between(x, best, worst, color=look.color, alpha=0.15, linewidth=0, zorder=look.level)
        _plot(axes, x, best, look, marker="o", markersize=4.0)
    axes.axvline(width, color="#444444", linewidth=0.9, linestyle=(0, (1, 2)))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(KL_SHOWN, highest * 1.4)
    _label_widths(axes, sorted(shared))
    axes.set_xlabel("width d")
    axes.set_ylabel("KL of the fit to the truth (nats)")
    axes.set_title("Loss: sigsoftmax lies on softmax" if _coincide(results) else "Loss: best fit, shaded to the worst")
    for look in looks.values():
        axes.plot([], [], color=look.color, linestyle=look.line, linewidth=look.size, label=look.label)
    axes.legend(loc="lower left", frameon=False, fontsize=9.5)


def _label_widths(axes: Axes, widths: Sequence[int]) -> None:
    """Ticks at the widths; of those that lie close together the last has a label."""
    crowded = {width for width, following in itertools.pairwise(widths) if following < 1.4 * width}
    axes.set_xticks(widths, ["" if width in crowded else str(width) for width in widths])
    axes.minorticks_off()


def _coincide(results: Sequence[CapacityResult]) -> bool:
    """True if the fits of sigsoftmax and softmax have equal KL at every common width shown."""
    softmax, sigsoftmax = (
        {r.width: r.fitted_kl for r in results if r.head == head} for head in ("softmax", "sigsoftmax")
    )
    shown = [width for width in sigsoftmax.keys() & softmax.keys() if softmax[width] > KL_SHOWN]
    return bool(shown) and all(abs(sigsoftmax[width] / softmax[width] - 1.0) < EQUAL for width in shown)
