"""Recipes by name: ``ptb-sigsoftmax`` is the paper's experiment on Penn Treebank with a sigsoftmax head.

A name is a setting and a head. The settings are ``ptb`` and ``wt2``, with every number as published, ``tiny``, for
Penn Treebank on a few CPU cores, and ``language``, for text sampled from a language of known truth. The head is any
member of the family or a mixture, as ``softmax-1.5``, ``gss-learned``, ``moss`` or ``gss(k=0.3)``.

Any field can be changed: ``training.learning_rate=20`` on a command line, tables in a TOML file. A change names a
field by its path and is read as the field's type. All changes are made at once and the result is checked as any
recipe is; it remembers what was changed of the recipe whose name it has.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sigsoftmax import family
from sigsoftmax.family.heads import Head
from sigsoftmax.lm.config import Recipe, parse_head
from sigsoftmax.lm.settings import SETTINGS
from sigsoftmax.records.envelope import from_plain, to_plain
from sigsoftmax.records.parsing import TOO_DEEP, check_nesting

__all__ = [
    "HEADS",
    "field_paths",
    "from_json",
    "from_toml",
    "head_by_name",
    "names",
    "recipe",
    "to_json",
    "with_overrides",
    "written_changes",
]

HEADS = (
    "softmax",
    "relu",
    "sigmoid",
    "sigsoftmax",
    "shifted-sigsoftmax",
    "shifted-sigsoftmax-per-class",
    "gss-0",
    "gss-0.2",
    "gss-0.5",
    "gss-learned",
    "softmax-1.5",
    "softmax-2",
    "softcap",
    "mos",
    "moss",
)
"""The heads that the list of names shows; any other that can be written works as well."""

HEAD_OPTIONS = ("K", "latent", "prior")
"""options of a mixture, which are part of its head"""

LEARNED_START = {"gss": 1.0}
"""Initial values of learned parameters whose default is none. k = 1 is softmax: what k becomes is then learned."""


def names() -> tuple[str, ...]:
    """The recipes, setting by setting."""
    return tuple(f"{setting}-{head}" for setting in SETTINGS for head in HEADS)


def recipe(name: str) -> Recipe:
    """The recipe of that name; an unknown one is refused with the nearest that exist."""
    setting, _, head_name = name.partition("-")
    try:
        if setting not in SETTINGS:
            raise ValueError(f"names begin with {', '.join(f'{known}-' for known in SETTINGS)}")
        if not head_name:
            raise ValueError(f"it must say a head too, as {setting}-{HEADS[0]}")
        head = head_by_name(head_name, components=SETTINGS[setting].components)
    except ValueError as error:
        near = difflib.get_close_matches(name, names(), n=3, cutoff=0.7)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise ValueError(f"unknown recipe {name!r}{hint}: {error}") from None
    return SETTINGS[setting].build(name, head)


def head_by_name(name: str, *, components: int) -> Head:
    """A head as recipes name it: ``gss-0.2`` sets the first parameter of a member, ``mos-4`` the components.

    ``-learned`` and ``-per-class`` train that parameter; one that layers train anyway needs no word. What
    ``Head.parse`` reads is read as well, with the options of a mixture: ``mos(K=4, latent=linear)``.
    """
    mixture = re.fullmatch(r"(mos|moss)(?:-(\d+))?", name)
    if mixture is not None:
        return Head.parse(f"{mixture[1]}(K={mixture[2] or components})")
    if "(" in name:
        return parse_head(name)
    for member in sorted(family.names(), key=len, reverse=True):
        value = re.fullmatch(rf"{re.escape(member.replace('_', '-'))}(?:-(.+))?", name.replace("_", "-"))
        if value is not None:
            return Head.parse(_member_with(member, value[1]))
    return Head.parse(name)


def _member_with(member: str, value: str | None) -> str:
    parameters = family.definition_by_name(member).parameters
    if value is None:
        learned = [key for key, parameter in parameters.items() if parameter.learned_in_layers]
        return f"{member}({', '.join(f'{key}=learned' for key in learned)})" if learned else member
    if not parameters:
        raise ValueError(f"{member!r} has no parameter that {value!r} could be")
    start = f":{LEARNED_START[member]:g}" if member in LEARNED_START else ""
    written = {"learned": f"learned{start}", "per-class": f"per_class{start}"}.get(value, value)
    return f"{member}({next(iter(parameters))}={written})"


def to_json(recipe: Recipe) -> dict[str, Any]:
    """A recipe as JSON can hold it, for checkpoints."""
    return typing.cast(dict[str, Any], to_plain(recipe))


def from_json(plain: Mapping[str, Any]) -> Recipe:
    """The recipe that :func:`to_json` wrote."""
    return typing.cast(Recipe, from_plain(Recipe, dict(plain), "recipe"))


def field_paths() -> dict[str, Any]:
    """Every field that can be changed, by its path, with its type."""
    return {path: expected for path, expected in _paths(Recipe).items() if path not in ("name", "overrides")}


def _paths(owner: type, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, expected in typing.get_type_hints(owner).items():
        if dataclasses.is_dataclass(expected) and isinstance(expected, type):
            found |= _paths(expected, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = expected
    return found


def with_overrides(base: Recipe, changes: Iterable[str]) -> Recipe:
    """``base`` with changes written as ``training.epochs=22`` or ``model.hidden=1150,1150,400``."""
    known = field_paths()
    values: dict[str, Any] = {}
    for change in changes:
        path, equals, text = (part.strip() for part in change.partition("="))
        if not equals:
            raise ValueError(f"cannot read the change {change!r}; write it as training.learning_rate=20")
        _check_path(path, known)
        if path in values:
            raise ValueError(f"{path} is changed twice; say it once")
        values[path] = _plain_of_text(known[path], text)
    return _changed(base, values)


def written_changes(changes: Iterable[str]) -> tuple[str, ...]:
    """Changes in the form that ``overrides`` has them in, sorted: the same for all ways to write the same changes."""
    known = field_paths()
    parts = [[part.strip() for part in change.partition("=")[::2]] for change in changes]
    values = {path: from_plain(known[path], _plain_of_text(known[path], text), path) for path, text in parts}
    return tuple(sorted(f"{path}={_text_of(value)}" for path, value in values.items()))


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The content of a file that describes ``what``."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        # Dotted keys nest without recursion in the reader, and would recurse in whoever walks over the tables.
        check_nesting(content)
        return content
    except FileNotFoundError:
        raise ValueError(f"no {what} file at {path}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    except RecursionError:
        raise ValueError(f"{path} is not a {what} file: {TOO_DEEP}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a {what} file: {error}") from None


def from_toml(path: str | Path) -> Recipe:
    """A recipe from a file: ``recipe = "ptb-softmax"`` and what to change, in tables such as ``[training]``.

    TOML has no null: a field that may be None takes the text ``"none"``.
    """
    path = Path(path)
    content = read_toml(path, "recipe")
    name = content.pop("recipe", None)
    if not isinstance(name, str):
        raise ValueError(f'{path} must name the recipe that it changes, as recipe = "ptb-softmax"')
    known = field_paths()
    try:
        values = dict(_flattened(content, known))
        for key, value in values.items():
            _check_path(key, known)
            if isinstance(value, str):
                # As on a command line only where it can be nothing else: numbers are written as numbers here.
                values[key] = None if _allows_none(known[key]) and value.lower() == "none" else value
        return _changed(recipe(name), values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _flattened(table: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in known:
            if not any(path.startswith(f"{prefix}{key}.") for path in known):
                _check_path(f"{prefix}{key}", known)
            yield from _flattened(value, known, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_path(path: str, known: Mapping[str, Any]) -> None:
    if path in known:
        return
    if inside := [candidate for candidate in known if candidate.startswith(f"{path}.")]:
        raise ValueError(f"{path} is not one field but several: {', '.join(inside)}")
    names: dict[str, list[str]] = {}
    for candidate in known:
        names.setdefault(candidate.rpartition(".")[2], []).append(candidate)
    last = path.rpartition(".")[2]
    if last in HEAD_OPTIONS:
        raise ValueError(
            f"a recipe has no field {path!r}; it is an option of the head: model.head=mos(K=4, latent=linear)"
        )
    near = names.get(last) or difflib.get_close_matches(path, known, n=3)
    near = near or [field for name in difflib.get_close_matches(last, names, n=2) for field in names[name]]
    hint = f"did you mean {' or '.join(near)}?" if near else f"the fields are {', '.join(known)}"
    raise ValueError(f"a recipe has no field {path!r}; {hint}")


def _changed(base: Recipe, values: Mapping[str, Any]) -> Recipe:
    known = field_paths()
    plain = to_json(base)
    changes = dict(change.split("=", 1) for change in base.overrides)
    for path, value in values.items():
        typed = from_plain(known[path], value, path)
        if path == "model.head":
            typed = value = str(parse_head(typed))
        *tables, last = path.split(".")
        owner = plain
        for table in tables:
            owner = owner[table]
        if path in changes or from_plain(known[path], owner[last], path) != typed:
            changes[path] = _text_of(typed)
        owner[last] = value
    plain["overrides"] = [f"{path}={text}" for path, text in changes.items()]
    try:
        return from_json(plain)
    except ValueError as error:
        raise ValueError(f"{base.name} cannot be changed so: {error}") from None


def _allows_none(expected: Any) -> bool:
    return typing.get_origin(expected) in (typing.Union, types.UnionType) and type(None) in typing.get_args(expected)


def _plain_of_text(expected: Any, text: str) -> Any:
    """The value as JSON would hold it; a text that cannot be read as the type stays one, to be refused by its field."""
    arguments = typing.get_args(expected)
    if _allows_none(expected):
        if text.lower() == "none":
            return None
        (expected,) = (argument for argument in arguments if argument is not type(None))
    if typing.get_origin(expected) is tuple:
        inside = text.strip("()[] ")
        return [_plain_of_text(arguments[0], part.strip()) for part in inside.split(",") if part.strip()]
    if expected is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if expected in (int, float):
        try:
            return expected(text)
        except ValueError:
            return text
    return text


def _text_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(_text_of(item) for item in value)
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
