"""Probing a phi of which nothing is known: what is found must agree with what the family knows of its own members."""

import pytest
import torch

from sigsoftmax.analysis.probing import is_rising, line_beyond, settled_slope
from sigsoftmax.family import OutputFunction, register_function


def unknown(text: str) -> OutputFunction:
    """A member of the family as a user would register it."""
    member = OutputFunction.parse(text)
    return register_function("unknown", member.phi, member.slope)


TEXTS = (
    "softmax",
    "softmax(alpha=0.3)",
    "sigsoftmax",
    "sigmoid",
    "gss(k=-1)",
    "gss(k=0.5, c=2)",
    "softcap(c=3)",
    "relu",
)
every_text = pytest.mark.parametrize("text", TEXTS)


@every_text
def test_rising_is_strictly_increasing(text):
    assert is_rising(unknown(text)) is OutputFunction.parse(text).properties.is_strictly_increasing


@every_text
def test_slopes_of_ends_are_those_of_the_asymptotes(text):
    pieces = {piece.where: piece.slope for piece in OutputFunction.parse(text).properties.linear_pieces}
    for where, sign in (("left", -1.0), ("right", 1.0)):
        slope = settled_slope(unknown(text), 2, sign)
        assert (slope is None) is (where not in pieces)
        if slope is not None:
            assert slope.tolist() == pytest.approx([pieces[where]] * 2, abs=1e-9)


@every_text
def test_a_line_begins_some_way_from_the_bend(text):
    pieces = {piece.where: piece.slope for piece in OutputFunction.parse(text).properties.linear_pieces}
    for where, start in (("left", -40.0), ("right", 40.0)):
        slope = line_beyond(unknown(text), start)
        if pieces.get(where):
            assert slope == pytest.approx(pieces[where])
        else:
            # A slope that goes to 0 does not stop to change by parts of itself.
            assert not slope


def test_slopes_that_differ_by_class_are_kept_apart():
    function = register_function("leaning", lambda z, s: s * z, parameters={"s": 1.0})
    leaning = function.with_parameters(s=torch.tensor([1.0, 2.0]))
    assert all(settled_slope(leaning, 2, sign).tolist() == [1.0, 2.0] for sign in (-1.0, 1.0))
