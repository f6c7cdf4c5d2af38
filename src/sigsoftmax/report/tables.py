"""Tables: one description, as HTML for the page, as text for the terminal and as Markdown for the documentation; and
how numbers are written.
"""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from sigsoftmax.records.durations import duration_text
from sigsoftmax.records.statistics import Sample
from sigsoftmax.report.markup import Child, Markup, join, tag

__all__ = [
    "DASH",
    "MINUS",
    "NO_BREAK",
    "TIMES",
    "Cell",
    "Column",
    "Row",
    "Table",
    "count_text",
    "interval_text",
    "listed",
    "number_text",
    "plain_text",
    "power_text",
    "range_text",
    "sample_text",
    "seconds_text",
    "sentence",
    "signed_text",
    "size_text",
]

DASH, MINUS, TIMES = "\u2013", "\u2212", "\u00d7"
NO_BREAK = "\u00a0"
"""a space at which a page begins no new line"""
SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


@dataclass(frozen=True)
class Cell:
    """A text with something around it that only the page shows."""

    text: str
    before: Markup | None = None
    """as the swatch of a head"""
    class_: str | None = None
    is_code: bool = False


@dataclass(frozen=True)
class Column:
    title: str
    kind: Literal["number", "interval", "words", "label"] = "number"
    """numbers stand to the right, an interval below its number where there is no room beside it; words may break, a
    label does not"""
    group: str = ""
    """a heading over neighbouring columns that share it"""


@dataclass(frozen=True)
class Row:
    cells: Sequence[Cell | str]
    """the first is the row's header; a row of one cell is the heading of those that follow"""
    class_: str | None = None

    @property
    def is_heading(self) -> bool:
        return len(self.cells) == 1


@dataclass(frozen=True, kw_only=True)
class Table:
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    notes: Sequence[Child] = ()
    has_heading: bool = False
    """whether the caption is a heading of the page, too"""

    def __post_init__(self) -> None:
        for row in self.rows:
            assert row.is_heading or len(row.cells) == len(self.columns), (self.caption, row.cells)

    def to_html(self) -> Markup:
        table = tag(
            "table",
            tag("caption", self.caption, class_="hidden-text" if self.has_heading else None),
            tag("thead", self._heads()),
            self._bodies(),
        )
        return join(
            tag("h3", self.caption) if self.has_heading else None,
            # A region that scrolls must be reachable by keyboard.
            tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=self.caption),
            [tag("p", note, class_="note") for note in self.notes],
        )

    def _heads(self) -> list[Markup]:
        titles = [tag("th", column.title, scope="col", class_=column.kind) for column in self.columns]
        groups = [(name, len(list(found))) for name, found in itertools.groupby(c.group for c in self.columns)]
        if not any(name for name, _ in groups):
            return [tag("tr", titles)]
        over = [
            tag("th", name, colspan=size, scope="colgroup", class_="group") if name else tag("td", colspan=size)
            for name, size in groups
        ]
        return [tag("tr", over, class_="groups"), tag("tr", titles)]

    def _bodies(self) -> list[Markup]:
        """A heading begins a body of its own, which is what its scope refers to."""
        bodies: list[list[Markup]] = [[]]
        for row in self.rows:
            if row.is_heading and bodies[-1]:
                bodies.append([])
            bodies[-1].append(self._row(row))
        return [tag("tbody", rows) for rows in bodies]

    def _row(self, row: Row) -> Markup:
        if row.is_heading:
            (only,) = row.cells
            only = only if isinstance(only, Cell) else Cell(only)
            content = join(only.before, only.text)
            return tag("tr", tag("th", content, colspan=len(self.columns), scope="rowgroup"), class_="group-heading")
        cells = []
        for place, (cell, column) in enumerate(zip(row.cells, self.columns, strict=True)):
            cell = cell if isinstance(cell, Cell) else Cell(cell)
            classes = f"{column.kind} {cell.class_}" if cell.class_ else column.kind
            content = join(cell.before, tag("code", cell.text) if cell.is_code else cell.text)
            cells.append(
                tag("td", content, class_=classes) if place else tag("th", content, scope="row", class_=classes)
            )
        return tag("tr", cells, class_=row.class_)

    def to_text(self) -> str:
        lines = [[column.title for column in self.columns]]
        indent = "  " if any(row.is_heading for row in self.rows) else ""
        for row in self.rows:
            texts = [cell if isinstance(cell, str) else cell.text for cell in row.cells]
            texts = [text.replace(NO_BREAK, " ") for text in texts]
            lines.append(texts if row.is_heading else [indent + texts[0], *texts[1:]])
        full = [line for line in lines if len(line) == len(self.columns)]
        sizes = [max(len(line[place]) for line in full) for place in range(len(self.columns))]
        groups = self._widened_groups(sizes)
        written = [
            "  ".join(
                text.rjust(size) if column.kind in ("number", "interval") else text.ljust(size)
                # A heading has one text and no columns.
                for text, size, column in zip(line, sizes, self.columns, strict=False)
            ).rstrip()
            for line in lines
        ]
        rule = "-" * max(map(len, [*written, *groups]))
        notes = [plain_text(note) for note in self.notes]
        return "\n".join([self.caption, rule, *groups, written[0], rule, *written[1:], rule, *notes])

    def to_markdown(self, *, has_notes: bool = True) -> str:
        """The table, and its notes; a heading over columns stands before their titles, one over rows in bold."""
        titles = [f"{c.group}: {c.title.lower()}" if c.group else c.title for c in self.columns]
        rule = ["---:" if column.kind in ("number", "interval") else "---" for column in self.columns]
        lines = [titles, rule]
        for row in self.rows:
            texts = [cell if isinstance(cell, str) else cell.text for cell in row.cells]
            texts = [text.replace(NO_BREAK, " ").replace("|", "\\|") for text in texts]
            lines.append([f"**{texts[0]}**", *[""] * (len(titles) - 1)] if row.is_heading else texts)
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        notes = self.notes if has_notes else ()
        return "\n".join([table, *(f"{plain_text(note)}\n" for note in notes)])

    def _widened_groups(self, sizes: list[int]) -> list[str]:
        """The line of headings over columns, if there are any; ``sizes`` grow where a heading is wider than its own."""
        if not any(column.group for column in self.columns):
            return []
        parts = []
        for name, places in itertools.groupby(range(len(sizes)), key=lambda place: self.columns[place].group):
            here = list(places)
            width = sum(sizes[place] for place in here) + 2 * (len(here) - 1)
            sizes[here[0]] += max(len(name) - width, 0)
            width = max(width, len(name))
            shown = f" {name} " if name and len(name) + 2 <= width else name
            parts.append(shown.center(width, "-" if name else " "))
        return ["  ".join(parts).rstrip()]


def plain_text(child: Child) -> str:
    """The text of markup without its tags."""
    return html.unescape(re.sub(r"<[^>]*>", "", join(child)))


def sentence(text: str) -> str:
    """With a capital at the beginning."""
    return text[:1].upper() + text[1:]


def number_text(value: float | None, digits: int = 4) -> str:
    """So many significant digits; a dash for what is not there."""
    if value is None:
        return DASH
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else f"{MINUS}∞"
    if value == 0.0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-4:
        mantissa, _, exponent = f"{value:.{max(digits - 2, 1)}e}".partition("e")
        return f"{mantissa} {TIMES} {power_text(int(exponent))}".replace("-", MINUS)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}".replace("-", MINUS)


def sample_text(sample: Sample | None, decimals: int = 2) -> str:
    """Mean and standard deviation; large means without decimals."""
    if sample is None:
        return DASH
    if not math.isfinite(sample.mean) or sample.mean >= 1e5:
        return number_text(sample.mean)
    decimals = decimals if sample.mean < 1e3 else 0
    if sample.deviation is None or not math.isfinite(sample.deviation):
        return f"{sample.mean:,.{decimals}f}"
    return f"{sample.mean:,.{decimals}f} ± {sample.deviation:,.{decimals}f}"


def interval_text(ends: tuple[float, float], form: str) -> str:
    """In brackets that stay on one line."""
    low, high = (format(end, form).replace("-", MINUS) for end in ends)
    return f"({low}{NO_BREAK}to{NO_BREAK}{high})"


def listed(items: Sequence[str], most: int = 8) -> str:
    """With semicolons between; of many, how many more there are."""
    shown = list(items) if len(items) <= most else [*items[: most - 1], f"and {len(items) - most + 1} more"]
    return "; ".join(shown)


def power_text(exponent: int) -> str:
    return "10" + str(exponent).translate(SUPERSCRIPTS)


def signed_text(value: float, form: str = ".2f") -> str:
    return format(value, f"+{form}").replace("-", MINUS) if math.isfinite(value) else number_text(value)


def count_text(value: int | None) -> str:
    return DASH if value is None else f"{value:,}"


def range_text(values: Iterable[int | None]) -> str:
    """Least to most of those that are there."""
    known = sorted(value for value in values if value is not None)
    return " to ".join(f"{value:,}" for value in dict.fromkeys((known[0], known[-1]))) if known else DASH


def size_text(rows: int, columns: int | None) -> str:
    return f"{rows:,} {TIMES} {count_text(columns)}"


def seconds_text(seconds: float | None) -> str:
    """A length of time in a cell, or a dash where none was measured."""
    return DASH if seconds is None or not math.isfinite(seconds) else duration_text(seconds)
