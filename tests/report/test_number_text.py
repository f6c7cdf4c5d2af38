"""Numbers, ranges and lists as they stand in tables and sentences."""

import math

import pytest

from sigsoftmax.report.number_text import (
    listed,
    number_text,
    range_text,
    seconds_text,
    sentence,
    signed_text,
    size_text,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (0.0, "0"),
        (57.0, "57.00"),
        (1234.5, "1,234" if round(1234.5) == 1234 else "1,235"),
        (-0.0123, "−0.01230"),
        (2.5e-7, "2.50 × 10⁻⁷"),
        (3.1e12, "3.10 × 10¹²"),
    ],
)
def test_numbers(value, text):
    assert number_text(value) == text


def test_other_texts():
    assert [seconds_text(s) for s in (0.5, 17.0, 600.0, 9000.0, None, math.nan)] == [
        "0.5 s",
        "17 s",
        "10 min 0 s",
        "2 h 30 min",
        "–",
        "–",
    ]
    assert (range_text([3, None, 12, 5]), range_text([4, 4]), range_text([None])) == ("3 to 12", "4", "–")
    assert (signed_text(-0.456), signed_text(0.02, ".1%"), signed_text(math.inf)) == ("−0.46", "+2.0%", "∞")
    assert size_text(10_000, None) == "10,000 × –"
    assert (sentence("abc"), sentence("")) == ("Abc", "")


def test_long_lists_say_how_much_is_left_out():
    assert listed(["a", "b", "c"], most=3) == "a; b; c"
    assert listed(["a", "b", "c", "d"], most=3) == "a; b; and 2 more"
