"""The picture of time against memory: each mode of ours as a line through its chunk sizes, the others as points.

A loss that holds fewer logits at a time needs less memory and more time. The picture shows that trade for ours, and
where the others stand beside it. It is drawn from the case "time against memory" of the GPU benchmark; where the
records have none yet, from the case that has the modes with one or two chunk sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bars import DIGEST, INK, STYLE
from measuring import Measurement
from overview import LINEAR, OTHERS, WIDE, Suites, first_of
from write_docs import CaseResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SWEEP = "time against memory, "
"""the beginning of the names of the cases that have several chunk sizes"""
FLOOR = "three matrix products alone"
MODES = {"fast": "#0072B2", "exact": "#009E73", "buffered": "#CC79A7", "default": "#D55E00"}
"""colours of Okabe and Ito"""
NAMES = {"float32 buffer": "buffered"}
"""modes that some cases call otherwise"""
MARKS = {"torch": "s", "torch.compile": "D", "Liger": "^", "cut-cross-entropy": "v"}
LEAST_MIB = 1.0


@dataclass(frozen=True, kw_only=True)
class Points:
    """The cost of one mode, or of one of the others: (MiB, milliseconds), one point for each chunk size."""

    name: str
    is_ours: bool
    places: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One problem size."""

    title: str
    member: str
    """our member: softmax where it was measured in every mode, else sigsoftmax, which is no faster"""
    floor: float | None
    """milliseconds of the matrix products alone"""
    points: tuple[Points, ...]


def panels(suites: Suites) -> list[Panel]:
    """One panel for each size that was measured."""
    found = []
    for name in (LINEAR, WIDE):
        case = suites.gpu.get(f"{SWEEP}{name}") or suites.gpu.get(name)
        if case is not None:
            found.append(_panel(case, name))
    return found


def _panel(case: CaseResult, name: str) -> Panel:
    member = "softmax" if case.name.startswith(SWEEP) else "sigsoftmax"
    modes: dict[str, list[Measurement]] = {}
    for m in case.rows:
        own, mode, *_ = [*m.implementation.split(", "), ""]
        mode = NAMES.get(mode, mode)
        if own == f"ours {member}" and mode in MODES:
            modes.setdefault(mode, []).append(m)
    others = {other: first_of(case, rows) for other, rows in OTHERS.items()}
    floor = case.by_name.get(FLOOR)
    sizes = name[name.index("N=") :]
    return Panel(
        title=sizes,
        member=member,
        floor=None if floor is None else floor.milliseconds,
        points=(
            *(_points(mode, rows, is_ours=True) for mode, rows in modes.items()),
            *(_points(other, [m], is_ours=False) for other, m in others.items() if m is not None),
        ),
    )


def _points(name: str, rows: Sequence[Measurement], *, is_ours: bool) -> Points:
    places = sorted((max(m.peak_mib or 0.0, LEAST_MIB), m.milliseconds) for m in rows)
    return Points(name=name, is_ours=is_ours, places=tuple(places))


def draw(drawn: Sequence[Panel], path: Path, digest: str) -> None:
    """Write the panels side by side as a PNG; the same panels give the same bytes."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({**STYLE, "axes.spines.left": True}):  # type: ignore[arg-type]
        figure = Figure(figsize=(4.9 * len(drawn), 3.7), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(1, len(drawn), squeeze=False)
        for axes, panel in zip(grid[0], drawn, strict=True):
            _draw_panel(axes, panel)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=4, frameon=False, fontsize=9)
        figure.savefig(path, dpi=150, metadata={"Software": None, DIGEST: digest})


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for points in panel.points:
        x, y = [place[0] for place in points.places], [place[1] for place in points.places]
        if points.is_ours:
            label = f"{points.name} mode" if points.name != "default" else "default mode of this package"
            axes.plot(x, y, "o-", color=MODES[points.name], markersize=6, linewidth=1.8, zorder=3, label=label)
        else:
            axes.plot(x, y, MARKS[points.name], color="#5A5A5A", markersize=7, zorder=2)
            place = {"xytext": (8, -3.5), "textcoords": "offset points", "ha": "left"}
            axes.annotate(points.name, (x[0], y[0]), fontsize=8.5, color=INK, **place)
    highest = max(y for points in panel.points for _, y in points.places)
    lowest = min(y for points in panel.points for _, y in points.places)
    if panel.floor is not None:
        lowest = min(lowest, panel.floor)
        axes.axhline(panel.floor, color=INK, linewidth=1.0, linestyle=(0, (4, 2)), zorder=1)
        place = {"xycoords": ("axes fraction", "data"), "xytext": (0, -12), "textcoords": "offset points"}
        axes.annotate("three matrix products alone", (0.02, panel.floor), fontsize=8.5, color=INK, **place)
    axes.set_xscale("log")
    axes.set_xlim(0.5, 150_000)
    axes.set_ylim(0.75 * lowest, 1.12 * highest)
    axes.set_xticks([1, 10, 100, 1_000, 10_000], ["1", "10", "100", "1,000", "10,000"])
    axes.minorticks_off()
    axes.grid(True)
    axes.set_xlabel("peak memory beyond inputs and their gradients (MiB)", fontsize=9)
    axes.set_ylabel("forward and backward (ms)", fontsize=9)
    axes.set_title(f"{panel.title}, ours with {panel.member}", fontsize=9.5, pad=8)
