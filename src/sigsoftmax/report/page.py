"""The page: head, contents, sections, and what could not be shown; one file that asks nothing of the network."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import resources

from sigsoftmax._version import __version__, install_extra
from sigsoftmax.records import Record
from sigsoftmax.report.loading import Loaded
from sigsoftmax.report.markup import Markup, join, script_json, tag
from sigsoftmax.report.material import Material
from sigsoftmax.report.provenance import origins
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
from sigsoftmax.report.tables import DASH, Cell, Column, Row, Table
from sigsoftmax.report.theme import Looks, stylesheet_variables

__all__ = ["NO_PLOTLY", "plotly_script", "render"]

WARNINGS_SHOWN = 50
NO_PLOTLY = (
    "plotly was not installed where this page was made, so its figures are tables; "
    f"{install_extra('report')} and the same command bring the plots."
)


def render(loaded: Loaded, *, title: str) -> str:
    """The whole page."""
    material = Material.of(loaded)
    looks = Looks([*material.published_heads(), *material.heads()])
    first = verdict.section(material, looks)
    parts: list[Section | Absent] = [
        reproduction.section(material, looks),
        spectra.section(material, looks),
        learning.section(material, looks),
        comparison.section(material, looks),
        sweeps.section(material, looks),
        capacity.section(material, looks),
        audits.section(material, looks),
        benchmarks.section(material),
    ]
    if isinstance(parts[0], Absent):
        # Then the comparison is what the page is about.
        parts.sort(key=lambda part: not (isinstance(part, Section) and part.id == "comparison"))
    sections = [part for part in parts if isinstance(part, Section)]
    absent = [part for part in (first, *parts) if isinstance(part, Absent)]
    sections += [section for section in (_problems(loaded, material), _leftovers(loaded.left())) if section]
    sections.insert(0, _runs(loaded))
    overview = _overview(sections)
    opening = [first] if isinstance(first, Section) else []
    plotly = plotly_script()
    shown = [section.to_html(has_plots=plotly is not None) for section in sections]
    # What a page opens with comes before its contents, so that a narrow screen shows it first.
    before: list[Markup | None] = [section.to_html() for section in opening] or [overview]
    after = [overview, *shown] if opening else shown
    scripts = [script for script in (plotly, _asset("page.js") if plotly else None) if script]
    body = join(
        tag("a", "Skip to the content", href="#content", class_="skip"),
        _header(loaded, title),
        tag(
            "main",
            tag(
                "div",
                tag("p", NO_PLOTLY, class_="warning", role="note") if plotly is None else None,
                before,
                class_="sections",
            ),
            _contents(opening, sections, absent, has_overview=overview is not None),
            tag("div", after, class_="sections"),
            id="content",
            class_="columns",
            tabindex=-1,
        ),
        _footer(),
        _data(sections) if plotly else None,
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
    facts = (
        (f"{len(loaded.records):,}", "record" if len(loaded.records) == 1 else "records"),
        (f"{len(loaded.files):,}", "file" if len(loaded.files) == 1 else "files"),
        (f"{len(machines):,}", "device" if len(machines) == 1 else "devices"),
        (f" {DASH} ".join(days), "measured"),
    )
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
        tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for value, name in facts], class_="facts"),
        class_="page-header",
    )


def _contents(
    opening: Sequence[Section], sections: Sequence[Section], absent: Sequence[Absent], *, has_overview: bool
) -> Markup:
    links = [(section.id, section.title) for section in opening]
    links += [("overview", "In short")] if has_overview else []
    links += [(section.id, section.title) for section in sections]
    missing = [tag("li", part.title, tag("code", part.command)) for part in absent]
    return tag(
        "nav",
        tag("p", "Contents", class_="nav-title"),
        tag("ol", [tag("li", tag("a", title, href=f"#{name}")) for name, title in links]),
        (
            tag("p", "No records of these; a command that makes some:", class_="nav-note"),
            tag("ul", missing, class_="absent"),
        )
        if missing
        else None,
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
    rows = [
        Row((Cell(o.command, is_code=True), o.place, o.versions, o.when, f"{o.records:,}"))
        for o in origins(record.environment for record in loaded.records)
    ]
    columns = [Column("Command", "words"), Column("Machine", "words"), Column("Versions", "words")]
    columns += [Column("Date", "label"), Column("Records")]
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in loaded.kinds().most_common())
    repeated = f" {loaded.repeated:,} records stood there more than once and count once." if loaded.repeated else ""
    notes = [f"Records by kind: {kinds}.{repeated}"]
    return Section(
        id="runs",
        title="What was run",
        short="Runs",
        lead="Everything on this page is made from records of runs. Published numbers stand beside them and are marked "
        "as such.",
        blocks=[Table(caption="Commands and machines", columns=columns, rows=rows, notes=notes)],
        key_findings=0,
    )


def _problems(loaded: Loaded, material: Material) -> Section | None:
    """What could not be read or does not count, so that nothing is lost silently."""
    shown = loaded.warnings[:WARNINGS_SHOWN]
    lines = [tag("li", text) for text in shown]
    if len(loaded.warnings) > len(shown):
        lines.append(tag("li", f"and {len(loaded.warnings) - len(shown):,} more"))
    findings = []
    if material.replaced:
        findings.append(
            f"{material.replaced:,} records were measured again later, as the epochs of a resumed run; the last counts."
        )
    if not lines and not findings:
        return None
    count = len(loaded.warnings)
    return Section(
        id="problems",
        title="Not shown above",
        short="Not shown",
        lead=f"{count:,} lines or records could not be read." if count else "Every line could be read.",
        findings=findings,
        blocks=[tag("ul", lines, class_="warnings")] if lines else [],
        key_findings=0,
    )


def _leftovers(records: Sequence[Record]) -> Section | None:
    if not records:
        return None
    counts = Counter((record.kind, record.version) for record in records)
    rows = []
    for (kind, version), count in counts.items():
        sources = [record.source for record in records if (record.kind, record.version) == (kind, version)]
        fields = sorted({key for r in records if (r.kind, r.version) == (kind, version) for key in r.payload})
        rows.append(Row((kind, str(version), f"{count:,}", ", ".join(fields[:12]), sources[0])))
    columns = [Column("Kind", "label"), Column("Version"), Column("Records")]
    columns += [Column("Fields", "words"), Column("The first", "words")]
    return Section(
        id="leftovers",
        title="Records of other kinds",
        short="Other kinds",
        lead=f"sigsoftmax {__version__} has no section for these; they are counted here so that nothing is lost.",
        blocks=[Table(caption="Records that no section shows", columns=columns, rows=rows)],
        key_findings=0,
    )


def _data(sections: Sequence[Section]) -> Markup:
    figures = [figure.to_json() for section in sections for figure in section.figures]
    return tag("script", script_json(figures), type="application/json", id="figures")


def _footer() -> Markup:
    now = dt.datetime.now(dt.UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z")
    return tag(
        "footer",
        tag("p", f"Made by sigsoftmax {__version__} on {now}. Plots: plotly.js, MIT licence, inlined."),
        class_="page-footer",
    )
