"""The notation ``name(item, key=value)`` in which members, heads and languages are written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Call(NamedTuple):
    """A name and the items in the brackets behind it."""

    name: str
    items: list[str] | None
    """Stripped of spaces; None where there are no brackets."""


def parse_call(text: str) -> Call | None:
    """Take ``"mixture(gss(k=0), K=4)"`` apart into ``"mixture"`` and ``["gss(k=0)", "K=4"]``; None if it is no call."""
    match = re.fullmatch(r"\s*([^()\s]+)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    return match and Call(match[1], None if match[2] is None else [item.strip() for item in _items(match[2])])


def _items(inside: str) -> Iterator[str]:
    """Split at the commas that are not inside brackets themselves."""
    depth, item = 0, ""
    for character in inside:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            yield item
            item = ""
        else:
            item += character
    if item.strip():
        yield item


def key_and_value(item: str) -> tuple[str, str] | None:
    """Take ``"k=0.2"`` apart; None without an equals sign."""
    key, equals, value = (part.strip() for part in item.partition("="))
    return (key, value) if equals else None
