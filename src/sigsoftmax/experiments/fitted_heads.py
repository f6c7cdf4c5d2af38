"""Heads of fits by the names that recipes have for them, so that all commands read the same names."""

from __future__ import annotations

from collections.abc import Iterable

from sigsoftmax.family.heads import Head
from sigsoftmax.lm.recipes import head_by_name
from sigsoftmax.lm.settings import SETTINGS

__all__ = ["fitted_heads"]


def fitted_heads(names: Iterable[str]) -> tuple[str, ...]:
    """Texts that ``Head.parse`` reads, of names such as ``mos``, ``gss-0.2`` and ``gss(k=0.2)``, each once.

    A mixture that does not say its components has those of recipes for known languages.
    """
    components = SETTINGS["language"].components
    heads = (Head.parse(head_by_name(name, components=components)) for name in names)
    return tuple(dict.fromkeys(map(str, heads)))
