"""The page: head, contents, sections, and what could not be shown; one file that asks nothing of the network."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources

from sigsoftmax._version import __version__, install_extra
from sigsoftmax.records import Record
from sigsoftmax.records.grouping import grouped
from sigsoftmax.report.loading import Loaded
from sigsoftmax.report.markup import Markup, join, script_json, tag
from sigsoftmax.report.material import Material
from sigsoftmax.report.number_text import DASH
from sigsoftmax.report.provenance import Origin, origins
from sigsoftmax.report.sections import (
    audits,
    benchmarks,
    capacity,
    comparison,
    learning,
    reproduction,
    spectra,
    sweeps,
    verdict,
)
from sigsoftmax.report.sections.section import Absent, Section
from sigsoftmax.report.tables import Cell, Column, Fields, Table
from sigsoftmax.report.theme import stylesheet_variables

__all__ = ["NO_PLOTLY", "plotly_script", "render"]

WARNINGS_SHOWN = 50
NO_PLOTLY = (
    "plotly was not installed where this page was made, so its figures are tables; "
    f"{install_extra('report')} and the same command bring the plots."
)


def render(loaded: Loaded, *, title: str) -> str:
    """The whole page."""
    material = Material.of(loaded)
    looks = material.looks()
    first = verdict.section(material, looks)
    shown = (reproduction, spectra, learning, comparison, sweeps, capacity, audits, benchmarks)
    parts = [module.section(material, looks) for module in shown]
    if isinstance(parts[0], Absent):
        # Then the comparison is what the page is about.
        parts.sort(key=lambda part: not (isinstance(part, Section) and part.id == "comparison"))
    others = (_runs(loaded), *parts, _problems(loaded, material), _leftovers(loaded.left()))
    sections = [part for part in others if isinstance(part, Section)]
    absent = [part for part in (first, *parts) if isinstance(part, Absent)]
    figures = [figure.to_json() for section in sections for figure in section.figures]
    plotly = plotly_script()
    scripts = [plotly, _asset("page.js")] if plotly else []
    body = join(
        tag("a", "Skip to the content", href="#content", class_="skip"),
        _header(loaded, title),
        _main(first if isinstance(first, Section) else None, sections, absent, has_plots=plotly is not None),
        _footer(),
        tag("script", script_json(figures), type="application/json", id="figures") if plotly else None,
        [tag("script", Markup(script)) for script in scripts],
    )
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"sigsoftmax {__version__}"),
        tag("title", title),
        # Not escaped: inside style, as inside script, HTML reads no entities.
        tag("style", Markup(stylesheet_variables() + _asset("page.css"))),
    )
    document = tag("html", tag("head", head), tag("body", body), lang="en", class_=None if plotly else "no-plots")
    return f"<!doctype html>\n{document}\n"


def _main(opening: Section | None, sections: Sequence[Section], absent: Sequence[Absent], *, has_plots: bool) -> Markup:
    overview = _overview(sections)
    # What a page opens with comes before its contents, so that a narrow screen shows it first.
    before = opening.to_html() if opening else overview
    return tag(
        "main",
        tag(
            "div",
            None if has_plots else tag("p", NO_PLOTLY, class_="warning", role="note"),
            before,
            class_="sections",
        ),
        _contents(opening, sections, absent, has_overview=overview is not None),
        tag(
            "div",
            overview if opening else None,
            [section.to_html(has_plots=has_plots) for section in sections],
            class_="sections",
        ),
        id="content",
        class_="columns",
        tabindex=-1,
    )


@cache
def plotly_script() -> str | None:
    """plotly.js as the Python package brings it; None where that is not installed."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return None
    script = str(get_plotlyjs())
    # It stands inside a script element, which these would end or turn into a comment.
    assert "</script" not in script.lower() and "<!--" not in script
    return script


@cache
def _asset(name: str) -> str:
    return resources.files("sigsoftmax.report").joinpath(name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """Nothing from the network, and no script but those that stand here."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes) or "'none'"
    # plotly styles its elements one by one, and saves a picture through a data or blob address.
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _header(loaded: Loaded, title: str) -> Markup:
    times = sorted(record.environment.time_utc for record in loaded.records)
    days = dict.fromkeys((times[0][:10], times[-1][:10]))
    machines = {record.environment.device for record in loaded.records}
    counts = {"record": len(loaded.records), "file": len(loaded.files), "device": len(machines)}
    facts = {name + "s" * (count != 1): f"{count:,}" for name, count in counts.items()}
    facts["measured"] = f" {DASH} ".join(days)
    return tag(
        "header",
        tag(
            "div",
            tag("p", "sigsoftmax", class_="brand"),
            tag(
                "button",
                "Dark theme",
                type="button",
                id="theme",
                class_="switch",
                aria_pressed="false",
                # Without a script it could do nothing.
                hidden=True,
            ),
            class_="bar",
        ),
        tag("h1", title),
        tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()], class_="facts"),
        class_="page-header",
    )


def _contents(
    opening: Section | None, sections: Sequence[Section], absent: Sequence[Absent], *, has_overview: bool
) -> Markup:
    links = {opening.id: opening.title} if opening else {}
    links |= {"overview": "In short"} if has_overview else {}
    links |= {section.id: section.title for section in sections}
    missing = (
        tag("p", "No records of these; a command that makes some:", class_="nav-note"),
        tag("ul", [tag("li", part.title, tag("code", part.command)) for part in absent], class_="absent"),
    )
    return tag(
        "nav",
        tag("p", "Contents", class_="nav-title"),
        tag("ol", [tag("li", tag("a", title, href=f"#{name}")) for name, title in links.items()]),
        missing if absent else None,
        aria_label="Contents",
    )


def _overview(sections: Sequence[Section]) -> Markup | None:
    """The first findings of every section, each with the way to its numbers."""
    found = [
        tag(
            "div",
            tag("dt", tag("a", section.short, href=f"#{section.id}")),
            [tag("dd", finding) for finding in section.findings[: section.key_findings]],
        )
        for section in sections
        if section.findings[: section.key_findings]
    ]
    if not found:
        return None
    return tag(
        "section",
        tag("h2", "In short", id="overview-title"),
        tag("dl", found, class_="short"),
        id="overview",
        aria_labelledby="overview-title",
    )


def _runs(loaded: Loaded) -> Section:
    fields: Fields[Origin] = {
        Column("Command", "words"): lambda origin: Cell(origin.command, is_code=True),
        Column("Machine", "words"): lambda origin: origin.place,
        Column("Versions", "words"): lambda origin: origin.versions,
        Column("Date", "label"): lambda origin: origin.when,
        "Records": lambda origin: f"{origin.records:,}",
    }
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in loaded.kinds().most_common())
    repeated = f" {loaded.repeated:,} records stood there more than once and count once." if loaded.repeated else ""
    made = origins(record.environment for record in loaded.records)
    notes = [f"Records by kind: {kinds}.{repeated}"]
    return Section(
        id="runs",
        title="What was run",
        short="Runs",
        lead="Everything on this page is made from records of runs. Published numbers stand beside them and are marked "
        "as such.",
        blocks=[Table.of(made, fields, caption="Commands and machines", notes=notes)],
        key_findings=0,
    )


def _problems(loaded: Loaded, material: Material) -> Section | None:
    """Lines that could not be read and records that do not count, so that nothing is lost silently."""
    count = len(loaded.warnings)
    lines = loaded.warnings[:WARNINGS_SHOWN] + [f"and {count - WARNINGS_SHOWN:,} more"] * (count > WARNINGS_SHOWN)
    again = f"{material.replaced:,} records were measured again later, as the epochs of a resumed run; the last counts."
    if not lines and not material.replaced:
        return None
    return Section(
        id="problems",
        title="Not shown above",
        short="Not shown",
        lead=f"{count:,} lines or records could not be read." if count else "Every line could be read.",
        findings=[again] if material.replaced else [],
        blocks=[tag("ul", [tag("li", text) for text in lines], class_="warnings")] if lines else [],
        key_findings=0,
    )


def _leftovers(records: Sequence[Record]) -> Section | None:
    fields: Fields[list[Record]] = {
        Column("Kind", "label"): lambda same: same[0].kind,
        "Version": lambda same: str(same[0].version),
        "Records": lambda same: f"{len(same):,}",
        Column("Fields", "words"): lambda same: ", ".join(sorted({key for r in same for key in r.payload})[:12]),
        Column("The first", "words"): lambda same: same[0].source,
    }
    kinds = grouped(records, lambda record: (record.kind, record.version)).values()
    section = Section(
        id="leftovers",
        title="Records of other kinds",
        short="Other kinds",
        lead=f"sigsoftmax {__version__} has no section for these; they are counted here so that nothing is lost.",
        blocks=[Table.of(kinds, fields, caption="Records that no section shows")],
        key_findings=0,
    )
    return section if records else None


def _footer() -> Markup:
    now = f"{dt.datetime.now(dt.UTC):%Y-%m-%dT%H:%M:%SZ}"
    return tag(
        "footer",
        tag("p", f"Made by sigsoftmax {__version__} on {now}. Plots: plotly.js, MIT licence, inlined."),
        class_="page-footer",
    )
