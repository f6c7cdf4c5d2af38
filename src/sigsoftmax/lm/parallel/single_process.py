"""Parallel strategies: what differs between a run on one process and a run on several.

The trainer, its updater and its evaluator ask a strategy for whatever depends on other processes, and know no other
difference. :class:`SingleProcessStrategy` is one process; ``sigsoftmax.lm.parallel.strategies`` has DDP, FSDP2 and the
vocabulary-parallel strategy.

Shapes: B columns of text, of which each process reads some; H hidden features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from sigsoftmax.family.notation import check_choice
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.training.nt_asgd import joint_squares

__all__ = ["KINDS", "Kind", "OwnColumns", "SingleProcessStrategy", "check_kind", "parallel_strategy"]

Kind = Literal["ddp", "fsdp", "vocabulary"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class OwnColumns(NamedTuple):
    """The columns of a text that this process reads."""

    columns: slice
    counts: bool = True
    """False where there are fewer columns than processes: a column is read, so that all exchange alike, for nothing"""


class SingleProcessStrategy:
    """One process, which holds and computes everything. Distributed strategies override what they do together."""

    rank, size = 0, 1
    can_capture = True
    """an update and an evaluation can become CUDA graphs; exchanges between processes cannot"""

    def __init__(self, model: LanguageModel) -> None:
        self.forward: Callable[..., Any] = model
        """the pass of training, called as the model is"""
        self.parts: dict[str, Tensor] = dict(model.named_parameters())
        """the part of each parameter that this process holds, in place"""
        self._gradients: list[Tensor] = []

    @property
    def is_first(self) -> bool:
        """True for the process that writes files."""
        return self.rank == 0

    def columns(self, batch: int, group: int) -> slice:
        """The columns of the batch that this process trains on; ``group`` of them share masks."""
        return slice(0, batch)

    def evaluated_columns(self, batch: int) -> OwnColumns:
        return OwnColumns(slice(0, batch))

    def every_column(self, own_1BH: Tensor) -> Tensor:
        """The states of all columns, from those of each process."""
        return own_1BH

    def training_pass(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Surrounds a forward pass and its gradients; an update is one or several of them."""
        return nullcontext()

    def add_gradients(self, objective: Tensor) -> None:
        """Add this pass's gradients to those of the passes before it."""
        gradients = torch.autograd.grad(objective, list(self.parts.values()))
        if self._gradients:
            torch._foreach_add_(self._gradients, gradients)
        else:
            self._gradients = list(gradients)

    def take_gradients(self) -> list[Tensor]:
        """The gradients of the update for the whole batch, one for each of ``parts``; may be overwritten."""
        gradients, self._gradients = self._gradients, []
        return gradients

    def squares(self, gradients: Sequence[Tensor]) -> Tensor:
        """Sums of squares of the gradients of the whole model, which sum to the square of their norm."""
        return joint_squares(gradients)

    def mean(self, own: Tensor) -> Tensor:
        """The mean over the batch, from the mean over the own columns."""
        return own

    def sum(self, own: Tensor) -> Tensor:
        """The sum over all columns, from the sum over those of :meth:`evaluated_columns`."""
        return own

    def any(self, own: bool) -> bool:
        """True if it is true on any process."""
        return own

    def check_same(self, position: Sequence[int], what: str) -> None:
        """Refuse to go on where processes stand in different places."""

    def wait_for_first(self) -> None:
        """Wait until the first process has done what it does alone."""

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors like the parameters, from the parts that each process has of them."""
        return dict(parts)

    def own(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parts of tensors like the parameters that this process holds."""
        return dict(whole)


def check_kind(kind: str | None) -> None:
    """Check that it is a known way to divide a run, or None for none."""
    if kind is not None:
        check_choice("parallel", kind, KINDS)


def parallel_strategy(model: LanguageModel, kind: Kind | None) -> SingleProcessStrategy:
    """Divide the model, in place, over the processes that torch.distributed has joined; None: one process."""
    check_kind(kind)
    if kind is None:
        return SingleProcessStrategy(model)
    # The communication libraries take their time to be imported.
    from sigsoftmax.lm.parallel.strategies import STRATEGIES

    return STRATEGIES[kind](model)
