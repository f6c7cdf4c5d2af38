"""Old paths of documented modules: they lead to the module of today, and say so."""

import importlib
import sys

import pytest

from sigsoftmax import _moved

OLD_NAMES = [
    (package, module, name)
    for package, modules in _moved.PACKAGES.items()
    for module, names in modules.items()
    for name in names
]


@pytest.mark.parametrize(("old", "new"), _moved.MODULES.items())
def test_a_moved_module_is_the_one_of_today(old, new):
    sys.modules.pop(f"sigsoftmax.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"sigsoftmax.{old} has moved to sigsoftmax.{new}$"):
        found = importlib.import_module(f"sigsoftmax.{old}")
    today = importlib.import_module(f"sigsoftmax.{new}")
    assert found is today
    assert today.__spec__.name == f"sigsoftmax.{new}"


@pytest.mark.parametrize(("package", "today", "name"), OLD_NAMES)
def test_a_package_has_the_names_of_the_module_that_stood_there(package, today, name):
    module, new = importlib.import_module(f"sigsoftmax.{package}"), f"sigsoftmax.{today}"
    with pytest.warns(DeprecationWarning, match=f"{package}.{name} has moved to {new}"):
        found = getattr(module, name)
    assert found is getattr(importlib.import_module(new), name)


def test_what_never_was_there_is_not_there():
    with pytest.raises(ModuleNotFoundError, match=r"sigsoftmax\.functionals"):
        importlib.import_module("sigsoftmax.functionals")
    module = importlib.import_module("sigsoftmax.lm.training")
    with pytest.raises(AttributeError, match=r"module 'sigsoftmax\.lm\.training' has no attribute 'Trainers'"):
        module.Trainers  # noqa: B018
