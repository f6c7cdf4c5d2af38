"""Modules under the paths that they had before: they can be imported for this minor version, with a DeprecationWarning.

The table lists the documented modules alone. A path that is a package today keeps the names that the module had.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["forward_names", "install"]

MODULES = {
    "functional": "losses.functional",
    "heads": "family.heads",
    "loss": "losses.op",
    "mixture": "layers.mixture",
    "modules": "layers.output_layer",
    "analysis.argmax": "analysis.audit.argmax",
    "analysis.capacity_curves": "analysis.capacity.curves",
    "analysis.certificates": "analysis.spectrum.bounds",
    "analysis.distributions": "analysis.capacity.distributions",
    "analysis.gradient_share": "analysis.audit.gradient_share",
    "analysis.matrix_files": "analysis.spectrum.matrix_files",
    "analysis.matrix_sources": "analysis.spectrum.matrix_readers",
    "analysis.streaming": "analysis.spectrum.streaming",
    "analysis.target": "analysis.capacity.width_cost",
    "analysis.truncation": "analysis.audit.truncation",
    "lm.checkpoints": "lm.saving.checkpoints",
    "lm.dynamic_evaluation": "lm.dynamic.evaluation",
    "lm.dynamic_search": "lm.dynamic.search",
    "lm.evaluation": "lm.training.evaluation",
    "lm.fetch": "lm.data.fetch",
    "lm.saved_models": "lm.saving.saved_models",
}
"""old path: new path, below ``sigsoftmax``"""

PACKAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "analysis.audit": {"analysis.audit.findings": ("AuditSettings", "Findings", "Subject", "measure")},
    "lm.data": {
        "lm.data.corpus": ("Corpus", "Vocabulary"),
        "lm.data.windows": ("WindowLengths", "batchify", "evaluation_windows"),
    },
    "lm.model": {"lm.model.language_model": ("Features", "LanguageModel")},
    "lm.training": {"lm.training.trainer": ("Diverged", "Progress", "Trainer", "run_together")},
}
"""package of today: the modules that have the names of the module that stood there, and these names"""

PREFIX = "sigsoftmax."


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is at no path of its own any more: asked last, after the modules that exist."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        known = fullname.startswith(PREFIX) and fullname.removeprefix(PREFIX) in MODULES
        return importlib.util.spec_from_loader(fullname, self) if known else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new = PREFIX + MODULES[old.removeprefix(PREFIX)]
        warnings.warn(f"{old} has moved to {new}", DeprecationWarning, stacklevel=2)
        # The import system hands out what stands here when the module has been executed.
        sys.modules[old] = importlib.import_module(new)


def install() -> None:
    """Let the import system find moved modules."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def forward_names(package: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package that stands where a module stood."""
    modules = {name: module for module, names in PACKAGES[package.removeprefix(PREFIX)].items() for name in names}

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        new = PREFIX + modules[name]
        value = getattr(importlib.import_module(new), name)
        warnings.warn(f"{package}.{name} has moved to {new}", DeprecationWarning, stacklevel=2)
        return value

    return find
