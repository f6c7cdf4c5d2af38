"""Colours, once for the page and its plots, in a light and a dark form; and the look of every head, everywhere.

The hues are Okabe and Ito's and Tol's, which people with any colour vision can tell apart, made darker or lighter until
they stand out from their background. Lines differ in dash and marker too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sigsoftmax.report.markup import Markup, tag

__all__ = ["DARK", "LIGHT", "Look", "Looks", "head_label", "same_head", "stylesheet_variables", "swatch"]

COLORS = {
    "page": ("#fbfaf7", "#14171b"),
    "card": ("#ffffff", "#1b1f25"),
    "sunken": ("#f3f1eb", "#22272e"),
    "ink": ("#1d2126", "#eceae4"),
    "soft-ink": ("#5a6069", "#a9b0ba"),
    "line": ("#dedbd2", "#353b44"),
    "grid": ("#e9e7e0", "#2b3038"),
    "accent": ("#0b5cad", "#7db8f5"),
    "accent-ink": ("#ffffff", "#10131a"),
    "good": ("#0b6e4f", "#5fd3a8"),
    "bad": ("#a8321a", "#ff9a80"),
    "caution": ("#7d5800", "#f0c461"),
    "caution-page": ("#fdf3dc", "#2e2818"),
    "target": ("#c4450c", "#ff8a5c"),
    "s0": ("#1d2126", "#f1efe9"),
    "s1": ("#c17a00", "#f0ab2e"),
    "s2": ("#b8568f", "#e592c2"),
    "s3": ("#2b8cc4", "#72c4f2"),
    "s4": ("#0059a3", "#5b9ff0"),
    "s5": ("#00875f", "#2fc493"),
    "s6": ("#c4450c", "#ff7d47"),
    "s7": ("#5b3fb0", "#a894f2"),
    "s8": ("#7c7a1c", "#cfcb5c"),
    "s9": ("#8a1f52", "#e0658f"),
    "s10": ("#757b84", "#98a0ab"),
    "s11": ("#6d4c2f", "#c9a27c"),
}
"""in the light theme, in the dark theme"""
LIGHT, DARK = ({name: both[theme] for name, both in COLORS.items()} for theme in (0, 1))

SLOTS = 12
# The colours that members take, by what stands before the bracket; the second and later of a kind take the next.
PREFERRED = {
    "softmax": (0,),
    "scaled softmax": (10,),
    "sigsoftmax": (1,),
    "shifted_sigsoftmax": (2,),
    "gss": (3, 4),
    "mos": (5,),
    "moss": (6,),
    "sigmoid": (7,),
    "relu": (8,),
    "softcap": (9,),
}
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SYMBOLS = (
    *("circle", "square", "diamond", "triangle-up", "triangle-down", "cross"),
    *("x", "star", "hexagon", "pentagon", "triangle-left", "triangle-right"),
)
LABELS = {"mos": "MoS", "moss": "MoSS", "relu": "ReLU"}


@dataclass(frozen=True)
class Look:
    """The appearance of a head in every figure and table."""

    label: str
    slot: int
    dash: str = "solid"
    width: float = 2.0

    @property
    def color(self) -> str:
        """A reference that the page resolves for its theme."""
        return f"@s{self.slot}"

    @property
    def symbol(self) -> str:
        return SYMBOLS[self.slot % len(SYMBOLS)]


def same_head(name: str) -> str:
    """One spelling for a head: without spaces, and with 0 for 0.0."""
    return re.sub(r"(=-?\d+)\.0+(?=[,)])", r"\1", name.replace(" ", ""))


def head_label(name: str) -> str:
    base, bracket, inside = same_head(name).partition("(")
    return LABELS.get(base, base) + bracket + inside


class Looks:
    """The look of every head of a page, chosen once from all their names."""

    def __init__(self, heads: Iterable[str]) -> None:
        names = list(dict.fromkeys(same_head(head) for head in heads))
        # Known heads first: a stranger must not take the colour that readers know.
        names.sort(key=lambda name: name.partition("(")[0] not in PREFERRED)
        used: list[tuple[int, str]] = []
        self._looks: dict[str, Look] = {}
        for name in names:
            key = "scaled softmax" if name.startswith("softmax(") else name.partition("(")[0]
            free = [slot for slot in range(SLOTS) if slot not in {slot for slot, _ in used}]
            choices = [(slot, dash) for dash in DASHES for slot in PREFERRED.get(key) or free or (11,)]
            slot, dash = next((choice for choice in choices if choice not in used), choices[-1])
            used.append((slot, dash))
            # softmax is broad, so that what lies on it can be seen.
            self._looks[name] = Look(head_label(name), slot, dash, 3.6 if name == "softmax" else 2.2)

    def __getitem__(self, head: str) -> Look:
        return self._looks[same_head(head)]


def swatch(look: Look) -> Markup:
    """A short piece of the line."""
    dashes = {"dash": "6 3", "dot": "2 3", "dashdot": "6 3 2 3", "longdash": "9 3"}.get(look.dash)
    line = tag(
        "line",
        x1=0,
        x2=26,
        y1=5,
        y2=5,
        stroke=f"var(--s{look.slot})",
        stroke_width=f"{look.width:g}",
        stroke_dasharray=dashes,
    )
    return tag("svg", line, class_="swatch", width=26, height=10, viewBox="0 0 26 10", aria_hidden="true")


def stylesheet_variables() -> str:
    """The colours as CSS variables: light, dark where the system or the reader asks for it."""
    light, dark = (" ".join(f"--{key}: {value};" for key, value in theme.items()) for theme in (LIGHT, DARK))
    return (
        f":root {{ color-scheme: light; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{\n"
        f':root:not([data-theme="light"]) {{ color-scheme: dark; {dark} }}\n}}\n'
        f'@media screen {{ :root[data-theme="dark"] {{ color-scheme: dark; {dark} }} }}\n'
    )
