"""Recipes as text: the list, and one in full."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from sigsoftmax.lm.recipes import HEADS, field_paths, recipe
from sigsoftmax.lm.settings import SETTINGS

__all__ = ["all_recipes", "one_recipe"]


def all_recipes() -> str:
    """Settings and heads; a recipe is one of each."""
    width = max(map(len, SETTINGS))
    lines = ["A recipe is <setting>-<head>, as ptb-sigsoftmax. Settings:"]
    lines += [f"  {name:{width}}  {setting.summary}" for name, setting in SETTINGS.items()]
    lines += ["Heads:", *(f"  {head}" for head in HEADS)]
    lines.append('and any other that can be written, as "tiny-gss(k=0.3)" or ptb-mos-10.')
    return "\n".join(lines)


def one_recipe(name: str) -> str:
    """Every field, as ``--set`` takes it."""
    chosen = recipe(name)
    values = dict(_values(chosen))
    width = max(map(len, field_paths()))
    return "\n".join([chosen.name, *(f"  {path:{width}} = {_text(values[path])}" for path in field_paths())])


def _values(owner: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        if dataclasses.is_dataclass(value):
            yield from _values(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
