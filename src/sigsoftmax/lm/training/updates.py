"""One update of the weights: a window of text, masks, loss, gradients, step.

What changes from update to update (the row, the carried state, the count, the losses) lives on the device in tensors
that stay where they are, so that an update of a given length can be captured once and replayed.

Each of several processes has some columns: whole groups, or a part of one. All draw the masks of all groups.

Shapes: R rows, B columns, T time steps, H hidden of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from sigsoftmax.lm.config import Precision, TrainingConfig
from sigsoftmax.lm.data.windows import TextCursor
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.model.recurrent import LayerState, carry_over
from sigsoftmax.lm.model.regularization import MaskSampler, penalties
from sigsoftmax.lm.parallel.single_process import SingleProcessStrategy
from sigsoftmax.lm.training.capture import RepeatedCalls
from sigsoftmax.lm.training.nt_asgd import AveragedSgd
from sigsoftmax.lm.training.precision import arithmetic, lstm_dtype

__all__ = ["Updater"]

SHORTEST_WINDOW = 5


class Updater:
    """Runs updates on one text in columns, group by group.

    ``skip`` is an error flag on the device, one int32, that an update looks at before it changes the weights.
    """

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
        parallel: SingleProcessStrategy | None = None,
        skip: Tensor | None = None,
    ) -> None:
        self._optimizer, self._config, self._precision = optimizer, config, precision
        self._parallel = SingleProcessStrategy(model) if parallel is None else parallel
        self._device, self._skip = model.embedding.device, skip
        self._group = config.group or config.batch
        self._columns = self._parallel.columns(config.batch, self._group)
        # A window may be the whole text: its last row has targets alone.
        self._cursor = TextCursor(text_RB[:, self._columns].to(self._device), text_RB.shape[0] - 1)
        self._generator = generator
        own = self._columns.stop - self._columns.start
        self.columns_at_once = min(own, self._group)
        """columns of one pass of the model"""
        self._states = [
            model.zero_state(self.columns_at_once, lstm_dtype(precision)) for _ in range(own // self.columns_at_once)
        ]
        self._masks = MaskSampler(
            model.config,
            vocabulary_size=model.vocabulary_size,
            batch=self._group,
            device=self._device,
            dtype=lstm_dtype(precision),
        )
        self._count = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._losses = torch.zeros(text_RB.shape[0] // SHORTEST_WINDOW + 2, device=self._device)
        self._calls = RepeatedCalls(self._device, generator, capture=capture and self._parallel.can_capture)
        self._mode = optimizer.mode

    def begin_epoch(self) -> None:
        """Begin at the first row, with zero state."""
        for tensor in (*self._numbers().values(), *(t for states in self._states for state in states for t in state)):
            tensor.zero_()

    def run(self, *, drawn: int, length: int) -> None:
        """One update on ``length`` rows; ``drawn`` is the length that was drawn, which the last window cuts short."""
        if self._optimizer.mode != self._mode:
            self._calls.forget()
            self._mode = self._optimizer.mode
        self._calls((drawn, length), lambda: self._update(drawn, length))

    def losses(self, first: int, end: int) -> list[float]:
        """The losses of updates ``first`` to ``end`` of the epoch; waits for them."""
        return cast(list[float], self._losses[first:end].tolist())

    def _update(self, drawn: int, length: int) -> None:
        tokens, targets = self._cursor.window(length)
        share = 1.0 / len(self._states)
        losses: list[Tensor] = []
        for group in range(self._config.batch // self._group):
            masks = self._masks.draw(self._generator)
            # The place of the group's first column among the own ones.
            place = group * self._group - self._columns.start
            part = max(place, 0) // self.columns_at_once
            if place <= -self._group or part >= len(self._states):
                continue
            if self.columns_at_once < self._group:
                masks = masks.of_columns(slice(-place, self.columns_at_once - place))
            columns, states = slice(part * self.columns_at_once, (part + 1) * self.columns_at_once), self._states[part]
            is_last = part + 1 == len(self._states)
            with arithmetic(self._precision, self._device), self._parallel.training_pass(is_last=is_last):
                loss, features = self._parallel.forward(
                    tokens[:, columns], targets[:, columns], states, masks, dtype=lstm_dtype(self._precision)
                )
                penalty = penalties(
                    features.raw_TBH,
                    features.dropped_TBH,
                    activation=self._config.activation,
                    temporal_activation=self._config.temporal_activation,
                )
                self._parallel.add_gradients(_times(loss + penalty, share))
            losses.append(_times(loss.detach(), share))
            carry_over(states, features.states)
        self._optimizer.update(
            self._parallel.take_gradients(),
            self._config.step_size(drawn),
            skip=self._skip,
        )
        mean_loss = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
        self._losses.index_copy_(0, self._count, self._parallel.mean(mean_loss).reshape(1))
        self._count += 1
        self._cursor.advance(drawn)

    def _numbers(self) -> dict[str, Tensor]:
        return {"row": self._cursor.row, "count": self._count, "losses": self._losses}

    def state(self) -> dict[str, Tensor]:
        """The position in the epoch, the states of all columns, and the random numbers."""
        tensors = self._numbers() | {"generator": self._generator.get_state()}
        for layer in range(len(self._states[0])):
            for kind in LayerState._fields:
                own_1BH = torch.cat([getattr(states[layer], kind) for states in self._states], dim=1)
                for group, tensor in enumerate(self._parallel.every_column(own_1BH).split(self._group, dim=1)):
                    tensors[f"{kind}.{group}.{layer}"] = tensor
        return tensors

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, number in self._numbers().items():
            number.copy_(state[name])
        for layer in range(len(self._states[0])):
            for kind in LayerState._fields:
                groups = range(self._config.batch // self._group)
                every_1BH = torch.cat([state[f"{kind}.{group}.{layer}"] for group in groups], dim=1)
                own = every_1BH[:, self._columns].split(self.columns_at_once, dim=1)
                for states, tensor in zip(self._states, own, strict=True):
                    getattr(states[layer], kind).copy_(tensor)
        self._generator.set_state(state["generator"].cpu())


def _times(loss: Tensor, share: float) -> Tensor:
    return loss if share == 1.0 else loss * share
