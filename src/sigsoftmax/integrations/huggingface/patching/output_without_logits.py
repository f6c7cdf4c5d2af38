"""The output of a call whose loss was computed without storing logits: whoever reads its logits is told why.

``.logits`` is None, as in every output of transformers that lacks something, so that code which checks for None works.
Code which does not would fail with an error about ``NoneType``; the warning before it says what happened.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections import OrderedDict
from typing import Any

import torch

WHY = (
    "this output has no logits: a call with labels computes the loss without storing them (in training mode, and in "
    "evaluation mode with logits_with_labels='never'). To get logits, call the model without labels, or keep them with "
    "apply_output_function(model, logits_with_labels='always')"
)
COPIERS = ("accelerate", "copy", "dataclasses", "torch", "transformers")
"""Packages that read every field of an output to copy, gather or print it; they are not told."""


def without_logits(output: Any) -> Any:
    """The same output without its logits, of a class that says why they are missing."""
    # The compiler knows the classes of transformers alone, and a compiled call is told nothing.
    own: Any = type(output)
    made = own if torch.compiler.is_compiling() else _class_without_logits(own)
    return made(**{key: value for key, value in output.items() if key != "logits"})


@functools.cache
def _class_without_logits(own: Any) -> Any:
    def read(self: Any) -> Any:
        value = self.__dict__.get("logits")
        reader = sys._getframe(1).f_globals.get("__name__") or ""
        if value is None and reader.partition(".")[0] not in COPIERS:
            warnings.warn(WHY, stacklevel=2)
        return value

    def write(self: Any, value: Any) -> None:
        self.__dict__["logits"] = value
        if value is not None:
            # Logits that are assigned become an entry of the mapping, too, as newer versions of transformers have it.
            OrderedDict.__setitem__(self, "logits", value)

    def item(self: Any, key: Any) -> Any:
        if key == "logits" and key not in self:
            raise KeyError(WHY)
        return own.__getitem__(self, key)

    def reduce(self: Any) -> Any:
        # By the class of transformers: this one is made anew in each process.
        return own(**dict(self.items())).__reduce__()

    attributes = {
        "__module__": __name__,
        "__doc__": own.__doc__,
        "__getitem__": item,
        "__reduce__": reduce,
        "logits": property(read, write),
    }
    return type(f"{own.__name__}WithoutLogits", (own,), attributes)
