"""The recipes of a sweep: by name, by head, or in a TOML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sigsoftmax.experiments.runs.run import check_setting, chosen_recipes
from sigsoftmax.lm.config import Recipe
from sigsoftmax.lm.recipes import read_toml

__all__ = ["AskedSweep", "read_sweep_file", "with_file"]


@dataclass(frozen=True, kw_only=True)
class AskedSweep:
    """The parts of a sweep, as they are written. What is left out is empty."""

    recipes: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    setting: str | None = None
    """setting of the heads"""
    seeds: tuple[int, ...] = ()
    baseline: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    def chosen_recipes(self, data: Path | None) -> tuple[Recipe, ...]:
        """Recipes by name, and heads in their setting: the embedded language, or ``tiny`` where a text is given."""
        check_setting(self.setting)
        if self.setting is not None and not self.heads:
            raise ValueError("the setting is that of --heads; a recipe's name has its own, as tiny-softmax")
        setting = self.setting or ("language" if data is None else "tiny")
        names = [*self.recipes, *(f"{setting}-{head}" for head in self.heads)]
        if not names:
            raise ValueError("name recipes, as tiny-softmax tiny-sigsoftmax, or heads, as --heads softmax,sigsoftmax")
        return tuple(chosen_recipes(names, None, ()))


def with_file(asked: AskedSweep, path: Path | None) -> AskedSweep:
    """The sweep of a file, if one is named, with the seeds, baseline and further changes that were asked for."""
    if path is None:
        return asked
    if asked.recipes or asked.heads or asked.setting:
        raise ValueError("name recipes or heads, or give --config FILE, which names its own, not both")
    file = read_sweep_file(path)
    return replace(
        file,
        seeds=asked.seeds or file.seeds,
        baseline=asked.baseline or file.baseline,
        changes=(*file.changes, *asked.changes),
    )


def read_sweep_file(path: Path) -> AskedSweep:
    """``recipes`` or ``heads``, ``seeds``, ``baseline``, and fields in tables as in a recipe's file.

    A field with a list of values is an axis; one that is itself a list becomes an axis by a list of lists.
    """
    content = read_toml(path, "sweep")
    try:
        setting = content.pop("setting", None)
        if setting is not None and not isinstance(setting, str):
            raise ValueError(f"setting must be a text, got {setting!r}")
        names = [_list(content.pop(key, []), str, key) for key in ("recipe", "recipes")]
        return AskedSweep(
            recipes=tuple(name for found in names for name in found),
            heads=_list(content.pop("heads", []), str, "heads"),
            setting=setting,
            seeds=_list(content.pop("seeds", []), int, "seeds"),
            baseline=_list(content.pop("baseline", []), str, "baseline"),
            changes=tuple(_changes_of(content)),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _list(value: Any, kind: type, name: str) -> tuple[Any, ...]:
    items = value if isinstance(value, list) else [value]
    if any(type(item) is not kind for item in items):
        raise ValueError(f"{name} must be a list of {'texts' if kind is str else 'whole numbers'}, got {value!r}")
    return tuple(items)


def _changes_of(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _changes_of(value, f"{prefix}{key}.")
        else:
            items = value if isinstance(value, list) else [value]
            yield f"{prefix}{key}={','.join(map(_text, items))}"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"({','.join(map(_text, value))})"
    return str(value).lower() if isinstance(value, bool) else str(value)
