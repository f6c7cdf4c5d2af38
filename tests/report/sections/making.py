"""A section made from payloads, and what stands in it."""

from collections.abc import Sequence
from pathlib import Path

from tests.report import synthetic_runs

from sigsoftmax.records import Payload, Record, append
from sigsoftmax.report.figures import Figure
from sigsoftmax.report.loading import load
from sigsoftmax.report.material import Material
from sigsoftmax.report.sections.section import Section
from sigsoftmax.report.tables import Table


def material_of(payloads: Sequence[Payload], tmp_path: Path) -> Material:
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    append(path, [Record.of(payload, synthetic_runs.environment("a command")) for payload in payloads])
    return Material.of(load([path]))


def section_of(module, payloads: Sequence[Payload], tmp_path: Path) -> Section:
    material = material_of(payloads, tmp_path)
    made = module.section(material, material.looks())
    assert isinstance(made, Section)
    return made


def table_of(section: Section, beginning: str) -> Table:
    return next(b for b in section.blocks if isinstance(b, Table) and b.caption.startswith(beginning))


def rows_of(table: Table) -> list[list[str]]:
    return [[cell if isinstance(cell, str) else cell.text for cell in row.cells] for row in table.rows]


def drawn(figure: Figure, *keys: str) -> list[dict]:
    return [dict(trace.data) for trace in figure.traces if set(keys) <= set(trace.keys)]
