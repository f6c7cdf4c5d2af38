"""One self-contained HTML page from records alone.

write_report(ReportConfig(paths=(Path("runs"),), out=Path("report.html")))
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sigsoftmax.records.atomic_write import atomic_write
from sigsoftmax.report.findings.comparisons import Comparison, comparisons
from sigsoftmax.report.loading import load
from sigsoftmax.report.material import Material
from sigsoftmax.report.page import NO_PLOTLY, plotly_script, render
from sigsoftmax.report.sections import reproduction, spectra

__all__ = ["ReportConfig", "WrittenReport", "paper_tables", "recorded_comparisons", "write_report"]


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """The records to report on, and the file to write."""

    paths: tuple[Path, ...]
    """files of records, or folders that are searched for ``*.jsonl``"""
    out: Path = Path("report.html")
    title: str = "What the output layer is worth"

    def __post_init__(self) -> None:
        if self.out.is_dir():
            raise ValueError(f"the output {self.out} is a folder; name a file, as {self.out / 'report.html'}")
        if self.out.suffix == ".jsonl":
            raise ValueError(
                f"the output {self.out} has the name of a file of records; expected a page, as report.html"
            )


@dataclass(frozen=True, kw_only=True)
class WrittenReport:
    """The page that was written, and what to say about it."""

    path: Path
    records: int
    files: int
    warnings: tuple[str, ...]
    """lines that could not be read, and whatever else the page says is missing"""


def write_report(config: ReportConfig) -> WrittenReport:
    """Write the page; it appears whole or not at all."""
    loaded = load(config.paths)
    page = render(loaded, title=config.title)
    try:
        with atomic_write(config.out) as file:
            file.write(page.encode())
    except OSError as error:
        raise ValueError(f"cannot write the report to {config.out}: {error.strerror or error}") from error
    warnings = list(loaded.warnings)
    if plotly_script() is None:
        warnings.append(NO_PLOTLY)
    return WrittenReport(
        path=config.out, records=len(loaded.records), files=len(loaded.files), warnings=tuple(warnings)
    )


def recorded_comparisons(paths: tuple[Path, ...]) -> list[Comparison]:
    """Comparisons of heads under equal budgets, as the page shows them."""
    return comparisons(entry.payload for entry in Material.of(load(paths)).comparisons)


def paper_tables(paths: tuple[Path, ...]) -> str:
    """The paper's tables beside ours, as text."""
    material = Material.of(load(paths))
    looks = material.looks()
    tables = [*reproduction.tables(material, looks), *spectra.tables(material, looks)]
    if not tables:
        raise ValueError(
            "no records of training, evaluation or ranks among these; "
            "`sigsoftmax train`, `sigsoftmax evaluate` and `sigsoftmax reproduce` write some"
        )
    return "\n\n".join(table.to_text() for table in tables)
