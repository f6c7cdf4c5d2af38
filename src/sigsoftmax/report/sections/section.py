"""A section of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sigsoftmax.report.figures import Figure
from sigsoftmax.report.markup import Markup, tag
from sigsoftmax.report.tables import Table

__all__ = ["Absent", "Block", "Section"]

Block = Figure | Table | Markup


@dataclass(frozen=True, kw_only=True)
class Section:
    id: str
    title: str
    short: str
    """the title in a word or two"""
    lead: str
    """a summary of the section, in a sentence or two"""
    findings: Sequence[str] = field(default_factory=tuple)
    """conclusions from the numbers; nothing here is known beforehand"""
    blocks: Sequence[Block] = field(default_factory=tuple)
    key_findings: int = 1
    """number of the findings that stand at the top of the page too"""

    @property
    def figures(self) -> list[Figure]:
        return [block for block in self.blocks if isinstance(block, Figure)]

    def to_html(self, *, has_plots: bool = True) -> Markup:
        inside: list[Markup] = []
        for block in self.blocks:
            if isinstance(block, Figure):
                inside.append(block.to_html(has_plots=has_plots))
            else:
                inside.append(block if isinstance(block, Markup) else block.to_html())
        return tag(
            "section",
            tag("h2", self.title, id=f"{self.id}-title"),
            tag("p", self.lead, class_="lead"),
            tag("ul", [tag("li", finding) for finding in self.findings], class_="findings") if self.findings else None,
            inside,
            id=self.id,
            aria_labelledby=f"{self.id}-title",
        )


@dataclass(frozen=True)
class Absent:
    """A section for which there are no records, and what would make some."""

    title: str
    command: str
