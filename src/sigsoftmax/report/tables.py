"""Tables: one description, as HTML for the page and as text for the terminal."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from sigsoftmax.report.markup import Child, Markup, join, tag
from sigsoftmax.report.number_text import NO_BREAK, wrapped
from sigsoftmax.report.theme import Look, Looks, head_label, swatch

__all__ = [
    "Cell",
    "Column",
    "Fields",
    "Row",
    "Table",
    "head_cell",
    "look_cell",
    "plain_text",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """A text with something around it that only the page shows."""

    text: str
    before: Markup | None = None
    """as the swatch of a head"""
    class_: str = ""
    is_code: bool = False

    @property
    def content(self) -> Markup:
        return join(self.before, tag("code", self.text) if self.is_code else self.text)

    def classes(self, kind: str) -> str:
        return f"{kind} {self.class_}".rstrip()


@dataclass(frozen=True)
class Column:
    title: str
    kind: Literal["number", "interval", "words", "label"] = "number"
    """numbers stand to the right, an interval below its number where there is no room beside it; words may break, a
    label does not"""
    group: str = ""
    """a heading over neighbouring columns that share it"""
    page_only: bool = False
    """True if a terminal has no room for it"""

    @property
    def is_number(self) -> bool:
        return self.kind in ("number", "interval")


Fields = dict[str | Column, Callable[[T], Cell | str]]
"""The columns of a table, each with the cell that it has for an item; a title alone is a column of numbers."""


@dataclass(frozen=True)
class Row:
    cells: Sequence[Cell | str]
    """the first is the row's header; a row of one cell is the heading of those that follow"""
    class_: str | None = None

    @property
    def is_heading(self) -> bool:
        return len(self.cells) == 1

    @property
    def full_cells(self) -> list[Cell]:
        return [cell if isinstance(cell, Cell) else Cell(cell) for cell in self.cells]

    @property
    def texts(self) -> list[str]:
        """The cells as a terminal shows them."""
        return [cell.text.replace(NO_BREAK, " ") for cell in self.full_cells]


@dataclass(frozen=True, kw_only=True)
class Table:
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    notes: Sequence[Child] = ()
    has_heading: bool = False
    """True if the caption is a heading of the page, too"""

    def __post_init__(self) -> None:
        for row in self.rows:
            assert row.is_heading or len(row.cells) == len(self.columns), (self.caption, row.cells)

    @classmethod
    def of(
        cls,
        items: Iterable[T],
        fields: Fields[T],
        *,
        caption: str,
        notes: Sequence[Child] = (),
        has_heading: bool = False,
    ) -> Table:
        """A row for each item, with the cells that its fields have in it."""
        columns = [title if isinstance(title, Column) else Column(title) for title in fields]
        rows = [Row([cell(item) for cell in fields.values()]) for item in items]
        return cls(caption=caption, columns=columns, rows=rows, notes=notes, has_heading=has_heading)

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
        first, *others = row.full_cells
        if row.is_heading:
            heading = tag("th", first.before, first.text, colspan=len(self.columns), scope="rowgroup")
            return tag("tr", heading, class_="group-heading")
        kinds = [column.kind for column in self.columns]
        cells = [
            tag("td", cell.content, class_=cell.classes(kind)) for cell, kind in zip(others, kinds[1:], strict=True)
        ]
        header = tag("th", first.content, scope="row", class_=first.classes(kinds[0]))
        return tag("tr", header, cells, class_=row.class_)

    def to_text(self) -> str:
        if any(column.page_only for column in self.columns):
            return self._narrowed().to_text()
        indent = "  " if any(row.is_heading for row in self.rows) else ""
        cells = [row.texts for row in self.rows if not row.is_heading]
        full = [[column.title for column in self.columns], *([indent + line[0], *line[1:]] for line in cells)]
        sizes = [max(map(len, cells)) for cells in zip(*full, strict=True)]
        groups = self._widened_groups(sizes)
        padded = iter(
            "  ".join(
                text.rjust(size) if column.is_number else text.ljust(size)
                for text, size, column in zip(line, sizes, self.columns, strict=True)
            ).rstrip()
            for line in full
        )
        titles = next(padded)
        written = [row.texts[0] if row.is_heading else next(padded) for row in self.rows]
        notes = [wrapped(plain_text(note)) for note in self.notes]
        rule = "-" * max(map(len, [titles, *written, *groups]))
        return "\n".join([self.caption, rule, *groups, titles, rule, *written, rule, *notes])

    def _narrowed(self) -> Table:
        """The columns for which a terminal has room."""
        shown = [not column.page_only for column in self.columns]
        rows = [
            row if row.is_heading else replace(row, cells=list(itertools.compress(row.cells, shown)))
            for row in self.rows
        ]
        return replace(self, columns=list(itertools.compress(self.columns, shown)), rows=rows)

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


def head_cell(head: str, looks: Looks | None) -> Cell:
    """The name of a head; with looks, its swatch stands before it on a page."""
    return Cell(head_label(head)) if looks is None else look_cell(looks[head])


def look_cell(look: Look) -> Cell:
    return Cell(look.label, swatch(look))


def plain_text(child: Child) -> str:
    """The text of markup without its tags."""
    return html.unescape(re.sub(r"<[^>]*>", "", join(child)))
