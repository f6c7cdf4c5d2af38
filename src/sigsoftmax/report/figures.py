"""A figure: traces for plotly, what may be switched in it, its words, its data as a table, and its origin.

Colours in traces are references such as ``@s3`` or ``@ink/0.2`` that the page resolves for its theme. A trace is seen
when all of its keys are on; legend entries, switches and choices turn keys on and off.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sigsoftmax.records import Environment
from sigsoftmax.report.markup import Child, Markup, join, plot_text, tag
from sigsoftmax.report.provenance import made_by
from sigsoftmax.report.tables import Table
from sigsoftmax.report.theme import Look, Looks, swatch

__all__ = [
    "HEADS_AXIS",
    "Axis",
    "Choice",
    "Figure",
    "Switch",
    "Trace",
    "count_axis",
    "dots",
    "far_above",
    "head_switches",
    "line",
    "numbers",
    "thinned",
    "threshold_line",
]

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

FAR = 3.0
"""A value that is this many times the median is not shown at first."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    title: str
    log: bool = False
    """as it is shown first"""
    can_switch: bool = True
    """True if the reader may change between linear and logarithmic"""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """further ones, in plotly's words"""


HEADS_AXIS = Axis(
    title="", can_switch=False, settings={"type": "category", "autorange": "reversed", "automargin": True}
)
"""heads below each other, the first on top"""


@dataclass(frozen=True)
class Trace:
    data: Mapping[str, Any]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Switch:
    """A button that turns a key on and off; with a look it is a legend entry."""

    key: str
    label: str
    on: bool = True
    look: Look | None = None


@dataclass(frozen=True)
class Choice:
    """A list of keys of which one is on."""

    label: str
    options: Mapping[str, str]
    """key -> label"""
    selected: str


@dataclass(frozen=True, kw_only=True)
class Figure:
    id: str
    """letters, digits and hyphens; unique in the page"""
    title: str
    summary: str
    """a description in words, for those who do not see the figure and for those who do"""
    x: Axis
    y: Axis
    traces: Sequence[Trace]
    table: Table
    environments: Sequence[Environment]
    legend: Sequence[Switch] = ()
    switches: Sequence[Switch] = ()
    choices: Sequence[Choice] = ()
    height: int = 420
    notes: Sequence[Child] = ()
    layout: Mapping[str, Any] = field(default_factory=dict)
    """further settings, in plotly's words"""
    narrow_layout: Mapping[str, Any] = field(default_factory=dict)
    """settings that replace them on a narrow screen"""

    def to_json(self) -> dict[str, Any]:
        """The part that the script on the page needs."""
        axes = {
            name: {"title": plot_text(axis.title), "log": axis.log, "settings": dict(axis.settings)}
            for name, axis in (("x", self.x), ("y", self.y))
        }
        return {
            "id": self.id,
            "title": plot_text(self.title),
            "traces": [{"data": dict(trace.data), "keys": list(trace.keys)} for trace in self.traces],
            **axes,
            "height": self.height,
            "layout": dict(self.layout),
            "narrow": dict(self.narrow_layout),
        }

    def to_html(self, *, has_plots: bool = True) -> Markup:
        """Without plots the tables are all there is, and open."""
        return tag(
            "figure",
            tag(
                "figcaption",
                tag("h3", self.title, id=f"{self.id}-title"),
                tag("p", self.summary, id=f"{self.id}-summary", class_="summary"),
            ),
            self._controls(),
            tag(
                "div",
                tag("p", "This plot needs JavaScript; its data are in the table below.", class_="no-plot"),
                class_="plot",
                id=f"{self.id}-plot",
                # Room for the plot before it is drawn: the page must not jump.
                style=f"min-height: {self.height}px",
                tabindex=0,
                role="group",
                aria_roledescription="interactive plot",
                aria_label=f"{self.title}. Arrow keys move, plus and minus zoom, 0 shows everything.",
                aria_describedby=f"{self.id}-summary",
            ),
            [tag("p", note, class_="note") for note in self.notes],
            tag(
                "details",
                tag("summary", "Data of this figure"),
                self.table.to_html(),
                class_="data",
                open=not has_plots,
            ),
            made_by(self.environments),
            id=self.id,
            class_="figure",
            data_figure=self.id,
            aria_labelledby=f"{self.id}-title",
        )

    def _controls(self) -> Markup:
        legend = [
            _button(switch.label, switch.on, "legend-entry", switch.look, data_key=switch.key) for switch in self.legend
        ]
        switches = [_button(switch.label, switch.on, data_key=switch.key) for switch in self.switches]
        axes = [(name, axis) for name, axis in (("x", self.x), ("y", self.y)) if axis.can_switch]
        actions = {"reset": "Show all", "save": "Save SVG"}
        return join(
            tag("div", legend, class_="legend", role="group", aria_label="Curves shown") if legend else None,
            tag(
                "div",
                [self._choice(choice, number) for number, choice in enumerate(self.choices)],
                switches,
                [_button(f"Log {name}", axis.log, data_scale=name) for name, axis in axes],
                [tag("button", text, type="button", class_="action", data_action=key) for key, text in actions.items()],
                class_="controls",
                role="group",
                aria_label="Settings of the plot",
            ),
        )

    def _choice(self, choice: Choice, number: int) -> Markup:
        options = [
            tag("option", label, value=key, selected=key == choice.selected) for key, label in choice.options.items()
        ]
        select = tag("select", options, id=f"{self.id}-choice-{number}", data_choice=number)
        return tag("span", tag("label", choice.label, for_=f"{self.id}-choice-{number}"), select, class_="choice")


def _button(text: str, is_on: bool, class_: str = "switch", look: Look | None = None, **data: str) -> Markup:
    mark = swatch(look) if look else None
    return tag("button", mark, text, type="button", class_=class_, **data, aria_pressed="true" if is_on else "false")


def head_switches(heads: Iterable[str], looks: Looks, far: Collection[str] = ()) -> list[Switch]:
    """The legend of heads; those that are far from the others are not shown at first."""
    return [Switch(f"head:{head}", looks[head].label, head not in far, looks[head]) for head in heads]


def far_above(values: Mapping[K, float]) -> list[K]:
    """Keys of values that are several times the median: beside them, the others would be one line or one dot."""
    return [key for key, value in values.items() if not value <= FAR * statistics.median(values.values())]


def count_axis(title: str, counts: Iterable[int]) -> Axis:
    """A logarithmic axis with ticks at counts that were measured, as far as they can stand beside each other."""
    known = sorted(count for count in counts if count > 0)
    apart = min(1.4, max(1.15, (known[-1] / known[0]) ** 0.1)) if known else 1.4
    ticks: list[int] = []
    for count in known:
        if not ticks or count >= apart * ticks[-1]:
            ticks.append(count)
    return Axis(title=title, log=True, settings={"tickvals": ticks, "ticktext": [f"{tick:,}" for tick in ticks]})


def numbers(values: Sequence[float | None]) -> list[float | None]:
    """Values as JSON holds them, to seven digits; what is not finite is a gap."""
    return [None if value is None or not math.isfinite(value) else float(f"{value:.7g}") for value in values]


def line(
    x: Sequence[float],
    y: Sequence[float | None],
    look: Look,
    *,
    name: str | None = None,
    hover: str,
    keys: tuple[str, ...] = (),
    markers: bool = False,
    **more: Any,
) -> Trace:
    """A curve of a head. ``hover`` follows its name, in plotly's template language."""
    data: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers" if markers else "lines",
        "name": plot_text(look.label if name is None else name),
        "x": numbers(x),
        "y": numbers(y),
        "line": {"color": look.color, "dash": look.dash, "width": look.width},
        "hovertemplate": f"<b>%{{fullData.name}}</b><br>{hover}<extra></extra>",
    }
    if markers:
        data["marker"] = {"color": look.color, "symbol": look.symbol, "size": 7}
    return Trace({**data, **more}, keys)


def dots(
    x: Sequence[float | None], look: Look, marker: Mapping[str, Any], *, name: str, keys: tuple[str, ...], **more: Any
) -> Trace:
    """Values of a head, on the line that an axis of heads has for it."""
    data = {
        "type": "scatter",
        "mode": "markers",
        "name": plot_text(name),
        "x": numbers(x),
        "y": [plot_text(look.label)] * len(x),
        "marker": {**marker, "color": look.color},
    }
    return Trace({**data, **more}, keys)


def threshold_line(x: Sequence[float], height: float, label: str, *, keys: tuple[str, ...] = ()) -> Trace:
    """A horizontal line with its name, as a trace: it keeps its place when an axis changes."""
    return line(
        x,
        [height] * len(x),
        Look(label, 10, "dot", 1.4),
        hover="at %{y:.2e}",
        keys=keys,
        mode="lines+text",
        text=[label, *[""] * (len(x) - 1)],
        textposition="top right",
        textfont={"color": "@soft-ink", "size": 11},
    )


def thinned(values: Sequence[T], most: int) -> list[T]:
    """Evenly spaced values, at most about so many of them, with both ends."""
    last = len(values) - 1
    places = range(last + 1) if last < most else sorted({round(i * last / (most - 1)) for i in range(most)})
    return [values[place] for place in places]
