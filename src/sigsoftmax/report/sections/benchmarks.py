"""Benchmarks: time and memory beside others of the same run, with what was aimed for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sigsoftmax.records import Environment, targets
from sigsoftmax.records.schemas.speed import Measurement
from sigsoftmax.records.targets import Clause
from sigsoftmax.report.figures import Axis, Figure, Trace, numbers
from sigsoftmax.report.markup import plot_text, tag
from sigsoftmax.report.material import Material
from sigsoftmax.report.section import Absent, Block, Section
from sigsoftmax.report.tables import DASH, TIMES, Cell, Column, Row, Table, number_text, sentence

__all__ = ["section"]

ROW = 44
"""pixels for a bar and the name above it"""


@dataclass(frozen=True)
class Case:
    """All measurements of a case in one run: times of different runs do not compare."""

    suite: str
    name: str
    rows: tuple[Measurement, ...]
    environment: Environment

    @property
    def by_name(self) -> dict[str, Measurement]:
        return {m.implementation: m for m in self.rows}

    @property
    def compares_times(self) -> bool:
        return any(m.implementation != m.baseline for m in self.rows)

    def verdict(self, m: Measurement) -> str:
        """What became of the target; a target that cannot be judged says why."""
        try:
            return targets.verdict(m, self.by_name)
        except ZeroDivisionError:
            return "not judged: relative to a time of zero"
        except KeyError as missing:
            return f"not judged: the case lacks {missing}"
        except ValueError as error:
            return f"not judged: {error}"

    def clauses(self, m: Measurement) -> list[Clause]:
        try:
            return targets.clauses(m.target)
        except ValueError:
            return []

    def bound(self, m: Measurement, *, aim: bool) -> float | None:
        """Where the target lies on the axis of the case: the lowest of its clauses that have a place there."""
        found = []
        for clause in self.clauses(m):
            if clause.is_aim != aim:
                continue
            if self.compares_times and clause.quantity == "x":
                other = self.by_name.get(clause.other) if clause.other else None
                if not clause.other or other:
                    found.append(clause.bound * (other.ratio if other else 1.0))
            elif self.compares_times and clause.quantity == "ms" and m.milliseconds > 0.0:
                found.append(clause.bound * m.ratio / m.milliseconds)
            elif not self.compares_times and clause.quantity == "MiB":
                found.append(clause.bound)
        return min(found) if found else None


def section(material: Material) -> Section | Absent:
    cases: dict[tuple[str, str, Environment], list[Measurement]] = {}
    for entry in material.measurements:
        m = entry.payload
        cases.setdefault((m.suite, m.case, entry.environment), []).append(m)
    if not cases:
        return Absent("Benchmarks", "python benchmarks/cpu.py")
    blocks: list[Block] = []
    kept = missed = 0
    suite_before = ""
    for number, ((suite, name, where), found) in enumerate(cases.items(), start=1):
        case = Case(suite, name, tuple(found), where)
        if suite != suite_before:
            blocks.append(tag("p", f"{suite.upper()}: {where.device}", class_="group-title"))
            suite_before = suite
        blocks.append(_figure(f"benchmark-{number}", case))
        verdicts = [case.verdict(m) for m in case.rows if any(not c.is_aim for c in case.clauses(m))]
        kept += sum(text.startswith("yes") for text in verdicts)
        missed += sum(text.startswith("no:") for text in verdicts)
    unjudged = sum(bool(entry.payload.target) for entry in material.measurements) - kept - missed
    findings = []
    if kept or missed:
        findings.append(
            f"Benchmarks: {kept} of {kept + missed} targets are met"
            + (f"; {unjudged} more could not be judged." if unjudged > 0 else ".")
        )
    return Section(
        id="benchmarks",
        title="Benchmarks",
        short="Benchmarks",
        lead="Median times relative to the baseline of each case, measured side by side in one run; less is better. "
        "Where a case compares no times, the bars are peak memory. Ticks across a bar are targets.",
        findings=findings,
        blocks=blocks,
    )


def _is_ours(m: Measurement) -> bool:
    return m.implementation.startswith("ours")


def _color(m: Measurement, case: Case) -> str:
    if _is_ours(m):
        return "@s4" if m.target else "@s3"
    return "@soft-ink" if case.compares_times and m.implementation == m.baseline else "@s10"


def _figure(name: str, case: Case) -> Figure:
    value = [m.ratio if case.compares_times else (m.peak_mib or 0.0) for m in case.rows]
    places = list(range(len(case.rows)))
    bars: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "x": numbers(value),
        "y": places,
        "width": 0.4,
        "marker": {"color": [_color(m, case) for m in case.rows], "line": {"width": 0}},
        "text": [plot_text(m.implementation) for m in case.rows],
        "textposition": "none",
        "customdata": [[_details(m), plot_text(case.verdict(m) or "no target")] for m in case.rows],
        "hovertemplate": "<b>%{text}</b><br>%{customdata[0]}<br>%{customdata[1]}<extra></extra>",
    }
    if case.compares_times:
        bars["error_x"] = {
            "type": "data",
            "symmetric": False,
            "array": numbers([max(0.0, _ends(m.ratio_quartiles, m.ratio)[1] - m.ratio) for m in case.rows]),
            "arrayminus": numbers([max(0.0, m.ratio - _ends(m.ratio_quartiles, m.ratio)[0]) for m in case.rows]),
            "color": "@ink",
            "thickness": 1.2,
            "width": 3,
        }
    traces = [Trace(bars)]
    for aim, symbol in ((False, "target"), (True, "aim")):
        bounds = [(place, case.bound(m, aim=aim)) for place, m in zip(places, case.rows, strict=True)]
        marked = [(place, bound) for place, bound in bounds if bound is not None]
        if marked:
            traces.append(
                Trace(
                    {
                        "type": "scatter",
                        "mode": "markers",
                        "name": symbol,
                        "x": numbers([bound for _, bound in marked]),
                        "y": [place for place, _ in marked],
                        "marker": {
                            "symbol": "line-ns-open",
                            "size": 20,
                            "color": "@target",
                            "line": {"width": 3.5 if symbol == "target" else 1.5, "color": "@target"},
                        },
                        "hovertemplate": f"{symbol}: %{{x:.3~g}}<extra></extra>",
                    }
                )
            )
    shapes = []
    if case.compares_times:
        line = {"color": "@soft-ink", "width": 1, "dash": "dash"}
        shapes = [{"type": "line", "xref": "x", "yref": "paper", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "line": line}]
    baseline = case.rows[0].baseline
    return Figure(
        id=name,
        title=sentence(case.name),
        summary=_summary(case),
        x=Axis(
            title=f"time relative to {baseline}" if case.compares_times else "peak memory (MiB)",
            can_switch=False,
            settings={"rangemode": "tozero", "tickformat": ",.3~g"},
        ),
        y=Axis(
            title="",
            can_switch=False,
            settings={
                "range": [len(places) - 0.5, -0.85],
                "showticklabels": False,
                "ticks": "",
                "automargin": False,
                "showgrid": False,
                "fixedrange": True,
                "zeroline": False,
            },
        ),
        traces=traces,
        table=_table(case),
        environments=[case.environment],
        height=ROW * len(places) + 70,
        layout={
            "annotations": _labels(case, in_full=True),
            "shapes": shapes,
            "bargap": 0.1,
            "margin": {"l": 8, "r": 14, "t": 8, "b": 46},
        },
        narrow_layout={"annotations": _labels(case, in_full=False)},
    )


def _labels(case: Case, *, in_full: bool) -> list[dict[str, Any]]:
    """Names stand above the bars, so that bars keep their width on a phone."""
    return [
        {
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "y": place - 0.26,
            "yref": "y",
            "yanchor": "bottom",
            "showarrow": False,
            "align": "left",
            "text": f"{_name(m)} · {_short(m, case, in_full=in_full)}",
            "font": {"size": 12 if in_full else 11},
            "bgcolor": "@card",
            "borderpad": 1,
        }
        for place, m in enumerate(case.rows)
    ]


def _name(m: Measurement) -> str:
    return f"<b>{plot_text(m.implementation)}</b>" if m.target else plot_text(m.implementation)


def _short(m: Measurement, case: Case, *, in_full: bool) -> str:
    if not case.compares_times:
        return _mib(m.peak_mib)
    parts = [f"{m.ratio:.2f}{TIMES}", _milliseconds(m.milliseconds)]
    if m.peak_mib is not None:
        parts.append(_mib(m.peak_mib))
    return " · ".join(parts if in_full else parts[:1])


def _details(m: Measurement) -> str:
    parts = [f"{_milliseconds(m.milliseconds)}, {m.ratio:.3f}{TIMES} of {plot_text(m.baseline)}"]
    if m.peak_mib is not None:
        parts.append(f"peak memory {_mib(m.peak_mib)}")
    if m.gradient_error is not None:
        parts.append(f"gradient error {m.gradient_error:.2f}{TIMES} torch's")
    return "<br>".join(parts)


def _ends(quartiles: Sequence[float], median: float) -> tuple[float, float]:
    """Of a record that may hold any number of them."""
    return (quartiles[0], quartiles[-1]) if quartiles else (median, median)


def _milliseconds(value: float) -> str:
    return f"{number_text(value, 3)} ms"


def _mib(value: float | None) -> str:
    return DASH if value is None else "< 0.1 MiB" if value < 0.1 else f"{number_text(value, 3)} MiB"


def _summary(case: Case) -> str:
    judged = [(m, case.verdict(m)) for m in case.rows if m.target]
    if case.compares_times:
        ours = [m for m in case.rows if _is_ours(m)]
        text = f"{len(case.rows)} implementations beside {case.rows[0].baseline}."
        if ours:
            text += f" Ours take {min(m.ratio for m in ours):.2f} to {max(m.ratio for m in ours):.2f} times as long."
    else:
        known = [m.peak_mib for m in case.rows if m.peak_mib is not None]
        text = f"Peak memory from {_mib(min(known))} to {_mib(max(known))}." if known else "No memory was measured."
    for m, verdict in judged:
        text += f" Target of {m.implementation}, {m.target}: {verdict}."
    return text


def _table(case: Case) -> Table:
    errors = any(m.gradient_error is not None for m in case.rows)
    rows = []
    for m in case.rows:
        verdict = case.verdict(m)
        class_ = "good" if verdict.startswith("yes") else "bad" if verdict.startswith("no:") else None
        quartiles = [_milliseconds(q) for q in _ends(m.milliseconds_quartiles, m.milliseconds)]
        cells: list[Cell | str] = [
            m.implementation,
            _milliseconds(m.milliseconds),
            " to ".join(quartiles),
            f"{m.ratio:.3f}" if case.compares_times else DASH,
            _mib(m.peak_mib),
        ]
        if errors:
            cells.append(number_text(m.gradient_error, 3))
        rows.append(Row((*cells, m.target or DASH, Cell(verdict or DASH, class_=class_))))
    columns = [
        Column("Implementation", "label"),
        Column("Time"),
        Column("Quartiles"),
        Column("Ratio"),
        Column("Peak memory"),
    ]
    if errors:
        columns.append(Column("Gradient error"))
    columns += [Column("Target", "words"), Column("Met", "words")]
    rounds = sorted({m.rounds for m in case.rows})
    notes = [f"Medians of {' to '.join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))} rounds."]
    if errors:
        notes.append("Gradient error: of the worst gradient against float64, relative to torch's.")
    return Table(caption=sentence(case.name), columns=columns, rows=rows, notes=notes)
