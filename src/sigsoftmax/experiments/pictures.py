"""The demo's pictures: singular values at one width, and KL against the width. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sigsoftmax.analysis.capacity import CapacityResult
from sigsoftmax.analysis.spectrum import Spectrum

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_bottleneck"]


class Look(NamedTuple):
    label: str
    color: str
    line: str = "-"
    size: float = 1.8


# Okabe and Ito's colours, which people with any colour vision can tell apart. softmax is broad, so that what lies on
# it can be seen.
LOOKS = {
    "softmax": Look("softmax", "#000000", size=4.5),
    "sigsoftmax": Look("sigsoftmax", "#E69F00", (0, (3, 1.5)), 2.2),  # type: ignore[arg-type]
    "shifted_sigsoftmax(b=per_class)": Look("sigsoftmax, shift per class", "#CC79A7"),
    "gss(k=0.2)": Look("gss k = 0.2", "#56B4E9"),
    "gss(k=0.0)": Look("gss k = 0", "#0072B2"),
    "mos(K=4)": Look("MoS, 4 components", "#009E73"),
    "moss(K=4)": Look("MoSS, 4 components", "#D55E00", (0, (3, 1.5))),  # type: ignore[arg-type]
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
            figure = Figure(figsize=(6.6 * len(panels), 5.0), layout="constrained")
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
    axes.plot(x, y, color=look.color, linestyle=look.line, linewidth=look.size, solid_capstyle="round", **more)


def _singular_values(axes: Axes, results: Sequence[CapacityResult], truth: Spectrum, width: int) -> None:
    here = [result for result in results if result.width == width]
    top = max(truth.largest, *(result.singular_values[0] for result in here))
    lowest = top * 1e-10
    for result in here:
        look = _look(result.head)
        # Below float64's noise the values of a matrix of low rank are rounding errors.
        kept = [value if value > lowest else lowest / 30.0 for value in result.singular_values]
        _plot(axes, range(1, len(kept) + 1), kept, look)
    _plot(axes, range(1, len(truth.singular_values) + 1), [max(v, lowest / 30) for v in truth.singular_values], TRUTH)
    threshold = max(result.rank_threshold for result in here)
    axes.axhline(threshold, color="#444444", linewidth=0.9, linestyle=(0, (1, 2)))
    axes.annotate(
        "threshold of the numerical rank (float32)",
        (1.0, threshold),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
        color="#444444",
    )
    axes.set_yscale("log")
    axes.set_ylim(lowest, top * 3.0)
    axes.set_xlim(0, len(truth.singular_values) * 1.01)
    axes.set_xlabel("index of the singular value")
    axes.set_ylabel("singular value of log Q")
    axes.set_title(f"Rank: sigsoftmax breaks the cliff of softmax (d = {width})")


def _kl_curves(axes: Axes, results: Sequence[CapacityResult], width: int) -> None:
    heads = list(dict.fromkeys(result.head for result in results))
    ends: list[tuple[float, float, Look]] = []
    for head in heads:
        look = _look(head)
        curve = sorted((result.width, result.kl) for result in results if result.head == head)
        _plot(axes, [d for d, _ in curve], [max(kl, KL_SHOWN / 30.0) for _, kl in curve], look)
        at_width = dict(curve).get(width)
        if at_width is not None:
            ends.append((width, at_width, look))
    axes.axvline(width, color="#444444", linewidth=0.9, linestyle=(0, (1, 2)))
    for x, y, look in ends:
        axes.plot([x], [y], "o", color=look.color, markersize=5, zorder=5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(KL_SHOWN, 2.5)
    ticks = sorted({result.width for result in results if result.head != "softmax"})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("width d")
    axes.set_ylabel("least KL to the truth (nats)")
    axes.set_title("Loss: sigsoftmax lies on softmax")
    handles = [
        axes.plot([], [], color=look.color, linestyle=look.line, linewidth=look.size, label=look.label)[0]
        for look in (*map(_look, heads), TRUTH)
    ]
    axes.legend(handles=handles, loc="lower left", frameon=False, fontsize=9.5)
