"""The commands, machines and versions that things were made with, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sigsoftmax.records import Environment
from sigsoftmax.report.markup import Markup, tag
from sigsoftmax.report.number_text import counted

__all__ = ["Origin", "made_by", "origins"]

SHOWN = 2
"""Commands that stand under a figure; further ones are folded."""


@dataclass(frozen=True)
class Origin:
    """One command on one machine."""

    command: str
    place: str
    versions: str
    first: str
    last: str
    records: int

    @property
    def when(self) -> str:
        return self.first if self.first == self.last else f"{self.first} to {self.last}"


def place_text(where: Environment) -> str:
    return f"{where.device} ({where.system}, {counted(where.threads, 'thread')})"


def origins(environments: Iterable[Environment]) -> list[Origin]:
    """Commands and machines, each once, in the order of their first records."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for where in environments:
        package = f"sigsoftmax {where.package_version}" + (f" ({where.revision_text})" if where.commit else "")
        versions = f"{package}, torch {where.torch_version}, Python {where.python_version}"
        found.setdefault((where.command, place_text(where), versions), []).append(where.time_utc)
    in_time = sorted(found.items(), key=lambda item: min(item[1]))
    return [
        Origin(command, place, versions, min(times)[:10], max(times)[:10], len(times))
        for (command, place, versions), times in in_time
    ]


def made_by(environments: Sequence[Environment]) -> Markup | None:
    """The line under a figure or table: the commands that made it, and on which machines."""
    lines = [
        tag(
            "li",
            tag("code", origin.command),
            tag("span", f"{origin.place} · {origin.versions} · "),
            tag("span", origin.when, class_="label"),
        )
        for origin in origins(environments)
    ]
    if not lines:
        return None
    shown = [tag("ul", lines[:SHOWN])]
    if lines[SHOWN:]:
        shown.append(tag("details", tag("summary", f"{len(lines) - SHOWN} more commands"), tag("ul", lines[SHOWN:])))
    return tag("div", shown, class_="made")
