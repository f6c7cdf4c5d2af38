"""The way that numbers, ranges, lists and long lines are written in tables and sentences."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterable, Sequence

from sigsoftmax.records.durations import duration_text
from sigsoftmax.records.statistics import Sample

__all__ = [
    "DASH",
    "MINUS",
    "NO_BREAK",
    "TIMES",
    "count_text",
    "counted",
    "interval_text",
    "listed",
    "names_text",
    "number_text",
    "range_text",
    "sample_text",
    "seconds_text",
    "sentence",
    "signed_text",
    "size_text",
    "width_text",
    "wrapped",
    "yes_or_no",
]

DASH, MINUS, TIMES = "\u2013", "\u2212", "\u00d7"
NO_BREAK = "\u00a0"
"""a space at which a page begins no new line"""
COLUMNS = 110
"""the width at which sentences are broken for a terminal"""
SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def sentence(text: str) -> str:
    """The text with a capital at the beginning."""
    return text[:1].upper() + text[1:]


def wrapped(line: str, indent: str = "") -> str:
    """The line broken for a terminal; it keeps its indentation, and what follows stands two spaces further in."""
    indent += line[: len(line) - len(line.lstrip())]
    wrapper = textwrap.TextWrapper(COLUMNS, indent, f"{indent}  ", break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(line.strip())


def counted(number: float, what: str) -> str:
    """``1 seed`` or ``3 seeds``."""
    return f"{number:g} {what}{'' if number == 1 else 's'}"


def names_text(names: Sequence[str], last: str = "and") -> str:
    """Names with commas between, and a word before the last."""
    return f" {last} ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def yes_or_no(answer: bool | None) -> str:
    """An answer in a cell, or a dash where there is none."""
    return DASH if answer is None else "yes" if answer else "no"


def number_text(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits; a dash for None."""
    if value is None:
        return DASH
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else f"{MINUS}∞"
    if value == 0.0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-4:
        mantissa, _, exponent = f"{value:.{max(digits - 2, 1)}e}".partition("e")
        return f"{mantissa} {TIMES} 10{str(int(exponent)).translate(SUPERSCRIPTS)}".replace("-", MINUS)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}".replace("-", MINUS)


def sample_text(sample: Sample | None, decimals: int = 2) -> str:
    """Mean and standard deviation; large means without decimals."""
    if sample is None or not -math.inf < sample.mean < 1e5:
        return number_text(None if sample is None else sample.mean)
    form = f",.{decimals if sample.mean < 1e3 else 0}f"
    is_known = sample.deviation is not None and math.isfinite(sample.deviation)
    return format(sample.mean, form) + (f" ± {format(sample.deviation, form)}" if is_known else "")


def interval_text(ends: tuple[float, float], form: str) -> str:
    """Both ends of an interval, in brackets that stay on one line."""
    low, high = (format(end, form).replace("-", MINUS) for end in ends)
    return f"({low}{NO_BREAK}to{NO_BREAK}{high})"


def listed(items: Sequence[str], most: int = 8) -> str:
    """The items with semicolons between; of many only the first, and how many more there are."""
    shown = list(items) if len(items) <= most else [*items[: most - 1], f"and {len(items) - most + 1} more"]
    return "; ".join(shown)


def signed_text(value: float, form: str = ".2f") -> str:
    return format(value, f"+{form}").replace("-", MINUS) if math.isfinite(value) else number_text(value)


def count_text(value: int | None) -> str:
    return DASH if value is None else f"{value:,}"


def range_text(values: Iterable[int | None]) -> str:
    """Least to most of those that are there."""
    known = sorted(value for value in values if value is not None)
    return " to ".join(f"{value:,}" for value in dict.fromkeys((known[0], known[-1]))) if known else DASH


def size_text(rows: int, columns: int | None) -> str:
    return f"{rows:,} {TIMES} {count_text(columns)}"


def width_text(width: float, fitted: Collection[int]) -> str:
    """The softmax width of equal KL, which may lie outside those that were fitted; a dash where it is not known."""
    if math.isnan(width) or not fitted:
        return DASH
    return f"d < {min(fitted)}" if width == 0.0 else f"d > {max(fitted)}" if math.isinf(width) else f"d = {width:.1f}"


def seconds_text(seconds: float | None) -> str:
    """A length of time in a cell, or a dash where none was measured."""
    return DASH if seconds is None or not math.isfinite(seconds) else duration_text(seconds)
