"""The notation of members, heads and languages."""

from __future__ import annotations

import pytest

from sigsoftmax.family.notation import Call, key_and_value, parse_call


@pytest.mark.parametrize(
    ("text", "name", "items"),
    [
        ("gss", "gss", None),
        (" gss ( ) ", "gss", []),
        ("gss(k=0.2, c = 1)", "gss", ["k=0.2", "c = 1"]),
        ("mixture(gss(k=0, c=1), K=4)", "mixture", ["gss(k=0, c=1)", "K=4"]),
        ("of_rank(contexts=4,,\n rank=2,)", "of_rank", ["contexts=4", "", "rank=2"]),
    ],
)
def test_a_call_is_a_name_and_the_items_outside_inner_brackets(text: str, name: str, items: list[str] | None) -> None:
    assert parse_call(text) == Call(name, items)


@pytest.mark.parametrize("text", ["", "gss(k=1", "gss)", "two words", "(k=1)"])
def test_other_texts_are_no_calls(text: str) -> None:
    assert parse_call(text) is None


def test_a_key_and_its_value() -> None:
    assert key_and_value(" k = 0.2 ") == ("k", "0.2")
    assert key_and_value("function=f(a=1)") == ("function", "f(a=1)")
    assert key_and_value("gss") is None
