"""Numbers, ranges and lists as they stand in tables and sentences."""

import math

import pytest

from sigsoftmax.report.number_text import (
    counted,
    listed,
    names_text,
    number_text,
    range_text,
    seconds_text,
    sentence,
    signed_text,
    size_text,
    width_text,
    wrapped,
    yes_or_no,
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


def test_counts_and_lists_of_names():
    assert [counted(number, "seed") for number in (0, 1, 3)] == ["0 seeds", "1 seed", "3 seeds"]
    assert [names_text(["1", "2", "4"][:count]) for count in (1, 2, 3)] == ["1", "1 and 2", "1, 2 and 4"]
    assert names_text(["a", "b"], "or") == "a or b"
    assert [yes_or_no(answer) for answer in (True, False, None)] == ["yes", "no", "–"]


@pytest.mark.parametrize(
    ("width", "fitted", "text"),
    [
        (5.25, (4, 8), "d = 5.2"),
        (0.0, (4, 8), "d < 4"),
        (math.inf, (4, 8), "d > 8"),
        (math.nan, (4, 8), "–"),
        (5.0, (), "–"),
    ],
)
def test_widths_of_equal_kl_may_lie_outside_those_that_were_fitted(width, fitted, text):
    assert width_text(width, fitted) == text


def test_long_lists_say_how_much_is_left_out():
    assert listed(["a", "b", "c"], most=3) == "a; b; c"
    assert listed(["a", "b", "c", "d"], most=3) == "a; b; and 2 more"


def test_long_lines_are_broken_for_a_terminal():
    line = "  " + "word " * 30
    first, second = wrapped(line, "  ").splitlines()
    assert first == "    " + " ".join(["word"] * 21)
    assert second == "      " + " ".join(["word"] * 9)
    assert wrapped("- short") == "- short"
