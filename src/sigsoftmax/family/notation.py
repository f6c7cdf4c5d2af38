"""The notation ``name(item, key=value)`` in which members, heads and languages are written, and unknown names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from typing import NamedTuple

MIXTURES = {"mos": "softmax", "moss": "sigsoftmax"}
"""The mixtures that have names of their own in the literature, and their members."""

# Compiled here, since Dynamo of torch 2.11 cannot trace how `re` compiles a pattern at its first use.
_CALL = re.compile(r"\s*([^()\s]+)\s*(?:\((.*)\))?\s*", re.DOTALL)


class Call(NamedTuple):
    """A name and the items in the brackets behind it."""

    name: str
    items: list[str] | None
    """Stripped of spaces; None where there are no brackets."""


def parse_call(text: str) -> Call | None:
    """Take ``"mixture(gss(k=0), K=4)"`` apart into ``"mixture"`` and ``["gss(k=0)", "K=4"]``; None if it is no call."""
    match = _CALL.fullmatch(text)
    if match is None or match[2] is None:
        return match and Call(match[1], None)
    *items, last = split_items(match[2])
    # A comma may stand behind the last item, and the brackets may be empty.
    return Call(match[1], [*items, last] if last else items)


def split_items(text: str) -> list[str]:
    """Split at the commas that are not inside brackets; items are stripped of spaces and may be empty."""
    depth, starts = 0, [0]
    for place, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            starts.append(place + 1)
    return [text[start : end - 1].strip() for start, end in zip(starts, [*starts[1:], len(text) + 1], strict=True)]


def key_and_value(item: str) -> tuple[str, str] | None:
    """Take ``"k=0.2"`` apart; None without an equals sign."""
    key, equals, value = (part.strip() for part in item.partition("="))
    return (key, value) if equals else None


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A hint for a message: the nearest of the known names, or nothing where none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Check that an option has one of the values that it can have."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
