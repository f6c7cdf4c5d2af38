"""Calls in forms that this package had before: they work for this minor version, with a DeprecationWarning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from sigsoftmax.family import OutputFunction

__all__ = ["function_was_positional", "was_named"]

P = ParamSpec("P")
R = TypeVar("R")
Self = TypeVar("Self")


def function_was_positional(
    *old_order: str,
) -> Callable[[Callable[Concatenate[Self, P], None]], Callable[Concatenate[Self, P], None]]:
    """Let a constructor read positional arguments in their old order, in which ``function`` was one of them.

    Such a call is recognised by a text or an :class:`OutputFunction` at the old place of ``function``, where torch's
    classes have an argument that is neither.
    """
    place = old_order.index("function")

    def decorate(construct: Callable[Concatenate[Self, P], None]) -> Callable[Concatenate[Self, P], None]:
        @functools.wraps(construct)
        def read(self: Self, /, *arguments: P.args, **options: P.kwargs) -> None:
            if len(arguments) <= place or not isinstance(arguments[place], str | OutputFunction):
                return construct(self, *arguments, **options)
            name = type(self).__name__
            warnings.warn(
                f"{name} takes the output function by its name: write {name}(..., function={str(arguments[place])!r}); "
                "the arguments before it are placed as in torch",
                DeprecationWarning,
                stacklevel=2,
            )
            if len(arguments) > len(old_order):
                raise TypeError(f"{name} takes at most {len(old_order)} positional arguments, got {len(arguments)}")
            by_name = dict(zip(old_order, arguments, strict=False))
            if twice := by_name.keys() & options.keys():
                raise TypeError(f"{name} got multiple values for argument {sorted(twice)[0]!r}")
            return construct(self, **by_name, **options)  # type: ignore[arg-type, call-arg]

        return read

    return decorate


def was_named(old: str, new: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take its argument ``new`` under the name ``old`` too."""

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(call)
        def read(*arguments: P.args, **options: P.kwargs) -> R:
            if old in options:
                name = call.__name__
                warnings.warn(f"{name}({old}=...) is {name}({new}=...) now", DeprecationWarning, stacklevel=2)
                options[new] = options.pop(old)
            return call(*arguments, **options)

        return read

    return decorate
