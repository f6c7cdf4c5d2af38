"""Lengths of time as text."""

import pytest

from sigsoftmax.records.durations import duration_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.004, "<0.01 s"),
        (0.04, "0.04 s"),
        (9.5, "9.5 s"),
        (42.4, "42 s"),
        (125, "2 min 5 s"),
        (7500, "2 h 5 min"),
        (200000, "2 d 7 h"),
        (59.7, "1 min 0 s"),
    ],
)
def test_durations_in_words(seconds, text):
    assert duration_text(seconds) == text
