"""What a benchmark aims for, as text that people read and that is also judged.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sigsoftmax.records.schemas.speed import Measurement

__all__ = ["Clause", "clauses", "off_the_line", "verdict"]


FLAT = 1.2
"""What `flat` allows: some dozen numbers a token are there, about 100 bytes, where a row of logits has thousands."""
LINEAR = 0.1
"""What `linear` allows to either side."""

Quantity = Literal["x", "no slower", "ms", "MiB", "of the memory", "torch's error", "flat", "linear"]
CLAUSE = re.compile(
    r"(?P<word><=|aim) (?:(?P<whole>\d+(?:\.\d+)?)|1/(?P<part>[1-9]\d*))"
    r"(?:x (?P<error>torch's error)|(?P<ratio>x)(?: of (?P<other>.+))?| (?P<unit>ms|MiB|of the memory))"
)


@dataclass(frozen=True, kw_only=True)
class Clause:
    text: str
    quantity: Quantity
    bound: float
    other: str = ""
    """the implementation that a ratio is relative to; empty: the baseline"""
    is_aim: bool = False

    def holds(self, own: Measurement, case: Mapping[str, Measurement]) -> bool | None:
        """Whether a measurement keeps to it, given all of its case by name; None if that was not measured."""
        value = self._value(own, case)
        return None if value is None else value <= self.bound

    def _value(self, own: Measurement, case: Mapping[str, Measurement]) -> float | None:
        if self.quantity == "x":
            return own.ratio / case[self.other].ratio if self.other else own.ratio
        if self.quantity == "no slower":
            return own.ratio_quartiles[0]
        if self.quantity == "ms":
            return own.milliseconds
        if self.quantity == "torch's error":
            return own.gradient_error
        if self.quantity == "linear":
            off = off_the_line(list(case.values())).get(own.implementation)
            return None if off is None else abs(off)
        if self.quantity == "MiB" or own.peak_mib is None:
            return own.peak_mib
        known = [m.peak_mib for m in case.values() if m.peak_mib is not None]
        reference = min(known) if self.quantity == "flat" else case[own.baseline].peak_mib
        return own.peak_mib / reference if reference else None


def off_the_line(case: Sequence[Measurement]) -> dict[str, float]:
    """How far each time lies above the straight line through the times of all sizes, relative to the line.

    The line minimises the sum of the squares of what is relative to each time: otherwise large sizes alone would count.
    Fewer than three sizes lie on a line anyway, and say nothing.
    """
    points = {m.implementation: (m.size, m.milliseconds) for m in case if m.size is not None}
    if len({size for size, _ in points.values()}) < 3 or min(time for _, time in points.values()) <= 0.0:
        return {}
    weights = [1.0 / time**2 for _, time in points.values()]
    total = sum(weights)
    mean_size, mean_time = (
        sum(w * value for w, value in zip(weights, values, strict=True)) / total
        for values in zip(*points.values(), strict=True)
    )
    along = across = 0.0
    for w, (size, time) in zip(weights, points.values(), strict=True):
        along += w * (size - mean_size) ** 2
        across += w * (size - mean_size) * (time - mean_time)
    slope = across / along
    return {name: time / (mean_time + slope * (size - mean_size)) - 1.0 for name, (size, time) in points.items()}


def clauses(target: str) -> list[Clause]:
    """The clauses of a target; ValueError for what could not be judged."""
    return [_clause(text.strip()) for text in target.split(",")] if target else []


def _clause(text: str) -> Clause:
    if text == "flat":
        return Clause(text=text, quantity="flat", bound=FLAT)
    if text == "no slower":
        return Clause(text=text, quantity="no slower", bound=1.0)
    if text == "linear":
        return Clause(text=text, quantity="linear", bound=LINEAR)
    match = CLAUSE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"cannot judge the target {text!r}; expected '<= 1.0x', '<= 1.0x of NAME', 'no slower', '<= 1.6 ms', "
            "'<= 64 MiB', '<= 1/10 of the memory', \"<= 1.2x torch's error\", 'flat', 'linear', "
            "or one of these with 'aim' instead of '<='"
        )
    return Clause(
        text=text,
        quantity=match["error"] or match["ratio"] or match["unit"],  # type: ignore[arg-type]
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
