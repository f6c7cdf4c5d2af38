"""How one run is divided over processes; with one process, not at all.

The trainer, its updater and its evaluator ask the object made here for what depends on other processes, and know no
other difference. :class:`Alone` is one process; the classes of ``sigsoftmax.lm.parallel.strategies`` are several.

Shapes: B columns of text, of which each process reads some; H hidden features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.training.optimization import joint_squares

__all__ = ["KINDS", "Alone", "Kind", "OwnColumns", "divided"]

Kind = Literal["ddp", "fsdp", "vocabulary"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class OwnColumns(NamedTuple):
    """The columns of a text that this process reads."""

    columns: slice
    counts: bool = True
    """False where there are fewer columns than processes: a column is read, so that all exchange alike, for nothing"""


class Alone:
    """One process, which holds and does everything. The others override what they do together."""

    rank, size = 0, 1

    def __init__(self, model: LanguageModel) -> None:
        self.forward: Callable[..., Any] = model
        """the pass of training, called as the model is"""
        self.parts: dict[str, Tensor] = dict(model.named_parameters())
        """what this process holds of each parameter, in place"""
        self._gradients: list[Tensor] = []

    @property
    def is_first(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0

    # --- text -----------------------------------------------------------------------------------------------------

    def columns(self, batch: int, group: int) -> slice:
        """The columns of the batch that this process trains on; ``group`` of them share masks."""
        return slice(0, batch)

    def evaluated_columns(self, batch: int) -> OwnColumns:
        return OwnColumns(slice(0, batch))

    def every_column(self, own_1BH: Tensor) -> Tensor:
        """The states of all columns, from those of each process."""
        return own_1BH

    # --- an update ------------------------------------------------------------------------------------------------

    def training_pass(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Around a forward pass and its gradients; an update is one or several of them."""
        return nullcontext()

    def add_gradients(self, objective: Tensor) -> None:
        """Of a pass, to those of the passes before it."""
        gradients = torch.autograd.grad(objective, list(self.parts.values()))
        if self._gradients:
            torch._foreach_add_(self._gradients, gradients)
        else:
            self._gradients = list(gradients)

    def take_gradients(self) -> list[Tensor]:
        """Those of the update for the whole batch, one for each of ``parts``; may be overwritten."""
        gradients, self._gradients = self._gradients, []
        return gradients

    def squares(self, gradients: Sequence[Tensor]) -> Tensor:
        """Sums of squares of the gradients of the whole model, which sum to the square of their norm."""
        return joint_squares(gradients)

    # --- numbers --------------------------------------------------------------------------------------------------

    def mean(self, own: Tensor) -> Tensor:
        """Over the batch, from the mean over the own columns."""
        return own

    def sum(self, own: Tensor) -> Tensor:
        """Over all columns, from the sum over those of :meth:`evaluated_columns`."""
        return own

    def any(self, own: bool) -> bool:
        """Whether it is so on any process."""
        return own

    def check_same(self, position: Sequence[int], what: str) -> None:
        """Refuse to go on where processes stand in different places."""

    def wait_for_first(self) -> None:
        """Until the first process has done what it does alone."""

    # --- weights --------------------------------------------------------------------------------------------------

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors like the parameters, from what each process has of them."""
        return dict(parts)

    def own(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this process holds of tensors like the parameters."""
        return dict(whole)


def divided(model: LanguageModel, kind: Kind | None) -> Alone:
    """The run of this model, in place, over the processes that torch.distributed has joined; None: one process."""
    if kind is None:
        return Alone(model)
    # The communication libraries take their time to be imported.
    from sigsoftmax.lm.parallel import strategies as teams

    if kind not in KINDS:
        raise ValueError(f"parallel must be one of {', '.join(KINDS)}, got {kind!r}")
    return teams.TEAMS[kind](model)
