"""Checks of values: what was expected, what came, what to do. Shapes and dtypes are checked in ``losses.validation``.

On a CPU values are always checked. On a GPU a check that reads a value back would stop the stream, so there the same
conditions are device-side asserts; the environment variable SIGSOFTMAX_CHECK=1 brings the full messages.

Shapes: V classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sigsoftmax.contract import signature
from sigsoftmax.torch_internals import assert_on_device


def _require(condition: Tensor, message: Callable[[], str]) -> None:
    if signature.checks_values(condition.device):
        if not bool(condition):
            raise ValueError(message())
    elif condition.device.type == "cuda":
        assert_on_device(condition)


def check_target(target: Tensor, num_classes: int, ignore_index: int) -> None:
    """Class indices lie in [0, num_classes) or are ignored; probabilities are not NaN."""
    if target.is_floating_point():
        _require(~torch.isnan(target).any(), lambda: _nan_message(target))
        return
    bad = (target != ignore_index) & ((target < 0) | (target >= num_classes))
    _require(~bad.any(), lambda: _index_message(target, bad, num_classes, ignore_index))


def _nan_message(target: Tensor) -> str:
    row = int(torch.isnan(target).flatten(0, -2).any(-1).nonzero()[0])
    return f"probability targets must not be NaN, but row {row} has a NaN; check how the targets were made"


def _index_message(target: Tensor, bad: Tensor, num_classes: int, ignore_index: int) -> str:
    row = int(bad.flatten().nonzero()[0])
    return (
        f"target {int(target.flatten()[row])} at row {row} is out of range: expected a class in [0, {num_classes}) or "
        f"ignore_index={ignore_index} ({int(bad.sum())} such targets); check the vocabulary, or pass ignore_index"
    )


def check_class_weight(weight_V: Tensor) -> None:
    bad = ~((weight_V >= 0) & (weight_V < torch.inf))

    def message() -> str:
        first = int(bad.nonzero()[0])
        return f"class weights must be finite and not negative, but weight[{first}] is {float(weight_V[first]):g}"

    _require(~bad.any(), message)


def check_same_targets(is_same: Tensor) -> None:
    """Processes that share their tokens have the same targets."""
    _require(is_same, lambda: "the ranks of the group have different targets; each must be given the same tokens")
