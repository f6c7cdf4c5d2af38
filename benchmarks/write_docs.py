"""Make the tables and pictures of docs/benchmark-tables.md from the records: `make bench-docs`.

The page is written by hand but for what stands between `<!-- generated: SUITE -->` and `<!-- end -->`, which is made
anew from the records of that suite, with docs/images/benchmarks-SUITE*.png. `--check` writes nothing and exits with 1
if page or pictures are not what the records give.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bars import Bar, Kind, Panel, draw, drawn_from
from measuring import RECORDS, Measurement, mib_text, milliseconds_text, number_text

from sigsoftmax import records
from sigsoftmax.records import Environment, Record, targets

PAGE = Path(__file__).parents[1] / "docs" / "benchmark-tables.md"
PART = re.compile(r"(?P<begin><!-- generated: (?P<suite>[\w-]+) -->\n).*?(?P<end><!-- end -->)", re.S)
NO_RECORDS = "*No records yet.*\n"


@dataclass(frozen=True)
class CaseResult:
    """All measurements of a case."""

    name: str
    rows: tuple[Measurement, ...]
    environment: Environment

    @property
    def compares_times(self) -> bool:
        return any(m.implementation != m.baseline for m in self.rows)

    @property
    def by_name(self) -> dict[str, Measurement]:
        return {m.implementation: m for m in self.rows}

    @property
    def grows(self) -> bool:
        """True if a size grows from row to row."""
        return any(m.size is not None for m in self.rows)

    @property
    def has_picture(self) -> bool:
        """Bars are ratios of times, or memory if no times are compared and memory is aimed at."""
        quantities = {clause.quantity for m in self.rows for clause in targets.clauses(m.target)}
        has_memory = any(m.peak_mib is not None for m in self.rows)
        return self.compares_times or (has_memory and bool(quantities & {"MiB", "flat"} or not self.grows))

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


def read_suites(folder: Path, known: Iterable[str], page: Path) -> dict[str, list[CaseResult]]:
    """The cases of each suite in the order of the files; ValueError names the file and the line at fault."""
    suites: dict[str, list[CaseResult]] = {suite: [] for suite in known}

    def has_a_place(record: Record, m: Measurement) -> None:
        if m.suite not in suites:
            raise ValueError(
                f"{record.source}: the suite {m.suite!r} has no place in {page.name}, which has: "
                f"{', '.join(suites) or 'none'}; add the lines '<!-- generated: {m.suite} -->' and '<!-- end -->'"
            )

    for case in read_cases(*sorted(folder.glob("*.jsonl")), check=has_a_place):
        suites[case.rows[0].suite].append(case)
    return suites


def read_cases(*paths: Path, check: Callable[[Record, Measurement], None] = lambda record, m: None) -> list[CaseResult]:
    """The cases in the order of the files; each was measured in one run, and has what its targets name."""
    cases: dict[tuple[str, str], list[tuple[Measurement, Environment]]] = {}
    for path in paths:
        for record in records.read(path):
            m = record.payload_as(Measurement)
            check(record, m)
            rows = cases.setdefault((m.suite, m.case), [])
            if m.implementation in (other.implementation for other, _ in rows):
                raise ValueError(
                    f"{record.source}: {m.implementation!r} is there twice in the case {m.case!r}; a run that measured "
                    "less than an earlier one does not replace it: delete the lines of one of them"
                )
            try:
                targets.clauses(m.target)
            except ValueError as error:
                raise ValueError(f"{record.source}: {error}") from None
            # The seconds at which a record was written are not part of where it was measured.
            where = dataclasses.replace(record.environment, time_utc=record.environment.time_utc[:10])
            if rows and rows[0][1] != where:
                raise ValueError(
                    f"{record.source}: the case {m.case!r} was begun in another run, and times of different runs do "
                    "not compare; measure the whole case anew"
                )
            rows.append((m, where))
    return [_case(name, rows) for (_, name), rows in cases.items()]


def _case(name: str, rows: Sequence[tuple[Measurement, Environment]]) -> CaseResult:
    case = CaseResult(name, tuple(m for m, _ in rows), rows[0][1])
    for m in case.rows:
        named = [m.baseline, *(clause.other for clause in targets.clauses(m.target) if clause.other)]
        if absent := [other for other in named if other not in case.by_name]:
            raise ValueError(f"the case {name!r} lacks {absent[0]!r}, to which {m.implementation!r} is compared")
    return case


# --- text ---------------------------------------------------------------------------------------------------------


def part_text(suite: str, cases: Sequence[CaseResult], images: str) -> str:
    """The text between the markers of a suite."""
    if not cases:
        return NO_RECORDS
    blocks = []
    one_place = len({case.environment for case in cases}) == 1
    if one_place:
        blocks.append(place_text(suite, cases[0].environment))
    if any(case.has_picture for case in cases):
        blocks.append(picture_text(f"All cases, {suite}: what has a target, and its baseline.", images, suite))
    if len(cases) > FEW_CASES:
        blocks.append(summary_text(cases))
    for case in cases:
        blocks.append(f"### {case.name[0].upper()}{case.name[1:]}")
        if not one_place:
            blocks.append(place_text(suite, case.environment))
        if case.has_picture:
            blocks.append(picture_text(f"{case.name}: {quantity_text(case)}.", images, suite, case))
        blocks.append(table_text(case))
        if note := equal_options_text(case):
            blocks.append(note)
        if any(m.gradient_errors for m in case.rows):
            blocks.append(errors_text(case))
    return "\n\n".join(blocks) + "\n"


def place_text(suite: str, where: Environment) -> str:
    threads = f", {where.threads} thread{'s' if where.threads > 1 else ''}" if suite == "cpu" else ""
    libraries = "".join(f", {library}" for library in where.libraries) or "; versions of other libraries not recorded"
    return (
        f"Measured on {where.time_utc}: {where.device}{threads}; {where.system}, Python {where.python_version}, "
        f"torch {where.torch_version}{libraries}; sigsoftmax {where.package_version}, {where.revision_text}. "
        f"The command:\n\n```sh\n{where.command}\n```"
    )


def quantity_text(case: CaseResult) -> str:
    if case.compares_times:
        return f"time relative to {case.rows[0].baseline}, less is better"
    return "peak memory, less is better"


def picture_name(suite: str, case: CaseResult | None = None) -> str:
    return f"benchmarks-{suite}-{case.slug}.png" if case else f"benchmarks-{suite}.png"


def picture_text(description: str, images: str, suite: str, case: CaseResult | None = None) -> str:
    return f"![{description}]({images}/{picture_name(suite, case)})"


Column = tuple[str, str, Callable[[Measurement], str]]
"""Head, alignment ("l" or "r") and text of a cell."""


FEW_CASES = 6
"""Up to so many, the tables of the cases show at a glance which targets are met."""


def summary_text(cases: Sequence[CaseResult]) -> str:
    """Every target of a suite in one table."""
    rows = [row for case in cases for row in judged(case)]
    met = sum(row[-1].startswith("yes") for row in rows)
    missed = sum(row[-1].startswith("no:") for row in rows)
    unknown = len(rows) - met - missed
    title = f"{met} of {len(rows)} targets are met" + (f"; {unknown} could not be judged in full." if unknown else ".")
    heads = ("case", "implementation", "median ms", "ratio", "memory MiB", "gradient error", "target", "met")
    return f"### All targets\n\n{title}\n\n" + markdown_table(heads, "llrrrrll", rows)


def judged(case: CaseResult) -> Iterator[tuple[str, ...]]:
    rows = [m for m in case.rows if any(not clause.is_aim for clause in targets.clauses(m.target))]
    verdicts = {m.implementation: _signs(targets.verdict(m, case.by_name)) for m in rows}
    if case.grows and rows:
        # One line for all sizes: those that fail are named.
        failed = [f"{name} ({verdict})" for name, verdict in verdicts.items() if not verdict.startswith("yes")]
        met = f"no: {', '.join(failed)}" if failed else "yes"
        yield case.name, f"{len(rows)} sizes", "", "", "", "", _signs(rows[0].target), met
        return
    for m in rows:
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(m.ratio, *m.ratio_quartiles) if case.compares_times else ""
        error = "" if m.gradient_error is None else f"{m.gradient_error:.2f}"
        figures = (milliseconds_text(m.milliseconds), ratio, mib_text(m.peak_mib), error)
        yield case.name, escaped(m.implementation), *figures, _signs(m.target), verdicts[m.implementation]


SMOOTHED = " with label smoothing"


def equal_options_text(case: CaseResult) -> str:
    """Ratios of equal options, where the baseline of a case has an option that some of its rows have not."""
    baseline = case.rows[0].baseline
    plain = case.by_name.get(baseline.removesuffix(SMOOTHED))
    if not baseline.endswith(SMOOTHED) or plain is None:
        return ""
    own = [m for m in case.rows if is_ours(m) and not m.implementation.endswith(SMOOTHED)]
    parts = [
        f"{m.implementation} takes {m.milliseconds / plain.milliseconds:.2f}x as long as {plain.implementation} "
        f"({milliseconds_text(m.milliseconds)} against {milliseconds_text(plain.milliseconds)} ms)"
        for m in own
    ]
    return (
        f"The baseline has label smoothing, which takes torch several more operations. At equal options, without it, "
        f"{'; '.join(parts)}."
        if parts
        else ""
    )


def errors_text(case: CaseResult) -> str:
    """The error of each gradient and kind of logits."""
    kinds = list(dict.fromkeys(kind for m in case.rows for kind in m.gradient_errors))
    rows = [
        (_named(m, case), *(f"{m.gradient_errors[kind]:.3f}" if kind in m.gradient_errors else "" for kind in kinds))
        for m in case.rows
        if m.gradient_errors
    ]
    heads = ("error relative to torch's", *kinds)
    return markdown_table(heads, "l" + "r" * len(kinds), rows)


def markdown_table(heads: Sequence[str], alignments: str, rows: Sequence[Sequence[str]]) -> str:
    rule = "|".join({"l": "---", "r": "---:"}[alignment] for alignment in alignments)
    return "\n".join(f"|{line}|" for line in (_cells(heads), rule, *map(_cells, rows)))


def _cells(texts: Sequence[str]) -> str:
    return f" {' | '.join(texts)} "


def table_text(case: CaseResult) -> str:
    columns = list(_columns(case))
    rows = [[cell(m) for _, _, cell in columns] for m in case.rows]
    text = markdown_table([head for head, _, _ in columns], "".join(side for _, side, _ in columns), rows)
    rounds = sorted({m.rounds for m in case.rows})
    note = f"{' to '.join(map(str, rounds))} round{'s' if rounds != [1] else ''}."
    return f"{text}\n\n{note}"


def _columns(case: CaseResult) -> Iterator[Column]:
    yield "implementation", "l", lambda m: _named(m, case)
    yield "median ms", "r", lambda m: milliseconds_text(m.milliseconds)
    if case.compares_times:
        yield "ratio", "r", lambda m: f"{m.ratio:.2f}"
        yield "quartiles", "r", lambda m: "{:.2f} to {:.2f}".format(*m.ratio_quartiles)
    elif any(m.rounds > 1 for m in case.rows):
        yield "quartiles", "r", lambda m: " to ".join(milliseconds_text(value) for value in m.milliseconds_quartiles)
    if off := targets.off_the_line(case.rows):
        yield "off a line", "r", lambda m: f"{100.0 * off[m.implementation]:+.1f} %" if m.implementation in off else ""
    if any(m.peak_mib is not None for m in case.rows):
        yield "memory MiB", "r", lambda m: mib_text(m.peak_mib)
    # What a suite measures besides, such as an error, gets a column under the name of its field.
    for field in dataclasses.fields(Measurement)[len(COMMON_FIELDS) :]:
        if field.name not in SHOWN_ELSEWHERE and any(
            getattr(m, field.name) not in (None, field.default) for m in case.rows
        ):
            yield field.name.replace("_", " "), "r", _reader_of(field.name)
    if any(m.target for m in case.rows):
        yield "target", "l", lambda m: _signs(m.target)
        yield "met", "l", lambda m: _signs(targets.verdict(m, case.by_name))


COMMON_FIELDS = (
    "suite",
    "case",
    "implementation",
    "baseline",
    "milliseconds",
    "milliseconds_quartiles",
    "ratio",
    "ratio_quartiles",
    "peak_mib",
    "rounds",
    "target",
)
SHOWN_ELSEWHERE = ("gradient_errors", "size")
"""Errors have a table of their own, and sizes are part of the names."""


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _named(m: Measurement, case: CaseResult) -> str:
    name = escaped(m.implementation)
    if is_ours(m):
        name = f"**{name}**"
    return f"{name} (baseline)" if case.compares_times and m.implementation == m.baseline else name


def _reader_of(field: str) -> Callable[[Measurement], str]:
    def text(m: Measurement) -> str:
        value = getattr(m, field)
        if field == "gradient_error" and value is not None:
            # Bounds on errors have two digits, as 1.05 has.
            return f"{value:.2f}"
        return number_text(value) if value is None or isinstance(value, int | float) else str(value)

    return text


def _signs(text: str) -> str:
    return escaped(text.replace("<=", "≤"))


def is_ours(m: Measurement) -> bool:
    return m.implementation.startswith(("ours ", "ours:"))


# --- pictures -----------------------------------------------------------------------------------------------------


def panel(case: CaseResult, rows: Sequence[Measurement]) -> Panel:
    quantity: Literal["x", "MiB"] = "x" if case.compares_times else "MiB"
    return Panel(
        title=case.name,
        axis=quantity_text(case) + ("" if case.compares_times else " (MiB)"),
        bars=[_bar(m, quantity) for m in rows],
        unit=quantity,
    )


def _bar(m: Measurement, quantity: Literal["x", "MiB"]) -> Bar:
    in_unit = [clause for clause in targets.clauses(m.target) if clause.quantity == quantity and not clause.other]
    memory = () if m.peak_mib is None else (f"{mib_text(m.peak_mib)} MiB",)
    return Bar(
        name=m.implementation,
        value=m.ratio if quantity == "x" else m.peak_mib or 0.0,
        spread=m.ratio_quartiles if quantity == "x" else None,
        columns=(f"{m.ratio:.2f}x", *memory) if quantity == "x" else memory,
        kind=_kind(m, quantity),
        target=next((clause.bound for clause in in_unit if not clause.is_aim), None),
        aim=next((clause.bound for clause in in_unit if clause.is_aim), None),
    )


def _kind(m: Measurement, quantity: Literal["x", "MiB"]) -> Kind:
    if quantity == "x" and m.implementation == m.baseline:
        return "baseline"
    if is_ours(m):
        return "ours with a target" if m.target else "ours"
    return "other"


def pictures(suite: str, cases: Sequence[CaseResult]) -> dict[str, list[Panel]]:
    """The panels of each picture of a suite, by file name."""
    drawn = [case for case in cases if case.has_picture]
    if not drawn:
        return {}
    overview = [
        panel(case, [m for m in case.rows if m.target or (case.compares_times and m.implementation == m.baseline)])
        for case in drawn
        if any(m.target for m in case.rows)
    ]
    return {
        picture_name(suite): overview or [panel(case, case.rows) for case in drawn],
        **{picture_name(suite, case): [panel(case, case.rows)] for case in drawn},
    }


def digest(panels: Sequence[Panel]) -> str:
    return hashlib.sha256(json.dumps([dataclasses.asdict(p) for p in panels]).encode()).hexdigest()


# --- the command --------------------------------------------------------------------------------------------------


def new_page(text: str, suites: Mapping[str, Sequence[CaseResult]], images: str) -> str:
    return PART.sub(
        lambda part: f"{part['begin']}\n{part_text(part['suite'], suites[part['suite']], images)}\n{part['end']}", text
    )


def suites_of(page: Path, text: str) -> list[str]:
    suites = [part["suite"] for part in PART.finditer(text)]
    if len(re.findall(r"<!-- generated: ", text)) != len(suites) or text.count("<!-- end -->") != len(suites):
        raise ValueError(f"{page}: each '<!-- generated: SUITE -->' needs an '<!-- end -->' after it, and the reverse")
    if repeated := {suite for suite in suites if suites.count(suite) > 1}:
        raise ValueError(f"{page}: more than one part is generated for {', '.join(sorted(repeated))}")
    return suites


def run(folder: Path, page: Path, *, check: bool) -> list[str]:
    """Bring page and pictures up to date, or only look; returns what was, or is, out of date."""
    if not page.is_file():
        raise ValueError(f"no page at {page}; it is written by hand but for its tables")
    text = page.read_text(encoding="utf-8")
    suites = read_suites(folder, suites_of(page, text), page)
    images = page.parent / "images"
    stale = []
    wanted = new_page(text, suites, images.name)
    if wanted != text:
        stale.append(page.name)
        if not check:
            page.write_text(wanted, encoding="utf-8")
    for suite, cases in suites.items():
        drawings = pictures(suite, cases)
        for name, panels in drawings.items():
            # The numbers are compared, not the pixels: another version of matplotlib draws others.
            if drawn_from(images / name) != digest(panels):
                stale.append(f"{images.name}/{name}")
                if not check:
                    draw(panels, images / name, digest(panels))
        for path in sorted({*images.glob(f"benchmarks-{suite}.png"), *images.glob(f"benchmarks-{suite}-*.png")}):
            if path.name not in drawings:
                stale.append(f"{images.name}/{path.name}")
                if not check:
                    path.unlink()
    return stale


def rewritten(page: Path, parts: Mapping[str, Callable[[], str]], *, check: bool, advice: str) -> int:
    """Put the parts of a page that ``parts`` names anew; or only say, and return 1, if that would change it.

    Parts of another name belong to another script.
    """
    before = page.read_text(encoding="utf-8")

    def anew(part: re.Match[str]) -> str:
        make = parts.get(part["suite"])
        return part[0] if make is None else f"{part['begin']}{make()}{part['end']}"

    after = PART.sub(anew, before)
    if not check:
        page.write_text(after, encoding="utf-8")
    elif before != after:
        print(f"{page.name} is not what the records give; {advice}")
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is out of date")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page; pictures go to the folder images beside it")
    options = parser.parse_args(arguments)
    try:
        stale = run(options.records, options.page, check=options.check)
    except ValueError as error:
        print(f"write_docs.py: {error}", file=sys.stderr)
        return 2
    if not stale:
        print("page and pictures are what the records give")
    elif options.check:
        print(f"out of date: {', '.join(stale)}; run: make bench-docs", file=sys.stderr)
    else:
        print(f"written: {', '.join(stale)}")
    return int(bool(stale) and options.check)


if __name__ == "__main__":
    sys.exit(main())
