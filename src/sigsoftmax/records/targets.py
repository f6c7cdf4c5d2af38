"""Targets of benchmarks, as text that people read and that is also judged.

A target is a list of clauses with commas between them:

    <= 1.0x                    the median ratio to the case's baseline
    <= 1.03x of ours softmax   the ratio to another implementation of the case
    no slower                  the ratio to the baseline: a quarter of the rounds or more have at most 1
    <= 1.6 ms                  the median time
    <= 64 MiB                  the peak memory
    <= 1/10 of the memory      the peak memory relative to the baseline's
    <= 1.2x torch's error      the error of the worst gradient, relative to torch's
    flat                       the peak memory, within a fifth of the smallest in the case
    linear                     the median time, within a tenth of a straight line through all sizes of the case
    aim 0.6x, aim 1.25 ms      what would be better still; missing it misses no target
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sigsoftmax.records.schemas.speed import Measurement

__all__ = ["Clause", "clauses", "off_the_line", "verdict"]


FIXED = {"flat": 1.2, "no slower": 1.0, "linear": 0.1}
"""Bounds of clauses that name none: `flat` allows some dozen numbers per token, about 100 bytes, where a row of logits
has thousands; `linear` allows a tenth to either side."""

CLAUSE = re.compile(
    r"(?P<word><=|aim) (?:(?P<whole>\d+(?:\.\d+)?)|1/(?P<part>[1-9]\d*))"
    r"(?:x (?P<error>torch's error)|(?P<ratio>x)(?: of (?P<other>.+))?| (?P<unit>ms|MiB|of the memory))"
)


@dataclass(frozen=True, kw_only=True)
class Clause:
    text: str
    quantity: str
    """a key of ``QUANTITIES``"""
    bound: float
    other: str = ""
    """the implementation that a ratio is relative to; empty: the baseline"""
    is_aim: bool = False

    def holds(self, own: Measurement, case: Mapping[str, Measurement]) -> bool | None:
        """A measurement keeps to it, given all of its case by name; None if that was not measured."""
        value = QUANTITIES[self.quantity](self, own, case)
        return None if value is None else value <= self.bound


def _ratio(clause: Clause, own: Measurement, case: Mapping[str, Measurement]) -> float:
    return own.ratio / case[clause.other].ratio if clause.other else own.ratio


def _memory_ratio(own: Measurement, reference: float | None) -> float | None:
    return own.peak_mib / reference if own.peak_mib is not None and reference else None


def _least_memory(case: Mapping[str, Measurement]) -> float | None:
    return min((m.peak_mib for m in case.values() if m.peak_mib is not None), default=None)


def _off_the_line(own: Measurement, case: Mapping[str, Measurement]) -> float | None:
    off = off_the_line(list(case.values())).get(own.implementation)
    return None if off is None else abs(off)


QUANTITIES: Mapping[str, Callable[[Clause, Measurement, Mapping[str, Measurement]], float | None]] = {
    "x": _ratio,
    "no slower": lambda clause, own, case: own.ratio_quartiles[0],
    "ms": lambda clause, own, case: own.milliseconds,
    "MiB": lambda clause, own, case: own.peak_mib,
    "of the memory": lambda clause, own, case: _memory_ratio(own, case[own.baseline].peak_mib),
    "torch's error": lambda clause, own, case: own.gradient_error,
    "flat": lambda clause, own, case: _memory_ratio(own, _least_memory(case)),
    "linear": lambda clause, own, case: _off_the_line(own, case),
}
"""the quantity that a clause bounds, by the word that names it"""


def off_the_line(case: Sequence[Measurement]) -> dict[str, float]:
    """The distance of each time above the straight line through the times of all sizes, relative to the line.

    The line minimises the sum of the squares of what is relative to each time: otherwise large sizes alone would count.
    Fewer than three sizes lie on a line anyway, and say nothing.
    """
    points = {m.implementation: (m.size, m.milliseconds) for m in case if m.size is not None}
    if len({size for size, _ in points.values()}) < 3 or min(time for _, time in points.values()) <= 0.0:
        return {}
    sizes, times = np.array(list(points.values())).T
    slope, start = np.polyfit(sizes, times, 1, w=1.0 / times)
    off = times / (start + slope * sizes) - 1.0
    return dict(zip(points, off.tolist(), strict=True))


def clauses(target: str) -> list[Clause]:
    """The clauses of a target; ValueError for what could not be judged."""
    return [_clause(text.strip()) for text in target.split(",")] if target else []


def _clause(text: str) -> Clause:
    if text in FIXED:
        return Clause(text=text, quantity=text, bound=FIXED[text])
    match = CLAUSE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"cannot judge the target {text!r}; expected '<= 1.0x', '<= 1.0x of NAME', 'no slower', '<= 1.6 ms', "
            "'<= 64 MiB', '<= 1/10 of the memory', \"<= 1.2x torch's error\", 'flat', 'linear', "
            "or one of these with 'aim' instead of '<='"
        )
    return Clause(
        text=text,
        quantity=match["error"] or match["ratio"] or match["unit"],
        bound=float(match["whole"]) if match["whole"] else 1 / int(match["part"]),
        other=match["other"] or "",
        is_aim=match["word"] == "aim",
    )


def verdict(own: Measurement, case: Mapping[str, Measurement]) -> str:
    """`yes`, or which clauses fail; then whether an aim was reached. Empty without a target."""
    judged = [(clause, clause.holds(own, case)) for clause in clauses(own.target)]
    required = [(clause.text, held) for clause, held in judged if not clause.is_aim]
    parts = []
    if failed := [text for text, held in required if held is False]:
        parts.append("no: " + ", ".join(failed))
    if unknown := [text for text, held in required if held is None]:
        parts.append("not measured: " + ", ".join(unknown))
    if required and not parts:
        parts.append("yes")
    parts += [f"{clause.text}: {'reached' if held else 'not reached'}" for clause, held in judged if clause.is_aim]
    return "; ".join(parts)
