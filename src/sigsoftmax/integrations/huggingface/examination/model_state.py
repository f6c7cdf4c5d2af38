"""Changes to a model that last for one block of code, and those that can be undone or copied."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

_COUNTING = threading.Lock()


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a model into evaluation mode, and each of its modules back into the mode that it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def loss_function_set(model: Any, function: Any) -> Iterator[None]:
    """Set another loss; None is the loss of the model's class. The setter of transformers keeps it in an attribute."""
    own = model.__dict__.pop("_loss_function", None)
    if function is not None:
        model.__dict__["_loss_function"] = function
    try:
        yield
    finally:
        model.__dict__.pop("_loss_function", None)
        if own is not None:
            model.__dict__["_loss_function"] = own


@contextmanager
def in_forward(model: Any) -> Iterator[None]:
    """Count a call of a patched model's forward pass while it runs; threads may share the model."""
    _count(model, 1)
    try:
        yield
    finally:
        _count(model, -1)


def _count(model: Any, change: int) -> None:
    if torch.compiler.is_compiling():
        model.calls_in_forward += change
        return
    with _COUNTING:
        model.calls_in_forward += change


def remove_hook(hooks: MutableMapping[Any, Any], function: Callable[..., Any]) -> bool:
    """Take a function out of a module's table of hooks; tells whether it was there."""
    keys = [key for key, hook in hooks.items() if getattr(hook, "hook", hook) is function]
    for key in keys:
        del hooks[key]
    return bool(keys)


def empty_instance(make_class: Callable[[Any], Any], own: type) -> Any:
    """An instance, for pickle to fill, of a class that is made of another one in each process."""
    made = make_class(own)
    return made.__new__(made)
