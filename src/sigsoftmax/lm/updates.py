"""One update of the weights: a window of text, masks, loss, gradients, step.

What changes from update to update (the row, the carried state, the count, the losses) lives on the device in tensors
that stay where they are, so that an update of a given length can be captured once and replayed.

Shapes: R rows, B columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sigsoftmax.lm.capture import RepeatedCalls
from sigsoftmax.lm.config import Precision, TrainingConfig
from sigsoftmax.lm.model import LanguageModel
from sigsoftmax.lm.optimization import AveragedSgd
from sigsoftmax.lm.precision import arithmetic, lstm_dtype
from sigsoftmax.lm.regularization import draw_masks, penalties

__all__ = ["Updater"]

SHORTEST_WINDOW = 5


class Updater:
    """Runs updates on one text in columns, group by group."""

    def __init__(
        self,
        model: LanguageModel,
        optimizer: AveragedSgd,
        text_RB: Tensor,
        config: TrainingConfig,
        *,
        generator: torch.Generator,
        precision: Precision = "float32",
        capture: bool = True,
    ) -> None:
        self._model, self._optimizer, self._config, self._precision = model, optimizer, config, precision
        self._device = model.embedding.device
        self._text_RB, self._generator = text_RB.to(self._device), generator
        self._parameters = list(model.parameters())
        self._group = config.group or config.batch
        self._states = [
            model.zero_state(self._group, lstm_dtype(precision)) for _ in range(config.batch // self._group)
        ]
        self._row = torch.zeros((), dtype=torch.int64, device=self._device)
        self._count = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._losses = torch.zeros(text_RB.shape[0] // SHORTEST_WINDOW + 2, device=self._device)
        self._steps = torch.arange(text_RB.shape[0], device=self._device)
        self._calls = RepeatedCalls(self._device, generator, capture=capture)
        self._mode = optimizer.mode

    def begin_epoch(self) -> None:
        """At the first row, with zero state."""
        for tensor in self._tensors().values():
            tensor.zero_()

    def run(self, *, drawn: int, length: int) -> None:
        """One update on ``length`` rows; ``drawn`` is the length that was drawn, which the last window cuts short."""
        if self._optimizer.mode != self._mode:
            self._calls.forget()
            self._mode = self._optimizer.mode
        self._calls((drawn, length), lambda: self._update(drawn, length))

    def losses(self, first: int, end: int) -> list[float]:
        """Of updates ``first`` to ``end`` of the epoch; waits for them."""
        losses: list[float] = self._losses[first:end].tolist()
        return losses

    def _update(self, drawn: int, length: int) -> None:
        rows = self._row + self._steps[:length]
        tokens, targets = self._text_RB.index_select(0, rows), self._text_RB.index_select(0, rows + 1)
        share = 1.0 / len(self._states)
        gradients: list[Tensor] = []
        mean_loss = torch.zeros((), device=self._device)
        for group, states in enumerate(self._states):
            columns = slice(group * self._group, (group + 1) * self._group)
            masks = draw_masks(
                self._model.config, words=self._model.words, batch=self._group, generator=self._generator
            )
            with arithmetic(self._precision, self._device):
                features = self._model.features(tokens[:, columns], states, masks, dtype=lstm_dtype(self._precision))
                loss = self._model.loss(features, targets[:, columns])
                penalty = penalties(
                    features.raw_TBH,
                    features.dropped_TBH,
                    activation=self._config.activation,
                    temporal_activation=self._config.temporal_activation,
                )
                of_group = torch.autograd.grad((loss + penalty) * share, self._parameters)
            mean_loss += loss.detach() * share
            if gradients:
                torch._foreach_add_(gradients, of_group)
            else:
                gradients = list(of_group)
            for old, new in zip(states, features.states, strict=True):
                old.hidden.copy_(new.hidden.detach())
                old.cell.copy_(new.cell.detach())
        self._optimizer.update(gradients, self._config.learning_rate * drawn / self._config.bptt)
        self._losses.index_copy_(0, self._count, mean_loss.reshape(1))
        self._count += 1
        self._row += drawn

    def _tensors(self) -> dict[str, Tensor]:
        named = {"row": self._row, "count": self._count, "losses": self._losses}
        for group, states in enumerate(self._states):
            for layer, state in enumerate(states):
                named[f"hidden.{group}.{layer}"] = state.hidden
                named[f"cell.{group}.{layer}"] = state.cell
        return named

    def state(self) -> dict[str, Tensor]:
        """Where in the epoch the run stands, and its random numbers."""
        return self._tensors() | {"generator": self._generator.get_state()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self._tensors().items():
            tensor.copy_(state[name])
        self._generator.set_state(state["generator"].cpu())
