"""Benchmarks: time and memory beside others of the same run, with their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sigsoftmax.records import Environment, targets
from sigsoftmax.records.grouping import grouped
from sigsoftmax.records.schemas.speed import Measurement
from sigsoftmax.records.targets import Clause
from sigsoftmax.report.figures import Axis, Figure, Trace, numbers
from sigsoftmax.report.markup import plot_text, tag
from sigsoftmax.report.material import Material
from sigsoftmax.report.number_text import DASH, TIMES, number_text, range_text, sentence
from sigsoftmax.report.sections.section import Absent, Block, Section
from sigsoftmax.report.tables import Cell, Column, Fields, Table
from sigsoftmax.report.theme import Looks

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
        """The judgement of the target; a target that cannot be judged says why."""
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
        """The place of the target on the axis of the case: the lowest of its clauses that have a place there."""
        places = [self._place(clause, m) for clause in self.clauses(m) if clause.is_aim == aim]
        return min((place for place in places if place is not None), default=None)

    def _place(self, clause: Clause, m: Measurement) -> float | None:
        if not self.compares_times:
            return clause.bound if clause.quantity == "MiB" else None
        if clause.quantity == "ms" and m.milliseconds > 0.0:
            return clause.bound * m.ratio / m.milliseconds
        ratios = {name: other.ratio for name, other in self.by_name.items()} | {"": 1.0}
        return clause.bound * ratios[clause.other] if clause.quantity == "x" and clause.other in ratios else None


def section(material: Material, looks: Looks) -> Section | Absent:
    cases = [
        Case(suite, name, tuple(entry.payload for entry in found), where)
        for (suite, name, where), found in grouped(
            material.measurements, lambda entry: (entry.payload.suite, entry.payload.case, entry.environment)
        ).items()
    ]
    if not cases:
        return Absent("Benchmarks", "python benchmarks/cpu.py")
    blocks: list[Block] = []
    verdicts: list[str] = []
    suite = ""
    for number, case in enumerate(cases, start=1):
        if case.suite != suite:
            suite = case.suite
            blocks.append(tag("p", f"{suite.upper()}: {case.environment.device}", class_="group-title"))
        blocks.append(_figure(f"benchmark-{number}", case))
        verdicts += [case.verdict(m) for m in case.rows if any(not c.is_aim for c in case.clauses(m))]
    kept, missed = (sum(text.startswith(word) for text in verdicts) for word in ("yes", "no:"))
    unjudged = sum(bool(entry.payload.target) for entry in material.measurements) - kept - missed
    more = f"; {unjudged} more could not be judged." if unjudged > 0 else "."
    findings = [f"Benchmarks: {kept} of {kept + missed} targets are met{more}"] if kept or missed else []
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
    count = len(case.rows)
    line = {"color": "@soft-ink", "width": 1, "dash": "dash"}
    at_one = {"type": "line", "xref": "x", "yref": "paper", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "line": line}
    return Figure(
        id=name,
        title=sentence(case.name),
        summary=_summary(case),
        x=Axis(
            title=f"time relative to {case.rows[0].baseline}" if case.compares_times else "peak memory (MiB)",
            can_switch=False,
            settings={"rangemode": "tozero", "tickformat": ",.3~g"},
        ),
        y=Axis(
            title="",
            can_switch=False,
            settings={
                "range": [count - 0.5, -0.85],
                "showticklabels": False,
                "ticks": "",
                "automargin": False,
                "showgrid": False,
                "fixedrange": True,
                "zeroline": False,
            },
        ),
        traces=[_bars(case), *_marks(case, "target", 3.5), *_marks(case, "aim", 1.5)],
        table=_table(case),
        environments=[case.environment],
        height=ROW * count + 70,
        layout={
            "annotations": _labels(case, in_full=True),
            "shapes": [at_one] if case.compares_times else [],
            "bargap": 0.1,
            "margin": {"l": 8, "r": 14, "t": 8, "b": 46},
        },
        narrow_layout={"annotations": _labels(case, in_full=False)},
    )


def _bars(case: Case) -> Trace:
    """Times with their quartiles, or memory."""
    bars: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "x": numbers([m.ratio if case.compares_times else (m.peak_mib or 0.0) for m in case.rows]),
        "y": list(range(len(case.rows))),
        "width": 0.4,
        "marker": {"color": [_color(m, case) for m in case.rows], "line": {"width": 0}},
        "text": [plot_text(m.implementation) for m in case.rows],
        "textposition": "none",
        "customdata": [[_details(m), plot_text(case.verdict(m) or "no target")] for m in case.rows],
        "hovertemplate": "<b>%{text}</b><br>%{customdata[0]}<br>%{customdata[1]}<extra></extra>",
    }
    if case.compares_times:
        ends = [_ends(m.ratio_quartiles, m.ratio) for m in case.rows]
        bars["error_x"] = {
            "type": "data",
            "symmetric": False,
            "array": numbers([max(0.0, high - m.ratio) for m, (_, high) in zip(case.rows, ends, strict=True)]),
            "arrayminus": numbers([max(0.0, m.ratio - low) for m, (low, _) in zip(case.rows, ends, strict=True)]),
            "color": "@ink",
            "thickness": 1.2,
            "width": 3,
        }
    return Trace(bars)


def _marks(case: Case, name: str, width: float) -> list[Trace]:
    """Ticks across the bars where targets or aims lie; none where no bar has one."""
    bounds = {place: case.bound(m, aim=name == "aim") for place, m in enumerate(case.rows)}
    marked = {place: bound for place, bound in bounds.items() if bound is not None}
    data = {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": numbers(list(marked.values())),
        "y": list(marked),
        "marker": {
            "symbol": "line-ns-open",
            "size": 20,
            "color": "@target",
            "line": {"width": width, "color": "@target"},
        },
        "hovertemplate": f"{name}: %{{x:.3~g}}<extra></extra>",
    }
    return [Trace(data)] if marked else []


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
            "text": f"{_bold(m)} · {_short(m, case, in_full=in_full)}",
            "font": {"size": 12 if in_full else 11},
            "bgcolor": "@card",
            "borderpad": 1,
        }
        for place, m in enumerate(case.rows)
    ]


def _bold(m: Measurement) -> str:
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
    """The first and the last quartile of a record, which may hold any number of them."""
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
    has_errors = any(m.gradient_error is not None for m in case.rows)
    fields: Fields[Measurement] = {
        Column("Implementation", "label"): lambda m: m.implementation,
        "Time": lambda m: _milliseconds(m.milliseconds),
        "Quartiles": lambda m: " to ".join(map(_milliseconds, _ends(m.milliseconds_quartiles, m.milliseconds))),
        "Ratio": lambda m: f"{m.ratio:.3f}" if case.compares_times else DASH,
        "Peak memory": lambda m: _mib(m.peak_mib),
        **({"Gradient error": lambda m: number_text(m.gradient_error, 3)} if has_errors else {}),
        Column("Target", "words"): lambda m: m.target or DASH,
        Column("Met", "words"): lambda m: _verdict_cell(case.verdict(m)),
    }
    notes = [f"Medians of {range_text(m.rounds for m in case.rows)} rounds."]
    if has_errors:
        notes.append("Gradient error: of the worst gradient against float64, relative to torch's.")
    return Table.of(case.rows, fields, caption=sentence(case.name), notes=notes)


def _verdict_cell(verdict: str) -> Cell:
    class_ = "good" if verdict.startswith("yes") else "bad" if verdict.startswith("no:") else ""
    return Cell(verdict or DASH, class_=class_)
