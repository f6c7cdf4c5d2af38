"""Pictures of measurements: horizontal bars, ours in colour, with targets and quartiles drawn in. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Kind = Literal["baseline", "ours with a target", "ours", "other"]

# Two blues and two greys differ in lightness, and the target's orange from all of them (Okabe and Ito's colours).
COLOURS: dict[Kind, str] = {
    "baseline": "#5A5A5A",
    "ours with a target": "#0072B2",
    "ours": "#8CC4E8",
    "other": "#BDBDBD",
}
TARGET, INK = "#D55E00", "#333333"
AIM_LINE, BASELINE_LINE = (0, (1.2, 1.0)), (0, (4, 2))
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#444444",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "ytick.major.size": 0,
    "figure.facecolor": "white",
}
LONGEST = 3.0
"""Ratios beyond it leave the picture, marked, so that those around 1 can be told apart."""
DIGEST = "Drawn from"
"""The text in a PNG that says which numbers it shows."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    name: str
    value: float
    spread: tuple[float, float] | None
    columns: tuple[str, ...]
    """texts to the right of it"""
    kind: Kind
    target: float | None
    aim: float | None


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One case."""

    title: str
    axis: str
    unit: Literal["x", "MiB"]
    bars: Sequence[Bar]


def draw(panels: Sequence[Panel], path: Path, digest: str) -> None:
    """Write the panels, one under the other, as a PNG; the same panels give the same bytes."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        heights = [0.27 * len(panel.bars) + 0.95 for panel in panels]
        figure = Figure(figsize=(8.4, sum(heights) + 0.3), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
        for axes, panel in zip(grid[:, 0], panels, strict=True):
            _draw_panel(axes, panel)
        _legend(grid[-1, 0], panels)
        figure.savefig(path, dpi=150, metadata={"Software": None, DIGEST: digest})


def drawn_from(path: Path) -> str | None:
    """The digest that a picture was drawn with; None if there is no such picture."""
    from PIL import Image

    if not path.is_file():
        return None
    with Image.open(path) as image:
        return image.info.get(DIGEST)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    ends = [max(bar.value, bar.target or 0.0, *(bar.spread or ())) for bar in panel.bars]
    reach = min(max(*ends, 1.0), LONGEST) if panel.unit == "x" else max(ends) or 1.0
    for place, bar in enumerate(panel.bars):
        axes.barh(place, min(bar.value, reach), height=0.72, color=COLOURS[bar.kind], linewidth=0)
        if bar.value > reach:
            axes.text(0.985 * reach, place, "»", va="center_baseline", ha="right", color="white", fontweight="bold")
        elif bar.spread and bar.spread[0] < bar.spread[1]:
            axes.plot(bar.spread, [place, place], color=INK, linewidth=1.3, solid_capstyle="butt")
        for bound, line in ((bar.target, "-"), (bar.aim, AIM_LINE)):
            if bound is not None:
                axes.plot([bound, bound], [place - 0.46, place + 0.46], color=TARGET, linewidth=2.2, linestyle=line)
        weight = "bold" if bar.kind == "ours with a target" else "normal"
        for column, text in enumerate(bar.columns):
            axes.annotate(
                text,
                (1.0, place),
                xycoords=axes.get_yaxis_transform(),
                xytext=(48 + 66 * column, 0),
                textcoords="offset points",
                ha="right",
                va="center_baseline",
                fontsize=9.5,
                color=INK,
                fontweight=weight,
            )
    if panel.unit == "x":
        axes.axvline(1.0, color=INK, linewidth=1.0, linestyle=BASELINE_LINE, zorder=0.9)
    axes.set_yticks(range(len(panel.bars)), [bar.name for bar in panel.bars])
    for label, bar in zip(axes.get_yticklabels(), panel.bars, strict=True):
        label.set_fontweight("bold" if bar.kind == "ours with a target" else "normal")
    axes.set_ylim(len(panel.bars) - 0.4, -0.6)
    axes.set_xlim(0, reach * 1.02)
    axes.grid(axis="x")
    # At the picture's edge, not the axes': names of cases are long. The empty title keeps the place.
    axes.set_title(" ")
    title = axes.annotate(
        panel.title,
        (0.0, 1.0),
        xycoords=("figure fraction", "axes fraction"),
        xytext=(5, 6),
        textcoords="offset points",
        fontsize=10,
        fontweight="bold",
    )
    title.set_in_layout(False)
    axes.set_xlabel(panel.axis, fontsize=9)
    axes.tick_params(axis="x", labelsize=9)


def _legend(axes: Axes, panels: Sequence[Panel]) -> None:
    from matplotlib.lines import Line2D

    bars = [bar for panel in panels for bar in panel.bars]
    marks = []
    if any(bar.target is not None for bar in bars):
        marks.append(Line2D([], [], color=TARGET, linewidth=2.2, label="target"))
    if any(bar.aim is not None for bar in bars):
        marks.append(Line2D([], [], color=TARGET, linewidth=2.2, linestyle=AIM_LINE, label="aim"))
    if any(panel.unit == "x" for panel in panels):
        marks.append(Line2D([], [], color=INK, linewidth=1.0, linestyle=BASELINE_LINE, label="baseline"))
        marks.append(Line2D([], [], color=INK, linewidth=1.3, label="quartiles"))
    if marks:
        axes.figure.legend(handles=marks, loc="outside lower right", ncols=len(marks), frameon=False, fontsize=9)
